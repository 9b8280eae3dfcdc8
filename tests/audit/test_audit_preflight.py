"""The preflight against closed forms, its findings against planted faults."""

import json

import keras
import numpy as np
import pytest
import support
import tensorflow as tf
from keras import layers

import tfmixed
from tfmixed import _keras
from tfmixed.audit import batches
from tfmixed.audit import formats
from tfmixed.audit import judge_layer
from tfmixed.audit import observe
from tfmixed.audit import rows as rows_lib
from tfmixed.audit import step
from tfmixed.audit import steps_shown
from tfmixed.audit import tally
from tfmixed.audit import window as window_lib
from tfmixed.audit.preflight import preflight
from tfmixed.audit.window import ScaleWindow


def linear(scale=1.0, policy="float32"):
    """Two linear layers with known numbers; one batch of five rows."""
    generator = np.random.default_rng(1)
    w1 = generator.normal(size=(3, 4)).astype("float32")
    w2 = generator.normal(size=(4, 2)).astype("float32")
    x = generator.normal(size=(5, 3)).astype("float32") * np.float32(scale)
    y = generator.normal(size=(5, 2)).astype("float32")
    model = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, use_bias=False, name="one", dtype=policy),
            layers.Dense(2, use_bias=False, name="two", dtype=policy),
        ]
    )
    model.set_weights([w1, w2])
    return model, x, y


def closed_form(model, x, y):
    """Values and gradients of `linear` in float64."""
    w1, w2 = (w.astype("float64") for w in model.get_weights())
    x, y = x.astype("float64"), y.astype("float64")
    hidden = x @ w1
    outputs = hidden @ w2
    slope = 2 * (outputs - y) / outputs.size
    return {
        "loss": np.mean((outputs - y) ** 2),
        "one": (hidden, slope @ w2.T, x.T @ (slope @ w2.T)),
        "two": (outputs, slope, hidden.T @ slope),
    }


def measured(model, x, y=None, **kwargs):
    kwargs.setdefault("verbose", False)
    return preflight(model, x, y, **kwargs)


def rows_by_name(found):
    return {row.name: row for row in found.rows}


def codes(found, layer=None):
    return [
        f.code
        for f in found.findings
        if layer is None or (f.layer or "").split("/")[-1] == layer
    ]


