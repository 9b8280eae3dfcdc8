"""Each static code: models that provoke it, and some that must not."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfmixed
from tfmixed.audit.audit import audit
from tfmixed.hardware import Cpu
from tfmixed.hardware import Device
from tfmixed.hardware import describe

F16 = "mixed_float16"
BF16 = "mixed_bfloat16"
CPU = Cpu("Some CPU", "Linux", ("avx512_bf16",), onednn=True)
NO_GPU = describe((Device("CPU", "Some CPU"),), CPU)
OLD_CPU = describe(
    (Device("CPU", "Old CPU"),), Cpu("Old CPU", "Linux", ("avx2",), onednn=True)
)
A100 = describe((Device("GPU", "A100", (8, 0)),), CPU)
P100 = describe((Device("GPU", "P100", (6, 0)),), CPU)


def found(model, code, **options):
    """(severity, layer) of the findings of one code."""
    result = audit(model, hardware=options.pop("hardware", A100), **options)
    return [(f.severity, f.layer) for f in result.findings if f.code == code]


def message(model, code, **options):
    result = audit(model, hardware=options.pop("hardware", A100), **options)
    (one,) = (f for f in result.findings if f.code == code)
    return one.message


def chain(*stack, shape=(16,), dtype="float32"):
    inputs = keras.Input(shape, dtype=dtype)
    x = inputs
    for layer in stack:
        x = layer(x)
    return keras.Model(inputs, x)


def head(**options):
    return layers.Dense(4, dtype="float32", name="head", **options)


def dense(policy=F16, **options):
    return layers.Dense(16, dtype=policy, **options)


class Plain(keras.Model):
    """A subclassed model around layers in a row."""

    def __init__(self, *stack, **options):
        super().__init__(**options)
        self.stack = list(stack)

    def call(self, x):
        for layer in self.stack:
            x = layer(x)
        return x


def called(model, shape=(2, 16), dtype="float32"):
    model(np.ones(shape, dtype))
    return model


class TestHeads:
    def test_softmax_head_in_a_functional_model(self):
        model = chain(
            dense(), layers.Dense(4, "softmax", dtype=F16, name="predictions")
        )
        assert found(model, "TM001") == [("error", "predictions")]
        assert message(model, "TM001") == (
            "Layer 'predictions' (Dense, softmax) gives its output in "
            "float16: a confident wrong answer is rounded to exactly 1 and "
            "its gradient to 0."
        )
        assert found(model, "TM003") == []

    def test_heads_of_sequential_subclassed_and_nested_models(self):
        stack = [dense(), layers.Dense(4, dtype=BF16, name="last")]
        sequential = keras.Sequential([keras.Input((16,)), *stack])
        assert found(sequential, "TM001") == [("error", "sequential/last")]
        subclassed = called(Plain(dense(), layers.Dense(4, dtype=F16)))
        ((severity, path),) = found(subclassed, "TM001")
        assert severity == "error"
        assert path.endswith("dense_2")
        inner = chain(dense(name="inner_head"))
        assert found(chain(inner), "TM001") == [("error", "inner_head")]

    def test_several_outputs_and_an_operation(self):
        inputs = keras.Input((16,))
        x = dense()(inputs)
        a = layers.Dense(2, dtype=F16, name="a")(x)
        b = layers.Dense(2, dtype="float32", name="b")(x)
        c = keras.ops.softmax(x)
        model = keras.Model(inputs, {"a": a, "b": b, "c": c})
        paths = [path for _, path in found(model, "TM001")]
        assert sorted(paths) == ["a", "softmax"]

    @pytest.mark.slow
    def test_application(self):
        keras.config.set_dtype_policy(F16)
        model = keras.applications.MobileNet(
            weights=None, input_shape=(32, 32, 3), alpha=0.25
        )
        assert found(model, "TM001") == [("error", "predictions")]

    @pytest.mark.parametrize(
        "last",
        [
            head(activation="softmax"),
            layers.Activation("softmax", dtype="float32"),
            lambda x: keras.ops.cast(x, "float32"),
        ],
    )
    def test_float32_outputs_are_right(self, last):
        assert found(chain(dense(), last), "TM001") == []

    def test_guarded_step_makes_a_linear_head_a_warning(self):
        inputs = keras.Input((16,))
        linear = layers.Dense(1, dtype=F16, name="y")(inputs)
        model = tfmixed.Model(inputs, linear)
        assert found(model, "TM001") == [("warning", "y")]
        softmax = layers.Dense(3, "softmax", dtype=F16, name="y")(inputs)
        model = tfmixed.Model(inputs, softmax)
        assert found(model, "TM001") == [("error", "y")]

    @pytest.mark.parametrize(
        "middle",
        [
            layers.Softmax(dtype=F16, name="gate"),
            layers.Dense(16, "softmax", dtype=F16, name="gate"),
            layers.Activation("log_softmax", dtype=F16, name="gate"),
        ],
    )
    def test_softmax_in_the_middle(self, middle):
        model = chain(dense(), middle, head())
        assert found(model, "TM003") == [("warning", "gate")]

    def test_softmax_operation_in_the_middle(self):
        model = chain(dense(), keras.ops.softmax, head())
        assert [s for s, _ in found(model, "TM003")] == ["warning"]

    def test_no_softmax_in_16_bits(self):
        model = chain(dense(), layers.Softmax(dtype="float32"), head())
        assert found(model, "TM003") == []
        # That of an attention layer belongs to TM016.
        inputs = keras.Input((4, 16))
        x = layers.MultiHeadAttention(2, 8, dtype=F16)(inputs, inputs)
        model = keras.Model(inputs, head()(x))
        assert found(model, "TM003") == []


class TestScaling:
    def test_layers_with_policies_of_their_own(self):
        model = chain(dense(name="one"), head())
        model.compile("adam", "mse")
        assert found(model, "TM002") == [("error", None)]
        assert message(model, "TM002") == (
            "Layer 'one' (Dense) computes in float16, but `optimizer` (Adam) "
            "does not scale the loss: gradients below 6e-8 become 0."
        )

    def test_mixed_model_in_a_float32_one_and_pure_float16(self):
        inner = chain(dense(), dense())
        model = chain(inner, head())
        model.compile("sgd", "mse")
        assert found(model, "TM002") == [("error", None)]
        keras.config.set_dtype_policy("float16")
        model = chain(layers.Dense(4))
        model.compile("sgd", "mse")
        assert found(model, "TM002") == [("error", None)]

    def test_policies_set_after_building_and_a_map(self):
        model = chain(layers.Dense(16), head())
        model.layers[1].dtype_policy = F16
        model.compile("sgd", "mse")
        assert found(model, "TM002") == [("error", None)]
        policies = keras.dtype_policies.DTypePolicyMap(default_policy=F16)
        model = chain(layers.Dense(16, dtype=policies), head())
        model.compile("sgd", "mse")
        assert found(model, "TM002") == [("error", None)]

    def test_before_compile_it_is_a_warning(self):
        assert found(chain(dense(), head()), "TM002") == [("warning", None)]

    def test_second_optimizer_of_a_gan(self):
        model = chain(dense(), head())
        model.compile(tfmixed.wrap_optimizer("adam"), "mse")
        model.other = keras.optimizers.SGD()
        assert "`other` (SGD)" in message(model, "TM002")

    def test_scaled_in_every_way(self):
        for optimizer in (
            tfmixed.wrap_optimizer("adam"),
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            keras.optimizers.SGD(loss_scale_factor=128.0),
        ):
            model = chain(dense(), head())
            model.compile(optimizer, "mse")
            assert found(model, "TM002") == []

    def test_no_need_in_bfloat16_frozen_or_guarded(self):
        model = chain(dense(BF16), head())
        model.compile("adam", "mse")
        assert found(model, "TM002") == []
        model = chain(dense(), head())
        model.layers[1].trainable = False
        model.compile("adam", "mse")
        assert found(model, "TM002") == []
        inputs = keras.Input((16,))
        model = tfmixed.Model(inputs, head()(dense()(inputs)))
        model.compile("adam", "mse")
        assert found(model, "TM002") == []

    def test_no_scaling_on_purpose_is_none_all_the_same(self):
        model = chain(dense(), head())
        model.compile(tfmixed.wrap_optimizer("sgd", loss_scale="none"), "mse")
        assert found(model, "TM002") == [("error", None)]

    def test_stock_scaling(self):
        keras.config.set_dtype_policy(F16)
        model = chain(layers.Dense(16), head())
        model.compile("adam", "mse")
        assert found(model, "TM013") == [("warning", None)]
        model.compile(
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse"
        )
        assert "around SGD" in message(model, "TM013")
        model.compile(tfmixed.wrap_optimizer("adam"), "mse")
        assert found(model, "TM013") == []

    def test_what_compile_would_do_to_a_float32_model(self):
        model = chain(layers.Dense(16), head())
        assert found(model, "TM013", policy=F16) == []
        model.compile("adam", "mse")
        assert found(model, "TM013", policy=F16) == [("warning", None)]
        # What compile adds is not absent.
        assert found(model, "TM002", policy=F16) == []
        assert found(model, "TM013", policy=BF16) == []

    def test_run_eagerly(self):
        model = chain(dense(BF16), head())
        model.compile("adam", "mse", run_eagerly=True)
        assert found(model, "TM011") == [("warning", None)]
        subclassed = called(Plain(dense(BF16), head()))
        subclassed.compile("adam", "mse", run_eagerly=True)
        assert found(subclassed, "TM011") == [("warning", None)]
        model.compile("adam", "mse")
        assert found(model, "TM011") == []
        assert found(chain(dense(BF16), head()), "TM011") == []


class TestConstants:
    def test_epsilon_in_a_graph(self):
        model = chain(dense(), lambda x: x / (keras.ops.abs(x) + 1e-8), head())
        assert [s for s, _ in found(model, "TM004")] == ["error"]
        assert "1e-08 becomes 0 in float16" in message(model, "TM004")
        model = chain(
            dense(),
            lambda x: x / keras.ops.maximum(keras.ops.abs(x), 1e-9),
            head(),
        )
        assert [s for s, _ in found(model, "TM004")] == ["error"]

    def test_epsilon_of_an_optimizer_on_float16_variables(self):
        model = chain(dense("float16"))
        model.compile(keras.optimizers.Adam(epsilon=1e-8), "mse")
        assert found(model, "TM004") == [("error", None)]
        assert message(model, "TM004") == (
            "Adam(epsilon=1e-08) updates 2 variables that are float16 "
            "themselves, in which 1e-08 becomes 0: the step divides by zero."
        )
        model.compile(keras.optimizers.Adam(epsilon=1e-4), "mse")
        assert found(model, "TM004") == []
        model = chain(dense())
        model.compile(keras.optimizers.Adam(epsilon=1e-8), "mse")
        assert found(model, "TM004") == []

    @pytest.mark.parametrize(
        "norm", ["BatchNormalization", "LayerNormalization"]
    )
    def test_epsilon_that_is_used_in_float32(self, norm):
        norm = getattr(layers, norm)(epsilon=1e-9, dtype=F16)
        assert found(chain(dense(), norm, head()), "TM004") == []

    def test_epsilon_of_rms_normalization_by_version(self):
        norm = layers.RMSNormalization(epsilon=1e-9, dtype=F16)
        value = norm(np.full((1, 4), 300.0, "float16"))
        value = keras.ops.cast(value, "float32")
        in_float32 = bool(keras.ops.all(keras.ops.abs(value - 1) < 0.1))
        model = chain(dense(), norm_of_same_kind(norm), head())
        assert (found(model, "TM004") == []) is in_float32
        assert (found(model, "TM015") == []) is in_float32

    def test_constants_in_a_graph(self):
        def masked(x):
            return keras.ops.where(x > 0, x, -1e9)

        model = chain(dense(), masked, head())
        assert [s for s, _ in found(model, "TM005")] == ["error"]
        assert message(model, "TM005") == (
            "Operation 'where' (keras.ops, Where): -1e+09 becomes -inf in "
            "float16."
        )
        model = chain(dense(), lambda x: x * 1e6, head())
        assert "1e+06 becomes inf" in message(model, "TM005")

    def test_constants_of_layers(self):
        model = chain(
            layers.Masking(-1e9, dtype=F16, name="mask"),
            layers.LSTM(4, dtype=F16),
            head(),
            shape=(3, 4),
        )
        assert found(model, "TM005") == [("error", "mask")]
        model = chain(layers.Rescaling(1e5, dtype=F16, name="up"), head())
        assert found(model, "TM005") == [("error", "up")]
        assert message(model, "TM005") == (
            "Layer 'up' (Rescaling), scale: 100000 becomes inf in float16."
        )

    def test_constants_that_do_no_harm(self):
        for dtype, number in ((F16, 3e4), (BF16, 1e9), ("float32", 1e9)):
            stack = [dense(), dense(dtype), lambda x, n=number: x * n, head()]
            model = chain(*stack)
            assert found(model, "TM005") == []
        for bound in (
            lambda x: keras.ops.clip(x, -1e9, 1e9),
            lambda x: keras.ops.maximum(x, -1e9),
            lambda x: keras.ops.cast(keras.ops.less(x, 1e9), "float16"),
        ):
            assert found(chain(dense(), bound, head()), "TM005") == []
        model = chain(dense(), lambda x: x + float("inf"), head())
        assert found(model, "TM005") == []
        model = chain(dense(), layers.LeakyReLU(0.1, dtype=F16), head())
        assert found(model, "TM005") == []


def norm_of_same_kind(layer):
    """A new one: the first was called on another shape."""
    return type(layer).from_config(layer.get_config())


class TestIds:
    def test_sequential_model_built_by_a_call(self):
        keras.config.set_dtype_policy(F16)
        model = keras.Sequential([layers.Embedding(5000, 4, name="words")])
        model(np.zeros((2, 3), "int32"))
        assert found(model, "TM006") == [("error", "sequential/words")]
        assert message(model, "TM006") == (
            "Layer 'sequential/words' (Embedding) looks up ids up to 4999, but "
            "they pass through float16 before, which holds every integer only "
            "up to 2048: 2049 becomes 2048."
        )

    def test_layer_before_the_embedding(self):
        model = chain(
            layers.Reshape((4, 4), dtype=BF16),
            layers.Embedding(1000, 4, dtype=BF16, name="words"),
            head(),
        )
        assert found(model, "TM006") == [("error", "words")]

    def test_other_lookups(self):
        for lookup in (
            layers.CategoryEncoding(4000, dtype=F16, name="look"),
            layers.IntegerLookup(vocabulary=[1, 5000], name="look"),
            layers.Hashing(8, name="look"),
        ):
            model = chain(layers.Reshape((4, 4), dtype=F16), lookup)
            assert found(model, "TM006") == [("error", "look")], lookup

    @pytest.mark.parametrize("dtype", ["int32", "float32"])
    def test_encoding_that_casts_ids_itself(self, dtype):
        # Only in a graph: called eagerly, Keras is exact.
        encoding = layers.CategoryEncoding(5000, dtype=F16, name="look")
        model = chain(encoding, shape=(1,), dtype=dtype)
        assert found(model, "TM006") == [("error", "look")]
        hot = model.predict(np.array([[2049]], dtype), verbose=0)
        assert np.argmax(hot) == 2048
        encoding = layers.CategoryEncoding(2000, dtype=F16, name="look")
        assert found(chain(encoding, shape=(1,)), "TM006") == []

    def test_subclassed_model_with_float_ids(self):
        keras.config.set_dtype_policy(F16)
        model = called(Plain(layers.Embedding(5000, 4)), (2, 3), "int32")
        ids = np.ones((2, 3), "float32")
        ((severity, _),) = static_only(model, ids, "TM006")
        assert severity == "error"
        assert static_only(model, ids.astype("int32"), "TM006") == []
        # Without data nobody knows whether ids come as integers.
        assert found(model, "TM006") == []

    def test_ids_that_stay_exact(self):
        embedding = layers.Embedding(5000, 4, dtype=F16)
        assert found(chain(embedding, head()), "TM006") == []
        model = chain(
            layers.Reshape((4, 4), dtype=F16),
            layers.Embedding(5000, 4, dtype=F16),
            head(),
            dtype="int32",
        )
        assert found(model, "TM006") == []
        small = chain(
            layers.Reshape((4, 4), dtype=F16),
            layers.Embedding(2000, 4, dtype=F16),
            head(),
        )
        assert found(small, "TM006") == []


def static_only(model, x, code):
    """Findings of a code with the dtypes of data, without measuring."""
    from tfmixed.audit.static import checks as static
    from tfmixed.audit.static import subject as static_subject
    from tfmixed.audit.static import walk as static_walk

    subject = static_subject.Subject(
        model,
        static_subject.places(model),
        static_walk.walk(model, x),
        A100,
    )
    return [
        (f.severity, f.layer)
        for f in static.findings(subject)
        if f.code == code
    ]


class TestSizes:
    def test_dimensions(self):
        model = chain(
            layers.Dense(30, dtype=F16, name="a"),
            layers.Dense(64, dtype=F16, name="b"),
            layers.Dense(64, dtype=F16, name="c"),
            head(),
        )
        assert found(model, "TM007") == [("note", "a"), ("note", "b")]
        result = audit(model, hardware=A100)
        a, b = (f for f in result.findings if f.code == "TM007")
        assert a.message == "Layer 'a' (Dense) has 30 units, no multiple of 8."
        assert a.fix == "Use 32, padding what is not needed."
        assert "30 input features" in b.message

    def test_filters_and_vocabularies(self):
        model = chain(
            layers.Conv2D(12, 3, dtype=F16, name="conv"), shape=(8, 8, 3)
        )
        # Three channels of an image are what they are.
        assert message(model, "TM007") == (
            "Layer 'conv' (Conv2D) has 12 filters, no multiple of 8."
        )
        model = chain(
            layers.Embedding(50257, 100, dtype=F16, name="e"),
            layers.Dense(50257, dtype="float32", name="vocabulary"),
        )
        assert found(model, "TM007") == [("note", "e"), ("note", "vocabulary")]

    def test_dimensions_that_fit_or_do_not_matter(self):
        fits = chain(layers.Dense(64, dtype=F16), head())
        assert found(fits, "TM007") == []
        odd = chain(layers.Dense(30, dtype=F16), head())
        assert found(odd, "TM007", hardware=NO_GPU) == []
        assert found(odd, "TM007", hardware=P100) == []
        small = chain(layers.Dense(2, dtype=F16))
        assert found(small, "TM007") == []

    def test_small_models(self):
        model = chain(dense(), head())
        assert found(model, "TM008") == [("note", None)]
        text = message(model, "TM008", batch_size=100)
        # (16 * 16 + 16 * 4) / 2 for each of 100 examples.
        assert "16 k multiply-adds in a layer with weights on average" in text
        assert "for a batch of 100 and 32 k in all" in text
        assert "batch of 32, the size assumed" in message(model, "TM008")
        conv = chain(layers.Conv2D(4, 3, dtype=F16), shape=(8, 8, 3))
        assert found(conv, "TM008") == [("note", None)]

    def test_large_ones_and_unknown_shapes(self):
        wide = chain(layers.Dense(2048, dtype=F16), shape=(2048,))
        assert found(wide, "TM008") == []
        # Many examples make up for small layers.
        assert found(chain(dense(), head()), "TM008", batch_size=10**6) == []
        open_shape = chain(
            dense(),
            layers.GlobalMaxPooling1D(dtype=F16),
            head(),
            shape=(None, 16),
        )
        assert found(open_shape, "TM008") == []
        assert found(chain(layers.Flatten(dtype=F16)), "TM008") == []

    def test_small_batches(self):
        model = chain(
            dense(), layers.BatchNormalization(dtype=F16, name="norm"), head()
        )
        assert found(model, "TM009", batch_size=4) == [("note", "norm")]
        inputs = keras.Input((16,), batch_size=8)
        norm = layers.BatchNormalization(dtype=F16, name="norm")(inputs)
        fixed = keras.Model(inputs, norm)
        assert "a batch of 8, fewer than 16" in message(fixed, "TM009")
        assert found(model, "TM009", batch_size=16) == []
        assert found(model, "TM009") == []
        model.get_layer("norm").trainable = False
        assert found(model, "TM009", batch_size=4) == []


class TestRules:
    def test_layers_left_behind_by_setting_policies(self):
        inputs = keras.Input((4, 16))
        x = layers.MultiHeadAttention(2, 8, name="mha")(inputs, inputs)
        x = layers.Bidirectional(layers.LSTM(4), name="both")(x)
        model = keras.Model(inputs, head()(x))
        for layer in model.layers[1:-1]:
            layer.dtype_policy = F16
        assert ("note", "mha") in found(model, "TM010")
        (text,) = (
            f.message
            for f in audit(model, hardware=A100).findings
            if f.code == "TM010" and f.layer == "mha"
        )
        assert text == (
            "Layer 'mha' (MultiHeadAttention) computes in float16, but inside "
            "of it 4 of its layers compute in float32 (query, key, value, "
            "...)."
        )

    def test_float32_product_in_a_mixed_model(self):
        keras.config.set_dtype_policy(F16)
        model = chain(layers.Dense(8, dtype="float32", name="left"), head())
        assert found(model, "TM010") == [("note", "left")]

    def test_what_is_meant_to_be_float32(self):
        keras.config.set_dtype_policy(F16)
        model = chain(
            layers.Dense(16),
            layers.LayerNormalization(dtype="float32"),
            head(),
        )
        assert found(model, "TM010") == []
        keras.config.set_dtype_policy("float32")
        assert found(chain(dense(), layers.Dense(4)), "TM010") == []

    @pytest.mark.parametrize(
        ("hardware", "policy", "better"),
        [
            (NO_GPU, F16, "mixed_bfloat16"),
            (OLD_CPU, F16, "float32"),
            (P100, F16, "float32"),
            (OLD_CPU, BF16, "float32"),
        ],
    )
    def test_slow_formats(self, hardware, policy, better):
        model = chain(dense(policy), head())
        result = audit(model, hardware=hardware)
        (one,) = (f for f in result.findings if f.code == "TM012")
        assert one.severity == "warning"
        assert one.fix.startswith(f"Use the policy '{better}' here")

    def test_fast_formats(self):
        assert found(chain(dense(), head()), "TM012", hardware=A100) == []
        model = chain(dense(BF16), head())
        assert found(model, "TM012", hardware=NO_GPU) == []

    def test_unsafe_layers(self):
        for layer, severity, lower in (
            (layers.UnitNormalization, "error", "note"),
            (layers.GlobalAveragePooling1D, "warning", "note"),
            (layers.Masking, "warning", "note"),
        ):
            for policy, expected in ((F16, severity), (BF16, lower)):
                model = chain(
                    layer(dtype=policy, name="it"), head(), shape=(4, 16)
                )
                assert found(model, "TM015") == [(expected, "it")]

    def test_products_of_activations(self):
        inputs = keras.Input((16,))
        a, b = dense()(inputs), dense()(inputs)
        for layer, severity in (
            (layers.Multiply(dtype=F16, name="it"), "warning"),
            (layers.Dot(1, dtype=F16, name="it"), "warning"),
            (layers.Dot(1, normalize=True, dtype=F16, name="it"), "error"),
        ):
            model = keras.Model(inputs, head()(layer([a, b])))
            assert found(model, "TM015") == [(severity, "it")]
        gate = layers.Dense(16, "sigmoid", dtype=F16)(inputs)
        gated = layers.Multiply(dtype=F16)([a, gate])
        assert found(keras.Model(inputs, head()(gated)), "TM015") == []

    def test_operations_of_a_graph(self):
        model = chain(dense(), lambda x: keras.ops.mean(x, -1), name_it, head())
        assert [s for s, _ in found(model, "TM015")] == ["warning"]
        safe = chain(dense(), lambda x: keras.ops.relu(x) + 1.0, head())
        assert found(safe, "TM015") == []
        cast = chain(
            dense(),
            lambda x: keras.ops.mean(keras.ops.cast(x, "float32"), -1),
            name_it,
            head(),
        )
        assert found(cast, "TM015") == []

    def test_cells_belong_to_their_layers(self):
        model = chain(
            layers.ConvLSTM1D(4, 3, dtype=F16),
            layers.Flatten(dtype=F16),
            head(),
            shape=(4, 8, 3),
        )
        assert found(model, "TM015") == []

    def test_safe_layers(self):
        model = chain(
            layers.Conv2D(8, 3, dtype=F16),
            layers.BatchNormalization(dtype=F16),
            layers.LayerNormalization(dtype=F16),
            layers.GroupNormalization(2, dtype=F16),
            layers.ReLU(dtype=F16),
            layers.MaxPooling2D(dtype=F16),
            layers.GlobalAveragePooling2D(dtype="float32"),
            head(),
            shape=(8, 8, 8),
        )
        assert found(model, "TM015") == []

    def test_attention(self):
        inputs = keras.Input((4, 16))
        for layer in (
            layers.MultiHeadAttention(2, 8, dtype=F16, name="it"),
            layers.Attention(dtype=F16, name="it"),
        ):
            arguments = (
                [[inputs, inputs]]
                if isinstance(layer, layers.Attention)
                else [inputs, inputs]
            )
            model = keras.Model(inputs, head()(layer(*arguments)))
            assert found(model, "TM016") == [("warning", "it")]
        x = layers.MultiHeadAttention(2, 8, dtype="float32")(inputs, inputs)
        assert found(keras.Model(inputs, head()(dense()(x))), "TM016") == []
        x = layers.MultiHeadAttention(2, 8, dtype=BF16, name="it")(x, x)
        model = keras.Model(inputs, head()(x))
        assert found(model, "TM016") == [("note", "it")]

    def test_missing_kernels(self):
        model = chain(
            layers.MaxPooling3D(dtype=F16, name="pool"),
            layers.Flatten(dtype=F16),
            head(),
            shape=(4, 4, 4, 2),
        )
        assert found(model, "TM018", hardware=NO_GPU) == [("error", "pool")]
        assert found(model, "TM018", hardware=A100) == []

    @pytest.mark.slow
    @pytest.mark.parametrize("policy", [F16, BF16])
    @pytest.mark.parametrize("name", ["MaxPooling3D", "AveragePooling3D"])
    def test_missing_kernels_are_those_that_fail(self, name, policy):
        model = chain(
            getattr(layers, name)(2, dtype=policy, name="it"),
            layers.Flatten(dtype=policy),
            head(),
            shape=(4, 4, 4, 2),
        )
        model.compile(tfmixed.wrap_optimizer("sgd"), "mse", jit_compile=False)
        try:
            model.train_on_batch(np.ones((2, 4, 4, 4, 2)), np.ones((2, 4)))
            runs = True
        except tf.errors.OpError:
            runs = False
        assert (found(model, "TM018", hardware=NO_GPU) == []) is runs

    def test_preprocessing(self):
        normalization = layers.Normalization(dtype=F16, name="it")
        normalization.adapt(np.ones((4, 16)) * 1000)
        assert found(chain(normalization, head()), "TM019") == [("error", "it")]
        model = chain(layers.Rescaling(1 / 255, dtype=F16, name="it"), head())
        assert found(model, "TM019") == [("note", "it")]
        normalization = layers.Normalization(dtype="float32")
        normalization.adapt(np.ones((4, 16)))
        assert found(chain(normalization, dense(), head()), "TM019") == []


def name_it(x):
    return keras.ops.reshape(x, (-1, 1))


class TestExtraLosses:
    @pytest.mark.parametrize("policy", [F16, BF16])
    def test_activity_regularizers(self, policy):
        model = chain(
            dense(policy, activity_regularizer="l2", name="it"), head()
        )
        assert found(model, "TM020") == [("error", "it")]
        penalty = layers.ActivityRegularization(l2=0.1, dtype=policy, name="it")
        model = chain(dense(policy), penalty, head())
        assert found(model, "TM020") == [("error", "it")]

    def test_metric_functions(self):
        in_keras = keras.losses.mean_absolute_error

        def mine(y_true, y_pred):
            return keras.ops.mean(y_true - y_pred)

        model = chain(dense(), layers.Dense(1, dtype=F16))
        model.compile(tfmixed.wrap_optimizer("sgd"), "mse", metrics=[mine])
        assert found(model, "TM020") == [("error", None)]
        assert "'mine' gets float32 targets and float16" in message(
            model, "TM020"
        )
        model.compile(
            tfmixed.wrap_optimizer("sgd"),
            "mse",
            metrics=["mae", keras.metrics.MeanSquaredError(), in_keras],
        )
        assert found(model, "TM020") == []
        model = chain(dense(), head())
        model.compile(tfmixed.wrap_optimizer("sgd"), "mse", metrics=[mine])
        assert found(model, "TM020") == []

    def test_guarded_models_and_float32_layers(self):
        inputs = keras.Input((16,))
        x = dense(activity_regularizer="l2")(inputs)
        assert found(tfmixed.Model(inputs, head()(x)), "TM020") == []
        model = chain(dense("float32", activity_regularizer="l2"), dense())
        assert found(model, "TM020") == []
