import keras
import numpy as np
import pytest
import tensorflow as tf
from support import numpy_of
from support import slow
from tensorflow.core.util import event_pb2

import tfmixed
from tfmixed.callbacks import GradientHealth
from tfmixed.callbacks import LossScaleMonitor

pytestmark = pytest.mark.filterwarnings("ignore:.*skipped because")
WAYS = [
    {},
    *slow({"steps_per_execution": 4}, {"jit_compile": True}),
    *slow({"run_eagerly": True}),
]
SMALL, LARGE = 2.0**-26, 2.0**-4


@keras.saving.register_keras_serializable(package="tests")
class Times(keras.losses.Loss):
    """The sum of the outputs times a constant: that is the gradient."""

    def __init__(self, factor, **kwargs):
        super().__init__(reduction="sum", **kwargs)
        self.factor = factor

    def call(self, y_true, y_pred):
        return y_pred * self.factor


def window_model(model_class=tfmixed.Model, policy="mixed_float16"):
    """Gradients underflow at scale 1 in one layer, overflow above 2^18.

    All inputs are 1 and a batch has two rows: the gradient of each output is
    the factor of its loss, that of each weight twice as much.
    """
    inputs = keras.Input((3,))
    small = keras.layers.Dense(2, use_bias=False, name="small", dtype=policy)
    large = keras.layers.Dense(2, use_bias=False, name="large", dtype=policy)
    return model_class(inputs, [small(inputs), large(inputs)])


def window_fit(model, scale, health, epochs=1, **kwargs):
    optimizer = keras.optimizers.SGD(0.0)
    if isinstance(model, tfmixed.Model):
        optimizer = tfmixed.LossScaleOptimizer(optimizer, scale)
    model.compile(optimizer, [Times(SMALL), Times(LARGE)], **kwargs)
    x = np.ones((64, 3), "float32")
    y = [np.zeros((64, 2), "float32")] * 2
    monitor = LossScaleMonitor()
    model.fit(
        x,
        y,
        batch_size=2,
        epochs=epochs,
        verbose=0,
        callbacks=[monitor, health],
    )
    return monitor


def rows_of(health):
    rows = {row.path: row for row in health.history[0].layers}
    return rows["small"], rows["large"]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_the_window_and_the_scale_that_settles_in_it(how):
    health = GradientHealth(every=8, verbose=False)
    scale = tfmixed.DynamicLossScale(initial=2.0**20, growth_interval=4)
    monitor = window_fit(window_model(), scale, health, 2, **how)
    found = health.history[-1]
    # 2^k * 2^-3 is below 65520 up to k = 18; 2^k * 2^-26 above 2^-25 from 2.
    assert found.window.highest == 2.0**18
    assert found.window.lowest == 4.0
    assert (found.upper, found.lower) == ("large", "small")
    # What is too high is tried now and then, and skipped.
    finite = monitor.records["finite"]
    settled = monitor.records["loss_scale"][8:][finite[8:]]
    assert set(settled.tolist()) <= {2.0**17, 2.0**18}
    assert all(value in found.window for value in settled)
    assert not finite[:2].any()


def test_complete_underflow_is_not_zero_percent():
    health = GradientHealth(every=1000)
    window_fit(window_model(), 1.0, health)
    small, large = rows_of(health)
    assert small.path == "small"
    assert small.underflow == 1.0
    assert small.norm == pytest.approx(2 * SMALL * 6**0.5)
    assert small.error == pytest.approx(1.0)
    assert large.underflow == 0.0
    assert large.largest == 2 * LARGE
    assert large.smallest == LARGE
    assert large.window.highest == 2.0**18


def test_overflow_as_a_share():
    health = GradientHealth(every=1000)
    scale = tfmixed.FixedLossScale(2.0**19)
    window_fit(window_model(), scale, health)
    _, large = rows_of(health)
    # The six weights overflow, the four outputs (2^15) do not.
    assert large.overflow == pytest.approx(0.6)


def test_exponents_are_counted():
    health = GradientHealth(every=1000)
    window_fit(window_model(), 1.0, health)
    _, large = rows_of(health)
    counts = dict(enumerate(large.exponents, large.lowest_exponent))
    assert counts[-4] == 4
    assert counts[-3] == 6
    assert sum(counts.values()) == 10


