"""The 16-bit formats against `ml_dtypes` and NumPy, bit by bit."""

import ml_dtypes
import numpy as np
import pytest

from tfmixed.audit import formats

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
NAMES = sorted(TYPES)


def patterns(name):
    """All 65,536 patterns of the format, as float32; one NaN for all NaN."""
    numbers = np.arange(2**16, dtype=np.uint16).view(TYPES[name])
    with np.errstate(invalid="ignore"):
        numbers[np.isnan(numbers)] = np.nan
    return numbers.astype("float32")


def midpoints(name):
    """Exact middles between neighbours, and the float32 beside each.

    The neighbour of the largest number is where infinity would begin.
    """
    numbers = patterns(name)[: 2**15].astype("float64")
    numbers = numbers[np.isfinite(numbers)]
    step = numbers[-1] - numbers[-2]
    numbers = np.append(numbers, numbers[-1] + step)
    middle = ((numbers[:-1] + numbers[1:]) / 2).astype("float32")
    assert (middle == (numbers[:-1] + numbers[1:]) / 2).all()
    around = [
        middle,
        np.nextafter(middle, np.float32(0)),
        np.nextafter(middle, np.float32(np.inf)),
    ]
    positive = np.concatenate(around)
    return np.concatenate([positive, -positive])


def cast(values, name):
    with np.errstate(over="ignore"):
        return values.astype(TYPES[name]).astype("float64")


@pytest.mark.parametrize("name", NAMES)
def test_limits(name):
    limits = formats.get(name)
    info = ml_dtypes.finfo(TYPES[name])
    assert limits.largest == float(info.max)
    assert limits.smallest_normal == float(info.smallest_normal)
    assert limits.smallest_subnormal == float(info.smallest_subnormal)
    assert limits.precision == info.nmant + 1
    assert formats.get(np.dtype(TYPES[name])) is limits


def test_float16_overflows_from_65520():
    assert formats.get("float16").overflow_from == 65520.0
    assert formats.get("float16").flushed_up_to == 2.0**-25


def test_another_dtype_is_an_error():
    with pytest.raises(ValueError, match="No 16-bit format is called 'int8'"):
        formats.get("int8")


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_the_format_stay_as_they_are(name):
    numbers = patterns(name)
    np.testing.assert_array_equal(formats.rounded(numbers, name), numbers)


@pytest.mark.parametrize("name", NAMES)
def test_rounding_is_that_of_the_cast(name):
    values = midpoints(name)
    np.testing.assert_array_equal(
        formats.rounded(values, name), cast(values, name)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("made", [patterns, midpoints])
def test_each_number_is_counted_as_the_cast_treats_it(name, made):
    values = made(name)
    values = values[np.isfinite(values) & (values != 0)]
    after = np.abs(cast(values, name))
    limits = formats.get(name)
    expected = {
        "overflow": np.isinf(after),
        "subnormal": (after > 0) & (after < limits.smallest_normal),
        "flushed": after == 0,
    }
    found = formats.shares(values, name)
    assert found.count == values.size
    for kind, is_such in expected.items():
        assert getattr(found, kind) * values.size == pytest.approx(
            np.count_nonzero(is_such), abs=1e-6
        )
    # One number at a time, where the fate of the neighbours differs.
    order = np.argsort(np.abs(values))
    fates = np.select(list(expected.values()), [1, 2, 3])[order]
    edges = np.flatnonzero(np.diff(fates))
    assert edges.size >= (1 if made is patterns else 3)
    for edge in edges:
        for index in order[edge : edge + 2]:
            one = formats.shares(values[index], name)
            assert [getattr(one, kind) for kind in expected] == [
                float(is_such[index]) for is_such in expected.values()
            ]


def test_zeros_infinities_and_nan_do_not_count():
    values = [0.0, -0.0, np.inf, np.nan, 1.0, 1e-9, 1e-6, -7e4]
    found = formats.shares(values, "float16")
    assert found == formats.Shares(0.25, 0.25, 0.25, 4)
    assert formats.shares([0.0, np.nan], "float16") == formats.Shares()


def test_scale():
    assert formats.shares([1e-9], "float16").flushed == 1.0
    assert formats.shares([1e-9], "float16", scale=2.0**15).subnormal == 1.0
    assert formats.shares([3.0], "float16", scale=2.0**15).overflow == 1.0
    assert formats.shares([3.0], "bfloat16", scale=2.0**15).overflow == 0.0


def test_shares_of_two_sets():
    one = formats.shares([1e-9, 1.0], "float16")
    two = formats.shares([1.0] * 6, "float16")
    both = formats.shares([1e-9] + [1.0] * 7, "float16")
    assert one + two == both
    assert formats.Shares() + formats.Shares() == formats.Shares()


def test_rounding_error():
    assert formats.rounding_error([1.0, 0.5], "float16") == 0.0
    assert formats.rounding_error([1e-9, 2e-9], "float16") == 1.0
    assert formats.rounding_error([], "float16") == 0.0
    assert formats.rounding_error([7e4, 1.0], "float16") == 0.0
    values = np.random.default_rng(0).normal(size=1000)
    expected = np.linalg.norm(values.astype("float16") - values)
    assert formats.rounding_error(values, "float16") == pytest.approx(
        expected / np.linalg.norm(values)
    )
    small = cast(values * 2.0**-20, "float16") / 2.0**-20
    assert formats.rounding_error(
        values, "float16", scale=2.0**-20
    ) == pytest.approx(np.linalg.norm(small - values) / np.linalg.norm(values))
