"""Loss-scale algorithms: pure functions of a small state.

In float16 a gradient below 2^-24 is 0. Multiplying the loss by a scale moves
every gradient of the backward pass upwards by the same factor, and dividing
afterwards in float32 gives back the original values (Micikevicius et al.,
2018, "Mixed Precision Training", https://arxiv.org/abs/1710.03740).

All algorithms here follow one protocol, the one without scaling included, so
that a caller never asks which of them it has:

- `initial`: the first scale, a float.
- `initial_state()`: the state before the first step.
- `update(state, outcome)`: the next state. No side effects; Python numbers
  and TensorFlow tensors both work, eagerly, in a graph and under XLA.
- `uses_largest`: whether `update` wants to know the largest gradient.
- `clip(scale)`: a scale from elsewhere brought into the permitted range.
- `at_floor(scale)`: whether the scale cannot fall any further.
- `adapts`, `remedy(scale)`: what to tell a person about skipped steps.
- `get_config()` / `from_config(config)`.
"""

import dataclasses
import math
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

FLOAT32_MAX = float(tf.float32.max)


class LossScaleState(NamedTuple):
    """What an algorithm remembers from one step to the next.

    Args:
        scale: float32 scalar, the factor for the next loss.
        good_steps: Integer scalar, finite steps since the scale last changed
            or a step was skipped.
        bad_steps: Integer scalar, non-finite steps in a row up to now.
        memory: Tuple of float32 scalars, what the algorithm needs besides.
            As many at every step as in `initial_state()`.
    """

    scale: Any
    good_steps: Any
    bad_steps: Any
    memory: tuple[Any, ...] = ()


class StepOutcome(NamedTuple):
    """What a step did, as far as an algorithm may know.

    Args:
        finite: Boolean scalar, true when every gradient on every replica and
            the loss were finite.
        gradient_norm: float32 scalar, the norm of all unscaled gradients of
            this replica; not finite when `finite` is false.
        largest: float32 scalar, the largest magnitude among all unscaled
            gradients of all replicas; may be infinite or NaN when `finite` is
            false. `None` unless the algorithm has `uses_largest`.
    """

    finite: Any
    gradient_norm: Any
    largest: Any = None


class LossScale:
    """Base class of the algorithms: a scale that never moves.

    Subclass it, override `initial` and `update`, and register the subclass
    with `keras.saving.register_keras_serializable` to bring your own.
    """

    initial: float = 1.0
    # A pass over all gradients, which only those pay for that want it. No
    # annotation: these two are no fields of the dataclasses below.
    uses_largest = False
    adapts = False

    def initial_state(self) -> LossScaleState:
        """Returns the state before the first step."""
        return LossScaleState(self.initial, 0, 0)

    def update(
        self, state: LossScaleState, outcome: StepOutcome
    ) -> LossScaleState:
        """Returns the state after a step; here only the counters move."""
        good_steps, bad_steps = state.good_steps + 1, state.bad_steps + 1
        zero = tf.zeros_like(good_steps)
        return LossScaleState(
            scale=state.scale,
            good_steps=tf.where(outcome.finite, good_steps, zero),
            bad_steps=tf.where(outcome.finite, zero, bad_steps),
            memory=state.memory,
        )

    def clip(self, scale: float) -> float:
        """Returns `scale` if the algorithm can hold it, else the nearest."""
        return self.initial

    def at_floor(self, scale: float) -> bool:
        """Returns whether `scale` can fall no further."""
        return False

    def remedy(self, scale: float) -> str:
        """Returns what to do if steps are skipped again and again.

        Args:
            scale: The scale now.
        """
        return 'use a smaller scale, or loss_scale="dynamic"'

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments to build an equal algorithm from."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LossScale":
        """Returns the algorithm that `get_config` described."""
        return cls(**config)


