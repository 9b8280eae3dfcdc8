"""The GAN: two guarded optimizers, its distance, files, compare."""

import subprocess
import sys

import keras
import numpy as np
import pytest

import tfmixed
from models.frechet import FrechetDistance
from models.gan import gan
from models.images import latent_mnist5k
from tfmixed.report.candidate import Recipe
from tfmixed.report.candidate import build
from tfmixed.report.candidate import skipped_steps
from tfmixed.report.candidate import without_effect
from tfmixed.report.dataset import load_data
from tfmixed.report.measure import higher_is_better
from tfmixed.report.measure import score_name
from tfmixed.report.sources import find_source

SMALL = {"input_shape": (8, 8, 1), "latent_size": 4, "width": 4}
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")


def small():
    return gan(**SMALL)


def batch(size=8):
    random = np.random.default_rng(0)
    latents = random.standard_normal((size, 4)).astype("float32")
    return latents, random.random((size, 8, 8, 1), "float32")


def values(variables):
    return [np.asarray(variable) for variable in variables]


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def state(model):
    optimizers = (model.optimizer, model.discriminator_optimizer)
    return {
        "generator": values(
            model.generator.trainable_variables
            + optimizers[0].inner_optimizer.variables
        ),
        "discriminator": values(
            model.discriminator.trainable_variables
            + optimizers[1].inner_optimizer.variables
        ),
        "statistics": values(model.non_trainable_variables),
        "metrics": values(model.metrics_variables),
    }


def skips(model):
    return (
        int(model.optimizer.skipped_steps),
        int(model.discriminator_optimizer.skipped_steps),
    )


def test_latents_and_images():
    from models.data import mnist5k

    for (x, y), (images, _) in zip(latent_mnist5k(), mnist5k(), strict=True):
        assert x.shape == (len(images), 64)
        assert x.dtype == np.dtype("float32")
        np.testing.assert_array_equal(y, images)
        np.testing.assert_allclose(x.mean(), 0, atol=0.02)
        np.testing.assert_allclose(x.std(), 1, atol=0.02)
    np.testing.assert_array_equal(latent_mnist5k()[1][0], x)
    with pytest.raises(ValueError, match="latent_size=0"):
        latent_mnist5k(0)


