"""Convolutional autoencoder that takes noise out of small images."""

import os
from collections.abc import Sequence

import keras
from keras import layers

from models.arguments import check_positive
from models.arguments import check_shape
from models.arguments import load_weights


def autoencoder(
    input_shape: Sequence[int] = (28, 28, 1),
    widths: Sequence[int] = (32, 64),
    weights: str | os.PathLike[str] | None = None,
    name: str = "autoencoder",
) -> keras.Model:
    """Builds strided convolutions, and transposed ones that undo them.

    Args:
        input_shape: shape of one image, `(height, width, channels)`.
        widths: channels of each stage. Every stage of the encoder halves
            height and width, and its counterpart doubles them.
        weights: `None` for random weights, or a path to load them from.
        name: name of the model.

    Input shape:
        `(batch, height, width, channels)`, noisy numbers of about unit size.

    Output shape:
        That of the input, float32: the image without the noise.

    Returns:
        A functional `keras.Model`, not compiled.

    Example:

    ```python
    model = autoencoder(widths=(16, 32))
    model.compile("adam", "mean_squared_error")
    model.fit(noisy_images, clean_images)
    ```

    Reference:
        [Extracting and Composing Robust Features with Denoising Autoencoders](
        https://doi.org/10.1145/1390156.1390294).
    """
    check_shape("autoencoder", input_shape, 3, "(28, 28, 1)")
    check_positive("autoencoder", widths=tuple(widths))
    step = 2 ** len(widths)
    if any(size % step for size in input_shape[:2]):
        raise ValueError(
            f"`autoencoder` got `input_shape={tuple(input_shape)}` and "
            f"{len(widths)} stages, `widths={tuple(widths)}`. Each stage "
            "halves the image and must be able to double it again, so height "
            f"and width must be multiples of {step}. Pass other images or "
            "fewer `widths`."
        )

    inputs = keras.Input(tuple(input_shape), name="images")
    x = inputs
    for stage, filters in enumerate(widths):
        x = _unit(layers.Conv2D, x, filters, f"encoder{stage}")
    for stage, filters in enumerate(reversed(widths)):
        x = _unit(layers.Conv2DTranspose, x, filters, f"decoder{stage}")
    # float32: the loss squares differences of nearly equal pixels. A bfloat16
    # pixel just below one is already wrong by up to 1/512.
    outputs = layers.Conv2D(
        input_shape[-1],
        3,
        padding="same",
        dtype="float32",
        name="predictions",
    )(x)

    model = keras.Model(inputs, outputs, name=name)
    load_weights(model, weights)
    return model


def _unit(
    convolution: type[layers.Layer],
    x: keras.KerasTensor,
    filters: int,
    prefix: str,
) -> keras.KerasTensor:
    x = convolution(
        filters,
        3,
        strides=2,
        padding="same",
        # The normalization that follows would subtract a bias.
        use_bias=False,
        kernel_initializer="he_normal",
        name=f"{prefix}_conv",
    )(x)
    # Keras computes the statistics in float32 under any policy. The momentum
    # lets them settle within the few steps of a short run.
    x = layers.BatchNormalization(momentum=0.7, name=f"{prefix}_bn")(x)
    return layers.ReLU(name=f"{prefix}_relu")(x)
