"""How numbers are written in tables and sentences."""

from collections.abc import Callable
from typing import Any

from tfmixed.report.intervals import Interval


def number(value: float, percent: bool = False) -> str:
    """Writes a number with as many digits as a reader can use.

    Args:
        value: any number.
        percent: whether a share of one is written in percent.

    Returns:
        For example `"95.3 %"`, `"485"`, `"2.14"`.
    """
    if percent:
        return f"{100 * value:.1f} %"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"


def ratio(value: float) -> str:
    """Writes a ratio with two decimals.

    Args:
        value: any number.

    Returns:
        For example `"1.49"`.
    """
    return f"{value:.2f}"


def span(interval: Interval, write: Callable[..., str], *options: Any) -> str:
    """Writes an interval.

    Args:
        interval: `(low, high)`.
        write: writes each end.
        *options: further arguments of `write`.

    Returns:
        For example `"1.45 to 1.52"`.
    """
    low, high = (write(end, *options) for end in interval)
    if low.endswith(" %"):
        low = low.removesuffix(" %")
    return f"{low} to {high}"
