"""Calls a model once on symbolic inputs and keeps what every layer did.

A functional model is walked node by node, so that the dtypes of `keras.ops`
nodes are known too, and a layer that fails does not hide the others. Nothing
is computed: the operations go into a graph that is thrown away. State, losses
and variables of the model stay as they are.
"""

import contextlib
import dataclasses
import inspect
import warnings
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed import rules
from tfmixed.audit.static import inputs as static_inputs


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer or an operation of `keras.ops`.

    Args:
        operation: The layer or operation.
        args: Its positional arguments, tensors of the graph.
        kwargs: Its keyword arguments.
        outputs: What it returned, flat.
        operations: The TensorFlow operations that it added to the graph.
        error: What it raised; None if it worked.
    """

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Any, ...]
    operations: tuple[Any, ...]
    error: Exception | None = None

    @property
    def inputs(self) -> list[Any]:
        """The tensors among the arguments, flat."""
        flat = keras.tree.flatten((self.args, self.kwargs))
        return [value for value in flat if tf.is_tensor(value)]


@dataclasses.dataclass(frozen=True)
class Output:
    """One output of the model.

    Args:
        dtype: Its dtype.
        operation: The layer or operation that made it; None if not known.
    """

    dtype: str
    operation: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Walk:
    """What happened in one call of the model.

    Args:
        calls: The calls, in order; those inside of a layer are not told apart.
        outputs: The outputs of the model; empty where they are not known.
        losses: The tensors that `add_loss` and activity regularizers added.
        problem: Why there is nothing here; None if there is.
        assumed: Whether the dtypes of the inputs are a guess.
    """

    calls: tuple[Call, ...] = ()
    outputs: tuple[Output, ...] = ()
    losses: tuple[Any, ...] = ()
    problem: str | None = None
    assumed: bool = False


def walk(model: keras.Model, x: Any = None) -> Walk:
    """Calls the model on symbolic inputs.

    Args:
        model: Any Keras model.
        x: Inputs as `model.predict` takes them, for their shapes and dtypes;
            None for those that the model was built with.
    """
    if not model.built:
        return Walk(problem="it is not built yet")
    recorder = _Recorder()
    graph = tf.__internal__.FuncGraph("tfmixed_audit")
    scope = keras.StatelessScope(collect_losses=True)
    with warnings.catch_warnings(), scope, graph.as_default():
        # NumPy warns of the constants that are looked for; Keras of masks.
        warnings.simplefilter("ignore")
        return recorder.run(model, x, scope)


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._makers: dict[int, Any] = {}
        self._specs: dict[int, tuple[Any, ...]] = {}

    def run(self, model: keras.Model, x: Any, scope: Any) -> Walk:
        functional = functional_of(model)
        if functional is not None:
            inputs = static_inputs.of_graph(functional, x)
            outputs = self.run_functional(functional, inputs)
            return self._walk(outputs, scope, False)
        last = Walk(problem="the shapes of its inputs are not known")
        for assumed, inputs in static_inputs.candidates(model, x):
            self.calls.clear()
            outputs = self.record(model, (inputs,), {})
            error = self.calls[-1].error
            if error is None:
                return self._walk(outputs, scope, assumed)
            last = Walk(problem=short(error))
        return last

    def _walk(self, outputs: Any, scope: Any, assumed: bool) -> Walk:
        return Walk(
            tuple(self.calls),
            tuple(self._output(o) for o in keras.tree.flatten(outputs)),
            tuple(scope.losses),
            assumed=assumed,
        )

    def _output(self, tensor: Any) -> Output:
        operation = self._makers.get(id(tensor))
        if operation is not None and is_opaque(operation):
            operation = layer_of(operation, tensor.op) or operation
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        return Output(dtype, operation)

    def run_functional(self, functional: Any, inputs: list[Any]) -> Any:
        for node in _keras.graph_nodes(functional):
            self._specs[id(node.operation)] = node.outputs
        return _keras.run_graph(functional, inputs, self._call)

    def _call(
        self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        nested = functional_of(operation)
        given = keras.tree.flatten(args[0]) if len(args) == 1 else []
        if nested is None or len(given) != len(nested.inputs):
            return self.record(operation, args, kwargs)
        inputs = [
            static_inputs.cast(value, spec.dtype)
            for value, spec in zip(given, nested.inputs, strict=True)
        ]
        return self.run_functional(nested, inputs)

    def record(
        self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        error: Exception | None = None
        try:
            outputs = operation(*args, **(kwargs | _training(operation)))
        except Exception as problem:
            error = problem
            specs = self._specs.get(id(operation), ())
            outputs = [_instead(operation, spec) for spec in specs]
        flat = tuple(keras.tree.flatten(outputs))
        self._makers.update({id(tensor): operation for tensor in flat})
        self.calls.append(
            Call(
                operation,
                args,
                kwargs,
                flat,
                tuple(graph.get_operations()[before:]),
                error,
            )
        )
        return outputs


def functional_of(operation: Any) -> Any:
    """The graph of a functional or Sequential model that runs as it is.

    None for a model with a `call` of its own, and for what is no model.
    """
    if not isinstance(operation, keras.Model) or is_opaque(operation):
        return None
    return _keras.graph_of(operation)


def is_opaque(operation: Any) -> bool:
    """Whether a layer, or one inside it, runs code of the user's own."""
    if not isinstance(operation, keras.Layer):
        return False
    if isinstance(operation, keras.Model):
        return _has_own_call(type(operation))
    return any(
        rules.is_custom(type(layer)) or isinstance(layer, keras.layers.Lambda)
        for layer in _keras.flatten_layers(operation)
    )


def _has_own_call(model_class: type) -> bool:
    for base in model_class.__mro__:
        if not rules.is_custom(base):
            return False
        if "call" in vars(base):
            return True
    return False


def layer_of(root: keras.Layer, operation: Any) -> keras.Layer | None:
    """The innermost layer in `root` whose name scope an operation lies in.

    Args:
        root: The layer that was called.
        operation: A TensorFlow operation that the call added.
    """
    parts = operation.name.split("/")[:-1]
    while parts and not _is_scope(parts[0], root.name):
        parts = parts[1:]
    if not parts:
        return None
    layer = root
    for part in parts[1:]:
        children = _keras.child_layers(layer)
        named = [c for c in children if c.name == part]
        named += [c for c in children if _is_scope(part, c.name)]
        layer = named[0] if named else layer
    return layer


def _is_scope(part: str, name: str) -> bool:
    # The second call of a layer gets a scope with a number behind the name.
    rest = part.removeprefix(name)
    return part.startswith(name) and (not rest or rest[1:].isdigit())


def short(error: BaseException) -> str:
    """The kind and the first telling line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if "Exception encountered" not in line]
    text = lines[0] if lines else ""
    for escape in ("\x1b[1m", "\x1b[0m"):
        text = text.replace(escape, "")
    return f"{type(error).__name__}: {text[:160]}".rstrip(": ")


def _training(operation: Any) -> dict[str, Any]:
    # Losses that a user's layer adds only in training are to be seen. For
    # layers of Keras the graph of inference says as much, and is smaller.
    if not is_opaque(operation):
        return {}
    with contextlib.suppress(ValueError, TypeError):
        if "training" in inspect.signature(operation.call).parameters:
            return {"training": True}
    return {}


def _instead(operation: Any, spec: Any) -> Any:
    """Stands in for an output of a layer that raised."""
    dtype = str(spec.dtype)
    if "float" in dtype and isinstance(operation, keras.Layer):
        dtype = str(operation.compute_dtype)
    return static_inputs.placeholder(spec.shape, dtype)
