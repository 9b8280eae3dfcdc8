"""Gradients as a list: finite or not, their norm, divided, never densified."""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def finite_and_norm(gradients: Iterable[Any]) -> tuple[Any, Any]:
    """Returns whether all gradients are finite, and their global norm.

    One pass over memory: the sum of squares is finite only if every number in
    it is. Where it is not, large but finite gradients may be the reason
    (squares overflow from 1.8e19 in float32), and only then each number is
    looked at. Of `tf.IndexedSlices` only the rows that exist are read.

    Args:
        gradients: Tensors, `tf.IndexedSlices` and `None`.

    Returns:
        A boolean scalar, and a float32 scalar that is infinite or NaN where
        the sum of squares is.
    """
    values = [_values(g) for g in gradients if g is not None]
    if not values:
        return tf.constant(True), tf.constant(0.0)
    halves = tf.add_n([_half_square(v) for v in values])
    finite = tf.cond(
        tf.math.is_finite(halves),
        lambda: tf.constant(True),
        lambda: tf.reduce_all(
            [tf.reduce_all(tf.math.is_finite(v)) for v in values]
        ),
    )
    return finite, tf.sqrt(2.0 * halves)


def norms_over(gradients: Sequence[Any], scale: Any, known: Any) -> list[Any]:
    """Returns the norm of each gradient divided by `scale`.

    Args:
        gradients: Tensors.
        scale: Scalar tensor.
        known: The global norm. It is infinite where the squares overflow
            before the division.
    """

    def norms(parts: Sequence[Any]) -> Any:
        return tf.sqrt(tf.stack([2.0 * _half_square(g) for g in parts]))

    stacked = tf.cond(
        tf.math.is_finite(known),
        lambda: norms(gradients) / scale,
        lambda: norms(divide(gradients, scale)),
    )
    return tf.unstack(stacked, len(gradients))


def _half_square(gradient: Any) -> Any:
    return tf.cast(tf.nn.l2_loss(_values(gradient)), tf.float32)


def _values(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    # The square of a float16 number overflows from 256 on.
    if gradient.dtype.size < 4:
        gradient = tf.cast(gradient, tf.float32)
    return gradient


def divide(
    gradients: Iterable[Any], scale: Any, variables: Sequence[Any] = ()
) -> list[Any]:
    """Returns the gradients divided by `scale`, each in its own dtype.

    Args:
        gradients: Tensors, `tf.IndexedSlices` and `None`.
        scale: Float, scalar tensor or variable.
        variables: The variables that the gradients belong to. Where one is
            overwritten with its "gradient" (float8 scales), that value is no
            gradient of the loss and stays as it is.
    """
    if isinstance(scale, float) and scale == 1.0:
        return list(gradients)
    gradients = list(gradients)
    variables = variables or [None] * len(gradients)
    return [
        gradient
        if gradient is None
        or getattr(variable, "overwrite_with_gradient", False)
        else _divide_one(gradient, scale)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def _divide_one(gradient: Any, scale: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            _divide_one(gradient.values, scale),
            gradient.indices,
            gradient.dense_shape,
        )
    if gradient.dtype.size < 4:
        # A scale above 65504 is infinite in float16.
        quotient = tf.cast(gradient, tf.float32) / tf.cast(scale, tf.float32)
        return tf.cast(quotient, gradient.dtype)
    return gradient / tf.cast(scale, gradient.dtype)


def is_reachable(tensor: Any) -> bool:
    """Returns whether `tensor` can be used where the program is now.

    A tensor made in one `tf.function` does not exist in another one, and one
    made eagerly would be frozen into a graph as a constant.
    """
    if tensor is None:
        return False
    if tf.executing_eagerly():
        return not tf.is_symbolic_tensor(tensor)
    if not tf.is_symbolic_tensor(tensor):
        return False
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if tensor.graph is graph:
            return True
        graph = getattr(graph, "outer_graph", None)
    return False
