"""TM017, and TM004 and TM005 in custom layers: seen in their graph.

Rules know the layers of Keras. What a layer or a Lambda of the user's own does
is read off the TensorFlow operations that its lines add to the graph.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmixed import rules
from tfmixed.audit.findings import Finding
from tfmixed.audit.findings import finding
from tfmixed.audit.static import text as static_text
from tfmixed.audit.static.subject import HALF
from tfmixed.audit.static.subject import Subject
from tfmixed.audit.static.walk import is_opaque
from tfmixed.audit.static.walk import layer_of
from tfmixed.audit.static.walk import short

_HALF = (tf.float16, tf.bfloat16)
# What an epsilon protects.
_DIVIDES = ("RealDiv", "Div", "Rsqrt", "Sqrt", "Log", "Reciprocal", "Pow")
_ADDS = ("Add", "AddV2", "Maximum")
# A comparison or a bound may be infinite without harm.
_HARMLESS = (
    *("Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual"),
    *("ClipByValue", "Minimum", "Maximum"),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    """A TensorFlow operation with the user's line that made it.

    Args:
        layer: The innermost layer that it belongs to.
        operation: The operation.
        frame: The frame of the user's line.
    """

    layer: Any
    operation: Any
    frame: Any

    @property
    def where(self) -> str:
        """File and line."""
        return static_text.location(self.frame)


def lines(subject: Subject) -> list[Line]:
    """The operations of the user's own layers, in order."""
    found = []
    for call in subject.walk.calls:
        if not is_opaque(call.operation):
            continue
        for operation in call.operations:
            frame = static_text.user_frame(operation)
            if frame is not None:
                layer = layer_of(call.operation, operation) or call.operation
                found.append(Line(layer, operation, frame))
    return found


def check_unsafe(subject: Subject) -> Iterator[Finding]:
    """TM017: sums, powers, exponentials and quotients of a custom layer."""
    by_layer: dict[int, list[Line]] = {}
    for line in lines(subject):
        if _is_unsafe(line.operation):
            by_layer.setdefault(id(line.layer), []).append(line)
    for found in by_layer.values():
        layer = found[0].layer
        kinds = sorted({line.operation.type for line in found})
        places = list(dict.fromkeys(line.where for line in found))
        dtype = _dtype_of(found[0].operation)
        opaque = isinstance(layer, keras.layers.Lambda)
        yield finding(
            "TM015" if opaque else "TM017",
            subject.path(layer),
            f"{subject.name(layer)} computes {_join(kinds)} in {dtype} "
            f"({_join(places)}), which leaves its range or loses digits.",
            severity="note" if dtype == "bfloat16" else None,
        )


def check_unseen(subject: Subject) -> Iterator[Finding]:
    """TM017: custom layers that could not be looked at, and failing ones."""
    for call in subject.walk.calls:
        if call.error is None or not isinstance(call.operation, keras.Layer):
            continue
        dtype = call.operation.compute_dtype
        if dtype not in HALF and not _holds_half(subject, call.operation):
            continue
        yield finding(
            "TM017",
            subject.path(call.operation),
            f"{subject.name(call.operation)} could not be looked at: called "
            f"in a graph in {dtype} it raises {short(call.error)}",
        )
    problem = subject.walk.problem
    if problem is not None and subject.formats:
        yield finding(
            "TM017",
            None,
            f"Model '{subject.model.name}' could not be called, because "
            f"{problem}. What its own code does, its outputs and its ids were "
            "not looked at.",
            "Pass data, audit(model, x), or build the model before.",
            severity="note",
        )


def _holds_half(subject: Subject, layer: Any) -> bool:
    place = subject.by_id.get(id(layer))
    return place is None or any(
        other.is_half and other.path.startswith(f"{place.path}/")
        for other in subject.places
    )


def _is_unsafe(operation: Any) -> bool:
    halves = [t for t in operation.inputs if t.dtype in _HALF]
    if not halves:
        return False
    if operation.type in rules.UNSAFE_KERNELS:
        return True
    # A product of two computed matrices has no weight that keeps it small.
    return (
        operation.type in rules.UNSAFE_MATRIX_PRODUCTS
        and halves[0].dtype == tf.float16
        and not any(_is_given(tensor) for tensor in operation.inputs)
    )


