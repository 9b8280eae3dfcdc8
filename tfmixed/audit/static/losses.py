"""TM020: extra losses and metrics of the user's own that meet 16 bits."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed.audit.findings import Finding
from tfmixed.audit.findings import finding
from tfmixed.audit.static.subject import HALF
from tfmixed.audit.static.subject import Subject
from tfmixed.audit.static.walk import layer_of

_HALF = (tf.float16, tf.bfloat16)
_SUM = "adding it to the float32 loss is a TypeError in `fit`."


def check_regularizers(subject: Subject) -> Iterator[Finding]:
    """TM020: activity regularizers, which get the output as it is."""
    if subject.guarded:
        return
    for place in subject.places:
        if place.is_half and place.layer.activity_regularizer is not None:
            kind = type(place.layer.activity_regularizer).__name__
            yield finding(
                "TM020",
                place.path,
                f"{place} hands its output to its activity regularizer "
                f"{kind} in {place.dtype}: the sum of squares overflows, and "
                f"{_SUM}",
            )


def check_added_losses(subject: Subject) -> Iterator[Finding]:
    """TM020: losses of `add_loss` in 16 bits."""
    if subject.guarded:
        return
    for loss in subject.walk.losses:
        if loss.dtype not in _HALF:
            continue
        layer = _source(subject, loss)
        if getattr(layer, "activity_regularizer", None) is not None:
            continue
        yield finding(
            "TM020",
            subject.path(layer),
            f"{subject.name(layer)} adds a loss in {loss.dtype.name} "
            f"(add_loss): {_SUM}",
        )


def _source(subject: Subject, loss: Any) -> Any:
    for call in subject.walk.calls:
        if any(loss.op is operation for operation in call.operations):
            return layer_of(call.operation, loss.op) or call.operation
    return subject.model


def check_metrics(subject: Subject) -> Iterator[Finding]:
    """TM020: metric functions of the user's own on 16-bit predictions."""
    dtypes = [o.dtype for o in subject.walk.outputs if o.dtype in HALF]
    if subject.guarded or not subject.model.compiled or not dtypes:
        return
    for function in _own_functions(subject.model):
        name = getattr(function, "__name__", type(function).__name__)
        yield finding(
            "TM020",
            None,
            f"The metric function '{name}' gets float32 targets and "
            f"{dtypes[0]} predictions: a TypeError in TensorFlow's own "
            "operations, or a sum that overflows.",
        )


def _own_functions(model: keras.Model) -> list[Any]:
    arguments = _keras.compile_arguments(model)
    given = [arguments.get("metrics"), arguments.get("weighted_metrics")]
    return [
        value
        for value in keras.tree.flatten(given)
        if callable(value)
        and not isinstance(value, keras.metrics.Metric)
        and not getattr(value, "__module__", "").startswith("keras")
    ]
