import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import zoo
from support import check_untouched
from support import numpy_of

import tfmixed


def wide():
    inputs = keras.Input((64,))
    x = keras.layers.Dense(512, activation="relu")(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dense(512, activation="relu")(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def save(model, folder):
    path = folder / "model.keras"
    tfmixed.save_half(model, path)
    assert os.listdir(folder) == ["model.keras"]
    return path


def test_half_the_size_and_float32_without_tfmixed(tmp_path):
    model = tfmixed.prepare(wide(), "mixed_bfloat16")
    model.compile("adam", "mse")
    model.fit(np.ones((4, 64)), np.ones((4, 10)), verbose=0)
    before = numpy_of(model.weights)
    path = save(model, tmp_path)
    check_untouched(before, numpy_of(model.weights))
    tfmixed.to_float32(wide()).save(tmp_path / "full.keras")
    full = (tmp_path / "full.keras").stat().st_size
    assert path.stat().st_size < 0.55 * full
    code = (
        "import sys; sys.modules['tfmixed'] = None\n"
        "import numpy as np, keras\n"
        "model = keras.models.load_model(sys.argv[1])\n"
        "weights = [np.asarray(v.value) for v in model.weights]\n"
        "assert {v.dtype for v in model.weights} == {'float32'}\n"
        "assert {l.compute_dtype for l in model.layers} == {'float32'}\n"
        "np.savez(sys.argv[1] + '.npz', *weights)\n"
    )
    found = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    with np.load(f"{path}.npz") as saved:
        for exact, rough in zip(before, saved.values(), strict=True):
            np.testing.assert_allclose(rough, exact, rtol=2**-11, atol=2**-25)
            if exact.ndim < 2:
                np.testing.assert_array_equal(rough, exact)


@pytest.mark.parametrize("value", [1e5, 1e-6])
def test_what_float16_cannot_hold_stays(value, tmp_path):
    model = wide()
    kernel = np.full((64, 512), value, "float32")
    model.layers[1].kernel.assign(kernel)
    loaded = keras.models.load_model(save(model, tmp_path))
    np.testing.assert_array_equal(numpy_of(loaded.weights)[0], kernel)


@pytest.mark.parametrize("kind", [zoo.nested_and_shared, zoo.subclassed])
def test_other_kinds_of_models(kind, tmp_path):
    model, x = kind()
    exact = keras.tree.flatten(model(x))
    loaded = keras.models.load_model(save(model, tmp_path))
    assert type(loaded) is type(model)
    for one, other in zip(exact, keras.tree.flatten(loaded(x)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-2)


def test_an_existing_file_survives_a_failure(tmp_path):
    path = save(wide(), tmp_path)
    before = path.read_bytes()
    broken, x = zoo.without_config()
    broken(x)
    with pytest.raises(ValueError, match=r"save_half: 'closed' \(Closed\)"):
        tfmixed.save_half(broken, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.keras"]


def test_wrong_uses(tmp_path):
    with pytest.raises(ValueError, match=r"does not end in '\.keras'"):
        tfmixed.save_half(wide(), tmp_path / "model.h5")
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="has no weights yet"):
        tfmixed.save_half(unbuilt, tmp_path / "model.keras")
    with pytest.raises(TypeError, match="save_half expects a Keras model"):
        tfmixed.save_half("model", tmp_path / "model.keras")
