"""Symbolic inputs for a model: of the shapes and dtypes that data have."""

from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras


def of_graph(functional: Any, x: Any) -> list[Any]:
    """Inputs of a functional model, flat, cast to what it declares.

    Args:
        functional: The model.
        x: Data, for their dtypes; None for what the model declares.
    """
    specs, _ = _keras.graph_inputs(functional)
    given: list[Any] = [None] * len(specs)
    if x is not None:
        flat = keras.tree.flatten(x)
        given = flat if len(flat) == len(specs) else given
    return [
        cast(_input(spec, value), spec.dtype)
        for spec, value in zip(specs, given, strict=True)
    ]


def _input(spec: Any, value: Any) -> Any:
    if value is not None:
        dtype = keras.backend.standardize_dtype(value.dtype)
        # Data come in any batch size; the model may have fixed its own.
        return placeholder(spec.shape, dtype)
    return placeholder(spec.shape, str(spec.dtype))


def candidates(model: keras.Model, x: Any) -> list[tuple[bool, Any]]:
    """Inputs to try on a model that does not declare them.

    Args:
        model: A model that was built.
        x: Data; None to take the shapes that the model was built with.

    Returns:
        Pairs: whether the dtypes are a guess, and the inputs.
    """
    if x is not None:
        return [(False, keras.tree.map_structure(_like, x))]
    shapes = _keras.build_shapes(model)
    if shapes is None:
        config = model.get_build_config() or {}
        shapes = {"input": config.get("input_shape")}
    shapes = list(shapes.values())
    if len(shapes) != 1 or shapes[0] is None:
        return []
    return [(True, _of_shape(shapes[0], d)) for d in ("float32", "int32")]


def _like(value: Any) -> Any:
    dtype = keras.backend.standardize_dtype(value.dtype)
    return placeholder((None, *value.shape[1:]), dtype)


def _of_shape(shape: Any, dtype: str) -> Any:
    if isinstance(shape, dict):
        return {key: _of_shape(value, dtype) for key, value in shape.items()}
    if shape and isinstance(shape[0], list | tuple):
        return [_of_shape(one, dtype) for one in shape]
    return placeholder((None, *shape[1:]), dtype)


def placeholder(shape: Any, dtype: str) -> Any:
    """A tensor without a value in the present graph."""
    return tf.compat.v1.placeholder(dtype, shape)


def cast(value: Any, dtype: str) -> Any:
    """A tensor as another dtype, as a model casts its inputs."""
    given = keras.backend.standardize_dtype(value.dtype)
    if given == dtype or "string" in (given, dtype):
        return value
    return tf.cast(value, dtype)
