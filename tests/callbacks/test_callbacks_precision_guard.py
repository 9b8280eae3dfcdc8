import json
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import number
from support import numpy_of

import tfmixed
from tfmixed.callbacks import GradientHealth
from tfmixed.callbacks import LossScaleMonitor
from tfmixed.callbacks import PrecisionGuard
from tfmixed.callbacks import StandardMissedError
from tfmixed.callbacks import TrainingDivergedError
from tfmixed.callbacks import standards

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*skipped because"),
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]
SLOW, LONG = pytest.mark.slow, pytest.mark.long
WAYS = [
    {},
    pytest.param({"steps_per_execution": 8}, marks=LONG),
    pytest.param({"jit_compile": True}, marks=LONG),
    pytest.param({"steps_per_execution": 8, "jit_compile": True}, marks=SLOW),
]


@keras.saving.register_keras_serializable(package="tests")
class Ill(keras.layers.Layer):
    """(z - m)^2 around 100, multiplied out: right in float32 alone."""

    def call(self, inputs):
        z = inputs + 100.0
        m = keras.ops.mean(z, -1, keepdims=True)
        return z * z - 2.0 * m * z + m * m


def ill_model(policy, model_class=tfmixed.Model):
    inputs = keras.Input((8,))
    x = keras.layers.Dense(16, "tanh", dtype=policy, name="before")(inputs)
    x = Ill(dtype=policy, name="ill")(x)
    x = keras.layers.Dense(16, "relu", dtype=policy, name="after")(x)
    outputs = keras.layers.Dense(2, "softmax", dtype="float32", name="head")(x)
    return model_class(inputs, outputs)


def ill_data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(512, 8)).astype("float32")
    return x, (np.abs(x[:, 0]) > 0.7).astype("int32")


def ill_fit(policy, callbacks, how, model_class=tfmixed.Model, epochs=24):
    keras.utils.set_random_seed(1)
    x, y = ill_data()
    model = ill_model(policy, model_class)
    model.compile(
        keras.optimizers.Adam(0.02),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        **how,
    )
    history = model.fit(
        x,
        y,
        batch_size=32,
        epochs=epochs,
        verbose=0,
        validation_data=(x, y),
        callbacks=callbacks,
    )
    return model, history.history


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_an_ill_conditioned_layer_is_moved_and_accuracy_comes_back(how):
    _, exact = ill_fit("float32", [], how)
    _, rough = ill_fit("mixed_float16", [], how)
    guard = PrecisionGuard("val_accuracy", baseline=0.95)
    model, guarded = ill_fit("mixed_float16", [guard], how)
    # Without the guard it learns nothing.
    assert max(rough["val_accuracy"]) < 0.75
    assert max(exact["val_accuracy"]) > 0.985
    best = max(guarded["val_accuracy"])
    assert best >= max(exact["val_accuracy"]) - 0.005
    moved = [e for e in guard.events if e.action == "layer to float32"]
    assert [event.layer for event in moved] == ["ill"]
    assert "outputs are off by" in moved[0].reason
    dtypes = {layer.name: layer.compute_dtype for layer in model.layers[1:]}
    assert dtypes == {
        "before": "float16",
        "ill": "float32",
        "after": "float16",
        "head": "float32",
    }
    # All batches of all epochs were trained on, in one fit.
    iterations = number(model.optimizer.inner_optimizer.iterations)
    assert iterations + number(model.optimizer.skipped_steps) >= 24 * 16
    assert iterations == 24 * 16


def simple(policy="mixed_float16", optimizer=None, **how):
    """One weight for each of six inputs, SGD: everything in closed form."""
    inputs = keras.Input((6,))
    layer = keras.layers.Dense(
        1, use_bias=False, kernel_initializer="zeros", dtype=policy, name="one"
    )
    model = tfmixed.Model(inputs, layer(inputs))
    if optimizer is None:
        scale = tfmixed.DynamicLossScale(initial=64.0)
        sgd = keras.optimizers.SGD(0.01)
        optimizer = tfmixed.LossScaleOptimizer(sgd, scale)
    model.compile(optimizer, "mse", **how)
    return model


def data(count=6, size=4):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(count * size, 6)).astype("float32")
    return x, x[:, :1] + x[:, 1:2]


