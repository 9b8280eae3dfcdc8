"""The model as it was handed in, kept from all harm."""

import contextlib
from collections.abc import Iterator

import keras

from tfmixed import _keras
from tfmixed.audit import step


class Original:
    """Remembers what `prepare` may change of a model that it cannot copy.

    Args:
        model: The model as it was handed in.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self._attributes = dict(vars(model))
        self._layers = [
            (layer, type(layer), _keras.layer_policy(layer))
            for layer in _keras.flatten_layers(model)
        ]

    def put_back(self) -> None:
        """Makes the model what it was."""
        for layer, layer_class, policy in self._layers:
            if type(layer) is not layer_class:
                layer.__class__ = layer_class
            if _keras.layer_policy(layer) is not policy:
                _keras.set_layer_policy(layer, policy)
        vars(self.model).update(self._attributes)
        for name in vars(self.model).keys() - self._attributes.keys():
            del vars(self.model)[name]


@contextlib.contextmanager
def unharmed(model: keras.Model) -> Iterator[Original]:
    """Afterwards the model is what it was, whatever happens in the block.

    Args:
        model: A built model.
    """
    original = Original(model)
    with step.unchanged(model):
        try:
            yield original
        finally:
            original.put_back()
