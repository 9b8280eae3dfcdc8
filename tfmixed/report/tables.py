"""Writes a comparison as text, Markdown and HTML."""

import html
import io
import textwrap
from typing import TYPE_CHECKING
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tfmixed.report.cells import cells
from tfmixed.report.cells import conclusion
from tfmixed.report.cells import headings
from tfmixed.report.cells import small_print
from tfmixed.report.cells import subject

if TYPE_CHECKING:
    from tfmixed.report.comparison import Comparison

_WIDTH = 80
# The table takes what it needs, which is 80 columns unless names are long.
_WIDEST = 200
_TITLE = "Mixed precision, measured"


def to_text(comparison: "Comparison") -> str:
    """Writes for a terminal, without colours.

    Args:
        comparison: what was measured.

    Returns:
        Lines of at most 80 columns.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0),
    )
    for index, heading in enumerate(headings(comparison)):
        table.add_column(
            "\n".join(heading.replace("_", " ").split()),
            justify="left" if index < 2 else "right",
            no_wrap=True,
        )
    for row in comparison.rows:
        table.add_row(
            *(
                f"{value}\n{detail}" if detail else "\n".join(value.split())
                for value, detail in cells(row)
            )
        )
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
    paragraphs = [
        *small_print(comparison),
        "",
        conclusion(comparison),
        *(f"- {reason}" for reason in comparison.verdict.reasons),
    ]
    lines = [*_wrap(subject(comparison)), *stream.getvalue().splitlines()]
    for paragraph in paragraphs:
        lines += _wrap(paragraph)
    return "\n".join(line.rstrip() for line in lines)


def _wrap(text: str) -> list[str]:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False
    ) or [""]


def to_markdown(comparison: "Comparison") -> str:
    """Writes a Markdown document.

    Args:
        comparison: what was measured.

    Returns:
        The document.
    """
    columns = headings(comparison)
    lines = [f"# {_TITLE}", "", _escape(subject(comparison)), ""]
    lines.append(_markdown_row(columns))
    lines.append("|" + " --- |" * 2 + " ---: |" * (len(columns) - 2))
    for row in comparison.rows:
        lines.append(
            _markdown_row(
                [
                    f"{value} ({detail})" if detail else value
                    for value, detail in cells(row)
                ]
            )
        )
    lines += ["", f"**{conclusion(comparison)}**", ""]
    lines += [f"- {_escape(text)}" for text in comparison.verdict.reasons]
    lines += ["", "## How it was measured", ""]
    lines += [f"- {_escape(text)}" for text in small_print(comparison)]
    lines += ["", "## Where it was measured", ""]
    lines += [
        f"- {name.replace('_', ' ')}: {_escape(str(value))}"
        for name, value in comparison.environment.items()
    ]
    return "\n".join(lines) + "\n"


def to_html(comparison: "Comparison") -> str:
    """Writes a page that loads nothing from elsewhere.

    Args:
        comparison: what was measured.

    Returns:
        The complete document.
    """
    heads = "".join(
        f"<th>{html.escape(text)}</th>" for text in headings(comparison)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td>{html.escape(value)}<br><small>{html.escape(detail)}"
            "</small></td>"
            for value, detail in cells(row)
        )
        + "</tr>\n"
        for row in comparison.rows
    )
    environment = [
        f"{name.replace('_', ' ')}: {value}"
        for name, value in comparison.environment.items()
    ]
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{_TITLE}</title>
<style>
body {{ font: 16px/1.5 sans-serif; margin: 2em auto; max-width: 60em }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ border-bottom: 1px solid #ccc; padding: .4em; text-align: right }}
th:first-child, td:first-child {{ text-align: left }}
</style>
<h1>{_TITLE}</h1>
<p>{html.escape(subject(comparison))}</p>
<table>
<tr>{heads}</tr>
{body}</table>
<h2>{html.escape(conclusion(comparison))}</h2>
{_html_list(comparison.verdict.reasons)}
<h2>How it was measured</h2>
{_html_list(small_print(comparison))}
<h2>Where it was measured</h2>
{_html_list(environment)}
</html>
"""


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(_escape(cell) for cell in cells) + " |"


def _escape(text: str) -> str:
    for character in "\\`*_|<>[]":
        text = text.replace(character, "\\" + character)
    return text.replace("\n", " ")


def _html_list(items: Any) -> str:
    return (
        "<ul>\n"
        + "".join(f"<li>{html.escape(item)}</li>\n" for item in items)
        + "</ul>"
    )
