"""The only place that touches private parts of Keras and TensorFlow.

Read from Keras 3.15.1: `keras/src/backend/common/global_state.py`,
`keras/src/backend/common/symbolic_scope.py`,
`keras/src/optimizers/base_optimizer.py`,
`keras/src/dtype_policies/dtype_policy.py`, `keras/src/layers/layer.py`,
`keras/src/layers/preprocessing/normalization.py`,
`keras/src/layers/core/input_layer.py`, `keras/src/models/functional.py`,
`keras/src/trainers/trainer.py`, `keras/src/trainers/compile_utils.py`,
`keras/src/random/seed_generator.py` and
`keras/src/backend/tensorflow/trainer.py`; and from TensorFlow 2.21.0:
`tensorflow/python/eager/record.py` and
`tensorflow/python/ops/control_flow_util.py`.
Nothing here changes Keras; when a newer Keras moves one of these parts, this
module and its test are what breaks, and nothing else.
"""

import contextlib
import dataclasses
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common import symbolic_scope
from keras.src.models.functional import Functional
from keras.src.models.functional import functional_like_constructor
from keras.src.trainers import compile_utils
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_util

__all__ = ["Functional"]

_POLICY = "dtype_policy"
_MARK = "tfmixed_mark"
_AUTOCAST = "autocast_scope"
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
    refresh_cached_tensors(layer)


def refresh_cached_tensors(layer: keras.Layer) -> None:
    """Makes a layer compute anew what it derives from its variables."""
    # Normalization is the one layer of Keras that keeps tensors in the compute
    # dtype: once rounded to 16 bits they stay so, whatever the policy.
    if not isinstance(layer, keras.layers.Normalization) or not layer.built:
        return
    # A tensor of a function that is being traced would outlive it.
    with tf.init_scope():
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


@dataclasses.dataclass(frozen=True)
class Node:
    """One call of an operation in a functional model.

    Attributes:
        operation: The layer or `keras.ops` operation that is called.
        inputs: The symbolic tensors among its arguments.
        outputs: The symbolic tensors that it returns.
        args: Its positional arguments, as given.
        kwargs: Its keyword arguments, as given.
    """

    operation: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def graph_of(model: Any) -> Any:
    """The functional model that runs a model; None for a subclassed one.

    A Sequential model has one inside, once it is built.
    """
    if isinstance(model, keras.Sequential):
        return model._functional
    return model if isinstance(model, Functional) else None


def graph_nodes(functional: Any) -> list[Node]:
    """The calls of a functional model, inputs first, without InputLayers."""
    by_depth = functional._nodes_by_depth
    return [
        Node(
            node.operation,
            tuple(node.input_tensors),
            tuple(node.outputs),
            tuple(node.arguments.args),
            dict(node.arguments.kwargs),
        )
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
        if node.operation is not None and not node.is_input
    ]


def graph_operations(model: Any) -> list[Any]:
    """The layers and operations of a model, those of nested models too."""
    found = []
    functional = graph_of(model)
    below = model.layers if functional is None else functional.operations
    for operation in below:
        found.append(operation)
        if isinstance(operation, keras.Sequential | Functional):
            found += graph_operations(operation)
    return found


def graph_inputs(functional: Any) -> tuple[Any, Any]:
    """The input tensors of a functional model: a flat list, and structured."""
    return list(functional.inputs), functional._inputs_struct


def run_graph(functional: Any, inputs: list[Any], call: Any) -> Any:
    """Calls a function for each node of a graph; returns the outputs.

    The calls of a shared layer come in the order in which they were made, so
    that a model made of the results has the same configuration.

    Args:
        functional: A functional model.
        inputs: Flat list of tensors, symbolic or not.
        call: A function of an operation, its args and its kwargs.
    """
    by_depth = functional._nodes_by_depth
    values = {
        id(old): new for old, new in zip(functional.inputs, inputs, strict=True)
    }
    waiting = [
        node
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
        if not node.is_input
    ]
    order = _calls_in_order(waiting)
    while waiting:
        later = []
        for node in waiting:
            is_next = order[id(node.operation)][0] is node
            if not is_next or any(
                id(x) not in values for x in node.input_tensors
            ):
                later.append(node)
                continue
            order[id(node.operation)].pop(0)
            args, kwargs = node.arguments.fill_in(values)
            outputs = keras.tree.flatten(call(node.operation, args, kwargs))
            for old, new in zip(node.outputs, outputs, strict=True):
                values[id(old)] = new
        if len(later) == len(waiting):
            raise ValueError(
                f"The graph of '{functional.name}' cannot be run: the inputs "
                f"of '{later[0].operation.name}' are not connected."
            )
        waiting = later
    flat = [values[id(x)] for x in functional.outputs]
    return keras.tree.pack_sequence_as(functional._outputs_struct, flat)


