"""The rows of the audit: what is known about each layer."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfmixed.audit.findings import Finding
from tfmixed.audit.static.subject import Place
from tfmixed.audit.static.subject import children


@dataclasses.dataclass(frozen=True)
class Layer:
    """A row of the audit: one layer, those inside of others included.

    Args:
        path: Its name, unique in the model.
        class_name: Its class.
        policy: Name of its dtype policy.
        compute_dtype: What it computes in.
        parameters: How many numbers its own weights have, without those of
            layers inside of it.
        treatment: What the rules want: "16 bits", "float32", "twin", ...
        reason: Why.
        codes: Of the findings about it.
        measured: What was measured on data, by name; None without data.
    """

    path: str
    class_name: str
    policy: str
    compute_dtype: str
    parameters: int
    treatment: str
    reason: str
    codes: tuple[str, ...] = ()
    measured: dict[str, Any] | None = None


def row_of(place: Place) -> Layer:
    """The row of a layer, without findings."""
    rule = place.rule
    treatment = place.treatment or rule.treatment("float16")
    is_model = place.is_container
    return Layer(
        path=place.path,
        class_name=type(place.layer).__name__,
        policy=str(place.layer.dtype_policy.name),
        compute_dtype=place.dtype,
        parameters=_own_parameters(place.layer),
        treatment="its layers" if is_model else treatment,
        reason=(
            "What the layers inside of it need decides."
            if is_model
            else rule.reason
        ),
    )


def _own_parameters(layer: Any) -> int:
    inside = {id(v) for child in children(layer) for v in child.variables}
    own = [v for v in layer.weights if id(v) not in inside]
    return int(sum(np.prod(variable.shape) for variable in own))


def with_details(
    rows: list[Layer], found: list[Finding], measured: Any
) -> Iterator[Layer]:
    """Adds the codes of the findings, and what was measured.

    Args:
        rows: The rows, without.
        found: All findings.
        measured: The `Preflight`; None without data.
    """
    by_path = {row.path: row for row in measured.rows} if measured else {}
    for row in rows:
        codes = {one.code for one in found if one.layer == row.path}
        values = by_path.get(row.path)
        yield dataclasses.replace(
            row,
            codes=tuple(sorted(codes)),
            measured=None if values is None else _measures(values),
        )


def _measures(values: Any) -> dict[str, Any]:
    fields: dict[str, Any] = plain(dataclasses.asdict(values))
    for name in ("path", "name", "class_name"):
        fields.pop(name)
    return fields


def plain(value: Any) -> Any:
    """The value for JSON: plain types, no NaN and no infinity."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not np.isfinite(value):
        # JSON has no number for it, and a reader is to see which it was.
        return str(value)
    return value
