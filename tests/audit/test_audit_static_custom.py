"""What custom layers do in 16 bits, read off their graph and source."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfmixed.audit.audit import audit
from tfmixed.audit.static import text as static_text
from tfmixed.audit.static import walk as static_walk
from tfmixed.hardware import Cpu
from tfmixed.hardware import Device
from tfmixed.hardware import describe

F16 = "mixed_float16"
A100 = describe((Device("GPU", "A100", (8, 0)),), Cpu("CPU", "Linux"))


def findings(model, *codes, **options):
    result = audit(model, hardware=A100, **options)
    return [one for one in result.findings if one.code in codes]


def around(layer, shape=(4,)):
    inputs = keras.Input(shape)
    outputs = layers.Dense(2, dtype="float32", name="head")(layer(inputs))
    return keras.Model(inputs, outputs)


class Norm(layers.Layer):
    """Squares and divides in whatever it is given."""

    def call(self, x):
        norm = tf.sqrt(tf.reduce_sum(tf.square(x), -1, keepdims=True))
        return x / (norm + 1e-3)


class NormInFloat32(layers.Layer):
    def call(self, x):
        wide = tf.cast(x, tf.float32)
        norm = tf.sqrt(tf.reduce_sum(tf.square(wide), -1, keepdims=True))
        return tf.cast(wide / (norm + 1e-8), x.dtype)


class OwnSoftmax(layers.Layer):
    def call(self, x):
        return keras.ops.softmax(x)


class Product(layers.Layer):
    """Of two matrices that are both computed."""

    def call(self, x):
        return tf.matmul(x, x, transpose_b=True)


class Weighted(layers.Layer):
    """Of a matrix and weights; with a layer of Keras inside."""

    def __init__(self, **options):
        super().__init__(**options)
        self.dense = layers.Dense(4, dtype=self.dtype_policy)
        self.norm = layers.LayerNormalization(dtype=self.dtype_policy)

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4))
        self.dense.build(shape)
        self.norm.build(shape)

    def call(self, x):
        x = self.norm(self.dense(x))
        return tf.nn.relu(tf.matmul(x, self.kernel))


class AroundUnsafe(layers.Layer):
    """Has a layer of Keras inside that is unsafe; its own code is safe."""

    def __init__(self, **options):
        super().__init__(**options)
        self.unit = layers.UnitNormalization(dtype=self.dtype_policy)

    def call(self, x):
        return tf.nn.relu(self.unit(x))


class SmallEpsilon(layers.Layer):
    def __init__(self, epsilon=1e-8, **options):
        super().__init__(**options)
        self.epsilon = epsilon

    def call(self, x):
        return x / (tf.abs(x) + self.epsilon)


class ReluThenRoot(layers.Layer):
    def call(self, x):
        return tf.sqrt(tf.maximum(x, 0.0))


class EpsilonByMaximum(layers.Layer):
    def call(self, x):
        return x / tf.maximum(tf.abs(x), 1e-9)


class Masked(layers.Layer):
    def call(self, x):
        return x + tf.cast(x < 0, x.dtype) * -1e9


class MaskedByCast(layers.Layer):
    def call(self, x):
        large = tf.constant([-1e9, 0.0, 0.0, 0.0])
        return x + tf.cast(large, x.dtype)


class MaskedByInfinity(layers.Layer):
    def call(self, x):
        return tf.where(x < 0, x, float("-inf"))


class Compared(layers.Layer):
    def call(self, x):
        return tf.where(x < 1e9, x, 0.0)


class Failing(layers.Layer):
    def call(self, x):
        return x + tf.ones((1, 4), tf.float32)


class AddsLoss(layers.Layer):
    def call(self, x, training=False):
        if training:
            self.add_loss(keras.ops.mean(x))
        return x


class AddsFloat32Loss(layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.cast(x, "float32")))
        return x


class Whole(keras.Model):
    """A subclassed model with custom layers inside a block."""

    def __init__(self, **options):
        super().__init__(**options)
        self.block = keras.Sequential([layers.Dense(4), Norm(name="deep")])
        self.last = layers.Dense(2, dtype="float32")

    def call(self, x):
        x = self.block(x)
        return self.last(x * keras.ops.exp(x))


class TestUnsafe:
    def test_norm(self):
        (one,) = findings(around(Norm(dtype=F16, name="norm")), "TM017")
        assert one.layer == "norm"
        assert one.severity == "warning"
        assert one.message.startswith(
            "Layer 'norm' (Norm) computes Square, Sum in float16 "
            "(test_audit_static_custom.py:"
        )

    @pytest.mark.parametrize(
        ("layer", "kernel"), [(OwnSoftmax, "Softmax"), (Product, "MatMul")]
    )
    def test_softmax_and_product(self, layer, kernel):
        (one,) = findings(around(layer(dtype=F16), (3, 4)), "TM017")
        assert kernel in one.message

    def test_product_is_safe_in_bfloat16(self):
        layer = Product(dtype="mixed_bfloat16")
        assert findings(around(layer, (3, 4)), "TM017") == []
        (one,) = findings(around(Norm(dtype="mixed_bfloat16")), "TM017")
        assert one.severity == "note"

    @pytest.mark.parametrize("layer", [NormInFloat32, Weighted])
    def test_safe_layers(self, layer):
        codes = ("TM004", "TM005", "TM015", "TM017", "TM020")
        assert findings(around(layer(dtype=F16)), *codes) == []

    @pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
    def test_layers_of_keras_inside_are_judged_by_the_rules(self):
        model = around(AroundUnsafe(dtype=F16, name="it"))
        (one,) = findings(model, "TM015", "TM017")
        assert (one.code, one.severity) == ("TM015", "error")
        assert one.layer.endswith("unit_normalization")

    def test_float32_layer_in_a_mixed_model(self):
        keras.config.set_dtype_policy(F16)
        assert findings(around(Norm(dtype="float32")), "TM017") == []

    def test_lambda(self):
        unsafe = layers.Lambda(lambda x: tf.exp(x), dtype=F16, name="it")
        (one,) = findings(around(unsafe), "TM015", "TM017")
        assert (one.code, one.layer) == ("TM015", "it")
        assert "computes Exp in float16" in one.message
        safe = layers.Lambda(lambda x: tf.nn.relu(x), dtype=F16)
        assert findings(around(safe), "TM015", "TM017") == []

    def test_inside_of_a_subclassed_model(self):
        keras.config.set_dtype_policy(F16)
        model = Whole(name="whole")
        model(np.ones((2, 4), "float32"))
        found = findings(model, "TM017")
        assert {one.layer.split("/")[-1] for one in found} == {"whole", "deep"}
        (own,) = (one for one in found if one.layer == "whole")
        assert "computes Exp in float16" in own.message

    def test_failing_layer_does_not_hide_the_others(self):
        inputs = keras.Input((4,))
        x = layers.Dense(4)(inputs)
        x = Failing(name="fails")(x)
        x = layers.Dense(3, "softmax", name="last")(x)
        model = keras.Model(inputs, x)
        result = audit(model, policy=F16, hardware=A100)
        (one,) = (f for f in result.findings if f.code == "TM017")
        assert one.layer == "fails"
        assert "called in a graph in float16 it raises" in one.message
        assert ("TM001", "last") in [(f.code, f.layer) for f in result.findings]

    def test_model_that_was_not_built(self):
        keras.config.set_dtype_policy(F16)
        (one,) = findings(Whole(name="whole"), "TM017")
        assert one.severity == "note"
        assert one.message.startswith(
            "Model 'whole' could not be called, because it is not built yet."
        )
        assert one.fix.startswith("Pass data")


# What NumPy says when TensorFlow makes the constant.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
class TestConstants:
    def test_epsilon_from_an_attribute(self):
        (one,) = findings(around(SmallEpsilon(dtype=F16, name="it")), "TM004")
        assert one.severity == "error"
        assert one.message.startswith("Layer 'it' (SmallEpsilon) has `epsilon`")
        assert "= 1e-08" in one.message
        assert "becomes 0 in float16" in one.message

    def test_epsilon_from_the_line(self):
        (one,) = findings(around(EpsilonByMaximum(dtype=F16)), "TM004")
        assert "the constant 1e-09" in one.message

    @pytest.mark.parametrize(
        "layer",
        [
            SmallEpsilon(1e-4, dtype=F16),
            SmallEpsilon(1e-8, dtype="mixed_bfloat16"),
            ReluThenRoot(dtype=F16),
            NormInFloat32(dtype=F16),
        ],
    )
    def test_harmless_epsilons(self, layer):
        assert findings(around(layer), "TM004") == []

    @pytest.mark.parametrize("layer", [Masked, MaskedByCast])
    def test_large_constants(self, layer):
        (one,) = findings(around(layer(dtype=F16)), "TM005")
        assert one.severity == "error"
        assert "has the constant -1e+09 (test_audit_static_custom.py:" in (
            one.message
        )
        assert one.message.endswith("which becomes -inf in float16.")

    @pytest.mark.parametrize(
        "layer",
        [
            Masked(dtype="mixed_bfloat16"),
            MaskedByInfinity(dtype=F16),
            Compared(dtype=F16),
        ],
    )
    def test_harmless_constants(self, layer):
        assert findings(around(layer), "TM005") == []


class TestLosses:
    def test_added_loss(self):
        (one,) = findings(around(AddsLoss(dtype=F16, name="it")), "TM020")
        assert (one.layer, one.severity) == ("it", "error")
        assert "adds a loss in float16 (add_loss)" in one.message
        model = around(AddsLoss(name="it"))
        (one,) = findings(model, "TM020", policy="mixed_bfloat16")
        assert "in bfloat16" in one.message

    def test_float32_loss(self):
        assert findings(around(AddsFloat32Loss(dtype=F16)), "TM020") == []


class TestWalk:
    def test_the_model_is_left_as_it_was(self):
        model = around(AddsLoss(dtype=F16))
        keras.config.set_dtype_policy("float32")
        before = [v.numpy().copy() for v in model.variables]
        result = static_walk.walk(model)
        assert len(result.losses) == 1
        assert model.losses == []
        for old, new in zip(before, model.variables, strict=True):
            np.testing.assert_array_equal(old, new)

    def test_shared_layers_and_nested_models(self):
        shared = layers.Dense(4, dtype=F16, name="shared")
        inner_inputs = keras.Input((4,), dtype="float16")
        inner = keras.Model(inner_inputs, shared(inner_inputs), name="inner")
        inputs = keras.Input((4,))
        model = keras.Model(inputs, [inner(shared(inputs)), inner(inputs)])
        calls = static_walk.walk(model).calls
        assert [c.operation.name for c in calls] == ["shared"] * 3
        assert [o.dtype for o in static_walk.walk(model).outputs] == [
            "float16",
            "float16",
        ]

    def test_data_decide_on_dtypes(self):
        model = keras.Sequential([layers.Embedding(10, 2)])
        model(np.zeros((1, 2), "int32"))
        walked = static_walk.walk(model, np.zeros((4, 2), "int32"))
        assert walked.problem is None
        assert not walked.assumed


class TestText:
    @pytest.mark.parametrize(
        ("value", "dtype", "expected"),
        [
            (65504.0, "float16", None),
            (65519.99, "float16", None),
            (65520.0, "float16", np.inf),
            (-1e9, "float16", -np.inf),
            (2.0**-25, "float16", 0.0),
            (2.0**-24, "float16", None),
            (0.0, "float16", None),
            (float("inf"), "float16", None),
            (3.4e38, "bfloat16", np.inf),
            (1e38, "bfloat16", None),
            (1e-45, "bfloat16", 0.0),
        ],
    )
    def test_becomes_is_what_a_cast_does(self, value, dtype, expected):
        assert static_text.becomes(value, dtype) == expected
        if np.isfinite(value) and (value == 0 or abs(value) > 1e-38):
            exact = tf.cast(tf.constant(value, tf.float64), dtype)
            cast = float(tf.cast(exact, tf.float64))
            changed = np.isinf(cast) or (cast == 0 and value != 0)
            assert bool(changed) is (expected is not None)

    def test_numbers_in_a_line(self):
        line = "x1 = y.real / (n + 1e-8) * -1E9 + .5 - 3 # v2"
        assert static_text.numbers_in(line) == [1e-8, 1e9, 0.5, 3.0]