@keras.saving.register_keras_serializable(package="tfmixed")
@dataclasses.dataclass(frozen=True)
class NoLossScale(LossScale):
    """No scaling: for float32 and bfloat16, whose range needs none.

    Steps with non-finite gradients are skipped all the same.

    Example:

    >>> optimizer = tfmixed.LossScaleOptimizer("sgd", tfmixed.NoLossScale())
    >>> float(optimizer.scale_loss(3.0))
    3.0
    """


@keras.saving.register_keras_serializable(package="tfmixed")
@dataclasses.dataclass(frozen=True)
class FixedLossScale(LossScale):
    """One scale for the whole training; non-finite steps are skipped.

    Args:
        value: Float above 0. Powers of two lose no bit of the gradients.

    Raises:
        ValueError: If `value` is not a finite number above 0.

    Example:

    >>> tfmixed.FixedLossScale(1024.0).initial
    1024.0
    """

    value: float

    def __post_init__(self) -> None:
        set_field(
            self, "value", positive("FixedLossScale", "value", self.value)
        )

    @property
    def initial(self) -> float:  # type: ignore[override]
        """The first and only scale."""
        return self.value


@keras.saving.register_keras_serializable(package="tfmixed")
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """A scale that rises while steps are finite and falls when one is not.

    After `growth_interval` finite steps in a row the scale is multiplied by
    `growth_factor`; a non-finite step multiplies it by `backoff_factor`. It
    never leaves `[minimum, maximum]`: without a ceiling it would double until
    it is infinite and skip every step from then on, without a floor it would
    reach 0 and the next division by it would write NaN into every weight.

    Args:
        initial: Float, the first scale. Too high costs a few skipped steps,
            too low costs `growth_interval` steps for each doubling.
        growth_interval: Integer, finite steps in a row before growth.
        growth_factor: Float of 1 or more.
        backoff_factor: Float in (0, 1).
        minimum: Float above 0, the floor.
        maximum: Float, the ceiling; finite in float32.
        hysteresis: Integer, the number of non-finite steps in a row from
            which the scale is lowered. 1 lowers at once; 2 forgives a single
            bad batch (as in NVIDIA Apex).

    Raises:
        ValueError: If an argument is out of its range; the message names it.

    Example:

    >>> scale = tfmixed.DynamicLossScale(initial=8.0, growth_interval=1)
    >>> optimizer = tfmixed.LossScaleOptimizer("sgd", scale)
    >>> weight = keras.Variable(1.0)
    >>> optimizer.build([weight])
    >>> optimizer.scale_loss(0.0)
    <tf.Tensor: shape=(), dtype=float32, numpy=0.0>
    >>> optimizer.apply([tf.constant(0.5)])
    >>> float(optimizer.dynamic_scale)
    16.0
    """

    initial: float = 2.0**15
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    minimum: float = 1.0
    maximum: float = 2.0**24
    hysteresis: int = 1
    adapts = True

    def __post_init__(self) -> None:
        owner = "DynamicLossScale"
        for name in ("initial", "minimum", "maximum"):
            set_field(self, name, positive(owner, name, getattr(self, name)))
        for name in ("growth_interval", "hysteresis"):
            set_field(self, name, count(owner, name, getattr(self, name)))
        growth_factor = positive(owner, "growth_factor", self.growth_factor)
        set_field(self, "growth_factor", growth_factor)
        backoff_factor = backoff(owner, "backoff_factor", self.backoff_factor)
        set_field(self, "backoff_factor", backoff_factor)
        if self.growth_factor < 1:
            raise ValueError(
                f"{owner}: `growth_factor` is {self.growth_factor}, but the "
                "scale has to grow by it: give a number of 1 or more "
                "(the default is 2.0)."
            )
        check_bounds(owner, self.initial, self.minimum, self.maximum)

    def update(
        self, state: LossScaleState, outcome: StepOutcome
    ) -> LossScaleState:
        """Returns the state after a step; see the class for the rule."""
        _, good_steps, bad_steps, memory = super().update(state, outcome)
        grow = good_steps >= self.growth_interval
        lower = bad_steps >= self.hysteresis
        grown = tf.minimum(state.scale * self.growth_factor, self.maximum)
        lowered = tf.maximum(state.scale * self.backoff_factor, self.minimum)
        return LossScaleState(
            scale=tf.where(grow, grown, tf.where(lower, lowered, state.scale)),
            good_steps=tf.where(grow, tf.zeros_like(good_steps), good_steps),
            bad_steps=bad_steps,
            memory=memory,
        )

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
        return f"start lower with tfmixed.DynamicLossScale(initial={scale:g})"


