"""Builds and compiles the model of a comparison under one policy and seed."""

from dataclasses import dataclass
from typing import Any

import keras

from tfmixed import _keras
from tfmixed.guard import loss_scale_optimizers
from tfmixed.model import GuardedTraining
from tfmixed.policy import precision
from tfmixed.prepare import prepare
from tfmixed.report.dataset import Data
from tfmixed.report.dataset import describe
from tfmixed.report.heads import output_layers
from tfmixed.report.losses import infer
from tfmixed.report.sources import Source
from tfmixed.wrapping import wrap_optimizer

_FLOATS = ("float16", "bfloat16", "float32")
# What a float32 model may compute in besides float32.
_OTHERS = {"float32", "float64", "int32", "int64", "string", "bool"}


@dataclass(frozen=True)
class Recipe:
    """How each model is trained.

    What is `None` comes from the builder's own `compile`, and where it did
    not compile from the defaults: Adam, the loss that targets and output
    show, the plan's XLA.

    Args:
        epochs: number of epochs.
        batch_size: size of a batch; datasets have their own.
        optimizer: name, optimizer, or function that returns one.
        learning_rate: learning rate.
        loss: as in `compile`.
        metrics: as in `compile`.
        jit_compile: whether XLA compiles the step.
        plan_jit_compile: the same, where nobody decided.
    """

    epochs: int = 2
    batch_size: int = 128
    optimizer: Any = None
    learning_rate: float | None = None
    loss: Any = None
    metrics: list[Any] | None = None
    jit_compile: bool | None = None
    plan_jit_compile: bool = False


def build(
    source: Source, data: Data, recipe: Recipe, policy: str, seed: int
) -> Any:
    """Builds and compiles a model.

    The same seed gives the same first weights under every policy.

    Args:
        source: builds the model.
        data: the data that it will see.
        recipe: how it will be trained.
        policy: name of the dtype policy.
        seed: seed of Python, NumPy and TensorFlow.

    Returns:
        A compiled model. Under float32 it is what the builder returned, which
        is what a person has without mixed precision. Under another policy it
        is prepared by `tfmixed.prepare`, unless it has its own train step.

    Raises:
        ValueError: the builder returns no trainable model, the model does not
            take the data, or its loss cannot be inferred.
    """
    keras.utils.set_random_seed(seed)
    with precision(policy):
        model = source.build(data)
        if not isinstance(model, keras.Model):
            raise ValueError(
                f"`builder` {source.name!r} returned {describe(model)}. "
                "Expected a `keras.Model`; return the model."
            )
        if source.convert:
            set_policy(model, policy)
        _feed(source, model, data)
        if not model.trainable_variables:
            raise ValueError(
                f"`builder` {source.name!r} returned the model "
                f"{model.name!r}, which has no trainable weights, so there "
                "is nothing to train. Set `trainable = True` on some layers."
            )
        prepared = model if policy == "float32" else _prepared(model, policy)
        _compile(prepared, model, data, recipe, policy)
    return prepared


def set_policy(model: Any, policy: str) -> None:
    """Sets the policy of every layer of a built model.

    Layers that make an output stay float32: a 16-bit softmax rounds a
    confident wrong answer to exactly one, and its gradient to zero.

    Args:
        model: any Keras model; changed in place.
        policy: name of the dtype policy.
    """
    outputs = {id(layer) for layer in output_layers(model)}
    for layer in _keras.flatten_layers(model):
        # Not float64, quantized layers, nor the integers of lookup layers.
        if layer.quantization_mode or layer.compute_dtype not in _FLOATS:
            continue
        name = "float32" if id(layer) in outputs else policy
        _keras.set_layer_policy(layer, keras.DTypePolicy(name))


def without_effect(model: Any, policy: str) -> str | None:
    """Says so when a model does not compute in what the policy asks for.

    Args:
        model: a model built under the policy.
        policy: name of the dtype policy.

    Returns:
        A sentence, or `None` when all is well.
    """
    computed = {layer.compute_dtype for layer in _keras.flatten_layers(model)}
    wanted = policy.removeprefix("mixed_")
    if wanted in computed and (wanted != "float32" or computed <= _OTHERS):
        return None
    return (
        f"Under {policy} the model's layers compute in "
        f"{', '.join(sorted(computed))}: its builder sets dtypes by itself. "
        "Let the layers follow the global policy to compare them."
    )


