"""Blame finds what was planted, and what it recommends works."""

import json

import keras
import numpy as np
import pytest
import support
import tensorflow as tf
from keras import layers

from tfmixed import _keras
from tfmixed.audit import batches
from tfmixed.audit import culprit
from tfmixed.audit import cure
from tfmixed.audit import step
from tfmixed.audit import suspect
from tfmixed.audit import verdicts
from tfmixed.audit.blame import blame

HALF = keras.DTypePolicy("mixed_float16")


def data(rows=8, width=6, seed=0):
    generator = np.random.default_rng(seed)
    x = np.abs(generator.normal(size=(rows, width))).astype("float32")
    return x, x[:, :1].copy()


def dense(name):
    """A layer that keeps magnitudes: all kernels are 1/6."""
    return layers.Dense(
        6,
        kernel_initializer=keras.initializers.Constant(1 / 6),
        name=name,
        dtype=HALF,
    )


def shrink(name):
    """A layer that makes everything a ten-thousandth as large."""
    return layers.Rescaling(1e-4, name=name, dtype=HALF)


def head():
    return layers.Dense(1, name="head", dtype="float32")


def chain():
    return [dense("a"), dense("b"), shrink("small"), dense("c"), head()]


def functional():
    inputs = x = keras.Input((6,), name="numbers")
    for layer in chain():
        x = layer(x)
    return keras.Model(inputs, x)


def sequential():
    return keras.Sequential([keras.Input((6,)), *chain()])


def nested():
    inner_inputs = keras.Input((6,))
    inner = keras.Sequential(
        [keras.Input((6,), dtype="float32"), dense("b"), shrink("small")],
        name="middle",
    )
    inner.dtype_policy = HALF
    inner = keras.Model(inner_inputs, inner(inner_inputs), name="nested")
    inputs = keras.Input((6,))
    x = dense("c")(inner(dense("a")(inputs)))
    return keras.Model(inputs, head()(x))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(dtype=HALF)
        self.parts = chain()

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


def with_operations():
    inputs = keras.Input((6,))
    x = dense("b")(dense("a")(inputs) + 1.0)
    x = keras.ops.relu(shrink("small")(x)) * 2.0
    return keras.Model(inputs, head()(dense("c")(x)))


MODELS = [functional, sequential, nested, Subclassed, with_operations]


def layer_of(model, name):
    return next(
        layer for layer in _keras.flatten_layers(model) if layer.name == name
    )


def plant(model, name, factor):
    kernel = layer_of(model, name).kernel
    kernel.assign(kernel * factor)


