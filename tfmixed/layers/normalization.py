"""The layers of Keras that normalize each example, in 16 bits.

Overrides `call` of `keras/src/layers/normalization/layer_normalization.py`,
`rms_normalization.py` and `group_normalization.py`, as read from Keras 3.15.1
and 3.10.0.
"""

import math
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed.fast import clusters
from tfmixed.layers.float32_inside import Float32Inside
from tfmixed.layers.normalize import normalize

_HALF = ("float16", "bfloat16")


class _Fused(Float32Inside):
    """What the layers here have in common.

    16 bits in and out, statistics and weights in float32. In a training step
    on a CPU the layer is a fused function; elsewhere, and for axes that are
    not the last ones, it does what Keras does, in float32 inside.
    """

    epsilon: float | None
    weights: list[Any]

    def _plain(self, inputs: Any) -> Any:
        # Or some versions of Keras round the weights of some layers.
        with _keras.without_autocast():
            outputs = super().call(self._widen(inputs))  # type: ignore[misc]
        return self._narrow(outputs)

    def _pays(self, inputs: Any) -> bool:
        return (
            self.compute_dtype in _HALF
            and inputs.dtype in (tf.float16, tf.bfloat16, tf.float32)
            and clusters.pays(
                inputs, *(tf.convert_to_tensor(v) for v in self.weights)
            )
        )

    def _fused(
        self,
        inputs: Any,
        shape: tuple[int, ...],
        axes: tuple[int, ...],
        gamma: Any,
        beta: Any,
        centered: bool = True,
    ) -> Any:
        """The fused function.

        Args:
            inputs: The inputs of the layer.
            shape: What to make of their shape, without the first axis.
            axes: Which axes of that to reduce.
            gamma: The scale; None for 1.
            beta: The offset; None for 0.
            centered: Whether to subtract the mean.
        """
        if inputs.dtype.name != self.compute_dtype:
            inputs = tf.cast(inputs, tf.float32)
        # Of groups: which one, and the place in it.
        ends, epsilon = shape[-2:], self.epsilon
        y = normalize(
            tf.reshape(inputs, (-1, *shape)),
            _weight(gamma, ends, 1.0),
            _weight(beta, ends, 0.0),
            axes=axes,
            epsilon=keras.config.epsilon() if epsilon is None else epsilon,
            centered=centered,
        )
        return self._narrow(tf.reshape(y, (-1, *inputs.shape[1:])))


@keras.saving.register_keras_serializable(package="tfmixed")
class LayerNormalization(_Fused, keras.layers.LayerNormalization):
    """`keras.layers.LayerNormalization` in 16 bits, with float32 inside."""

    def call(self, inputs: Any) -> Any:
        """Returns the normalized inputs."""
        columns = _columns(self.axis, inputs.shape)
        if self.rms_scaling or not columns or not self._pays(inputs):
            return self._plain(inputs)
        return self._fused(inputs, (columns,), (1,), self.gamma, self.beta)


@keras.saving.register_keras_serializable(package="tfmixed")
class RMSNormalization(_Fused, keras.layers.RMSNormalization):
    """`keras.layers.RMSNormalization` in 16 bits, with float32 inside."""

    def call(self, x: Any) -> Any:
        """Returns the inputs, divided by their root mean square."""
        columns = _columns(self.axis, x.shape)
        if not columns or not self._pays(x):
            return self._plain(x)
        return self._fused(x, (columns,), (1,), self.scale, None, False)


@keras.saving.register_keras_serializable(package="tfmixed")
class GroupNormalization(_Fused, keras.layers.GroupNormalization):
    """`keras.layers.GroupNormalization` in 16 bits, with float32 inside."""

    def call(self, inputs: Any) -> Any:
        """Returns the normalized inputs."""
        rank = inputs.shape.rank
        if not rank or self.axis % rank != rank - 1 or not self._pays(inputs):
            return self._plain(inputs)
        *places, channels = inputs.shape[1:]
        each = channels // self.groups
        shape = (math.prod(places), self.groups, each)
        return self._fused(inputs, shape, (1, 3), self.gamma, self.beta)


def _columns(axes: list[int], shape: Any) -> int | None:
    """How many values there are along these axes; None if they are not last."""
    rank = shape.rank
    if not rank or len(axes) >= rank:
        return None
    # Not sorted: the weights have the axes in this order.
    last = list(range(rank - len(axes), rank))
    if [axis % rank for axis in axes] != last:
        return None
    columns: int | None = shape[-len(axes) :].num_elements()
    return columns


def _weight(weight: Any, shape: tuple[int, ...], constant: float) -> Any:
    if weight is None:
        return tf.fill(shape, constant)
    with _keras.without_autocast():
        return tf.reshape(tf.convert_to_tensor(weight), shape)
