import csv
import importlib.util
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import slow
from tensorflow.core.util import event_pb2

import tfmixed
from tfmixed.callbacks import LossScaleMonitor
from tfmixed.callbacks import reader
from tfmixed.callbacks.history import Summary
from tfmixed.callbacks.outputs import StepTable
from tfmixed.telemetry import Rows

# One step of eight is skipped, which `fit` itself tells of.
pytestmark = pytest.mark.filterwarnings("ignore:.*skipped because")
BAD = 5
WAYS = [
    {},
    {"steps_per_execution": 4},
    {"jit_compile": True},
    {"run_eagerly": True},
]


def model_of(model_class, policy="mixed_float16"):
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, activation="relu", dtype=policy)(inputs)
    return model_class(inputs, keras.layers.Dense(1, dtype="float32")(x))


def data(count=8, bad=(BAD,), size=4):
    generator = np.random.default_rng(3)
    x = generator.normal(size=(count * size, 6)).astype("float32")
    y = generator.normal(size=(count * size, 1)).astype("float32")
    for index in bad:
        x[index * size + 1, 2] = np.nan
    return x, y


def fitted(model, monitor, bad=(BAD,), epochs=1, **kwargs):
    x, y = data(bad=bad)
    return model.fit(
        x,
        y,
        batch_size=4,
        shuffle=False,
        epochs=epochs,
        verbose=0,
        callbacks=[monitor],
        **kwargs,
    )


def scaled(initial=256.0, growth_interval=3):
    scale = tfmixed.DynamicLossScale(
        initial=initial, growth_interval=growth_interval
    )
    return tfmixed.LossScaleOptimizer(keras.optimizers.SGD(0.1), scale)


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_a_row_for_each_step_with_the_scale_that_it_used(how):
    model = model_of(tfmixed.Model)
    model.compile(scaled(), "mse", **how)
    monitor = LossScaleMonitor()
    fitted(model, monitor)
    records = monitor.records
    np.testing.assert_array_equal(records["step"], np.arange(8))
    np.testing.assert_array_equal(
        records["finite"], [i != BAD for i in range(8)]
    )
    # Doubled after three finite steps, halved after the bad one.
    np.testing.assert_array_equal(
        records["loss_scale"], [256, 256, 256, 512, 512, 512, 256, 256]
    )
    assert {r.dtype.name for r in records.values()} == {
        "int64",
        "float32",
        "bool",
    }


def float32_norms(model, steps):
    """The norms in float32, of the same training without loss scaling."""
    x, y = data()
    optimizer = keras.optimizers.SGD(0.1)
    norms = []
    for index in range(steps):
        rows = slice(index * 4, index * 4 + 4)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x[rows]) - y[rows]) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        norms.append(float(tf.linalg.global_norm(gradients)))
        optimizer.apply(gradients, model.trainable_variables)
    return norms


@pytest.mark.parametrize("model_class", [tfmixed.Model, keras.Model])
@pytest.mark.parametrize("how", [{}, *slow(*WAYS[1:])], ids=str)
def test_the_norm_is_that_of_unscaled_gradients(model_class, how):
    policy = "float32"
    model, twin = model_of(model_class, policy), model_of(keras.Model, policy)
    twin.set_weights(model.get_weights())
    wrapper = keras.optimizers.LossScaleOptimizer
    if model_class is tfmixed.Model:
        wrapper = tfmixed.LossScaleOptimizer
    model.compile(wrapper(keras.optimizers.SGD(0.1)), "mse", **how)
    monitor = LossScaleMonitor()
    fitted(model, monitor)
    np.testing.assert_allclose(
        monitor.records["gradient_norm"][:BAD],
        float32_norms(twin, BAD),
        rtol=1e-5,
    )
    assert not np.isfinite(monitor.records["gradient_norm"][BAD])


@pytest.mark.parametrize("how", [{}, *slow(*WAYS[1:])], ids=str)
def test_a_stock_optimizer_with_scaling(how):
    model = model_of(keras.Model)
    inner = keras.optimizers.SGD(0.1)
    optimizer = keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=256.0, dynamic_growth_steps=3
    )
    model.compile(optimizer, "mse", **how)
    monitor = LossScaleMonitor()
    fitted(model, monitor)
    # Keras puts a scale up one step later than ours counts.
    assert monitor.records["finite"].tolist() == [i != BAD for i in range(8)]
    before, after = monitor.records["loss_scale"][[BAD, BAD + 1]]
    assert after == before / 2
    # Neither class was touched.
    assert "telemetry" not in vars(type(optimizer))
    assert "apply" not in vars(type(model_of(keras.Model)))


