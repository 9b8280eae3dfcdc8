"""What a search for the fewest float32 layers found, in words."""

import dataclasses
from collections.abc import Sequence

from tfmixed.audit.minimal_bench import Bench
from tfmixed.audit.minimal_errors import Errors
from tfmixed.audit.minimal_errors import number
from tfmixed.audit.minimal_units import Unit

_SHOWN = 6


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found.

    Args:
        kept: The units in float32.
        before: The errors without them.
        after: The errors with them.
        is_minimal: Whether each of them is known to be needed.
    """

    kept: Sequence[Unit]
    before: Errors
    after: Errors
    is_minimal: bool = True


def summary(
    name: str, bench: Bench, found: Found, tolerance: float, rows: int
) -> str:
    """Puts a search into a few lines.

    Args:
        name: Of the model.
        bench: What was measured on.
        found: What came out.
        tolerance: What was wanted.
        rows: On how many rows of data.
    """
    paths = [unit.path for unit in found.kept]
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    half = {layer for unit in bench.units for layer in unit.half}
    kept = {layer for unit in found.kept for layer in unit.half}
    measurements = "measurement" if bench.count == 1 else "measurements"
    lines = [
        f"Model '{name}' in {bench.policy} against float32, on {rows} rows, "
        f"tolerance {number(tolerance)}, {bench.count} {measurements}:",
        f"  As `prepare` makes it: {found.before}.",
    ]
    if kept:
        lines += [
            f"  With {len(kept)} of {len(half)} layers in float32: "
            f"{found.after}.",
            f"  In float32: {', '.join(paths[:_SHOWN])}{more}.",
        ]
    else:
        lines.append(f"  None of {len(half)} layers has to be in float32.")
    if not found.is_minimal:
        lines.append("  The limit was reached: fewer layers may do as well.")
    lines.append(f"  The loss is {bench.loss_kind}.")
    return "\n".join(lines)
