"""Lets the peers of a workload take turns, and keeps what they measured."""

import statistics
from typing import Any

import peer_report
from peer_catalogue import ONLY_ON_GPU
from peer_catalogue import PEERS
from peer_figures import add_figures
from peer_figures import geometric_means
from peer_figures import judge
from peer_team import Team
from rich.console import Console
from rich.progress import BarColumn
from rich.progress import Progress
from rich.progress import TextColumn
from rich.progress import TimeElapsedColumn

LEAST_STEPS = 3
MOST_STEPS = 200

Record = dict[str, Any]


def unmeasured() -> Record:
    """What is known of a peer before it starts."""
    return {
        "status": "not measured",
        "error": None,
        "device": None,
        "format": None,
        "batch": None,
        "build_ms": None,
        "first_step_ms": None,
        "loss": None,
        "rounds": [],
        "memory_mb": None,
        "memory_note": None,
    }


class Run:
    """Measures all workloads with all peers.

    Args:
        settings: How to measure, see `peers.settings`.
        command: The command line, for the record.
    """

    def __init__(self, settings: Record, command: list[str]) -> None:
        self._settings = settings
        self._peers = list(
            settings["peers"] or (p for p in PEERS if p not in ONLY_ON_GPU)
        )
        self._workloads: Record = {}
        self._machine = peer_report.describe_machine()
        self._header: Record = {
            "date": peer_report.now(),
            "command": command,
            "machine": self._machine,
            "versions": peer_report.describe_versions(),
            "settings": settings,
        }
        self._interrupted = False
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        stages = 1 + settings["rounds"] + settings["memory"]
        self._task = self._progress.add_task(
            "", total=stages * len(settings["workloads"])
        )

    def measure(self) -> None:
        """Measures until the end or until Ctrl-C."""
        try:
            with self._progress:
                for workload in self._settings["workloads"]:
                    self._measure_speed(workload)
                    if self._settings["memory"]:
                        self._measure_memory(workload)
        except KeyboardInterrupt:
            self._interrupted = True

    def result(self) -> Record:
        """All that was measured, and what follows from it."""
        for workload in self._workloads.values():
            add_figures(workload)
        means = geometric_means(self._workloads)
        return self._header | {
            "interrupted": self._interrupted,
            "workloads": self._workloads,
            "geometric_means": means,
            "targets": judge(self._workloads, means),
        }

    def _measure_speed(self, workload: str) -> None:
        peers = {peer: unmeasured() for peer in self._peers}
        self._workloads[workload] = {"peers": peers}

        def lose(peer: str, status: str, reason: str) -> None:
            peers[peer].update(status=status, error=reason)

        with Team(workload, lose) as team:
            self._say(f"{workload}: starting")
            self._start(team, peers)
            for peer in team.names:
                self._say(f"{workload}: first step of {peer}")
                batch = self._settings["batch"]
                peers[peer].update(team.ask(peer, "build", batch=batch))
            self._progress.advance(self._task)
            self._take_turns(team, workload)
        self._report_progress(workload)

    def _start(self, team: Team, peers: Record) -> None:
        devices = team.start(list(peers))
        if "GPU" in devices.values() and self._settings["peers"] is None:
            late = [peer for peer in ONLY_ON_GPU if peer not in peers]
            self._peers += late
            peers.update({peer: unmeasured() for peer in late})
            devices |= team.start(late)
        for peer, device in devices.items():
            peers[peer]["device"] = self._machine["device"] = device

    def _take_turns(self, team: Team, workload: str) -> None:
        peers = self._workloads[workload]["peers"]
        steps = {}
        for peer in team.names:
            # The first of these may still be compiling.
            times = team.ask(peer, "run", steps=2).get("step_ms")
            if times:
                steps[peer] = self._turn_length(times[-1])
        for index in range(self._settings["rounds"]):
            for peer in team.names[:: -1 if index % 2 else 1]:
                self._say(f"{workload}: round {index + 1}, {peer}")
                answer = team.ask(peer, "run", steps=steps[peer] + 1)
                if answer:
                    # The first step finds the caches full of others' data.
                    peers[peer]["rounds"].append(answer["step_ms"][1:])
                    peers[peer].update(status="measured", loss=answer["loss"])
            self._progress.advance(self._task)

    def _turn_length(self, step_ms: float) -> int:
        steps = round(self._settings["turn_seconds"] * 1e3 / step_ms)
        return min(max(steps, LEAST_STEPS), MOST_STEPS)

    def _measure_memory(self, workload: str) -> None:
        peers = self._workloads[workload]["peers"]

        def lose(peer: str, status: str, reason: str) -> None:
            peers[peer]["memory_note"] = f"{status}: {reason}"

        with Team(workload, lose) as team:
            self._say(f"{workload}: starting to measure memory")
            team.start([p for p in peers if peers[p]["status"] == "measured"])
            for peer in team.names:
                self._say(f"{workload}: memory of {peer}")
                batch = self._settings["memory_batch"]
                peers[peer].update(team.ask(peer, "memory", batch=batch))
        self._progress.advance(self._task)

    def _say(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def _report_progress(self, workload: str) -> None:
        peers = self._workloads[workload]["peers"]
        times = [
            f"{name} {statistics.median(sum(peer['rounds'], [])):.1f} ms"
            if peer["rounds"]
            else f"{name} {peer['status']}"
            for name, peer in peers.items()
        ]
        self._console.print(
            f"{workload}: {', '.join(times)}", highlight=False, markup=False
        )
