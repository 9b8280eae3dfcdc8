"""What `tfmixed.prepare` costs, beside building the model in the first place.

Building, preparing and going back are timed in turns; the figures are medians
and their ratios. For the chains the table also says by how much each of them
grows when the number of layers doubles: 2 is linear, 4 is quadratic. Saving
and loading stand beside those of the model as stock Keras has it:

    python benchmarks/prepare_time.py
    python benchmarks/prepare_time.py --only chain --rounds 5 --json time.json
    python benchmarks/prepare_time.py --files --only "chain of Dense"
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras

import tfmixed

POLICY = "mixed_bfloat16"
WIDTH = 4


def resnet(_):
    return keras.applications.ResNet152(weights=None)


def chain(num_layers):
    """Dense layers in a row, as a functional model."""
    inputs = keras.Input((WIDTH,))
    x = inputs
    for _ in range(num_layers):
        x = keras.layers.Dense(WIDTH)(x)
    return keras.Model(inputs, x)


def residual(num_layers):
    """Dense layers with `keras.ops` between them, and additions around."""
    inputs = keras.Input((WIDTH,))
    x = inputs
    for index in range(num_layers // 2):
        y = keras.ops.relu(keras.layers.Dense(WIDTH)(x))
        y = keras.ops.exp(y) if index % 10 == 0 else y
        x = keras.layers.Add()([x, y])
    return keras.Model(inputs, x)


def sequential(num_layers):
    layers = [keras.layers.Dense(WIDTH) for _ in range(num_layers)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers])


SIZES = (250, 500, 1000, 2000)
WORKLOADS = {
    "ResNet152": (resnet, (1,)),
    "chain of Dense": (chain, SIZES),
    "chain with residuals and keras.ops": (residual, SIZES),
    "Sequential of Dense": (sequential, SIZES),
}


def timed(function, *arguments):
    """Returns the result and the seconds."""
    gc.collect()
    start = time.perf_counter()
    result = function(*arguments)
    return result, time.perf_counter() - start


def measure(build, size, rounds):
    """Returns the medians in seconds of building, preparing, going back."""
    times = {"build": [], "prepare": [], "back": []}
    for _ in range(rounds):
        keras.utils.clear_session()
        model, seconds = timed(build, size)
        times["build"].append(seconds)
        prepared, seconds = timed(tfmixed.prepare, model, POLICY)
        times["prepare"].append(seconds)
        _, seconds = timed(tfmixed.to_float32, prepared)
        times["back"].append(seconds)
    return {name: statistics.median(t) for name, t in times.items()}


def measure_files(build, size, rounds):
    """Returns the medians of saving and loading, stock and prepared."""
    sides = ("stock", "prepared")
    times = {
        f"{what} {side}": [] for side in sides for what in ("save", "load")
    }
    for _ in range(rounds):
        keras.utils.clear_session()
        stock = build(size)
        models = {"stock": stock, "prepared": tfmixed.prepare(stock, POLICY)}
        for side, model in models.items():
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "model.keras")
                times[f"save {side}"].append(timed(model.save, path)[1])
                _, seconds = timed(keras.models.load_model, path)
                times[f"load {side}"].append(seconds)
    return {name: statistics.median(t) for name, t in times.items()}


def show(row):
    ratios = ", ".join(f"{k} {v:.2f}" for k, v in row["ratios"].items())
    seconds = ", ".join(f"{k} {v:.2f} s" for k, v in row["seconds"].items())
    growth = ", ".join(f"{k} x{v:.1f}" for k, v in row["growth"].items())
    print(f"{row['workload']}, {row['layers']}: {seconds}", flush=True)
    print(f"    against building or stock: {ratios}")
    if growth:
        print(f"    for twice the layers: {growth}", flush=True)


def ratios_of(seconds):
    """Each time over that of building, or of the stock model."""
    if "build" in seconds:
        return {k: seconds[k] / seconds["build"] for k in ("prepare", "back")}
    return {
        what: seconds[f"{what} prepared"] / seconds[f"{what} stock"]
        for what in ("save", "load")
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="part of a workload's name")
    parser.add_argument("--sizes", type=int, nargs="+", help="layers")
    parser.add_argument("--files", action="store_true", help="save and load")
    parser.add_argument("--json", metavar="FILE", help="also write the rows")
    arguments = parser.parse_args()
    # Keras follows a graph by recursion.
    sys.setrecursionlimit(50_000)
    # The first model pays for what Keras and TensorFlow load late.
    tfmixed.to_float32(tfmixed.prepare(residual(20), POLICY))
    rows = []
    for name, (build, sizes) in WORKLOADS.items():
        if arguments.only and arguments.only not in name:
            continue
        before = None
        if len(sizes) > 1 and arguments.sizes:
            sizes = arguments.sizes
        for size in sizes:
            run = measure_files if arguments.files else measure
            seconds = run(build, size, arguments.rounds)
            is_double = before is not None and before[0] * 2 == size
            growth = (
                {k: v / before[1][k] for k, v in seconds.items()}
                if is_double
                else {}
            )
            before = size, seconds
            rows.append(
                {
                    "workload": name,
                    "layers": size,
                    "seconds": seconds,
                    "ratios": ratios_of(seconds),
                    "growth": growth,
                }
            )
            show(rows[-1])
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
