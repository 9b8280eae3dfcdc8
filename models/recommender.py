"""Recommender of two large embedding tables, a dot product and an MLP."""

import os
from collections.abc import Sequence

import keras
from keras import layers

from models.arguments import check_positive
from models.arguments import load_weights
from models.interactions import ROWS


def recommender(
    rows: int = ROWS,
    width: int = 32,
    hidden: Sequence[int] = (64, 32),
    classifier_activation: str | None = "sigmoid",
    weights: str | os.PathLike[str] | None = None,
    name: str = "recommender",
) -> keras.Model:
    """Builds two embeddings, matched by a dot product and by dense layers.

    Nearly all weights lie in the tables, and a batch touches few of their
    rows: the gradients are sparse, and little of the time goes into the
    products that 16 bits speed up.

    Args:
        rows: rows of each table. The default fits
            `models.interactions.interactions`.
        width: size of a row.
        hidden: units of each hidden layer.
        classifier_activation: `"sigmoid"` for the probability of a match,
            `None` for its logit.
        weights: `None` for random weights, or a path to load them from.
        name: name of the model.

    Input shape:
        `(batch, 2)`, int32 row numbers: who, and what.

    Output shape:
        `(batch, 1)`, float32.

    Returns:
        A functional `keras.Model`, not compiled.

    Example:

    ```python
    model = recommender(rows=10_000, width=16)
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    ```

    Reference:
        [Neural Collaborative Filtering](https://arxiv.org/abs/1708.05031),
        section 3.4.
    """
    check_positive("recommender", rows=rows, width=width, hidden=tuple(hidden))

    # Integers: float ids above 256 would be rounded by a bfloat16 policy and
    # those above 2048 by a float16 one, and meet the row of another id.
    ids = keras.Input((2,), dtype="int32", name="ids")
    who, what = (
        layers.Embedding(rows, width, name=f"{column}_embedding")(ids[:, index])
        for index, column in enumerate(("who", "what"))
    )
    # float32: products of both signs cancel, and bfloat16 would keep eight
    # bits of each of them and of their sum.
    score = layers.Dot(axes=1, dtype="float32", name="score")([who, what])
    x = layers.Concatenate(name="both")([who, what])
    for index, units in enumerate(hidden):
        x = layers.Dense(units, activation="relu", name=f"dense_{index}")(x)
    # float32: beside the hidden units the score would be rounded after all.
    x = layers.Concatenate(dtype="float32", name="evidence")([score, x])
    # float32: a 16-bit sigmoid rounds a confident wrong answer to exactly
    # one, and its gradient to zero. The loss takes float32 from here too.
    outputs = layers.Dense(
        1,
        activation=classifier_activation,
        dtype="float32",
        name="predictions",
    )(x)

    model = keras.Model(ids, outputs, name=name)
    load_weights(model, weights)
    return model
