"""What is seen in the code of custom layers, and what is left behind."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras import ops

from tfmixed import _keras
from tfmixed.convert import trace as trace_lib
from tfmixed.convert.trace import CallError
from tfmixed.convert.trace import trace

pytestmark = pytest.mark.filterwarnings(
    # A constant that float16 does not hold, as NumPy sees it.
    "ignore:overflow encountered in cast"
)
SHAPE = (2, 4, 4)


class Computes(layers.Layer):
    """A layer whose code is a function."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, x):
        return self.function(x)


class Holds(layers.Layer):
    """A layer with children, and a function of them and the input."""

    def __init__(self, function, children, **options):
        super().__init__(**options)
        self.function = function
        self.children = children

    def call(self, x):
        return self.function(x, *self.children)


class Scaled(layers.Layer):
    """Has a weight of its own, which a function may use."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def build(self, shape):
        self.weight = self.add_weight(shape=shape[-1:], name="w")

    def call(self, x):
        return self.function(x, self.weight)


def traced(layer, shape=SHAPE):
    return trace(layer, (keras.KerasTensor(shape, "float32"),), {})


def unsafe(layer, dtype="float16", shape=SHAPE):
    """(layer, operation, sources) by name, each once: Keras builds by calls."""
    found = [
        (one.layer.name, one.operation, {s.name for s in one.sources})
        for one in traced(layer, shape).unsafe(dtype)
    ]
    return [one for i, one in enumerate(found) if one not in found[:i]]


def in_half(make, dtype="float16"):
    """Builds layers under a mixed policy."""
    keras.config.set_dtype_policy(f"mixed_{dtype}")
    return make()


def kernels(function, dtype="float16"):
    """The unsafe TensorFlow operations of a layer that is this function."""
    layer = in_half(lambda: Computes(function, name="it"), dtype)
    found = unsafe(layer, dtype)
    assert {(name, *sources) for name, _, sources in found} <= {("it", "it")}
    return {operation for _, operation, _ in found}


def instance_norm(x):
    mean = ops.mean(x, axis=1, keepdims=True)
    variance = ops.mean(ops.square(x - mean), axis=1, keepdims=True)
    return (x - mean) / ops.sqrt(variance + 1e-3)


def attention(x):
    scores = ops.matmul(x, ops.transpose(x, (0, 2, 1))) / 2.0
    return ops.matmul(ops.softmax(scores), x)


def raw_attention(x):
    scores = tf.einsum("bqd,bkd->bqk", x, x)
    return tf.matmul(tf.nn.softmax(scores), x)


def carefully(x):
    wide = ops.cast(x, "float32")
    return ops.cast(attention(wide) + instance_norm(wide * wide), x.dtype)


UNSAFE = {
    "instance norm": (instance_norm, {"Square"}, {"RealDiv"}),
    # The product with the softmax of what is computed is bounded by it.
    "attention": (attention, {"Softmax"}, {"BatchMatMulV2", "MatMul"}),
    "raw attention": (raw_attention, {"Softmax"}, {"Einsum", "BatchMatMulV2"}),
    "moments by hand": (
        lambda x: tf.math.reduce_variance(x, axis=1),
        {"Mean", "Square"},
        set(),
    ),
    "l2 normalize": (
        lambda x: tf.nn.l2_normalize(x, -1),
        {"Square", "Sum", "Rsqrt"},
        {"Mul"},
    ),
    "the length": (lambda x: tf.norm(x, axis=-1), {"Sum"}, {"Mul"}),
    "logsumexp": (lambda x: ops.logsumexp(x, -1), {"Exp", "Log", "Sum"}, set()),
    "gelu": (ops.gelu, {"Pow"}, {"Mul"}),
    "a power": (lambda x: x**3, {"Pow"}, set()),
    # The other factor of the product is a tanh.
    "softplus": (keras.activations.mish, {"Softplus"}, set()),
    "an average over a window": (
        lambda x: tf.nn.avg_pool1d(x, 2, 2, "SAME"),
        {"AvgPool"},
        set(),
    ),
    "cumulative": (lambda x: ops.cumsum(x, 1), {"Cumsum"}, set()),
    "segments": (
        lambda x: tf.math.segment_sum(x, [0, 0]),
        {"SegmentSum"},
        set(),
    ),
    "a square as a product": (lambda x: x * x, set(), {"Mul"}),
    "a quotient": (lambda x: x / (ops.abs(x) + 1.0), set(), {"RealDiv"}),
    "a gate without a bound": (
        lambda x: x * ops.relu(x[..., :1]),
        set(),
        {"Mul"},
    ),
    "a gate of swish": (lambda x: x * ops.silu(x), set(), {"Mul"}),
    "a product of itself": (
        lambda x: tf.matmul(x, x, transpose_b=True),
        set(),
        {"BatchMatMulV2", "MatMul"},
    ),
}


@pytest.mark.parametrize("case", UNSAFE)
def test_what_is_unsafe(case):
    function, always, in_float16 = UNSAFE[case]
    assert always <= kernels(function, "bfloat16") <= always
    found = kernels(function)
    assert always <= found <= always | in_float16
    assert bool(found & in_float16) == bool(in_float16)


@pytest.mark.parametrize(
    "function",
    [
        carefully,
        lambda x: x + 1.0,
        lambda x: ops.relu(x) - ops.tanh(x),
        lambda x: ops.concatenate([x, x[:, ::-1]], -1),
        lambda x: ops.max(x, axis=1),
        # Gated linear units.
        lambda x: x[..., :2] * ops.sigmoid(x[..., 2:]),
        lambda x: ops.tanh(x) * ops.reshape(ops.sigmoid(x), (-1, 4, 4)),
        lambda x: ops.softmax(ops.cast(x, "float32")),
        lambda x: x * tf.cast(x > 0, x.dtype),
        lambda x: x * 0.5,
        lambda x: x * tf.constant([1.0, 2.0, 3.0, 4.0], x.dtype),
        lambda x: tf.nn.conv1d(x, tf.ones((1, 4, 2), x.dtype), 1, "SAME"),
        # Sums of what is not in 16 bits.
        lambda x: x + ops.cast(ops.sum(ops.cast(x > 0, "int32")), x.dtype),
        lambda x: ops.where(ops.cumsum(ops.cast(x > 0, "int32"), 1) > 2, x, 0),
    ],
)
def test_what_is_not_unsafe(function):
    assert kernels(function) == set()
    assert kernels(function, "bfloat16") == set()


@pytest.mark.parametrize(
    ("constant", "float16", "bfloat16"),
    [
        (-1e9, {"Const"}, set()),
        (1e38, {"Const"}, set()),
        (7e4, {"Const"}, set()),
        (6e4, set(), set()),
        (float("inf"), {"Const"}, {"Const"}),
        (1e-3, set(), set()),
    ],
)
def test_constants_that_the_format_does_not_hold(constant, float16, bfloat16):
    for function in (
        lambda x: ops.where(x > 0, x, constant),
        lambda x: x + tf.constant(constant, x.dtype),
        lambda x: x + ops.cast(x > 0, x.dtype) * -constant,
        lambda x: ops.maximum(x, -constant),
    ):
        assert kernels(function) == float16
        assert kernels(function, "bfloat16") == bfloat16


def compiled(function):
    return tf.function(function, autograph=False)


@pytest.mark.parametrize(
    "function",
    [
        compiled(ops.exp),
        tf.function(ops.exp, jit_compile=True, autograph=False),
        compiled(compiled(ops.exp)),
        lambda x: tf.map_fn(ops.exp, x),
        lambda x: ops.scan(lambda c, y: (c, ops.exp(y)), x[0], x)[1],
        lambda x: tf.cond(x[0, 0, 0] > 0, lambda: x, lambda: ops.exp(x)),
        lambda x: tf.switch_case(
            tf.shape(x)[1], [lambda: x, lambda: ops.exp(x)]
        ),
        lambda x: tf.while_loop(
            lambda i, y: i < 2, lambda i, y: (i + 1, ops.exp(y)), [0, x]
        )[1],
    ],
)
def test_functions_loops_and_branches_are_looked_into(function):
    assert len(kernels(function, "bfloat16")) == 1


@pytest.mark.parametrize(
    "function",
    [
        compiled(ops.relu),
        compiled(lambda x: ops.cast(ops.exp(ops.cast(x, "float32")), x.dtype)),
        lambda x: tf.map_fn(ops.relu, x),
        lambda x: tf.cond(x[0, 0, 0] > 0, lambda: x, lambda: -x),
    ],
)
def test_functions_without_anything_unsafe(function):
    assert kernels(function) == kernels(function, "bfloat16") == set()


@pytest.mark.parametrize(
    ("factor", "tame"),
    [(2.0, True), (16.0, True), (17.0, False), (1000, False)],
)
def test_a_constant_factor_is_tame_if_it_is_small(factor, tame):
    assert kernels(lambda x: x * factor) == (set() if tame else {"Mul"})
    assert kernels(lambda x: x * factor, "bfloat16") == set()


def test_ids_that_are_rounded_inside_a_layer():
    def make():
        children = [
            layers.Dense(4, name="d"),
            layers.Embedding(9, 4, name="e"),
        ]
        return Holds(lambda x, d, e: e(d(x)), children, name="it")

    for dtype in ("float16", "bfloat16"):
        found = unsafe(in_half(make, dtype), dtype)
        assert ("it", "Cast to ids", {"d"}) in found


def test_a_constant_that_is_cast_to_a_format_that_does_not_hold_it():
    def function(x):
        return ops.where(x > 0, x, ops.cast(-1e9, x.dtype))

    assert kernels(function) == {"Cast"}
    assert kernels(function, "bfloat16") == set()
    assert kernels(lambda x: x + ops.cast(-6e4, x.dtype)) == set()


def test_a_weight_as_a_factor_is_tame():
    """As in layer scale, and in a product with a weight matrix."""
    for function in (
        lambda x, w: x * w,
        lambda x, w: x * ops.reshape(w, (1, 1, -1)),
        lambda x, w: ops.matmul(x, ops.expand_dims(w, -1)),
        lambda x, w: x / w,
    ):
        layer = in_half(lambda f=function: Scaled(f, name="it"))
        assert unsafe(layer) == []
    # But a power of a weight is a power.
    layer = in_half(lambda: Scaled(lambda x, w: x * ops.exp(w), name="it"))
    assert ("it", "Exp", {"it"}) in unsafe(layer)


def test_sources_are_the_children_that_feed_the_operation():
    def make():
        def function(x, query, key, value):
            scores = ops.softmax(query(x) + ops.transpose(key(x), (0, 2, 1)))
            return value(x) + scores

        children = [layers.Dense(4, name=n) for n in ("q", "k", "v")]
        return Holds(function, children, name="it")

    assert unsafe(in_half(make)) == [("it", "Softmax", {"k", "q"})]


def test_the_layer_itself_is_a_source_where_its_input_feeds_the_operation():
    def make():
        child = layers.Dense(4, name="d")
        return Holds(lambda x, d: ops.exp(x + d(x)), [child], name="it")

    layer = in_half(make)
    layer.children[0].build(SHAPE)
    layer.built = True
    assert unsafe(layer) == [("it", "Exp", {"it", "d"})]


def test_a_child_that_passes_on_is_where_the_walk_ends():
    def make():
        first, last = layers.Dense(4, name="d"), layers.Flatten(name="f")
        return Holds(lambda x, d, f: ops.sum(f(d(x))), [first, last], name="it")

    assert unsafe(in_half(make)) == [("it", "Sum", {"f"})]


def test_code_of_keras_inside_is_the_tables_affair():
    def make():
        parts = [
            layers.LayerNormalization(),
            layers.MultiHeadAttention(1, 4),
            layers.Dense(4, activation="gelu"),
        ]
        return Holds(lambda x, n, a, d: d(a(n(x), n(x))), parts, name="it")

    assert unsafe(in_half(make)) == []


def test_a_squeeze_and_excite_block():
    def make():
        parts = [
            layers.GlobalAveragePooling1D(name="p", dtype="float32"),
            layers.Dense(2, "relu", name="r"),
            layers.Dense(4, "sigmoid", name="e"),
        ]
        return Holds(
            lambda x, p, r, e: x * ops.expand_dims(e(r(p(x))), 1),
            parts,
            name="it",
        )

    assert unsafe(in_half(make)) == []


def test_nested_composites_are_told_apart():
    def make():
        inner = Holds(
            lambda x, d: ops.exp(d(x)),
            [layers.Dense(4, name="deep")],
            name="inner",
        )
        clean = Computes(lambda x: x + 1.0, name="clean")
        return Holds(
            lambda x, c, i, d: ops.sum(d(i(c(x)))),
            [clean, inner, layers.Dense(4, name="shallow")],
            name="outer",
        )

    assert unsafe(in_half(make)) == [
        ("inner", "Exp", {"deep"}),
        ("outer", "Sum", {"shallow"}),
    ]


def test_a_composite_is_one_source_for_the_layer_around_it():
    def make():
        inner = Holds(
            lambda x, d: d(x) + 1.0, [layers.Dense(4, name="d")], name="inner"
        )
        return Holds(lambda x, i: ops.exp(i(x)), [inner], name="outer")

    assert unsafe(in_half(make)) == [("outer", "Exp", {"inner"})]


def test_a_shared_child_is_seen_in_each_place():
    def make():
        shared = layers.Dense(4, name="s")
        return Holds(lambda x, s: s(s(x)) * s(x), [shared], name="it")

    assert unsafe(in_half(make)) == [("it", "Mul", {"s"})]
    keras.config.set_dtype_policy("float32")
    assert unsafe(make()) == []


class Cell(layers.Layer):
    """A recurrent cell that squares its state, or gates it."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function
        self.state_size = self.output_size = 4
        self.dense = layers.Dense(4, name="into")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x, states):
        state = self.function(self.dense(x), states[0])
        return state, [state]


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, s: ops.tanh(x) * ops.sigmoid(s), []),
        (lambda x, s: ops.exp(x), [("cell", "Exp", {"into"})]),
    ],
)
def test_a_cell_inside_a_loop_is_seen(function, expected, unroll):
    def make():
        cell = Cell(function, name="cell")
        return layers.RNN(cell, unroll=unroll, name="rnn")

    found = unsafe(in_half(make))
    assert found == expected


