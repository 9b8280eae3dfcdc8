"""BatchNormalization in 16 bits, in one kernel each way.

Keras casts to float32 and runs about ten operations, whose float32 results the
backward pass keeps. TensorFlow's fused kernel (oneDNN on a CPU, cuDNN on a GPU)
takes 16 bits, and sums in float32. Overrides `call` of
`keras/src/layers/normalization/batch_normalization.py`, as read from Keras
3.15.1 and 3.10.0.
"""

from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed.fast import clusters
from tfmixed.layers.float32_inside import Float32Inside

_HALF = ("float16", "bfloat16")
# Below it cuDNN takes no epsilon.
_SMALLEST_EPSILON = 1.001e-5


@keras.saving.register_keras_serializable(package="tfmixed")
class BatchNormalization(Float32Inside, keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` that is fast and right in 16 bits.

    The arguments, the weights and the results are those of Keras: 16 bits in
    and out, statistics, scale and offset in float32. What the fused kernel
    does not know (masks, `renorm`, `synchronized` over replicas) is computed
    as Keras does it, in float32. Inputs beyond the range of 16 bits come in as
    they are, and an empty batch leaves the statistics as they are. Layers of
    other dtypes do exactly what Keras does.
    """

    def call(
        self, inputs: Any, training: bool | None = None, mask: Any = None
    ) -> Any:
        """Returns the normalized inputs; updates the statistics in training."""
        learns = bool(training and self.trainable)
        if mask is not None or not self._is_fused(inputs, learns):
            inputs, mask = self._widen(inputs), self._widen(mask)
            outputs = super().call(inputs, training=training, mask=mask)
            return self._narrow(outputs)
        return self._narrow(self._normalize(inputs, learns))

    def _is_fused(self, inputs: Any, learns: bool) -> bool:
        if (
            self.compute_dtype not in _HALF
            or inputs.dtype not in (tf.float16, tf.bfloat16, tf.float32)
            or inputs.shape.rank is None
            or inputs.shape.rank < 2
            # Compiled, the variance is E[x^2] - E[x]^2, which may be negative;
            # and XLA fuses what Keras writes by itself.
            or _keras.inside_xla()
        ):
            return False
        if clusters.has_accelerator():
            fits = self.epsilon >= _SMALLEST_EPSILON
        else:
            # On a CPU, the kernel for other axes transposes.
            fits = learns or self._is_last_axis(inputs)
        is_shared = self.synchronized and tf.distribute.has_strategy()
        # Keras 3.10 has no `renorm`.
        is_plain = not (is_shared or getattr(self, "renorm", False))
        return fits and (is_plain or not learns)

    def _is_last_axis(self, inputs: Any) -> bool:
        rank: int = inputs.shape.rank
        return self.axis % rank == rank - 1

    def _normalize(self, inputs: Any, learns: bool) -> Any:
        dtype = inputs.dtype.name
        if dtype != self.compute_dtype or (
            # On a CPU the kernel for float16 is slower than that and a cast.
            dtype == "float16" and learns and not clusters.has_accelerator()
        ):
            inputs = tf.cast(inputs, tf.float32)
        x, data_format = self._as_images(inputs)
        statistics = (self.moving_mean, self.moving_variance)
        given = [[] if learns else tf.convert_to_tensor(v) for v in statistics]
        scale = self._or_constant(self.gamma, 1.0)
        offset = self._or_constant(self.beta, 0.0)
        attributes = {"epsilon": self.epsilon, "data_format": data_format}
        if learns and not clusters.has_accelerator():
            y, mean, variance = _lean(x, scale, offset, attributes)
        else:
            y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
                x=x,
                scale=scale,
                offset=offset,
                mean=given[0],
                variance=given[1],
                is_training=learns,
                **attributes,
            )
        if learns:
            self._update(mean, variance, tf.size(x, out_type=tf.int64))
        if y.shape.rank == inputs.shape.rank and x is inputs:
            return y
        return tf.ensure_shape(tf.reshape(y, tf.shape(inputs)), inputs.shape)

    def _update(self, mean: Any, variance: Any, size: Any) -> None:
        """Moves the statistics towards those of a batch.

        Args:
            mean: The mean of each channel.
            variance: The variance of each channel, as the kernel gives it:
                divided by one less than there are values, but not by 0.
            size: How many values there are in all channels.
        """
        channels = max(self.moving_mean.shape[0], 1)
        count = tf.cast(size // channels, tf.float32)
        variance *= (count - 1.0) / tf.maximum(count, 1.0)
        for moving, value in (
            (self.moving_mean, mean),
            (self.moving_variance, variance),
        ):
            old = tf.convert_to_tensor(moving)
            # The kernel gives NaN for an empty batch, as a replica may get.
            value = tf.where(count > 0.0, value, old)
            moving.assign(old * self.momentum + value * (1.0 - self.momentum))

    def _or_constant(self, weight: Any, constant: float) -> Any:
        if weight is None:
            return tf.fill(self.moving_mean.shape, constant)
        return tf.convert_to_tensor(weight)

    def _as_images(self, inputs: Any) -> tuple[Any, str]:
        """The inputs with four axes, of which the kernel knows the channels."""
        shape, rank = inputs.shape, inputs.shape.rank
        axis = self.axis % rank
        channels = self.moving_mean.shape[0]
        if axis == rank - 1:
            if rank != 4:
                inputs = tf.reshape(inputs, (1, -1, 1, channels))
            return inputs, "NHWC"
        if rank == 4 and axis == 1:
            return inputs, "NCHW"
        sizes = tf.shape(inputs)
        before = tf.reduce_prod(sizes[:axis])
        after = shape[axis + 1 :].num_elements()
        if after is None:
            after = tf.reduce_prod(sizes[axis + 1 :])
        return tf.reshape(inputs, (before, channels, after, 1)), "NCHW"


def _lean(x: Any, scale: Any, offset: Any, attributes: Any) -> Any:
    """The kernel in training, without what its gradient does not need.

    Fused with a ReLU that follows, oneDNN's kernel returns a byte for each
    number, and TensorFlow keeps it for a gradient that does not read it: a
    quarter of the memory of a step.
    """

    @tf.custom_gradient
    def run(x: Any, scale: Any, offset: Any) -> Any:
        y, mean, variance, *reserves = tf.raw_ops.FusedBatchNormV3(
            x=x,
            scale=scale,
            offset=offset,
            mean=[],
            variance=[],
            is_training=True,
            **attributes,
        )

        def gradient(upstream: Any, *_: Any) -> Any:
            found = tf.raw_ops.FusedBatchNormGradV3(
                y_backprop=upstream,
                x=x,
                scale=scale,
                reserve_space_1=reserves[0],
                reserve_space_2=reserves[1],
                reserve_space_3=tf.zeros([0]),
                is_training=True,
                **attributes,
            )
            return found[:3]

        return (y, mean, variance), gradient

    y, mean, variance = run(x, scale, offset)
    return y, mean, variance