def test_rows_are_those_of_the_closed_form():
    model, x, y = linear()
    exact = closed_form(model, x, y)
    found = measured(model, x, y, loss="mse", batch_size=5, loss_scale=4.0)
    assert found.loss == pytest.approx(exact["loss"], rel=1e-5)
    assert found.examples == 5
    assert found.loss_scale == 4.0
    assert found.policy == "mixed_float16"
    rows = rows_by_name(found)
    assert list(rows) == ["one", "two"]
    for name in ("one", "two"):
        row = rows[name]
        output, by_output, by_weight = exact[name]
        assert row.class_name == "Dense"
        assert row.dtype == "float16"
        assert row.calls == 1
        sizes = (
            (row.largest_output, output),
            (row.largest_output_gradient, by_output),
            (row.largest_weight_gradient, by_weight),
        )
        for largest, expected in sizes:
            assert largest == pytest.approx(np.abs(expected).max(), rel=1e-5)
        assert row.output_shares["float16"] == formats.shares(output, "float16")
        for name, scale in (("float16", 4.0), ("bfloat16", 1.0)):
            assert row.weight_gradient_shares[name] == formats.shares(
                by_weight, name, scale
            )
            assert row.output_gradient_shares[name] == formats.shares(
                by_output, name, scale
            )
        assert 0 < row.gradient_error < 5e-3
        assert row.gradient_cosine == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_gradient_error_is_that_of_the_step_in_16_bits(policy):
    model, x, y = linear(policy=policy)
    exact = closed_form(model, x, y)
    found = measured(model, x, y, loss="mse", batch_size=5, loss_scale=8.0)
    variables = [v.value for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        outputs = tf.cast(model(x), "float32")
        # Powers of two change no digit of a gradient that is normal.
        loss = tf.reduce_mean((outputs - y) ** 2)
    gradients = tape.gradient(loss, variables)
    for name, gradient in zip(("one", "two"), gradients, strict=True):
        expected = exact[name][2]
        row = rows_by_name(found)[name]
        error = np.linalg.norm(gradient - expected) / np.linalg.norm(expected)
        assert row.gradient_error == pytest.approx(error, rel=1e-2)
    assert found.policy == "as it is"
    assert (found.window is None) == (policy == "mixed_bfloat16")


def test_several_batches_are_taken_together():
    model, x, y = linear()
    x = np.tile(x, (8, 1)) * np.repeat(np.arange(1, 9.0), 5)[:, None]
    y = np.tile(y, (8, 1))
    found = measured(
        model, x.astype("float32"), y, loss="mse", batches=3, batch_size=4
    )
    assert found.examples == 12
    rows = [batch.rows for batch in batches.take(x, y, batches=3, batch_size=4)]
    chosen = np.concatenate(rows)
    assert len(set(chosen)) == 12
    outputs = (x[chosen] @ model.get_weights()[0]).astype("float32")
    row = rows_by_name(found)["one"]
    assert row.largest_output == pytest.approx(np.abs(outputs).max(), rel=1e-5)
    assert row.output_shares["float16"].count == outputs.size
    # From the whole of the data, which may be sorted.
    assert chosen.max() >= 36
    assert all(r.max() >= 30 for r in rows)


def expected_highest(model, x, y):
    exact = closed_form(model, x, y)
    largest = max(np.abs(g).max() for n in ("one", "two") for g in exact[n][1:])
    return 2.0 ** np.floor(np.log2(65504 / largest))


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_window_ends_where_the_backward_pass_overflows(scale):
    model, x, y = linear(scale)
    found = measured(model, x, y, loss="mse", batch_size=5)
    highest = expected_highest(model, x, y)
    assert found.window.highest == highest
    assert found.window.lowest == 1.0
    assert found.window.exists
    assert highest in found.window
    assert 2 * highest not in found.window
    with tfmixed.precision("mixed_float16", model=model):
        batch = batches.whole(x, y)
        for factor, finite in ((1.0, True), (2.0, False)):
            run = step.observe(
                model, batch, loss="mse", loss_scale=factor * highest
            )
            assert (
                all(
                    tally.is_finite(g)
                    for g in [*(w.gradient for w in run.weights)]
                    + [g for r in run.records for g in r.gradients]
                )
                == finite
            )


class Growing(layers.Layer):
    """The identity, within which gradients are `factor` times as large."""

    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x):
        return (x * (1 / self.factor)) * self.factor


@pytest.mark.parametrize("factor", [4.0, 1024.0])
@pytest.mark.parametrize("loss_scale", [1.0, 2.0**8, 2.0**15])
def test_window_is_proved_by_a_run(factor, loss_scale):
    model, x, y = linear()
    model.add(Growing(factor))
    found = measured(
        model, x, y, loss="mse", batch_size=5, loss_scale=loss_scale
    )
    exact = closed_form(model, x, y)
    inside = factor * np.abs(exact["two"][1]).max()
    highest = min(
        expected_highest(model, x, y), 2.0 ** np.floor(np.log2(65504 / inside))
    )
    assert found.window.highest == highest
    assert rows_by_name(found)["one"].gradient_error < 1e-2


def test_window_follows_from_magnitudes_without_a_run():
    model, x, y = linear(policy="mixed_float16")
    names = observe.paths(model)
    batch = batches.whole(x, y)
    table = rows_lib.Table(names, 1.0)
    unscaled = step.observe(model, batch, loss="mse")
    table.add_judged(unscaled)
    with tfmixed.precision("float32", model=model):
        table.add_float32(step.observe(model, batch, loss="mse"))
    highest = expected_highest(model, x, y)
    assert window_lib.window_of(table, 1.0, unscaled).highest == highest
    # The scaled loss is a number of float32 as well.
    assert window_lib.window_of(table, 1e38, unscaled).highest == 2.0
    assert window_lib.window_of(table, 3e38, unscaled).highest == 1.0


