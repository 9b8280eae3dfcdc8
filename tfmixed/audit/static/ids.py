"""TM006: ids that are rounded to 16 bits on their way to a lookup."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed.audit.findings import Finding
from tfmixed.audit.findings import finding
from tfmixed.audit.static.subject import Place
from tfmixed.audit.static.subject import Subject
from tfmixed.audit.static.walk import layer_of

_HALF = (tf.float16, tf.bfloat16)
# From here on not every integer is a number of the format.
EXACT_UP_TO = {"float16": 2048, "bfloat16": 256}
# Operations that hand ids on without computing with them.
_PASSING = (
    *("Cast", "Reshape", "Identity", "ExpandDims", "Squeeze", "Transpose"),
    *("StopGradient", "ConcatV2", "Pack", "StridedSlice", "Slice", "GatherV2"),
    *("Tile", "Round", "Minimum", "Maximum"),
)


def check_ids(subject: Subject) -> Iterator[Finding]:
    """TM006: a lookup whose ids were 16-bit numbers before."""
    if subject.walk.assumed:
        # Only data tell whether ids come as integers.
        return
    for place in subject.places:
        largest = largest_id(place.layer)
        if largest is None:
            continue
        for source in _sources(subject, place):
            dtype = _half_before(source)
            if dtype is None or largest <= EXACT_UP_TO[dtype]:
                continue
            limit = EXACT_UP_TO[dtype]
            yield finding(
                "TM006",
                place.path,
                f"{place} looks up ids up to {largest}, but they pass "
                f"through {dtype} before, which holds every integer only up "
                f"to {limit}: {limit + 1} becomes {limit}.",
            )
            break


def largest_id(layer: Any) -> int | None:
    """The largest id that a lookup layer knows; None for other layers."""
    layers = keras.layers
    if isinstance(layer, layers.Embedding):
        return int(layer.input_dim) - 1
    if isinstance(layer, layers.CategoryEncoding):
        return None if layer.num_tokens is None else int(layer.num_tokens) - 1
    if isinstance(layer, layers.IntegerLookup):
        known = [v for v in layer.get_vocabulary() if isinstance(v, int)]
        known += [int(v) for v in layer.get_vocabulary() if hasattr(v, "item")]
        return max(known, default=None)
    if isinstance(layer, layers.Hashing | layers.HashedCrossing):
        # Any id can come.
        return 2**31 - 1
    return None


def _sources(subject: Subject, place: Place) -> list[Any]:
    """The tensors that the ids come from, at every call of the layer."""
    found: list[Any] = []
    for call in subject.walk.calls:
        if call.operation is place.layer:
            found += call.inputs
            inside = call.operations
        elif _holds(call.operation, place.layer):
            inside = tuple(
                operation
                for operation in call.operations
                if layer_of(call.operation, operation) is place.layer
            )
        else:
            continue
        found += [ids for one in inside for ids in _ids_of(one)]
    return found


def _ids_of(operation: Any) -> list[Any]:
    """The ids that an operation within a lookup layer reads."""
    if operation.type == "ResourceGather":
        return [operation.inputs[1]]
    if operation.type == "AsString":
        return list(operation.inputs)
    if operation.type == "Cast" and operation.get_attr("DstT").is_integer:
        return list(operation.inputs)
    return []


def _holds(operation: Any, layer: Any) -> bool:
    if not isinstance(operation, keras.Layer):
        return False
    return any(one is layer for one in _keras.flatten_layers(operation))


def _half_before(tensor: Any) -> str | None:
    """The 16-bit format that a tensor passed through, if it did."""
    queue, seen = [tensor], set()
    while queue:
        one = queue.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if one.dtype in _HALF:
            return str(one.dtype.name)
        if one.op.type in _PASSING:
            queue += list(one.op.inputs)
    return None