@pytest.mark.parametrize("model_class", [tfmixed.Model, keras.Model])
def test_two_replicas(two_replicas, model_class):
    health = GradientHealth(every=1000)
    with two_replicas.scope():
        model = window_model(model_class)
        window_fit(model, 1.0, health, jit_compile=False)
    small, large = rows_of(health)
    # A row each; both together as if they were one batch of two.
    assert large.exponents.sum() == 2 * (6 + 2)
    assert large.largest == LARGE
    if model_class is tfmixed.Model:
        assert small.underflow == 1.0


def test_a_float32_model_needs_no_scale():
    health = GradientHealth(every=1000)
    window_fit(window_model(policy="float32"), 1.0, health)
    assert health.history[0].window is None
    assert "no loss scale is needed" in str(health.history[0])


def rich_model(model_class):
    """Dropout, statistics, a regularizer, an added loss: state of all sorts."""
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, kernel_regularizer="l2")(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.5, seed=3)(x)
    if model_class is tfmixed.Model:
        # Keras adds this loss to another of another dtype, and fails.
        x = keras.layers.ActivityRegularization(1e-3)(x)
    x = keras.layers.Normalization(mean=1.0, variance=4.0)(x)
    return model_class(inputs, keras.layers.Dense(1, dtype="float32")(x))


def data(count=64):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(count, 6)).astype("float32")
    return x, x[:, :1] * 2.0


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("keras", {}),
        ("tfmixed", {}),
        pytest.param("prepared", {}, marks=pytest.mark.slow),
        *[
            pytest.param(kind, how, marks=pytest.mark.long)
            for kind in ("keras", "tfmixed", "prepared")
            for how in (
                {"steps_per_execution": 4},
                {"jit_compile": True},
                {"run_eagerly": True},
            )
        ],
    ],
)
def test_the_training_is_the_same_with_and_without(kind, how):
    results = []
    for callbacks in ([], [GradientHealth(every=3, verbose=False)]):
        keras.utils.clear_session()
        keras.config.set_dtype_policy("mixed_float16")
        keras.utils.set_random_seed(5)
        base = tfmixed.Model if kind == "tfmixed" else keras.Model
        model = rich_model(base)
        if kind == "prepared":
            model = tfmixed.prepare(model, "mixed_float16")
        model.compile("adam", "mse", metrics=["mae"], **how)
        x, y = data()
        history = model.fit(
            x,
            y,
            batch_size=8,
            epochs=2,
            verbose=0,
            shuffle=False,
            callbacks=callbacks,
        ).history
        results.append(numpy_of(model.variables) + [history["loss"]])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_errors_against_numpy():
    """The weight gradients of one layer, in float16 and in float64."""
    inputs = keras.Input((6,))
    layer = keras.layers.Dense(1, use_bias=False, dtype="mixed_float16")
    model = tfmixed.Model(inputs, layer(inputs))
    optimizer = tfmixed.LossScaleOptimizer(keras.optimizers.SGD(0.0), 64.0)
    model.compile(optimizer, "mse")
    x, y = data(16)
    health = GradientHealth(every=100)
    kernel = layer.kernel.numpy().astype("float64")
    model.fit(x, y, batch_size=16, verbose=0, shuffle=False, callbacks=[health])
    difference = x.astype("float64") @ kernel - y
    gradient = 2 * x.T.astype("float64") @ difference / 16
    (row,) = health.history[0].layers
    assert row.norm == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
    # float16 rounds to 11 bits.
    assert 0 < row.error < 2.0**-9
    assert 0 < row.output_error < 2.0**-9


def test_dropout_draws_the_same_in_both_runs():
    keras.config.set_dtype_policy("mixed_float16")
    model = rich_model(tfmixed.Model)
    model.compile("sgd", "mse")
    x, y = data()
    health = GradientHealth(every=100)
    model.fit(x, y, batch_size=64, verbose=0, callbacks=[health])
    # Other units would be dropped: errors of 100 % and more.
    assert max(row.output_error for row in health.history[0].layers) < 0.01
    assert max(row.error for row in health.history[0].layers) < 0.05


def test_every_and_a_second_fit():
    health = GradientHealth(every=3, verbose=False)
    model = rich_model(tfmixed.Model)
    model.compile("sgd", "mse")
    x, y = data(80)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[health])
    assert [found.step for found in health.history] == [0, 3, 6, 9]
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[health])
    assert [found.step for found in health.history] == [10, 13, 16, 19]
    # Nothing is left behind.
    assert not hasattr(model.train_function, "executions")
    assert "train_step" not in vars(model)


