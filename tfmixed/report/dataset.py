"""The data of a comparison: NumPy arrays or `tf.data`, checked once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfmixed.report.names import import_function
from tfmixed.report.names import name_of

_EXPECTED = (
    "Expected `(x_train, y_train), (x_val, y_val)` as NumPy arrays, or two "
    "batched `tf.data.Dataset`s, training and validation."
)


@dataclass(frozen=True)
class Data:
    """Training and validation data.

    Args:
        name: how the person named the loader.
        train: `(x, y)` arrays, or a batched dataset of `(x, y)`.
        validation: the same kind.
        loader: returns both anew.
        reference: `module:function` for a fresh process, or `None`.
        reason: why there is no reference.
    """

    name: str
    train: Any
    validation: Any
    loader: Callable[[], Any]
    reference: str | None = None
    reason: str | None = None

    @property
    def is_dataset(self) -> bool:
        """Whether the data come as `tf.data.Dataset`s."""
        return isinstance(self.train, tf.data.Dataset)

    def reloaded(self) -> "Data":
        """Loads datasets again, so that a seed decides their order.

        A shuffled dataset goes on with its random stream from one epoch to
        the next. Two runs see the same order only when each starts a dataset
        of its own. Arrays are shuffled by `fit` and stay as they are.

        Returns:
            Data of the same loader.
        """
        if not self.is_dataset:
            return self
        train, validation = self.loader()
        return Data(
            self.name,
            train,
            validation,
            self.loader,
            self.reference,
            self.reason,
        )

    def batch(self, size: int) -> tuple[Any, Any, Any]:
        """Takes the first examples for training.

        Args:
            size: how many; a dataset gives its own first batch, cut to it.

        Returns:
            `(x, y, sample_weight)` of tensors; `sample_weight` may be `None`.
        """
        if self.is_dataset:
            element = next(iter(self.train))
        else:
            element = tuple(part[:size] for part in self.train)
        tensors = tf.nest.map_structure(
            lambda value: tf.convert_to_tensor(value)[:size], element
        )
        return tensors[0], tensors[1], tensors[2] if len(tensors) > 2 else None

    def targets(self) -> np.ndarray:
        """Returns the targets for training, those of a dataset's first batch.

        Returns:
            An array of shape `(n, ...)`.

        Raises:
            ValueError: there is more than one target for an example.
        """
        if not self.is_dataset:
            return np.asarray(self.train[1])
        targets = self.batch(2**31)[1]
        if tf.nest.is_nested(targets):
            raise ValueError(
                f"`data` {self.name!r} gives several targets for an example, "
                "so the loss cannot be inferred. Compile the model in its "
                "builder."
            )
        return targets.numpy()

    def steps(self, batch_size: int) -> int:
        """Counts the optimizer steps of an epoch.

        Args:
            batch_size: size of a batch; a dataset has its own.

        Returns:
            The number of steps.
        """
        return _count(self.train, batch_size)

    def validation_steps(self, batch_size: int) -> int:
        """Counts the batches of an evaluation.

        Args:
            batch_size: size of a batch; a dataset has its own.

        Returns:
            The number of batches.
        """
        return _count(self.validation, batch_size)

    def validation_size(self) -> int | None:
        """Counts the validation examples, if they are arrays."""
        return None if self.is_dataset else len(self.validation[0])


def load_data(data: Any) -> Data:
    """Loads and checks the data of a comparison.

    Args:
        data: a function without arguments, or its name `module:function`.

    Returns:
        The data.

    Raises:
        ValueError: there is no such function, or it returns something else
            than training and validation data.
    """
    reference: str | None
    if isinstance(data, str):
        loader, name = import_function(data, "data"), data
        reference, reason = data, None
    elif callable(data):
        loader = data
        reference, reason = name_of(data)
        label: str = getattr(data, "__qualname__", repr(data))
        name = reference or label
    else:
        raise ValueError(
            f"`data` got {describe(data)}. Expected a function without "
            "arguments or its name `module:function`. Pass for example "
            "`lambda: ((x_train, y_train), (x_val, y_val))`."
        )
    loaded = loader()
    if not isinstance(loaded, tuple | list) or len(loaded) != 2:
        raise _wrong(name, loaded)
    train, validation = loaded
    if isinstance(train, tf.data.Dataset):
        _check_dataset(name, train, loaded)
        _check_dataset(name, validation, loaded)
    else:
        train, validation = _check_arrays(name, loaded)
    return Data(name, train, validation, loader, reference, reason)


def check_batch_size(data: Data, batch_size: int) -> None:
    """Checks that the batches of arrays can be as large as asked.

    Args:
        data: the data.
        batch_size: size of a batch.

    Raises:
        ValueError: there are fewer examples for training.
    """
    if not data.is_dataset and batch_size > len(data.train[0]):
        raise ValueError(
            f"`batch_size` got {batch_size}, but `data` {data.name!r} has "
            f"only {len(data.train[0])} examples for training. Pass at most "
            f"`batch_size={len(data.train[0])}`."
        )


def describe(value: Any) -> str:
    """Words what a value is, for messages.

    Args:
        value: anything.

    Returns:
        For example `"(ndarray (10, 3) float32, list of 10)"`.
    """
    if isinstance(value, tuple) and len(value) <= 6:
        return f"({', '.join(describe(item) for item in value)})"
    kind = type(value).__name__
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        dtype = getattr(value.dtype, "name", value.dtype)
        return f"{kind} {tuple(value.shape)} {dtype}"
    if isinstance(value, tf.data.Dataset):
        return "tf.data.Dataset"
    if isinstance(value, list | tuple | dict):
        return f"{kind} of {len(value)}"
    return kind if value is not None else "None"


def _wrong(name: str, loaded: Any, why: str = "") -> ValueError:
    return ValueError(
        f"`data` {name!r} returned {describe(loaded)}. {why}{_EXPECTED}"
    )


def _check_arrays(name: str, loaded: Any) -> tuple[Any, Any]:
    """Returns both parts as pairs of arrays that fit each other."""
    parts = []
    for part in loaded:
        if not isinstance(part, tuple | list) or len(part) != 2:
            raise _wrong(name, loaded)
        if not all(hasattr(item, "__array__") for item in part):
            raise _wrong(name, loaded)
        x, y = (np.asarray(item) for item in part)
        if not x.ndim or not y.ndim or len(x) != len(y) or not len(x):
            raise _wrong(
                name,
                loaded,
                "`x` and `y` must hold the same number of examples, at "
                "least one. ",
            )
        if x.dtype == object or y.dtype == object:
            raise _wrong(name, loaded, "Objects are not numbers. ")
        parts.append((x, y))
    for train, validation, letter in zip(*parts, "xy", strict=True):
        if train.shape[1:] != validation.shape[1:]:
            raise _wrong(
                name,
                loaded,
                f"One example of `{letter}_train` has the shape "
                f"{train.shape[1:]} and one of `{letter}_val` "
                f"{validation.shape[1:]}; they must be equal. ",
            )
    return parts[0], parts[1]


def _check_dataset(name: str, dataset: Any, loaded: Any) -> None:
    if not isinstance(dataset, tf.data.Dataset):
        raise _wrong(name, loaded)
    spec = dataset.element_spec
    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise _wrong(
            name,
            loaded,
            f"Its elements are {spec}, not `(x, y)` or `(x, y, weight)`. ",
        )
    cardinality = int(dataset.cardinality())
    if cardinality == tf.data.INFINITE_CARDINALITY:
        raise _wrong(
            name, loaded, "A dataset never ends: end it with `.take(n)`. "
        )
    if cardinality == 0:
        raise _wrong(name, loaded, "A dataset is empty. ")


def _count(part: Any, batch_size: int) -> int:
    if not isinstance(part, tf.data.Dataset):
        return -(-len(part[0]) // batch_size)
    known = int(part.cardinality())
    # Some datasets only know how long they are once they have been read.
    return known if known >= 0 else sum(1 for _ in part)