def test_window_begins_where_gradients_live():
    model, x, y = linear()
    # Gradients of about 1e-10: at least 2^9 is needed for some to be normal.
    found = measured(
        model,
        x,
        y,
        loss=lambda y, p: 1e-10 * keras.ops.mean(p * y),
        batch_size=5,
    )
    outputs = x.astype("f8") @ model.get_weights()[0]
    slope = 1e-10 * y.astype("f8") / y.size
    gradients = np.concatenate(
        [
            np.ravel(g)
            for g in (
                slope,
                slope @ model.get_weights()[1].T,
                outputs.T @ slope,
                x.T @ (slope @ model.get_weights()[1].T),
            )
        ]
    )
    shares = [
        formats.shares(gradients, "float16", 2.0**k).flushed for k in range(25)
    ]
    expected = next(
        k for k, s in enumerate(shares) if s <= window_lib.FLUSH_TOLERANCE
    )
    assert 5 < expected < 24
    assert found.window.lowest == 2.0**expected
    assert "TM106" in codes(found)
    assert found.findings[-1].severity == "error"
    assert "gradients vanish" in found.findings[-1].message


def test_an_overflowing_layer_is_named_with_value_and_fix():
    model, x, y = linear(policy="mixed_float16")
    model.layers[0].kernel.assign(model.layers[0].kernel * 5e4)
    found = measured(model, x, y, loss="mse", batch_size=5, loss_scale=1.0)
    exact = closed_form(model, x, y)
    reached = np.abs(exact["one"][0]).max()
    first = found.findings[0]
    assert (first.code, first.severity) == ("TM101", "error")
    assert first.layer == rows_by_name(found)["one"].path
    assert first.message == (
        f"Layer '{first.layer}' (Dense, float16) reaches {reached:.6g} in its "
        "output; float16 ends at 65504."
    )
    assert first.fix == (
        "Keep it in float32: tfmixed.prepare(model, keep_float32=['one'])."
    )
    assert rows_by_name(found)["one"].gradient_error is None
    # What comes out of a 16-bit layer is not the fault of the next.
    assert not any("casts an input" in f.message for f in found.findings)


def test_bfloat16_does_not_overflow_there():
    model, x, y = linear(policy="mixed_bfloat16")
    model.layers[0].kernel.assign(model.layers[0].kernel * 5e4)
    found = measured(model, x, y, loss="mse", batch_size=5)
    assert codes(found) == []
    row = rows_by_name(found)["one"]
    assert row.output_shares["float16"].overflow > 0
    assert row.output_shares["bfloat16"].overflow == 0
    assert str(found).splitlines()[1] == "Nothing wrong was found."


def test_an_overflow_within_a_layer():
    class Energy(layers.Layer):
        def call(self, x):
            return keras.ops.sqrt(keras.ops.sum(x * x, -1, keepdims=True))

    inputs = keras.Input((6,))
    model = keras.Model(inputs, Energy(name="energy")(inputs))
    x = np.full((4, 6), 300.0, "float32")
    found = measured(model, x)
    assert codes(found, "energy") == ["TM101"]
    assert "overflows on the way" in found.findings[0].message
    assert "no more than 734.847" in found.findings[0].message


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_cast_that_overflows_is_blamed_on_the_data(policy):
    # Under a 16-bit policy the model itself casts, and no layer inside it.
    keras.config.set_dtype_policy(policy)
    model, x, y = linear(1e6, policy="mixed_float16")
    model.layers[0].kernel.assign(model.layers[0].kernel * 1e-6)
    found = measured(model, x, y, loss="mse", batch_size=5)
    casts = [f for f in found.findings if "casts an input" in f.message]
    assert len(casts) == 1
    assert casts[0].code == "TM101"
    assert f"{np.abs(x).max():.6g}" in casts[0].message
    assert "Scale the data in float32" in casts[0].fix


def test_a_float32_layer_before_a_16_bit_one_overflows_in_its_cast():
    inputs = keras.Input((6,))
    x = layers.Rescaling(1e5, name="large", dtype="float32")(inputs)
    x = layers.Rescaling(1e-5, name="small", dtype="mixed_float16")(x)
    model = keras.Model(inputs, x)
    found = measured(model, np.ones((4, 6), "float32"))
    assert codes(found, "small") == ["TM101"]
    assert codes(found, "large") == []


