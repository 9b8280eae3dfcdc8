"""When 16 bits are too few for a layer, and when they would do again."""

import dataclasses
import math
from typing import Any

from tfmixed.health.alone import Alone


@dataclasses.dataclass(frozen=True)
class Move:
    """A layer that changed its precision.

    Args:
        epoch: Number of the epoch at whose end, as `fit` counts; None for
            before the first step.
        path: What the layer is called.
        before: What it computed in.
        after: What it computes in from now on.
        reason: What was measured, in words.
        measured: The numbers, each the middle one of the epoch.
    """

    epoch: int | None
    path: str
    before: str
    after: str
    reason: str
    measured: Alone

    def __str__(self) -> str:
        when = "at the start"
        if self.epoch is not None:
            when = f"epoch {self.epoch + 1}"
        return (
            f"{when}: '{self.path}' {self.before} → {self.after}, {self.reason}"
        )


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of `AdaptivePrecision`; see there."""

    up: float
    down: float
    underflow: float
    overflow: float

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 <= value < math.inf
            ):
                raise ValueError(
                    f"AdaptivePrecision: `{name}` is {value!r}, but it is a "
                    "limit for a share: give a number of 0 or more."
                )
        if not 0 < self.down < self.up:
            raise ValueError(
                f"AdaptivePrecision: `down` is {self.down!r} and `up` is "
                f"{self.up!r}, but a layer has to be better to come back than "
                "to stay: give 0 < down < up, for example down=0.1, up=0.3."
            )

    def strain(self, measured: Alone) -> float:
        """Returns how far above its limits a layer is: above 1, or not."""
        return max(
            _ratio(measured.error, self.up),
            _ratio(measured.underflow, self.underflow),
            _ratio(measured.overflow, self.overflow),
        )

    def is_quiet(self, measured: Alone) -> bool:
        """Whether 16 bits would do, with room to spare."""
        return self.strain(measured) < self.down / self.up

    def reason(self, measured: Alone) -> str:
        """Returns which limits a layer is above, in words."""
        found = []
        if measured.error > self.up:
            found.append(
                f"its {measured.part} are off by {measured.error:.2g} (more "
                f"than {self.up:g})"
            )
        for name in ("underflow", "overflow"):
            share, limit = getattr(measured, name), getattr(self, name)
            if share > limit:
                found.append(f"{name} {share:.2%} (more than {limit:.2%})")
        return "; ".join(found)


def middle(found: list[Alone]) -> Alone:
    """Returns the middle of several measurements, number by number.

    Of an even count the lower one: what is seen in half of them is no rule.
    """
    where = (len(found) - 1) // 2
    by_error = sorted(found, key=lambda one: one.error)[where]
    return dataclasses.replace(
        by_error,
        underflow=sorted(one.underflow for one in found)[where],
        overflow=sorted(one.overflow for one in found)[where],
    )


def check_counts(**counts: Any) -> None:
    """Raises a ValueError for an argument that counts nothing."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"AdaptivePrecision: `{name}` is {value!r}, but it is a "
                "number of things: give a whole number of 1 or more."
            )


def _ratio(value: float, limit: float) -> float:
    if limit:
        return value / limit
    return math.inf if value else 0.0
