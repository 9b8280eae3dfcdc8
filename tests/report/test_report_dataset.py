"""Data of the wrong shape must be found before anything is trained."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmixed.report.dataset import check_batch_size
from tfmixed.report.dataset import load_data

X = np.arange(24, dtype="float32").reshape(12, 2)
Y = np.arange(12) % 3


def dataset(count=12, batch=4):
    return tf.data.Dataset.from_tensor_slices((X[:count], Y[:count])).batch(
        batch
    )


def test_arrays_are_taken():
    data = load_data(lambda: ((X[:8], Y[:8]), (X[8:], Y[8:])))
    assert not data.is_dataset
    assert data.steps(3) == 3
    assert data.validation_steps(3) == 2
    assert data.validation_size() == 4
    x, y, weight = data.batch(5)
    np.testing.assert_array_equal(x, X[:5])
    np.testing.assert_array_equal(y, Y[:5])
    assert weight is None


def test_datasets_are_taken_with_weights():
    weights = np.ones(12, "float32")
    train = tf.data.Dataset.from_tensor_slices((X, Y, weights)).batch(4)
    data = load_data(lambda: (train, dataset(8)))
    assert data.is_dataset
    assert data.steps(128) == 3
    assert data.validation_steps(128) == 2
    x, y, weight = data.batch(128)
    np.testing.assert_array_equal(x, X[:4])
    assert weight.shape == (4,)
    np.testing.assert_array_equal(data.targets(), Y[:4])


def test_a_dataset_of_unknown_length_is_counted():
    train = dataset().filter(lambda x, y: True)
    assert int(train.cardinality()) == tf.data.UNKNOWN_CARDINALITY
    assert load_data(lambda: (train, dataset())).steps(1) == 3


def test_a_reloaded_dataset_has_the_order_of_the_seed():
    data = load_data(lambda: (dataset(batch=1).shuffle(12), dataset()))

    def order(seed):
        keras.utils.set_random_seed(seed)
        return [int(x[0, 0]) for x, _ in data.reloaded().train]

    assert order(1) == order(1)
    assert order(1) != order(2)
    # Without loading anew the stream of the dataset goes on.
    again = [[int(x[0, 0]) for x, _ in data.train] for _ in range(2)]
    assert again[0] != again[1]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned None."),
        (
            (X, Y, X, Y),
            "returned (ndarray (12, 2) float32, ndarray (12,) int64, "
            "ndarray (12, 2) float32, ndarray (12,) int64).",
        ),
        ((X, Y), "returned (ndarray (12, 2) float32, ndarray (12,) int64)."),
        (((X, Y), (X, Y, Y)), "returned (("),
        (((X, "y"), (X, Y)), "returned ((ndarray (12, 2) float32, str), ("),
        (((X, Y[:5]), (X, Y)), "must hold the same number of examples"),
        (((X[:0], Y[:0]), (X, Y)), "at least one"),
        (((X, np.array([None] * 12)), (X, Y)), "Objects are not numbers"),
        (((X, Y), (X[:, :1], Y)), "`x_train` has the shape (2,) and one"),
        (((X, X), (X, Y)), "`y_train` has the shape (2,) and one"),
        ((dataset(), (X, Y)), "returned (tf.data.Dataset, (ndarray"),
        ((dataset().repeat(), dataset()), "end it with `.take(n)`"),
        ((dataset().take(0), dataset()), "A dataset is empty"),
        (
            (dataset().map(lambda x, y: x), dataset()),
            "not `(x, y)` or `(x, y, weight)`",
        ),
    ],
)
def test_what_is_wrong_is_said(returned, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_data(lambda: returned)
    assert "Expected `(x_train, y_train), (x_val, y_val)`" in str(error.value)


def test_data_that_are_no_function_are_an_error():
    with pytest.raises(ValueError, match="Expected a function without"):
        load_data(((X, Y), (X, Y)))


def test_a_batch_must_not_be_larger_than_the_data():
    data = load_data(lambda: ((X[:8], Y[:8]), (X, Y)))
    check_batch_size(data, 8)
    with pytest.raises(ValueError, match="got 9, but .* only 8 examples"):
        check_batch_size(data, 9)
