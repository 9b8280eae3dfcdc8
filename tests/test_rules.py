"""The table: complete, without contradictions, and true where it can be."""

import ast
import dataclasses
import functools
import inspect
import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras import ops
from tensorflow.python.framework import op_def_registry

import tfmixed
from tfmixed import rules

NEWEST = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 15)
HALF = ["float16", "bfloat16"]


def layer_classes():
    """The layer classes of Keras, but for the base class of them all."""
    found = {
        value
        for value in vars(layers).values()
        if isinstance(value, type) and issubclass(value, layers.Layer)
    }
    return sorted(found - {layers.Layer}, key=lambda c: c.__name__)


def names_in_table():
    """What stands in quotes in the calls of `_layers`, also if it is absent."""
    tree = ast.parse(pathlib.Path(rules.__file__).read_text())
    return [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "_layers"
        for name in node.args[0].value.split()
    ]


def operations():
    """The classes behind `keras.ops`, by their names."""
    found, queue = {}, [keras.Operation]
    while queue:
        for subclass in queue.pop().__subclasses__():
            if not issubclass(subclass, keras.Layer):
                queue.append(subclass)
                if subclass.__module__.startswith("keras."):
                    found[subclass.__name__] = subclass
    return found


def kind(layer):
    return rules.rule_for(layer).kind


class Twice(layers.Layer):
    def call(self, x):
        return x * 2


@pytest.mark.parametrize("layer_class", layer_classes())
def test_every_layer_of_keras_has_one_rule(layer_class):
    matching = [r for r in rules.TABLE if layer_class in r.layers]
    if layer_class in rules.FRAGILE.layers:
        matching.append(rules.FRAGILE)
    assert len(matching) == 1


def test_no_name_stands_in_the_table_twice():
    names = names_in_table()
    assert len(names) > 100
    assert len(set(names)) == len(names)


@pytest.mark.skipif(not NEWEST, reason="an older Keras lacks some layers")
def test_every_name_in_the_table_is_a_layer_of_the_newest_keras():
    assert [n for n in names_in_table() if not hasattr(layers, n)] == []


def test_a_layer_of_keras_that_the_table_lacks_gets_float32():
    unknown = type("Unknown", (layers.Layer,), {"__module__": "keras.layers"})
    assert rules.rule_for(unknown()) is rules.UNKNOWN
    assert [rules.UNKNOWN.treatment(d) for d in HALF] == ["float32"] * 2


def test_treatments_and_reasons_are_those_that_are_documented():
    known = {rules.SIXTEEN, rules.FLOAT32, rules.TWIN, rules.ALONE, rules.LOOK}
    lone = [r for r in vars(rules).values() if isinstance(r, rules.Rule)]
    assert len(lone) > 8
    kinds = [rule.kind for rule in (*rules.TABLE, *lone)]
    assert len(set(kinds)) == len(kinds)
    for rule in (*rules.TABLE, *lone):
        assert {rule.float16, rule.bfloat16} <= known
        assert rule.reason.endswith(".")
        assert rule.reason[0].isupper()


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (lambda: layers.Dense(2), "matrix product"),
        (lambda: layers.AveragePooling1D(2), "pooling that averages"),
        # Its base class is a base class of AveragePooling, too.
        (lambda: layers.MaxPooling1D(2), "elementwise or shape"),
        (lambda: layers.GlobalMaxPooling3D(), "pooling without a 16-bit"),
        (lambda: layers.Embedding(9, 2), "lookup"),
        (lambda: layers.RandomFlip(), "preprocessing"),
        (lambda: layers.Bidirectional(layers.GRU(2)), "recurrent"),
        (lambda: layers.Masking(), "comparison with a value"),
        (lambda: layers.Lambda(lambda x: x), "opaque function"),
        (lambda: layers.Minimum(), "elementwise or shape"),
        (lambda: keras.Sequential(), "model"),
        (lambda: tfmixed.Sequential(), "model"),
    ],
)
def test_rule_of_a_layer(layer, expected):
    assert kind(layer()).startswith(expected)


def test_a_product_of_activations_is_safe_in_bfloat16_only():
    rule = rules.rule_for(layers.Multiply())
    assert [rule.treatment(dtype) for dtype in HALF] == ["float32", "16 bits"]


