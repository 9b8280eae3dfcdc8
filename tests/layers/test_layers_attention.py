import inspect
import json
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfmixed.layers import attention
from tfmixed.layers import products
from tfmixed.layers import twins as twin_lib
from tfmixed.layers.twins import stock_of
from tfmixed.layers.twins import twin_of

HALF = ["float16", "bfloat16"]
# From near the least numbers of float16 to near its largest; bfloat16 has the
# range of float32.
INPUTS = [(m, "float16") for m in (1e-3, 1.0, 300.0, 3000.0, 60000.0)]
INPUTS += [(m, "bfloat16") for m in (1.0, 3000.0)]
TWINS = {
    stock: twin
    for stock, twin in twin_lib.TWINS.items()
    if twin.__module__ == "tfmixed.layers.attention"
}
STOCK = sorted(TWINS, key=lambda stock: stock.__name__)
HEADS = [layers.MultiHeadAttention, layers.GroupQueryAttention]
BATCH, LENGTH = 2, 12
OLD = tuple(map(int, keras.__version__.split(".")[:2])) < (3, 15)


def identity(stock, size, dtype, heads=1, **options):
    """A layer whose projections are the identity: they round nothing."""
    if issubclass(stock, HEADS[0]):
        arguments = {"num_heads": heads, "key_dim": size}
    else:
        arguments = {
            "head_dim": size,
            "num_query_heads": heads,
            "num_key_value_heads": heads,
        }
    policy = dtype if dtype == "float32" else f"mixed_{dtype}"
    layer = stock(**arguments, use_bias=False, dtype=policy, **options)
    width = heads * size
    layer.build((BATCH, LENGTH, width), (BATCH, LENGTH, width))
    eye = np.eye(width)
    split = eye.reshape(width, heads, size)
    layer.set_weights([split, split, split, eye.reshape(heads, size, width)])
    return layer


def draw(shape, magnitude, dtype, seed=0):
    """Numbers up to `magnitude` that `dtype` holds exactly, as float32."""
    x = np.random.default_rng(seed).normal(size=shape).clip(-3, 3) / 3
    return tf.cast(tf.cast(x * magnitude, dtype), "float32")


