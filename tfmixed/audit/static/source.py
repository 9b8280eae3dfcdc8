"""TM014: misuse of the loss scale in a training step of the user's own."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import keras

from tfmixed import rules
from tfmixed.audit.findings import Finding
from tfmixed.audit.findings import finding
from tfmixed.audit.static.optimizer import optimizers
from tfmixed.audit.static.optimizer import scales
from tfmixed.audit.static.steps import Misuse
from tfmixed.audit.static.steps import misuses
from tfmixed.audit.static.subject import Subject

_UNGUARDED = (
    "Derive the model from tfmixed.Model, or use tfmixed.prepare(model)."
)


def check_steps(subject: Subject) -> Iterator[Finding]:
    """TM014: what the methods of the model's class do with gradients."""
    known = optimizers(subject.model)
    # Before `compile` nothing is known but what Keras will add.
    scaled = {name for name, value in known.items() if scales(value)}
    if not subject.model.compiled and "float16" in subject.formats:
        scaled.add("optimizer")
    unscaled = set(known) - scaled
    methods = _own_methods(type(subject.model))
    helpers = {name for name, function in methods if _scales_loss(function)}
    for name, function in methods:
        for misuse in _misuses(function, scaled, unscaled, helpers):
            yield finding(
                "TM014",
                None,
                f"`{type(subject.model).__name__}.{name}`, line "
                f"{misuse.line}: {misuse.message}",
                misuse.fix,
            )
    if "float16" in subject.formats and not subject.guarded:
        step = dict(methods).get("train_step")
        if step is not None:
            yield finding(
                "TM014",
                None,
                f"`{type(subject.model).__name__}.train_step` is not guarded, "
                "because the class is not derived from tfmixed.Model: a "
                "skipped step still updates normalization statistics and "
                "metrics.",
                _UNGUARDED,
                severity="note",
            )


def check_nesting(subject: Subject) -> Iterator[Finding]:
    """TM014: a loss-scaling optimizer within another one."""
    wrapper = keras.optimizers.LossScaleOptimizer
    for name, optimizer in optimizers(subject.model).items():
        inner = getattr(optimizer, "inner_optimizer", None)
        if not isinstance(optimizer, wrapper) or inner is None:
            continue
        factor = getattr(inner, "loss_scale_factor", None)
        if isinstance(inner, wrapper) or factor is not None:
            yield finding(
                "TM014",
                None,
                f"`{name}` scales the loss and its inner optimizer "
                f"{type(inner).__name__} scales it again: the gradients are "
                "divided by a scale that the loss was not multiplied with.",
                "Wrap the innermost optimizer once: "
                "tfmixed.wrap_optimizer(optimizer).",
            )


def _own_methods(model_class: type) -> list[tuple[str, Any]]:
    """The methods that the user's own classes define, the nearest first."""
    found: dict[str, Any] = {}
    for base in model_class.__mro__:
        if not rules.is_custom(base) or base is object:
            continue
        for name, value in vars(base).items():
            value = inspect.unwrap(getattr(value, "__func__", value))
            # TensorFlow's functions keep what they were made from.
            value = getattr(value, "python_function", value)
            if inspect.isfunction(value):
                found.setdefault(name, value)
    return list(found.items())


def _source(function: Any) -> tuple[str, int]:
    """The source of a function and its first line; empty without a file."""
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        # Written at a prompt, or compiled.
        return "", 1
    return textwrap.dedent("".join(lines)), first


def _scales_loss(function: Any) -> bool:
    return function.__name__ != "train_step" and (
        "scale_loss(" in _source(function)[0]
    )


def _misuses(
    function: Any, scaled: set[str], unscaled: set[str], helpers: set[str]
) -> list[Misuse]:
    source, first = _source(function)
    try:
        tree = ast.parse(source)
    except SyntaxError:
        # A lambda in the middle of an expression.
        return []
    return misuses(tree, first, scaled, unscaled, helpers)
