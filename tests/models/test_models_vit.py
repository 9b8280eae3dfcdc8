"""The Vision Transformer: patches in order, positions, dtypes, preparation."""

import keras
import numpy as np
import pytest

import tfmixed
from models.vit import vit

SMALL = {
    "input_shape": (8, 12, 2),
    "classes": 3,
    "patch_size": 4,
    "num_blocks": 1,
    "width": 8,
    "num_heads": 2,
}


def images(size=2):
    random = np.random.default_rng(0)
    return random.normal(size=(size, 8, 12, 2)).astype("float32")


def shuffled(x, order):
    """The images with their six patches of 4x4 in another order."""
    patches = x.reshape(-1, 2, 4, 3, 4, 2).transpose(0, 1, 3, 2, 4, 5)
    patches = patches.reshape(-1, 6, 4, 4, 2)[:, order]
    patches = patches.reshape(-1, 2, 3, 4, 4, 2).transpose(0, 1, 3, 2, 4, 5)
    return patches.reshape(x.shape)


def logits(model, x):
    return np.asarray(model(x))


def test_patches_come_row_by_row():
    model = vit(**SMALL)
    kernel = np.random.default_rng(1).normal(size=(4, 4, 2, 8))
    model.get_layer("patches").set_weights([kernel, np.arange(8.0)])
    x = images()
    expected = [
        np.einsum("bhwc,hwcf->bf", x[:, top : top + 4, left : left + 4], kernel)
        + np.arange(8.0)
        for top in (0, 4)
        for left in (0, 4, 8)
    ]
    sequence = keras.Model(model.input, model.get_layer("sequence").output)
    np.testing.assert_allclose(
        sequence(x), np.stack(expected, axis=1), atol=1e-4
    )


def test_each_patch_has_a_position_of_its_own():
    model = vit(**SMALL, classifier_activation=None)
    embedding = model.get_layer("position_embedding")
    assert embedding.get_weights()[0].shape == (6, 8)
    x = images()
    moved = shuffled(x, [3, 1, 2, 0, 4, 5])
    assert not np.array_equal(moved, x)
    # By nothing but the positions does the model know where a patch was.
    embedding.set_weights([np.zeros((6, 8))])
    np.testing.assert_allclose(
        logits(model, moved), logits(model, x), atol=1e-5
    )
    table = np.random.default_rng(2).normal(size=(6, 8))
    embedding.set_weights([table])
    assert np.abs(logits(model, moved) - logits(model, x)).max() > 1e-3
    # Moved with their patches, the positions change nothing.
    embedding.set_weights([table[[3, 1, 2, 0, 4, 5]]])
    after = logits(model, moved)
    embedding.set_weights([table])
    np.testing.assert_allclose(after, logits(model, x), atol=1e-5)


def test_attention_looks_both_ways():
    model = vit(**SMALL)
    block = keras.Model(model.input, model.get_layer("norm").input)
    x = images(1)
    for changed in (0, 5):
        other = x.copy()
        top, left = 4 * (changed // 3), 4 * (changed % 3)
        other[:, top : top + 4, left : left + 4] += 1
        moved = np.abs(np.asarray(block(other)) - np.asarray(block(x)))[0]
        assert (moved.max(axis=1) > 1e-6).all()


@pytest.mark.parametrize(
    "policy", ["float32", "mixed_bfloat16", "mixed_float16"]
)
def test_dtypes(policy):
    keras.config.set_dtype_policy(policy)
    model = vit(**SMALL)
    assert model.outputs[0].dtype == "float32"
    assert logits(model, images()).dtype == np.float32
    half = policy.removeprefix("mixed_")
    for name in ("patches", "position_embedding", "block0_up", "norm"):
        assert model.get_layer(name).compute_dtype == half


def test_attention_survives_a_product_above_the_float16_range():
    keras.config.set_dtype_policy("mixed_float16")
    model = vit(**{**SMALL, "width": 128})
    attention = model.get_layer("block0_attention")
    weights = attention.get_weights()
    # As in the test of the transformer: 64 * 64 * 64 is 262,144.
    for index in (0, 2):
        weights[index] = np.zeros_like(weights[index])
        weights[index + 1] = np.full_like(weights[index + 1], 64.0)
    attention.set_weights(weights)
    assert np.isfinite(logits(model, images())).all()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_prepared_model_trains(policy):
    model = vit(**SMALL)
    prepared = tfmixed.prepare(model, policy)
    half = policy.removeprefix("mixed_")
    assert prepared.get_layer("block0_up").compute_dtype == half
    x = images(8)
    np.testing.assert_allclose(prepared(x), model(x), atol=0.02)
    np.testing.assert_array_equal(tfmixed.to_float32(prepared)(x), model(x))
    prepared.compile("adam", "sparse_categorical_crossentropy")
    history = prepared.fit(x, np.arange(8) % 3, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"patch_size": 5},
            r"`vit` got `input_shape=\(8, 12, 2\)` and `patch_size=5`.*divides",
        ),
        ({"patch_size": 8}, "`patch_size=8`.*divides height and width"),
        (
            {"width": 10, "num_heads": 4},
            r"`vit` got `width=10` and `num_heads=4`.*`width=8`",
        ),
        ({"input_shape": (8, 12)}, r"input_shape=\(8, 12\)`.*3 positive"),
        ({"num_blocks": 0}, "`vit` got `num_blocks=0`"),
        ({"dropout": 1}, "dropout=1`"),
    ],
)
def test_bad_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        vit(**{**SMALL, **arguments})
