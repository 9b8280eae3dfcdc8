"""Shapes and data of the benchmarks' models, for every framework."""

from collections.abc import Callable

import numpy as np

NUM_CLASSES = 10
IMAGE = (64, 64, 3)
SEQUENCE = 128
VOCABULARY = 256
ROWS = 400_000
FEATURES = 64

Data = tuple[np.ndarray, np.ndarray]


def floats(shape: tuple[int, ...]) -> Callable[[int], Data]:
    """Returns a function of the batch size: normal inputs and classes."""

    def data(batch: int) -> Data:
        random = np.random.default_rng(0)
        x = random.normal(size=(batch, *shape)).astype("float32")
        return x, random.integers(NUM_CLASSES, size=batch).astype("int32")

    return data


def tokens(batch: int) -> Data:
    """Sequences of characters, and the same one later."""
    random = np.random.default_rng(0)
    text = random.integers(VOCABULARY, size=(batch, SEQUENCE + 1))
    return text[:, :-1].astype("int32"), text[:, 1:].astype("int32")


def ids(batch: int) -> Data:
    """Different rows of the embedding, and classes."""
    random = np.random.default_rng(0)
    rows = random.choice(ROWS, size=(batch, 1), replace=False).astype("int32")
    return rows, random.integers(NUM_CLASSES, size=batch).astype("int32")


# By workload: the data, and the batch size.
DATA = {
    "mlp": (floats((1024,)), 256),
    "cnn": (floats(IMAGE), 32),
    "transformer": (tokens, 32),
    "resnet50": (floats(IMAGE), 32),
    "embedding": (ids, 64),
    "lstm": (floats((SEQUENCE, FEATURES)), 64),
}