def test_activations_that_vanish():
    inputs = keras.Input((6,))
    x = layers.Rescaling(1e-8, name="tiny", dtype="mixed_float16")(inputs)
    x = layers.Rescaling(1e8, name="back", dtype="float32")(x)
    model = keras.Model(inputs, x)
    generator = np.random.default_rng(0)
    found = measured(model, generator.normal(size=(64, 6)).astype("float32"))
    assert codes(found, "tiny") == ["TM102"]
    finding = next(f for f in found.findings if f.code == "TM102")
    row = rows_by_name(found)["tiny"]
    flushed = row.output_shares["float16"].flushed
    assert f"{flushed:.0%} becomes zero" in finding.message


def test_tiny_values_beside_large_ones_are_no_fault():
    inputs = keras.Input((6,))
    model = keras.Model(
        inputs, layers.Softmax(name="softmax", dtype="mixed_float16")(inputs)
    )
    x = np.full((8, 6), -30.0, "float32")
    x[:, 0] = 0.0
    found = measured(model, x)
    row = rows_by_name(found)["softmax"]
    assert row.output_shares["float16"].flushed > 0.8
    assert "TM102" not in codes(found)


@pytest.mark.parametrize(
    ("loss_scale", "lost"), [(1.0, True), (2.0**15, False)]
)
def test_gradients_that_vanish_at_a_low_scale(loss_scale, lost):
    model, x, y = linear(policy="mixed_float16")
    found = measured(
        model,
        x,
        y,
        loss=lambda y, p: 1e-8 * keras.ops.mean(p * y),
        batch_size=5,
        loss_scale=loss_scale,
    )
    assert ("TM103" in codes(found, "one")) == lost
    assert ("TM106" in codes(found)) == lost
    if lost:
        finding = next(f for f in found.findings if f.code == "TM103")
        assert "at a loss scale of 1." in finding.message
        assert rows_by_name(found)["one"].gradient_error > 0.5
        assert "TM104" in codes(found)


def test_gradients_that_are_far_off():
    class Cancelling(layers.Layer):
        """x + 1000 - 1000 loses the digits of x in 16 bits."""

        def call(self, x):
            return (x + 1000.0) - 1000.0

    inputs = keras.Input((6,))
    x = layers.Dense(6, name="dense", dtype="mixed_bfloat16")(inputs)
    x = Cancelling(name="cancel", dtype="mixed_bfloat16")(x)
    model = keras.Model(inputs, x)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(16, 6)).astype("float32")
    found = measured(model, x, loss=None)
    assert codes(found) == ["TM104"]
    assert found.findings[0].layer == "dense"
    assert "keep_float32=['dense']" in found.findings[0].fix
    assert rows_by_name(found)["dense"].gradient_error > 0.5


def test_errors_in_most_layers_are_one_note():
    class Cancelling(layers.Layer):
        def call(self, x):
            return (x + 1000.0) - 1000.0

    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = x = keras.Input((6,))
    for index in range(4):
        x = layers.Dense(6, name=f"dense{index}")(x)
    model = keras.Model(inputs, Cancelling()(x))
    generator = np.random.default_rng(0)
    found = measured(model, generator.normal(size=(16, 6)).astype("float32"))
    assert codes(found) == ["TM104"]
    only = found.findings[0]
    assert only.severity == "note"
    assert only.layer == "dense3"
    assert "in 4 of 4 layers" in only.message
    assert "tfmixed.compare" in only.fix


def test_a_model_that_is_not_finite_in_float32():
    inputs = keras.Input((6,))
    x = layers.Lambda(lambda x: keras.ops.log(-1.0 - x * x), name="log")(inputs)
    model = keras.Model(inputs, layers.Dense(1)(x))
    found = measured(model, np.ones((4, 6), "float32"))
    assert codes(found)[0] == "TM105"
    assert found.findings[0].layer == "log"
    assert "puts out NaN or infinite values in float32" in str(found)
    json.loads(found.to_json(), parse_constant=pytest.fail)


