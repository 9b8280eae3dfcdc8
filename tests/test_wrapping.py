import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import losses_of
from support import number
from support import numpy_of
from support import small_model
from support import trained

import tfmixed

STOCK = keras.optimizers.LossScaleOptimizer


class TestUpgrade:
    """A stock Keras `LossScaleOptimizer` becomes one of tfmixed."""

    def stock(self, policy="float32"):
        model = small_model(keras.Model, policy)
        optimizer = STOCK(keras.optimizers.Adam(0.01), 64.0, 3)
        model.compile(optimizer, "mse")
        return trained(model)

    def test_wrapping_keeps_the_state(self):
        model = self.stock()
        stock = model.optimizer
        optimizer = tfmixed.wrap_optimizer(stock)
        assert optimizer.inner_optimizer is stock.inner_optimizer
        assert optimizer.loss_scale == tfmixed.DynamicLossScale(
            initial=64.0, growth_interval=3
        )
        # Six good steps: two growths.
        assert number(optimizer.dynamic_scale) == 256.0
        assert number(optimizer.step_counter) == 0
        assert number(optimizer.iterations) == 6
        slots = len(stock.inner_optimizer.variables)
        assert len(optimizer.variables) == slots + 7

    def test_file_of_a_stock_model(self, tmp_path):
        self.stock().save(tmp_path / "stock.keras")
        stock = keras.models.load_model(tmp_path / "stock.keras")
        control = keras.models.load_model(tmp_path / "stock.keras")
        upgraded = tfmixed.Model(stock.inputs, stock.outputs)
        upgraded.compile(stock.optimizer, "mse")
        assert type(upgraded.optimizer) is tfmixed.LossScaleOptimizer
        assert number(upgraded.optimizer.dynamic_scale) == 256.0
        assert number(upgraded.optimizer.iterations) == 6
        assert losses_of(upgraded) == pytest.approx(
            losses_of(control), rel=1e-6
        )

    def test_from_a_stock_config(self):
        stock = STOCK(keras.optimizers.SGD(0.25), 128.0, 5, name="old")
        config = stock.get_config()
        optimizer = tfmixed.LossScaleOptimizer.from_config(config)
        assert optimizer.loss_scale == tfmixed.DynamicLossScale(
            initial=128.0, growth_interval=5
        )
        assert optimizer.name == "old"

    @pytest.mark.parametrize(
        ("scale", "expected"), [(np.inf, 2.0**24), (0.0, 1.0)]
    )
    def test_a_scale_that_ran_away_is_brought_back(self, scale, expected):
        model = self.stock()
        model.optimizer.dynamic_scale.assign(scale)
        store = {}
        model.optimizer.save_own_variables(store)
        upgraded = tfmixed.wrap_optimizer(model.optimizer)
        assert number(upgraded.dynamic_scale) == expected
        fresh = tfmixed.LossScaleOptimizer(keras.optimizers.Adam(0.01))
        fresh.build(model.trainable_variables)
        fresh.load_own_variables(store)
        assert number(fresh.dynamic_scale) == expected
        assert number(fresh.iterations) == 6

    def test_state_of_the_bare_optimizer(self):
        """A float32 training goes on in mixed precision."""
        control = small_model(keras.Model)
        control.compile(keras.optimizers.Adam(0.01), "mse")
        trained(control)
        store = {}
        control.optimizer.save_own_variables(store)
        optimizer = tfmixed.LossScaleOptimizer(keras.optimizers.Adam(0.5))
        optimizer.build(control.trainable_variables)
        optimizer.load_own_variables(store)
        for one, other in zip(
            numpy_of(control.optimizer.variables),
            numpy_of(optimizer.inner_optimizer.variables),
            strict=True,
        ):
            np.testing.assert_array_equal(one, other)
        assert number(optimizer.dynamic_scale) == 2.0**15


class TestWrapping:
    def test_idempotent(self):
        optimizer = tfmixed.wrap_optimizer("adam")
        assert type(optimizer.inner_optimizer) is keras.optimizers.Adam
        assert tfmixed.wrap_optimizer(optimizer) is optimizer
        again = tfmixed.wrap_optimizer(optimizer, loss_scale="dynamic")
        assert again is optimizer

    def test_keras_never_wraps_it(self):
        model = small_model(keras.Model, "mixed_float16")
        optimizer = tfmixed.wrap_optimizer("adam")
        model.compile(optimizer, "mse")
        assert model.optimizer is optimizer

    def test_own_factor_becomes_the_fixed_scale(self):
        inner = keras.optimizers.SGD(loss_scale_factor=128.0)
        optimizer = tfmixed.wrap_optimizer(inner)
        assert optimizer.loss_scale == tfmixed.FixedLossScale(128.0)
        assert inner.loss_scale_factor is None

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                (tfmixed.LossScaleOptimizer("sgd"),),
                "is itself a LossScaleOptimizer: the loss would be scaled",
            ),
            ((STOCK(keras.optimizers.SGD()),), "scaled twice"),
            (
                (keras.optimizers.SGD(loss_scale_factor=8.0),),
                "has loss_scale_factor=8.0: the loss would be scaled twice",
            ),
            (("sgd", -1.0), "`value` is -1.0"),
            (("sgdd",), "sgdd"),
        ],
    )
    def test_rejects(self, arguments, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            tfmixed.LossScaleOptimizer(*arguments)

    def test_two_scales_are_one_too_many(self):
        optimizer = tfmixed.wrap_optimizer("sgd", loss_scale=8.0)
        with pytest.raises(
            ValueError, match=r"already has the loss scale Fixed"
        ):
            tfmixed.wrap_optimizer(optimizer, loss_scale=16.0)
        inner = keras.optimizers.SGD(loss_scale_factor=8.0)
        with pytest.raises(
            ValueError, match=r"already has the loss scale Fixed"
        ):
            tfmixed.wrap_optimizer(inner, loss_scale="dynamic")
        assert inner.loss_scale_factor == 8.0

    def test_learning_rate_is_that_of_the_inner_optimizer(self):
        optimizer = tfmixed.wrap_optimizer(keras.optimizers.SGD(0.5))
        optimizer.learning_rate = 0.25
        assert number(optimizer.inner_optimizer.learning_rate) == 0.25

    def test_two_optimizers_decide_for_themselves(self):
        """A GAN: a bad generator step leaves the discriminator's alone."""
        first = tfmixed.LossScaleOptimizer(keras.optimizers.SGD(0.5))
        second = tfmixed.LossScaleOptimizer(keras.optimizers.SGD(0.5))
        one, other = keras.Variable([1.0]), keras.Variable([1.0])

        @tf.function
        def step(factor):
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_sum(one * other)
                first_loss = first.scale_loss(loss)
                second_loss = second.scale_loss(loss * factor)
            first.apply(tape.gradient(first_loss, [one]), [one])
            second.apply(tape.gradient(second_loss, [other]), [other])

        first.build([one])
        second.build([other])
        step(tf.constant(np.nan))
        np.testing.assert_array_equal(one.numpy(), [0.5])
        np.testing.assert_array_equal(other.numpy(), [1.0])
        assert number(first.skipped_steps) == 0
        assert number(second.skipped_steps) == 1
        assert number(first.dynamic_scale) == 2 * number(second.dynamic_scale)
