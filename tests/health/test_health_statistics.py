"""The numbers of tensors, against NumPy in float64."""

import numpy as np
import pytest
import tensorflow as tf

from tfmixed.health import statistics
from tfmixed.health.columns import EXPONENTS
from tfmixed.health.columns import LOWEST_EXPONENT
from tfmixed.health.columns import SAMPLE
from tfmixed.health.columns import Column

SCALE = 4.0


def numbers(exact, rough, scale=SCALE):
    found = statistics.columns([(exact, rough)], [tf.constant(scale)])
    return found[0].numpy()


def expected(exact, rough, scale=SCALE):
    exact, rough = np.float64(exact).ravel(), np.float64(rough).ravel()
    good, rough_good = np.isfinite(exact), np.isfinite(rough)
    nonzero = good & (exact != 0)
    both = good & rough_good
    sizes = np.abs(exact[nonzero])
    return {
        Column.LARGEST: np.abs(exact[good]).max(initial=0),
        Column.LARGEST_ROUGH: np.abs(rough[rough_good]).max(initial=0),
        Column.SIZE: exact.size,
        Column.SMALLEST: sizes.min(initial=np.inf),
        Column.NONZERO: nonzero.sum(),
        Column.FLUSHED: (nonzero & (rough == 0)).sum(),
        Column.OVERFLOWED: (good & ~rough_good).sum(),
        Column.BAD: (~good).sum(),
        Column.SQUARES: (exact[good] ** 2).sum(),
        Column.ERRORS: ((rough[both] / scale - exact[both]) ** 2).sum(),
        Column.ALL_FINITE: float(rough_good.all()),
    }


def check(exact, rough):
    found = numbers(tf.constant(exact), tf.constant(rough))
    for column, value in expected(exact, rough).items():
        assert found[column] == pytest.approx(value, rel=1e-5), column
    sizes = np.abs(exact[np.isfinite(exact) & (exact != 0)]).astype("float64")
    for index, count in enumerate(found[EXPONENTS]):
        top = 2.0 ** (index + LOWEST_EXPONENT)
        inside = ((sizes > top / 2) & (sizes <= top)).sum()
        # What is beyond the ends counts at the ends.
        if 0 < index < len(found[EXPONENTS]) - 1:
            assert count == inside, index


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (40, 50, 2), (1,)])
def test_a_tensor(shape, dtype):
    generator = np.random.default_rng(0)
    powers = 2.0 ** generator.integers(-30, 14, shape)
    exact = (generator.normal(size=shape) * powers).astype("float32")
    with np.errstate(over="ignore"):
        check(exact, (exact * SCALE).astype(dtype))


@pytest.mark.parametrize(
    "values",
    [
        [0.0, 0.0],
        [np.nan, 1.0, -2.0],
        [np.inf, -np.inf, 0.5],
        [2.0**-60, 2.0**30, 1.0, -1.0, 0.5, 0.75],
        [],
    ],
    ids=str,
)
def test_zeros_and_what_is_not_finite(values):
    exact = np.float32(values)
    with np.errstate(over="ignore"):
        check(exact, (exact * SCALE).astype("float16"))


def test_overflow_and_complete_underflow():
    exact = np.float32([2.0**-40, 3 * 2.0**-41, 1e5])
    with np.errstate(over="ignore"):
        found = numbers(
            tf.constant(exact), tf.constant(exact.astype("float16"))
        )
    assert found[Column.FLUSHED] == 2
    assert found[Column.OVERFLOWED] == 1
    assert found[Column.ALL_FINITE] == 0


def test_a_large_tensor_is_sampled_but_for_its_largest():
    exact = np.full(10 * SAMPLE + 3, 0.25, "float32")
    exact[17] = 1e3
    rough = exact.astype("float16") * np.float16(SCALE)
    found = numbers(tf.constant(exact), tf.constant(rough))
    assert found[Column.LARGEST] == 1e3
    assert found[Column.NONZERO] == pytest.approx(exact.size, rel=1e-6)
    assert found[EXPONENTS].sum() == pytest.approx(exact.size, rel=1e-6)


def test_sparse_gradients_by_their_rows():
    exact = tf.IndexedSlices(tf.constant([[1.0], [3.0]]), [0, 0], [10, 1])
    rough = tf.IndexedSlices(tf.constant([[4.0], [0.0]]), [0, 0], [10, 1])
    found = numbers(exact, rough)
    assert found[Column.SIZE] == 2
    assert found[Column.FLUSHED] == 1
    assert found[Column.ERRORS] == 9


@pytest.mark.parametrize(
    ("rows", "count", "first"),
    [((), 0, np.inf), ((2,), 1, 2), ((3, 1), 2, 1)],
)
def test_bad_data(rows, count, first):
    data = np.ones((5, 2, 2), "float32")
    for row in rows:
        data[row, 0, 1] = np.nan
    found = [v.numpy() for v in statistics.bad_values(tf.constant(data))]
    assert found == [count, first]
