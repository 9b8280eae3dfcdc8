"""Why a step was not finite: calibration, a scale, a layer, or a bug."""

import dataclasses
import math
from typing import Any

from tfmixed.audit.window import power
from tfmixed.health.columns import Column
from tfmixed.health.columns import Part
from tfmixed.health.probe import Reading
from tfmixed.health.suspect import suspect
from tfmixed.health.view import view

DATA = "data"
FLOAT32 = "float32"
LAYER = "layer"
LOSS = "loss"
SCALE = "scale"
CALIBRATION = "calibration"
UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a step was not finite.

    Args:
        kind: `"data"` (NaN or infinity in the batch), `"float32"` (loss or
            gradients are not finite in float32 either: a bug or a divergence),
            `"layer"` (a layer overflows in 16 bits on the way forward, or its
            rounding makes gradients overflow that would fit in float32),
            `"loss"` (only the loss does), `"scale"` (gradients overflow at
            this scale, which will not fall), `"calibration"` (they do, and
            the scale falls to where they do not: ordinary), `"unknown"` (it
            did not happen again when the batch was measured).
        message: One sentence for a person.
        layer: The layer, operation or None.
        path: What it is called.
        highest_scale: The highest safe scale, where that is known.
        row: The first row of the batch with bad data, where there is one.
    """

    kind: str
    message: str
    layer: Any = None
    path: str | None = None
    highest_scale: float | None = None
    row: int | None = None


def cause_of(reading: Reading, algorithm: Any = None) -> Cause:
    """Returns why a batch gives a step that is not finite.

    Args:
        reading: The batch, measured.
        algorithm: What moves the loss scale; None if nothing does.
    """
    if reading.bad_data:
        return of_data(reading.bad_data, reading.bad_row)
    if not math.isfinite(reading.loss) or _bad_gradients(reading):
        what = "gradients are" if math.isfinite(reading.loss) else "loss is"
        return Cause(
            FLOAT32,
            f"the {what} not finite in float32 either: this is a bug or a "
            "divergence, not a matter of precision",
        )
    found = _first_broken(reading)
    if found is not None:
        path = reading.paths[id(found.layer)]
        message = f"'{path}' overflows in {found.dtype} on the way forward"
        return Cause(LAYER, message, found.layer, path)
    if not math.isfinite(reading.rough_loss):
        return Cause(LOSS, "only the loss overflows: compute it in float32")
    return _of_scale(reading, algorithm)


def of_data(count: int, row: int | None) -> Cause:
    """Returns the cause of a batch with bad data.

    Args:
        count: How many of its values are not finite.
        row: The first row with one.
    """
    values = "1 value is" if count == 1 else f"{count} values are"
    where = "" if row is None else f", first in row {row}"
    message = f"{values} NaN or infinite in the batch itself{where}"
    return Cause(DATA, message, row=row)


def _bad_gradients(reading: Reading) -> bool:
    return any(
        numbers[Column.BAD]
        for tensor, numbers in zip(
            reading.tensors, reading.numbers, strict=True
        )
        if tensor.part is Part.WEIGHTS
    )


def _first_broken(reading: Reading) -> Any:
    """The first output, in order, that is finite in float32 alone."""
    broken = [
        tensor
        for tensor, numbers in zip(
            reading.tensors, reading.numbers, strict=True
        )
        if tensor.part is Part.OUTPUTS
        and not numbers[Column.ALL_FINITE]
        and not numbers[Column.BAD]
    ]
    return min(broken, key=lambda tensor: tensor.call, default=None)


def _of_scale(reading: Reading, algorithm: Any) -> Cause:
    health = view(reading, 0)
    overflows = any(
        not numbers[Column.ALL_FINITE]
        for tensor, numbers in zip(
            reading.tensors, reading.numbers, strict=True
        )
        if tensor.part is not Part.OUTPUTS
    )
    if not overflows and math.isfinite(reading.rough_loss * reading.scale):
        return Cause(
            UNKNOWN, "it did not happen again when the batch was measured"
        )
    highest = health.window.highest if health.window else None
    if highest is not None and highest >= reading.scale:
        return _of_rounding(reading)
    layer = _layer(reading, health.upper)
    whose = f"of '{health.upper}' " if health.upper else ""
    message = f"gradients {whose}overflow at loss scale {power(reading.scale)}"
    if highest is not None:
        message += f"; up to {power(highest)} is safe"
    falls = (
        getattr(algorithm, "adapts", False)
        and highest is not None
        and highest >= getattr(algorithm, "minimum", 0.0)
    )
    if falls:
        message += ", and the scale falls there by itself: ordinary calibration"
    kind = CALIBRATION if falls else SCALE
    return Cause(kind, message, layer, health.upper, highest)


def _of_rounding(reading: Reading) -> Cause:
    """Gradients overflow where those of float32 would fit: somebody's error."""
    found = suspect(reading)
    path = None if found is None else found[0]
    message = (
        f"gradients overflow at loss scale {power(reading.scale)}, where those "
        "of float32 would fit"
    )
    if found is not None:
        message += f": '{path}' is ill-conditioned in 16 bits, {found[1]}"
    return Cause(LAYER, message, _layer(reading, path), path)


def _layer(reading: Reading, path: str | None) -> Any:
    layers = (x for x in reading.layers if reading.paths[id(x)] == path)
    return next(layers, None)
