import keras
import numpy as np
import pytest
from support import numpy_of
from support import slow

import tfmixed
from tfmixed.callbacks import AdaptivePrecision
from tfmixed.callbacks.limits import Limits
from tfmixed.callbacks.limits import middle
from tfmixed.health.alone import Alone

# The bad layers make steps be skipped, and the first scale is too high.
pytestmark = pytest.mark.filterwarnings("ignore:.*training step.* skipped")
HALVES = ["mixed_float16", "mixed_bfloat16"]


@keras.saving.register_keras_serializable("adaptive_tests")
class Standardize(keras.layers.Layer):
    """Rows to mean 0 and variance 1, around a mean that is far from 0.

    The variance is the mean of the squares less the square of the mean, which
    float32 computes to three digits and 16 bits not at all.
    """

    def __init__(self, mean=100.0, **kwargs):
        super().__init__(**kwargs)
        self.mean = mean

    def call(self, inputs):
        x = inputs + self.mean
        mean = keras.ops.mean(x, axis=-1, keepdims=True)
        squares = keras.ops.mean(x * x, axis=-1, keepdims=True)
        variance = keras.ops.maximum(squares - mean * mean, 0)
        return (x - mean) / keras.ops.sqrt(variance + 0.1)

    def get_config(self):
        return {**super().get_config(), "mean": self.mean}


@keras.saving.register_keras_serializable("adaptive_tests")
class Shift(keras.layers.Layer):
    """Adds a number and takes it away again; nothing where `far` is 0."""

    def __init__(self, far=0.0, **kwargs):
        super().__init__(**kwargs)
        self.far = self.add_weight(
            name="far",
            initializer=keras.initializers.Constant(far),
            trainable=False,
        )

    def call(self, inputs):
        return (inputs + self.far) - self.far


def planted(bad=Standardize, model_class=keras.Model, policy="mixed_float16"):
    """Weights before the bad layer, and after it."""
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input((6,))
    x = keras.layers.Dense(16, activation="tanh", name="before")(inputs)
    x = bad(name="bad")(x)
    x = keras.layers.Dense(16, activation="relu", name="after")(x)
    outputs = keras.layers.Dense(1, dtype="float32", name="head")(x)
    return model_class(inputs, outputs)


def compiled(model, optimizer=None, **how):
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse", **how)
    return model


def data(count=64):
    generator = np.random.default_rng(5)
    x = generator.normal(size=(count, 6)).astype("float32")
    return x, np.sin(x[:, :1] * 2) + x[:, 1:2]


def at_ends(*args, **kwargs):
    return AdaptivePrecision(*args, at_start=False, **kwargs)


def fitted(model, adaptive, epochs=2, **kwargs):
    x, y = data()
    kwargs = {"batch_size": 8, "verbose": 0, "shuffle": False, **kwargs}
    kwargs["callbacks"] = [adaptive, *kwargs.pop("after", [])]
    return model.fit(x, y, epochs=epochs, **kwargs)


def dtypes_of(model):
    return {layer.name: layer.compute_dtype for layer in model.layers[1:]}


def moves_of(adaptive):
    return [(m.epoch, m.path, m.before, m.after) for m in adaptive.history]


@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize("model_class", [keras.Model, tfmixed.Model])
def test_the_bad_layer_is_moved_and_no_other(model_class, policy):
    model = compiled(planted(model_class=model_class, policy=policy))
    adaptive = at_ends()
    history = fitted(model, adaptive).history
    half = policy.removeprefix("mixed_")
    assert moves_of(adaptive) == [(0, "bad", half, "float32")]
    assert dtypes_of(model) == {
        "before": half,
        "bad": "float32",
        "after": half,
        "head": "float32",
    }
    assert history["float32_layers"] == [1, 1]
    assert adaptive.history[0].measured.error > 0.3
    for name in ("before", "after"):
        assert adaptive.latest[name].error < 0.1
    # In float32 it still shows what it would do in 16 bits.
    assert adaptive.latest["bad"].error > 0.3


WAYS = [
    {"jit_compile": True},
    {"steps_per_execution": 3},
    {"run_eagerly": True},
    {"jit_compile": True, "steps_per_execution": 3},
]


@pytest.mark.parametrize("how", [*WAYS[:2], *slow(*WAYS[2:])], ids=str)
def test_however_the_step_is_run(how):
    model, adaptive = compiled(planted(), **how), at_ends()
    fitted(model, adaptive)
    assert moves_of(adaptive) == [(0, "bad", "float16", "float32")]