@pytest.mark.parametrize("gpu", [True, False])
def test_a_kernel_that_only_a_gpu_has(gpu, monkeypatch):
    def devices(kind=None):
        return [object()] if gpu and kind == "GPU" else []

    monkeypatch.setattr(tf.config, "list_physical_devices", devices)
    expected = rules.SIXTEEN if gpu else rules.FLOAT32
    for layer in (layers.MaxPooling3D(), layers.GlobalMaxPooling3D()):
        rule = rules.rule_for(layer)
        assert [rule.treatment(dtype) for dtype in HALF] == [expected] * 2
    always = rules.rule_for(layers.MaxPooling2D())
    assert always.treatment("float16") == rules.SIXTEEN


@pytest.mark.parametrize(
    "activation",
    [
        "softmax",
        "log_softmax",
        "exponential",
        keras.activations.softmax,
        layers.Softmax(),
        functools.partial(keras.activations.softmax, axis=1),
        pytest.param(
            "sparsemax",
            marks=pytest.mark.skipif(
                not hasattr(keras.activations, "sparsemax"), reason="absent"
            ),
        ),
    ],
    # No addresses: the processes of a run have to agree on the names.
    ids=lambda activation: re.sub(" at 0x[0-9a-f]+", "", str(activation)),
)
@pytest.mark.parametrize(
    "make",
    [
        functools.partial(layers.Dense, 4),
        functools.partial(layers.Conv2D, 4, 3),
        functools.partial(layers.LSTM, 4),
        functools.partial(layers.EinsumDense, "ab,bc->ac", 4),
        layers.Activation,
    ],
    ids=lambda make: getattr(make, "func", make).__name__,
)
def test_a_softmax_inside_a_layer_is_seen(make, activation):
    rule = rules.rule_for(make(activation=activation))
    assert rule is rules.SOFTMAX
    assert [rule.treatment(dtype) for dtype in HALF] == ["float32"] * 2


def test_a_softmax_in_a_custom_layer_is_seen():
    class Mine(layers.Dense):
        def call(self, x):
            return super().call(x)

    assert rules.rule_for(Mine(2, activation="softmax")) is rules.SOFTMAX
    assert rules.rule_for(Mine(2, activation="relu")) is rules.CUSTOM


@pytest.mark.parametrize("name", ["elu", "selu", "celu", "squareplus"])
def test_an_activation_that_loses_digits_counts_where_it_stands_alone(name):
    if not hasattr(keras.activations, name):
        pytest.skip("absent")
    assert rules.rule_for(layers.Activation(name)) is rules.FRAGILE
    # The product inside a Dense is worth more.
    assert kind(layers.Dense(2, activation=name)) == "matrix product"


def test_layers_that_are_an_activation():
    assert rules.rule_for(layers.ELU()) is rules.FRAGILE
    for layer in (layers.ReLU(), layers.LeakyReLU(), layers.PReLU()):
        assert kind(layer) == "elementwise or shape"


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (None, "linear"),
        ("hard_sigmoid", "hard_sigmoid"),
        (layers.ReLU(), "relu"),
        (layers.Softmax(), "softmax"),
        (functools.partial(keras.activations.relu, max_value=1.0), "relu"),
        (lambda x: x, "<lambda>"),
    ],
)
def test_activation_name(activation, name):
    assert rules.activation_name(layers.Dense(1, activation=activation)) == name


def test_a_layer_without_an_activation_has_no_name_of_one():
    assert rules.activation_name(layers.Flatten()) is None
    assert rules.activation_name(operations()["Softmax"]()) is None


def test_layers_that_are_the_users_own_affair():
    quantized = layers.Dense(4)
    quantized.build((None, 4))
    quantized.quantize("int8")
    assert rules.rule_for(quantized) is rules.QUANTIZED
    tuned = layers.Dense(4, activation="softmax")
    tuned.build((None, 4))
    tuned.enable_lora(2)
    assert rules.rule_for(tuned) is rules.LORA
    tuned = layers.Embedding(4, 4)
    tuned.build((None, 4))
    tuned.enable_lora(1)
    assert rules.rule_for(tuned) is rules.LORA
    for dtype in ("float64", "int32", "mixed_float16"):
        layer = layers.Flatten(dtype=dtype)
        alone = dtype != "mixed_float16"
        assert (rules.rule_for(layer) is rules.OTHER_DTYPE) == alone


