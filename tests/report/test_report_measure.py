"""Rounds, training and which number a model is judged by."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfmixed.report.candidate import Recipe
from tfmixed.report.candidate import build
from tfmixed.report.dataset import load_data
from tfmixed.report.measure import Record
from tfmixed.report.measure import higher_is_better
from tfmixed.report.measure import run_round
from tfmixed.report.measure import score_name
from tfmixed.report.measure import steps_in_round
from tfmixed.report.measure import train
from tfmixed.report.measure import warm_up
from tfmixed.report.sources import find_source

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")


def arrays():
    return (X, Y), (X, Y)


def shuffled():
    train_set = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(40).batch(8)
    return train_set, tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


def net():
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(1, activation="sigmoid", dtype="float32"),
        ]
    )


class Fake:
    """A model that notes its steps, and may be interrupted."""

    def __init__(self, name, log, stop_at=None):
        self.name, self.log, self.stop_at = name, log, stop_at

    def train_on_batch(self, *batch):
        self.log.append(self.name)
        if len(self.log) == self.stop_at:
            raise KeyboardInterrupt


def test_policies_take_turns():
    log = []
    records = [Record("a"), Record("b")]
    models = {name: Fake(name, log) for name in "ab"}
    run_round(records, models, 2, (), backwards=False)
    run_round(records, models, 2, (), backwards=True)
    assert log == list("aabbbbaa")
    for record in records:
        assert [len(times) for times in record.rounds] == [2, 2]


def test_an_interrupted_round_counts_for_none():
    log = []
    records = [Record("a"), Record("b")]
    models = {name: Fake(name, log, stop_at=3) for name in "ab"}
    with pytest.raises(KeyboardInterrupt):
        run_round(records, models, 2, (), backwards=False)
    assert [record.rounds for record in records] == [[], []]


def test_the_first_step_is_kept_apart():
    log, record = [], Record("a")
    warm_up(record, Fake("a", log), ())
    assert record.first_step_s > 0
    assert record.rounds == []
    assert record.step_seconds() is None
    assert len(log) == 3


def test_medians_and_quartiles_of_all_steps():
    record = Record("a", rounds=[[1.0, 2.0], [3.0, 10.0], [4.0, 5.0]])
    assert record.step_seconds() == 3.5
    assert record.quartiles() == (2.25, 4.75)


@pytest.mark.parametrize(
    ("seconds", "steps"), [(1e-9, 50), (0.01, 20), (0.05, 4), (0.5, 2)]
)
def test_a_round_is_long_enough_and_not_too_long(seconds, steps):
    assert steps_in_round(seconds) == steps


def trained(loader, seed=0, epochs=3, **recipe):
    data = load_data(loader)
    model = build(find_source(net), data, Recipe(**recipe), "float32", 0)
    record, advanced = Record("float32"), []
    name = train(record, model, data, epochs, 8, seed, 0.5, advanced.append)
    return name, record, advanced, model


@pytest.mark.slow
@pytest.mark.parametrize("loader", [arrays, shuffled])
def test_a_seed_decides_order_and_dropout(loader):
    first, second, other = (
        trained(loader, seed)[3].get_weights() for seed in (0, 0, 1)
    )
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(first[0], other[0])


@pytest.mark.parametrize("loader", [arrays, shuffled])
def test_training_is_recorded(loader):
    name, record, advanced, model = trained(
        loader, epochs=20, learning_rate=0.05
    )
    assert name == "accuracy"
    assert record.scores == {
        0: pytest.approx(
            np.mean((model.predict(X, verbose=0)[:, 0] > 0.5) == Y)
        )
    }
    assert record.scores[0] > 0.9
    assert record.trained_steps == 100
    assert record.skipped_steps == 0
    assert record.ended_on_skip == []
    assert sum(advanced) == 50.0


def test_steps_are_counted_with_steps_per_execution():
    def compiled():
        model = net()
        model.compile("sgd", "binary_crossentropy", steps_per_execution=2)
        return model

    data = load_data(arrays)
    model = build(find_source(compiled), data, Recipe(), "float32", 0)
    record = Record("float32")
    name = train(record, model, data, 2, 8, 0, 0.0, lambda seconds: None)
    assert name == "loss"
    assert record.trained_steps == 10


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["loss"], "loss"),
        (["loss", "mae"], "mae"),
        (["loss", "auc", "binary_accuracy"], "binary_accuracy"),
        (["loss", "acc", "accuracy"], "acc"),
    ],
)
def test_a_model_is_judged_by_its_accuracy_if_it_has_one(names, chosen):
    assert score_name(names) == chosen


def test_losses_and_errors_are_better_when_lower():
    for name in ("loss", "mae", "root_mean_squared_error", "val_mse"):
        assert not higher_is_better(name)
    for name in ("accuracy", "auc", "precision", "f1_score"):
        assert higher_is_better(name)
