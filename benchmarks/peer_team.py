"""The processes of a workload's peers: started together, stopped together."""

from collections.abc import Callable
from types import TracebackType
from typing import Any

from peer_process import PeerAbsentError
from peer_process import PeerFailedError
from peer_process import PeerProcess

Record = dict[str, Any]


class Team:
    """The peers of a workload that have not failed yet, as a context.

    Args:
        workload: Name of the workload.
        on_loss: Told of a peer that drops out: its name, `"failed"` or
            `"left out"`, and why.
    """

    def __init__(
        self, workload: str, on_loss: Callable[[str, str, str], None]
    ) -> None:
        self._workload = workload
        self._on_loss = on_loss
        self._processes: dict[str, PeerProcess] = {}

    @property
    def names(self) -> list[str]:
        """The peers that are there."""
        return list(self._processes)

    def start(self, names: list[str]) -> dict[str, str]:
        """Starts peers and waits until all have imported what they need.

        They import at the same time; afterwards nothing disturbs the one
        whose turn it is.

        Returns:
            For each peer that is there, the device that it trains on.
        """
        for name in names:
            self._processes[name] = PeerProcess(self._workload, name)
        greetings = {
            name: self._heed(name, self._processes[name].answer)
            for name in names
        }
        return {
            name: greeting["device"]
            for name, greeting in greetings.items()
            if greeting
        }

    def ask(self, name: str, command: str, **arguments: Any) -> Record:
        """Returns the answer of a peer, empty if it dropped out."""
        process = self._processes[name]
        return self._heed(name, lambda: process.ask(command, **arguments))

    def _heed(self, name: str, answer: Callable[[], Record]) -> Record:
        try:
            return answer()
        except PeerAbsentError as reason:
            self._on_loss(name, "left out", str(reason))
        except PeerFailedError as failure:
            self._on_loss(name, "failed", str(failure))
        self._processes.pop(name).stop()
        return {}

    def __enter__(self) -> "Team":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            # After Ctrl-C nobody waits for the end of a step.
            if error:
                process.kill()
            else:
                process.release()
        for process in self._processes.values():
            process.stop()
