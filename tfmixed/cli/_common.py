"""What the subcommands share: errors, `--json`, a quiet TensorFlow."""

import argparse
import contextlib
import importlib
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from typing import Any

from tfmixed import _start

# TensorFlow 2.21 writes these before its log level is in force.
_CHATTER = re.compile(
    r"^[IW]\d{4} |^[IW]0000 00:00|^WARNING: All log messages before absl"
)

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class CliError(Exception):
    """Bad input, for the person at the terminal to correct.

    Args:
        message: One line: what was given, what was expected, how to fix it.
    """


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--json` to a subcommand."""
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object instead of tables",
    )


def print_json(value: dict[str, Any]) -> None:
    """Prints the one JSON object of a subcommand."""
    print(json.dumps(value, indent=2, allow_nan=False))


def run_guarded(args: argparse.Namespace) -> int:
    """Runs `args.run(args)` and turns what it raises into an exit code.

    `CliError` and `ValueError`, which the library raises for bad input, give
    2, Ctrl-C gives 130, anything else 1: each with one line on stderr. With
    the environment variable `TFMIXED_DEBUG` set the traceback comes first.

    Args:
        args: The parsed arguments.

    Returns:
        The exit code.
    """
    try:
        load_library()
        return int(args.run(args))
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:
        # The reader of a pipe has gone, as in `tfmixed env | head -1`; what
        # Python flushes at exit would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CliError, ValueError) as error:
        return _say(f"error: {error}", 2)
    except Exception as error:
        return _say(f"failed: {type(error).__name__}: {error}", 1)


def _say(message: str, code: int) -> int:
    if os.environ.get("TFMIXED_DEBUG"):
        traceback.print_exc()
    # Keras puts some of its messages in bold type, over several lines.
    message = " ".join(_ESCAPES.sub("", message).split())
    print(f"tfmixed: {message}", file=sys.stderr)
    return code


def load_library() -> None:
    """Gives the package the names that `import tfmixed` gives elsewhere.

    In the program `tfmixed` the package starts out empty, see `_start`.
    """
    quiet_tensorflow()
    if not _start.names_wanted:
        _start.names_wanted = True
        importlib.reload(sys.modules["tfmixed"])


def quiet_tensorflow() -> None:
    """Imports TensorFlow without the notes it prints while it is imported.

    A `TF_CPP_MIN_LOG_LEVEL` that the user has set is obeyed: at 0 all is
    shown. Errors, warnings of Python and tracebacks are always shown.
    """
    level = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "tensorflow" in sys.modules or level == "0":
        return
    with _without_chatter():
        importlib.import_module("tensorflow")


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
    # The notes come from C++ and go to the file descriptor, not to sys.stderr.
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            captured.seek(0)
            for line in captured.read().decode(errors="replace").splitlines():
                if not _CHATTER.match(line):
                    print(line, file=sys.stderr)
