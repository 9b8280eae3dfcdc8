import numpy as np
import pytest
import tensorflow as tf
from support import slow

from tfmixed import gradients as lib

ROWS = 400_000


def slices(values, rows=ROWS):
    values = tf.constant(values, tf.float32)
    indices = tf.range(len(values)) * 3
    return tf.IndexedSlices(
        values, indices, tf.constant([rows, values.shape[1]])
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("jit_compile", [False, *slow(True)])
def test_one_bad_number_is_found(dtype, bad, place, jit_compile):
    check = tf.function(lib.finite_and_norm, jit_compile=jit_compile)
    good = np.ones((5, 7))
    hurt = good.copy().reshape(-1)
    hurt[place] = bad
    hurt = tf.cast(hurt.reshape(5, 7), dtype)
    good = tf.cast(good, dtype)
    assert check([good, None, good])[0]
    assert not check([good, hurt, good])[0]
    assert not np.isfinite(check([good, hurt])[1])


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [("float32", 3.4e38), ("float16", 65504.0), ("bfloat16", 3.3e38)],
)
def test_large_but_finite_is_finite(dtype, largest):
    gradient = tf.cast([largest, -largest, 1.0], dtype)
    finite, norm = lib.finite_and_norm([gradient])
    assert finite
    if dtype == "float16":
        assert float(norm) == pytest.approx(np.sqrt(2.0) * largest)


def test_norm_is_the_global_norm():
    generator = np.random.default_rng(0)
    arrays = [generator.normal(size=s) for s in [(3, 4), (5,), ()]]
    _, norm = lib.finite_and_norm([tf.constant(a, "float32") for a in arrays])
    expected = np.sqrt(sum((a**2).sum() for a in arrays))
    assert float(norm) == pytest.approx(expected, rel=1e-6)


def test_no_gradients_are_finite():
    finite, norm = lib.finite_and_norm([None])
    assert finite
    assert norm == 0


def operations(function):
    """All operations of a graph and of the functions that it calls."""
    definition = function.graph.as_graph_def()
    nodes = list(definition.node)
    for library_function in definition.library.function:
        nodes.extend(library_function.node_def)
    return nodes


def test_sparse_gradients_stay_sparse():
    """No tensor of the size of the table appears in the graph."""
    gradient = slices([[1.0, 2.0], [3.0, 4.0]])

    @tf.function
    def run(values):
        given = tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        finite, norm = lib.finite_and_norm([given])
        divided = lib.divide([given], 2.0**10)[0]
        return finite, norm, divided

    finite, norm, divided = run(gradient.values)
    assert finite
    assert float(norm) == pytest.approx(np.sqrt(30.0))
    assert isinstance(divided, tf.IndexedSlices)
    np.testing.assert_array_equal(divided.values, gradient.values / 2.0**10)
    types = {
        node.op
        for node in operations(run.get_concrete_function(gradient.values))
    }
    assert not types & {"UnsortedSegmentSum", "ScatterNd", "TensorScatterAdd"}
    assert not lib.finite_and_norm([slices([[1.0, np.nan]])])[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_divide_is_exact_for_powers_of_two(dtype):
    values = np.array([1.0, -0.375, 96.0, 0.0])
    gradient = tf.cast(values, dtype)
    (divided,) = lib.divide([gradient], tf.constant(2.0**17))
    assert divided.dtype == dtype
    # 2^17 is infinite in float16, and the smallest float16 is 2^-24.
    expected = values / 2.0**17
    tolerance = 2.0**-25 if dtype == "float16" else 0
    np.testing.assert_allclose(
        divided.numpy().astype("float64"), expected, rtol=0, atol=tolerance
    )


def test_divide_leaves_none_and_values_that_are_no_gradients():
    class Overwritten:
        overwrite_with_gradient = True

    gradient = tf.constant([4.0])
    result = lib.divide(
        [None, gradient, gradient], 2.0, [None, Overwritten(), None]
    )
    assert result[0] is None
    assert result[1] is gradient
    np.testing.assert_array_equal(result[2], [2.0])


def test_is_reachable():
    eager = tf.constant(1.0)
    seen = {}

    @tf.function
    def make():
        seen["inside"] = tf.constant(2.0)
        seen["inside here"] = lib.is_reachable(seen["inside"])
        seen["eager here"] = lib.is_reachable(eager)
        tf.cond(
            seen["inside"] > 1,
            lambda: seen.update(deeper=lib.is_reachable(seen["inside"])),
            lambda: None,
        )

    @tf.function
    def other():
        seen["elsewhere"] = lib.is_reachable(seen["inside"])

    make()
    other()
    assert lib.is_reachable(eager)
    assert not lib.is_reachable(None)
    assert not lib.is_reachable(seen["inside"])
    assert seen["inside here"]
    assert seen["deeper"]
    assert not seen["eager here"]
    assert not seen["elsewhere"]
