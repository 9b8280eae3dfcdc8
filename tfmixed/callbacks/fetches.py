"""Measures what a training step fetches, in the graph of the step itself.

Keras hands `fit`'s train function an iterator of `tf.data`, whatever the data
is, and the function fetches from it in its graph: there is no moment in Python
between the batch and the step. So the function is given an iterator that
writes down, on the host and within that graph, how long a fetch took and how
many examples came of it.
"""

import itertools
import math
import time
import weakref
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf


class Fetched(NamedTuple):
    """What was fetched; NaN is what cannot be told.

    Args:
        waited: Seconds for which the step had to wait for its input.
        examples: Number of examples, over all replicas.
        steps: Number of batches.
    """

    waited: float
    examples: float
    steps: float


_NOTHING = Fetched(0.0, 0.0, 0.0)
_numbers = itertools.count()
_meters: "weakref.WeakValueDictionary[int, Meter]"
_meters = weakref.WeakValueDictionary()


class Meter:
    """Sums up what is fetched from the iterators that it watches.

    Args:
        strategy: The `tf.distribute` strategy that the batches are for.
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        # Functions are traced anew for a meter that they do not know.
        self.number = next(_numbers)
        _meters[self.number] = self
        with tf.init_scope(), tf.device("CPU:0"):
            self._total = tf.Variable(
                tf.zeros(len(Fetched._fields), tf.float64), trainable=False
            )
        self._seen = _NOTHING

    def watch(self, iterator: Any) -> "WatchedIterator":
        """Returns an iterator over the same batches that is measured."""
        return WatchedIterator(iterator, self)

    def add(self, waited: Any, examples: Any, steps: Any) -> None:
        """Adds what was fetched, in the graph where there is one."""
        fetched = [tf.cast(x, tf.float64) for x in (waited, examples, steps)]
        self._total.assign_add(tf.stack(fetched))

    def read(self) -> Fetched:
        """Returns what was fetched since the last call.

        The numbers are on the host: this does not wait for a device.
        """
        total = Fetched(*self._total.value().numpy().tolist())
        new = Fetched(*(a - b for a, b in zip(total, self._seen, strict=True)))
        self._seen = total
        return new

    def reset(self) -> None:
        """Forgets all, also that something could not be told."""
        self._total.assign(tf.zeros_like(self._total))
        self._seen = _NOTHING


class WatchedIterator(tf.data.Iterator):
    """An iterator of `tf.data` or `tf.distribute` whose fetches are measured.

    Args:
        iterator: The iterator.
        meter: Takes the numbers.
    """

    def __init__(self, iterator: Any, meter: Meter) -> None:
        super().__init__()
        self._watched = iterator
        self._meter = meter

    @property
    def element_spec(self) -> Any:
        """The type of a batch."""
        return self._watched.element_spec

    @property
    def _type_spec(self) -> "WatchedSpec":
        spec = tf.type_spec_from_value(self._watched)
        return WatchedSpec(spec, self._meter.number)

    def __next__(self) -> Any:
        # At its end it raises StopIteration in Python and no error of a graph.
        return self._timed(lambda: next(self._watched))

    def get_next(self) -> Any:
        """Returns the next batch."""
        return self._timed(self._watched.get_next)

    def get_next_as_optional(self) -> Any:
        """Returns the next batch, or an optional without a value."""
        waited: Any = math.nan
        if tf.executing_eagerly():
            start = time.perf_counter()
            batch = self._watched.get_next_as_optional()
            waited = time.perf_counter() - start
        else:
            # With several steps in an execution, TensorFlow fetches the next
            # batch beside the step before: its time is not one of waiting.
            batch = self._watched.get_next_as_optional()
        has_value = batch.has_value()
        examples = tf.cond(
            has_value,
            lambda: self._examples(batch.get_value()),
            lambda: tf.constant(0.0, tf.float64),
        )
        with tf.device("CPU:0"):
            self._meter.add(waited, examples, has_value)
        return batch

    def _timed(self, fetch: Callable[[], Any]) -> Any:
        with tf.device("CPU:0"):
            before = tf.timestamp()
        with tf.control_dependencies([before]):
            batch = fetch()
        parts = tf.nest.flatten(batch, expand_composites=True)
        with tf.device("CPU:0"), tf.control_dependencies(parts):
            waited = tf.timestamp() - before
        examples = self._examples(batch)
        with tf.device("CPU:0"):
            self._meter.add(waited, examples, 1.0)
        return batch

    def _examples(self, batch: Any) -> Any:
        """Counts the rows of the first input, over all replicas."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        for part in keras.tree.flatten(x):
            local = self._meter.strategy.experimental_local_results(part)
            counts = [_rows(tensor) for tensor in local]
            # Keras makes an optional without a value of an input of None.
            if not any(count is None for count in counts):
                return tf.add_n([tf.cast(n, tf.float64) for n in counts])
        return tf.constant(math.nan, tf.float64)


class WatchedSpec(tf.TypeSpec):
    """Type of a `WatchedIterator`, so that a function can take one.

    Args:
        spec: Type of the iterator that is watched.
        number: Number of the meter.
    """

    def __init__(self, spec: Any, number: int) -> None:
        self._spec = spec
        self._number = number

    @property
    def value_type(self) -> type:
        """The class of the values."""
        return WatchedIterator

    @property
    def _component_specs(self) -> Any:
        return (self._spec,)

    def _serialize(self) -> Any:
        return self._spec, self._number

    def _to_components(self, value: Any) -> Any:
        return (value._watched,)

    def _from_components(self, components: Any) -> WatchedIterator:
        return WatchedIterator(components[0], _meters[self._number])


def _rows(tensor: Any) -> Any:
    """Returns the length of the first axis; None where there is none."""
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.nrows()
    if isinstance(tensor, tf.SparseTensor):
        return tensor.dense_shape[0]
    if not isinstance(tensor, tf.Tensor) or tensor.shape.rank == 0:
        return None
    # Not `[0]`, which would fail on a scalar of unknown rank.
    return tf.reduce_prod(tf.shape(tensor, tf.int64)[:1])
