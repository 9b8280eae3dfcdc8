"""Causal transformer that predicts the next character."""

import os

import keras
from keras import layers
from keras import ops

from models.arguments import check_fraction
from models.arguments import check_positive
from models.arguments import load_weights
from models.data import VOCABULARY_SIZE


def transformer(
    sequence_length: int = 128,
    vocabulary_size: int = VOCABULARY_SIZE,
    num_blocks: int = 3,
    width: int = 256,
    num_heads: int = 4,
    dropout: float = 0.0,
    classifier_activation: str | None = "softmax",
    weights: str | os.PathLike[str] | None = None,
    name: str = "transformer",
) -> keras.Model:
    """Builds pre-norm blocks of causal attention and a GELU feed-forward.

    Args:
        sequence_length: number of token ids in a sample.
        vocabulary_size: number of different token ids. The default fits
            `models.data.characters`.
        num_blocks: number of blocks.
        width: size of a token's vector; the feed-forward is four times wider.
        num_heads: attention heads; must divide `width`.
        dropout: share of units dropped at the end of each half block.
        classifier_activation: `"softmax"` for probabilities, `None` for
            logits.
        weights: `None` for random weights, or a path to load them from.
        name: name of the model.

    Input shape:
        `(batch, sequence_length)`, int32 token ids.

    Output shape:
        `(batch, sequence_length, vocabulary_size)`, float32: at each position
        the distribution of the token that follows it.

    Returns:
        A functional `keras.Model`, not compiled.

    Example:

    ```python
    model = transformer(sequence_length=64, num_blocks=2)
    model.compile("adam", "sparse_categorical_crossentropy")
    ```
    """
    check_positive(
        "transformer",
        sequence_length=sequence_length,
        vocabulary_size=vocabulary_size,
        num_blocks=num_blocks,
        width=width,
        num_heads=num_heads,
    )
    check_fraction("transformer", dropout=dropout)
    if width % num_heads:
        raise ValueError(
            f"`transformer` got `width={width}` and `num_heads={num_heads}`. "
            "Expected a width that the heads can share equally. Pass for "
            f"example `width={num_heads * max(1, round(width / num_heads))}`."
        )

    # Integers: under a 16-bit policy float ids above 256 would be rounded.
    tokens = keras.Input((sequence_length,), dtype="int32", name="tokens")
    positions = ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    x = layers.Embedding(vocabulary_size, width, name="token_embedding")(tokens)
    x = x + layers.Embedding(sequence_length, width, name="position_embedding")(
        positions
    )
    for index in range(num_blocks):
        x = _block(x, num_heads, dropout, f"block{index}")
    x = layers.LayerNormalization(epsilon=1e-5, name="norm")(x)
    # float32: a 16-bit softmax rounds a confident wrong answer to exactly
    # one, and its gradient to zero. The loss takes float32 from here too.
    outputs = layers.Dense(
        vocabulary_size,
        activation=classifier_activation,
        dtype="float32",
        name="predictions",
    )(x)

    model = keras.Model(tokens, outputs, name=name)
    load_weights(model, weights)
    return model


def _block(
    x: keras.KerasTensor, num_heads: int, dropout: float, prefix: str
) -> keras.KerasTensor:
    width = x.shape[-1]
    # Keras computes the statistics of a layer normalization in float32 under
    # any policy; the epsilon is one that float16 can hold.
    y = layers.LayerNormalization(epsilon=1e-5, name=f"{prefix}_norm_0")(x)
    # With the scores asked for, Keras divides the query by sqrt(width of a
    # head) before it multiplies by the key. Its shorter path divides the
    # product, which by then can be past 65504, where float16 ends.
    y, _ = layers.MultiHeadAttention(
        num_heads, width // num_heads, name=f"{prefix}_attention"
    )(y, y, use_causal_mask=True, return_attention_scores=True)
    x = x + (layers.Dropout(dropout)(y) if dropout else y)

    y = layers.LayerNormalization(epsilon=1e-5, name=f"{prefix}_norm_1")(x)
    y = layers.Dense(4 * width, activation="gelu", name=f"{prefix}_up")(y)
    y = layers.Dense(width, name=f"{prefix}_down")(y)
    return x + (layers.Dropout(dropout)(y) if dropout else y)
