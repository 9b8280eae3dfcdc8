"""The recommender and its pairs: no leak, integers, a float32 score."""

import keras
import numpy as np
import pytest

from models.data import paragraphs
from models.interactions import _WORD
from models.interactions import interactions
from models.recommender import recommender

SMALL = {"rows": 50, "width": 8, "hidden": (8,)}


@pytest.fixture(scope="module")
def loaded():
    return interactions()


def ids(size=16):
    random = np.random.default_rng(0)
    return random.integers(0, 50, (size, 2)).astype("int32")


def test_pairs(loaded):
    for x, y in loaded:
        assert x.dtype == y.dtype == np.dtype("int32")
        assert x.shape == (len(y), 2)
        assert x.min() >= 0
        assert x.max() < 100_000
        assert set(y) == {0, 1}
        assert abs(y.mean() - 0.5) < 0.01
        assert (np.diff(y) < 0).any()
    # About a tenth of the text is for validation.
    share = len(loaded[1][0]) / sum(len(x) for x, _ in loaded)
    assert 0.05 < share < 0.2


def test_pairs_are_the_same_at_every_call(loaded):
    for one, other in zip(loaded, interactions(), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


def test_every_neighbour_is_a_positive_pair(loaded):
    texts = [_WORD.findall(text.lower()) for text in paragraphs()]
    neighbours = sum(max(0, len(text) - 1) for text in texts)
    assert sum(int(y.sum()) for _, y in loaded) == neighbours


def test_a_negative_pair_occurs_nowhere():
    # So many rows that no two words share one.
    parts = interactions(rows=2**31 - 1)
    yes, no = (
        {tuple(row) for x, y in parts for row in x[y == label]}
        for label in (1, 0)
    )
    assert not yes & no


def test_no_column_alone_tells_the_answer(loaded):
    (x_train, y_train), (x_val, y_val) = loaded
    for column in range(2):
        yes, total = (
            np.bincount(x_train[:, column], weights, minlength=100_000)
            for weights in (y_train, None)
        )
        guess = (yes / np.maximum(total, 1))[x_val[:, column]] > 0.5
        assert (guess == y_val).mean() < 0.62


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, "`interactions` got `rows=0`"),
        ({"validation_fraction": 0.0}, "validation_fraction=0.0`.*split"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0`.*split"),
    ],
)
def test_bad_argument_of_the_loader(arguments, message):
    with pytest.raises(ValueError, match=message):
        interactions(**arguments)


def test_default_model():
    model = recommender()
    assert model.input_shape == (None, 2)
    assert model.inputs[0].dtype == "int32"
    assert model.output_shape == (None, 1)
    dense = (64 * 64 + 64) + (64 * 32 + 32) + (33 + 1)
    assert model.count_params() == 2 * 100_000 * 32 + dense


def test_by_hand():
    model = recommender(**SMALL, classifier_activation=None)
    who, what, kernel, bias, last, last_bias = model.get_weights()
    x = ids()
    rows = who[x[:, 0]], what[x[:, 1]]
    score = (rows[0] * rows[1]).sum(1, keepdims=True)
    hidden = np.maximum(np.concatenate(rows, 1) @ kernel + bias, 0)
    expected = np.concatenate([score, hidden], 1) @ last + last_bias
    np.testing.assert_allclose(np.asarray(model(x)), expected, atol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_dtypes(policy):
    keras.config.set_dtype_policy(policy)
    model = recommender(**SMALL)
    half = policy.removeprefix("mixed_")
    dtypes = {layer.name: layer.compute_dtype for layer in model.layers}
    for name in ("score", "evidence", "predictions"):
        assert dtypes[name] == "float32"
    for name in ("who_embedding", "what_embedding", "dense_0", "both"):
        assert dtypes[name] == half
    assert model.outputs[0].dtype == "float32"
    assert {weight.dtype for weight in model.weights} == {"float32"}


def test_ids_past_what_16_bits_hold_find_their_rows():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = recommender(rows=4_000, width=4, hidden=(4,))
    x = np.array([[2048, 3001], [2049, 3001]], "int32")
    first, second = np.asarray(model(x))[:, 0]
    assert first != second


def test_the_score_is_more_exact_than_one_in_bfloat16():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = recommender(rows=50, width=32)
    x = ids()
    rows = [
        np.asarray(model.get_layer(f"{name}_embedding")(x[:, index]))
        for index, name in enumerate(("who", "what"))
    ]
    exact = (rows[0].astype("float64") * rows[1].astype("float64")).sum(1)

    def error(dtype):
        scores = keras.layers.Dot(axes=1, dtype=dtype)(
            [keras.ops.convert_to_tensor(row) for row in rows]
        )
        return np.abs(np.asarray(scores, "float64")[:, 0] - exact).max()

    assert error(model.get_layer("score").dtype_policy) < 0.01 * error(
        "mixed_bfloat16"
    )


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_learns_which_pairs_belong_together(policy):
    keras.config.set_dtype_policy(policy)
    model = recommender(**SMALL)
    x = ids(256)
    y = ((x[:, 0] + x[:, 1]) % 2).astype("int32")
    model.compile(
        keras.optimizers.Adam(0.02), "binary_crossentropy", jit_compile=False
    )
    before = model.evaluate(x, y, verbose=0)
    model.fit(x, y, epochs=15, verbose=0)
    assert model.evaluate(x, y, verbose=0) < 0.5 * before


@pytest.mark.filterwarnings("ignore:.*structure of .inputs. doesn't match")
def test_saves_and_loads(tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = recommender(**SMALL)
    expected = np.asarray(model(ids()))
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    again = recommender(**SMALL, weights=tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(np.asarray(again(ids())), expected)
    keras.config.set_dtype_policy("float32")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(np.asarray(loaded(ids())), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, "`recommender` got `rows=0`"),
        ({"width": 2.5}, "width=2.5"),
        ({"hidden": ()}, r"hidden=\(\)"),
        ({"weights": "imagenet"}, "weights='imagenet'.*no such file"),
    ],
)
def test_bad_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        recommender(**{**SMALL, **arguments})
