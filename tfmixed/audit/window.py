"""The window of loss scales: high enough for gradients to live, not higher."""

import dataclasses
import math

import numpy as np

from tfmixed.audit import formats
from tfmixed.audit import tally
from tfmixed.audit.rows import Table
from tfmixed.audit.step import Observation

# A scale is high enough if it leaves no more of the gradients at zero: the
# share of all values, not zero in float32, that a cast to float16 flushes.
FLUSH_TOLERANCE = 0.01
# The bounds of `tfmixed.DynamicLossScale`, as powers of two.
_EXPONENTS = range(25)
_FLOAT32_MAX = float(np.finfo("float32").max)


@dataclasses.dataclass(frozen=True)
class ScaleWindow:
    """The loss scales, powers of two from 1 to 2^24, that are safe.

    Args:
        lowest: The smallest scale at which at most `FLUSH_TOLERANCE` of the
            gradients become zero in float16; None if there is none.
        highest: The largest scale at which nothing in the backward pass
            overflows, the scaled loss included; None if there is none.
    """

    lowest: float | None
    highest: float | None

    @property
    def exists(self) -> bool:
        """Whether any scale is safe."""
        return (
            self.lowest is not None
            and self.highest is not None
            and self.lowest <= self.highest
        )

    def __contains__(self, scale: float) -> bool:
        return (
            self.lowest is not None
            and self.highest is not None
            and self.lowest <= scale <= self.highest
        )

    def __str__(self) -> str:
        if self.exists:
            return f"{power(self.lowest or 0)} to {power(self.highest or 0)}"
        low, high = "at every scale", "at every scale"
        if self.lowest is not None:
            low = f"below {power(self.lowest)}"
        if self.highest is not None:
            high = f"above {power(self.highest)}"
        return f"none, because gradients overflow {high} and vanish {low}"


def power(scale: float) -> str:
    """Writes a loss scale, as a power of two where it is one."""
    exponent = math.log2(scale) if scale > 0 else math.nan
    if scale < 1024 or not exponent.is_integer():
        return f"{scale:g}"
    return f"2^{int(exponent)}"


def window_of(
    table: Table, largest_loss: float, unscaled: Observation
) -> ScaleWindow:
    """Returns the window that follows from what was measured.

    Args:
        table: What was measured. Only gradients of layers that put out float16
            are held against its limits.
        largest_loss: The largest magnitude of the loss, not scaled.
        unscaled: A run under the judged policy without a loss scale. Its
            gradients may be larger: in float32 a probability is not rounded
            before it is divided by.
    """
    exponents = np.zeros_like(tally.Tally().exponents)
    largest = max(
        (
            tally.largest(gradient)
            for record in unscaled.records
            for gradient in record.gradients
            if gradient is not None and record.dtype == "float16"
        ),
        default=0.0,
    )
    for measured in table:
        if measured.dtype != "float16":
            continue
        kinds = [measured.weight_gradients]
        if not measured.passes_on:
            kinds.append(measured.output_gradients)
        for found in kinds:
            exponents += found.exponents
            largest = max(largest, found.largest or 0.0)
    limit = formats.get("float16").overflow_from
    flushed = round(math.log2(formats.get("float16").flushed_up_to))
    room = min(limit / (largest or 1e-30), _FLOAT32_MAX / (largest_loss or 1.0))
    high = [k for k in _EXPONENTS if 2.0**k < room]
    low = [
        k
        for k in _EXPONENTS
        if tally.share_up_to(exponents, flushed - k) <= FLUSH_TOLERANCE
    ]
    return ScaleWindow(
        2.0 ** min(low) if low else None, 2.0 ** max(high) if high else None
    )
