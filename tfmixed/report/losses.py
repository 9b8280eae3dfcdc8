"""Infers the loss and the metric of a model that its builder did not compile.

Only what targets and output show without doubt is inferred; anything else is
an error that says how to decide it.
"""

from typing import Any

import keras
import numpy as np

from tfmixed.report.dataset import Data
from tfmixed.report.heads import output_layers

_FIX = "Pass `loss=`, or compile the model in its builder."
_HEADS = ("softmax", "sigmoid", "linear")


def infer(model: Any, data: Data) -> tuple[Any, list[Any] | None]:
    """Infers loss and metrics from the targets and the model's output.

    Args:
        model: a built model with one output.
        data: the data that it is trained on.

    Returns:
        `(loss, metrics)`, new Keras objects. Metrics are `None` for
        regression, which is judged by its loss.

    Raises:
        ValueError: the loss is open; the message says why.
    """
    targets = data.targets()
    x, _, _ = data.batch(32)
    outputs = model(x, training=False)
    if not hasattr(outputs, "shape"):
        raise ValueError(
            f"The loss of model {model.name!r} cannot be inferred, because "
            f"it has several outputs. {_FIX}"
        )
    head = _head(model, keras.ops.convert_to_numpy(outputs))
    units = int(outputs.shape[-1]) if len(outputs.shape) > 1 else 1
    if targets.ndim == len(outputs.shape) and targets.shape[-1] == 1:
        targets = targets[..., 0]
    shape = tuple(outputs.shape)[1:]
    found = None
    if np.issubdtype(targets.dtype, np.floating):
        found = _from_numbers(targets, head, units, shape)
    else:
        found = _from_classes(targets, head, units, shape)
    if isinstance(found, str):
        raise ValueError(
            f"The loss of model {model.name!r} cannot be inferred from "
            f"targets of shape {data.targets().shape} and dtype "
            f"{targets.dtype} and an output of shape {tuple(outputs.shape)} "
            f"with the activation {head or 'unknown'}: {found}. {_FIX}"
        )
    return found


def _from_classes(
    targets: np.ndarray, head: str | None, units: int, shape: tuple[int, ...]
) -> Any:
    """Infers from class numbers, or says what is in the way."""
    low, high = int(targets.min()), int(targets.max())
    multi_label = targets.shape[1:] == shape and units > 1
    if units == 1 or multi_label:
        if low < 0 or high > 1:
            return f"whole targets from {low} to {high} are no yes or no"
        return _yes_or_no(head)
    if targets.shape[1:] != shape[:-1]:
        return "their shapes do not fit each other"
    if low < 0 or high >= units:
        return (
            f"classes from {low} to {high} need at least {high + 1} outputs "
            "and none below 0"
        )
    if head not in ("softmax", "linear"):
        return "classes need a softmax or linear output"
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=head == "linear"
    )
    return loss, [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]


def _from_numbers(
    targets: np.ndarray, head: str | None, units: int, shape: tuple[int, ...]
) -> Any:
    """Infers from float targets, or says what is in the way."""
    fits = targets.shape[1:] == (shape if units > 1 else shape[:-1])
    if not fits:
        return "their shapes do not fit each other"
    binary = bool(np.isin(targets, (0, 1)).all())
    one_hot = units > 1 and binary and bool((targets.sum(-1) == 1).all())
    if one_hot and head in ("softmax", "linear"):
        loss = keras.losses.CategoricalCrossentropy(
            from_logits=head == "linear"
        )
        return loss, [keras.metrics.CategoricalAccuracy(name="accuracy")]
    if binary and head == "sigmoid":
        return _yes_or_no(head)
    if head == "linear":
        return keras.losses.MeanSquaredError(), None
    return "numbers need a linear output"


def _yes_or_no(head: str | None) -> Any:
    if head not in ("sigmoid", "linear"):
        return "yes or no needs a sigmoid or linear output"
    logits = head == "linear"
    return keras.losses.BinaryCrossentropy(from_logits=logits), [
        keras.metrics.BinaryAccuracy(
            name="accuracy", threshold=0.0 if logits else 0.5
        )
    ]


def _head(model: Any, outputs: np.ndarray) -> str | None:
    """Names the activation of the output, by its layer or by its values."""
    layers = output_layers(model)
    layer = layers[0] if len(layers) == 1 else None
    if isinstance(layer, keras.layers.Softmax):
        return "softmax"
    activation = getattr(layer, "activation", None)
    name = getattr(activation, "__name__", None)
    if name in _HEADS:
        return name
    if name is not None:
        return None
    return _head_by_values(outputs)


def _head_by_values(outputs: np.ndarray) -> str | None:
    """Tells softmax and logits by the numbers that come out.

    A single unit tells too little: untrained logits may all lie between 0
    and 1 by chance.
    """
    if outputs.shape[-1] < 2:
        return None
    if outputs.min() < 0 or outputs.max() > 1:
        return "linear"
    # A 16-bit softmax adds up to one within its rounding.
    sums = outputs.astype("float64").sum(-1)
    return "softmax" if np.abs(sums - 1).max() < 0.02 else None