def get(identifier: Any) -> LossScale:
    """Returns the algorithm that `identifier` names.

    Args:
        identifier: `"dynamic"`, `"none"` or `None`, a number (a fixed scale),
            a `LossScale`, or the config of a serialized one.

    Raises:
        ValueError: If it is none of these.
        TypeError: If its type is none of these.

    Example:

    >>> get(128)
    FixedLossScale(value=128.0)
    """
    if isinstance(identifier, LossScale):
        return identifier
    if identifier == "dynamic":
        return DynamicLossScale()
    if identifier is None or identifier == "none":
        return NoLossScale()
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
        if isinstance(identifier, LossScale):
            return identifier
    accepted = (
        'Give "dynamic", "none", a number above 0 for a fixed scale, or an '
        "object such as tfmixed.DynamicLossScale(initial=1024.0)."
    )
    if isinstance(identifier, str):
        raise ValueError(f'Unknown loss scale "{identifier}". {accepted}')
    if not is_number(identifier):
        raise TypeError(
            f"`loss_scale` is {identifier!r} of type "
            f"{type(identifier).__name__}. {accepted}"
        )
    return FixedLossScale(float(identifier))


def is_number(value: Any) -> bool:
    """Returns whether `value` is a number, or something that holds one."""
    if isinstance(value, bool | str):
        return False
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def positive(owner: str, name: str, value: Any) -> float:
    """Returns `value` as a float that float32 can hold, or raises."""
    if not is_number(value) or not 0 < float(value) <= FLOAT32_MAX:
        raise ValueError(
            f"{owner}: `{name}` is {value!r}, but it must be a finite number "
            f"above 0 (and at most {FLOAT32_MAX:.4g}, the largest float32)."
        )
    return float(value)


def count(owner: str, name: str, value: Any) -> int:
    """Returns `value` as a whole number of 1 or more, or raises."""
    if not is_number(value) or not float(value).is_integer() or value < 1:
        raise ValueError(
            f"{owner}: `{name}` is {value!r}, but it counts steps: give a "
            "whole number of 1 or more."
        )
    return int(value)


def backoff(owner: str, name: str, value: Any) -> float:
    """Returns `value` as a float between 0 and 1, or raises."""
    value = positive(owner, name, value)
    if value >= 1:
        raise ValueError(
            f"{owner}: `{name}` is {value}, but the scale has to fall by it: "
            "give a number between 0 and 1 (the default is 0.5)."
        )
    return value


def check_bounds(
    owner: str, initial: float, minimum: float, maximum: float
) -> None:
    """Raises unless `minimum <= initial <= maximum`."""
    if minimum > maximum:
        raise ValueError(
            f"{owner}: `minimum` ({minimum}) is above `maximum` ({maximum}). "
            "Swap them, or leave one at its default (1.0 and 16777216.0)."
        )
    if not minimum <= initial <= maximum:
        raise ValueError(
            f"{owner}: `initial` ({initial}) is outside [{minimum}, "
            f"{maximum}]. Choose a value inside, or move `minimum` or "
            "`maximum`."
        )


def set_field(instance: Any, name: str, value: Any) -> None:
    """Writes a field of a frozen algorithm; for `__post_init__` only."""
    # The fields are frozen for callers; normalising 1024 to 1024.0 once, here,
    # keeps `==` and the saved config the same however the number was typed.
    object.__setattr__(instance, name, value)
