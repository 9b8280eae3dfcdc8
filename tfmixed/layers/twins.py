"""Which layer of Keras has a twin here that is right in 16 bits."""

import keras

from tfmixed.layers import activations
from tfmixed.layers import attention
from tfmixed.layers import dense
from tfmixed.layers import float32_inside
from tfmixed.layers import normalization
from tfmixed.layers.batch_normalization import BatchNormalization
from tfmixed.layers.convolutions import CONVOLUTIONS

_NORMALIZATIONS: dict[type, type] = {
    keras.layers.BatchNormalization: BatchNormalization,
    keras.layers.GroupNormalization: normalization.GroupNormalization,
    keras.layers.LayerNormalization: normalization.LayerNormalization,
    keras.layers.RMSNormalization: normalization.RMSNormalization,
}

# From the class of Keras to its twin.
TWINS: dict[type, type] = {
    keras.layers.AdditiveAttention: attention.AdditiveAttention,
    keras.layers.Attention: attention.Attention,
    keras.layers.GroupQueryAttention: attention.GroupedQueryAttention,
    keras.layers.MultiHeadAttention: attention.MultiHeadAttention,
    **_NORMALIZATIONS,
}
# Twins for use inside custom code, where the output has to be in 16 bits.
INSIDE: dict[type, type] = {
    **float32_inside.INSIDE,
    **_NORMALIZATIONS,
    keras.layers.Activation: activations.Activation,
}
# Twins of layers that are safe in 16 bits as they are, but slower or rougher.
FASTER: dict[type, type] = {
    **CONVOLUTIONS,
    keras.layers.Activation: activations.Activation,
    keras.layers.Dense: dense.Dense,
    keras.layers.EinsumDense: dense.EinsumDense,
}
ALL = TWINS | INSIDE | FASTER
_STOCK = {twin: stock for stock, twin in ALL.items()}


def twin_of(layer_class: type) -> type | None:
    """Returns the twin of exactly this class; None where it has none.

    A subclass may rely on what the twin overrides, so it has none.
    """
    return TWINS.get(layer_class)


def faster_of(layer: keras.Layer) -> type | None:
    """Returns the class that a 16-bit layer is faster as; None for others.

    Args:
        layer: A layer of Keras, or already its twin.
    """
    stock = stock_of(type(layer)) or type(layer)
    if stock is keras.layers.Activation and not activations.is_chain(
        layer.activation
    ):
        return None
    return FASTER.get(stock)


def stock_of(layer_class: type) -> type | None:
    """Returns the class of Keras that this is the twin of; None for others."""
    return _STOCK.get(layer_class)
