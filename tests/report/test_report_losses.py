"""The loss that targets and output show, and when they show none."""

import keras
import numpy as np
import pytest
from keras import layers

from tfmixed.report.dataset import load_data
from tfmixed.report.losses import infer

X = np.linspace(-1, 1, 24, dtype="float32").reshape(12, 2)
CLASSES = np.arange(12) % 3
NUMBERS = np.linspace(-2, 2, 12, dtype="float32")
ONE_HOT = np.eye(3, dtype="float32")[CLASSES]


def sequential(units, activation=None):
    return keras.Sequential(
        [keras.Input((2,)), layers.Dense(units, activation=activation)]
    )


def data(targets):
    return load_data(lambda: ((X, targets), (X, targets)))


@pytest.mark.parametrize(
    ("targets", "units", "activation", "loss", "logits", "accuracy"),
    [
        (CLASSES, 3, "softmax", "sparse_categorical_crossentropy", 0, 1),
        (CLASSES, 3, None, "sparse_categorical_crossentropy", 1, 1),
        (CLASSES[:, None], 3, "softmax", "sparse_categorical", 0, 1),
        (CLASSES % 2, 1, "sigmoid", "binary_crossentropy", 0, 1),
        (CLASSES % 2 == 1, 1, "sigmoid", "binary_crossentropy", 0, 1),
        (CLASSES % 2, 1, None, "binary_crossentropy", 1, 1),
        (ONE_HOT, 3, "softmax", "categorical_crossentropy", 0, 1),
        (ONE_HOT, 3, None, "categorical_crossentropy", 1, 1),
        (ONE_HOT.astype(int), 3, "sigmoid", "binary_crossentropy", 0, 1),
        (NUMBERS, 1, None, "mean_squared_error", 0, 0),
        (NUMBERS[:, None], 1, "linear", "mean_squared_error", 0, 0),
        (np.stack([NUMBERS] * 2, 1), 2, None, "mean_squared_error", 0, 0),
    ],
)
def test_inferred(targets, units, activation, loss, logits, accuracy):
    found, metrics = infer(sequential(units, activation), data(targets))
    assert found.name.startswith(loss)
    assert bool(found.get_config().get("from_logits")) == bool(logits)
    assert [metric.name for metric in metrics or []] == ["accuracy"] * accuracy


def test_binary_logits_are_counted_from_zero():
    _, (accuracy,) = infer(sequential(1), data(CLASSES % 2))
    accuracy.update_state([[0], [1]], [[-0.2], [0.2]])
    assert float(accuracy.result()) == 1.0


def test_sequences_have_a_class_at_every_step():
    model = keras.Sequential(
        [
            keras.Input((2,)),
            layers.RepeatVector(4),
            layers.Dense(3, activation="softmax"),
        ]
    )
    loss, _ = infer(model, data(np.stack([CLASSES] * 4, 1)))
    assert loss.name == "sparse_categorical_crossentropy"


def test_the_head_of_a_nested_model_is_found():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, sequential(1, "sigmoid")(inputs))
    loss, _ = infer(model, data(CLASSES % 2))
    assert loss.get_config()["from_logits"] is False


@pytest.mark.parametrize(("softmax", "logits"), [(True, False), (False, True)])
def test_the_head_of_a_subclass_is_told_by_its_numbers(softmax, logits):
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, x):
            x = self.dense(10 * x)
            return keras.ops.softmax(x) if softmax else x

    loss, _ = infer(Net(), data(CLASSES))
    assert loss.get_config()["from_logits"] is logits


@pytest.mark.parametrize(
    ("targets", "units", "activation", "why"),
    [
        (CLASSES, 2, "softmax", "classes from 0 to 2 need at least 3 outputs"),
        (CLASSES - 1, 3, "softmax", "and none below 0"),
        (CLASSES, 3, "relu", "classes need a softmax or linear output"),
        (CLASSES, 1, None, "whole targets from 0 to 2 are no yes or no"),
        (CLASSES % 2, 1, "relu", "yes or no needs a sigmoid or linear"),
        (NUMBERS, 1, "sigmoid", "numbers need a linear output"),
        (NUMBERS, 3, "softmax", "shapes do not fit"),
        (np.stack([CLASSES] * 2, 1), 3, "softmax", "shapes do not fit"),
    ],
)
def test_what_is_open_is_an_error_with_the_fix(targets, units, activation, why):
    with pytest.raises(ValueError, match=why) as error:
        infer(sequential(units, activation), data(targets))
    assert "Pass `loss=`, or compile the model in its builder." in str(
        error.value
    )


def test_several_outputs_are_an_error():
    inputs = keras.Input((2,))
    model = keras.Model(
        inputs, [layers.Dense(1)(inputs), layers.Dense(1)(inputs)]
    )
    with pytest.raises(ValueError, match="it has several outputs"):
        infer(model, data(NUMBERS))
