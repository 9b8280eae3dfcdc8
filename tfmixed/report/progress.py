"""Shows how far a long measurement is, on the standard error.

On a terminal a bar with the time left; elsewhere plain lines.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any
from typing import Self

from rich.console import Console
from rich.progress import BarColumn
from rich.progress import Progress as Bar
from rich.progress import TextColumn
from rich.progress import TimeElapsedColumn


class Progress:
    """Progress of work whose length is known in seconds, about.

    Args:
        visible: whether anything is shown.
        stream: where to; the standard error when it is `None`.

    Example:

    ```python
    with Progress() as progress:
        progress.expect(60.0)
        progress.describe("training")
        progress.advance(1.5)
        progress.say("float32: accuracy 95 %")
    ```
    """

    def __init__(self, visible: bool = True, stream: Any = None) -> None:
        self._console = Console(
            file=stream or sys.stderr,
            force_jupyter=False,
            quiet=not visible,
            highlight=False,
            markup=False,
            emoji=False,
            soft_wrap=True,
        )
        self._bar: Bar | None = None
        self._task: Any = None
        self._total = 0.0
        self._done = 0.0
        self._started = time.monotonic()
        if visible and self._console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}", markup=False),
                console=self._console,
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("starting", total=None, left="")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def expect(self, seconds: float) -> None:
        """Sets how long the work takes from here on.

        Args:
            seconds: an estimate.
        """
        self._total, self._done = max(seconds, 1e-3), 0.0
        self._started = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, total=self._total, completed=0.0)

    def advance(self, seconds: float) -> None:
        """Notes that work is done.

        Args:
            seconds: what it was estimated to take.
        """
        self._done += seconds
        if self._bar is not None:
            self._bar.update(
                self._task, completed=self._done, left=self._left()
            )

    def describe(self, activity: str) -> None:
        """Says what is going on; on a terminal only.

        Args:
            activity: a few words.
        """
        if self._bar is not None:
            self._bar.update(self._task, description=activity)

    def say(self, message: str, with_time: bool = False) -> None:
        """Writes a line that stays.

        Args:
            message: the line.
            with_time: whether the time left stands beside it where no bar
                shows it.
        """
        left = self._left() if with_time and self._bar is None else ""
        self._console.print(f"{message} ({left})" if left else message)

    def _left(self) -> str:
        """Words the time left, by the speed of the work so far."""
        if not self._total or self._done >= self._total:
            return ""
        elapsed = time.monotonic() - self._started
        pace = elapsed / self._done if self._done else 1.0
        return f"{duration(pace * (self._total - self._done))} left"


@contextlib.contextmanager
def without_retracing_notes() -> Iterator[None]:
    """Keeps TensorFlow from warning of each new model as of a mistake.

    Every training here builds and traces a model anew, on purpose.
    """
    logger = logging.getLogger("tensorflow")
    logger.addFilter(_is_no_retracing_note)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_retracing_note)


def _is_no_retracing_note(record: logging.LogRecord) -> bool:
    return "triggered tf.function retracing" not in record.getMessage()


def duration(seconds: float) -> str:
    """Words a length of time.

    Args:
        seconds: at least 0.

    Returns:
        For example `"about 40 s"` or `"about 4 min"`.
    """
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"about {round(seconds / 60)} min"
    return f"about {seconds / 3600:.1f} h"
