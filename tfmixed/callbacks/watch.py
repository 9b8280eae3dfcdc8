"""Finds the batch of a step that was not finite, to look at it or retry it."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmixed import telemetry
from tfmixed.callbacks.executions import Executions
from tfmixed.callbacks.reader import find_optimizer
from tfmixed.callbacks.reader import steps_taken

# To look is to wait for the device, which a CPU does anyway.
_EXECUTIONS_ON_ACCELERATOR = 8


class Watch:
    """Keeps batches until it is known that their steps were finite.

    Args:
        bad: Called with the number in the epoch of a batch whose step was not
            finite, and the batch, in the midst of the training; returns the
            logs of a step that took its place, or None.
    """

    def __init__(self, bad: Callable[[int, Any], Any]) -> None:
        self._bad = bad
        self._executions = Executions(lambda: True, self._run)
        self._model: Any = None
        self._waiting: list[tuple[int, int, Any]] = []
        self._next_batch = self._next_position = 0
        self._seen = 0
        self._offset: int | None = None
        self._since = 0
        self._every = 1
        self.last_batch: Any = None
        # The loss scale of the last step that was not finite.
        self.failed_scale = 1.0
        # Which batch of the training it was, from 0.
        self.position = 0

    def attach(self, model: keras.Model) -> None:
        """Takes its place in a model; at the beginning of a training."""
        self._model = model
        with model.distribute_strategy.scope():
            changed = telemetry.attach(
                find_optimizer(model, None), model.steps_per_execution
            )
        if changed:
            model.make_train_function(force=True)
        self._executions.attach(model)
        on_cpu = not tf.config.list_logical_devices("GPU")
        self._every = 1 if on_cpu else _EXECUTIONS_ON_ACCELERATOR
        self._waiting, self._since, self._offset = [], 0, None

    def new_epoch(self) -> None:
        """Counts batches from 0 again."""
        self._next_batch = 0

    def before_batch(self) -> None:
        """Called before each execution."""
        # Another callback may have changed the model.
        self._executions.attach(self._model)
        if self._offset is None:
            # Only now has everybody restored what was saved.
            self._seen = self._records.count()
            self._offset = steps_taken(self.optimizer) - self._seen

    def detach(self) -> None:
        """Gives the place back."""
        self._waiting = []
        self.last_batch = None
        self._executions.detach()

    @property
    def optimizer(self) -> Any:
        """The optimizer of the model."""
        return find_optimizer(self._model, None)

    @property
    def step(self) -> int:
        """The number of the next step, those that were retried counted."""
        return self._records.count() + (self._offset or 0)

    def retry(self, batch: Any) -> tuple[bool, Any]:
        """Trains on a batch again; waits.

        Returns:
            Whether the step was finite, and the logs.
        """
        function = self._model.train_function
        while hasattr(function, "inner"):
            function = function.inner
        logs = function(iter([batch]))
        rows = self._records.read(self._seen)
        self._seen = self._records.count()
        finite = bool(rows.finite.all())
        if not finite:
            self.failed_scale = float(rows.loss_scale[-1])
        return finite, logs

    def check(self) -> Any:
        """Looks at the steps since the last time; waits.

        Returns:
            The logs of the last step that took the place of another, or None.
        """
        rows = self._records.read(self._seen)
        waiting, self._waiting, self._since = self._waiting, [], 0
        self._seen = self._records.count()
        logs = None
        # A custom train_step may take several steps on a batch, or none.
        if len(rows.step) == len(waiting):
            for finite, scale, (index, position, batch) in zip(
                rows.finite, rows.loss_scale, waiting, strict=True
            ):
                if not finite:
                    self.failed_scale = float(scale)
                    self.position = position
                    found = self._bad(index, batch)
                    logs = logs if found is None else found
        return logs

    def _run(self, batches: list[Any], train: Callable[[Any], Any]) -> Any:
        logs = train(batches)
        for batch in batches:
            self._waiting.append((self._next_batch, self._next_position, batch))
            self._next_batch += 1
            self._next_position += 1
        self.last_batch = batches[-1]
        self._since += 1
        if self._since < self._every:
            return logs
        found = self.check()
        return logs if found is None else found

    @property
    def _records(self) -> Any:
        return telemetry.records_of(self.optimizer)