@pytest.mark.slow
@pytest.mark.parametrize("model_class", [keras.Model, tfmixed.Model])
def test_on_two_replicas(two_replicas, model_class):
    with two_replicas.scope():
        model = compiled(planted(model_class=model_class))
    adaptive = at_ends()
    history = fitted(model, adaptive, epochs=3).history
    assert moves_of(adaptive) == [(0, "bad", "float16", "float32")]
    # In the first epoch steps may all have been skipped.
    assert np.isfinite(history["loss"][1:]).all()


def test_what_overflows_in_a_prepared_model():
    """Numbers of a million go from one layer to the next: both need more."""
    inputs = keras.Input((6,))
    x = keras.layers.Dense(16, name="large")(inputs)
    x = keras.layers.Dense(16, name="small")(x)
    x = keras.layers.Dense(16, name="after", activation="relu")(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    for name, factor in (("large", 1e6), ("small", 1e-6)):
        kernel = model.get_layer(name).kernel
        kernel.assign(kernel * factor)
    model = tfmixed.prepare(model, "mixed_float16")
    adaptive = at_ends()
    # Gradients are as large as that: what is trained would explode.
    still = keras.optimizers.SGD(0.0)
    history = fitted(compiled(model, still), adaptive).history
    assert {m.path for m in adaptive.history} == {"large", "small"}
    assert all("overflow" in m.reason for m in adaptive.history)
    assert np.isfinite(history["loss"][1])


def test_in_a_nested_and_in_a_subclassed_model():
    class Outer(keras.Model):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.head = keras.layers.Dense(1, dtype="float32")

        def call(self, inputs):
            return self.head(self.inner(inputs))

    model = Outer(planted())
    model(data()[0])
    adaptive = at_ends()
    fitted(compiled(model), adaptive)
    assert [move.path for move in adaptive.history] == ["bad"]
    assert model.inner.get_layer("before").compute_dtype == "float16"


def test_what_is_inside_a_layer_moves_with_it():
    class Block(keras.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = Standardize()
            self.dense = keras.layers.Dense(16)

        def build(self, shape):
            self.dense.build(shape)
            super().build(shape)

        def call(self, inputs):
            return self.dense(self.inner(inputs))

    model, adaptive = compiled(planted(Block)), at_ends()
    fitted(model, adaptive)
    block = model.get_layer("bad")
    assert [move.path for move in adaptive.history] == ["bad"]
    assert block.inner.compute_dtype == "float32"
    assert block.dense.compute_dtype == "float32"
    assert model.get_layer("after").compute_dtype == "float16"


@pytest.mark.parametrize("policy", HALVES)
def test_layers_of_every_kind_without_a_fault_stay(policy):
    keras.config.set_dtype_policy(policy)
    layers = keras.layers
    inputs = keras.Input((12, 8))
    x = layers.Dropout(0.3)(inputs)
    x = layers.Conv1D(8, 3, padding="same", activation="relu")(x)
    x = layers.BatchNormalization()(x)
    x = layers.MultiHeadAttention(2, 4, dropout=0.2)(x, x)
    x = layers.MaxPooling1D(2)(layers.LayerNormalization()(x))
    x = layers.Bidirectional(layers.LSTM(6, dropout=0.2))(x)
    model = keras.Model(inputs, layers.Dense(1, dtype="float32")(x))
    generator = np.random.default_rng(0)
    x = generator.normal(size=(64, 12, 8)).astype("float32")
    adaptive = at_ends()
    compiled(model).fit(
        x, x[:, 0, :1], batch_size=16, verbose=0, callbacks=[adaptive]
    )
    assert len(adaptive.latest) == 7
    assert max(one.error for one in adaptive.latest.values()) < 0.1
    assert adaptive.history == []


class Script(keras.callbacks.Callback):
    """Sets how far the `Shift` shifts, epoch by epoch."""

    def __init__(self, script):
        super().__init__()
        self.script = script

    def on_epoch_begin(self, epoch, logs=None):
        self.model.get_layer("bad").far.assign(self.script[epoch])


FAR = 4096.0  # in float16, whole numbers of 4 are left of what is added
GOOD = 0.0


def test_it_comes_back_when_it_was_quiet_long_enough():
    model, adaptive = compiled(planted(Shift)), at_ends(patience=2)
    script = [FAR, GOOD, FAR, GOOD, GOOD, GOOD, GOOD]
    history = fitted(
        model, adaptive, epochs=len(script), after=[Script(script)]
    ).history
    assert moves_of(adaptive) == [
        (0, "bad", "float16", "float32"),
        (4, "bad", "float32", "float16"),
    ]
    assert history["float32_layers"] == [1, 1, 1, 1, 0, 0, 0]
    assert model.get_layer("bad").compute_dtype == "float16"
    assert "quiet for 2 epochs" in adaptive.history[1].reason


def test_before_the_first_step_a_bad_layer_does_no_harm():
    """Weights are those of a model that was built so, bit by bit."""
    model = compiled(planted(policy="mixed_bfloat16"))
    twin = planted(policy="mixed_bfloat16")
    twin.get_layer("bad").dtype_policy = keras.DTypePolicy("float32")
    twin.set_weights(model.get_weights())
    adaptive = AdaptivePrecision()
    fitted(model, adaptive, epochs=2)
    x, y = data()
    compiled(twin).fit(x, y, 8, epochs=2, shuffle=False, verbose=0)
    assert moves_of(adaptive) == [(None, "bad", "bfloat16", "float32")]
    assert str(adaptive.history[0]).startswith("at the start: 'bad' ")
    for one, other in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_first_loss_scale_moves_nothing():
    """So large that every gradient overflows until it has come down."""
    keras.config.set_dtype_policy("mixed_float16")
    model = planted(lambda name: keras.layers.Dense(16, name=name))
    scale = tfmixed.DynamicLossScale(initial=2.0**24)
    optimizer = tfmixed.LossScaleOptimizer(keras.optimizers.SGD(), scale)
    adaptive = AdaptivePrecision()
    x, y = data()
    compiled(model, optimizer).fit(
        x, y * 100, 8, verbose=0, callbacks=[adaptive]
    )
    assert all(move.epoch is not None for move in adaptive.history)


def test_one_comes_back_and_one_stays():
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((6,))
    x = keras.layers.Dense(16, activation="tanh")(inputs)
    x = Standardize(name="stays")(Shift(name="bad")(x))
    model = keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(x))
    adaptive = at_ends(patience=1)
    script = Script([FAR, GOOD])
    history = fitted(compiled(model), adaptive, after=[script]).history
    assert history["float32_layers"] == [2, 1]
    assert model.get_layer("bad").compute_dtype == "float16"
    assert model.get_layer("stays").compute_dtype == "float32"


def test_between_the_limits_nothing_moves():
    """An error of about 0.2 is too little to go and too much to come back."""
    # Around 512, numbers of about 0.5 are rounded to multiples of 0.5.
    script = [512.0] * 3 + [FAR] + [512.0] * 4
    model, adaptive = compiled(planted(Shift)), at_ends(patience=1)
    looks = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: looks.append(adaptive.latest["bad"].error)
    )
    fitted(model, adaptive, epochs=8, after=[Script(script), look])
    assert moves_of(adaptive) == [(3, "bad", "float16", "float32")]
    assert all(0.1 < looks[i] < 0.3 for i in (0, 1, 2, 4, 5, 6, 7))


