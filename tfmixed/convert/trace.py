"""What the code of a custom layer does in 16 bits, seen in its graph.

The rules table knows the layers of Keras. A custom layer is called once on
symbolic inputs, and the TensorFlow operations that appear are looked at: an
operation that is unsafe in 16 bits is traced back to the layers that its values
come from, which then compute in float32.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed import rules
from tfmixed.convert.kernels import Library
from tfmixed.convert.kernels import is_unsafe

_HALF = (tf.float16, tf.bfloat16)


@dataclasses.dataclass(frozen=True)
class Unsafe:
    """An operation of a custom layer that 16 bits are unsafe for.

    Attributes:
        layer: The custom layer whose code contains it.
        operation: The type of the TensorFlow operation.
        sources: The layers that have to compute in float32 to make it safe.
    """

    layer: keras.Layer
    operation: str
    sources: tuple[keras.Layer, ...]


class CallError(Exception):
    """A layer does not run: `layer` is the innermost that raised `cause`."""

    def __init__(self, layer: keras.Layer, cause: BaseException) -> None:
        super().__init__(f"{layer.name}: {cause}")
        self.layer = layer
        self.cause = cause


@dataclasses.dataclass
class _Region:
    """The operations that one call of a layer added to a graph."""

    layer: keras.Layer
    graph: Any
    operations: list[Any]
    parent: "_Region | None"
    outputs: Any = None


class Trace:
    """The graph of one call of a layer, sorted by the layers inside it.

    Args:
        layer: The layer, with everything inside it.
        call: Calls the layer on symbolic tensors and returns its outputs.

    Raises:
        CallError: If the call raises.
    """

    def __init__(self, layer: keras.Layer, call: Callable[[], Any]) -> None:
        self._regions: list[_Region] = []
        self._owner: dict[int, _Region] = {}
        self._stack: list[_Region] = []
        # Keeps the graphs alive: the owners go by `id`.
        self._outputs: list[Any] = []
        self._failed: keras.Layer | None = None
        with self._recording(_keras.flatten_layers(layer)):
            try:
                self._outputs = keras.tree.flatten(call())
            except Exception as error:
                failed = self._failed or layer
                raise CallError(failed, error) from error
        for region in self._regions:
            # Inner calls end first, so that the innermost owner wins.
            for operation in region.operations:
                self._owner.setdefault(id(operation), region)

    @contextlib.contextmanager
    def _recording(self, layers: list[keras.Layer]) -> Iterator[None]:
        for layer in layers:
            own = layer.__dict__.get("call")
            if own is None:
                _keras.set_instance_call(layer, self._recorder(layer))
        try:
            yield
        finally:
            for layer in layers:
                recorder = layer.__dict__.get("call")
                if getattr(recorder, "tfmixed_trace", None) is self:
                    _keras.set_instance_call(layer, None)

    def _recorder(self, layer: keras.Layer) -> Callable[..., Any]:
        call = layer.call

        def record(*args: Any, **kwargs: Any) -> Any:
            graph = tf.compat.v1.get_default_graph()
            before = len(graph.get_operations())
            parent = self._stack[-1] if self._stack else None
            region = _Region(layer, graph, [], parent)
            self._stack.append(region)
            try:
                # What has failed so far was caught by who called it.
                self._failed = None
                region.outputs = call(*args, **kwargs)
                return region.outputs
            except Exception:
                self._failed = self._failed or layer
                raise
            finally:
                self._stack.pop()
                region.operations = graph.get_operations()[before:]
                self._regions.append(region)

        record.tfmixed_trace = self  # type: ignore[attr-defined]
        return record

    def unsafe(self, dtype: str) -> list[Unsafe]:
        """What custom layers do that is unsafe in a 16-bit dtype.

        Args:
            dtype: `"float16"` or `"bfloat16"`.
        """
        found = []
        library = Library([region.graph for region in self._regions])
        for region in self._regions:
            # A nested functional model may have `keras.ops` of its own.
            is_graph = isinstance(region.layer, _keras.Functional)
            if not (is_graph or rules.is_custom(type(region.layer))):
                continue
            own = [o for o in region.operations if self._owns(region, o)]
            for operation in own:
                if is_unsafe(operation, dtype) or library.is_unsafe(operation):
                    sources = self._sources(region, [operation])
                    found.append(Unsafe(region.layer, operation.type, sources))
            for operation in self._rounded_ids(region):
                starts = self._way_in(region, operation)
                sources = self._sources(region, starts)
                found.append(Unsafe(region.layer, "Cast to ids", sources))
        return found

    def _way_in(self, region: _Region, operation: Any) -> list[Any]:
        """The operations of a region from which the input of one comes."""
        owner = self._owner.get(id(operation))
        child = None if owner is region else _child_of(owner, region)
        if child is None:
            return [operation]
        return self._inputs_of(child.layer)

    def _rounded_ids(self, region: _Region) -> Iterator[Any]:
        """What casts 16-bit floats to whole numbers in a call, or inside."""
        for operation in region.operations:
            if operation.type != "Cast":
                continue
            before, after = operation.inputs[0], operation.outputs[0]
            if before.dtype in _HALF and after.dtype.is_integer:
                yield operation

    def heads(self, layer: keras.Layer) -> tuple[keras.Layer, ...]:
        """The layers inside a layer that its outputs come from.

        Only own code of the layer, and layers without weights, may stand
        between them and the outputs.
        """
        region = self._last_region(layer)
        starts = [o.op for o in self._outputs if hasattr(o, "op")]
        found: dict[int, keras.Layer] = {}
        seen: set[int] = set()
        while starts:
            sources = self._sources(region, starts, seen)
            starts = []
            for source in sources:
                if source is layer:
                    continue
                found[id(source)] = source
                if source.weights or id(source) in seen:
                    continue
                seen.add(id(source))
                starts += self._inputs_of(source)
        return tuple(found.values()) + self._idle_after(region, found)

    def _idle_after(
        self, region: _Region, heads: dict[int, keras.Layer]
    ) -> tuple[keras.Layer, ...]:
        """What hands on the output of a head as it is, as Dropout may."""
        made = {
            id(tensor)
            for other in self._regions
            if id(other.layer) in heads
            for tensor in keras.tree.flatten(other.outputs)
        }
        return tuple(
            other.layer
            for other in self._regions
            if other.parent is region
            and not other.operations
            and id(other.layer) not in heads
            and made & {id(t) for t in keras.tree.flatten(other.outputs)}
        )

    def _inputs_of(self, layer: keras.Layer) -> list[Any]:
        region = self._last_region(layer)
        inside = {id(operation) for operation in region.operations}
        return [
            tensor.op
            for operation in region.operations
            for tensor in operation.inputs
            if id(tensor.op) not in inside
        ]

    def _last_region(self, layer: keras.Layer) -> _Region:
        # An earlier one may come from the building of the layer.
        return next(r for r in reversed(self._regions) if r.layer is layer)

    def _owns(self, region: _Region, operation: Any) -> bool:
        owner = self._owner.get(id(operation))
        return owner is not None and owner is region

    def _sources(
        self,
        region: _Region,
        starts: Iterable[Any],
        seen: set[int] | None = None,
    ) -> tuple[keras.Layer, ...]:
        """The layers whose outputs reach some operations of a region."""
        sources: dict[int, keras.Layer] = {}
        seen = set() if seen is None else seen
        queue = list(starts)
        while queue:
            operation = queue.pop()
            if id(operation) in seen:
                continue
            seen.add(id(operation))
            owner = self._owner.get(id(operation))
            if owner is region:
                if not operation.inputs:
                    continue
                queue += [tensor.op for tensor in operation.inputs]
                continue
            child = _child_of(owner, region)
            source = region.layer if child is None else child.layer
            sources[id(source)] = source
        return tuple(sources.values()) or (region.layer,)


def _child_of(region: _Region | None, ancestor: _Region) -> _Region | None:
    """The call directly inside `ancestor` that `region` belongs to."""
    while region is not None and region.parent is not ancestor:
        region = region.parent
    return region


def trace(layer: keras.Layer, args: Any, kwargs: Any) -> Trace:
    """Traces one call of a layer.

    Args:
        layer: The layer.
        args: Its positional arguments; `keras.KerasTensor` where a tensor is.
        kwargs: Its keyword arguments likewise.

    Raises:
        CallError: If the call raises.
    """
    # A graph of its own, which is thrown away with the trace.
    graph = tf.__internal__.FuncGraph("tfmixed_trace")
    losses = _keras.kept_losses(layer)

    def call() -> Any:
        with graph.as_default():
            filled, named = keras.tree.map_structure(
                _placeholder, (tuple(args), dict(kwargs))
            )
            return layer(*filled, **named)

    try:
        return Trace(layer, call)
    finally:
        _keras.restore_losses(losses)


def _placeholder(value: Any) -> Any:
    if not isinstance(value, keras.KerasTensor):
        return value
    return tf.compat.v1.placeholder(value.dtype, value.shape)
