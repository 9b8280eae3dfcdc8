"""What stock Keras gets wrong in 16 bits, and a prepared model does not."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmixed

layers = keras.layers


def through(layer, *shapes, **call):
    """A model with the layer in the middle, and a float32 head."""
    inputs = [keras.Input(shape) for shape in shapes]
    x = layer(inputs if len(inputs) > 1 else inputs[0], **call)
    outputs = layers.Dense(1, name="head")(layers.Flatten()(x))
    return keras.Model(inputs, outputs)


def output_of(model, x):
    """What the layer before the Flatten gives."""
    middle = model.layers[-2].input
    outputs = keras.Model(model.inputs, middle)(x)
    return keras.ops.convert_to_numpy(outputs).astype("float64")


def check(model, x, tolerance=1e-2):
    for policy in ("mixed_float16", "mixed_bfloat16"):
        exact = output_of(model, x)
        rough = output_of(tfmixed.prepare(model, policy), x)
        scale = np.abs(exact).max()
        assert scale > 0
        assert np.abs(exact - rough).max() <= tolerance * scale


def constant(*shape, value):
    return [np.full((2, *shape), value, "float32")]


@pytest.mark.parametrize("value", [32.0, 300.0])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: layers.Attention()([x, x]),
        lambda x: layers.MultiHeadAttention(1, 64)(x, x),
        lambda x: layers.MultiHeadAttention(1, 64)(x, x, use_causal_mask=True),
        lambda x: layers.GroupQueryAttention(64, 2, 1)(x, x),
        lambda x: layers.AdditiveAttention()([x, x]),
    ],
)
def test_queries_are_scaled_before_the_product(make, value):
    inputs = keras.Input((8, 64))
    outputs = layers.Dense(1)(layers.Flatten()(make(inputs)))
    check(keras.Model(inputs, outputs), constant(8, 64, value=value))


@pytest.mark.parametrize("value", [1e-3, 300.0, 60000.0])
@pytest.mark.parametrize(
    "layer",
    [
        layers.UnitNormalization,
        layers.LayerNormalization,
        layers.RMSNormalization,
        lambda: layers.GroupNormalization(4),
        layers.BatchNormalization,
    ],
)
def test_norms_of_large_and_small_inputs(layer, value):
    ramp = np.linspace(0.5, 1, 64, dtype="float32") * value
    check(through(layer(), (64,)), [np.stack([ramp, ramp[::-1]])])


@pytest.mark.parametrize("value", [1e-3, 300.0, 3000.0])
def test_cosine_of_large_and_small_inputs(value):
    model = through(layers.Dot(1, normalize=True), (64,), (64,))
    check(model, constant(64, value=value) * 2)


@pytest.mark.parametrize("value", [300.0, 3000.0, 60000.0])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: layers.AveragePooling2D(16), (32, 32, 2)),
        (lambda: layers.AveragePooling1D(64), (128, 2)),
        (lambda: layers.AveragePooling3D(4), (8, 8, 8, 2)),
        (layers.GlobalAveragePooling2D, (32, 32, 2)),
        (lambda: keras.Sequential([layers.Masking(7.0), mean()]), (4096, 2)),
    ],
)
def test_means_over_many_values(layer, shape, value):
    check(through(layer(), shape), constant(*shape, value=value))


def mean():
    return layers.GlobalAveragePooling1D()


def adapted():
    layer = layers.Normalization()
    layer.adapt(np.random.default_rng(0).normal(5e3, 1e3, (500, 4)))
    return layer


@pytest.mark.parametrize(
    "layer",
    [
        adapted,
        lambda: layers.Normalization(mean=1e5, variance=1e10),
        lambda: layers.Rescaling(1 / 60000.0, offset=-1.0),
        lambda: keras.Sequential([layers.Rescaling(1e-3), layers.ReLU()]),
    ],
)
def test_preprocessing_of_raw_data(layer):
    x = np.linspace(1e3, 1e5, 8, dtype="float32").reshape(2, 4)
    check(through(layer(), (4,)), [x])


@pytest.mark.parametrize(
    "before",
    [
        lambda: layers.Reshape((2, 2)),
        lambda: layers.Flatten(),
        lambda: layers.Dropout(0.5),
        lambda: layers.Rescaling(1.0),
        lambda: keras.Sequential([layers.Permute((1,)), layers.Identity()]),
    ],
)
@pytest.mark.parametrize("last", ["embedding", "lookup"])
def test_ids_above_2048_come_through(before, last):
    ids = np.array([[2049, 2051, 4095, 257]], "float32")
    table = layers.Embedding(5000, 1, embeddings_initializer="zeros")
    if last == "lookup":
        table = layers.IntegerLookup(vocabulary=[2049, 2051, 4095, 257])
    inputs = keras.Input((4,))
    x = layers.Flatten()(table(before()(inputs)))
    model = keras.Model(inputs, layers.Dense(1)(layers.Rescaling(1.0)(x)))
    if last == "embedding":
        table.embeddings.assign(np.arange(5000.0)[:, None])
    check(model, [ids])


HEADS = [
    lambda x: layers.Dense(3, activation="softmax")(x),
    lambda x: layers.Softmax()(layers.Dense(3)(x)),
    lambda x: layers.Activation("softmax")(layers.Dense(3)(x)),
    lambda x: keras.ops.softmax(layers.Dense(3)(x)),
    lambda x: keras.Sequential([layers.Dense(3), layers.Softmax()])(x),
]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("head", HEADS)
def test_a_confident_wrong_answer_has_a_gradient(head, policy):
    inputs = keras.Input((3,))
    model = tfmixed.prepare(keras.Model(inputs, head(inputs)), policy)
    kernel, bias = model.trainable_variables
    kernel.assign(keras.ops.eye(3))
    bias.assign(keras.ops.zeros(3))
    x = tf.constant([[18.0, 0.0, 0.0]])
    with tf.GradientTape() as tape:
        # Not a loss of Keras, which looks for the logits behind a softmax.
        loss = -tf.math.log(model(x)[0, 1])
    gradient = keras.ops.convert_to_numpy(tape.gradient(loss, bias.value))
    # That of the cross-entropy: probabilities less the true answer.
    np.testing.assert_allclose(gradient, [1, -1, 0], atol=1e-3)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("activation", ["sigmoid", keras.activations.sigmoid])
def test_a_confident_wrong_sigmoid_has_a_gradient(activation, policy):
    inputs = keras.Input((1,))
    outputs = layers.Dense(1, activation=activation)(inputs)
    model = tfmixed.prepare(keras.Model(inputs, outputs), policy)
    model.layers[-1].kernel.assign([[1.0]])
    with tf.GradientTape() as tape:
        loss = -tf.math.log(1 - model(tf.constant([[9.0]]))[0, 0])
    bias = model.layers[-1].bias.value
    assert float(tape.gradient(loss, bias)[0]) == pytest.approx(1, abs=0.01)


class Penalty(layers.Layer):
    def call(self, x):
        self.add_loss(1e-6 * keras.ops.sum(keras.ops.square(x)))
        return x


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_losses_and_metrics_of_ones_own(policy):
    def own_metric(y_true, y_pred):
        return tf.reduce_mean(tf.square(y_true - y_pred))

    def own_loss(y_true, y_pred):
        return tf.reduce_mean(tf.abs(y_true - y_pred), axis=-1)

    inputs = keras.Input((64,))
    x = layers.Dense(512, activity_regularizer="l2")(inputs)
    x = Penalty()(x)
    x = layers.ActivityRegularization(l2=1e-6)(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile("sgd", own_loss, metrics=[own_metric])
    x, y = np.full((8, 64), 8.0, "float32"), np.ones((8, 1), "float32")
    exact = model.evaluate(x, y, verbose=0, return_dict=True)
    prepared = tfmixed.prepare(model, policy)
    rough = prepared.evaluate(x, y, verbose=0, return_dict=True)
    for name, value in exact.items():
        assert rough[name] == pytest.approx(value, rel=0.05)
    prepared.compile(
        tfmixed.LossScaleOptimizer(keras.optimizers.SGD(1e-6), 1.0),
        own_loss,
        metrics=[own_metric],
    )
    history = prepared.fit(x, y, verbose=0).history
    assert all(np.isfinite(values).all() for values in history.values())


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_penalties_outside_of_a_training_step(policy):
    inputs = keras.Input((8,))
    x = layers.Dense(512, activity_regularizer="l2")(inputs)
    x = layers.Conv1D(8, 3, activity_regularizer="l1")(x[..., None])
    model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(x)))
    x = np.random.default_rng(0).normal(0, 300, (4, 8)).astype("float32")
    prepared = tfmixed.prepare(model, policy)
    for one in (model, prepared):
        one(x)
    exact, rough = ([float(v) for v in m.losses] for m in (model, prepared))
    np.testing.assert_allclose(rough, exact, rtol=1e-2)