def test_a_loss_and_a_gradient_that_are_not_finite_in_float32():
    model, x, y = linear()
    bad = measured(model, x, y, loss=lambda y, p: keras.ops.log(p * 0 - 1.0))
    assert "The loss is NaN or infinite in float32" in bad.findings[0].message
    bad = measured(model, x, y, loss=lambda y, p: keras.ops.sqrt(p * 0.0))
    assert bad.findings[0].code == "TM105"
    assert "gradient of" in bad.findings[0].message


@pytest.mark.parametrize("kind", ["arrays", "dataset", "py_dataset"])
def test_bad_data_is_named_and_left_out(kind):
    x = np.ones((64, 6), "float32")
    y = np.ones((64, 1), "float32")
    x[37, 4] = np.nan
    x[38, 0] = np.inf
    model = keras.Sequential(
        [keras.Input((6,), name="numbers"), layers.Dense(1)]
    )
    if kind == "arrays":
        found = measured(model, x, y, loss="mse")
    else:
        given = dataset(x, y, 16) if kind == "dataset" else Sequence(x, y, 16)
        found = measured(model, given, loss="mse", batches=4)
        assert found.examples == 48
    only = next(f for f in found.findings if f.code == "TM107")
    assert only.severity == "error"
    assert "input 'numbers' contains 2 NaN and infinite values" in only.message
    assert "row 37 position 4, row 38 position 0" in only.message
    assert found.loss is not None


def test_nothing_but_bad_data():
    model, x, y = linear()
    found = measured(model, x * np.nan, y, loss="mse")
    assert codes(found) == ["TM107"]
    assert found.rows == ()
    assert found.loss is None
    assert found.window is None
    assert found.examples == 0


def dataset(x, y, size):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(size)


class Sequence(keras.utils.PyDataset):
    def __init__(self, x, y, size):
        super().__init__()
        self._data = (x, y, size)

    def __len__(self):
        return len(self._data[0]) // self._data[2]

    def __getitem__(self, index):
        x, y, size = self._data
        part = slice(index * size, (index + 1) * size)
        return x[part], y[part]


@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "dataset"])
def test_inputs_of_each_kind(kind):
    names = ("one", "two")
    inputs = {name: keras.Input((3,), name=name) for name in names}
    x = layers.Concatenate()(list(inputs.values()))
    structure = inputs if kind in ("dict", "dataset") else list(inputs.values())
    model = keras.Model(structure, layers.Dense(1, name="head")(x))
    arrays = {name: np.ones((20, 3)) for name in names}
    y = np.ones((20, 1))
    if kind in ("list", "tuple"):
        arrays = (list if kind == "list" else tuple)(arrays.values())
    if kind == "dataset":
        arrays, y = dataset(arrays, y, 10), None
    found = measured(model, arrays, y, loss="mse")
    assert found.examples == 20
    assert rows_by_name(found)["head"].largest_output is not None


def test_a_dataset_brings_its_targets():
    model, x, y = linear()
    with pytest.raises(ValueError, match="y must be None"):
        measured(model, dataset(x, y, 5), y)
    with pytest.raises(ValueError, match="yields no batch"):
        measured(model, dataset(x, y, 5).take(0))
    with pytest.raises(TypeError, match=r"expects a Keras model\. Received"):
        measured("model", x)


def test_the_model_is_afterwards_what_it_was():
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((6,))
    x = layers.BatchNormalization()(layers.Dense(4)(inputs))
    x = layers.Dropout(0.5)(x)
    model = keras.Model(inputs, layers.Dense(1, dtype="float32")(x))
    model.compile("sgd", "mse", metrics=["mae"])
    x, y = support.arrays()
    model.fit(x, y, verbose=0)
    function = model.train_function
    before = support.numpy_of(model.variables + model.metrics_variables)
    policies = [_keras.layer_policy(f) for f in _keras.flatten_layers(model)]
    found = measured(model, x, y)
    assert found.loss_kind == step.COMPILED
    support.check_untouched(
        before, support.numpy_of(model.variables + model.metrics_variables)
    )
    after = [_keras.layer_policy(f) for f in _keras.flatten_layers(model)]
    assert all(a is b for a, b in zip(after, policies, strict=True))
    assert model.train_function is function


