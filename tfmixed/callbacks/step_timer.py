"""`StepTimer`: what a step takes, and how much of it is waiting for input."""

import math
import os
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmixed.callbacks import step_times
from tfmixed.callbacks.fetches import Fetched
from tfmixed.callbacks.fetches import Meter
from tfmixed.callbacks.outputs import Board
from tfmixed.callbacks.outputs import StepTable
from tfmixed.callbacks.reader import steps_taken
from tfmixed.callbacks.step_times import Execution
from tfmixed.callbacks.step_times import Times

# For the progress bar, TensorBoard and the memory.
_SECONDS = 0.5
_ITERATORS = (tf.data.Iterator, tf.distribute.DistributedIterator)


class StepTimer(keras.callbacks.Callback):
    """Measures the time of a step, examples a second, input wait and memory.

    While `fit` runs, the progress bar shows the latest of them. `History`, and
    with it every callback that reads the logs of an epoch, gets those of the
    epoch: `step_ms` (the median), `examples_per_second`, `input_wait` and
    `memory_mb`. At the end a line sums it up. What could not be measured is
    absent, never 0. Put it before callbacks that are to see its entries.

    - **Time** goes from the end of one execution of the train function to the
      end of the next, so other callbacks are in it, validation is not. With
      `steps_per_execution` one execution counts as that many steps. The first
      execution of a `fit`, in which the step is traced, is kept apart; one in
      which XLA compiles for another shape of batch is not. No step waits for
      the device: on a GPU, which works on while Python goes ahead, the times
      of single steps may be off, and right on average.
    - **Examples** are counted in the batches, the smaller last one too, over
      the replicas of this process.
    - **`input_wait`** is the share of that time in which the step waited for
      its batch, for arrays, `tf.data`, generators and PyDatasets alike. It is
      measured on the host; a GPU may still be busy with the step before, and
      then waits less. With `steps_per_execution` above 1, TensorFlow fetches
      beside the running step, what remains of waiting cannot be seen, and
      `input_wait` is absent unless the model runs eagerly.
    - **Memory** on a GPU is the peak of TensorFlow's allocator since the
      program began. Without a GPU it is the resident memory of the process,
      all that Python holds included, the most that was seen in the epoch.

    A model with a `make_train_function` of its own is timed as a whole:
    `examples_per_second` and `input_wait` are absent. To measure takes about
    0.1 ms an execution; with `csv` about 0.3 ms more.

    Args:
        log_dir: Folder for TensorBoard scalars, twice a second; needs
            `tensorboard`.
        csv: Path of a CSV file with a row for each execution and the columns
            of `records`. Where a training goes on after an interruption, so
            does the file.

    Attributes:
        records: A dict of NumPy arrays with an entry for each execution:
            `step` (int64, number of its first step, from 0, counted on in a
            later `fit`), `steps` (int64, how many it had), `step_ms`,
            `examples`, `input_wait`, `memory_mb` (all float64).

    Raises:
        ModuleNotFoundError: If `log_dir` is given without `tensorboard`.

    Example:

    >>> timer = tfmixed.callbacks.StepTimer()
    >>> model = tfmixed.Sequential([keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x, y = np.ones((10, 4)), np.ones((10, 1))
    >>> _ = model.fit(x, y, batch_size=4, verbose=0, callbacks=[timer])
    >>> timer.records["examples"].tolist()
    [4.0, 4.0, 2.0]
    """

    # Nothing here that Keras must not run beside the next step.
    async_safe = True

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        csv: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self._csv = csv
        self._board = None if log_dir is None else Board(log_dir)
        self._meter: Any = None
        self._wrapper: Any = None
        self._begin()

    def _begin(self) -> None:
        self._executions: list[Execution] = []
        self._next: int | None = None
        self._table: StepTable | None = None
        self._whole = Times()
        self._epoch = Times()
        self._latest = Times()
        self._live: dict[str, float] = {}
        self._ended: float | None = None
        self._is_armed = False
        self._refreshed_at = -math.inf
        self._megabytes = math.nan

    @property
    def records(self) -> dict[str, np.ndarray]:
        """What was measured in the last `fit`; arrays of one length."""
        return step_times.columns(self._executions)

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts anew."""
        self._begin()
        self._memory = step_times.Memory()
        strategy = self.model.distribute_strategy
        # One meter for all trainings: another would be another trace.
        if self._meter is None or self._meter.strategy is not strategy:
            self._meter = Meter(strategy)
        self._meter.reset()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts to count for this epoch."""
        self._epoch = Times()
        self._ended = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Makes the next call of the train function be timed."""
        if self._next is None:
            # Only now has everybody restored what was saved.
            optimizer = getattr(self.model, "optimizer", None)
            self._next = 0 if optimizer is None else steps_taken(optimizer)
        if time.monotonic() - self._refreshed_at > _SECONDS:
            self._refresh()
        if self._is_armed:
            # Another callback put in a train function that was not timed.
            self._ended = None
        self._is_armed = True
        function = self.model.train_function
        if function is not self._wrapper:
            self._wrapper = _Timed(self._run, function)
            self._set_train_function(self._wrapper)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Shows the latest values in the progress bar."""
        if logs is not None:
            logs.update(self._live)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Puts the numbers of the epoch into the logs."""
        self._refresh()
        if logs is not None:
            logs.update(self._epoch.logs())

    def on_train_end(self, logs: Any = None) -> None:
        """Prints the summary."""
        if self._executions and self.params.get("verbose"):
            print(self.summary())

    def summary(self) -> str:
        """Returns one line on the last `fit`.

        Such as "4,690 steps: median 12.3 ms (first 2.1 s), 5,203 examples/s,
        3 % of the time waiting for input, 812 MB resident."
        """
        if not self._executions:
            return "No steps."
        first = self._executions[0]
        steps = self._whole.steps + first.steps
        logs = self._whole.logs()
        return step_times.describe(
            steps, first.seconds, logs, self._memory.kind
        )

    def _set_train_function(self, function: Callable[[Any], Any]) -> None:
        # Not by `setattr`, in which Keras looks for layers for 40 us.
        self.model.__dict__["train_function"] = function

    def _run(self, function: Callable[[Any], Any], iterator: Any) -> Any:
        """Calls the train function, once, and takes the time."""
        # Out of the way at once: nothing is told of a fit that is interrupted.
        if self.model.train_function is self._wrapper:
            self._set_train_function(function)
        self._is_armed = False
        if not isinstance(iterator, _ITERATORS):
            # Not from `fit`, but from `train_on_batch` after an interruption.
            return function(iterator)
        own = type(self.model).make_train_function
        start = time.perf_counter() if self._ended is None else self._ended
        if own is keras.Model.make_train_function:
            iterator = self._meter.watch(iterator)
        logs = function(iterator)
        fetched = self._meter.read()
        if not fetched.steps:
            # The function is not one of Keras, or does not ask the iterator.
            steps = self.model.steps_per_execution
            fetched = Fetched(math.nan, math.nan, steps)
        self._ended = time.perf_counter()
        self._take(self._ended - start, fetched)
        return logs

    def _take(self, seconds: float, fetched: Fetched) -> None:
        steps = int(fetched.steps)
        execution = Execution(
            self._next or 0,
            steps,
            seconds * 1e3 / steps,
            fetched.examples,
            fetched.waited / seconds,
            self._megabytes,
        )
        self._next = execution.step + steps
        if self._executions:
            for times in (self._whole, self._epoch, self._latest):
                times.add(execution)
        self._executions.append(execution)
        if self._csv is not None:
            if self._table is None:
                self._table = StepTable(
                    self._csv, Execution._fields, execution.step
                )
            self._table.write([step_times.row(execution)])

    def _refresh(self) -> None:
        """Measures the memory; shows what was measured since the last time."""
        self._megabytes = self._memory.megabytes()
        for times in (self._whole, self._epoch, self._latest):
            times.add_memory(self._megabytes)
        if not self._latest.steps:
            return
        self._live = self._latest.logs()
        self._latest = Times()
        self._refreshed_at = time.monotonic()
        if self._board is not None:
            scalars = {f"step_timer/{k}": v for k, v in self._live.items()}
            self._board.scalars((self._next or 1) - 1, scalars)
            self._board.flush()


class _Timed:
    """A training function that is timed."""

    def __init__(self, run: Callable[[Any, Any], Any], inner: Any) -> None:
        self._run = run
        self.inner = inner

    def __call__(self, iterator: Any) -> Any:
        return self._run(self.inner, iterator)
