"""The reference builders: shapes, dtypes, arguments, training, files."""

import keras
import numpy as np
import pytest

from models.convnet import convnet
from models.gpt import TiedEmbedding
from models.gpt import gpt
from models.lstm import lstm
from models.mlp import mlp
from models.mlp import tiny_mlp
from models.resnet import resnet
from models.resnet import resnet50
from models.transformer import transformer
from models.unet import unet
from models.vit import vit

MIXED = ("mixed_float16", "mixed_bfloat16")

# Each builder at a size that trains in a second.
SMALL = {
    "mlp": (mlp, {"input_shape": (6, 6, 1), "classes": 3, "hidden": (8, 8)}),
    "tiny_mlp": (tiny_mlp, {"input_shape": (6, 6, 1), "classes": 3}),
    "convnet": (
        convnet,
        {"input_shape": (8, 8, 1), "classes": 3, "widths": (4, 8)},
    ),
    "resnet": (
        resnet,
        {"input_shape": (8, 8, 1), "classes": 3, "depth": 8, "width": 4},
    ),
    "transformer": (
        transformer,
        {
            "sequence_length": 6,
            "vocabulary_size": 11,
            "num_blocks": 1,
            "width": 8,
            "num_heads": 2,
        },
    ),
    "gpt": (
        gpt,
        {
            "sequence_length": 6,
            "vocabulary_size": 11,
            "num_blocks": 1,
            "width": 8,
            "num_heads": 2,
        },
    ),
    "vit": (
        vit,
        {
            "input_shape": (8, 8, 1),
            "classes": 3,
            "patch_size": 4,
            "num_blocks": 1,
            "width": 8,
            "num_heads": 2,
        },
    ),
    "unet": (
        unet,
        {"input_shape": (8, 8, 2), "classes": 3, "widths": (4, 8)},
    ),
    "lstm": (
        lstm,
        {
            "sequence_length": 6,
            "vocabulary_size": 11,
            "num_layers": 1,
            "width": 8,
            "embedding_width": 4,
        },
    ),
}


def build(name, **kwargs):
    builder, small = SMALL[name]
    return builder(**{**small, **kwargs})


def batch(model, size=4):
    """A batch of inputs and labels that fits the model."""
    random = np.random.default_rng(0)
    shape = (size, *model.input_shape[1:])
    classes = model.output_shape[-1]
    if model.inputs[0].dtype == "int32":
        x = random.integers(0, classes, shape).astype("int32")
    else:
        x = random.normal(size=shape).astype("float32")
    y = random.integers(0, classes, (size, *model.output_shape[1:-1]))
    return x, y.astype("int32")


@pytest.mark.parametrize(
    ("builder", "input_shape", "output_shape", "parameters"),
    [
        (mlp, (None, 28, 28, 1), (None, 10), 14_217_226),
        (tiny_mlp, (None, 8, 8, 1), (None, 10), 3_466),
        (convnet, (None, 28, 28, 1), (None, 10), 1_149_514),
        (resnet, (None, 28, 28, 1), (None, 10), 273_754),
        (transformer, (None, 128), (None, 128, 97), 2_452_321),
        (gpt, (None, 128), (None, 128, 97), 1_793_664),
        (vit, (None, 28, 28, 1), (None, 10), 803_082),
        (unet, (None, 32, 32, 3), (None, 32, 32, 2), 468_482),
        (lstm, (None, None), (None, None, 97), 885_153),
    ],
)
def test_default_model(builder, input_shape, output_shape, parameters):
    model = builder()
    assert model.input_shape == input_shape
    assert model.output_shape == output_shape
    assert model.count_params() == parameters


@pytest.mark.parametrize("name", SMALL)
def test_small_model_shapes(name):
    model = build(name)
    x, y = batch(model)
    probabilities = model.predict_on_batch(x)
    assert probabilities.shape == (*y.shape, model.output_shape[-1])
    np.testing.assert_allclose(probabilities.sum(-1), 1, atol=1e-5)
    assert model.name.startswith(name)


@pytest.mark.parametrize("policy", MIXED)
@pytest.mark.parametrize("name", SMALL)
def test_mixed_dtypes(name, policy):
    keras.config.set_dtype_policy(policy)
    model = build(name)
    half = policy.removeprefix("mixed_")
    head = model.get_layer("predictions")
    assert head.compute_dtype == "float32"
    assert model.outputs[0].dtype == "float32"
    # `weights`, because the `variables` hold integer seeds as well.
    assert {weight.dtype for weight in model.weights} == {"float32"}
    # All the rest does compute in 16 bits, and its result reaches the head.
    # A language model's norms and its one matrix have tests of their own.
    others = [
        layer
        for layer in model.layers
        if layer.weights
        and layer is not head
        and not isinstance(layer, keras.layers.RMSNormalization | TiedEmbedding)
    ]
    assert {layer.compute_dtype for layer in others} == {half}
    assert name == "gpt" or head.input.dtype == half
    x, _ = batch(model)
    assert keras.backend.standardize_dtype(model(x).dtype) == "float32"


