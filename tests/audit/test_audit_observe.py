"""Watching a step: everything is seen, and nothing is changed."""

import random

import keras
import numpy as np
import pytest
import support
import tensorflow as tf
from keras import layers

import tfmixed
from tfmixed import _keras
from tfmixed._switch import ModelSwitch
from tfmixed.audit import batches
from tfmixed.audit import observe
from tfmixed.audit import step
from tfmixed.audit import tally

STOCK = keras.optimizers.LossScaleOptimizer


def data(rows=4, width=6, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(rows, width)).astype("float32")
    return x, x[:, :1] * 2.0


def observed(model, x, y=None, **kwargs):
    return step.observe(model, batches.whole(x, y), **kwargs)


def names(observation):
    return [record.name for record in observation.records]


class Doubling(layers.Layer):
    """A custom layer around another, with code of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(6, name="inner")

    def call(self, x):
        return self.inner(x) * 2.0


class Plain(keras.Model):
    """Subclassed, not built, its `call` without `training`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = Doubling(name="first")
        self.last = layers.Dense(1, name="last")

    def call(self, x):
        return self.last(keras.ops.relu(self.first(x)))


def functional(policy="float32"):
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input((6,), name="numbers")
    shared = layers.Dense(6, activation="relu", name="shared")
    x = shared(shared(inputs))
    x = x * 2.0
    x = layers.BatchNormalization(name="norm")(x)
    x = layers.Dropout(0.5, name="dropout", seed=3)(x)
    inner_inputs = keras.Input((6,))
    inner = keras.Model(
        inner_inputs, layers.Dense(6, name="deep")(inner_inputs), name="nested"
    )
    outputs = layers.Dense(1, dtype="float32", name="head")(inner(x))
    return keras.Model(inputs, outputs, name="whole")


def linear():
    """Two linear layers, and their gradients in closed form."""
    model = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, use_bias=False, name="one"),
            layers.Dense(2, use_bias=False, name="two"),
        ]
    )
    generator = np.random.default_rng(1)
    w1, w2 = generator.normal(size=(3, 4)), generator.normal(size=(4, 2))
    model.set_weights([w1, w2])
    x, y = generator.normal(size=(5, 3)), generator.normal(size=(5, 2))
    w1, w2, x, y = (a.astype("float32").astype("f8") for a in (w1, w2, x, y))
    hidden = x @ w1
    outputs = hidden @ w2
    slope = 2 * (outputs - y) / outputs.size
    exact = {
        "loss": np.mean((outputs - y) ** 2),
        "hidden": hidden,
        "outputs": outputs,
        "by_hidden": slope @ w2.T,
        "by_outputs": slope,
        "w1": x.T @ (slope @ w2.T),
        "w2": hidden.T @ slope,
    }
    return model, x.astype("float32"), y.astype("float32"), exact


def test_values_and_gradients_are_those_of_the_closed_form():
    model, x, y, exact = linear()
    found = observed(model, x, y, loss="mse", loss_scale=8.0)
    by_layer = {record.layer.name: record for record in found.records}

    def check(tensor, expected):
        np.testing.assert_allclose(tensor, expected, rtol=2e-5, atol=1e-6)

    check(found.loss, exact["loss"])
    check(by_layer["one"].inputs[0], x)
    check(by_layer["one"].outputs[0], exact["hidden"])
    check(by_layer["two"].outputs[0], exact["outputs"])
    check(by_layer["one"].gradients[0], 8 * exact["by_hidden"])
    check(by_layer["two"].gradients[0], 8 * exact["by_outputs"])
    assert [w.layer.name for w in found.weights] == ["one", "two"]
    check(found.weights[0].gradient, 8 * exact["w1"])
    check(found.weights[1].gradient, 8 * exact["w2"])
    assert found.loss_scale == 8.0
    assert found.loss_kind == step.GIVEN


