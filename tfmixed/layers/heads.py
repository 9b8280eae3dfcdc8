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
    flat = [*ops.shape(query)[:-1], ops.shape(key)[-2]]
    mask = None if mask is None else _spread(mask, tensors, axes, fused)

    def hide(scores: Any, instead: float) -> Any:
        if mask is None:
            return scores
        scores = _unfold_scores(scores, tensors, axes)
        return ops.reshape(ops.where(mask, scores, instead), flat)

    drops = not fused and layer._dropout_layer.rate > 0
    if value.dtype == tf.bfloat16 and not drops:
        weights = products.attention_weights(query, key, scale, hide)
        dropped = weights
    else:
        scores = hide(products.scores(query, key, scale), products.MASKED)
        weights = dropped = tf.nn.softmax(scores)
        if drops:
            # Called as a layer, it would cast the weights to its dtype.
            dropped = layer._dropout_layer.call(weights, training=training)
    output = products.combine(dropped, value)
    if mask is not None and not fused:
        attends = ops.any(mask, range(-len(axes), 0))
        rows = ops.shape(_unfold_scores(weights, tensors, axes))[: -len(axes)]
        attends = ops.broadcast_to(attends, rows)
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


def _spread(mask: Any, tensors: Any, axes: Any, fused: bool) -> Any:
    """A mask that broadcasts to scores with all their axes."""
    mask = _as_bool(mask, fused)
    rank = len(tensors[0].shape) - 1 + len(axes)
    while len(mask.shape) < rank:
        mask = ops.expand_dims(mask, -2 * len(axes) - 1)
    return mask


def _as_bool(mask: Any, fused: bool) -> Any:
    """Reads a mask of another dtype as Keras does in either place."""
    if keras.backend.standardize_dtype(mask.dtype) == "bool" or fused:
        return ops.cast(mask, "bool")
    return ops.greater(ops.cast(mask, "float32"), 0.5)
