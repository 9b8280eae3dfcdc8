import csv
import math
import pathlib
import re
import time

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from tensorflow.core.util import event_pb2

import tfmixed
from tfmixed.callbacks import StepTimer
from tfmixed.callbacks import step_times
from tfmixed.callbacks.fetches import Meter
from tfmixed.callbacks.step_times import Execution
from tfmixed.callbacks.step_times import Times

# Of data of an unknown length Keras says at the end that they are too few.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*ran out of data"),
    pytest.mark.filterwarnings("ignore:.*`shuffle=True` was passed"),
]
# Ten batches of four and one of two.
COUNT = 42
WAYS = [
    {},
    {"steps_per_execution": 4},
    {"jit_compile": True},
    {"jit_compile": True, "steps_per_execution": 4},
    {"run_eagerly": True},
    {"run_eagerly": True, "steps_per_execution": 4},
]


def model_of(model_class=keras.Model, **how):
    inputs = keras.Input((6,))
    x = keras.layers.Dense(4, activation="relu")(inputs)
    model = model_class(inputs, keras.layers.Dense(1)(x))
    model.compile(keras.optimizers.SGD(0.1), "mse", **how)
    return model


def prepared(**how):
    model = tfmixed.prepare(model_of(), "mixed_bfloat16")
    model.compile(keras.optimizers.SGD(0.1), "mse", **how)
    return model


def arrays():
    generator = np.random.default_rng(3)
    x = generator.normal(size=(COUNT, 6)).astype("float32")
    return x, generator.normal(size=(COUNT, 1)).astype("float32")


def batches(pause=0.0):
    x, y = arrays()
    for start in range(0, COUNT, 4):
        time.sleep(pause)
        yield x[start : start + 4], y[start : start + 4]


class Batches(keras.utils.PyDataset):
    def __init__(self, pause=0.0):
        super().__init__()
        self.pause = pause

    def __len__(self):
        return 11

    def __getitem__(self, index):
        time.sleep(self.pause)
        return list(batches())[index]


def dataset(pause=0.0):
    return tf.data.Dataset.from_generator(
        lambda: batches(pause),
        output_signature=(tf.TensorSpec((None, 6)), tf.TensorSpec((None, 1))),
    )


SOURCES = {
    "arrays": lambda: {"x": arrays()[0], "y": arrays()[1], "batch_size": 4},
    "tf.data": lambda: {"x": dataset()},
    "generator": lambda: {"x": batches()},
    "PyDataset": lambda: {"x": Batches()},
}


def fitted(model, timer, source="arrays", **kwargs):
    arguments = {**SOURCES[source](), "verbose": 0, "shuffle": False}
    callbacks = [timer, *kwargs.pop("after", [])]
    arguments.update(kwargs)
    return model.fit(callbacks=callbacks, **arguments)


def is_clean(model):
    """Whether the train function is one that Keras made."""
    return "TensorFlowTrainer" in model.train_function.__qualname__


@pytest.mark.parametrize(
    ("how", "source"),
    [
        pytest.param(how, source, marks=mark, id=f"{how}-{source}")
        for how in WAYS
        for source in SOURCES
        # Each way with one source, and each source in one way.
        for mark in [
            ()
            if how == WAYS[0]
            else pytest.mark.slow
            if source == list(SOURCES)[0]
            else pytest.mark.long
        ]
    ],
)
def test_examples_and_steps_are_those_of_the_data(how, source):
    model, timer = model_of(**how), StepTimer()
    history = fitted(model, timer, source).history
    records = timer.records
    n = how.get("steps_per_execution", 1)
    starts = np.arange(0, 11, n)
    np.testing.assert_array_equal(records["step"], starts)
    np.testing.assert_array_equal(
        records["steps"], np.minimum(starts + n, 11) - starts
    )
    np.testing.assert_array_equal(
        records["examples"],
        np.minimum((starts + n) * 4, COUNT) - starts * 4,
    )
    measured = {"step_ms", "examples_per_second", "memory_mb"}
    if n == 1 or how.get("run_eagerly"):
        measured.add("input_wait")
        assert np.all(records["input_wait"] > 0)
        assert np.all(records["input_wait"] < 1)
    assert set(history) == {"loss"} | measured
    assert set(records) == {"step", "steps", "step_ms", "examples"} | (
        measured & {"input_wait", "memory_mb"}
    )
    assert is_clean(model)


