"""What the callbacks cost: `fit` with and without them, in turns.

The same float32 model with the same optimizer is trained by `fit` on each
side: a plain `keras.Model` without callbacks, `tfmixed.Model` (guarded), and
`tfmixed.Model` with one callback each. Rounds are interleaved; the figures are
medians of the time of a step, and their ratio to the plain side and to the
guarded one. Run it alone on an idle machine:

    python benchmarks/callbacks.py
    python benchmarks/callbacks.py --only MLP --rounds 15 --json callbacks.json
"""

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
import workloads

import tfmixed
from tfmixed.health.probe import Probe

# The workload, and how many steps a round of it has.
STEPS = {"mlp": 20, "cnn": 4, "transformer": 6, "embedding": 200}

SIDES = {
    "plain": None,
    "guarded": lambda: [],
    "LossScaleMonitor": lambda: [tfmixed.callbacks.LossScaleMonitor()],
    "PrecisionGuard": lambda: [tfmixed.callbacks.PrecisionGuard()],
    "StepTimer": lambda: [tfmixed.callbacks.StepTimer()],
}


class Clock(keras.callbacks.Callback):
    """Takes the time of an epoch.

    Not that of the whole `fit`: the end of an iterator of TensorFlow takes
    seconds now and then, whoever trains.
    """

    def on_epoch_begin(self, epoch, logs=None):
        """Starts the clock."""
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        """Stops it."""
        self.seconds = time.perf_counter() - self.start


def trainer(side, key):
    """Returns a function that trains one round and says how long it took."""
    workload = workloads.WORKLOADS[key]
    model = getattr(workloads, key)()
    callbacks = []
    if side != "plain":
        model = tfmixed.Model(model.inputs, model.outputs)
        callbacks = SIDES[side]()
    model.compile(keras.optimizers.Adam(), workloads.loss(), jit_compile=False)
    batch = tuple(map(tf.constant, workload.data(workload.batch)))
    data = tf.data.Dataset.from_tensors(batch).repeat()
    clock = Clock()

    def train():
        model.fit(
            data,
            steps_per_epoch=STEPS[key],
            verbose=0,
            # Last, to see what the others do at the end of an epoch.
            callbacks=[*callbacks, clock],
        )
        return clock.seconds

    return train


def measure(key, rounds):
    """Returns the medians of the step in ms, by side."""
    trains = {side: trainer(side, key) for side in SIDES}
    for train in trains.values():
        train()
    times = {side: [] for side in SIDES}
    for index in range(rounds):
        order = list(SIDES) if index % 2 else list(SIDES)[::-1]
        for side in order:
            times[side].append(trains[side]())
    return {
        side: statistics.median(t) * 1e3 / STEPS[key]
        for side, t in times.items()
    }


def measurement(key, rounds=5):
    """Returns how many guarded steps one `GradientHealth` measurement takes.

    Divided by its `every` (500), that is the share of time it costs.
    """
    workload = workloads.WORKLOADS[key]
    model = getattr(workloads, key)()
    model = tfmixed.Model(model.inputs, model.outputs)
    model.compile(keras.optimizers.Adam(), workloads.loss(), jit_compile=False)
    batch = tuple(map(tf.constant, workload.data(workload.batch)))
    model.train_on_batch(*batch)
    probe = Probe(model)
    sides = {
        "step": lambda: model.train_on_batch(*batch),
        "measurement": lambda: probe.measure(batch),
    }
    times = {side: [] for side in sides}
    for _ in range(rounds + 1):
        for side, run in sides.items():
            start = time.perf_counter()
            run()
            times[side].append(time.perf_counter() - start)
    step, measured = (statistics.median(t[1:]) for t in times.values())
    return measured / step


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", help="a workload", choices=list(STEPS))
    parser.add_argument("--json", metavar="FILE", help="also write the rows")
    arguments = parser.parse_args()
    found = {}
    for key in STEPS if arguments.only is None else [arguments.only]:
        keras.utils.clear_session()
        found[key] = measure(key, arguments.rounds)
        plain, guarded = found[key]["plain"], found[key]["guarded"]
        for side, median in found[key].items():
            print(
                f"{key:>12} {side:>18}: {median:8.2f} ms, to plain "
                f"{median / plain:.3f}, to guarded {median / guarded:.3f}",
                flush=True,
            )
        steps = found[key]["measurement"] = measurement(key)
        print(
            f"{key:>12} {'GradientHealth':>18}: a measurement takes "
            f"{steps:.2f} steps, one in 500 costs {steps / 500:.2%}",
            flush=True,
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