def test_fixed_batch_size_is_obeyed():
    model = keras.Sequential(
        [
            keras.Input((4, 6), batch_size=3),
            layers.LSTM(2, stateful=True, dropout=0.5),
        ]
    )
    x = np.ones((10, 4, 6), "float32")
    found = measured(model, x)
    assert found.examples == 6
    assert any("recurrent layers was off" in note for note in found.notes)
    assert any("stand-in" in note for note in found.notes)


def test_a_policy_can_be_chosen():
    model, x, y = linear()
    found = measured(model, x, y, loss="mse", policy="mixed_bfloat16")
    assert found.policy == "mixed_bfloat16"
    assert rows_by_name(found)["one"].dtype == "bfloat16"
    assert model.layers[0].compute_dtype == "float32"


def test_the_scale_of_a_dynamic_optimizer_is_a_note():
    keras.config.set_dtype_policy("mixed_float16")
    model, x, y = linear(10.0, policy="mixed_float16")
    model.compile(
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(), initial_scale=2.0**15
        ),
        "mse",
    )
    found = measured(model, x, y, batch_size=5)
    only = next(f for f in found.findings if f.code == "TM106")
    assert only.severity == "note"
    highest = expected_highest(model, x, y)
    assert f"initial={highest:g}" in only.fix
    model.compile(
        tfmixed.LossScaleOptimizer(keras.optimizers.SGD(), 2.0**15), "mse"
    )
    found = measured(model, x, y, batch_size=5)
    only = next(f for f in found.findings if f.code == "TM106")
    assert only.severity == "error"
    assert "gradients overflow" in only.message


def test_there_may_be_no_window_at_all():
    model, x, y = linear(3e3)
    found = measured(
        model,
        x,
        y * 0.0,
        loss=lambda y, p: keras.ops.mean(keras.ops.square(p)),
        batch_size=5,
    )
    assert found.window.highest is None
    assert not found.window.exists
    assert 1.0 not in found.window
    only = next(f for f in found.findings if f.code == "TM106")
    assert "gradients overflow at every scale" in only.message
    assert "Use bfloat16" in only.fix
    over = [f for f in found.findings if "without any loss scale" in f.message]
    assert over
    assert over[0].code == "TM101"


def test_large_tensors_are_sampled_and_this_is_said():
    model = keras.Sequential([keras.Input((tally.SAMPLE,)), layers.Dense(2)])
    x = np.zeros((4, tally.SAMPLE), "float32")
    x[0, 1] = 7e4
    found = measured(model, x)
    assert any("come from so many" in note for note in found.notes)


def test_tally():
    counted = tally.Tally({"float16": 2.0**10})
    assert counted.largest is None
    counted.add(tf.zeros((0,)))
    assert counted.largest is None
    counted.add(tf.constant([0.0, 1.0, -3.0, 1e-12]))
    counted.add(tf.constant([np.inf, 1e-30], tf.bfloat16))
    assert counted.largest == 3.0
    assert not counted.finite
    shares = counted.shares["float16"]
    assert (shares.count, shares.flushed) == (4, 0.5)
    # 1.0 is 2**0 at most; 3.0 is 2**2 at most, and not 2**1.
    assert tally.share_up_to(counted.exponents, 0) == 0.75
    assert tally.share_up_to(counted.exponents, 1) == 0.75
    assert tally.share_up_to(counted.exponents, 2) == 1.0
    assert tally.share_up_to(counted.exponents, -1) == 0.5
    assert tally.share_up_to(counted.exponents, -200) == 0.0
    assert counted.rounding_error("float16") < 1e-9
    tiny = tally.Tally()
    tiny.add(tf.constant([1e-9, 2e-9]))
    assert tiny.rounding_error("float16") == 1.0
    assert tally.Tally().rounding_error("float16") == 0.0


