"""`LossScaleMonitor`: what the loss scale does, step by step."""

import os
from typing import Any

import keras
import numpy as np

from tfmixed.callbacks import history
from tfmixed.callbacks.explainer import Explainer
from tfmixed.callbacks.outputs import Board
from tfmixed.callbacks.outputs import StepTable
from tfmixed.callbacks.reader import Reader
from tfmixed.health.cause import Cause
from tfmixed.telemetry import Rows


class LossScaleMonitor(keras.callbacks.Callback):
    """Records loss scale, skipped steps and gradient norm of each step.

    While `fit` runs, the progress bar shows the scale and the steps skipped in
    this epoch. `History`, and with it every callback that reads the logs of an
    epoch (CSVLogger, W&B, MLflow), gets `loss_scale` (at the end of the
    epoch), `skipped_steps` (of the epoch) and `gradient_norm` (the mean over
    the finite steps). At the end a line sums it up. Put it before callbacks
    that are to see its entries.

    The numbers are written on the device and fetched twice a second, so that
    a step never waits; it works with `steps_per_execution`, under XLA, and
    with `tf.distribute`. On a plain Keras model, whose optimizer does not skip
    by itself, `finite` says what it would have skipped.

    Args:
        log_dir: Folder for TensorBoard scalars; needs `tensorboard`.
        csv: Path of a CSV file with the columns `step`, `loss_scale`,
            `finite`, `gradient_norm`. Where a training goes on after an
            interruption, so does the file.
        every: Integer, keep every n-th step only. Skipped steps are all kept.
        explain: Whether skipped steps are looked into: the first ten batches
            that were not finite are measured in float32 as well, and `causes`
            says whether it was ordinary calibration, a scale too high, a layer
            that overflows, or bad data or a loss that float32 has too. Steps
            then run one by one even with `steps_per_execution`.
        optimizer: Name of the model's attribute that holds the optimizer to
            watch, for a model with several.

    Attributes:
        records: After `fit`, a dict of NumPy arrays with an entry for each
            step, skipped ones included: `step` (int64, from 0, counted on in
            a later `fit`), `loss_scale` (float32, what that step used),
            `finite` (bool), `gradient_norm` (float32, not scaled; with several
            replicas the root of the sum of the squares of theirs).

        causes: With `explain`, a list of (number of the step's batch in its
            epoch, `Cause` with `kind`, `message`, `path`, `row`).

    Raises:
        ModuleNotFoundError: If `log_dir` is given without `tensorboard`.
        ValueError: If `every` is not a whole number of 1 or more; in `fit`, if
            the model has no optimizer or several.

    Example:

    >>> monitor = tfmixed.callbacks.LossScaleMonitor()
    >>> model = tfmixed.Sequential([keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x, y = np.ones((8, 4)), np.ones((8, 1))
    >>> _ = model.fit(x, y, batch_size=4, verbose=0, callbacks=[monitor])
    >>> monitor.records["finite"].tolist()
    [True, True]
    """

    # Nothing here that Keras must not run beside the next step.
    async_safe = True

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        *,
        csv: str | os.PathLike[str] | None = None,
        every: int = 1,
        explain: bool = False,
        optimizer: str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(
                f"LossScaleMonitor: `every` is {every!r}, but it says which "
                "steps to keep: give a whole number of 1 or more."
            )
        self._every = every
        self._csv = csv
        self._board = None if log_dir is None else Board(log_dir)
        self._table: StepTable | None = None
        self._reader = Reader(self._take, optimizer)
        self._explainer = Explainer() if explain else None
        self._kept: list[Rows] = []
        self._epoch = history.Epoch()
        self._whole = history.Summary()

    @property
    def causes(self) -> list[tuple[int, Cause]]:
        """Why steps were not finite; empty without `explain`."""
        return self._explainer.causes if self._explainer else []

    @property
    def records(self) -> dict[str, np.ndarray]:
        """What was recorded in the last `fit`; arrays of one length."""
        if not self._kept:
            empty = history.NO_ROWS
            return empty._asdict()
        return Rows(
            *map(np.concatenate, zip(*self._kept, strict=True))
        )._asdict()

    def on_train_begin(self, logs: Any = None) -> None:
        """Attaches to the optimizer."""
        self._kept = []
        self._table = None
        self._reader.attach(self.model)
        self._whole = history.Summary(skips=self._reader.skips)
        if self._explainer is not None:
            self._explainer.attach(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts to count for this epoch."""
        self._epoch = history.Epoch()
        if self._explainer is not None:
            self._explainer.watch.new_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Fetches what the steps so far have written, twice a second."""
        self._reader.before_batch()
        if self._explainer is not None:
            self._explainer.watch.before_batch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Shows the latest values in the progress bar."""
        if logs is not None and self._epoch.steps:
            logs["loss_scale"] = self._epoch.loss_scale
            logs["skipped_steps"] = self._epoch.skipped

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Puts the numbers of the epoch into the logs."""
        self._reader.read()
        if logs is not None and self._epoch.steps:
            logs.update(self._epoch.logs())

    def on_train_end(self, logs: Any = None) -> None:
        """Fetches the rest, closes the files and prints the summary."""
        self._reader.read()
        if self._explainer is not None:
            self._explainer.detach()
        if self._board is not None:
            self._board.flush()
        if self._whole.steps and self.params.get("verbose"):
            print(self.summary())

    def summary(self) -> str:
        """Returns one line on the last `fit`.

        Such as "3 of 4,690 steps skipped, all in the first 40; loss scale
        32768 → 65536." With `explain`, a line more for each kind of cause.
        """
        lines = [str(self._whole)]
        kinds: dict[str, list[str]] = {}
        for batch, cause in self.causes:
            line = f"  batch {batch}: {cause.message}"
            kinds.setdefault(cause.kind, []).append(line)
        for first, *others in kinds.values():
            more = f" (and {len(others)} more like it)" if others else ""
            lines.append(first + more)
        return "\n".join(lines)

    def plot(self, ax: Any = None) -> Any:
        """Draws the loss scale over the steps, skipped ones marked.

        Args:
            ax: `matplotlib.axes.Axes` to draw on; by default a new one.

        Returns:
            The axes.

        Raises:
            ModuleNotFoundError: If `matplotlib` is not installed.
        """
        from tfmixed.callbacks import plots

        return plots.loss_scale(self.records, ax)

    def _take(self, rows: Rows) -> None:
        self._epoch.add(rows)
        self._whole.add(rows)
        keep = (rows.step % self._every == 0) | ~rows.finite
        kept = Rows(*(column[keep] for column in rows))
        self._kept.append(kept)
        if self._csv is not None:
            if self._table is None:
                self._table = StepTable(
                    self._csv, Rows._fields, int(rows.step[0])
                )
            self._table.write(zip(*(c.tolist() for c in kept), strict=True))
        if self._board is not None:
            before = self._whole.skipped - int(np.sum(~rows.finite))
            self._write_board(self._board, kept, before)

    def _write_board(self, board: Board, rows: Rows, skipped: int) -> None:
        for step, scale, finite, norm in zip(*rows, strict=True):
            skipped += not finite
            values = {
                "loss_scale/scale": scale,
                "loss_scale/skipped_steps": skipped,
            }
            if finite:
                values["loss_scale/gradient_norm"] = norm
            board.scalars(step, values)
        board.flush()
