"""Attention with several heads, of projections in 16 bits.

Does what `_compute_attention` of Keras does, as read from
`keras/src/layers/attention/`, `keras/src/layers/activations/softmax.py` and
`keras/src/backend/tensorflow/nn.py` of Keras 3.15.1 and 3.10.0, and uses
`_dropout_layer`.
"""

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfmixed.layers import products

# What `keras.ops.dot_product_attention` gives masked scores in float32.
_MASKED = -0.7 * 3.38953e38


def attend(
    layer: Any,
    tensors: tuple[Any, Any, Any],
    mask: Any,
    training: bool | None,
    *,
    axes: tuple[int, ...],
    scale: float,
    fused: bool,
) -> tuple[Any, Any]:
    """Returns the combined values and, unless `fused`, the attention scores.

    Args:
        layer: Whose softmax and dropout to use.
        tensors: Projected query, key and value. Each has batch axes and
            attended axes in any order, then heads, then features.
        mask: True where a query may attend to a key, or None.
        training: Whether to drop.
        axes: The attended axes.
        scale: What to multiply the products by.
        fused: Whether Keras would call `ops.dot_product_attention`. Where all
            keys are masked it attends to all alike, Keras's softmax to none.
    """
    query, key, value = (_fold(x, axes) for x in tensors)
    scores = products.scores(query, key, scale)
    flat = ops.shape(scores)
    scores = _unfold_scores(scores, tensors, axes)
    attends = None
    if mask is not None:
        mask = _as_bool(mask, fused)
        while len(mask.shape) < len(scores.shape):
            mask = ops.expand_dims(mask, -2 * len(axes) - 1)
        scores = ops.where(mask, scores, _MASKED)
        if not fused:
            attends = ops.any(mask, range(-len(axes), 0))
            rows = ops.shape(scores)[: -len(axes)]
            attends = ops.broadcast_to(attends, rows)
    weights = dropped = tf.nn.softmax(ops.reshape(scores, flat))
    if not fused:
        # Called as a layer, it would cast the weights to its compute dtype.
        dropped = layer._dropout_layer.call(weights, training=training)
    output = products.combine(dropped, value)
    if attends is not None:
        attends = ops.reshape(attends, (*flat[:-1], 1))
        output = ops.where(attends, output, 0)
        weights = ops.where(attends, weights, 0)
    output = _unfold(output, tensors[0], axes)
    if fused:
        return output, None
    weights = ops.cast(weights, value.dtype)
    return output, _unfold_scores(weights, tensors, axes)


def _batch_axes(rank: int, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i for i in range(rank - 1) if i not in axes)


def _fold(x: Any, axes: tuple[int, ...]) -> Any:
    """Moves the attended axes before the features, and makes one of them."""
    batch = _batch_axes(len(x.shape), axes)
    x = ops.transpose(x, (*batch, *axes, len(x.shape) - 1))
    if len(axes) == 1:
        return x
    shape = ops.shape(x)
    return ops.reshape(x, (*shape[: len(batch)], -1, shape[-1]))


def _unfold(x: Any, like: Any, axes: tuple[int, ...]) -> Any:
    """Undoes `_fold`; all axes but the last are those of `like`."""
    order = (*_batch_axes(len(like.shape), axes), *axes)
    shape = ops.shape(like)
    x = ops.reshape(x, (*(shape[i] for i in order), ops.shape(x)[-1]))
    back = sorted(range(len(order)), key=order.__getitem__)
    return ops.transpose(x, (*back, len(order)))


def _unfold_scores(scores: Any, tensors: Any, axes: tuple[int, ...]) -> Any:
    if len(axes) == 1:
        return scores
    query, key = (ops.shape(x) for x in tensors[:2])
    batch = [query[i] for i in _batch_axes(len(query), axes)]
    rows = [query[i] for i in axes]
    return ops.reshape(scores, (*batch, *rows, *(key[i] for i in axes)))


def _as_bool(mask: Any, fused: bool) -> Any:
    """Reads a mask of another dtype as Keras does in either place."""
    if keras.backend.standardize_dtype(mask.dtype) == "bool" or fused:
        return ops.cast(mask, "bool")
    return ops.greater(ops.cast(mask, "float32"), 0.5)