def test_a_subclass_without_a_call_of_its_own_is_its_base():
    class Mine(layers.Conv1D):
        def __init__(self, filters):
            super().__init__(filters, 3)

        def build(self, shape):
            super().build(shape)

    class MyNorm(layers.RMSNormalization):
        pass

    class Between(Mine):
        pass

    assert kind(Mine(2)) == kind(Between(2)) == "matrix product"
    assert kind(MyNorm()) == "normalization"


def test_a_subclass_with_a_call_of_its_own_is_looked_into():
    class Mine(layers.Conv1D):
        def call(self, x):
            return ops.exp(super().call(x))

    class Mixin:
        def call(self, x):
            return ops.exp(x)

    class Mixed(Mixin, layers.Dense):
        pass

    class Gate(layers.Multiply):
        def call(self, x):
            return x[0] * x[1] * x[0]

    for layer in (Mine(2, 3), Mixed(2), Gate(), Twice(), keras.Model()):
        expected = rules.CONTAINER if type(layer) is keras.Model else None
        assert rules.rule_for(layer) is (expected or rules.CUSTOM)

    class Own(keras.Model):
        def call(self, x):
            return x

    assert rules.rule_for(Own()) is rules.CUSTOM
    assert rules.CUSTOM.treatment("float16") == rules.LOOK


def test_a_changed_layer_that_needs_float32_still_does():
    class Norm(layers.BatchNormalization):
        def call(self, x, training=None):
            return super().call(x, training=False)

    class Pool(layers.GlobalAveragePooling2D):
        def call(self, x):
            return super().call(x) * 2

    assert kind(Norm()) == "normalization"
    assert kind(Pool()) == "pooling that averages"


@pytest.mark.parametrize(
    "layer",
    [
        layers.BatchNormalization(),
        layers.LayerNormalization(),
        layers.GroupNormalization(2),
        layers.RMSNormalization(),
    ],
)
def test_normalization_has_a_twin_that_subclasses_have_not(layer):
    rule = rules.rule_for(layer)
    assert [rule.treatment(dtype) for dtype in HALF] == ["twin"] * 2
    mine = type("Mine", (type(layer),), {"__module__": "mine"})
    rule = rules.rule_for(mine.from_config(layer.get_config()))
    assert [rule.treatment(dtype) for dtype in HALF] == ["float32"] * 2


def test_a_changed_attention_has_no_twin():
    class Renamed(layers.Attention):
        pass

    class Changed(layers.MultiHeadAttention):
        def _compute_attention(self, *args, **kwargs):
            return super()._compute_attention(*args, **kwargs)

    class Called(layers.GroupQueryAttention):
        def call(self, *args, **kwargs):
            return super().call(*args, **kwargs)

    for layer in (Renamed(), Changed(1, 2), Called(2, 1, 1)):
        assert rules.rule_for(layer) is rules.CUSTOM_TWIN
    assert rules.CUSTOM_TWIN.treatment("bfloat16") == rules.FLOAT32
    assert rules.rule_for(layers.Attention()).treatment("float16") == "twin"


def test_is_custom():
    assert rules.is_custom(Twice)
    assert not rules.is_custom(layers.Dense)
    assert not rules.is_custom(tfmixed.Model)
    # Packages whose names begin like ours.
    for module in ("keras_hub.layers", "tfmixed_extra", "__main__"):
        assert rules.is_custom(type("A", (), {"__module__": module}))


def test_rules_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        rules.SOFTMAX.float16 = rules.SIXTEEN


@pytest.mark.skipif(not NEWEST, reason="an older Keras lacks some operations")
@pytest.mark.parametrize("names", ["SAFE_OPERATIONS", "SAFE_IN_BFLOAT16"])
def test_every_operation_that_is_named_exists_in_the_newest_keras(names):
    assert getattr(rules, names) - operations().keys() == set()


def test_most_operations_that_are_named_exist_in_any_keras():
    missing = rules.SAFE_OPERATIONS - operations().keys()
    assert len(missing) < len(rules.SAFE_OPERATIONS) / 5
    assert operations().keys() >= rules.SAFE_IN_BFLOAT16