def test_records_come_in_the_order_in_which_calls_end():
    x, y = data()
    found = observed(functional("mixed_float16"), x, y, loss="mse")
    assert names(found) == [
        "shared (call 1)",
        "shared (call 2)",
        "multiply",
        "norm",
        "dropout",
        "deep",
        "nested",
        "head",
        "whole",
    ]
    dtypes = {record.name: record.dtype for record in found.records}
    assert dtypes.pop("head") == dtypes.pop("whole") == "float32"
    assert set(dtypes.values()) == {"float16"}
    deep = next(r for r in found.records if r.path == "deep")
    assert deep.parent.path == "nested"
    assert deep.parent.parent.path == "whole"
    assert deep.parent.parent.parent is None
    assert [kind for kind, _ in found.events].count("in") == 9
    assert found.events[0][1].path == "whole"
    assert all(len(r.gradients) == len(r.outputs) for r in found.records)
    assert all(g is not None for r in found.records for g in r.gradients)


def test_subclassed_model_is_built_and_its_layers_are_seen():
    x, y = data()
    model = Plain(name="plain")
    found = observed(model, x, y, loss="mse")
    assert model.built
    assert [record.layer.name for record in found.records] == [
        "inner",
        "first",
        "last",
        "plain",
    ]
    inner, first = found.records[:2]
    np.testing.assert_allclose(
        first.outputs[0], 2.0 * inner.outputs[0], rtol=1e-6
    )
    assert [w.layer.name for w in found.weights] == 2 * ["inner"] + 2 * ["last"]


def test_inside_of_attention_and_recurrent_layers():
    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input((5, 6))
    attention = layers.MultiHeadAttention(2, 3, dropout=0.1, name="attention")
    x = attention(inputs, inputs)
    x = layers.TimeDistributed(layers.Dense(6, name="each"), name="steps")(x)
    x = layers.Bidirectional(layers.LSTM(2, return_sequences=True), name="two")(
        x
    )
    x = layers.RNN(layers.GRUCell(3, name="cell"), name="loop")(x)
    model = keras.Model(inputs, layers.Dense(1, name="head")(x))
    x = np.random.default_rng(0).normal(size=(2, 5, 6)).astype("float32")
    found = observed(model, x, x[:, 0, :1], loss="mse")
    seen = [record.layer.name for record in found.records]
    kinds = [type(record.layer) for record in found.records]
    assert {"query", "key", "value", "attention_output"} <= set(seen)
    assert kinds.index(layers.Softmax) < seen.index("attention")
    assert {"steps", "two", "loop", "head"} <= set(seen)
    assert not {"cell", "each", "lstm_cell"} & set(seen)
    assert {"forward_lstm", "backward_lstm"} <= set(seen)
    assert "model" not in seen
    by_owner = {w.layer.name for w in found.weights}
    assert {"loop", "steps", "forward_lstm", "query"} <= by_owner
    assert not {"cell", "each", "two", "attention"} & by_owner
    assert all(w.gradient is not None for w in found.weights)
    assert len(found.weights) == len(model.trainable_variables)


def test_two_layers_of_one_path_are_told_apart():
    def part(name):
        inputs = keras.Input((6,))
        return keras.Model(
            inputs, layers.Dense(6, name="dense")(inputs), name=name
        )

    inputs = keras.Input((6,))
    model = keras.Model(inputs, part("left")(part("right")(inputs)))
    x, _ = data()
    assert names(observed(model, x))[:3] == [
        "right/dense",
        "right",
        "left/dense",
    ]


def everything(model):
    """The attributes of all layers, by identity, and the values of state."""
    found = {}
    for layer in _keras.flatten_layers(model):
        for name, value in vars(layer).items():
            found[id(layer), name] = value
    return found


class Everything(keras.Model):
    """Each kind of state that a step moves."""

    def __init__(self):
        super().__init__()
        self.dense = layers.SpectralNormalization(layers.Dense(6))
        self.norm = layers.BatchNormalization()
        self.dropout = layers.Dropout(0.5)
        self.loop = layers.LSTM(3, stateful=True)
        self.head = layers.Dense(1, dtype="float32")
        self.seen = keras.metrics.Sum(name="seen")

    def call(self, x, training=False):
        x = self.dense(x, training=training)
        x = self.dropout(self.norm(x, training=training), training=training)
        self.add_loss(1e-3 * keras.ops.sum(x))
        self.seen.update_state(keras.ops.ones((2,)))
        return self.head(self.loop(x[:, None, :]))


