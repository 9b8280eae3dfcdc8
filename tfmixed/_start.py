"""How this process was started, found out without importing anything heavy."""

import pathlib
import sys


def is_command_line(arguments: list[str] | None = None) -> bool:
    """Returns whether this process is the program `tfmixed`.

    Python imports the package before its command line, and the package
    imports TensorFlow, which takes seconds and prints notes. The command line
    answers questions about its usage first, and imports TensorFlow itself,
    quietly, when it has work to do.

    Args:
        arguments: The command line of the process, with the interpreter.
    """
    arguments = sys.orig_argv if arguments is None else arguments
    if "-m" in arguments:
        program = arguments[arguments.index("-m") + 1 :][:1]
    else:
        program = [pathlib.Path(name).stem for name in arguments[1:2]]
    return program == ["tfmixed"]


# Set by the command line, before it imports the package again.
names_wanted = not is_command_line()
