"""The result of a comparison: rows, verdict and what it was measured on."""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from tfmixed.report import tables
from tfmixed.report.intervals import Interval
from tfmixed.report.intervals import mean_interval
from tfmixed.report.intervals import ratio_interval
from tfmixed.report.measure import Record

BASELINE = "float32"


@dataclass(frozen=True)
class Row:
    """What was measured under one policy.

    What is `None` was not measured. Intervals are at 95 %.

    Args:
        policy: name of the dtype policy.
        jit_compile: whether XLA compiled the step.
        accuracy_mean: mean validation accuracy over the seeds, 0 to 1; `None`
            when the model is judged by another metric.
        accuracy_interval: its t-interval, within 0 and 1.
        metric_mean: mean of the metric, whichever it is.
        metric_interval: its t-interval.
        scores: the metric for each seed.
        difference_mean: mean over the seeds of this row's metric less that of
            float32 with the same seed.
        difference_interval: its t-interval.
        step_ms: median time of a training step in milliseconds.
        step_ms_quartiles: the middle half of the steps lies in it.
        first_step_s: seconds of the first step, tracing and compilation
            included.
        speedup: step time of float32 divided by this one.
        speedup_interval: its bootstrap interval.
        peak_memory_mb: peak memory in MB of a million bytes.
        memory_ratio: peak memory divided by that of float32.
        memory_note: why there is no peak memory.
        skipped_steps: training steps that the loss scale left out, over all
            seeds.
        trained_steps: training steps over all seeds.
        ended_on_skip: seeds whose training ended on a skipped step.
    """

    policy: str
    jit_compile: bool | None = None
    accuracy_mean: float | None = None
    accuracy_interval: Interval | None = None
    metric_mean: float | None = None
    metric_interval: Interval | None = None
    scores: tuple[float, ...] = ()
    difference_mean: float | None = None
    difference_interval: Interval | None = None
    step_ms: float | None = None
    step_ms_quartiles: Interval | None = None
    first_step_s: float | None = None
    speedup: float | None = None
    speedup_interval: Interval | None = None
    peak_memory_mb: float | None = None
    memory_ratio: float | None = None
    memory_note: str | None = None
    skipped_steps: int | None = None
    trained_steps: int = 0
    ended_on_skip: tuple[int, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The conclusion.

    Args:
        use: whether mixed precision pays here.
        policy: the policy to train with.
        reasons: sentences with the numbers that decided.
    """

    use: bool
    policy: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Training under several policies, side by side.

    `str()` gives the table and the verdict.

    Args:
        rows: a row for each policy, float32 first.
        verdict: the conclusion.
        metric: name of the metric in the rows.
        higher_is_better: direction of the metric.
        validation_size: examples behind the metric, where known.
        environment: date, machine and versions.
        settings: model, data, seeds, epochs and so on.
        notes: what a reader must know beside the numbers.
        partial: whether the comparison was interrupted.

    `print` shows it; `tfmixed.compare` has an example.
    """

    rows: tuple[Row, ...]
    verdict: Verdict
    metric: str = "accuracy"
    higher_is_better: bool = True
    validation_size: int | None = None
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    partial: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Gives all of it as what JSON knows.

        Returns:
            Dictionaries, lists, numbers, strings, booleans and `None`.
        """
        return _plain(dataclasses.asdict(self))

    def to_json(self) -> str:
        """Words the comparison in JSON; what was not measured is `null`.

        Returns:
            An object with at least `rows` and `verdict`.
        """
        return json.dumps(
            self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False
        )

    def to_markdown(self) -> str:
        """Words the comparison in Markdown.

        Returns:
            A document with a table and the verdict.
        """
        return tables.to_markdown(self)

    def to_html(self) -> str:
        """Words the comparison as a page that needs nothing else.

        Returns:
            A complete HTML document.
        """
        return tables.to_html(self)

    def __str__(self) -> str:
        return tables.to_text(self)


def make_row(record: Record, baseline: Record, is_accuracy: bool) -> Row:
    """Computes a row from what has been measured.

    Args:
        record: the measurements of the policy.
        baseline: those of float32.
        is_accuracy: whether the metric is an accuracy.

    Returns:
        The row.
    """
    scores = tuple(record.scores.values())
    mean = sum(scores) / len(scores) if scores else None
    interval = mean_interval(scores)
    if is_accuracy and interval is not None:
        interval = (max(0.0, interval[0]), min(1.0, interval[1]))
    differences = [
        score - baseline.scores[seed]
        for seed, score in record.scores.items()
        if seed in baseline.scores and record is not baseline
    ]
    return Row(
        policy=record.policy,
        jit_compile=record.jit_compile,
        accuracy_mean=mean if is_accuracy else None,
        accuracy_interval=interval if is_accuracy else None,
        metric_mean=mean,
        metric_interval=interval,
        scores=scores,
        difference_mean=(
            sum(differences) / len(differences) if differences else None
        ),
        difference_interval=mean_interval(differences),
        first_step_s=record.first_step_s,
        **_speed(record, baseline),
        peak_memory_mb=record.memory_mb,
        memory_ratio=(
            record.memory_mb / baseline.memory_mb
            if record.memory_mb and baseline.memory_mb
            else None
        ),
        memory_note=record.memory_note,
        skipped_steps=record.skipped_steps,
        trained_steps=record.trained_steps,
        ended_on_skip=tuple(record.ended_on_skip),
    )


def _speed(record: Record, baseline: Record) -> dict[str, Any]:
    seconds, reference = record.step_seconds(), baseline.step_seconds()
    if seconds is None or reference is None:
        return {}
    speed: dict[str, Any] = {
        "step_ms": 1000 * seconds,
        "step_ms_quartiles": tuple(1000 * q for q in record.quartiles()),
        "speedup": reference / seconds,
    }
    if record is not baseline:
        speed["speedup_interval"] = ratio_interval(
            baseline.rounds, record.rounds
        )
    return speed


def _plain(value: Any) -> Any:
    """Replaces what JSON does not know: tuples, and numbers that are none."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
