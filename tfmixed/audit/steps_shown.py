"""A progress bar for work of a few steps, on the standard error."""

import importlib.util
import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress


def watched() -> Console | None:
    """Returns where to show progress: a terminal, or a notebook that can.

    Without `ipywidgets` rich warns in a notebook at each change.
    """
    console = Console(file=sys.stderr)
    if console.is_jupyter:
        return console if importlib.util.find_spec("ipywidgets") else None
    return console if console.is_terminal else None


class StepsShown:
    """Shows how many of the steps are done; nothing where nobody looks.

    Args:
        total: How many steps there will be, about.
        visible: Whether to show anything, on a terminal or in a notebook.
    """

    def __init__(self, total: int, visible: bool = True) -> None:
        console = watched()
        self._bar = Progress(
            console=console or Console(file=sys.stderr, force_jupyter=False),
            transient=True,
            disable=console is None or not visible,
        )
        self._task = self._bar.add_task("", total=total)

    def next(self, what: str) -> None:
        """Begins the next step."""
        self._bar.update(self._task, advance=1, description=what)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
