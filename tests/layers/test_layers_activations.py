"""Activations in 16 bits: one rounding, the right gradient, any context."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmixed
from tfmixed.layers import activations
from tfmixed.layers.activations import activate

CHAINS = [
    keras.activations.celu,
    keras.activations.elu,
    keras.activations.gelu,
    keras.activations.hard_silu,
    keras.activations.log_sigmoid,
    keras.activations.mish,
    keras.activations.selu,
    keras.activations.silu,
    keras.activations.softplus,
    keras.activations.softsign,
    keras.activations.squareplus,
    functools.partial(keras.activations.gelu, approximate=True),
    functools.partial(keras.activations.elu, alpha=0.5),
]
# One rounding to the format, of a value or of a gradient.
UNIT = {"float16": 2**-11, "bfloat16": 2**-8}


def ramp(dtype):
    return tf.cast(np.linspace(-8, 8, 4 * 256).reshape(4, 256), dtype)


def value_and_gradient(function, x, upstream):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return y, tape.gradient(y, x, upstream)


def oracle(activation, x, upstream):
    """In float64, or float32 where Keras has constants of float32."""
    wide = [tf.cast(value, tf.float64) for value in (x, upstream)]
    try:
        return value_and_gradient(activation, *wide)
    except (TypeError, ValueError, tf.errors.InvalidArgumentError):
        wide = [tf.cast(value, tf.float32) for value in (x, upstream)]
        return value_and_gradient(activation, *wide)


def run(mode, function, *arguments):
    if mode == "eager":
        return function(*arguments)
    return tf.function(function, jit_compile=mode == "xla")(*arguments)


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "activation", CHAINS, ids=lambda f: getattr(f, "__name__", "partial")
)
def test_value_and_gradient_are_those_of_float64(activation, dtype, mode):
    x, upstream = ramp(dtype), tf.cast(tf.reverse(ramp(dtype), [1]), dtype)
    results = run(
        mode,
        lambda x, u: value_and_gradient(
            functools.partial(activate, activation), x, u
        ),
        x,
        upstream,
    )
    exact = oracle(activation, x, upstream)
    for result, right in zip(results, exact, strict=True):
        assert result.dtype == dtype
        result = tf.cast(result, tf.float64).numpy()
        right = tf.cast(right, tf.float64).numpy()
        # GELU by erf or tanh ends in 1 - 1, to the precision of float32.
        np.testing.assert_allclose(result, right, rtol=UNIT[dtype], atol=1e-4)


@pytest.mark.parametrize("activation", [None, keras.activations.relu, abs])
def test_others_are_called_as_they_are(activation):
    x = ramp("bfloat16")
    expected = x if activation is None else activation(x)
    np.testing.assert_array_equal(activate(activation, x), expected)
    assert not activations.is_chain(activation)


def test_float32_and_symbols_are_left_to_keras():
    x = ramp("float32")
    gelu = keras.activations.gelu
    np.testing.assert_array_equal(activate(gelu, x), gelu(x))
    symbol = keras.KerasTensor((None, 4), "bfloat16")
    assert activate(gelu, symbol).shape == (None, 4)


def test_second_derivatives():
    x = tf.cast(np.linspace(-3, 3, 13), tf.bfloat16)[None]

    def second(function, x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = function(x)
            first = inner.gradient(y, x)
        return outer.gradient(first, x)

    gelu = keras.activations.gelu
    exact = second(gelu, tf.cast(x, tf.float64))
    for wrap in (lambda f: f, tf.function):
        result = wrap(
            functools.partial(second, functools.partial(activate, gelu))
        )(x)
        np.testing.assert_allclose(
            tf.cast(result, tf.float64), exact, rtol=2**-6, atol=2**-8
        )


def is_twin(layer):
    return type(layer).__module__.startswith("tfmixed")


def test_prepare_uses_it_for_chains_only():
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(8),
            layers.Activation("silu", name="chain"),
            layers.Activation("relu", name="single"),
            layers.Dense(2),
        ]
    )
    prepared = tfmixed.prepare(model, "mixed_bfloat16")
    assert is_twin(prepared.get_layer("chain"))
    assert not is_twin(prepared.get_layer("single"))
    plain = tfmixed.prepare(model, "mixed_bfloat16", fast=False)
    assert not any(map(is_twin, plain.layers))
    assert plain.get_layer("chain").compute_dtype == "bfloat16"
    stock = tfmixed.to_float32(prepared)
    assert not any(map(is_twin, stock.layers))


def test_a_shape_that_varies_is_trained_too():
    inputs = keras.Input((None, 8))
    x = keras.layers.Dense(16, activation="gelu")(inputs)
    x = keras.layers.GlobalMaxPooling1D()(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model = tfmixed.prepare(model, "mixed_bfloat16")
    model.compile("sgd", "mse")
    for length in (3, 5):
        x = np.ones((4, length, 8), "float32")
        assert np.isfinite(model.train_on_batch(x, np.ones((4, 1))))
