"""Small XLA clusters inside a TensorFlow graph, for chains on a CPU.

Matrix products and convolutions belong to oneDNN: XLA on a CPU computes 16-bit
ones by way of float32. A chain of elementwise operations is the other way
round: TensorFlow reads and writes memory, and rounds to 16 bits, once for each
link; a cluster does it once for all. `benchmarks/NOTES.md` has the figures.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmixed import _keras

_calls = 0


def calls() -> int:
    """Returns how many calls of clusters have been made or traced so far."""
    return _calls


def cluster(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function of tensors: compiled on its own where that pays.

    Elsewhere the function runs as it is written. See `pays`.

    Args:
        function: A pure function of tensors, which returns tensors. It is
            compiled once for each set of shapes and dtypes.
    """

    @functools.cache
    def compiled(*specs: tf.TensorSpec) -> Any:
        # Not one polymorphic function, about whose many traces TensorFlow
        # would warn.
        whole = tf.function(function, jit_compile=True, autograph=False)
        return whole.get_concrete_function(*specs)

    @functools.wraps(function)
    def run(*tensors: Any) -> Any:
        if not has_static_shapes(tensors):
            return function(*tensors)
        specs = (tf.TensorSpec(x.shape, x.dtype) for x in tensors)
        with tf.init_scope():
            concrete = compiled(*specs)
        global _calls
        _calls += 1
        return concrete(*tensors)

    return run


def pays(*tensors: Any) -> bool:
    """Returns whether to compile a chain on these tensors as a cluster.

    In a training step on a CPU, that is. Elsewhere an odd batch would be
    compiled for itself: a step repeats its shapes, a server does not. And on a
    GPU the whole step is one cluster.

    Args:
        *tensors: What the chain starts from.
    """
    return (
        all(tf.is_symbolic_tensor(x) for x in tensors)
        and not has_accelerator()
        and has_static_shapes(tensors)
        and _keras.is_recording(tensors)
    )


def has_static_shapes(tensors: Any) -> bool:
    """Returns whether at most the first dimension, the batch, varies."""
    return all(
        x.shape.rank is not None and x.shape[1:].is_fully_defined()
        for x in tensors
    )


@functools.cache
def has_accelerator() -> bool:
    """Returns whether TensorFlow sees a GPU or a TPU."""
    kinds = {device.device_type for device in tf.config.list_logical_devices()}
    return bool(kinds & {"GPU", "TPU"})
