"""Vision Transformer for small images."""

import os
from collections.abc import Sequence

import keras
from keras import layers
from keras import ops

from models.arguments import check_fraction
from models.arguments import check_positive
from models.arguments import check_shape
from models.arguments import load_weights


def vit(
    input_shape: Sequence[int] = (28, 28, 1),
    classes: int = 10,
    patch_size: int = 7,
    num_blocks: int = 4,
    width: int = 128,
    num_heads: int = 4,
    dropout: float = 0.0,
    classifier_activation: str | None = "softmax",
    weights: str | os.PathLike[str] | None = None,
    name: str = "vit",
) -> keras.Model:
    """Builds pre-norm blocks of attention over the patches of an image.

    The classifier sees the average of the patches. A class token would need
    a layer of its own to hold it.

    Args:
        input_shape: shape of one image, `(height, width, channels)`.
        classes: number of classes.
        patch_size: side of a patch in pixels; must divide height and width.
        num_blocks: number of blocks.
        width: size of a patch's vector; the feed-forward is four times wider.
        num_heads: attention heads; must divide `width`.
        dropout: share of units dropped at the end of each half block.
        classifier_activation: `"softmax"` for probabilities, `None` for
            logits.
        weights: `None` for random weights, or a path to load them from.
        name: name of the model.

    Input shape:
        `(batch, height, width, channels)`, numbers of about unit size.

    Output shape:
        `(batch, classes)`, float32.

    Returns:
        A functional `keras.Model`, not compiled.

    Example:

    ```python
    model = vit(input_shape=(32, 32, 3), patch_size=4, num_blocks=6)
    ```

    Reference:
        [An Image is Worth 16x16 Words](https://arxiv.org/abs/2010.11929);
        average pooling as in [Better plain ViT baselines for ImageNet-1k](
        https://arxiv.org/abs/2205.01580).
    """
    check_shape("vit", input_shape, 3, "(28, 28, 1)")
    check_positive(
        "vit",
        classes=classes,
        patch_size=patch_size,
        num_blocks=num_blocks,
        width=width,
        num_heads=num_heads,
    )
    check_fraction("vit", dropout=dropout)
    if input_shape[0] % patch_size or input_shape[1] % patch_size:
        raise ValueError(
            f"`vit` got `input_shape={tuple(input_shape)}` and "
            f"`patch_size={patch_size}`. Expected a patch size that divides "
            "height and width. Pass another one, or pad the images."
        )
    if width % num_heads:
        raise ValueError(
            f"`vit` got `width={width}` and `num_heads={num_heads}`. "
            "Expected a width that the heads can share equally. Pass for "
            f"example `width={num_heads * max(1, round(width / num_heads))}`."
        )

    images = keras.Input(tuple(input_shape), name="images")
    # Patches do not overlap, so the convolution is one matrix product. Row
    # by row: the patch after the last of a row is the first of the next.
    x = layers.Conv2D(width, patch_size, patch_size, name="patches")(images)
    x = layers.Reshape((-1, width), name="sequence")(x)
    # Integers: floats of bfloat16 count to 256 only.
    positions = ops.cumsum(ops.ones_like(x[..., 0], dtype="int32"), axis=1) - 1
    embedding = layers.Embedding(x.shape[1], width, name="position_embedding")
    x = x + embedding(positions)
    for index in range(num_blocks):
        x = _block(x, num_heads, dropout, f"block{index}")
    x = layers.LayerNormalization(epsilon=1e-5, name="norm")(x)
    x = layers.GlobalAveragePooling1D(name="average_pool")(x)
    # float32: a 16-bit softmax rounds a confident wrong answer to exactly
    # one, and its gradient to zero. The loss takes float32 from here too.
    outputs = layers.Dense(
        classes,
        activation=classifier_activation,
        dtype="float32",
        name="predictions",
    )(x)

    model = keras.Model(images, outputs, name=name)
    load_weights(model, weights)
    return model


def _block(
    x: keras.KerasTensor, num_heads: int, dropout: float, prefix: str
) -> keras.KerasTensor:
    width = x.shape[-1]
    # Keras computes the statistics of a layer normalization in float32 under
    # any policy; the epsilon is one that float16 can hold.
    y = layers.LayerNormalization(epsilon=1e-5, name=f"{prefix}_norm_0")(x)
    # With the scores asked for, Keras divides the query by sqrt(width of a
    # head) before it multiplies by the key. Its shorter path divides the
    # product, which by then can be past 65504, where float16 ends.
    y, _ = layers.MultiHeadAttention(
        num_heads, width // num_heads, name=f"{prefix}_attention"
    )(y, y, return_attention_scores=True)
    x = x + (layers.Dropout(dropout)(y) if dropout else y)

    y = layers.LayerNormalization(epsilon=1e-5, name=f"{prefix}_norm_1")(x)
    y = layers.Dense(4 * width, activation="gelu", name=f"{prefix}_up")(y)
    y = layers.Dense(width, name=f"{prefix}_down")(y)
    return x + (layers.Dropout(dropout)(y) if dropout else y)
