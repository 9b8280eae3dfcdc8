"""TM001 and TM003: outputs of the model, and softmax inside it, in 16 bits."""

from collections.abc import Iterator
from typing import Any

from tfmixed import rules
from tfmixed.audit.findings import Finding
from tfmixed.audit.findings import finding
from tfmixed.audit.static.subject import HALF
from tfmixed.audit.static.subject import Place
from tfmixed.audit.static.subject import Subject

# Operations of `keras.ops` that exponentiate.
_EXPONENTIALS = ("Softmax", "LogSoftmax", "Exp", "Exp2", "Expm1", "Logsumexp")


def check_heads(subject: Subject) -> Iterator[Finding]:
    """TM001: an output of the model that is in 16 bits."""
    seen: set[int] = set()
    for output in subject.walk.outputs:
        operation = output.operation
        if output.dtype not in HALF or id(operation) in seen:
            continue
        seen.add(id(operation))
        if operation is None:
            yield finding(
                "TM001",
                None,
                f"Model '{subject.model.name}' gives its output in "
                f"{output.dtype}: losses and metrics start from rounded "
                "numbers.",
            )
            continue
        exponential = is_exponential(operation)
        # The step of tfmixed casts outputs; what is lost before stays lost.
        yield finding(
            "TM001",
            subject.path(operation),
            f"{subject.name(operation)} gives its output in {output.dtype}: "
            + _why(exponential),
            severity=(
                "warning" if subject.guarded and not exponential else None
            ),
        )


def _why(exponential: bool) -> str:
    if exponential:
        return (
            "a confident wrong answer is rounded to exactly 1 and its "
            "gradient to 0."
        )
    return "losses and metrics start from rounded numbers."


def check_softmax(subject: Subject) -> Iterator[Finding]:
    """TM003: a softmax inside the model that is computed in 16 bits."""
    for place in subject.places:
        if id(place.layer) in subject.head_ids or is_inside(place):
            continue
        if place.is_half and is_exponential(place.layer):
            yield finding(
                "TM003",
                place.path,
                f"{place} computes in {place.dtype}: probabilities below "
                f"{_smallest(place.dtype)} become 0.",
            )
    for call in subject.walk.calls:
        operation = call.operation
        dtypes = {tensor.dtype.name for tensor in call.inputs} & set(HALF)
        if (
            dtypes
            and id(operation) not in subject.by_id
            and id(operation) not in subject.head_ids
            and is_exponential(operation)
        ):
            dtype = dtypes.pop()
            yield finding(
                "TM003",
                operation.name,
                f"{subject.name(operation)} computes in {dtype}: "
                f"probabilities below {_smallest(dtype)} become 0.",
            )


def is_exponential(operation: Any) -> bool:
    """Whether a layer or a `keras.ops` operation is a softmax or the like."""
    name = type(operation).__name__
    if not hasattr(operation, "compute_dtype"):
        return name in _EXPONENTIALS
    rule = rules.rule_for(operation)
    return rule is rules.SOFTMAX or rule.kind == "softmax"


def is_inside(place: Place) -> bool:
    """Whether a layer is part of one that is judged as a whole.

    The softmax of an attention layer is; so are the parts of tfmixed's own
    layers.
    """
    parent = place.parent
    while parent is not None:
        if not parent.is_container and (
            parent.is_ours or parent.rule.float16 == rules.TWIN
        ):
            return True
        parent = parent.parent
    return place.is_ours and not place.is_container


def _smallest(dtype: str) -> str:
    return "6e-8" if dtype == "float16" else "1e-40"
