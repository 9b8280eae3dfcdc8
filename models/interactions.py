"""Pairs of ids with a yes or no, as a recommender learns from."""

import re
import zlib
from collections.abc import Sequence

import numpy as np

from models.arguments import check_positive
from models.data import Splits
from models.data import paragraphs

ROWS = 100_000
_WORD = re.compile(r"[a-z_]+")
_Pairs = np.ndarray


def interactions(rows: int = ROWS, validation_fraction: float = 0.1) -> Splits:
    """Loads pairs of words: does the second one follow the first?

    The text is that of Python's `help()` topics, as in `models.data`. A word
    stands for what a person has just chosen, the next word for what is chosen
    after it. Each pair that occurs is joined by one that occurs nowhere in the
    text: the same first word, and a second one drawn by how often words follow
    any other. So neither column alone tells the answer. Validation pairs come
    from paragraphs of their own.

    Words become row numbers by a hash, as ids do whose number is not known
    beforehand. Two words may share a row.

    Args:
        rows: rows of each embedding; ids are below it.
        validation_fraction: share of the paragraphs for validation.

    Returns:
        `(x_train, y_train), (x_val, y_val)`: int32 row numbers of shape
        `(n, 2)`, and 1 where the pair occurs, 0 where it does not, int32.

    Raises:
        ValueError: an argument is wrong, or a split would be empty.

    Example:

    ```python
    (x_train, y_train), (x_val, y_val) = interactions(rows=10_000)
    ```
    """
    check_positive("interactions", rows=rows)
    texts = [_WORD.findall(text.lower()) for text in paragraphs()]
    names = sorted({word for text in texts for word in text})
    number = {word: index for index, word in enumerate(names)}
    # The legacy generator: its stream is frozen, see `models.data`.
    random = np.random.RandomState(0)
    order = random.permutation(len(texts))
    cut = round(len(texts) * validation_fraction)
    if not 0 < cut < len(texts):
        raise ValueError(
            "`interactions` got `validation_fraction="
            f"{validation_fraction!r}`, which leaves a split without a pair: "
            f"the text has {len(texts)} paragraphs. Pass for example "
            "`validation_fraction=0.1`."
        )
    parts = [
        _neighbours([texts[index] for index in sorted(indices)], number)
        for indices in (order[cut:], order[:cut])
    ]
    both = np.concatenate(parts)
    hashes = np.array(
        [zlib.crc32(name.encode()) % rows for name in names], "int32"
    )
    train, validation = (
        _with_negatives(part, both, hashes, random) for part in parts
    )
    return train, validation


def _neighbours(texts: Sequence[list[str]], number: dict[str, int]) -> _Pairs:
    return np.array(
        [
            (number[first], number[second])
            for text in texts
            for first, second in zip(text, text[1:], strict=False)
        ]
    )


def _with_negatives(
    pairs: _Pairs,
    known: _Pairs,
    hashes: np.ndarray,
    random: np.random.RandomState,
) -> tuple[np.ndarray, np.ndarray]:
    """Adds as many pairs that do not occur, shuffles, and hashes."""
    frequency = np.bincount(known[:, 1], minlength=len(hashes)) / len(known)
    size = len(hashes)
    occurring = np.unique(known[:, 0] * size + known[:, 1])
    first, negatives = pairs[:, 0], []
    # Common words have seen most others: a few of them stay without.
    for _ in range(50):
        second = random.choice(size, len(first), p=frequency)
        drawn = np.stack([first, second], axis=1)
        occurs = np.isin(first * size + second, occurring)
        negatives.append(drawn[~occurs])
        first = first[occurs]
    x = np.concatenate([pairs, *negatives])
    y = (np.arange(len(x)) < len(pairs)).astype("int32")
    shuffled = random.permutation(len(x))
    return hashes[x[shuffled]], y[shuffled]
