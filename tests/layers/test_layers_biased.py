"""Dense and convolution twins: Keras's results, and exact bias gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmixed
from tfmixed.layers.dense import _contracted
from tfmixed.layers.twins import FASTER

L = keras.layers
SEQUENCE, IMAGE, VOLUME = (16, 64, 8), (16, 16, 16, 8), (8, 8, 8, 8, 4)

# Enough rows that a sum in 16 bits is off by a percent and more.
LAYERS = {
    "dense": (L.Dense, {"units": 16}, SEQUENCE),
    "dense relu": (L.Dense, {"units": 16, "activation": "relu"}, SEQUENCE),
    "dense gelu": (L.Dense, {"units": 16, "activation": "gelu"}, SEQUENCE),
    "dense of two axes": (L.Dense, {"units": 16}, (1024, 8)),
    "dense without bias": (
        L.Dense,
        {"units": 16, "use_bias": False, "activation": "silu"},
        SEQUENCE,
    ),
    "einsum": (
        L.EinsumDense,
        {"equation": "abc,cd->abd", "output_shape": (None, 16)},
        SEQUENCE,
    ),
    "einsum into heads": (
        L.EinsumDense,
        {
            "equation": "abc,cde->abde",
            "output_shape": (None, 2, 6),
            "bias_axes": "de",
        },
        SEQUENCE,
    ),
    "einsum out of heads": (
        L.EinsumDense,
        {
            "equation": "abcd,cde->abe",
            "output_shape": (None, 6),
            "bias_axes": "e",
        },
        (16, 64, 2, 4),
    ),
    "einsum with another bias": (
        L.EinsumDense,
        {
            "equation": "abc,cde->abde",
            "output_shape": (None, 2, 6),
            "bias_axes": "e",
        },
        SEQUENCE,
    ),
    "einsum with a bias of positions": (
        L.EinsumDense,
        {
            "equation": "abc,cd->abd",
            "output_shape": (64, 6),
            "bias_axes": "bd",
        },
        SEQUENCE,
    ),
    "einsum that transposes": (
        L.EinsumDense,
        {
            "equation": "abc,cd->adb",
            "output_shape": (6, None),
            "bias_axes": "d",
        },
        SEQUENCE,
    ),
    "einsum with an ellipsis": (
        L.EinsumDense,
        {
            "equation": "...c,cd->...d",
            "output_shape": (6,),
            "bias_axes": "d",
            "activation": "relu",
        },
        SEQUENCE,
    ),
    "causal": (
        L.Conv1D,
        {"filters": 6, "kernel_size": 3, "padding": "causal"},
        SEQUENCE,
    ),
    **{
        name: (
            getattr(L, name),
            {"kernel_size": 3, "padding": "same"}
            | ({} if "Depthwise" in name else {"filters": 6}),
            shape,
        )
        for name, shape in (
            ("Conv1D", SEQUENCE),
            ("Conv1DTranspose", SEQUENCE),
            ("Conv2D", IMAGE),
            ("Conv2DTranspose", IMAGE),
            ("Conv3D", VOLUME),
            ("Conv3DTranspose", VOLUME),
            ("DepthwiseConv1D", SEQUENCE),
            ("DepthwiseConv2D", IMAGE),
            ("SeparableConv1D", SEQUENCE),
            ("SeparableConv2D", IMAGE),
        )
    },
    "Conv2D relu": (
        L.Conv2D,
        {"filters": 6, "kernel_size": 3, "activation": "relu"},
        IMAGE,
    ),
    "pointwise": (
        L.Conv2D,
        {"filters": 6, "kernel_size": 1, "activation": "gelu"},
        IMAGE,
    ),
    "pointwise relu": (
        L.Conv1D,
        {"filters": 6, "kernel_size": 1, "activation": "relu"},
        SEQUENCE,
    ),
    "pointwise without bias": (
        L.Conv3D,
        {"filters": 6, "kernel_size": 1, "use_bias": False},
        VOLUME,
    ),
    "pointwise with strides": (
        L.Conv2D,
        {"filters": 6, "kernel_size": 1, "strides": 2},
        IMAGE,
    ),
    "pointwise in groups": (
        L.Conv2D,
        {"filters": 6, "kernel_size": 1, "groups": 2},
        IMAGE,
    ),
    "in groups": (
        L.Conv2D,
        {"filters": 6, "kernel_size": 3, "groups": 2},
        IMAGE,
    ),
    "dilated": (
        L.Conv2D,
        {"filters": 6, "kernel_size": 3, "dilation_rate": 2},
        IMAGE,
    ),
    "strided": (
        L.Conv2D,
        {"filters": 6, "kernel_size": 3, "strides": 2, "activation": "gelu"},
        IMAGE,
    ),
}


MODES = ["eager", "graph", "xla"]
# Each mode in one format at least; the rest is for long runs.
USUAL = {"float16": ["eager", "xla"], "bfloat16": ["eager", "graph"]}


def combinations():
    """Layers in each format and mode; of the first of a kind all are run."""
    seen = set()
    for name, (kind, *_) in LAYERS.items():
        for dtype in USUAL:
            for mode in MODES:
                is_run = kind not in seen or mode in USUAL[dtype]
                marks = () if is_run else pytest.mark.long
                yield pytest.param(name, dtype, mode, marks=marks)
        seen.add(kind)


def twin_of(layer):
    layer.__class__ = FASTER[type(layer)]
    return layer


def gradients(layer, x, weights):
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = layer(x)
        loss = tf.reduce_sum(tf.cast(outputs, "float32") * weights)
    variables = [v.value for v in layer.trainable_variables]
    return [outputs, *tape.gradient(loss, [x, *variables])]


def distance(result, exact):
    result, exact = (tf.cast(v, tf.float64).numpy() for v in (result, exact))
    return np.linalg.norm(result - exact) / np.linalg.norm(exact)


def pair(name, dtype, stock=False):
    """A float32 layer, and its 16-bit twin (or stock) with its weights."""
    kind, arguments, shape = LAYERS[name]
    exact = kind(**arguments)
    rough = kind(**arguments, dtype=f"mixed_{dtype}")
    rough = rough if stock else twin_of(rough)
    random = np.random.default_rng(0)
    x = tf.cast(tf.constant(random.normal(size=shape), "float32"), dtype)
    x = tf.cast(x, "float32")
    outputs = exact(x)
    rough(x)
    values = [random.normal(size=v.shape) * 0.3 for v in exact.weights]
    exact.set_weights(values)
    rough.set_weights(values)
    # A mean that is not 0, so that sums are large.
    weights = random.normal(size=outputs.shape) + 1.0
    return exact, rough, x, tf.constant(weights, "float32")


@pytest.mark.parametrize(("name", "dtype", "mode"), list(combinations()))
def test_outputs_and_gradients_are_those_of_float32(name, dtype, mode):
    exact, rough, x, weights = pair(name, dtype)
    function = gradients
    if mode != "eager":
        function = tf.function(gradients, jit_compile=mode == "xla")
    results = function(rough, x, weights)
    assert results[0].dtype == dtype
    exact_results = gradients(exact, x, weights)
    # Convolutions of float16 are no better than those of bfloat16 on a CPU.
    # Where rounding moves a number across the bend of a ReLU, the gradient of
    # a single number is another; the sum of thousands is not.
    bends = exact.activation is keras.activations.relu
    for index, result in enumerate(results):
        tolerance = 0.1 if index and bends else 0.016
        assert distance(result, exact_results[index]) < tolerance
    if exact.bias is not None:
        assert distance(results[-1], exact_results[-1]) < 0.01


def test_stock_sums_in_16_bits():
    """If this fails, TensorFlow has mended it, and the twin can go."""
    exact, rough, x, weights = pair("DepthwiseConv2D", "bfloat16", stock=True)
    right = gradients(exact, x, weights)[-1]
    assert distance(gradients(rough, x, weights)[-1], right) > 0.05


@pytest.mark.parametrize("name", LAYERS)
def test_another_dtype_computes_as_keras_does(name):
    exact, _, x, weights = pair(name, "bfloat16")
    before = gradients(exact, x, weights)
    after = gradients(twin_of(exact), x, weights)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("equation", "contracted"),
    [
        ("ab,bc->ac", 1),
        ("abc,cd->abd", 1),
        ("abc, cde -> abde", 1),
        ("abcd,cde->abe", 2),
        ("abc,bcd->ad", 2),
        ("...x,xy->...y", 1),
        ("abc,cd->adb", 0),
        ("abc,cd->abcd", 0),
        ("ab,ab->ab", 0),
        ("aab,bc->aac", 0),
        ("abc,dc->abd", 0),
        ("ab,cd->abcd", 0),
        ("ab,b->a", 0),
        ("...x,...xy->...y", 0),
        ("abc,abd->abcd", 0),
    ],
)
def test_which_equations_are_one_product(equation, contracted):
    assert _contracted(equation) == contracted


@pytest.mark.parametrize("shape", [(None, None, 8), (None, 5, 8), (3, None, 8)])
def test_unknown_sizes(shape):
    layer = twin_of(L.Dense(4, activation="gelu", dtype="mixed_bfloat16"))
    layer.build(shape)
    spec = tf.TensorSpec(shape, tf.float32)
    call = tf.function(layer, input_signature=[spec])
    x = np.random.default_rng(0).normal(size=(3, 5, 8)).astype("float32")
    outputs = call(x)
    assert outputs.shape == (3, 5, 4)
    exact = L.Dense(4, activation="gelu")
    exact.build(shape)
    exact.set_weights(layer.get_weights())
    assert distance(outputs, exact(x)) < 0.01
    assert call(x[:, :0] if shape[1] is None else x).shape[0] == 3


@pytest.mark.parametrize("shape", [(None, None, None, 8), (2, 4, 4, 8)])
@pytest.mark.parametrize("strides", [1, 2])
def test_a_pointwise_convolution_of_any_size(shape, strides):
    layer = twin_of(L.Conv2D(4, 1, strides=strides, dtype="mixed_bfloat16"))
    layer.build(shape)
    call = tf.function(layer, input_signature=[tf.TensorSpec(shape)])
    x = np.random.default_rng(0).normal(size=(2, 4, 4, 8)).astype("float32")
    exact = L.Conv2D(4, 1, strides=strides)
    exact.build(shape)
    exact.set_weights(layer.get_weights())
    outputs = call(x)
    assert outputs.shape == (2, 4 // strides, 4 // strides, 4)
    assert distance(outputs, exact(x)) < 0.01


def test_an_empty_batch():
    layer = twin_of(L.Dense(4, activation="relu", dtype="mixed_bfloat16"))
    x = tf.zeros((0, 8))
    layer(x)
    _, of_x, _, of_bias = gradients(layer, x, tf.zeros((0, 4)))
    assert of_x.shape == (0, 8)
    np.testing.assert_array_equal(tf.cast(of_bias, "float32"), [0.0] * 4)


@pytest.mark.parametrize("kind", [L.Dense, L.EinsumDense])
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.enable_lora(2),
        lambda layer: layer.quantize("int8", type_check=False),
    ],
)
def test_lora_and_quantization_are_left_to_keras(kind, change):
    arguments = {"units": 8}
    if kind is L.EinsumDense:
        arguments = {"equation": "ab,bc->ac", "output_shape": 8}
    x = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
    stock = kind(**arguments, dtype="mixed_bfloat16")
    ours = twin_of(kind(**arguments, dtype="mixed_bfloat16"))
    stock(x)
    ours(x)
    ours.set_weights(stock.get_weights())
    change(stock)
    change(ours)
    for one, other in zip(ours.weights, stock.weights, strict=True):
        one.assign(other)
    np.testing.assert_array_equal(
        tf.cast(ours(x), "float32"), tf.cast(stock(x), "float32")
    )


def test_a_prepared_model_trains_its_biases_as_float32_does():
    random = np.random.default_rng(0)
    x = random.normal(size=(8, 16, 16, 4)).astype("float32")
    y = random.normal(size=(8, 1)).astype("float32") + 3.0

    def model():
        keras.utils.set_random_seed(1)
        return keras.Sequential(
            [
                keras.Input((16, 16, 4)),
                L.DepthwiseConv2D(3, name="depthwise"),
                L.Conv2DTranspose(4, 3, name="transposed"),
                L.GlobalAveragePooling2D(),
                L.Dense(1),
            ]
        )

    exact, rough = model(), tfmixed.prepare(model(), "mixed_bfloat16")
    for trained in (exact, rough):
        trained.compile(keras.optimizers.SGD(0.1), "mse")
        trained.fit(x, y, epochs=3, batch_size=8, shuffle=False, verbose=0)
    for name in ("depthwise", "transposed"):
        bias = rough.get_layer(name).bias.numpy()
        assert distance(bias, exact.get_layer(name).bias.numpy()) < 0.02


def test_projections_of_attention_are_products_of_matrices():
    inputs = keras.Input((6, 8))
    outputs = L.MultiHeadAttention(2, 4)(inputs, inputs)
    model = keras.Model(inputs, L.Dense(1)(outputs))
    prepared = tfmixed.prepare(model, "mixed_bfloat16")
    attention = prepared.layers[1]
    prepared(np.ones((1, 6, 8)))
    assert type(attention.query_dense) is FASTER[L.EinsumDense]
    back = tfmixed.to_float32(prepared)
    assert type(back.layers[1].query_dense) is L.EinsumDense


def test_it_is_saved_and_loaded(tmp_path):
    model = keras.Sequential([keras.Input((8,)), L.Dense(4), L.Dense(1)])
    prepared = tfmixed.prepare(model, "mixed_bfloat16")
    x = np.ones((2, 8), "float32")
    prepared.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[0]) is FASTER[L.Dense]
    np.testing.assert_array_equal(loaded(x), prepared(x))