def test_a_nested_functional_model_may_have_operations_of_its_own():
    def make():
        inputs = keras.Input((4, 4))
        x = layers.Dense(4, name="d")(inputs)
        inner = keras.Model(inputs, ops.exp(x), name="inner")
        return Holds(lambda x, i: i(x), [inner], name="it")

    assert unsafe(in_half(make)) == [("inner", "Exp", {"d"})]


def test_what_computes_in_float32_is_not_looked_at():
    for function, _, _ in UNSAFE.values():
        layer = Computes(function, name="it", dtype="float32")
        assert unsafe(layer) == []


def test_what_unsafe_says():
    layer = in_half(lambda: Computes(ops.exp, name="it"))
    (found,) = traced(layer).unsafe("float16")
    assert found == trace_lib.Unsafe(layer, "Exp", (layer,))


def test_the_graph_may_be_asked_in_any_order_and_twice():
    layer = in_half(lambda: Computes(lambda x: x * x, name="it"))
    result = traced(layer)
    for _ in range(2):
        assert len(result.unsafe("float16")) == 1
        assert result.unsafe("bfloat16") == []
        assert result.heads(layer) == ()


def test_arguments_by_name_and_in_structures():
    class Two(layers.Layer):
        def call(self, inputs, scale=1.0, keep=None, training=False):
            a, b = inputs["a"], inputs["b"]
            assert training
            return ops.exp(a) + b * scale + ops.cast(keep, a.dtype)

    layer = in_half(lambda: Two(name="two"))
    symbol = keras.KerasTensor(SHAPE, "float32")
    found = trace(
        layer,
        ({"a": symbol, "b": symbol},),
        {
            "scale": 0.5,
            "training": True,
            "keep": keras.KerasTensor(SHAPE, "bool"),
        },
    ).unsafe("float16")
    assert [one.operation for one in found] == ["Exp"]


