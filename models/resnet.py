"""Residual networks for small images."""

import os
from collections.abc import Sequence
from typing import Any

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
    """Builds a residual network for images of about 32 by 32 pixels.

    Three stages of `(depth - 2) / 6` blocks with two 3x3 convolutions each,
    at `width`, `2 * width` and `4 * width` channels. Depth 50 is `resnet50`.

    Args:
        input_shape: shape of one image, `(height, width, channels)`.
        classes: number of classes.
        depth: number of layers, `6n + 2`: 20, 32, 44, 56, 110; or 50.
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
    deep = depth == 50
    lengths = (3, 4, 6, 3) if deep else ((depth - 2) // 6,) * 3

    inputs = keras.Input(tuple(input_shape), name="images")
    x = _conv_bn(inputs, width, 3, 2 if deep else 1, "stem")
    x = layers.ReLU(name="stem_relu")(x)
    for stage, length in enumerate(lengths):
        for block in range(length):
            strides = 2 if stage > 0 and block == 0 else 1
            prefix = f"stage{stage}_block{block}"
            x = _block(x, width * 2**stage, strides, deep, prefix)
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


def resnet50(
    input_shape: Sequence[int] = (28, 28, 1), width: int = 64, **arguments: Any
) -> keras.Model:
    """Builds ResNet-50 for images of about 32 by 32 pixels.

    Four stages of bottlenecks. As the images are small, a 3x3 convolution
    of stride 2 stands for the one of 7x7 and its pooling.

    Args:
        input_shape: shape of one image, `(height, width, channels)`.
        width: channels inside the first blocks; they give out four times that.
        **arguments: by name, those of `resnet` except `depth`.

    Input shape, output shape, returns:
        As of `resnet`.

    Example:

    ```python
    model = resnet50(classes=100)
    ```
    """
    return resnet(input_shape, depth=50, width=width, **arguments)


def _block(
    x: keras.KerasTensor, filters: int, strides: int, deep: bool, prefix: str
) -> keras.KerasTensor:
    outside = 4 * filters if deep else filters
    shortcut = x
    if strides > 1 or x.shape[-1] != outside:
        shortcut = _conv_bn(x, outside, 1, strides, f"{prefix}_shortcut")
    if deep:
        # A bottleneck: the 3x3 convolution gets a quarter of the channels.
        x = _conv_bn(x, filters, 1, 1, f"{prefix}_squeeze")
        x = layers.ReLU(name=f"{prefix}_squeeze_relu")(x)
    x = _conv_bn(x, filters, 3, strides, f"{prefix}_0")
    x = layers.ReLU(name=f"{prefix}_0_relu")(x)
    x = _conv_bn(x, outside, 1 if deep else 3, 1, f"{prefix}_1")
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
