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


def dense(name):
    return layers.Dense(4, name=name)


def names_of(nodes):
    return [node.operation.name for node in nodes]


def test_a_graph_has_a_node_for_each_call_inputs_first():
    shared, add = dense("shared"), layers.Add(name="add")
    inputs = keras.Input((4,), name="in")
    first = shared(inputs)
    outputs = add([shared(first), keras.ops.exp(inputs)])
    model = keras.Model(inputs, outputs)
    nodes = _keras.graph_nodes(_keras.graph_of(model))
    assert sorted(names_of(nodes)) == ["add", "exp", "shared", "shared"]
    assert nodes[-1].operation is add
    known = {id(inputs)}
    for node in nodes:
        assert {id(x) for x in node.inputs} <= known
        known |= {id(x) for x in node.outputs}
    assert len(nodes[-1].inputs) == 2
    assert nodes[-1].outputs[0] is outputs
    assert nodes[-1].args[0][0] is nodes[-1].inputs[0]


def test_a_node_tells_the_arguments_as_they_were_given():
    inputs = keras.Input((4, 4))
    outputs = layers.MultiHeadAttention(1, 2)(
        inputs, inputs, use_causal_mask=True
    )
    model = keras.Model(inputs, keras.ops.sum(outputs, axis=-1, keepdims=True))
    attention, total = _keras.graph_nodes(_keras.graph_of(model))
    assert attention.kwargs["use_causal_mask"] is True
    assert len(attention.args) == len(attention.inputs) == 2
    assert total.operation.keepdims
    # A copy: the graph stays as it was.
    attention.kwargs.clear()
    assert _keras.graph_nodes(_keras.graph_of(model))[0].kwargs


def test_graph_of_each_kind_of_model():
    inputs = keras.Input((4,))
    functional = keras.Model(inputs, dense("a")(inputs))
    assert _keras.graph_of(functional) is functional
    sequential = keras.Sequential([dense("a")])
    assert _keras.graph_of(sequential) is None
    sequential.build((None, 4))
    graph = _keras.graph_of(sequential)
    assert names_of(_keras.graph_nodes(graph)) == ["a"]

    class Own(keras.Model):
        pass

    assert _keras.graph_of(Own()) is None
    assert _keras.graph_of(dense("a")) is None


def test_graph_operations_are_those_of_nested_models_too():
    def nested(x, name):
        return keras.Model(x, dense(f"{name}_d")(keras.ops.exp(x)), name=name)

    inputs = keras.Input((4,), name="in")
    inner = keras.Sequential([nested(inputs, "inner"), dense("last")])
    unbuilt = keras.Sequential([dense("unbuilt")])
    inner.build((None, 4))
    model = keras.Model(inputs, inner(inputs))
    found = [one.name for one in _keras.graph_operations(model)]
    assert {"in", "inner", "exp", "inner_d", "last"} <= set(found)
    assert [o.name for o in _keras.graph_operations(unbuilt)] == ["unbuilt"]


def test_graph_inputs_flat_and_as_given():
    pair = {n: keras.Input((2,), name=n) for n in ("b", "a")}
    model = keras.Model(pair, layers.Add()([pair["a"], pair["b"]]))
    flat, structure = _keras.graph_inputs(model)
    assert {id(x) for x in flat} == {id(x) for x in pair.values()}
    assert structure["a"] is pair["a"]
    assert structure["b"] is pair["b"]
    assert [id(x) for x in flat] == [
        id(x) for x in keras.tree.flatten(structure)
    ]


def test_run_graph_computes_what_the_model_does():
    first, second = keras.Input((4,)), keras.Input((4,))
    shared = dense("shared")
    x = layers.Add()([shared(first), 2.0 * shared(second)])
    outputs = {"a": shared(x), "b": [keras.ops.split(x, 2, axis=-1)[1]]}
    model = keras.Model([first, second], outputs)
    values = [np.ones((3, 4), "float32"), np.full((3, 4), 2.0, "float32")]
    called = []

    def call(operation, args, kwargs):
        called.append(operation.name)
        return operation(*args, **kwargs)

    found = _keras.run_graph(model, values, call)
    expected = model(values)
    np.testing.assert_allclose(found["a"], expected["a"], rtol=1e-6)
    np.testing.assert_allclose(found["b"][0], expected["b"][0], rtol=1e-6)
    assert called.count("shared") == 3
    assert len(called) == 6


