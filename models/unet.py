"""U-Net for the segmentation of small images."""

import os
from collections.abc import Sequence

import keras
from keras import layers

from models.arguments import check_positive
from models.arguments import check_shape
from models.arguments import load_weights


def unet(
    input_shape: Sequence[int] = (32, 32, 3),
    classes: int = 2,
    widths: Sequence[int] = (32, 64, 128),
    classifier_activation: str | None = "softmax",
    weights: str | os.PathLike[str] | None = None,
    name: str = "unet",
) -> keras.Model:
    """Builds a path down to small maps and one up again, joined by skips.

    Args:
        input_shape: shape of one image, `(height, width, channels)`.
        classes: number of classes of a pixel, the background included.
        widths: channels of each stage. Every stage after the first works at
            half the height and width.
        classifier_activation: `"softmax"` for probabilities, `None` for
            logits.
        weights: `None` for random weights, or a path to load them from.
        name: name of the model.

    Input shape:
        `(batch, height, width, channels)`, numbers of about unit size.

    Output shape:
        `(batch, height, width, classes)`, float32: the distribution of each
        pixel.

    Returns:
        A functional `keras.Model`, not compiled.

    Example:

    ```python
    model = unet(input_shape=(64, 64, 1), classes=3)
    model.compile("adam", "sparse_categorical_crossentropy")
    ```

    Reference:
        [U-Net: Convolutional Networks for Biomedical Image Segmentation](
        https://arxiv.org/abs/1505.04597), here with padding, so that output
        and input have one size, and with batch normalization.
    """
    check_shape("unet", input_shape, 3, "(32, 32, 3)")
    check_positive("unet", classes=classes, widths=tuple(widths))
    factor = 2 ** (len(widths) - 1)
    if input_shape[0] % factor or input_shape[1] % factor:
        raise ValueError(
            f"`unet` got `input_shape={tuple(input_shape)}` and "
            f"{len(widths)} stages, `widths={tuple(widths)}`. Each stage "
            "after the first halves the image and is doubled again, so "
            f"height and width must be multiples of {factor}. Pad the images "
            "or pass fewer `widths`."
        )

    images = keras.Input(tuple(input_shape), name="images")
    skips = []
    x = images
    for stage, filters in enumerate(widths):
        if stage > 0:
            skips.append(x)
            x = layers.MaxPooling2D(2, name=f"down{stage}_pool")(x)
        x = _convolutions(x, filters, f"down{stage}")
    for stage in reversed(range(len(widths) - 1)):
        # A kernel of the size of the stride paints each pixel once; one of 3
        # would paint every other pixel twice, which shows as a chequerboard.
        x = layers.Conv2DTranspose(
            widths[stage], 2, strides=2, name=f"up{stage}_transpose"
        )(x)
        x = layers.Concatenate(name=f"up{stage}_skip")([skips[stage], x])
        x = _convolutions(x, widths[stage], f"up{stage}")
    # float32: a 16-bit softmax rounds a confident wrong answer to exactly
    # one, and its gradient to zero. The loss takes float32 from here too.
    outputs = layers.Conv2D(
        classes,
        1,
        activation=classifier_activation,
        dtype="float32",
        name="predictions",
    )(x)

    model = keras.Model(images, outputs, name=name)
    load_weights(model, weights)
    return model


def _convolutions(
    x: keras.KerasTensor, filters: int, prefix: str
) -> keras.KerasTensor:
    for unit in range(2):
        name = f"{prefix}_{unit}"
        x = layers.Conv2D(
            filters,
            3,
            padding="same",
            # The normalization that follows would subtract a bias.
            use_bias=False,
            kernel_initializer="he_normal",
            name=f"{name}_conv",
        )(x)
        # Keras computes the statistics in float32 under any policy. The
        # momentum lets them settle within the few steps of a short run.
        x = layers.BatchNormalization(momentum=0.7, name=f"{name}_bn")(x)
        x = layers.ReLU(name=f"{name}_relu")(x)
    return x
