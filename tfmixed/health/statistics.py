"""Numbers of many tensors at once, exact and rough; on the device."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfmixed.health.columns import LOWEST_EXPONENT
from tfmixed.health.columns import NUM_EXPONENTS
from tfmixed.health.columns import SAMPLE

_BIAS = 127  # of the exponent of float32
_MANTISSA_BITS = 23


def columns(pairs: Sequence[tuple[Any, Any]], scales: Sequence[Any]) -> Any:
    """Returns what is measured, of shape (pairs, columns).

    All tensors are sampled into one matrix first: a model has hundreds, and
    the rest is to be a few operations whatever their number.

    Args:
        pairs: Exact and rough, each a float tensor or `tf.IndexedSlices`.
        scales: For each pair a scalar that the rough one was multiplied by.
    """
    exact = [_flat(one) for one, _ in pairs]
    rough = [_flat(other) for _, other in pairs]
    sizes = tf.stack([tf.cast(tf.size(one), tf.float32) for one in exact])
    largest = tf.stack([_largest(one) for one in exact])
    largest_rough = tf.stack([_largest(one) for one in rough])
    all_finite = tf.stack([_is_finite(one) for one in rough])
    distances = tf.maximum(tf.math.ceil(sizes / SAMPLE), 1.0)
    used = tf.math.ceil(sizes / distances)
    one = tf.stack([_sampled(flat) for flat in exact])
    other = tf.stack([_sampled(flat) for flat in rough])
    found = _of_matrices(one, other, tf.stack(list(scales)))
    # A number of values in the sample stands for more of them in all.
    counts = found[:, 1:] * (sizes / tf.maximum(used, 1.0))[:, tf.newaxis]
    return tf.concat(
        [
            tf.stack([largest, largest_rough, sizes, found[:, 0]], 1),
            counts[:, :6],
            all_finite[:, tf.newaxis],
            counts[:, 6:],
        ],
        axis=1,
    )


def _of_matrices(exact: Any, rough: Any, scales: Any) -> Any:
    """Smallest, then counts and sums, then exponents; row by row."""
    is_good, is_rough_good = map(tf.math.is_finite, (exact, rough))
    zero = tf.zeros_like(exact)
    magnitudes = tf.where(is_good, tf.abs(exact), zero)
    is_nonzero = magnitudes > 0
    difference = tf.where(
        is_good & is_rough_good, rough / scales[:, tf.newaxis] - exact, zero
    )
    numbers = [
        # Infinite where there is nothing but zeros.
        tf.reduce_min(tf.where(is_nonzero, magnitudes, float("inf")), axis=1),
        _count(is_nonzero),
        _count(is_nonzero & (rough == 0)),
        _count(is_good & ~is_rough_good),
        _count(~is_good),
        tf.reduce_sum(tf.square(magnitudes), axis=1),
        tf.reduce_sum(tf.square(difference), axis=1),
    ]
    return tf.concat([tf.stack(numbers, 1), _exponents(magnitudes)], axis=1)


def bad_values(tensor: Any) -> Any:
    """Returns how many values of a batch are not finite, and the first row.

    Args:
        tensor: Float tensor whose first axis is that of the batch.

    Returns:
        Two float32 scalars; the second is infinite if all are finite.
    """
    bad = tf.reshape(~tf.math.is_finite(tensor), [tf.shape(tensor)[0], -1])
    is_bad = tf.reduce_any(bad, axis=1)
    positions = tf.cast(tf.range(tf.size(is_bad)), tf.float32)
    first = tf.reduce_min(tf.where(is_bad, positions, float("inf")))
    return tf.reduce_sum(_count(bad)), first


def _flat(tensor: Any) -> Any:
    if isinstance(tensor, tf.IndexedSlices):
        tensor = tensor.values
    return tf.reshape(tensor, [-1])


def _sampled(flat: Any) -> Any:
    """Values at equal distances as float32, zeros up to the full length."""
    step = tf.maximum((tf.size(flat) + SAMPLE - 1) // SAMPLE, 1)
    taken = tf.cast(flat[::step], tf.float32)
    padded = tf.pad(taken, [[0, SAMPLE - tf.size(taken)]])
    return tf.ensure_shape(padded, [SAMPLE])


def _largest(flat: Any) -> Any:
    sizes = tf.where(tf.math.is_finite(flat), tf.abs(flat), tf.zeros_like(flat))
    # The maximum over no values at all is minus infinity.
    return tf.maximum(tf.cast(tf.reduce_max(sizes), tf.float32), 0.0)


def _is_finite(flat: Any) -> Any:
    return tf.cast(tf.reduce_all(tf.math.is_finite(flat)), tf.float32)


def _count(mask: Any) -> Any:
    return tf.reduce_sum(tf.cast(mask, tf.float32), axis=1)


def _exponents(magnitudes: Any) -> Any:
    """Counts by binary exponent: at k what is above 2^(k-1), up to 2^k."""
    bits = tf.bitcast(magnitudes, tf.int32)
    exponent = tf.bitwise.right_shift(bits, _MANTISSA_BITS) - _BIAS
    fraction = tf.bitwise.bitwise_and(bits, 2**_MANTISSA_BITS - 1)
    exponent += 1 - tf.cast(tf.equal(fraction, 0), tf.int32)
    bucket = tf.clip_by_value(exponent - LOWEST_EXPONENT, 0, NUM_EXPONENTS - 1)
    rows = magnitudes.shape[0]
    bucket += tf.range(rows)[:, tf.newaxis] * NUM_EXPONENTS
    is_nonzero = tf.cast(magnitudes > 0, tf.float32)
    counts = tf.math.unsorted_segment_sum(
        is_nonzero, bucket, rows * NUM_EXPONENTS
    )
    return tf.reshape(counts, [rows, NUM_EXPONENTS])
