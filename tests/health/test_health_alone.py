import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmixed import _keras
from tfmixed.health.alone import AloneProbe
from tfmixed.health.alone import units


def measured(model, x, y, layers=None, **how):
    """What is found of each layer, by its name."""
    model.compile("sgd", "mse", **how)
    layers = units(model, _keras.flatten_layers(model))
    probe = AloneProbe(model, layers)
    found = probe.measure((tf.constant(x), tf.constant(y)))
    return {unit.name: found[id(unit)] for unit in layers if id(unit) in found}


def error(exact, rough):
    rough = np.asarray(rough, "float64")
    return np.linalg.norm(rough - exact) / np.linalg.norm(exact)


class Times(keras.layers.Layer):
    """Multiplies by a number that every format holds."""

    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, inputs):
        return inputs * self.factor


def chain(*layers, size=4):
    inputs = x = keras.Input((size,))
    for layer in layers:
        x = layer(x)
    return keras.Model(inputs, x)


def numbers(*shape, scale=1.0):
    generator = np.random.default_rng(2)
    return generator.normal(size=shape).astype("float32") * np.float32(scale)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_error_of_a_layer_is_that_of_its_rounding(dtype):
    """Outputs rounded once; gradients of inputs rounded twice, 0.5 is exact."""
    model = chain(Times(0.5, name="half", dtype=f"mixed_{dtype}"))
    x = numbers(64, 4)
    found = measured(model, x, np.zeros((64, 4), "float32"))["half"]
    # The gradient of the mean of squares is a multiple of the outputs.
    rounded = tf.cast(tf.cast(x, dtype), "float32")
    assert found.error == pytest.approx(error(x, rounded), rel=0.1)
    assert found.underflow == found.overflow == 0


def test_what_others_did_is_not_its_own():
    """A layer that destroys everything stands before it, and one behind it."""

    class Destroys(keras.layers.Layer):
        def call(self, inputs):
            # float16 holds even numbers alone from 2048 on.
            return (inputs + 4096.0) - 4096.0

    model = chain(
        Destroys(name="first", dtype="mixed_float16"),
        keras.layers.Dense(4, name="dense", dtype="mixed_float16"),
        Destroys(name="last", dtype="mixed_float16"),
    )
    found = measured(model, numbers(32, 4), numbers(32, 4))
    assert found["first"].error > 0.5
    assert found["last"].error > 0.5
    assert found["dense"].error < 2e-3


def test_gradients_that_vanish_in_float16_are_counted():
    model = chain(Times(1.0, name="layer", dtype="mixed_float16"))
    # The gradient of an output is 2 * difference / 32: 2^-28 in one column,
    # of which float16 makes 0, and 2^-14, 0 and 2^-4.
    y = np.array([[2.0**-24, 2.0**-10, 0.0, 1.0]] * 8, "float32")
    found = measured(model, np.zeros((8, 4), "float32"), y)["layer"]
    assert found.underflow == pytest.approx(1 / 3)
    assert found.overflow == 0


def test_outputs_that_overflow_are_counted():
    model = chain(Times(1e4, name="large", dtype="mixed_float16"))
    x = np.array([[1.0, 2.0, 10.0, 20.0]] * 8, "float32")
    # Of the outputs 1e5 and 2e5 overflow; and all of what they are compared
    # with: gradients of 5e3 to 1e5 times 1e4.
    found = measured(model, x, np.zeros((8, 4), "float32"))["large"]
    outputs, gradients = 2 / 4, 4 / 4
    assert found.overflow == pytest.approx((outputs + gradients) / 2)


