import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras import ops

from tfmixed import _keras
from tfmixed.convert import graph
from tfmixed.prepare import prepare

HALF = ["float16", "bfloat16"]


def dense(name, **options):
    return layers.Dense(4, name=name, **options)


def functional(function, *shapes, dtype="float32", name=None):
    """A model of what a function makes of inputs of these shapes."""
    inputs = [
        keras.Input(shape, dtype=dtype, name=f"in_{number}")
        for number, shape in enumerate(shapes or ((4,),))
    ]
    return keras.Model(inputs, function(*inputs), name=name)


def marked(model, reason):
    """The names of what is demanded in float32, nested models included."""
    demands = graph.demands(model)
    return {
        operation.name
        for operation in _keras.graph_operations(model)
        if demands.get(id(operation)) == reason
    }


def kinds_of(model, reason):
    demands = graph.demands(model)
    return {
        type(operation).__name__
        for operation in _keras.graph_operations(model)
        if demands.get(id(operation)) == reason
    }


def heads(model):
    return marked(model, graph.HEAD)


def ids(model):
    return marked(model, graph.IDS)


def body(x):
    return dense("body", activation="relu")(x)


def multiple(x):
    a, b = dense("a")(body(x)), dense("b")(body_of(x))
    return {"a": a, "b": layers.Softmax(name="softmax")(b)}


def body_of(x):
    return layers.LSTM(4, name="lstm")(layers.RepeatVector(2)(x))


def trunk(x):
    """A chain of residual additions, which gives the output."""
    for number in range(4):
        x = layers.Add(name=f"add_{number}")([x, dense(f"d{number}")(x)])
    return x


def rectified(x):
    """The same, as in ResNet."""
    for number in range(3):
        x = layers.Add(name=f"add_{number}")([x, dense(f"d{number}")(x)])
        x = layers.ReLU(name=f"relu_{number}")(x)
    return x


def operators(x):
    return ops.squeeze(ops.exp(dense("d")(body(x))[:, :1]) + 1.0, -1)


HEADS = {
    "a layer": (lambda x: dense("d")(body(x)), {"d"}),
    "Activation": (
        lambda x: layers.Activation("softmax", name="s")(dense("d")(body(x))),
        {"s", "d"},
    ),
    "Softmax, Reshape, Dropout": (
        lambda x: layers.Softmax(name="s")(
            layers.Dropout(0.1, name="o")(
                layers.Reshape((2, 2), name="r")(dense("d")(body(x)))
            )
        ),
        {"s", "o", "r", "d"},
    ),
    "Rescaling": (
        lambda x: layers.Rescaling(2.0, name="r")(dense("d")(body(x))),
        {"r", "d"},
    ),
    "ReLU and Flatten": (
        lambda x: layers.ReLU(name="r")(layers.Flatten(name="f")(body(x))),
        {"r", "f", "body"},
    ),
    "concatenated": (
        lambda x: layers.Concatenate(name="c")(
            [dense("d")(body(x)), layers.ReLU(name="r")(dense("e")(x))]
        ),
        {"c", "d", "r", "e"},
    ),
    "added": (
        lambda x: layers.Add(name="s")([dense("d")(body(x)), dense("e")(x)]),
        {"s", "d", "e"},
    ),
    "averaged": (
        lambda x: layers.Average(name="s")([dense("d")(x), dense("e")(x)]),
        # What it averages is its own affair: it is float32 itself.
        {"s"},
    ),
    "a residual trunk": (trunk, {"add_3", "add_2", "d3"}),
    "a rectified trunk": (
        rectified,
        {"relu_2", "add_2", "d2", "relu_1", "add_1"},
    ),
    "through a layer with weights": (
        lambda x: layers.BatchNormalization(name="n")(dense("d")(x)),
        {"n"},
    ),
    "through a layer with layers": (
        lambda x: layers.Bidirectional(layers.GRU(2), name="g")(
            layers.RepeatVector(2, name="r")(x)
        ),
        {"g"},
    ),
    "pooled": (
        lambda x: layers.GlobalAveragePooling1D(name="p")(
            layers.RepeatVector(2, name="r")(x)
        ),
        {"p"},
    ),
    "the largest": (
        lambda x: layers.GlobalMaxPooling1D(name="p")(
            layers.RepeatVector(2, name="r")(dense("d")(x))
        ),
        {"p", "r", "d"},
    ),
    "several outputs": (multiple, {"a", "b", "softmax"}),
    "the input itself": (lambda x: [x, dense("d")(x)], {"d"}),
}