def is_finite_with(model, x, y, kept, scale):
    """Runs the step with layers in float32, without the code under test."""
    for layer in _keras.flatten_layers(model):
        if layer.name in kept:
            for part in _keras.flatten_layers(layer):
                _keras.set_layer_policy(part, keras.DTypePolicy("float32"))
    variables = [v.value for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        outputs = tf.cast(model(x, training=True), "float32")
        loss = scale * tf.reduce_mean(tf.square(outputs - y))
    gradients = tape.gradient(loss, variables)
    return all(
        bool(tf.reduce_all(tf.math.is_finite(g))) for g in [loss, *gradients]
    )


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("name", ["a", "b"])
def test_an_overflow_in_one_layer_is_found_and_cured(make, name):
    x, y = data()
    model = make()
    model(x)
    plant(model, name, 3e5)
    before = support.numpy_of(model.variables)
    policies = [_keras.layer_policy(f) for f in _keras.flatten_layers(model)]
    found = blame(model, x, y, loss="mse", loss_scale=1.0)
    assert found.where == "forward"
    assert found.layer.split("/")[-1] == name
    assert found.tensor == "output"
    assert found.float32_too is False
    assert found.dtype == "float16"
    assert found.value > 65504
    assert found.inputs["weight 'kernel'"] == pytest.approx(3e5 / 6)
    assert name in found.keep_float32
    assert found.loss_scale is None
    assert not is_finite_with(make_again(make, name), x, y, (), 1.0)
    assert is_finite_with(make_again(make, name), x, y, found.keep_float32, 1.0)
    # And no layer of these can be left out.
    for left_out in found.keep_float32:
        fewer = set(found.keep_float32) - {left_out}
        assert not is_finite_with(make_again(make, name), x, y, fewer, 1.0)
    support.check_untouched(before, support.numpy_of(model.variables))
    after = [_keras.layer_policy(f) for f in _keras.flatten_layers(model)]
    assert all(a is b for a, b in zip(after, policies, strict=True))


def make_again(make, name):
    model = make()
    model(data()[0])
    plant(model, name, 3e5)
    return model


@pytest.mark.parametrize("make", MODELS)
def test_nothing_wrong_is_said_with_the_nearest_miss(make):
    x, y = data()
    model = make()
    model(x)
    plant(model, "b", 1e4)
    found = blame(model, x, y, loss="mse", loss_scale=1.0)
    assert found.where == "nothing"
    assert found.layer.split("/")[-1] == "b"
    assert found.tensor == "output"
    expected = tf.reduce_max(tf.abs(layer_of_output(model, x, "b")))
    assert found.value == pytest.approx(float(expected))
    assert found.keep_float32 == ()
    assert found.loss_scale is None
    assert "finite" in str(found)


def layer_of_output(model, x, name):
    records = step.observe(model, batches.whole(x)).records
    record = next(r for r in records if r.layer.name == name)
    return tf.cast(record.outputs[0], "float32")


def test_the_cure_is_one_layer_where_one_is_enough():
    # The sum of squares overflows; what is done with it does not.
    class Energy(layers.Layer):
        def call(self, x):
            return keras.ops.sqrt(keras.ops.sum(x * x, -1, keepdims=True))

    inputs = keras.Input((6,))
    x = Energy(name="energy", dtype=HALF)(inputs)
    model = keras.Model(inputs, head()(x))
    x, y = data()
    found = blame(model, x * 200, y, loss="mse", loss_scale=1.0)
    assert (found.where, found.layer) == ("forward", "energy")
    assert found.keep_float32 == ("energy",)
    assert found.value < 65504
    assert str(found) == (
        f"Layer 'energy' (Energy): the output is not finite in float16; "
        f"float16 ends at\n65504. A step in float32 is finite. In float32 it "
        f"reaches {found.value:.6g}. Largest\nfinite magnitudes that went in: "
        f"input {found.inputs['input']:.6g}. Keep this layer in float32:\n"
        "tfmixed.prepare(model, keep_float32=['energy']). With this the step "
        "was run\nagain and is finite."
    )


def test_a_shared_layer_overflows_in_its_second_call():
    shared = layers.Dense(
        6,
        kernel_initializer=keras.initializers.Constant(50.0),
        dtype=HALF,
        name="shared",
    )
    inputs = keras.Input((6,))
    x = shrink("small")(shared(shared(inputs)))
    model = keras.Model(inputs, head()(x))
    x, y = data()
    found = blame(model, x, y, loss="mse", loss_scale=1.0)
    assert found.layer == "shared (call 2)"
    assert found.where == "forward"
    assert found.keep_float32 == ("shared", "small")


def test_an_overflow_in_the_cast_of_the_next_layer():
    inputs = keras.Input((6,))
    x = layers.Rescaling(1e5, dtype="float32", name="large")(inputs)
    x = shrink("small")(x)
    model = keras.Model(inputs, head()(x))
    x, y = data()
    found = blame(model, x, y, loss="mse", loss_scale=1.0)
    assert found.where == "forward"
    assert found.layer == "small"
    assert found.tensor == (
        "input, cast to float16 from the float32 output of 'large'"
    )
    assert found.keep_float32 == ("small",)
    assert found.value == pytest.approx(1e5 * x.max(), rel=1e-6)


def test_code_between_layers_is_blamed_on_the_layer_around_it():
    class Around(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.first = dense("first")
            self.second = shrink("second")

        def call(self, x):
            return self.second(self.first(x) * 3e4 * 10)

    inputs = keras.Input((6,))
    model = keras.Model(
        inputs, head()(Around(name="around", dtype=HALF)(inputs))
    )
    x, y = data()
    found = blame(model, x, y, loss="mse", loss_scale=1.0)
    assert found.layer == "around"
    assert "on the way into" in found.tensor
    assert "second" in found.tensor
    assert found.keep_float32 == ("around",)


def test_attention_scores_that_overflow():
    inputs = keras.Input((4, 64))
    attention = layers.MultiHeadAttention(
        1, 64, dropout=0.1, dtype=HALF, name="attention"
    )
    x = attention(inputs, inputs)
    model = keras.Model(inputs, head()(x))
    model.set_weights([w * 30 for w in model.get_weights()])
    generator = np.random.default_rng(0)
    x = generator.normal(size=(2, 4, 64)).astype("float32") * 3
    found = blame(model, x, x[..., :1], loss="mse", loss_scale=1.0)
    assert found.where in ("forward", "backward")
    assert found.layer.split("/")[0] == "attention"
    assert found.keep_float32
    assert found.float32_too is False


@pytest.mark.parametrize(
    ("make", "layer"),
    [(functional, "a"), (sequential, None), (Subclassed, None)],
)
def test_data_beyond_the_format_is_bad_data(make, layer):
    x, y = data()
    x[3] = 1e5
    model = make()
    found = blame(model, x, y, loss="mse", loss_scale=1.0)
    assert found.where == "data"
    assert found.tensor.endswith("as float16")
    assert found.float32_too is False
    assert found.value == pytest.approx(1e5)
    if layer:
        assert found.layer == layer
        assert found.tensor == "input 'numbers' as float16"
    assert "Scale the data" in found.fix
    assert "a" in found.keep_float32
    assert model.name not in found.keep_float32


def test_data_beyond_the_format_of_a_declared_input():
    # Keras declares a float16 input for a Sequential that it builds itself.
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([shrink("small"), head()])
    x, y = data()
    model.build(x.shape)
    assert model.inputs[0].dtype == "float16"
    found = blame(model, x + 1e5, y, loss="mse", loss_scale=1.0)
    assert found.where == "data"
    assert found.keep_float32 == ("small",)
    assert model.inputs[0].dtype == "float16"


@pytest.mark.parametrize(
    ("bad", "kind"), [(np.nan, "NaN"), (np.inf, "infinite")]
)
def test_bad_values_in_the_data(bad, kind):
    x, y = data()
    x[3, 2] = x[5, 0] = bad
    found = blame(functional(), x, y, loss="mse", loss_scale=1.0)
    assert found.where == "data"
    assert found.layer is None
    assert found.tensor == "input 'numbers'"
    assert found.float32_too is True
    assert str(found).replace("\n", " ") == (
        f"The data is bad: input 'numbers' contains 2 {kind} values (48 in "
        "all), first at row 3 position 2, row 5 position 0. Remove or replace "
        "these rows; no precision and no loss scale helps."
    )
    assert found.keep_float32 == ()


def test_bad_targets():
    x, y = data()
    y[7] = np.nan
    found = blame(functional(), x, y, loss="mse")
    assert found.where == "data"
    assert found.tensor == "target 'head'"
    assert "1 NaN value (8 in all), first at row 7 position 0" in found.message


@pytest.mark.parametrize("as_dict", [True, False])
def test_one_of_several_inputs_is_bad_and_targets_are_integers(as_dict):
    one = keras.Input((6,), name="one")
    two = keras.Input((2,), name="two")
    x = layers.Concatenate(dtype=HALF)([dense("a")(one), two])
    outputs = layers.Dense(3, activation="softmax", dtype="float32")(x)
    model = keras.Model(
        {"one": one, "two": two} if as_dict else [one, two], outputs
    )
    x, _ = data()
    second = np.ones((8, 2), "float32")
    second[1, 1] = np.nan
    inputs = {"one": x, "two": second} if as_dict else [x, second]
    found = blame(
        model, inputs, np.arange(8) % 3, loss="sparse_categorical_crossentropy"
    )
    assert (found.where, found.tensor) == ("data", "input 'two'")
    assert "row 1 position 1" in found.message


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_model_that_diverges_in_float32_too(policy):
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(6, name="a"),
            layers.Lambda(
                lambda x: keras.ops.log(-keras.ops.abs(x)), name="log"
            ),
            layers.Dense(1, dtype="float32"),
        ]
    )
    x, y = data()
    found = blame(model, x, y, loss="mse", loss_scale=1.0)
    assert found.where == "forward"
    assert found.layer.split("/")[-1] == "log"
    assert found.float32_too is True
    assert found.dtype == policy.removeprefix("mixed_")
    assert found.keep_float32 == ()
    assert found.loss_scale is None
    assert "no matter of precision" in found.fix


