"""Intervals of small samples: Student's t for means, bootstrap for ratios."""

import math
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
_RESAMPLES = 2000

Interval = tuple[float, float]


def t_quantile(probability: float, degrees: int) -> float:
    """Computes a quantile of Student's t distribution.

    The distribution function has a finite closed form for whole degrees of
    freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4); it is inverted by
    bisection. This keeps SciPy out of the dependencies.

    Args:
        probability: between 0.5 and 1, both excluded.
        degrees: degrees of freedom, at least 1.

    Returns:
        The value below which the share `probability` lies.

    Raises:
        ValueError: an argument is out of its range.

    Example:

    ```python
    t_quantile(0.975, 2)    # 4.303
    ```
    """
    if not 0.5 < probability < 1 or degrees < 1:
        raise ValueError(
            "`t_quantile` expects a probability between 0.5 and 1 and at "
            f"least one degree of freedom. Received: {probability=}, "
            f"{degrees=}."
        )
    central = 2 * probability - 1
    low, high = 0.0, 1.0
    while _central_probability(high, degrees) < central:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        if _central_probability(middle, degrees) < central:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Computes the 95 % t-interval of a mean.

    Args:
        values: independent measurements.

    Returns:
        `(low, high)`, or `None` when there are fewer than two values, because
        one value says nothing about its own spread, or when one of them is
        not finite.
    """
    sample = np.asarray(values, dtype="float64")
    if len(sample) < 2 or not np.isfinite(sample).all():
        return None
    quantile = t_quantile((1 + CONFIDENCE) / 2, len(sample) - 1)
    half = quantile * sample.std(ddof=1) / math.sqrt(len(sample))
    return float(sample.mean() - half), float(sample.mean() + half)


def ratio_interval(
    numerator: Sequence[Sequence[float]],
    denominator: Sequence[Sequence[float]],
) -> Interval | None:
    """Computes the 95 % bootstrap interval of a ratio of medians.

    Whole rounds are drawn, and the same ones for both sides: steps of a
    round share the state of the machine, so they are not independent, and
    what slows a round slows both sides.

    Args:
        numerator: durations, a sequence for each round.
        denominator: durations of the other side in the same rounds.

    Returns:
        `(low, high)`, or `None` for fewer than two rounds.
    """
    rounds = min(len(numerator), len(denominator))
    if rounds < 2:
        return None
    top = np.asarray(numerator[:rounds], dtype="float64")
    bottom = np.asarray(denominator[:rounds], dtype="float64")
    # A fixed seed: the same measurements give the same report.
    drawn = np.random.default_rng(0).integers(rounds, size=(_RESAMPLES, rounds))
    medians = [
        np.median(side[drawn].reshape(_RESAMPLES, -1), axis=1)
        for side in (top, bottom)
    ]
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(medians[0] / medians[1], [tail, 100 - tail])
    return float(low), float(high)


def _central_probability(t: float, degrees: int) -> float:
    """Computes the probability that a t variable lies within `-t` and `t`."""
    theta = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(theta), math.sin(theta)
    odd = degrees % 2
    if degrees == 1:
        return 2 * theta / math.pi
    term = cosine if odd else 1.0
    total = term
    for k in range(2 + odd, degrees, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    if odd:
        return 2 / math.pi * (theta + sine * total)
    return sine * total