@pytest.mark.parametrize("how", WAYS[:2], ids=str)
def test_the_figures_of_an_epoch_are_those_of_its_executions(how):
    model, timer = model_of(**how), StepTimer()
    history = fitted(model, timer, epochs=2).history
    records = timer.records
    half = len(records["step"]) // 2
    # In the first epoch without the first execution.
    for epoch, rows in enumerate([slice(1, half), slice(half, None)]):
        ms, steps, examples = (
            records[name][rows] for name in ("step_ms", "steps", "examples")
        )
        seconds = np.sum(ms * steps) / 1e3
        of_each = [t for t, n in zip(ms, steps, strict=True) for _ in range(n)]
        assert history["step_ms"][epoch] == pytest.approx(np.median(of_each))
        assert history["examples_per_second"][epoch] == pytest.approx(
            examples.sum() / seconds
        )
        if "input_wait" in records:
            waited = np.sum(records["input_wait"][rows] * ms * steps) / 1e3
            assert history["input_wait"][epoch] == pytest.approx(
                waited / seconds
            )
    assert records["step_ms"][0] > history["step_ms"][0]


@pytest.mark.parametrize(
    "make", [model_of, lambda **how: model_of(tfmixed.Model, **how), prepared]
)
def test_weights_are_those_without_it(make):
    models = make(), make()
    models[1].set_weights(models[0].get_weights())
    timer = StepTimer()
    fitted(models[0], timer, epochs=2)
    x, y = arrays()
    models[1].fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    for one, other in zip(*(m.get_weights() for m in models), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(timer.records["step"]) == 22


@pytest.mark.parametrize(
    "pausing",
    [
        {"source": "tf.data", "x": lambda: dataset(0.02)},
        {"source": "generator", "x": lambda: batches(0.02)},
        {"source": "PyDataset", "x": lambda: Batches(0.02)},
    ],
    ids=lambda p: p["source"],
)
def test_waiting_is_found_where_it_is(pausing):
    """Of a step of about one millisecond and a batch that takes twenty."""
    model = model_of()
    timer = StepTimer()
    fitted(model, timer, pausing["source"], x=pausing["x"]())
    share = timer.model.history.history["input_wait"][0]
    assert share > 0.5
    # The same model, from memory.
    x, y = (tf.constant(a[:4]) for a in arrays())
    ready = tf.data.Dataset.from_tensors((x, y)).repeat(30)
    history = fitted(model, timer, "tf.data", x=ready).history
    assert history["input_wait"][0] < share


def test_what_a_callback_takes_is_not_waiting_for_input():
    pause = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: time.sleep(0.02)
    )
    model, timer = model_of(), StepTimer()
    history = fitted(model, timer, after=[pause]).history
    assert history["step_ms"][0] > 20
    assert history["input_wait"][0] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("in_scope", [False, True])
def test_examples_of_all_replicas_count(two_replicas, in_scope):
    """With several steps in an execution Keras itself fails here."""
    with two_replicas.scope():
        model = model_of(tfmixed.Model)
    timer = StepTimer()
    if in_scope:
        with two_replicas.scope():
            fitted(model, timer)
    else:
        fitted(model, timer)
    assert timer.records["examples"].tolist() == [4] * 10 + [2]
    assert np.all(timer.records["input_wait"] < 1)
    assert is_clean(model)


def test_inputs_of_other_kinds_are_counted():
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0]])
    rows = {
        "dict": ({"b": tf.zeros((3, 2)), "a": tf.zeros((3, 5))}, 3),
        "ragged": (ragged, 3),
        "sparse": (tf.sparse.from_dense(tf.zeros((5, 2))), 5),
        "scalar": (tf.zeros(()), math.nan),
    }
    for x, count in rows.values():
        meter = Meter(tf.distribute.get_strategy())
        iterator = iter(tf.data.Dataset.from_tensors((x, tf.zeros((7,)))))
        tf.function(lambda i: i.get_next()[1])(meter.watch(iterator))
        np.testing.assert_equal(meter.read().examples, count)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_train_function_of_the_users_own_is_timed_as_a_whole(policy):
    class Own(keras.Model):
        def make_train_function(self, force=False):
            def function(iterator):
                for batch in iterator:
                    return self.train_step(batch)
                raise StopIteration

            self.train_function = function

    keras.config.set_dtype_policy(policy)
    model, timer = model_of(Own), StepTimer()
    history = fitted(model, timer).history
    assert set(history) == {"loss", "step_ms", "memory_mb"}
    assert timer.records["steps"].tolist() == [1] * 11


