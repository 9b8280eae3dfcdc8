import keras
import numpy as np
import pytest
from keras import layers
from support import numpy_of

import tfmixed
from tfmixed.convert.carry import carry_compile
from tfmixed.preparation import Account

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 2)).astype("float32")


def branched():
    """Layers of one shape in branches, made in another order than called."""
    inputs = keras.Input((6,))
    c, a, b = (layers.Dense(6, "tanh", name=n) for n in ("c", "a", "b"))
    x = layers.Add()([b(inputs), a(inputs), c(a(inputs))])
    x = layers.BatchNormalization(name="norm")(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x), name="it")


def step(model, number):
    """One update with gradients that are drawn: much faster than a batch."""
    generator = np.random.default_rng(number)
    weights = model.trainable_variables
    if not model.optimizer.built:
        model.optimizer.build(weights)
    scale = model.optimizer.scale_loss(keras.ops.ones(()))
    gradients = [
        scale * keras.ops.cast(generator.normal(size=w.shape), "float32")
        for w in weights
    ]
    model.optimizer.apply(gradients)


def compiled(optimizer, steps=3, frozen=(), **arguments):
    model = branched()
    for name in frozen:
        model.get_layer(name).trainable = False
    model.compile(optimizer, "mse", run_eagerly=True, **arguments)
    for number in range(steps):
        step(model, number)
    return model


def carried(source, target):
    account = Account()
    carry_compile(source, target, account)
    return account.notes


def schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)


OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01, beta_1=0.7, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(
        0.01, weight_decay=0.1, clipnorm=0.5, use_ema=True, ema_momentum=0.8
    ),
    "RMSprop": lambda: keras.optimizers.RMSprop(
        0.01, rho=0.8, momentum=0.5, centered=True
    ),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "accumulating": lambda: keras.optimizers.Adam(
        0.01, gradient_accumulation_steps=2
    ),
    "with a schedule": lambda: keras.optimizers.SGD(schedule(), momentum=0.5),
}


def settings(optimizer):
    config = optimizer.get_config()
    return {k: v for k, v in config.items() if k != "name"}


