"""The only place that touches private parts of Keras and TensorFlow.

Read from Keras 3.15.1: `keras/src/backend/common/global_state.py`,
`keras/src/dtype_policies/dtype_policy.py`, `keras/src/layers/layer.py`,
`keras/src/layers/preprocessing/normalization.py`,
`keras/src/layers/core/input_layer.py`, `keras/src/models/functional.py`,
`keras/src/trainers/trainer.py` and `keras/src/backend/tensorflow/trainer.py`.
Nothing here changes Keras; when a newer Keras moves one of these parts, this
module and its test are what breaks, and nothing else.
"""

import contextlib
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.models.functional import Functional

__all__ = ["Functional"]

_POLICY = "dtype_policy"
_MARK = "tfmixed_mark"
_FUNCTIONS = ("train_function", "test_function", "predict_function")


def thread_policy() -> keras.DTypePolicy | None:
    """The global policy of this thread; None where nothing has set it.

    `keras.config.dtype_policy()` cannot tell these apart: it sets the default
    when it finds nothing, as in a new thread or after `clear_session()`.
    """
    return global_state.get_global_attribute(_POLICY)


def set_thread_policy(policy: keras.DTypePolicy | None) -> None:
    """Sets the global policy of this thread; None unsets it."""
    global_state.set_global_attribute(_POLICY, policy)


def thread_mark() -> Any:
    """What `set_thread_mark` left in this thread; None after a reset."""
    return global_state.get_global_attribute(_MARK)


def set_thread_mark(mark: Any) -> None:
    """Leaves a mark beside the global policy of this thread.

    The mark lives in Keras's own per-thread state, so it is lost exactly when
    the policy is: in another thread, and in `keras.utils.clear_session()`.
    """
    global_state.set_global_attribute(_MARK, mark)


def flatten_layers(model: keras.Layer) -> list[keras.Layer]:
    """The layer itself and every layer inside it, each once.

    Unlike `model.layers` this goes into composite layers: the projections of
    MultiHeadAttention, the cells of RNN, the layers of nested models.
    """
    seen: dict[int, keras.Layer] = {}
    for layer in model._flatten_layers():
        seen.setdefault(id(layer), layer)
    return list(seen.values())


def child_layers(layer: keras.Layer) -> list[keras.Layer]:
    """The layers that stand directly inside this one."""
    return list(layer._layers)


def layer_policy(layer: keras.Layer) -> keras.DTypePolicy:
    """The layer's own policy object; a DTypePolicyMap comes as the map."""
    return layer._dtype_policy


def set_layer_policy(layer: keras.Layer, policy: keras.DTypePolicy) -> None:
    """Gives the layer this policy object, and does nothing else.

    The setter of `layer.dtype_policy` writes into a DTypePolicyMap that other
    layers share, and quantizes the weights for a quantized policy.
    """
    layer._dtype_policy = policy
    _refresh_cached_tensors(layer)


def _refresh_cached_tensors(layer: keras.Layer) -> None:
    # Normalization is the one layer of Keras that keeps tensors in the compute
    # dtype: once rounded to 16 bits they stay so, whatever the policy.
    if not isinstance(layer, keras.layers.Normalization) or not layer.built:
        return
    if layer.input_mean is None:
        layer.finalize_state()
    else:
        layer.build(layer._build_input_shape)


def input_dtype(layer: keras.Layer) -> str | None:
    """The dtype that an InputLayer casts to; None for any other layer.

    A Sequential model that was built under a 16-bit policy declares a 16-bit
    input, which no dtype policy changes afterwards.
    """
    return layer.dtype if isinstance(layer, keras.layers.InputLayer) else None


def set_input_dtype(layer: keras.layers.InputLayer, dtype: str) -> None:
    """Declares another dtype for the input of a functional model."""
    layer._dtype = dtype
    layer.output._dtype = dtype


def compiled_functions(model: keras.Model) -> dict[str, Any]:
    """The functions that `fit`, `evaluate` and `predict` have made so far."""
    return {name: getattr(model, name) for name in _FUNCTIONS}


def set_compiled_functions(
    model: keras.Model, functions: dict[str, Any] | None
) -> None:
    """Puts functions back; None makes Keras build them anew when needed."""
    for name in _FUNCTIONS:
        setattr(model, name, functions[name] if functions else None)


def compile_token(model: keras.Model) -> Any:
    """An object that is another one after each `model.compile`."""
    return getattr(model, "_compile_config", None)


def optimizer_variables(optimizer: Any) -> list[Any]:
    """The trainable variables that an optimizer was built with, in order."""
    return list(optimizer._trainable_variables)


def needs_merge_call() -> bool:
    """Whether replicas have to meet before they update variables.

    False without a strategy, and under XLA on GPUs, where the replicas talk
    by collectives only.
    """
    supports_none = tf.__internal__.distribute.strategy_supports_no_merge_call
    return tf.distribute.has_strategy() and not supports_none()


def build_for_step(model: keras.Model, data: Any) -> None:
    """Creates what the first step on `data` would create.

    Layers, metrics, losses and the optimizer of the model; nothing where all
    of it exists. Where the model cannot be called on such data (a model with a
    `train_step` of its own need not be), what could not be built is left to
    the step.
    """
    optimizer = model.optimizer
    if model.built and optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    with contextlib.suppress(Exception):
        model._symbolic_build(data_batch=keras.tree.map_structure(_spec, data))


def _spec(value: Any) -> Any:
    if value is None:
        return None
    dtype = keras.backend.standardize_dtype(value.dtype)
    return keras.KerasTensor(tuple(value.shape), dtype)


def copy_mask(source: Any, target: Any) -> Any:
    """Gives `target` the Keras mask of `source`, and returns it."""
    mask = getattr(source, "_keras_mask", None)
    if mask is not None:
        target._keras_mask = mask
    return target