@pytest.mark.parametrize("case", HEADS)
def test_heads(case):
    function, expected = HEADS[case]
    model = functional(function)
    assert heads(model) == expected
    assert ids(model) == set()


def test_a_head_behind_operations():
    model = functional(operators)
    kinds = kinds_of(model, graph.HEAD)
    assert kinds == {"Dense", "GetItem", "Exp", "Add", "Squeeze"}
    assert "body" not in heads(model)


def test_a_product_of_operations_is_not_passed():
    model = functional(lambda x: ops.matmul(dense("d")(x), ops.transpose(x)))
    assert kinds_of(model, graph.HEAD) == {"Matmul"}


def test_a_comparison_in_the_head_is_not_float():
    model = functional(
        lambda x: ops.where(
            ops.greater(dense("gate")(x), 0.0), dense("yes")(x), dense("no")(x)
        )
    )
    assert {"yes", "no"} <= heads(model)
    assert "gate" not in heads(model)


def test_the_order_of_the_outputs_does_not_matter():
    def make(x):
        a = layers.Add(name="a")([dense("c")(x), dense("d")(x)])
        return [a, layers.Add(name="o")([a, dense("b")(x)])]

    for function in (make, lambda x: make(x)[::-1]):
        assert heads(functional(function)) == {"a", "b", "c", "d", "o"}


def test_a_shared_layer_is_a_head_when_one_of_its_calls_is():
    shared = dense("shared")
    model = functional(lambda x: dense("d")(shared(shared(x))))
    assert heads(model) == {"d"}
    model = functional(lambda x: shared(dense("d")(shared(x))))
    assert heads(model) == {"shared"}


def inner(name="inner", output="out"):
    return functional(
        lambda x: layers.ReLU(name=f"{name}_relu")(dense(output)(body(x))),
        name=name,
    )


def test_heads_in_a_nested_model():
    nested = inner()
    model = functional(lambda x: layers.Softmax(name="s")(nested(x)))
    assert heads(model) == {"s", "out", "inner_relu"}
    # The nested model is not a head as a whole.
    assert id(nested) not in graph.demands(model)
    model = functional(lambda x: dense("d")(nested(x)))
    assert heads(model) == {"d"}


def test_heads_in_a_model_nested_twice():
    innermost = inner("innermost")
    nested = functional(
        lambda x: layers.Dropout(0.1, name="drop")(innermost(x)), name="middle"
    )
    model = functional(lambda x: layers.Reshape((2, 2), name="r")(nested(x)))
    assert heads(model) == {"r", "drop", "out", "innermost_relu"}


def test_heads_through_a_nested_model_without_weights():
    plain = keras.Sequential(
        [keras.Input((4,)), layers.ReLU(name="r"), layers.Softmax(name="s")]
    )
    model = functional(lambda x: plain(dense("d")(body(x))))
    assert heads(model) == {"r", "s", "d"}


def test_a_nested_model_gives_a_part_of_the_output():
    nested = functional(lambda x: [dense("a")(x), dense("b")(x)], name="two")
    assert "b" in heads(functional(lambda x: nested(x)[1]))
    assert heads(functional(lambda x: dense("d")(nested(x)[0]))) == {"d"}


def test_a_shared_nested_model():
    nested = inner()
    model = functional(lambda x: nested(nested(x)))
    assert heads(model) == {"out", "inner_relu"}
    siamese = functional(
        lambda x, y: layers.Subtract(name="s")([nested(x), nested(y)]),
        (4,),
        (4,),
    )
    assert heads(siamese) == {"s", "out", "inner_relu"}


SEQUENCES = {
    "a layer": (lambda: [dense("a"), dense("b")], {"b"}),
    "softmax": (lambda: [dense("a"), layers.Softmax(name="s")], {"a", "s"}),
    "dropout": (
        lambda: [
            dense("a"),
            dense("b"),
            layers.Activation("tanh", name="t"),
            layers.Dropout(0.1, name="o"),
        ],
        {"b", "t", "o"},
    ),
    "pooling": (
        lambda: [
            layers.RepeatVector(3, name="r"),
            layers.GlobalAveragePooling1D(name="p"),
            layers.Flatten(name="f"),
        ],
        {"p", "f"},
    ),
    "recurrent": (
        lambda: [layers.RepeatVector(3, name="r"), layers.GRU(2, name="g")],
        {"g"},
    ),
}


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("case", SEQUENCES)
def test_heads_of_a_sequential_model(case, built):
    make, expected = SEQUENCES[case]
    model = keras.Sequential(make())
    if built:
        model.build((None, 4))
    assert model.built == built
    assert heads(model) == expected