def fit(model, x, y, callbacks, **kwargs):
    kwargs = {"batch_size": 4, "verbose": 0, "shuffle": False, **kwargs}
    return model.fit(x, y, callbacks=callbacks, **kwargs).history


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_nan_in_one_sample_is_one_skip_and_a_finite_loss(how):
    x, y = data()
    x[4 * 3 + 2, 1] = np.nan
    guard, monitor = PrecisionGuard(), LossScaleMonitor()
    model = simple(**how)
    history = fit(model, x, y, [monitor, guard])
    rest = np.r_[0:12, 16:24]
    twin = simple(**how)
    expected = fit(twin, x[rest], y[rest], [])
    assert history["loss"][0] == pytest.approx(expected["loss"][0], rel=1e-6)
    np.testing.assert_array_equal(model.get_weights()[0], twin.get_weights()[0])
    assert (
        monitor.records["finite"].tolist() == [True] * 3 + [False] + [True] * 2
    )
    (event,) = guard.events
    assert (event.epoch, event.batch, event.action) == (0, 3, "none")
    assert "1 value is NaN or infinite" in event.reason
    assert "row 2" in event.reason


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_a_batch_that_overflows_is_trained_on_in_the_end(how):
    x, y = data()
    y[4 * 2] = 3e4
    guard = PrecisionGuard(retries=0)
    model = simple(**how)
    fit(model, x, y, [guard])
    assert number(model.optimizer.inner_optimizer.iterations) == 6
    assert number(model.optimizer.skipped_steps) == 1
    (event,) = guard.events
    assert event.batch == 2
    assert event.action in ("lower scale", "retry")
    assert "gradients" in event.reason
    assert "overflow at loss scale 64" in event.reason
    if "steps_per_execution" in how:
        # The others of that execution came first.
        return
    twin = simple("float32")
    fit(twin, x, y, [])
    np.testing.assert_allclose(
        model.get_weights()[0], twin.get_weights()[0], rtol=2e-2
    )


def test_a_retry_is_enough_where_the_scale_has_fallen():
    x, y = data()
    # 2 * 64 * 520 is infinite in float16, half of it is not.
    x[:] = 1.0
    y[4 * 2 : 4 * 3] = 1000.0
    guard = PrecisionGuard(retries=3)
    model = simple()
    fit(model, x, y, [guard])
    (event,) = guard.events
    assert (event.action, event.batch) == ("retry", 2)
    assert event.value == number(model.optimizer.dynamic_scale)
    assert number(model.optimizer.inner_optimizer.iterations) == 6


def test_a_fixed_scale_that_is_too_high_is_lowered():
    x, y = data()
    sgd = keras.optimizers.SGD(0.01)
    scale = tfmixed.FixedLossScale(2.0**22)
    model = simple(optimizer=tfmixed.LossScaleOptimizer(sgd, scale))
    guard = PrecisionGuard()
    fit(model, x, y, [guard])
    (event,) = [e for e in guard.events if e.action == "lower scale"]
    assert event.batch == 0
    assert event.value < 2.0**22
    assert number(model.optimizer.dynamic_scale) == event.value
    assert number(model.optimizer.inner_optimizer.iterations) == 6


def overflowing(policy="mixed_float16"):
    """A layer whose output is 1e5 and more: beyond float16."""
    inputs = keras.Input((6,))
    x = keras.layers.Dense(4, dtype=policy, name="small")(inputs)
    x = keras.layers.Rescaling(1e6, dtype=policy, name="big")(x)
    x = keras.layers.Rescaling(1e-6, dtype="float32")(x)
    outputs = keras.layers.Dense(1, dtype="float32")(x)
    model = tfmixed.Model(inputs, outputs)
    scale = tfmixed.DynamicLossScale(initial=64.0)
    sgd = keras.optimizers.SGD(0.01)
    model.compile(tfmixed.LossScaleOptimizer(sgd, scale), "mse")
    return model


def test_a_layer_that_overflows_on_the_way_forward():
    x, y = data()
    model = overflowing()
    guard = PrecisionGuard()
    fit(model, x, y, [guard])
    assert [(e.action, e.layer) for e in guard.events] == [
        ("layer to float32", "big")
    ]
    assert "overflows in float16 on the way forward" in guard.events[0].reason
    assert guard.record()["float32_layers"] == ["big"]
    assert number(model.optimizer.inner_optimizer.iterations) == 6


@keras.saving.register_keras_serializable(package="tests")
class Hidden(keras.losses.Loss):
    """NaN whatever the precision, for targets above 100."""

    def call(self, y_true, y_pred):
        broken = keras.ops.sqrt(100.0 - y_true)
        return keras.ops.mean((y_true - y_pred) ** 2 + 0.0 * broken, -1)