@pytest.mark.parametrize("factor", [None, 64.0])
def test_a_stock_optimizer_without_a_guard_says_that_it_applied(factor, capsys):
    model = model_of(keras.Model, "float32")
    optimizer = keras.optimizers.SGD(0.1, loss_scale_factor=factor)
    model.compile(optimizer, "mse", jit_compile=False)
    monitor = LossScaleMonitor()
    fitted(model, monitor)
    assert monitor.records["loss_scale"].tolist() == [factor or 1.0] * 8
    assert not monitor.records["finite"][BAD]
    assert "not finite" in monitor.summary()
    assert "does not skip" in monitor.summary()


def test_it_changes_nothing_of_the_training():
    weights = []
    for callbacks in ([], [LossScaleMonitor()]):
        keras.utils.set_random_seed(7)
        model = model_of(tfmixed.Model)
        model.compile(scaled(), "mse")
        x, y = data()
        model.fit(
            x, y, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks
        )
        weights.append(model.get_weights())
        names = [v.path for v in model.optimizer.variables]
        assert not any("telemetry" in name for name in names)
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("model_class", [tfmixed.Model, keras.Model])
def test_two_replicas_with_the_bad_batch_on_one(two_replicas, model_class):
    with two_replicas.scope():
        model = model_of(model_class)
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=256.0
        )
        if model_class is tfmixed.Model:
            optimizer = scaled()
        model.compile(optimizer, "mse", jit_compile=False)
    monitor = LossScaleMonitor()
    fitted(model, monitor)
    assert monitor.records["finite"].tolist() == [i != BAD for i in range(8)]


