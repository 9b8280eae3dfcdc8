"""The two products of attention, with what 16 bits cannot hold in float32.

A score of more than 65504 does not fit float16, and one of 100 is off by up to
0.03 in float16 and 0.25 in bfloat16, which softmax makes 3 % and 28 %. So the
product of query and key takes its operands as float32; TensorFlow has none of
16-bit operands with a float32 result. It costs little: these casts grow with
the length of the sequence, a cast of the scores with its square, and TF32 holds
every number of either 16-bit dtype. All else is multiplied in 16 bits.
"""

from typing import Any

import tensorflow as tf

from tfmixed.fast import clusters

# Products of float16 operands stay below twice this; float16 ends at 65504.
_FITS = 2.0**14
# In place of the power of two below 0: less than float16 can tell from 0.
_LEAST = 2.0**-100
# What `keras.ops.dot_product_attention` gives masked scores in float32.
MASKED = -0.7 * 3.38953e38


def scores(query: Any, key: Any, scale: float) -> Any:
    """Returns `scale * query @ key^T` in float32.

    Args:
        query: float16 or bfloat16, of shape `(..., T, features)`.
        key: The same dtype, of shape `(..., S, features)`.
        scale: What to multiply the product by.
    """

    @tf.custom_gradient
    def product(query: Any, key: Any) -> Any:
        def gradient(upstream: Any) -> tuple[Any, Any]:
            return _score_gradients(upstream, query, key, scale)

        return _wide_product(query, key, scale), gradient

    return product(query, key)


def attention_weights(query: Any, key: Any, scale: float, hide: Any) -> Any:
    """Returns the softmax of the scores in bfloat16; only that is kept.

    The scores and their exponentials are float32, and gone when the forward
    pass goes on: the gradient of a softmax needs nothing but its result.

    Args:
        query: bfloat16, of shape `(..., T, features)`.
        key: bfloat16, of shape `(..., S, features)`.
        scale: What to multiply the product by.
        hide: A function of scores and a number, which it puts in the place
            of those that are masked.
    """

    upstream_of = _score_upstream
    if not clusters.pays(query, key):
        # Eager steps would compile it for each shape.
        upstream_of = _score_upstream.__wrapped__  # type: ignore[attr-defined]

    @tf.custom_gradient
    def product(query: Any, key: Any) -> Any:
        hidden = hide(_wide_product(query, key, scale), MASKED)
        weights = tf.cast(tf.nn.softmax(hidden), query.dtype)

        def gradient(upstream: Any) -> tuple[Any, Any]:
            # Where all are masked, there are weights, but no gradient.
            of_scores = hide(upstream_of(weights, upstream), 0)
            return _score_gradients(of_scores, query, key, scale)

        return weights, gradient

    return product(query, key)


@clusters.cluster
def _score_upstream(weights: Any, upstream: Any) -> Any:
    wide, upstream = (tf.cast(x, tf.float32) for x in (weights, upstream))
    # Rounded weights do not sum to 1. Divided by their sum they do, and the
    # gradient where one key takes nearly all is the small number that it is.
    wide = wide / tf.reduce_sum(wide, -1, keepdims=True)
    total = tf.reduce_sum(wide * upstream, -1, keepdims=True)
    return tf.cast(wide * (upstream - total), weights.dtype)


def combine(weights: Any, value: Any) -> Any:
    """Returns `weights @ value` in the dtype of `value`.

    Args:
        weights: float32 or as `value`, of shape `(..., T, S)`.
        value: float16 or bfloat16, of shape `(..., S, features)`.
    """

    @tf.custom_gradient
    def product(weights: Any, value: Any) -> Any:
        given = weights.dtype
        weights = tf.cast(weights, value.dtype)

        def gradient(upstream: Any) -> tuple[Any, Any]:
            of_value = tf.matmul(weights, upstream, transpose_a=True)
            if value.dtype == tf.float16:
                # Values of a few thousand would make it infinite.
                return _wide_product(upstream, value, 1.0), of_value
            of_weights = tf.matmul(upstream, value, transpose_b=True)
            return tf.cast(of_weights, given), of_value

        return tf.matmul(weights, value), gradient

    return product(weights, value)


def _wide_product(rows: Any, columns: Any, scale: float) -> Any:
    rows = tf.cast(rows, "float32")
    if scale != 1:
        rows = rows * scale
    return tf.matmul(rows, tf.cast(columns, "float32"), transpose_b=True)


def _score_gradients(
    upstream: Any, query: Any, key: Any, scale: float
) -> tuple[Any, Any]:
    dtype = query.dtype
    if dtype != tf.float16:
        upstream = tf.cast(upstream, dtype)
        of_query = tf.matmul(upstream, key)
        of_key = tf.matmul(upstream, query, transpose_a=True)
        return _times(of_query, scale), _times(of_key, scale)
    # The gradients of long or of large scores do not fit float16, unlike what
    # becomes of them: each row gets a unit, a power of two, which is exact.
    peak = _peak(upstream, -1)
    unit = _unit(peak, _peak(key, [-2, -1]), tf.shape(key)[-2])
    upstream = tf.cast(upstream / unit, dtype)
    of_query = _times(tf.matmul(upstream, key), unit * scale)
    query = tf.cast(query, "float32") * unit
    largest = tf.reduce_max(peak / unit, -2, keepdims=True)
    unit = _unit(_peak(query, [-2, -1]), largest, tf.shape(query)[-2])
    query = tf.cast(query / unit, dtype)
    of_key = tf.matmul(upstream, query, transpose_a=True)
    return of_query, _times(of_key, unit * scale)


def _unit(peak: Any, factor: Any, terms: Any) -> Any:
    """A power of two: what is divided by it fits, and so do its products.

    Args:
        peak: The largest magnitude of what is to be divided.
        factor: The largest magnitude of what it is multiplied with.
        terms: The number of products that are summed up.
    """
    bound = peak * tf.maximum(factor * tf.cast(terms, "float32"), 1.0)
    # Without the bits of its fraction, a float is a power of two.
    bits = tf.bitwise.bitwise_and(tf.bitcast(bound, tf.int32), 0x7F800000)
    return tf.maximum(tf.bitcast(bits, tf.float32) / _FITS, _LEAST)


def _peak(x: Any, axis: Any) -> Any:
    return tf.cast(tf.reduce_max(tf.abs(x), axis, keepdims=True), "float32")


def _times(x: Any, factor: Any) -> Any:
    return tf.cast(tf.cast(x, "float32") * factor, x.dtype)
