"""A reading in words and rows: what each layer's gradients need."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

import numpy as np

from tfmixed.audit import formats
from tfmixed.audit.tally import share_up_to
from tfmixed.audit.window import FLUSH_TOLERANCE
from tfmixed.audit.window import ScaleWindow
from tfmixed.audit.window import power
from tfmixed.health.columns import LOWEST_EXPONENT
from tfmixed.health.columns import Column
from tfmixed.health.columns import Part
from tfmixed.health.probe import Numbers
from tfmixed.health.probe import Reading
from tfmixed.health.probe import together

# The bounds of `tfmixed.DynamicLossScale`, as powers of two.
_EXPONENTS = range(25)
_FLOAT32_MAX = float(np.finfo("float32").max)


@dataclasses.dataclass(frozen=True)
class LayerHealth:
    """What was measured of one layer.

    Magnitudes are those of the unscaled gradients in float32, of the weights
    and, where a layer puts out 16 bits, of the outputs.

    Args:
        path: What the layer is called, unique in the model.
        dtype: What it puts out; None if that is no float.
        largest: Largest magnitude of its gradients.
        smallest: Smallest one that is not zero; None if all are.
        underflow: Share of the gradients, not zero in float32, that are zero
            in the step.
        overflow: Share that is finite in float32 and not in the step.
        norm: Euclidean norm of the gradients of its weights, in float32.
        error: Euclidean norm of what the step's gradients of its weights are
            off, relative to `norm`; infinite where one overflows.
        output_error: The same of its outputs.
        window: The loss scales that are safe for this layer alone; None if its
            gradients are not float16.
        exponents: Counts of magnitudes by binary exponent, from
            `lowest_exponent` on: at k those above 2^(k-1), up to 2^k.
    """

    path: str
    dtype: str | None
    largest: float
    smallest: float | None
    underflow: float
    overflow: float
    norm: float
    error: float
    output_error: float
    window: ScaleWindow | None
    exponents: np.ndarray
    lowest_exponent: int = LOWEST_EXPONENT


@dataclasses.dataclass(frozen=True)
class Health:
    """What one measurement says.

    Args:
        step: Number of the step.
        loss_scale: The scale that the step used.
        layers: A row for each layer with gradients.
        window: The loss scales that are safe for all layers; None if nothing
            computes in float16.
        upper: Path of the layer that limits the scale from above; None if
            none does.
        lower: Path of the layer that limits it from below.
    """

    step: int
    loss_scale: float
    layers: tuple[LayerHealth, ...]
    window: ScaleWindow | None
    upper: str | None
    lower: str | None

    def __str__(self) -> str:
        if self.window is None:
            return "Nothing computes in float16: no loss scale is needed."
        text = f"Safe loss scales: {self.window}"
        limits = []
        if self.upper is not None:
            limits.append(f"'{self.upper}' limits it from above")
        if self.lower is not None:
            limits.append(f"'{self.lower}' from below")
        text += f" ({', '.join(limits)})." if limits else "."
        where = "inside" if self.loss_scale in self.window else "outside"
        text += f" The scale {power(self.loss_scale)} is {where}"
        over = [row.path for row in self.layers if row.overflow]
        if over and where == "inside":
            return f"{text}, but the gradients of '{over[-1]}' overflow."
        return f"{text}."


def view(reading: Reading, step: int) -> Health:
    """Returns what a measurement says of each layer and of the scale.

    Args:
        reading: The measurement.
        step: Number of the step.
    """
    rows = []
    windows: dict[str, ScaleWindow] = {}
    room = _FLOAT32_MAX / (abs(reading.loss) or 1.0)
    for layer in reading.layers:
        row, numbers = _row(reading, layer)
        if row is None:
            continue
        if numbers:
            found = _window(together(numbers), room)
            row = dataclasses.replace(row, window=found)
            windows[row.path] = found
        rows.append(row)
    whole = upper = lower = None
    if windows:
        whole = _common(windows.values())
        upper, lower = _limits(windows)
    return Health(step, reading.scale, tuple(rows), whole, upper, lower)


def _row(
    reading: Reading, layer: Any
) -> tuple[LayerHealth | None, list[Numbers]]:
    """A row, and the numbers that float16 has to hold."""
    weights = reading.of(layer, Part.WEIGHTS)
    own = [
        (t, n)
        for t, n in zip(reading.tensors, reading.numbers, strict=True)
        if t.layer is layer and not t.passed_on and t.part is Part.GRADIENTS
    ]
    half = [n for t, n in own if t.dtype in ("float16", "bfloat16")]
    float16 = [n for t, n in own if t.dtype == "float16"]
    dtype = next((t.dtype for t, _ in own), None)
    if not weights[Column.SIZE] and not half:
        return None, []
    both = together([weights, *half])
    smallest = both[Column.SMALLEST]
    row = LayerHealth(
        path=reading.paths[id(layer)],
        dtype=dtype,
        largest=both[Column.LARGEST],
        smallest=smallest if math.isfinite(smallest) else None,
        underflow=both.share(Column.FLUSHED),
        overflow=both[Column.OVERFLOWED] / (both[Column.SIZE] or 1.0),
        norm=math.sqrt(weights[Column.SQUARES]),
        error=math.inf if weights[Column.OVERFLOWED] else weights.error,
        output_error=reading.of(layer, Part.OUTPUTS).error,
        window=None,
        exponents=both.exponents,
    )
    # The gradients of the weights are made by the same float16 kernels.
    return row, [weights, *float16] if float16 else []


def _window(numbers: Numbers, room: float) -> ScaleWindow:
    """The scales at which float16 holds these gradients."""
    limits = formats.get("float16")
    largest = numbers[Column.LARGEST]
    room = min(room, limits.overflow_from / (largest or 1e-30))
    flushed = round(math.log2(limits.flushed_up_to))
    high = [k for k in _EXPONENTS if 2.0**k < room]
    low = [
        k
        for k in _EXPONENTS
        if share_up_to(numbers.exponents, flushed - k, LOWEST_EXPONENT)
        <= FLUSH_TOLERANCE
    ]
    return ScaleWindow(
        2.0 ** min(low) if low else None, 2.0 ** max(high) if high else None
    )


def _common(windows: Collection[ScaleWindow]) -> ScaleWindow:
    """The scales that are in all of them."""
    lowest = [w.lowest for w in windows if w.lowest is not None]
    highest = [w.highest for w in windows if w.highest is not None]
    count = len(windows)
    return ScaleWindow(
        max(lowest) if len(lowest) == count else None,
        min(highest) if len(highest) == count else None,
    )


def _limits(windows: dict[str, ScaleWindow]) -> tuple[str | None, str | None]:
    """The layers that allow the smallest highest and need the highest lowest.

    None where every scale that is ever used would do.
    """
    highest = {p: w.highest or 0.0 for p, w in windows.items()}
    lowest = {
        p: math.inf if w.lowest is None else w.lowest
        for p, w in windows.items()
    }
    upper = min(highest, key=lambda path: highest[path])
    lower = max(lowest, key=lambda path: lowest[path])
    return (
        upper if highest[upper] < 2.0 ** _EXPONENTS[-1] else None,
        lower if lowest[lower] > 1.0 else None,
    )
