"""The command line.

A subcommand is a module with `add_parser(subparsers)`, which sets `run` as a
default of its parser: `run(args) -> int`. Modules import TensorFlow only
inside `run`, so that `--help` answers at once.
"""

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from tfmixed.cli import _common
from tfmixed.cli import audit
from tfmixed.cli import compare
from tfmixed.cli import env

_SUBCOMMANDS = (env, audit, compare)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments after the program's name; `sys.argv` when None.

    Returns:
        The exit code: 0 when all went well, 1 for a failure, 2 for bad input,
        130 after Ctrl-C.
    """
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        return 2
    # `module:function` names what lies in the current folder, as in uvicorn.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return _common.run_guarded(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfmixed",
        description="Mixed precision for Keras on TensorFlow.",
    )
    version = importlib.metadata.version("tfmixed")
    parser.add_argument(
        "--version", action="version", version=f"tfmixed {version}"
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", title="commands")
    for subcommand in _SUBCOMMANDS:
        subcommand.add_parser(subparsers)
    return parser
