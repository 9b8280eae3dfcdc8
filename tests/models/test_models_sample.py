"""Text that a model writes: window, temperature, seed, messages."""

import keras
import numpy as np
import pytest
from keras import ops

from models.data import VOCABULARY_SIZE
from models.data import decode
from models.gpt import gpt
from models.lstm import lstm
from models.sample import sample

# Ids of "a", "b" and "c" in the vocabulary.
A, B, C = 67, 68, 69


def small(**arguments):
    return gpt(
        sequence_length=6, num_blocks=1, width=8, num_heads=2, **arguments
    )


def successor(activation="softmax", shares=None):
    """A model that gives b after a, c after b, a after c; or fixed shares."""
    table = np.full((VOCABULARY_SIZE, VOCABULARY_SIZE), -30.0, "float32")
    for one, other in ((A, B), (B, C), (C, A)):
        table[one, other] = 0.0
    if shares:
        for token, share in shares.items():
            table[:, token] = np.log(share)
    tokens = keras.Input((6,), dtype="int32")
    rows = keras.layers.Embedding(VOCABULARY_SIZE, VOCABULARY_SIZE)
    outputs = keras.layers.Activation(activation, name="predictions")(
        rows(tokens)
    )
    model = keras.Model(tokens, outputs)
    rows.set_weights([table])
    return model


def test_decode_of_the_ids():
    assert decode([A, B, C]) == "abc"


@pytest.mark.parametrize("activation", ["softmax", None])
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_follows_the_model_beyond_its_window(activation, temperature):
    model = successor(activation)
    text = sample(model, "ab", length=10, temperature=temperature)
    assert text == "abcabcabcabc"


def test_reads_the_position_of_the_last_character():
    # The next character is the id of the last one, plus its position.
    tokens = keras.Input((6,), dtype="int32")
    positions = ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    outputs = keras.layers.Activation("softmax", name="predictions")(
        ops.one_hot(tokens + positions, VOCABULARY_SIZE) * 50.0
    )
    model = keras.Model(tokens, outputs)
    # a + 0, then + 1, + 2, and + 5 for all that the window has no room for.
    expected = "a" + "".join(chr(97 + n) for n in (0, 1, 3, 6, 10, 15, 20))
    assert sample(model, "a", 7, temperature=0) == expected


@pytest.mark.parametrize(
    ("activation", "temperature"), [("softmax", 0.5), (None, 1.0)]
)
def test_shares_follow_the_temperature(activation, temperature):
    model = successor(activation, shares={A: 0.5, B: 0.3, C: 0.2})
    text = sample(model, "a", 600, temperature=temperature, seed=1)[1:]
    shares = np.array([0.5, 0.3, 0.2]) ** (1 / temperature)
    shares /= shares.sum()
    counts = [text.count(character) / len(text) for character in "abc"]
    np.testing.assert_allclose(counts, shares, atol=0.06)


def test_seed_decides():
    model = small()
    texts = [sample(model, "The", 20, 1.0, seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("The")
    assert len(texts[0]) == 23


def test_any_model_of_characters():
    model = lstm(num_layers=1, width=4, embedding_width=2)
    assert len(sample(model, "x", 3)) == 4


def test_unknown_characters_come_back_replaced():
    text = sample(small(), "\N{SNOWMAN}a", 1)
    assert text.startswith("\N{REPLACEMENT CHARACTER}a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": ""}, "`sample` got `prompt=''`.*at least one character"),
        ({"length": 0}, "`sample` got `length=0`"),
        ({"temperature": -1.0}, r"temperature=-1.0`.*`temperature=0.7`"),
        ({"temperature": float("nan")}, "temperature=nan"),
    ],
)
def test_bad_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        sample(small(), **{"prompt": "a", **arguments})
