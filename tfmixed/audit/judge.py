"""From measurements to findings: what is too large, too small, too far off."""

import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tfmixed import _keras
from tfmixed.audit import batches as batch_lib
from tfmixed.audit import formats
from tfmixed.audit import judge_layer
from tfmixed.audit import tally
from tfmixed.audit.batches import BadData
from tfmixed.audit.batches import Batch
from tfmixed.audit.findings import Finding
from tfmixed.audit.findings import finding
from tfmixed.audit.judge_layer import keep
from tfmixed.audit.rows import Table
from tfmixed.audit.step import Observation
from tfmixed.audit.window import ScaleWindow
from tfmixed.audit.window import power
from tfmixed.model import computes_in_float16

# Relative error of the gradients of a layer's weights against float32.
GRADIENT_ERROR = 0.5
# Layers with less of the gradient than this are not judged: the bias before
# a BatchNormalization has a gradient of zero, and its rounding noise.
NEGLIGIBLE = 1e-4
_SPREAD = (
    "No single layer is the cause. Before it is trained, a deep network "
    "amplifies any rounding; tfmixed.compare measures whether "
    "training suffers."
)


def bad_data(
    model: keras.Model, taken: list[Batch], x: Any, y: Any
) -> list[BadData]:
    """Looks at all of the arrays, or at the batches that were taken.

    Args:
        model: The model that the data is for.
        taken: The batches that were taken.
        x: The data that they were taken from.
        y: The targets.
    """
    if not batch_lib.is_dataset(x):
        pairs = batch_lib.named(model, Batch(x, y))
        found = [batch_lib.bad_data(name, leaf) for name, leaf in pairs]
        return [one for one in found if one is not None]
    result = []
    start = 0
    for batch in taken:
        rows = np.arange(start, start + len(batch))
        start += len(batch)
        for name, tensor in batch_lib.named(model, batch):
            one = batch_lib.bad_data(name, tensor, rows)
            if one is not None:
                result.append(one)
    return result


def of_bad_data(bad: BadData) -> Finding:
    """The finding that says where data is not finite."""
    return finding(
        "TM107",
        None,
        f"The data is bad: {bad}.",
        "Remove or replace these rows before training; no precision helps.",
    )


def of_float32(found: Observation) -> Finding | None:
    """The finding for a run in float32 that is not finite; None if it is."""
    for kind, record in found.events:
        tensors = record.inputs if kind == "in" else record.outputs
        if not all(map(tally.is_finite, tensors)):
            what = "receives" if kind == "in" else "puts out"
            return _float32_too(
                record.path,
                f"Layer '{record.name}' ({type(record.layer).__name__}) {what} "
                "NaN or infinite values in float32 as well",
            )
    if not tally.is_finite(found.loss):
        return _float32_too(
            None, "The loss is NaN or infinite in float32 as well"
        )
    for weight in found.weights:
        gradient = weight.gradient
        if gradient is not None and not tally.is_finite(gradient):
            return _float32_too(
                found.path_of(weight.layer),
                f"The gradient of '{weight.variable.path}' is NaN or infinite "
                "in float32 as well",
            )
    return None


def _float32_too(layer: str | None, message: str) -> Finding:
    return finding(
        "TM105",
        layer,
        f"{message}, on data that is finite.",
        "This is no matter of precision. Look at the learning rate, at the "
        "weights, and for a division by zero or a logarithm of zero.",
    )


def of_table(
    table: Table,
    loss_scale: float,
    window: ScaleWindow | None,
    model: keras.Model,
) -> list[Finding]:
    """The findings for what was measured, layer by layer, then the scale.

    Args:
        table: What was measured.
        loss_scale: The scale that float16 gradients were judged at.
        window: The safe scales; None if nothing computes in float16.
        model: The model.
    """
    found: list[Finding] = []
    for measured in table:
        if isinstance(measured.layer, keras.Sequential | _keras.Functional):
            # It computes nothing; the layers inside it speak for themselves.
            continue
        if measured.dtype in formats.FORMATS:
            found += judge_layer.overflows(measured, table)
            found += judge_layer.vanishes(measured, loss_scale)
    found += _inexact(table)
    if window is not None:
        found += _scale(window, loss_scale, model)
    return found


def _inexact(table: Table) -> Iterator[Finding]:
    """One finding for all layers: errors spread through the backward pass."""
    whole = math.hypot(*(m.gradient_norm for m in table), 0.0)
    compared = [
        (measured, *measured.error)
        for measured in table
        if measured.error is not None
        and measured.gradient_norm >= NEGLIGIBLE * whole
    ]
    off = [one for one in compared if one[1] >= GRADIENT_ERROR]
    if not off:
        return
    # The one nearest to the loss: the layers before it inherit its error.
    measured, error, cosine = off[-1]
    spread = len(off) > len(compared) / 2 and len(off) > 2
    others = ""
    if len(off) > 1:
        worst = max(off, key=lambda one: one[1])
        others = (
            f" So it is in {len(off)} of {len(compared)} layers, most in "
            f"'{worst[0].path}' ({worst[1]:.0%})."
        )
    yield finding(
        "TM104",
        measured.path,
        f"The gradient of the weights of layer {measured.kind} differs from "
        f"that of float32 by {error:.0%} of its norm (cosine {cosine:.3f})."
        + others,
        _SPREAD if spread else keep(measured.layer),
        severity="note" if spread else None,
    )


def _scale(
    window: ScaleWindow, loss_scale: float, model: keras.Model
) -> Iterator[Finding]:
    now = power(loss_scale)
    if not window.exists:
        yield finding(
            "TM106",
            None,
            f"The loss scale is {now}. Safe ones: {window}.",
            "Use bfloat16, whose range is that of float32, or keep the layers "
            "that are named above in float32.",
        )
        return
    if loss_scale in window:
        return
    too_high = loss_scale > (window.highest or 0.0)
    start = window.highest if too_high else window.lowest
    change = (
        "With it gradients overflow" if too_high else "With it gradients vanish"
    )
    # A dynamic scale finds its level within a few skipped steps.
    dynamic = too_high and _is_dynamic(model)
    yield finding(
        "TM106",
        None,
        f"The loss scale is {now}; the safe ones are {window}. {change}.",
        "Start with a safe one: tfmixed.wrap_optimizer(optimizer, loss_scale="
        f"tfmixed.DynamicLossScale(initial={start:g}))."
        + (" The dynamic scale gets there by itself." if dynamic else ""),
        severity="note" if dynamic else None,
    )


def _is_dynamic(model: keras.Model) -> bool:
    """Whether the scale of the model falls by itself when steps are skipped.

    Of a model that does not need one yet, because then it will.
    """
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer is None or not computes_in_float16(model)
    algorithm = getattr(optimizer, "loss_scale", None)
    return algorithm is None or hasattr(algorithm, "backoff_factor")
