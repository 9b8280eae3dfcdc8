"""The guard around a training step: all of it happens, or none of it.

Stock Keras and PyTorch AMP leave the weights alone when a gradient is not
finite, but by then the forward pass has already moved the statistics of
normalization layers and the metrics. Here every variable that a step may have
written is remembered before it and put back if an optimizer skipped it. Most
steps pay next to nothing: to remember is to keep a reference, and nothing is
written unless the step was bad.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfmixed import _keras
from tfmixed.casting import float32_activity_regularizers
from tfmixed.gradients import finite_and_norm
from tfmixed.optimizer import LossScaleOptimizer

# The model whose step is running in this thread; replicas are threads.
_stepping: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "tfmixed_stepping", default=None
)


class Snapshot:
    """The values of variables before a step.

    Args:
        variables: Keras variables.
    """

    def __init__(self, variables: Iterable[Any]) -> None:
        self._variables = list({id(v): v.value for v in variables}.values())
        self._values = [tf.convert_to_tensor(v) for v in self._variables]

    def still_finite(self) -> Any:
        """Returns a boolean scalar: nothing that was finite no longer is.

        A batch with one huge number can leave the loss and the gradients
        finite and a moving variance infinite.
        """
        pairs = [
            pair
            for pair in zip(self._variables, self._values, strict=True)
            if pair[1].dtype.is_floating and _may_be_written(pair[0])
        ]
        now, _ = finite_and_norm(tf.convert_to_tensor(v) for v, _ in pairs)
        return tf.cond(
            now,
            lambda: tf.constant(True),
            lambda: tf.reduce_all(
                [
                    tf.reduce_all(
                        tf.math.is_finite(variable) | ~tf.math.is_finite(value)
                    )
                    for variable, value in pairs
                ]
            ),
        )

    def restore_unless(self, finite: Any) -> None:
        """Puts the values back, on every replica, where `finite` is false.

        Args:
            finite: Boolean scalar, the same on every replica.
        """
        pairs = [
            (variable, value)
            for variable, value in zip(
                self._variables, self._values, strict=True
            )
            if _may_be_written(variable)
        ]
        if not pairs:
            return
        variables, values = zip(*pairs, strict=True)
        if _keras.needs_merge_call():
            tf.distribute.get_replica_context().merge_call(
                _restore_merged, args=(finite, variables, values)
            )
        else:
            tf.cond(
                finite,
                lambda: None,
                lambda: _assign_all(variables, values),
            )


def _assign_all(variables: Iterable[Any], values: Iterable[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _restore_merged(
    strategy: Any, finite: Any, variables: Any, values: Any
) -> None:
    # As in the optimizer: replicas may not branch by themselves.
    def restore() -> None:
        for variable, value in zip(variables, values, strict=True):
            strategy.extended.update(
                variable,
                lambda replica_variable, old: replica_variable.assign(old),
                args=(value,),
                group=False,
            )

    finite = strategy.experimental_local_results(finite)[0]
    tf.cond(finite, lambda: None, restore)


def _may_be_written(variable: Any) -> bool:
    """Returns false where the graph so far only reads the variable.

    That spares the weights of a frozen backbone, which are not trainable but
    never change either: XLA would copy them for the branch that restores.
    """
    if tf.executing_eagerly() or tf.distribute.has_strategy():
        return True
    graph = tf.compat.v1.get_default_graph()
    handle = graph.capture(variable.handle)
    return any(op.type != "ReadVariableOp" for op in handle.consumers())


@contextlib.contextmanager
def stepping(model: Any) -> Iterator[None]:
    """Inside the block a step of the model runs: `is_stepping` is true."""
    if is_stepping(model):
        # The step of a subclass called that of its base class.
        yield
        return
    token = _stepping.set(model)
    try:
        yield
    finally:
        _stepping.reset(token)


def in_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a `test_step`: `is_stepping` is true inside it."""

    @functools.wraps(step)
    def run(self: Any, data: Any) -> Any:
        with stepping(self), float32_activity_regularizers(self):
            return step(self, data)

    return run


def is_stepping(model: Any) -> bool:
    """Returns whether a step of this model is running in this thread."""
    return _stepping.get() is model


def all_or_nothing(step: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a `train_step`: undone if an optimizer skipped it.

    Where the model has no loss-scaling optimizer there is nobody to say
    whether the step was finite, and the step runs as it is.
    """

    @functools.wraps(step)
    def run(self: Any, data: Any) -> Any:
        if is_stepping(self):
            # Called by the step of a subclass, which is guarded.
            return step(self, data)
        with stepping(self):
            # Builds the layers, among which regularizers are looked for.
            self.prepare_step(data)
            with float32_activity_regularizers(self):
                return _guarded(self, step, data)

    return run


def _guarded(model: Any, step: Callable[..., Any], data: Any) -> Any:
    optimizers = loss_scale_optimizers(model)
    if not optimizers:
        return step(model, data)
    state = Snapshot(model.non_trainable_variables)
    metrics = Snapshot(model.metrics_variables)
    before = [_skipped(optimizer) for optimizer in optimizers]
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.stages.watch(state.still_finite))
        logs = step(model, data)
    after = [_skipped(optimizer) for optimizer in optimizers]
    finite = tf.reduce_all(tf.equal(before, after))
    state.restore_unless(finite)
    metrics.restore_unless(finite)
    if not isinstance(logs, dict):
        return logs
    restored = {**logs, **model.get_metrics_result()}
    if "loss" in logs:
        # Before the first finite step of an epoch there is no mean. The loss
        # of this step is better than none: it is finite while the scale finds
        # its level, and `TerminateOnNaN` is not to stop the training then.
        loss = tf.convert_to_tensor(restored["loss"])
        restored["loss"] = tf.where(tf.math.is_nan(loss), logs["loss"], loss)
    return {name: restored[name] for name in logs}


def _skipped(optimizer: LossScaleOptimizer) -> Any:
    return tf.cast(tf.convert_to_tensor(optimizer.skipped_steps), tf.int64)


def loss_scale_optimizers(model: Any) -> list[LossScaleOptimizer]:
    """Returns the loss-scaling optimizers among the model's attributes.

    More than one where the model trains in parts, as a GAN does.
    """
    found = {
        id(value): value
        for value in vars(model).values()
        if isinstance(value, LossScaleOptimizer)
    }
    return list(found.values())