def test_samples_stand_for_all_values():
    values = np.zeros(5 * tally.SAMPLE, "float32")
    values[::2] = 1e-9
    values[1::2] = 1.0
    counted = tally.Tally()
    counted.add(tf.constant(values))
    assert counted.sampled
    shares = counted.shares["float16"]
    assert shares.flushed == pytest.approx(0.5, abs=0.01)
    assert shares.count == pytest.approx(values.size)


def test_windows_in_words():
    assert str(ScaleWindow(1.0, 2.0**14)) == "1 to 2^14"
    assert str(ScaleWindow(2.0**12, 64.0)) == (
        "none, because gradients overflow above 64 and vanish below 2^12"
    )
    assert str(ScaleWindow(None, 64.0)) == (
        "none, because gradients overflow above 64 and vanish at every scale"
    )
    assert window_lib.power(3000.0) == "3000"
    assert judge_layer.number(81234.0) == "81234"


def test_json_and_text():
    model, x, y = linear(policy="mixed_float16")
    found = measured(model, x, y, loss="mse", batch_size=5, loss_scale=1.0)
    read = json.loads(found.to_json())
    assert read["window"]["highest"] == found.window.highest
    assert read["rows"][0]["output_shares"]["float16"]["count"] == 20
    assert str(found).splitlines()[:3] == [
        "2 layers, 5 examples.",
        f"Safe loss scales: {found.window}.",
        "Nothing wrong was found.",
    ]


def test_progress_is_shown_on_a_terminal_only(capsys, monkeypatch):
    model, x, y = linear()
    preflight(model, x, y, loss="mse")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(
        steps_shown,
        "Console",
        lambda file: original(file=file, force_terminal=True),
    )
    preflight(model, x, y, loss="mse")
    assert "running in 16 bits" in capsys.readouterr().err


original = steps_shown.Console


def test_a_model_that_cannot_run_in_16_bits_here():
    class Float32Only(layers.Layer):
        def call(self, x):
            return tf.math.igamma(x, x)

    inputs = keras.Input((3,))
    x = layers.Dense(3, activation="sigmoid")(inputs)
    model = keras.Model(inputs, Float32Only()(x))
    found = measured(model, np.ones((4, 3), "float32"), policy="mixed_bfloat16")
    assert any("does not run here in 16 bits" in n for n in found.notes)
    assert found.rows[0].largest_output is not None
    assert found.rows[0].dtype is None


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_convolutional_network(policy):
    keras.config.set_dtype_policy(policy)
    model = keras.applications.MobileNetV2(
        weights=None,
        input_shape=(32, 32, 3),
        classes=10,
        classifier_activation=None,
    )
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, size=(32, 32, 32, 3)).astype("float32")
    y = generator.integers(0, 10, 32)
    found = measured(
        model,
        x,
        y,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    assert len(found.rows) > 100
    assert all(row.largest_output is not None for row in found.rows)
    assert "TM101" not in codes(found)
    if policy == "mixed_float16":
        assert found.window.exists


def test_batches_of_each_kind_of_array():
    pandas = pytest.importorskip("pandas")
    x = np.arange(12.0).reshape(6, 2)
    expected = x[[0, 2, 4]].astype("float32")
    for data in (x, tf.constant(x), pandas.DataFrame(x, index=list("abcdef"))):
        first, second = batches.take(data, x, batches=2, batch_size=3)
        assert first.x.dtype == tf.float32
        np.testing.assert_array_equal(first.x, expected)
        np.testing.assert_array_equal(first.y, expected)
        np.testing.assert_array_equal(second.rows, [1, 3, 5])
    column = pandas.Series(np.arange(6), index=list("fedcba"))
    (only,) = batches.take({"a": column}, None, batches=1, batch_size=6)
    np.testing.assert_array_equal(only.x["a"], np.arange(6))
    assert only.x["a"].dtype == tf.int64
    assert only.y is None
    assert len(only) == 6


def test_a_dataset_without_batches_and_one_without_length():
    empty = tf.data.Dataset.from_tensors(np.ones((2, 2))).take(0)
    with pytest.raises(ValueError, match="yields no batch"):
        batches.whole(empty)
    endless = tf.data.Dataset.from_tensors(np.ones((2, 2))).repeat()
    assert len(list(batches.take(endless, None, 3, 32))) == 3
