import contextlib
import subprocess
import sys
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
from tfmixed.loss_scale import LossScale

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
        [
            *["dynamic", "none", 96.0],
            tfmixed.DynamicLossScale(maximum=2.0**20),
            tfmixed.ScheduledLossScale({0: 96.0, 5: 8.0}, minimum=2.0),
            tfmixed.PredictiveLossScale(headroom=4.0),
        ],
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


# With histories that leave each value of their memory away from the first.
WITH_MEMORY = {
    "scheduled": tfmixed.ScheduledLossScale(
        {0: 64.0, 8: 16.0}, growth_interval=3
    ),
    "predictive": tfmixed.PredictiveLossScale(
        initial=64.0, warm_up=4, growth_interval=3, headroom=1.5
    ),
}
# The saved order: what stands after these is the inner optimizer.
OWN_VARIABLES = [
    *["iteration", "learning_rate", "step_counter", "dynamic_scale"],
    *["skipped_steps", "consecutive_skips", "last_step_finite"],
]


@pytest.mark.parametrize(
    ("loss_scale", "count"),
    [
        *[("dynamic", 0), (8.0, 0), ("none", 0)],
        *[(WITH_MEMORY["scheduled"], 1), (WITH_MEMORY["predictive"], 4)],
    ],
)
def test_memory_comes_after_the_other_variables(loss_scale, count):
    optimizer = tfmixed.LossScaleOptimizer("sgd", loss_scale)
    weight = keras.Variable([1.0])
    optimizer.build([weight])
    own = optimizer.variables[: -len(optimizer.inner_optimizer.variables)]
    memory = [f"loss_scale_memory_{index}" for index in range(count)]
    assert [variable.name for variable in own] == OWN_VARIABLES + memory
    assert {v.dtype for v in own[len(OWN_VARIABLES) :]} <= {"float32"}
    first = optimizer.loss_scale.initial_state().memory
    assert tuple(numpy_of(own[len(OWN_VARIABLES) :])) == first


NEXT_SCALES = """
import sys
sys.path.insert(0, {tests!r})
import keras
from support import batches, number
import tfmixed

model = keras.models.load_model({path!r})
for x, y in batches(6, seed=9, bad=(2,)):
    model.train_on_batch(x, y)
    print(number(model.optimizer.dynamic_scale))
"""


@pytest.mark.parametrize("name", WITH_MEMORY)
class TestSavingMemory:
    def trained(self, name, **how):
        return trained(scaled_model(WITH_MEMORY[name]), bad=(1, 2), **how)

    def next_scales(self, model):
        scales = []
        for x, y in batches(6, seed=9, bad=(2,)):
            model.train_on_batch(x, y)
            scales.append(number(model.optimizer.dynamic_scale))
        return scales

    @pytest.mark.slow
    def test_keras_file_in_a_fresh_process(self, name, tmp_path, request):
        model = self.trained(name)
        model.save(tmp_path / "model.keras")
        code = NEXT_SCALES.format(
            tests=str(request.path.parent), path=str(tmp_path / "model.keras")
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
        )
        scales = [float(line) for line in done.stdout.split()[-6:]]
        assert scales == self.next_scales(model)
        # Without the memory they are others.
        forgetful = self.trained(name)
        forgetful.optimizer._variables[-1].assign(1.0)
        assert scales != self.next_scales(forgetful)

    def test_checkpoint(self, name, tmp_path):
        model = self.trained(name)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        path = checkpoint.write(str(tmp_path / "checkpoint"))
        other = scaled_model(WITH_MEMORY[name])
        other.optimizer.build(other.trainable_variables)
        tf.train.Checkpoint(model=other, optimizer=other.optimizer).read(
            path
        ).assert_existing_objects_matched()
        for one, copy in zip(
            numpy_of(model.optimizer.variables),
            numpy_of(other.optimizer.variables),
            strict=True,
        ):
            np.testing.assert_array_equal(copy, one)
        assert self.next_scales(other) == self.next_scales(model)

    def test_state_that_was_saved_without_memory(self, name):
        """A dynamic scale before; the memory begins with this file."""
        dynamic, store = trained(scaled_model(), bad=(1,)).optimizer, {}
        dynamic.save_own_variables(store)
        model = scaled_model(WITH_MEMORY[name])
        model.optimizer.build(model.trainable_variables)
        model.optimizer.load_own_variables(store)
        assert number(model.optimizer.skipped_steps) == 1
        assert number(model.optimizer.iterations) == 5
        for one, other in zip(
            numpy_of(dynamic.inner_optimizer.variables),
            numpy_of(model.optimizer.inner_optimizer.variables),
            strict=True,
        ):
            np.testing.assert_array_equal(one, other)

    def test_a_running_keras_optimizer_is_taken_over(self, name):
        stock = STOCK(keras.optimizers.SGD(0.5), initial_scale=32.0)
        weight = keras.Variable([1.0])
        stock.apply([tf.constant([32.0])], [weight])
        wrapped = tfmixed.wrap_optimizer(stock, loss_scale=WITH_MEMORY[name])
        loss = wrapped.scale_loss(tf.constant(1.0))
        assert number(loss) == 32.0
        wrapped.apply([tf.constant([32.0])], [weight])
        assert number(weight) == 0.0


