"""The same random numbers in each precision, to compare runs in two of them.

A draw in float16 takes other bits than one in float32, so that dropout would
drop other units. Layers that only draw therefore run in float32, and their
result is cast. Recurrent layers draw in the midst of their work; their dropout
is turned off.
"""

import contextlib
import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras

_HALF = ("float16", "bfloat16")


def only_draws(operation: Any) -> bool:
    """Returns whether a layer has random numbers and no weights."""
    return (
        isinstance(operation, keras.Layer)
        and bool(_keras.seed_generators(operation))
        and not _keras.child_layers(operation)
        and not operation.weights
        and operation.compute_dtype in _HALF
    )


@contextlib.contextmanager
def in_float32(layer: Any) -> Iterator[Callable[..., Any]]:
    """Inside the block, a layer computes in float32 for the `call` it yields.

    That call casts its result to the dtype that the layer had.
    """
    policy, dtype = _keras.layer_policy(layer), layer.compute_dtype
    call = layer.call

    def cast_back(tensor: Any) -> Any:
        is_float = tf.is_tensor(tensor) and tensor.dtype.is_floating
        return tf.cast(tensor, dtype) if is_float else tensor

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return keras.tree.map_structure(cast_back, call(*args, **kwargs))

    _keras.set_layer_policy(layer, keras.DTypePolicy("float32"))
    try:
        yield wrapped
    finally:
        _keras.set_layer_policy(layer, policy)


@contextlib.contextmanager
def without_recurrent_dropout(model: keras.Model) -> Iterator[None]:
    """Inside the block, recurrent layers have no dropout."""
    changed = [
        (vars(layer), name, rate)
        for layer in recurrent_dropout(model)
        for name in ("dropout", "recurrent_dropout")
        if isinstance(rate := vars(layer).get(name), int | float)
    ]
    for attributes, name, _ in changed:
        attributes[name] = 0.0
    try:
        yield
    finally:
        for attributes, name, rate in changed:
            attributes[name] = rate


def recurrent_dropout(model: keras.Model) -> list[Any]:
    """The cells and layers inside recurrent layers that have dropout."""
    return [
        part
        for layer in _keras.flatten_layers(model)
        if isinstance(layer, keras.layers.RNN)
        for part in _keras.flatten_layers(layer)
        if vars(part).get("dropout") or vars(part).get("recurrent_dropout")
    ]
