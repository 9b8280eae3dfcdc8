"""Tells of batches whose changing shapes make XLA compile without end.

A step in a graph is traced once or twice, and Keras then lets every dimension
that has changed be unknown: other shapes cost nothing more. XLA knows no
unknown dimensions. It compiles the step anew for each shape, within the
runtime and without a word to Python, so that a count of traces would show
nothing. The compiled step itself therefore writes down the shapes it has seen,
into a small table on the device, which is read a few times in a training.
"""

import collections
import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmixed.skips import warn

# Fewer shapes are ordinary: an odd last batch, a few buckets.
FEWEST = 5
# As many are remembered; and so many are too many for any number of steps.
MOST = 32
_FIRST_LOOK = 32
_SHOWN = 5
# Of a row: the rank of the first input that varies, and sizes.
_WIDTH = 24


class Shapes:
    """The shapes for which the training step of a model was compiled.

    Args:
        whole: Whether the whole step is compiled; otherwise clusters in it,
            whose shapes vary in the size of the batch alone.
    """

    def __init__(self, whole: bool = True) -> None:
        self.whole = whole
        # One table, made at once: a later trace of the step may make none.
        with tf.init_scope():
            empty = tf.fill([MOST, _WIDTH], tf.constant(-1, tf.int64))
            # Not int32, which TensorFlow keeps off a GPU.
            self._table = tf.Variable(empty, trainable=False)
        self._known: set[tuple[int, ...]] = set()

    def note(self, data: Any) -> None:
        """Writes down the shapes of a batch; called in a step, under XLA.

        Args:
            data: What `train_step` takes.
        """
        tensors = [x for x in keras.tree.flatten(data) if tf.is_tensor(x)]
        # A ragged tensor has no shape of numbers; XLA takes none anyway.
        if not tensors or not all(
            isinstance(x, tf.Tensor) and x.shape.rank is not None
            for x in tensors
        ):
            return
        if not self.whole:
            tensors = tensors[:1]
            if not tensors[0].shape[1:].is_fully_defined():
                return
        shapes = [x.shape for x in tensors]
        varying = [x for x in tensors if not x.shape.is_fully_defined()]
        if not varying:
            self._known.add(tuple(shapes[0]))
            return
        rank = tf.constant([varying[0].shape.rank], tf.int64)
        row = tf.concat([rank, *(tf.shape(x, tf.int64) for x in varying)], 0)
        row = row[:_WIDTH]
        padding = tf.fill([_WIDTH - row.shape[0]], tf.constant(-1, tf.int64))
        _write(self._table, tf.concat([row, padding], 0))

    def seen(self) -> list[tuple[int, ...]]:
        """The shapes so far, of the first input that varies; waits for them.

        One shape stands here several times if other inputs varied with it.
        """
        found = sorted(self._known)
        for rank, *sizes in self._table.numpy().tolist():
            if rank >= 0:
                found.append(tuple(sizes[:rank]))
        return found


def _write(table: Any, row: Any) -> None:
    """Adds a row to a table, unless it is there already or the table full."""
    rows = tf.convert_to_tensor(table)
    is_known = tf.reduce_any(tf.reduce_all(rows == row, axis=1))
    used = tf.reduce_sum(tf.cast(rows[:, 0] >= 0, tf.int64))
    is_next = tf.range(MOST, dtype=tf.int64) == used
    here = tf.logical_and(is_next, tf.logical_not(is_known))
    table.assign(tf.where(here[:, tf.newaxis], row, rows))


