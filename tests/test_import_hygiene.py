"""`import tfmixed` stays light, and `--help` answers without TensorFlow.

Keras imports scikit-learn, pandas and matplotlib itself where they are
installed. So the optional packages are made impossible to import, as they are
in a base install, and every attempt is recorded with the module that made it.
"""

import subprocess
import sys

import pytest

OPTIONAL = ("matplotlib", "pandas", "sklearn", "tensorboard", "mlxtend")
FRAMEWORKS = ("tensorflow", "keras", "numpy")

SPY = """
import importlib, pkgutil, sys

class Spy:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {names!r}:
            return None
        frame = sys._getframe(1)
        while frame.f_globals["__name__"].startswith("importlib"):
            frame = frame.f_back
        print(frame.f_globals["__name__"], name)
        raise ImportError(f"no {{name}}")

sys.meta_path.insert(0, Spy())
"""
IMPORT = "import tfmixed"
IMPORT_ALL = """
import tfmixed
for module in pkgutil.walk_packages(tfmixed.__path__, "tfmixed."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
# As `python -m tfmixed` would: the package looks at how Python was started.
COMMAND_LINE = """
import contextlib, runpy
sys.argv = ["tfmixed", *{arguments!r}]
sys.orig_argv = [sys.executable, "-m", *sys.argv]
with contextlib.redirect_stdout(sys.stderr):
    try:
        runpy.run_module("tfmixed", run_name="__main__")
    except SystemExit as stop:
        assert stop.code == 0, stop.code
"""


def attempts(code, names, by="tfmixed"):
    """The imports of `names` that are attempted while the code runs.

    Args:
        code: A program.
        names: Packages, which it cannot import.
        by: How the names of the importing modules that count begin.

    Returns:
        A list of `importing module, imported module`, from a new process.
    """
    result = subprocess.run(
        [sys.executable, "-c", f"{SPY.format(names=names)}\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    pairs = [line.split() for line in result.stdout.splitlines()]
    return [pair for pair in pairs if pair[0].startswith(by)]


@pytest.mark.slow
@pytest.mark.parametrize("code", [IMPORT, IMPORT_ALL])
def test_import_works_without_optional_packages_and_does_not_try(code):
    assert attempts(code, OPTIONAL) == []


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["env", "--help"], ["compare", "--help"]],
    ids=" ".join,
)
def test_help_imports_no_framework(arguments):
    code = COMMAND_LINE.format(arguments=arguments)
    assert attempts(code, FRAMEWORKS, by="") == []


@pytest.mark.parametrize("name", OPTIONAL + FRAMEWORKS)
def test_the_check_can_fail(name):
    code = f"""
source = "try: import {name}\\nexcept ImportError: pass"
exec(source, {{"__name__": "tfmixed.somewhere"}})
"""
    assert attempts(code, OPTIONAL + FRAMEWORKS) == [
        ["tfmixed.somewhere", name]
    ]