def snapshot(layer):
    """What a person could see of a layer and of those inside it."""
    return [
        (id(one), {key: id(value) for key, value in vars(one).items()})
        for one in _keras.flatten_layers(layer)
    ]


def block():
    def function(x, norm, dense, drop):
        return drop(dense(norm(x)), training=True)

    parts = [
        layers.BatchNormalization(),
        layers.Dense(4),
        layers.Dropout(0.5, seed=1),
    ]
    layer = Holds(function, parts, name="it")
    layer(np.ones(SHAPE, "float32"))
    return layer


def test_a_traced_layer_is_as_it_was_before():
    layer = block()
    before = snapshot(layer)
    weights = layer.get_weights()
    seeds = [v.numpy() for v in layer.non_trainable_variables]
    count = len(tf.compat.v1.get_default_graph().get_operations())
    traced(layer)
    assert snapshot(layer) == before
    assert "call" not in vars(layer)
    for one, other in zip(weights, layer.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    after = [v.numpy() for v in layer.non_trainable_variables]
    for one, other in zip(seeds, after, strict=True):
        np.testing.assert_array_equal(one, other)
    assert tf.executing_eagerly()
    graph = tf.compat.v1.get_default_graph()
    assert len(graph.get_operations()) == count
    assert layer(np.ones(SHAPE, "float32")).shape == SHAPE


def test_losses_of_the_trace_are_dropped_and_the_others_kept():
    class Adds(layers.Layer):
        def call(self, x):
            self.add_loss(ops.sum(x))
            return x

    parts = [Adds(), layers.Dense(4, activity_regularizer="l2")]
    layer = Holds(lambda x, a, d: d(a(x)), parts)
    traced(layer)
    assert layer.losses == []
    layer(np.ones(SHAPE, "float32"))
    before = [float(loss) for loss in layer.losses]
    traced(layer)
    assert [float(loss) for loss in layer.losses] == before
    assert len(before) == 2


def test_a_failure_that_the_code_recovers_from_is_forgotten():
    def raises(x):
        raise ValueError("first")

    def function(x, bad, worse):
        try:
            return bad(x)
        except ValueError:
            return worse(x)

    def worse(x):
        raise ValueError("second")

    parts = [Computes(raises, name="bad"), Computes(worse, name="worse")]
    with pytest.raises(CallError, match="second") as raised:
        traced(Holds(function, parts, name="it"))
    assert raised.value.layer.name == "worse"


def failing(where):
    """A composite; the layer of this name raises."""

    def function(x, *children):
        for child in children:
            x = child(x)
        return x

    def raises(x):
        raise ValueError("no such thing")

    def inside(name):
        return Computes(raises if name == where else ops.relu, name=name)

    inner = Holds(function, [inside("deep"), inside("deeper")], name="inner")
    return Holds(function, [inside("first"), inner], name="outer")


@pytest.mark.parametrize("where", ["first", "deep", "deeper"])
def test_a_call_that_fails_names_the_innermost_layer(where):
    layer = failing(where)
    before = snapshot(layer)
    with pytest.raises(CallError, match="no such thing") as raised:
        traced(layer)
    assert raised.value.layer.name == where
    assert str(raised.value).startswith(f"{where}: ")
    assert isinstance(raised.value.cause, ValueError)
    # `built` may have become true on the way; nothing stays in the way.
    assert [one for one, _ in snapshot(layer)] == [one for one, _ in before]
    for one in _keras.flatten_layers(layer):
        assert "call" not in vars(one)
    assert tf.executing_eagerly()


def test_a_call_that_fails_in_its_own_code_names_itself():
    def function(x, dense):
        return dense(x) + tf.ones((4,), "float32")

    layer = in_half(lambda: Holds(function, [layers.Dense(4)], name="it"))
    with pytest.raises(CallError) as raised:
        traced(layer)
    assert raised.value.layer is layer


def test_arguments_that_do_not_fit():
    layer = layers.Dense(4, name="d")
    with pytest.raises(CallError) as raised:
        trace(layer, (), {"nonsense": 1})
    assert raised.value.layer is layer


def test_a_call_of_the_users_own_on_the_instance_is_left_alone():
    layer = Computes(ops.relu, name="it")
    own = lambda x: ops.exp(x)  # noqa: E731
    _keras.set_instance_call(layer, own)
    around = Holds(lambda x, one: one(x), [layer], name="around")
    traced(around)
    assert vars(layer)["call"] is own


def test_an_unbuilt_layer_is_built_with_real_variables():
    layer = in_half(lambda: Scaled(lambda x, w: x * w, name="it"))
    traced(layer)
    assert layer.built
    assert layer.weights[0].numpy().shape == (4,)
    assert layer(np.ones(SHAPE, "float32")).dtype == "float16"


class Own(keras.Model):
    """A subclassed model whose code is a function of its layers."""

    def __init__(self, function, **parts):
        super().__init__(name="own")
        self.function = function
        self.parts = {name: make(name) for name, make in parts.items()}

    def call(self, x):
        return self.function(x, **self.parts)


def named(layer_class, *arguments, **options):
    return lambda name: layer_class(*arguments, name=name, **options)


DENSE = named(layers.Dense, 4)
HEADS = {
    "one": (lambda x, a, b: b(a(x)), {"a": DENSE, "b": DENSE}, {"b"}),
    "two": (lambda x, a, b: [a(x), b(x)], {"a": DENSE, "b": DENSE}, {"a", "b"}),
    "a dict": (
        lambda x, a, b: {"p": a(x), "q": b(a(x))},
        {"a": DENSE, "b": DENSE},
        {"a", "b"},
    ),
    "own code": (
        lambda x, a, b: ops.reshape(b(a(x)), (-1, 16)) + 1.0,
        {"a": DENSE, "b": DENSE},
        {"b"},
    ),
    "without weights": (
        lambda x, a, b, s, r: s(r(b(a(x)))),
        {
            "a": DENSE,
            "b": DENSE,
            "s": named(layers.Softmax),
            "r": named(layers.ReLU),
        },
        {"s", "r", "b"},
    ),
    "what hands on": (
        lambda x, a, b, o: o(b(a(x))),
        {"a": DENSE, "b": DENSE, "o": named(layers.Dropout, 0.1)},
        {"o", "b"},
    ),
    "what hands on in between": (
        lambda x, a, i, s: s(i(a(x))),
        {
            "a": DENSE,
            "i": named(layers.Identity),
            "s": named(layers.Softmax),
        },
        {"s", "i", "a"},
    ),
    "a sum": (
        lambda x, a, b, c: a(x) + b(c(x)),
        {"a": DENSE, "b": DENSE, "c": DENSE},
        {"a", "b"},
    ),
    "a part of it": (
        lambda x, a: ops.concatenate([x, a(x)], -1) + 0 * ops.mean(x),
        {"a": DENSE},
        {"a"},
    ),
    "nothing but code": (lambda x: x + 1.0, {}, set()),
}


@pytest.mark.parametrize("case", HEADS)
def test_heads_of_a_subclassed_model(case):
    function, parts, expected = HEADS[case]
    model = Own(function, **parts)
    found = traced(model).heads(model)
    assert {layer.name for layer in found} == expected
    assert len(found) == len(expected)


def test_heads_of_a_model_that_was_built_before():
    function, parts, expected = HEADS["without weights"]
    model = Own(function, **parts)
    model(np.ones(SHAPE, "float32"))
    found = traced(model).heads(model)
    assert {layer.name for layer in found} == expected
