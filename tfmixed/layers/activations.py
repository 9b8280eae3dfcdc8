"""Activations of 16-bit tensors, computed in float32 in one pass each way.

TensorFlow computes GELU of a bfloat16 tensor as five operations, each of which
reads and writes all of it and rounds to eight bits; and keeps what the backward
pass needs of each. Here the chain is one cluster that keeps its input.
"""

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmixed.fast import clusters
from tfmixed.layers.float32_inside import Float32Inside

_HALF = (tf.float16, tf.bfloat16)


def _gelu(x: Any, approximate: bool = False) -> Any:
    """GELU by the error function, which compiles to fewer steps than erfc."""
    if approximate:
        return keras.activations.gelu(x, approximate=True)
    return 0.5 * x * (1.0 + tf.math.erf(x * math.sqrt(0.5)))


# From an activation of Keras to the same in float32. Not those of one
# operation (ReLU, tanh), which oneDNN does or fuses itself.
_CHAINS: dict[Any, Callable[..., Any]] = {
    keras.activations.gelu: _gelu,
    **{
        activation: activation
        for activation in (
            keras.activations.celu,
            keras.activations.elu,
            keras.activations.hard_silu,
            keras.activations.log_sigmoid,
            keras.activations.mish,
            keras.activations.selu,
            keras.activations.silu,
            keras.activations.softplus,
            keras.activations.softsign,
            keras.activations.squareplus,
        )
    },
}


def is_chain(activation: Any) -> bool:
    """Returns whether an activation is worth a cluster of its own.

    Args:
        activation: A function of `keras.activations`, a `functools.partial`
            of one, or anything else, which is not.
    """
    if isinstance(activation, functools.partial):
        activation = activation.func
    return isinstance(activation, types.FunctionType) and activation in _CHAINS


def activate(activation: Any, x: Any) -> Any:
    """Returns `activation(x)`; of 16-bit tensors rounded only at the end.

    Args:
        activation: An activation function, or None for none.
        x: Tensor of any shape and dtype, symbolic ones of Keras too.
    """
    if activation is None:
        return x
    is_half = tf.is_tensor(x) and x.dtype in _HALF
    if not (is_half and is_chain(activation)):
        return activation(x)
    if clusters.pays(x):
        return _clusters(activation)(x)
    return _wide(activation, x)


def _wide(activation: Any, x: Any) -> Any:
    return tf.cast(_exact(activation, tf.cast(x, tf.float32)), x.dtype)


def _exact(activation: Any, x: Any) -> Any:
    if not isinstance(activation, functools.partial):
        return _CHAINS[activation](x)
    exact = _CHAINS[activation.func]
    return exact(x, *activation.args, **activation.keywords)


@functools.cache
def _clusters(activation: Any) -> Callable[[Any], Any]:
    """A function with one cluster forward and one backward."""
    forward = clusters.cluster(functools.partial(_wide, activation))

    @clusters.cluster
    def backward(x: Any, upstream: Any) -> Any:
        wide = tf.cast(x, tf.float32)
        y = _exact(activation, wide)
        # Not a tape, which does not record where clusters are traced.
        (gradient,) = tf.gradients(y, wide, tf.cast(upstream, tf.float32))
        return tf.cast(gradient, x.dtype)

    @tf.custom_gradient
    def run(x: Any) -> Any:
        return forward(x), lambda upstream: backward(x, upstream)

    return run


@keras.saving.register_keras_serializable(package="tfmixed")
class Activation(Float32Inside, keras.layers.Activation):
    """`keras.layers.Activation` in 16 bits, with float32 inside."""

    def call(self, inputs: Any) -> Any:
        """Applies the activation function."""
        is_cast = tf.is_tensor(inputs) and inputs.dtype == self.compute_dtype
        if is_cast and is_chain(self.activation):
            return activate(self.activation, inputs)
        return self._narrow(self.activation(self._widen(inputs)))
