"""The loss-scaling optimizer: a thin shell over `tfmixed.loss_scale`.

It decides once a step, for all replicas together, whether every gradient and
the loss were finite. If so, the inner optimizer gets the unscaled gradients;
if not, neither it nor any weight is touched.
"""

import threading
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed import gradients as gradient_lib
from tfmixed import loss_scale as loss_scale_lib
from tfmixed import skips as skip_lib
from tfmixed.fast import update
from tfmixed.loss_scale import LossScaleState
from tfmixed.loss_scale import StepOutcome
from tfmixed.stages import Stages
from tfmixed.stages import check_untouched
from tfmixed.telemetry import StepRecords
from tfmixed.telemetry import outcome_of

# The order in which the variables are created is the saved format. The first
# two after the base class's own (iteration, learning_rate) are those of the
# Keras class, with its names, so that its files can be read. The memory of the
# algorithm comes last: most have none.
_NUM_KERAS_VARIABLES = 4
_NUM_VARIABLES = 7


@keras.saving.register_keras_serializable(package="tfmixed")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Wraps an optimizer so that float16 gradients survive and bad steps don't.

    A subclass of `keras.optimizers.LossScaleOptimizer`, so that Keras never
    wraps it a second time. With `model.fit` there is nothing more to do. In a
    loop of your own, three calls make a step:

    ```python
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(loss_fn(y, model(x, training=True)))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    ```

    Gradient clipping belongs to the inner optimizer (`Adam(clipnorm=1.0)`),
    which sees unscaled gradients. To change gradients by hand, unscale them
    first; `apply` then knows not to divide again:

    ```python
    gradients = optimizer.unscale(tape.gradient(loss, variables))
    gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
    optimizer.apply(gradients, variables)
    ```

    No call waits for the device; reading a counter, `int(skipped_steps)`,
    does. Sparse gradients (`tf.IndexedSlices`) stay sparse.

    Args:
        inner_optimizer: The `keras.optimizers.Optimizer` to wrap, or its
            name. It must have no loss scaling of its own.
        loss_scale: `"dynamic"`; a number, for a fixed scale; `"none"` for no
            scaling (non-finite steps are still skipped); or an object such as
            `tfmixed.DynamicLossScale(initial=1024.0)`.
        name: String. The name of the optimizer.

    Raises:
        ValueError: If the inner optimizer already scales the loss.

    Example:

    >>> optimizer = tfmixed.LossScaleOptimizer("sgd", loss_scale=128)
    >>> weight = keras.Variable([1.0])
    >>> with tf.GradientTape() as tape:
    ...     loss = optimizer.scale_loss(weight * 2.0)
    >>> optimizer.apply(tape.gradient(loss, [weight]), [weight])
    >>> int(optimizer.skipped_steps)
    0

    Source of the method: Micikevicius et al., 2018,
    https://arxiv.org/abs/1710.03740.
    """

    def __init__(
        self,
        inner_optimizer: Any,
        loss_scale: Any = "dynamic",
        *,
        name: str | None = None,
    ) -> None:
        inner_optimizer = keras.optimizers.get(inner_optimizer)
        _check_inner(inner_optimizer)
        algorithm = loss_scale_lib.get(loss_scale)
        super().__init__(
            inner_optimizer,
            initial_scale=algorithm.initial,
            dynamic_growth_steps=getattr(algorithm, "growth_interval", 0),
            name=name,
        )
        self.loss_scale = algorithm
        self.first_state = algorithm.initial_state()
        self._loss_was_scaled = False
        self._reported = (0, 0)
        # Filled by `telemetry.attach`; not saved, and no part of the state.
        self.telemetry: StepRecords | None = None
        self.stages = Stages()
        # Replicas are threads.
        self._before_changes = threading.local()

    def build(self, var_list: Sequence[Any]) -> None:
        """Creates the state; builds the inner optimizer unless it is built."""
        if self.built:
            return
        first = self.first_state
        self.step_counter = self._add_scalar(
            "step_counter", "int", first.good_steps
        )
        self.dynamic_scale = self._add_scalar(
            "dynamic_scale", "float32", first.scale
        )
        self._skipped_steps = self._add_scalar("skipped_steps", "int", 0)
        self._consecutive_skips = self._add_scalar(
            "consecutive_skips", "int", first.bad_steps
        )
        self._last_step_finite = self._add_scalar(
            "last_step_finite", "bool", True
        )
        # Not of `first_state`, which is of another algorithm where a running
        # optimizer was wrapped.
        memory = self.loss_scale.initial_state().memory
        for index, value in enumerate(memory):
            self._add_scalar(f"loss_scale_memory_{index}", "float32", value)
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(var_list)
        # Not the method of the class above, which would create its variables
        # once more.
        keras.optimizers.Optimizer.build(self, var_list)

    def _add_scalar(self, name: str, dtype: str, value: float) -> Any:
        # The value is the same on every replica, so one replica's is enough
        # when replicas without a merge call (XLA on GPUs) write it.
        return self.add_variable(
            shape=(),
            dtype=dtype,
            # `Constant` multiplies in some versions; no boolean can.
            initializer=lambda shape, dtype: tf.constant(value, dtype, shape),
            aggregation="only_first_replica",
            name=name,
        )

    @property
    def skipped_steps(self) -> Any:
        """Integer variable: steps skipped since the beginning."""
        return self._skipped_steps if self.built else 0

    @property
    def consecutive_skips(self) -> Any:
        """Integer variable: steps skipped in a row up to now."""
        return self._consecutive_skips if self.built else 0

    @property
    def last_step_finite(self) -> Any:
        """Boolean variable: whether the last step was applied."""
        return self._last_step_finite if self.built else True

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss times the scale, in float32 at least.

        Args:
            loss: Floating point tensor of any shape, usually a scalar.
        """
        self._loss_was_scaled = True
        loss = tf.convert_to_tensor(loss)
        if loss.dtype.size < 4:
            # 2^15 times a float16 loss of 2 is already infinite.
            loss = tf.cast(loss, tf.float32)
        self.stages.scaled(loss)
        if isinstance(self.loss_scale, loss_scale_lib.NoLossScale):
            return loss
        return loss * tf.cast(self._current_scale(), loss.dtype)

    @tf.autograph.experimental.do_not_convert
    def unscale(self, gradients: Iterable[Any]) -> list[Any]:
        """Returns gradients divided by the scale, to be changed by hand.

        Call it once between `scale_loss` and `apply`, in the same function as
        `apply`, which will not divide again.

        Args:
            gradients: Gradients of the scaled loss; `None` and
                `tf.IndexedSlices` are passed through as such.

        Raises:
            RuntimeError: If it was already called since the last `apply`.
        """
        gradients = list(gradients)
        finite, _ = gradient_lib.finite_and_norm(gradients)
        self.stages.unscaled(finite)
        if self.loss_scale.uses_largest:
            # Clipping by hand would hide how large they were.
            self._before_changes.largest = (
                _largest(gradients) / self._current_scale()
            )
        return gradient_lib.divide(gradients, self._current_scale())

    @tf.autograph.experimental.do_not_convert
    def apply(
        self, grads: Iterable[Any], trainable_variables: Any = None
    ) -> None:
        """Updates the variables, or skips the step on every replica.

        Args:
            grads: Gradients of the scaled loss, or what `unscale` returned.
            trainable_variables: The variables, in the same order. May be left
                out once the optimizer is built.

        Raises:
            RuntimeError: If the loss was never passed through `scale_loss`.
        """
        grads = list(grads)
        if not grads:
            return
        if tf.distribute.in_cross_replica_context():
            raise ValueError(
                "apply() must be called in a replica context: call it inside "
                "the function that you pass to strategy.run()."
            )
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if not self.built:
            self._build_in_step(trainable_variables)
        self._check_scaled()
        unscaled, flags = self.stages.applied()
        finite, norm = gradient_lib.finite_and_norm(grads)
        finite = tf.reduce_all([finite, *flags])
        if not unscaled and not self._is_off():
            check_untouched(grads, self.dynamic_scale)
            norm = norm / self.dynamic_scale
        largest = self._largest_of(grads, unscaled)
        outcome = outcome_of(finite, norm, largest)
        if _keras.needs_merge_call():
            tf.distribute.get_replica_context().merge_call(
                self._apply_merged,
                args=(outcome, grads, trainable_variables, unscaled, norm),
            )
        else:
            self._apply_or_skip(
                outcome,
                lambda: self._apply_inner(
                    grads, trainable_variables, unscaled, norm
                ),
            )

    def _largest_of(self, grads: Any, unscaled: bool) -> Any:
        """Returns the largest unscaled magnitude, if the algorithm asks."""
        if not self.loss_scale.uses_largest:
            return None
        if not unscaled:
            return _largest(grads) / self.dynamic_scale
        largest = getattr(self._before_changes, "largest", None)
        if gradient_lib.is_reachable(largest):
            return largest
        return _largest(grads)

    def _build_in_step(self, trainable_variables: list[Any] | None) -> None:
        if trainable_variables is None:
            raise ValueError(
                "apply() needs the variables at its first call: pass them "
                "beside the gradients, or call "
                "optimizer.build(model.trainable_variables) before."
            )
        if tf.distribute.has_strategy() and not tf.executing_eagerly():
            # TensorFlow would fail later, and not say why.
            raise RuntimeError(
                "The optimizer cannot be built inside a tf.function that runs "
                "on several replicas. Build it before the first step: `with "
                "strategy.scope(): optimizer.build(model.trainable_variables)`."
            )
        with keras.name_scope(self.name):
            self.build(trainable_variables)

    def _apply_merged(
        self,
        strategy: Any,
        outcome: StepOutcome,
        grads: Any,
        trainable_variables: Any,
        unscaled: bool,
        norm: Any,
    ) -> None:
        """Decides outside the replicas, which may not branch by themselves.

        The updates of the inner optimizer are merge calls, and TensorFlow
        permits none inside a `tf.cond` of a replica.
        """
        first = [
            strategy.experimental_local_results(part)[0] for part in outcome
        ]
        self._apply_or_skip(
            StepOutcome(*first),
            lambda: strategy.extended.call_for_each_replica(
                self._apply_inner,
                args=(grads, trainable_variables, unscaled, norm),
            ),
        )

    def _apply_or_skip(
        self, outcome: StepOutcome, apply_inner: Callable[[], Any]
    ) -> None:
        tf.cond(outcome.finite, apply_inner, lambda: None)
        if self.telemetry is not None:
            self.telemetry.write(self.dynamic_scale, outcome)
        new = self.loss_scale.update(
            LossScaleState(
                tf.convert_to_tensor(self.dynamic_scale),
                tf.convert_to_tensor(self.step_counter),
                tf.convert_to_tensor(self._consecutive_skips),
                tuple(tf.convert_to_tensor(v) for v in self._memory()),
            ),
            outcome,
        )
        skipped = tf.cast(
            tf.logical_not(outcome.finite), self._skipped_steps.dtype
        )
        self.dynamic_scale.assign(new.scale)
        self.step_counter.assign(new.good_steps)
        self._consecutive_skips.assign(new.bad_steps)
        for variable, value in zip(self._memory(), new.memory, strict=True):
            variable.assign(value)
        self._skipped_steps.assign(
            tf.convert_to_tensor(self._skipped_steps) + skipped
        )
        self._last_step_finite.assign(outcome.finite)

    def _apply_inner(
        self, grads: Any, trainable_variables: Any, unscaled: bool, norm: Any
    ) -> None:
        scaled = not unscaled and not self._is_off()
        update.apply(
            self.inner_optimizer,
            grads,
            trainable_variables,
            tf.convert_to_tensor(self.dynamic_scale) if scaled else None,
            norm,
        )

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Keras calls this at the end of `fit`; skipped steps are told now."""
        super().finalize_variable_values(var_list)
        self.report_skips()

    def report_skips(self) -> None:
        """Warns if more steps than usual were skipped since the last report.

        Waits for the device.
        """
        if not self.built:
            return
        skipped, applied = number(self.skipped_steps), self._applied_steps()
        skips = skipped - self._reported[0]
        steps = applied - self._reported[1] + skips
        self._reported = (skipped, applied)
        message = skip_lib.describe(
            skips,
            steps,
            number(self.dynamic_scale),
            number(self.consecutive_skips),
            self.loss_scale,
        )
        if message is not None:
            skip_lib.warn(message)

    def _memory(self) -> list[Any]:
        # No attribute of its own: TensorFlow would save it in checkpoints,
        # and those of algorithms without memory are to stay as they are.
        count = len(self.loss_scale.initial_state().memory)
        return self._variables[_NUM_VARIABLES : _NUM_VARIABLES + count]

    def _current_scale(self) -> Any:
        return self.dynamic_scale if self.built else self.first_state.scale

    def _is_off(self) -> bool:
        return isinstance(self.loss_scale, loss_scale_lib.NoLossScale)

    def _applied_steps(self) -> int:
        per_update = self.inner_optimizer.gradient_accumulation_steps or 1
        return number(self.inner_optimizer.iterations) * per_update

    def _check_scaled(self) -> None:
        if self._loss_was_scaled or self.loss_scale.initial == 1.0:
            return
        raise RuntimeError(
            "apply() was called on the gradients of a loss that was never "
            "scaled: they would be divided by the loss scale "
            f"({self.first_state.scale:g}) for nothing. Pass the loss through "
            "`optimizer.scale_loss(loss)` inside the GradientTape, or turn "
            'scaling off with `loss_scale="none"`.'
        )

    def load_own_variables(self, store: Any) -> None:
        """Loads the saved state, also that of a stock Keras optimizer.

        Args:
            store: Mapping from "0", "1", ... to arrays: what this class, the
                Keras `LossScaleOptimizer`, the bare inner optimizer or this
                class with a loss scale without memory saved.
        """
        inner = self.inner_optimizer.variables
        saved = len(store.keys()) - len(inner)
        known = saved in (0, _NUM_KERAS_VARIABLES, _NUM_VARIABLES)
        if known and saved <= len(self._variables):
            targets = self._variables[:saved] + inner
        else:
            super().load_own_variables(store)
            targets = []
        for index, variable in enumerate(targets):
            variable.assign(store[str(index)])
        if self.built:
            # A stock file may hold a scale that ran away to 0 or infinity.
            self.dynamic_scale.assign(
                self.loss_scale.clip(number(self.dynamic_scale))
            )
            self._reported = (
                number(self.skipped_steps),
                self._applied_steps(),
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments to build an equal optimizer from."""
        serialize = keras.saving.serialize_keras_object
        return {
            "name": self.name,
            "inner_optimizer": serialize(self.inner_optimizer),
            "loss_scale": serialize(self.loss_scale),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> "LossScaleOptimizer":
        """Returns the optimizer that a config describes.

        Args:
            config: From this class, or from the Keras `LossScaleOptimizer`.
            custom_objects: Mapping from names to classes, for inner optimizers
                that are not registered.
        """
        inner = keras.saving.deserialize_keras_object(
            config["inner_optimizer"], custom_objects=custom_objects
        )
        if "loss_scale" in config:
            loss_scale = config["loss_scale"]
        else:
            loss_scale = loss_scale_lib.DynamicLossScale(
                initial=config["initial_scale"],
                growth_interval=config["dynamic_growth_steps"],
            )
        return cls(inner, loss_scale, name=config["name"])


def _check_inner(inner_optimizer: Any) -> None:
    if isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"The inner optimizer '{inner_optimizer.name}' is itself a "
            f"{type(inner_optimizer).__name__}: the loss would be scaled "
            "twice. Pass the optimizer inside it, or use "
            "tfmixed.wrap_optimizer(optimizer), which never wraps twice."
        )
    factor = inner_optimizer.loss_scale_factor
    if factor is not None:
        raise ValueError(
            f"The inner optimizer '{inner_optimizer.name}' has "
            f"loss_scale_factor={factor}: the loss would be scaled twice. "
            "Leave it out there and pass it here: "
            f"LossScaleOptimizer(optimizer, loss_scale={factor})."
        )


def _largest(gradients: Iterable[Any]) -> Any:
    """Returns the largest magnitude in gradients, never densified."""
    magnitudes = [tf.constant(0.0)]
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            gradient = gradient.values
        if gradient is not None:
            largest = tf.reduce_max(tf.abs(gradient))
            magnitudes.append(tf.cast(largest, tf.float32))
    return tf.reduce_max(tf.stack(magnitudes))


def number(scalar: Any) -> Any:
    """Returns the value of a scalar variable as a Python number."""
    # float() of a variable that stands on several replicas raises.
    return keras.ops.convert_to_tensor(scalar).numpy().item()
