"""What a culprit is, and how the calls of a step hang together."""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfmixed.audit import tally
from tfmixed.audit.observe import Record

FORWARD = "forward"
BACKWARD = "backward"
LOSS = "loss"
DATA = "data"


@dataclasses.dataclass(eq=False)
class Culprit:
    """The first tensor that is not finite.

    Args:
        where: `"data"` if a cast of the data overflows, `"forward"`,
            `"loss"` or `"backward"`.
        layer: The layer whose tensor it is; None for the loss.
        path: What the layer is called.
        tensor: What the tensor is, in words.
        dtype: Its dtype.
        inputs: The largest finite magnitudes of what went in, by name.
        suspects: The layers that may have to compute in float32: first the
            layer, then those that feed it or take its output.
        key: What to ask another run of the same model for.
    """

    where: str
    layer: Any
    path: str | None
    tensor: str
    dtype: str
    inputs: dict[str, float]
    suspects: list[Any]
    key: tuple[Any, ...]


def first_bad(values: list[Any]) -> int | None:
    """The position of the first tensor that is not finite; None if none."""
    for index, tensor in enumerate(values):
        if tensor is not None and not tally.is_finite(tensor):
            return index
    return None


def is_cast_of(tensor: Any, given: Any) -> bool:
    """Whether `tensor` is `given` in another dtype, bit by bit."""
    if tensor is given or not tf.is_tensor(given):
        return False
    if not given.dtype.is_floating or tensor.dtype == given.dtype:
        return False
    if tensor.shape != given.shape or not tally.is_finite(given):
        return False
    cast = tf.cast(given, tensor.dtype)
    same = (cast == tensor) | (tf.math.is_nan(cast) & tf.math.is_nan(tensor))
    return bool(tf.reduce_all(same))


def feeding(record: Record, done: list[Record]) -> list[Any]:
    """The layers whose outputs a call takes, or casts; nearest first.

    A `keras.ops` node has no dtype of its own: it follows what feeds it, so
    the search goes on to that.
    """
    found = []
    queue = [record]
    seen: set[int] = set()
    while queue:
        taker = queue.pop(0)
        for earlier in reversed(done):
            if id(earlier) in seen or not takes(taker, earlier):
                continue
            seen.add(id(earlier))
            if isinstance(earlier.layer, keras.Layer):
                found.append(earlier.layer)
            else:
                queue.append(earlier)
    return found


def takes(taker: Record, maker: Record) -> bool:
    """Whether an output of one call goes into another, cast or not."""
    return any(
        given is output or is_cast_of(given, output)
        for given in taker.inputs
        for output in maker.outputs
    )


def around(record: Record) -> list[Any]:
    """The layers that a call stands in, without the model itself."""
    found = []
    parent = record.parent
    while parent is not None and parent.parent is not None:
        found.append(parent.layer)
        parent = parent.parent
    return found
