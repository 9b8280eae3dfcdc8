"""Times of steps, summed up: for an epoch, and in one line for a training."""

import math
from typing import Any
from typing import NamedTuple

import numpy as np
import psutil
import tensorflow as tf

_MEGABYTE = 1e6


class Execution(NamedTuple):
    """One call of the train function; NaN is what could not be measured.

    Args:
        step: Number of its first step.
        steps: How many it had.
        step_ms: Milliseconds of one of them.
        examples: How many they saw together.
        input_wait: Share of the time spent waiting for input, 0 to 1.
        memory_mb: Memory, as last measured.
    """

    step: int
    steps: int
    step_ms: float
    examples: float
    input_wait: float
    memory_mb: float

    @property
    def seconds(self) -> float:
        """What the whole execution took."""
        return self.step_ms * self.steps / 1e3


class Times:
    """Sums up executions."""

    def __init__(self) -> None:
        self.steps = 0
        self._times: list[float] = []
        self._counts: list[int] = []
        self._seconds = 0.0
        self._examples = 0.0
        self._waited = 0.0
        self._memory = math.nan

    def add(self, execution: Execution) -> None:
        """Counts an execution."""
        self.steps += execution.steps
        self._times.append(execution.step_ms)
        self._counts.append(execution.steps)
        self._seconds += execution.seconds
        self._examples += execution.examples
        self._waited += execution.input_wait * execution.seconds

    def add_memory(self, megabytes: float) -> None:
        """Remembers the most."""
        self._memory = float(np.fmax(self._memory, megabytes))

    def logs(self) -> dict[str, float]:
        """Returns what was measured, by its name in the logs."""
        found = {"memory_mb": self._memory}
        if self._times:
            each_step = np.repeat(self._times, self._counts)
            found = {
                "step_ms": float(np.median(each_step)),
                "examples_per_second": self._examples / self._seconds,
                "input_wait": self._waited / self._seconds,
                **found,
            }
        return {k: v for k, v in found.items() if not math.isnan(v)}


class Memory:
    """Measures the memory that a training takes.

    On GPUs it is the peak of TensorFlow's allocator, since the program began,
    of the GPU that has the highest; without one the memory of the process
    that is resident now.
    """

    def __init__(self) -> None:
        devices = tf.config.list_logical_devices("GPU")
        self._gpus = [f"GPU:{index}" for index in range(len(devices))]
        self._process = psutil.Process()
        self.kind = "GPU memory at the peak" if self._gpus else "resident"

    def megabytes(self) -> float:
        """Measures, in MB of a million bytes; NaN where it is not possible."""
        if not self._gpus:
            return float(self._process.memory_info().rss) / _MEGABYTE
        try:
            peaks = [
                tf.config.experimental.get_memory_info(name)["peak"]
                for name in self._gpus
            ]
        except ValueError:
            # An allocator that does not count.
            return math.nan
        return max(peaks) / _MEGABYTE or math.nan


def columns(executions: list[Execution]) -> dict[str, np.ndarray]:
    """Returns executions as arrays; none for what was never measured."""
    found = {}
    for name, kind in Execution.__annotations__.items():
        dtype = "int64" if kind is int else "float64"
        values = [getattr(execution, name) for execution in executions]
        column = np.array(values, dtype)
        if not len(column) or not np.isnan(column).all():
            found[name] = column
    return found


def row(execution: Execution) -> list[Any]:
    """Returns the cells of an execution; empty is what was not measured."""
    return ["" if math.isnan(value) else value for value in execution]


def describe(
    steps: int, first_seconds: float, logs: dict[str, float], memory: str
) -> str:
    """Returns one line on a training.

    Args:
        steps: How many there were, the first included.
        first_seconds: What the first execution took.
        logs: What `Times` has of the others.
        memory: What kind of memory is in it.

    Example:

    >>> describe(1, 2.14, {"memory_mb": 812.3}, "resident")
    '1 step: first 2.1 s, 812 MB resident.'
    """
    parts = [f"first {_duration(first_seconds)}"]
    if "step_ms" in logs:
        parts = [f"median {_duration(logs['step_ms'] / 1e3)} ({parts[0]})"]
    if "examples_per_second" in logs:
        parts.append(f"{logs['examples_per_second']:,.0f} examples/s")
    if "input_wait" in logs:
        share = f"{100 * logs['input_wait']:.0f} %"
        parts.append(f"{share} of the time waiting for input")
    if "memory_mb" in logs:
        parts.append(f"{logs['memory_mb']:,.0f} MB {memory}")
    return f"{steps:,} step{'s'[: steps != 1]}: {', '.join(parts)}."


def _duration(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:,.1f} s"
