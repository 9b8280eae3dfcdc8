"""Residual network for small images."""

import os
from collections.abc import Sequence

import keras
from keras import layers

from models.arguments import check_positive
from models.arguments import check_shape
from models.arguments import load_weights


def resnet(
    input_shape: Sequence[int] = (28, 28, 1),
    classes: int = 10,
    depth: int = 20,
    width: int = 16,
    classifier_activation: str | None = "softmax",
    weights: str | os.PathLike[str] | None = None,
    name: str | None = None,
) -> keras.Model:
    """Builds the residual network for images of about 32 by 32 pixels.

    Three stages of `(depth - 2) / 6` blocks with two 3x3 convolutions each,
    at `width`, `2 * width` and `4 * width` channels.

    Args:
        input_shape: shape of one image, `(height, width, channels)`.
        classes: number of classes.
        depth: number of layers, `6n + 2`: 20, 32, 44, 56, 110.
        width: channels of the first stage.
        classifier_activation: `"softmax"` for probabilities, `None` for
            logits.
        weights: `None` for random weights, or a path to load them from.
        name: name of the model, `f"resnet{depth}"` if `None`.

    Input shape:
        `(batch, height, width, channels)`, numbers of about unit size.

    Output shape:
        `(batch, classes)`, float32.

    Returns:
        A functional `keras.Model`, not compiled.

    Example:

    ```python
    model = resnet(input_shape=(32, 32, 3), depth=32)
    ```

    Reference:
        [Deep Residual Learning for Image Recognition](
        https://arxiv.org/abs/1512.03385), section 4.2.
    """
    check_shape("resnet", input_shape, 3, "(28, 28, 1)")
    check_positive("resnet", classes=classes, depth=depth, width=width)
    if depth < 8 or depth % 6 != 2:
        raise ValueError(
            f"`resnet` got `depth={depth}`. Expected three stages of equal "
            "length, that is 6n + 2 layers: pass 20, 32, 44, 56 or 110."
        )

    inputs = keras.Input(tuple(input_shape), name="images")
    x = _conv_bn(inputs, width, 3, 1, "stem")
    x = layers.ReLU(name="stem_relu")(x)
    for stage in range(3):
        for block in range((depth - 2) // 6):
            strides = 2 if stage > 0 and block == 0 else 1
            prefix = f"stage{stage}_block{block}"
            x = _residual_block(x, width * 2**stage, strides, prefix)
    x = layers.GlobalAveragePooling2D(name="average_pool")(x)
    # float32: a 16-bit softmax rounds a confident wrong answer to exactly
    # one, and its gradient to zero. The loss takes float32 from here too.
    outputs = layers.Dense(
        classes,
        activation=classifier_activation,
        dtype="float32",
        name="predictions",
    )(x)

    model = keras.Model(inputs, outputs, name=name or f"resnet{depth}")
    load_weights(model, weights)
    return model


def _residual_block(
    x: keras.KerasTensor, filters: int, strides: int, prefix: str
) -> keras.KerasTensor:
    shortcut = x
    if strides > 1:
        shortcut = _conv_bn(x, filters, 1, strides, f"{prefix}_shortcut")
    x = _conv_bn(x, filters, 3, strides, f"{prefix}_0")
    x = layers.ReLU(name=f"{prefix}_0_relu")(x)
    x = _conv_bn(x, filters, 3, 1, f"{prefix}_1")
    x = layers.Add(name=f"{prefix}_add")([shortcut, x])
    return layers.ReLU(name=f"{prefix}_out")(x)


def _conv_bn(
    x: keras.KerasTensor, filters: int, size: int, strides: int, prefix: str
) -> keras.KerasTensor:
    x = layers.Conv2D(
        filters,
        size,
        strides=strides,
        padding="same",
        # The normalization that follows would subtract a bias.
        use_bias=False,
        kernel_initializer="he_normal",
        name=f"{prefix}_conv",
    )(x)
    # Keras computes the statistics in float32 under any policy. The momentum
    # lets them settle within the few steps of a short run.
    return layers.BatchNormalization(momentum=0.7, name=f"{prefix}_bn")(x)
