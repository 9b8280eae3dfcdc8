"""Layer, group and RMS normalization in 16 bits, against Keras in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfmixed.fast import clusters
from tfmixed.layers import normalization
from tfmixed.layers.normalize import normalize
from tfmixed.layers.twins import stock_of

HALF = ["float16", "bfloat16"]
# The distance of neighbours, relative to the number.
STEP = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
SHAPE = (5, 3, 4, 8)
NEWER = tuple(map(int, keras.__version__.split(".")[:2])) > (3, 10)
WEIGHTS = [
    {"scale": scale, "center": center}
    for scale in (True, False)
    for center in (True, False)
]
CASES = [
    *(
        ("LayerNormalization", {"axis": axis, **weights})
        for axis in (-1, 1, (2, 3), (-2, -1), (1, 2, 3), (1, 3), (-1, 2))
        for weights in WEIGHTS[:: 3 if axis != -1 else 1]
    ),
    ("LayerNormalization", {"epsilon": 1e-6}),
    ("RMSNormalization", {}),
    *(
        # Keras 3.10 does not shape the scale for several axes.
        [("RMSNormalization", {"axis": (2, 3), "epsilon": 1e-3})]
        if NEWER
        else []
    ),
    *(
        ("GroupNormalization", {"groups": groups, **weights})
        for groups in (1, 2, 8, -1)
        for weights in WEIGHTS[:: 3 if groups != 2 else 1]
    ),
    ("GroupNormalization", {"groups": 2, "axis": 2}),
    ("GroupNormalization", {"groups": 4, "axis": 3}),
]

WAYS = ["eager", "graph", "dynamic", "compiled"]
# Each format in two ways and each way in one format; the rest for long runs.
USUAL = {"float16": ["eager", "compiled"], "bfloat16": ["graph", "dynamic"]}


def combinations():
    """Cases in each format and way; of each layer's first case all are run."""
    seen = set()
    for name, options in CASES:
        for dtype in HALF:
            for way in WAYS:
                is_run = name not in seen or way in USUAL[dtype]
                yield pytest.param(
                    name,
                    options,
                    dtype,
                    way,
                    marks=() if is_run else pytest.mark.long,
                    id=f"{name}-{options}-{dtype}-{way}",
                )
        seen.add(name)


def draw(shape, dtype="bfloat16", mean=1.0, spread=2.0, seed=0):
    """Normal numbers that `dtype` holds exactly, as float64."""
    x = np.random.default_rng(seed).normal(size=shape) * spread + mean
    return tf.cast(tf.cast(x, dtype), "float64").numpy()


def pair(name, dtype, shape, **options):
    """A twin, and a float64 layer of Keras with the same weights."""
    make = getattr(layers, name)
    twin = make(dtype=f"mixed_{dtype}", **options)
    twin.__class__ = getattr(normalization, name)
    stock = make(dtype="float64", **options)
    for layer in (twin, stock):
        layer.build(shape)
    for i, (one, other) in enumerate(
        zip(twin.weights, stock.weights, strict=True)
    ):
        assert one.dtype == "float32"
        value = np.random.default_rng(i).uniform(0.5, 2.0, size=one.shape)
        one.assign(value.astype("float32"))
        other.assign(value.astype("float32"))
    return twin, stock


