"""Takes what a model was compiled with, and its optimizer, to another."""

import warnings
from typing import Any

import keras

from tfmixed import _keras
from tfmixed.convert.prepared import has_own_compile
from tfmixed.model import GuardedTraining
from tfmixed.optimizer import LossScaleOptimizer
from tfmixed.preparation import Account


def carry_compile(source: Any, target: Any, account: Account) -> None:
    """Compiles a model as another one was, optimizer state included.

    Args:
        source: The model as it was handed in.
        target: The model that was made of it; may be `source` itself.
        account: Takes note of what could not be carried over.
    """
    if not source.compiled:
        return
    if has_own_compile(type(source)):
        if source is not target:
            account.note("It has a `compile` of its own: compile it again.")
        return
    arguments = _keras.compile_arguments(source)
    same = source is target
    for name in ("metrics", "weighted_metrics"):
        if not same:
            arguments[name] = _copies(arguments[name], account)
    if isinstance(source, GuardedTraining) and source.jit_compile_is_auto:
        arguments["jit_compile"] = "auto"
    optimizer = _usable(source, target)
    if optimizer is None:
        target.compile(**{**arguments, "optimizer": None})
        return
    if not same:
        try:
            optimizer = _copy_optimizer(optimizer, source, target, account)
        except Exception as error:
            # A user's own schedule or optimizer may not be made again.
            account.note(
                "Its optimizer cannot be made again from its configuration "
                f"({type(error).__name__}), so it is not compiled: compile it."
            )
            return
    target.compile(**{**arguments, "optimizer": optimizer})
    if optimizer.built and not target.optimizer.built:
        target.optimizer.build(target.trainable_variables)


def _usable(source: Any, target: Any) -> Any:
    """The optimizer to go on with: without a wrapper that nobody asked for."""
    optimizer = source.optimizer
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer
    asked_for = _keras.compile_arguments(source).get("optimizer")
    automatic = asked_for is not optimizer or getattr(
        source, "loss_scale_is_auto", False
    )
    is_stock = not isinstance(target, GuardedTraining)
    if is_stock and isinstance(optimizer, LossScaleOptimizer):
        return optimizer.inner_optimizer
    if automatic and not _scales_again(optimizer, target):
        return optimizer.inner_optimizer
    return optimizer


def _scales_again(optimizer: Any, target: Any) -> bool:
    """Whether the state of the wrapper is of use in the new model."""
    if not any(
        layer.compute_dtype == "float16"
        for layer in _keras.flatten_layers(target)
    ):
        return False
    scale = getattr(optimizer, "loss_scale", None)
    return scale is None or type(scale).__name__ != "NoLossScale"


def _copy_optimizer(
    optimizer: Any, source: Any, target: Any, account: Account
) -> Any:
    with warnings.catch_warnings():
        # About lambdas that would be unsafe to load.
        warnings.filterwarnings("ignore", message=".*lambda.*")
        copy = type(optimizer).from_config(optimizer.get_config())
    if not optimizer.built:
        return copy
    counterparts = {
        id(one): other
        for one, other in zip(source.weights, target.weights, strict=False)
    }
    variables = [
        counterparts.get(id(variable))
        for variable in _keras.optimizer_variables(_innermost(optimizer))
    ]
    if any(variable is None for variable in variables):
        account.note(
            "The state of its optimizer was not carried over: it was built for "
            "variables that the model does not have."
        )
        return copy
    copy.build(variables)
    pairs = zip(_all_variables(optimizer), _all_variables(copy), strict=True)
    for one, other in pairs:
        other.assign(one)
    return copy


def _all_variables(optimizer: Any) -> list[Any]:
    """Those of an optimizer and, in each version of Keras, of its inner."""
    found = list(optimizer.variables)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        found += _all_variables(optimizer.inner_optimizer)
    return list({id(variable): variable for variable in found}.values())


def _innermost(optimizer: Any) -> Any:
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def _copies(metrics: Any, account: Account) -> Any:
    """Metrics with a state of their own; names and functions as they are."""

    def copy(metric: Any) -> Any:
        if not isinstance(metric, keras.metrics.Metric):
            return metric
        try:
            return type(metric).from_config(metric.get_config())
        except Exception:
            # A user's own, without a usable `get_config`.
            account.note(
                f"The metric '{metric.name}' cannot be copied; both models "
                "update the same one."
            )
            return metric

    return keras.tree.map_structure(copy, metrics)
