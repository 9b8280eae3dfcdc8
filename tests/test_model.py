import contextlib
import inspect
import warnings

import keras
import numpy as np
import pytest
from support import Subclassed
from support import arrays
from support import check_untouched
from support import number
from support import numpy_of
from support import slow
from support import small_model
from support import train_on

import tfmixed


def nested():
    inner = small_model(keras.Model, "mixed_float16")
    inputs = keras.Input((6,))
    return tfmixed.Model(inputs, keras.layers.Dense(1)(inner(inputs)))


def own_policy():
    inputs = keras.Input((6,))
    outputs = keras.layers.Dense(1, dtype="mixed_float16")(inputs)
    return tfmixed.Model(inputs, outputs)


def pure_float16():
    inputs = keras.Input((6,))
    return tfmixed.Model(inputs, keras.layers.Dense(1, dtype="float16")(inputs))


def policy_map():
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    policies["half"] = keras.DTypePolicy("mixed_float16")
    inputs = keras.Input((6,))
    x = keras.layers.Dense(4, name="half", dtype=policies)(inputs)
    return tfmixed.Model(inputs, keras.layers.Dense(1, dtype=policies)(x))


def policy_set_later():
    model = small_model(tfmixed.Model)
    model.layers[1].dtype_policy = "mixed_float16"
    return model


def inside_a_wrapper():
    inputs = keras.Input((3, 6))
    layer = keras.layers.LSTM(2, dtype="mixed_float16")
    x = keras.layers.Bidirectional(layer)(inputs)
    return tfmixed.Model(inputs, keras.layers.Dense(1)(x))


FLOAT16_MODELS = [
    nested,
    own_policy,
    pure_float16,
    policy_map,
    policy_set_later,
    inside_a_wrapper,
]


class TestCompile:
    @pytest.mark.parametrize("build", FLOAT16_MODELS)
    def test_scales_whenever_anything_computes_in_float16(self, build):
        model = build()
        assert model.dtype_policy.name != "mixed_float16"
        model.compile("adam", "mse")
        assert model.optimizer.loss_scale == tfmixed.DynamicLossScale()

    def test_float16_that_appears_when_the_model_is_built(self):
        class Late(tfmixed.Model):
            def build(self, input_shape):
                self.head = keras.layers.Dense(1, dtype="mixed_float16")

            def call(self, x):
                return self.head(x)

        model = Late()
        model.compile(keras.optimizers.Adam(0.01), "mse")
        assert model.optimizer.loss_scale == tfmixed.NoLossScale()
        adam = model.optimizer.inner_optimizer
        model.fit(*arrays(2), verbose=0)
        assert model.optimizer.loss_scale == tfmixed.DynamicLossScale()
        assert model.optimizer.inner_optimizer is adam
        assert number(adam.iterations) == 1

    @pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
    def test_only_guards_where_no_scale_is_needed(self, policy):
        model = small_model(tfmixed.Model, policy)
        model.compile("adam", "mse")
        assert model.optimizer.loss_scale == tfmixed.NoLossScale()

    @pytest.mark.parametrize(
        "build", [own_policy, lambda: small_model(tfmixed.Model)]
    )
    def test_what_the_user_passes_wins(self, build):
        model = build()
        mine = tfmixed.LossScaleOptimizer("sgd", 16.0)
        model.compile(mine, "mse")
        assert model.optimizer is mine
        model.compile(keras.optimizers.SGD(loss_scale_factor=4.0), "mse")
        assert model.optimizer.loss_scale == tfmixed.FixedLossScale(4.0)
        model.compile(tfmixed.LossScaleOptimizer("sgd", "none"), "mse")
        assert model.optimizer.loss_scale == tfmixed.NoLossScale()
        model.fit(*arrays(1), verbose=0)
        assert model.optimizer.loss_scale == tfmixed.NoLossScale()

    def test_takes_all_that_keras_takes(self):
        expected = list(inspect.signature(keras.Model.compile).parameters)
        actual = list(inspect.signature(tfmixed.Model.compile).parameters)
        assert actual == expected

    @pytest.mark.parametrize("jit_compile", [True, False, "auto"])
    def test_xla_as_the_plan_says_or_the_user(self, jit_compile):
        model = small_model(tfmixed.Model)
        model.compile("sgd", "mse", jit_compile=jit_compile)
        expected = (
            tfmixed.current_plan().jit_compile
            if jit_compile == "auto"
            else jit_compile
        )
        assert model.jit_compile == expected

    def test_no_trainable_weight(self):
        model = small_model(tfmixed.Model)
        model.trainable = False
        model.compile("sgd", "mse")
        assert np.isfinite(model.evaluate(*arrays(1), verbose=0))
        message = f"The model '{model.name}' has no trainable weights"
        with pytest.raises(ValueError, match=message):
            model.fit(*arrays(1), verbose=0)

    def test_enable_decides_for_models_built_after_it(self):
        with pytest.warns(UserWarning, match="mixed_float16 was forced"):
            tfmixed.enable("mixed_float16", verbose=False)
        inputs = keras.Input((6,))
        outputs = keras.layers.Dense(1, dtype="float32")(
            keras.layers.Dense(4)(inputs)
        )
        model = tfmixed.Model(inputs, outputs)
        model.compile("sgd", "mse")
        assert model.layers[1].compute_dtype == "float16"
        assert model.optimizer.loss_scale == tfmixed.DynamicLossScale()

    def test_a_lost_policy_is_told(self):
        with contextlib.suppress(UserWarning), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tfmixed.enable("mixed_bfloat16", verbose=False)
        keras.utils.clear_session(free_memory=False)
        inputs = keras.Input((6,))
        outputs = keras.layers.Dense(1)(inputs)
        with pytest.warns(UserWarning, match="clear_session.. had reset it"):
            tfmixed.Model(inputs, outputs)