@pytest.mark.parametrize("policy", MIXED)
@pytest.mark.parametrize("name", SMALL)
def test_mixed_output_is_close_to_float32(name, policy):
    reference = build(name, classifier_activation=None)
    keras.config.set_dtype_policy(policy)
    model = build(name, classifier_activation=None)
    model.set_weights(reference.get_weights())
    x, _ = batch(model)
    expected, actual = np.asarray(reference(x)), np.asarray(model(x))
    tolerance = {"mixed_float16": 0.01, "mixed_bfloat16": 0.06}[policy]
    np.testing.assert_allclose(
        actual, expected, atol=tolerance * np.abs(expected).max()
    )
    # The same to the last bit would mean that nothing ran in 16 bits.
    assert not np.array_equal(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("policy", MIXED)
@pytest.mark.parametrize("name", SMALL)
def test_trains_two_steps(name, policy):
    keras.config.set_dtype_policy(policy)
    model = build(name)
    before = model.get_weights()
    optimizer = keras.optimizers.SGD(0.1)
    if policy == "mixed_float16":
        # From a low scale: the first one of Keras often overflows.
        optimizer = keras.optimizers.LossScaleOptimizer(
            optimizer, initial_scale=64.0
        )
    model.compile(optimizer, "sparse_categorical_crossentropy")
    x, y = batch(model)
    losses = [float(model.train_on_batch(x, y)) for _ in range(2)]
    assert np.isfinite(losses).all()
    after = model.get_weights()
    changed = [
        not np.array_equal(old, new)
        for old, new in zip(before, after, strict=True)
    ]
    assert all(changed), "a weight got no gradient"


# Keras 3.10 gives a loaded model a list of one input, and grumbles.
@pytest.mark.filterwarnings("ignore:.*structure of .inputs. doesn't match")
@pytest.mark.parametrize("name", SMALL)
def test_keras_file_round_trip(name, tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = build(name)
    x, _ = batch(model)
    expected = np.asarray(model(x))
    path = tmp_path / "model.keras"
    model.save(path)
    keras.config.set_dtype_policy("float32")
    loaded = keras.models.load_model(path)
    np.testing.assert_array_equal(np.asarray(loaded(x)), expected)
    assert loaded.get_layer("predictions").compute_dtype == "float32"


@pytest.mark.parametrize("name", SMALL)
def test_weights_from_a_path(name, tmp_path):
    model = build(name)
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    loaded = build(name, weights=path)
    for old, new in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("name", SMALL)
def test_missing_weights_file(name):
    with pytest.raises(ValueError, match=r"weights='imagenet'.*no such file"):
        build(name, weights="imagenet")


@pytest.mark.parametrize("name", ["mlp", "transformer", "vit", "lstm"])
def test_dropout_acts_in_training_only(name):
    model = build(name, dropout=0.5)
    x, _ = batch(model)
    quiet = np.asarray(model(x))
    np.testing.assert_array_equal(np.asarray(model(x)), quiet)
    assert not np.array_equal(np.asarray(model(x, training=True)), quiet)


@pytest.mark.parametrize("name", ["transformer", "gpt", "lstm"])
def test_no_token_sees_the_future(name):
    model = build(name)
    x, _ = batch(model)
    changed = x.copy()
    changed[:, 3] = (changed[:, 3] + 1) % 11
    before, after = np.asarray(model(x)), np.asarray(model(changed))
    np.testing.assert_allclose(after[:, :3], before[:, :3], atol=1e-6)
    assert not np.allclose(after[:, 3:], before[:, 3:], atol=1e-6)


def test_transformer_knows_positions():
    model = build("transformer")
    x = np.zeros((1, 6), "int32")
    output = np.asarray(model(x))[0]
    assert not np.allclose(output[0], output[1], atol=1e-6)


def test_attention_survives_a_product_above_the_float16_range():
    keras.config.set_dtype_policy("mixed_float16")
    model = build("transformer", width=128)
    attention = model.get_layer("block0_attention")
    # Query and key of 64 in a head of width 64: their product, 262,144, is
    # past 65,504, and within it once the query is divided by 8.
    weights = attention.get_weights()
    for index in (0, 2):
        weights[index] = np.zeros_like(weights[index])
        weights[index + 1] = np.full_like(weights[index + 1], 64.0)
    attention.set_weights(weights)
    x, _ = batch(model)
    assert np.isfinite(np.asarray(model(x))).all()


def test_resnet_depth_counts_layers():
    model = resnet((8, 8, 1), depth=20, width=2)
    assert model.name == "resnet20"
    convolutions = [
        layer
        for layer in model.layers
        if isinstance(layer, keras.layers.Conv2D)
        and "shortcut" not in layer.name
    ]
    assert len(convolutions) == 19  # the classifier is the twentieth


def kernels(model):
    """The shapes of all kernels but those of stem and classifier."""
    shapes = [
        tuple(layer.kernel.shape)
        for layer in model.layers
        if isinstance(layer, keras.layers.Conv2D)
    ]
    return sorted(shapes[1:])


@pytest.mark.slow
def test_resnet50_has_the_kernels_of_the_applications():
    model = resnet50((32, 32, 3), classes=7)
    stock = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3))
    assert kernels(model) == kernels(stock)
    assert model.name == "resnet50"
    assert model.output_shape == (None, 7)
    # Stem and stages halve a size of 32 four times, not five.
    assert model.get_layer("stage3_block2_out").output.shape[1:3] == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", *MIXED])