@pytest.mark.parametrize("prepared_first", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_next_step_is_that_of_the_original(kind, prepared_first):
    source = compiled(OPTIMIZERS[kind]())
    target = tfmixed.prepare(source, "float32")
    if prepared_first:
        source, target = target, tfmixed.to_float32(target)
    optimizer, copy = source.optimizer, target.optimizer
    if prepared_first:
        assert not isinstance(copy, keras.optimizers.LossScaleOptimizer)
        optimizer = optimizer.inner_optimizer
    else:
        assert isinstance(copy, tfmixed.LossScaleOptimizer)
        copy = copy.inner_optimizer
    assert type(copy) is type(optimizer)
    assert settings(copy) == settings(optimizer)
    assert int(copy.iterations) == int(optimizer.iterations)
    assert copy.variables[0] is not optimizer.variables[0]
    for number in range(2):
        step(source, number)
        step(target, number)
        for one, other in zip(
            numpy_of(source.weights), numpy_of(target.weights), strict=True
        ):
            # The update by a kernel rounds in another order.
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    # They have nothing in common.
    before = numpy_of(source.weights + optimizer.variables)
    step(target, 2)
    after = numpy_of(source.weights + optimizer.variables)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_next_batch_is_that_of_the_original():
    """As before, with all of the training step."""
    source = compiled(keras.optimizers.Adam(0.01))
    target = tfmixed.prepare(source, "float32")
    for _ in range(2):
        source.train_on_batch(X, Y)
        target.train_on_batch(X, Y)
    for one, other in zip(
        numpy_of(source.weights), numpy_of(target.weights), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def slots(model):
    """The moments of each weight, by the name of its layer."""
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    weights = [v.path for v in optimizer._trainable_variables]
    moments = numpy_of(optimizer._momentums)
    return dict(zip(weights, moments, strict=True))


def test_each_weight_keeps_its_own_moments():
    source = compiled(keras.optimizers.Adam(0.01))
    target = tfmixed.prepare(source, "mixed_bfloat16")
    ours, theirs = slots(source), slots(target)
    assert {"a/kernel", "b/kernel", "c/kernel"} < set(ours)
    assert ours.keys() == theirs.keys()
    for path, moment in ours.items():
        np.testing.assert_array_equal(theirs[path], moment)
    assert not np.array_equal(ours["a/kernel"], ours["b/kernel"])


def test_frozen_layers_have_no_moments_before_and_after():
    source = compiled("adam", frozen=("a", "norm"))
    target = tfmixed.prepare(source, "mixed_float16")
    assert slots(source).keys() == slots(target).keys()
    assert "a/kernel" not in slots(target)
    before = target.get_layer("a").get_weights()
    step(target, 7)
    after = target.get_layer("a").get_weights()
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_layer_frozen_after_the_compilation():
    """The optimizer still has slots for it, and so has the copy."""
    source = compiled(keras.optimizers.Adam(0.01))
    source.get_layer("a").trainable = False
    target = tfmixed.prepare(source, "float32")
    assert int(target.optimizer.inner_optimizer.iterations) == 3


def test_an_optimizer_that_has_not_trained_yet():
    source = compiled(keras.optimizers.Adam(0.5), steps=0)
    target = tfmixed.prepare(source, "mixed_bfloat16")
    assert float(target.optimizer.learning_rate) == 0.5
    assert int(target.optimizer.iterations) == 0
    step(target, 0)
    assert int(target.optimizer.iterations) == 1


def test_a_learning_rate_that_was_changed_stays_changed():
    source = compiled(keras.optimizers.SGD(0.5))
    source.optimizer.learning_rate = 0.125
    target = tfmixed.prepare(source, "mixed_bfloat16")
    assert float(target.optimizer.learning_rate) == 0.125
    target.optimizer.learning_rate = 1.0
    assert float(source.optimizer.learning_rate) == 0.125


def test_a_schedule_goes_on_where_it_was():
    source = compiled(keras.optimizers.SGD(schedule()), steps=2)
    target = tfmixed.prepare(source, "float32")
    assert float(target.optimizer.learning_rate) == pytest.approx(0.025)


def test_keras_own_loss_scaling_is_carried_over():
    """Scale and counter go on; `Model.compile` makes ours of it."""
    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    scaling = keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=64.0, dynamic_growth_steps=2
    )
    source = compiled(scaling, steps=3)
    target = tfmixed.prepare(source, "mixed_float16")
    optimizer = target.optimizer
    assert isinstance(optimizer, tfmixed.LossScaleOptimizer)
    assert float(optimizer.dynamic_scale) == float(scaling.dynamic_scale) == 128
    assert int(optimizer.step_counter) == int(scaling.step_counter) == 1
    assert optimizer.loss_scale.growth_interval == 2
    assert slots_of(optimizer) == slots_of(scaling)


def slots_of(optimizer):
    inner = optimizer.inner_optimizer
    return [moment.tolist() for moment in numpy_of(inner.variables)]


def test_our_loss_scaling_is_carried_over():
    scaling = tfmixed.LossScaleOptimizer(
        keras.optimizers.Adam(0.01),
        tfmixed.DynamicLossScale(initial=8.0, growth_interval=3),
    )
    source = compiled(scaling, steps=4)
    target = tfmixed.prepare(source, "mixed_float16")
    optimizer = target.optimizer
    assert optimizer is not scaling
    assert optimizer.loss_scale == scaling.loss_scale
    assert float(optimizer.dynamic_scale) == float(scaling.dynamic_scale) == 16
    assert slots_of(optimizer) == slots_of(scaling)
    # And into another format, where it was asked for.
    again = tfmixed.prepare(target, "mixed_float16")
    assert again.optimizer.loss_scale == scaling.loss_scale
    assert float(again.optimizer.dynamic_scale) == 16


def test_a_scale_that_nobody_asked_for_is_not_carried_to_bfloat16():
    source = tfmixed.prepare(compiled("adam", steps=0), "mixed_float16")
    assert source.optimizer.loss_scale == tfmixed.DynamicLossScale()
    step(source, 0)
    target = tfmixed.prepare(source, "mixed_bfloat16")
    assert target.optimizer.loss_scale == tfmixed.NoLossScale()
    assert int(target.optimizer.inner_optimizer.iterations) == 1
    back = tfmixed.prepare(target, "mixed_float16")
    assert back.optimizer.loss_scale == tfmixed.DynamicLossScale()


def test_a_stock_model_gets_the_optimizer_without_ours():
    scaling = tfmixed.LossScaleOptimizer(keras.optimizers.Adam(0.01), 64.0)
    source = tfmixed.prepare(compiled(scaling), "mixed_float16")
    stock = tfmixed.to_float32(source)
    assert type(stock.optimizer) is keras.optimizers.Adam
    assert int(stock.optimizer.iterations) == 3
    assert stock.optimizer is not scaling.inner_optimizer


class Doubled(keras.metrics.Metric):
    """A metric of a user's own, which says how it is made."""

    def __init__(self, name="doubled", factor=2.0):
        super().__init__(name=name)
        self.factor = factor
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y, y_pred, sample_weight=None):
        self.total.assign_add(self.factor)

    def result(self):
        return self.total + 0.0

    def get_config(self):
        return {"name": self.name, "factor": self.factor}


