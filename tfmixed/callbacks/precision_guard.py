"""`PrecisionGuard`: falls back to more precision when 16 bits do harm."""

import collections
import os
from collections.abc import Sequence
from typing import Any

import keras

from tfmixed.callbacks import ladder as rungs
from tfmixed.callbacks import standards
from tfmixed.callbacks.guard_log import Event
from tfmixed.callbacks.guard_log import EventLog
from tfmixed.callbacks.recovery import Recovery
from tfmixed.callbacks.watch import Watch
from tfmixed.health.suspect import suspect

# What happens in each epoch again is told a few times.
_REPEATING = ("none", "retry")
_MOST_TOLD = 5


class PrecisionGuard(keras.callbacks.Callback):
    """Watches a training in 16 bits and falls back as far as is needed.

    When a step is not finite: the batch is looked at (NaN in the data is
    reported and skipped), retried, and if that fails measured in float32
    beside 16 bits. Then the first of these rungs that helps is taken:

    1. the loss scale is lowered to where the gradients fit,
    2. the layer to blame is moved to float32,
    3. float16 is changed to bfloat16, where that is fast,
    4. everything is moved to float32.

    When after an epoch `monitor` is worse than `baseline` by more than
    `max_drop`, a batch is measured: if a layer is found whose outputs or
    gradients are wrong in 16 bits, rung 2 is taken at once; without one, rungs
    3 and 4 after `patience` such epochs in which it did not improve either, in
    the second half of the training.

    Training goes on in the same `fit`: weights, optimizer state and epoch are
    kept, only the step is traced anew. Each action is printed and logged with
    its reason. Where float32 fails as well, the training stops with an error
    that says so.

    The guard sees each batch, so that steps run one by one even with
    `steps_per_execution`. An optimizer that does not skip bad steps (any but a
    `LossScaleOptimizer`) has lost its weights by then: the guard stops with an
    error instead.

    Args:
        monitor: Name of the metric in the logs of an epoch, such as
            `"val_auc"`.
        baseline: Float, what the metric is to be; or a sequence with a value
            for each epoch, such as the history of a float32 training. None
            watches no metric.
        max_drop: Float, how much worse it may be.
        mode: `"max"` if more is better, `"min"` if less is; `"auto"` takes
            `"min"` for names with "loss", "error", "perplexity" or the short
            name of an error ("mse", "mae", ...) in them.
        patience: Integer, epochs below the baseline without improvement until
            everything is moved without a culprit.
        retries: Integer, how often a batch is tried again before it is
            measured.
        climb_after: Integer, epochs without trouble after which rungs 3 and 4
            are left again, once; the layers to blame stay float32. None never
            does.
        required: Dict from names of metrics to the values that the last epoch
            must reach; if it does not, `fit` raises at its end. As for
            `mode="auto"`, less is better for losses and errors; say it for
            other metrics: `{"hausdorff": ("min", 4.0)}`. Put the guard last:
            what stands after it does not see the end of the training.
        log: Path of a file of JSON lines, a line an event. A training that
            goes on after an interruption (`BackupAndRestore`) makes the moves
            in it again.
        verbose: Whether events are printed.

    Attributes:
        events: List of `Event`: `step`, `epoch`, `batch`, `action`, `reason`,
            `layer`, `value`.

    Raises:
        ValueError: If an argument is out of its range; in `fit`, if the model
            cannot be measured or the metric is not in the logs.
        TrainingDivergedError: In `fit`, if float32 fails as well.
        StandardMissedError: In `fit`, if a required metric is missed.

    Example:

    >>> guard = tfmixed.callbacks.PrecisionGuard(
    ...     monitor="loss", baseline=0.5, required={"loss": 10.0}
    ... )
    >>> model = tfmixed.Sequential(
    ...     [keras.Input((4,)), keras.layers.Dense(1, dtype="mixed_float16")]
    ... )
    >>> model.compile("sgd", "mae")
    >>> x, y = np.ones((8, 4)), np.ones((8, 1))
    >>> _ = model.fit(x, y, batch_size=2, verbose=0, callbacks=[guard])
    >>> [event.action for event in guard.events]
    ['epoch']
    """

    async_safe = True

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        baseline: float | Sequence[float] | None = None,
        max_drop: float = 0.005,
        mode: str = "auto",
        patience: int = 2,
        retries: int = 1,
        climb_after: int | None = None,
        required: dict[str, standards.Standard] | None = None,
        log: str | os.PathLike[str] | None = None,
        verbose: bool = True,
    ) -> None:
        super().__init__()
        self._metric = standards.Metric(monitor, baseline, max_drop, mode)
        self._patience = standards.count("patience", patience, 1)
        self._retries = standards.count("retries", retries, 0)
        self._climb_after = climb_after
        if climb_after is not None:
            standards.count("climb_after", climb_after, 1)
        self._required = standards.checked(required)
        self._log = EventLog(log)
        self._verbose = verbose
        self._watch = Watch(self._bad_step)
        self._recovery: Recovery | None = None
        self._has_begun = False
        self._epoch = self._quiet = 0
        self._progress = standards.Progress(self._metric)
        self._has_climbed = False
        self._told: collections.Counter[str] = collections.Counter()

    @property
    def events(self) -> list[Event]:
        """What happened in the last `fit`, in order."""
        return self._log.events

    def record(self) -> dict[str, Any]:
        """Returns what happened as plain data, for a report."""
        ladder = self._recovery.ladder if self._recovery else None
        return {
            "monitor": self._metric.name,
            "required": self._required,
            "float32_layers": list(ladder.moved) if ladder else [],
            "rung": ladder.rung if ladder else None,
            "events": [vars(event) for event in self.events],
        }

    def on_train_begin(self, logs: Any = None) -> None:
        """Takes its place before the training function."""
        self._recovery = Recovery(
            self.model, self._watch, self._note, self._retries
        )
        self._watch.attach(self.model)
        self._has_begun = self._has_climbed = False
        self._told.clear()
        self._quiet = 0
        self._progress = standards.Progress(self._metric)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins, or goes on where a training was interrupted."""
        self._epoch = epoch
        self._begin()
        self._watch.new_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Takes its place again where another callback changed the model."""
        self._watch.before_batch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Looks at the metric of the epoch."""
        self._watch.check()
        value = self._metric.value(logs or {})
        if value is not None:
            self._note(
                "epoch", f"{self._metric.name} is {value:.4g}", None, value
            )
            self._judge(epoch, value)
        if self._quiet_epoch():
            self._climb()

    def on_train_end(self, logs: Any = None) -> None:
        """Gives the place back, and holds the result against the standard."""
        self._watch.detach()
        standards.check(self._required, logs or {})

    def _begin(self) -> None:
        self._watch.before_batch()
        if self._has_begun or self._recovery is None:
            return
        self._has_begun = True
        for event in self._log.begin(self._watch.step):
            self._recovery.ladder.redo(event.action, event.layer)
            if event.action == "epoch" and event.value is not None:
                self._progress.add(event.value, event.epoch)
        self._watch.before_batch()

    def _bad_step(self, where: int, batch: Any) -> Any:
        """Called when a step was not finite; returns the logs of a retry."""
        self._quiet = -1
        if self._recovery is None:
            return None
        return self._recovery.recover(where, batch, self._epoch)

    def _judge(self, epoch: int, value: float) -> None:
        """Acts on the metric of an epoch."""
        self._progress.add(value, epoch)
        if not self._metric.is_below(value, epoch):
            return
        self._quiet = -1
        recovery, batch = self._recovery, self._watch.last_batch
        if recovery is None or batch is None:
            return
        ladder = recovery.ladder
        if not ladder.has_16_bit:
            return
        target = self._metric.target(epoch)
        told = f"{self._metric.name} is {value:.4g} and not {target:.4g}"
        found = suspect(recovery.probe.measure(batch))
        if found is not None and ladder.move(found[0]):
            reason = f"{told}, and {found[1]}"
            self._note(rungs.LAYER, reason, None, layer=found[0])
            return
        is_late = 2 * (epoch + 1) >= (self.params.get("epochs") or 0)
        if self._progress.stalled < self._patience or not is_late:
            return
        for rung in (rungs.BFLOAT16, rungs.FLOAT32):
            if ladder.rung != rung and ladder.all_to(rung):
                reason = f"{told}, and no layer is to blame alone"
                self._note(rung, reason, None)
                self._progress.stalled = 0
                return

    def _quiet_epoch(self) -> bool:
        """Counts epochs without trouble; whether there were enough."""
        self._quiet += 1
        return self._climb_after is not None and (
            self._quiet >= self._climb_after
        )

    def _climb(self) -> None:
        if self._recovery is None or self._has_climbed:
            return
        if self._recovery.ladder.back():
            self._has_climbed = True
            reason = f"{self._quiet} epochs without trouble"
            self._note(rungs.BACK, reason, None)

    def _note(
        self,
        action: str,
        reason: str,
        batch: int | None,
        value: float | None = None,
        layer: str | None = None,
    ) -> None:
        step = self._watch.step
        event = Event(step, self._epoch, batch, action, reason, layer, value)
        self._log.add(event)
        self._told[action] += 1
        if not self._verbose or action == "epoch":
            return
        if action not in _REPEATING or self._told[action] <= _MOST_TOLD:
            print(event)
        if action in _REPEATING and self._told[action] == _MOST_TOLD:
            print("PrecisionGuard: more of these are only in its events.")