def test_two_replicas_add_up_their_squares(two_replicas):
    with two_replicas.scope():
        model = model_of(tfmixed.Model, "float32")
        model.compile(scaled(), "mse", jit_compile=False)
    weights = model.get_weights()
    monitor = LossScaleMonitor()
    x, y = data()
    fitted(model, monitor)
    twin = model_of(keras.Model, "float32")
    twin.set_weights(weights)
    squares = 0.0
    for rows in (slice(0, 2), slice(2, 4)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((twin(x[rows]) - y[rows]) ** 2) / 4
        gradients = tape.gradient(loss, twin.trainable_variables)
        squares += float(tf.linalg.global_norm(gradients)) ** 2
    assert monitor.records["gradient_norm"][0] == pytest.approx(
        squares**0.5, rel=1e-5
    )


def test_history_has_the_numbers_of_each_epoch():
    model = model_of(tfmixed.Model)
    model.compile(scaled(), "mse")
    monitor = LossScaleMonitor()
    history = fitted(model, monitor, epochs=2).history
    norms = monitor.records["gradient_norm"][:8]
    finite = monitor.records["finite"][:8]
    assert history["skipped_steps"] == [1, 1]
    assert (
        history["loss_scale"] == monitor.records["loss_scale"][[7, 15]].tolist()
    )
    assert history["gradient_norm"][0] == pytest.approx(
        norms[finite].mean(), rel=1e-6
    )


def test_the_progress_bar_shows_the_scale(capsys):
    model = model_of(tfmixed.Model)
    model.compile(scaled(), "mse")
    x, y = data()
    model.fit(x, y, batch_size=4, callbacks=[LossScaleMonitor()], verbose=1)
    shown = capsys.readouterr().out
    assert "loss_scale: " in shown
    assert "skipped_steps: " in shown
    assert "1 of 8 steps skipped" in shown


def test_every_other_step_and_all_that_were_skipped():
    model = model_of(tfmixed.Model)
    model.compile(scaled(), "mse")
    monitor = LossScaleMonitor(every=3)
    fitted(model, monitor)
    assert monitor.records["step"].tolist() == [0, 3, BAD, 6]


def test_more_steps_than_the_buffer_holds(monkeypatch):
    # However fast the steps are.
    monkeypatch.setattr(reader, "_SECONDS", 1e9)
    model = model_of(tfmixed.Model, "float32")
    model.compile(scaled(growth_interval=10), "mse", steps_per_execution=8)
    monitor = LossScaleMonitor()
    x, y = data(count=8, bad=())
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).repeat()
    model.fit(
        batches,
        shuffle=False,
        steps_per_epoch=2400,
        verbose=0,
        callbacks=[monitor],
    )
    np.testing.assert_array_equal(monitor.records["step"], np.arange(2400))
    growths = np.minimum(np.arange(2400) // 10, 16)
    np.testing.assert_array_equal(
        monitor.records["loss_scale"], 256.0 * 2.0**growths
    )


def test_a_second_fit_counts_on_and_traces_nothing_anew():
    traces = []

    class Traced(tfmixed.Model):
        def call(self, inputs):
            traces.append(1)
            return super().call(inputs)

    inputs = keras.Input((6,))
    model = Traced(inputs, keras.layers.Dense(1)(inputs))
    model.compile(scaled(), "mse")
    monitor = LossScaleMonitor()
    fitted(model, monitor)
    before = len(traces)
    fitted(model, monitor)
    fitted(model, other := LossScaleMonitor())
    assert len(traces) == before
    assert monitor.records["step"].tolist() == list(range(8, 16))
    assert other.records["step"].tolist() == list(range(16, 24))


def test_a_fit_without_the_monitor_first():
    model = model_of(tfmixed.Model)
    model.compile(scaled(), "mse")
    x, y = data()
    model.fit(x, y, batch_size=4, verbose=0)
    monitor = LossScaleMonitor()
    fitted(model, monitor)
    assert monitor.records["step"].tolist() == list(range(8, 16))
    assert monitor.records["finite"].sum() == 7


def test_the_csv_has_every_step(tmp_path):
    path = tmp_path / "logs" / "scale.csv"
    model = model_of(tfmixed.Model)
    model.compile(scaled(), "mse")
    monitor = LossScaleMonitor(csv=path)
    fitted(model, monitor)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [int(r["step"]) for r in rows] == list(range(8))
    assert [r["finite"] for r in rows] == [str(i != BAD) for i in range(8)]
    assert float(rows[3]["loss_scale"]) == 512.0
    # Another fit goes on where this one stopped; a new model starts anew.
    fitted(model, monitor)
    assert len(list(csv.DictReader(path.read_text().splitlines()))) == 16
    fresh = model_of(tfmixed.Model)
    fresh.compile(scaled(), "mse")
    fitted(fresh, LossScaleMonitor(csv=path))
    assert len(list(csv.DictReader(path.read_text().splitlines()))) == 8


def test_rows_of_steps_that_come_again_are_replaced(tmp_path):
    path = tmp_path / "table.csv"
    StepTable(path, ["step", "value"], 0).write([(0, 1.0), (1, 2.0), (2, 3.0)])
    with path.open("a") as file:
        file.write("3")  # cut off by a kill
    StepTable(path, ["step", "value"], 2).write([(2, 30.0)])
    rows = list(csv.reader(path.read_text().splitlines()))
    assert rows == [
        ["step", "value"],
        ["0", "1.0"],
        ["1", "2.0"],
        ["2", "30.0"],
    ]


def test_a_csv_of_something_else_is_not_lost(tmp_path):
    path = tmp_path / "other.csv"
    model = model_of(tfmixed.Model)
    model.compile(scaled(), "mse")
    fitted(model, LossScaleMonitor())
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="has the columns"):
        fitted(model, LossScaleMonitor(csv=path))
    assert path.read_text() == "a,b\n1,2\n"


def scalars_of(folder):
    found = {}
    for path in pathlib.Path(folder).glob("events*"):
        for record in tf.data.TFRecordDataset(str(path)):
            event = event_pb2.Event.FromString(record.numpy())
            for value in event.summary.value:
                number = tf.make_ndarray(value.tensor)
                found.setdefault(value.tag, {})[event.step] = number.item()
    return found


def test_tensorboard_has_every_step(tmp_path):
    model = model_of(tfmixed.Model)
    model.compile(scaled(), "mse")
    monitor = LossScaleMonitor(tmp_path)
    fitted(model, monitor)
    found = scalars_of(tmp_path)
    assert found["loss_scale/scale"] == dict(
        enumerate([256, 256, 256, 512, 512, 512, 256, 256])
    )
    skips = [0] * BAD + [1] * (8 - BAD)
    assert found["loss_scale/skipped_steps"] == dict(enumerate(skips))
    assert len(found["loss_scale/gradient_norm"]) == 7