def test_run_graph_calls_a_shared_layer_in_the_order_it_was_called():
    """Also where the graph would have the later call first."""
    shared = dense("shared")
    inputs = keras.Input((4,))
    early = shared(layers.ReLU(name="deep")(layers.ReLU()(inputs)))
    late = shared(inputs)
    model = keras.Model(inputs, [early, late])
    order = []

    def call(operation, args, kwargs):
        if operation is shared:
            order.append(args[0])
        return operation(*args, **kwargs)

    x = np.array([[-1.0, 1.0, -1.0, 1.0]], "float32")
    _keras.run_graph(model, [x], call)
    assert (order[0].numpy() >= 0).all()
    np.testing.assert_array_equal(order[1], x)


def test_run_graph_says_what_is_not_connected():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, dense("d")(inputs), name="mine")
    node = model._nodes_by_depth[0][0]
    other = keras.Input((4,))
    node.arguments.keras_tensors[:] = [other]
    node.input_tensors[:] = [other]
    with pytest.raises(ValueError, match="cannot be run") as raised:
        _keras.run_graph(model, [np.ones((1, 4))], lambda *_: None)
    assert str(raised.value) == (
        "The graph of 'mine' cannot be run: the inputs of 'd' are not "
        "connected."
    )


def test_a_copied_operation_is_free_of_its_graph():
    x = keras.Input((4,))
    operation = keras.ops.sum(x, axis=1)._keras_history.operation
    copy = _keras.copy_operation(operation)
    assert type(copy) is type(operation)
    assert copy is not operation
    assert (copy.axis, copy.name) == (operation.axis, operation.name)
    y = copy(keras.Input((4,)))
    assert y._keras_history.operation is copy
    assert len(copy._inbound_nodes) == len(operation._inbound_nodes) == 1


def test_is_functional_like():
    class Own(keras.Model):
        def __init__(self, size):
            super().__init__()

    class Like(keras.Model):
        pass

    inputs = keras.Input((4,))
    like = Like(inputs, dense("d")(inputs))
    assert _keras.is_functional_like(type(like))
    assert _keras.is_functional_like(_keras.Functional)
    assert not _keras.is_functional_like(Own)


def test_sequential_layers_have_the_input_layer():
    model = keras.Sequential([keras.Input((4,), name="in"), dense("d")])
    assert [x.name for x in _keras.sequential_layers(model)] == ["in", "d"]
    assert [x.name for x in model.layers] == ["d"]
    assert len(_keras.sequential_layers(keras.Sequential([dense("d")]))) == 1


def test_seed_generators_are_those_of_the_layer_itself():
    dropout = layers.Dropout(0.5, seed=1)
    (generator,) = _keras.seed_generators(dropout)
    assert isinstance(generator, keras.random.SeedGenerator)
    assert _keras.seed_generators(dense("d")) == []
    assert _keras.seed_generators(keras.Sequential([dropout])) == []


def test_compile_arguments_are_those_that_were_given():
    model = keras.Sequential([dense("d")])
    given = {
        "optimizer": keras.optimizers.SGD(0.5),
        "loss": "mse",
        "loss_weights": [2.0],
        "metrics": ["mae"],
        "run_eagerly": True,
        "steps_per_execution": 1,
    }
    model.compile(**given)
    found = _keras.compile_arguments(model)
    for name, value in given.items():
        assert found[name] is value or found[name] == value
    found.clear()
    assert _keras.compile_arguments(model)["loss"] == "mse"


def test_a_call_on_the_instance_wins_and_goes_again():
    layer = layers.ReLU()
    original = layer.call
    state = dict(vars(layer))
    _keras.set_instance_call(layer, lambda x: x + 5.0)
    np.testing.assert_array_equal(layer(np.zeros((1,))), [5.0])
    assert layers.ReLU.call is type(layer).call
    _keras.set_instance_call(layer, None)
    _keras.set_instance_call(layer, None)
    assert layer.call == original
    assert vars(layer).keys() == state.keys()
    np.testing.assert_array_equal(layer(np.full((1,), -1.0)), [0.0])


