"""Every model of keras.applications: prepared, trained, and taken back."""

import inspect
import re

import keras
import numpy as np
import pytest
from support import numpy_of

import tfmixed

# The smallest input that the architecture takes.
SIZES = {"InceptionV3": 75, "InceptionResNetV2": 75, "Xception": 71}
# One of each family, under one policy or both; the rest is marked `long`.
FAMILIES = {
    "MobileNetV3Small": ("mixed_float16", "mixed_bfloat16"),
    "ResNet50": ("mixed_bfloat16",),
    "MobileNet": ("mixed_float16",),
    "MobileNetV2": ("mixed_bfloat16",),
    "EfficientNetB0": ("mixed_float16",),
    "EfficientNetV2B0": ("mixed_bfloat16",),
    "DenseNet121": ("mixed_float16",),
    "NASNetMobile": ("mixed_bfloat16",),
    "Xception": ("mixed_bfloat16",),
    "InceptionV3": ("mixed_float16",),
    "InceptionResNetV2": ("mixed_bfloat16",),
    "ResNet50V2": ("mixed_float16",),
    "VGG16": ("mixed_bfloat16",),
    "ConvNeXtTiny": ("mixed_float16",),
}
# Untrained, with the seed of the tests, they amplify any rounding: by so much
# the probabilities may be off. float32 itself is off by 0.01, 0.02 and 1 when
# weights and input are rounded to the format before.
AMPLIFYING = {
    ("ResNet50V2", "mixed_bfloat16"): 0.06,
    ("ResNet101V2", "mixed_bfloat16"): 0.06,
    ("EfficientNetV2L", "mixed_float16"): 1.0,
    ("EfficientNetV2L", "mixed_bfloat16"): 1.0,
}
POLICIES = ("mixed_float16", "mixed_bfloat16")
FAST = ("VGG16",)


def models():
    """All model functions of keras.applications that exist here."""
    return sorted(
        name
        for name, value in vars(keras.applications).items()
        if inspect.isfunction(value) and name[0].isupper()
    )


def parameters():
    for name in models():
        for policy in POLICIES:
            in_suite = policy in FAMILIES.get(name, ())
            mark = pytest.mark.slow if in_suite else pytest.mark.long
            marks = [] if in_suite and name in FAST else [mark]
            yield pytest.param(name, policy, marks=marks)


def built(name):
    size = SIZES.get(name, 32)
    return getattr(keras.applications, name)(
        weights=None, input_shape=(size, size, 3), classes=10
    )


def images(model):
    shape = (2, *model.input_shape[1:])
    return np.random.default_rng(0).uniform(0, 255, shape).astype("float32")


def family(name):
    """The name without depth and size: ResNet152V2 is one of ResNetV2."""
    name = re.sub(r"^(ResNet|DenseNet|VGG)\d+", r"\1", name)
    return re.sub(r"(Small|X?Large|Tiny|Base|Mobile|B\d|[SML])$", "", name)


def test_every_family_is_in_the_suite():
    ours = {family(name) for name in FAMILIES}
    assert {family(name) for name in models()} - ours == set()


@pytest.mark.parametrize(("name", "policy"), list(parameters()))
def test_there_trained_and_back(name, policy):
    model = built(name)
    x = images(model)
    exact = keras.ops.convert_to_numpy(model(x))
    prepared = tfmixed.prepare(model, policy)
    rough = prepared(x)
    assert keras.backend.standardize_dtype(rough.dtype) == "float32"
    assert prepared.output_shape == model.output_shape
    assert [v.shape for v in prepared.weights] == [
        v.shape for v in model.weights
    ]
    rough = keras.ops.convert_to_numpy(rough)
    # Probabilities; float16 is held to the same part of the largest one.
    scale = np.abs(exact).max() if policy == "mixed_float16" else 1.0
    tolerance = AMPLIFYING.get((name, policy), 1e-2)
    assert np.abs(exact - rough).max() <= tolerance * scale
    half = policy.removeprefix("mixed_")
    assert any(layer.compute_dtype == half for layer in prepared.layers)

    back = tfmixed.to_float32(prepared)
    assert type(back) is type(model)
    assert back.get_config() == model.get_config()
    for one, other in zip(
        numpy_of(model.weights), numpy_of(back.weights), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(exact, keras.ops.convert_to_numpy(back(x)))

    # Untrained, with two images whose last feature maps are one pixel,
    # gradients reach 5e7 in float32, too: float16 cannot hold that at any
    # scale, and without clipping the second step starts from wild weights.
    sgd = keras.optimizers.SGD(1e-3, clipnorm=1.0)
    optimizer = tfmixed.LossScaleOptimizer(sgd, 64.0)
    # To trace the larger ones takes longer than to run them.
    prepared.compile(
        optimizer, "sparse_categorical_crossentropy", run_eagerly=True
    )
    for _ in range(2):
        loss = prepared.train_on_batch(x, np.array([1, 2]))
        assert np.isfinite(loss)
    # In float32 the gradients of the untrained EfficientNetV2L reach 1e34, and
    # their norm is infinite: such steps are skipped in every format.
    if policy == "mixed_bfloat16" and name != "EfficientNetV2L":
        assert int(prepared.optimizer.skipped_steps) == 0