class Seen(LossScale):
    """Remembers the largest gradient of each step, up to three of them."""

    initial = 4.0
    uses_largest = True

    def initial_state(self):
        return super().initial_state()._replace(memory=(-1.0,) * 3)

    def update(self, state, outcome):
        new = super().update(state, outcome)
        return new._replace(memory=(*state.memory[1:], outcome.largest))


def seen_by(optimizer):
    return [number(v) for v in optimizer._variables[len(OWN_VARIABLES) :]]


@pytest.mark.parametrize("mode", modes(), ids=["eager", "graph", "xla"])
class TestLargest:
    @pytest.mark.parametrize("clip", [False, True])
    def test_of_all_gradients(self, mode, clip):
        """Unscaled, and before they were clipped by hand."""
        optimizer = tfmixed.LossScaleOptimizer("sgd", Seen())
        weights = [keras.Variable([1.0, 1.0]), keras.Variable([[1.0]])]
        nothing = keras.Variable(np.zeros((0, 3), "float32"))
        half = keras.Variable([1.0], dtype="float16")
        weights += [nothing, half]
        optimizer.build(weights)

        @mode
        def step(first, second, third):
            optimizer.scale_loss(tf.constant(1.0))
            gradients = [first * 4.0, [[second * 4.0]], tf.zeros((0, 3))]
            gradients = [tf.convert_to_tensor(g) for g in gradients]
            gradients.append(tf.cast([third * 4.0], tf.float16))
            if clip:
                gradients = optimizer.unscale(gradients)
                gradients = [tf.clip_by_value(g, -0.5, 0.5) for g in gradients]
            optimizer.apply(gradients, weights)

        for numbers in [([1.0, -7.0], 2.0, 3.0), ([1.0, 2.0], -9.0, 0.0)]:
            step(*map(tf.constant, numbers))
        step(tf.constant([0.0, 0.0]), tf.constant(0.0), tf.constant(-11.0))
        assert seen_by(optimizer) == [7.0, 9.0, 11.0]

    def test_an_infinite_one_is_seen_or_the_step_is_bad(self, mode):
        optimizer = tfmixed.LossScaleOptimizer("sgd", Seen())
        weight = keras.Variable([1.0, 1.0])
        optimizer.build([weight])

        @mode
        def step(gradient):
            optimizer.scale_loss(tf.constant(1.0))
            optimizer.apply([gradient], [weight])

        step(tf.constant([1.0, np.inf]))
        assert seen_by(optimizer)[-1] == np.inf
        assert number(optimizer.skipped_steps) == 1


