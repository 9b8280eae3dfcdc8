"""XLA and several replicas: the step runs as a graph, and says so."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import arrays
from support import batches
from support import check_untouched
from support import number
from support import small_model

import tfmixed
from tfmixed import policy as policy_lib
from tfmixed.hardware import Cpu
from tfmixed.hardware import Device
from tfmixed.hardware import describe

MESSAGE = (
    "jit_compile=True is not possible for the 2 replicas of MirroredStrategy"
)


@pytest.fixture
def plan_with_xla(monkeypatch):
    """The plan of a machine where XLA pays."""
    gpu = Device("GPU", "Tesla T4", (7, 5), 15360)
    machine = describe((gpu,), Cpu("Intel Xeon", "Linux"))
    plan = policy_lib.choose(machine)
    assert plan.jit_compile
    monkeypatch.setattr(policy_lib, "current_plan", lambda: plan)


def compiled(strategy, jit_compile, model_class=tfmixed.Model, optimizer="sgd"):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = small_model(model_class)
        model.compile(optimizer, "mse", jit_compile=jit_compile)
    return model


def refused(strategy, **keywords):
    """A model with `jit_compile=True`, and what was said to it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = compiled(strategy, True, **keywords)
    return model, [w for w in caught if "jit_compile" in str(w.message)]


def fit(model, x, y):
    """Three steps of 8; Keras warns of sharding and of the shuffle."""
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(data, shuffle=False, verbose=0)
    return model


def test_an_explicit_true_is_refused_and_told_once(two_replicas):
    model, told = refused(two_replicas)
    assert model.jit_compile is False
    assert len(told) == 1
    assert re.match(MESSAGE, str(told[0].message))
    assert told[0].filename == __file__
    # As it was given: another machine may have one device.
    assert model.get_compile_config()["jit_compile"] is True


def test_auto_is_a_graph_without_a_word(two_replicas, plan_with_xla):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = compiled(two_replicas, "auto")
    assert model.jit_compile is False
    assert model.get_compile_config()["jit_compile"] == "auto"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(two_replicas, False).jit_compile is False


def test_one_replica_is_compiled():
    one_device = tf.distribute.OneDeviceStrategy("CPU:0")
    for strategy in (tf.distribute.get_strategy(), one_device):
        assert compiled(strategy, True).jit_compile is True


def test_a_later_compile_starts_anew(two_replicas):
    model, _ = refused(two_replicas)
    with two_replicas.scope():
        model.compile("sgd", "mse", jit_compile=False)
    assert model.get_compile_config()["jit_compile"] is False


@pytest.mark.slow
def test_weights_are_those_without_xla(two_replicas):
    x, y = arrays(3)
    model, _ = refused(two_replicas)
    fit(model, x, y)
    # Stock Keras on the replicas, which normalize their halves of a batch.
    twin = fit(compiled(two_replicas, False, keras.Model), x, y)
    for one, other in zip(model.get_weights(), twin.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("bad_row", [0, 7])
def test_an_inf_on_one_replica_skips_the_step_on_all(two_replicas, bad_row):
    """Rows 0 to 3 go to the first replica, the others to the second."""
    optimizer = tfmixed.LossScaleOptimizer(
        "sgd", tfmixed.DynamicLossScale(initial=64.0)
    )
    model, _ = refused(two_replicas, optimizer=optimizer)
    fit(model, *arrays(1))
    before = model.get_weights()
    (batch,) = batches(1, bad=(0,), bad_row=bad_row, value=np.inf)
    fit(model, *batch)
    check_untouched(before, model.get_weights())
    assert number(model.optimizer.skipped_steps) == 1
    assert number(model.optimizer.dynamic_scale) == 32.0
    fit(model, *arrays(1, seed=1))
    assert np.isfinite(np.concatenate([w.ravel() for w in before])).all()
    assert not np.array_equal(before[0], model.get_weights()[0])
