"""Tables, JSON and the description of the machine for `peers.py`."""

import importlib.metadata
import os
import pathlib
import platform
import time
from typing import Any

from peer_catalogue import OURS
from peer_catalogue import PEERS
from rich.console import Console
from rich.table import Table

Record = dict[str, Any]

COLUMNS = (
    "workload",
    "batch",
    "peer",
    "step, ms",
    "±",
    "speed-up",
    "first step, s",
    "build, s",
    "memory, MB",
)
NOTES = (
    "Step: median over all rounds; ± half the interquartile range. Speed-up by "
    f"{OURS}: median step of the peer divided by that of {OURS}, formed in "
    "each round; median over the rounds. First step: tracing and compiling "
    "included; building the model apart. Memory of the step: peak during "
    "steps, less that with a batch of one, in a fresh process."
)
_PACKAGES = ("tensorflow", "keras", "torch", "numpy", OURS)
_TOLD_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16", "sve")


def describe_machine() -> Record:
    """The processor, its cores that we may use and its features."""
    from archspec.cpu.detect import detected_info

    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return {
        "cpu": _processor(),
        "cores": cores,
        "features": sorted(detected_info().features),
        "system": platform.platform(),
        "device": None,
    }


def _processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_versions() -> dict[str, str | None]:
    """Versions of Python and of what is compared; `None`: not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def now() -> str:
    """The date and time, with the offset from UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def heading(result: Record) -> list[str]:
    """Date, machine and versions, in words."""
    machine, settings = result["machine"], result["settings"]
    features = [name for name in _TOLD_FEATURES if name in machine["features"]]
    versions = [
        f"{name} {version or 'not installed'}"
        for name, version in result["versions"].items()
    ]
    lines = [
        f"{result['date'][:10]}; {machine['cpu']}, {machine['cores']} cores "
        f"({', '.join(features)}), trained on "
        f"{machine['device'] or 'nothing'}.",
        f"{', '.join(versions)}.",
        f"{settings['rounds']} rounds in turns; memory at batch "
        f"{settings['memory_batch']}."
        if settings["memory"]
        else f"{settings['rounds']} rounds in turns.",
    ]
    if settings["quick"]:
        lines.append("A quick run on small batches: its times say nothing.")
    if result["interrupted"]:
        lines.append("Interrupted: only what was measured until then.")
    return lines


def rows(result: Record) -> list[tuple[str, ...]]:
    """The cells of the table, one row for a peer of a workload."""
    return [
        _row(name, peer, workload)
        for name, workload in result["workloads"].items()
        for peer in workload["peers"]
    ]


def _row(title: str, name: str, workload: Record) -> tuple[str, ...]:
    peer = workload["peers"][name]
    if peer["status"] != "measured" and not peer["rounds"]:
        words = ": ".join(filter(None, (peer["status"], peer["error"])))
        return (title, "", f"{name}: {words}", *[""] * (len(COLUMNS) - 3))
    ratio = workload["speedups"].get(name, {}).get("median")
    return (
        title,
        _number(peer["batch"], "{}", 1),
        f"{name}; then failed: {peer['error']}" if peer["error"] else name,
        _number(peer["median_ms"], "{:.1f}"),
        _number(peer["iqr_ms"], "{:.1f}", 0.5),
        _number(ratio, "{:.2f}"),
        _number(peer["first_step_ms"], "{:.2f}", 1e-3),
        _number(peer["build_ms"], "{:.2f}", 1e-3),
        peer["memory_note"] or _number(peer["memory_mb"], "{:.0f}"),
    )


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "" if value is None else form.format(value * factor)


def verdicts(result: Record) -> list[tuple[str, str, str, str]]:
    """Target, bound, value and outcome of each target, in words."""
    words = {True: "pass", False: "FAIL", None: "not measured"}
    return [
        (
            entry["what"],
            f"{'≥' if entry['at_least'] else '≤'} {entry['bound']:.2f}",
            _number(entry["value"], "{:.2f}"),
            words[entry["passed"]],
        )
        for entry in result["targets"]
    ]


_TARGET_COLUMNS = ("target", "bound", "measured", "")


def print_report(result: Record, console: Console) -> None:
    """Prints the tables on a terminal."""
    for line in heading(result):
        console.print(line, highlight=False, markup=False)
    table = Table(*COLUMNS, padding=(0, 0, 0, 1))
    table.columns[0].no_wrap = True
    # No name of a peer is longer.
    table.columns[2].min_width = max(map(len, PEERS))
    seen = None
    for title, *cells in rows(result):
        if seen not in (None, title):
            table.add_section()
        table.add_row("" if title == seen else title, *map(_plain, cells))
        seen = title
    console.print(table)
    console.print(NOTES, highlight=False)
    targets = Table(*_TARGET_COLUMNS)
    colours = {"pass": "green", "FAIL": "red", "not measured": "yellow"}
    for *cells, outcome in verdicts(result):
        targets.add_row(*cells, f"[{colours[outcome]}]{outcome}[/]")
    if result["targets"]:
        console.print(targets)


def _plain(text: str) -> str:
    # An error message may hold what rich takes for markup.
    return text.replace("[", r"\[")


def to_markdown(result: Record) -> str:
    """The same tables for a README."""
    parts = [
        " ".join(heading(result)),
        _markdown_table(COLUMNS, rows(result)),
        NOTES,
    ]
    if result["targets"]:
        parts.append(_markdown_table(_TARGET_COLUMNS, verdicts(result)))
    parts.append(f"`{' '.join(result['command'])}`")
    return "\n\n".join(parts) + "\n"


def _markdown_table(columns: Any, cells: Any) -> str:
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |"
        for line in lines
    )