def test_without_tensorboard_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"tfmixed\[tensorboard\]"):
        LossScaleMonitor(tmp_path)


def test_the_plot_marks_the_skips():
    import matplotlib

    matplotlib.use("Agg")
    model = model_of(tfmixed.Model)
    model.compile(scaled(), "mse")
    monitor = LossScaleMonitor()
    fitted(model, monitor)
    scale, skips = monitor.plot().get_lines()
    np.testing.assert_array_equal(
        scale.get_ydata(), monitor.records["loss_scale"]
    )
    assert skips.get_xdata().tolist() == [BAD]


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_every_must_be_a_count(every):
    with pytest.raises(ValueError, match="whole number of 1 or more"):
        LossScaleMonitor(every=every)


def test_no_optimizer_and_a_wrong_name():
    model = model_of(tfmixed.Model)
    model.compile(None, "mse")
    with pytest.raises(ValueError, match="compiled without an optimizer"):
        LossScaleMonitor()._reader.attach(model)
    with pytest.raises(ValueError, match="has no optimizer in an attribute"):
        LossScaleMonitor(optimizer="other")._reader.attach(model)


class Pair(tfmixed.Model):
    """Two optimizers, as in a GAN; the second one gets the NaN."""

    def __init__(self):
        super().__init__()
        self.one = keras.layers.Dense(1)
        self.two = keras.layers.Dense(1)
        self.first = tfmixed.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), tfmixed.FixedLossScale(2.0)
        )
        self.second = tfmixed.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), tfmixed.FixedLossScale(4.0)
        )

    def train_step(self, data):
        x, y = data
        for layer, optimizer, features in (
            (self.one, self.first, x[:, :2]),
            (self.two, self.second, x[:, 2:]),
        ):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((layer(features) - y) ** 2)
                scaled = optimizer.scale_loss(loss)
            variables = layer.trainable_variables
            optimizer.apply(tape.gradient(scaled, variables), variables)
        return {"loss": loss}


@pytest.mark.parametrize(("name", "bad"), [("first", 0), ("second", 1)])
def test_one_of_several_optimizers(name, bad):
    model = Pair()
    model.one.build((None, 2))
    model.two.build((None, 4))
    for layer, optimizer in (
        (model.one, model.first),
        (model.two, model.second),
    ):
        optimizer.build(layer.trainable_variables)
    model.compile(None)
    with pytest.raises(ValueError, match="has 2 of its own"):
        LossScaleMonitor()._reader.attach(model)
    monitor = LossScaleMonitor(optimizer=name)
    fitted(model, monitor)
    assert (~monitor.records["finite"]).sum() == bad


def test_the_optimizer_that_the_first_step_puts_in_its_place():
    class Late(tfmixed.Model):
        def build(self, shape):
            self.dense = keras.layers.Dense(1, dtype="mixed_float16")

        def call(self, inputs):
            return self.dense(inputs)

    model = Late()
    model.compile("sgd", "mse")
    monitor = LossScaleMonitor()
    fitted(model, monitor)
    assert len(monitor.records["step"]) == 8
    assert monitor.records["loss_scale"].max() == 2.0**15


def rows(finite, scales):
    steps = np.arange(len(finite))
    norms = np.ones(len(finite), "float32")
    return Rows(steps, np.float32(scales), np.array(finite), norms)


@pytest.mark.parametrize(
    ("finite", "scales", "text"),
    [
        ([True], [8], "None of 1 step skipped; loss scale 8."),
        (
            [False, True, True, True],
            [16, 8, 8, 8],
            "1 of 4 steps skipped, the first; loss scale 16 → 8.",
        ),
        (
            [True, True, True, False],
            [8, 8, 8, 8],
            "1 of 4 steps skipped; loss scale 8.",
        ),
        (
            [False] + [True] * 4689,
            [32768] + [65536] * 4689,
            "1 of 4,690 steps skipped, the first; loss scale 32768 → 65536.",
        ),
        ([True], [2.0**24], "None of 1 step skipped; loss scale 16777216."),
    ],
)
def test_the_summary_in_words(finite, scales, text):
    summary = Summary()
    half = len(finite) // 2
    summary.add(rows(finite[:half], scales[:half]))
    summary.add(rows(finite[half:], scales[half:]))
    assert str(summary) == text