def test_a_bug_that_float32_has_too_stops_the_training():
    x, y = data()
    y[8:] = 101.0
    model = simple()
    model.compile(model.optimizer, Hidden())
    guard = PrecisionGuard()
    with pytest.raises(TrainingDivergedError, match="float32 either") as caught:
        fit(model, x, y, [guard])
    assert "batch 4" in str(caught.value)
    assert [e.batch for e in guard.events] == [2, 3, 4]
    assert not np.isnan(model.get_weights()[0]).any()


def test_such_batches_with_good_ones_between_are_no_divergence():
    x, y = data()
    y[8:12] = y[16:20] = 101.0
    model = simple()
    model.compile(model.optimizer, Hidden())
    guard = PrecisionGuard()
    fit(model, x, y, [guard], epochs=3)
    assert [event.batch for event in guard.events] == [2, 4] * 3
    for event in guard.events:
        assert "not finite in float32 either" in event.reason


def test_an_optimizer_that_does_not_skip_stops_with_a_reason():
    x, y = data()
    x[9, 0] = np.inf
    inputs = keras.Input((6,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(TrainingDivergedError, match=r"tfmixed\.prepare"):
        fit(model, x, y, [PrecisionGuard()])


@pytest.mark.parametrize("kind", ["stock", "prepared"])
def test_other_models(kind):
    x, y = ill_data()
    x[40, 3] = np.nan
    model = ill_model("mixed_float16", keras.Model)
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.02), initial_scale=64.0
    )
    if kind == "prepared":
        model = tfmixed.prepare(model, "mixed_float16")
        optimizer = "adam"
    model.compile(
        optimizer,
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=False,
    )
    guard = PrecisionGuard("accuracy", baseline=0.9)
    health = GradientHealth(every=8, verbose=False)
    fit(model, x, y, [guard, health], batch_size=32, epochs=2)
    data_events = [e for e in guard.events if "NaN or infinite" in e.reason]
    assert [e.batch for e in data_events] == [1, 1]
    # `prepare` has it in float32 already.
    moved = [event.layer for event in guard.events if event.layer]
    assert moved == (["ill"] if kind == "stock" else [])
    assert len(health.history) >= 4


def test_two_replicas(two_replicas):
    x, y = data(size=8)
    x[8 * 2 + 5, 1] = np.nan
    with two_replicas.scope():
        model = simple()
    guard = PrecisionGuard()
    fit(model, x, y, [guard], batch_size=8)
    (event,) = guard.events
    assert event.batch == 2
    assert number(model.optimizer.skipped_steps) == 1
    with two_replicas.scope():
        model = overflowing()
    x, y = data(size=8)
    guard = PrecisionGuard()
    fit(model, x, y, [guard], batch_size=8)
    assert guard.record()["float32_layers"] == ["big"]


def test_everything_to_float32_when_nothing_is_to_blame():
    """A baseline that nothing reaches: the last rungs, late in the training."""
    x, y = data()
    guard = PrecisionGuard("loss", baseline=-1.0, max_drop=0.1, patience=2)
    model = simple(
        optimizer=tfmixed.LossScaleOptimizer(keras.optimizers.SGD(0.0), 1.0)
    )
    fit(model, x, y, [guard], epochs=8)
    actions = [e.action for e in guard.events if e.action != "epoch"]
    fast = "bfloat16" in tfmixed.hardware().fast_dtypes
    assert actions == (["bfloat16", "float32"] if fast else ["float32"])
    assert guard.events[-1].epoch == 7
    first = next(e for e in guard.events if e.action != "epoch")
    assert first.epoch == 3
    assert model.layers[-1].compute_dtype == "float32"


def test_climbing_back_once():
    x, y = data()
    # Half of the training is over after the fifth epoch.
    guard = PrecisionGuard(
        "loss", baseline=[-1.0] * 5 + [100.0], patience=1, climb_after=2
    )
    optimizer = tfmixed.LossScaleOptimizer(keras.optimizers.SGD(0.0), 1.0)
    model = simple(optimizer=optimizer)
    fit(model, x, y, [guard], epochs=9)
    acted = [e for e in guard.events if e.action != "epoch"]
    assert acted[0].epoch == 4
    assert (acted[-1].action, acted[-1].epoch) == ("climb back", 6)
    assert len(acted) == 2
    assert model.layers[-1].compute_dtype == "float16"


def test_a_missed_standard_is_loud_and_a_kept_one_silent():
    x, y = data()
    model = simple()
    with pytest.raises(StandardMissedError, match="loss is .*at most 1e-09"):
        fit(model, x, y, [PrecisionGuard(required={"loss": 1e-9})])
    fit(model, x, y, [PrecisionGuard(required={"loss": 1e9})])
    with pytest.raises(ValueError, match="logs have no 'val_auc'"):
        fit(model, x, y, [PrecisionGuard(required={"val_auc": 0.9})])


