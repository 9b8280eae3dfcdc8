"""Trains the same step side by side with every peer, and prints a table.

Each peer of a workload has a process of its own. They take turns of a few
steps, round by round and in reverse order every other round, so that a drift
of the machine hits all alike. Run it on an idle machine:

    python benchmarks/peers.py
    python benchmarks/peers.py --only mlp,cnn --json peers.json
    python benchmarks/peers.py --peers keras-bfloat16,tfmixed --no-memory

Exit codes: 0 if anything was measured, also where a peer failed, 1 if nothing
was, 2 for wrong arguments, 130 after Ctrl-C (what
was measured until then is printed and written).
"""

import argparse
import json
import pathlib
import signal
import sys
from collections.abc import Iterable
from typing import Any

from peer_catalogue import ONLY_ON_GPU
from peer_catalogue import PEERS
from peer_catalogue import WORKLOADS

# About ten minutes with the default peers on two cores.
ROUNDS = 5
TURN_SECONDS = 1.0
MEMORY_BATCH = 128
QUICK_BATCH = 4
QUICK_MEMORY_BATCH = 16


def listed(known: Iterable[str]) -> Any:
    """Returns a parser of comma-separated names that knows its names."""

    def parse(text: str) -> list[str]:
        names = list(dict.fromkeys(filter(None, text.split(","))))
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown) or 'the empty name'}; choose "
                f"from {', '.join(known)}"
            )
        return names

    return parse


def positive(text: str) -> int:
    """Parses a number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"expected a whole number of at least 1, got {text!r}"
        )
    return int(text)


def writable(text: str) -> pathlib.Path:
    """Parses a path; that it cannot be written is found out now."""
    try:
        with open(text, "a"):
            return pathlib.Path(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"cannot write to {text!r}: {error.strerror}"
        ) from None


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=str(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="peers:\n"
        + "\n".join(f"  {name}: {text}" for name, text in PEERS.items()),
    )
    parser.add_argument(
        "--only",
        type=listed(WORKLOADS),
        default=list(WORKLOADS),
        metavar="NAMES",
        help=f"of {','.join(WORKLOADS)}",
    )
    parser.add_argument(
        "--peers",
        type=listed(PEERS),
        metavar="NAMES",
        help=f"all but {','.join(ONLY_ON_GPU)}, which joins on a GPU",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        help=f"{ROUNDS}, or 1 with --quick",
    )
    parser.add_argument(
        "--batch", type=positive, help="instead of each workload's own"
    )
    parser.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure the memory of a step too, in processes of its own",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="try it out: one round of few steps on small batches",
    )
    parser.add_argument("--json", type=writable, metavar="FILE")
    parser.add_argument("--markdown", type=writable, metavar="FILE")
    arguments = parser.parse_args(argv)
    arguments.rounds = arguments.rounds or (1 if arguments.quick else ROUNDS)
    if arguments.quick:
        arguments.batch = arguments.batch or QUICK_BATCH
    return arguments


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """How to measure, as the JSON file has it."""
    quick = arguments.quick
    return {
        "workloads": arguments.only,
        "peers": arguments.peers,
        "rounds": arguments.rounds,
        "batch": arguments.batch,
        "turn_seconds": 0.0 if quick else TURN_SECONDS,
        "memory": arguments.memory,
        "memory_batch": QUICK_MEMORY_BATCH if quick else MEMORY_BATCH,
        "quick": quick,
    }


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    arguments = parse(argv)
    # A shell that starts us in the background has Ctrl-C ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    from peer_report import print_report
    from peer_report import to_markdown
    from peer_run import Run
    from rich.console import Console

    command = ["python", *(sys.argv if argv is None else ["peers.py", *argv])]
    run = Run(settings(arguments), command)
    run.measure()
    result = run.result()
    # The files first: a terminal may be gone by now.
    if arguments.json:
        arguments.json.write_text(
            json.dumps(result, indent=2, allow_nan=False) + "\n"
        )
    if arguments.markdown:
        arguments.markdown.write_text(to_markdown(result))
    print_report(result, Console())
    if result["interrupted"]:
        return 130
    measured = any(
        peer["rounds"]
        for workload in result["workloads"].values()
        for peer in workload["peers"].values()
    )
    return 0 if measured else 1


if __name__ == "__main__":
    sys.exit(main())
