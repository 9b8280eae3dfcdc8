"""Gets a batch trained whose step was not finite: the rungs, one by one."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmixed.callbacks import ladder as rungs
from tfmixed.callbacks.ladder import Ladder
from tfmixed.callbacks.watch import Watch
from tfmixed.health import cause as causes
from tfmixed.health import statistics
from tfmixed.health.cause import Cause
from tfmixed.health.probe import Probe
from tfmixed.loss_scale import NoLossScale
from tfmixed.optimizer import number

# As many batches in a row are no accident.
_TOO_MANY = 3
# The scale, a few layers one after the other, and the two for all layers.
_MOST_RUNGS = 8


class TrainingDivergedError(RuntimeError):
    """The training fails in float32 as well: precision is not the cause.

    Example:

    >>> model = tfmixed.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", lambda y, p: keras.ops.sqrt(-1.0 - (y - p) ** 2))
    >>> guard = tfmixed.callbacks.PrecisionGuard("loss", verbose=0)
    >>> x, y = np.ones((4, 2)), np.ones((4, 1))
    >>> try:
    ...     model.fit(x, y, batch_size=1, verbose=0, callbacks=[guard])
    ... except tfmixed.callbacks.TrainingDivergedError:
    ...     print("the root of a negative number is NaN in float32, too")
    the root of a negative number is NaN in float32, too
    """


class Recovery:
    """Retries a batch, lowers the scale, moves layers, until it trains.

    Args:
        model: A built, compiled model.
        watch: What has seen the batch.
        note: Called with an action, a reason and the number of the batch, and
            by keyword `value` and `layer`.
        retries: How often a batch is retried before it is measured.

    Attributes:
        ladder: What was moved so far.
        probe: What measures batches.
    """

    def __init__(
        self,
        model: keras.Model,
        watch: Watch,
        note: Callable[..., None],
        retries: int,
    ) -> None:
        self.probe = Probe(model)
        self.ladder = Ladder(model)
        self._watch = watch
        self._note = note
        self._retries = retries
        # Positions of the last batches that failed for a reason that no rung
        # mends: in float32 too, or for none that was found.
        self._hopeless: list[int] = []
        self._unexplained: list[int] = []

    def recover(self, where: int, batch: Any, epoch: int) -> Any:
        """Called when a step was not finite; returns the logs of a retry.

        Args:
            where: Number of the batch in the epoch.
            batch: The batch.
            epoch: Number of the epoch, from 0.

        Raises:
            TrainingDivergedError: If more precision does not help.
        """
        self._check_skips(where, epoch)
        count, row = _bad_data(batch)
        if count:
            found = causes.of_data(count, row)
            self._note("none", f"{found.message}; the step was skipped", where)
            return None
        for _ in range(self._retries if self._scale_falls() else 0):
            finite, logs = self._watch.retry(batch)
            if finite:
                scale = number(self._watch.optimizer.dynamic_scale)
                reason = f"finite at loss scale {scale:g}"
                self._note("retry", reason, where, value=scale)
                return logs
        return self._climb(batch, where, epoch)

    def _climb(self, batch: Any, where: int, epoch: int) -> Any:
        """Takes rung after rung until the batch trains."""
        algorithm = getattr(self._watch.optimizer, "loss_scale", None)
        for _ in range(_MOST_RUNGS):
            reading = self.probe.measure(batch, self._watch.failed_scale)
            found = causes.cause_of(reading, algorithm)
            if found.kind == causes.FLOAT32:
                return self._fails_in_float32(found, where, epoch)
            has_fallen = self._has_fallen_enough(found)
            if not has_fallen and not self._act(found, where):
                return None
            finite, logs = self._watch.retry(batch)
            if finite:
                if has_fallen:
                    self._note("retry", found.message, where)
                return logs
        return None

    def _act(self, found: Cause, where: int) -> bool:
        """Takes the first rung that changes something for this cause."""
        highest = found.highest_scale
        if highest is not None and self._can_lower(highest):
            self._watch.optimizer.dynamic_scale.assign(highest)
            self._note("lower scale", found.message, where, value=highest)
            return True
        if self.ladder.move(found.path):
            self._note(rungs.LAYER, found.message, where, layer=found.path)
            return True
        for rung in (rungs.BFLOAT16, rungs.FLOAT32):
            if self.ladder.rung != rung and self.ladder.all_to(rung):
                self._note(rung, found.message, where)
                return True
        self._note("none", found.message, where)
        return False

    def _has_fallen_enough(self, found: Cause) -> bool:
        """Whether the scale has already gone to where the batch fits."""
        if found.kind == causes.UNKNOWN:
            return not self._too_many(self._unexplained)
        if found.highest_scale is None:
            return False
        scale = number(self._watch.optimizer.dynamic_scale)
        return scale <= found.highest_scale and scale < self._watch.failed_scale

    def _fails_in_float32(self, found: Cause, where: int, epoch: int) -> None:
        self._note("none", found.message, where)
        if self._too_many(self._hopeless):
            raise TrainingDivergedError(
                f"{_TOO_MANY} batches in a row were not finite in float32 "
                f"either (the last: epoch {epoch + 1}, batch {where}; "
                f"{found.message}). More precision does not help: lower the "
                "learning rate, clip the gradients, or look at the model with "
                "tfmixed.blame(model, x, y)."
            )

    def _too_many(self, positions: list[int]) -> bool:
        """Notes a batch; whether it is one too many in a row."""
        here = self._watch.position
        if not positions or here > positions[-1]:
            positions.append(here)
        del positions[:-_TOO_MANY]
        row = list(range(here - _TOO_MANY + 1, here + 1))
        return positions == row

    def _check_skips(self, where: int, epoch: int) -> None:
        optimizer = self._watch.optimizer
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return
        raise TrainingDivergedError(
            f"Batch {where} of epoch {epoch + 1} gave a step that is not "
            f"finite, and the optimizer {type(optimizer).__name__} has applied "
            "it: the weights are lost. Use tfmixed.prepare(model), whose "
            "optimizer skips such steps."
        )

    def _scale_falls(self) -> bool:
        """Whether a bad step has lowered the scale, or will."""
        algorithm = getattr(self._watch.optimizer, "loss_scale", None)
        if algorithm is None:
            return True
        scale = number(self._watch.optimizer.dynamic_scale)
        moves = algorithm.clip(scale / 2) != algorithm.clip(scale)
        return moves and not algorithm.at_floor(scale)

    def _can_lower(self, highest: float) -> bool:
        optimizer = self._watch.optimizer
        algorithm = getattr(optimizer, "loss_scale", None)
        if isinstance(algorithm, NoLossScale):
            return False
        lowest = getattr(algorithm, "minimum", 1.0)
        return lowest <= highest < number(optimizer.dynamic_scale)


def _bad_data(batch: Any) -> tuple[int, int | None]:
    """How many values of a batch are not finite, and the first row."""
    total, first = 0, float("inf")
    for value in keras.tree.flatten(batch):
        for tensor in getattr(value, "values", [value]):
            is_float = tf.is_tensor(tensor) and tensor.dtype.is_floating
            if is_float and isinstance(tensor, tf.Tensor) and tensor.shape.rank:
                count, row = statistics.bad_values(tensor)
                total += int(count)
                first = min(first, float(row))
    return total, None if first == float("inf") else int(first)