def _is_given(tensor: Any) -> bool:
    operation = tensor.op
    while operation.type in ("Cast", "Reshape", "Identity", "Transpose"):
        operation = operation.inputs[0].op
    return operation.type in ("ReadVariableOp", "Const")


def _dtype_of(operation: Any) -> str:
    return next(str(t.dtype.name) for t in operation.inputs if t.dtype in _HALF)


def check_constants(subject: Subject) -> Iterator[Finding]:
    """TM004 and TM005: constants in the code of custom layers."""
    seen = set()
    for line in lines(subject):
        if line.operation.type != "Const":
            continue
        constant = _constant(line)
        if constant is None:
            continue
        changed, dtype = constant
        users = _users(line.operation)
        meant = _meant(line, changed, dtype)
        code = _code(line, users, changed, meant)
        key = (code, id(line.layer), line.where)
        if code is None or key in seen:
            continue
        seen.add(key)
        what = meant or "a constant"
        yield finding(
            code,
            subject.path(line.layer),
            f"{subject.name(line.layer)} has {what} ({line.where}), which "
            f"becomes {changed:g} in {dtype}"
            + ("." if changed else ", so it protects from no division by 0."),
        )


def _constant(line: Line) -> tuple[float, str] | None:
    """What a constant became in 16 bits, where that is 0 or infinite."""
    operation = line.operation
    dtype = operation.get_attr("dtype")
    value = tf.make_ndarray(operation.get_attr("value"))
    if dtype in _HALF:
        value = value.astype("float32")
        if value.size and np.isinf(value).any():
            return float(value[np.isinf(value)].ravel()[0]), dtype.name
        return (0.0, dtype.name) if value.size and not value.any() else None
    if dtype != tf.float32 or not value.size:
        return None
    consumers = operation.outputs[0].consumers()
    halves = [o for o in consumers if _casts_to_half(o)]
    if not halves:
        return None
    name = halves[0].get_attr("DstT").name
    for one in value.ravel()[:16]:
        changed = static_text.becomes(one, name)
        if changed is not None:
            return changed, name
    return None


def _casts_to_half(operation: Any) -> bool:
    return operation.type == "Cast" and operation.get_attr("DstT") in _HALF


def _users(operation: Any) -> list[Any]:
    """What uses a constant, past casts."""
    users = []
    for consumer in operation.outputs[0].consumers():
        passes = consumer.type in ("Cast", "BroadcastTo", "Fill", "Reshape")
        users += _users(consumer) if passes else [consumer]
    return users


def _code(
    line: Line, users: list[Any], changed: float, meant: str | None
) -> str | None:
    if changed != 0:
        if users and all(user.type in _HARMLESS for user in users):
            return None
        deliberate = "inf" in static_text.source_line(line.frame)
        return None if deliberate and meant is None else "TM005"
    for user in users:
        if user.type not in _ADDS:
            continue
        after = [c.type for o in user.outputs for c in o.consumers()]
        # A plain maximum with 0 is a ReLU; only the source tells.
        if any(kind in _DIVIDES for kind in after) and (
            meant is not None or user.type != "Maximum"
        ):
            return "TM004"
    return None


def _meant(line: Line, changed: float, dtype: str) -> str | None:
    """The number that the user wrote: on the line, or in an attribute."""
    for number in static_text.numbers_in(static_text.source_line(line.frame)):
        for signed in (number, -number):
            if static_text.becomes(signed, dtype) == changed:
                return f"the constant {signed:g}"
    for name, value in vars(line.layer).items():
        if (
            isinstance(value, float)
            and static_text.becomes(value, dtype) == changed
        ):
            return f"`{name}` = {value:g}"
    return None


def _join(words: list[str], most: int = 4) -> str:
    text = ", ".join(words[:most])
    return text + ", ..." if len(words) > most else text
