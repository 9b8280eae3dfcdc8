"""The results of the reference models: a file of them, and a table."""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from tfmixed.report.wording import number
from tfmixed.report.wording import ratio

BEGIN = "<!-- results: written by `python -m models` -->"
END = "<!-- end of the results -->"

_HEADINGS = (
    "model",
    "metric",
    "float32",
    "plan",
    "with the plan",
    "step, ms",
    "times as fast",
    "memory of a step, MB",
    "skipped steps",
    "within the interval",
)
_VERSIONS = ("python", "tensorflow", "keras", "numpy", "tfmixed")

Result = dict[str, Any]
Results = dict[str, Result]


def read_results(path: pathlib.Path) -> Results:
    """Reads the results that are kept.

    Args:
        path: the file; there need not be one.

    Returns:
        What `tfmixed.compare` found, by the name of the model.

    Raises:
        ValueError: the file holds something else.
    """
    if not path.exists():
        return {}
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        complete = all(
            len(result["rows"]) > 1 and result["settings"]
            for result in results.values()
        )
    except (ValueError, AttributeError, KeyError, TypeError):
        complete = False
    if not complete:
        raise ValueError(
            f"{path} does not hold results of `python -m models`. Restore it, "
            "or delete it to begin anew."
        )
    return dict(results)


def write_results(path: pathlib.Path, results: Results) -> None:
    """Writes all results; an interruption leaves the old file or the new.

    Args:
        path: the file.
        results: as `read_results` returns them.
    """
    text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False)
    _write(path, text + "\n")


def check_readme(path: pathlib.Path) -> None:
    """Finds out before the long work where the table goes.

    Args:
        path: the file.

    Raises:
        ValueError: there is no such file, or no place for a table in it.
    """
    _split(path)


def write_table(path: pathlib.Path, table: str) -> None:
    """Puts a table between the two marks; the rest stays to the byte.

    Args:
        path: the file.
        table: Markdown.

    Raises:
        ValueError: there is no such file, or no place for a table in it.
    """
    before, after = _split(path)
    _write(path, f"{before}{BEGIN}\n\n{table.strip()}\n\n{END}{after}")


def to_markdown(results: Results, names: Sequence[str]) -> str:
    """Writes the table, what it says in a sentence, and where it is from.

    Args:
        results: as `read_results` returns them.
        names: the models, in the order of the table.

    Returns:
        Markdown.

    Example:

    ```python
    print(to_markdown(read_results(path), models.names()))
    ```
    """
    known = {name: results[name] for name in names if name in results}
    if not known:
        return "Nothing was measured yet."
    lines = [
        _line(_HEADINGS),
        "|" + " --- |" * 2 + " ---: |" + " --- |" + " ---: |" * 5 + " --- |",
    ]
    lines += [_line(_cells(name, result)) for name, result in known.items()]
    lines += ["", f"**{_sentence(known)}**", ""]
    lines.append(
        "float32 and plan: validation data, mean over seeds and, in brackets, "
        "95 % interval; "
        f"{_seeds(known)}. Step: medians, taken in turns; in brackets the "
        "95 % interval of the ratio. Memory: peak of a step, each in a process "
        "of its own; small steps are not measurable. Skipped: over all seeds, "
        "with the plan. Within: to one validation example."
    )
    lines += ["", *_places(known)]
    return "\n".join(lines)


def within(result: Result) -> str:
    """Says whether the plan's metric lies within the interval of float32.

    Args:
        result: what `tfmixed.compare` found for a model.

    Returns:
        `"yes"`, `"better"`, `"worse"`, `"not finite"` or `"one seed"`.
    """
    baseline, row = result["rows"][:2]
    interval, mean = baseline["metric_interval"], row["metric_mean"]
    if mean is None:
        return "not finite"
    if interval is None:
        return "one seed"
    # One validation example more or less is the finest an accuracy can tell.
    is_share = row["accuracy_mean"] is not None and result["validation_size"]
    finest = 1 / result["validation_size"] if is_share else 0.0
    if interval[0] - finest <= mean <= interval[1] + finest:
        return "yes"
    is_higher = mean > interval[1]
    return "better" if is_higher == result["higher_is_better"] else "worse"


def _cells(name: str, result: Result) -> list[str]:
    baseline, row = result["rows"][:2]
    skipped = row["skipped_steps"]
    return [
        name,
        result["metric"].replace("_", " "),
        _metric(baseline),
        row["policy"],
        _metric(row),
        _pair(baseline["step_ms"], row["step_ms"]),
        _number(row["speedup"], row["speedup_interval"], ratio),
        _pair(baseline["peak_memory_mb"], row["peak_memory_mb"]),
        "" if skipped is None else f"{skipped} of {row['trained_steps']}",
        within(result),
    ]


def _metric(row: dict[str, Any]) -> str:
    percent = row["accuracy_mean"] is not None
    return _number(row["metric_mean"], row["metric_interval"], number, percent)


def _number(
    value: float | None, interval: Any, write: Any, *options: bool
) -> str:
    if value is None:
        return "not finite"
    if interval is None:
        return write(value, *options)
    ends = (write(end, *options).removesuffix(" %") for end in interval)
    return f"{write(value, *options)} ({'–'.join(ends)})"


def _pair(first: float | None, second: float | None) -> str:
    if first is None and second is None:
        return "not measurable"
    both = (
        "?" if value is None else number(value) for value in (first, second)
    )
    return " → ".join(both)


def _sentence(results: Results) -> str:
    """Says how many models the plan is right for."""
    found = {name: within(result) for name, result in results.items()}
    held = sum(verdict == "yes" for verdict in found.values())
    sentence = (
        "The metric with the plan lies within the 95 % interval of float32 "
        f"for {held} of {len(found)} models"
    )
    for verdict in ("better", "worse", "not finite", "one seed"):
        names = [name for name, this in found.items() if this == verdict]
        if names:
            sentence += f"; {verdict}: {', '.join(names)}"
    pays = [name for name in results if results[name]["verdict"]["use"]]
    return (
        f"{sentence}. `tfmixed compare` advises 16 bits for "
        f"{', '.join(pays) or 'none'}."
    )


def _seeds(results: Results) -> str:
    counts = sorted(
        {result["settings"]["seeds"] for result in results.values()}
    )
    return " or ".join(map(str, counts)) + (
        " seed" if counts == [1] else " seeds"
    )


def _places(results: Results) -> list[str]:
    """Says when and where it was measured, once for each place."""
    dates: dict[str, set[str]] = {}
    for result in results.values():
        environment = result["environment"]
        versions = ", ".join(
            f"{name} {environment[name]}" for name in _VERSIONS
        )
        place = f"{', '.join(environment['devices'])}; {versions}"
        dates.setdefault(place, set()).add(environment["date"][:10])
    return [
        f"Measured {' and '.join(sorted(days))} on {place}."
        for place, days in dates.items()
    ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _split(path: pathlib.Path) -> tuple[str, str]:
    """Returns what stands before and after the place of the table."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}. The table goes there, "
            f"between the lines {BEGIN!r} and {END!r}."
        ) from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(
            f"{path} has no place for the table. It goes between the lines "
            f"{BEGIN!r} and {END!r}: add both."
        )
    return before, after


def _write(path: pathlib.Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(text.encode())
    os.replace(temporary, path)
