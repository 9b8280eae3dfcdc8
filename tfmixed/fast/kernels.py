"""The update of one weight by one kernel, where TensorFlow has one.

Keras writes an update as a chain of elementwise operations, each of which
reads and writes all of a weight. TensorFlow has kernels that do the same in
one pass, kept for `tf.compat.v1` and used here where the formula, also the
place of epsilon, is that of Keras. Not here, because it is another one:
Adagrad (epsilon outside of the root), Ftrl (refuses a learning rate of zero),
RMSprop without momentum or centered (needs a momentum slot; differs after
cancellation). Nor decay rates so near to one that the kernel, which subtracts
from one in float32, and Keras, which does in float64, get different numbers;
but see `rates.corrections`.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed.fast import rates

# (optimizer, handle of the weight, handles of its slots, gradient, learning
# rate, bias corrections)
Kernel = Callable[[Any, Any, list[Any], Any, Any, list[Any]], None]


def find(optimizer: Any) -> Kernel | None:
    """Returns the kernel for an optimizer as it is configured, if any.

    Only of these very classes: a subclass may compute something else.

    Args:
        optimizer: A Keras optimizer.
    """
    kind = type(optimizer)
    if kind is keras.optimizers.RMSprop and (
        optimizer.centered or not optimizer.momentum > 0
    ):
        return None
    if not rates.are_exact(optimizer):
        return None
    # XLA knows all of the kernels but this one.
    if getattr(optimizer, "amsgrad", False) and _keras.inside_xla():
        return None
    return _KERNELS.get(kind)


def is_linear(optimizer: Any) -> bool:
    """Returns whether the gradient counts only times the learning rate.

    Then dividing the learning rate is as good as dividing all gradients.
    """
    return type(optimizer) is keras.optimizers.SGD


def decay(variable: Any, amount: Any) -> None:
    """Subtracts `amount` times a float32 variable from it, in one pass."""
    tf.raw_ops.ResourceApplyGradientDescent(
        var=variable.handle, alpha=amount, delta=tf.convert_to_tensor(variable)
    )


def _sgd(
    optimizer: Any,
    weight: Any,
    slots: list[Any],
    gradient: Any,
    learning_rate: Any,
    _: list[Any],
) -> None:
    if not slots:
        tf.raw_ops.ResourceApplyGradientDescent(
            var=weight, alpha=learning_rate, delta=gradient
        )
        return
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=weight,
        accum=slots[0],
        lr=learning_rate,
        grad=gradient,
        momentum=optimizer.momentum,
        use_nesterov=optimizer.nesterov,
    )


def _adam(
    optimizer: Any,
    weight: Any,
    slots: list[Any],
    gradient: Any,
    learning_rate: Any,
    powers: list[Any],
) -> None:
    _adam_of(optimizer, weight, slots, gradient, learning_rate, powers)


def _adam_of(
    optimizer: Any,
    weight: Any,
    slots: list[Any],
    gradient: Any,
    learning_rate: Any,
    powers: list[Any],
    *,
    moves_second: bool = True,
) -> None:
    arguments = {
        "var": weight,
        "m": slots[0],
        "v": slots[1],
        "beta1_power": powers[0],
        "beta2_power": powers[1],
        "lr": learning_rate * powers[2],
        "beta1": optimizer.beta_1,
        "beta2": optimizer.beta_2 if moves_second else 1.0,
        "epsilon": optimizer.epsilon * powers[2],
        "grad": gradient,
    }
    if optimizer.amsgrad:
        tf.raw_ops.ResourceApplyAdamWithAmsgrad(vhat=slots[2], **arguments)
    else:
        tf.raw_ops.ResourceApplyAdam(**arguments)


def adam_of_rows(
    optimizer: Any,
    weight: Any,
    slots: list[Any],
    gradient: tf.IndexedSlices,
    learning_rate: Any,
    powers: list[Any],
) -> None:
    """Adam and AdamW for a table in which a row has several gradients.

    The kernel would square their sum, but Keras adds up their squares. So the
    second moment is moved before, and the kernel leaves it as it is. Not the
    single rows after the kernel: TensorFlow copies a variable at each update
    once single rows of it were written.

    Args:
        optimizer: The optimizer.
        weight: The handle of the table.
        slots: The handles of its slots.
        gradient: Float32 gradients of rows.
        learning_rate: Float32 scalar tensor.
        powers: From `rates.corrections`.
    """
    # With the rounding of the kernel, of which `powers` knows.
    beta = tf.constant(optimizer.beta_2, tf.float32)
    second = tf.raw_ops.ReadVariableOp(resource=slots[1], dtype=tf.float32)
    squares = tf.IndexedSlices(
        tf.square(gradient.values) * (1.0 - beta),
        gradient.indices,
        gradient.dense_shape,
    )
    tf.raw_ops.AssignVariableOp(
        resource=slots[1],
        value=second * beta + tf.convert_to_tensor(squares),
    )
    _adam_of(
        optimizer,
        weight,
        slots,
        tf.convert_to_tensor(gradient),
        learning_rate,
        powers,
        moves_second=False,
    )


def _adamax(
    optimizer: Any,
    weight: Any,
    slots: list[Any],
    gradient: Any,
    learning_rate: Any,
    powers: list[Any],
) -> None:
    tf.raw_ops.ResourceApplyAdaMax(
        var=weight,
        m=slots[0],
        v=slots[1],
        beta1_power=powers[0],
        lr=learning_rate,
        beta1=optimizer.beta_1,
        beta2=optimizer.beta_2,
        epsilon=optimizer.epsilon,
        grad=gradient,
    )


def _adadelta(
    optimizer: Any,
    weight: Any,
    slots: list[Any],
    gradient: Any,
    learning_rate: Any,
    _: list[Any],
) -> None:
    tf.raw_ops.ResourceApplyAdadelta(
        var=weight,
        accum=slots[0],
        accum_update=slots[1],
        lr=learning_rate,
        rho=optimizer.rho,
        epsilon=optimizer.epsilon,
        grad=gradient,
    )


def _rmsprop(
    optimizer: Any,
    weight: Any,
    slots: list[Any],
    gradient: Any,
    learning_rate: Any,
    _: list[Any],
) -> None:
    tf.raw_ops.ResourceApplyRMSProp(
        var=weight,
        ms=slots[0],
        mom=slots[1],
        lr=learning_rate,
        rho=optimizer.rho,
        momentum=optimizer.momentum,
        epsilon=optimizer.epsilon,
        grad=gradient,
    )


_KERNELS: dict[type, Kernel] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
    keras.optimizers.Adamax: _adamax,
    keras.optimizers.Adadelta: _adadelta,
    keras.optimizers.RMSprop: _rmsprop,
}