class TestKinds:
    def test_functional(self):
        model = small_model(tfmixed.Model)
        assert isinstance(model, tfmixed.Model)
        named = tfmixed.Model(
            inputs=model.inputs, outputs=model.outputs, name="named"
        )
        assert named.name == "named"
        assert named.layers == model.layers

    def test_a_subclass_may_be_functional(self):
        class Base(tfmixed.Model):
            pass

        class Mine(Base):
            def __init__(self):
                inputs = keras.Input((6,))
                super().__init__(inputs, keras.layers.Dense(1)(inputs))

        model = Mine()
        model.compile("sgd", "mse")
        assert np.isfinite(model.fit(*arrays(1), verbose=0).history["loss"])
        # The base classes of everybody else are as before.
        assert Subclassed().built is False
        assert keras.Model in tfmixed.Model.__bases__

    def test_sequential(self):
        model = tfmixed.Sequential(
            [
                keras.layers.Dense(4, dtype="mixed_float16"),
                keras.layers.BatchNormalization(dtype="mixed_float16"),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        model.compile("sgd", "mse")
        with pytest.warns(UserWarning, match="1 of 2 training steps was skip"):
            model.fit(
                *arrays(2, bad=(0,)), batch_size=8, shuffle=False, verbose=0
            )
        assert np.isfinite(model.layers[1].moving_mean.numpy()).all()
        assert model.optimizer.loss_scale == tfmixed.DynamicLossScale()

    @pytest.mark.parametrize("kind", ["functional", *slow("sequential")])
    @pytest.mark.parametrize("policy", ["mixed_float16", *slow("float32")])
    def test_file_round_trip(self, kind, policy, tmp_path):
        if kind == "functional":
            model = small_model(tfmixed.Model, policy)
        else:
            model = tfmixed.Sequential(
                [keras.Input((6,)), keras.layers.Dense(1, dtype=policy)]
            )
        model.compile("adam", "mse", metrics=["mae"])
        model.fit(*arrays(2), verbose=0)
        path = tmp_path / "model.keras"
        model.save(path)
        loaded = keras.models.load_model(path)
        assert type(loaded) is type(model)
        assert loaded.get_compile_config() == model.get_compile_config()
        assert loaded.get_compile_config()["jit_compile"] == "auto"
        check_untouched(
            numpy_of(model.optimizer.variables),
            numpy_of(loaded.optimizer.variables),
        )
        x, y = arrays(1)
        assert train_on(loaded, x, y) == train_on(model, x, y)

    def test_explicit_arguments_survive_the_file(self, tmp_path):
        model = small_model(tfmixed.Model, "mixed_float16")
        model.compile("adam", "mse", auto_scale_loss=False, jit_compile=True)
        model.train_on_batch(*arrays(1))
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert type(loaded.optimizer) is keras.optimizers.Adam
        assert loaded.jit_compile is True

    def test_weights_file_is_that_of_keras(self, tmp_path):
        model = small_model(tfmixed.Model)
        model.save_weights(tmp_path / "a.weights.h5")
        twin = small_model(keras.Model)
        twin.load_weights(tmp_path / "a.weights.h5")
        check_untouched(model.get_weights(), twin.get_weights())
