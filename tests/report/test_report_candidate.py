"""The model under each policy: same weights, own settings, guarded step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfmixed
from tfmixed.model import GuardedTraining
from tfmixed.report.candidate import Recipe
from tfmixed.report.candidate import build
from tfmixed.report.candidate import ended_on_skip
from tfmixed.report.candidate import set_policy
from tfmixed.report.candidate import skipped_steps
from tfmixed.report.candidate import without_effect
from tfmixed.report.dataset import load_data
from tfmixed.report.sources import find_source

X = np.linspace(-1, 1, 64, dtype="float32").reshape(16, 4)
Y = np.arange(16) % 3
DATA = load_data(lambda: ((X, Y), (X, Y)))


def plain():
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="relu", name="hidden"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(3, activation="softmax", dtype="float32", name="head"),
        ]
    )


def compiled():
    model = plain()
    model.compile(
        keras.optimizers.SGD(0.25, momentum=0.5),
        keras.losses.SparseCategoricalCrossentropy(),
        metrics=["sparse_top_k_categorical_accuracy"],
        steps_per_execution=2,
    )
    return model


def make(builder, policy="float32", seed=0, **recipe):
    return build(find_source(builder), DATA, Recipe(**recipe), policy, seed)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_seed_gives_the_same_weights_under_every_policy(policy):
    reference, model = make(plain), make(plain, policy)
    for ours, theirs in zip(model.weights, reference.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    other = make(plain, policy, seed=1)
    assert not np.array_equal(other.weights[0], model.weights[0])


def test_float32_is_what_the_builder_returned():
    model = make(plain)
    assert type(model) is keras.Sequential
    assert type(model.optimizer) is keras.optimizers.Adam


def test_16_bits_come_with_the_guarded_step():
    model = make(plain, "mixed_float16")
    assert isinstance(model, GuardedTraining)
    assert model.get_layer("hidden").compute_dtype == "float16"
    assert model.get_layer("head").compute_dtype == "float32"
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert keras.config.dtype_policy().name == "float32"


def test_a_subclass_gets_the_guarded_step_and_loss_scaling():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = layers.Dense(3, activation="softmax")

        def call(self, x):
            return self.head(x)

    model = make(Net, "mixed_float16")
    assert isinstance(model, Net)
    assert isinstance(model, GuardedTraining)
    assert hasattr(model.optimizer, "skipped_steps")


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_compiled_model_keeps_its_settings(policy):
    model = make(compiled, policy)
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    assert type(optimizer) is keras.optimizers.SGD
    assert optimizer.momentum == 0.5
    assert float(optimizer.learning_rate) == 0.25
    assert model.steps_per_execution == 2
    logs = model.evaluate(X, Y, verbose=0, return_dict=True)
    assert set(logs) == {"loss", "sparse_top_k_categorical_accuracy"}


def test_what_the_recipe_says_wins():
    model = make(
        compiled,
        optimizer=keras.optimizers.Adam(),
        learning_rate=0.125,
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=True,
    )
    assert type(model.optimizer) is keras.optimizers.Adam
    assert float(model.optimizer.learning_rate) == 0.125
    assert model.jit_compile
    assert "accuracy" in model.evaluate(X, Y, verbose=0, return_dict=True)


def test_without_a_loss_the_data_decide_and_without_a_word_the_plan():
    model = make(plain, plan_jit_compile=True)
    assert model.loss.name == "sparse_categorical_crossentropy"
    assert model.jit_compile


def test_an_optimizer_is_not_shared():
    optimizer = keras.optimizers.SGD(0.5)
    first = make(plain, optimizer=optimizer)
    first.fit(X, Y, verbose=0)
    second = make(plain, optimizer=optimizer)
    assert int(second.optimizer.iterations) == 0
    assert int(optimizer.iterations) == 0
    assert make(plain, optimizer=lambda: optimizer).optimizer is optimizer


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        (lambda: "model", "returned str. Expected a `keras.Model`"),
        (
            lambda: keras.Sequential([keras.Input((4,)), layers.ReLU()]),
            "which has no trainable weights, so there is nothing to train",
        ),
        (
            lambda: keras.Sequential([keras.Input((5,)), layers.Dense(3)]),
            "does not take a batch of `data`",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_an_error(builder, message):
    with pytest.raises(ValueError, match=message):
        make(builder)


def test_an_optimizer_that_is_none_is_an_error():
    with pytest.raises(ValueError, match="`optimizer` got 3. Expected a name"):
        make(plain, optimizer=3)


def test_a_file_computes_in_the_policy_but_for_its_output(tmp_path):
    inputs = keras.Input((4,))
    hidden = layers.Dense(8, name="hidden")(inputs)
    outputs = layers.Dense(3, activation="softmax", name="head")(hidden)
    saved = keras.Model(inputs, outputs)
    saved.compile("sgd", "sparse_categorical_crossentropy")
    saved.fit(X, Y, verbose=0)
    saved.save(tmp_path / "net.keras")
    path = str(tmp_path / "net.keras")
    model = make(path, "mixed_bfloat16")
    assert model.get_layer("hidden").compute_dtype == "bfloat16"
    assert model.get_layer("head").compute_dtype == "float32"
    assert model.predict(X, verbose=0).dtype == "float32"
    assert int(model.optimizer.iterations) == 0
    np.testing.assert_array_equal(
        model.get_layer("hidden").kernel, saved.get_layer("hidden").kernel
    )
    assert make(path).get_layer("hidden").compute_dtype == "float32"


def test_the_output_of_a_nested_model_stays_float32_and_ids_stay_integers():
    inner = keras.Sequential(
        [
            keras.Input((1,), dtype="int32"),
            layers.Embedding(7, 4, name="embedding"),
            layers.Flatten(),
            layers.Dense(3, name="head"),
        ]
    )
    lookup = layers.IntegerLookup(vocabulary=[5, 6])
    inputs = keras.Input((1,), dtype="int64")
    model = keras.Model(inputs, inner(lookup(inputs)))
    set_policy(model, "mixed_bfloat16")
    assert inner.get_layer("head").compute_dtype == "float32"
    assert inner.get_layer("embedding").compute_dtype == "bfloat16"
    assert lookup.compute_dtype == "int64"


def test_a_builder_that_sets_its_own_dtypes_is_noticed():
    def stubborn(dtype):
        return lambda: keras.Sequential(
            [keras.Input((4,)), layers.Dense(3, dtype=dtype)]
        )

    assert without_effect(make(plain), "float32") is None
    assert without_effect(make(plain, "mixed_bfloat16"), "mixed_bfloat16") is (
        None
    )
    note = without_effect(make(stubborn("mixed_bfloat16")), "float32")
    assert note.startswith("Under float32 the model's layers compute in bfloat")


@pytest.mark.parametrize("guarded", [True, False])
def test_skipped_steps_are_counted(guarded):
    model = make(plain, "mixed_float16")
    if not guarded:
        model = plain()
        model.compile(
            keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(), initial_scale=64.0
            ),
            "sparse_categorical_crossentropy",
        )
    good, bad = X[:4], np.full_like(X[:4], np.inf)
    model.train_on_batch(good, Y[:4])
    before = skipped_steps(model, 1)
    for batch in (bad, good, bad):
        model.train_on_batch(batch, Y[:4])
    assert skipped_steps(model, 4) - before == 2
    # Keras's own wrapper does not tell.
    assert ended_on_skip(model) is guarded


def test_an_optimizer_that_never_skips_has_skipped_nothing():
    model = make(plain)
    model.train_on_batch(X, Y)
    assert skipped_steps(model, 1) == 0
    assert not ended_on_skip(model)


def two_optimizers(scale):
    inputs = keras.Input((4,))
    model = tfmixed.Model(inputs, layers.Dense(3)(inputs))
    optimizers = [
        tfmixed.wrap_optimizer(keras.optimizers.SGD(), loss_scale=scale)
        for _ in range(2)
    ]
    model.compile(optimizers[0], "sparse_categorical_crossentropy")
    model.other_optimizer = optimizers[1]
    return model, optimizers


def test_skips_of_every_optimizer_are_counted():
    model, optimizers = two_optimizers(64.0)
    variable = keras.Variable([1.0])
    for optimizer, gradients in zip(
        optimizers, ([1.0, np.nan], [np.inf, np.nan]), strict=True
    ):
        for gradient in gradients:
            optimizer.scale_loss(1.0)
            optimizer.apply([tf.constant([gradient])], [variable])
    assert skipped_steps(model, 2) == 3
    assert ended_on_skip(model)
    optimizers[1].apply([tf.constant([1.0])], [variable])
    assert ended_on_skip(model)
    optimizers[0].apply([tf.constant([1.0])], [variable])
    assert not ended_on_skip(model)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_scale_that_nobody_asked_for_is_chosen_anew(policy):
    def builder():
        inputs = keras.Input((4,))
        model = tfmixed.Model(inputs, layers.Dense(3)(inputs))
        model.compile(keras.optimizers.SGD(0.25), "mse")
        return model

    optimizer = make(builder, policy).optimizer
    scales = policy == "mixed_float16"
    expected = tfmixed.DynamicLossScale if scales else tfmixed.NoLossScale
    assert type(optimizer.loss_scale) is expected
    assert type(optimizer.inner_optimizer) is keras.optimizers.SGD
    assert float(optimizer.learning_rate) == 0.25
