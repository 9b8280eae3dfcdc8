"""Moves layers between precisions while `fit` runs.

Weights are float32 whatever a layer computes in, so that a move loses nothing:
not the weights, not the optimizer's state. What has to be done again is to
trace the step.
"""

from collections.abc import Iterable
from typing import Any

import keras

from tfmixed import _keras

_HALF = ("float16", "bfloat16")


class Moves:
    """The dtype policies of a model, and how to change them.

    Args:
        model: A built model.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._before = [
            (layer, _keras.layer_policy(layer))
            for layer in _keras.flatten_layers(model)
        ]
        # A model may declare 16-bit data, which no dtype policy changes.
        self._inputs = [
            (layer, dtype)
            for layer, _ in self._before
            if (dtype := _keras.input_dtype(layer)) in _HALF
        ]

    def movable(self) -> list[Any]:
        """The layers that computed in 16 bits when this object was made."""
        return [
            layer for layer, policy in self._before if _is_half(policy, layer)
        ]

    def to(self, layers: Iterable[Any], policy: str) -> bool:
        """Gives layers, and what is inside them, another policy.

        Only layers that began in 16 bits are touched: what is float32 for a
        good reason stays so.

        Args:
            layers: The layers, for example `[model]` for all of them.
            policy: `"float32"`, `"mixed_bfloat16"`, `"mixed_float16"`.

        Returns:
            Whether any computes in another dtype than before.
        """
        target = keras.DTypePolicy(policy)
        inside = {
            id(inner)
            for layer in layers
            for inner in _keras.flatten_layers(layer)
        }
        changed = False
        for layer in self.movable():
            if id(layer) in inside:
                changed = changed or layer.compute_dtype != target.compute_dtype
                _keras.set_layer_policy(layer, target)
        for layer, _ in self._inputs:
            if id(layer) in inside:
                _keras.set_input_dtype(layer, target.compute_dtype)
        if changed:
            self._trace_anew()
        return changed

    def back(self, layers: Iterable[Any]) -> bool:
        """Gives layers, and what is inside them, what they began with.

        Returns:
            Whether any computes in another dtype than before.
        """
        inside = {
            id(inner)
            for layer in layers
            for inner in _keras.flatten_layers(layer)
        }
        changed = False
        for layer, policy in self._before:
            if id(layer) in inside:
                before = layer.compute_dtype
                _keras.set_layer_policy(layer, policy)
                changed = changed or layer.compute_dtype != before
        for layer, dtype in self._inputs:
            if id(layer) in inside:
                _keras.set_input_dtype(layer, dtype)
        if changed:
            self._trace_anew()
        return changed

    def _trace_anew(self) -> None:
        # `fit` looks for the function before each execution.
        _keras.set_compiled_functions(self._model, None)
        self._model.make_train_function(force=True)


def _is_half(policy: Any, layer: Any) -> bool:
    dtype = getattr(policy, "compute_dtype", None) or layer.compute_dtype
    return dtype in _HALF
