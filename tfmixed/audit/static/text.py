"""Where in the user's program a TensorFlow operation comes from."""

import linecache
import os
import re
from typing import Any

import numpy as np

# Frames in these packages say nothing about where the user's own line is.
_INSIDE = ("tensorflow", "keras", "tfmixed", "numpy", "optree")
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LAYERS = os.path.join("keras", "src", "layers")
# Those of Keras that only pass on a call.
_PASSING = ("layer.py",)
_NUMBER = re.compile(
    r"(?<![\w.])\d+\.?\d*(?:[eE][+-]?\d+)?(?![\w.])|(?<![\w.])\.\d+"
)


def user_frame(operation: Any) -> Any:
    """The line of the user's own code that made an operation.

    None where a layer of Keras made it: the innermost frame that is not part
    of a backend decides.
    """
    for frame in reversed(operation.traceback):
        if not _is_inside(frame.filename):
            return frame
        folder, name = os.path.split(frame.filename)
        if _LAYERS in folder and name not in _PASSING:
            return None
    return None


def _is_inside(filename: str) -> bool:
    parts = filename.split(os.sep)
    if parts[-1].startswith("__autograph_generated"):
        return True
    if filename.startswith(_OURS + os.sep):
        return True
    return "site-packages" in parts and any(name in parts for name in _INSIDE)


def location(frame: Any) -> str:
    """`nets.py:31`, as messages name a line."""
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"


def source_line(frame: Any) -> str:
    """The text of the line; empty where the source is not there."""
    return linecache.getline(frame.filename, frame.lineno).strip()


def numbers_in(line: str) -> list[float]:
    """The number literals in a line of source."""
    return [float(text) for text in _NUMBER.findall(line)]


def becomes(value: Any, dtype: str) -> float | None:
    """What a number becomes in a format, if that is infinity or zero.

    Args:
        value: A finite number.
        dtype: `"float16"` or `"bfloat16"`.

    Returns:
        An infinity, 0.0, or None where the format holds the number.

    Example:

    >>> becomes(-1e9, "float16")
    -inf
    """
    # The half of a step above the largest number, and half of the smallest.
    largest, smallest = {
        "float16": (65520.0, 2.0**-25),
        "bfloat16": (2.0**128 - 2.0**119, 2.0**-134),
    }[dtype]
    value = float(value)
    if not np.isfinite(value):
        return None
    if abs(value) >= largest:
        return float(np.copysign(np.inf, value))
    if value != 0 and abs(value) <= smallest:
        return 0.0
    return None
