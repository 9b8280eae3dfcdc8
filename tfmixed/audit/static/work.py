"""How many multiply-adds the layers of a model do for one example."""

import math
from typing import Any

import keras

from tfmixed import _keras
from tfmixed.audit.static.subject import Place

DEFAULT_BATCH = 32

_KERNELS = (
    "kernel",
    "recurrent_kernel",
    "depthwise_kernel",
    "pointwise_kernel",
)


def multiply_adds(place: Place) -> int | None:
    """The multiply-adds of a layer itself for one example, forward.

    Args:
        place: A layer. The layers inside it are places of their own.

    Returns:
        0 for a layer without a matrix product, None where a shape is unknown.
    """
    layer = place.layer
    kernels = _kernels(layer)
    if not kernels:
        return 0
    shape = _input_shape(layer)
    if shape is None:
        return None
    positions = _positions(layer, shape)
    if positions is None:
        return None
    return positions * sum(kernels)


def _kernels(layer: Any) -> list[int]:
    if not layer.built:
        return []
    kernels: list[Any] = [getattr(layer, name, None) for name in _KERNELS]
    return [math.prod(k.shape) for k in kernels if hasattr(k, "shape")]


def _input_shape(layer: Any) -> tuple[int | None, ...] | None:
    shapes = _keras.build_shapes(layer) or layer.get_build_config() or {}
    shape = next(iter(shapes.values()), None)
    if not isinstance(shape, list | tuple) or not shape:
        return None
    if isinstance(shape[0], list | tuple):
        return None
    return tuple(shape)


def _positions(layer: Any, shape: tuple[int | None, ...]) -> int | None:
    """How often the kernel of a layer is applied to one example."""
    layers = keras.layers
    if isinstance(layer, layers.EinsumDense):
        return _einsum_positions(layer, shape)
    if isinstance(layer, layers.Dense):
        return _product(shape[1:-1])
    if hasattr(layer, "recurrent_kernel"):
        # A cell is built with one step; its layer knows how many there are.
        return 1
    if not hasattr(layer, "kernel_size"):
        return None
    output = layer.compute_output_shape(shape)
    last = layer.data_format == "channels_last"
    return _product(output[1:-1] if last else output[2:])


def _einsum_positions(layer: Any, shape: tuple[int | None, ...]) -> int | None:
    left, _, _ = layer.equation.partition("->")
    inputs, _, kernel = left.partition(",")
    if "." in inputs:
        return _product(shape[1 : len(shape) - len(kernel) + 1])
    return _product(
        size
        for letter, size in list(zip(inputs, shape, strict=False))[1:]
        if letter not in kernel
    )


def _product(sizes: Any) -> int | None:
    result = 1
    for size in sizes:
        if size is None:
            return None
        result *= size
    return result
