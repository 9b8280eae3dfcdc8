"""The decoder-only model: rotary positions, tied weights, causality, files."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmixed
from models.gpt import RotaryAttention
from models.gpt import TiedEmbedding
from models.gpt import gpt
from models.gpt import rotate

SMALL = {
    "sequence_length": 8,
    "vocabulary_size": 11,
    "num_blocks": 2,
    "width": 16,
    "num_heads": 2,
}


def token_ids(size=3):
    random = np.random.default_rng(0)
    return random.integers(0, 11, (size, 8)).astype("int32")


def turned(x):
    """RoPE in float64: pairs are complex numbers, turning is a product."""
    length, half = x.shape[1], x.shape[3] // 2
    rates = 10000.0 ** (-2 * np.arange(half) / x.shape[3])
    turn = np.exp(1j * np.arange(length)[:, None, None] * rates)
    z = (x[..., :half].astype("float64") + 1j * x[..., half:]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def attention(x, num_heads):
    """Causal attention over turned queries and keys, in float64."""
    batch, length, width = x.shape
    x = x.astype("float64").reshape(batch, length, 3, num_heads, -1)
    query, key, value = turned(x[:, :, 0]), turned(x[:, :, 1]), x[:, :, 2]
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) / x.shape[-1] ** 0.5
    scores[:, :, np.triu(np.ones((length, length), bool), 1)] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    outputs = np.einsum("bhqk,bkhd->bqhd", shares, value)
    return outputs.reshape(batch, length, width // 3)


def test_rotate_is_a_turn_in_the_complex_plane():
    # Past 256 positions, which bfloat16 would round to even ones.
    x = np.random.default_rng(0).normal(size=(2, 300, 3, 8)).astype("float32")
    np.testing.assert_allclose(rotate(x), turned(x), atol=2e-4)
    np.testing.assert_array_equal(np.asarray(rotate(x))[:, 0], x[:, 0])


def test_products_of_turned_vectors_depend_on_the_distance():
    random = np.random.default_rng(0)
    query, key = random.normal(size=(2, 8)).astype("float32")
    query, key = (
        np.asarray(rotate(np.tile(x, (1, 40, 1, 1))))[0, :, 0]
        for x in (query, key)
    )
    products = query @ key.T
    for distance in range(-39, 40):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-4)
    assert np.ptp(products[0]) > 0.1


def test_attention_agrees_with_float64():
    x = np.random.default_rng(0).normal(size=(2, 9, 24)).astype("float32")
    np.testing.assert_allclose(
        RotaryAttention(2)(x), attention(x, 2), atol=1e-5
    )


def test_attention_survives_a_product_above_the_float16_range():
    keras.config.set_dtype_policy("mixed_float16")
    model = gpt(**SMALL)
    qkv = model.get_layer("block0_qkv")
    kernel = np.random.default_rng(0).normal(size=(16, 48)) * 100
    qkv.set_weights([kernel])
    layer = model.get_layer("block0_attention")
    inputs = np.asarray(
        keras.Model(model.input, layer.input)(token_ids())
    ).astype("float16")
    query, key = inputs[..., :8], inputs[..., 16:24]
    with np.errstate(over="ignore"):
        assert np.isinf(np.einsum("bqd,bkd->bqk", query, key)).any()
    assert np.isfinite(np.asarray(model(token_ids()))).all()


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_no_bit_changes_before_a_changed_token(policy):
    keras.config.set_dtype_policy(policy)
    model = gpt(**SMALL)
    x = token_ids()
    changed = x.copy()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = (np.asarray(model(ids)) for ids in (x, changed))
    np.testing.assert_array_equal(after[:, :5], before[:, :5])
    assert (after[:, 5:] != before[:, 5:]).any(axis=(0, 2)).all()


def test_positions_matter():
    # One block: without positions it gives the same sums after two swapped
    # tokens. The causal mask of a second block would tell them apart.
    model = gpt(**{**SMALL, "num_blocks": 1})
    x = np.int32([[1, 2, 3, 4] * 2, [2, 1, 3, 4] * 2])
    one, other = np.asarray(model(x))
    assert np.abs(one[2] - other[2]).max() > 1e-4


def test_one_matrix_for_tokens_and_logits():
    model = gpt(**SMALL)
    shapes = [tuple(weight.shape) for weight in model.weights]
    assert shapes.count((11, 16)) == 1
    assert (16, 11) not in shapes
    blocks = 2 * (16 + 3 * 16**2 + 16**2 + 16 + 8 * 16**2 + 4 * 16 + 16)
    assert model.count_params() == 11 * 16 + blocks + 16
    # A logit is the product of the last norm and the row of its token.
    matrix = model.get_layer("tied").get_weights()[0].astype("float64")
    bare = keras.Model(model.input, model.get_layer("norm").output)
    x = token_ids()
    logits = np.asarray(bare(x)).astype("float64") @ matrix.T
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(model(x), shares, atol=1e-6)


def test_matrix_gets_the_gradient_of_both_uses():
    layer = TiedEmbedding(5, 3)
    random = np.random.default_rng(0)
    ids = np.int32([[0, 2, 2]])
    vectors, from_ids = random.normal(size=(2, 1, 3, 3)).astype("float32")
    from_logits = random.normal(size=(1, 3, 5)).astype("float32")
    layer(ids)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(ids) * from_ids)
        loss += tf.reduce_sum(layer(vectors, reverse=True) * from_logits)
    actual = tf.convert_to_tensor(tape.gradient(loss, layer.matrix.value))
    expected = from_logits[0].T @ vectors[0]
    np.add.at(expected, ids[0], from_ids[0])
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize(
    "policy", ["float32", "mixed_bfloat16", "mixed_float16"]
)
def test_dtypes(policy):
    keras.config.set_dtype_policy(policy)
    model = gpt(**SMALL)
    x = token_ids()
    assert model.outputs[0].dtype == "float32"
    assert np.asarray(model(x)).dtype == np.float32
    assert {weight.dtype for weight in model.weights} == {"float32"}
    half = policy.removeprefix("mixed_")
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dense):
            assert layer.compute_dtype == half
    for name in ("tied", "norm", "block0_attention", "predictions"):
        assert model.get_layer(name).compute_dtype == "float32"


def test_norm_survives_large_vectors_in_float16():
    keras.config.set_dtype_policy("mixed_float16")
    model = gpt(**SMALL)
    tied = model.get_layer("tied")
    tied.set_weights([tied.get_weights()[0] * 3000])
    norm = keras.Model(model.input, model.get_layer("block0_norm_0").output)
    outputs = np.asarray(norm(token_ids())).astype("float64")
    np.testing.assert_allclose((outputs**2).mean(-1), 1, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_prepared_model_trains(policy):
    model = gpt(**SMALL)
    prepared = tfmixed.prepare(model, policy)
    x = token_ids(8)
    np.testing.assert_allclose(prepared(x), model(x), atol=0.01)
    half = policy.removeprefix("mixed_")
    # Were the matrix taken for ids in reverse, all would be float32.
    assert prepared.get_layer("block0_up").compute_dtype == half
    prepared.compile("adam", "sparse_categorical_crossentropy")
    history = prepared.fit(x[:, :8], (x + 1) % 11, verbose=0)
    assert np.isfinite(history.history["loss"]).all()


LOAD = """
import sys
import keras, numpy as np
import models.gpt

