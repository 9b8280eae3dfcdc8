"""The denoising autoencoder and its images."""

import keras
import numpy as np
import pytest

from models.autoencoder import autoencoder
from models.data import mnist5k
from models.images import noisy_mnist5k

SMALL = {"input_shape": (8, 8, 1), "widths": (4, 8)}


def images(size=4):
    return np.random.default_rng(0).random((size, 8, 8, 1), "float32")


def test_noisy_images():
    for (x, y), (clean, _) in zip(noisy_mnist5k(), mnist5k(), strict=True):
        assert {x.dtype, y.dtype} == {np.dtype("float32")}
        np.testing.assert_array_equal(y, clean)
        noise = (x - y).astype("float64")
        np.testing.assert_allclose(noise.mean(), 0, atol=5e-3)
        np.testing.assert_allclose(noise.std(), 0.5, atol=5e-3)
        # Independent of the pixel that it lies on.
        assert abs(np.corrcoef(noise.ravel(), y.ravel())[0, 1]) < 5e-3


def test_noise_is_the_same_at_every_call_and_as_strong_as_asked():
    one, other, weak = noisy_mnist5k(), noisy_mnist5k(), noisy_mnist5k(0.125)
    np.testing.assert_array_equal(one[1][0], other[1][0])
    np.testing.assert_allclose(
        (weak[0][0] - weak[0][1]) * 4, one[0][0] - one[0][1], atol=1e-6
    )
    assert not np.array_equal(one[0][0][0] - one[0][1][0], one[1][0][0])
    for noise in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="`noisy_mnist5k` got `noise="):
            noisy_mnist5k(noise)


def test_default_model():
    model = autoencoder()
    assert model.input_shape == model.output_shape == (None, 28, 28, 1)
    convolutions = 9 * (32 + 32 * 64 + 64 * 64 + 64 * 32 + 32) + 1
    normalizations = 4 * (32 + 64 + 64 + 32)
    assert model.count_params() == convolutions + normalizations


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_dtypes(policy):
    keras.config.set_dtype_policy(policy)
    model = autoencoder(**SMALL)
    head = model.get_layer("predictions")
    assert head.compute_dtype == "float32"
    others = {
        layer.compute_dtype
        for layer in model.layers
        if layer.weights and layer is not head
    }
    assert others == {policy.removeprefix("mixed_")}
    assert model.outputs[0].dtype == "float32"
    assert {weight.dtype for weight in model.weights} == {"float32"}


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_output_is_close_to_float32(policy):
    reference = autoencoder(**SMALL)
    keras.config.set_dtype_policy(policy)
    model = autoencoder(**SMALL)
    model.set_weights(reference.get_weights())
    expected, actual = (np.asarray(m(images())) for m in (reference, model))
    tolerance = {"mixed_float16": 0.01, "mixed_bfloat16": 0.06}[policy]
    np.testing.assert_allclose(
        actual, expected, atol=tolerance * np.abs(expected).max()
    )
    assert not np.array_equal(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_takes_noise_out(policy):
    keras.config.set_dtype_policy(policy)
    (x_train, y_train), (x_val, y_val) = noisy_mnist5k()
    model = autoencoder(widths=(8, 16))
    model.compile(
        keras.optimizers.Adam(5e-3), "mean_squared_error", jit_compile=False
    )
    model.fit(x_train, y_train, batch_size=64, epochs=1, verbose=0)
    error = model.evaluate(x_val, y_val, verbose=0)
    # Less than the best single number for all pixels leaves, and far less
    # than the noise.
    assert error < 0.5 * y_val.var()
    assert error < 0.2 * np.square(x_val - y_val).mean()


@pytest.mark.filterwarnings("ignore:.*structure of .inputs. doesn't match")
def test_saves_and_loads(tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = autoencoder(**SMALL)
    expected = np.asarray(model(images()))
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    again = autoencoder(**SMALL, weights=tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(np.asarray(again(images())), expected)
    keras.config.set_dtype_policy("float32")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(np.asarray(loaded(images())), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": (8, 8)}, r"input_shape=\(8, 8\)`.*3 positive"),
        ({"input_shape": (8, 6, 1)}, r"\(8, 6, 1\)` and 2 st.*multiples of 4"),
        ({"widths": ()}, r"`autoencoder` got `widths=\(\)`"),
        ({"weights": "imagenet"}, "weights='imagenet'.*no such file"),
    ],
)
def test_bad_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        autoencoder(**{**SMALL, **arguments})
