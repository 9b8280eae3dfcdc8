"""Multilayer perceptron."""

import os
from collections.abc import Sequence

import keras
from keras import layers

from models.arguments import check_fraction
from models.arguments import check_positive
from models.arguments import load_weights


def mlp(
    input_shape: Sequence[int] = (28, 28, 1),
    classes: int = 10,
    hidden: Sequence[int] = (2048, 2048, 2048, 2048),
    dropout: float = 0.0,
    classifier_activation: str | None = "softmax",
    weights: str | os.PathLike[str] | None = None,
    name: str = "mlp",
) -> keras.Model:
    """Builds dense layers with ReLU and a classifier on top.

    The default is wide enough that its matrix products, which 16 bits speed
    up, outweigh the casts, which they cost.

    Args:
        input_shape: shape of one sample; more than one dimension is flattened.
        classes: number of classes.
        hidden: width of each hidden layer.
        dropout: share of units dropped after each hidden layer.
        classifier_activation: `"softmax"` for probabilities, `None` for
            logits.
        weights: `None` for random weights, or a path to load them from.
        name: name of the model.

    Input shape:
        `(batch, *input_shape)`, numbers.

    Output shape:
        `(batch, classes)`, float32.

    Returns:
        A functional `keras.Model`, not compiled.

    Example:

    ```python
    model = mlp(input_shape=(30,), classes=2, hidden=(64, 64))
    model.compile("adam", "sparse_categorical_crossentropy")
    ```
    """
    check_positive(
        "mlp",
        input_shape=tuple(input_shape),
        classes=classes,
        hidden=tuple(hidden),
    )
    check_fraction("mlp", dropout=dropout)

    inputs = keras.Input(tuple(input_shape), name="features")
    x = (
        layers.Flatten(name="flatten")(inputs)
        if len(input_shape) > 1
        else (inputs)
    )
    for index, units in enumerate(hidden):
        x = layers.Dense(units, activation="relu", name=f"dense_{index}")(x)
        if dropout:
            x = layers.Dropout(dropout, name=f"dropout_{index}")(x)
    # float32: a 16-bit softmax rounds a confident wrong answer to exactly
    # one, and its gradient to zero. The loss takes float32 from here too.
    outputs = layers.Dense(
        classes,
        activation=classifier_activation,
        dtype="float32",
        name="predictions",
    )(x)

    model = keras.Model(inputs, outputs, name=name)
    load_weights(model, weights)
    return model


def tiny_mlp(
    input_shape: Sequence[int] = (8, 8, 1),
    classes: int = 10,
    classifier_activation: str | None = "softmax",
    weights: str | os.PathLike[str] | None = None,
    name: str = "tiny_mlp",
) -> keras.Model:
    """Builds an `mlp` that is too small to gain from mixed precision.

    Its step is spent on starting operations, not inside them, so casts can
    only add to it. An honest comparison says not to use mixed precision.

    Args:
        input_shape: shape of one sample.
        classes: number of classes.
        classifier_activation: `"softmax"` for probabilities, `None` for
            logits.
        weights: `None` for random weights, or a path to load them from.
        name: name of the model.

    Returns:
        A functional `keras.Model`, not compiled.

    Example:

    ```python
    model = tiny_mlp()
    model.predict(x)    # x of shape (batch, 8, 8, 1)
    ```
    """
    return mlp(
        input_shape,
        classes,
        hidden=(32, 32),
        classifier_activation=classifier_activation,
        weights=weights,
        name=name,
    )
