"""Plain convolutional network for small images."""

import os
from collections.abc import Sequence

import keras
from keras import layers

from models.arguments import check_positive
from models.arguments import check_shape
from models.arguments import load_weights


def convnet(
    input_shape: Sequence[int] = (28, 28, 1),
    classes: int = 10,
    widths: Sequence[int] = (64, 128, 256),
    classifier_activation: str | None = "softmax",
    weights: str | os.PathLike[str] | None = None,
    name: str = "convnet",
) -> keras.Model:
    """Builds stages of two 3x3 convolutions, each stage at half the size.

    Args:
        input_shape: shape of one image, `(height, width, channels)`.
        classes: number of classes.
        widths: channels of each stage. Every stage halves height and width.
        classifier_activation: `"softmax"` for probabilities, `None` for
            logits.
        weights: `None` for random weights, or a path to load them from.
        name: name of the model.

    Input shape:
        `(batch, height, width, channels)`, numbers of about unit size.

    Output shape:
        `(batch, classes)`, float32.

    Returns:
        A functional `keras.Model`, not compiled.

    Example:

    ```python
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = convnet(input_shape=(32, 32, 3), classes=100)
    ```
    """
    check_shape("convnet", input_shape, 3, "(28, 28, 1)")
    check_positive("convnet", classes=classes, widths=tuple(widths))
    smallest = 2 ** len(widths)
    if min(input_shape[:2]) < smallest:
        raise ValueError(
            f"`convnet` got `input_shape={tuple(input_shape)}` and "
            f"{len(widths)} stages, `widths={tuple(widths)}`. Each stage "
            "halves the image, so height and width must be at least "
            f"{smallest}. Pass larger images or fewer `widths`."
        )

    inputs = keras.Input(tuple(input_shape), name="images")
    x = inputs
    for stage, filters in enumerate(widths):
        for unit in range(2):
            prefix = f"stage{stage}_unit{unit}"
            x = layers.Conv2D(
                filters,
                3,
                padding="same",
                # The normalization that follows would subtract a bias.
                use_bias=False,
                kernel_initializer="he_normal",
                name=f"{prefix}_conv",
            )(x)
            # Keras computes the statistics in float32 under any policy. The
            # momentum lets them settle within the few steps of a short run.
            x = layers.BatchNormalization(momentum=0.7, name=f"{prefix}_bn")(x)
            x = layers.ReLU(name=f"{prefix}_relu")(x)
        x = layers.MaxPooling2D(2, name=f"stage{stage}_pool")(x)
    x = layers.GlobalAveragePooling2D(name="average_pool")(x)
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
