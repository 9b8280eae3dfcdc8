"""From the measurements of one layer to findings."""

from collections.abc import Iterator
from typing import Any

from tfmixed.audit import formats
from tfmixed.audit.findings import Finding
from tfmixed.audit.findings import finding
from tfmixed.audit.rows import Measured
from tfmixed.audit.rows import Table
from tfmixed.audit.tally import Tally
from tfmixed.audit.window import power

# Vanishing values are a finding if so many of them vanish ...
VANISHED = 0.05
# ... and if that changes the tensor so much, relative, in Euclidean norm. Tiny
# probabilities beside one of 0.9 may vanish; nobody misses them.
VANISHING_ERROR = 0.01


def number(value: float) -> str:
    """Writes a magnitude: up to six digits."""
    return f"{value:.6g}"


def keep(layer: Any) -> str:
    """Says how to keep a layer in float32."""
    return (
        "Keep it in float32: tfmixed.prepare(model, "
        f"keep_float32=[{str(layer.name)!r}])."
    )


def overflows(measured: Measured, table: Table) -> Iterator[Finding]:
    """Values beyond the format: of an input, the output or the gradients.

    Args:
        measured: A layer that puts out a 16-bit format.
        table: All layers.
    """
    name = str(measured.dtype)
    limits = formats.get(name)
    ends = f"{name} ends at {number(limits.largest)}"
    source = _overflowing_input(measured, table)
    if source is not None:
        yield finding(
            "TM101",
            measured.path,
            f"Layer {measured.kind} casts an input that reaches "
            f"{number(source)} to {measured.input_dtype}; {ends}.",
            "Scale the data in float32, for example with a Normalization "
            f"layer. {keep(measured.layer)}",
        )
    output = measured.outputs.largest or 0.0
    if not measured.passes_on and output >= limits.overflow_from:
        yield finding(
            "TM101",
            measured.path,
            f"Layer {measured.kind} reaches {number(output)} in its output; "
            f"{ends}.",
            keep(measured.layer),
        )
    elif measured.broken and measured.outputs.finite:
        yield finding(
            "TM101",
            measured.path,
            f"Layer {measured.kind} overflows on the way to its output, which "
            f"in float32 reaches no more than {number(output)}; {ends}.",
            keep(measured.layer),
        )
    kinds = {
        "the gradient of its weights": measured.weight_gradients,
        "the gradient of its output": measured.output_gradients,
    }
    for what, found in kinds.items():
        if (found.largest or 0.0) >= limits.overflow_from:
            yield finding(
                "TM101",
                measured.path,
                f"Layer {measured.kind} has {number(found.largest or 0.0)} in "
                f"{what}, without any loss scale; {ends}.",
                f"Normalize what goes into the layer. {keep(measured.layer)}",
            )
            return


def _overflowing_input(measured: Measured, table: Table) -> float | None:
    """The largest input that a cast by this layer turns into infinity."""
    if measured.input_dtype not in formats.FORMATS:
        return None
    limit = formats.get(measured.input_dtype).overflow_from
    for source, largest in measured.sources.items():
        maker = table.by_path(source)
        # What a 16-bit layer puts out is that layer's fault.
        from_16_bit = maker is not None and maker.dtype in formats.FORMATS
        by_parent = (
            source == Measured.FROM_PARENT
            and measured.parent_input_dtype in formats.FORMATS
        )
        if largest >= limit and not from_16_bit and not by_parent:
            return largest
    return None


def vanishes(measured: Measured, loss_scale: float) -> Iterator[Finding]:
    """Values too small for the format: of the output and the gradients.

    Args:
        measured: A layer that puts out a 16-bit format.
        loss_scale: The scale that gradients were measured at.
    """
    name = str(measured.dtype)
    kept = keep(measured.layer)
    if not measured.passes_on and _is_lost(measured.outputs, name):
        yield finding(
            "TM102",
            measured.path,
            f"Of the output of layer {measured.kind}, "
            f"{_lost(measured.outputs, name)} in {name}: it reaches no more "
            f"than {number(measured.outputs.largest or 0.0)}.",
            f"Scale or normalize what goes into the layer. {kept}",
        )
    if name != "float16":
        return
    kinds = {"weights": measured.weight_gradients}
    if not measured.passes_on:
        kinds["output"] = measured.output_gradients
    for what, found in kinds.items():
        if _is_lost(found, name):
            yield finding(
                "TM103",
                measured.path,
                f"Of the gradient of the {what} of layer {measured.kind}, "
                f"{_lost(found, name)} at a loss scale of {power(loss_scale)}.",
                f"Raise the loss scale. {kept}",
            )
            return


def _is_lost(found: Tally, name: str) -> bool:
    shares = found.shares[name]
    return (
        shares.flushed + shares.subnormal >= VANISHED
        and found.rounding_error(name) >= VANISHING_ERROR
    )


def _lost(found: Tally, name: str) -> str:
    shares = found.shares[name]
    return (
        f"{shares.flushed:.0%} becomes zero and {shares.subnormal:.0%} "
        "subnormal"
    )