def test_the_weights_gradient_of_a_dense_layer():
    dense = keras.layers.Dense(3, use_bias=False, dtype="mixed_bfloat16")
    model = chain(dense)
    x, y = numbers(16, 4), numbers(16, 3)
    found = measured(model, x, y)[dense.name]

    def rounded(a):
        return np.asarray(tf.cast(tf.cast(a, "bfloat16"), "float64"))

    kernel = np.asarray(dense.kernel.value, "float64")
    outputs = x @ kernel
    gradient = 2 * (outputs - y) / outputs.size
    errors = {
        "outputs": error(outputs, rounded(rounded(x) @ rounded(kernel))),
        "gradients of weights": error(
            x.T @ gradient, rounded(rounded(x).T @ rounded(gradient))
        ),
        "gradients of inputs": error(
            gradient @ kernel.T, rounded(rounded(gradient) @ rounded(kernel).T)
        ),
    }
    assert found.part == max(errors, key=errors.get)
    assert found.error == pytest.approx(max(errors.values()), rel=0.05)


def test_layers_in_float32_by_now_are_measured_as_they_began():
    dense = keras.layers.Dense(3, dtype="mixed_bfloat16")
    model = chain(dense)
    model.compile("sgd", "mse")
    probe = AloneProbe(model, [dense])
    data = tf.constant(numbers(16, 4)), tf.constant(numbers(16, 3))
    _keras.set_layer_policy(dense, keras.DTypePolicy("float32"))
    in_float32 = probe.measure(data)
    assert dense.compute_dtype == "float32"
    _keras.set_layer_policy(dense, keras.DTypePolicy("mixed_bfloat16"))
    assert probe.measure(data) == in_float32
    assert in_float32[id(dense)].error > 1e-3


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_nothing_of_the_model_changes(rate):
    keras.config.set_dtype_policy("mixed_float16")
    model = chain(
        keras.layers.Dense(4, kernel_regularizer="l2"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(rate),
        keras.layers.Dense(1, activity_regularizer="l2", dtype="float32"),
    )
    model.compile("sgd", "mse")
    before = [keras.ops.convert_to_numpy(v) for v in model.variables]
    policies = [layer.compute_dtype for layer in model.layers]
    calls = [layer.call for layer in model.layers]
    measured(model, numbers(8, 4), numbers(8, 1))
    after = [keras.ops.convert_to_numpy(v) for v in model.variables]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    assert [layer.compute_dtype for layer in model.layers] == policies
    assert [layer.call for layer in model.layers] == calls
    assert not model.layers[1].losses[1:]


def test_layers_that_draw_draw_the_same():
    """Other numbers would be an error of about 1."""
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((6, 4))
    attention = keras.layers.MultiHeadAttention(2, 4, dropout=0.5)
    x = attention(inputs, inputs)
    x = keras.layers.GaussianNoise(1.0)(keras.layers.Dropout(0.5)(x))
    x = keras.layers.GRU(3, dropout=0.5, recurrent_dropout=0.5)(x)
    model = keras.Model(inputs, x)
    found = measured(model, numbers(8, 6, 4), numbers(8, 3))
    assert len(found) == 4
    assert all(one.error < 0.02 for one in found.values())


def test_a_shared_layer_is_the_sum_of_its_calls_and_a_dead_end_is_left_out():
    keras.config.set_dtype_policy("mixed_float16")
    shared, dead = keras.layers.Dense(4), keras.layers.Dense(4)
    inputs = keras.Input((4,))
    x = shared(shared(inputs))
    end = dead(x)
    model = keras.Model(inputs, [x, end])
    model.compile("sgd", ["mse", None])
    layers = units(model, _keras.flatten_layers(model))
    probe = AloneProbe(model, layers)
    found = probe.measure((tf.constant(numbers(8, 4)), [numbers(8, 4), None]))
    assert set(found) == {id(shared)}


def test_numbers_that_are_not_finite_in_float32_say_nothing():
    keras.config.set_dtype_policy("mixed_float16")
    model = chain(keras.layers.Dense(2), keras.layers.Dense(1, dtype="float32"))
    x = numbers(8, 4)
    x[3, 1] = np.nan
    assert measured(model, x, numbers(8, 1)) == {}


def test_a_model_that_is_not_built_is_refused():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="it is not built"):
        AloneProbe(model, [])
