"""Builders: functions, saved files, keras.applications."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfmixed.report.dataset import load_data
from tfmixed.report.sources import find_source


def data(x_shape=(2,), classes=3):
    x = np.zeros((6, *x_shape), "float32")
    y = np.arange(6) % classes
    return load_data(lambda: ((x, y), (x, y)))


def small():
    return keras.Sequential([keras.Input((2,)), layers.Dense(3)])


def test_a_function_is_called_at_every_build():
    source = find_source(small)
    first, second = source.build(data()), source.build(data())
    assert first is not second
    assert source.reference == f"{__name__}:small"
    assert not source.convert


def test_a_lambda_cannot_travel():
    source = find_source(lambda: small())
    assert source.reference is None
    assert source.reason
    assert source.build(data()).count_params() == 9


def test_a_name_is_imported():
    source = find_source("models.mlp:tiny_mlp")
    assert source.name == source.reference == "models.mlp:tiny_mlp"
    assert source.build(data()).name == "tiny_mlp"


def test_a_file_is_loaded_with_its_weights(tmp_path):
    model = small()
    model.save(tmp_path / "small.keras")
    source = find_source(tmp_path / "small.keras")
    loaded = source.build(data())
    for ours, theirs in zip(loaded.weights, model.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert source.fixed_weights
    assert source.convert


def test_a_missing_file_is_named_and_the_closest_one_suggested(tmp_path):
    small().save(tmp_path / "small.keras")
    with pytest.raises(ValueError, match="there is no such file") as error:
        find_source(str(tmp_path / "smal.keras"))
    assert "Did you mean 'small.keras'?" in str(error.value)


def test_a_model_is_no_builder():
    with pytest.raises(ValueError, match="got Sequential") as error:
        find_source(small())
    assert "lambda: build_model()" in str(error.value)


def test_an_application_takes_images_and_classes_from_the_data():
    source = find_source("applications:MobileNet")
    model = source.build(data((32, 32, 1), classes=5))
    assert model.input_shape == (None, 32, 32, 1)
    assert model.output_shape == (None, 5)


def test_an_unknown_application_is_an_error():
    with pytest.raises(ValueError, match="has no 'ResNet55'") as error:
        find_source("applications:ResNet55")
    assert "Did you mean 'ResNet50'?" in str(error.value)
    assert "VGG16" in str(error.value)


def floats():
    x = np.zeros((6, 32, 32, 3), "float32")
    return (x, x[:, 0, 0, 0]), (x, x[:, 0, 0, 0])


def class_datasets():
    x = np.zeros((6, 32, 32, 3), "float32")
    numbers = tf.data.Dataset.from_tensor_slices((x, np.arange(6))).batch(3)
    return numbers, numbers


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        (data((8, 8, 3)), "images of shape (8, 8, 3)"),
        (data((30,)), "has inputs of shape (30,)"),
        (load_data(floats), "targets of shape (6,) and dtype float32"),
        (load_data(class_datasets), "needs the number of classes"),
    ],
)
def test_an_application_says_which_data_it_takes(loaded, message):
    source = find_source("applications:MobileNet")
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        source.build(loaded)
    assert "'applications:MobileNet'" in str(error.value)
    assert re.search(r"Pass|Expected", str(error.value))
