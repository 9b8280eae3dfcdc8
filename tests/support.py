"""Small models and data that several test files use."""

import keras
import numpy as np


def small_model(model_class, policy="float32"):
    """Dense, BatchNormalization, float32 head: (None, 6) to (None, 1)."""
    with_policy = keras.dtype_policies.get(policy)
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, dtype=with_policy)(inputs)
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


def numpy_of(variables):
    return [keras.ops.convert_to_tensor(v).numpy() for v in variables]


def number(variable):
    return keras.ops.convert_to_tensor(variable).numpy().item()
