"""What the graph of a functional model says about its layers.

A layer alone does not know whether it gives the output of the model, whether
ids pass through it, or whether one of its factors is bounded. The graph does.
"""

from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from tfmixed import _keras
from tfmixed import rules

HEAD = (
    "It gives the output of the model: losses, probabilities and metrics need "
    "float32."
)
IDS = (
    "Ids pass through it as floats: float16 cannot count beyond 2048, bfloat16 "
    "not beyond 256."
)

_LARGEST = 65504.0
_SMALLEST = 2.0**-25
_TAKES_IDS = (
    keras.layers.Embedding,
    keras.layers.CategoryEncoding,
    keras.layers.Hashing,
    keras.layers.Discretization,
    keras.layers.IntegerLookup,
    keras.layers.HashedCrossing,
)
_PRODUCTS = ("Matmul", "Einsum", "Tensordot", "Dot", "Conv", "ConvTranspose")


def demands(model: Any) -> dict[int, str]:
    """What the graph demands in float32: from `id(operation)` to the reason.

    Args:
        model: A functional or Sequential model.
    """
    functional = _keras.graph_of(model)
    if functional is None:
        return _demands_in_a_row(model.layers)
    found: dict[int, str] = {}
    _mark_ids(functional, found)
    _mark_heads(functional, found)
    return found


def _demands_in_a_row(layers: list[Any]) -> dict[int, str]:
    """The demands in a Sequential model that is not built yet."""
    found: dict[int, str] = {}
    for layer in reversed(layers):
        if isinstance(layer, keras.Sequential | _keras.Functional):
            found.update(_heads_of(layer, found))
            break
        found[id(layer)] = HEAD
        rule = rules.rule_for(layer)
        if rule.kind == "matrix product" or not _hands_on(layer):
            break
    taking = [i for i, x in enumerate(layers) if isinstance(x, _TAKES_IDS)]
    for layer in layers[: taking[-1]] if taking else ():
        found.setdefault(id(layer), IDS)
    return found


def _outputs(functional: Any) -> list[Any]:
    return list(functional.outputs)


def _mark_ids(functional: Any, found: dict[int, str]) -> set[int]:
    """Marks what ids pass through; returns the inputs that hold ids."""

    def mark(node: _keras.Node) -> Iterable[Any]:
        if not _is_float(node.outputs[0]):
            return ()
        found.setdefault(id(node.operation), IDS)
        return node.inputs

    starts = []
    for node in _keras.graph_nodes(functional):
        nested = _keras.graph_of(node.operation)
        if nested is not None:
            holding = _mark_ids(nested, found)
            inputs = keras.tree.flatten(node.args[0]) if node.args else []
            starts += [x for i, x in enumerate(inputs) if i in holding]
        elif _takes_ids(node):
            starts += [x for x in node.inputs if _is_float(x)]
    return _walk(functional, starts, mark)


def _takes_ids(node: _keras.Node) -> bool:
    """Whether floats that come in here are used as whole numbers."""
    operation = node.operation
    if not isinstance(operation, keras.Layer):
        is_cast = type(operation).__name__ in ("Cast", "SaturateCast")
        return is_cast and not _is_float(node.outputs[0])
    if node.kwargs.get("reverse"):
        # A ReversibleEmbedding takes vectors then, and gives logits.
        return False
    return any(
        isinstance(inner, _TAKES_IDS)
        for inner in _keras.flatten_layers(operation)
    )


def _mark_heads(functional: Any, found: dict[int, str]) -> None:
    """Marks what the outputs come from, back to the first layer with weights.

    The way leads past one merge, not past a second: a chain of residual
    additions is the body of the model, not its head.
    """
    producers = _producers(functional)
    queue = [(x, False) for x in _outputs(functional)]
    seen: set[tuple[int, bool]] = set()
    while queue:
        tensor, merged = queue.pop()
        node = producers.get(id(tensor))
        if node is None or (id(tensor), merged) in seen:
            continue
        seen.add((id(tensor), merged))
        if isinstance(node.operation, keras.Sequential | _keras.Functional):
            found.update(_heads_of(node.operation, found))
            if not node.operation.weights:
                queue += [(x, merged) for x in node.inputs if _is_float(x)]
            continue
        found.setdefault(id(node.operation), HEAD)
        inputs = [x for x in node.inputs if _is_float(x)]
        merges = len(inputs) > 1
        if _hands_on(node.operation) and not (merges and merged):
            queue += [(x, merged or merges) for x in inputs]


def _heads_of(model: Any, found: dict[int, str]) -> dict[int, str]:
    functional = _keras.graph_of(model)
    if functional is not None:
        _mark_heads(functional, found)
        return found
    return {**_demands_in_a_row(model.layers), **found}