def test_a_loss_that_is_not_finite():
    model = functional()
    x, y = data()
    found = blame(
        model,
        x,
        y,
        loss=lambda y, p: keras.ops.log(p * 0.0 - 1.0),
        loss_scale=1.0,
    )
    assert (found.where, found.layer) == ("loss", None)
    assert found.tensor == "the loss"
    assert found.float32_too is True
    assert str(found).startswith("The loss is not finite")


def test_a_loss_that_only_the_format_breaks():
    # float16 rounds the small output to zero, whose logarithm is infinite.
    inputs = keras.Input((6,))
    x = layers.Rescaling(1e-5, dtype=HALF, name="tiny")(inputs)
    outputs = layers.Rescaling(1e-4, dtype=HALF, name="tinier")(x)
    model = keras.Model(inputs, outputs)
    x, y = data()
    found = blame(
        model, x, y, loss=lambda y, p: -keras.ops.log(p), loss_scale=1.0
    )
    assert found.where == "loss"
    assert found.float32_too is False
    assert found.keep_float32 == ("tinier",)


def backward_only(scale_in):
    """The output is small; the gradient grows on its way back."""
    inputs = keras.Input((6,))
    x = dense("first")(inputs)
    x = layers.Rescaling(scale_in, dtype=HALF, name="down")(x)
    x = layers.Rescaling(6e4, dtype=HALF, name="up")(x)
    return keras.Model(inputs, head()(x))


