"""Twins with 16 bits outside and float32 inside, against closed forms."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfmixed
from tfmixed.layers.float32_inside import Float32Inside
from tfmixed.layers.twins import INSIDE
from tfmixed.layers.twins import TWINS
from tfmixed.layers.twins import stock_of
from tfmixed.layers.twins import twin_of

ROOT = pathlib.Path(tfmixed.__file__).parent.parent
HALF = ["float16", "bfloat16"]
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38}
# The distance of neighbours, relative to the number.
STEP = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
MAGNITUDES = [1e-2, 1.0, 300.0, 3000.0, 60000.0]


def double(x):
    return x * 2.0


def windows(*dimensions):
    return {
        f"{kind}{n}D": {"pool_size": 2}
        for kind in ("AveragePooling", "MaxPooling")
        for n in dimensions
    }


ARGUMENTS = {
    **windows(1, 2, 3),
    **{
        f"Adaptive{kind}Pooling{n}D": {"output_size": 2}
        for kind in ("Average", "Max")
        for n in (1, 2, 3)
    },
    "GroupNormalization": {"groups": 2},
    "Dot": {"axes": 1},
    "Lambda": {"function": double},
    "Activation": {"activation": "elu"},
}
MERGES = ("Multiply", "Dot", "Average")
STOCK = sorted(INSIDE, key=lambda stock: stock.__name__)


def policy(dtype):
    return f"mixed_{dtype}" if dtype in HALF else dtype


def make(stock, dtype="float32", **options):
    options = {**ARGUMENTS.get(stock.__name__, {}), **options}
    return stock(dtype=policy(dtype), **options)


def twin(stock, dtype, **options):
    """A layer of Keras, made a twin as `prepare` does it."""
    layer = make(stock, dtype, **options)
    layer.__class__ = INSIDE[stock]
    return layer


def shape_for(stock):
    name = stock.__name__
    if name == "Dot":
        return (2, 4)
    return {"1D": (2, 8, 4), "2D": (2, 8, 8, 4), "3D": (2, 4, 4, 4, 4)}.get(
        name[-2:], (2, 8, 4)
    )


def draw(shape, magnitude=1.0, dtype="float32", seed=0):
    """Numbers up to `magnitude` that `dtype` holds exactly, as float32."""
    x = np.random.default_rng(seed).uniform(-1, 1, size=shape) * magnitude
    return tf.cast(tf.cast(x, dtype), "float32").numpy()


def inputs_for(stock, *arguments):
    shape = shape_for(stock)
    if stock.__name__ in MERGES:
        return [draw(shape, *arguments), draw(shape, *arguments, seed=1)]
    return draw(shape, *arguments)


def array(x):
    return tf.cast(x, "float64").numpy()


def test_every_twin_has_a_case():
    for stock in STOCK:
        make(stock)
    assert len(STOCK) > 20


@pytest.mark.parametrize(
    "stock",
    [
        layers.Normalization,
        layers.Rescaling,
        layers.ActivityRegularization,
        layers.SpectralNormalization,
        layers.Dense,
    ],
)
def test_what_casts_by_itself_has_no_twin(stock):
    """Between two casts its `call` would still compute in 16 bits."""
    assert stock not in INSIDE


@pytest.mark.parametrize("stock", STOCK)
def test_there_and_back_is_a_change_of_class(stock):
    layer = make(stock)
    layer(inputs_for(stock))
    before = dict(vars(layer))
    variables = [id(v) for v in layer.variables]
    layer.__class__ = INSIDE[stock]
    assert isinstance(layer, Float32Inside)
    assert not layer.autocast
    layer.autocast = True
    assert not layer.autocast
    layer.__class__ = stock_of(type(layer))
    assert type(layer) is stock
    assert layer.autocast == before["autocast"]
    assert {k: id(v) for k, v in vars(layer).items()} == {
        k: id(v) for k, v in before.items()
    }
    assert [id(v) for v in layer.variables] == variables


def test_each_twin_knows_its_stock():
    for stock, changed in INSIDE.items():
        assert stock_of(changed) is stock
        assert stock_of(stock) is None
        assert issubclass(changed, stock)
        assert changed.__name__ == stock.__name__
        # One class, wherever it stands.
        assert twin_of(stock) in (None, changed)
    for stock, changed in TWINS.items():
        assert twin_of(stock) is changed
        assert stock_of(changed) is stock
    assert twin_of(type("Mine", (layers.Attention,), {})) is None


@pytest.mark.parametrize("stock", STOCK)
def test_a_configuration_makes_the_same_twin(stock):
    layer = twin(stock, "bfloat16", name="mine")
    name = keras.saving.get_registered_name(type(layer))
    assert name == f"tfmixed>{stock.__name__}"
    config = layer.get_config()
    assert config == make(stock, "bfloat16", name="mine").get_config()
    if stock is layers.Lambda:
        # Keras makes no layer of byte code unless it is told to.
        return
    again = type(layer).from_config(config)
    assert type(again) is type(layer)
    assert again.name == "mine"
    assert again.compute_dtype == "bfloat16"
    x = inputs_for(stock, 1.0, "bfloat16")
    np.testing.assert_array_equal(array(again(x)), array(layer(x)))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("stock", STOCK)
def test_with_a_float32_policy_it_does_what_keras_does(stock, training):
    one, other = make(stock), twin(stock, "float32")
    x = keras.tree.map_structure(tf.constant, inputs_for(stock, 100.0))
    options = {}
    if stock is layers.BatchNormalization:
        options = {"training": training}

    def run(layer):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, **options)
        gradients = tape.gradient(y, [x, *layer.trainable_variables])
        return y, gradients, [v.numpy() for v in layer.variables], layer.losses

    for found, expected in zip(
        keras.tree.flatten(run(other)),
        keras.tree.flatten(run(one)),
        strict=True,
    ):
        assert (found is None) == (expected is None)
        if found is not None:
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [*HALF, "float32"])
@pytest.mark.parametrize("stock", STOCK)
def test_what_comes_out_is_in_the_compute_dtype(stock, dtype):
    layer = twin(stock, dtype)

    def given_as(value, given):
        return tf.cast(value, given)

    def symbol(value, given):
        return keras.KerasTensor(value.shape, given)

    for given in ("float16", "bfloat16", "float32", "float64"):
        for convert in (given_as, symbol):
            x = keras.tree.map_structure(
                functools.partial(convert, given=given), inputs_for(stock)
            )
            assert layer(x).dtype == dtype
    assert all(v.dtype == "float32" for v in layer.weights)


def test_with_a_float64_policy_it_does_what_keras_does():
    x = tf.cast(draw((4, 8)), "float64")
    for stock in (layers.Softmax, layers.UnitNormalization):
        found = twin(stock, "float64")(x)
        assert found.dtype == "float64"
        np.testing.assert_array_equal(found, make(stock, "float64")(x))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("stock", STOCK)
def test_it_is_the_float32_layer_rounded_once(stock, dtype):
    for magnitude in MAGNITUDES:
        x = inputs_for(stock, magnitude, dtype)
        with np.errstate(over="ignore"):
            expected = tf.cast(make(stock)(x), dtype)
        half = keras.tree.map_structure(lambda value: tf.cast(value, dtype), x)  # noqa: B023
        found = twin(stock, dtype)(half)
        np.testing.assert_array_equal(array(found), array(expected))


def average(x, size):
    n = len(x.shape) - 2
    for axis in range(1, n + 1):
        shape = (*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
        x = x.reshape(shape).mean(axis + 1)
    return x


def normalized(x, axes, epsilon=1e-3, center=True):
    mean = x.mean(axes, keepdims=True) if center else 0.0
    variance = ((x - mean) ** 2).mean(axes, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon)


def softmax(x):
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def unit(x, axis=-1):
    return x / np.sqrt((x**2).sum(axis, keepdims=True))


def grouped(x):
    split = x.reshape(2, 8, 2, 2)
    return normalized(split, (1, 3)).reshape(x.shape)


CLOSED = {
    "AveragePooling1D": ({"pool_size": 8}, lambda x: average(x, 8)),
    "AveragePooling2D": ({"pool_size": 4}, lambda x: average(x, 4)),
    "AveragePooling3D": ({"pool_size": 2}, lambda x: average(x, 2)),
    "GlobalAveragePooling1D": ({}, lambda x: x.mean(1)),
    "GlobalAveragePooling2D": ({}, lambda x: x.mean((1, 2))),
    "GlobalAveragePooling3D": ({}, lambda x: x.mean((1, 2, 3))),
    "AdaptiveAveragePooling1D": ({}, lambda x: average(x, 4)),
    "AdaptiveAveragePooling2D": ({}, lambda x: average(x, 4)),
    "UnitNormalization": ({}, unit),
    "LayerNormalization": ({}, lambda x: normalized(x, -1)),
    "RMSNormalization": (
        {"epsilon": 1e-6},
        lambda x: normalized(x, -1, 1e-6, False),
    ),
    "GroupNormalization": ({}, grouped),
    "Softmax": ({}, softmax),
    "Average": ({}, lambda x: (x[0] + x[1]) / 2),
    "Multiply": ({}, lambda x: x[0] * x[1]),
    "Dot": ({}, lambda x: (x[0] * x[1]).sum(1, keepdims=True)),
    "Dot of directions": (
        {"normalize": True},
        lambda x: (unit(x[0], 1) * unit(x[1], 1)).sum(1, keepdims=True),
    ),
    "ELU": ({}, lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0)))),
}


@pytest.mark.parametrize("magnitude", [300.0, 3000.0, 60000.0])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", CLOSED)
def test_results_are_those_of_float64(name, dtype, magnitude):
    stock = getattr(layers, name.partition(" ")[0], None)
    if stock is None:
        pytest.skip("absent in this Keras")
    options, function = CLOSED[name]
    x = inputs_for(stock, magnitude, dtype)
    if "Pooling" in name:
        # All of one sign, so that sums are as large as they can be.
        x = np.abs(x)
    exact = function(
        [v.astype("float64") for v in x]
        if isinstance(x, list)
        else x.astype("float64")
    )
    half = keras.tree.map_structure(lambda value: tf.cast(value, dtype), x)
    found = array(twin(stock, dtype, **options)(half))
    fits = np.abs(exact) <= LARGEST[dtype]
    if name.startswith(("Multiply", "Dot")) and dtype == "float16":
        assert np.isinf(found[np.abs(exact) > 65520]).all()
    else:
        assert fits.all()
    assert np.isfinite(found[fits]).all()
    np.testing.assert_allclose(
        found[fits], exact[fits], rtol=STEP[dtype], atol=2.0**-24
    )


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("training", [False, True])
def test_normalization_of_what_float16_does_not_hold(training, dtype):
    """Inputs of 1e6 come in as they are, and leave normalized."""
    layer = twin(layers.BatchNormalization, dtype, momentum=0.5)
    x = draw((32, 4)) * 1e3 + 1e6
    layer.build((None, 4))
    layer.moving_mean.assign([1e6] * 4)
    layer.moving_variance.assign([1e6] * 4)
    found = array(layer(x, training=training))
    wide = x.astype("float64")
    expected = (wide - 1e6) / np.sqrt(1e6 + 1e-3)
    if training:
        expected = normalized(wide, 0)
        np.testing.assert_allclose(
            layer.moving_mean, 0.5 * 1e6 + 0.5 * wide.mean(0), rtol=1e-6
        )
    # float32 holds such inputs to 1/16, of which there are 1e3 in a unit.
    np.testing.assert_allclose(found, expected, rtol=STEP[dtype], atol=1e-3)


@pytest.mark.parametrize("dtype", HALF)
def test_gradients_come_in_and_out(dtype):
    x = tf.constant(draw((4, 8), 3000.0, dtype))
    layer, reference = (
        twin(layers.LayerNormalization, dtype),
        make(layers.LayerNormalization),
    )

    def gradient(layer, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.cast(layer(x), "float32")[:, ::2])
        return tape.gradient(y, [x, *layer.trainable_variables])

    found = gradient(layer, tf.cast(x, dtype))
    assert found[0].dtype == dtype
    assert all(g.dtype == "float32" for g in found[1:])
    for one, other in zip(found, gradient(reference, x), strict=True):
        np.testing.assert_allclose(
            array(one), array(other), rtol=2 * STEP[dtype], atol=1e-3
        )


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "stock",
    [
        layers.LayerNormalization,
        layers.BatchNormalization,
        layers.UnitNormalization,
        layers.Activation,
        layers.ELU,
    ],
)
def test_a_mask_is_handed_on_as_in_float32(stock, dtype):
    """Keras 3.10 loses it where it casts."""
    masked = layers.Embedding(9, 4, mask_zero=True)(np.array([[1, 2, 0]]))
    expected = getattr(make(stock)(masked), "_keras_mask", None)
    found = getattr(twin(stock, dtype)(masked), "_keras_mask", None)
    assert (found is None) == (expected is None)
    if found is not None:
        np.testing.assert_array_equal(found, [[True, True, False]])


@pytest.mark.parametrize("dtype", HALF)
def test_a_mask_is_obeyed(dtype):
    mask = tf.constant([[True, True, False], [True, False, False]])
    x = tf.cast(draw((2, 3, 4), 3000.0, dtype), dtype)
    wide = array(x)
    pooled = array(twin(layers.GlobalAveragePooling1D, dtype)(x, mask=mask))
    expected = [wide[0, :2].mean(0), wide[1, 0]]
    np.testing.assert_allclose(pooled, expected, rtol=STEP[dtype])
    normal = twin(layers.BatchNormalization, dtype)
    y = array(normal(x, training=True, mask=mask))
    kept = np.concatenate([wide[0, :2], wide[1, :1]])
    expected = (wide - kept.mean(0)) / np.sqrt(kept.var(0) + 1e-3)
    np.testing.assert_allclose(y, expected, rtol=4 * STEP[dtype], atol=1e-2)
    weights = array(twin(layers.Softmax, dtype)(x[:, :, 0], mask=mask))
    assert (weights[~mask.numpy()] == 0).all()
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=2 * STEP[dtype])


def test_masking_compares_in_float32():
    """In 16 bits, 2049 would be 2048."""
    x = np.array([[[2048.0, 2048.0], [2049.0, 2049.0], [2048.0, 1.0]]])
    layer = twin(layers.Masking, "float16", mask_value=2048.0)
    y = layer(x.astype("float32"))
    np.testing.assert_array_equal(y._keras_mask, [[False, True, True]])
    assert y.dtype == "float16"


def test_a_mask_of_two_inputs():
    embedding = layers.Embedding(9, 4, mask_zero=True)
    pair = [embedding(np.array([[1, 0]])), embedding(np.array([[1, 1]]))]
    for stock in (layers.Multiply, layers.Average):
        expected = make(stock)(pair)._keras_mask
        found = twin(stock, "float16")(pair)._keras_mask
        np.testing.assert_array_equal(found, expected)


def test_integers_and_other_arguments_are_left_alone():
    layer = twin(layers.Lambda, "float16", function=lambda x: x + 1)
    assert layer(tf.constant([1, 2])).dtype == "int32"
    layer = twin(layers.Lambda, "float16", function=lambda x: (x > 0, x))
    flags, y = layer(tf.constant([1.0]))
    assert (flags.dtype, y.dtype) == ("bool", "float16")


def test_the_signature_is_that_of_keras():
    """Keras reads from it whether a layer takes `training` and `mask`."""
    for stock in STOCK:
        one, other = make(stock), make(stock)
        other.__class__ = INSIDE[stock]
        again = INSIDE[stock](**ARGUMENTS.get(stock.__name__, {}))
        assert again._call_has_training_arg == one._call_has_training_arg
        assert again._call_has_mask_arg == one._call_has_mask_arg
        assert again.supports_masking == one.supports_masking


LOAD = """
import sys
import json
import keras
import numpy as np
import tfmixed

