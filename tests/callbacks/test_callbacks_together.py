"""All callbacks in one `fit`: every kind of model, every kind of data."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import slow

import tfmixed
from tfmixed import callbacks

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*skipped because"),
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
]
COUNT, SIZE = 8, 8
BAD = 5


def data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(COUNT * SIZE, 6)).astype("float32")
    y = (x[:, 0] > 0).astype("int32")
    x[BAD * SIZE + 3, 2] = np.nan
    return x, y


def model_of(kind):
    policy = "mixed_float16"
    inputs = keras.Input((6,))
    x = keras.layers.Dense(16, dtype=policy)(inputs)
    x = keras.layers.LayerNormalization(dtype=policy)(x)
    x = keras.layers.Dropout(0.1, dtype=policy)(x)
    outputs = keras.layers.Dense(2, "softmax", dtype="float32")(x)
    if kind == "tfmixed":
        return tfmixed.Model(inputs, outputs), "adam"
    model = keras.Model(inputs, outputs)
    if kind == "prepared":
        return tfmixed.prepare(model, policy), "adam"
    adam = keras.optimizers.Adam()
    return model, keras.optimizers.LossScaleOptimizer(adam, initial_scale=64.0)


def everything(folder):
    return [
        # First, and so around what the others put in its place later.
        callbacks.StepTimer(folder / "time", csv=folder / "time.csv"),
        callbacks.LossScaleMonitor(folder / "board", csv=folder / "scale.csv"),
        callbacks.GradientHealth(every=3, log_dir=folder / "health"),
        callbacks.PrecisionGuard(
            "accuracy", baseline=0.1, log=folder / "guard.jsonl"
        ),
        callbacks.AdaptivePrecision(),
    ]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        rows = slice(index * SIZE, index * SIZE + SIZE)
        return tuple(part[rows] for part in data())


def generate():
    batches = Batches()
    for index in range(COUNT):
        yield batches[index]


def arguments(how):
    x, y = data()
    good = x[:16], y[:16]
    return {
        "arrays": {
            "x": x,
            "y": y,
            "batch_size": SIZE,
            "class_weight": {0: 1.0, 1: 2.0},
            "validation_data": good,
        },
        "dataset": {
            "x": tf.data.Dataset.from_tensor_slices((x, y)).batch(SIZE),
            "validation_data": tf.data.Dataset.from_tensors(good),
        },
        "generator": {"x": generate()},
        "pydataset": {"x": Batches()},
    }[how]


KINDS = ["keras", "tfmixed", "prepared"]
long = pytest.mark.long


@pytest.mark.parametrize("kind", ["tfmixed", *slow("keras", "prepared")])
def test_all_at_once(kind, tmp_path):
    check(kind, "arrays", tmp_path, epochs=2)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        pytest.param(kind, how, marks=mark)
        for how, chosen in (
            ("dataset", "tfmixed"),
            ("pydataset", None),
            ("generator", None),
        )
        for kind in KINDS
        for mark in [pytest.mark.slow if kind == chosen else long]
    ],
)
def test_other_data(kind, how, tmp_path):
    check(kind, how, tmp_path, epochs=1 if how == "generator" else 2)


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [
        pytest.param(kind, {way: value}, marks=long)
        for way, value in (("jit_compile", True), ("steps_per_execution", 4))
        for kind in KINDS
    ],
)
def test_compiled_ways(kind, compiled, tmp_path):
    check(kind, "arrays", tmp_path, epochs=2, **compiled)


@pytest.mark.parametrize(
    "kind", [*slow("tfmixed"), pytest.param("keras", marks=long)]
)
def test_two_replicas(kind, tmp_path, two_replicas):
    check(kind, "arrays", tmp_path, epochs=2, strategy=two_replicas)


def check(kind, how, folder, epochs, strategy=None, **compiled):
    compiled = {"jit_compile": False, **compiled}
    with (strategy or tf.distribute.get_strategy()).scope():
        model, optimizer = model_of(kind)
        model.compile(
            optimizer,
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            **compiled,
        )
    used = everything(folder)
    history = model.fit(
        epochs=epochs,
        verbose=0,
        shuffle=False,
        callbacks=used,
        **arguments(how),
    ).history
    timer, monitor, health, guard, adaptive = used
    # The guard may have retried what overflowed while the scale settled.
    finite = monitor.records["finite"]
    assert finite.sum() == epochs * (COUNT - 1)
    events = [e for e in guard.events if "NaN or infinite" in e.reason]
    assert [event.batch for event in events] == [BAD] * epochs
    assert all("row 3" in event.reason for event in events)
    assert health.history
    assert (
        all(np.isfinite(history["val_loss"])) if "val_loss" in history else True
    )
    if kind != "keras":
        # A stock step lets a skipped batch into the loss of the epoch.
        assert np.isfinite(history["loss"]).all()
    for name in ("loss_scale", "skipped_steps", "gradient_norm", "step_ms"):
        assert len(history[name]) == epochs, name
    executions = 2 if compiled.get("steps_per_execution") else COUNT
    assert len(timer.records["step"]) == epochs * executions
    assert adaptive.history == []
    for file in ("scale.csv", "time.csv", "guard.jsonl"):
        assert (folder / file).stat().st_size > 0
