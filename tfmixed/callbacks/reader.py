"""Reads the step records of a model while `fit` runs, without slowing it."""

import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmixed import telemetry
from tfmixed.guard import loss_scale_optimizers
from tfmixed.optimizer import number
from tfmixed.telemetry import Rows
from tfmixed.telemetry import StepRecords

# To read is to wait for the device, so it is done twice a second at most.
_SECONDS = 0.5


class Reader:
    """Fetches the rows of a model's optimizer now and then.

    Args:
        take: Called with the `Rows` that are new, their steps counted from
            the beginning of the training, also an interrupted one.
        attribute: Name of the attribute of the model that holds the
            optimizer; None for its only one.
    """

    def __init__(
        self, take: Callable[[Rows], Any], attribute: str | None = None
    ) -> None:
        self._take = take
        self._attribute = attribute
        self._model: Any = None
        self._next = 0
        self._pending = 0
        self._offset: int | None = None
        self._read_at = 0.0

    def attach(self, model: Any) -> None:
        """Makes the steps of a model be recorded from now on."""
        self._model = model
        self._pending = 0
        self._offset = None
        with model.distribute_strategy.scope():
            changed = telemetry.attach(
                self.optimizer, model.steps_per_execution
            )
        if changed:
            # A step that was traced before writes nothing.
            model.make_train_function(force=True)
        self._next = self._records.count()
        self._read_at = time.monotonic()

    def before_batch(self) -> None:
        """Called before each execution; reads if it is time to."""
        if self._offset is None:
            # Only now has everybody restored what was saved.
            self._offset = steps_taken(self.optimizer) - self._next
        due = time.monotonic() - self._read_at > _SECONDS
        pending = self._pending + self._model.steps_per_execution
        if self._pending and (due or pending >= self._records.capacity):
            self.read()
        self._pending += self._model.steps_per_execution

    def read(self) -> None:
        """Fetches what is new; waits for the device."""
        rows = self._records.read(self._next)
        self._pending = 0
        self._read_at = time.monotonic()
        if len(rows.step):
            self._next = int(rows.step[-1]) + 1
            self._take(rows._replace(step=rows.step + (self._offset or 0)))

    @property
    def skips(self) -> bool:
        """Whether the optimizer skips a step that is not finite."""
        wrapper = keras.optimizers.LossScaleOptimizer
        return isinstance(self.optimizer, wrapper)

    @property
    def optimizer(self) -> Any:
        """The optimizer whose steps are read; the first step may replace it."""
        return find_optimizer(self._model, self._attribute)

    @property
    def _records(self) -> StepRecords:
        records = telemetry.records_of(self.optimizer)
        if records is None:
            raise RuntimeError(
                f"The optimizer of the model '{self._model.name}' was replaced "
                "during fit. Compile the model before fit, not in a callback."
            )
        return records


def find_optimizer(model: Any, attribute: str | None) -> Any:
    """Returns the optimizer of a model.

    Args:
        model: A Keras model.
        attribute: Name of the attribute that holds it; None for the one that
            `compile` was given, or else the only one.

    Raises:
        ValueError: If there is none, or several.
    """
    if attribute is not None:
        found = getattr(model, attribute, None)
        if not hasattr(found, "apply"):
            raise ValueError(
                f"optimizer={attribute!r}: the model '{model.name}' has no "
                "optimizer in an attribute of that name."
            )
        return found
    if getattr(model, "optimizer", None) is not None:
        return model.optimizer
    several = loss_scale_optimizers(model)
    if len(several) == 1:
        return several[0]
    names = [k for k, v in vars(model).items() if v in several]
    raise ValueError(
        f"The model '{model.name}' was compiled without an optimizer"
        + (
            f" and has {len(several)} of its own. Say which: "
            f"optimizer={names[0]!r}."
            if several
            else ": call model.compile(optimizer=...) before fit."
        )
    )


def steps_taken(optimizer: Any) -> int:
    """Returns the steps that an optimizer has taken, skipped ones included."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not inner.built:
        return 0
    # An optimizer of Keras does not count what it skips.
    skipped = number(getattr(optimizer, "skipped_steps", tf.constant(0)))
    per_update = inner.gradient_accumulation_steps or 1
    return int(number(inner.iterations)) * per_update + int(skipped)