model = keras.models.load_model(sys.argv[1])
x = np.load(sys.argv[2])
print(json.dumps({
    "dtypes": [str(y.dtype) for y in model(x)],
    "values": [np.asarray(y, "float32").tolist() for y in model(x)],
    "modules": sorted({type(l).__module__ for l in model.layers}),
}))
"""


@pytest.mark.slow
def test_twins_are_saved_and_loaded_in_another_process(tmp_path):
    inputs = keras.Input((8, 4))
    outputs = []
    for stock in STOCK:
        if stock.__name__[-2:] in ("2D", "3D") or stock is layers.Lambda:
            continue
        pair = [inputs, inputs] if stock.__name__ in MERGES else inputs
        outputs.append(twin(stock, "float16")(pair))
    assert len(outputs) > 12
    model = keras.Model(inputs, outputs)
    x = draw((2, 8, 4), 300.0, "float16")
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", x)
    result = subprocess.run(
        [sys.executable, "-c", LOAD, tmp_path / "model.keras", "x.npy"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert set(found["dtypes"]) == {"<dtype: 'float16'>"}
    for one, other in zip(found["values"], model(x), strict=True):
        np.testing.assert_array_equal(
            np.array(one, "float32"), tf.cast(other, "float32")
        )
    assert "tfmixed.layers.float32_inside" in found["modules"]