def test_a_loss_scale_that_is_too_high():
    x, y = data()
    model = functional()
    found = blame(model, x, y, loss="mse", loss_scale=2.0**24)
    assert found.where == "backward"
    assert found.float32_too is False
    assert found.keep_float32 == ()
    assert 1 <= found.loss_scale < 2.0**24
    assert is_finite_with(model, x, y, (), found.loss_scale)
    assert not is_finite_with(model, x, y, (), 2 * found.loss_scale)
    assert "Lower the loss scale to 2^" in found.fix
    assert found.value > 65504


def test_the_gradient_is_named_with_the_layer_that_forms_it():
    x, y = data()
    y = y + 1000.0
    model = backward_only(1e-5)
    found = blame(model, x, y, loss="mse", loss_scale=1.0)
    assert found.where == "backward"
    assert found.layer == "down"
    assert found.tensor == (
        "gradient with respect to its output (formed in the backward pass of "
        "'up')"
    )
    assert found.float32_too is False
    assert found.value > 65504
    assert found.loss_scale is None
    assert found.keep_float32 == ("down", "up")
    assert is_finite_with(model, x, y, found.keep_float32, 1.0)


def test_a_gradient_that_passes_an_operation_without_a_dtype():
    inputs = keras.Input((6,))
    x = dense("first")(inputs) * 1e-5 + 1e-5
    x = layers.Rescaling(6e4, dtype=HALF, name="up")(x)
    model = keras.Model(inputs, head()(x))
    x, y = data()
    found = blame(model, x, y + 1000.0, loss="mse", loss_scale=1.0)
    assert found.where == "backward"
    assert found.layer == "add"
    # The operations follow the layer before them.
    assert found.keep_float32 == ("first", "up")


def test_layers_that_turn_out_not_to_be_needed_are_left_out():
    class Growing(layers.Layer):
        def call(self, x):
            return (x * 2.0**-12) * 2.0**12

    inputs = keras.Input((6,))
    x = Growing(dtype=HALF, name="growing")(dense("first")(inputs))
    model = keras.Model(inputs, head()(x))
    x, y = data()
    found = blame(model, x, y + 1000.0, loss="mse", loss_scale=1.0)
    assert (found.where, found.layer) == ("backward", "first")
    assert found.value < 65504
    assert found.keep_float32 == ("growing",)


def test_the_output_of_the_model_is_that_of_its_last_layer():
    inputs = keras.Input((6,))
    model = keras.Model(inputs, dense("last")(dense("first")(inputs)))
    x, y = data()
    found = blame(model, x, y + 1000.0, loss="mse", loss_scale=2.0**20)
    assert (found.where, found.layer) == ("backward", "last")
    assert found.tensor == "gradient with respect to its output"


class Incurable:
    """Stands for trials none of which is finite, but for bfloat16 maybe."""

    exact_inputs = False

    def __init__(self, bfloat16):
        self.bfloat16 = bfloat16

    def can_keep(self, layer):
        return False

    def culprit(self, loss_scale, kept=(), policy=None):
        return None if policy is not None and self.bfloat16 else "bad"


@pytest.mark.parametrize("bfloat16", [True, False])
def test_what_is_not_cured_is_not_claimed(bfloat16):
    model = functional()
    bad = suspect.Culprit(
        "forward", model, "whole", "output", "float16", {}, [model], ()
    )
    found = cure.find_cure(Incurable(bfloat16), bad, 1.0, [])
    assert (found is not None) == bfloat16
    said = verdicts.precision(bad, None, found, 1.0)
    assert ("No small change" in said.fix) != bfloat16
    assert ("Use mixed_bfloat16" in said.fix) == bfloat16
    assert said.keep_float32 == ()