def _calls_in_order(nodes: list[Any]) -> dict[int, list[Any]]:
    """The nodes of each operation, in the order of its calls."""
    order: dict[int, list[Any]] = {}
    for node in nodes:
        order.setdefault(id(node.operation), []).append(node)
    for calls in order.values():
        if len(calls) > 1:
            made = {
                id(node): number
                for number, node in enumerate(calls[0].operation._inbound_nodes)
            }
            calls.sort(key=lambda node: made[id(node)])
    return order


def copy_operation(operation: Any) -> Any:
    """A copy of a `keras.ops` operation that no model calls yet."""
    copy = object.__new__(type(operation))
    copy.__dict__.update(operation.__dict__)
    copy._inbound_nodes = []
    copy._outbound_nodes = []
    return copy


def is_functional_like(model_class: type) -> bool:
    """Whether a class is constructed from inputs and outputs."""
    return bool(functional_like_constructor(model_class))


def sequential_layers(model: keras.Sequential) -> list[keras.Layer]:
    """The layers of a Sequential model, its InputLayer included."""
    return list(model._layers)


def seed_generators(layer: keras.Layer) -> list[Any]:
    """The random seed generators that a layer itself owns."""
    return list(layer._seed_generators)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """What `model.compile` was called with, as it was given."""
    return dict(model._compile_config.config)


def set_instance_call(layer: Any, call: Any) -> None:
    """Puts a function in the place of an instance's `call`; None removes it.

    Neither the class nor Keras is touched: Keras looks `call` up on the
    instance. Its tracking of attributes is passed by.
    """
    if call is None:
        layer.__dict__.pop("call", None)
    else:
        layer.__dict__["call"] = call


def set_instance_apply(optimizer: Any, apply: Any) -> None:
    """Puts a function in the place of an optimizer's `apply`.

    On the instance, whose class stays as it is; `apply_gradients` calls it.
    """
    vars(optimizer)["apply"] = apply


def set_instance_train_step(model: Any, step: Any) -> None:
    """Puts a function in the place of a model's `train_step`.

    On the instance, whose class stays as it is; `make_train_function` uses it.
    None removes it.
    """
    if step is None:
        vars(model).pop("train_step", None)
    else:
        vars(model)["train_step"] = step


def build_shapes(layer: keras.Layer) -> Any:
    """The shapes that a layer was built with; None if it does not know."""
    return getattr(layer, "_build_shapes_dict", None)


def kept_losses(layer: keras.Layer) -> list[tuple[keras.Layer, list[Any]]]:
    """What `add_loss` has put into a layer and those inside it so far."""
    return [(inner, added_losses(inner)) for inner in flatten_layers(layer)]


def restore_losses(kept: list[tuple[keras.Layer, list[Any]]]) -> None:
    """Puts losses back, and drops those that have come since."""
    for layer, losses in kept:
        set_added_losses(layer, losses)


def added_losses(layer: keras.Layer) -> list[Any]:
    """What the layer itself has added with `add_loss` in its last call."""
    return list(layer._losses)


def set_added_losses(layer: keras.Layer, losses: list[Any]) -> None:
    """Puts other losses in the place of what a layer has added."""
    layer._losses[:] = losses


def takes_training(model: keras.Model) -> bool:
    """Whether the training step of Keras calls the model with `training`."""
    return bool(model._call_has_training_arg)


