import keras
import numpy as np
import pytest
from support import arrays
from support import slow
from support import small_model
from support import train_on

import tfmixed

HALF = ["mixed_float16", "mixed_bfloat16"]


class TestFloat32:
    @pytest.mark.parametrize("policy", HALF)
    def test_losses_and_metrics_see_float32(self, policy):
        seen = []

        def difference(y_true, y_pred):
            seen.append(y_pred.dtype)
            return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)

        inputs = keras.Input((6,))
        outputs = keras.layers.Dense(1, dtype=policy)(inputs)
        model = tfmixed.Model(inputs, outputs)
        model.compile("sgd", difference, metrics=[difference])
        model.fit(*arrays(2), verbose=0, validation_data=arrays(1))
        assert len(seen) >= 4
        assert {keras.backend.standardize_dtype(d) for d in seen} == {"float32"}
        assert model.predict(arrays(1)[0], verbose=0).dtype != "float32"

    @pytest.mark.parametrize("policy", HALF)
    def test_own_compute_loss_sees_float32(self, policy):
        class Own(tfmixed.Model):
            def compute_loss(
                self, x, y, y_pred, sample_weight=None, training=True
            ):
                assert y_pred.dtype == "float32"
                return keras.ops.mean((y - y_pred) ** 2)

        inputs = keras.Input((6,))
        model = Own(inputs, keras.layers.Dense(1, dtype=policy)(inputs))
        model.compile("sgd")
        assert np.isfinite(model.fit(*arrays(2), verbose=0).history["loss"])

    @pytest.mark.parametrize("policy", HALF)
    @pytest.mark.parametrize("regularizer", ["L2", *slow("L1", "L1L2")])
    def test_activity_regularizer(self, policy, regularizer):
        """1,024 activations of 32: their squares sum to 1,048,576."""
        inputs = keras.Input((4,))
        layer = keras.layers.Dense(
            128,
            kernel_initializer="ones",
            activity_regularizer=regularizer,
            dtype=policy,
        )
        x = layer(inputs)
        outputs = keras.layers.GlobalAveragePooling1D(dtype="float32")(
            keras.layers.Reshape((128, 1))(x)
        )
        losses = []
        for model_policy in (policy, "float32"):
            model = tfmixed.Model(inputs, outputs)
            with tfmixed.precision(model_policy, model=model):
                # A scale that overflows at first would hide what is tested.
                optimizer = tfmixed.LossScaleOptimizer("sgd", "none")
                model.compile(optimizer, "mse")
                x_data, y = np.full((8, 4), 8.0), np.full((8, 1), 32.0)
                losses.append(model.evaluate(x_data, y, verbose=0))
                losses.append(model.train_on_batch(x_data, y))
            layer.set_weights([np.ones((4, 128)), np.zeros(128)])
        assert losses == pytest.approx([losses[2]] * 4, rel=1e-3)
        regularizers = type(keras.regularizers.get(regularizer))
        assert type(layer.activity_regularizer) is regularizers

    @pytest.mark.parametrize("policy", HALF)
    def test_add_loss_beside_a_float32_loss(self, policy):
        """Stock Keras: a TypeError in `fit`."""

        class Penalty(keras.layers.Layer):
            def call(self, x):
                self.add_loss(0.5 * keras.ops.mean(x))
                return x

        inputs = keras.Input((6,))
        x = keras.layers.Dense(
            4, kernel_initializer="ones", dtype=policy, kernel_regularizer="l2"
        )(inputs)
        x = Penalty(dtype=policy)(x)
        outputs = keras.layers.Dense(
            1, kernel_initializer="zeros", dtype="float32"
        )(x)
        model = tfmixed.Model(inputs, outputs)
        model.compile(tfmixed.LossScaleOptimizer("sgd", 64.0), "mse")
        logs = train_on(model, np.ones((8, 6)), np.ones((8, 1)))
        # Error 1, half of 6, and 0.01 times 24 squares of 1.
        assert logs["loss"] == pytest.approx(1 + 3 + 0.24, rel=1e-2)
        # To look at them outside of the step is harmless, as in Keras.
        assert len(model.losses) == 2

    def test_masks_reach_the_loss(self):
        """The cast keeps the mask: padded steps do not count."""
        losses = []
        for policy in ("float32", "mixed_float16"):
            keras.utils.set_random_seed(0)
            inputs = keras.Input((5,))
            x = keras.layers.Embedding(7, 4, mask_zero=True, dtype=policy)(
                inputs
            )
            outputs = keras.layers.Dense(1, dtype=policy)(x)
            model = tfmixed.Model(inputs, outputs)
            model.compile("sgd", "mse")
            ids = np.array([[1, 2, 0, 0, 0], [3, 4, 5, 6, 0]])
            targets = np.where(ids > 0, 1.0, 1000.0)[..., None]
            losses.append(model.evaluate(ids, targets, verbose=0))
        assert losses[0] < 2
        assert losses[1] == pytest.approx(losses[0], rel=1e-2)

    def test_evaluation_in_float32_without_a_copy(self):
        model = small_model(tfmixed.Model, "mixed_float16")
        model.compile("sgd", "mse")
        x, y = arrays(2)
        twin = small_model(keras.Model, "float32")
        twin.set_weights(model.get_weights())
        twin.compile("sgd", "mse")
        with tfmixed.precision("float32", model=model):
            inside = model.evaluate(x, y, verbose=0)
        assert inside == twin.evaluate(x, y, verbose=0)
        assert model.evaluate(x, y, verbose=0) != inside
