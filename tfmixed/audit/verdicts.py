"""What `blame` returns, and how it puts its findings into words."""

import dataclasses
import json
import textwrap
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmixed.audit import culprit as culprit_lib
from tfmixed.audit import formats
from tfmixed.audit import observe as observe_lib
from tfmixed.audit import step
from tfmixed.audit import suspect
from tfmixed.audit import tally
from tfmixed.audit.batches import BadData
from tfmixed.audit.cure import Cure
from tfmixed.audit.judge_layer import number
from tfmixed.audit.suspect import Culprit
from tfmixed.audit.window import power

_FLOAT32_MAX = float(np.finfo("float32").max)


@dataclasses.dataclass(frozen=True)
class Blame:
    """The first thing that goes wrong in a step, and the way out.

    Args:
        where: `"data"`, `"weights"`, `"forward"`, `"backward"`, `"loss"`, or
            `"nothing"` if the step is finite.
        layer: Path of the layer, or None.
        tensor: Which tensor it is, in words.
        float32_too: Whether a step in float32 is not finite either.
        dtype: The dtype of the tensor.
        value: The largest magnitude that the tensor has in float32, the loss
            scale included; None if it is not finite there. Where nothing is
            wrong, the largest magnitude as it is.
        inputs: The largest finite magnitudes of what it was computed from.
        fix: What to do.
        keep_float32: Names of layers, for `tfmixed.prepare`: with them in
            float32 the step was run again and was finite.
        loss_scale: A loss scale at which the step was run again and was
            finite, with `keep_float32`; None if it need not change.
        message: What happened, in words.
    """

    where: str
    layer: str | None = None
    tensor: str = ""
    float32_too: bool = False
    dtype: str | None = None
    value: float | None = None
    inputs: dict[str, float] = dataclasses.field(default_factory=dict)
    fix: str = ""
    keep_float32: tuple[str, ...] = ()
    loss_scale: float | None = None
    message: str = ""

    def to_json(self) -> str:
        """Returns the fields as strict JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False)

    def __str__(self) -> str:
        return textwrap.fill(
            f"{self.message} {self.fix}".strip(),
            width=79,
            break_long_words=False,
            break_on_hyphens=False,
        )


def nothing(found: step.Observation) -> Blame:
    """All is finite: says how near it came to the limit.

    Args:
        found: The step.
    """
    reach, nearest = -1.0, ("", "", None)
    for path, what, tensor in culprit_lib.tensors(found):
        relative = tally.largest(tensor) / _limit(tensor.dtype.name)
        if relative > reach:
            reach, nearest = relative, (path, what, tensor)
    path, what, tensor = nearest
    if tensor is None:
        return Blame("nothing", message="The step is finite.")
    dtype, value = tensor.dtype.name, tally.largest(tensor)
    return Blame(
        "nothing",
        layer=path,
        tensor=what,
        dtype=dtype,
        value=value,
        message=(
            f"The step is finite{_at(found.loss_scale)}. What comes nearest to "
            f"the end of its format is the {what} of layer '{path}': it "
            f"reaches {number(value)}, and {_ends(dtype)}."
        ),
    )


def bad_data(bad: BadData, float32_too: bool, dtype: str) -> Blame:
    """The data is not finite.

    Args:
        bad: What was found in it.
        float32_too: Whether the step in float32 is not finite either.
        dtype: The dtype of the data.
    """
    return Blame(
        "data",
        tensor=bad.name,
        float32_too=float32_too,
        dtype=dtype,
        fix="Remove or replace these rows; no precision and no loss scale "
        "helps.",
        message=f"The data is bad: {bad}.",
    )


def damaged(model: keras.Model, variable: Any, float32_too: bool) -> Blame:
    """A variable of the model is not finite.

    Args:
        model: The model.
        variable: The first such variable.
        float32_too: Whether the step in float32 is not finite either.
    """
    names = observe_lib.paths(model)
    inside = [
        names[id(layer)]
        for layer in observe_lib.operations(model)
        if any(variable is v for v in getattr(layer, "variables", []))
    ]
    values = tf.convert_to_tensor(variable.value)
    bad = int(tf.math.count_nonzero(~tf.math.is_finite(values)))
    return Blame(
        "weights",
        # The innermost one comes last.
        layer=inside[-1] if inside else None,
        tensor=f"variable '{variable.path}'",
        float32_too=float32_too,
        dtype=values.dtype.name,
        fix="Load the weights of an earlier checkpoint. An update with a "
        "gradient that is not finite does this; the optimizer of "
        "tfmixed.wrap_optimizer(optimizer) skips such steps.",
        message=(
            f"The model is damaged already: its variable '{variable.path}' "
            f"has {bad} NaN or infinite values of {int(tf.size(values))}."
        ),
    )


def diverged(first: Culprit) -> Blame:
    """Neither 16 bits nor float32 are finite.

    Args:
        first: The first tensor that is not finite.
    """
    return Blame(
        first.where,
        layer=first.path,
        tensor=first.tensor,
        float32_too=True,
        dtype=first.dtype,
        inputs=first.inputs,
        fix="This is no matter of precision, and a loss scale does not help. "
        "Look at the learning rate, clip the gradients, and look for a "
        "division by zero or a logarithm of zero.",
        message=(
            f"{_what(first)} is not finite; in float32 the step is not "
            "either, on data and weights that are. "
            f"{_went_in(first)}".rstrip()
        ),
    )


def precision(
    first: Culprit, value: float | None, cure: Cure | None, scale: float
) -> Blame:
    """A step in float32 is finite, so the format is the cause.

    Args:
        first: The first tensor that is not finite.
        value: The largest magnitude that it has in float32, if that is known.
        cure: What made the step finite, if anything did.
        scale: The loss scale.
    """
    layers = cure.layers if cure else ()
    names = tuple(dict.fromkeys(str(layer.name) for layer in layers))
    scaled = first.where in (suspect.BACKWARD, suspect.LOSS)
    at = _at(scale) if scaled else ""
    reached = ""
    if value is not None:
        reached = f" In float32 it reaches {number(value)}{at}."
    return Blame(
        first.where,
        layer=first.path,
        tensor=first.tensor,
        dtype=first.dtype,
        value=value,
        inputs=first.inputs,
        fix=_fix(first, cure, names),
        keep_float32=names,
        loss_scale=cure.loss_scale if cure else None,
        message=(
            f"{_what(first)} is not finite in {first.dtype}{at}; "
            f"{_ends(first.dtype)}. A step in float32 is finite.{reached} "
            f"{_went_in(first)}".rstrip()
        ),
    )


def _fix(first: Culprit, cure: Cure | None, names: tuple[str, ...]) -> str:
    if cure is None:
        return (
            "No small change that was tried makes the step finite. Train in "
            "float32, or scale down what goes into the layer."
        )
    if cure.policy is not None:
        return (
            f"Use {cure.policy}, whose range is that of float32: with it the "
            "step was run and is finite."
        )
    fixes = []
    if first.where == suspect.DATA:
        fixes.append("Scale the data to a range around 1.")
    if names:
        alternative = "Or keep" if fixes else "Keep"
        what = "this layer" if len(names) == 1 else "these layers"
        fixes.append(
            f"{alternative} {what} in float32: tfmixed.prepare(model, "
            f"keep_float32={list(names)!r})."
        )
    if cure.loss_scale is not None:
        fixes.append(
            f"Lower the loss scale to {power(cure.loss_scale)}, the largest "
            "power of two at which the step is finite; a dynamic loss scale "
            "falls there by itself."
        )
    fixes.append("With this the step was run again and is finite.")
    return " ".join(fixes)


def _what(first: Culprit) -> str:
    if first.layer is None:
        return first.tensor.capitalize()
    kind = type(first.layer).__name__
    tensor = first.tensor
    article = "" if tensor.startswith(("a ", "the ")) else "the "
    return f"Layer '{first.path}' ({kind}): {article}{tensor}"


def _went_in(first: Culprit) -> str:
    if not first.inputs:
        return ""
    parts = [f"{name} {number(size)}" for name, size in first.inputs.items()]
    return f"Largest finite magnitudes that went in: {', '.join(parts)}."


def _at(scale: float) -> str:
    return f" at a loss scale of {power(scale)}" if scale != 1.0 else ""


def _limit(dtype: str) -> float:
    if dtype in formats.FORMATS:
        return formats.get(dtype).largest
    return _FLOAT32_MAX


def _ends(dtype: str) -> str:
    return f"{dtype} ends at {number(_limit(dtype))}"
