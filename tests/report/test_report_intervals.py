"""Student's t and the bootstrap against published values and closed forms."""

import math

import pytest

from tfmixed.report.intervals import mean_interval
from tfmixed.report.intervals import ratio_interval
from tfmixed.report.intervals import t_quantile


@pytest.mark.parametrize(
    ("degrees", "expected"),
    # Table of the 97.5 % point, as in any textbook and scipy.stats.t.ppf.
    [
        (1, 12.7062047362),
        (2, 4.3026527297),
        (3, 3.1824463053),
        (4, 2.7764451052),
        (5, 2.5705818356),
        (9, 2.2621571628),
        (29, 2.0452296421),
        (30, 2.0422724563),
        (100, 1.9839715185),
        (1000, 1.9623390808),
    ],
)
def test_t_quantile_is_the_published_one(degrees, expected):
    assert t_quantile(0.975, degrees) == pytest.approx(expected, abs=1e-9)


def test_t_quantile_at_other_probabilities():
    # One degree of freedom is the Cauchy distribution, with tan in it.
    assert t_quantile(0.75, 1) == pytest.approx(1.0)
    assert t_quantile(0.9, 1) == pytest.approx(math.tan(math.pi * 0.4))
    # Two: 2 a / sqrt(1 - a * a) / sqrt(2), with a = 2 p - 1.
    assert t_quantile(0.9, 2) == pytest.approx(
        0.8 * math.sqrt(2 / (1 - 0.8**2))
    )


@pytest.mark.parametrize(
    ("probability", "degrees"), [(0.4, 3), (1.0, 3), (0.975, 0)]
)
def test_t_quantile_refuses_what_it_cannot_do(probability, degrees):
    with pytest.raises(ValueError, match="degree of freedom. Received"):
        t_quantile(probability, degrees)


def test_mean_interval_in_closed_form():
    low, high = mean_interval([1.0, 2.0, 3.0])
    half = 4.3026527297 / math.sqrt(3)
    assert (low, high) == pytest.approx((2 - half, 2 + half))


def test_one_value_has_no_interval():
    assert mean_interval([]) is None
    assert mean_interval([0.9]) is None
    assert mean_interval([0.9, math.nan, 0.8]) is None


def test_equal_values_have_an_interval_of_no_length():
    assert mean_interval([0.5, 0.5, 0.5]) == (0.5, 0.5)


def test_ratio_interval_is_exact_when_every_round_agrees():
    # The machine slows by ten in the second round, for both sides alike.
    fast = [[1.0, 1.0], [10.0, 10.0], [1.0, 1.0]]
    slow = [[1.5, 1.5], [15.0, 15.0], [1.5, 1.5]]
    assert ratio_interval(slow, fast) == pytest.approx((1.5, 1.5))


def test_ratio_interval_covers_the_rounds_and_not_more():
    top = [[2.0], [3.0], [4.0], [3.0], [2.5]]
    bottom = [[1.0]] * 5
    low, high = ratio_interval(top, bottom)
    assert 2.0 <= low < 3.0 < high <= 4.0
    assert ratio_interval(top, bottom) == (low, high)


def test_one_round_has_no_ratio_interval():
    assert ratio_interval([[1.0, 2.0]], [[1.0, 2.0]]) is None
