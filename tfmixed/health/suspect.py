"""The layer that loses most precision in 16 bits."""

import math

from tfmixed.health.columns import Part
from tfmixed.health.probe import Reading
from tfmixed.health.view import view

# Rounding to bfloat16, the coarser of the two, is off by 0.2 % on average; a
# few layers in a row add up to some of it. An output is wrong from here on,
# and ill-conditioned a layer that makes it this much worse than its inputs.
_OUTPUT_ERROR = 0.05
_JUMP = 4.0
_UNDERFLOW = 0.1
_GRADIENT_ERROR = 0.5


def suspect(reading: Reading) -> tuple[str, str] | None:
    """Returns the layer that loses most precision, and why; or None.

    Where the error of the outputs jumps, the layer is ill-conditioned: what
    comes after it only passes the error on. Where no output is off, gradients
    may be: those that vanish, or the weight gradients of one layer.

    Args:
        reading: A batch, measured.
    """
    found = _jump(reading)
    if found is not None:
        return found
    rows = [r for r in view(reading, 0).layers if r.dtype != "float32"]
    worst = max(rows, key=lambda r: r.underflow, default=None)
    if worst is not None and worst.underflow > _UNDERFLOW:
        return worst.path, (
            f"{worst.underflow:.0%} of its gradients vanish in {worst.dtype}"
        )
    worst = max(rows, key=lambda r: r.error, default=None)
    if worst is not None and worst.error > _GRADIENT_ERROR:
        return worst.path, (
            f"the gradients of its weights are off by {_size(worst.error)}"
        )
    return None


def _jump(reading: Reading) -> tuple[str, str] | None:
    errors = [
        (tensor.call, numbers.error, tensor.layer)
        for tensor, numbers in zip(
            reading.tensors, reading.numbers, strict=True
        )
        if tensor.part is Part.OUTPUTS and not tensor.passed_on
    ]
    before, worst = 0.0, (_JUMP, None, 0.0)
    for _, error, layer in sorted(errors, key=lambda one: one[0]):
        ratio = error / before if before else math.inf
        if error > _OUTPUT_ERROR and ratio > worst[0]:
            worst = (ratio, layer, error)
        before = max(before, error)
    if worst[1] is None:
        return None
    path = reading.paths[id(worst[1])]
    return path, f"its outputs are off by {_size(worst[2])} in 16 bits"


def _size(error: float) -> str:
    return f"{error:.0%}" if error < 1 else f"{error:.3g} times their size"
