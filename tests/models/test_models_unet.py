"""The U-Net: sizes, skips, dtypes, preparation."""

import keras
import numpy as np
import pytest

import tfmixed
from models.unet import unet

SMALL = {"input_shape": (8, 12, 2), "classes": 3, "widths": (4, 6, 8)}


def images(size=2):
    random = np.random.default_rng(0)
    return random.normal(size=(size, 8, 12, 2)).astype("float32")


@pytest.mark.parametrize(
    ("shape", "widths"),
    [((8, 12, 2), (4, 6, 8)), ((4, 4, 1), (4, 6)), ((3, 5, 1), (4,))],
)
def test_output_has_the_size_of_the_input(shape, widths):
    model = unet(input_shape=shape, classes=3, widths=widths)
    assert model.output_shape == (None, *shape[:2], 3)
    outputs = np.asarray(model(np.ones((2, *shape), "float32")))
    assert outputs.shape == (2, *shape[:2], 3)
    np.testing.assert_allclose(outputs.sum(-1), 1, atol=1e-5)


def test_each_stage_works_at_half_the_size():
    model = unet(**SMALL)
    for stage, size in ((0, (8, 12)), (1, (4, 6)), (2, (2, 3))):
        output = model.get_layer(f"down{stage}_1_relu").output
        assert output.shape[1:] == (*size, SMALL["widths"][stage])
    for stage in (0, 1):
        joined = model.get_layer(f"up{stage}_skip").output
        assert joined.shape[-1] == 2 * SMALL["widths"][stage]


def silence(model, name):
    """Makes a layer give zeros."""
    layer = model.get_layer(name)
    layer.set_weights([np.zeros_like(x) for x in layer.get_weights()])


def test_detail_comes_by_the_skip_and_context_from_below():
    model = unet(**SMALL, classifier_activation=None)
    x = images(1)
    changed = x.copy()
    changed[0, 0, 0] += 1
    far = (0, 7, 11)
    differs = np.asarray(model(changed)) != np.asarray(model(x))
    # Four convolutions of 3x3 see four pixels far; only the way through the
    # smallest maps reaches the other corner.
    assert differs[far].any()
    silence(model, "up0_transpose")
    moved = np.abs(np.asarray(model(changed)) - np.asarray(model(x)))
    assert moved[0, 0, 0].max() > 1e-6
    assert moved[far].max() == 0


def test_pixels_of_the_transposed_convolution_do_not_overlap():
    model = unet(**SMALL)
    layer = model.get_layer("up0_transpose")
    random = np.random.default_rng(0)
    kernel, bias = random.normal(size=(2, 2, 4, 6)), np.arange(4.0)
    layer.set_weights([kernel, bias])
    x = random.normal(size=(1, 4, 6, 6)).astype("float32")
    expected = np.einsum("bhwc,ijfc->bhiwjf", x, kernel).reshape(1, 8, 12, 4)
    np.testing.assert_allclose(layer(x), expected + bias, atol=1e-4)


@pytest.mark.parametrize(
    "policy", ["float32", "mixed_bfloat16", "mixed_float16"]
)
def test_dtypes(policy):
    keras.config.set_dtype_policy(policy)
    model = unet(**SMALL)
    assert model.outputs[0].dtype == "float32"
    assert np.asarray(model(images())).dtype == np.float32
    half = policy.removeprefix("mixed_")
    for name in ("down0_0_conv", "up0_transpose", "up0_skip", "up0_1_relu"):
        assert model.get_layer(name).compute_dtype == half
        assert model.get_layer(name).output.dtype == half


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_prepared_model_trains(policy):
    model = unet(**SMALL)
    prepared = tfmixed.prepare(model, policy)
    half = policy.removeprefix("mixed_")
    assert prepared.get_layer("up0_transpose").compute_dtype == half
    x = images(8)
    np.testing.assert_allclose(prepared(x), model(x), atol=0.03)
    np.testing.assert_array_equal(tfmixed.to_float32(prepared)(x), model(x))
    prepared.compile("adam", "sparse_categorical_crossentropy")
    history = prepared.fit(x, (x[..., 0] > 0).astype("int32"), verbose=0)
    assert np.isfinite(history.history["loss"]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"input_shape": (8, 10, 2)},
            r"`unet` got `input_shape=\(8, 10, 2\)` and 3 stages.*multiples "
            "of 4",
        ),
        ({"input_shape": (6, 8, 2)}, "multiples of 4"),
        ({"widths": ()}, r"`unet` got `widths=\(\)`"),
        ({"classes": 0}, "`unet` got `classes=0`"),
        ({"input_shape": (8, 8)}, r"input_shape=\(32, 32, 3\)"),
    ],
)
def test_bad_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        unet(**{**SMALL, **arguments})
