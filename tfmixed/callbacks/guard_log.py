"""What a `PrecisionGuard` did and why: for people, and to go on from."""

import dataclasses
import json
import os
import pathlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that a guard noticed or did.

    Args:
        step: How many steps the training had taken.
        epoch: Number of the epoch, from 0.
        batch: Number of the batch in the epoch; None at its end.
        action: `"retry"`, `"lower scale"`, `"layer to float32"`,
            `"bfloat16"`, `"float32"`, `"climb back"`, `"none"` (noticed
            only) or `"epoch"` (the metric of an epoch).
        reason: Why, in one sentence.
        layer: Path of the layer, where it is about one.
        value: The new scale, or the metric.
    """

    step: int
    epoch: int
    batch: int | None
    action: str
    reason: str
    layer: str | None = None
    value: float | None = None

    def __str__(self) -> str:
        where = f"epoch {self.epoch + 1}"
        if self.batch is not None:
            where += f", batch index {self.batch}"
        what = {
            "none": "noticed",
            "layer to float32": f"'{self.layer}' to float32",
            "lower scale": f"loss scale to {self.value or 0:g}",
            "float32": "everything to float32",
            "bfloat16": "float16 to bfloat16",
            "retry": "batch retried",
        }.get(self.action, self.action)
        return (
            f"PrecisionGuard, after {self.step} steps ({where}): {what}: "
            f"{self.reason}."
        )


class EventLog:
    """The events of a training, in a file of JSON lines where one is given.

    Args:
        path: The file; None for none.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._path = None if path is None else pathlib.Path(path)
        self.events: list[Event] = []

    def begin(self, step: int) -> list[Event]:
        """Begins a training, or goes on with one that was interrupted.

        Args:
            step: How many steps were taken before.

        Returns:
            The events up to there, read from the file. Later ones, which came
            after the state that was restored, are dropped.
        """
        self.events = []
        if self._path is None:
            return []
        if step and self._path.exists():
            self.events = [e for e in _read(self._path) if e.step <= step]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # In another file first: a kill in between would lose the old lines.
        fresh = self._path.with_name(f"{self._path.name}.part")
        fresh.write_text("".join(map(_line, self.events)), encoding="utf-8")
        fresh.replace(self._path)
        return list(self.events)

    def add(self, event: Event) -> None:
        """Adds an event; it is in the file when this returns."""
        self.events.append(event)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(event))


def _line(event: Event) -> str:
    return json.dumps(dataclasses.asdict(event)) + "\n"


def _read(path: pathlib.Path) -> list[Event]:
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            fields: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            # The last line, cut off by a kill.
            continue
        found.append(Event(**fields))
    return found
