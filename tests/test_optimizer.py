import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import batches
from support import losses_of
from support import number
from support import numpy_of
from support import small_model
from support import trained

import tfmixed

STOCK = keras.optimizers.LossScaleOptimizer
OPTIMIZERS = [
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Adamax,
    keras.optimizers.Adafactor,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
    keras.optimizers.Nadam,
    keras.optimizers.Lamb,
]
# Arguments that change how an optimizer applies gradients.
ARGUMENTS = {
    "plain": {},
    "clipnorm": {"clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.01},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "weight_decay": {"weight_decay": 0.1},
    "ema": {"use_ema": True, "ema_overwrite_frequency": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "schedule": {
        "learning_rate": keras.optimizers.schedules.ExponentialDecay(
            0.1, decay_steps=1, decay_rate=0.5
        )
    },
}


class Loop:
    """A loop of one's own over two variables, one of them sparse."""

    def __init__(self, optimizer, sparse=True):
        kernel = np.linspace(-1, 1, 12, dtype="float32").reshape(4, 3)
        table = np.linspace(-2, 2, 40, dtype="float32").reshape(10, 4)
        self.kernel, self.table = keras.Variable(kernel), keras.Variable(table)
        self.variables = [self.kernel, self.table]
        self.sparse = sparse
        self.optimizer = optimizer

    def step(self, factor):
        with tf.GradientTape() as tape:
            table = tf.convert_to_tensor(self.table.value)
            if self.sparse:
                rows = tf.gather(self.table.value, [1, 7, 1])
            else:
                rows = table[:3]
            loss = tf.reduce_sum(tf.square(rows @ self.kernel.value)) * factor
            loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, [v.value for v in self.variables])
        if self.sparse:
            assert isinstance(gradients[1], tf.IndexedSlices)
        self.optimizer.apply(gradients, self.variables)


def history(loop, step, factors):
    states = []
    for factor in factors:
        step(tf.constant(factor))
        states.append(numpy_of(loop.variables))
    return states


def modes():
    return [
        lambda function: function,
        tf.function,
        lambda function: tf.function(function, jit_compile=True),
    ]


@pytest.mark.parametrize("optimizer_class", OPTIMIZERS)
def test_every_optimizer_gets_the_true_gradients(optimizer_class):
    """Good steps equal those of the plain optimizer, bad ones do nothing."""
    control = Loop(optimizer_class(0.05))
    loop = Loop(tfmixed.LossScaleOptimizer(optimizer_class(0.05), 2.0**12))
    loop.optimizer.build(loop.variables)
    control.optimizer.build(control.variables)
    good = history(control, tf.function(control.step), [1.0, 0.5, 2.0])
    mixed = history(
        loop, tf.function(loop.step), [1.0, np.nan, 0.5, np.inf, 2.0]
    )
    good = [good[0], good[0], good[1], good[1], good[2]]
    for expected, actual in zip(good, mixed, strict=True):
        for one, other in zip(expected, actual, strict=True):
            np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)
    assert number(loop.optimizer.skipped_steps) == 2
    assert number(loop.optimizer.iterations) == 3


@pytest.mark.parametrize("mode", modes(), ids=["eager", "graph", "xla"])
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_what_the_inner_optimizer_does_is_unscaled(mode, arguments):
    # XLA and accumulation have no kernels for sparse gradients in Keras.
    arguments = {"learning_rate": 0.05, **ARGUMENTS[arguments]}
    control = Loop(keras.optimizers.SGD(**arguments), sparse=False)
    inner = keras.optimizers.SGD(**arguments)
    loop = Loop(tfmixed.LossScaleOptimizer(inner, 2.0**12), sparse=False)
    for one in (control, loop):
        one.optimizer.build(one.variables)
    good = history(control, mode(control.step), [1.0, 0.5, 2.0, 1.0])
    mixed = history(loop, mode(loop.step), [1.0, 0.5, np.nan, 2.0, 1.0])
    del mixed[2]
    for expected, actual in zip(good, mixed, strict=True):
        for one, other in zip(expected, actual, strict=True):
            np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"),
    reason="this Keras has no MultiOptimizer",
)
def test_multi_optimizer():
    def build():
        rates = {"a": keras.optimizers.SGD(0.1), "b": keras.optimizers.Adam()}
        return keras.optimizers.MultiOptimizer(
            lambda variable: rates["a" if variable.shape[0] == 4 else "b"]
        )

    control = Loop(build())
    loop = Loop(tfmixed.LossScaleOptimizer(build(), 2.0**12))
    good = history(control, control.step, [1.0, 0.5])
    mixed = history(loop, loop.step, [1.0, np.nan, 0.5])
    for index, expected in [(0, good[0]), (1, good[0]), (2, good[1])]:
        for one, other in zip(expected, mixed[index], strict=True):
            np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)


