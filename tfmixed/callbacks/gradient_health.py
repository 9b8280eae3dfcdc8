"""`GradientHealth`: what 16 bits do to each layer's gradients."""

import os
from typing import Any

import keras
import numpy as np

from tfmixed.callbacks.executions import Executions
from tfmixed.callbacks.outputs import Board
from tfmixed.callbacks.reader import find_optimizer
from tfmixed.callbacks.reader import steps_taken
from tfmixed.health.probe import Probe
from tfmixed.health.view import Health
from tfmixed.health.view import view
from tfmixed.small_batches import advise


class GradientHealth(keras.callbacks.Callback):
    """Measures every n-th batch in float32 as well, layer by layer.

    The batch runs forward and backward twice, before its step: in float32
    without a loss scale, and as the step computes it. What float16 flushes to
    zero is therefore seen as such: a layer whose gradients all vanish has an
    underflow of 100 %, not of 0 % for want of numbers. From the magnitudes
    follow the loss scales that are safe, and the layers that limit them.

    A measurement takes three to five times as long as a step, and is compiled
    beside it; training is not changed by it. It works under XLA, with
    `steps_per_execution` (the first batch of an execution is measured), and
    with `MirroredStrategy`.

    `History` gets `underflow` and `overflow`, the largest share in any layer
    at the last measurement.

    Args:
        every: Integer, how many steps there are from one measurement to the
            next. The first step is measured.
        log_dir: Folder for TensorBoard: shares, norms and a histogram of
            binary exponents for each layer; needs `tensorboard`.
        verbose: Whether the last finding is printed at the end of `fit`.

    Attributes:
        history: List of `Health`, one for each measurement in the last `fit`:
            `step`, `loss_scale`, `layers` (a row each, see below), `window`
            (`lowest`, `highest`), `upper` and `lower` (the layers that limit
            the scale). A row has `path`, `dtype`, `largest`, `smallest`,
            `underflow`, `overflow` (shares), `norm`, `error` (of the weight
            gradients, relative), `output_error`, `window`, `exponents`.
        advice: String, where a BatchNormalization takes its statistics over
            too few examples (`docs/small-batches.md`); else None.

    Raises:
        ValueError: If `every` is not a whole number of 1 or more; in `fit`,
            if the model cannot be measured (no loss, not built).

    Example:

    >>> health = tfmixed.callbacks.GradientHealth(every=2)
    >>> model = tfmixed.Sequential(
    ...     [keras.Input((4,)), keras.layers.Dense(1, dtype="mixed_float16")]
    ... )
    >>> model.compile("sgd", "mae")
    >>> x, y = np.ones((8, 4)), np.ones((8, 1))
    >>> _ = model.fit(x, y, batch_size=2, verbose=0, callbacks=[health])
    >>> [found.step for found in health.history]
    [0, 2]
    >>> health.history[-1].layers[0].underflow
    0.0
    """

    async_safe = True

    def __init__(
        self,
        every: int = 500,
        *,
        log_dir: str | os.PathLike[str] | None = None,
        verbose: bool = True,
    ) -> None:
        super().__init__()
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(
                f"GradientHealth: `every` is {every!r}, but it says how many "
                "steps there are between measurements: give a whole number of "
                "1 or more (the default is 500)."
            )
        self._every = every
        self._verbose = verbose
        self._board = None if log_dir is None else Board(log_dir)
        self._executions = Executions(self._is_due, self._measured)
        self._probe: Probe | None = None
        self._next = 0
        self._step = 0
        self._first: int | None = None
        self.history: list[Health] = []
        self.advice: str | None = None

    @property
    def latest(self) -> Health | None:
        """The last measurement; None before the first."""
        return self.history[-1] if self.history else None

    def on_train_begin(self, logs: Any = None) -> None:
        """Takes its place before the training function."""
        self._probe = Probe(self.model)
        self._executions.attach(self.model)
        self.history = []
        self.advice = None
        self._step = self._next = 0
        self._first = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Takes its place again where another callback changed the model."""
        self._executions.attach(self.model)
        if self._first is None:
            # Only now has everybody restored what was saved.
            self._first = steps_taken(find_optimizer(self.model, None))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Puts the last measurement into the logs of the epoch."""
        if logs is not None and self.latest is not None:
            rows = self.latest.layers
            logs["underflow"] = max((r.underflow for r in rows), default=0.0)
            logs["overflow"] = max((r.overflow for r in rows), default=0.0)

    def on_train_end(self, logs: Any = None) -> None:
        """Gives the place back and says what was found."""
        self._executions.detach()
        if self._board is not None:
            self._board.flush()
        if self._verbose and self.params.get("verbose") and self.latest:
            print(self.latest)
            if self.advice is not None:
                print(self.advice)

    def table(self) -> str:
        """Returns the last measurement as a table, a line for each layer."""
        return "" if self.latest is None else table(self.latest)

    def _is_due(self) -> bool:
        step, self._step = (
            self._step,
            (self._step + self.model.steps_per_execution),
        )
        if step < self._next:
            return False
        self._next = step + self._every
        return True

    def _measured(self, batches: list[Any], train: Any) -> Any:
        step = self._step - self.model.steps_per_execution + (self._first or 0)
        if self._probe is not None:
            found = view(self._probe.measure(batches[0]), step)
            self.history.append(found)
            if self._board is not None:
                _write(self._board, found)
        if self.advice is None:
            self.advice = advise(self.model, _examples(batches[0]))
        return train(batches)


def table(health: Health) -> str:
    """Returns a measurement as a table, a line for each layer."""
    width = max([5, *(len(row.path) for row in health.layers)])
    lines = [
        f"{'layer':<{width}}  {'dtype':<9} {'largest':>9} {'smallest':>9} "
        f"{'underflow':>9} {'overflow':>9} {'error':>9}  safe scales"
    ]
    for row in health.layers:
        smallest = "" if row.smallest is None else f"{row.smallest:.2g}"
        lines.append(
            f"{row.path:<{width}}  {row.dtype or '':<9} {row.largest:>9.2g} "
            f"{smallest:>9} {row.underflow:>9.2%} {row.overflow:>9.2%} "
            f"{row.error:>9.2g}  {row.window or ''}"
        )
    return "\n".join([*lines, str(health)])


def _examples(batch: Any) -> int:
    """The rows of a batch, over all replicas."""
    first = keras.tree.flatten(batch)[0]
    return sum(int(part.shape[0]) for part in getattr(first, "values", [first]))


def _write(board: Board, health: Health) -> None:
    for row in health.layers:
        board.scalars(
            health.step,
            {
                f"gradient_health/underflow/{row.path}": row.underflow,
                f"gradient_health/overflow/{row.path}": row.overflow,
                f"gradient_health/norm/{row.path}": row.norm,
            },
        )
        counts = row.exponents
        edges = np.arange(len(counts)) + row.lowest_exponent
        board.histogram(
            health.step,
            f"gradient_exponents/{row.path}",
            np.stack([edges - 1, edges, counts], axis=1)[counts > 0],
        )
    board.flush()