def counting(model_class):
    class Counts(model_class):
        traces = 0

        def train_step(self, data):
            type(self).traces += 1
            return super().train_step(data)

    return Counts


@pytest.mark.parametrize("model_class", [keras.Model, tfmixed.Model])
def test_no_more_traces_than_allowed(model_class):
    script = [GOOD, FAR, GOOD, FAR, GOOD, FAR, GOOD]

    def traces(callbacks):
        kind = counting(model_class)
        model = compiled(planted(Shift, kind))
        fitted(model, callbacks[0], len(script), after=callbacks[1:])
        return kind.traces

    adaptive = at_ends(patience=1, max_retraces=3)
    alone = traces([Script(script)])
    assert alone + 3 == traces([adaptive, Script(script)])
    assert [move.epoch for move in adaptive.history] == [1, 2, 3]
    assert adaptive.retraces == 3
    assert "No more than 3 are allowed: 'bad' stayed" in (adaptive.summary())


def test_moves_of_one_epoch_are_made_together_and_no_more_than_said():
    keras.config.set_dtype_policy("mixed_float16")

    def model_of():
        inputs = x = keras.Input((6,))
        for index in range(3):
            x = keras.layers.Dense(8, activation="tanh")(x)
            x = Standardize(mean=100.0 + index, name=f"bad{index}")(x)
        return keras.Model(inputs, keras.layers.Dense(1, dtype="float32")(x))

    adaptive = at_ends()
    fitted(compiled(model_of()), adaptive)
    assert {(m.epoch, m.path) for m in adaptive.history} == {
        (0, "bad0"),
        (0, "bad1"),
        (0, "bad2"),
    }
    assert adaptive.retraces == 1
    adaptive = at_ends(max_moves=2, overflow=1.0)
    fitted(compiled(model_of()), adaptive)
    assert [m.epoch for m in adaptive.history] == [0, 0, 1]
    first, second, third = (m.measured.error for m in adaptive.history)
    assert first >= second
    assert adaptive.retraces == 2


