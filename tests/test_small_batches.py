import keras
import pytest

import tfmixed
from tfmixed.small_batches import advise

layers = keras.layers


def dense(policy="mixed_bfloat16", **kwargs):
    keras.config.set_dtype_policy(policy)
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(4),
            layers.BatchNormalization(name="norm", **kwargs),
            layers.Dense(1, dtype="float32"),
        ]
    )


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize(
    "model_of", [dense, lambda p: tfmixed.prepare(dense(p), p)]
)
def test_examples_count_after_a_dense_layer(policy, model_of):
    model = model_of(policy)
    assert advise(model, 8) is None
    for size in (2, 7):
        message = advise(model, size)
        assert (
            f"norm' are of {size} values a channel (batches of {size}), "
        ) in message
        assert "batches of 8 or more" in message
        assert "GroupNormalization" in message
    assert "are of one value a channel" in advise(model, 1)


def images(shape, axis=-1):
    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input(shape)
    x = layers.BatchNormalization(axis=axis, name="norm")(inputs)
    return keras.Model(inputs, layers.Activation("relu")(x))


@pytest.mark.parametrize(
    ("shape", "axis", "positions"),
    [
        ((3, 1, 5), -1, 3),
        ((1, 1, 5), -1, 1),
        ((5, 3, 1), 1, 3),
        ((2, 5), 2, 2),
        ((8, 8, 5), -1, 64),
    ],
)
def test_positions_count_after_a_convolution(shape, axis, positions):
    model = images(shape, axis)
    for size in range(1, 9):
        message = advise(model, size)
        if size * positions >= 8:
            assert message is None
        else:
            count = size * positions
            words = "one value" if count == 1 else f"{count} values"
            assert f"are of {words} a channel" in message


def test_what_is_not_known_is_not_claimed():
    assert advise(images((None, 5)), 1) is None


def test_a_float32_model_and_a_frozen_layer_are_left_alone():
    assert advise(dense("float32"), 2) is None
    model = dense()
    model.get_layer("norm").trainable = False
    assert advise(model, 2) is None


def test_each_replica_has_statistics_of_its_own(two_replicas):
    with two_replicas.scope():
        model = dense()
        together = dense(synchronized=True)
    assert advise(model, 16) is None
    message = advise(model, 13)
    assert "are of 7 values a channel (batches of 13 on 2 replicas)" in message
    assert "synchronized=True" in message
    assert advise(together, 13) is None


def test_layers_of_nested_models_are_found_and_few_are_named():
    inner = [dense() for _ in range(5)]
    inputs = keras.Input((6,))
    model = keras.Model(inputs, layers.Add()([one(inputs) for one in inner]))
    message = advise(model, 2)
    assert message.count("'norm") + message.count("/norm'") >= 3
    assert "and 2 more" in message


@pytest.mark.parametrize("size", [0, -1, 2.0, True, None])
def test_a_size_that_counts_nothing(size):
    with pytest.raises(ValueError, match=f"`batch_size` is {size}"):
        advise(dense(), size)
