"""The convolutions of Keras: exact bias gradients, 1x1 as a matrix product.

Uses `call` of `keras/src/layers/convolutional/`, as read from Keras 3.15.1 and
3.10.0.
"""

import functools
from typing import Any

import keras
import tensorflow as tf

from tfmixed.fast import clusters
from tfmixed.layers.biased import finish
from tfmixed.layers.biased import is_plain
from tfmixed.layers.biased import products
from tfmixed.layers.dense import product

# Those that can be a product of matrices.
_POINTWISE = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)


def _is_pointwise(layer: Any, inputs: Any) -> bool:
    """Whether a convolution mixes channels only, and a product does it faster.

    In bfloat16 on a CPU, oneDNN's gradients of such a convolution take half as
    long again as those of the product.
    """
    return (
        inputs.dtype == tf.bfloat16
        and set(layer.kernel_size) == {1}
        # TensorFlow takes longer over the gradient of a strided slice.
        and set(layer.strides) == {1}
        and layer.groups == 1
        and layer.data_format == "channels_last"
        and not clusters.has_accelerator()
    )


def _as_product(layer: Any, inputs: Any) -> Any:
    kernel = tf.convert_to_tensor(layer.kernel)
    kernel = tf.reshape(kernel, kernel.shape[-2:])
    bias = layer.bias if layer.use_bias else None
    return product(inputs, 1, kernel, bias, layer.activation)


def _twin(stock: Any) -> type:
    """The twin of a layer class, registered under the name of its stock."""

    # Keras reads from the signature what the layer can be called with.
    @functools.wraps(stock.call)
    def call(self: Any, inputs: Any) -> Any:
        if not is_plain(self, inputs):
            return stock.call(self, inputs)
        if stock in _POINTWISE and _is_pointwise(self, inputs):
            return _as_product(self, inputs)
        outputs = products(self, stock, inputs)
        bias = None
        if self.use_bias:
            bias = tf.convert_to_tensor(self.bias)
            if self.data_format != "channels_last":
                bias = tf.reshape(bias, (-1, *[1] * self.rank))
        return finish(outputs, bias, self.activation)

    twin = type(
        stock.__name__,
        (stock,),
        {
            "call": call,
            "__doc__": f"`keras.layers.{stock.__name__}` with an exact bias "
            "gradient in bfloat16.",
            "__module__": __name__,
        },
    )
    register = keras.saving.register_keras_serializable(package="tfmixed")
    registered: type = register(twin)
    return registered


# From a layer class of Keras to its twin.
CONVOLUTIONS: dict[type, type] = {
    stock: _twin(stock)
    for stock in (
        keras.layers.Conv1D,
        keras.layers.Conv1DTranspose,
        keras.layers.Conv2D,
        keras.layers.Conv2DTranspose,
        keras.layers.Conv3D,
        keras.layers.Conv3DTranspose,
        keras.layers.DepthwiseConv1D,
        keras.layers.DepthwiseConv2D,
        keras.layers.SeparableConv1D,
        keras.layers.SeparableConv2D,
    )
}