@pytest.mark.slow
@pytest.mark.parametrize("policy", HALVES)
def test_the_outcome_is_that_of_float32(policy):
    x, y = data()

    def loss(policy, *callbacks):
        """In float32 at the end, the mean over seeds."""
        found = []
        for seed in range(3):
            keras.utils.set_random_seed(seed)
            model = compiled(planted(policy=policy))
            model.fit(
                x, y, batch_size=8, epochs=30, verbose=0, callbacks=callbacks
            )
            with tfmixed.precision("float32", model=model):
                found.append(model.evaluate(x, y, verbose=0))
        return np.mean(found)

    exact, rough = loss("float32"), loss(policy)
    adaptive = loss(policy, at_ends())
    assert rough > exact * 5
    # What is left is the rounding of the other layers.
    assert abs(adaptive - exact) < (rough - exact) / 10


def test_weights_and_the_optimizer_are_kept_by_a_move():
    class Looks(keras.callbacks.Callback):
        seen = []

        def look(self):
            variables = self.model.variables + self.model.optimizer.variables
            Looks.seen.append(numpy_of(variables))

        def on_epoch_end(self, epoch, logs=None):
            self.look()

    before, after = Looks(), Looks()
    model, adaptive = (
        compiled(planted(policy="mixed_bfloat16")),
        at_ends(),
    )
    x, y = data()
    model.fit(
        x,
        y,
        batch_size=8,
        verbose=0,
        epochs=1,
        callbacks=[before, adaptive, after],
    )
    assert adaptive.retraces == 1
    for one, other in zip(*Looks.seen, strict=True):
        np.testing.assert_array_equal(one, other)
    model.fit(x, y, batch_size=8, verbose=0, epochs=2, initial_epoch=1)
    assert int(model.optimizer.iterations) == 16


def test_a_step_after_a_move_is_that_of_a_model_built_so():
    """The same weights and slots, then one epoch: bit by bit the same."""
    x, y = data()
    kwargs = {"batch_size": 8, "verbose": 0, "shuffle": False}
    model = compiled(planted(), keras.optimizers.SGD(0.01, momentum=0.9))
    fitted(model, at_ends(), epochs=1)
    twin = planted()
    twin.get_layer("bad").dtype_policy = keras.DTypePolicy("float32")
    compiled(twin, keras.optimizers.SGD(0.01, momentum=0.9))
    twin.optimizer.build(twin.trainable_variables)
    twin.set_weights(model.get_weights())
    for one, other in zip(
        twin.optimizer.variables, model.optimizer.variables, strict=True
    ):
        one.assign(other)
    for each in (model, twin):
        each.fit(x, y, **kwargs)
    for one, other in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_saved_model_keeps_its_dtypes(tmp_path):
    model = compiled(planted(model_class=tfmixed.Model))
    fitted(model, at_ends())
    path = tmp_path / "model.keras"
    model.save(path)
    keras.config.set_dtype_policy("float32")
    loaded = keras.models.load_model(path)
    assert dtypes_of(loaded) == dtypes_of(model)
    assert dtypes_of(loaded)["bad"] == "float32"
    x = data()[0]
    np.testing.assert_array_equal(
        loaded.predict(x, verbose=0), model.predict(x, verbose=0)
    )


def test_data_of_a_moved_first_layer_are_not_rounded():
    """A Sequential model without an Input declares data of 16 bits."""
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(
        [Shift(name="bad"), keras.layers.Dense(1, dtype="float32")]
    )
    x, y = data()
    model(x[:2])
    model.get_layer("bad").far.assign(FAR)
    compiled(model)
    adaptive = at_ends(patience=1)
    fitted(model, adaptive, epochs=1)
    assert model.inputs[0].dtype == "float32"
    assert model.get_layer("bad").compute_dtype == "float32"
    kernel, bias = model.layers[-1].get_weights()
    np.testing.assert_allclose(
        model.predict(1 + x / 1e4, verbose=0),
        ((1 + x / 1e4 + np.float32(FAR)) - np.float32(FAR)) @ kernel + bias,
        atol=1e-6,
    )
    fitted(model, adaptive, epochs=1, after=[Script([GOOD])])
    assert model.get_layer("bad").compute_dtype == "float16"
    assert model.inputs[0].dtype == "float16"


