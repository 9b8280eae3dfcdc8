"""Tells of a BatchNormalization whose batches are too small for statistics."""

import math
from typing import Any

import keras

from tfmixed import _keras

# What a mean and a variance are taken over. Measured, see
# `docs/small-batches.md`: of 2 examples they cost much, of 4 a little, of 8
# nothing.
ENOUGH = 8
_HALF = ("float16", "bfloat16")
_SHOWN = 3


def advise(model: keras.Model, batch_size: int) -> str | None:
    """Returns advice if batch statistics are taken over too few values.

    A `BatchNormalization` takes the mean and the variance of each channel over
    the examples of a batch on one replica, and over all positions of an image
    or a sequence: after a convolution these are thousands, after a dense layer
    as many as there are examples. Layers that are frozen, or whose number of
    positions is not known, are left out; those with `synchronized=True` have
    the whole batch.

    Args:
        model: A built model.
        batch_size: Integer, examples of a whole batch, over all replicas.

    Returns:
        A message that names the layers, or None: where the statistics are of
        `ENOUGH` values or more, and for models without 16 bits.

    Raises:
        ValueError: If `batch_size` is not a whole number of 1 or more.

    Example:

    >>> model = keras.Sequential(
    ...     [
    ...         keras.Input((4,)),
    ...         keras.layers.Dense(4, dtype="mixed_bfloat16"),
    ...         keras.layers.BatchNormalization(dtype="mixed_bfloat16"),
    ...     ]
    ... )
    >>> advise(model, 32) is None
    True
    >>> advise(model, 2).startswith("The statistics of")
    True
    """
    if (
        isinstance(batch_size, bool)
        or not isinstance(batch_size, int)
        or batch_size < 1
    ):
        raise ValueError(
            f"advise: `batch_size` is {batch_size!r}, but it says how many "
            "examples a batch has: give a whole number of 1 or more."
        )
    layers = _keras.flatten_layers(model)
    if not any(layer.compute_dtype in _HALF for layer in layers):
        return None
    replicas = model.distribute_strategy.num_replicas_in_sync
    found = []
    for layer in layers:
        if not isinstance(layer, keras.layers.BatchNormalization):
            continue
        examples = batch_size
        if not getattr(layer, "synchronized", False):
            examples = math.ceil(batch_size / replicas)
        positions = _positions(layer)
        if positions is not None and examples * positions < ENOUGH:
            found.append((examples * positions, layer))
    if not found:
        return None
    return _message(found, batch_size, replicas)


def _positions(layer: Any) -> int | None:
    """Positions that a channel has in an example; None if not known.

    None, too, for a layer that uses no statistics of the batch.
    """
    shapes = _keras.build_shapes(layer) or {}
    shape = shapes.get("input_shape")
    if not layer.trainable or not shape:
        return None
    axis = layer.axis % len(shape)
    sizes = [size for i, size in enumerate(shape) if i not in (0, axis)]
    return None if None in sizes else math.prod(sizes)


def _message(
    found: list[tuple[int, Any]], batch_size: int, replicas: int
) -> str:
    fewest = min(count for count, _ in found)
    names = ", ".join(repr(layer.path) for _, layer in found[:_SHOWN])
    if len(found) > _SHOWN:
        names += f" and {len(found) - _SHOWN} more"
    several = f" on {replicas} replicas" if replicas > 1 else ""
    values = "one value" if fewest == 1 else f"{fewest} values"
    return (
        f"The statistics of {names} are of {values} a channel (batches of "
        f"{batch_size}{several}), too few: that costs accuracy in any "
        f"precision. Use batches of {ENOUGH} or more on each replica"
        + (", synchronized=True" if replicas > 1 else "")
        + ", or GroupNormalization or LayerNormalization, which need no batch."
    )
