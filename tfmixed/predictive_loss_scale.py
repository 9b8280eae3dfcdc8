"""A loss scale that foresees overflow instead of suffering it."""

import dataclasses
import math
from typing import Any

import keras
import tensorflow as tf

from tfmixed import loss_scale as lib
from tfmixed.loss_scale import LossScale
from tfmixed.loss_scale import LossScaleState
from tfmixed.loss_scale import StepOutcome

_FLOAT16_MAX = 65504.0
# The smallest normal number: smaller ones may be flushed to 0 in a logarithm.
_FLOAT32_TINY = 2.0**-126


@keras.saving.register_keras_serializable(package="tfmixed")
@dataclasses.dataclass(frozen=True)
class PredictiveLossScale(LossScale):
    """A scale set from statistics of the largest gradient of each step.

    Let G be log2 of the largest magnitude among all unscaled gradients, and
    mean and deviation its exponentially weighted statistics. The next scale
    is the power of two just below

        65504 / 2^(headroom + mean + deviations * deviation)

    so that gradients may grow by the power of two `headroom`, and beyond that
    by as much as they have lately been seen to, before one overflows. It
    follows the gradients up and down at once, without a skipped step.

    The method is LogMax (Kuchaiev et al., 2018, "Mixed-Precision Training for
    NLP and Speech Recognition with OpenSeq2Seq",
    https://arxiv.org/abs/1805.10387), with the headroom added. Only the
    gradients of weights are seen, and inside the backward pass larger ones may
    occur. So there is a ceiling as well, which moves like
    `tfmixed.DynamicLossScale`: a non-finite step puts it at the scale of that
    step times `backoff_factor`, and `growth_interval` finite steps in a row
    double it. Gradients that are all 0 teach nothing.

    Args:
        initial: Float, the scale until the statistics are trusted. It is only
            lowered then, by non-finite steps.
        beta: Float in (0, 1), the weight of the past in the statistics; they
            look back about `1 / (1 - beta)` steps.
        deviations: Float of 0 or more, how many standard deviations of G
            above its mean are to fit.
        headroom: Float of 0 or more, the powers of two left free above that.
        warm_up: Integer, the finite steps after which the statistics are
            trusted.
        backoff_factor: Float in (0, 1).
        growth_interval: Integer, finite steps in a row before the ceiling
            rises.
        minimum: Float above 0, the floor.
        maximum: Float, the highest ceiling.

    Raises:
        ValueError: If an argument is out of its range; the message names it.

    Example:

    >>> scale = tfmixed.PredictiveLossScale(warm_up=1, headroom=0.0)
    >>> optimizer = tfmixed.LossScaleOptimizer("sgd", scale)
    >>> weight = keras.Variable(1.0)
    >>> optimizer.build([weight])
    >>> scaled = optimizer.scale_loss(2.0)
    >>> optimizer.apply([2.0 * optimizer.dynamic_scale.value])
    >>> float(optimizer.dynamic_scale)
    16384.0
    """

    initial: float = 2.0**15
    beta: float = 0.99
    deviations: float = 3.0
    headroom: float = 2.0
    warm_up: int = 20
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    minimum: float = 1.0
    maximum: float = 2.0**24
    uses_largest = True
    adapts = True

    def __post_init__(self) -> None:
        owner = "PredictiveLossScale"
        for name, read in (
            ("initial", lib.positive),
            ("beta", _weight),
            ("deviations", _not_negative),
            ("headroom", _not_negative),
            ("warm_up", lib.count),
            ("backoff_factor", lib.backoff),
            ("growth_interval", lib.count),
            ("minimum", lib.positive),
            ("maximum", lib.positive),
        ):
            lib.set_field(self, name, read(owner, name, getattr(self, name)))
        lib.check_bounds(owner, self.initial, self.minimum, self.maximum)

    def initial_state(self) -> LossScaleState:
        """Returns the state before the first step.

        In memory: mean and variance of G, the number of steps they are made
        of, and the ceiling.
        """
        return LossScaleState(self.initial, 0, 0, (0.0, 0.0, 0.0, self.maximum))

    def update(
        self, state: LossScaleState, outcome: StepOutcome
    ) -> LossScaleState:
        """Returns the state after a step; see the class for the rule."""
        _, good_steps, bad_steps, memory = super().update(state, outcome)
        mean, variance, steps, ceiling = (
            tf.cast(scalar, tf.float32) for scalar in memory
        )
        mean, variance, steps = self._observe(mean, variance, steps, outcome)
        grow = good_steps >= self.growth_interval
        lowered = state.scale * self.backoff_factor
        risen = tf.where(grow, ceiling * 2.0, ceiling)
        ceiling = tf.where(outcome.finite, risen, lowered)
        ceiling = tf.clip_by_value(ceiling, self.minimum, self.maximum)
        wanted = tf.where(
            steps >= self.warm_up,
            self._prediction(mean, variance),
            tf.cast(state.scale, tf.float32),
        )
        return LossScaleState(
            scale=tf.clip_by_value(wanted, self.minimum, ceiling),
            good_steps=tf.where(grow, tf.zeros_like(good_steps), good_steps),
            bad_steps=bad_steps,
            memory=(mean, variance, steps, ceiling),
        )

    def _observe(
        self, mean: Any, variance: Any, steps: Any, outcome: StepOutcome
    ) -> tuple[Any, Any, Any]:
        """Returns the statistics with one more step in them."""
        known = outcome.finite & (outcome.largest >= _FLOAT32_TINY)
        largest = tf.where(known, tf.cast(outcome.largest, tf.float32), 1.0)
        more = steps + 1.0
        # The weight of the newest of `more` steps, all weights adding up to
        # 1; that is the usual correction for beginning at 0.
        rate = (1.0 - self.beta) / -tf.math.expm1(more * math.log(self.beta))
        difference = tf.math.log(largest) / math.log(2.0) - mean
        new_variance = (1.0 - rate) * (variance + rate * difference**2)
        return (
            tf.where(known, mean + rate * difference, mean),
            tf.where(known, tf.maximum(new_variance, 0.0), variance),
            tf.where(known, more, steps),
        )

    def _prediction(self, mean: Any, variance: Any) -> Any:
        """Returns the power of two that the statistics allow."""
        exponent = (
            math.log2(_FLOAT16_MAX)
            - self.headroom
            - mean
            - self.deviations * tf.sqrt(variance)
        )
        return _power_of_two(tf.floor(exponent))

    def clip(self, scale: float) -> float:
        """Returns `scale` inside the bounds; NaN becomes `initial`."""
        if math.isnan(scale):
            return self.initial
        return min(max(scale, self.minimum), self.maximum)

    def at_floor(self, scale: float) -> bool:
        """Returns whether `scale` is at `minimum`."""
        return scale <= self.minimum

    def remedy(self, scale: float) -> str:
        """Returns what to do if steps are skipped again and again."""
        return (
            "start lower with tfmixed.PredictiveLossScale("
            f"initial={scale:g}), or with a larger `headroom` (now "
            f"{self.headroom:g})"
        )


def _power_of_two(exponent: Any) -> Any:
    """Returns 2 to a whole number, as far as float32 goes, exactly."""
    # Compilers compute powers by exp and log, which would cost a bit of every
    # gradient: the exponent of a float32 is what stands in these bits.
    biased = tf.clip_by_value(exponent, -126.0, 127.0) + 127.0
    return tf.bitcast(tf.cast(biased, tf.int32) * 2**23, tf.float32)


def _weight(owner: str, name: str, value: Any) -> float:
    if not lib.is_number(value) or not 0 < float(value) < 1:
        raise ValueError(
            f"{owner}: `{name}` is {value!r}, but it is the weight of the "
            "past: give a number between 0 and 1 (the default is 0.99)."
        )
    return float(value)


def _not_negative(owner: str, name: str, value: Any) -> float:
    if not lib.is_number(value) or not 0 <= float(value) <= lib.FLOAT32_MAX:
        raise ValueError(
            f"{owner}: `{name}` is {value!r}, but it must be a finite number "
            "of 0 or more."
        )
    return float(value)