@pytest.mark.parametrize("built", [True, False])
def test_a_nested_model_at_the_end_of_a_sequential_model(built):
    nested = inner()
    model = keras.Sequential([layers.Rescaling(2.0, name="r"), nested])
    if built:
        model.build((None, 4))
    assert heads(model) == {"out", "inner_relu"}
    assert id(nested) not in graph.demands(model)


@pytest.mark.parametrize("built", [True, False])
def test_ids_in_a_sequential_model(built):
    model = keras.Sequential(
        [
            layers.Reshape((2, 2), name="r"),
            layers.Flatten(name="f"),
            layers.Embedding(9, 2, name="e"),
            layers.Flatten(name="g"),
            dense("d"),
        ]
    )
    if built:
        model.build((None, 4))
    assert ids(model) == {"r", "f"}
    assert heads(model) == {"d"}


TAKING = {
    "Embedding": lambda: layers.Embedding(9, 2),
    "CategoryEncoding": lambda: layers.CategoryEncoding(9),
    "Hashing": lambda: layers.Hashing(9),
    "IntegerLookup": lambda: layers.IntegerLookup(vocabulary=[1, 2]),
    "Discretization": lambda: layers.Discretization([1.0, 2.0]),
    "a subclass": lambda: type("Mine", (layers.Embedding,), {})(9, 2),
}


@pytest.mark.parametrize("kind", TAKING)
def test_ids_are_traced_to_what_they_pass(kind):
    taking = TAKING[kind]()
    model = functional(
        lambda x, other: [
            taking(layers.Reshape((4,), name="r")(layers.ReLU(name="n")(x))),
            dense("d")(layers.ReLU(name="free")(other)),
        ],
        (2, 2),
        (4,),
    )
    assert ids(model) == {"r", "n"}


@pytest.mark.skipif(
    not hasattr(layers, "ReversibleEmbedding"), reason="Keras has none yet"
)
def test_tied_logits_take_no_ids():
    tied = layers.ReversibleEmbedding(9, 4, name="e")
    tokens = keras.Input((5,), dtype="int32")
    hidden = layers.Dense(4, name="d")(tied(tokens))
    logits = tied(hidden, reverse=True)
    model = prepare(keras.Model(tokens, logits), "mixed_bfloat16")
    assert model.get_layer("d").compute_dtype == "bfloat16"
    found = model(np.ones((2, 5), "int32"))
    assert found.dtype == tf.float32
    exact = keras.Model(tokens, logits)(np.ones((2, 5), "int32"))
    np.testing.assert_allclose(found, exact, atol=0.01)


def test_ids_through_several_inputs_and_operations():
    def make(x, y):
        both = layers.Concatenate(name="c")([x, ops.flip(y)])
        return layers.Embedding(9, 2, name="e")(both[:, :3] + 1.0)

    model = functional(make, (4,), (4,))
    kinds = kinds_of(model, graph.IDS)
    assert kinds == {"Concatenate", "Flip", "GetItem", "Add"}


def test_integers_stop_the_walk():
    model = functional(
        lambda x: layers.Embedding(9, 2)(ops.argmax(dense("d")(x), -1)[:, None])
    )
    assert ids(model) == set()
    model = functional(
        lambda x: layers.Embedding(9, 2)(
            layers.Reshape((1,), name="r")(
                ops.cast(ops.argmax(dense("d")(x), -1), "float32")
            )
        )
    )
    assert "r" in ids(model)
    assert "d" not in ids(model)
    model = functional(
        lambda x: layers.Embedding(9, 2)(layers.Reshape((2, 2), name="r")(x)),
        dtype="int32",
    )
    assert ids(model) == set()


def test_ids_that_are_cast_to_integers():
    """They are rounded before they are cast."""
    model = functional(
        lambda x: layers.Embedding(9, 2)(
            ops.cast(layers.Reshape((2, 2), name="r")(x), "int32")
        )
    )
    assert "r" in ids(model)
    model = functional(
        lambda x: layers.Flatten()(ops.cast(dense("d")(x), "float64"))
    )
    assert ids(model) == set()


