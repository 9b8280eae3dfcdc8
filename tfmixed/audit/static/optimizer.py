"""TM002, TM011, TM013: how the model was compiled."""

from collections.abc import Iterator
from typing import Any

import keras

from tfmixed.audit.findings import Finding
from tfmixed.audit.findings import finding
from tfmixed.audit.static.subject import Subject
from tfmixed.loss_scale import NoLossScale
from tfmixed.optimizer import LossScaleOptimizer


def optimizers(model: keras.Model) -> dict[str, Any]:
    """The optimizers of a model, by the attribute that holds them."""
    found = {}
    if model.compiled and model.optimizer is not None:
        found["optimizer"] = model.optimizer
    for name, value in vars(model).items():
        if isinstance(value, keras.optimizers.Optimizer) and not any(
            value is known for known in found.values()
        ):
            found[name.removeprefix("_")] = value
    return found


def scales(optimizer: Any) -> bool:
    """Whether an optimizer scales the loss by other than 1."""
    if isinstance(optimizer, LossScaleOptimizer):
        return not isinstance(optimizer.loss_scale, NoLossScale)
    return (
        isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        or optimizer.loss_scale_factor is not None
    )


def check_scaling(subject: Subject) -> Iterator[Finding]:
    """TM002: gradients pass through float16 and nothing scales the loss."""
    layers = [
        place
        for place in subject.places
        if place.dtype == "float16"
        and not place.is_container
        and any(variable.trainable for variable in place.layer.variables)
    ]
    # As if: `compile` would add what belongs to the policy.
    if not layers or subject.as_if:
        return
    where = (
        f"{len(layers)} layers compute in float16 ({layers[0].path}, ...)"
        if len(layers) > 1
        else f"{layers[0]} computes in float16"
    )
    found = optimizers(subject.model)
    for name, optimizer in found.items():
        if scales(optimizer) or _is_added_later(subject, name):
            continue
        yield finding(
            "TM002",
            None,
            f"{where}, but `{name}` ({_kind(optimizer)}) does not scale the "
            "loss: gradients below 6e-8 become 0.",
        )
    policy = subject.model.dtype_policy.name
    if not found and policy != "mixed_float16" and not subject.guarded:
        yield finding(
            "TM002",
            None,
            f"{where}, but the policy of the model is {policy!r}, so compile "
            "will not add loss scaling.",
            severity="warning",
        )


def _is_added_later(subject: Subject, name: str) -> bool:
    # The guarded step sees at its first step what the layers compute in.
    return (
        subject.guarded
        and name == "optimizer"
        and getattr(subject.model, "_auto_loss_scale", False)
    )


def check_stock_scaling(subject: Subject) -> Iterator[Finding]:
    """TM013: the loss scaling of Keras, with its known faults."""
    found = optimizers(subject.model)
    for name, optimizer in found.items():
        if isinstance(
            optimizer, keras.optimizers.LossScaleOptimizer
        ) and not isinstance(optimizer, LossScaleOptimizer):
            yield finding(
                "TM013",
                None,
                f"`{name}` is Keras's own LossScaleOptimizer around "
                f"{_kind(optimizer.inner_optimizer)}: its scale can run away "
                "to 0 or infinity, each replica decides alone, and it skips "
                "steps without a word.",
            )
    optimizer = found.get("optimizer")
    if (
        subject.as_if == "mixed_float16"
        and not subject.guarded
        and optimizer is not None
        and not scales(optimizer)
    ):
        yield finding(
            "TM013",
            None,
            f"Under mixed_float16, compile would put {_kind(optimizer)} into "
            "Keras's own LossScaleOptimizer: its scale can run away to 0 or "
            "infinity, each replica decides alone, and it skips steps without "
            "a word.",
        )


def check_eager(subject: Subject) -> Iterator[Finding]:
    """TM011: every operation runs by itself."""
    if subject.model.compiled and subject.model.run_eagerly:
        yield finding(
            "TM011",
            None,
            f"Model '{subject.model.name}' was compiled with "
            "run_eagerly=True: every cast is an operation of its own, which "
            "costs more than 16 bits gain.",
        )


def _kind(optimizer: Any) -> str:
    return type(optimizer).__name__
