"""The update of `tfmixed.LossScaleOptimizer` beside that of stock Keras.

One update of all weights in a graph, with gradients that are given: stock
Keras's optimizer on the one side, the same optimizer inside
`tfmixed.LossScaleOptimizer` (finite check and all) on the other. Rounds are
interleaved; the figure is the ratio of the medians. Run it alone:

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py --weights resnet50 --only SGD
    python benchmarks/optimizers.py --loss-scale 1024
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

from tfmixed.optimizer import LossScaleOptimizer

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(),
    "SGD, clipnorm": lambda: keras.optimizers.SGD(clipnorm=1.0),
    "SGD, momentum": lambda: keras.optimizers.SGD(momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(),
    "Adam, global_clipnorm": lambda: keras.optimizers.Adam(global_clipnorm=1.0),
    "Adam, amsgrad": lambda: keras.optimizers.Adam(amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(),
    "Adamax": lambda: keras.optimizers.Adamax(),
    "Adadelta": lambda: keras.optimizers.Adadelta(),
    "Adagrad": lambda: keras.optimizers.Adagrad(),
    "RMSprop": lambda: keras.optimizers.RMSprop(),
    "RMSprop, momentum": lambda: keras.optimizers.RMSprop(momentum=0.9),
    "Nadam": lambda: keras.optimizers.Nadam(),
    "Lion": lambda: keras.optimizers.Lion(),
    "Ftrl": lambda: keras.optimizers.Ftrl(),
    "Adafactor": lambda: keras.optimizers.Adafactor(),
}
WEIGHTS = {"mlp": workloads.mlp, "resnet50": workloads.resnet50}


def update(shapes, optimizer):
    """Returns a function that updates weights of these shapes once."""
    random = np.random.default_rng(0)
    variables = [
        keras.Variable(random.normal(size=shape), dtype="float32")
        for shape in shapes
    ]
    gradients = [
        tf.constant(random.normal(size=shape), tf.float32) for shape in shapes
    ]
    optimizer.build(variables)

    @tf.function(autograph=False)
    def step():
        optimizer.scale_loss(tf.constant(1.0))
        optimizer.apply(gradients, variables)

    start = time.perf_counter()
    step()
    first_step = time.perf_counter() - start
    step()
    return step, first_step


def measure(name, shapes, rounds, loss_scale):
    """Returns a row: medians in ms of both sides and their ratio."""
    make = OPTIMIZERS[name]
    sides = {
        "keras": make(),
        "tfmixed": LossScaleOptimizer(make(), loss_scale),
    }
    steps, first, times = {}, {}, {side: [] for side in sides}
    for side, optimizer in sides.items():
        steps[side], first[side] = update(shapes, optimizer)
    for index in range(rounds):
        for side in list(steps) if index % 2 else list(steps)[::-1]:
            start = time.perf_counter()
            steps[side]()
            times[side].append(time.perf_counter() - start)
    medians = {side: statistics.median(t) * 1e3 for side, t in times.items()}
    return {
        "optimizer": name,
        "keras_ms": medians["keras"],
        "tfmixed_ms": medians["tfmixed"],
        "ratio": medians["tfmixed"] / medians["keras"],
        "first_step_s": first,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--weights", choices=WEIGHTS, default="mlp")
    parser.add_argument("--only", help="part of an optimizer's name")
    parser.add_argument("--loss-scale", type=float, help="none by default")
    parser.add_argument("--json", metavar="FILE", help="also write the rows")
    arguments = parser.parse_args()
    model = WEIGHTS[arguments.weights]()
    shapes = [tuple(v.shape) for v in model.trainable_variables]
    loss_scale = arguments.loss_scale or "none"
    names = [n for n in OPTIMIZERS if (arguments.only or "") in n]
    rows = []
    for name in names:
        row = measure(name, shapes, arguments.rounds, loss_scale)
        rows.append(row)
        first = row["first_step_s"]
        print(
            f"{name:>22}: Keras {row['keras_ms']:7.2f} ms, tfmixed "
            f"{row['tfmixed_ms']:7.2f} ms, ratio {row['ratio']:.2f}; first "
            f"{first['keras']:.2f} s, {first['tfmixed']:.2f} s",
            flush=True,
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
