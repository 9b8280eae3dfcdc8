"""Small models and data that several test files use."""

import keras
import numpy as np
import pytest

import tfmixed


def small_model(model_class, policy="float32"):
    """Dense, BatchNormalization, float32 head: (None, 6) to (None, 1)."""
    with_policy = keras.dtype_policies.get(policy)
    inputs = keras.Input((6,))
    # A bias here would have only rounding for a gradient, which Adam enlarges.
    x = keras.layers.Dense(8, use_bias=False, dtype=with_policy)(inputs)
    x = keras.layers.BatchNormalization(dtype=with_policy)(x)
    x = keras.layers.Activation("relu", dtype=with_policy)(x)
    outputs = keras.layers.Dense(1, dtype="float32")(x)
    return model_class(inputs, outputs)


def batches(count, size=8, bad=(), bad_row=0, value=np.nan, seed=0):
    """`count` batches of (x, y); `value` stands in one row of the bad ones."""
    generator = np.random.default_rng(seed)
    result = []
    for index in range(count):
        x = generator.normal(size=(size, 6)).astype("float32")
        y = generator.normal(size=(size, 1)).astype("float32")
        if index in bad:
            x[bad_row, 2] = value
        result.append((x, y))
    return result


def slow(*values):
    """Parameters of a test that the fast part of the suite leaves out."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def train_on(model, x, y):
    """One step; the logs of this batch alone, in every version of Keras."""
    model.reset_metrics()
    logs = model.train_on_batch(x, y, return_dict=True)
    return {name: float(value) for name, value in logs.items()}


def trained(model, count=6, bad=()):
    for x, y in batches(count, bad=bad):
        model.train_on_batch(x, y)
    return model


def losses_of(model, count=4, **kwargs):
    return [
        train_on(model, x, y)["loss"]
        for x, y in batches(count, seed=9, **kwargs)
    ]


def numpy_of(variables):
    return [keras.ops.convert_to_tensor(v).numpy() for v in variables]


def number(variable):
    return keras.ops.convert_to_tensor(variable).numpy().item()


def arrays(count=4, **kwargs):
    x, y = zip(*batches(count, **kwargs), strict=True)
    return np.concatenate(x), np.concatenate(y)


def state_of(model):
    optimizer = model.optimizer
    return numpy_of(
        model.variables
        + optimizer.inner_optimizer.variables
        + model.metrics_variables
    )


def check_untouched(before, after):
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


class Subclassed(tfmixed.Model):
    """Built by its first step; with dropout, add_loss and a metric."""

    def __init__(self, policy="mixed_float16"):
        super().__init__()
        self.dense = keras.layers.Dense(8, dtype=policy)
        self.norm = keras.layers.BatchNormalization(dtype=policy)
        self.dropout = keras.layers.Dropout(0.5, dtype=policy)
        self.head = keras.layers.Dense(1, dtype="float32")
        self.seen = keras.metrics.Sum(name="seen")

    def call(self, x, training=False):
        x = self.dense(x)
        self.add_loss(1e-3 * keras.ops.sum(x))
        self.seen.update_state(keras.ops.ones((2,)))
        return self.head(self.dropout(self.norm(x, training=training)))