def compute_loss(
    model: keras.Model, x: Any, y: Any, outputs: Any, w: Any
) -> Any:
    """The loss of a compiled model, as its training step computes it."""
    return model._compute_loss(
        x=x, y=y, y_pred=outputs, sample_weight=w, training=True
    )


def compile_loss(model: keras.Model, loss: Any) -> Any:
    """A function of (y, outputs, sample weights) as `compile` makes of a loss.

    Args:
        model: The model, which is not changed.
        loss: What `compile(loss=...)` takes, also lists and dicts.
    """
    names = getattr(model, "output_names", None)
    return compile_utils.CompileLoss(loss, output_names=names)


def global_seed() -> Any:
    """The seed generator for draws without one of their own; None if unused."""
    return global_state.get_global_attribute("global_seed_generator")


def set_global_seed(generator: Any) -> None:
    """Puts another seed generator in its place; None for a new one."""
    global_state.set_global_attribute("global_seed_generator", generator)


def lambda_arguments(layer: keras.layers.Lambda) -> dict[str, Any]:
    """What a Lambda layer was constructed with, its function as it is."""
    return {
        "function": layer.function,
        "output_shape": layer._output_shape,
        "mask": layer.mask,
        "arguments": layer.arguments,
    }


def is_recording(tensors: Any) -> bool:
    """Whether a `tf.GradientTape` is watching any of these tensors.

    Within a `tf.function` that holds the tape, that is: as in a train step.
    """
    return bool(record.should_record_backprop(list(tensors)))


def is_symbolic() -> bool:
    """Whether Keras calls layers only to learn the shapes that they return."""
    return bool(symbolic_scope.in_symbolic_scope())


def inside_xla() -> bool:
    """Whether the code is being traced for `jit_compile=True`."""
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Inside the block variables are themselves, and in their own dtype."""
    outer = global_state.get_global_attribute(_AUTOCAST)
    global_state.set_global_attribute(_AUTOCAST, None)
    try:
        yield
    finally:
        global_state.set_global_attribute(_AUTOCAST, outer)


@contextlib.contextmanager
def methods_replaced(optimizer: Any, methods: dict[str, Any]) -> Iterator[None]:
    """Puts functions in the place of methods of one optimizer, for a block.

    Neither its class nor its tracking of attributes notices. Replicas may be
    inside such a block of the same optimizer by turns: each one puts its own
    functions there, and the first that leaves takes them away. By then the
    last update, which all of them make together, is over.
    """
    vars(optimizer).update(methods)
    try:
        yield
    finally:
        for name in methods:
            vars(optimizer).pop(name, None)


def own_methods(instance: Any, names: Iterable[str]) -> list[Any]:
    """The functions by these names that stand on the instance itself."""
    own = [vars(instance).get(name) for name in names]
    return [method for method in own if callable(method)]


def backend_variable(variable: Any) -> Any:
    """The variable of TensorFlow inside that of Keras, if it is one."""
    if isinstance(variable, keras.Variable):
        return variable.value
    return variable


# Per class the attributes that hold a variable for each weight.
_SLOTS = {
    "SGD": ("momentums",),
    "Adam": ("_momentums", "_velocities", "_velocity_hats"),
    "AdamW": ("_momentums", "_velocities", "_velocity_hats"),
    "Adamax": ("_m", "_u"),
    "Adadelta": ("_accumulated_grads", "_accumulated_delta_vars"),
    "RMSprop": ("_velocities", "_momentums"),
}


def slot_handles(optimizer: Any, variable: Any) -> list[Any]:
    """The resource handles of a weight's slots, on the replica in charge."""
    index = optimizer._get_variable_index(variable)
    lists = (
        getattr(optimizer, n, None) for n in _SLOTS[type(optimizer).__name__]
    )
    return [slots[index].value.handle for slots in lists if slots]


def weight_decay(optimizer: Any, variable: Any) -> Any:
    """The share of it that decays at a learning rate of 1, or None."""
    decay = optimizer.weight_decay
    if decay is None or not optimizer._use_weight_decay(variable):
        return None
    return decay


def learning_rate_schedule(optimizer: Any) -> Any:
    """What computes the learning rate; None where a variable holds it."""
    rate = optimizer._learning_rate
    return None if isinstance(rate, keras.Variable) else rate
