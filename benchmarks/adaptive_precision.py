"""What `AdaptivePrecision` brings and costs, beside fixed precision.

Small models train by `fit` on real data, in float32, in fixed mixed precision
and in the same with the callback, in turns:

    python -m benchmarks.adaptive_precision
    python -m benchmarks.adaptive_precision --only norm --json adaptive.json

The columns: accuracy on data held back, in the precision that the model has at
the end, mean and standard deviation over the seeds; "fit", the median seconds
of the whole training, with all that is traced and measured; "epoch", those of
the last epoch, the callback's four measurements included; moves and retraces
of each seed. float16 has no fast kernels on a CPU: its times mean nothing
there.
"""

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers

import tfmixed
from models.convnet import convnet
from models.data import digits
from models.mlp import tiny_mlp

MEAN = 100.0
CONFIGURATIONS = {
    "float32": ("float32", False),
    "bfloat16": ("mixed_bfloat16", False),
    "bfloat16, adaptive": ("mixed_bfloat16", True),
    "float16": ("mixed_float16", False),
    "float16, adaptive": ("mixed_float16", True),
}


class Norm(layers.Layer):
    """A layer normalization by hand, around a mean that is far from 0."""

    def call(self, inputs):
        """Subtracts the mean, and divides by the root of the variance."""
        x = inputs + MEAN
        mean = keras.ops.mean(x, axis=-1, keepdims=True)
        squares = keras.ops.mean(keras.ops.square(x), axis=-1, keepdims=True)
        variance = keras.ops.maximum(squares - keras.ops.square(mean), 0)
        return (x - mean) / keras.ops.sqrt(variance + 1e-3)


def with_norm():
    """An MLP for digits with two normalizations written by hand."""
    inputs = keras.Input((8, 8, 1))
    x = layers.Flatten()(inputs)
    for _ in range(2):
        x = layers.Activation("relu")(Norm()(layers.Dense(64)(x)))
    outputs = layers.Dense(10, activation="softmax", dtype="float32")(x)
    return keras.Model(inputs, outputs)


def small_convnet():
    """The reference convolutional network, two narrow stages of three."""
    return convnet(input_shape=(8, 8, 1), widths=(16, 32))


# The builder, the data, batch size, epochs, learning rate.
MODELS = {
    "MLP, digits": (tiny_mlp, digits, 64, 15, 3e-3),
    "convnet, digits": (small_convnet, digits, 64, 10, 3e-3),
    "norm by hand, digits": (with_norm, digits, 64, 15, 3e-3),
}


class Clock(keras.callbacks.Callback):
    """Takes the time of the last epoch, without validation."""

    def on_epoch_begin(self, epoch, logs=None):
        """Starts the clock."""
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        """Stops it."""
        self.seconds = time.perf_counter() - self.start


def train(name, configuration, seed):
    """Trains once; returns what the columns show."""
    build, load, batch_size, epochs, rate = MODELS[name]
    policy, is_adaptive = CONFIGURATIONS[configuration]
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(policy)
    (x, y), held_back = load()
    model = build()
    model.compile(
        keras.optimizers.Adam(rate),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=False,
    )
    clock, adaptive = Clock(), tfmixed.callbacks.AdaptivePrecision()
    start = time.perf_counter()
    model.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=epochs,
        verbose=0,
        callbacks=[*([adaptive] if is_adaptive else []), clock],
    )
    return {
        "fit": time.perf_counter() - start,
        "epoch": clock.seconds,
        "accuracy": model.evaluate(*held_back, verbose=0)[1],
        "retraces": adaptive.retraces,
        "moves": [str(move) for move in adaptive.history],
        "largest_error": max(
            (one.error for one in adaptive.latest.values()), default=None
        ),
    }


def row_of(name, configuration, runs):
    """Returns a row of the table."""
    accuracies = [run["accuracy"] for run in runs]
    fit, epoch = (
        statistics.median(run[key] for run in runs) for key in ("fit", "epoch")
    )
    moves = "/".join(str(len(run["moves"])) for run in runs)
    retraces = "/".join(str(run["retraces"]) for run in runs)
    is_adaptive = CONFIGURATIONS[configuration][1]
    return (
        f"| {name} | {configuration} | {np.mean(accuracies):.1%} ± "
        f"{np.std(accuracies):.1%} | {fit:.1f} s | {epoch:.2f} s | "
        f"{moves if is_adaptive else ''} | {retraces if is_adaptive else ''} |"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", help="part of a model's name")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="also write all runs")
    arguments = parser.parse_args()
    start, found = time.perf_counter(), []
    print(
        "| model | precision | accuracy | fit | epoch | moves | retraces |\n"
        "| --- | --- | --- | --- | --- | --- | --- |"
    )
    for name in MODELS:
        if arguments.only and arguments.only not in name:
            continue
        runs = {configuration: [] for configuration in CONFIGURATIONS}
        for seed in range(arguments.seeds):
            for configuration in list(runs)[:: -1 if seed % 2 else 1]:
                runs[configuration].append(train(name, configuration, seed))
        for configuration, several in runs.items():
            print(row_of(name, configuration, several), flush=True)
            found += [
                {"model": name, "precision": configuration, "seed": seed, **run}
                for seed, run in enumerate(several)
            ]
    print(f"\n{time.perf_counter() - start:.0f} s")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
