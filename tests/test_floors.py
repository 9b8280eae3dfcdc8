"""A module imports from its own floor and from the floors below, never up."""

import ast
import pathlib

import pytest

import tfmixed

ROOT = pathlib.Path(tfmixed.__file__).parent

# The first part of a module's name decides its floor.
FLOORS = (
    {"_keras", "_start"},
    {
        "_probe",
        "_switch",
        "threads",
        "hardware",
        "plan",
        "policy",
        "loss_scale",
        "scheduled_loss_scale",
        "predictive_loss_scale",
    },
    {
        "gradients",
        "skips",
        "retraces",
        "small_batches",
        "stages",
        "optimizer",
        "wrapping",
        "telemetry",
        "layers",
        "fast",
        "data",
    },
    {
        "casting",
        "guard",
        "dtypes",
        "preparation",
        "model",
        "rules",
        "convert",
        "prepare",
        "archive",
    },
    {"audit", "health", "callbacks", "distill", "export"},
    {"tune", "report"},
    {"cli", "__main__"},
    {"__init__"},
)
# Within a floor: earlier rooms must not import later ones.
ROOMS = (
    ("_probe", "hardware", "plan", "policy"),
    ("loss_scale", "scheduled_loss_scale", "predictive_loss_scale"),
    (
        "gradients",
        "skips",
        "retraces",
        "stages",
        "telemetry",
        "optimizer",
        "wrapping",
    ),
    (
        "casting",
        "guard",
        "dtypes",
        "preparation",
        "model",
        "rules",
        "convert",
        "prepare",
        "archive",
    ),
)


def floor_of(name):
    for number, rooms in enumerate(FLOORS):
        if name in rooms:
            return number
    raise AssertionError(
        f"tfmixed.{name} has no floor: add it to FLOORS in {__file__}"
    )


def room_of(module):
    """`tfmixed.cli.env` and `cli/env` live in `cli`; `tfmixed` in itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(source, package):
    """The modules of tfmixed that a source imports, wherever it does so.

    Names for type checkers alone count too: a type is a dependency.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: 1 - node.level or None]
                base = ".".join([*above, base] if base else above)
            if base == "tfmixed":
                found.update(f"tfmixed.{alias.name}" for alias in node.names)
            else:
                found.add(base)
    return {name for name in found if name.split(".")[0] == "tfmixed"}


def upward_imports(files):
    """The imports that go up, as (importing room, imported module).

    Args:
        files: A dict from module name to source.
    """
    upward = []
    for module, source in files.items():
        room = room_of(module)
        package = module.rpartition(".")[0] or module
        for imported in sorted(imports(source, package)):
            other = room_of(imported)
            if floor_of(other) > floor_of(room) or later(other, room):
                upward.append((module, imported))
    return upward


def later(other, room):
    return any(
        other in rooms
        and room in rooms
        and rooms.index(other) > rooms.index(room)
        for rooms in ROOMS
    )


def tfmixed_files():
    files = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        if len(parts) > 2 and parts[-1] == "__init__":
            parts = parts[:-1]
        files[".".join(parts)] = path.read_text()
    return files


def test_imports_only_go_down():
    files = tfmixed_files()
    assert len(files) > 5
    assert upward_imports(files) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tfmixed.policy", "import tfmixed.model"),
        ("tfmixed.policy", "from tfmixed import optimizer"),
        ("tfmixed.policy", "from tfmixed.report.names import Name"),
        ("tfmixed.policy", "def f():\n    from tfmixed import cli"),
        ("tfmixed.policy", "from tfmixed import enable"),
        ("tfmixed.hardware", "from tfmixed.policy import Plan"),
        ("tfmixed.report.table", "from tfmixed.cli import main"),
        ("tfmixed.report.table", "from ..cli import main"),
        ("tfmixed._keras", "from tfmixed.hardware import hardware"),
    ],
)
def test_the_check_can_fail(module, source):
    if "enable" in source:
        with pytest.raises(AssertionError, match="has no floor"):
            upward_imports({module: source})
    else:
        assert len(upward_imports({module: source})) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tfmixed.policy", "from tfmixed import _keras\nimport keras"),
        ("tfmixed.policy", "from tfmixed.hardware import hardware"),
        ("tfmixed.report.table", "from tfmixed.report import names"),
        ("tfmixed.report.table", "from .names import Name"),
        ("tfmixed.cli.compare", "from tfmixed.report import compare"),
    ],
)
def test_downward_imports_are_allowed(module, source):
    assert upward_imports({module: source}) == []
