"""Where the model comes from: a function, a saved file or keras.applications.

Every source builds a model under the global policy that stands when it is
called, and knows whether a fresh process can build it too.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from tfmixed.report.dataset import Data
from tfmixed.report.dataset import describe
from tfmixed.report.names import import_function
from tfmixed.report.names import name_of
from tfmixed.report.names import suggest

APPLICATIONS = "applications:"


@dataclass(frozen=True)
class Source:
    """A way to build the model of a comparison.

    Args:
        name: how the person named it.
        build: returns a new model for the data; for `None` the model that
            needs no data, as keras.applications builds it by default.
        reference: name for a fresh process, or `None`.
        reason: why there is no reference.
        convert: whether the layers' policies must be set after building,
            because building does not follow the global policy or has no
            float32 output.
        fixed_weights: whether the weights are the same for every seed.
    """

    name: str
    build: Callable[[Data | None], Any]
    reference: str | None = None
    reason: str | None = None
    convert: bool = False
    fixed_weights: bool = False


def find_source(builder: Any) -> Source:
    """Finds the builder that a person names.

    Args:
        builder: a function without arguments that returns a `keras.Model`,
            its name `module:function`, a `.keras` file, or
            `applications:ResNet50` for a model of keras.applications.

    Returns:
        The source.

    Raises:
        ValueError: there is no such builder, file or application.
    """
    if callable(builder) and not isinstance(builder, keras.Model):
        reference, reason = name_of(builder)
        label: str = getattr(builder, "__qualname__", repr(builder))
        return Source(
            reference or label, lambda data: builder(), reference, reason
        )
    if not isinstance(builder, str | os.PathLike):
        raise ValueError(
            f"`builder` got {describe(builder)}. Expected a function without "
            "arguments that returns a model, because every policy and seed "
            "needs a new one. Pass for example `lambda: build_model()`."
        )
    name = os.fspath(builder)
    if name.endswith(".keras"):
        return _file(name)
    if name.startswith(APPLICATIONS):
        return _application(name)
    function = import_function(name, "builder")
    return Source(name, lambda data: function(), name)


def _file(name: str) -> Source:
    if not os.path.isfile(name):
        folder = os.path.dirname(name) or "."
        present = os.listdir(folder) if os.path.isdir(folder) else []
        raise ValueError(
            f"`builder` got {name!r}, but there is no such file."
            + suggest(
                os.path.basename(name),
                [file for file in present if file.endswith(".keras")],
            )
            + " Pass the path of a file that `model.save` wrote."
        )

    def build(data: Data | None) -> Any:
        return keras.models.load_model(name)

    return Source(
        name, build, os.path.abspath(name), convert=True, fixed_weights=True
    )


def _application(name: str) -> Source:
    wanted = name.removeprefix(APPLICATIONS)
    builders = {
        key: value
        for key, value in vars(keras.applications).items()
        if key[:1].isupper() and callable(value)
    }
    if wanted not in builders:
        raise ValueError(
            f"`builder` got {name!r}, but keras.applications has no "
            f"{wanted!r}."
            + suggest(wanted, builders)
            + f" Expected one of: {', '.join(sorted(builders))}."
        )

    def build(data: Data | None) -> Any:
        if data is None:
            return builders[wanted](weights=None)
        shape, classes = _image_task(name, data)
        try:
            return builders[wanted](
                weights=None, input_shape=shape, classes=classes
            )
        except ValueError as error:
            raise ValueError(
                f"`builder` {name!r} cannot be built for images of shape "
                f"{shape} from `data` {data.name!r}: {error} Pass data with "
                "images that it takes."
            ) from error

    return Source(name, build, name, convert=True)


def _image_task(name: str, data: Data) -> tuple[tuple[int, ...], int]:
    """Reads the shape of an image and the number of classes off the data."""
    x, _, _ = data.batch(1)
    targets = data.targets()
    shape = tuple(getattr(x, "shape", ()))[1:]
    if len(shape) != 3:
        raise ValueError(
            f"`builder` {name!r} takes images, but `data` {data.name!r} has "
            f"inputs of shape {shape}. Pass data of shape "
            "`(n, height, width, channels)`."
        )
    if np.issubdtype(targets.dtype, np.integer) and targets.ndim <= 2:
        if targets.ndim == 1 or targets.shape[1] == 1:
            if data.is_dataset:
                raise ValueError(
                    f"`builder` {name!r} needs the number of classes, which "
                    f"a dataset of class numbers does not tell. Pass one-hot "
                    "targets, or a builder of your own."
                )
            classes = 1 + max(int(targets.max()), _largest(data.validation))
            return shape, classes
    elif targets.ndim == 2 and targets.shape[1] > 1:
        return shape, int(targets.shape[1])
    raise ValueError(
        f"`builder` {name!r} is a classifier, but `data` {data.name!r} has "
        f"targets of shape {targets.shape} and dtype {targets.dtype}. "
        "Expected class numbers of shape `(n,)` or one-hot rows."
    )


def _largest(part: Any) -> int:
    return int(np.max(part[1]))