def reference_distance(real, made, components):
    """By the textbook, with SciPy's matrix root, in float64."""
    from scipy.linalg import sqrtm

    def pooled(images):
        n, h, w, c = images.shape
        blocks = images.astype("float64").reshape(n, h // 2, 2, w // 2, 2, c)
        return blocks.mean((2, 4)).reshape(n, -1)

    real, made = pooled(real), pooled(made)
    _, vectors = np.linalg.eigh(np.cov(real.T, bias=True))
    real, made = (x @ vectors[:, -components:] for x in (real, made))
    one, other = (np.cov(x.T, bias=True) for x in (real, made))
    shift = real.mean(0) - made.mean(0)
    return shift @ shift + np.trace(one + other - 2 * sqrtm(one @ other).real)


@pytest.mark.parametrize("shape", [(8, 8, 1), (6, 8, 3)])
def test_distance_is_that_of_the_textbook(shape):
    random = np.random.default_rng(0)
    real = random.random((200, *shape), "float32")
    made = 0.3 + 0.5 * random.random((200, *shape), "float32")
    metric = FrechetDistance(shape, components=6)
    for part in (slice(0, 150), slice(150, 200)):
        metric.update_state(real[part], made[part])
    expected = reference_distance(real, made, 6)
    np.testing.assert_allclose(float(metric.result()), expected, rtol=1e-9)
    metric.reset_state()
    metric.update_state(real, real)
    np.testing.assert_allclose(float(metric.result()), 0, atol=1e-9)


def test_distance_survives_a_large_offset():
    # In float32 the sums of squares would hold none of the spread.
    random = np.random.default_rng(0)
    real = 4096 + random.integers(0, 3, (100, 8, 8, 1)).astype("float32")
    made = 4096 + random.integers(0, 5, (100, 8, 8, 1)).astype("float32")
    metric = FrechetDistance((8, 8, 1))
    metric.update_state(real, made)
    expected = reference_distance(real, made, 16)
    np.testing.assert_allclose(float(metric.result()), expected, rtol=1e-4)
    again = FrechetDistance.from_config(metric.get_config())
    assert again.components == 16
    assert again.input_shape == (8, 8, 1)


def test_default_model():
    model = gan()
    assert isinstance(model, tfmixed.Model)
    assert model.generator.output_shape == (None, 28, 28, 1)
    assert model.generator.input_shape == (None, 64)
    generator = 64 * 3136 + 4 * 64 + 16 * 64 * 32 + 4 * 32 + 16 * 32 + 1
    discriminator = 16 * 32 + 32 + 16 * 32 * 64 + 4 * 64 + 3136 + 1
    assert model.count_params() == generator + discriminator


@pytest.mark.parametrize("policy", POLICIES)
def test_dtypes(policy):
    keras.config.set_dtype_policy(policy)
    model = small()
    half = policy.removeprefix("mixed_")
    for network, head in (
        (model.generator, "images"),
        (model.discriminator, "logits"),
    ):
        assert network.get_layer(head).compute_dtype == "float32"
        others = {
            layer.compute_dtype
            for layer in network.layers
            if layer.weights and layer.name != head
        }
        assert others == {half}
    images = np.asarray(model(batch()[0]))
    assert images.dtype == np.dtype("float32")
    assert images.min() >= 0
    assert images.max() <= 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_good_step_moves_both_networks(policy):
    keras.config.set_dtype_policy(policy)
    model = small()
    model.compile(tfmixed.wrap_optimizer("adam", loss_scale=64.0))
    before = state(model)
    logs = model.train_on_batch(*batch(), return_dict=True)
    after = state(model)
    assert set(logs) == {"generator_loss", "discriminator_loss"}
    assert skips(model) == (0, 0)
    for part in before:
        assert not same(before[part], after[part]), part


def test_losses_by_hand():
    model = small()
    latents, images = batch()
    made = model.generator(latents, training=True)
    real, fake = (
        np.asarray(model.discriminator(x, training=True), "float64")
        for x in (images, made)
    )
    logs = model.train_on_batch(latents, images, return_dict=True)
    np.testing.assert_allclose(
        logs["generator_loss"], np.log1p(np.exp(-fake)).mean(), rtol=1e-5
    )
    np.testing.assert_allclose(
        logs["discriminator_loss"],
        np.log1p(np.exp(-real)).mean() + np.log1p(np.exp(fake)).mean(),
        rtol=1e-5,
    )


@pytest.mark.parametrize("bad", ["latents", "images"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_bad_step_is_skipped_by_both(policy, bad):
    # Bad images spoil the statistics of the discriminator, which the
    # generator learns from too.
    keras.config.set_dtype_policy(policy)
    model = small()
    model.compile(tfmixed.wrap_optimizer("adam", loss_scale=64.0))
    latents, images = batch()
    model.train_on_batch(latents, images)
    model.reset_metrics()
    before = state(model)
    spoilt = {"latents": latents, "images": images}
    spoilt[bad] = np.full_like(spoilt[bad], np.nan)
    model.train_on_batch(*spoilt.values())
    after = state(model)
    assert skips(model) == (1, 1)
    for part in before:
        assert same(before[part], after[part]), part
    model.train_on_batch(latents, images)
    assert skips(model) == (1, 1)
    for part in ("generator", "discriminator", "statistics"):
        assert not same(before[part], state(model)[part]), part


def test_an_overflow_of_one_scale_leaves_the_other_network_alone():
    model = small()
    model.compile(tfmixed.wrap_optimizer("adam", loss_scale=64.0))
    latents, images = batch()
    model.train_on_batch(latents, images)
    # So large that the scaled loss of the discriminator is past float32.
    model.discriminator_optimizer.dynamic_scale.assign(3e38)
    model.discriminator.get_layer("logits").bias.assign([-40.0])
    before = state(model)
    model.train_on_batch(latents, images)
    after = state(model)
    assert skips(model) == (0, 1)
    assert not same(before["generator"], after["generator"])
    for part in ("discriminator", "statistics"):
        assert same(before[part], after[part]), part


def test_both_optimizers_have_the_same_settings():
    model = small()
    model.compile(keras.optimizers.Adam(0.25, beta_1=0.125))
    other = model.discriminator_optimizer
    assert other is not model.optimizer
    assert float(other.learning_rate) == 0.25
    assert other.inner_optimizer.beta_1 == 0.125
    own = len(model.generator.trainable_variables)
    assert len(model.optimizer.inner_optimizer._trainable_variables) == own


def test_evaluate_compares_with_the_textbook():
    model = small()
    latents, images = batch(64)
    logs = model.evaluate(
        latents, images, batch_size=24, verbose=0, return_dict=True
    )
    assert score_name(list(logs)) == "frechet_error"
    assert not higher_is_better("frechet_error")
    made = model.predict(latents, verbose=0)
    np.testing.assert_allclose(
        logs["frechet_error"], reference_distance(images, made, 16), rtol=1e-5
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prepared", [False, True])
def test_file_round_trip(policy, prepared, tmp_path):
    keras.config.set_dtype_policy("float32" if prepared else policy)
    model = small()
    if prepared:
        model = tfmixed.prepare(model, policy)
        model.compile(keras.optimizers.Adam(1e-3, beta_1=0.5))
    model.train_on_batch(*batch())
    expected = np.asarray(model(batch()[0]))
    path = tmp_path / "model.keras"
    model.save(path)
    keras.config.set_dtype_policy("float32")
    loaded = keras.models.load_model(path)
    np.testing.assert_array_equal(np.asarray(loaded(batch()[0])), expected)
    before, after = state(model), state(loaded)
    assert same(before["generator"], after["generator"])
    assert same(before["discriminator"], after["discriminator"])
    # The next step is that of no interruption.
    for one in (model, loaded):
        one.train_on_batch(*batch())
    for one, other in zip(
        state(model)["generator"], state(loaded)["generator"], strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_weights_from_a_path(tmp_path):
    model = small()
    model.save_weights(tmp_path / "model.weights.h5")
    again = gan(**SMALL, weights=tmp_path / "model.weights.h5")
    assert same(model.get_weights(), again.get_weights())


@pytest.mark.slow
def test_loads_in_a_fresh_process(tmp_path):
    model = small()
    model.save(tmp_path / "model.keras")
    script = (
        "import sys, keras, numpy, models.gan\n"
        "model = keras.models.load_model(sys.argv[1])\n"
        "print(float(numpy.sum(model(numpy.ones((2, 4), 'float32')))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model.keras")],
        check=True,
        capture_output=True,
        text=True,
    )
    expected = float(np.sum(model(np.ones((2, 4), "float32"))))
    assert float(done.stdout.split()[-1]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
def test_compare_builds_and_counts_skips(policy):
    data = load_data(lambda: (batch(), batch()))
    recipe = Recipe(learning_rate=0.125)
    model = build(find_source(small), data, recipe, policy, seed=0)
    assert without_effect(model, policy) is None
    for optimizer in (model.optimizer, model.discriminator_optimizer):
        assert float(optimizer.learning_rate) == 0.125
        scale = type(optimizer.loss_scale).__name__
        wanted = policy == "mixed_float16"
        assert scale == ("DynamicLossScale" if wanted else "NoLossScale")
    latents, images = batch()
    model.train_on_batch(latents, images)
    calibration = skipped_steps(model, 1)
    model.train_on_batch(np.full_like(latents, np.nan), images)
    assert skipped_steps(model, 2) == calibration + 2


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_learns_to_make_digits(policy):
    keras.config.set_dtype_policy(policy)
    (x_train, y_train), (x_val, y_val) = latent_mnist5k()
    model = gan(width=8)
    model.compile(keras.optimizers.Adam(2e-3, beta_1=0.5))

    def distance():
        logs = model.evaluate(x_val, y_val, verbose=0, return_dict=True)
        return logs["frechet_error"]

    before = distance()
    model.fit(x_train, y_train, batch_size=64, epochs=2, verbose=0)
    assert distance() < 0.6 * before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": (8, 8)}, r"input_shape=\(8, 8\)`.*3 positive"),
        ({"input_shape": (8, 6, 1)}, r"\(8, 6, 1\)`.*multiples of 4"),
        ({"latent_size": 0}, "`gan` got `latent_size=0`"),
        ({"width": True}, "width=True"),
        ({"weights": "imagenet"}, "weights='imagenet'.*no such file"),
    ],
)
def test_bad_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        gan(**{**SMALL, **arguments})
