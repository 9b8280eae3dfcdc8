"""Writes an audit as text: findings, grouped, then a row a layer."""

import io
import itertools
import textwrap
from typing import TYPE_CHECKING
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfmixed.audit.codes import CODES
from tfmixed.audit.codes import SEVERITIES
from tfmixed.audit.findings import Finding

if TYPE_CHECKING:
    from tfmixed.audit.audit import Audit
    from tfmixed.audit.static.rows import Layer

_WIDTH = 80
_WIDEST = 160
# So many layers are named one by one in a group, and shown in the table.
_NAMED = 4
_ROWS = 40


def to_text(result: "Audit") -> str:
    """Writes for a terminal, without colours.

    Args:
        result: What was found.

    Returns:
        The subject, the findings by kind, the layers, and the conclusion.
    """
    lines = [*_wrap(subject(result)), ""]
    for group in groups(result.findings):
        lines += _group_lines(group)
    lines += _table(result)
    for note in result.notes:
        lines += _wrap(note)
    lines += ["", *_wrap(conclusion(result))]
    return "\n".join(line.rstrip() for line in lines)


def escaped(text: str) -> str:
    """The text with square brackets that rich takes for text."""
    return escape(text)


def subject(result: "Audit") -> str:
    """Says what was audited, in one sentence."""
    how = (
        f"a float32 model, as if it had the policy {result.policy}"
        if result.assumed
        else f"policy {result.policy}"
    )
    data = "with data" if result.measured else "without data"
    return f"Audit of '{result.model}': {how}, {data}."


def conclusion(result: "Audit") -> str:
    """Says what came of it, in a few sentences."""
    counts = {
        name: sum(one.severity == name for one in result.findings)
        for name in SEVERITIES
    }
    if not result.findings:
        return f"Nothing was found in {_count(len(result.layers), 'layer')}."
    found = ", ".join(
        _count(number, name) for name, number in counts.items() if number
    )
    text = f"{found} in {_count(len(result.layers), 'layer')}."
    # Others need to be told which layer to keep: prepare(model, keep_float32=).
    codes = {
        one.code
        for one in result.findings
        if "tfmixed.prepare(model)" in one.fix
    }
    if codes:
        text += (
            f" tfmixed.prepare(model) takes care of {', '.join(sorted(codes))}."
        )
    if not result.measured:
        text += " Pass data, audit(model, x, y), to measure as well."
    return text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def groups(findings: tuple[Finding, ...]) -> list[list[Finding]]:
    """Findings of one kind together, in the order of the first of each.

    Args:
        findings: Sorted by severity.

    Returns:
        Lists of findings with the same code, severity and fix.
    """
    found: dict[Any, list[Finding]] = {}
    for one in findings:
        fix = one.fix if one.code != "TM007" else ""
        found.setdefault((one.severity, one.code, fix), []).append(one)
    return list(found.values())


def _group_lines(group: list[Finding]) -> list[str]:
    first = group[0]
    title = CODES[first.code].title
    lines = _wrap(f"{first.severity.upper()} {first.code} {title}")
    for one in group[:_NAMED] if len(group) <= _NAMED else group[:1]:
        lines += _indent(one.message)
    if len(group) > _NAMED:
        layers = [one.layer or "the model" for one in group[1:]]
        named = ", ".join(layers[: _NAMED - 1])
        more = len(layers) - (_NAMED - 1)
        tail = f" and {more} more" if more > 0 else ""
        lines += _indent(f"The same: {named}{tail}.")
    fixes = list(dict.fromkeys(one.fix for one in group))
    lines += _indent(f"Fix: {fixes[0]}")
    return [*lines, ""]


def _indent(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
    )


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False) or [""]


def _table(result: "Audit") -> list[str]:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    columns = ["layer", "class", "computes in", "parameters", "rules", "found"]
    if result.measured:
        columns += ["largest", "gradient error"]
    for name in columns:
        right = name in ("parameters", "largest", "gradient error")
        table.add_column(
            name, justify="right" if right else "left", no_wrap=True
        )
    shown, hidden = _chosen(result.layers)
    for layer in shown:
        table.add_row(*_cells(layer, result.measured))
    stream = io.StringIO()
    console = Console(
        file=stream,
        # In a notebook rich would show the table and write nothing.
        force_jupyter=False,
        width=_WIDEST,
        no_color=True,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(table)
    lines = stream.getvalue().rstrip().splitlines()
    if hidden:
        lines.append(f"... and {hidden} more layers; all are in .layers")
    return lines


def _chosen(
    layers: tuple["Layer", ...],
) -> tuple[list["Layer"], int]:
    """Rows to show: all of a small model, else those with findings first."""
    if len(layers) <= _ROWS:
        return list(layers), 0
    ranked = sorted(
        range(len(layers)),
        key=lambda index: (not layers[index].codes, index),
    )
    chosen = sorted(itertools.islice(ranked, _ROWS))
    return [layers[i] for i in chosen], len(layers) - _ROWS


def _cells(layer: "Layer", measured: bool) -> list[str]:
    cells = [
        layer.path,
        layer.class_name,
        layer.compute_dtype,
        f"{layer.parameters:,}" if layer.parameters else "",
        layer.treatment,
        " ".join(layer.codes),
    ]
    if measured:
        values = layer.measured or {}
        for name in ("largest_output", "gradient_error"):
            value = values.get(name)
            cells.append(_number(value))
    return cells


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float | int) else str(value)