def built_everything():
    model = Everything()
    model.compile(
        tfmixed.LossScaleOptimizer(keras.optimizers.SGD()),
        "mse",
        metrics=["mae"],
    )
    x, y = data()
    model.train_on_batch(x, y)
    return model, x, y


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_bit_for_bit_as_before(policy, fails):
    keras.config.set_dtype_policy(policy)
    if policy == "mixed_float16":
        model, x, y = functional(policy), *data()
        model.compile("sgd", "mse")
    else:
        model, x, y = built_everything()
    observed(model, x, y)
    values = support.numpy_of(model.variables + model.metrics_variables)
    attributes = everything(model)
    parts = _keras.flatten_layers(model)
    losses = [_keras.added_losses(part) for part in parts]
    optimizer = support.numpy_of(model.optimizer.variables)
    draws = random.getstate()
    if fails:
        with pytest.raises(ZeroDivisionError):
            observed(model, x, y, loss=lambda y_true, y_pred: 1 // 0)
    else:
        observed(model, x, y, loss_scale=4.0, same_draws=True)
    support.check_untouched(
        values, support.numpy_of(model.variables + model.metrics_variables)
    )
    support.check_untouched(
        optimizer, support.numpy_of(model.optimizer.variables)
    )
    after = everything(model)
    assert after.keys() == attributes.keys()
    assert [k for k, v in after.items() if v is not attributes[k]] == []
    assert not any("call" in vars(part) for part in parts)
    for part, before in zip(parts, losses, strict=True):
        added = _keras.added_losses(part)
        assert len(added) == len(before)
        assert all(a is b for a, b in zip(added, before, strict=True))
    assert random.getstate() == draws


def test_a_call_that_stood_on_the_instance_stays():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1, name="own")])
    layer = model.layers[0]

    def own(x, **kwargs):
        return type(layer).call(layer, x) + 1.0

    _keras.set_instance_call(layer, own)
    x, _ = data()
    found = observed(model, x)
    assert vars(layer)["call"] is own
    np.testing.assert_allclose(
        found.records[0].outputs[0], x @ layer.kernel.numpy() + 1.0, rtol=1e-5
    )


def test_an_error_inside_a_layer_leaves_no_trace():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    layer = model.layers[0]
    with pytest.raises(ValueError, match="incompatible"):
        observed(model, np.ones((4, 7), "float32"))
    assert "call" not in vars(layer)
    assert "call" not in vars(model)


def test_two_runs_draw_the_same():
    model, (x, y) = functional(), data(64)
    one = observed(model, x, y, loss="mse")
    two = observed(model, x, y, loss="mse")
    for first, second in zip(one.records, two.records, strict=True):
        np.testing.assert_array_equal(first.outputs[0], second.outputs[0])
    dropout = next(r for r in one.records if r.path == "dropout")
    zeros = np.mean(dropout.outputs[0].numpy() == 0)
    assert 0.3 < zeros < 0.9


def test_draws_without_a_seed_are_the_same_as_well():
    class Noise(layers.Layer):
        def call(self, x):
            return x + keras.random.normal(keras.ops.shape(x))

    model = keras.Sequential([keras.Input((6,)), Noise(), layers.Dense(1)])
    x, _ = data()
    _keras.set_global_seed(None)
    one, two = observed(model, x), observed(model, x)
    np.testing.assert_array_equal(
        one.records[0].outputs[0], two.records[0].outputs[0]
    )
    assert _keras.global_seed() is None
    keras.random.normal((1,))
    seed = _keras.global_seed().state.numpy()
    one, two = observed(model, x), observed(model, x)
    np.testing.assert_array_equal(
        one.records[0].outputs[0], two.records[0].outputs[0]
    )
    np.testing.assert_array_equal(_keras.global_seed().state.numpy(), seed)


