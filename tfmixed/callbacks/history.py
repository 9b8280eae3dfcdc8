"""Step records, summed up: for an epoch, and in one line for a training."""

import dataclasses
import math

import numpy as np

from tfmixed.telemetry import Rows

NO_ROWS = Rows(
    np.zeros(0, "int64"),
    np.zeros(0, "float32"),
    np.zeros(0, "bool"),
    np.zeros(0, "float32"),
)


@dataclasses.dataclass
class Epoch:
    """What the steps of one epoch did.

    Args:
        steps: How many there were, skipped ones included.
        skipped: How many of them were not finite.
        loss_scale: What the last one used.
        norms: Sum of the norms of the finite ones.
    """

    steps: int = 0
    skipped: int = 0
    loss_scale: float = math.nan
    norms: float = 0.0

    def add(self, rows: Rows) -> None:
        """Counts steps."""
        if not len(rows.step):
            return
        self.steps += len(rows.step)
        self.skipped += int(np.sum(~rows.finite))
        self.loss_scale = float(rows.loss_scale[-1])
        finite = rows.gradient_norm[rows.finite]
        self.norms += float(np.sum(finite, dtype="float64"))

    def logs(self) -> dict[str, float]:
        """Returns what goes into the logs of the epoch."""
        applied = self.steps - self.skipped
        return {
            "loss_scale": self.loss_scale,
            "skipped_steps": self.skipped,
            "gradient_norm": self.norms / applied if applied else math.nan,
        }


@dataclasses.dataclass
class Summary:
    """One line on a whole training.

    Args:
        skips: Whether the optimizer skips steps that are not finite.
        steps: How many there were.
        skipped: How many of them were not finite.
        first_scale: What the first one used.
        last_scale: What the last one used.
        last_skip: Position of the last that was skipped, from 1.
    """

    skips: bool = True
    steps: int = 0
    skipped: int = 0
    first_scale: float = math.nan
    last_scale: float = math.nan
    last_skip: int = 0

    def add(self, rows: Rows) -> None:
        """Counts steps."""
        if not len(rows.step):
            return
        if not self.steps:
            self.first_scale = float(rows.loss_scale[0])
        bad = np.flatnonzero(~rows.finite)
        if len(bad):
            self.last_skip = self.steps + int(bad[-1]) + 1
        self.steps += len(rows.step)
        self.skipped += len(bad)
        self.last_scale = float(rows.loss_scale[-1])

    def __str__(self) -> str:
        steps = f"{self.steps:,} {'step' if self.steps == 1 else 'steps'}"
        what = "skipped" if self.skips else "not finite"
        if self.skipped:
            told = f"{self.skipped:,} of {steps} {what}"
            if self.last_skip <= self.steps // 2:
                only = self.last_skip == 1
                told += (
                    ", the first"
                    if only
                    else f", all in the first {self.last_skip:,}"
                )
            if not self.skips:
                told += " (and applied: this optimizer does not skip)"
        else:
            told = f"None of {steps} {what}"
        if self.first_scale == self.last_scale:
            return f"{told}; loss scale {self.last_scale:.10g}."
        scales = f"{self.first_scale:.10g} → {self.last_scale:.10g}"
        return f"{told}; loss scale {scales}."
