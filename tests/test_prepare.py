import pathlib
import re
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import zoo
from support import arrays
from support import check_untouched
from support import numpy_of
from support import slow
from support import small_model

import tfmixed
from tfmixed import _keras
from tfmixed.layers.twins import stock_of
from tfmixed.model import GuardedTraining

POLICIES = ("mixed_float16", "mixed_bfloat16")


def outputs_of(model, x):
    flat = keras.tree.flatten(model(x))
    return [keras.ops.convert_to_numpy(tensor) for tensor in flat]


def dtypes_in_order(model):
    return [layer.compute_dtype for layer in flatten(model)]


def dtypes_of(model):
    return {layer.name: layer.compute_dtype for layer in flatten(model)}


def flatten(model):
    return _keras.flatten_layers(model)


def is_16_bit(layer):
    return layer.compute_dtype in ("float16", "bfloat16")


def error(exact, rough):
    scale = max(np.abs(exact).max(), 1e-30)
    return np.abs(exact - rough.astype("float32")).max() / scale


def made(kind):
    model, x = kind()
    return model, x, outputs_of(model, x)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", zoo.KINDS)
def test_outputs_are_those_of_float32(kind, policy):
    model, x, exact = made(kind)
    prepared = tfmixed.prepare(model, policy)
    assert isinstance(prepared, GuardedTraining)
    rough = outputs_of(prepared, x)
    tolerance = 1e-2 if policy == "mixed_float16" else 6e-2
    for one, other in zip(exact, rough, strict=True):
        assert other.dtype == "float32"
        assert error(one, other) < tolerance
    check_untouched(exact, outputs_of(model, x))


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_there_and_back_is_the_original(kind):
    model, x, exact = made(kind)
    back = tfmixed.to_float32(tfmixed.prepare(model, "mixed_float16"))
    assert type(back) is type(model)
    assert back is not model
    check_untouched(exact, outputs_of(back, x))
    check_untouched(numpy_of(model.weights), numpy_of(back.weights))
    assert all(stock_of(type(layer)) is None for layer in flatten(back))
    assert not any(is_16_bit(layer) for layer in flatten(back))
    if kind is not zoo.functions:
        assert _config(back) == _config(model)


def _config(model):
    # A layer that was built by `adapt` knows the shape of that data.
    text = repr(model.get_config())
    return re.sub(r"'build_config': {'input_shape': [^}]*}", "", text)


@pytest.mark.parametrize(
    "kind", [zoo.dense, *slow(*(k for k in zoo.SAVEABLE if k is not zoo.dense))]
)
def test_a_saved_model_is_the_same_in_another_process(kind, tmp_path):
    model, x, _ = made(kind)
    prepared = tfmixed.prepare(model, "mixed_float16")
    prepared.save(tmp_path / "model.keras")
    flat = [np.asarray(v) for v in keras.tree.flatten(x)]
    np.savez(tmp_path / "x.npz", *flat)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import numpy as np, keras, zoo, tfmixed\n"
        "from tfmixed import _keras\n"
        "model = keras.models.load_model(sys.argv[2] + '/model.keras')\n"
        f"_, x = zoo.{kind.__name__}()\n"
        "out = [np.asarray(o) for o in keras.tree.flatten(model(x))]\n"
        "np.savez(sys.argv[2] + '/out.npz', *out)\n"
        "print([(type(l).__name__, l.dtype_policy.name)\n"
        "       for l in _keras.flatten_layers(model)])\n"
        "print(isinstance(model, tfmixed.model.GuardedTraining))\n"
    )
    tests = str(pathlib.Path(__file__).parent)
    found = subprocess.run(
        [sys.executable, "-c", code, tests, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    with np.load(tmp_path / "out.npz") as saved:
        check_untouched(outputs_of(prepared, x), list(saved.values()))
    dtypes = [
        (type(v).__name__, v.dtype_policy.name) for v in flatten(prepared)
    ]
    assert found.stdout.splitlines() == [str(dtypes), "True"]


def test_the_stock_file_loads_without_tfmixed(tmp_path):
    model, x, exact = made(zoo.attention)
    prepared = tfmixed.prepare(model, "mixed_bfloat16")
    tfmixed.to_float32(prepared).save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", x)
    code = (
        "import sys; sys.modules['tfmixed'] = None\n"
        "import numpy as np, keras\n"
        "model = keras.models.load_model(sys.argv[1] + '/model.keras')\n"
        "out = model(np.load(sys.argv[1] + '/x.npy'))\n"
        "np.save(sys.argv[1] + '/out.npy', np.asarray(out))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    np.testing.assert_array_equal(exact[0], np.load(tmp_path / "out.npy"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "kind",
    [
        zoo.dense,
        zoo.custom_blocks,
        zoo.autoencoder,
        *slow(zoo.attention, zoo.subclassed, zoo.wrappers, zoo.masked),
    ],
)
def test_it_trains(kind, policy):
    model, x, exact = made(kind)
    prepared = tfmixed.prepare(model, policy)
    # A low scale: the calibration of the first steps is not in question.
    optimizer = tfmixed.LossScaleOptimizer(keras.optimizers.SGD(1e-3), 64.0)
    prepared.compile(optimizer, "mse")
    y = np.zeros_like(exact[0])
    history = prepared.fit(x, y, epochs=3, verbose=0)
    assert np.isfinite(history.history["loss"][-1])
    before, after = numpy_of(model.weights), numpy_of(prepared.weights)
    assert any((a != b).any() for a, b in zip(before, after, strict=True))


def test_weights_are_copied_not_shared():
    model = small_model(keras.Model)
    prepared = tfmixed.prepare(model, "mixed_float16")
    ours = {id(v) for v in model.variables}
    assert not any(id(v) in ours for v in prepared.variables)
    assert {v.dtype for v in prepared.weights} == {"float32"}


def test_pure_float16_gets_float32_weights():
    inputs = keras.Input((6,))
    x = keras.layers.Dense(4, dtype="float16")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, dtype="float16")(x))
    prepared = tfmixed.prepare(model, "mixed_float16")
    assert {v.dtype for v in prepared.weights} == {"float32"}
    check_untouched(numpy_of(model.weights), numpy_of(prepared.weights))


