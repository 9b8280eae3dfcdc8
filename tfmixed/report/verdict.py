"""Judges a comparison: use mixed precision here or not, with the numbers."""

import math
from collections.abc import Sequence

from tfmixed.report.comparison import BASELINE
from tfmixed.report.comparison import Row
from tfmixed.report.comparison import Verdict
from tfmixed.report.intervals import Interval
from tfmixed.report.wording import number
from tfmixed.report.wording import ratio
from tfmixed.report.wording import span

# Below this a speed-up is not worth a second precision in a program.
WORTHWHILE = 1.1
# Half a point of accuracy, or half a percent of another metric.
MATERIAL = 0.005
# Steps shorter than this are mostly the fixed cost of starting operations.
_SHORT_STEP_MS = 10.0
_MEMORY_WORTH_NAMING = 0.9
# The loss scale starts high on purpose and backs off in its first steps.
_SHARE_OF_SKIPS = 0.05
_CALIBRATION_SKIPS = 20


def judge(
    rows: Sequence[Row],
    metric: str = "accuracy",
    higher_is_better: bool = True,
    validation_size: int | None = None,
    partial: bool = False,
) -> Verdict:
    """Judges the rows of a comparison.

    A policy is good to use when its speed-up is at least `WORTHWHILE` and its
    whole interval above 1, its metric is not worse than that of float32, and
    its training did not end on skipped steps. Among several the fastest wins.
    The metric is worse when two of three hold: its mean lies outside the
    interval of float32, the interval of the differences seed by seed lies
    below zero, the mean difference is at least `MATERIAL`.

    Args:
        rows: a row for each policy, float32 among them.
        metric: name of the metric.
        higher_is_better: direction of the metric.
        validation_size: examples behind the metric, where known.
        partial: whether the comparison was interrupted.

    Returns:
        The verdict. Without a policy that is good to use it names float32.

    Example:

    ```python
    judge(comparison.rows).reasons
    ```
    """
    baseline = next(row for row in rows if row.policy == BASELINE)
    others = [row for row in rows if row.policy != BASELINE]
    findings = {}
    for row in others:
        findings[row.policy] = (
            _speed(row, baseline),
            _quality(row, baseline, metric, higher_is_better, validation_size),
            _skips(row),
        )
    good = [row for row in others if all(ok for ok, _ in findings[row.policy])]
    best = max(good, key=lambda row: row.speedup or 0, default=None)
    reasons = []
    if partial:
        reasons.append(
            "The comparison was interrupted: what follows rests on a part of "
            "the measurements."
        )
    if not others:
        reasons.append("Only float32 was measured: there is nothing to judge.")
    # The reasons against the others stay, after those for the winner.
    for row in sorted(others, key=lambda row: row is not best):
        for ok, reason in findings[row.policy]:
            if reason and (row is best or best is None or not ok):
                reasons.append(reason)
        if row is best or best is None:
            reasons += _memory(row)
    return Verdict(
        best is not None, best.policy if best else BASELINE, tuple(reasons)
    )


def _speed(row: Row, baseline: Row) -> tuple[bool, str]:
    """Judges the step time; True when it is worth it."""
    if row.speedup is None or row.step_ms is None or baseline.step_ms is None:
        return False, f"The step time of {row.policy} was not measured."
    numbers = (
        f"a step takes {number(row.step_ms)} ms with {row.policy} and "
        f"{number(baseline.step_ms)} ms with float32: {ratio(row.speedup)} "
        "times as fast"
    )
    interval = row.speedup_interval
    if interval is None:
        return False, (
            f"One round cannot tell a speed-up from chance: {numbers}. "
            "Measure at least two rounds."
        )
    numbers += f" (95 % interval {span(interval, ratio)})"
    if interval[0] > 1 and row.speedup >= WORTHWHILE:
        return True, f"It is faster: {numbers}."
    if interval[1] < 1:
        verdict = "It is slower"
    elif interval[0] <= 1:
        verdict = "It is not faster beyond chance"
    else:
        verdict = f"It gains less than {WORTHWHILE:g} times"
    reason = f"{verdict}: {numbers}."
    if baseline.step_ms < _SHORT_STEP_MS:
        reason += (
            " The model is too small to gain: in a step this short most of "
            "the time goes into starting operations, not into arithmetic "
            "that 16 bits speed up."
        )
    return False, reason


