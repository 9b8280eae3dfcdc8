"""What only a GPU can tell; everything else about GPUs is fed in elsewhere."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import arrays
from support import number
from support import small_model

import tfmixed

pytestmark = pytest.mark.gpu


def test_plan_follows_the_weakest_gpu():
    capabilities = [
        tf.config.experimental.get_device_details(device).get(
            "compute_capability"
        )
        for device in tf.config.list_physical_devices("GPU")
    ]
    plan = tfmixed.enable(verbose=False)
    if None in capabilities or min(capabilities) < (7, 0):
        assert plan.policy == "float32"
    else:
        assert plan.policy == "mixed_float16"
        assert plan.loss_scaling
        assert plan.jit_compile


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.filterwarnings("ignore:tfmixed.enable")
@pytest.mark.filterwarnings("ignore:.*training step")
def test_step_under_xla_skips_and_goes_on(policy):
    tfmixed.enable(policy, verbose=False)
    model = small_model(tfmixed.Model, policy)
    scale = tfmixed.DynamicLossScale(initial=64.0)
    model.compile(
        tfmixed.LossScaleOptimizer("adam", scale), "mse", jit_compile=True
    )
    model.train_on_batch(*arrays(1))
    before = model.get_weights()
    model.train_on_batch(*arrays(1, bad=(0,)))
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert number(model.optimizer.skipped_steps) == 1
    assert number(model.optimizer.dynamic_scale) == 32.0
    history = model.fit(*arrays(8), epochs=5, verbose=0).history["loss"]
    assert history[-1] < history[0]


@pytest.mark.filterwarnings("ignore:tfmixed.enable")
def test_float16_is_computed_on_the_gpu():
    keras.config.set_dtype_policy("mixed_float16")
    layer = keras.layers.Dense(8)
    outputs = layer(np.ones((4, 8), "float32"))
    assert outputs.dtype == tf.float16
    assert "GPU" in outputs.device
