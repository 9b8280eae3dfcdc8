"""What stands in the tables and sentences of a report, whatever its format."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tfmixed.report.intervals import Interval
from tfmixed.report.wording import number
from tfmixed.report.wording import ratio

if TYPE_CHECKING:
    from tfmixed.report.comparison import Comparison
    from tfmixed.report.comparison import Row

NOT_MEASURED = "not measured"
NOT_MEASURABLE = "not measurable here"


def conclusion(comparison: "Comparison") -> str:
    """Words the verdict in a sentence.

    Args:
        comparison: what was measured.

    Returns:
        The sentence.
    """
    verdict = comparison.verdict
    partial = " (partial: interrupted)" if comparison.partial else ""
    if verdict.use:
        return f"Verdict{partial}: use {verdict.policy} here."
    return (
        f"Verdict{partial}: do not use mixed precision here, stay with "
        f"{verdict.policy}."
    )


def headings(comparison: "Comparison") -> list[str]:
    """Names the columns.

    Args:
        comparison: what was measured.

    Returns:
        A heading for each of `cells`.
    """
    return [
        "policy",
        "XLA",
        comparison.metric,
        "step, ms",
        "speed-up",
        "peak memory, MB",
        "memory ratio",
        "skipped steps",
    ]


def cells(row: "Row") -> list[tuple[str, str]]:
    """Writes a row as pairs of a value and a detail, which may be empty.

    Args:
        row: what was measured under a policy.

    Returns:
        A pair for each heading.
    """
    percent = row.accuracy_mean is not None
    missing = NOT_MEASURABLE if row.memory_note else NOT_MEASURED
    # float32 may be what is missing from a ratio.
    no_ratio = missing if row.peak_memory_mb is None else NOT_MEASURABLE
    skipped = row.skipped_steps
    return [
        (row.policy, ""),
        ({None: NOT_MEASURED, True: "yes", False: "no"}[row.jit_compile], ""),
        (
            _or(row.metric_mean, number, NOT_MEASURED, percent),
            _detail(row.metric_interval, number, percent),
        ),
        (
            _or(row.step_ms, number, NOT_MEASURED),
            _detail(row.step_ms_quartiles, number),
        ),
        (
            _or(row.speedup, ratio, NOT_MEASURED),
            _detail(row.speedup_interval, ratio),
        ),
        (_or(row.peak_memory_mb, number, missing), ""),
        (_or(row.memory_ratio, ratio, no_ratio), ""),
        (
            _or(skipped, str, NOT_MEASURED),
            "" if skipped is None else f"of {row.trained_steps}",
        ),
    ]


def _or(
    value: float | None,
    write: Callable[..., str],
    otherwise: str,
    *options: bool,
) -> str:
    return otherwise if value is None else write(value, *options)


def _detail(
    interval: Interval | None, write: Callable[..., str], *options: bool
) -> str:
    """Writes an interval as short as a cell needs it."""
    if interval is None:
        return ""
    low, high = (write(end, *options).removesuffix(" %") for end in interval)
    return f"{low}–{high}"


def subject(comparison: "Comparison") -> str:
    """Says what was compared.

    Args:
        comparison: what was measured.

    Returns:
        A line with model, data and settings.
    """
    settings = comparison.settings
    known = [
        f"{name.replace('_', ' ')} {settings[name]}"
        for name in ("model", "data", "batch_size", "epochs", "seeds")
        if settings.get(name) is not None
    ]
    return ", ".join(known)


def small_print(comparison: "Comparison") -> list[str]:
    """Says what the numbers mean and what is missing, and why.

    Args:
        comparison: what was measured.

    Returns:
        Sentences.
    """
    lines = [
        f"{comparison.metric}: validation data, mean over seeds and 95 % "
        "interval. Step: median and quartiles, policies in turns. Speed-up: "
        "95 % interval.",
    ]
    firsts = [
        f"{row.policy} {number(row.first_step_s)} s"
        for row in comparison.rows
        if row.first_step_s is not None
    ]
    if firsts:
        lines.append(
            "Left out of the step time: the first step, with tracing and "
            f"compilation: {', '.join(firsts)}."
        )
    method = comparison.settings.get("memory_method")
    if method and any(row.peak_memory_mb for row in comparison.rows):
        lines.append(f"Peak memory: {method}, in a fresh process.")
    reasons: dict[str, list[str]] = {}
    for row in comparison.rows:
        if row.memory_note:
            reasons.setdefault(row.memory_note, []).append(row.policy)
    for reason, policies in reasons.items():
        lines.append(
            f"Peak memory is not measurable here for {', '.join(policies)}: "
            f"{reason}."
        )
    return lines + list(comparison.notes)