folder, ids = sys.argv[1], np.int32(eval(sys.argv[2]))
for name in ("mixed", "stock", "prepared"):
    if name == "prepared":
        assert "tfmixed" not in sys.modules
        import tfmixed
    model = keras.models.load_model(f"{folder}/{name}.keras")
    np.save(f"{folder}/{name}.npy", np.asarray(model(ids)))
"""


@pytest.mark.slow
def test_files_load_in_a_fresh_process(tmp_path):
    model = gpt(**SMALL)
    prepared = tfmixed.prepare(model, "mixed_bfloat16")
    stock = tfmixed.to_float32(prepared)
    keras.config.set_dtype_policy("mixed_bfloat16")
    saved = {"mixed": gpt(**SMALL), "stock": stock, "prepared": prepared}
    x = token_ids()
    np.testing.assert_array_equal(stock(x), model(x))
    for name, one in saved.items():
        one.save(tmp_path / f"{name}.keras")
    arguments = [str(tmp_path), str(x.tolist())]
    subprocess.run([sys.executable, "-c", LOAD, *arguments], check=True)
    for name, one in saved.items():
        np.testing.assert_array_equal(np.load(tmp_path / f"{name}.npy"), one(x))


def test_layers_keep_their_arguments():
    for layer in (
        RotaryAttention(3, dtype="float32", name="one"),
        TiedEmbedding(5, 3, dtype="mixed_bfloat16", name="two"),
    ):
        copy = type(layer).from_config(layer.get_config())
        assert copy.get_config() == layer.get_config()
        assert copy.name == layer.name
        assert copy.dtype_policy.name == layer.dtype_policy.name
    assert keras.saving.get_registered_name(RotaryAttention) == (
        "tfmixed_models>RotaryAttention"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"width": 12, "num_heads": 4},
            r"`gpt` got `width=12` and `num_heads=4`.*even.*`width=192`",
        ),
        ({"num_blocks": 0}, "`gpt` got `num_blocks=0`"),
        ({"sequence_length": None}, "sequence_length=None"),
        ({"vocabulary_size": 2.0}, "vocabulary_size=2.0"),
    ],
)
def test_bad_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        gpt(**{**SMALL, **arguments})