@pytest.mark.parametrize(
    ("standard", "is_kept"),
    [
        (("min", 4.0), True),
        (("min", 2.0), False),
        (("max", 2.0), True),
        (("max", 4.0), False),
        (4.0, False),
    ],
)
def test_the_direction_of_a_standard_can_be_said(standard, is_kept):
    logs = {"hausdorff": 3.0}
    if is_kept:
        standards.check({"hausdorff": standard}, logs)
        return
    with pytest.raises(StandardMissedError, match="hausdorff is 3"):
        standards.check({"hausdorff": standard}, logs)


def test_a_metric_that_is_not_there():
    x, y = data()
    guard = PrecisionGuard("val_auc", baseline=0.9)
    with pytest.raises(ValueError, match="there is loss"):
        fit(simple(), x, y, [guard])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "upwards"}, "`mode` is 'upwards'"),
        ({"max_drop": -0.1}, "`max_drop` is -0.1"),
        ({"baseline": float("nan")}, "`baseline` is nan"),
        ({"baseline": []}, "`baseline` is"),
        ({"patience": 0}, "`patience` is 0"),
        ({"retries": -1}, "`retries` is -1"),
        ({"required": {"auc": ("up", 1.0)}}, "`required` has"),
        ({"required": {"auc": "high"}}, "`required` has 'high'"),
        ({"climb_after": 1.5}, "`climb_after` is 1.5"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        PrecisionGuard(**arguments)


def test_the_log_tells_the_story(tmp_path, capsys):
    x, y = data()
    x[13, 0] = np.nan
    path = tmp_path / "logs" / "guard.jsonl"
    fit(overflowing(), x, y, [PrecisionGuard(log=path)], epochs=2)
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("PrecisionGuard, after ")
    assert (
        "(epoch 1, batch index 0): 'big' to float32: 'big' overflows" in told[0]
    )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [
        (line["epoch"], line["batch"], line["action"]) for line in lines
    ] == [
        (0, 0, "layer to float32"),
        (0, 3, "none"),
        (1, 3, "none"),
    ]


def test_moves_keep_weights_and_slots():
    x, y = ill_data()
    seen = {}

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.setdefault(epoch, []).append(
                numpy_of(
                    self.model.variables
                    + self.model.optimizer.inner_optimizer.variables
                )
            )

    guard = PrecisionGuard("val_accuracy", baseline=0.99, verbose=False)
    ill_fit("mixed_float16", [Look(), guard, Look()], {}, epochs=2)
    assert [e.layer for e in guard.events if e.layer] == ["ill"]
    before, after = seen[0]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


# No dropout: Keras saves no seeds with the weights.
RESUMED = """
    import json
    import os
    import sys

    import keras
    import numpy as np

    import tfmixed

    folder, kill_at = sys.argv[1], int(sys.argv[2])
    keras.utils.set_random_seed(3)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(96, 6)).astype("float32")
    y = x[:, :1] * 2.0
    x[5 * 8 + 2, 1] = np.nan
    inputs = keras.Input((6,))
    policy = "mixed_float16"
    z = keras.layers.Dense(8, dtype=policy, name="small")(inputs)
    z = keras.layers.Rescaling(1e6, dtype=policy, name="big")(z)
    z = keras.layers.Rescaling(1e-6, dtype="float32")(z)
    model = tfmixed.Model(inputs, keras.layers.Dense(1, dtype="float32")(z))
    scale = tfmixed.DynamicLossScale(initial=4096.0, growth_interval=7)
    adam = keras.optimizers.Adam(0.01)
    model.compile(tfmixed.LossScaleOptimizer(adam, scale), "mse")
    losses = []

    class Note(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            losses.append([self.epoch, batch, logs["loss"]])
            if len(losses) == kill_at:
                os._exit(9)

    guard = tfmixed.callbacks.PrecisionGuard(log=folder + "/guard.jsonl")
    monitor = tfmixed.callbacks.LossScaleMonitor(csv=folder + "/scale.csv")
    backup = keras.callbacks.BackupAndRestore(
        folder + "/backup", delete_checkpoint=False
    )
    model.fit(
        x, y, batch_size=8, epochs=4, shuffle=False, verbose=0,
        callbacks=[guard, monitor, backup, Note()],
    )
    optimizer = model.optimizer
    found = {
        "losses": losses,
        "scale": float(optimizer.dynamic_scale.numpy()),
        "skipped": int(optimizer.skipped_steps.numpy()),
        "good": int(optimizer.step_counter.numpy()),
        "iterations": int(optimizer.inner_optimizer.iterations.numpy()),
        "dtypes": [layer.compute_dtype for layer in model.layers],
        "weights": [w.tolist() for w in model.get_weights()],
        "events": [vars(event) for event in guard.events],
    }
    print("FOUND" + json.dumps(found))
"""


def run(script, folder, kill_at=0):
    done = subprocess.run(
        [sys.executable, script, folder, str(kill_at)],
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("FOUND"):
            return json.loads(line[5:])
    assert done.returncode == 9, done.stderr[-2000:]
    return None


@pytest.mark.slow
def test_killed_and_resumed_is_as_if_nothing_had_happened(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(RESUMED))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    expected = run(script, str(whole))
    # In the middle of the third epoch.
    assert run(script, str(parts), kill_at=30) is None
    resumed = run(script, str(parts))
    assert resumed["losses"][0][:2] == [2, 0]
    assert resumed["losses"][:10] == expected["losses"][24:34]
    for name in ("scale", "skipped", "good", "iterations", "dtypes", "weights"):
        assert resumed[name] == expected[name], name
    assert resumed["events"] == expected["events"]
    assert [e["layer"] for e in expected["events"]][0] == "big"
    one, other = (
        (folder / "scale.csv").read_text() for folder in (whole, parts)
    )
    assert one == other


def test_an_interrupted_training_leaves_nothing_that_acts():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    x, y = data()
    model, guard = simple(), PrecisionGuard()
    with pytest.raises(KeyboardInterrupt):
        fit(model, x, y, [guard, Stop()])
    x[5] = np.nan
    fit(model, x, y, [])
    assert guard.events == []
    again = PrecisionGuard()
    fit(model, x, y, [again])
    assert len(again.events) == 1
    assert not hasattr(model.train_function, "executions")


def test_the_monitor_explains():
    x, y = data()
    x[1, 0] = np.nan
    y[4 * 2] = 3e4
    model = simple()
    monitor = LossScaleMonitor(explain=True)
    fit(model, x, y, [monitor])
    kinds = [(batch, cause.kind) for batch, cause in monitor.causes]
    assert kinds == [(0, "data"), (2, "calibration")]
    assert "ordinary calibration" in monitor.summary()
    assert "batch 0: 1 value is NaN" in monitor.summary()
    sgd = keras.optimizers.SGD(0.01)
    model = simple(optimizer=tfmixed.LossScaleOptimizer(sgd, 2.0**20))
    fit(model, *data(), [monitor])
    assert {cause.kind for _, cause in monitor.causes} == {"scale"}
    model = overflowing()
    fit(model, *data(), [monitor])
    assert {(c.kind, c.path) for _, c in monitor.causes} == {("layer", "big")}
    model = simple()
    model.compile(model.optimizer, Hidden())
    fit(model, data()[0], data()[1] + 200.0, [monitor])
    assert {cause.kind for _, cause in monitor.causes} == {"float32"}


def test_rounding_that_is_magnified_is_no_calibration():
    """Gradients overflow that would fit in float32: the layer is named."""
    monitor = LossScaleMonitor(explain=True)
    ill_fit("mixed_float16", [monitor], {"jit_compile": False}, epochs=1)
    found = [cause for _, cause in monitor.causes if cause.path == "ill"]
    assert found
    assert {cause.kind for cause in found} == {"layer"}
    assert "where those of float32 would fit" in found[0].message


@pytest.mark.parametrize(
    "how", ["generator", "dataset", "pydataset", "weights"]
)
def test_all_kinds_of_data(how):
    x, y = data()
    x[9, 2] = np.nan
    labels = (y > 0).astype("int32")[:, 0]

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            rows = slice(index * 4, index * 4 + 4)
            return x[rows], y[rows]

    def generate():
        for index in range(6):
            yield x[index * 4 : index * 4 + 4], y[index * 4 : index * 4 + 4]

    slices = tf.data.Dataset.from_tensor_slices((x, y))
    given, kwargs = {
        "generator": (generate(), {}),
        "dataset": (slices.batch(4), {}),
        "pydataset": (Batches(), {}),
        "weights": (
            x,
            {
                "y": labels,
                "batch_size": 4,
                "class_weight": {0: 1.0, 1: 2.0},
                "validation_data": (x[:8], labels[:8]),
            },
        ),
    }[how]
    guard = PrecisionGuard()
    model = simple()
    model.fit(given, verbose=0, shuffle=False, callbacks=[guard], **kwargs)
    (event,) = guard.events
    assert event.batch == 2
    assert number(model.optimizer.skipped_steps) == 1