class Stubborn(Doubled):
    def __init__(self, must):
        super().__init__(name="stubborn")

    def get_config(self):
        return {}


def test_metrics_are_copied_with_a_state_of_their_own():
    metrics = [
        "mae",
        Doubled("mine", factor=3.0),
        keras.metrics.RootMeanSquaredError(name="root"),
        keras.losses.log_cosh,
    ]
    source = compiled(
        "sgd", metrics=metrics, weighted_metrics=[Doubled("weighted")]
    )
    target = tfmixed.prepare(source, "mixed_bfloat16")
    assert source.train_on_batch(X, Y, return_dict=True)["mine"] == 3.0
    logs = target.train_on_batch(X, Y, return_dict=True)
    names = ["loss", "mae", "mine", "root", "log_cosh", "weighted"]
    assert sorted(logs) == sorted(names)
    assert logs.keys() == source.get_metrics_result().keys()
    assert float(logs["mine"]) == 3.0
    assert float(logs["weighted"]) == 2.0
    assert float(source.get_metrics_result()["mine"]) == 3.0
    assert metrics[1] not in [*target.metrics]


def test_a_metric_that_cannot_be_copied_is_shared_and_named():
    metric = Stubborn(1)
    source = compiled("sgd", metrics=[metric], steps=0)
    target, report = tfmixed.prepare(source, "mixed_bfloat16", report=True)
    assert report.notes == (
        "The metric 'stubborn' cannot be copied; both models update the same "
        "one.",
    )
    target.train_on_batch(X, Y)
    assert float(metric.result()) == 2.0


def two_headed():
    inputs = keras.Input((6,))
    heads = {n: layers.Dense(2, name=n)(inputs) for n in ("a", "b")}
    return keras.Model(inputs, heads)


def test_all_arguments_are_carried_over():
    source = two_headed()
    given = {
        "optimizer": "sgd",
        "loss": {"a": "mse", "b": keras.losses.Huber(0.5)},
        "loss_weights": {"a": 0.25, "b": 2.0},
        "metrics": {"a": ["mae"], "b": []},
        "weighted_metrics": {"a": [], "b": [Doubled("twice")]},
        "run_eagerly": True,
        "steps_per_execution": 1,
        "jit_compile": False,
    }
    source.compile(**given)
    target = tfmixed.prepare(source, "float32")
    assert target.run_eagerly
    config = target.get_compile_config()
    for name in ("loss_weights", "run_eagerly", "steps_per_execution"):
        assert config[name] == given[name]
    assert config["jit_compile"] is False
    y = {"a": Y, "b": 3 * Y}
    ours = source.train_on_batch(X, y, return_dict=True)
    theirs = target.train_on_batch(X, y, return_dict=True)
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert float(theirs[name]) == pytest.approx(float(value), rel=1e-6)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("jit_compile", [True, False])
def test_how_it_is_run_is_carried_over(steps, jit_compile):
    source = branched()
    source.compile(
        "sgd", "mse", steps_per_execution=steps, jit_compile=jit_compile
    )
    target = tfmixed.prepare(source, "mixed_bfloat16")
    assert target.steps_per_execution == steps
    assert target.jit_compile == jit_compile
    assert not target.run_eagerly


