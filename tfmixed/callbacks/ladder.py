"""The rungs that a `PrecisionGuard` climbs, and how to come back down."""

import keras

from tfmixed import _keras
from tfmixed.audit import observe
from tfmixed.callbacks.moves import Moves
from tfmixed.hardware import hardware

LAYER = "layer to float32"
BFLOAT16 = "bfloat16"
FLOAT32 = "float32"
BACK = "climb back"


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