def test_a_train_function_that_fetches_nothing_is_timed_too():
    model, timer = model_of(), StepTimer()
    batch = tuple(map(tf.constant, arrays()))
    model.train_function = lambda iterator: model.train_step(batch)
    history = fitted(model, timer, "tf.data", steps_per_epoch=3).history
    assert set(history) == {"loss", "step_ms", "memory_mb"}
    assert timer.records["steps"].tolist() == [1] * 3


def test_another_train_function_in_the_middle_is_timed_too():
    class Renews(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 5:
                self.model.make_train_function(force=True)
                self.function = self.model.train_function
                self.model.train_function = self.once

        def once(self, iterator):
            self.model.train_function = self.function
            time.sleep(2)
            return self.function(iterator)

    model, timer = model_of(), StepTimer()
    fitted(model, timer, after=[Renews()])
    # That one is not timed, and is not in the time of the next.
    assert timer.records["examples"].sum() == COUNT - 4
    assert max(timer.records["step_ms"]) < 2000
    assert is_clean(model)
    fitted(model, timer)
    assert timer.records["examples"].sum() == COUNT


def test_what_is_between_epochs_is_in_no_step():
    pause = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: time.sleep(2)
    )
    model, timer = model_of(), StepTimer()
    fitted(model, timer, after=[pause], epochs=2)
    assert max(timer.records["step_ms"]) < 2000


@pytest.mark.parametrize("hook", ["on_train_batch_begin", "on_train_batch_end"])
def test_an_interruption_leaves_the_file_and_nothing_else(tmp_path, hook):
    class Interrupts(keras.callbacks.Callback):
        async_safe = False

    def interrupt(self, batch, logs=None):
        if batch == 5:
            raise KeyboardInterrupt

    setattr(Interrupts, hook, interrupt)
    path = tmp_path / "steps.csv"
    model, timer = model_of(), StepTimer(csv=path)
    with pytest.raises(KeyboardInterrupt):
        fitted(model, timer, after=[Interrupts()])
    steps = 6 if hook.endswith("end") else 5
    assert [row["step"] for row in rows_of(path)] == [
        str(i) for i in range(steps)
    ]
    model.train_on_batch(*(a[:4] for a in arrays()))
    assert is_clean(model)
    # It goes on: the step of `train_on_batch` was not one of `fit`.
    fitted(model, StepTimer(csv=path))
    numbers = [int(row["step"]) for row in rows_of(path)]
    assert numbers == [*range(steps), *range(steps + 1, steps + 12)]


def rows_of(path):
    with pathlib.Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_file_has_what_the_records_have(tmp_path):
    path = tmp_path / "folder" / "steps.csv"
    model, timer = model_of(steps_per_execution=4), StepTimer(csv=path)
    fitted(model, timer)
    rows = rows_of(path)
    assert [row["input_wait"] for row in rows] == [""] * 3
    for name, column in timer.records.items():
        assert [float(row[name]) for row in rows] == column.tolist()


def test_a_second_fit_counts_on_and_starts_anew():
    model, timer = model_of(), StepTimer()
    fitted(model, timer)
    traces = [model.train_function]
    fitted(model, timer)
    assert timer.records["step"].tolist() == list(range(11, 22))
    assert [model.train_function] == traces
    # Other models, with the same timer.
    fitted(model_of(steps_per_execution=4), timer)
    assert "input_wait" not in timer.records
    fitted(model_of(tfmixed.Model), timer)
    assert timer.records["step"].tolist() == list(range(11))
    assert np.all(timer.records["input_wait"] > 0)


