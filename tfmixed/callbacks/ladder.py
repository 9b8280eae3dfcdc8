"""The rungs that a `PrecisionGuard` climbs, and how to come back down."""

import math

import keras

from tfmixed import _keras
from tfmixed.audit import observe
from tfmixed.callbacks.moves import Moves
from tfmixed.hardware import hardware
from tfmixed.health.columns import Part
from tfmixed.health.probe import Reading
from tfmixed.health.view import view

LAYER = "layer to float32"
BFLOAT16 = "bfloat16"
FLOAT32 = "float32"
BACK = "climb back"

# Rounding to bfloat16, the coarser of the two, is off by 0.2 % on average; a
# few layers in a row add up to some of it. An output is wrong from here on,
# and ill-conditioned a layer that makes it this much worse than its inputs.
_OUTPUT_ERROR = 0.05
_JUMP = 4.0
_UNDERFLOW = 0.1
_GRADIENT_ERROR = 0.5


class Ladder:
    """Which layers of a model were moved, and what can be moved next.

    Args:
        model: A built model.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._moves = Moves(model)
        paths = observe.paths(model)
        self._layers = {paths[id(o)]: o for o in observe.operations(model)}
        self.moved: list[str] = []
        self.rung: str | None = None

    def move(self, path: str | None) -> bool:
        """Moves one layer to float32.

        Returns:
            Whether that changed anything: not if it computes in float32, or
            is a `keras.ops` node, which follows what feeds it.
        """
        layer = self._layers.get(path or "")
        if path is None or not isinstance(layer, keras.Layer):
            return False
        if layer is self._model or not self._moves.to([layer], "float32"):
            return False
        self.moved.append(path)
        return True

    def all_to(self, rung: str) -> bool:
        """Moves what still computes in 16 bits to bfloat16, or to float32.

        Returns:
            Whether that changed anything.
        """
        policy = "mixed_bfloat16" if rung == BFLOAT16 else "float32"
        if rung == BFLOAT16 and not self._may_use_bfloat16():
            return False
        changed = self._moves.to([self._model], policy)
        for path in self.moved:
            self._moves.to([self._layers[path]], "float32")
        if changed:
            self.rung = rung
        return changed

    def back(self) -> bool:
        """Goes one rung down: the layers that were blamed stay in float32.

        Returns:
            Whether there was a rung to leave.
        """
        if self.rung is None:
            return False
        self._moves.back([self._model])
        for path in self.moved:
            self._moves.to([self._layers[path]], "float32")
        self.rung = None
        return True

    def redo(self, action: str, path: str | None) -> None:
        """Makes a move that was made before an interruption."""
        if action == LAYER:
            self.move(path)
        elif action in (BFLOAT16, FLOAT32):
            self.all_to(action)
        elif action == BACK:
            self.back()

    @property
    def has_16_bit(self) -> bool:
        """Whether any layer still computes in 16 bits."""
        return any(
            layer.compute_dtype in ("float16", "bfloat16")
            for layer in _keras.flatten_layers(self._model)
        )

    def _may_use_bfloat16(self) -> bool:
        if "bfloat16" not in hardware().fast_dtypes:
            return False
        return any(
            layer.compute_dtype == "float16"
            for layer in _keras.flatten_layers(self._model)
        )


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
