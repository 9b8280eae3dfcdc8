"""Training in mixed_float16 is as accurate as in float32, on real digits."""

import keras
import numpy as np
import pytest

import models
import tfmixed

SEEDS = range(5)

pytestmark = pytest.mark.slow


def accuracy(policy, seed, data):
    entry = models.get("tiny_mlp")
    (x, y), validation = data
    keras.utils.set_random_seed(seed)
    with tfmixed.precision(policy):
        stock = entry.builder()
    model_class = keras.Model if policy == "float32" else tfmixed.Model
    model = model_class(stock.inputs, stock.outputs)
    model.compile(
        keras.optimizers.Adam(entry.learning_rate),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    model.fit(x, y, entry.batch_size, entry.epochs, verbose=0)
    if policy == "mixed_float16":
        assert model.optimizer.loss_scale == tfmixed.DynamicLossScale()
    return model.evaluate(*validation, verbose=0)[1]


def test_digits_over_five_seeds():
    data = models.get("tiny_mlp").data()
    means = {
        policy: np.mean([accuracy(policy, seed, data) for seed in SEEDS])
        for policy in ("float32", "mixed_float16")
    }
    print(means)
    assert means["float32"] > 0.94
    assert abs(means["mixed_float16"] - means["float32"]) <= 0.005
