"""BatchNormalization in small batches, and what 16 bits add to that.

A small MLP trains on digits for two epochs, with BatchNormalization over the
examples of a batch, the same with momentum 0.9, or GroupNormalization, in each
precision. The table shows accuracy on data held back, mean and standard
deviation over the seeds:

    python -m benchmarks.small_batches
    python -m benchmarks.small_batches --only "momentum 0.9" --json batches.json
"""

import argparse
import json
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers

from models.data import digits

SIZES = (2, 4, 8, 16, 32)
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
NORMALIZATIONS = {
    "BatchNormalization": layers.BatchNormalization,
    "momentum 0.9": lambda: layers.BatchNormalization(momentum=0.9),
    "GroupNormalization": lambda: layers.GroupNormalization(8),
}


def train(normalization, policy, size, seed):
    """Trains once; returns the accuracy on data held back."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(policy)
    inputs = keras.Input((8, 8, 1))
    x = layers.Flatten()(inputs)
    for _ in range(2):
        x = layers.Dense(64, use_bias=False)(x)
        x = layers.Activation("relu")(NORMALIZATIONS[normalization]()(x))
    outputs = layers.Dense(10, activation="softmax", dtype="float32")(x)
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(1e-3),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=False,
    )
    (x_train, y_train), held_back = digits()
    # The last batch is as large as the others.
    count = len(x_train) // size * size
    model.fit(
        x_train[:count], y_train[:count], batch_size=size, epochs=2, verbose=0
    )
    return model.evaluate(*held_back, batch_size=360, verbose=0)[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", help="a normalization")
    parser.add_argument("--precision", choices=POLICIES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="also write all runs")
    arguments = parser.parse_args()
    start, found = time.perf_counter(), []
    print(
        f"| normalization | precision | {' | '.join(map(str, SIZES))} |\n"
        f"| --- | --- |{' --- |' * len(SIZES)}"
    )
    for name in NORMALIZATIONS:
        if arguments.only not in (None, name):
            continue
        for policy in POLICIES:
            if arguments.precision not in (None, policy):
                continue
            cells = []
            for size in SIZES:
                values = [
                    train(name, policy, size, seed)
                    for seed in range(arguments.seeds)
                ]
                cells.append(f"{np.mean(values):.1%} ± {np.std(values):.1%}")
                found.append(
                    {
                        "normalization": name,
                        "precision": policy,
                        "batch_size": size,
                        "accuracy": values,
                    }
                )
            print(f"| {name} | {policy} | {' | '.join(cells)} |", flush=True)
    print(f"\n{time.perf_counter() - start:.0f} s")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