def test_build_shapes_by_the_names_of_the_arguments():
    class Two(layers.Layer):
        def build(self, a_shape, b_shape):
            pass

        def call(self, a, b):
            return a + b

    layer = Two()
    assert _keras.build_shapes(layer) is None
    layer(np.ones((2, 3)), np.ones((2, 1)))
    shapes = _keras.build_shapes(layer)
    assert {k: tuple(v) for k, v in shapes.items()} == {
        "a_shape": (2, 3),
        "b_shape": (2, 1),
    }

    class Own(keras.Model):
        def call(self, x):
            return x

    model = Own()
    model(np.ones((2, 3)))
    (shape,) = _keras.build_shapes(model).values()
    assert tuple(shape) == (2, 3)


def test_lambda_arguments_make_the_same_layer():
    def mask(inputs, given):
        return given

    layer = layers.Lambda(len, output_shape=(3,), mask=mask, arguments={"a": 1})
    assert _keras.lambda_arguments(layer) == {
        "function": len,
        "output_shape": (3,),
        "mask": mask,
        "arguments": {"a": 1},
    }
    again = layers.Lambda(**_keras.lambda_arguments(layer))
    assert _keras.lambda_arguments(again) == _keras.lambda_arguments(layer)


class Adds(layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.sum(x))
        return x


def test_losses_are_put_back_as_they_were():
    inner = Adds()
    model = keras.Sequential([inner, dense("d")])
    x = np.ones((2, 4), "float32")
    model(x)
    (before,) = inner.losses
    kept = _keras.kept_losses(model)
    model(2.0 * x)
    model(3.0 * x)
    assert float(inner.losses[0]) != 8.0
    _keras.restore_losses(kept)
    assert inner.losses[0] is before
    assert len(model.losses) == 1
    # And none where there were none.
    fresh = keras.Sequential([Adds()])
    kept = _keras.kept_losses(fresh)
    fresh(x)
    assert fresh.losses
    _keras.restore_losses(kept)
    assert fresh.losses == []


def test_added_losses_can_be_replaced():
    layer = Adds()
    layer(np.ones((2, 4), "float32"))
    (added,) = _keras.added_losses(layer)
    assert float(added) == 8.0
    _keras.set_added_losses(layer, [keras.ops.ones(())])
    assert [float(loss) for loss in layer.losses] == [1.0]
    assert [float(loss) for loss in _keras.added_losses(layer)] == [1.0]


def test_takes_training():
    class Own(keras.Model):
        def call(self, x, training=False):
            return x

    class Without(keras.Model):
        def call(self, x):
            return x

    assert _keras.takes_training(Own())
    assert not _keras.takes_training(Without())


def test_losses_are_computed_as_the_step_does():
    model = keras.Sequential([Adds(), dense("d")])
    x, y = np.ones((2, 4), "float32"), np.zeros((2, 4), "float32")
    model.compile("sgd", "mse")
    outputs = model(x)
    weights = np.array([1.0, 3.0], "float32")
    found = _keras.compute_loss(model, x, y, outputs, weights)
    errors = np.square(np.array(outputs)).mean(-1)
    expected = (errors * weights).mean() + 8.0
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_loss_of_each_kind_becomes_a_function():
    inputs = keras.Input((4,))
    model = keras.Model(
        inputs, {"a": dense("a")(inputs), "b": dense("b")(inputs)}
    )
    y = {name: np.zeros((2, 4), "float32") for name in ("a", "b")}
    outputs = {name: np.full((2, 4), 2.0, "float32") for name in ("a", "b")}
    loss = _keras.compile_loss(model, {"a": "mse", "b": "mae"})
    np.testing.assert_allclose(loss(y, outputs), 6.0)
    assert not model.compiled
    single = _keras.compile_loss(keras.Sequential([dense("d")]), "mse")
    weights = np.array([1.0, 0.0], "float32")
    np.testing.assert_allclose(single(y["a"], outputs["a"], weights), 2.0)


def test_the_global_seed_can_be_put_back():
    keras.utils.set_random_seed(1)
    _keras.set_global_seed(None)
    assert _keras.global_seed() is None
    first = np.array(keras.random.normal((2,)))
    kept = _keras.global_seed()
    assert isinstance(kept, keras.random.SeedGenerator)
    second = np.array(keras.random.normal((2,)))
    keras.utils.set_random_seed(1)
    _keras.set_global_seed(None)
    np.testing.assert_array_equal(keras.random.normal((2,)), first)
    assert _keras.global_seed() is not kept
    assert not np.array_equal(first, second)
    _keras.set_global_seed(kept)
    assert _keras.global_seed() is kept
