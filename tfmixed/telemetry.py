"""Step records: what each training step did, kept on the device.

A row a step, in a ring buffer that the step itself writes: no call waits for
the device, and it works in a loop on the device (`steps_per_execution`), under
XLA and on several replicas. Whoever wants to know reads the rows now and then,
before the buffer comes round.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfmixed import _keras
from tfmixed import gradients as gradient_lib
from tfmixed.loss_scale import StepOutcome

_CAPACITY = 1024
_SCALE, _FINITE, _NORM = range(3)


class Rows(NamedTuple):
    """What some consecutive steps did, an entry a step.

    Args:
        step: int64 array, the number of the step; the first that was recorded
            has 0.
        loss_scale: float32 array, the scale that the step used; 1.0 without
            loss scaling.
        finite: Boolean array, whether loss and gradients were finite on every
            replica.
        gradient_norm: float32 array, the norm of all unscaled gradients. With
            several replicas: the root of the sum of the squares of theirs.
    """

    step: np.ndarray
    loss_scale: np.ndarray
    finite: np.ndarray
    gradient_norm: np.ndarray


class StepRecords:
    """A ring buffer on the device with a row for each step.

    Create it in the scope of the strategy that the steps run under, outside
    of any `tf.function`.

    Args:
        capacity: Integer, how many of the last steps are kept.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self.capacity = capacity
        with tf.init_scope():
            self._table = variable(tf.zeros([capacity, 3]))
            # Not int32, which TensorFlow keeps off a GPU.
            self._count = variable(tf.constant(0, tf.int64))

    def write(self, scale: Any, outcome: StepOutcome) -> None:
        """Adds a row; called in the step.

        Args:
            scale: Scalar tensor, the scale that the step used.
            outcome: The same on every replica.
        """
        count = tf.convert_to_tensor(self._count)
        parts = (scale, outcome.finite, outcome.gradient_norm)
        row = [tf.cast(part, tf.float32) for part in parts]
        # Replicas that write need a whole value; and XLA writes it in place.
        table = tf.tensor_scatter_nd_update(
            tf.convert_to_tensor(self._table),
            tf.reshape(count % self.capacity, [1, 1]),
            tf.stack(row)[tf.newaxis],
        )
        self._table.assign(table)
        self._count.assign(count + 1)

    def counted(self) -> Any:
        """Returns how many rows were written so far, a tensor; in the step."""
        return tf.convert_to_tensor(self._count)

    def last_finite(self) -> Any:
        """Returns whether the last step was finite, a tensor; in the step."""
        count = tf.convert_to_tensor(self._count)
        table = tf.convert_to_tensor(self._table)
        return table[(count - 1) % self.capacity, _FINITE] > 0

    def count(self) -> int:
        """Returns how many rows were written so far; waits for the device."""
        return int(tf.convert_to_tensor(self._count).numpy())

    def read(self, first: int = 0) -> Rows:
        """Returns the rows from step `first` on; waits for the device.

        Args:
            first: Number of a step. Rows that were overwritten since are left
                out.
        """
        count = self.count()
        steps = np.arange(max(first, count - self.capacity), count)
        table = tf.convert_to_tensor(self._table).numpy()
        rows = table[steps % self.capacity]
        return Rows(
            steps, rows[:, _SCALE], rows[:, _FINITE] > 0, rows[:, _NORM]
        )


def variable(value: Any) -> Any:
    """Returns a variable for what a step writes down.

    Args:
        value: The first value, the same on every replica as all later ones.
    """
    # As the counters of the optimizer: every replica has the same value.
    return tf.Variable(
        value,
        trainable=False,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def outcome_of(finite: Any, norm: Any, largest: Any = None) -> StepOutcome:
    """Returns what all replicas together did, the same on each of them.

    Args:
        finite: Boolean scalar of this replica.
        norm: float32 scalar, the norm of the gradients of this replica.
        largest: float32 scalar, the largest magnitude among them, or `None`
            if nobody asks for it.
    """
    if not tf.distribute.has_strategy():
        return StepOutcome(finite, norm, largest)
    failures = tf.cast(tf.logical_not(finite), tf.float32)
    context = tf.distribute.get_replica_context()
    parts = tf.stack([failures, tf.square(norm)])
    if largest is not None:
        # Replicas can add but not compare: each adds 0 in the place of others.
        places = tf.one_hot(
            context.replica_id_in_sync_group,
            context.num_replicas_in_sync,
            on_value=largest,
            off_value=tf.zeros_like(largest),
        )
        parts = tf.concat([parts, places], 0)
    # One message between the replicas, not two.
    sums = context.all_reduce(tf.distribute.ReduceOp.SUM, parts)
    if largest is not None:
        largest = tf.reduce_max(sums[2:])
    return StepOutcome(tf.equal(sums[0], 0), tf.sqrt(sums[1]), largest)


def attach(optimizer: Any, steps_per_execution: int = 1) -> bool:
    """Makes the steps of an optimizer be recorded from their next trace on.

    A `tfmixed.LossScaleOptimizer` records by itself. Of any other optimizer
    the instance, not its class, gets an `apply` that takes notes first.

    Args:
        optimizer: A Keras optimizer.
        steps_per_execution: How many steps run before anybody can read.

    Returns:
        Whether anything changed, so that a step traced before is out of date.
    """
    present = records_of(optimizer)
    wanted = max(_CAPACITY, 2 ** math.ceil(math.log2(4 * steps_per_execution)))
    if present is not None and present.capacity >= wanted:
        return False
    records = StepRecords(wanted)
    if not hasattr(optimizer, "telemetry"):
        _keras.set_instance_apply(
            optimizer, functools.partial(_recorded_apply, optimizer)
        )
    vars(optimizer)["telemetry"] = records
    return True


def records_of(optimizer: Any) -> StepRecords | None:
    """Returns the records of an optimizer; None if it keeps none."""
    return getattr(optimizer, "telemetry", None)


@tf.autograph.experimental.do_not_convert
def _recorded_apply(
    optimizer: Any, grads: Iterable[Any], trainable_variables: Any = None
) -> Any:
    """The `apply` of an optimizer that knows nothing of records."""
    grads = list(grads)
    scale = scale_of(optimizer)
    finite, norm = gradient_lib.finite_and_norm(grads)
    outcome = outcome_of(finite, norm / scale)
    result = type(optimizer).apply(optimizer, grads, trainable_variables)
    optimizer.telemetry.write(scale, outcome)
    return result


def scale_of(optimizer: Any) -> Any:
    """Returns the scale of the step that is about to be applied, a tensor.

    Args:
        optimizer: A Keras optimizer, with or without loss scaling.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        if optimizer.built:
            return tf.convert_to_tensor(optimizer.dynamic_scale)
        return tf.constant(float(optimizer.initial_scale))
    return tf.constant(float(optimizer.loss_scale_factor or 1.0))
