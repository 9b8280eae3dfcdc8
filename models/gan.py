"""Generative adversarial network of convolutions (DCGAN) for small images."""

import os
from collections.abc import Sequence

import keras
from keras import layers

from models.adversarial import Adversarial
from models.arguments import check_positive
from models.arguments import check_shape
from models.arguments import load_weights
from models.images import LATENT_SIZE


def gan(
    input_shape: Sequence[int] = (28, 28, 1),
    latent_size: int = LATENT_SIZE,
    width: int = 32,
    weights: str | os.PathLike[str] | None = None,
    name: str = "gan",
) -> Adversarial:
    """Builds a generator of images and a discriminator that judges them.

    Args:
        input_shape: shape of one image, `(height, width, channels)`; height
            and width are multiples of 4.
        latent_size: size of the random vector that an image is made of. The
            default fits `models.images.latent_mnist5k`.
        width: channels at half the size of the image; twice as many at a
            quarter of it.
        weights: `None` for random weights, or a path to load them from.
        name: name of the model.

    Input shape:
        `(batch, latent_size)`, standard normal numbers.

    Output shape:
        `(batch, height, width, channels)`, float32 in `[0, 1]`.

    Returns:
        An `Adversarial` model, a `tfmixed.Model`. It is compiled, because its
        losses are its own; `compile` it again for another optimizer.

    Example:

    ```python
    model = gan()
    model.fit(latents, images, epochs=10)
    pictures = model.predict(latents[:16])
    ```

    Reference:
        [Unsupervised Representation Learning with Deep Convolutional
        Generative Adversarial Networks](https://arxiv.org/abs/1511.06434).
    """
    check_shape("gan", input_shape, 3, "(28, 28, 1)")
    check_positive("gan", latent_size=latent_size, width=width)
    if any(size % 4 for size in input_shape[:2]):
        raise ValueError(
            f"`gan` got `input_shape={tuple(input_shape)}`. Height and width "
            "are halved twice, so they must be multiples of 4. Pass for "
            "example `input_shape=(28, 28, 1)`."
        )
    model = Adversarial(
        _generator(tuple(input_shape), latent_size, width),
        _discriminator(tuple(input_shape), width),
        name=name,
    )
    # Rate and first moment of the paper; the plan decides about XLA.
    model.compile(keras.optimizers.Adam(2e-4, beta_1=0.5))
    load_weights(model, weights)
    return model


def _generator(
    shape: tuple[int, ...], latent_size: int, width: int
) -> keras.Model:
    height, breadth, channels = shape
    small = (height // 4, breadth // 4, 2 * width)
    latents = keras.Input((latent_size,), name="latents")
    x = layers.Dense(
        small[0] * small[1] * small[2], use_bias=False, name="project"
    )(latents)
    x = layers.Reshape(small, name="reshape")(x)
    x = layers.ReLU(name="project_relu")(_normalized(x, "project_bn"))
    x = layers.Conv2DTranspose(
        width, 4, strides=2, padding="same", use_bias=False, name="up"
    )(x)
    x = layers.ReLU(name="up_relu")(_normalized(x, "up_bn"))
    # float32: a 16-bit sigmoid rounds a pixel near one to exactly one, and
    # its gradient to zero; most pixels of a digit are black or white.
    images = layers.Conv2DTranspose(
        channels,
        4,
        strides=2,
        padding="same",
        activation="sigmoid",
        dtype="float32",
        name="images",
    )(x)
    return keras.Model(latents, images, name="generator")


def _discriminator(shape: tuple[int, ...], width: int) -> keras.Model:
    images = keras.Input(shape, name="images")
    x = layers.Conv2D(width, 4, strides=2, padding="same", name="down_0")(
        images
    )
    x = layers.LeakyReLU(0.2, name="down_0_relu")(x)
    x = layers.Conv2D(
        2 * width, 4, strides=2, padding="same", use_bias=False, name="down_1"
    )(x)
    x = layers.LeakyReLU(0.2, name="down_1_relu")(_normalized(x, "down_1_bn"))
    x = layers.Flatten(name="flatten")(x)
    # float32: the loss is taken of the logit, and where the discriminator is
    # sure the generator learns from differences that 16 bits round away.
    logits = layers.Dense(1, dtype="float32", name="logits")(x)
    return keras.Model(images, logits, name="discriminator")


def _normalized(x: keras.KerasTensor, name: str) -> keras.KerasTensor:
    # Keras computes the statistics in float32 under any policy. The momentum
    # lets them settle within the few steps of a short run.
    return layers.BatchNormalization(momentum=0.7, name=name)(x)
