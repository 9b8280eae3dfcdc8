"""Metrics that are held against what they are to be."""

import math
from collections.abc import Sequence
from typing import Any

# Less is better where a name has one of these in it.
_LESS = ("loss", "error", "mse", "mae", "mape", "msle", "rmse", "perplexity")


class StandardMissedError(RuntimeError):
    """A metric that was required is worse than the standard.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> guard = tfmixed.callbacks.PrecisionGuard(
    ...     "loss", required={"loss": 1e-9}, verbose=0
    ... )
    >>> x, y = np.ones((4, 2)), np.full((4, 1), 9.0)
    >>> try:
    ...     model.fit(x, y, verbose=0, callbacks=[guard])
    ... except tfmixed.callbacks.StandardMissedError:
    ...     print("not good enough")
    not good enough
    """


class Metric:
    """A metric in the logs of an epoch, and what it is to be.

    Args:
        name: Its name in the logs.
        baseline: Float, or a sequence with a value for each epoch, of which
            the last holds for all later ones; None to watch nothing.
        max_drop: Float, how much worse it may be.
        mode: `"max"`, `"min"` or `"auto"`.

    Raises:
        ValueError: If `max_drop` or `mode` is not one of these.
    """

    def __init__(
        self,
        name: str,
        baseline: float | Sequence[float] | None,
        max_drop: float,
        mode: str,
    ) -> None:
        if mode not in ("auto", "max", "min"):
            raise ValueError(
                f'`mode` is {mode!r}, but it must be "max" (more is better), '
                '"min" (less is better) or "auto" (by the name).'
            )
        if not math.isfinite(max_drop) or max_drop < 0:
            raise ValueError(
                f"`max_drop` is {max_drop!r}, but it says how much worse the "
                "metric may be: give a number of 0 or more."
            )
        self.name = name
        self._max_drop = max_drop
        self._less = less_is_better(name) if mode == "auto" else mode == "min"
        self._baseline: list[float] | None = None
        if baseline is not None:
            values = (
                list(baseline) if isinstance(baseline, Sequence) else [baseline]
            )
            if not values or not all(map(math.isfinite, values)):
                raise ValueError(
                    f"`baseline` is {baseline!r}, but it must be a finite "
                    "number, or one for each epoch."
                )
            self._baseline = [float(value) for value in values]

    def value(self, logs: dict[str, Any]) -> float | None:
        """Returns the metric; None if it is not to be watched.

        Raises:
            ValueError: If it is not in the logs.
        """
        if self._baseline is None:
            return None
        return value_of(self.name, logs)

    def target(self, epoch: int) -> float:
        """Returns what it is to be after an epoch."""
        values = self._baseline or [math.nan]
        return values[min(epoch, len(values) - 1)]

    def gain(self, before: float, after: float) -> float:
        """Returns by how much more than the allowed drop it became better."""
        difference = before - after if self._less else after - before
        return difference - self._max_drop

    def is_below(self, value: float, epoch: int) -> bool:
        """Returns whether it is worse than that by more than it may be."""
        drop = self.target(epoch) - value
        return not (-drop if self._less else drop) <= self._max_drop


class Progress:
    """Whether a metric that is worse than its baseline at least improves.

    Args:
        metric: The metric.

    Attributes:
        stalled: How many epochs in a row it was worse, and not better than
            ever before by more than the drop that is allowed.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._best: float | None = None
        self.stalled = 0

    def add(self, value: float, epoch: int) -> None:
        """Takes the metric of an epoch."""
        best = self._best
        improved = best is None or self._metric.gain(best, value) > 0
        if improved:
            self._best = value
        is_below = self._metric.is_below(value, epoch)
        self.stalled = self.stalled + 1 if is_below and not improved else 0


def less_is_better(name: str) -> bool:
    """Returns whether a metric of that name is better when it is less."""
    return any(part in name.lower() for part in _LESS)


def value_of(name: str, logs: dict[str, Any]) -> float:
    """Returns a metric from the logs of an epoch.

    Raises:
        ValueError: If it is not there; the message lists what is.
    """
    if name not in logs:
        known = ", ".join(sorted(logs)) or "nothing"
        raise ValueError(
            f"The logs have no '{name}': there is {known}. Add the metric to "
            "compile(metrics=[...]) by that name, and validation data for "
            "names that begin with 'val_'."
        )
    return float(logs[name])


Standard = float | tuple[str, float]


def check(required: dict[str, Standard], logs: dict[str, Any]) -> None:
    """Raises a StandardMissedError if the last epoch missed a standard.

    Args:
        required: The standards, by the name of the metric: a number, or a
            pair of `"max"` or `"min"` and a number.
        logs: The logs of the last epoch.
    """
    missed = []
    for name, standard in required.items():
        less, bound = _bound(name, standard)
        value = value_of(name, logs)
        if not (value <= bound if less else value >= bound):
            most = "at most" if less else "at least"
            missed.append(f"{name} is {value:.6g}, required {most} {bound:g}")
    if missed:
        raise StandardMissedError(
            f"The training has missed its standard: {'; '.join(missed)}."
        )


def checked(required: dict[str, Standard] | None) -> dict[str, Standard]:
    """Returns the standards, or raises a ValueError if one is none."""
    for name, standard in (required or {}).items():
        _bound(name, standard)
    return dict(required or {})


def _bound(name: str, standard: Standard) -> tuple[bool, float]:
    """Whether less is better, and the number to reach."""
    less = less_is_better(name)
    if isinstance(standard, tuple) and len(standard) == 2:
        mode, standard = standard
        if mode not in ("max", "min"):
            standard = math.nan
        less = mode == "min"
    is_number = isinstance(standard, int | float)
    if not is_number or not math.isfinite(standard):
        raise ValueError(
            f"`required` has {standard!r} for '{name}': give a number, or "
            '("max", number) where more is better and ("min", number) where '
            "less is."
        )
    return less, float(standard)


def count(name: str, value: Any, least: int) -> int:
    """Returns a whole number, or raises.

    Raises:
        ValueError: If it is none, or less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"`{name}` is {value!r}, but it is a count: give a whole number "
            f"of {least} or more."
        )
    return value