def test_a_prepared_model_can_be_prepared_again():
    model, x, exact = made(zoo.attention)
    prepared = tfmixed.prepare(model, "mixed_float16")
    again = tfmixed.prepare(prepared)
    assert dtypes_in_order(again) == dtypes_in_order(prepared)
    other = tfmixed.prepare(prepared, "mixed_bfloat16")
    assert "bfloat16" in dtypes_of(other).values()
    assert "float16" not in dtypes_of(other).values()
    back = tfmixed.to_float32(tfmixed.prepare(other, "float32"))
    check_untouched(exact, outputs_of(back, x))


def test_operations_are_protected_once_however_often_prepared():
    model, _ = zoo.operations()
    prepared = model
    for _ in range(3):
        prepared = tfmixed.prepare(prepared, "mixed_float16")
    guards = [v.name for v in prepared.layers if "float32" in v.name]
    assert guards == ["square_float32"]


def test_a_guard_takes_no_name_of_the_model():
    inputs = keras.Input((8,))
    x = keras.ops.square(keras.layers.Dense(8)(inputs))
    x = keras.layers.Dense(4, name=f"{x._keras_history[0].name}_float32")(x)
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    prepared = tfmixed.prepare(model, "mixed_float16")
    assert [v.name for v in prepared.layers if "float32" in v.name] == [
        "square_float32_2",
        "square_float32",
    ]