@pytest.mark.parametrize("same_draws", [True, False])
def test_draws_can_be_the_same_in_each_precision(same_draws):
    inputs = keras.Input((64,))
    x = layers.Dropout(0.5, seed=1, name="dropout")(inputs)
    x = layers.GaussianNoise(1.0, seed=2, name="noise")(x)
    model = keras.Model(inputs, layers.Dense(1, name="head")(x))
    x = np.ones((16, 64), "float32")
    exact = observed(model, x, same_draws=same_draws)
    switch = ModelSwitch(model, keras.DTypePolicy("mixed_float16"))
    switch.on()
    rough = observed(model, x, same_draws=same_draws)
    switch.off()
    for one, other in zip(exact.records[:2], rough.records[:2], strict=True):
        assert one.dtype == "float32"
        assert other.dtype == "float16"
        same = np.allclose(
            one.outputs[0],
            tf.cast(other.outputs[0], "float32"),
            atol=1e-2,
        )
        assert same == same_draws
    assert model.get_layer("dropout").compute_dtype == "float32"


def test_recurrent_dropout_is_off_for_comparisons_only():
    model = keras.Sequential(
        [
            keras.Input((4, 6)),
            layers.LSTM(3, dropout=0.5, recurrent_dropout=0.25, name="loop"),
        ]
    )
    x = np.ones((8, 4, 6), "float32")
    with_it = observed(model, x).records[0].outputs[0].numpy()
    without = observed(model, x, same_draws=True).records[0].outputs[0].numpy()
    expected = model(x, training=False).numpy()
    np.testing.assert_allclose(without, expected, rtol=1e-5)
    assert np.abs(with_it - expected).max() > 1e-3
    cell = model.layers[0].cell
    assert (cell.dropout, cell.recurrent_dropout) == (0.5, 0.25)


def test_the_loss_is_that_of_the_model_in_float32():
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((6,))
    x = layers.Dense(
        4, kernel_regularizer="l2", activity_regularizer="l1", name="dense"
    )(inputs)
    model = keras.Model(inputs, layers.Dense(1, name="head")(x))
    model.compile("sgd", keras.losses.Huber(), loss_weights=[3.0])
    x, y = data()
    found = observed(model, x, y)
    assert found.loss_kind == step.COMPILED
    assert found.loss.dtype == tf.float32
    hidden = tf.cast(found.records[0].outputs[0], "float32").numpy()
    outputs = tf.cast(found.records[1].outputs[0], "float32").numpy()
    # Older versions of Keras do not divide it by the size of the batch.
    activity = layers.ActivityRegularization(l1=0.01)
    activity(hidden)
    expected = (
        3.0 * keras.losses.Huber()(y, outputs).numpy()
        + 0.01 * np.sum(model.layers[1].kernel.numpy() ** 2)
        + activity.losses[0].numpy()
    )
    np.testing.assert_allclose(found.loss, expected, rtol=1e-5)
    given = observed(model, x, y, loss="mse")
    np.testing.assert_allclose(
        given.loss - np.mean((outputs - y) ** 2),
        expected - 3.0 * keras.losses.Huber()(y, outputs).numpy(),
        rtol=1e-3,
    )


def test_activity_regularizers_do_not_overflow():
    inputs = keras.Input((6,))
    outputs = layers.Rescaling(
        3e4, dtype="mixed_float16", activity_regularizer="l2"
    )(inputs)
    model = keras.Model(inputs, outputs)
    x = np.ones((4, 6), "float32")
    found = observed(model, x, x * 3e4, loss="mse")
    activity = layers.ActivityRegularization(l2=0.01)
    activity(x * np.float32(3e4))
    np.testing.assert_allclose(found.loss, activity.losses[0], rtol=1e-3)


def test_without_a_loss_there_is_a_stand_in():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    x, _ = data()
    found = observed(model, x)
    assert found.loss_kind == step.STAND_IN
    np.testing.assert_allclose(
        found.loss, np.mean(model(x).numpy() ** 2), rtol=1e-6
    )


