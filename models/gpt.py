"""Decoder-only language model: rotary positions, RMS norms, tied weights."""

import os
from typing import Any

import keras
from keras import layers
from keras import ops

from models.arguments import check_positive
from models.arguments import load_weights
from models.data import VOCABULARY_SIZE


def gpt(
    sequence_length: int = 128,
    vocabulary_size: int = VOCABULARY_SIZE,
    num_blocks: int = 4,
    width: int = 192,
    num_heads: int = 4,
    classifier_activation: str | None = "softmax",
    weights: str | os.PathLike[str] | None = None,
    name: str = "gpt",
) -> keras.Model:
    """Builds pre-norm blocks of causal attention and a GELU feed-forward.

    Args:
        sequence_length: number of token ids in a sample.
        vocabulary_size: number of token ids; the default fits `models.data`.
        num_blocks: number of blocks.
        width: size of a token's vector; the feed-forward is four times wider.
        num_heads: attention heads; each needs an even share of `width`.
        classifier_activation: `"softmax"` for probabilities, `None` for
            logits.
        weights: `None` for random weights, or a path to load them from.
        name: name of the model.

    Input shape:
        `(batch, sequence_length)`, int32 token ids.

    Output shape:
        `(batch, sequence_length, vocabulary_size)`, float32: the next token.

    Returns:
        A functional `keras.Model`, not compiled.

    Example:

    ```python
    model = gpt(num_blocks=2)
    model.compile("adam", "sparse_categorical_crossentropy")
    ```
    """
    check_positive(
        "gpt",
        sequence_length=sequence_length,
        vocabulary_size=vocabulary_size,
        num_blocks=num_blocks,
        width=width,
        num_heads=num_heads,
    )
    if width % (2 * num_heads):
        raise ValueError(
            f"`gpt` got `width={width}` and `num_heads={num_heads}`. Expected "
            f"an even number for each head. Pass `width={48 * num_heads}`."
        )

    # Integers: under a 16-bit policy float ids above 256 would be rounded.
    tokens = keras.Input((sequence_length,), dtype="int32", name="tokens")
    # float32: the same layer gives the logits, which 16 bits would round.
    tied = TiedEmbedding(vocabulary_size, width, dtype="float32", name="tied")
    x = tied(tokens)
    for index in range(num_blocks):
        x = _block(x, num_heads, f"block{index}")
    # float32: as in `_block`.
    x = layers.RMSNormalization(dtype="float32", name="norm")(x)
    # float32: a 16-bit softmax rounds a confident wrong answer to exactly
    # one, and its gradient to zero. The loss takes float32 from here too.
    outputs = layers.Activation(
        classifier_activation, dtype="float32", name="predictions"
    )(tied(x, reverse=True))

    model = keras.Model(tokens, outputs, name=name)
    load_weights(model, weights)
    return model


def _block(x: keras.KerasTensor, heads: int, prefix: str) -> keras.KerasTensor:
    width = x.shape[-1]
    # float32: Keras 3.10 sums the squares in the dtype of this layer.
    y = layers.RMSNormalization(dtype="float32", name=f"{prefix}_norm_0")(x)
    y = layers.Dense(3 * width, use_bias=False, name=f"{prefix}_qkv")(y)
    # float32: bfloat16 rounds positions above 256; q @ k may leave float16.
    y = RotaryAttention(heads, dtype="float32", name=f"{prefix}_attention")(y)
    y = layers.Dense(width, use_bias=False, name=f"{prefix}_out")(y)
    x = layers.Add(name=f"{prefix}_add_0")([x, y])
    # float32: as above.
    y = layers.RMSNormalization(dtype="float32", name=f"{prefix}_norm_1")(x)
    # GELU and no gate: the product of two activations may leave float16.
    y = layers.Dense(4 * width, activation="gelu", name=f"{prefix}_up")(y)
    y = layers.Dense(width, name=f"{prefix}_down")(y)
    return layers.Add(name=f"{prefix}_add_1")([x, y])


@keras.saving.register_keras_serializable(package="tfmixed_models")
class TiedEmbedding(layers.Layer):
    """Turns ids into vectors and, called in reverse, vectors into logits."""

    def __init__(self, vocabulary_size: int, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # Of this name Keras makes `get_config`.
        self.matrix = self.add_weight((vocabulary_size, width), name="matrix")

    def call(self, inputs: Any, reverse: bool = False) -> Any:
        """Takes ids; with `reverse=True` vectors."""
        if reverse:
            return ops.matmul(inputs, ops.transpose(self.matrix))
        return ops.take(self.matrix, inputs, axis=0)


@keras.saving.register_keras_serializable(package="tfmixed_models")
class RotaryAttention(layers.Layer):
    """Causal attention over queries and keys that `rotate` has turned."""

    def __init__(self, num_heads: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_heads = num_heads

    def call(self, inputs: Any) -> Any:
        """Takes query, key and value side by side; gives a third as wide."""
        _, length, width = inputs.shape
        shape = (-1, length, 3, self.num_heads, width // 3 // self.num_heads)
        query, key, value = ops.unstack(ops.reshape(inputs, shape), 3, axis=2)
        query, key = rotate(query), rotate(key)
        outputs = ops.dot_product_attention(query, key, value, is_causal=True)
        return ops.reshape(outputs, (-1, length, width // 3))


def rotate(x: Any) -> Any:
    """Turns pairs of features by angles that grow with the position (RoPE).

    What a query and a key have in common then depends on their distance.
    """
    length, size = x.shape[1], x.shape[3]
    rates = 10000.0 ** (-ops.arange(0, size, 2, dtype="float32") / size)
    angles = ops.arange(length, dtype="float32")[:, None, None] * rates
    cos, sin = ops.cos(angles), ops.sin(angles)
    one, other = ops.split(x, 2, axis=-1)
    turned = (one * cos - other * sin, one * sin + other * cos)
    return ops.concatenate(turned, axis=-1)
