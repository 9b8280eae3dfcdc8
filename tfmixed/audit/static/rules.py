"""TM010, TM015, TM016, TM019: what the rules table says about each layer."""

import functools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmixed import rules
from tfmixed.audit.findings import Finding
from tfmixed.audit.findings import finding
from tfmixed.audit.static.heads import is_exponential
from tfmixed.audit.static.heads import is_inside
from tfmixed.audit.static.subject import HALF
from tfmixed.audit.static.subject import Place
from tfmixed.audit.static.subject import Subject

# Kinds of the table that other checks speak about.
_ELSEWHERE = (
    "attention",
    "softmax",
    "preprocessing",
    "penalty",
    "opaque function",
    "custom attention",
    rules.SOFTMAX.kind,
)
_PRODUCTS = ("matrix product", "recurrent")
# Preprocessing that loses more than digits: it divides, compares or squares.
_FRAGILE = ("Normalization", "Discretization", "MelSpectrogram")


def check_rules(subject: Subject) -> Iterator[Finding]:
    """TM015: computed in 16 bits against the rules table."""
    for place in subject.places:
        wanted = (rules.FLOAT32, rules.TWIN)
        if place.treatment not in wanted or is_inside(place):
            continue
        if place.rule.kind in _ELSEWHERE or place.rule.only_on_gpu:
            continue
        if place.is_container or _is_part(place) or _is_safe(place, subject):
            continue
        yield finding(
            "TM015",
            place.path,
            f"{place} computes in {place.dtype}. {place.rule.reason}",
            severity=_severity(place),
        )
    yield from _operations(subject)


def _is_part(place: Place) -> bool:
    """Whether an unknown layer belongs to one that is known: a cell, say."""
    parent = place.parent
    return (
        place.rule is rules.UNKNOWN
        and parent is not None
        and not parent.is_container
    )


def _severity(place: Place) -> str:
    if place.dtype == "bfloat16" or place.rule is rules.FRAGILE:
        return "note"
    normalizes = getattr(place.layer, "normalize", False) is True
    is_norm = place.rule.kind in rules.NORMALIZATION
    return "error" if normalizes or is_norm else "warning"


def _is_safe(place: Place, subject: Subject) -> bool:
    if place.rule.kind in rules.NORMALIZATION:
        kind: Any = type(place.layer)
        return is_float32_inside(kind)
    if place.rule.kind == "product of activations":
        calls = [c for c in subject.walk.calls if c.operation is place.layer]
        return any(is_bounded(t) for call in calls for t in call.inputs)
    return False


@functools.cache
def is_float32_inside(layer_class: type) -> bool:
    """Whether a normalization layer squares its input in float32.

    Most layers of Keras do, some only from some version on. Asked of the layer
    itself: the square of 300 overflows float16.
    """
    arguments = {"groups": 1} if "Group" in layer_class.__name__ else {}
    if "Spectral" in layer_class.__name__:
        return True
    x = np.array([[0.0] * 4, [300.0, 300.0, 300.0, 200.0]])
    try:
        layer = layer_class(dtype="float16", **arguments)
        if "Batch" in layer_class.__name__:
            return True
        with tf.init_scope():
            y = layer(keras.ops.cast(x, "float16"))
        y = keras.ops.convert_to_numpy(keras.ops.cast(y, "float32"))
    except Exception:
        return False
    return bool(np.isfinite(y).all() and np.abs(y[1]).max() > 0)


def is_bounded(tensor: Any) -> bool:
    """Whether a tensor of a graph is the output of a sigmoid or the like."""
    operation = tensor.op
    passing = ("Cast", "Reshape", "Identity", "ExpandDims", "BroadcastTo")
    while operation.type in passing and operation.inputs:
        operation = operation.inputs[0].op
    return operation.type in rules.BOUNDED_KERNELS


def _operations(subject: Subject) -> Iterator[Finding]:
    """The nodes of `keras.ops` in a functional model."""
    seen: set[int] = set()
    for call in subject.walk.calls:
        operation = call.operation
        if isinstance(operation, keras.Layer) or id(operation) in seen:
            continue
        dtypes = {tensor.dtype.name for tensor in call.inputs} & set(HALF)
        if not dtypes or is_exponential(operation):
            continue
        dtype = sorted(dtypes)[-1]
        if rules.is_safe_operation(operation, dtype) or _scales_by_number(call):
            continue
        if any(is_bounded(tensor) for tensor in call.inputs):
            continue
        seen.add(id(operation))
        yield finding(
            "TM015",
            operation.name,
            f"{subject.name(operation)} computes in {dtype}: it is none of "
            "the operations that are safe in this format.",
            'Cast its inputs with keras.ops.cast(x, "float32"), or use '
            "tfmixed.prepare(model).",
            severity="note" if dtype == "bfloat16" else None,
        )


def _scales_by_number(call: Any) -> bool:
    name = type(call.operation).__name__
    products = ("Multiply", "Divide", "TrueDivide")
    return name in products and len(call.inputs) < 2


def check_attention(subject: Subject) -> Iterator[Finding]:
    """TM016: the attention of Keras, or a subclass of it, in 16 bits."""
    for place in subject.places:
        if not place.is_half or is_inside(place):
            continue
        if place.rule.kind not in ("attention", "custom attention"):
            continue
        yield finding(
            "TM016",
            place.path,
            f"{place} computes in {place.dtype}. {place.rule.reason}",
            severity="note" if place.dtype == "bfloat16" else None,
        )


def check_preprocessing(subject: Subject) -> Iterator[Finding]:
    """TM019: raw data in 16 bits."""
    for place in subject.places:
        if not place.is_half or place.rule.kind != "preprocessing":
            continue
        if is_inside(place):
            continue
        fragile = type(place.layer).__name__ in _FRAGILE
        yield finding(
            "TM019",
            place.path,
            f"{place} computes in {place.dtype}. {place.rule.reason}",
            severity=(
                "error"
                if fragile and place.dtype == "float16"
                else "warning"
                if fragile
                else "note"
            ),
        )


def check_left_behind(subject: Subject) -> Iterator[Finding]:
    """TM010: matrix products in float32 within a 16-bit model."""
    if hasattr(subject.model, "preparation"):
        # tfmixed.prepare left them there on purpose, and says why.
        return
    main = subject.places[0].dtype
    for place in subject.places[1:]:
        children = _left_inside(place, subject)
        if children:
            names = ", ".join(child.layer.name for child in children[:3])
            more = ", ..." if len(children) > 3 else ""
            yield finding(
                "TM010",
                place.path,
                f"{place} computes in {place.dtype}, but inside of it "
                f"{len(children)} of its layers compute in float32 "
                f"({names}{more}).",
            )
        elif (
            main in HALF
            and _is_left(place, subject)
            and place.parent is not None
            and place.parent.is_container
        ):
            yield finding(
                "TM010",
                place.path,
                f"{place} computes in float32, but the policy of the model is "
                f"{subject.model.dtype_policy.name}.",
            )


def _left_inside(place: Place, subject: Subject) -> list[Place]:
    if not place.is_half or place.is_container:
        return []
    return [
        other
        for other in subject.places
        if other.parent is place and _is_left(other, subject)
    ]


def _is_left(place: Place, subject: Subject) -> bool:
    return (
        place.dtype == "float32"
        and place.rule.kind in _PRODUCTS
        and id(place.layer) not in subject.head_ids
        and not place.is_container
        and not place.is_ours
    )
