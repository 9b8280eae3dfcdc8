"""Which layer of Keras has a twin here that is right in 16 bits."""

import keras

from tfmixed.layers import attention
from tfmixed.layers.float32_inside import INSIDE

# From the class of Keras to its twin.
TWINS: dict[type, type] = {
    keras.layers.AdditiveAttention: attention.AdditiveAttention,
    keras.layers.Attention: attention.Attention,
    keras.layers.GroupQueryAttention: attention.GroupedQueryAttention,
    keras.layers.MultiHeadAttention: attention.MultiHeadAttention,
}
_STOCK = {twin: stock for stock, twin in (TWINS | INSIDE).items()}


def twin_of(layer_class: type) -> type | None:
    """Returns the twin of exactly this class; None where it has none.

    A subclass may rely on what the twin overrides, so it has none.
    """
    return TWINS.get(layer_class)


def stock_of(layer_class: type) -> type | None:
    """Returns the class of Keras that this is the twin of; None for others."""
    return _STOCK.get(layer_class)
