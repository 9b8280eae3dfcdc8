"""TM004 and TM005: constants that the format cannot hold.

Three places have constants: nodes of `keras.ops` in a functional model, the
attributes of Keras's layers, and the code of custom layers, whose graph shows
them as the format holds them and whose source says what was meant.
"""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tfmixed import rules
from tfmixed.audit.findings import Finding
from tfmixed.audit.findings import finding
from tfmixed.audit.static.rules import is_float32_inside
from tfmixed.audit.static.subject import HALF
from tfmixed.audit.static.subject import Place
from tfmixed.audit.static.subject import Subject
from tfmixed.audit.static.text import becomes

# Attributes of Keras's layers that are combined with the input.
_ATTRIBUTES = {
    "Masking": ("mask_value",),
    "LeakyReLU": ("negative_slope",),
    "ELU": ("alpha",),
    "ReLU": ("negative_slope", "threshold"),
    "Rescaling": ("scale", "offset"),
    "GaussianNoise": ("stddev",),
}
# A bound or a comparison may be infinite without harm.
_HARMLESS = (
    *("Clip", "NanToNum", "Minimum", "Maximum", "Fmin", "Fmax", "Cast"),
    *("Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual"),
)


def check_operations(subject: Subject) -> Iterator[Finding]:
    """TM004 and TM005 in the nodes of `keras.ops`."""
    for call in subject.walk.calls:
        operation = call.operation
        if isinstance(operation, keras.Layer):
            continue
        dtype = next(
            (t.dtype.name for t in call.outputs if t.dtype.name in HALF), None
        )
        if dtype is None:
            continue
        for value in _numbers(call):
            changed = becomes(value, dtype)
            if changed is None:
                continue
            if changed != 0 and type(operation).__name__ in _HARMLESS:
                continue
            yield _found(
                subject.path(operation),
                f"{subject.name(operation)}",
                value,
                changed,
                dtype,
            )


def _numbers(call: Any) -> Iterator[float]:
    """The numbers among the arguments and attributes of an operation."""
    flat = keras.tree.flatten((call.args, call.kwargs))
    flat.append(getattr(call.operation, "epsilon", None))
    for value in flat:
        value = np.asarray(value if np.isscalar(value) else None)
        if value.dtype.kind in "fiu":
            yield float(value)


def check_attributes(subject: Subject) -> Iterator[Finding]:
    """TM004 and TM005 in the attributes of layers of Keras."""
    for place in subject.places:
        if not place.is_half or place.is_ours:
            continue
        for name, value in _values(place):
            changed = becomes(value, place.dtype)
            if changed is not None:
                yield _found(
                    place.path,
                    f"{place}, {name}",
                    value,
                    changed,
                    place.dtype,
                )


def _values(place: Place) -> Iterator[tuple[str, float]]:
    for base in type(place.layer).__mro__:
        for name in _ATTRIBUTES.get(base.__name__, ()):
            value = getattr(place.layer, name, None)
            for one in np.ravel(np.asarray(value, "float64")):
                yield name, float(one)
    kind: Any = type(place.layer)
    is_norm = place.rule.kind in rules.NORMALIZATION
    if is_norm and not is_float32_inside(kind):
        epsilon = getattr(place.layer, "epsilon", None)
        if isinstance(epsilon, float):
            yield "epsilon", epsilon


def _found(
    path: str, what: str, value: float, changed: float, dtype: str
) -> Finding:
    if changed == 0:
        return finding(
            "TM004",
            path,
            f"{what}: {value:g} becomes 0 in {dtype}, so it protects from no "
            "division by zero.",
        )
    return finding(
        "TM005", path, f"{what}: {value:g} becomes {changed:g} in {dtype}."
    )


def check_optimizer_epsilon(subject: Subject) -> Iterator[Finding]:
    """TM004 in an optimizer whose variables are themselves in float16."""
    optimizer = getattr(subject.model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    epsilon = getattr(optimizer, "epsilon", None)
    if not isinstance(epsilon, float):
        return
    halves = [
        variable
        for variable in subject.model.trainable_variables
        if keras.backend.standardize_dtype(variable.dtype) in HALF
    ]
    if not halves:
        return
    dtype = keras.backend.standardize_dtype(halves[0].dtype)
    if becomes(epsilon, dtype) == 0:
        yield finding(
            "TM004",
            None,
            f"{type(optimizer).__name__}(epsilon={epsilon:g}) updates "
            f"{len(halves)} variables that are {dtype} themselves, in which "
            f"{epsilon:g} becomes 0: the step divides by zero.",
            "Keep the variables in float32: use the policy "
            f"'mixed_{dtype}' instead of '{dtype}'.",
        )
