"""The first gradient of a backward pass that is not finite."""

from tfmixed.audit import tally
from tfmixed.audit.observe import Record
from tfmixed.audit.step import Observation
from tfmixed.audit.step import WeightGradient
from tfmixed.audit.suspect import BACKWARD
from tfmixed.audit.suspect import Culprit
from tfmixed.audit.suspect import around
from tfmixed.audit.suspect import feeding
from tfmixed.audit.suspect import first_bad
from tfmixed.audit.suspect import takes


def backward(observation: Observation) -> Culprit | None:
    """The first gradient, from the loss backwards, that is not finite."""
    makers: dict[int, Record] = {}
    for record in observation.records:
        for output in record.outputs:
            makers.setdefault(id(output), record)
    for position in range(len(observation.records) - 1, -1, -1):
        record = observation.records[position]
        # A model that hands on the output of a layer inside it is not meant.
        index = first_bad(
            [
                gradient if makers[id(output)] is record else None
                for output, gradient in zip(
                    record.outputs, record.gradients, strict=True
                )
            ]
        )
        if index is not None:
            records = observation.records
            return _bad_gradient(
                record, index, records[:position], records[position + 1 :]
            )
        for weight in observation.weights:
            if weight.layer is record.layer and _is_bad(weight):
                return _bad_weight(weight, record)
    bad = next((w for w in observation.weights if _is_bad(w)), None)
    return None if bad is None else _bad_weight(bad, None)


def _is_bad(weight: WeightGradient) -> bool:
    gradient = weight.gradient
    return gradient is not None and not tally.is_finite(gradient)


def _bad_weight(weight: WeightGradient, record: Record | None) -> Culprit:
    return Culprit(
        BACKWARD,
        weight.layer,
        record.path if record else str(weight.layer.name),
        f"gradient of its '{weight.variable.name}'",
        (record and record.dtype) or str(weight.layer.compute_dtype),
        _gradients_into(record) if record else {},
        [weight.layer, *(around(record) if record else [])],
        ("weight", id(weight.variable)),
    )


def _bad_gradient(
    record: Record, index: int, done: list[Record], later: list[Record]
) -> Culprit:
    consumers = [other for other in later if takes(other, record)]
    tensor = "gradient with respect to its output"
    if consumers:
        makers = " and ".join(f"'{other.name}'" for other in consumers[:3])
        tensor += f" (formed in the backward pass of {makers})"
    inputs: dict[str, float] = {}
    for other in consumers:
        for name, largest in _gradients_into(other).items():
            inputs[f"{name} of '{other.name}'"] = largest
    suspects = [record.layer, *(other.layer for other in consumers)]
    return Culprit(
        BACKWARD,
        record.layer,
        record.name,
        tensor,
        record.gradients[index].dtype.name,
        inputs,
        [*suspects, *feeding(record, done), *around(record)],
        ("gradients", id(record.layer), record.call, index),
    )


def _gradients_into(record: Record) -> dict[str, float]:
    sizes = [tally.largest(g) for g in record.gradients if g is not None]
    return {"gradient of the output": max(sizes)} if sizes else {}
