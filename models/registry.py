"""The reference models by name, each with data and settings that fit it."""

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A reference model, the data it is measured on and how to train it.

    Model and data are named `module:function`, as on the command line, and
    imported when asked for, so that a list of the models needs no TensorFlow.

    Args:
        name: name in the registry.
        model: the builder, callable without arguments.
        dataset: the loader, callable without arguments.
        description: one line for a person who chooses.
        batch_size: suggested batch size.
        epochs: suggested number of epochs.
        learning_rate: suggested learning rate of Adam.

    Example:

    ```python
    entry = get("convnet")
    model = entry.builder()
    (x_train, y_train), (x_val, y_val) = entry.data()
    ```
    """

    name: str
    model: str
    dataset: str
    description: str
    batch_size: int
    epochs: int
    learning_rate: float

    @property
    def builder(self) -> Callable[..., Any]:
        """The function that builds the model."""
        return _resolve(self.model)

    @property
    def data(self) -> Callable[..., Any]:
        """The function that loads `(x_train, y_train), (x_val, y_val)`."""
        return _resolve(self.dataset)


_ENTRIES = (
    Entry(
        name="convnet",
        model="models.convnet:convnet",
        dataset="models.data:mnist5k",
        description="3 stages of 3x3 convolutions, 1.1 M parameters, on MNIST",
        batch_size=128,
        epochs=2,
        learning_rate=1e-3,
    ),
    Entry(
        name="mlp",
        model="models.mlp:mlp",
        dataset="models.data:mnist5k",
        description="4 dense layers of 2048, 14 M parameters, on MNIST",
        batch_size=256,
        epochs=3,
        learning_rate=1e-3,
    ),
    Entry(
        name="tiny_mlp",
        model="models.mlp:tiny_mlp",
        dataset="models.data:digits",
        description="2 dense layers of 32 on 8x8 digits: too small to gain",
        batch_size=64,
        epochs=20,
        learning_rate=3e-3,
    ),
    Entry(
        name="resnet",
        model="models.resnet:resnet",
        dataset="models.data:mnist5k",
        description="ResNet-20, 0.27 M parameters, narrow layers, on MNIST",
        batch_size=128,
        epochs=2,
        learning_rate=2e-3,
    ),
    Entry(
        name="resnet50",
        model="models.resnet:resnet50",
        dataset="models.data:mnist5k",
        description="ResNet-50, bottlenecks, 24 M parameters, on MNIST",
        batch_size=64,
        epochs=1,
        learning_rate=1e-3,
    ),
    Entry(
        name="transformer",
        model="models.transformer:transformer",
        dataset="models.data:few_characters",
        description="3 causal blocks of width 256, next character of English",
        batch_size=16,
        epochs=1,
        learning_rate=1e-3,
    ),
    Entry(
        name="gpt",
        model="models.gpt:gpt",
        dataset="models.data:few_characters",
        description="4 blocks, rotary positions, tied weights, same text",
        batch_size=16,
        epochs=1,
        learning_rate=2e-3,
    ),
    Entry(
        name="vit",
        model="models.vit:vit",
        dataset="models.data:mnist5k",
        description="4 blocks of attention over 16 patches, on MNIST",
        batch_size=32,
        epochs=4,
        learning_rate=1e-3,
    ),
    Entry(
        name="unet",
        model="models.unet:unet",
        dataset="models.scenes:scenes",
        description="3 stages down and up, digits on photographs",
        batch_size=32,
        epochs=3,
        learning_rate=2e-3,
    ),
    Entry(
        name="lstm",
        model="models.lstm:lstm",
        dataset="models.data:few_characters",
        description="2 LSTM layers of 256, next character of English",
        batch_size=16,
        epochs=1,
        learning_rate=3e-3,
    ),
    Entry(
        name="recommender",
        model="models.recommender:recommender",
        dataset="models.interactions:interactions",
        description="2 tables of 100,000 x 32, dot product and MLP, word pairs",
        batch_size=1024,
        epochs=3,
        learning_rate=1e-2,
    ),
    Entry(
        name="autoencoder",
        model="models.autoencoder:autoencoder",
        dataset="models.images:noisy_mnist5k",
        description="convolutions down and up, noise out of MNIST",
        batch_size=128,
        epochs=3,
        learning_rate=2e-3,
    ),
    Entry(
        name="gan",
        model="models.gan:gan",
        dataset="models.images:latent_mnist5k",
        description="DCGAN, two optimizers in one step, images like MNIST",
        batch_size=128,
        epochs=5,
        learning_rate=1e-3,
    ),
)


def names() -> tuple[str, ...]:
    """Lists the names of the reference models, the default one first.

    Returns:
        The names that `get` takes.
    """
    return tuple(entry.name for entry in _ENTRIES)


def get(name: str) -> Entry:
    """Looks up a reference model.

    Args:
        name: one of `names()`.

    Returns:
        The entry of that name.

    Raises:
        ValueError: there is no such model; the message lists those there are.

    Example:

    ```python
    model = get("convnet").builder(classes=10)
    ```
    """
    for entry in _ENTRIES:
        if entry.name == name:
            return entry
    close = difflib.get_close_matches(str(name), names(), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"There is no reference model {name!r}.{hint} Expected one of: "
        f"{', '.join(names())}."
    )


def _resolve(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)
