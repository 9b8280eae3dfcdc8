"""Misuse of the loss scale in training steps, found in their source."""

import keras
import pytest
import tensorflow as tf
from keras import layers

import tfmixed
from tfmixed.audit.audit import audit
from tfmixed.hardware import Cpu
from tfmixed.hardware import Device
from tfmixed.hardware import describe

A100 = describe((Device("GPU", "A100", (8, 0)),), Cpu("CPU", "Linux"))


class Base(tfmixed.Model):
    """What all steps below train."""


def misuses(step_class, optimizer=None, policy="mixed_float16"):
    inputs = keras.Input((4,))
    x = layers.Dense(8, dtype=policy)(inputs)
    model = step_class(inputs, layers.Dense(1, dtype="float32")(x))
    model.compile(optimizer or tfmixed.wrap_optimizer("sgd"), "mse")
    result = audit(model, hardware=A100)
    return [f for f in result.findings if f.code == "TM014"]


class Forgets(Base):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class ForgetsWithAnAlias(Base):
    def train_step(self, data):
        x, y = data
        optimizer = self.optimizer
        with tf.GradientTape() as tape:
            mse = tf.reduce_mean((self(x) - y) ** 2)
            total_loss = mse + sum(self.losses)
        pairs = zip(
            tape.gradient(total_loss, self.trainable_variables),
            self.trainable_variables,
            strict=True,
        )
        optimizer.apply_gradients(pairs)
        return {"loss": total_loss}


class ClipsScaled(Base):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class ClipsEach(Base):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [tf.clip_by_norm(g, 1.0) for g in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class DividesByHand(Base):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        gradients = [g / self.optimizer.dynamic_scale for g in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class GoesPast(Base):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.inner_optimizer.apply(
            gradients, self.trainable_variables
        )
        return {"loss": loss}


class CastsTheLoss(Base):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            half = tf.cast(loss, tf.float16)
            scaled = self.optimizer.scale_loss(half)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class InALoop(Base):
    @tf.function
    def one_batch(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )


WRONG = [
    (Forgets, "did not pass through `scale_loss`"),
    (ForgetsWithAnAlias, "did not pass through `scale_loss`"),
    (InALoop, "did not pass through `scale_loss`"),
    (ClipsScaled, "`clip_by_global_norm` clips gradients"),
    (ClipsEach, "`clip_by_norm` clips gradients"),
    (DividesByHand, "divided by the loss scale by hand"),
    (GoesPast, "`inner_optimizer.apply` goes past"),
    (CastsTheLoss, "the loss is cast to tf.float16"),
]


@pytest.mark.parametrize(("step", "text"), WRONG)
def test_misuse(step, text):
    (one,) = misuses(step)
    assert one.severity == "error"
    assert text in one.message
    assert one.layer is None


def test_message_names_method_and_line():
    (one,) = misuses(Forgets)
    with open(__file__, encoding="utf-8") as file:
        lines = file.read().splitlines()
    first = lines.index("class Forgets(Base):")
    line = next(
        number
        for number, text in enumerate(lines, 1)
        if number > first and "self.optimizer.apply(" in text
    )
    assert one.message == (
        f"`Forgets.train_step`, line {line}: `optimizer.apply` gets the "
        "gradients of a loss that did not pass through `scale_loss`, and "
        "divides them by the loss scale."
    )


class Right(Base):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            scaled_loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class RightInPlace(Base):
    """The way Keras's own step does it."""

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self._compute_loss(
                x=x, y=y, y_pred=self(x), sample_weight=weight, training=True
            )
            self._loss_tracker.update_state(loss)
            if self.optimizer is not None:
                loss = self.optimizer.scale_loss(loss)
        variables = self.trainable_weights
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return self.compute_metrics(x, y, self(x), sample_weight=weight)


class RightAndClipped(Base):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        gradients = self.optimizer.unscale(
            tape.gradient(scaled, self.trainable_variables)
        )
        gradients, norm = tf.clip_by_global_norm(gradients, 1.0)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "norm": norm}


class RightWithMore(Base):
    """A gradient penalty, a metric in its own scale, a helper."""

    penalty_scale = 10.0

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                prediction = self(x)
            slopes = inner.gradient(prediction, x)
            squares = tf.cast(slopes, tf.float32) ** 2
            penalty = tf.reduce_mean(squares) / self.penalty_scale
            loss = self.compute_loss(y=y, y_pred=prediction) + penalty
            scaled = self.optimizer.scale_loss(loss)
        reported_loss = scaled / self.optimizer.dynamic_scale
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.update(gradients)
        return {"loss": reported_loss}

    def update(self, gradients):
        self.optimizer.apply(gradients, self.trainable_variables)


class RightByItsBase(Base):
    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "loss": tf.clip_by_value(logs["loss"], 0.0, 1.0)}


class RightByHelper(Base):
    def scaled_loss(self, x, y):
        return self.optimizer.scale_loss(tf.reduce_mean((self(x) - y) ** 2))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.scaled_loss(x, y)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {}


def scaled_somewhere(loss, optimizer):
    return optimizer.scale_loss(loss)


class RightByAFunction(Base):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
            total_loss = scaled_somewhere(loss, self.optimizer)
        gradients = tape.gradient(total_loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {}


@pytest.mark.parametrize(
    "step",
    [
        RightByAFunction,
        Right,
        RightInPlace,
        RightAndClipped,
        RightWithMore,
        RightByItsBase,
        RightByHelper,
    ],
)
def test_correct_steps_raise_no_alarm(step):
    assert misuses(step) == []


def test_without_scaling_nothing_is_forgotten():
    plain = tfmixed.wrap_optimizer("sgd", loss_scale="none")
    assert misuses(Forgets, plain, "mixed_bfloat16") == []
    assert misuses(Base) == []


class Unguarded(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def test_step_of_a_plain_model_is_a_note():
    (one,) = misuses(Unguarded)
    assert one.severity == "note"
    assert "`Unguarded.train_step` is not guarded" in one.message
    assert "tfmixed.Model" in one.fix
    assert misuses(Unguarded, policy="mixed_bfloat16") == []


def test_two_scales_in_one():
    wrapper = keras.optimizers.LossScaleOptimizer
    twice = wrapper(keras.optimizers.SGD())
    # The wrapper takes away what its inner optimizer had before.
    twice.inner_optimizer.loss_scale_factor = 4.0
    (one,) = misuses(keras.Model, twice)
    assert one.severity == "error"
    assert "its inner optimizer SGD scales it again" in one.message
    nested = wrapper(wrapper(keras.optimizers.SGD()))
    assert len(misuses(keras.Model, nested)) == 1
    assert misuses(keras.Model, wrapper(keras.optimizers.SGD())) == []


class Gan(Base):
    """One optimizer scales, the other does not."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.other.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize(("scale", "count"), [("dynamic", 1), ("none", 0)])
def test_each_optimizer_is_asked_for_itself(scale, count):
    inputs = keras.Input((4,))
    x = layers.Dense(8, dtype="mixed_float16")(inputs)
    model = Gan(inputs, layers.Dense(1, dtype="float32")(x))
    model.other = tfmixed.wrap_optimizer("sgd", loss_scale=scale)
    model.compile(tfmixed.wrap_optimizer("sgd"), "mse")
    result = audit(model, hardware=A100)
    found = [f for f in result.findings if f.code == "TM014"]
    assert len(found) == count