class Token(layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.embedding = layers.Embedding(9, 2)

    def call(self, x):
        return self.embedding(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Token(name="t"),
        lambda: layers.TimeDistributed(layers.Embedding(9, 2), name="t"),
    ],
)
def test_ids_that_a_layer_inside_takes(make):
    model = functional(lambda x: make()(layers.Reshape((2, 2), name="r")(x)))
    assert "r" in ids(model)


def test_ids_into_a_nested_model():
    nested = functional(
        lambda x, y: [
            layers.Embedding(9, 2)(layers.Reshape((4,), name="r")(x)),
            dense("d")(y),
        ],
        (2, 2),
        (4,),
    )
    model = functional(
        lambda x, y: nested(
            [layers.Permute((2, 1), name="p")(x), layers.ReLU(name="n")(y)]
        ),
        (2, 2),
        (4,),
    )
    assert ids(model) == {"p", "r"}


def test_ids_into_a_nested_model_with_named_inputs():
    inputs = {name: keras.Input((4,), name=name) for name in ("b", "a")}
    outputs = layers.Embedding(9, 2)(inputs["b"]), dense("d")(inputs["a"])
    nested = keras.Model(inputs, outputs)
    model = functional(
        lambda x, y: nested(
            {
                "a": layers.ReLU(name="for_a")(x),
                "b": layers.ReLU(name="for_b")(y),
            }
        ),
        (4,),
        (4,),
    )
    assert ids(model) == {"for_b"}


def test_ids_out_of_a_nested_model():
    nested = functional(lambda x: layers.Reshape((2, 2), name="r")(x))
    twice = functional(lambda x: layers.Reshape((4,), name="s")(nested(x)))
    model = functional(lambda x: layers.Hashing(9, name="h")(twice(x)))
    assert ids(model) == {"r", "s"}


def test_ids_out_of_one_of_the_outputs_of_a_nested_model():
    nested = functional(
        lambda x, y: [
            layers.ReLU(name="with_x")(x),
            layers.ReLU(name="with_y")(y),
        ],
        (4,),
        (4,),
    )

    def make(x, y):
        both = nested(
            [layers.ReLU(name="for_x")(x), layers.ReLU(name="for_y")(y)]
        )
        return layers.Embedding(9, 2)(both[1]), dense("d")(both[0])

    assert ids(functional(make, (4,), (4,))) == {"with_y", "for_y"}


def test_ids_are_not_a_head_and_a_head_is_not_ids():
    """What is both is float32 for either reason."""
    model = functional(
        lambda x: [layers.Reshape((2, 2), name="r")(x), embedded(x)]
    )
    assert heads(model) == {"r", "e"}
    both = layers.Reshape((2, 2), name="r")
    model = functional(lambda x: [both(x), layers.Embedding(9, 2)(both(x))])
    assert "r" in ids(model) | heads(model)


def embedded(x):
    return layers.Embedding(9, 2, name="e")(x)


def tame(function, *shapes):
    model = functional(function, *shapes)
    found = graph.tame_products(model)
    return {layer.name for layer in model.layers if id(layer) in found}


def gated(factor):
    return lambda x: layers.Multiply(name="m")([body(x), factor(x)])


@pytest.mark.parametrize(
    "name", ["sigmoid", "hard_sigmoid", "tanh", "softsign", "softmax"]
)
def test_a_product_with_a_bounded_factor_is_tame(name):
    assert tame(gated(layers.Activation(name))) == {"m"}
    assert tame(gated(dense("d", activation=name))) == {"m"}


@pytest.mark.parametrize(
    "factor",
    [
        lambda x: layers.Reshape((4,))(dense("d", activation="sigmoid")(x)),
        lambda x: layers.Dropout(0.5)(layers.Softmax()(x)),
        lambda x: layers.Reshape((4,))(layers.Dropout(0.5)(ops.tanh(x))),
        ops.sigmoid,
        ops.softmax,
        ops.hard_sigmoid,
        lambda x: layers.LSTM(4)(layers.RepeatVector(2)(x)),
    ],
)
def test_a_bounded_factor_may_come_through_others(factor):
    assert tame(gated(factor)) == {"m"}


@pytest.mark.parametrize(
    "factor",
    [
        lambda x: x,
        layers.ReLU(),
        layers.Activation("swish"),
        dense("d"),
        ops.exp,
        lambda x: dense("e")(ops.sigmoid(x)),
        lambda x: layers.Add()([x, ops.sigmoid(x)]),
    ],
)
def test_a_product_of_what_has_no_bound_is_not(factor):
    assert tame(gated(factor)) == set()


