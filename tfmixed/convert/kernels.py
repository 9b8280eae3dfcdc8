"""Which TensorFlow operations of a graph are unsafe in 16 bits."""

from typing import Any

import numpy as np
import tensorflow as tf

from tfmixed import rules

_HALF = (tf.float16, tf.bfloat16)
# Operations that hand values on; a constant behind them is still a constant.
_PASSING = frozenset(
    (
        "Cast",
        "Reshape",
        "ExpandDims",
        "Squeeze",
        "BroadcastTo",
        "Identity",
        "Transpose",
        "StopGradient",
        "Tile",
        "Pack",
        "StridedSlice",
        "ReadVariableOp",
    )
)


def is_unsafe(operation: Any, dtype: str) -> bool:
    """Returns whether an operation of a graph needs float32.

    Args:
        operation: A `tf.Operation`.
        dtype: `"float16"` or `"bfloat16"`.
    """
    floating = [t for t in operation.inputs if t.dtype in _HALF]
    if operation.type == "Const":
        return _leaves_the_range(operation, operation.get_attr("dtype"))
    if operation.type == "Cast" and operation.inputs[0].op.type == "Const":
        return _leaves_the_range(
            operation.inputs[0].op, operation.outputs[0].dtype
        )
    if not floating:
        return False
    if operation.type in rules.UNSAFE_KERNELS:
        return True
    if dtype != "float16":
        return False
    if operation.type in rules.UNSAFE_PRODUCTS:
        return not any(_is_tame(tensor) for tensor in operation.inputs)
    if operation.type in rules.UNSAFE_MATRIX_PRODUCTS:
        return not any(_is_given(tensor) for tensor in operation.inputs)
    return False


def _leaves_the_range(constant: Any, dtype: Any) -> bool:
    """Whether a constant is infinite in a 16-bit dtype."""
    if dtype not in _HALF:
        return False
    value = tf.make_ndarray(constant.get_attr("value"))
    rounded = value.astype(dtype.as_numpy_dtype).astype("float32")
    return not np.isfinite(rounded).all()


def _origin(tensor: Any) -> Any:
    """The operation that a tensor comes from, past those that hand it on."""
    operation = tensor.op
    while operation.type in _PASSING and operation.inputs:
        operation = operation.inputs[0].op
    return operation


def _is_given(tensor: Any) -> bool:
    """Whether a tensor is a constant or a variable, not computed."""
    operation = _origin(tensor)
    if tensor.dtype == tf.resource or operation.type in (
        "Const",
        "VarHandleOp",
    ):
        return True
    # Variables come into a graph by placeholders of their handles.
    return (
        operation.type == "Placeholder"
        and operation.outputs[0].dtype == tf.resource
    )


def _is_tame(tensor: Any) -> bool:
    """Whether a factor cannot make a product leave the range."""
    operation = _origin(tensor)
    if operation.type == "Const":
        value = tf.make_ndarray(operation.get_attr("value"))
        return bool(np.all(np.abs(value) <= rules.LARGEST_FACTOR))
    if _is_given(tensor) or operation.type in rules.BOUNDED_KERNELS:
        return True
    # A mask of zeros and ones, as dropout draws it.
    return any(
        source.op.type in ("GreaterEqual", "Greater", "Less", "LessEqual")
        for source in operation.inputs
    ) or operation.type in ("GreaterEqual", "Greater", "LogicalAnd")


_FUNCTIONS = ("f", "body", "cond", "then_branch", "else_branch", "branches")


class Library:
    """The bodies of loops, branches and functions of some graphs.

    Args:
        graphs: The graphs.
    """

    def __init__(self, graphs: list[Any]) -> None:
        self._functions: dict[str, Any] = {}
        for graph in {id(g): g for g in graphs}.values():
            for function in graph.as_graph_def().library.function:
                self._functions[function.signature.name] = function

    def is_unsafe(self, operation: Any) -> bool:
        """Whether a function that an operation runs is unsafe in 16 bits."""
        attributes = operation.node_def.attr
        names = [n for key in _FUNCTIONS for n in _called(attributes, key)]
        return any(self._holds(name, set()) for name in names)

    def _holds(self, name: str, seen: set[str]) -> bool:
        if name in seen or name not in self._functions:
            return False
        seen.add(name)
        for node in self._functions[name].node_def:
            types = {
                node.attr[key].type for key in ("T", "SrcT") if key in node.attr
            }
            if types & _HALF_ENUMS and node.op in rules.UNSAFE_KERNELS:
                return True
            inner = [n for key in _FUNCTIONS for n in _called(node.attr, key)]
            if any(self._holds(n, seen) for n in inner):
                return True
        return False


_HALF_ENUMS = {dtype.as_datatype_enum for dtype in _HALF}


def _called(attributes: Any, key: str) -> list[str]:
    if key not in attributes:
        return []
    value = attributes[key]
    names = [value.func.name] + [f.name for f in value.list.func]
    return [name for name in names if name]