def test_the_step_is_not_traced_again():
    class Counts(keras.Model):
        traces = 0

        def train_step(self, data):
            self.traces += 1
            return super().train_step(data)

    model = model_of(Counts)
    x, y = arrays()
    model.fit(x, y, batch_size=4, verbose=0)
    before = model.traces
    timer = StepTimer()
    fitted(model, timer, epochs=3)
    fitted(model, timer)
    assert model.traces == before


def test_the_bar_shows_it_and_the_summary_comes_last(capsys):
    shown = []

    class Looks(keras.callbacks.Callback):
        async_safe = True

        def on_train_batch_end(self, batch, logs=None):
            shown.append(dict(logs))

    model, timer = model_of(), StepTimer()
    fitted(model, timer, after=[Looks()], verbose=2)
    assert max(len(logs) for logs in shown) == 5
    assert {"step_ms", "examples_per_second", "input_wait"} < set(
        max(shown, key=len)
    )
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == timer.summary()
    assert re.fullmatch(
        r"11 steps: median [\d.]+ ms \(first [\d.,]+ m?s\), [\d,]+ "
        r"examples/s, \d+ % of the time waiting for input, [\d,]+ MB "
        "resident.",
        last,
    )


def test_no_steps_no_figures():
    timer = StepTimer()
    assert not any(map(len, timer.records.values()))
    assert timer.summary() == "No steps."


def test_one_execution_is_the_first_and_no_median():
    model, timer = model_of(), StepTimer()
    history = fitted(model, timer, epochs=2, steps_per_epoch=1).history
    assert len(history["memory_mb"]) == 2
    assert len(history["step_ms"]) == 1
    assert timer.records["step_ms"][1] == history["step_ms"][0]


def test_memory_is_that_of_the_process():
    before = psutil.Process().memory_info().rss
    model, timer = model_of(), StepTimer()
    found = fitted(model, timer).history["memory_mb"][0] * 1e6
    after = psutil.Process().memory_info().rss
    # Within what a small training may take and give back.
    assert before * 0.5 < found < after * 2


def test_tensorboard_gets_the_figures(tmp_path):
    pytest.importorskip("tensorboard")
    model, timer = model_of(), StepTimer(tmp_path)
    fitted(model, timer)
    found = {}
    for path in tmp_path.glob("*tfevents*"):
        for record in tf.data.TFRecordDataset(str(path)):
            event = event_pb2.Event.FromString(record.numpy())
            for value in event.summary.value:
                number = float(tf.make_ndarray(value.tensor))
                found.setdefault(value.tag, []).append((event.step, number))
    names = ("step_ms", "examples_per_second", "input_wait", "memory_mb")
    assert set(found) == {f"step_timer/{name}" for name in names}
    for values in found.values():
        steps = [step for step, _ in values]
        assert steps == sorted(steps)
        assert steps[-1] == 10
        assert all(number > 0 for _, number in values)


class TestTimes:
    def test_the_median_is_that_of_steps(self):
        times = Times()
        times.add(Execution(0, 4, 2.0, 16, 0.5, 1.0))
        times.add(Execution(4, 1, 10.0, 2, 0.0, 1.0))
        times.add_memory(7.0)
        times.add_memory(math.nan)
        # Eight milliseconds and ten; four of them waiting.
        assert times.logs() == {
            "step_ms": 2.0,
            "examples_per_second": pytest.approx(1000),
            "input_wait": pytest.approx(4 / 18),
            "memory_mb": 7.0,
        }

    def test_what_was_not_measured_is_absent(self):
        times = Times()
        assert times.logs() == {}
        times.add(Execution(0, 1, 2.0, math.nan, math.nan, math.nan))
        assert times.logs() == {"step_ms": 2.0}


def test_words():
    logs = {
        "step_ms": 12.31,
        "examples_per_second": 5202.7,
        "input_wait": 0.031,
        "memory_mb": 812.3,
    }
    assert step_times.describe(4690, 2.14, logs, "resident") == (
        "4,690 steps: median 12.3 ms (first 2.1 s), 5,203 examples/s, "
        "3 % of the time waiting for input, 812 MB resident."
    )
    logs = {"step_ms": 999.7}
    assert step_times.describe(2, 0.9, logs, "") == (
        "2 steps: median 1.0 s (first 900 ms)."
    )
    assert step_times.describe(1, 0.0121, {}, "") == "1 step: first 12.1 ms."