def step_of(layer):
    def step(x, upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        variables = [v.value for v in layer.trainable_variables]
        return y, tape.gradient(y, [x, *variables], upstream)

    return step


def array(x):
    return tf.cast(x, "float64").numpy()


def assert_near(found, expected, error):
    """Within `error` of each number, and of the largest where they cancel."""
    found, expected = array(found), array(expected)
    assert np.isfinite(expected).all()
    largest = np.abs(expected).max(initial=1e-3)
    np.testing.assert_allclose(
        found, expected, rtol=error, atol=error * largest / 4
    )


def compare(twin, stock, dtype, x, run=None, given=None):
    """Compares outputs and all gradients of a call."""
    upstream = draw(x.shape, dtype, mean=0.0, spread=1.0, seed=9)
    y, (dx, *others) = (run or step_of(twin))(
        tf.cast(x, given or dtype), tf.cast(upstream, dtype)
    )
    expected, (dx_expected, *others_expected) = step_of(stock)(
        tf.constant(x), tf.constant(upstream)
    )
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert_near(y, expected, STEP[dtype])
    assert dx.dtype == (given or dtype)
    assert_near(dx, dx_expected, STEP[dtype])
    for one, other in zip(others, others_expected, strict=True):
        assert one.dtype == "float32"
        assert_near(one, other, 1e-3)


@pytest.mark.parametrize(
    ("name", "options", "dtype", "way"), list(combinations())
)
def test_it_is_keras(name, options, dtype, way):
    twin, stock = pair(name, dtype, SHAPE, **options)
    spec = tf.TensorSpec((None, *SHAPE[1:]), dtype)
    run = {
        "eager": step_of(twin),
        "graph": tf.function(step_of(twin), autograph=False),
        "dynamic": tf.function(step_of(twin), input_signature=(spec, spec)),
        "compiled": tf.function(step_of(twin), jit_compile=True),
    }[way]
    compare(twin, stock, dtype, draw(SHAPE, dtype), run)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    "name",
    ["LayerNormalization", "RMSNormalization", "GroupNormalization"],
)
class TestEach:
    def options(self, name):
        return {"groups": 2} if name.startswith("Group") else {}

    @pytest.mark.parametrize(
        "shape", [(4, 8), (2, 3, 8), (1, 8), (2, 2, 2, 2, 8)]
    )
    def test_ranks(self, name, dtype, shape):
        twin, stock = pair(name, dtype, shape, **self.options(name))
        run = tf.function(step_of(twin), autograph=False)
        compare(twin, stock, dtype, draw(shape, dtype), run)

    @pytest.mark.parametrize("mean", [300.0, 3000.0, 60000.0])
    def test_large_inputs(self, name, dtype, mean):
        twin, stock = pair(name, dtype, SHAPE, **self.options(name))
        x = draw(SHAPE, dtype, mean, mean / 50)
        run = tf.function(step_of(twin), autograph=False)
        compare(twin, stock, dtype, np.clip(x, -65504, 65504), run)

    @pytest.mark.parametrize("given", [*HALF, "float32", "float64"])
    def test_inputs_of_another_dtype_are_not_rounded(self, name, dtype, given):
        twin, stock = pair(name, dtype, SHAPE, **self.options(name))
        spread = 1e5 if given != "float16" else 1e3
        x = draw(SHAPE, given, 0.0, spread)
        for run in (step_of(twin), tf.function(step_of(twin))):
            compare(twin, stock, dtype, x, run, given=given)

    def test_an_empty_batch(self, name, dtype):
        twin, _ = pair(name, dtype, SHAPE, **self.options(name))
        x = tf.zeros((0, *SHAPE[1:]), dtype)
        run = tf.function(step_of(twin), autograph=False)
        y, (dx, *others) = run(x, x)
        assert y.shape == dx.shape == x.shape
        for gradient in others:
            np.testing.assert_array_equal(gradient, tf.zeros_like(gradient))

    def test_a_frozen_layer(self, name, dtype):
        twin, stock = pair(name, dtype, SHAPE, **self.options(name))
        twin.trainable = stock.trainable = False
        run = tf.function(step_of(twin), autograph=False)
        compare(twin, stock, dtype, draw(SHAPE, dtype), run)

    def test_a_second_derivative(self, name, dtype):
        twin, stock = pair(name, dtype, SHAPE, **self.options(name))

        def second(layer, x):
            weight = layer.trainable_variables[0].value
            with tf.GradientTape() as outer:
                outer.watch([x, weight])
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = tf.reduce_sum(tf.cast(layer(x), x.dtype) ** 3) * 0.1
                slope = tf.cast(inner.gradient(y, x), "float64")
                penalty = tf.reduce_sum(slope**2)
            variables = [v.value for v in layer.trainable_variables]
            return outer.gradient(penalty, [x, *variables])

        x = draw(SHAPE, dtype, 0.0, 1.0)
        run = tf.function(second, autograph=False)
        found = run(twin, tf.cast(x, dtype))
        expected = second(stock, tf.constant(x))
        for one, other in zip(found, expected, strict=True):
            if other is None:
                continue
            largest = np.abs(array(other)).max()
            np.testing.assert_allclose(
                array(one), array(other), atol=largest * 8 * STEP[dtype]
            )

    def test_two_replicas(self, name, dtype, two_replicas):
        with two_replicas.scope():
            twin, stock = pair(name, dtype, SHAPE, **self.options(name))
        x = draw(SHAPE, dtype)

        @tf.function
        def both(x, upstream):
            return two_replicas.run(step_of(twin), (x, upstream))

        upstream = draw(SHAPE, dtype, 0.0, 1.0, seed=9)
        y, gradients = both(tf.cast(x, dtype), tf.cast(upstream, dtype))
        expected, exact = step_of(stock)(tf.constant(x), tf.constant(upstream))
        for one, other, error in (
            (y, expected, STEP[dtype]),
            (gradients[0], exact[0], STEP[dtype]),
            (gradients[1], exact[1], 1e-3),
        ):
            for local in two_replicas.experimental_local_results(one):
                assert_near(local, other, error)