def test_an_interrupted_training_leaves_nothing_that_acts():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    health = GradientHealth(every=1, verbose=False)
    model = rich_model(tfmixed.Model)
    model.compile("sgd", "mse")
    x, y = data()
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[health, Stop()])
    before = len(health.history)
    model.fit(x, y, batch_size=8, verbose=0)
    assert len(health.history) == before


def test_history_table_and_tensorboard(tmp_path, capsys):
    health = GradientHealth(every=4, log_dir=tmp_path)
    model = window_model()
    model.compile(
        tfmixed.LossScaleOptimizer(keras.optimizers.SGD(0.0), 1.0),
        [Times(SMALL), Times(LARGE)],
    )
    x, y = np.ones((16, 3), "float32"), [np.zeros((16, 2), "float32")] * 2
    history = model.fit(x, y, batch_size=2, verbose=2, callbacks=[health])
    assert history.history["underflow"] == [1.0]
    assert history.history["overflow"] == [0.0]
    told = capsys.readouterr().out
    assert "Safe loss scales: 4 to 2^18" in told
    assert "The scale 1 is outside." in told
    assert "100.00%" in health.table()
    tags = set()
    for path in tmp_path.glob("events*"):
        for record in tf.data.TFRecordDataset(str(path)):
            event = event_pb2.Event.FromString(record.numpy())
            tags |= {value.tag for value in event.summary.value}
    assert "gradient_health/underflow/small" in tags
    assert "gradient_exponents/large" in tags


@pytest.mark.parametrize(("size", "is_small"), [(2, True), (16, False)])
def test_statistics_of_few_examples_are_told_of(size, is_small, capsys):
    inputs = keras.Input((6,))
    x = keras.layers.BatchNormalization(dtype="mixed_bfloat16")(inputs)
    model = tfmixed.Model(inputs, keras.layers.Dense(1, dtype="float32")(x))
    model.compile("sgd", "mse")
    health = GradientHealth()
    x, y = data(32)
    model.fit(x, y, batch_size=size, verbose=2, callbacks=[health])
    assert (health.advice is not None) == is_small
    assert ("The statistics of" in capsys.readouterr().out) == is_small


@pytest.mark.parametrize("every", [0, -3, 2.5, True, "10"])
def test_every_must_be_a_count(every):
    with pytest.raises(ValueError, match="whole number of 1 or more"):
        GradientHealth(every=every)


def test_models_that_cannot_be_measured(two_replicas):
    x, y = data()
    model = rich_model(tfmixed.Model)
    model.compile("sgd", None)
    with pytest.raises(ValueError, match="given no loss"):
        model.fit(x, y, verbose=0, callbacks=[GradientHealth()])
    with two_replicas.scope():
        inputs = keras.Input((6,))
        outputs = keras.layers.BatchNormalization(synchronized=True)(inputs)
        model = tfmixed.Model(inputs, outputs)
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="synchronized=True"):
        model.fit(x, x, verbose=0, callbacks=[GradientHealth()])


# Keras says so of every generator that ends.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    "how", ["generator", "dataset", "pydataset", "weights"]
)
def test_all_kinds_of_data(how):
    x, y = data(32)

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            rows = slice(index * 8, index * 8 + 8)
            return x[rows], y[rows]

    def generate():
        for index in range(4):
            yield x[index * 8 : index * 8 + 8], y[index * 8 : index * 8 + 8]

    given, kwargs = {
        "generator": (generate(), {"shuffle": False}),
        "dataset": (
            tf.data.Dataset.from_tensor_slices((x, y)).batch(8),
            {"shuffle": False},
        ),
        "pydataset": (Batches(), {}),
        "weights": (
            x,
            {
                "y": (y[:, 0] > 0).astype("int32"),
                "batch_size": 8,
                "class_weight": {0: 1.0, 1: 2.0},
                "validation_data": (x, y > 0),
            },
        ),
    }[how]
    model = rich_model(tfmixed.Model)
    model.compile("sgd", "mse")
    health = GradientHealth(every=2, verbose=False)
    model.fit(given, verbose=0, callbacks=[health], **kwargs)
    assert [found.step for found in health.history] == [0, 2]
