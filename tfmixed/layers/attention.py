"""The attention layers of Keras with float32 scores in 16-bit models.

Overrides `_compute_attention`, `_calculate_scores` and `_apply_scores`, and
uses `_compute_causal_mask` and the private arguments of the layers, as read
from `keras/src/layers/attention/` of Keras 3.15.1 and 3.10.0.
"""

import functools
from typing import Any

import keras
from keras import ops

from tfmixed import _keras
from tfmixed.layers import heads
from tfmixed.layers import products
from tfmixed.layers.dense import EinsumDense

_HALF = ("float16", "bfloat16")


def _with_faster_projections(stock: Any) -> Any:
    """The `call` of a layer whose projections are products of matrices."""

    # Keras reads from the signature what the layer can be called with.
    @functools.wraps(stock.call)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Not in `build`: Keras keeps that of the class that a layer had first.
        for part in _keras.child_layers(self):
            if type(part) is keras.layers.EinsumDense:
                part.__class__ = EinsumDense
        return stock.call(self, *args, **kwargs)

    return call


@keras.saving.register_keras_serializable(package="tfmixed")
class MultiHeadAttention(keras.layers.MultiHeadAttention):
    """`keras.layers.MultiHeadAttention` that is right in 16 bits.

    The arguments, the weights and the dtypes of what it returns, attention
    scores too, are those of Keras. In a float16 or bfloat16 layer the scores,
    masks, softmax and dropout are float32; where every key is masked, the
    result is that of the float32 layer. Layers of other dtypes do exactly what
    Keras does.

    What it cannot mend is that the projections are 16-bit: a float16
    projection of more than 65504 is infinite, and rounding query and key moves
    a score of size s by about `s / 2048` in float16 and `s / 256` in bfloat16.
    Scores of 30 (float16) or 4 (bfloat16) may so move the output by a percent;
    with scores of thousands, where one key takes all, one row in about a
    thousand (float16) or two hundred (bfloat16) takes another key. Given the
    rounded projections, the output is as near to that of float64 as its dtype
    allows. Masks hide a key whatever its score, while the softmax of Keras,
    float32 too, hides none whose score is 1e9 more than that of the others.
    """

    call = _with_faster_projections(keras.layers.MultiHeadAttention)

    def _compute_attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
    ) -> tuple[Any, Any]:
        if use_causal_mask:
            causal_mask = self._compute_causal_mask(query, value)
            attention_mask = _both(attention_mask, causal_mask)
        if self._flash_attention or not _is_half(query, key, value):
            return super()._compute_attention(
                query,
                key,
                value,
                attention_mask,
                training,
                return_attention_scores,
            )
        return heads.attend(
            self,
            (query, key, value),
            attention_mask,
            training,
            axes=self._attention_axes,
            scale=self._inverse_sqrt_key_dim,
            fused=not (
                self._dropout > 0
                or return_attention_scores
                or len(query.shape) != 4
            ),
        )


@keras.saving.register_keras_serializable(package="tfmixed")
class GroupedQueryAttention(keras.layers.GroupQueryAttention):
    """`keras.layers.GroupQueryAttention` that is right in 16 bits.

    The name is that of the class of Keras. See `MultiHeadAttention`.
    """

    call = _with_faster_projections(keras.layers.GroupQueryAttention)

    def _compute_attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> tuple[Any, Any]:
        if use_causal_mask:
            causal_mask = self._compute_causal_mask(query, value)
            attention_mask = _both(attention_mask, causal_mask)
        if self._flash_attention or not _is_half(query, key, value):
            return super()._compute_attention(
                query, key, value, attention_mask, training
            )
        return heads.attend(
            self,
            (query, key, value),
            attention_mask,
            training,
            axes=(1,),
            scale=self._inverse_sqrt_head_dim,
            fused=not (self.dropout > 0 or self._return_attention_scores),
        )


class _Scores:
    """What `Attention` and `AdditiveAttention` have in common."""

    def _calculate_scores(self, query: Any, key: Any) -> Any:
        if _is_half(query, key):
            query = ops.cast(query, "float32")
            key = ops.cast(key, "float32")
        return super()._calculate_scores(query, key)  # type: ignore[misc]

    def _apply_scores(
        self,
        scores: Any,
        value: Any,
        scores_mask: Any = None,
        training: bool = False,
    ) -> tuple[Any, Any]:
        apply_scores = super()._apply_scores  # type: ignore[misc]
        if not _is_half(value):
            return apply_scores(scores, value, scores_mask, training)
        # Keras masks, normalizes and drops in the dtype of the scores; its
        # product with no features at all costs nothing.
        _, weights = apply_scores(scores, value[..., :0], scores_mask, training)
        if weights.shape[:-2] == value.shape[:-2]:
            output = products.combine(weights, value)
        else:
            output = ops.matmul(weights, ops.cast(value, weights.dtype))
            output = ops.cast(output, value.dtype)
        return output, ops.cast(weights, value.dtype)


@keras.saving.register_keras_serializable(package="tfmixed")
class Attention(_Scores, keras.layers.Attention):
    """`keras.layers.Attention` that is right in 16 bits.

    Scores, masks, softmax and dropout are float32, the inputs and what is
    returned 16-bit. See `MultiHeadAttention` for what rounded inputs do.
    """

    def _calculate_scores(self, query: Any, key: Any) -> Any:
        if (
            self.score_mode != "dot"
            or not _is_half(query, key)
            or query.shape[:-2] != key.shape[:-2]
        ):
            return super()._calculate_scores(query, key)
        scores = products.scores(query, key, 1.0)
        if self.scale is not None:
            scores = ops.multiply(scores, self.scale)
        return scores


@keras.saving.register_keras_serializable(package="tfmixed")
class AdditiveAttention(_Scores, keras.layers.AdditiveAttention):
    """`keras.layers.AdditiveAttention` that is right in 16 bits.

    As `Attention`. The tensor that tanh is taken of is float32 as well, and
    twice the size that it has in Keras.
    """


def _both(mask: Any, other: Any) -> Any:
    if mask is None:
        return other
    return ops.logical_and(ops.cast(mask, "bool"), other)


def _is_half(*tensors: Any) -> bool:
    dtypes = {keras.backend.standardize_dtype(x.dtype) for x in tensors}
    return len(dtypes) == 1 and dtypes < set(_HALF)
