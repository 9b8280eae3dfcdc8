"""The update of all weights, in as few passes over memory as there can be.

The result is that of dividing the gradients by the loss scale and calling the
optimizer's own `apply`. Keras's `apply` runs here too; only what it does with
each element goes another way: one kernel for one weight (`kernels`), or all
weights in one XLA cluster (`update_cluster`). Any other optimizer, a user's
own above all, runs as it is written. `benchmarks/NOTES.md` has the figures.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed import gradients as gradient_lib
from tfmixed.fast import kernels
from tfmixed.fast import rates
from tfmixed.fast import update_cluster


def apply(
    optimizer: Any,
    gradients: Sequence[Any],
    variables: Sequence[Any] | None,
    scale: Any,
    norm: Any,
) -> None:
    """Does what `optimizer.apply` does with gradients divided by `scale`.

    Args:
        optimizer: A Keras optimizer that is built.
        gradients: Tensors, `tf.IndexedSlices` and `None`.
        variables: The Keras variables, in the same order; None for those that
            the optimizer was built with.
        scale: Scalar tensor, or None for gradients that are not scaled.
        norm: The global norm of the gradients of this replica, divided by
            `scale`.
    """
    gradients = list(gradients)
    targets = variables or _keras.optimizer_variables(optimizer)
    with _keras.without_autocast():
        kernel = kernels.find(optimizer)
        if kernel is not None and not _is_patched(optimizer):
            update = KernelUpdate(optimizer, kernel)
            gradients = update.prepare(gradients, targets, scale, norm)
            with _keras.methods_replaced(optimizer, update.methods):
                optimizer.apply(gradients, variables)
        elif update_cluster.pays(optimizer, gradients, targets):
            update_cluster.apply(optimizer, gradients, targets, scale)
        else:
            gradients = _unscaled(gradients, scale, targets)
            optimizer.apply(gradients, variables)


class KernelUpdate:
    """One call of `apply` of an optimizer, with a kernel in its middle.

    Args:
        optimizer: The Keras optimizer.
        kernel: From `kernels.find`.
    """

    def __init__(self, optimizer: Any, kernel: kernels.Kernel) -> None:
        self._optimizer = optimizer
        self._kernel = kernel
        self._scale: Any = None
        self._powers: list[Any] | None = None
        self.methods: dict[str, Any] = {
            "update_step": self.update_step,
            "_apply_weight_decay": self.decay_later,
        }

    def prepare(
        self,
        gradients: list[Any],
        variables: Sequence[Any],
        scale: Any,
        norm: Any,
    ) -> list[Any]:
        """Returns the gradients to call the optimizer with.

        The division by the scale is one pass over memory of its own. Here it
        becomes one with the clipping, or one with the learning rate.
        """
        clips = _clips(self._optimizer)
        if clips and _are_simple(self._optimizer, gradients, variables):
            self.methods["_clip_gradients"] = list
            return clipped(self._optimizer, gradients, scale, norm)
        if (
            not clips
            and kernels.is_linear(self._optimizer)
            and not self._optimizer.clipvalue
            and not self._optimizer.gradient_accumulation_steps
            # The sum over the replicas must not overflow.
            and not tf.distribute.has_strategy()
        ):
            self._scale = scale
            return gradients
        return _unscaled(gradients, scale, variables)

    def update_step(
        self, gradient: Any, variable: Any, learning_rate: Any
    ) -> None:
        """Stands in for the method of the optimizer."""
        optimizer = self._optimizer
        variable = _keras.backend_variable(variable)
        self._decay(variable, learning_rate)
        if self._powers is None:
            # Not in a branch, whose tensors other weights could not use.
            self._powers = rates.corrections(optimizer)
        powers = self._powers

        def by_kernel(kernel: Any, gradient: Any) -> None:
            self._by_kernel(kernel, gradient, variable, learning_rate, powers)

        if _fits(optimizer, gradient, variable):
            dense = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
            by_kernel(self._kernel, dense)
        elif _fits_as_rows(optimizer, gradient, variable):
            tf.cond(
                _are_unique(gradient.indices),
                lambda: by_kernel(self._kernel, tf.convert_to_tensor(gradient)),
                lambda: by_kernel(kernels.adam_of_rows, gradient),
            )
        else:
            (unscaled,) = _unscaled([gradient], self._scale)
            type(optimizer).update_step(
                optimizer, unscaled, variable, learning_rate
            )

    def _by_kernel(
        self,
        kernel: Any,
        gradient: Any,
        variable: Any,
        learning_rate: Any,
        powers: list[Any],
    ) -> None:
        optimizer = self._optimizer
        learning_rate = tf.cast(learning_rate, tf.float32)
        if self._scale is not None:
            learning_rate = learning_rate / self._scale
        kernel(
            optimizer,
            variable.handle,
            _keras.slot_handles(optimizer, variable),
            gradient,
            learning_rate,
            powers,
        )

    def decay_later(self, variables: Any) -> None:
        """Stands in for the weight decay: `update_step` does it."""

    def _decay(self, variable: Any, learning_rate: Any) -> None:
        amount = _keras.weight_decay(self._optimizer, variable)
        if amount is None:
            return
        amount = tf.cast(amount, variable.dtype)
        learning_rate = tf.cast(learning_rate, variable.dtype)
        if variable.dtype == tf.float32:
            kernels.decay(variable, amount * learning_rate)
        else:
            variable.assign_sub(variable * amount * learning_rate)


def clipped(
    optimizer: Any, gradients: list[Any], scale: Any, norm: Any
) -> list[Any]:
    """Returns the gradients divided by `scale` and clipped by their norms.

    Args:
        optimizer: With `clipnorm` or `global_clipnorm`.
        gradients: Dense tensors and `None`.
        scale: As in `apply`.
        norm: As in `apply`.
    """
    scale = tf.constant(1.0) if scale is None else scale
    present = [g for g in gradients if g is not None]
    limit = optimizer.clipnorm
    if limit and limit > 0:
        norms = gradient_lib.norms_over(present, scale, norm)
        factors = [limit / tf.maximum(one, limit) for one in norms]
    else:
        limit = optimizer.global_clipnorm
        norm = tf.cond(
            tf.math.is_finite(norm),
            lambda: norm,
            lambda: tf.norm(gradient_lib.norms_over(present, scale, norm)),
        )
        # In Keras, too, an infinite norm makes everything NaN.
        factor = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        factors = [factor] * len(present)
    remaining = iter(factors)
    return [
        None if g is None else g * (next(remaining) / scale) for g in gradients
    ]


def _clips(optimizer: Any) -> bool:
    limits = (optimizer.clipnorm, optimizer.global_clipnorm)
    return any(limit and limit > 0 for limit in limits)


def _are_simple(
    optimizer: Any, gradients: list[Any], variables: Sequence[Any]
) -> bool:
    """Returns whether Keras would clip these, as they are, in float32."""
    return not optimizer.gradient_accumulation_steps and all(
        gradient is None
        or (
            isinstance(gradient, tf.Tensor)
            and gradient.dtype == tf.float32
            and not getattr(variable, "overwrite_with_gradient", False)
        )
        for gradient, variable in zip(gradients, variables, strict=True)
    )


def _fits(optimizer: Any, gradient: Any, variable: Any) -> bool:
    if variable.dtype != tf.float32:
        return False
    if not isinstance(gradient, tf.IndexedSlices):
        return True
    # Without momentum only the rows that exist are touched.
    return kernels.is_linear(optimizer) and optimizer.momentum != 0


def _fits_as_rows(optimizer: Any, gradient: Any, variable: Any) -> bool:
    """Returns whether a sparse gradient is one for `kernels.adam_of_rows`."""
    kinds = (keras.optimizers.Adam, keras.optimizers.AdamW)
    return (
        variable.dtype == tf.float32
        and isinstance(gradient, tf.IndexedSlices)
        and gradient.dtype == tf.float32
        and type(optimizer) in kinds
        and not tf.distribute.has_strategy()
        and not _keras.inside_xla()
    )


def _are_unique(indices: Any) -> Any:
    return tf.equal(tf.size(tf.unique(indices).y), tf.size(indices))


def _unscaled(
    gradients: list[Any], scale: Any, variables: Sequence[Any] = ()
) -> list[Any]:
    if scale is None:
        return gradients
    return gradient_lib.divide(gradients, scale, variables)


def _is_patched(optimizer: Any) -> bool:
    """Returns whether a user has put methods on the instance."""
    methods = _keras.own_methods(
        optimizer, ("update_step", "_apply_weight_decay", "_clip_gradients")
    )
    # Another replica may be inside `apply` already.
    return any(
        method is not list
        and not isinstance(getattr(method, "__self__", None), KernelUpdate)
        for method in methods
    )
