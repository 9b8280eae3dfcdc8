"""The registry: every entry fits together, unknown names are explained."""

import dataclasses
import functools

import pytest

import models
from models import registry


@functools.cache
def load(dataset):
    """Loads a data set once for all the models that use it."""
    entries = [models.get(name) for name in models.names()]
    return next(e for e in entries if e.dataset == dataset).data()


def test_names():
    assert models.names() == (
        "convnet",
        "mlp",
        "tiny_mlp",
        "resnet",
        "resnet50",
        "transformer",
        "gpt",
        "vit",
        "unet",
        "lstm",
        "recommender",
        "autoencoder",
        "gan",
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.names())
def test_model_and_data_fit(name):
    entry = models.get(name)
    model = entry.builder()
    (x_train, y_train), (x_val, y_val) = load(entry.dataset)
    outputs = model(x_train[:1])
    if y_train.dtype == "float32":
        # Images.
        assert outputs.shape == y_train[:1].shape
    else:
        assert outputs.shape[:-1] == y_train[:1].shape
        # A single unit says yes or no.
        classes = max(2, outputs.shape[-1])
        assert classes > max(y_train.max(), y_val.max())
    assert x_val.shape[1:] == x_train.shape[1:]
    assert model.name.startswith(name)


@pytest.mark.parametrize("name", registry.names())
def test_settings(name):
    entry = models.get(name)
    assert entry.name == name
    assert entry.description
    assert entry.batch_size >= 1
    assert entry.epochs >= 1
    assert 0 < entry.learning_rate < 0.1
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.epochs = 1


def test_unknown_name_lists_the_known_and_the_closest():
    expected = (
        "There is no reference model 'convnett'. Did you mean 'convnet'? "
        "Expected one of: convnet, mlp, tiny_mlp, resnet, resnet50, "
        "transformer, gpt, vit, unet, lstm, recommender, autoencoder, gan."
    )
    with pytest.raises(ValueError, match="convnett") as error:
        models.get("convnett")
    assert str(error.value) == expected


def test_unknown_name_without_a_close_one():
    with pytest.raises(ValueError, match="'zzz'. Expected one of: convnet"):
        models.get("zzz")