def test_several_outputs_with_a_loss_each_and_sample_weights():
    inputs = keras.Input((6,))
    model = keras.Model(
        inputs,
        {
            "number": layers.Dense(1, name="number")(inputs),
            "kind": layers.Dense(3, name="kind")(inputs),
        },
    )
    x, y = data()
    targets = {"number": y, "kind": np.array([0, 1, 2, 1])}
    loss = {
        "number": "mse",
        "kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }
    found = observed(model, x, targets, loss=loss)
    outputs = model(x)
    expected = keras.losses.MeanSquaredError()(y, outputs["number"])
    expected += loss["kind"](targets["kind"], outputs["kind"])
    np.testing.assert_allclose(found.loss, expected, rtol=1e-5)
    model.compile("sgd", loss)
    weights = {"number": np.arange(4.0), "kind": np.ones(4)}
    dataset = tf.data.Dataset.from_tensors((x, targets, weights))
    weighted = step.observe(model, batches.whole(dataset))
    expected = model.compute_loss(
        y=targets, y_pred=outputs, sample_weight=weights
    )
    np.testing.assert_allclose(weighted.loss, expected, rtol=1e-5)


def test_what_does_not_train_has_no_gradients():
    model = functional()
    model.get_layer("shared").trainable = False
    x, y = data()
    found = observed(model, x, y, loss="mse")
    by_name = {record.name: record for record in found.records}
    assert by_name["shared (call 1)"].gradients == [None]
    assert by_name["nested"].gradients[0] is not None
    assert "shared" not in [w.layer.name for w in found.weights]


def test_embedding_gradients_stay_sparse_and_count_once():
    model = keras.Sequential(
        [keras.Input((3,), dtype="int32"), layers.Embedding(50, 2)]
    )
    found = observed(model, np.array([[1, 1, 4]]))
    gradient = found.weights[0].gradient
    table = model.layers[0].embeddings.numpy()
    expected = np.zeros((50, 2))
    for row in (1, 1, 4):
        expected[row] += 2 * table[row] / 6
    np.testing.assert_allclose(
        tally.dense(gradient), expected.ravel(), rtol=1e-5
    )
    counted = tally.Tally()
    counted.add(gradient)
    assert counted.largest == pytest.approx(np.abs(expected).max(), rel=1e-5)


def test_remat_and_frozen_loops_do_not_confuse_the_records():
    with keras.RematScope(mode="full"):
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(4, name="again"), layers.Dense(1)]
        )
    x, y = data()
    found = observed(model, x, y, loss="mse")
    assert [r.layer.name for r in found.records].count("again") == 1
    assert all(w.gradient is not None for w in found.weights)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: None, 2.0**15),
        (lambda: keras.optimizers.SGD(), 1.0),
        (lambda: keras.optimizers.SGD(loss_scale_factor=8.0), 8.0),
        (lambda: STOCK(keras.optimizers.SGD(), 64.0), 64.0),
        (lambda: tfmixed.LossScaleOptimizer("sgd", 128), 128.0),
        (lambda: tfmixed.LossScaleOptimizer("sgd", "none"), 1.0),
    ],
)
@pytest.mark.parametrize("built", [False, True])
def test_the_loss_scale_is_that_of_the_next_step(make, expected, built):
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(1, dtype="mixed_float16")]
    )
    optimizer = make()
    if optimizer is not None:
        model.compile(optimizer, "mse", auto_scale_loss=False)
        if built:
            optimizer.build(model.trainable_variables)
    assert step.loss_scale_of(model) == expected


def test_a_float32_model_is_judged_at_the_scale_it_would_get():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    assert step.loss_scale_of(model) == 2.0**15


def test_private_parts_that_are_relied_on():
    model = functional()
    x, y = data()
    assert _keras.takes_training(model)
    assert not _keras.takes_training(Plain())
    loss = _keras.compile_loss(model, "mse")
    assert float(loss(y, y + 1.0)) == 1.0
    model.compile("sgd", "mse")
    outputs = model(x)
    np.testing.assert_allclose(
        _keras.compute_loss(model, x, y, outputs, None),
        np.mean((outputs.numpy() - y) ** 2),
        rtol=1e-5,
    )
    layer = layers.ActivityRegularization(l1=1.0)
    layer(tf.ones((2, 2)))
    (added,) = _keras.added_losses(layer)
    _keras.set_added_losses(layer, [added, added])
    assert len(layer.losses) == 2


def test_records_name_their_calls():
    record = observe.Record(None, "dense", 2, None, [], calls=3)
    assert record.name == "dense (call 2)"
    assert record.dtype is None
