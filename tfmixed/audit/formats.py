"""The 16-bit formats: their limits, and what a cast does to numbers.

Everything is computed with exact arithmetic in float64, so nothing here
depends on how a device casts. A cast rounds to nearest, ties to even.
"""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Format:
    """The numbers that a floating-point format can hold.

    Args:
        name: As TensorFlow and Keras call it.
        precision: Bits of the significand, the implicit one included.
        largest: The largest finite number.
        smallest_normal: The smallest number held with full precision.
        smallest_subnormal: The smallest number above zero. Some hardware
            flushes the subnormal numbers of bfloat16 to zero, as it does with
            those of float32, which begin at the same place.
    """

    name: str
    precision: int
    largest: float
    smallest_normal: float
    smallest_subnormal: float

    @property
    def overflow_from(self) -> float:
        """The smallest number that a cast turns into infinity.

        Half a unit in the last place above `largest`: 65520 for float16. The
        tie goes to the even neighbour, which is the infinite one.
        """
        exponent = np.frexp(self.largest)[1]
        return self.largest + float(2.0 ** (exponent - self.precision - 1))

    @property
    def flushed_up_to(self) -> float:
        """The largest number that a cast turns into zero: a tie, to even."""
        return self.smallest_subnormal / 2

    @property
    def normal_from(self) -> float:
        """The smallest number that a cast turns into a normal one."""
        return self.smallest_normal - self.smallest_subnormal / 2


FORMATS = {
    "float16": Format("float16", 11, 65504.0, 2.0**-14, 2.0**-24),
    "bfloat16": Format(
        "bfloat16", 8, (2.0 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133
    ),
}


@dataclasses.dataclass(frozen=True)
class Shares:
    """What a cast does to numbers, as shares of those finite and not zero.

    Args:
        overflow: Becomes infinite.
        subnormal: Loses precision, because it becomes subnormal.
        flushed: Becomes zero.
        count: How many numbers were finite and not zero.
    """

    overflow: float = 0.0
    subnormal: float = 0.0
    flushed: float = 0.0
    count: float = 0

    def __add__(self, other: "Shares") -> "Shares":
        """The shares of both sets of numbers together."""
        count = self.count + other.count
        if not count:
            return self

        def mean(one: float, two: float) -> float:
            return (one * self.count + two * other.count) / count

        return Shares(
            mean(self.overflow, other.overflow),
            mean(self.subnormal, other.subnormal),
            mean(self.flushed, other.flushed),
            count,
        )


def get(dtype: Any) -> Format:
    """Returns the format of that name.

    Args:
        dtype: `"float16"`, `"bfloat16"` or a dtype of that name.

    Raises:
        ValueError: For any other dtype.
    """
    name = getattr(dtype, "name", dtype)
    if name not in FORMATS:
        raise ValueError(
            f"No 16-bit format is called {name!r}. Expected one of "
            f"{sorted(FORMATS)}."
        )
    return FORMATS[name]


def shares(values: Any, dtype: Any, scale: float = 1.0) -> Shares:
    """Returns what a cast to `dtype` does to `values * scale`.

    Args:
        values: Array of numbers. Zeros, infinities and NaN count for nothing.
        dtype: `"float16"` or `"bfloat16"`.
        scale: What the values are multiplied with before the cast.
    """
    limits = get(dtype)
    sizes = np.abs(np.asarray(values, "float64").ravel()) * scale
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    count = sizes.size
    if not count:
        return Shares()
    flushed = np.count_nonzero(sizes <= limits.flushed_up_to)
    below_normal = np.count_nonzero(sizes < limits.normal_from)
    overflow = np.count_nonzero(sizes >= limits.overflow_from)
    return Shares(
        float(overflow / count),
        float((below_normal - flushed) / count),
        float(flushed / count),
        count,
    )


def rounded(values: Any, dtype: Any) -> np.ndarray:
    """Returns float64 values rounded to what `dtype` can hold.

    Args:
        values: Array of numbers.
        dtype: `"float16"` or `"bfloat16"`.
    """
    limits = get(dtype)
    values = np.asarray(values, "float64")
    exponents = np.frexp(values)[1]
    lowest = np.frexp(limits.smallest_normal)[1]
    spacing = np.ldexp(1.0, np.maximum(exponents, lowest) - limits.precision)
    with np.errstate(invalid="ignore"):
        result = np.rint(values / spacing) * spacing
    too_large = np.abs(values) >= limits.overflow_from
    return np.where(too_large, np.copysign(np.inf, values), result)


def rounding_error(values: Any, dtype: Any, scale: float = 1.0) -> float:
    """Returns the relative error of a cast, in the Euclidean norm.

    What becomes infinite is left out: that is no rounding.

    Args:
        values: Array of numbers.
        dtype: `"float16"` or `"bfloat16"`.
        scale: What the values are multiplied with before the cast.
    """
    values = np.asarray(values, "float64").ravel() * scale
    after = rounded(values, dtype)
    kept = np.isfinite(after)
    norm = np.linalg.norm(values[kept])
    if norm == 0:
        return 0.0
    return float(np.linalg.norm(after[kept] - values[kept]) / norm)
