"""A model file of half the size, for people who keep many."""

import os
import pathlib
import tempfile
import zipfile
from typing import Any

import h5py
import keras
import numpy as np

from tfmixed.prepare import stock_copy

_WEIGHTS = "model.weights.h5"
_LARGEST = 65504.0
_SMALLEST = 2.0**-14


def save_half(model: keras.Model, path: str | os.PathLike[str]) -> None:
    """Saves a model with its weights in float16: half the size on disk.

    `keras.models.load_model` opens the file as a float32 model of stock Keras
    classes, also where tfmixed is not installed. Kernels and embeddings are
    rounded to float16, which keeps 3 digits; biases, statistics, and whatever
    float16 cannot hold stay in float32. Optimizer state and compile settings
    are left out. An interruption leaves no half-written file.

    Args:
        model: Any Keras model, prepared or not; it stays as it is.
        path: Where to write, ending in `.keras`. A file that exists is
            replaced.

    Raises:
        ValueError: If `path` does not end in `.keras`, or the model is not
            built, or has a layer that Keras cannot make again.

    Example:

    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    >>> model = tfmixed.prepare(model, "mixed_bfloat16")
    >>> tfmixed.save_half(model, "model.keras")
    >>> keras.models.load_model("model.keras").dtype_policy.name
    'float32'
    """
    target = pathlib.Path(path)
    if target.suffix != ".keras":
        raise ValueError(
            f"save_half: the name {str(path)!r} does not end in '.keras', by "
            "which keras.models.load_model knows the format. Add it."
        )
    if isinstance(model, keras.Model) and not model.built:
        raise ValueError(
            f"save_half: the model '{model.name}' has no weights yet. Call it "
            "on a batch first."
        )
    stock = stock_copy(model)
    # On the same file system, so that the replacing is one step.
    with tempfile.TemporaryDirectory(
        prefix=".save_half_", dir=target.parent
    ) as folder:
        full = pathlib.Path(folder) / "full.keras"
        half = pathlib.Path(folder) / "half.keras"
        stock.save(full)
        _halve(full, half)
        half.replace(target)


def _halve(full: pathlib.Path, half: pathlib.Path) -> None:
    with (
        zipfile.ZipFile(full) as source,
        zipfile.ZipFile(half, "w") as target,
    ):
        for name in source.namelist():
            if name != _WEIGHTS:
                target.writestr(name, source.read(name))
                continue
            weights = pathlib.Path(source.extract(name, half.parent))
            rounded = weights.with_suffix(".half")
            _round_file(weights, rounded)
            target.write(rounded, name)


def _round_file(weights: pathlib.Path, rounded: pathlib.Path) -> None:
    # A new file: HDF5 does not give back the room of what is deleted.
    with h5py.File(weights) as source, h5py.File(rounded, "w") as target:

        def copy(name: str, item: Any) -> None:
            if isinstance(item, h5py.Group):
                group = target.require_group(name)
            else:
                group = target.create_dataset(name, data=_rounded(item[()]))
            group.attrs.update(item.attrs)

        source.visititems(copy)
        target.attrs.update(source.attrs)


def _rounded(value: Any) -> Any:
    """The array in float16 if it is a kernel that float16 can hold."""
    value = np.asarray(value)
    if value.dtype != np.float32 or value.ndim < 2:
        return value
    largest = np.abs(value).max(initial=0.0)
    if not _SMALLEST <= largest <= _LARGEST:
        return value
    return value.astype(np.float16)
