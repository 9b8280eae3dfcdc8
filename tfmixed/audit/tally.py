"""Counts over tensors: largest magnitude, and what 16 bits would do to them."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfmixed.audit import formats
from tfmixed.audit.formats import FORMATS
from tfmixed.audit.formats import Shares

# The largest magnitude is taken over all values, shares over so many of each
# tensor at most, at equal distances.
SAMPLE = 2**15
# Binary exponents of float32, subnormal ones included.
_LOWEST, _HIGHEST = -150, 130


class Tally:
    """What is known of the values of one kind in one layer.

    Args:
        scales: By the name of the format, what the values are multiplied with
            before a cast to it; 1.0 where nothing is said.

    Attributes:
        largest: The largest finite magnitude; None before the first tensor.
        finite: Whether all values were finite.
        shares: By the name of the format, what a cast does.
        exponents: How many values have a magnitude above `2**(e - 1)` and up
            to `2**e`; the first entry is for e = -150.
        sampled: Whether a tensor was too large to look at every value.
    """

    def __init__(self, scales: dict[str, float] | None = None) -> None:
        self._scales = scales or {}
        self.largest: float | None = None
        self.finite = True
        self.shares = {name: Shares() for name in FORMATS}
        self.exponents = np.zeros(_HIGHEST - _LOWEST + 1)
        self.sampled = False
        self._squares = dict.fromkeys(FORMATS, (0.0, 0.0))

    def add(self, tensor: Any) -> float:
        """Counts the values of a tensor, or of `tf.IndexedSlices`.

        Returns:
            The largest finite magnitude in this tensor.
        """
        if isinstance(tensor, tf.IndexedSlices):
            tensor = summed(tensor)
        if not int(tf.size(tensor)):
            return 0.0
        finite, size = extent(tensor)
        self.largest = max(self.largest or 0.0, size)
        self.finite = self.finite and finite
        values, weight = self._sample(tensor)
        self._count_exponents(values, weight)
        for name in FORMATS:
            self._count_shares(name, values, weight)
        return size

    def _count_shares(
        self, name: str, values: np.ndarray, weight: float
    ) -> None:
        scale = self._scales.get(name, 1.0)
        sizes = np.abs(values[values != 0]) * scale
        if not sizes.size:
            return
        limits = formats.get(name)
        square = float(sizes @ sizes)
        if limits.smallest_normal <= sizes.min() and (
            sizes.max() <= limits.largest
        ):
            # The common case; the rounding of normal numbers does not count.
            self.shares[name] += Shares(count=sizes.size * weight)
            self._add_squares(name, 0.0, square * weight)
            return
        found = formats.shares(sizes, name)
        weighted = dataclasses.replace(found, count=found.count * weight)
        self.shares[name] += weighted
        after = formats.rounded(sizes, name)
        kept = np.isfinite(after)
        error = after[kept] - sizes[kept]
        square = float(sizes[kept] @ sizes[kept])
        self._add_squares(name, float(error @ error) * weight, square * weight)

    def rounding_error(self, name: str) -> float:
        """The relative error that vanishing values make, Euclidean norm."""
        error, square = self._squares[name]
        return float(np.sqrt(error / square)) if square else 0.0

    def _sample(self, tensor: Any) -> tuple[np.ndarray, float]:
        flat = tf.reshape(tensor, [-1])
        size = int(flat.shape[0])
        step = -(-size // SAMPLE)
        self.sampled = self.sampled or step > 1
        values = tf.cast(flat[::step], tf.float32).numpy().astype("float64")
        return values[np.isfinite(values)], size / -(-size // step)

    def _count_exponents(self, values: np.ndarray, weight: float) -> None:
        fractions, exponents = np.frexp(np.abs(values[values != 0]))
        exponents = exponents - (fractions == 0.5)
        exponents = np.clip(exponents, _LOWEST, _HIGHEST) - _LOWEST
        counts = np.bincount(exponents, minlength=len(self.exponents))
        self.exponents += counts * weight

    def _add_squares(self, name: str, error: float, square: float) -> None:
        old_error, old_square = self._squares[name]
        self._squares[name] = (old_error + error, old_square + square)


def share_up_to(
    exponents: np.ndarray, exponent: int, lowest: int = _LOWEST
) -> float:
    """Returns the share of the values that are `2**exponent` at most.

    Args:
        exponents: As `Tally.exponents`, or the sum of several.
        exponent: The binary exponent.
        lowest: The exponent that the first count is of.
    """
    total = float(exponents.sum())
    below = float(exponents[: max(exponent - lowest + 1, 0)].sum())
    return below / total if total else 0.0


def extent(tensor: Any) -> tuple[bool, float]:
    """Returns whether all values are finite, and the largest finite magnitude.

    Args:
        tensor: A floating-point tensor, or `tf.IndexedSlices`. One without
            values is finite and has 0.0.
    """
    if isinstance(tensor, tf.IndexedSlices):
        tensor = tensor.values
    if not int(tf.size(tensor)):
        return True, 0.0
    tensor = _wide(tensor)
    # A sum is finite only if all of its terms are, and makes no copies.
    if bool(tf.math.is_finite(tf.reduce_sum(tensor))):
        low, high = tf.reduce_min(tensor), tf.reduce_max(tensor)
        return True, max(float(high), -float(low))
    finite = tf.math.is_finite(tensor)
    sizes = tf.where(finite, tf.abs(tensor), tf.zeros_like(tensor))
    return bool(tf.reduce_all(finite)), float(tf.reduce_max(sizes))


def largest(tensor: Any) -> float:
    """Returns the largest finite magnitude in a tensor; 0.0 if there is none.

    Args:
        tensor: As for `extent`.
    """
    return extent(tensor)[1]


def is_finite(tensor: Any) -> bool:
    """Returns whether no value is NaN or infinite.

    Args:
        tensor: As for `extent`.
    """
    if isinstance(tensor, tf.IndexedSlices):
        tensor = tensor.values
    if bool(tf.math.is_finite(tf.reduce_sum(_wide(tensor)))):
        return True
    return bool(tf.reduce_all(tf.math.is_finite(tensor)))


def summed(slices: tf.IndexedSlices) -> Any:
    """Returns the rows of sparse gradients, each of them once."""
    rows, positions = tf.unique(tf.reshape(slices.indices, [-1]))
    return tf.math.unsorted_segment_sum(slices.values, positions, tf.size(rows))


def dense(gradient: Any) -> np.ndarray:
    """Returns a gradient as a flat array, zeros included."""
    if isinstance(gradient, tf.IndexedSlices):
        shape = [int(n) for n in gradient.dense_shape]
        array = np.zeros(shape, "float32")
        values = _wide(gradient.values).numpy()
        np.add.at(array, gradient.indices.numpy(), values)
        return array.ravel()
    return np.ravel(_wide(gradient).numpy())


def _wide(tensor: Any) -> Any:
    if tensor.dtype in (tf.float16, tf.bfloat16):
        return tf.cast(tensor, tf.float32)
    return tensor