def test_scale_of_a_float16_loss_is_finite_before_build():
    optimizer = tfmixed.LossScaleOptimizer("sgd")
    scaled = optimizer.scale_loss(tf.constant(100.0, tf.float16))
    assert scaled.dtype == "float32"
    assert float(scaled) == 100 * 2.0**15


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_scale_never_passes_its_bounds_and_comes_back(hysteresis):
    """142 bad steps take stock Keras to scale 0, 113 good ones to inf."""
    scale = tfmixed.DynamicLossScale(growth_interval=1, hysteresis=hysteresis)
    optimizer = tfmixed.LossScaleOptimizer(keras.optimizers.SGD(0.0), scale)
    weight = keras.Variable([1.0])
    optimizer.build([weight])

    @tf.function
    def step(factor):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(weight * factor))
        optimizer.apply(tape.gradient(loss, [weight]), [weight])

    for _ in range(142):
        step(tf.constant([np.nan]))
    assert number(optimizer.dynamic_scale) == 1.0
    assert number(optimizer.consecutive_skips) == 142
    for _ in range(142):
        step(tf.constant([1.0]))
    assert number(optimizer.dynamic_scale) == 2.0**24
    assert number(optimizer.skipped_steps) == 142
    assert np.isfinite(weight.numpy()).all()


def test_stock_keras_has_no_bounds():
    """Why: the same history in stock Keras."""
    optimizer = STOCK(keras.optimizers.SGD(1.0), dynamic_growth_steps=1)
    weight = keras.Variable([1.0])
    optimizer.build([weight])
    for _ in range(170):
        optimizer.apply([tf.constant([np.nan])], [weight])
    assert number(optimizer.dynamic_scale) == 0.0
    optimizer.apply([tf.constant([0.0])], [weight])
    assert np.isnan(weight.numpy()).all()


def scaled_model(loss_scale=None, optimizer=None):
    model = small_model(tfmixed.Model)
    loss_scale = loss_scale or tfmixed.DynamicLossScale(
        initial=64.0, growth_interval=3, minimum=2.0, hysteresis=2
    )
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    model.compile(tfmixed.LossScaleOptimizer(optimizer, loss_scale), "mse")
    return model


