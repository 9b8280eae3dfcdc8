"""What every test needs: quiet TensorFlow, a clean Keras state, GPU skips."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Tests choose the policy themselves; a developer's own setting must not.
os.environ.pop("TFMIXED_POLICY", None)

import keras  # noqa: E402
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402

import tfmixed  # noqa: E402

# Two logical CPU devices stand for two replicas; they must exist before
# TensorFlow starts its runtime.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 2,
)


def pytest_collection_modifyitems(config, items):
    _leave_out_long_tests(config, items)
    if tf.config.list_physical_devices("GPU"):
        return
    skip = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def _leave_out_long_tests(config, items):
    if "long" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _clean_keras():
    """Gives each test the default policy, a fixed seed and fresh names."""
    keras.utils.clear_session(free_memory=False)
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)
    yield
    tfmixed.disable()
    keras.config.set_dtype_policy("float32")


@pytest.fixture(scope="session")
def two_replicas():
    """A MirroredStrategy over two logical CPU devices."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