def describe(
    shapes: list[tuple[int, ...]],
    steps: int,
    seconds: list[float],
    whole: bool = True,
) -> str | None:
    """Returns a message about too many shapes, or None if they are ordinary.

    Ordinary are a few, and as many as there may be buckets while most steps
    bring none that is new.

    Args:
        shapes: The shapes that a step was compiled for.
        steps: The steps in which they were seen.
        seconds: The time of each call of the training step, of one step or
            of as many as `steps_per_execution` says.
        whole: As for `Shapes`.

    Example:

    >>> describe([(32, 10), (17, 10)], 100, [0.1] * 100) is None
    True
    """
    is_endless = len(shapes) >= FEWEST and len(shapes) * 4 > steps
    if not is_endless and len(shapes) < MOST:
        return None
    examples = ", ".join(map(str, list(dict.fromkeys(shapes))[-_SHOWN:]))
    at_least = "at least " if len(shapes) >= MOST else ""
    what = "the whole step" if whole else "parts of the prepared model"
    told = (
        f"The batches had {at_least}{len(shapes)} different shapes in {steps} "
        f"training steps, among them {examples}. XLA compiles {what} "
        f"anew for each of them{_cost(len(shapes), seconds)}."
    )
    if not whole:
        return (
            f"{told} Make batches of one size, for example by "
            "tf.data.Dataset.batch(..., drop_remainder=True), or use "
            "tfmixed.prepare(model, fast=False), which compiles nothing."
        )
    return (
        f"{told} Pad the batches "
        "to a few lengths: keras.utils.pad_sequences(..., maxlen=...), "
        "tf.data.Dataset.bucket_by_sequence_length(..., "
        "pad_to_bucket_boundary=True, drop_remainder=True) or padded_batch("
        "..., padded_shapes=..., drop_remainder=True). Or use "
        "compile(jit_compile=False): a graph takes all shapes."
    )


def _cost(count: int, seconds: list[float]) -> str:
    """What the slowest calls took, and the others, as measured."""
    slowest = sorted(seconds, reverse=True)
    first, others = slowest[:count], slowest[count:]
    if not others:
        return ""
    return (
        f": the {len(first)} slowest calls of the step took "
        f"{sum(first):.3g} s, the others {statistics.median(others):.2g} s each"
    )


class RetraceReporter(keras.callbacks.Callback):
    """Tells once of a training whose batches keep changing their shape.

    Args:
        find_shapes: Returns the `Shapes` of the model; None before its first
            step under XLA.
    """

    # Up to Keras 3.15 callbacks of TensorFlow run between steps anyway;
    # once they may run beside them, this one is not what makes steps wait.
    async_safe = True

    def __init__(self, find_shapes: Callable[[], Shapes | None]) -> None:
        super().__init__()
        self._find_shapes = find_shapes
        self._seconds: list[float] = []
        self._started: float | None = None
        self._stopped: float | None = None
        self._begun = 0
        self._ended: list[int] = []
        self._steps = 0
        self._next_look = _FIRST_LOOK
        self._has_told = False
        self._before: collections.Counter[tuple[int, ...]]
        self._before = collections.Counter()

    def on_train_begin(self, logs: Any = None) -> None:
        """Remembers for which shapes the step was compiled before."""
        shapes = self._find_shapes()
        if shapes is not None:
            self._before = collections.Counter(shapes.seen())

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Looks after 32 steps, 64, 128 and so on: to look is to wait."""
        self._close(time.perf_counter())
        if self._steps >= self._next_look:
            self._next_look = 2 * self._steps
            self._look()
        self._begun += 1
        self._started = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts; perhaps late and in another thread, so times are not here."""
        # To append is safe beside other threads, which `+= 1` is not.
        self._ended.append(batch)

    def on_test_begin(self, logs: Any = None) -> None:
        """Stops the clock: what follows is no training step."""
        self._stopped = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts the last step, if there were data for it."""
        if len(self._ended) < self._begun:
            self._begun = len(self._ended)
            self._started = None
        self._close(time.perf_counter())

    def on_train_end(self, logs: Any = None) -> None:
        """Looks for the last time, also after a short training."""
        self._look()

    def _close(self, now: float) -> None:
        """Takes the time of the step that was begun, if any."""
        stopped = self._stopped
        self._stopped = None
        if self._started is None:
            return
        self._seconds.append((stopped or now) - self._started)
        self._started = None
        # Not from `batch`: versions of Keras name the first or the last step.
        self._steps += self.model.steps_per_execution

    def _look(self) -> None:
        shapes = self._find_shapes()
        if shapes is None or self._has_told:
            return
        new = collections.Counter(shapes.seen()) - self._before
        message = describe(
            list(new.elements()), self._steps, self._seconds, shapes.whole
        )
        if message is not None:
            self._has_told = True
            warn(message)
