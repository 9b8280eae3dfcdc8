"""A loss scale that a person lays down beforehand, step by step."""

import dataclasses
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfmixed import loss_scale as lib
from tfmixed.loss_scale import LossScale
from tfmixed.loss_scale import LossScaleState
from tfmixed.loss_scale import StepOutcome

# float32, in which the steps are counted, holds every whole number up to here.
MAX_STEP = 2**24

_FORM = "Give {step: scale}, for example {0: 2.0**18, 10_000: 2.0**15}."


@keras.saving.register_keras_serializable(package="tfmixed")
@dataclasses.dataclass(frozen=True)
class ScheduledLossScale(LossScale):
    """A scale that follows a schedule as far as the steps stay finite.

    For a training that was seen before: the scale starts where it is known to
    work and changes where it is known to have to. Steps are counted as they
    are taken, skipped ones included.

    A schedule that is too high would skip every step from there on, so it is
    a ceiling. A non-finite step multiplies the scale by `backoff_factor`, and
    `growth_interval` finite steps in a row double it again, up to the
    scheduled value. At each point of the schedule the scale becomes the
    scheduled value, whatever happened before.

    Args:
        points: Mapping from a step to the scale from that step on, or pairs
            of the two. One of them is step 0.
        growth_interval: Integer, finite steps in a row before a scale below
            the schedule is doubled.
        backoff_factor: Float in (0, 1).
        minimum: Float above 0, the floor; no scheduled scale is below it.

    Raises:
        ValueError: If an argument is out of its range; the message names it.

    Example:

    >>> points = {0: 2.0**18, 10_000: 2.0**15}
    >>> scale = tfmixed.ScheduledLossScale(points)
    >>> scale.initial
    262144.0
    """

    points: Any
    growth_interval: int = 2000
    backoff_factor: float = 0.5
    minimum: float = 1.0
    adapts = True

    def __post_init__(self) -> None:
        owner = "ScheduledLossScale"
        for name, read in (
            ("growth_interval", lib.count),
            ("backoff_factor", lib.backoff),
            ("minimum", lib.positive),
        ):
            lib.set_field(self, name, read(owner, name, getattr(self, name)))
        points = _points(self.points)
        for step, scale in points:
            if scale < self.minimum:
                raise ValueError(
                    f"{owner}: the scale at step {step} is {scale}, which is "
                    f"below `minimum` ({self.minimum}). Raise the one or "
                    "lower the other."
                )
        lib.set_field(self, "points", points)

    @property
    def initial(self) -> float:  # type: ignore[override]
        """The scale at step 0."""
        return self.points[0][1]

    def initial_state(self) -> LossScaleState:
        """Returns the state before the first step; it remembers the step."""
        return LossScaleState(self.initial, 0, 0, (0.0,))

    def update(
        self, state: LossScaleState, outcome: StepOutcome
    ) -> LossScaleState:
        """Returns the state after a step; see the class for the rule."""
        _, good_steps, bad_steps, memory = super().update(state, outcome)
        before = tf.cast(memory[0], tf.float32)
        now = before + 1.0
        ceiling = tf.gather(
            tf.constant([scale for _, scale in self.points]), self._index(now)
        )
        new_point = self._index(now) > self._index(before)
        grow = good_steps >= self.growth_interval
        lowered = tf.maximum(state.scale * self.backoff_factor, self.minimum)
        grown = tf.where(grow, state.scale * 2.0, state.scale)
        scale = tf.where(outcome.finite, grown, lowered)
        return LossScaleState(
            scale=tf.where(new_point, ceiling, tf.minimum(scale, ceiling)),
            good_steps=tf.where(
                grow | new_point, tf.zeros_like(good_steps), good_steps
            ),
            bad_steps=bad_steps,
            memory=(now,),
        )

    def _index(self, step: Any) -> Any:
        """Returns which of the points is in force at `step`."""
        starts = tf.constant([float(start) for start, _ in self.points])
        return tf.reduce_sum(tf.cast(starts <= step, tf.int32)) - 1

    def clip(self, scale: float) -> float:
        """Returns `scale` between the floor and the highest point."""
        if scale != scale:
            return self.initial
        highest = max(point for _, point in self.points)
        return min(max(scale, self.minimum), highest)

    def at_floor(self, scale: float) -> bool:
        """Returns whether `scale` is at `minimum`."""
        return scale <= self.minimum

    def remedy(self, scale: float) -> str:
        """Returns what to do if steps are skipped again and again."""
        return f"lower the schedule there, to {scale:g} or less"

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments; points as lists, which JSON leaves alone."""
        points = [list(point) for point in self.points]
        return {**super().get_config(), "points": points}


def _points(points: Any) -> tuple[tuple[int, float], ...]:
    """Returns the points as pairs in the order of their steps, or raises."""
    owner = "ScheduledLossScale"
    given = points.items() if isinstance(points, Mapping) else points
    pairs = _pairs(given)
    if not pairs:
        raise ValueError(f"{owner}: `points` is empty. {_FORM}")
    read = sorted(
        (_step(step), lib.positive(owner, f"points[{step!r}]", scale))
        for step, scale in pairs
    )
    steps = [step for step, _ in read]
    for step, following in zip(steps, steps[1:], strict=False):
        if step == following:
            raise ValueError(
                f"{owner}: `points` has two scales for step {step}. Keep one "
                "of them."
            )
    if steps[0] != 0:
        raise ValueError(
            f"{owner}: `points` begins at step {steps[0]}, so nothing says "
            f"how to start. Add a scale for step 0. {_FORM}"
        )
    return tuple(read)


def _pairs(given: Any) -> list[tuple[Any, Any]]:
    try:
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise TypeError
        return [(step, scale) for step, scale in given]
    except (TypeError, ValueError):
        raise ValueError(
            f"ScheduledLossScale: `points` is {given!r}, which is neither a "
            f"mapping nor a list of pairs. {_FORM}"
        ) from None


def _step(value: Any) -> int:
    """Returns a step as a whole number; JSON makes strings of keys."""
    number = value
    if isinstance(value, str) and value.isascii() and value.isdigit():
        number = int(value)
    if (
        not lib.is_number(number)
        or not float(number).is_integer()
        or number < 0
    ):
        raise ValueError(
            f"ScheduledLossScale: `points` has the step {value!r}, but steps "
            f"are whole numbers from 0 on. {_FORM}"
        )
    if number > MAX_STEP:
        raise ValueError(
            f"ScheduledLossScale: `points` has the step {value!r}, but steps "
            f"are counted in float32, which is exact up to {MAX_STEP} only. "
            "Leave later points out."
        )
    return int(number)
