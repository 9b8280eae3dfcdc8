"""How many steps each loss scale loses, how far it lifts gradients, and what
the model is worth at the end.

Small models train in `mixed_float16` with the dynamic scale, a fixed one, a
schedule and the predicted scale, from the same weights on the same batches:

    python benchmarks/loss_scales.py
    python benchmarks/loss_scales.py --only spikes --seeds 5 --json scales.json

The columns, means over the seeds: steps skipped; the mean of log2 of the scale
over the steps; "lost", the share of gradient entries that float16 made 0 where
float32 has a number, at the last weights and the last scale; and accuracy on
data held back. The trainings are short, so that scales may rise after 100
finite steps and not after 2,000.
"""

import argparse
import json
import os
import time
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

import tfmixed
from tfmixed import telemetry

BATCH = 32
GROWTH_INTERVAL = 100
# The share of batches that a spike hits, and how large it makes the inputs.
SPIKES, SPIKE = 0.03, 200.0
# As the mean over very many outputs may be.
SMALL = 1e-8


def mlp():
    return [layers.Dense(64, activation="relu") for _ in range(3)]


def convnet():
    return [
        layers.Reshape((8, 8, 1)),
        layers.Conv2D(8, 3, activation="relu"),
        layers.Conv2D(16, 3, activation="relu"),
        layers.Flatten(),
    ]


def lstm():
    return [layers.Reshape((8, 8)), layers.LSTM(32)]


# Its layers, its epochs, whether some batches have far too large inputs, and
# what the loss is multiplied by.
MODELS = {
    "MLP": (mlp, 16, False, 1.0),
    "convnet": (convnet, 10, False, 1.0),
    "LSTM": (lstm, 10, False, 1.0),
    "MLP with spikes": (mlp, 16, True, 1.0),
    "convnet, small loss": (convnet, 10, False, SMALL),
}


def scales(steps):
    """Returns the loss scales by name, for a training of `steps` steps."""
    return {
        "dynamic": tfmixed.DynamicLossScale(growth_interval=GROWTH_INTERVAL),
        "fixed 2^10": tfmixed.FixedLossScale(2.0**10),
        "scheduled": tfmixed.ScheduledLossScale(
            {0: 2.0**10, steps // 4: 2.0**13, steps // 2: 2.0**15},
            growth_interval=GROWTH_INTERVAL,
        ),
        "predictive": tfmixed.PredictiveLossScale(
            growth_interval=GROWTH_INTERVAL
        ),
    }


def build(parts):
    inputs = keras.Input((64,))
    x = inputs
    for layer in parts():
        x = layer(x)
    outputs = layers.Dense(10, activation="softmax", dtype="float32")(x)
    return tfmixed.Model(inputs, outputs)


def batches(seed, spikes):
    """Returns training batches in an order, and the data held back."""
    x, y = load_digits(return_X_y=True)
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(x))
    x, y = (x[order] / 16.0).astype("float32"), y[order]
    count = (len(x) - 400) // BATCH
    train = x[: count * BATCH].reshape(count, BATCH, 64).copy()
    if spikes:
        train[generator.random(count) < SPIKES] *= SPIKE
    labels = y[: count * BATCH].reshape(count, BATCH)
    return (train, labels), (x[-400:], y[-400:])


def gradients_of(model, x, y, scale):
    """Returns all entries of the gradients of `scale` times the loss."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(
            keras.losses.sparse_categorical_crossentropy(y, model(x))
        )
        scaled = loss * scale
    gradients = tape.gradient(
        scaled, [v.value for v in model.trainable_weights]
    )
    return np.concatenate([np.ravel(gradient) for gradient in gradients])


def lost(model, x, y, scale):
    """Returns the share of entries that are 0 only in float16."""
    half = gradients_of(model, x, y, scale)
    with tfmixed.precision("float32", model=model):
        full = gradients_of(model, x, y, scale)
    # What is below the smallest number of float32 counts for nothing.
    return float(np.mean(half[np.abs(full) > 1e-30] == 0))


def train(name, scale_name, seed):
    """Trains once; returns what the columns show."""
    parts, epochs, spikes, weight = MODELS[name]
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy("mixed_float16")
    (x, y), held_back = batches(seed, spikes)
    model = build(parts)
    algorithm = scales(epochs * len(x))[scale_name]
    optimizer = tfmixed.LossScaleOptimizer(
        # Its default epsilon would be large beside gradients of a small loss.
        keras.optimizers.Adam(2e-3, epsilon=1e-7 * weight),
        algorithm,
    )
    model.compile(
        optimizer,
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        loss_weights=[weight],
        jit_compile=False,
    )
    optimizer.build(model.trainable_variables)
    telemetry.attach(optimizer, epochs * len(x))
    data = tf.data.Dataset.from_tensor_slices((x, y)).repeat(epochs)
    model.fit(data, shuffle=False, verbose=0)
    rows = telemetry.records_of(optimizer).read()
    accuracy = model.evaluate(*held_back, batch_size=400, verbose=0)[1]
    return {
        "steps": len(rows.finite),
        "skipped": int(np.sum(~rows.finite)),
        "log2_scale": float(np.mean(np.log2(rows.loss_scale))),
        "lost": lost(model, x[0], y[0], weight * rows.loss_scale[-1]),
        "accuracy": accuracy,
    }


def main():
    parser = argparse.ArgumentParser(description="Compares loss scales.")
    parser.add_argument("--only", help="part of a model's name")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="also write all runs")
    arguments = parser.parse_args()
    # What the table shows.
    warnings.filterwarnings("ignore", "[0-9]+ of [0-9]+ training step")
    start, rows = time.perf_counter(), []
    print(
        "| model | loss scale | skipped | mean log2 scale | lost | accuracy |"
        "\n| --- | --- | --- | --- | --- | --- |"
    )
    for name in MODELS:
        if arguments.only and arguments.only not in name:
            continue
        for scale_name in scales(8):
            runs = [train(name, scale_name, s) for s in range(arguments.seeds)]
            rows += [
                {"model": name, "scale": scale_name, "seed": seed, **run}
                for seed, run in enumerate(runs)
            ]
            print(row_of(name, scale_name, runs), flush=True)
    print(f"\n{time.perf_counter() - start:.0f} s")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=2)


def row_of(name, scale_name, runs):
    mean = {key: np.mean([run[key] for run in runs]) for key in runs[0]}
    spread = np.std([run["accuracy"] for run in runs])
    return (
        f"| {name} | {scale_name} | {mean['skipped']:.1f} of "
        f"{mean['steps']:.0f} | {mean['log2_scale']:.1f} | "
        f"{mean['lost']:.2%} | {mean['accuracy']:.2%} ± {spread:.2%} |"
    )


if __name__ == "__main__":
    main()
