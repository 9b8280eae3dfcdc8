"""The bias and the activation of a layer in 16 bits.

TensorFlow's CPU kernel sums the gradient of a bfloat16 bias in bfloat16: with
4,096 rows it is off by 3 % in a Dense layer, by up to 40 % in a transposed or
depthwise convolution. Here it is a product with a row of ones, which oneDNN
sums in float32, in half the time. Activations that are a chain of operations
become one (`tfmixed.layers.activations`).
"""

from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed.fast import clusters
from tfmixed.layers.activations import activate


class _Bare:
    """A layer seen without its bias and its activation function."""

    bias = None
    use_bias = False
    activation = None

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def products(layer: Any, stock: Any, inputs: Any) -> Any:
    """What a layer computes before it adds its bias.

    Args:
        layer: The layer.
        stock: Its class in Keras.
        inputs: Its inputs.
    """
    return stock.call(_Bare(layer), inputs)


def finish(outputs: Any, bias: Any, activation: Any) -> Any:
    """Adds a bias and applies an activation function.

    Args:
        outputs: 16-bit products.
        bias: Of the same dtype and a shape that broadcasts, or None.
        activation: The activation function, or None.
    """
    if bias is None:
        return activate(activation, outputs)
    if outputs.dtype != tf.bfloat16 or clusters.has_accelerator():
        return activate(activation, keras.ops.add(outputs, bias))
    if activation is keras.activations.relu:
        return _add_and_relu(outputs, bias)
    return activate(activation, _add(outputs, bias))


@tf.custom_gradient
def _add(outputs: Any, bias: Any) -> Any:
    def gradient(upstream: Any) -> tuple[Any, Any]:
        return upstream, bias_gradient(upstream, bias.shape)

    return keras.ops.add(outputs, bias), gradient


@tf.custom_gradient
def _add_and_relu(outputs: Any, bias: Any) -> Any:
    # In one, so that oneDNN can do both in the kernel of the product.
    activated = tf.nn.relu(keras.ops.add(outputs, bias))

    def gradient(upstream: Any) -> tuple[Any, Any]:
        of_outputs = tf.raw_ops.ReluGrad(gradients=upstream, features=activated)
        return of_outputs, bias_gradient(of_outputs, bias.shape)

    return activated, gradient


def bias_gradient(upstream: Any, shape: Any) -> Any:
    """Returns the sum over all that was broadcast, summed in float32.

    Args:
        upstream: bfloat16 tensor, the gradient of the sum.
        shape: The shape of the bias.
    """
    if shape.rank == 1 and shape[0] == upstream.shape[-1]:
        rows = tf.reshape(upstream, (-1, shape[0]))
        ones = tf.ones((1, tf.shape(rows)[0]), upstream.dtype)
        return tf.squeeze(tf.matmul(ones, rows), 0)
    rank = upstream.shape.rank
    padded = [1] * (rank - shape.rank) + shape.as_list()
    axes = [i for i in range(rank) if padded[i] == 1]
    total = tf.reduce_sum(tf.cast(upstream, tf.float32), axes)
    return tf.reshape(tf.cast(total, upstream.dtype), shape)


def is_plain(layer: Any, inputs: Any) -> bool:
    """Whether a layer computes in 16 bits, and only what its class says.

    Quantization and LoRA change that. Where only shapes are asked for, Keras's
    own code takes less time to trace.

    Args:
        layer: The layer.
        inputs: What it is called on.
    """
    return (
        tf.is_tensor(inputs)
        and inputs.dtype in (tf.float16, tf.bfloat16)
        and inputs.dtype == layer.compute_dtype
        and not _keras.is_symbolic()
        and not getattr(layer, "quantization_mode", None)
        and not getattr(layer, "lora_enabled", False)
    )