class TestSaving:
    def test_keras_file_goes_on_as_if_nothing_had_happened(self, tmp_path):
        model = trained(scaled_model(), bad=(1, 2, 5))
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert type(loaded.optimizer) is tfmixed.LossScaleOptimizer
        assert loaded.optimizer.loss_scale == model.optimizer.loss_scale
        for one, other in zip(
            numpy_of(model.optimizer.variables),
            numpy_of(loaded.optimizer.variables),
            strict=True,
        ):
            np.testing.assert_array_equal(one, other)
        assert losses_of(loaded) == losses_of(model)
        assert number(loaded.optimizer.skipped_steps) == 3

    def test_checkpoint(self, tmp_path):
        model = trained(scaled_model(), bad=(1, 2, 5))
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        path = checkpoint.write(str(tmp_path / "checkpoint"))
        other = scaled_model()
        other.optimizer.build(other.trainable_variables)
        tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(
            path
        ).assert_existing_objects_matched()
        assert number(other.optimizer.skipped_steps) == 3
        assert number(other.optimizer.dynamic_scale) == number(
            model.optimizer.dynamic_scale
        )
        assert losses_of(other) == losses_of(model)

    def test_backup_and_restore(self, tmp_path):
        class InterruptionError(Exception):
            pass

        class Interrupt(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                if epoch == 1:
                    raise InterruptionError

        x, y = (
            np.concatenate(p) for p in zip(*batches(6, bad=(4,)), strict=True)
        )
        fit = {"epochs": 4, "batch_size": 8, "shuffle": False, "verbose": 0}
        keras.utils.set_random_seed(1)
        whole = scaled_model()
        expected = quietly(lambda: whole.fit(x, y, **fit)).history["loss"]
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
        keras.utils.set_random_seed(1)
        first = scaled_model()
        # The backup of an epoch is written before the interruption of it.
        with contextlib.suppress(InterruptionError):
            quietly(
                lambda: first.fit(x, y, callbacks=[backup, Interrupt()], **fit)
            )
        second = scaled_model()
        resumed = quietly(lambda: second.fit(x, y, callbacks=[backup], **fit))
        assert (
            resumed.history["loss"] == expected[-len(resumed.history["loss"]) :]
        )
        assert number(second.optimizer.skipped_steps) == 4
        assert number(second.optimizer.dynamic_scale) == number(
            whole.optimizer.dynamic_scale
        )

    @pytest.mark.parametrize(
        "loss_scale",
        ["dynamic", "none", 96.0, tfmixed.DynamicLossScale(maximum=2.0**20)],
    )
    def test_config_round_trip(self, loss_scale):
        optimizer = tfmixed.LossScaleOptimizer(
            keras.optimizers.Adam(0.25, clipnorm=3.0), loss_scale, name="mine"
        )
        config = optimizer.get_config()
        before = repr(config)
        again = tfmixed.LossScaleOptimizer.from_config(config)
        assert repr(config) == before
        assert again.get_config() == config
        assert again.loss_scale == optimizer.loss_scale
        serialized = keras.optimizers.serialize(optimizer)
        assert serialized["registered_name"] == "tfmixed>LossScaleOptimizer"
        assert keras.optimizers.deserialize(serialized).get_config() == config


def quietly(function):
    """The warning about skipped steps has tests of its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "[0-9]+ of [0-9]+ training step")
        return function()


def test_apply_outside_of_a_replica_raises(two_replicas):
    with two_replicas.scope():
        weight = keras.Variable([1.0])
        optimizer = tfmixed.LossScaleOptimizer("sgd")
        optimizer.scale_loss(1.0)
        with pytest.raises(ValueError, match="strategy.run"):
            optimizer.apply([tf.constant([1.0])], [weight])


def test_no_gradient_for_any_variable():
    optimizer = tfmixed.LossScaleOptimizer("sgd")
    optimizer.scale_loss(1.0)
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply([None], [keras.Variable([1.0])])


def test_first_call_without_variables():
    optimizer = tfmixed.LossScaleOptimizer("sgd")
    optimizer.scale_loss(1.0)
    with pytest.raises(ValueError, match="needs the variables at its first"):
        optimizer.apply([tf.constant([1.0])])


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("built", [True, False])
def test_loop_over_replicas(graph, built, two_replicas):
    with two_replicas.scope():
        weight = keras.Variable([1.0])
        optimizer = tfmixed.LossScaleOptimizer(keras.optimizers.SGD(0.5))
        if built:
            optimizer.build([weight])

    def step(x):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(weight.value * x) / 2)
        optimizer.apply(tape.gradient(loss, [weight.value]), [weight])

    def run(x):
        two_replicas.run(step, args=(x,))

    run = tf.function(run) if graph else run
    if graph and not built:
        with pytest.raises(RuntimeError, match="strategy.scope"):
            run(tf.constant([1.0]))
        return
    run(tf.constant([1.0]))
    assert number(weight) == 0.5
    run(tf.constant([np.nan]))
    assert number(weight) == 0.5
    assert number(optimizer.skipped_steps) == 1
