"""Writes the API reference, `docs/reference.md`, from the docstrings.

```bash
python docs/make_reference.py
```
"""

import inspect
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import tfmixed
from tfmixed import callbacks
from tfmixed.audit.audit import Audit
from tfmixed.audit.findings import Finding
from tfmixed.audit.verdicts import Blame
from tfmixed.hardware import Hardware
from tfmixed.plan import Plan
from tfmixed.preparation import Preparation
from tfmixed.report.comparison import Comparison

TARGET = pathlib.Path(__file__).parent / "reference.md"
INTRODUCTION = """\
# API reference

Made from the docstrings by `python docs/make_reference.py`; the tests run each
example. All of them assume

```python
import keras
import numpy as np
import tensorflow as tf
import tfmixed
```
"""
GROUPS = {
    "The policy": ("enable", "disable", "precision", "current_plan"),
    "This machine": ("hardware",),
    "Models": ("prepare", "to_float32", "save_half", "Model", "Sequential"),
    "Optimizers": ("LossScaleOptimizer", "wrap_optimizer"),
    "Loss scales": (
        "DynamicLossScale",
        "FixedLossScale",
        "ScheduledLossScale",
        "PredictiveLossScale",
        "NoLossScale",
    ),
    "Find what breaks": ("audit", "blame", "minimal_float32"),
    "Compare": ("compare",),
}
# What is returned, and not made by a user.
RESULTS = (Plan, Hardware, Preparation, Audit, Finding, Blame, Comparison)
# Those of Keras, which a user does not call.
_HOOKS = re.compile(
    "build|call|get_config|load_own|finalize|on_|"
    # Those that an optimizer asks its loss scale.
    "update|clip|at_floor|remedy|initial"
)
_SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Example):")


def public() -> Iterator[tuple[str, Any]]:
    """Yields the name and the object of all that is public."""
    for name in tfmixed.__all__:
        if name != "callbacks":
            yield f"tfmixed.{name}", getattr(tfmixed, name)
    for name in callbacks.__all__:
        yield f"tfmixed.callbacks.{name}", getattr(callbacks, name)


def make() -> str:
    """Returns the text of the reference."""
    parts = [INTRODUCTION]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += _entry(f"tfmixed.{name}", getattr(tfmixed, name))
    parts.append("## Callbacks\n")
    for name in callbacks.__all__:
        parts += _entry(f"tfmixed.callbacks.{name}", getattr(callbacks, name))
    parts.append("## What is returned\n")
    for kind in RESULTS:
        parts += _entry(kind.__name__, kind, called=False)
    return "\n".join(parts)


def _entry(name: str, thing: Any, called: bool = True) -> Iterator[str]:
    yield f"### `{name}`\n"
    if called and not (inspect.isclass(thing) and issubclass(thing, Exception)):
        yield f"```text\n{name}{_signature(thing)}\n```\n"
    yield _markdown(inspect.getdoc(thing) or "")
    if not inspect.isclass(thing):
        return
    for member, value in vars(thing).items():
        text = inspect.getdoc(value)
        if member.startswith("_") or _HOOKS.match(member) or not text:
            continue
        if isinstance(value, property):
            yield f"#### `{member}`\n\n{_markdown(text)}"
        elif inspect.isfunction(value):
            given = _signature(value).replace("(self, ", "(")
            given = given.replace("(self)", "()")
            yield f"#### `{member}{given}`\n\n{_markdown(text)}"


def _signature(thing: Any) -> str:
    """The signature without annotations: the text says what is expected."""
    empty = inspect.Parameter.empty
    signature = inspect.signature(thing)
    plain = [p.replace(annotation=empty) for p in signature.parameters.values()]
    bare = inspect.Signature(plain)
    line = str(bare)
    if len(line) < 60 or len(plain) < 2:
        return line
    inside = line[1:-1].split(", ")
    return "(\n    " + ",\n    ".join(inside) + ",\n)"


def _markdown(docstring: str) -> str:
    """A docstring of this project as Markdown."""
    lines, section, code = [], "", False
    for line in docstring.splitlines():
        found = _SECTION.fullmatch(line)
        if found:
            section = found[1]
            lines += ["", f"**{section}**", ""]
            continue
        if line and not line.startswith(" ") and section != "Example":
            section = ""
        opens = line.startswith(">>>") and not code
        closes = code and not line.strip()
        if opens:
            lines.append("```pycon")
        if closes:
            lines.append("```")
        code = (code or opens) and not closes
        lines.append(line if code else _listed(line, section))
    if code:
        lines.append("```")
    text = "\n".join(lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _listed(line: str, section: str) -> str:
    """A line of a section; each entry of it becomes a point of a list."""
    if section not in ("Args", "Attributes", "Raises"):
        return line.strip() if section == "Returns" else line
    entry = re.match(r"    (\*{0,2}[\w., ]+): (.*)", line)
    if entry:
        return f"- `{entry[1]}`: {entry[2]}"
    return line[4:].replace("    ", "  ", 1) if line.strip() else ""


if __name__ == "__main__":
    TARGET.write_text(make())
    print(f"Wrote {TARGET}.")
