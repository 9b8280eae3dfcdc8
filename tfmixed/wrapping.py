"""Optimizers of others, wrapped, and taken over with their state."""

from typing import Any

import keras

from tfmixed import _keras
from tfmixed import loss_scale as loss_scale_lib
from tfmixed.loss_scale import LossScaleState
from tfmixed.optimizer import LossScaleOptimizer
from tfmixed.optimizer import number


def wrap_optimizer(optimizer: Any, **kwargs: Any) -> LossScaleOptimizer:
    """Returns `optimizer` in a `LossScaleOptimizer`, with its state.

    Args:
        optimizer: A name, a Keras optimizer, a Keras `LossScaleOptimizer`
            (its scale and counter are carried over), or one of tfmixed, which
            is returned as it is. An optimizer with `loss_scale_factor` gets
            that factor as its fixed scale.
        **kwargs: Arguments of `LossScaleOptimizer`, such as `loss_scale`.

    Raises:
        ValueError: If a second loss scale is asked for.

    Example:

    >>> tfmixed.wrap_optimizer("adam").inner_optimizer.name
    'adam'
    """
    optimizer = keras.optimizers.get(optimizer)
    if isinstance(optimizer, LossScaleOptimizer):
        _check_same_scale(optimizer.loss_scale, kwargs)
        return optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return _upgrade(optimizer, kwargs)
    factor = optimizer.loss_scale_factor
    if factor is not None:
        fixed = loss_scale_lib.get(factor)
        _check_same_scale(fixed, kwargs)
        kwargs["loss_scale"] = fixed
        optimizer.loss_scale_factor = None
    return LossScaleOptimizer(optimizer, **kwargs)


def _upgrade(optimizer: Any, kwargs: dict[str, Any]) -> LossScaleOptimizer:
    """Returns a tfmixed optimizer that goes on where Keras's stopped."""
    dynamic = loss_scale_lib.DynamicLossScale
    bounds = dynamic()
    kwargs.setdefault(
        "loss_scale",
        dynamic(
            initial=bounds.clip(float(optimizer.initial_scale)),
            growth_interval=optimizer.dynamic_growth_steps,
        ),
    )
    kwargs.setdefault("name", optimizer.name)
    upgraded = LossScaleOptimizer(optimizer.inner_optimizer, **kwargs)
    if optimizer.built:
        upgraded.first_state = LossScaleState(
            upgraded.loss_scale.clip(number(optimizer.dynamic_scale)),
            number(optimizer.step_counter),
            0,
        )
        upgraded.build(_keras.optimizer_variables(optimizer))
    return upgraded


def _check_same_scale(present: Any, kwargs: dict[str, Any]) -> None:
    wanted = kwargs.get("loss_scale")
    if wanted is not None and loss_scale_lib.get(wanted) != present:
        raise ValueError(
            f"The optimizer already has the loss scale {present}, and "
            f"`loss_scale` asks for {loss_scale_lib.get(wanted)}. Leave one of "
            "the two out; to change it, wrap the inner optimizer anew: "
            "LossScaleOptimizer(optimizer.inner_optimizer, loss_scale=...)."
        )