def test_the_gradient_of_a_weight():
    inputs = keras.Input((6,))
    layer = layers.Dense(1, kernel_initializer="zeros", dtype=HALF, name="wide")
    model = keras.Model(inputs, layers.Identity(dtype="float32")(layer(inputs)))
    x = np.full((8, 6), 3e4, "float32")
    found = blame(model, x, np.full((8, 1), 50.0), loss="mse", loss_scale=1.0)
    assert (found.where, found.layer) == ("backward", "wide")
    assert found.tensor == "gradient of its 'kernel'"
    # 2 * (0 - 50) / 8 for each of eight rows, times 3e4.
    assert found.value == pytest.approx(3e6)
    assert found.keep_float32 == ("wide",)


def test_the_scaled_loss_alone():
    model = keras.Sequential([keras.Input((6,)), dense("a"), head()])
    x, y = data()
    found = blame(
        model, x, y, loss=lambda y, p: p * 0.0 + 1e33, loss_scale=2.0**20
    )
    assert (found.where, found.tensor) == ("loss", "the scaled loss")
    assert found.loss_scale == 2.0**18


@pytest.mark.parametrize("which", ["kernel", "moving_variance"])
def test_a_damaged_weight_is_named(which):
    inputs = keras.Input((6,))
    x = layers.BatchNormalization(name="norm", dtype=HALF)(dense("a")(inputs))
    model = keras.Model(inputs, head()(x))
    model.get_layer("norm").trainable = which == "kernel"
    layer = model.get_layer("a" if which == "kernel" else "norm")
    variable = getattr(layer, which)
    values = variable.numpy()
    values.flat[2] = np.nan
    variable.assign(values)
    x, y = data()
    found = blame(model, x, y, loss="mse", loss_scale=1.0)
    assert found.where == "weights"
    assert found.layer == layer.name
    assert found.tensor == f"variable '{variable.path}'"
    assert found.float32_too is True
    assert f"has 1 NaN or infinite values of {values.size}" in found.message


def test_many_layers_in_float32_are_no_cure():
    # Each layer overflows for itself, and there are more than the limit.
    inputs = x = keras.Input((6,))
    for index in range(14):
        x = layers.Rescaling(1e5, dtype=HALF, name=f"up{index}")(x)
        x = layers.Rescaling(1e-5, dtype=HALF, name=f"down{index}")(x)
    model = keras.Model(inputs, head()(x))
    x, y = data()
    found = blame(model, x, y, loss="mse", loss_scale=1.0)
    assert found.layer == "up0"
    assert found.keep_float32 == ()
    assert "Use mixed_bfloat16" in found.fix


def test_bfloat16_needs_no_loss_scale():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4), head()])
    x, y = data()
    found = blame(model, x, y, loss="mse", loss_scale=2.0**24)
    assert found.where == "nothing"
    assert "loss scale" not in found.message


def test_compiled_model_and_its_scale():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4), head()])
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(), initial_scale=2.0**30
    )
    model.compile(optimizer, "mse")
    x, y = data()
    found = blame(model, tf.data.Dataset.from_tensors((x, y)))
    assert found.where == "backward"
    assert found.loss_scale < 2.0**30
    assert "at a loss scale of 2^30" in str(found).replace("\n", " ")


def test_json():
    x, y = data()
    model = functional()
    plant(model, "b", 3e5)
    found = blame(model, x, y, loss="mse", loss_scale=1.0)
    read = json.loads(found.to_json())
    assert read["layer"] == "b"
    assert read["keep_float32"] == list(found.keep_float32)
    assert read["value"] == found.value
    x[0, 0] = np.nan
    assert json.loads(blame(model, x, y).to_json())["value"] is None


def test_what_cannot_be_blamed_is_an_error():
    with pytest.raises(TypeError, match=r"expects a Keras model\. Received: 3"):
        blame(3, np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"number of rows.*\[2, 3\]"):
        blame(functional(), [np.ones((2, 6)), np.ones((3, 6))])


def test_a_culprit_that_another_run_does_not_have():
    x, y = data()
    model = functional()
    found = step.observe(model, batches.whole(x, y), loss="mse")
    assert culprit.find(found, []) is None
    assert culprit.value(found, ("outputs", id(model), 7, 0)) is None
    assert culprit.value(found, ("weight", 0)) is None
    assert culprit.value(found, ("loss",)) == float(found.loss)
