"""Misuse of a loop of one's own is told, not computed."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import slow

import tfmixed

BY_HAND = re.escape("multiplied or divided by the loss scale by hand")
CLIPPED = "Gradients were clipped while they were still multiplied"


class Loop:
    """A model with shared, regularized and normalized weights, and its step."""

    def __init__(self, change, graph=True, optimizer="sgd", scale=1024.0):
        inputs = keras.Input((4, 4, 3))
        x = keras.layers.Conv2D(4, 3, kernel_regularizer="l2")(inputs)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.Reshape((4, 4))(keras.layers.Activation("gelu")(x))
        shared = keras.layers.Dense(4)
        outputs = keras.layers.LSTM(3)(shared(shared(x)))
        self.model = keras.Model(inputs, outputs)
        self.optimizer = tfmixed.LossScaleOptimizer(optimizer, scale)
        self.optimizer.build(self.model.trainable_variables)
        self.change = change
        self.step = tf.function(self._step) if graph else self._step

    def _step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.model(x, training=True) ** 2)
            loss = self.optimizer.scale_loss(loss + sum(self.model.losses))
        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, variables)
        gradients = self.change(self.optimizer, gradients)
        self.optimizer.apply(gradients, variables)

    def run(self):
        self.step(tf.random.stateless_normal((2, 4, 4, 3), (0, 0)))
        return self.model.get_weights()


def unscaled_then(change):
    return lambda optimizer, gradients: change(optimizer.unscale(gradients))


DIVISIONS = {
    "tensor / scale": lambda o, gs: [g / o.dynamic_scale for g in gs],
    "keras.ops": lambda o, gs: [
        keras.ops.divide(g, o.dynamic_scale) for g in gs
    ],
    "inverse": lambda o, gs: [g * (1.0 / o.dynamic_scale) for g in gs],
    "reciprocal of a cast": lambda o, gs: [
        g * tf.math.reciprocal(tf.cast(o.dynamic_scale, "float32")) for g in gs
    ],
}
CLIPS = {
    "global norm": lambda gs: tf.clip_by_global_norm(gs, 0.1)[0],
    "norm": lambda gs: [tf.clip_by_norm(g, 0.1) for g in gs],
    "value": lambda gs: [tf.clip_by_value(g, -0.1, 0.1) for g in gs],
    "keras.ops.clip": lambda gs: [keras.ops.clip(g, -0.1, 0.1) for g in gs],
}


@pytest.mark.parametrize("how", DIVISIONS)
def test_dividing_by_hand_raises(how):
    with pytest.raises(RuntimeError, match=BY_HAND):
        Loop(DIVISIONS[how]).run()


@pytest.mark.parametrize("how", CLIPS)
def test_clipping_scaled_gradients_warns(how):
    loop = Loop(lambda _, gradients: CLIPS[how](gradients))
    with pytest.warns(UserWarning, match=CLIPPED) as caught:
        loop.run()
    ours = [warning for warning in caught if warning.category is UserWarning]
    assert [warning.filename for warning in ours] == [__file__]


@pytest.mark.parametrize("how", CLIPS)
@pytest.mark.parametrize("graph", [True, *slow(False)])
def test_clipping_unscaled_gradients_is_that_of_plain_training(how, graph):
    loop = Loop(unscaled_then(CLIPS[how]), graph)
    plain = Loop(
        lambda _, gradients: CLIPS[how](gradients), graph, scale="none"
    )
    plain.model.set_weights(loop.model.get_weights())
    for expected, actual in zip(plain.run(), loop.run(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


def test_harmless_changes_are_let_through():
    """Scaling, noise and moving averages commute with the loss scale."""
    loop = Loop(lambda _, gradients: [0.5 * g + 0.0 for g in gradients])
    half = Loop(lambda _, gradients: gradients, optimizer=half_rate())
    half.model.set_weights(loop.model.get_weights())
    for expected, actual in zip(half.run(), loop.run(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


def half_rate():
    return keras.optimizers.SGD(0.005)


@pytest.mark.parametrize("graph", [True, False])
def test_unscaling_twice_raises(graph):
    loop = Loop(lambda o, gs: o.unscale(o.unscale(gs)), graph)
    message = "unscale.. has already been called on this optimizer since the"
    with pytest.raises(RuntimeError, match=message):
        loop.run()
    # After the mistake is corrected the optimizer works on.
    loop.change = unscaled_then(list)
    loop.step = loop._step
    loop.run()
    assert int(loop.optimizer.iterations) == 1


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("scale", ["dynamic", 8.0])
def test_forgetting_scale_loss_raises(graph, scale):
    optimizer = tfmixed.LossScaleOptimizer("sgd", scale)
    weight = keras.Variable([1.0, 2.0])

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * weight)
        optimizer.apply(tape.gradient(loss, [weight]), [weight])

    with pytest.raises(RuntimeError, match="never scaled.*scale_loss"):
        (tf.function(step) if graph else step)()
    np.testing.assert_array_equal(weight.numpy(), [1.0, 2.0])


@pytest.mark.parametrize("scale", ["none", 1.0])
def test_nothing_to_forget_without_a_scale(scale):
    optimizer = tfmixed.LossScaleOptimizer(keras.optimizers.SGD(0.5), scale)
    weight = keras.Variable([1.0, 2.0])
    optimizer.apply([tf.constant([1.0, 1.0])], [weight])
    np.testing.assert_array_equal(weight.numpy(), [0.5, 1.5])


@pytest.mark.parametrize("graph", [True, False])
def test_an_infinite_gradient_cannot_be_clipped_away(graph):
    optimizer = tfmixed.LossScaleOptimizer("sgd", 64.0)
    weight = keras.Variable([1.0, 2.0])
    optimizer.build([weight])

    def step():
        optimizer.scale_loss(tf.constant(1.0))
        gradients = optimizer.unscale([tf.constant([np.inf, 1.0])])
        gradients = [tf.clip_by_value(g, -1.0, 1.0) for g in gradients]
        optimizer.apply(gradients, [weight])

    (tf.function(step) if graph else step)()
    assert int(optimizer.skipped_steps) == 1
    np.testing.assert_array_equal(weight.numpy(), [1.0, 2.0])


@pytest.mark.parametrize("graph", [True, False])
def test_a_loss_that_is_not_finite_skips_the_step(graph):
    """Also where its gradients are: a constant NaN has none."""
    optimizer = tfmixed.LossScaleOptimizer("sgd")
    weight = keras.Variable([1.0, 2.0])
    optimizer.build([weight])

    def step(extra):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(weight) + extra)
        optimizer.apply(tape.gradient(loss, [weight]), [weight])

    step = tf.function(step) if graph else step
    step(tf.constant(np.nan))
    assert int(optimizer.skipped_steps) == 1
    np.testing.assert_array_equal(weight.numpy(), [1.0, 2.0])
    step(tf.constant(0.0))
    assert int(optimizer.skipped_steps) == 1
    assert weight.numpy()[0] < 1.0


def test_loss_and_update_in_functions_of_their_own():
    """A flag of one graph does not leak into another."""
    optimizer = tfmixed.LossScaleOptimizer(keras.optimizers.SGD(1.0), 4.0)
    weight = keras.Variable([1.0, 2.0])
    optimizer.build([weight])

    @tf.function
    def gradients_of():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(weight))
        return tape.gradient(loss, [weight])

    @tf.function
    def update(gradients):
        optimizer.apply(gradients, [weight])

    for _ in range(3):
        update(gradients_of())
    np.testing.assert_array_equal(weight.numpy(), [-2.0, -1.0])
