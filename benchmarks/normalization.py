"""Normalization layers in a training step: Keras in float32, and the twins.

Prints medians in milliseconds of forward and backward pass on 16-bit inputs,
measured in turns. Keras's layer stands between two casts, as where it has a
float32 policy in a 16-bit model.

    python benchmarks/normalization.py [bfloat16|float16]
"""

import statistics
import sys
import time

import tensorflow as tf
from keras import layers

from tfmixed.layers.twins import TWINS

ROUNDS = 25
CASES = (
    (layers.BatchNormalization, {}, (32, 64, 64, 64)),
    (layers.BatchNormalization, {}, (32, 8, 8, 512)),
    (layers.BatchNormalization, {}, (256, 1024)),
    (layers.BatchNormalization, {"axis": 1}, (32, 64, 32, 32)),
    (layers.LayerNormalization, {}, (32, 128, 256)),
    (layers.LayerNormalization, {}, (16, 128, 1024)),
    (layers.RMSNormalization, {}, (32, 128, 256)),
    (layers.GroupNormalization, {"groups": 8}, (32, 32, 32, 64)),
)


def step(layer, shape, dtype):
    """A function that runs the layer forward and backward."""
    x = tf.Variable(tf.cast(tf.random.normal(shape), dtype))
    upstream = tf.cast(tf.random.normal(shape), dtype)
    options = {}
    if isinstance(layer, layers.BatchNormalization):
        options["training"] = True

    @tf.function(autograph=False)
    def run():
        inputs = x.value()
        weights = [v.value for v in layer.trainable_variables]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = tf.cast(layer(inputs, **options), dtype)
        gradients = tape.gradient(y, [inputs, *weights], upstream)
        # All is computed, and little of it is copied to the host.
        return [tf.reshape(g, [-1])[:2] for g in gradients]

    return lambda: [gradient.numpy() for gradient in run()]


def medians(steps):
    """The median of each step in milliseconds, measured in turns."""
    times = [[] for _ in steps]
    for one in steps:
        one()
    for _ in range(ROUNDS):
        for one, taken in zip(steps, times, strict=True):
            start = time.perf_counter()
            one()
            taken.append(time.perf_counter() - start)
    return [1e3 * statistics.median(taken) for taken in times]


def main():
    dtype = sys.argv[1] if len(sys.argv) > 1 else "bfloat16"
    for stock, options, shape in CASES:
        keras_layer = stock(dtype="float32", **options)
        twin = stock(dtype=f"mixed_{dtype}", **options)
        twin.__class__ = TWINS[stock]
        for layer in (keras_layer, twin):
            layer.build(shape)
        before, after = medians(
            [step(layer, shape, dtype) for layer in (keras_layer, twin)]
        )
        print(
            f"{stock.__name__:20} {shape!s:18} {options or ''!s:14} "
            f"{before:7.2f} -> {after:7.2f}  {after / before:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
