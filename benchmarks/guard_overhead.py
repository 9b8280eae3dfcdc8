"""What the guarded step costs, beside the step of stock Keras.

Both sides train the same float32 model with Adam under dynamic loss scaling:
`keras.Model` with `keras.optimizers.LossScaleOptimizer`, and `tfmixed.Model`
with `tfmixed.LossScaleOptimizer`. Rounds are interleaved; the figure is the
ratio of the medians. The number of variables and the number of parameters
grow separately. Run it alone on an idle machine:

    python benchmarks/guard_overhead.py
    python benchmarks/guard_overhead.py --jit-compile --json overhead.json

The rows "guarded ..." have another other side: a plain `keras.Model` with the
plain optimizer, without any loss scaling. What is guarded there is what
`tfmixed.Model.compile` makes of the same.
"""

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
import workloads

from tfmixed.model import Model
from tfmixed.optimizer import LossScaleOptimizer


def chain(model_class, num_variables, width):
    """A chain of dense layers, each with a kernel and a bias."""
    inputs = keras.Input((width,))
    x = inputs
    for _ in range(num_variables // 2):
        x = keras.layers.Dense(width)(x)
    return model_class(inputs, x)


def wide(model_class, num_parameters):
    """Four layers that together have about `num_parameters` parameters."""
    return chain(model_class, 8, round((num_parameters / 4) ** 0.5))


def normalized(model_class, num_layers):
    """Layers with statistics: what the guard has to remember grows too."""
    inputs = keras.Input((16,))
    x = inputs
    for _ in range(num_layers):
        x = keras.layers.Dense(16, use_bias=False)(x)
        x = keras.layers.BatchNormalization()(x)
    return model_class(inputs, x)


WORKLOADS = {
    "10 variables": lambda cls: chain(cls, 10, 16),
    "100 variables": lambda cls: chain(cls, 100, 16),
    "1,000 variables": lambda cls: chain(cls, 1000, 16),
    "100 normalized layers": lambda cls: normalized(cls, 100),
    "1 M parameters": lambda cls: wide(cls, 1e6),
    "10 M parameters": lambda cls: wide(cls, 1e7),
    "100 M parameters": lambda cls: wide(cls, 1e8),
}


# Guarded against unguarded: the model, its batch and its optimizer.
UNGUARDED = {
    "guarded embedding": (
        workloads.embedding,
        "embedding",
        lambda: keras.optimizers.SGD(),
    ),
    "guarded MLP": (workloads.mlp, "mlp", lambda: keras.optimizers.SGD()),
}


def square_batch(model):
    """A batch whose targets have the shape of its inputs."""
    width = model.input_shape[-1]
    batch = np.random.default_rng(0).normal(size=(32, width))
    return batch.astype("float32"), batch.astype("float32")


def prepared_step(model, optimizer, jit_compile, loss="mse", batch=None):
    """Returns a function that runs one step on a fixed batch."""
    model.compile(optimizer, loss, jit_compile=jit_compile)
    model.make_train_function()
    batch = tuple(map(tf.constant, batch or square_batch(model)))
    data = tf.data.Dataset.from_tensors(batch).repeat()
    iterator = iter(data)
    start = time.perf_counter()
    model.train_function(iterator)
    first_step = time.perf_counter() - start
    model.train_function(iterator)

    def step():
        logs = model.train_function(iterator)
        return float(logs["loss"])

    return step, first_step


def unguarded(name, rounds, jit_compile):
    """Returns the row of a guarded step against a plain one."""
    build, key, make = UNGUARDED[name]
    steps, first = {}, {}
    for side in ("keras", "tfmixed"):
        model, optimizer = build(), make()
        if side == "tfmixed":
            model = Model(model.inputs, model.outputs)
            optimizer = LossScaleOptimizer(optimizer)
        workload = workloads.WORKLOADS[key]
        steps[side], first[side] = prepared_step(
            model,
            optimizer,
            jit_compile,
            workloads.loss(),
            workload.data(workload.batch),
        )
    return row_of(name, steps, first, rounds)


def measure(name, build, rounds, jit_compile):
    """Returns the row of the guarded step against that of stock Keras."""
    sides = {
        "keras": (keras.Model, keras.optimizers.LossScaleOptimizer),
        "tfmixed": (Model, LossScaleOptimizer),
    }
    steps, first = {}, {}
    for side, (model_class, wrapper) in sides.items():
        optimizer = wrapper(keras.optimizers.Adam())
        steps[side], first[side] = prepared_step(
            build(model_class), optimizer, jit_compile
        )
    return row_of(name, steps, first, rounds)


def row_of(name, steps, first, rounds):
    """Returns a row: medians in ms of both sides and their ratio."""
    times = {side: [] for side in steps}
    for index in range(rounds):
        order = list(steps) if index % 2 else list(steps)[::-1]
        for side in order:
            start = time.perf_counter()
            steps[side]()
            times[side].append(time.perf_counter() - start)
    medians = {side: statistics.median(t) * 1e3 for side, t in times.items()}
    return {
        "workload": name,
        "keras_ms": medians["keras"],
        "tfmixed_ms": medians["tfmixed"],
        "ratio": medians["tfmixed"] / medians["keras"],
        "first_step_ratio": first["tfmixed"] / first["keras"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--only", help="part of a workload's name")
    parser.add_argument("--jit-compile", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="also write the rows")
    arguments = parser.parse_args()
    rows = []
    for name in [*WORKLOADS, *UNGUARDED]:
        if arguments.only and arguments.only not in name:
            continue
        keras.utils.clear_session()
        how = (arguments.rounds, arguments.jit_compile)
        if name in WORKLOADS:
            row = measure(name, WORKLOADS[name], *how)
        else:
            row = unguarded(name, *how)
        rows.append(row)
        print(
            f"{name:>22}: Keras {row['keras_ms']:8.2f} ms, tfmixed "
            f"{row['tfmixed_ms']:8.2f} ms, ratio {row['ratio']:.3f}; first "
            f"step {row['first_step_ratio']:.2f}",
            flush=True,
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
