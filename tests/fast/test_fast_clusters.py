"""Clusters: the same numbers, compiled only where a step repeats its shapes."""

import numpy as np
import pytest
import tensorflow as tf

from tfmixed.fast import clusters


@clusters.cluster
def softened(x, y):
    wide = tf.cast(x, tf.float32)
    return tf.cast(tf.exp(-wide * wide), x.dtype), wide + y


def x_and_y(rows=3):
    x = np.linspace(-2, 2, rows * 4, dtype="float32").reshape(rows, 4)
    return tf.cast(x, tf.bfloat16), tf.constant(x)


def expected(x, y):
    wide = tf.cast(x, tf.float64).numpy()
    return np.exp(-wide * wide), wide + y.numpy()


def check(results, x, y):
    for result, exact in zip(results, expected(x, y), strict=True):
        result = tf.cast(result, tf.float64).numpy()
        np.testing.assert_allclose(result, exact, rtol=2**-8)


def test_results_are_those_of_the_plain_function():
    x, y = x_and_y()
    check(softened(x, y), x, y)
    check(tf.function(softened)(x, y), x, y)
    check(tf.function(softened, jit_compile=True)(x, y), x, y)


def test_a_varying_batch_and_other_shapes():
    function = tf.function(
        softened,
        input_signature=[
            tf.TensorSpec((None, 4), tf.bfloat16),
            tf.TensorSpec((None, 4), tf.float32),
        ],
    )
    for rows in (1, 3, 8):
        x, y = x_and_y(rows)
        check(function(x, y), x, y)


def test_unknown_shapes_run_as_written():
    unknown = [
        tf.TensorSpec(None, tf.bfloat16),
        tf.TensorSpec((None, None), tf.float32),
    ]
    function = tf.function(softened, input_signature=unknown)
    assert not operations(function, "StatefulPartitionedCall")
    x, y = x_and_y()
    check(function(x, y), x, y)


def operations(function, kind):
    graph = function.get_concrete_function().graph
    calls = [
        op for op in graph.get_operations() if "PartitionedCall" in op.type
    ]
    return [op for op in calls if op.type == kind or kind is None]


def is_compiled(function, *arguments):
    """Whether a graph calls something that has to be compiled by XLA."""
    graph = tf.function(function).get_concrete_function(*arguments).graph
    return any(
        op.type.endswith("PartitionedCall")
        and definition(graph, op).attr["_XlaMustCompile"].b
        for op in graph.get_operations()
    )


def definition(graph, op):
    name = op.get_attr("f").name
    library = graph.as_graph_def().library.function
    return next(f for f in library if f.signature.name == name)


def test_the_cluster_is_compiled_in_a_graph():
    assert is_compiled(softened, *x_and_y())
    assert not is_compiled(softened.__wrapped__, *x_and_y())


def paying(x, watched=True):
    """What `pays` says inside a graph."""
    said = []

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            if watched:
                tape.watch(x)
            said.append(clusters.pays(x))
        said.append(clusters.pays(x))

    step.get_concrete_function(x)
    return said


def test_it_pays_under_a_tape_in_a_graph():
    x, _ = x_and_y()
    assert not clusters.pays(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        assert not clusters.pays(x)
    assert paying(tf.TensorSpec((None, 4), tf.bfloat16)) == [True, False]
    assert paying(x, watched=False) == [False, False]


@pytest.mark.parametrize("shape", [None, (2, None), (None, 3, None, 4)])
def test_it_does_not_pay_where_shapes_vary(shape):
    assert paying(tf.TensorSpec(shape, tf.bfloat16)) == [False, False]