def test_a_second_fit_may_bring_back_what_the_first_has_moved():
    model, adaptive = compiled(planted(Shift)), at_ends(patience=1)
    fitted(model, adaptive, epochs=1, after=[Script([FAR])])
    assert len(adaptive.history) == 1
    fitted(model, adaptive, epochs=1, after=[Script([GOOD])])
    assert moves_of(adaptive) == [(0, "bad", "float32", "float16")]


def test_a_model_without_16_bits_is_left_alone():
    model = compiled(planted(policy="float32"))
    adaptive = at_ends()
    history = fitted(model, adaptive).history
    assert history["float32_layers"] == [0, 0]
    assert "0 of 0 layers in float32" in adaptive.summary()


def test_batches_that_are_not_finite_say_nothing():
    model = compiled(planted(Shift, tfmixed.Model))
    adaptive = at_ends(every=1)
    x, y = data()
    x[:] = np.nan
    with pytest.warns(UserWarning, match="training step"):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[adaptive])
    assert adaptive.history == []
    assert adaptive.latest == {}


@pytest.mark.parametrize(
    ("every", "count", "steps"),
    [(None, 4, 1), (3, 3, 1), (100, 1, 1), (1, 8, 1), (1, 4, 2), (4, 2, 3)],
)
def test_how_often_it_measures(every, count, steps):
    """Of eight steps in an epoch; the first of an execution is measured."""
    model = compiled(planted(), steps_per_execution=steps)
    adaptive = at_ends(every)
    counts = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: counts.append(len(adaptive._found))
    )
    fitted(model, adaptive, after=[look])
    assert counts == [count, count]


def test_it_says_what_it_did(capsys):
    model, adaptive = compiled(planted()), at_ends()
    fitted(model, adaptive, verbose=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == (
        "AdaptivePrecision: 1 of 3 layers in float32; moves: 1, retraces: 1."
    )
    assert lines[-1].startswith("  epoch 1: 'bad' float16 → float32, its ")
    assert "(more than 0.3)" in lines[-1]
    fitted(model, at_ends(verbose=False), verbose=2)
    assert "AdaptivePrecision" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "`every` is 0, but it is a number of things"),
        ({"every": 2.5}, "`every` is 2.5"),
        ({"patience": 0}, "`patience` is 0"),
        ({"max_moves": True}, "`max_moves` is True"),
        ({"max_retraces": -1}, "`max_retraces` is -1"),
        ({"up": "much"}, "`up` is 'much', but it is a limit for a share"),
        ({"underflow": -0.1}, "`underflow` is -0.1"),
        ({"overflow": float("nan")}, "`overflow` is nan"),
        ({"up": 0.1}, "give 0 < down < up"),
        ({"down": 0}, "give 0 < down < up"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        AdaptivePrecision(**arguments)


def test_a_model_that_cannot_be_measured_is_refused():
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match="it is not built"):
        fitted(model, AdaptivePrecision())


class TestLimits:
    limits = Limits(up=0.3, down=0.1, underflow=0.6, overflow=0.0)

    def test_each_number_counts_alone(self):
        quiet = Alone(0.05, "outputs", 0.1, 0.0)
        assert self.limits.is_quiet(quiet)
        assert self.limits.strain(quiet) < 1
        for measured, reason in (
            (Alone(0.4, "outputs", 0.0, 0.0), "its outputs are off by 0.4"),
            (Alone(0.0, "outputs", 0.7, 0.0), "underflow 70.00%"),
            (Alone(0.0, "outputs", 0.0, 0.1), "overflow 10.00%"),
        ):
            assert self.limits.strain(measured) > 1
            assert not self.limits.is_quiet(measured)
            assert self.limits.reason(measured).startswith(reason)

    def test_in_between_is_neither(self):
        for measured in (
            Alone(0.2, "outputs", 0.0, 0.0),
            Alone(0.0, "outputs", 0.3, 0.0),
        ):
            assert self.limits.strain(measured) < 1
            assert not self.limits.is_quiet(measured)

    def test_the_middle_is_no_outlier(self):
        def found(*errors):
            return middle([Alone(e, "outputs", e / 2, 0.0) for e in errors])

        assert found(9.0, 0.1, 0.2) == Alone(0.2, "outputs", 0.1, 0.0)
        # What is in half of them is not in most of them.
        assert found(9.0, 0.1, 0.2, 9.0).error == 0.2
        assert found(0.7).error == 0.7