def masks():
    """Of a call: none, causal, padded keys, and rows that attend to nothing."""
    rows = np.random.default_rng(5).random((BATCH, LENGTH, LENGTH)) < 0.6
    rows[0, 0] = rows[1, 3] = False
    padding = np.arange(LENGTH) < np.array([[LENGTH // 2], [0]])
    return [
        {},
        {"use_causal_mask": True},
        {"value_mask": tf.constant(padding)},
        {"attention_mask": tf.constant(rows), "use_causal_mask": True},
    ]


def array(x):
    return tf.cast(x, "float32").numpy()


def error(found, expected):
    """Largest difference, relative to the largest number expected."""
    found, expected = array(found), array(expected)
    return np.abs(found - expected).max() / np.abs(expected).max()


def limit(dtype, bits=3):
    """A few roundings of `dtype`."""
    return 2.0 ** (bits - (11 if dtype == "float16" else 8))


def attended(query, key, value, scale):
    """Attention in float64."""
    query, key, value = (np.asarray(x, "float64") for x in (query, key, value))
    scores = scale * query @ np.swapaxes(key, -1, -2)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value


class TestStock:
    """What is wrong in Keras; when one of these fails, Keras has mended it."""

    def test_scores_overflow(self):
        x = 32 + draw((BATCH, LENGTH, 64), 8, "float16") ** 2 / 8
        output = identity(HEADS[0], 64, "float16")(x, x)
        assert np.isnan(array(output)).any()

    @pytest.mark.parametrize("dtype", HALF)
    def test_scores_in_16_bits(self, dtype):
        x = tf.cast(4 + draw((BATCH, LENGTH, 64), 1, "float32"), dtype)
        expected = attended(*(array(x),) * 3, 1.0)
        stock = layers.Attention(dtype=f"mixed_{dtype}")([x, x])
        assert error(stock, expected) > 1e-2
        twin = attention.Attention(dtype=f"mixed_{dtype}")([x, x])
        assert error(twin, expected) < limit(dtype)

    @pytest.mark.parametrize("dtype", HALF)
    def test_tanh_in_16_bits(self, dtype):
        """Sums up to 512."""
        x = draw((BATCH, LENGTH, 512), 3, dtype)
        options = {"use_scale": False}
        expected = layers.AdditiveAttention(**options)([x, x])
        options["dtype"] = f"mixed_{dtype}"
        stock = layers.AdditiveAttention(**options)([x, x])
        assert error(stock, expected) > 1e-2
        twin = attention.AdditiveAttention(**options)([x, x])
        assert error(twin, expected) < limit(dtype)


class TestHeads:
    @pytest.mark.parametrize(
        ("stock", "size"), [(HEADS[0], 8), (HEADS[0], 64), (HEADS[1], 64)]
    )
    @pytest.mark.parametrize(("magnitude", "dtype"), INPUTS)
    def test_output(self, stock, dtype, size, magnitude):
        """Exact inputs and projections: nothing excuses another output."""
        x = draw((BATCH, LENGTH, 2 * size), magnitude, dtype)
        y = draw((BATCH, LENGTH, 2 * size), magnitude, dtype, seed=1)
        control = identity(stock, size, "float32", heads=2)
        twin = identity(TWINS[stock], size, dtype, heads=2)
        for mask in masks():
            expected = control(x, y, **mask)
            assert error(twin(x, y, **mask), expected) < limit(dtype)
            if OLD and magnitude > 1e4:
                # The -1e9 of Keras 3.10 is too little to mask such scores.
                continue
            mask["return_attention_scores"] = True
            output, scores = twin(x, y, **mask)
            expected, expected_scores = control(x, y, **mask)
            assert error(output, expected) < limit(dtype)
            assert error(scores, expected_scores) < limit(dtype)
            assert output.dtype == scores.dtype == dtype

    @pytest.mark.parametrize("dtype", HALF)
    def test_what_all_keys_have_in_common(self, dtype):
        """Scores about 10,000 that differ by less than what float16 shows."""
        x = 32 + array(draw((BATCH, LENGTH, 64), 1, "float32", seed=2)) * 8
        x = array(tf.cast(x, dtype))
        twin = identity(attention.MultiHeadAttention, 64, dtype)
        expected = attended(x, x, x, 1 / 8)
        assert error(twin(x, x), expected) < limit(dtype)

    @pytest.mark.parametrize("stock", HEADS)
    @pytest.mark.parametrize("dtype", HALF)
    def test_mask_that_is_no_bool(self, stock, dtype):
        x = draw((BATCH, LENGTH, 8), 3, dtype)
        mask = np.random.default_rng(5).random((BATCH, LENGTH, LENGTH)) < 0.6
        for values in (mask.astype("int32"), np.where(mask, 0.0, -1e9)):
            for scores in (False, True):
                outputs = [
                    layer(
                        x,
                        x,
                        attention_mask=tf.constant(values),
                        return_attention_scores=scores,
                    )
                    for layer in (
                        identity(stock, 8, "float32"),
                        identity(TWINS[stock], 8, dtype),
                    )
                ]
                expected, output = outputs
                if scores:
                    expected, output = expected[0], output[0]
                difference = np.abs(array(output) - array(expected)).max()
                assert difference < 3 * limit(dtype)

    @pytest.mark.parametrize("stock", HEADS)
    @pytest.mark.parametrize("dtype", HALF)
    def test_dropout(self, stock, dtype):
        """The same seed drops the same weights as in float32."""
        x = draw((BATCH, LENGTH, 8), 3, dtype)
        outputs = {}
        for kind, to in ((stock, "float32"), (TWINS[stock], dtype)):
            layer = identity(kind, 8, to, dropout=0.3, seed=7)
            outputs[to] = [layer(x, x, training=t) for t in (True, False)]
        for one, other in zip(outputs[dtype], outputs["float32"], strict=True):
            assert error(one, other) < limit(dtype)
        assert error(*outputs["float32"]) > 0.1

    @pytest.mark.parametrize("axes", [(1,), (2,), (1, 2), (2, 1)])
    @pytest.mark.parametrize("dtype", HALF)
    def test_attention_axes(self, axes, dtype):
        x = draw((BATCH, 3, 4, 6), 3, dtype)
        lengths = [x.shape[i] for i in axes]
        shape = (BATCH, *(x.shape[i] for i in (1, 2) if i not in axes))
        mask = np.random.default_rng(5).random((*shape, *lengths, *lengths))
        mask = mask < 0.6
        mask[0, ..., 0] = mask[1, ..., 1] = False
        control = layers.MultiHeadAttention(
            2, 3, value_dim=5, attention_axes=axes
        )
        control.build(x.shape, x.shape)
        twin = attention.MultiHeadAttention(
            2, 3, value_dim=5, attention_axes=axes, dtype=f"mixed_{dtype}"
        )
        twin.build(x.shape, x.shape)
        twin.set_weights(control.get_weights())
        for kwargs in ({}, {"attention_mask": tf.constant(mask)}):
            kwargs["return_attention_scores"] = True
            pairs = zip(
                twin(x, x, **kwargs), control(x, x, **kwargs), strict=True
            )
            for found, expected in pairs:
                assert found.shape == expected.shape
                assert error(found, expected) < limit(dtype, 4)
            kwargs.pop("return_attention_scores")
            found, expected = (
                layer(x, x, **kwargs) for layer in (twin, control)
            )
            assert error(found, expected) < limit(dtype, 4)

    def test_flash_attention_is_refused_as_in_keras(self):
        layer = identity(
            attention.MultiHeadAttention, 8, "float16", flash_attention=True
        )
        x = draw((BATCH, LENGTH, 8), 1, "float16")
        with pytest.raises(ValueError, match="[Ff]lash attention"):
            layer(x, x)

    @pytest.mark.parametrize("dtype", HALF)
    def test_own_causal_mask(self, dtype):
        """`call` of Keras hides it from layers that override this method."""
        x = draw((1, LENGTH, 1, 8), 3, dtype)
        for stock in HEADS:
            layer = identity(TWINS[stock], 8, dtype)
            half = tf.cast(x, dtype)
            output, _ = layer._compute_attention(
                half, half, half, use_causal_mask=True
            )
            expected = [
                attended(*(x[:, : i + 1, 0],) * 3, 8**-0.5)[:, -1]
                for i in range(LENGTH)
            ]
            expected = np.stack(expected, 1)
            assert error(output[:, :, 0], expected) < limit(dtype)


class TestGradients:
    def gradients(self, layer, tensors, upstream, mask):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            query, key, value = tensors
            output = layer(query, value, key, **mask)
            output = tf.cast(output, "float32")
            loss = tf.reduce_sum(output * upstream)
        return tape.gradient(loss, tensors)

    @pytest.mark.parametrize("stock", HEADS)
    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize(
        ("magnitudes", "upstream"),
        [
            ((3, 3, 3), 1),
            ((300, 300, 300), 1),
            ((3000, 3000, 3000), 1),
            # The gradients of the weights are more than float16 holds,
            ((0.01, 1, 3000), 3),
            # those of the scores too,
            ((0.1, 0.1, 60000), 3),
            # and here they are less.
            ((3e-4, 3000, 0.01), 2e-4),
        ],
    )
    def test_against_float32(self, stock, dtype, magnitudes, upstream):
        shape = (BATCH, LENGTH, 64)
        tensors = [draw(shape, m, dtype, i) for i, m in enumerate(magnitudes)]
        upstream = draw(shape, upstream, dtype, 3)
        control = identity(stock, 64, "float32")
        twin = identity(TWINS[stock], 64, dtype)
        for mask in (masks()[0], masks()[3]):
            expected = self.gradients(control, tensors, upstream, mask)
            found = self.gradients(twin, tensors, upstream, mask)
            for one, other in zip(found, expected, strict=True):
                assert np.abs(other).max() < 65504
                assert np.isfinite(one).all()
                # What float16 has no more digits for, and what is left where
                # one key takes all, is not compared.
                floor = max(2**-14, 1e-6 * np.abs(expected[2]).max())
                if np.abs(other).max() > floor:
                    assert error(one, other) < limit(dtype)

    @pytest.mark.parametrize("dtype", HALF)
    def test_gradient_of_a_gradient(self, dtype):
        x = draw((BATCH, LENGTH, 8), 3, dtype)
        found = []
        for stock in (HEADS[0], TWINS[HEADS[0]]):
            to = dtype if stock in TWINS.values() else "float32"
            layer = identity(stock, 8, to)
            with tf.GradientTape() as outer:
                outer.watch(x)
                (of_query, of_key, _) = self.gradients(layer, [x] * 3, 1.0, {})
                penalty = tf.reduce_sum(of_query**2 + of_key**2)
            found.append(outer.gradient(penalty, x))
        assert error(found[1], found[0]) < limit(dtype, 4)


class TestScores:
    """Attention and AdditiveAttention."""

    @pytest.mark.parametrize(("magnitude", "dtype"), INPUTS)
    @pytest.mark.parametrize(
        ("stock", "options"),
        [
            (layers.Attention, {}),
            (layers.Attention, {"use_scale": True}),
            (layers.Attention, {"score_mode": "concat"}),
            (layers.Attention, {"score_mode": "concat", "use_scale": True}),
            (layers.AdditiveAttention, {}),
            (layers.AdditiveAttention, {"use_scale": False}),
        ],
    )
    def test_output(self, stock, options, dtype, magnitude):
        query = draw((BATCH, 7, 32), magnitude, dtype)
        value = draw((BATCH, LENGTH, 32), magnitude, dtype, seed=1)
        key = draw((BATCH, LENGTH, 32), magnitude, dtype, seed=2)
        control = stock(**options)
        twin = TWINS[stock](**options, dtype=f"mixed_{dtype}")
        for layer in (control, twin):
            layer.build([query.shape, value.shape, key.shape])
        # Powers of two, such that no weight is rounded.
        weights = [np.full(w.shape, 0.5) for w in control.get_weights()]
        control.set_weights(weights)
        twin.set_weights(weights)
        query_mask = np.arange(7) < np.array([[7], [4]])
        padding = np.arange(LENGTH) < np.array([[LENGTH // 2], [0]])
        mask = [tf.constant(query_mask), tf.constant(padding)]
        calls = [{}, {"use_causal_mask": True, "mask": mask}]
        if not OLD:
            # Keras 3.10 takes a mask of values for one of scores.
            calls.append({"mask": mask})
        for arguments in calls:
            arguments["return_attention_scores"] = True
            found = twin([query, value, key], **arguments)
            expected = control([query, value, key], **arguments)
            for one, other in zip(found, expected, strict=True):
                assert error(one, other) < limit(dtype)
                assert one.dtype == dtype

    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize("stock", STOCK[:2])
    def test_gradients(self, stock, dtype):
        """Values of 60,000 make gradients of scores beyond float16."""
        tensors = [
            draw((BATCH, LENGTH, 64), m, dtype, seed)
            for seed, m in enumerate((0.2, 60000, 0.2))
        ]
        upstream = draw((BATCH, LENGTH, 64), 1, dtype, 3)
        found = {}
        for kind, policy in (
            (stock, "float32"),
            (TWINS[stock], f"mixed_{dtype}"),
        ):
            layer = kind(use_scale=False, dtype=policy)
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                output = tf.cast(layer(tensors), "float32")
                loss = tf.reduce_sum(output * upstream)
            found[policy] = tape.gradient(loss, tensors)
        for one, other in zip(*found.values(), strict=True):
            # Else the gradient itself would not fit.
            assert np.abs(one).max() < 65504
            assert error(other, one) < limit(dtype)

    @pytest.mark.parametrize("stock", STOCK[:2])
    @pytest.mark.parametrize("dtype", HALF)
    def test_dropout(self, stock, dtype):
        x = draw((BATCH, LENGTH, 8), 3, dtype)
        outputs = [
            kind(dropout=0.3, seed=7, use_scale=False, dtype=policy)(
                [x, x], training=True
            )
            for kind, policy in (
                (stock, "float32"),
                (TWINS[stock], f"mixed_{dtype}"),
            )
        ]
        assert error(outputs[1], outputs[0]) < limit(dtype)

    @pytest.mark.parametrize("stock", STOCK[:2])
    def test_one_query_for_all_samples(self, stock):
        query = draw((1, 4, 8), 3, "float16")
        value = draw((BATCH, LENGTH, 8), 3, "float16", seed=1)
        for tensors in ([query, value], [value, value[:1], value[:1]]):
            found = []
            for kind, policy in (
                (stock, "float32"),
                (TWINS[stock], "mixed_float16"),
            ):
                layer = kind(use_scale=False, dtype=policy)
                with tf.GradientTape() as tape:
                    tape.watch(tensors)
                    output = layer(tensors)
                    loss = tf.reduce_sum(tf.cast(output, "float32") ** 2)
                found.append([output, *tape.gradient(loss, tensors)])
            assert output.dtype == "float16"
            for expected, one in zip(*found, strict=True):
                assert error(one, expected) < limit("float16")


def called(layer, x, **kwargs):
    if isinstance(layer, tuple(HEADS)):
        return layer(x, x, **kwargs)
    return layer([x, x], **kwargs)


def make(kind, policy, **options):
    stock = stock_of(kind) or kind
    if stock is HEADS[0]:
        options = {"num_heads": 2, "key_dim": 4, **options}
    elif stock is HEADS[1]:
        options |= {
            "head_dim": 4,
            "num_query_heads": 4,
            "num_key_value_heads": 2,
        }
    return kind(**options, dtype=policy)


class TestTwins:
    def test_tables(self):
        assert len(TWINS) == 4
        for stock, twin in TWINS.items():
            assert issubclass(twin, stock)
            assert twin_of(stock) is twin
            assert stock_of(twin) is stock
            assert twin_of(twin) is stock_of(stock) is None
            assert twin.__name__ == stock.__name__
            name = keras.saving.get_registered_name(twin)
            assert name == f"tfmixed>{stock.__name__}"

            class Own(stock):
                pass

            assert twin_of(Own) is stock_of(Own) is None

    @pytest.mark.parametrize("stock", STOCK)
    def test_no_arguments_of_its_own(self, stock):
        assert TWINS[stock].__init__ is stock.__init__
        layer = make(stock, "mixed_float16", dropout=0.25, seed=3)
        twin = TWINS[stock].from_config(layer.get_config())
        assert twin.get_config() == layer.get_config()
        assert twin.dropout == 0.25

    @pytest.mark.parametrize("stock", STOCK)
    def test_change_of_class(self, stock):
        x = draw((BATCH, LENGTH, 16), 3, "bfloat16")
        layer = make(stock, "mixed_bfloat16")
        before = called(layer, x)
        state = set(vars(layer))
        layer.__class__ = TWINS[stock]
        twin = called(layer, x)
        anew = TWINS[stock].from_config(layer.get_config())
        called(anew, x)
        anew.set_weights(layer.get_weights())
        np.testing.assert_array_equal(array(called(anew, x)), array(twin))
        assert np.abs(array(twin) - array(before)).max() > 0
        assert set(vars(layer)) == state
        layer.__class__ = stock
        np.testing.assert_array_equal(array(called(layer, x)), array(before))

    @pytest.mark.parametrize("policy", ["float32", "float64"])
    @pytest.mark.parametrize("stock", STOCK)
    def test_other_dtypes_are_exactly_as_in_keras(self, stock, policy):
        x = draw((BATCH, LENGTH, 16), 3, policy)
        layer = make(stock, policy, dropout=0.3, seed=1)
        for kwargs in (
            {},
            {"use_causal_mask": True},
            {"return_attention_scores": True},
        ):
            layer.__class__ = stock
            expected = called(layer, x, **kwargs)
            layer.__class__ = TWINS[stock]
            found = called(layer, x, **kwargs)
            keras.tree.map_structure(
                np.testing.assert_array_equal, found, expected
            )

    @pytest.mark.parametrize(
        ("dtype", "jit"), [("float16", True), ("bfloat16", False)]
    )
    def test_compiled_model_of_unknown_shapes(self, dtype, jit):
        x = draw((BATCH, LENGTH, 8), 3, dtype)
        twins = [TWINS[stock] for stock in STOCK]
        outputs = []
        for kinds, policy in ((STOCK, "float32"), (twins, f"mixed_{dtype}")):
            keras.utils.set_random_seed(0)
            inputs = keras.Input((None, 8))
            hidden = inputs
            for kind in kinds:
                hidden += called(make(kind, policy), hidden)
            model = keras.Model(inputs, hidden)

            def step(x, model=model):
                with tf.GradientTape() as tape:
                    output = tf.cast(model(x), "float32")
                    loss = tf.reduce_mean(output**2)
                return output, *tape.gradient(loss, model.trainable_variables)

            if kinds is twins:
                shape = tf.TensorSpec((None, None, 8))
                step = tf.function(step, [shape], jit_compile=jit)
            output, *gradients = step(x)
            gradients = tf.concat([tf.reshape(g, -1) for g in gradients], 0)
            outputs.append([output, gradients])
        for expected, found in zip(*outputs, strict=True):
            assert error(found, expected) < limit(dtype, 4)

    def test_file_in_a_new_process(self, tmp_path):
        inputs = keras.Input((None, 8))
        hidden = inputs
        for stock in STOCK:
            hidden = called(make(TWINS[stock], "mixed_float16"), hidden)
        model = keras.Model(inputs, hidden)
        model.save(tmp_path / "model.keras")
        x = np.asarray(draw((BATCH, LENGTH, 8), 3, "float16"))
        np.save(tmp_path / "x.npy", x)
        code = f"""
import json, keras, numpy, tfmixed.layers.twins
model = keras.models.load_model({str(tmp_path / "model.keras")!r})
output = model.predict(numpy.load({str(tmp_path / "x.npy")!r}), verbose=0)
modules = [type(layer).__module__ for layer in model.layers[1:]]
print(json.dumps([modules, output.astype("float32").tolist()]))
"""
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
        )
        modules, output = json.loads(done.stdout.splitlines()[-1])
        assert modules == ["tfmixed.layers.attention"] * 4
        expected = model.predict(x, verbose=0)
        np.testing.assert_array_equal(output, expected.astype("float32"))


class TestPrivateParts:
    """Of Keras: what the twins override has the parameters that they expect."""

    @pytest.mark.parametrize(
        ("stock", "name", "parameters"),
        [
            (
                HEADS[0],
                "_compute_attention",
                "query key value attention_mask training "
                "return_attention_scores use_causal_mask",
            ),
            (
                HEADS[1],
                "_compute_attention",
                "query key value attention_mask training use_causal_mask",
            ),
            (layers.Attention, "_calculate_scores", "query key"),
            (layers.AdditiveAttention, "_calculate_scores", "query key"),
            (
                layers.Attention,
                "_apply_scores",
                "scores value scores_mask training",
            ),
        ],
    )
    def test_overridden_methods(self, stock, name, parameters):
        expected = ["self", *parameters.split()]
        twin = list(inspect.signature(getattr(TWINS[stock], name)).parameters)
        assert twin == expected
        found = list(inspect.signature(getattr(stock, name)).parameters)
        if expected[-1] == "use_causal_mask" != found[-1]:
            # Keras 3.10 does not have it yet.
            expected.pop()
        assert found == expected


@pytest.mark.parametrize("dtype", HALF)
def test_kernels_add_up_in_float32(dtype):
    """4,096 terms: added up in 16 bits they would end at 256 or 2,048."""
    weights = tf.ones((1, 2, 4096), "float32")
    value = tf.ones((1, 4096, 3), dtype)
    assert array(products.combine(weights, value)).max() == 4096
