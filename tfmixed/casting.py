"""float32 where a model meets its losses and metrics."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from tfmixed import _keras

_HALF = ("float16", "bfloat16")


def to_float32(tensor: Any) -> Any:
    """Returns a 16-bit tensor as float32, with its Keras mask.

    Anything else is returned as it is.
    """
    dtype = getattr(tensor, "dtype", None)
    if dtype is None or keras.backend.standardize_dtype(dtype) not in _HALF:
        return tensor
    return _keras.copy_mask(tensor, keras.ops.cast(tensor, "float32"))


@contextlib.contextmanager
def float32_activity_regularizers(model: keras.Model) -> Iterator[None]:
    """Inside the block, activity regularizers of 16-bit layers see float32.

    A layer hands its output to its regularizer as it is, and the sum of
    squares of a few thousand float16 numbers overflows. The layers are given
    their own regularizers back afterwards, so that nothing of this is saved.

    Args:
        model: The model, with all the layers inside it.
    """
    changed = [
        (layer, layer.activity_regularizer)
        for layer in _keras.flatten_layers(model)
        if layer.activity_regularizer is not None
        and layer.compute_dtype in _HALF
        and not isinstance(layer.activity_regularizer, _OfFloat32)
    ]
    for layer, regularizer in changed:
        layer.activity_regularizer = _OfFloat32(regularizer)
    try:
        yield
    finally:
        for layer, regularizer in changed:
            layer.activity_regularizer = regularizer


class _OfFloat32:
    def __init__(self, regularizer: Any) -> None:
        self._regularizer = regularizer

    def __call__(self, outputs: Any) -> Any:
        return self._regularizer(to_float32(outputs))
