"""The first tensor of a step that is not finite, and where it comes from."""

from collections.abc import Iterator
from typing import Any

from tfmixed.audit import tally
from tfmixed.audit.first_backward import backward
from tfmixed.audit.first_forward import forward
from tfmixed.audit.step import Observation
from tfmixed.audit.suspect import LOSS
from tfmixed.audit.suspect import Culprit


def find(
    observation: Observation, data: list[tuple[str, Any]]
) -> Culprit | None:
    """Returns the first tensor that is not finite; None if all are.

    "First" is the order of execution: through the layers, the loss, and back
    from the loss. Gradients of the loss are looked at with its scale.

    Args:
        observation: The step.
        data: The tensors of the batch, with their names.
    """
    found = forward(observation, data) or _loss(observation)
    return found or backward(observation)


def value(observation: Observation, key: tuple[Any, ...]) -> float | None:
    """Returns the largest magnitude of a culprit's tensor in another run.

    Args:
        observation: The other run.
        key: The culprit's.

    Returns:
        None where that run has no such tensor, or it is not finite there.
    """
    tensor = _lookup(observation, key)
    if tensor is None or not tally.is_finite(tensor):
        return None
    return tally.largest(tensor)


def tensors(observation: Observation) -> Iterator[tuple[Any, str, Any]]:
    """All tensors of a step, as (path of the layer, what it is, tensor)."""
    for record in observation.records:
        for tensor in record.outputs:
            yield record.name, "output", tensor
        for gradient in record.gradients:
            if gradient is not None:
                yield record.name, "gradient of the output", gradient
    for weight in observation.weights:
        if weight.gradient is not None:
            name = f"gradient of '{weight.variable.name}'"
            yield observation.path_of(weight.layer), name, weight.gradient


def _lookup(observation: Observation, key: tuple[Any, ...]) -> Any:
    kind, *rest = key
    if kind == "loss":
        return observation.loss
    if kind == "weight":
        gradients = {id(w.variable): w.gradient for w in observation.weights}
        return gradients.get(rest[0])
    layer, call, index = rest
    for record in observation.records:
        if id(record.layer) == layer and record.call == call:
            found = getattr(record, kind)
            return found[index] if index < len(found) else None
    return None


def _loss(observation: Observation) -> Culprit | None:
    loss = observation.loss
    scaled = loss * observation.loss_scale
    if tally.is_finite(scaled):
        return None
    outputs = observation.records[-1].outputs if observation.records else []
    heads = [
        record.layer
        for record in observation.records
        if any(t is o for t in record.outputs for o in outputs)
    ]
    return Culprit(
        LOSS,
        None,
        None,
        "the loss" if not tally.is_finite(loss) else "the scaled loss",
        "float32",
        {f"output {i + 1}": tally.largest(t) for i, t in enumerate(outputs)},
        heads,
        ("loss",),
    )
