"""Finds the layers that make the outputs of a model."""

from typing import Any

import keras


def output_layers(model: Any) -> list[Any]:
    """Finds the layers that make the outputs of a model.

    Args:
        model: any built model.

    Returns:
        The layers, those inside a nested model rather than the model itself;
        none for a subclassed model, which does not tell.
    """
    if not getattr(model, "outputs", None):
        return []
    outputs = {id(tensor) for tensor in model.outputs}
    found = [layer for layer in model.layers if outputs & set(_made_by(layer))]
    # A nested model knows its own outputs and not those it gave to this one.
    if not found and isinstance(model.layers[-1], keras.Model):
        found = [model.layers[-1]]
    flat: list[Any] = []
    for layer in found:
        nested = isinstance(layer, keras.Model)
        flat += output_layers(layer) if nested else [layer]
    return flat


def _made_by(layer: Any) -> list[int]:
    try:
        return [id(tensor) for tensor in keras.tree.flatten(layer.output)]
    except (AttributeError, ValueError):
        # The layer was never called, or more than once.
        return []
