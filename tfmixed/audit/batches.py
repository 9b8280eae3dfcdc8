"""Batches out of whatever data a person has, and a look at the data itself."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Names that Keras makes up tell nobody which input is meant.
_AUTOMATIC = re.compile(r"(keras_tensor|input_layer|input)(_\d+)*")


@dataclasses.dataclass(frozen=True)
class Batch:
    """What one step of a model takes.

    Args:
        x: The inputs, as tensors in the structure that the model takes.
        y: The targets likewise, or None.
        weights: The sample weights likewise, or None.
        rows: Where the rows stand in the data; None if that is not known.
    """

    x: Any
    y: Any = None
    weights: Any = None
    rows: np.ndarray | None = None

    def __len__(self) -> int:
        return int(keras.tree.flatten(self.x)[0].shape[0])


@dataclasses.dataclass(frozen=True)
class BadData:
    """Values in the data that are not finite.

    Args:
        name: The input or target, such as `"input 'image'"`.
        count: How many there are.
        total: Of how many values.
        places: The first positions, the row first.
        kinds: `"NaN"`, `"infinite"` or both.
    """

    name: str
    count: int
    total: int
    places: tuple[tuple[int, ...], ...]
    kinds: str

    def __str__(self) -> str:
        places = ", ".join(_place(place) for place in self.places)
        more = ", ..." if self.count > len(self.places) else ""
        values = "value" if self.count == 1 else "values"
        return (
            f"{self.name} contains {self.count} {self.kinds} {values} "
            f"({self.total} in all), first at {places}{more}"
        )


def _place(place: tuple[int, ...]) -> str:
    if len(place) == 1:
        return f"row {place[0]}"
    position = place[1] if len(place) == 2 else place[1:]
    return f"row {place[0]} position {position}"


def whole(x: Any, y: Any = None) -> Batch:
    """One batch of all the data that is given.

    Args:
        x: Array, or list, tuple or dict of arrays; or a dataset, of which the
            first batch is taken.
        y: The targets likewise, or None.
    """
    if is_dataset(x):
        for batch in take(x, y, 1, 0):
            return batch
        raise ValueError("The dataset yields no batch.")
    rows = np.arange(_num_rows(x))
    return Batch(_tensors(x), _tensors(y), None, rows)


def take(x: Any, y: Any, batches: int, batch_size: int) -> Iterator[Batch]:
    """The batches to look at.

    Of arrays, rows at equal distances, because many data sets are sorted; of
    datasets, the first batches as they come.

    Args:
        x: Array, or list, tuple or dict of arrays; or a `tf.data.Dataset` or
            `keras.utils.PyDataset` that yields (x, y) or (x, y, weights).
        y: The targets likewise, or None.
        batches: How many batches at most.
        batch_size: How many rows a batch has at most.
    """
    if is_dataset(x):
        if y is not None:
            raise ValueError(
                "A dataset brings its targets itself, so y must be None. "
                f"Received: x={type(x).__name__}, y={type(y).__name__}."
            )
        for item in _first(x, batches):
            inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(
                item
            )
            yield Batch(_tensors(inputs), _tensors(targets), _tensors(weights))
        return
    count = _num_rows(x)
    batches = min(batches, -(-count // batch_size))
    chosen = np.linspace(0, count, min(count, batches * batch_size), False)
    # Each batch gets its rows from the whole of the data as well.
    for start in range(batches):
        rows = chosen[start::batches].astype("int64")
        yield Batch(_tensors(x, rows), _tensors(y, rows), None, rows)


def is_dataset(x: Any) -> bool:
    """Returns whether `x` yields batches, not rows."""
    return isinstance(x, tf.data.Dataset | keras.utils.PyDataset)


def _first(dataset: Any, batches: int) -> Iterator[Any]:
    if isinstance(dataset, tf.data.Dataset):
        yield from dataset.take(batches)
        return
    for index in range(min(batches, dataset.num_batches or batches)):
        yield dataset[index]


def _num_rows(x: Any) -> int:
    leaves = keras.tree.flatten(x)
    counts = {len(leaf) for leaf in leaves if hasattr(leaf, "__len__")}
    if len(counts) != 1 or not min(counts):
        raise ValueError(
            "The arrays of the data must have the same number of rows, and "
            f"at least one. Received rows: {sorted(counts)}."
        )
    return int(counts.pop())


def _tensors(data: Any, rows: np.ndarray | None = None) -> Any:
    if data is None:
        return None

    def convert(leaf: Any) -> Any:
        if leaf is None:
            return None
        if not tf.is_tensor(leaf):
            leaf = np.asarray(leaf)
        tensor = leaf if rows is None else _rows_of(leaf, rows)
        tensor = tf.convert_to_tensor(tensor)
        # As `fit` does: what is float64 in NumPy is float32 in the model.
        if tensor.dtype == tf.float64:
            tensor = tf.cast(tensor, keras.config.floatx())
        return tensor

    return keras.tree.map_structure(convert, data)


def _rows_of(leaf: Any, rows: np.ndarray) -> Any:
    return tf.gather(leaf, rows) if tf.is_tensor(leaf) else leaf[rows]


def named(model: Any, batch: Batch) -> list[tuple[str, Any]]:
    """The tensors of a batch, with what people call them.

    Args:
        model: The model that the batch is for.
        batch: The batch.
    """
    inputs = [str(tensor.name) for tensor in getattr(model, "inputs", []) or []]
    if any(_AUTOMATIC.fullmatch(name) for name in inputs):
        inputs = []
    outputs = list(getattr(model, "output_names", None) or [])
    return [
        *_named("input", batch.x, inputs),
        *_named("target", batch.y, outputs),
        *_named("sample weights", batch.weights, outputs),
    ]


def _named(kind: str, data: Any, names: list[str]) -> list[tuple[str, Any]]:
    if data is None:
        return []
    found = []
    leaves = keras.tree.flatten_with_path(data)
    for index, (path, leaf) in enumerate(leaves):
        if any(isinstance(part, str) for part in path):
            name = "/".join(str(part) for part in path)
        elif len(names) == len(leaves):
            name = names[index]
        elif len(leaves) == 1:
            found.append((f"the {kind}", leaf))
            continue
        else:
            name = str(index + 1)
        found.append((f"{kind} '{name}'", leaf))
    return found


def bad_data(name: str, tensor: Any, rows: Any = None) -> BadData | None:
    """Looks for values that are not finite; None where all are.

    Args:
        name: What people call the tensor.
        tensor: An array or tensor, with the rows first.
        rows: Where the rows stand in the data; None for 0, 1, 2, ...
    """
    values = np.asarray(tensor)
    # The 16-bit types of `ml_dtypes` are of kind "V".
    if values.dtype.kind not in "fV" or values.dtype.itemsize > 8:
        return None
    if values.dtype.itemsize < 4:
        values = values.astype("float32")
    finite = np.isfinite(values)
    count = int(values.size - np.count_nonzero(finite))
    if not count:
        return None
    first = np.argwhere(~finite)[:3]
    if rows is not None:
        first[:, 0] = np.asarray(rows)[first[:, 0]]
    has_nan = bool(np.isnan(values).any())
    only_nan = has_nan and count == np.count_nonzero(np.isnan(values))
    kinds = "NaN" if only_nan else "NaN and infinite" if has_nan else "infinite"
    places = tuple(tuple(int(i) for i in place) for place in first)
    return BadData(name, count, int(values.size), places, kinds)