def test_what_was_left_to_the_plan_is_left_to_it_again():
    source = tfmixed.prepare(branched(), "mixed_bfloat16")
    source.compile("sgd", "mse")
    assert source.jit_compile_is_auto
    target = tfmixed.prepare(source, "mixed_float16")
    assert target.jit_compile_is_auto
    assert target.loss_scale_is_auto


def test_a_model_that_is_not_compiled_stays_so():
    source = branched()
    target = tfmixed.prepare(source, "mixed_float16")
    assert not target.compiled
    assert carried(source, target) == []


def test_a_model_without_an_optimizer():
    source = branched()
    source.compile(None, loss="mse", metrics=["mae"], run_eagerly=True)
    target = tfmixed.prepare(source, "mixed_float16")
    assert target.optimizer is None
    logs = target.evaluate(X, Y, verbose=0, return_dict=True)
    assert set(logs) == {"loss", "mae"}


def test_an_optimizer_of_variables_that_the_model_does_not_have():
    source = branched()
    optimizer = keras.optimizers.Adam(0.01)
    extra = keras.Variable([1.0])
    optimizer.build([*source.trainable_variables, extra])
    optimizer.apply([v * 0 + 1.0 for v in [*source.trainable_variables, extra]])
    source.compile(optimizer, "mse")
    target, report = tfmixed.prepare(source, "mixed_bfloat16", report=True)
    assert report.notes == (
        "The state of its optimizer was not carried over: it was built for "
        "variables that the model does not have.",
    )
    assert float(target.optimizer.inner_optimizer.learning_rate) == (
        pytest.approx(0.01)
    )
    step(target, 0)
    assert int(target.optimizer.inner_optimizer.iterations) == 1


def test_a_model_that_stays_the_same_object_keeps_all():
    source = compiled(keras.optimizers.Adam(0.01), metrics=["mae"])
    optimizer, state = source.optimizer, numpy_of(source.optimizer.variables)
    assert carried(source, source) == []
    assert source.optimizer is optimizer
    for one, other in zip(state, numpy_of(optimizer.variables), strict=True):
        np.testing.assert_array_equal(one, other)


class Own(keras.Model):
    """Its `compile` takes arguments of its own."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x):
        return self.dense(x)

    def compile(self, rate):
        super().compile(keras.optimizers.SGD(rate), "mse")


def test_a_compile_of_ones_own_is_left_to_the_user():
    source = Own()
    source(X)
    source.compile(rate=0.5)
    target, report = tfmixed.prepare(source, "mixed_bfloat16", report=True)
    assert "It has a `compile` of its own: compile it again." in report.notes
    assert not target.compiled
    target.compile(rate=0.25)
    assert isinstance(target.optimizer, tfmixed.LossScaleOptimizer)
    step(target, 0)
    assert source.compiled


class TwoScales(Own):
    """Its `compile` brings optimizers with scales of their own."""

    def compile(self, scale):
        own = tfmixed.DynamicLossScale(initial=scale)
        super(Own, self).compile(tfmixed.LossScaleOptimizer("sgd", own), "mse")
        self.other = keras.optimizers.SGD()


def test_a_loss_scale_of_ones_own_is_kept():
    source = TwoScales()
    source(X)
    target = tfmixed.prepare(source, "mixed_float16")
    target.compile(scale=64.0)
    assert target.optimizer.loss_scale.initial == 64.0
    # Its one layer gives the output, so nothing computes in float16.
    assert target.other.loss_scale == tfmixed.NoLossScale()
    target.fit(X, Y, verbose=0)


class Demanding(keras.optimizers.SGD):
    def __init__(self, must, **options):
        super().__init__(**options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Demanding(1),
        lambda: keras.optimizers.SGD(lambda: 0.1),
        lambda: keras.optimizers.SGD(local_schedule()),
    ],
)
@pytest.mark.filterwarnings("ignore:The object being serialized.*lambda")
def test_an_optimizer_that_cannot_be_made_again_is_said(make):
    source = compiled(make())
    target, report = tfmixed.prepare(source, "mixed_bfloat16", report=True)
    (note,) = report.notes
    assert note.startswith("Its optimizer cannot be made again from its")
    assert not target.compiled
    target.compile("sgd", "mse")
    step(target, 0)
    step(source, 0)


def local_schedule():
    class Local(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.1

        def get_config(self):
            return {}

    return Local()
