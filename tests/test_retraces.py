import functools
import inspect
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.utils.python_utils import is_default

import tfmixed
from tfmixed.retraces import MOST
from tfmixed.retraces import Shapes
from tfmixed.retraces import describe


class Counting(tfmixed.Model):
    """Counts how often its step is traced; sequences to one number."""

    def __init__(self):
        super().__init__()
        self.traces = 0
        self.dense = keras.layers.Dense(4)
        self.pool = keras.layers.GlobalMaxPooling1D()
        self.head = keras.layers.Dense(1)

    def call(self, x):
        return self.head(self.pool(self.dense(x)))

    def train_step(self, data):
        self.traces += 1
        return super().train_step(data)


class Spy(keras.Model):
    """Below `tfmixed.Model`: sees the callbacks that it adds in `fit`."""

    @functools.wraps(keras.Model.fit)
    def fit(self, *args, **kwargs):
        call = inspect.signature(super().fit).bind(*args, **kwargs)
        self.added = call.arguments["callbacks"]
        return super().fit(*args, **kwargs)


class Spied(tfmixed.Model, Spy):
    pass


def sequences(lengths, sizes=None, length=None):
    """Batches (4, length, 3) of a dataset that leaves both open."""
    generator = np.random.default_rng(0)
    sizes = sizes or [4] * len(lengths)
    batches = []
    for size, steps in zip(sizes, lengths, strict=True):
        x = generator.normal(size=(size, steps, 3)).astype("float32")
        batches.append((x, x[:, 0, :1]))
    signature = (
        tf.TensorSpec((None, length, 3)),
        tf.TensorSpec((None, 1)),
    )
    data = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=signature
    )
    return data.apply(tf.data.experimental.assert_cardinality(len(batches)))


def compiled(jit_compile=True, steps_per_execution=1):
    model = Counting()
    model.compile(
        "sgd",
        "mse",
        jit_compile=jit_compile,
        steps_per_execution=steps_per_execution,
    )
    return model