def skipped_steps(model: Any, steps: int) -> int:
    """Counts the optimizer steps that a model left out.

    Args:
        model: a model after training.
        steps: how many steps it has run.

    Returns:
        The count of the guarded optimizers, all of them where the model
        trains in parts; for Keras's own wrapper, which keeps none, the steps
        that its inner optimizer did not see; 0 for an optimizer that never
        skips.
    """
    guarded = loss_scale_optimizers(model)
    if guarded:
        return sum(int(optimizer.skipped_steps) for optimizer in guarded)
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return max(0, steps - int(optimizer.inner_optimizer.iterations))
    return 0


def ended_on_skip(model: Any) -> bool:
    """Tells whether the last step of an optimizer of a model was left out.

    Args:
        model: a model after training.

    Returns:
        False as well for an optimizer that does not tell.
    """
    return any(
        int(optimizer.consecutive_skips) > 0
        for optimizer in loss_scale_optimizers(model)
    )


def _feed(source: Source, model: Any, data: Data) -> None:
    """Calls the model once, so that it is built and known to take the data."""
    x, _, _ = data.batch(2)
    try:
        model(x, training=False)
    except Exception as error:
        raise ValueError(
            f"The model {model.name!r} of `builder` {source.name!r} does not "
            f"take a batch of `data` {data.name!r}, {describe(x)}. Pass data "
            f"of the shape that the model expects. It says: {error}"
        ) from error


def _prepared(model: Any, policy: str) -> Any:
    """Prepares a model, unless it has a train step of its own.

    Such a step may not scale its loss, and would have to be changed first.
    """
    own_step = type(model).train_step is not keras.Model.train_step
    if own_step and not isinstance(model, GuardedTraining):
        return model
    return prepare(model, policy)


def _compile(
    model: Any, built: Any, data: Data, recipe: Recipe, policy: str
) -> None:
    """Compiles as the builder did, then as the recipe says."""
    # What the builder passed to `compile`, objects as they are.
    arguments = (
        dict(_keras.compile_token(built).config) if built.compiled else {}
    )
    given: Any = arguments.get("optimizer")
    if getattr(built, "loss_scale_is_auto", False):
        # The wrapper that `tfmixed.Model` chose was right for another policy.
        given = given.inner_optimizer
    optimizer = _fresh_optimizer(recipe.optimizer or given or "adam")
    if recipe.learning_rate is not None:
        optimizer.learning_rate = recipe.learning_rate
    if policy == "mixed_float16":
        optimizer = wrap_optimizer(optimizer)
    arguments["optimizer"] = optimizer
    arguments.setdefault("jit_compile", recipe.plan_jit_compile)
    if recipe.jit_compile is not None:
        arguments["jit_compile"] = recipe.jit_compile
    if recipe.loss is not None:
        arguments["loss"] = recipe.loss
    if recipe.metrics is not None:
        arguments["metrics"] = _fresh_metrics(recipe.metrics)
    if not built.compiled and recipe.loss is None:
        loss, metrics = infer(built, data)
        arguments["loss"] = loss
        arguments.setdefault("metrics", metrics)
    elif not built.compiled:
        arguments.setdefault("metrics", _metrics_beside(recipe.loss))
    model.compile(**arguments)


def _metrics_beside(loss: Any) -> list[Any] | None:
    """Adds the accuracy where the loss is one of a classifier."""
    name = loss if isinstance(loss, str) else getattr(loss, "name", "")
    return ["accuracy"] if "crossentropy" in str(name) else None


def _fresh_optimizer(optimizer: Any) -> Any:
    """Makes an optimizer without the state of another training."""
    if isinstance(optimizer, str):
        return keras.optimizers.get(optimizer)
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return type(optimizer).from_config(optimizer.get_config())
    if callable(optimizer):
        return optimizer()
    raise ValueError(
        f"`optimizer` got {optimizer!r}. Expected a name, an optimizer or a "
        "function that returns one. Pass for example `optimizer='adam'`."
    )


def _fresh_metrics(metrics: list[Any]) -> list[Any]:
    """Copies metrics, so that models do not count into each other's."""
    return [
        type(metric).from_config(metric.get_config())
        if isinstance(metric, keras.metrics.Metric)
        else metric
        for metric in metrics
    ]
