"""The dtypes of all layers of a model, as they are saved with it.

The configuration of a custom layer does not tell the dtypes of the layers that
it makes itself, and the process that loads a file has another global policy.
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import keras

from tfmixed import _keras
from tfmixed.layers.twins import ALL
from tfmixed.layers.twins import stock_of

# The name in saved configurations.
KEY = "tfmixed_precision"
_SETTABLE = ("float32", "mixed_float16", "mixed_bfloat16")


def dtypes_of(model: keras.Model) -> list[list[Any]]:
    """Class name, policy and twin of each layer, in the order of the model.

    Args:
        model: Any model; the first entry is the model itself.
    """
    return [
        [
            _stock(layer).__name__,
            _keras.layer_policy(layer).name,
            stock_of(type(layer)) is not None,
        ]
        for layer in _keras.flatten_layers(model)
    ]


def _stock(layer: keras.Layer) -> type:
    return stock_of(type(layer)) or type(layer)


def apply_dtypes(model: keras.Model, dtypes: list[list[Any]]) -> bool:
    """Gives the layers of a model what `dtypes_of` said about them.

    Args:
        model: A model with the same layers.
        dtypes: What `dtypes_of` returned.

    Returns:
        Whether it was done: not where the model has other layers, as before
        it is built.
    """
    layers = _keras.flatten_layers(model)
    names = [_stock(layer).__name__ for layer in layers]
    if names[1:] != [name for name, _, _ in dtypes][1:]:
        return False
    for layer, (_, policy, is_twin) in zip(layers, dtypes, strict=True):
        stock = _stock(layer)
        if stock in ALL:
            layer.__class__ = ALL[stock] if is_twin else stock
        if policy != _keras.layer_policy(layer).name and policy in _SETTABLE:
            _keras.set_layer_policy(layer, keras.DTypePolicy(policy))
    return True


@contextlib.contextmanager
def default_policy(name: str | None) -> Iterator[None]:
    """Another global policy for a block, without a word to `enable`.

    Layers that a custom layer makes inside it get this policy, as they would
    have got it where the model was built.
    """
    before, mark = _keras.thread_policy(), _keras.thread_mark()
    if name is not None:
        _keras.set_thread_policy(keras.DTypePolicy(name))
    try:
        yield
    finally:
        _keras.set_thread_policy(before)
        _keras.set_thread_mark(mark)


def warn_of_other_layers(model: keras.Model) -> None:
    """Says that the saved dtypes do not fit the model that was loaded."""
    warnings.warn(
        f"The model '{model.name}' was saved with the dtypes of its layers, "
        "but the model that was made from its configuration has other layers. "
        "The layers inside its custom layers compute in the global policy; "
        "call tfmixed.prepare on it again.",
        stacklevel=3,
    )
