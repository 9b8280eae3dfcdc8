"""Watches a model run: what goes into each layer, and what comes out.

Keras looks `call` up on the instance, so for the length of a `with` block each
layer and each `keras.ops` node gets a `call` of its own that takes notes. No
class is touched, and afterwards the instances are as they were.
"""

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed.audit import draws

# They run what is inside them in loops, partly without `__call__`.
_CLOSED = (keras.layers.RNN, keras.layers.TimeDistributed)


@dataclasses.dataclass(eq=False)
class Record:
    """One call of one layer or operation.

    Args:
        layer: The layer, or the operation of a `keras.ops` node.
        path: What it is called, unique in the model.
        call: 1 for the first call of this layer, 2 for the second, ...
        parent: The record of the layer that it runs in; None for the model.
        inputs: The floating-point tensors that went in, already cast.
        outputs: Those that came out.
        gradients: Those of the loss with respect to the outputs; None where
            the backward pass does not come by.
        calls: How often the layer was called in all.
    """

    layer: Any
    path: str
    call: int
    parent: "Record | None"
    inputs: list[Any]
    outputs: list[Any] = dataclasses.field(default_factory=list)
    gradients: list[Any] = dataclasses.field(default_factory=list)
    calls: int = 1

    @property
    def name(self) -> str:
        """The path, with the number of the call where there are several."""
        if self.calls == 1:
            return self.path
        return f"{self.path} (call {self.call})"

    @property
    def dtype(self) -> str | None:
        """The dtype of the output; None without a floating-point one."""
        return self.outputs[0].dtype.name if self.outputs else None


class Recorder:
    """Keeps the records of a run.

    Args:
        graph: The graph whose tensors are recorded, where the run is traced;
            None for an eager run.

    Attributes:
        records: In the order in which the calls ended.
        events: `("in", record)` and `("out", record)`, in order.
        active: Whether calls are recorded.
    """

    def __init__(self, graph: Any = None) -> None:
        self._graph = graph
        self.records: list[Record] = []
        self.events: list[tuple[str, Record]] = []
        self.active = True
        self._stack: list[Record] = []
        self._calls: Counter[int] = Counter()

    def run(
        self,
        layer: Any,
        path: str,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Calls a layer and takes notes."""
        # Inside a function that is being traced there are no values, and a
        # tensor of a loop or a branch exists only there.
        if not self.active or _current_graph() is not self._graph:
            return call(*args, **kwargs)
        self._calls[id(layer)] += 1
        record = Record(
            layer,
            path,
            self._calls[id(layer)],
            self._stack[-1] if self._stack else None,
            floats((args, kwargs), self._graph),
        )
        self.events.append(("in", record))
        self._stack.append(record)
        try:
            outputs = call(*args, **kwargs)
        finally:
            self._stack.pop()
        record.outputs = floats(outputs, self._graph)
        self.records.append(record)
        self.events.append(("out", record))
        return outputs

    def finish(self) -> None:
        """Stops recording and tells the records how many calls there were."""
        self.active = False
        for record in self.records:
            record.calls = self._calls[id(record.layer)]


def floats(structure: Any, graph: Any = None) -> list[Any]:
    """The floating-point tensors in a structure.

    Args:
        structure: Anything nested.
        graph: The graph that they have to be in; None for those with values.
    """
    return [
        leaf
        for leaf in keras.tree.flatten(structure)
        if isinstance(leaf, tf.Tensor)
        and leaf.dtype.is_floating
        and (leaf.graph if tf.is_symbolic_tensor(leaf) else None) is graph
    ]


def _current_graph() -> Any:
    """The graph that is being traced; None while the program runs eagerly."""
    if tf.executing_eagerly():
        return None
    return tf.compat.v1.get_default_graph()


def operations(model: keras.Model) -> list[Any]:
    """The layers and the `keras.ops` nodes that can be watched, each once.

    The model itself comes first, and a layer before what is inside it. What
    runs inside a recurrent layer or `TimeDistributed` is part of it.
    """
    layers = _keras.flatten_layers(model)
    inside = {
        id(part)
        for layer in layers
        if isinstance(layer, _CLOSED)
        for part in _keras.flatten_layers(layer)[1:]
    }
    found = {id(layer): layer for layer in layers if id(layer) not in inside}
    for layer in list(found.values()):
        graph = _keras.graph_of(layer) if _is_model(layer) else None
        for node in [] if graph is None else _keras.graph_nodes(graph):
            found.setdefault(id(node.operation), node.operation)
    return [
        operation
        for operation in found.values()
        if id(operation) not in inside
        and not isinstance(operation, keras.layers.InputLayer)
    ]


def _is_model(layer: Any) -> bool:
    return isinstance(layer, keras.Model)


def paths(model: keras.Model) -> dict[int, str]:
    """What each layer and operation is called, by its `id`.

    The path that Keras gives, and where two layers share it, that from the
    model down to the layer.
    """
    found = operations(model)
    by_keras = {id(o): getattr(o, "path", None) or str(o.name) for o in found}
    counts = Counter(by_keras.values())
    from_above: dict[int, str] = {}

    def walk(layer: Any, prefix: str) -> None:
        for child in _keras.child_layers(layer):
            if id(child) not in from_above:
                from_above[id(child)] = f"{prefix}{child.name}"
                walk(child, f"{prefix}{child.name}/")

    walk(model, "")
    return {
        key: path if counts[path] == 1 else from_above.get(key, path)
        for key, path in by_keras.items()
    }


def owners(model: keras.Model) -> list[tuple[Any, Any]]:
    """The trainable variables, each with the innermost layer watched."""
    found: dict[int, tuple[Any, Any]] = {}
    for layer in operations(model):
        for variable in getattr(layer, "trainable_variables", []):
            found[id(variable)] = (variable, layer)
    return [found[id(v)] for v in model.trainable_variables if id(v) in found]


@contextlib.contextmanager
def recording(
    model: keras.Model, same_draws: bool = False
) -> Iterator[Recorder]:
    """Inside the block, calls of the model are recorded.

    Eager calls, or where the block stands in a function that is being traced,
    calls in that function.

    Args:
        model: The model.
        same_draws: Whether dropout and the like draw the same numbers in each
            precision; see `draws`.
    """
    recorder = Recorder(_current_graph())
    names = paths(model)
    with contextlib.ExitStack() as stack:
        for operation in operations(model):
            call = operation.call
            if same_draws and draws.only_draws(operation):
                call = stack.enter_context(draws.in_float32(operation))
            stack.enter_context(
                _watched(recorder, operation, names[id(operation)], call)
            )
        if same_draws:
            stack.enter_context(draws.without_recurrent_dropout(model))
        yield recorder
        recorder.finish()


@contextlib.contextmanager
def _watched(
    recorder: Recorder, operation: Any, path: str, call: Callable[..., Any]
) -> Iterator[None]:
    before = vars(operation).get("call")

    @functools.wraps(call)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return recorder.run(operation, path, call, args, kwargs)

    _keras.set_instance_call(operation, watched)
    try:
        yield
    finally:
        _keras.set_instance_call(operation, before)
