"""Recurrent network that predicts the next character."""

import os

import keras
from keras import layers

from models.arguments import check_fraction
from models.arguments import check_positive
from models.arguments import load_weights
from models.data import VOCABULARY_SIZE


def lstm(
    sequence_length: int | None = None,
    vocabulary_size: int = VOCABULARY_SIZE,
    num_layers: int = 2,
    width: int = 256,
    embedding_width: int = 64,
    dropout: float = 0.0,
    classifier_activation: str | None = "softmax",
    weights: str | os.PathLike[str] | None = None,
    name: str = "lstm",
) -> keras.Model:
    """Builds a stack of LSTM layers over embedded characters.

    Args:
        sequence_length: number of token ids in a sample; `None` for any.
        vocabulary_size: number of different token ids. The default fits
            `models.data.characters`.
        num_layers: number of LSTM layers.
        width: units of each LSTM layer.
        embedding_width: size of a token's vector.
        dropout: share of units dropped after each LSTM layer.
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
    model = lstm(num_layers=1, width=128)
    model.compile("adam", "sparse_categorical_crossentropy")
    ```
    """
    check_positive(
        "lstm",
        vocabulary_size=vocabulary_size,
        num_layers=num_layers,
        width=width,
        embedding_width=embedding_width,
    )
    if sequence_length is not None:
        check_positive("lstm", sequence_length=sequence_length)
    check_fraction("lstm", dropout=dropout)

    # Integers: under a 16-bit policy float ids above 256 would be rounded.
    tokens = keras.Input((sequence_length,), dtype="int32", name="tokens")
    x = layers.Embedding(
        vocabulary_size, embedding_width, name="token_embedding"
    )(tokens)
    for index in range(num_layers):
        # Dropout between the layers and not inside them: `dropout=` of the
        # LSTM itself rules out the fused cuDNN kernel.
        x = layers.LSTM(width, return_sequences=True, name=f"lstm_{index}")(x)
        if dropout:
            x = layers.Dropout(dropout, name=f"dropout_{index}")(x)
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
