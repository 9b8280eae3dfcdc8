"""How this process was started, found out without importing anything heavy."""

import pathlib
import sys

_ANSWERED_AT_ONCE = ("-h", "--help", "--version")


def asks_for_help(arguments: list[str] | None = None) -> bool:
    """Returns whether this is `tfmixed --help`, `tfmixed env --help`, ...

    Python imports the package before its command line, and the package
    imports TensorFlow, which takes seconds. A question about the usage needs
    none of it.

    Args:
        arguments: The command line of the process, with the interpreter.
    """
    arguments = sys.orig_argv if arguments is None else arguments
    if "-m" in arguments:
        program = arguments[arguments.index("-m") + 1 :][:1]
    else:
        program = [pathlib.Path(name).stem for name in arguments[1:2]]
    if program != ["tfmixed"]:
        return False
    return any(option in arguments for option in _ANSWERED_AT_ONCE)