def test_a_rule_for_an_operation():
    found = operations()
    assert rules.is_safe_operation(found["Reshape"]((2,)), "float16")
    assert not rules.is_safe_operation(found["Multiply"](), "float16")
    assert rules.is_safe_operation(found["Multiply"](), "bfloat16")
    assert not rules.is_safe_operation(found["Sum"](), "bfloat16")
    assert not rules.SAFE_OPERATIONS & rules.SAFE_IN_BFLOAT16


@pytest.mark.parametrize(
    "name",
    [
        "Mean",
        "Sum",
        "Exp",
        "Log",
        "Log1p",
        "Power",
        "Square",
        "Sqrt",
        "Softmax",
        "LogSoftmax",
        "Var",
        "Std",
        "Prod",
        "Cumsum",
        "Norm",
        "Logsumexp",
        "Reciprocal",
        "Rsqrt",
        "Average",
        "Median",
        "Sinh",
    ],
)
def test_sums_powers_and_exponentials_are_safe_nowhere(name):
    assert name in operations()
    assert name not in rules.SAFE_OPERATIONS | rules.SAFE_IN_BFLOAT16


def unary(names):
    """The operations of one tensor that need no other argument."""
    found = operations()
    # These take a number, or a matrix.
    for name in sorted((names & found.keys()) - {"Arange", "Diag"}):
        call = inspect.signature(found[name].call).parameters.values()
        make = inspect.signature(found[name].__init__).parameters.values()
        if sum(p.default is p.empty for p in call) == 2 and not any(
            p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
            for p in make
            if p.name != "self"
        ):
            yield name


def results(operation, x):
    outputs = keras.tree.flatten(operation(x))
    return [ops.cast(y, "float32").numpy() for y in outputs]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float16") for name in unary(rules.SAFE_OPERATIONS)]
    + [
        (name, "bfloat16")
        for name in unary(rules.SAFE_OPERATIONS | rules.SAFE_IN_BFLOAT16)
    ],
)
def test_what_the_table_calls_safe_is_safe(name, dtype):
    """No larger and no less exact than the input, up to the largest."""
    operation = operations()[name]()
    digits = 10 if dtype == "float16" else 7
    generator = np.random.default_rng(0)
    for magnitude in (1e-3, 1.0, 300.0, 60000.0):
        x = generator.uniform(-1, 1, size=(4, 4, 4)) * magnitude
        x = ops.cast(x.astype("float32"), dtype)
        found = results(operation, x)
        wide = results(operation, ops.cast(x, "float32"))
        for one, other in zip(found, wide, strict=True):
            assert np.isfinite(one).all()
            np.testing.assert_allclose(
                one, other, rtol=2.0**-digits, atol=2.0**-digits * magnitude
            )


@pytest.mark.parametrize(
    "names",
    [
        "UNSAFE_KERNELS",
        "UNSAFE_PRODUCTS",
        "UNSAFE_MATRIX_PRODUCTS",
        "BOUNDED_KERNELS",
    ],
)
def test_every_kernel_that_is_named_exists_in_tensorflow(names):
    named = getattr(rules, names)
    assert named
    assert [n for n in sorted(named) if op_def_registry.get(n) is None] == []


def test_no_kernel_is_in_two_lists_but_softmax():
    both = rules.UNSAFE_PRODUCTS | rules.UNSAFE_MATRIX_PRODUCTS
    assert not both & rules.UNSAFE_KERNELS
    assert not rules.UNSAFE_PRODUCTS & rules.UNSAFE_MATRIX_PRODUCTS
    # Its output is bounded, its input has to be exact.
    assert {"Softmax"} == rules.BOUNDED_KERNELS & rules.UNSAFE_KERNELS


@pytest.mark.parametrize("name", rules.BOUNDED)
def test_what_is_called_bounded_is(name):
    if not hasattr(keras.activations, name):
        pytest.skip("absent")
    x = np.array([-1e30, -7.0, 0.0, 0.3, 7.0, 1e30], "float32")
    y = np.asarray(getattr(keras.activations, name)(x))
    assert np.abs(y).max() <= 1.0
