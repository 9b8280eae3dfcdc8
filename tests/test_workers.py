"""Two workers, each a process of its own, decide together."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import numpy as np
import pytest

pytestmark = pytest.mark.slow

WORKER = """
import json, os, sys
import keras, numpy as np, tensorflow as tf
sys.path.insert(0, {tests!r})
from support import batches, number, numpy_of, small_model
import tfmixed

index, folder, bad_worker = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(0)
with strategy.scope():
    model = small_model(tfmixed.Model)
    scale = tfmixed.DynamicLossScale(initial=64.0, growth_interval=2)
    model.compile(tfmixed.LossScaleOptimizer("adam", scale), "mse")
    model.optimizer.build(model.trainable_variables)
    data = batches(6, bad=(1, 4) if index == bad_worker else (), seed=index)
    step = tf.function(
        lambda x, y: strategy.run(model.train_step, args=((x, y),))
    )
    scales = []
    for x, y in data:
        # What each worker gives to its own replica.
        x, y = (
            strategy.experimental_distribute_values_from_function(
                lambda _, a=a: tf.constant(a)
            )
            for a in (x, y)
        )
        step(x, y)
        scales.append(number(model.optimizer.dynamic_scale))
np.savez(
    f"{{folder}}/{{index}}.npz",
    *numpy_of(model.trainable_variables),
    scales=scales,
    skipped=number(model.optimizer.skipped_steps),
    finite=all(np.isfinite(v).all() for v in numpy_of(model.variables)),
)
"""


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("localhost", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def test_a_bad_worker_stops_the_step_of_both(tmp_path):
    """Stock Keras: one skips, the other waits for its gradients for ever."""
    addresses = [f"localhost:{port}" for port in free_ports(2)]
    program = WORKER.format(tests=os.path.dirname(__file__))
    workers = []
    for index in range(2):
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": addresses}, "task": task}
        workers.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    textwrap.dedent(program),
                    str(index),
                    str(tmp_path),
                    "1",
                ],
                env={**os.environ, "TF_CONFIG": json.dumps(config)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        for worker in workers:
            output, _ = worker.communicate(timeout=240)
            assert worker.returncode == 0, output[-3000:]
    finally:
        for worker in workers:
            worker.kill()
    one, other = (np.load(tmp_path / f"{index}.npz") for index in range(2))
    for results in (one, other):
        # Good, bad, good, good, bad, good.
        assert list(results["scales"]) == [64, 32, 32, 64, 32, 32]
        assert results["skipped"] == 2
        assert results["finite"]
    for name in one.files:
        np.testing.assert_array_equal(one[name], other[name])
