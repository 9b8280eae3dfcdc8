"""Where callbacks write: TensorBoard, and CSV files that survive a kill."""

import csv
import importlib.util
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import tensorflow as tf


class Board:
    """Scalars and histograms for TensorBoard.

    Args:
        log_dir: Folder for the event files, made if it does not exist.

    Raises:
        ModuleNotFoundError: If the package `tensorboard` is not installed.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        # TensorFlow finds out at the first write, in the midst of a training.
        if importlib.util.find_spec("tensorboard") is None:
            raise ModuleNotFoundError(
                "log_dir writes TensorBoard files, and the package tensorboard "
                'is not installed: pip install "tfmixed[tensorboard]", or '
                "leave log_dir out."
            )
        self._writer = tf.summary.create_file_writer(os.fspath(log_dir))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Writes scalars by name, for one step."""
        with self._writer.as_default(step=int(step)):
            for name, value in values.items():
                tf.summary.scalar(name, value)

    def histogram(self, step: int, name: str, buckets: Any) -> None:
        """Writes a histogram that is counted already.

        Args:
            step: The step.
            name: Its name.
            buckets: Array of rows (left edge, right edge, count).
        """
        from tensorboard.plugins.histogram import metadata

        # What `tf.summary.histogram` writes after it has counted.
        kind = metadata.create_summary_metadata(None, None)
        with self._writer.as_default(step=int(step)):
            values = tf.constant(buckets, tf.float64)
            tf.summary.write(name, values, metadata=kind)

    def flush(self) -> None:
        """Makes sure that what was written is in the file."""
        self._writer.flush()

    def close(self) -> None:
        """Writes what is left and closes the file."""
        self._writer.close()


class StepTable:
    """A CSV file with rows in the order of steps.

    Where a training goes on after an interruption, rows of earlier steps that
    are in the file stay; rows of steps that come again are replaced.

    Args:
        path: The file; its folder is made if it does not exist.
        columns: Names of the columns; the first holds the step.
        first: Number of the first step that will be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: Iterable[str],
        first: int,
    ) -> None:
        self._path = pathlib.Path(path)
        columns = list(columns)
        kept = _rows_before(self._path, columns, first)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # In another file first: a kill in between would lose the old rows.
        fresh = self._path.with_name(f"{self._path.name}.part")
        with fresh.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([columns, *kept])
        fresh.replace(self._path)

    def write(self, rows: Iterable[Iterable[Any]]) -> None:
        """Appends rows; they are in the file when this returns."""
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)


def _rows_before(
    path: pathlib.Path, columns: list[str], first: int
) -> list[list[str]]:
    if not first or not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        header, *rows = list(csv.reader(file)) or [[]]
    if header != columns:
        raise ValueError(
            f"The training goes on at step {first}, but '{path}' has the "
            f"columns {header} and not {columns}. Give another file, or move "
            "this one away."
        )
    # The last row may have been cut off in the middle.
    whole = [row for row in rows if len(row) == len(columns)]
    return [row for row in whole if int(row[0]) < first]
