"""Normalization of each example for itself, as two XLA clusters on a CPU.

TensorFlow runs about ten operations on float32 copies each way, and keeps
several of them. Here the forward pass is one cluster, the backward pass is
another, and between them only the 16-bit input and a mean and a reciprocal
standard deviation for each row are kept.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmixed.fast import clusters


def normalize(
    x: Any,
    gamma: Any,
    beta: Any,
    *,
    axes: tuple[int, ...],
    epsilon: float,
    centered: bool = True,
) -> Any:
    """Returns `gamma * (x - mean) / sqrt(variance + epsilon) + beta`.

    Worth it where `clusters.pays`. The statistics are float32, whatever `x`
    is; gradients of any order are right.

    Args:
        x: A tensor of known shape but for the first dimension.
        gamma: The float32 scale, whose shape is that of the last axes of `x`.
        beta: The float32 offset, of the same shape.
        axes: What to reduce: not the first axis.
        epsilon: What to add to the variance.
        centered: Whether to subtract the mean; otherwise it counts as 0.
    """
    forward, backward = _clusters(axes, epsilon, centered)

    @tf.custom_gradient
    def run(x: Any, gamma: Any, beta: Any) -> Any:
        y, mean, scale = forward(x, gamma, beta)

        def gradient(upstream: Any) -> Any:
            dx, *terms = backward(x, gamma, mean, scale, upstream)
            return dx, *(_column_sums(term, gamma.shape) for term in terms)

        return y, gradient

    return run(x, gamma, beta)


@functools.cache
def _clusters(
    axes: tuple[int, ...], epsilon: float, centered: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    @clusters.cluster
    def forward(x: Any, gamma: Any, beta: Any) -> Any:
        mean, scale = _statistics(x, axes, epsilon, centered)
        y = (tf.cast(x, tf.float32) - mean) * (scale * gamma) + beta
        return tf.cast(y, x.dtype), mean, scale

    backward = functools.partial(_backward, axes=axes, centered=centered)
    return forward, clusters.cluster(backward)


def _statistics(
    x: Any, axes: tuple[int, ...], epsilon: float, centered: bool
) -> tuple[Any, Any]:
    """The mean, and the reciprocal of the standard deviation."""
    x = tf.cast(x, tf.float32)
    mean = tf.reduce_mean(x, axes, keepdims=True)
    if not centered:
        mean = tf.zeros_like(mean)
    variance = tf.reduce_mean(tf.square(x - mean), axes, keepdims=True)
    return mean, tf.math.rsqrt(variance + epsilon)


def _backward(
    x: Any,
    gamma: Any,
    mean: Any,
    scale: Any,
    upstream: Any,
    *,
    axes: tuple[int, ...],
    centered: bool,
) -> tuple[Any, Any, Any]:
    """The gradient of `x`, and what to sum for those of gamma and beta."""
    normal = (tf.cast(x, tf.float32) - mean) * scale
    wide = tf.cast(upstream, tf.float32)
    inner = wide * gamma
    dx = inner - normal * tf.reduce_mean(inner * normal, axes, keepdims=True)
    if centered:
        dx -= tf.reduce_mean(inner, axes, keepdims=True)
    return tf.cast(dx * scale, x.dtype), wide * normal, wide


def _column_sums(x: Any, shape: Any) -> Any:
    """Sums over all but the last axes, which have this shape.

    As a product of matrices: XLA walks down one column after the other.
    """
    rows = tf.reshape(x, (-1, math.prod(shape)))
    ones = tf.ones((1, tf.shape(rows)[0]), rows.dtype)
    return tf.reshape(tf.matmul(ones, rows), shape)