def test_resnet50_computes(policy):
    keras.config.set_dtype_policy(policy)
    model = resnet50((8, 8, 1), classes=3, width=2)
    head = model.get_layer("predictions")
    assert head.input.dtype == policy.removeprefix("mixed_")
    assert head.input.shape == (None, 2 * 8 * 4)
    x, _ = batch(model)
    outputs = np.asarray(model(x))
    assert outputs.dtype == np.float32
    np.testing.assert_allclose(outputs.sum(-1), 1, atol=1e-5)


def test_resnet_blocks_add_what_came_in():
    # With the last normalization of a block at zero, only the shortcut is
    # left: the block hands on what the block before gave out.
    model = resnet((8, 8, 1), depth=8, width=2)
    deep = resnet50((8, 8, 1), width=1)
    for network, block, before in (
        (model, "stage0_block0", "stem_relu"),
        (deep, "stage3_block2", "stage3_block1_out"),
    ):
        last = network.get_layer(f"{block}_1_bn")
        gamma, *others = last.get_weights()
        last.set_weights([gamma * 0, *others])
        outputs = [
            network.get_layer(name).output for name in (f"{block}_out", before)
        ]
        x, _ = batch(network)
        after, given = keras.Model(network.input, outputs)(x)
        np.testing.assert_array_equal(after, given)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("mlp", {"hidden": (8, 0)}, r"`mlp` got `hidden=\(8, 0\)`.*positive"),
        ("mlp", {"classes": 0}, "`mlp` got `classes=0`.*`classes=64`"),
        ("mlp", {"classes": True}, "classes=True"),
        ("mlp", {"input_shape": ()}, r"input_shape=\(\)"),
        ("mlp", {"dropout": 1.0}, "dropout=1.0.*without, 1"),
        ("tiny_mlp", {"classes": 2.5}, "classes=2.5"),
        ("convnet", {"widths": ()}, r"`convnet` got `widths=\(\)`"),
        ("convnet", {"classes": -1}, "classes=-1"),
        (
            "convnet",
            {"input_shape": (8, 8)},
            r"input_shape=\(8, 8\)`.*3 positive.*input_shape=\(28, 28, 1\)",
        ),
        (
            "convnet",
            {"input_shape": (8, 2, 1), "widths": (4, 8)},
            r"input_shape=\(8, 2, 1\)` and 2 stages.*at least 4",
        ),
        ("resnet", {"depth": 21}, r"depth=21`.*20, 32, 44, 56 or 110"),
        ("resnet", {"depth": 2}, "depth=2`"),
        ("resnet", {"depth": 101}, "depth=101`"),
        ("resnet", {"width": 0}, "width=0"),
        ("resnet", {"input_shape": None}, "input_shape=None"),
        (
            "transformer",
            {"width": 10, "num_heads": 4},
            r"width=10` and `num_heads=4`.*`width=8`",
        ),
        ("transformer", {"num_blocks": 0}, "num_blocks=0"),
        ("transformer", {"dropout": -0.1}, "dropout=-0.1"),
        ("lstm", {"num_layers": 0}, "`lstm` got `num_layers=0`"),
        ("lstm", {"sequence_length": 0}, "sequence_length=0"),
        ("lstm", {"dropout": 2}, "dropout=2"),
    ],
)
def test_bad_argument(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        build(name, **arguments)
