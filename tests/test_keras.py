"""The private parts of Keras that `tfmixed._keras` relies on."""

import re
import threading

import keras
import numpy as np
import pytest
from keras import layers

from tfmixed import _keras


def test_thread_policy_is_the_global_policy():
    keras.config.set_dtype_policy("mixed_float16")
    assert _keras.thread_policy() is keras.config.dtype_policy()
    _keras.set_thread_policy(keras.DTypePolicy("float64"))
    assert layers.Dense(1).dtype_policy.name == "float64"
    _keras.set_thread_policy(None)
    assert _keras.thread_policy() is None
    assert keras.config.dtype_policy().name == "float32"


def test_mark_is_lost_exactly_when_the_policy_is():
    keras.config.set_dtype_policy("mixed_float16")
    _keras.set_thread_mark("here")
    assert _keras.thread_mark() == "here"
    elsewhere = []

    def look():
        elsewhere.append((_keras.thread_mark(), _keras.thread_policy()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert elsewhere == [(None, None)]
    keras.utils.clear_session(free_memory=False)
    assert _keras.thread_mark() is None
    assert _keras.thread_policy() is None


def test_flatten_layers_finds_every_layer_once():
    shared = layers.Dense(4)
    attention = layers.MultiHeadAttention(1, 4)
    cell = layers.LSTMCell(4)
    inputs = keras.Input((3, 4))
    x = shared(shared(inputs))
    x = layers.RNN(cell)(attention(x, x))
    inner = keras.Sequential([layers.Dense(2)])
    model = keras.Model(inputs, inner(x))
    found = _keras.flatten_layers(model)
    assert len({id(layer) for layer in found}) == len(found)
    wanted = [
        model,
        shared,
        attention,
        *_keras.child_layers(attention),
        cell,
        inner,
        inner.layers[0],
    ]
    assert len(_keras.child_layers(attention)) >= 5
    assert all(any(layer is f for f in found) for layer in wanted)


def test_setting_a_policy_changes_nothing_else():
    policy_map = keras.dtype_policies.DTypePolicyMap("mixed_bfloat16")
    layer = layers.Dense(2, dtype=policy_map)
    layer.build((None, 3))
    kernel = layer.kernel
    _keras.set_layer_policy(layer, keras.DTypePolicy("float32"))
    assert layer.compute_dtype == "float32"
    assert len(policy_map) == 0
    _keras.set_layer_policy(layer, policy_map)
    assert _keras.layer_policy(layer) is policy_map
    assert layer.kernel is kernel
    assert kernel.dtype == "float32"


def test_normalization_keeps_no_rounded_tensors():
    for arguments in ({"mean": 1001.0, "variance": 2.0}, {}):
        layer = layers.Normalization(dtype="mixed_bfloat16", **arguments)
        layer.build((None, 1))
        _keras.set_layer_policy(layer, keras.DTypePolicy("float32"))
        assert layer.mean.dtype == layer.variance.dtype == "float32"
        expected = arguments.get("mean", 0.0)
        np.testing.assert_array_equal(np.ravel(layer.mean), [expected])


def test_input_dtype():
    model = keras.Sequential([layers.Dense(1, dtype="mixed_bfloat16")])
    model.build((None, 4))
    inputs = [
        layer
        for layer in _keras.flatten_layers(model)
        if _keras.input_dtype(layer) is not None
    ]
    assert [_keras.input_dtype(layer) for layer in inputs] == ["bfloat16"]
    _keras.set_input_dtype(inputs[0], "float32")
    assert model.inputs[0].dtype == "float32"
    assert model.input_dtype == "float32"


def test_compiled_functions_and_token():
    model = keras.Sequential([layers.Dense(1)])
    x = np.ones((4, 2))
    assert _keras.compile_token(model) is None
    model.compile("sgd", "mse")
    token = _keras.compile_token(model)
    assert set(_keras.compiled_functions(model).values()) == {None}
    model.fit(x, x[:, :1], verbose=0)
    model.evaluate(x, x[:, :1], verbose=0)
    model.predict(x, verbose=0)
    functions = _keras.compiled_functions(model)
    assert all(callable(function) for function in functions.values())
    _keras.set_compiled_functions(model, None)
    assert model.predict_function is None
    _keras.set_compiled_functions(model, functions)
    assert model.train_function is functions["train_function"]
    assert _keras.compile_token(model) is token
    model.compile("sgd", "mse")
    assert _keras.compile_token(model) is not token


def test_version_that_it_was_read_from():
    """A newer Keras may have moved these parts: then read it again."""
    read = re.search(r"Read from Keras ([0-9.]+)", _keras.__doc__).group(1)
    parts = [int(part) for part in read.split(".")[:2]]
    here = [int(part) for part in keras.__version__.split(".")[:2]]
    if here > parts:
        pytest.skip(f"read from Keras {read}, this is {keras.__version__}")
    assert parts == [3, 15]


def test_functional_is_what_keras_makes_of_inputs_and_outputs():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, layers.Dense(1)(inputs))
    assert type(model) is _keras.Functional


def test_optimizer_variables_are_those_it_was_built_with():
    variables = [keras.Variable([1.0]), keras.Variable([2.0])]
    optimizer = keras.optimizers.SGD()
    optimizer.build(variables)
    found = _keras.optimizer_variables(optimizer)
    assert [id(v) for v in found] == [id(v) for v in variables]


def test_replicas_need_a_merge_call_only_with_a_strategy(two_replicas):
    assert not _keras.needs_merge_call()
    with two_replicas.scope():
        assert _keras.needs_merge_call()


def test_build_for_step_creates_what_the_step_would():
    model = keras.Sequential([layers.Dense(2), layers.BatchNormalization()])
    model.compile("adam", "mse", metrics=["mae"])
    data = (np.ones((4, 3), "float32"), np.ones((4, 2), "float32"), None)
    _keras.build_for_step(model, data)
    assert len(model.variables) == 6
    # Two slots for each of four weights, the iteration and the rate.
    assert len(model.optimizer.variables) == 10
    assert len(model.metrics_variables) == 4
    before = [v.numpy() for v in model.variables]
    _keras.build_for_step(model, data)
    for one, other in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(one, other.numpy())


def test_build_for_step_leaves_odd_models_to_their_step():
    class Odd(keras.Model):
        pass

    model = Odd()
    model.compile("sgd", "mse")
    _keras.build_for_step(model, {"a": "text", "b": object()})
    assert not model.built


def test_copy_mask():
    ids = np.array([[1, 0]])
    masked = layers.Embedding(3, 2, mask_zero=True)(ids)
    plain = keras.ops.cast(masked, "float64")
    assert getattr(plain, "_keras_mask", None) is None
    assert _keras.copy_mask(masked, plain) is plain
    np.testing.assert_array_equal(plain._keras_mask, [[True, False]])
    bare = keras.ops.ones((1,))
    assert _keras.copy_mask(bare, plain)._keras_mask is not None