def test_layers_that_were_float32_in_a_mixed_model_stay():
    inputs = keras.Input((6,))
    half = keras.DTypePolicy("mixed_float16")
    x = keras.layers.Dense(4, dtype=half, name="half")(inputs)
    x = keras.layers.Dense(4, dtype="float32", name="kept")(x)
    x = keras.layers.Dense(4, dtype=half, name="other")(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    for _ in range(2):
        model = tfmixed.prepare(model)
        dtypes = dtypes_of(model)
        assert dtypes["half"] == dtypes["other"] == "float16"
        assert dtypes["kept"] == "float32"


def test_sublayers_left_behind_are_converted():
    inputs = keras.Input((4, 8))
    attention = keras.layers.MultiHeadAttention(2, 4, name="attention")
    lstm = keras.layers.LSTM(4, name="lstm")
    x = lstm(attention(inputs, inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    for layer in (attention, lstm):
        layer.dtype_policy = "mixed_float16"
    assert not is_16_bit(attention.query_dense)
    prepared = tfmixed.prepare(model)
    assert is_16_bit(prepared.get_layer("attention").query_dense)
    assert is_16_bit(prepared.get_layer("lstm").cell)


@pytest.mark.parametrize(
    "keep",
    ["deep", "inner/deep", ["shared", re.compile("^dee")], "d.*p", "inner"],
)
def test_keep_float32_by_name(keep):
    model, _ = zoo.nested_and_shared()
    prepared = tfmixed.prepare(model, "mixed_float16", keep_float32=keep)
    inner = prepared.get_layer("inner")
    assert inner.get_layer("deep").compute_dtype == "float32"
    assert is_16_bit(prepared.get_layer("shared")) != ("shared" in keep)


def test_keep_float32_by_class():
    model, _ = zoo.wrappers()
    lstm = keras.layers.LSTM
    prepared = tfmixed.prepare(model, "mixed_float16", keep_float32=lstm)
    kept = [v for v in flatten(prepared) if isinstance(v, lstm)]
    assert kept
    assert not any(is_16_bit(inner) for v in kept for inner in flatten(v))


def test_keep_float32_reaches_into_custom_layers():
    model, x, exact = made(zoo.custom_blocks)
    prepared = tfmixed.prepare(
        model, "mixed_float16", keep_float32="block/multi_head_attention"
    )
    blocks = [v for v in flatten(prepared) if isinstance(v, zoo.Block)]
    kept = [is_16_bit(block.attention) for block in blocks]
    # The outer call is written first, so the last block is called "block".
    assert kept == [True, False]
    assert error(exact[0], outputs_of(prepared, x)[0]) < 1e-2


def test_an_unknown_name_is_an_error_with_a_hint():
    model, _ = zoo.nested_and_shared()
    with pytest.raises(ValueError, match=r"'sharde'.*matches no layer.*shared"):
        tfmixed.prepare(model, "mixed_float16", keep_float32="sharde")


def test_a_policy_map_is_obeyed_to_the_letter():
    model, _ = zoo.nested_and_shared()
    policies = keras.dtype_policies.DTypePolicyMap("mixed_bfloat16")
    policies["inner/deep"] = keras.DTypePolicy("float32")
    policies["dense.*"] = keras.DTypePolicy("mixed_float16")
    prepared = tfmixed.prepare(model, policies)
    dtypes = dtypes_of(prepared)
    head = next(v for v in prepared.layers if v.name.startswith("dense"))
    assert prepared.get_layer("inner").get_layer("deep").dtype == "float32"
    assert head.compute_dtype == "float16"
    assert dtypes["shared"] == "bfloat16"


@pytest.mark.parametrize("bad", ["float16", "int8", "mixed_int8", 3])
def test_policies_that_cannot_be_used(bad):
    with pytest.raises((ValueError, TypeError)):
        tfmixed.prepare(small_model(keras.Model), bad)


def test_not_a_model():
    with pytest.raises(TypeError, match=r"expects a Keras model.*Dense"):
        tfmixed.prepare(keras.layers.Dense(2))
    with pytest.raises(TypeError, match="to_float32 expects"):
        tfmixed.to_float32("model.keras")


def test_the_plan_decides_without_a_policy():
    tfmixed.enable("mixed_bfloat16", verbose=False)
    prepared = tfmixed.prepare(small_model(keras.Model))
    assert "bfloat16" in dtypes_of(prepared).values()
    tfmixed.enable("float32", verbose=False)
    prepared = tfmixed.prepare(small_model(keras.Model))
    assert set(dtypes_of(prepared).values()) == {"float32"}


def test_without_fast_attention_is_stock_and_float32():
    model, _ = zoo.attention()
    prepared = tfmixed.prepare(model, "mixed_float16", fast=False)
    assert all(stock_of(type(layer)) is None for layer in flatten(prepared))
    attention = prepared.layers[1]
    assert not any(is_16_bit(layer) for layer in flatten(attention))


def test_a_layer_without_config_is_converted_in_place_and_named():
    model, x = zoo.without_config()
    exact = outputs_of(model, x)
    prepared, account = tfmixed.prepare(model, "mixed_float16", report=True)
    assert prepared.get_layer("closed") is model.get_layer("closed")
    (note,) = account.notes
    assert "'closed' (Closed)" in note
    assert "in place" in note
    assert not account.in_place
    assert is_16_bit(prepared.get_layer("closed").dense)
    assert error(exact[0], outputs_of(prepared, x)[0]) < 1e-2
    back = tfmixed.to_float32(prepared)
    check_untouched(exact, outputs_of(back, x))


def test_a_model_without_config_is_converted_in_place_and_named():
    class Closed(keras.Model):
        def __init__(self, function):
            super().__init__()
            self.function = function
            self.dense = keras.layers.Dense(8)
            self.head = keras.layers.Dense(2)

        def call(self, x):
            return self.head(self.function(self.dense(x)))

    model, x = Closed(lambda v: v * 2), np.ones((4, 8), "float32")
    exact = outputs_of(model, x)
    prepared, account = tfmixed.prepare(model, "mixed_float16", report=True)
    assert prepared is model
    assert isinstance(model, GuardedTraining)
    assert account.in_place
    assert "in place" in account.notes[0]
    assert is_16_bit(model.dense)
    assert not is_16_bit(model.head)
    assert tfmixed.to_float32(model) is model
    assert type(model) is Closed
    check_untouched(exact, outputs_of(model, x))


def test_tied_weights_stay_tied():
    class Tied(keras.layers.Layer):
        def __init__(self, embedding, **kwargs):
            super().__init__(**kwargs)
            self.embedding = embedding

        def call(self, x):
            table = keras.ops.cast(self.embedding.embeddings, x.dtype)
            return keras.ops.matmul(x, keras.ops.transpose(table))

    embedding = keras.layers.Embedding(10, 8)
    inputs = keras.Input((4,), dtype="int32")
    x = keras.layers.Dense(8)(embedding(inputs))
    model = keras.Model(inputs, Tied(embedding)(x))
    prepared = tfmixed.prepare(model, "mixed_float16")
    assert len(prepared.weights) == len(model.weights)
    ids = np.zeros((2, 4), "int32")
    rough = outputs_of(prepared, ids)[0]
    assert error(outputs_of(model, ids)[0], rough) < 1e-2


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adafactor"])
def test_compile_and_optimizer_state_carry_over(optimizer):
    x, y = arrays()
    model = small_model(keras.Model)
    model.compile(optimizer, "mse", metrics=["mae"])
    model.fit(x, y, verbose=0)
    prepared = tfmixed.prepare(model, "mixed_float16")
    check_untouched(
        numpy_of(model.optimizer.variables),
        numpy_of(prepared.optimizer.inner_optimizer.variables),
    )
    assert set(prepared.evaluate(x, y, verbose=0, return_dict=True)) == {
        "loss",
        "mae",
    }
    back = tfmixed.to_float32(prepared)
    assert type(back.optimizer) is type(model.optimizer)
    for one in (model, back):
        one.train_on_batch(x, y)
    for one, other in zip(
        numpy_of(model.weights), numpy_of(back.weights), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_keras_own_loss_scaling_is_taken_over_with_its_state():
    x, y = arrays()
    model = small_model(keras.Model, "mixed_float16")
    inner = keras.optimizers.Adam()
    model.compile(keras.optimizers.LossScaleOptimizer(inner, 64.0), "mse")
    model.fit(x, y, verbose=0)
    prepared = tfmixed.prepare(model)
    assert isinstance(prepared.optimizer, tfmixed.LossScaleOptimizer)
    assert float(prepared.optimizer.dynamic_scale) == 64.0
    assert int(prepared.optimizer.inner_optimizer.iterations) == 1


def test_a_train_step_of_ones_own_is_guarded():
    class Custom(keras.Model):
        def train_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
                scaled = self.optimizer.scale_loss(loss)
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(scaled, weights), weights)
            return {"loss": loss}

    inputs = keras.Input((6,))
    x = keras.layers.BatchNormalization()(keras.layers.Dense(8)(inputs))
    model = Custom(inputs, keras.layers.Dense(1)(x))
    prepared = tfmixed.prepare(model, "mixed_float16")
    scale = tfmixed.FixedLossScale(8.0)
    prepared.compile(tfmixed.LossScaleOptimizer("sgd", scale), "mse")
    before = numpy_of(prepared.weights)
    bad, targets = arrays(1, bad=(0,))
    prepared.train_on_batch(bad, targets)
    check_untouched(before, numpy_of(prepared.weights))
    assert isinstance(prepared, Custom)
    assert type(tfmixed.to_float32(prepared)) is Custom


def test_a_model_that_is_not_built_yet():
    layers = keras.layers
    model = keras.Sequential([layers.Dense(4), layers.ReLU(), layers.Dense(2)])
    prepared = tfmixed.prepare(model, "mixed_float16")
    assert outputs_of(prepared, np.ones((2, 3)))[0].dtype == "float32"
    assert is_16_bit(prepared.layers[0])
    net = zoo.Net()
    prepared, account = tfmixed.prepare(net, "mixed_float16", report=True)
    assert "has not been built" in " ".join(account.notes)
    assert is_16_bit(prepared.first)


def test_frozen_layers_stay_frozen():
    model, _ = zoo.nested_and_shared()
    model.get_layer("inner").trainable = False
    model.get_layer("inner").get_layer("deep").trainable = True
    prepared = tfmixed.prepare(model, "mixed_float16")
    names = [v.path for v in model.trainable_variables]
    assert [v.path for v in prepared.trainable_variables] == names


def test_the_account_is_readable():
    model, _ = zoo.attention()
    prepared, account = tfmixed.prepare(model, "mixed_float16", report=True)
    assert prepared.preparation is account
    text = str(account)
    assert "is prepared for mixed_float16" in text
    assert "twin: multi_head_attention" in text
    assert "float32: global_average_pooling1d" in text
    assert "The sum over the window overflows" in text
    assert all(change.reason.endswith(".") for change in account.changes)


def test_what_is_left_alone_is_said():
    for kind, name in ((zoo.quantized, "int8"), (zoo.lora, "LoRA")):
        model, _ = kind()
        account = tfmixed.prepare(model, "mixed_float16").preparation
        assert any(name in note for note in account.notes), name


def test_no_warning_and_no_global_state():
    model, _ = zoo.custom_blocks()
    keras.config.set_dtype_policy("float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tfmixed.prepare(model, "mixed_float16")
    assert keras.config.dtype_policy().name == "float32"


def test_a_failure_leaves_the_model_and_the_global_policy_alone():
    model, x, exact = made(zoo.dense)
    with pytest.raises(ValueError, match="matches no layer"):
        tfmixed.prepare(model, "mixed_float16", keep_float32="nothing")
    assert keras.config.dtype_policy().name == "float32"
    check_untouched(exact, outputs_of(model, x))


def test_functional_outputs_keep_their_names():
    model, _ = zoo.named_inputs_and_outputs()
    prepared = tfmixed.prepare(model, "mixed_float16")
    assert prepared.output_names == model.output_names
    assert (
        prepared.input_names == model.input_names
        if hasattr(model, "input_names")
        else True
    )


@keras.saving.register_keras_serializable("test_prepare")
class Late(keras.layers.Layer):
    """Makes its layers when it is built."""

    def build(self, shape):
        self.dense = keras.layers.Dense(shape[-1])
        self.norm = keras.layers.LayerNormalization()
        self.dense.build(shape)
        self.norm.build(shape)

    def call(self, x):
        return self.norm(self.dense(x))


def late():
    inputs = keras.Input((8,))
    x = Late(name="second")(Late(name="first")(inputs))
    return keras.Model(inputs, keras.layers.Dense(2)(x))


def as_map(name):
    policies = keras.dtype_policies.DTypePolicyMap("mixed_float16")
    policies[name] = keras.DTypePolicy("float32")
    return {"policy": policies}


def as_keep(name):
    return {"policy": "mixed_float16", "keep_float32": name}


@pytest.mark.parametrize("argument", [as_map, as_keep])
def test_layers_that_build_makes_follow_what_names_their_layer(argument):
    model = late()
    prepared = tfmixed.prepare(model, **argument("second"))
    first, second = prepared.get_layer("first"), prepared.get_layer("second")
    assert is_16_bit(first.dense)
    assert is_16_bit(first.norm)
    assert not any(is_16_bit(layer) for layer in flatten(second))
    inner = model.get_layer("first").dense.name
    prepared = tfmixed.prepare(model, **argument(f"first/{inner}"))
    assert not is_16_bit(prepared.get_layer("first").dense)
    assert prepared.get_layer("first").dense.name == inner
    assert is_16_bit(prepared.get_layer("second").dense)


def test_what_was_converted_in_place_does_not_make_a_model_mixed():
    model, _ = zoo.without_config()
    one = tfmixed.prepare(model, "mixed_float16")
    other = tfmixed.prepare(model, "mixed_float16")
    assert dtypes_in_order(other) == dtypes_in_order(one)
    assert is_16_bit(other.layers[1])


@keras.saving.register_keras_serializable("test_prepare")
class LateModel(keras.Model):
    """Makes its layers when it is built."""

    def build(self, shape):
        self.dense = keras.layers.Dense(shape[-1])
        self.softmax = keras.layers.Softmax()
        self.head = keras.layers.Dense(2)
        self.dense.build(shape)
        self.head.build(shape)

    def call(self, x):
        return self.head(self.softmax(self.dense(x)))

    def get_config(self):
        return {"name": self.name}


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_layers_that_the_build_of_a_model_makes_follow_the_table(policy):
    x = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
    model = LateModel()
    exact = model(x)
    prepared = tfmixed.prepare(model, policy)
    assert is_16_bit(prepared.dense)
    # Of a softmax only the outside may be in 16 bits, in a layer of tfmixed.
    assert not is_16_bit(prepared.softmax) or (
        type(prepared.softmax) is not keras.layers.Softmax
    )
    assert not is_16_bit(prepared.head)
    np.testing.assert_allclose(prepared(x), exact, rtol=0, atol=0.05)