def _quality(
    row: Row,
    baseline: Row,
    metric: str,
    higher_is_better: bool,
    validation_size: int | None,
) -> tuple[bool, str]:
    """Judges the metric; True when it is not worse than with float32."""
    if row.metric_mean is None or baseline.metric_mean is None:
        return False, f"The {metric} of {row.policy} was not measured."
    percent = row.accuracy_mean is not None
    here, there = (
        number(mean, percent)
        for mean in (row.metric_mean, baseline.metric_mean)
    )
    if not math.isfinite(row.metric_mean):
        return False, (
            f"Training with {row.policy} diverged: the {metric} is no "
            "finite number."
        )
    # One validation example more or less is the finest the metric can tell.
    finest = 1 / validation_size if percent and validation_size else 0.0
    if baseline.metric_interval is None or row.difference_mean is None:
        return False, (
            f"One seed cannot tell whether {metric} suffers: {here} with "
            f"{row.policy}, {there} with float32. Train with three or more."
        )
    signs = _signs_of_loss(
        row, baseline.metric_interval, higher_is_better, percent, finest
    )
    interval = span(baseline.metric_interval, number, percent)
    numbers = (
        f"{metric} {here} with {row.policy}, {there} with float32 (mean of "
        f"{len(row.scores)} seeds; 95 % interval of float32 {interval}"
    )
    if row.difference_interval is not None:
        low, high = (_signed(end, percent) for end in row.difference_interval)
        numbers += f"; difference seed by seed {low} to {high}"
    # A single sign is often chance: a few seeds may lie close together by
    # accident, which makes an interval too narrow.
    if signs >= 2:
        return False, f"The {metric} suffers: {numbers})."
    if signs == 1:
        return True, (
            f"The {metric} may be a little worse, not enough to decide: "
            f"{numbers}). More seeds would tell."
        )
    return True, f"The {metric} holds: {numbers})."


def _signs_of_loss(
    row: Row,
    interval: Interval,
    higher_is_better: bool,
    percent: bool,
    finest: float,
) -> int:
    """Counts which of three signs of a loss there are."""
    sign = 1 if higher_is_better else -1
    mean, difference = row.metric_mean or 0.0, row.difference_mean or 0.0
    edge = interval[0 if higher_is_better else 1]
    outside = sign * (mean - edge) < -finest
    paired = row.difference_interval
    behind = paired is not None and (
        max(sign * end for end in paired) < -finest
    )
    least = MATERIAL if percent else MATERIAL * abs(mean - difference)
    material = difference != 0 and sign * difference <= -least
    return [outside, behind, material].count(True)


def _signed(value: float, percent: bool) -> str:
    """Writes a difference; that of two shares is in points, not percent."""
    return f"{100 * value:+.1f}" if percent else f"{value:+.3g}"


def _skips(row: Row) -> tuple[bool, str]:
    """Judges skipped steps; True when they do not matter."""
    if row.ended_on_skip:
        return False, (
            f"{row.policy} skipped the last step of {len(row.ended_on_skip)} "
            f"of {len(row.scores)} trainings: the gradients were not finite "
            "to the end."
        )
    if not row.skipped_steps:
        return True, ""
    numbers = (
        f"{row.policy} skipped {row.skipped_steps} of {row.trained_steps} "
        "training steps"
    )
    per_run = row.skipped_steps / max(len(row.scores), 1)
    share = row.skipped_steps / max(row.trained_steps, 1)
    if share > _SHARE_OF_SKIPS and per_run > _CALIBRATION_SKIPS:
        return False, f"{numbers}: too many to be the loss scale settling."
    return True, f"{numbers}, while the loss scale settled."


def _memory(row: Row) -> list[str]:
    if row.memory_ratio is None or row.memory_ratio > _MEMORY_WORTH_NAMING:
        return []
    return [
        f"It needs {number(row.memory_ratio, percent=True)} of the memory of "
        "float32, which leaves room for a larger batch or model."
    ]