@pytest.mark.parametrize("policy", ["float32", "float64"])
@pytest.mark.parametrize(
    "name", ["LayerNormalization", "RMSNormalization", "GroupNormalization"]
)
def test_layers_of_other_dtypes_are_those_of_keras(name, policy):
    options = {"groups": 2} if name.startswith("Group") else {}
    one = getattr(layers, name)(dtype=policy, **options)
    other = getattr(layers, name)(dtype=policy, **options)
    other.__class__ = getattr(normalization, name)
    x = tf.cast(draw(SHAPE), policy)
    for layer in (one, other):
        layer.build(SHAPE)
    runs = [tf.function(step_of(layer)) for layer in (one, other)]
    for a, b in zip(*(tf.nest.flatten(run(x, x)) for run in runs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert stock_of(type(other)) is type(one)


@pytest.mark.filterwarnings("ignore:.*rms_scaling")
@pytest.mark.parametrize("dtype", HALF)
def test_scaling_by_the_deviation_alone(dtype):
    options = {"rms_scaling": True}
    twin, stock = pair("LayerNormalization", dtype, SHAPE, **options)
    run = tf.function(step_of(twin), autograph=False)
    compare(twin, stock, dtype, draw(SHAPE, dtype), run)


def kinds(function, *arguments):
    """The kinds of operation in a traced function."""
    graph = tf.function(function).get_concrete_function(*arguments).graph
    return {node.op for node in graph.as_graph_def().node}


def test_only_a_training_step_is_compiled():
    twin, _ = pair("LayerNormalization", "bfloat16", (4, 8))
    x = tf.cast(draw((4, 8)), "bfloat16")
    assert "PartitionedCall" in kinds(step_of(twin), x, x)
    assert "PartitionedCall" not in kinds(twin, x)


@pytest.mark.parametrize("centered", [True, False])
def test_the_function_against_a_closed_form(centered):
    x = draw((6, 4, 5), mean=3.0)
    gamma, beta = draw((4, 5), seed=1), draw((4, 5), seed=2)

    @tf.function
    def run(x, gamma, beta):
        with tf.GradientTape() as tape:
            tape.watch((x, gamma, beta))
            assert clusters.pays(x, gamma)
            y = normalize(
                x,
                gamma,
                beta,
                axes=(2,),
                epsilon=0.1,
                centered=centered,
            )
        return y, tape.gradient(y, (x, gamma, beta))

    y, (dx, for_gamma, for_beta) = run(
        *(tf.cast(v, "float32") for v in (x, gamma, beta))
    )
    mean = x.mean(2, keepdims=True) if centered else 0.0
    deviation = np.sqrt(((x - mean) ** 2).mean(2, keepdims=True) + 0.1)
    normal = (x - mean) / deviation
    np.testing.assert_allclose(y, gamma * normal + beta, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(for_gamma, normal.sum(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(for_beta, np.full((4, 5), 6.0), rtol=1e-6)
    inner = gamma - normal * (gamma * normal).mean(2, keepdims=True)
    inner = inner - (gamma.mean(1)[:, None] if centered else 0.0)
    np.testing.assert_allclose(dx, inner / deviation, rtol=1e-4, atol=1e-5)


def test_a_name_of_their_own():
    for name in ("LayerNormalization", "RMSNormalization"):
        found = keras.saving.get_registered_name(getattr(normalization, name))
        assert found == f"tfmixed>{name}"
