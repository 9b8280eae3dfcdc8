"""The update of all weights as one XLA cluster inside a TensorFlow graph.

For the optimizers of Keras that have no kernel, on a CPU. Compiled, a chain of
elementwise operations passes over memory once.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed import gradients as gradient_lib
from tfmixed.fast import clusters

# Compiling takes about 60 ms a weight, tracing included. With more weights
# than these the first step takes noticeably longer than that of Keras.
_MOST_VARIABLES = 64
# Below this a step saves less than 1 ms, and the first one costs 1 s.
_FEWEST_ELEMENTS = 500_000

# Those that a cluster does not make faster, and why. Ratios of the time of
# the update to that of Keras for two matrices of 2048 x 2048.
_EXCLUDED = {
    # 1.04: means over rows and columns, which XLA does one after another.
    "Adafactor",
    # 1.18: nearly all of it is matrix products.
    "Muon",
    # Calls other optimizers, each of which may be a user's own.
    "MultiOptimizer",
}


def pays(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]
) -> bool:
    """Returns whether to compile this update.

    Args:
        optimizer: A Keras optimizer.
        gradients: Tensors, `tf.IndexedSlices` and `None`.
        variables: The Keras variables, in the same order.
    """
    return (
        not tf.executing_eagerly()
        and not tf.distribute.has_strategy()
        and _only_keras(optimizer, variables)
        and type(optimizer).__name__ not in _EXCLUDED
        and len(variables) <= _MOST_VARIABLES
        and all(_is_static(g) for g in gradients if g is not None)
        and _num_elements(gradients) >= _FEWEST_ELEMENTS
        and not _keras.inside_xla()
        and not clusters.has_accelerator()
    )


def apply(
    optimizer: Any,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    scale: Any,
) -> None:
    """Calls `optimizer.apply` in a cluster, with gradients over `scale`.

    Args:
        optimizer: A Keras optimizer.
        gradients: Tensors and `None`.
        variables: The Keras variables, in the same order.
        scale: Scalar tensor or None.
    """

    @tf.function(jit_compile=True, autograph=False)
    def update(tensors: list[Any], scale: Any) -> None:
        if scale is not None:
            tensors = gradient_lib.divide(tensors, scale, variables)
        optimizer.apply(tensors, variables)

    update(list(gradients), scale)


def _only_keras(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Returns whether all code that would run is Keras's own."""
    parts = [optimizer, *(getattr(v, "constraint", None) for v in variables)]
    schedule = _keras.learning_rate_schedule(optimizer)
    parts.append(schedule)
    return all(
        part is None or type(part).__module__.startswith("keras.src.")
        for part in parts
    ) and not _keras.own_methods(optimizer, dir(keras.optimizers.Optimizer))


def _is_static(gradient: Any) -> bool:
    return isinstance(gradient, tf.Tensor) and gradient.shape.is_fully_defined()


def _num_elements(gradients: Sequence[Any]) -> int:
    return sum(g.shape.num_elements() for g in gradients if g is not None)