class Swish(layers.Layer):
    """Has an activation that is bounded, and is not."""

    activation = staticmethod(keras.activations.sigmoid)

    def call(self, x):
        return x * self.activation(x)


def test_a_custom_layer_is_not_known_to_be_bounded():
    assert tame(gated(Swish())) == set()


def test_a_bounded_factor_in_either_place():
    multiply = layers.Multiply(name="m")
    assert tame(lambda x: multiply([ops.sigmoid(x), x])) == {"m"}
    assert tame(lambda x: layers.Multiply(name="n")([x, x, ops.tanh(x)]))


def test_a_shared_product_is_tame_when_all_its_calls_are():
    multiply = layers.Multiply(name="m")
    gate = layers.Activation("sigmoid")

    def twice(one, other):
        return lambda x: [
            multiply([x, one(x)]),
            layers.Flatten()(multiply([other(x), x])),
        ]

    assert tame(twice(gate, gate)) == {"m"}
    assert tame(twice(gate, body)) == set()
    assert tame(twice(body, gate)) == set()


def needs(function, dtype="float16"):
    """Whether the last operation of a function needs float32."""
    x = keras.KerasTensor((2, 4), dtype)
    y = function(x)
    operation, number, _ = y._keras_history
    node = operation._inbound_nodes[number]
    arguments = node.arguments
    return graph.needs_float32(
        operation, arguments.args, arguments.kwargs, dtype
    )


@pytest.mark.parametrize(
    ("function", "float16", "bfloat16"),
    [
        (lambda x: x + x, False, False),
        (lambda x: x + 1e-3, False, False),
        (lambda x: x - 65504.0, False, False),
        (lambda x: x - 1e9, True, False),
        (lambda x: x + 1e-9, True, False),
        (lambda x: x + 0.0, False, False),
        (lambda x: x + math.nan, False, False),
        (lambda x: ops.where(x > 0, x, -math.inf), False, False),
        (lambda x: ops.maximum(x, -(10**9)), True, False),
        (lambda x: x + np.array([0.0, -1e9, 1.0, 2.0]), True, False),
        (lambda x: x + np.array([0.0, 1.0, 2.0, 3.0], "float16"), False, False),
        (lambda x: ops.maximum(x, -1e9), True, False),
        (lambda x: x * 0.5, False, False),
        (lambda x: -1.0 * x, False, False),
        (lambda x: x * 16.0, False, False),
        (lambda x: x * 17.0, True, False),
        (lambda x: -1000.0 * x, True, False),
        (lambda x: x * 1000, True, False),
        (lambda x: x * 8, False, False),
        (lambda x: x * np.float32(1000.0), True, False),
        (lambda x: x * tf.constant(1000.0), True, False),
        (lambda x: x * 1e-9, True, False),
        (lambda x: x * x, True, False),
        (lambda x: x / 2.0, True, False),
        (lambda x: x / x, True, False),
        (lambda x: 1.0 / x, True, False),
        (lambda x: x**2.0, True, True),
        (lambda x: ops.matmul(x, ops.transpose(x)), True, False),
        (lambda x: ops.einsum("ab,cb->ac", x, x), True, False),
        (lambda x: ops.sum(x, axis=-1), True, True),
        (lambda x: ops.mean(x, axis=1, keepdims=True), True, True),
        (ops.exp, True, True),
        (ops.softmax, True, True),
        (ops.sigmoid, False, False),
        (ops.relu, False, False),
        (ops.silu, True, False),
        (ops.gelu, True, False),
        (ops.transpose, False, False),
        (lambda x: ops.max(x, axis=-1), False, False),
        (lambda x: ops.concatenate([x, x]), False, False),
        (lambda x: ops.pad(x, [(1, 1), (0, 0)]), False, False),
    ],
)
def test_operations_that_need_float32(function, float16, bfloat16):
    assert needs(function) == float16
    assert needs(function, "bfloat16") == bfloat16


@pytest.mark.parametrize(
    ("constant", "outside"),
    [(65504.0, False), (65505.0, True), (2.0**-25, False), (2.0**-26, True)],
)
def test_the_range_of_float16(constant, outside):
    for function in (lambda x: x + constant, lambda x: x + -constant):
        assert needs(function) == outside
        assert not needs(function, "bfloat16")


def test_an_unbuilt_model_of_nothing():
    assert graph.demands(keras.Sequential()) == {}