def _producers(functional: Any) -> dict[int, _keras.Node]:
    return {
        id(output): node
        for node in _keras.graph_nodes(functional)
        for output in node.outputs
    }


def _walk(
    functional: Any,
    tensors: Iterable[Any],
    visit: Callable[[_keras.Node], Iterable[Any]],
) -> set[int]:
    """Walks back from tensors; returns the numbers of the inputs reached.

    Args:
        functional: A functional model.
        tensors: Symbolic tensors in its graph.
        visit: Called with each node; returns the inputs to go on with.
    """
    producers = _producers(functional)
    numbers = {
        id(x): i for i, x in enumerate(_keras.graph_inputs(functional)[0])
    }
    reached: set[int] = set()
    seen: set[int] = set()
    queue = list(tensors)
    while queue:
        tensor = queue.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if id(tensor) in numbers:
            reached.add(numbers[id(tensor)])
        node = producers.get(id(tensor))
        if node is None:
            continue
        nested = _keras.graph_of(node.operation)
        if nested is None:
            queue += visit(node)
            continue
        position = [id(o) for o in node.outputs].index(id(tensor))
        inner = _walk(nested, [_outputs(nested)[position]], visit)
        inputs = keras.tree.flatten(node.args[0]) if node.args else []
        queue += [x for i, x in enumerate(inputs) if i in inner]
    return reached


def _is_float(tensor: Any) -> bool:
    return bool(keras.backend.is_float_dtype(tensor.dtype))


def _hands_on(operation: Any) -> bool:
    """Whether an output of the model may be traced through an operation."""
    if not isinstance(operation, keras.Layer):
        return type(operation).__name__ not in _PRODUCTS
    if operation.weights or _keras.child_layers(operation):
        return False
    kind = rules.rule_for(operation).kind
    return "pooling" not in kind and kind != "sum of products"


def tame_products(functional: Any) -> set[int]:
    """The Multiply layers with a bounded factor in each of their calls.

    Returns:
        The ids of these layers, such as the gates of EfficientNet.
    """
    producers = _producers(functional)
    tame: dict[int, bool] = {}
    for node in _keras.graph_nodes(functional):
        if isinstance(node.operation, keras.layers.Multiply):
            key = id(node.operation)
            bounded = any(_is_bounded(x, producers) for x in node.inputs)
            tame[key] = tame.get(key, True) and bounded
    return {key for key, value in tame.items() if value}


def _is_bounded(tensor: Any, producers: dict[int, _keras.Node]) -> bool:
    node = producers.get(id(tensor))
    while node is not None and isinstance(
        node.operation, keras.layers.Reshape | keras.layers.Dropout
    ):
        node = producers.get(id(node.inputs[0]))
    if node is None:
        return False
    if rules.is_custom(type(node.operation)):
        return False
    name = rules.activation_name(node.operation)
    if name is None:
        name = type(node.operation).__name__.lower()
    bounded = {known.replace("_", "") for known in rules.BOUNDED}
    return name.replace("_", "") in {*bounded, "softmax"}


def needs_float32(operation: Any, args: Any, kwargs: Any, dtype: str) -> bool:
    """Returns whether a `keras.ops` node is unsafe on 16-bit tensors.

    Args:
        operation: The operation, not a layer.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        dtype: The 16-bit dtype of its tensors.
    """
    tensors, constants = [], []
    for value in keras.tree.flatten((args, kwargs)):
        if isinstance(value, keras.KerasTensor):
            tensors.append(value)
        elif _is_number(value):
            constants += _magnitudes(value)
    # Clip and its like keep theirs as attributes.
    kept = [v for v in vars(operation).values() if isinstance(v, float)]
    constants += [m for value in kept for m in _magnitudes(value)]
    if dtype == "float16" and any(_leaves_the_range(c) for c in constants):
        return True
    if rules.is_safe_operation(operation, dtype):
        return False
    # A product with a small number is as safe as a sum of few.
    is_product = type(operation).__name__ == "Multiply"
    small = all(c <= rules.LARGEST_FACTOR for c in constants)
    return not (is_product and len(tensors) == 1 and small)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool | str | bytes) or value is None:
        return False
    return isinstance(value, int | float) or hasattr(value, "__array__")


def _magnitudes(value: Any) -> list[float]:
    """The largest magnitude in a constant, and the smallest but zero."""
    array = np.abs(np.asarray(value).astype("float64"))
    array = array[np.isfinite(array) & (array > 0)]
    return [float(array.max()), float(array.min())] if array.size else []


def _leaves_the_range(constant: float) -> bool:
    return constant > _LARGEST or constant < _SMALLEST
