import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import Subclassed
from support import arrays
from support import batches
from support import check_untouched
from support import number
from support import numpy_of
from support import slow
from support import small_model
from support import state_of
from support import train_on

import tfmixed

HALF = ["mixed_float16", "mixed_bfloat16"]
EXECUTION = [{"run_eagerly": True}, {}, *slow({"jit_compile": True})]


class TestGuard:
    @pytest.mark.parametrize("how", EXECUTION)
    @pytest.mark.parametrize(
        "policy", ["mixed_float16", *slow("float32", "mixed_bfloat16")]
    )
    def test_bad_first_step_of_an_unbuilt_model(self, policy, how):
        model = Subclassed(policy)
        model.compile("adam", "mse", metrics=["mae"], **how)
        logs = train_on(model, *arrays(1, bad=(0,)))
        assert np.isnan(logs["loss"])
        assert number(model.optimizer.skipped_steps) == 1
        np.testing.assert_array_equal(model.norm.moving_mean, np.zeros(8))
        np.testing.assert_array_equal(model.norm.moving_variance, np.ones(8))
        assert number(model.seen.total) == 0
        # Kernel, bias, gamma, beta, kernel, bias: no slot has moved.
        assert number(model.optimizer.iterations) == 0

    @pytest.mark.parametrize("how", EXECUTION)
    def test_nothing_of_the_model_moves(self, how):
        """Seeds of dropout included: the next step is that without it."""
        models = []
        for bad in [(), (1,)]:
            keras.utils.set_random_seed(3)
            model = Subclassed()
            scale = tfmixed.DynamicLossScale(initial=64.0)
            optimizer = tfmixed.LossScaleOptimizer("adam", scale)
            model.compile(optimizer, "mse", metrics=["mae"], **how)
            three = batches(3, bad=bad)
            model.train_on_batch(*three[0])
            if bad:
                model.reset_metrics = lambda: None
                before = state_of(model)
                model.train_on_batch(*three[1])
                check_untouched(before, state_of(model))
                del model.reset_metrics
            model.train_on_batch(*three[2])
            models.append(model)
        for one, other in zip(*(state_of(m) for m in models), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("how", EXECUTION)
    def test_statistics_may_overflow_where_gradients_do_not(self, how):
        model = small_model(tfmixed.Model)
        model.compile("sgd", "mse", **how)
        model.train_on_batch(*arrays(1))
        before = state_of(model)[:-2]
        model.train_on_batch(*arrays(1, bad=(0,), value=3e38))
        check_untouched(before, state_of(model)[:-2])
        assert number(model.optimizer.skipped_steps) == 1

    @pytest.mark.parametrize("how", EXECUTION)
    def test_calibration_is_no_reason_to_terminate(self, how):
        """The loss is finite while the scale is still too high."""
        model = small_model(tfmixed.Model)
        scale = tfmixed.DynamicLossScale(
            initial=2.0**126, maximum=2.0**127, backoff_factor=2.0**-8
        )
        model.compile(tfmixed.LossScaleOptimizer("sgd", scale), "mse", **how)
        x, y = arrays(8)
        stop = keras.callbacks.TerminateOnNaN()
        with pytest.warns(UserWarning, match="of 8 training steps"):
            model.fit(x, 1e4 * y, 8, shuffle=False, verbose=0, callbacks=[stop])
        assert not model.stop_training
        assert 0 < number(model.optimizer.skipped_steps) < 8

    def test_a_loss_of_nan_is_one(self):
        model = small_model(tfmixed.Model)
        model.compile("sgd", "mse")
        stop = keras.callbacks.TerminateOnNaN()
        with pytest.warns(UserWarning, match="1 of 1 training steps was"):
            model.fit(
                *arrays(2, bad=(0,)),
                8,
                shuffle=False,
                verbose=0,
                callbacks=[stop],
            )
        assert model.stop_training

    def test_a_constant_that_is_not_finite_is_nobodys_fault(self):
        class Masked(keras.layers.Layer):
            def build(self, _):
                self.mask = self.add_weight(
                    shape=(6,), trainable=False, initializer="zeros"
                )
                self.count = self.add_weight(
                    shape=(), trainable=False, initializer="zeros"
                )

            def call(self, x):
                self.count.assign(self.count + 1)
                self.mask.assign(self.mask * 1.0)
                return keras.ops.where(keras.ops.isinf(self.mask), x, 0.0)

        inputs = keras.Input((6,))
        layer = Masked()
        model = tfmixed.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
        layer.mask.assign([-np.inf] * 6)
        model.compile("sgd", "mse")
        model.fit(*arrays(2), verbose=0)
        assert number(model.optimizer.skipped_steps) == 0

    def test_an_epoch_without_a_good_step_has_no_loss(self):
        model = small_model(tfmixed.Model)
        model.compile("sgd", "mse")
        with pytest.warns(UserWarning, match="2 of 2 training steps"):
            history = model.fit(
                *arrays(2, bad=(0, 1)), batch_size=8, shuffle=False, verbose=0
            )
        assert np.isnan(history.history["loss"][0])
        assert np.isfinite(model.evaluate(*arrays(1), verbose=0))

    def test_frozen_weights_are_not_written_in_the_graph(self):
        """Restoring a frozen backbone would cost its size under XLA."""
        backbone = small_model(keras.Model)
        backbone.trainable = False
        inputs = keras.Input((6,))
        x = backbone(inputs, training=False)
        model = tfmixed.Model(inputs, keras.layers.Dense(1)(x))
        model.compile("sgd", "mse")
        model.train_on_batch(*arrays(1))
        step = tf.function(model.train_step)
        data = tuple(tf.constant(a) for a in arrays(1))
        graph = step.get_concrete_function(data).graph
        handles = {id(v.value.handle) for v in backbone.variables}
        inside = [
            internal
            for outer, internal in graph.captures
            if id(outer) in handles
        ]
        assert inside
        for handle in inside:
            types = {operation.type for operation in handle.consumers()}
            assert types == {"ReadVariableOp"}

    def test_without_a_guard_if_so_asked(self):
        model = small_model(tfmixed.Model)
        model.compile("sgd", "mse", auto_scale_loss=False)
        assert type(model.optimizer) is keras.optimizers.SGD
        model.train_on_batch(*arrays(1, bad=(0,)))
        assert np.isnan(model.get_weights()[0]).any()


class TestReplicas:
    @pytest.mark.parametrize(
        "aggregation", ["mean", *slow("none", "sum", "only_first_replica")]
    )
    @pytest.mark.parametrize("bad_row", [7, *slow(0)])
    def test_state_of_every_aggregation_is_put_back(
        self, aggregation, bad_row, two_replicas
    ):
        """Some may only be written where the replicas meet."""

        class Counting(keras.layers.Layer):
            def build(self, _):
                self.count = self.add_weight(
                    shape=(),
                    initializer="zeros",
                    trainable=False,
                    aggregation=aggregation,
                )

            def call(self, x):
                self.count.assign(self.count + 1.0)
                return x

        with two_replicas.scope():
            inputs = keras.Input((6,))
            x = Counting()(inputs)
            model = tfmixed.Model(inputs, keras.layers.Dense(1)(x))
            model.compile("sgd", "mse")
        counts = []
        for bad in [(), (0,), ()]:
            data = tf.data.Dataset.from_tensors(batches(1, 8, bad, bad_row)[0])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.fit(data, shuffle=False, verbose=0)
            counts.append(number(model.layers[1].count))
        assert counts[0] > 0
        assert counts[1] == counts[0]
        assert counts[2] > counts[1]
        assert number(model.optimizer.skipped_steps) == 1


class TestCustomTrainStep:
    class Own(tfmixed.Model):
        """As in the Keras guide, with the scaling of the loss."""

        def train_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                assert y_pred.dtype == "float32"
                loss = self.compute_loss(y=y, y_pred=y_pred)
                scaled = self.optimizer.scale_loss(loss)
            variables = self.trainable_variables
            gradients = tape.gradient(scaled, variables)
            self.optimizer.apply(gradients, variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics}

    @pytest.mark.parametrize("how", EXECUTION)
    def test_is_guarded(self, how):
        inputs = keras.Input((6,))
        x = keras.layers.Dense(4, dtype="mixed_float16")(inputs)
        x = keras.layers.BatchNormalization(dtype="mixed_float16")(x)
        outputs = keras.layers.Dense(1, dtype="mixed_float16")(x)
        model = self.Own(inputs, outputs)
        optimizer = tfmixed.LossScaleOptimizer(
            "adam", tfmixed.DynamicLossScale(initial=64.0)
        )
        model.compile(optimizer, "mse", metrics=["mae"], **how)
        model.train_on_batch(*arrays(1))
        before = state_of(model)[:-4]
        model.train_on_batch(*arrays(1, bad=(0,)))
        check_untouched(before, state_of(model)[:-4])
        assert number(model.optimizer.skipped_steps) == 1

    def test_calling_the_step_of_the_base_class(self):
        class More(tfmixed.Model):
            def train_step(self, data):
                return {**super().train_step(data), "extra": tf.constant(1.0)}

        inputs = keras.Input((6,))
        x = keras.layers.BatchNormalization()(inputs)
        model = More(inputs, keras.layers.Dense(1)(x))
        model.compile("sgd", "mse")
        logs = train_on(model, *arrays(1, bad=(0,)))
        assert logs["extra"] == 1.0
        assert np.isfinite(model.layers[1].moving_mean.numpy()).all()

    def test_gan(self):
        """Two optimizers, no `call`, losses of its own in the logs."""

        class Gan(tfmixed.Model):
            def __init__(self):
                super().__init__()
                self.generator = small_model(keras.Model, "mixed_float16")
                self.critic = keras.Sequential(
                    [
                        keras.layers.BatchNormalization(dtype="mixed_float16"),
                        keras.layers.Dense(1, dtype="float32"),
                    ]
                )
                self.generator_optimizer = tfmixed.wrap_optimizer("sgd")
                self.critic_optimizer = tfmixed.wrap_optimizer("sgd")
                self.generator_loss = keras.metrics.Mean(name="generator")

            def train_step(self, data):
                noise, factor = data
                with tf.GradientTape(persistent=True) as tape:
                    fake = self.generator(noise, training=True)
                    score = self.critic(fake, training=True)
                    critic_loss = tf.reduce_mean(score)
                    loss = -tf.reduce_mean(score) * factor[0]
                    scaled = self.generator_optimizer.scale_loss(loss)
                    other = self.critic_optimizer.scale_loss(critic_loss)
                for optimizer, target, part in (
                    (self.generator_optimizer, scaled, self.generator),
                    (self.critic_optimizer, other, self.critic),
                ):
                    variables = part.trainable_variables
                    gradients = tape.gradient(target, variables)
                    optimizer.apply(gradients, variables)
                self.generator_loss.update_state(loss)
                return {"generator": self.generator_loss.result()}

        model = Gan()
        model.compile(optimizer=None)
        noise = np.ones((4, 6), "float32") * np.arange(4)[:, None]
        good, bad = np.ones(4, "float32"), np.full(4, np.nan, "float32")
        model.fit(noise, good, batch_size=4, epochs=2, verbose=0)
        statistics = numpy_of(model.non_trainable_variables)
        weights = model.generator.get_weights()
        critic = model.critic.get_weights()
        with pytest.warns(UserWarning, match="1 of 1 training steps was"):
            model.fit(noise, bad, batch_size=4, verbose=0)
        check_untouched(statistics, numpy_of(model.non_trainable_variables))
        check_untouched(weights, model.generator.get_weights())
        # The critic's own gradients were finite.
        assert not np.array_equal(
            critic[-1], model.critic.get_weights()[-1]
        ) or not np.array_equal(critic[-2], model.critic.get_weights()[-2])
        assert number(model.generator_loss.count) == 0
        assert number(model.generator_optimizer.skipped_steps) == 1
        assert number(model.critic_optimizer.skipped_steps) == 0