def told(model, *arguments, **keywords):
    """Fits the model; returns what was said of shapes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(*arguments, **{"shuffle": False, "verbose": 0, **keywords})
    return [w for w in caught if "different shapes" in str(w.message)]


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_a_new_shape_in_each_batch_is_told_once(steps_per_execution):
    model = compiled(True, steps_per_execution)
    (warning,) = told(model, sequences(range(1, 9)), epochs=2)
    message = str(warning.message)
    assert "8 different shapes in 16 training steps, among them" in message
    assert all(f"(4, {length}, 3)" in message for length in range(4, 9))
    if steps_per_execution == 1:
        # Eight calls compiled, and eight in the second epoch did not.
        assert re.search(
            r": the 8 slowest calls of the step took [\d.]+ s, the others "
            r"[\d.e-]+ s each\.",
            message,
        )
    assert "compile(jit_compile=False)" in message
    assert warning.filename == __file__
    # What a count of traces would have shown.
    assert model.traces <= 2


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_a_graph_takes_all_shapes_and_nothing_is_told(steps_per_execution):
    model = compiled(False, steps_per_execution)
    assert told(model, sequences(range(1, 21))) == []
    assert model.traces <= 2


@pytest.mark.slow
def test_weights_are_those_of_keras():
    models = compiled(True), compiled(False)
    for model in models:
        model(np.zeros((1, 1, 3), "float32"))
    models[1].set_weights(models[0].get_weights())
    for model in models:
        told(model, sequences(range(1, 7)))
    for one, other in zip(*(m.get_weights() for m in models), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [True, False])
def test_an_ordinary_training_is_no_news(jit_compile):
    """An odd last batch, validation with another, several epochs."""
    model = compiled(jit_compile)
    x = np.ones((11, 5, 3), "float32")
    y = np.ones((11, 1), "float32")
    arguments = {"batch_size": 4, "epochs": 3}
    validation = (x[:6, :3], y[:6])
    assert told(model, x, y, validation_data=validation, **arguments) == []
    assert told(model, x, y, **arguments) == []


@pytest.mark.slow
def test_a_few_buckets_are_no_news():
    model = compiled()
    lengths = [4, 8, 12, 16, 20, 24] * 5
    assert told(model, sequences(lengths)) == []
    shapes = {(4, length, 3) for length in lengths}
    assert set(model._shapes.seen()) == shapes
    # Nor in the next training, of fewer steps: they are compiled already.
    assert told(model, sequences(lengths[:6])) == []


@pytest.mark.slow
def test_shapes_of_a_fit_alone_count():
    model = compiled()
    for start in (1, 4):
        assert told(model, sequences(range(start, start + 3))) == []
    (warning,) = told(model, sequences(range(10, 15)))
    assert "5 different shapes in 5 training steps" in str(warning.message)
    model.compile("sgd", "mse", jit_compile=True)
    assert model._shapes is None


@pytest.mark.slow
def test_batches_whose_size_changes_count_too():
    model = compiled()
    (warning,) = told(model, sequences([3] * 6, [1, 2, 3, 4, 5, 6]))
    assert "(6, 3, 3)" in str(warning.message)


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_steps_are_those_that_had_data(steps_per_execution):
    """Keras begins one more where it does not know how many there are."""
    model = compiled(True, steps_per_execution)
    data = sequences(range(1, 9))
    unknown = data.filter(lambda x, y: True)
    assert unknown.cardinality() == tf.data.UNKNOWN_CARDINALITY
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*ran out of data")
        (warning,) = told(model, unknown, validation_data=data)
    message = str(warning.message)
    assert "8 different shapes in 8 training steps" in message


def test_what_fit_adds_does_not_make_steps_wait():
    """The condition of Keras's `CallbackList` for callbacks beside steps."""
    inputs = keras.Input((3,))
    model = Spied(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    model.fit(x, y, batch_size=2, verbose=0)
    assert len(model.added) == 2
    for callback in model.added:
        hooks = (
            callback.on_batch_end,
            callback.on_train_batch_end,
            callback.on_test_batch_end,
        )
        assert getattr(callback, "async_safe", False) or all(
            is_default(hook) for hook in hooks
        )


def prepared(activation, fast=True, shape=(5, 3)):
    inputs = keras.Input(shape)
    x = keras.layers.Dense(4, activation=activation)(inputs)
    x = keras.layers.GlobalMaxPooling1D()(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model = tfmixed.prepare(model, "mixed_bfloat16", fast=fast)
    model.compile("sgd", "mse")
    return model


def test_clusters_are_compiled_for_each_size_of_a_batch():
    data = sequences([5] * 8, range(1, 9), length=5)
    (warning,) = told(prepared("gelu"), data)
    message = str(warning.message)
    assert "8 different shapes in 8 training steps" in message
    assert "parts of the prepared model" in message
    assert "drop_remainder=True" in message
    # Nothing is compiled here,
    assert not told(prepared("relu"), data)
    assert not told(prepared("gelu", fast=False), data)
    # nor where the length is open,
    assert not told(prepared("gelu", shape=(None, 3)), sequences(range(3, 11)))
    # and once only here.
    assert not told(prepared("gelu"), sequences([5] * 8, length=5))


@pytest.mark.parametrize("jit_compile", [True, False])
def test_a_known_shape_may_be_followed_by_others(jit_compile):
    """The second trace, of an open size, may create no variable."""
    model = prepared("gelu")
    model.compile("sgd", "mse", jit_compile=jit_compile)
    for size in (1, 8, 5):
        x = np.ones((size, 5, 3), "float32")
        model.train_on_batch(x, x[:, 0, :1])
    assert model._shapes.seen() == [(1, 5, 3), (8, 5, 3), (5, 5, 3)]


def test_eager_steps_are_not_compiled():
    model = Counting()
    model.compile("sgd", "mse", run_eagerly=True, jit_compile=False)
    assert told(model, sequences(range(1, 7))) == []
    assert model._shapes is None


@pytest.mark.slow
def test_the_table_is_not_part_of_the_model(tmp_path):
    model = compiled()
    model(np.zeros((1, 1, 3), "float32"))
    names = [variable.path for variable in model.variables]
    path = str(tmp_path / "checkpoint")
    before = tf.train.Checkpoint(model).save(path)
    told(model, sequences(range(1, 4)))
    assert model._shapes.seen()
    assert [variable.path for variable in model.variables] == names
    keys = [
        {name for name, _ in tf.train.list_variables(checkpoint)}
        for checkpoint in (before, tf.train.Checkpoint(model).save(path))
    ]
    assert not [key for key in keys[1] - keys[0] if "shapes" in key]


class TestDescribe:
    def shapes(self, count):
        return [(4, length) for length in range(1, count + 1)]

    @pytest.mark.parametrize(
        ("count", "steps", "is_told"),
        [
            (4, 4, False),
            (5, 5, True),
            (5, 19, True),
            (5, 20, False),
            (8, 31, True),
            (8, 32, False),
            (MOST - 1, 10_000, False),
            (MOST, 10_000, True),
        ],
    )
    def test_told_is_what_does_not_end(self, count, steps, is_told):
        message = describe(self.shapes(count), steps, [0.1] * steps)
        assert (message is not None) == is_told

    def test_cost_is_what_was_measured(self):
        seconds = [0.5, 0.02, 0.5, 0.5, 0.03, 0.5, 0.5, 0.01]
        message = describe(self.shapes(5), 8, seconds)
        assert (
            "for each of them: the 5 slowest calls of the step took 2.5 s, "
            "the others 0.02 s each." in message
        )

    def test_no_cost_where_there_is_nothing_to_compare(self):
        message = describe(self.shapes(6), 6, [0.5] * 6)
        assert "for each of them. Pad the batches" in message

    def test_a_full_table_is_a_lower_bound(self):
        message = describe(self.shapes(MOST), 40, [])
        assert f"at least {MOST} different shapes in 40" in message


class TestShapes:
    def run(self, batches, signature):
        shapes = Shapes()

        @tf.function(input_signature=[signature])
        def step(data):
            shapes.note(data)
            return tf.constant(0)

        for batch in batches:
            step(batch)
        return shapes.seen()

    def test_each_shape_once_and_no_more_than_fit(self):
        lengths = [3, 1, 3, 2, 1, *range(4, 60)]
        seen = self.run(
            [tf.zeros((length, 2)) for length in lengths],
            tf.TensorSpec((None, 2)),
        )
        first = list(dict.fromkeys(lengths))[:MOST]
        assert seen == [(length, 2) for length in first]

    def test_a_second_input_may_be_what_varies(self):
        spec = (tf.TensorSpec((4, 2)), tf.TensorSpec((4, None)))
        batches = [(tf.zeros((4, 2)), tf.zeros((4, n))) for n in (1, 2, 1)]
        assert self.run(batches, spec) == [(4, 1), (4, 2)]

    def test_what_has_no_shape_of_numbers_is_left_out(self):
        ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
        spec = tf.RaggedTensorSpec((None, None), tf.float32)
        assert self.run([ragged], spec) == []
        assert self.run([tf.zeros((2, 2))], tf.TensorSpec(None)) == []
        assert self.run([tf.zeros((2, 3))], tf.TensorSpec((2, 3))) == [(2, 3)]
