"""TM007, TM008 and TM009: sizes that keep 16 bits from paying."""

from collections.abc import Iterator
from typing import Any

import keras

from tfmixed.audit.findings import Finding
from tfmixed.audit.findings import finding
from tfmixed.audit.static.subject import Place
from tfmixed.audit.static.subject import Subject
from tfmixed.audit.static.work import DEFAULT_BATCH
from tfmixed.audit.static.work import multiply_adds
from tfmixed.hardware import TENSOR_CORES_FROM

# NVIDIA's "Matrix Multiplication Background": 16 bytes, 8 numbers of 16 bits.
MULTIPLE = 8
# Where 16 bits begin to pay: measured with dense layers on two CPU cores with
# AVX512_BF16, slower at 2 million and faster at 8 million. A GPU needs more.
SMALL = 4_000_000
SMALL_BATCH = 16
# A head this wide is a vocabulary, whose product is worth padding in float32.
_VOCABULARY = 1000


def check_dimensions(subject: Subject) -> Iterator[Finding]:
    """TM007: units and features that are no multiples of 8, on tensor cores."""
    machine = subject.hardware
    capability = machine.compute_capability
    if machine.kind != "GPU" or not capability:
        return
    if capability < TENSOR_CORES_FROM:
        return
    for place in subject.places:
        sizes = [
            (what, size)
            for what, size in dimensions(place)
            if size % MULTIPLE and size > MULTIPLE
        ]
        if sizes:
            given = " and ".join(f"{size} {what}" for what, size in sizes)
            better = " and ".join(str(_better(size)) for _, size in sizes)
            yield finding(
                "TM007",
                place.path,
                f"{place} has {given}, no multiple of {MULTIPLE}.",
                f"Use {better}, padding what is not needed.",
            )


def _better(size: int) -> int:
    return -(-size // MULTIPLE) * MULTIPLE


def dimensions(place: Place) -> list[tuple[str, int]]:
    """The sizes of a layer that a matrix product sees.

    Args:
        place: A layer. One in float32 counts only if it is a vocabulary.
    """
    layer = place.layer
    layers = keras.layers
    if isinstance(layer, layers.Embedding):
        return [("units", int(layer.output_dim))] if place.is_half else []
    kernel = getattr(layer, "kernel", None) if layer.built else None
    if kernel is None:
        return []
    shape = tuple(kernel.shape)
    if isinstance(layer, layers.Dense):
        sizes = [("input features", shape[0]), ("units", shape[1])]
    elif isinstance(layer, layers.EinsumDense):
        sizes = [("input features", shape[0]), ("units", shape[-1])]
    elif place.rule.kind == "matrix product" and len(shape) > 2:
        sizes = [("input channels", shape[-2]), ("filters", shape[-1])]
    else:
        return []
    if not place.is_half:
        sizes = [pair for pair in sizes if pair[1] >= _VOCABULARY]
    return [(what, int(size)) for what, size in sizes]


def check_work(subject: Subject) -> Iterator[Finding]:
    """TM008: so few multiply-adds that 16 bits cannot pay."""
    batch = subject.batch_size or DEFAULT_BATCH
    work = [multiply_adds(place) for place in subject.places]
    known = [one for one in work if one]
    if not known or any(one is None for one in work) or not subject.formats:
        return
    mean = batch * sum(known) / len(known)
    if mean >= SMALL:
        return
    assumed = "" if subject.batch_size else ", the size assumed,"
    yield finding(
        "TM008",
        None,
        f"Model '{subject.model.name}' has {_count(mean)} multiply-adds in a "
        f"layer with weights on average, for a batch of {batch}{assumed} and "
        f"{_count(sum(known) * batch)} in all: too few to gain from 16 bits.",
    )


def _count(number: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.0f}"


def check_batch(subject: Subject) -> Iterator[Finding]:
    """TM009: statistics of batch normalization over few examples."""
    size = subject.batch_size
    if size is None or size >= SMALL_BATCH or not subject.formats:
        return
    layers: list[Any] = [
        place
        for place in subject.places
        if isinstance(place.layer, keras.layers.BatchNormalization)
        and place.layer.trainable
    ]
    for place in layers:
        yield finding(
            "TM009",
            place.path,
            f"{place} takes its statistics over a batch of {size}, fewer than "
            f"{SMALL_BATCH}.",
        )
