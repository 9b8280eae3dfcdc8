"""The dense layers of Keras, as products of two matrices in 16 bits.

Uses `call` of `keras/src/layers/core/dense.py` and `einsum_dense.py`, as read
from Keras 3.15.1 and 3.10.0.
"""

import math
from typing import Any

import keras
import tensorflow as tf

from tfmixed.layers.biased import finish
from tfmixed.layers.biased import is_plain


@keras.saving.register_keras_serializable(package="tfmixed")
class Dense(keras.layers.Dense):
    """`keras.layers.Dense` with an exact bias gradient in bfloat16.

    Arguments, weights and results are those of Keras.
    """

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns `activation(inputs @ kernel + bias)`."""
        if not is_plain(self, inputs) or inputs.shape.rank < 2:
            return super().call(inputs, training=training)
        return product(inputs, 1, self.kernel, self.bias, self.activation)


@keras.saving.register_keras_serializable(package="tfmixed")
class EinsumDense(keras.layers.EinsumDense):
    """`keras.layers.EinsumDense` as one matrix product where it is one.

    TensorFlow multiplies a batch of matrices for `abc,cde->abde`, and sums the
    gradient of the kernel over the batch afterwards.
    """

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns `activation(einsum(inputs, kernel) + bias)`."""
        contracted = _contracted(self.equation)
        if not is_plain(self, inputs) or not contracted:
            return super().call(inputs, training=training)
        kernel, bias = self.kernel, self.bias
        if bias is not None and bias.shape != kernel.shape[contracted:]:
            outputs = product(inputs, contracted, kernel, None, None)
            return finish(outputs, tf.convert_to_tensor(bias), self.activation)
        return product(inputs, contracted, kernel, bias, self.activation)


def _contracted(equation: str) -> int:
    """How many axes an equation sums over, if it is a product of matrices.

    That is, if they are the last of the input and the first of the kernel, and
    all others keep their order; else 0.
    """
    operands, _, result = equation.replace(" ", "").partition("->")
    inputs, _, kernel = operands.partition(",")
    count = len(set(inputs) & set(kernel))
    rows, columns = inputs[: len(inputs) - count], kernel[count:]
    letters = (inputs + columns).replace("...", "")
    is_product = (
        "." not in kernel
        and inputs == rows + kernel[:count]
        and result == rows + columns
        and len(set(letters)) == len(letters)
    )
    return count if is_product and columns else 0


def product(
    inputs: Any, contracted: int, kernel: Any, bias: Any, activation: Any
) -> Any:
    """A product over the last axes of the inputs, with all else in one axis.

    Args:
        inputs: 16-bit tensor.
        contracted: How many axes to sum over: the last ones of the inputs, the
            first ones of the kernel.
        kernel: Of the same dtype.
        bias: Of the shape of the other axes of the kernel, or None.
        activation: An activation function, or None.
    """
    kernel = tf.convert_to_tensor(kernel)
    size = math.prod(kernel.shape[:contracted])
    columns = kernel.shape[contracted:]
    outer = inputs.shape[: inputs.shape.rank - contracted]
    rows = tf.reshape(inputs, (-1, size))
    outputs = tf.matmul(rows, tf.reshape(kernel, (size, -1)))
    if bias is not None:
        bias = tf.reshape(tf.convert_to_tensor(bias), (-1,))
    outputs = finish(outputs, bias, activation)
    if outer.rank == columns.rank == 1:
        return outputs
    return tf.reshape(outputs, [*_sizes(inputs, outer), *columns])


def _sizes(inputs: Any, outer: Any) -> list[Any]:
    """The first sizes of a tensor, as numbers as far as they are known."""
    if list(outer).count(None) <= 1:
        return [-1 if size is None else size for size in outer]
    dynamic = tf.shape(inputs)
    return [dynamic[i] if n is None else n for i, n in enumerate(outer)]