@pytest.mark.parametrize("mode", modes()[:2], ids=["eager", "graph"])
def test_replicas_see_the_largest_of_all(mode, two_replicas):
    with two_replicas.scope():
        weight = keras.Variable([1.0, 1.0])
        optimizer = tfmixed.LossScaleOptimizer("sgd", Seen())
        optimizer.build([weight])

    def step(gradient):
        optimizer.scale_loss(tf.constant(1.0))
        optimizer.apply([gradient], [weight])

    run = mode(lambda x: two_replicas.run(step, args=(x,)))
    for pair in [(3.0, -8.0), (-20.0, 4.0), (np.nan, 0.5)]:
        run(
            two_replicas.experimental_distribute_values_from_function(
                lambda context, pair=pair: tf.constant(
                    [0.0, 4.0 * pair[context.replica_id_in_sync_group]]
                )
            )
        )
    assert number(optimizer.skipped_steps) == 1
    for variable in optimizer._variables[len(OWN_VARIABLES) :]:
        first, second = (v.numpy() for v in variable.value.values)
        np.testing.assert_array_equal(first, second)
    assert seen_by(optimizer)[:2] == [8.0, 20.0]


def test_sparse_gradients_are_not_densified():
    """The rows alone, in the units of the loss."""
    loop = Loop(tfmixed.LossScaleOptimizer(keras.optimizers.SGD(0.0), Seen()))
    loop.optimizer.build(loop.variables)
    kernel, table = (v.numpy().astype("float64") for v in loop.variables)
    rows = table[[1, 7, 1]]
    product = rows @ kernel
    to_kernel, to_rows = rows.T @ product * 2, product @ kernel.T * 2
    largest = max(np.abs(to_kernel).max(), np.abs(to_rows).max())

    @tf.function
    def step(factor):
        loop.step(factor)

    concrete = step.get_concrete_function(tf.constant(1.0))
    kinds = {operation.type for operation in concrete.graph.get_operations()}
    assert "UnsortedSegmentSum" not in kinds
    step(tf.constant(1.0))
    step(tf.constant(0.5))
    np.testing.assert_allclose(
        seen_by(loop.optimizer)[1:], [largest, largest / 2], rtol=1e-5
    )


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_adaptive_scales_on_two_replicas(name, two_replicas):
    """Each replica gets the same half: as one would with that half alone."""
    x, y = (
        np.concatenate(part) for part in zip(*batches(8, bad=(5,)), strict=True)
    )
    alone = scaled_model(WITH_MEMORY[name], keras.optimizers.SGD(0.01))
    with two_replicas.scope():
        model = scaled_model(WITH_MEMORY[name], keras.optimizers.SGD(0.01))
    model.set_weights(alone.get_weights())
    twice = [
        np.concatenate([np.tile(p, (2,) + (1,) * (p.ndim - 1)) for p in parts])
        for parts in (np.split(x, 8), np.split(y, 8))
    ]
    for one, data, size in [(alone, (x, y), 8), (model, twice, 16)]:
        quietly(
            lambda one=one, data=data, size=size: one.fit(
                *data, batch_size=size, shuffle=False, verbose=0
            )
        )
    assert number(model.optimizer.skipped_steps) == 1
    # Keras halves the loss of each, so half of the gradients can overflow.
    factor = {"scheduled": 1, "predictive": 2}[name]
    assert number(model.optimizer.dynamic_scale) == factor * number(
        alone.optimizer.dynamic_scale
    )


@pytest.mark.parametrize("name", WITH_MEMORY)
@pytest.mark.parametrize(
    "how",
    [{"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 4}],
    ids=["eager", "xla", "in a loop"],
)
def test_adaptive_scales_are_the_same_in_every_mode(name, how):
    x, y = (
        np.concatenate(part) for part in zip(*batches(8, bad=(5,)), strict=True)
    )
    states = []
    for arguments in ({}, how):
        model = scaled_model(WITH_MEMORY[name], keras.optimizers.SGD(0.01))
        model.compile(model.optimizer, "mse", **arguments)
        model.set_weights(small_weights(model))
        quietly(
            lambda model=model: model.fit(
                x, y, batch_size=8, shuffle=False, verbose=0
            )
        )
        states.append(numpy_of(model.optimizer._variables))
    for one, other in zip(*states, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3)


def small_weights(model):
    generator = np.random.default_rng(0)
    return [
        generator.uniform(0.1, 1.0, weight.shape).astype("float32")
        for weight in model.get_weights()
    ]


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
