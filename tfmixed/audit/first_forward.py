"""The first tensor of a forward pass that is not finite."""

from typing import Any

import tensorflow as tf

from tfmixed.audit import tally
from tfmixed.audit.observe import Record
from tfmixed.audit.step import Observation
from tfmixed.audit.suspect import DATA
from tfmixed.audit.suspect import FORWARD
from tfmixed.audit.suspect import Culprit
from tfmixed.audit.suspect import around
from tfmixed.audit.suspect import feeding
from tfmixed.audit.suspect import first_bad
from tfmixed.audit.suspect import is_cast_of


def forward(
    observation: Observation, data: list[tuple[str, Any]]
) -> Culprit | None:
    """Returns the first culprit of the forward pass; None if there is none.

    Args:
        observation: The step.
        data: The tensors of the batch, with their names.
    """
    done: list[Record] = []
    for kind, record in observation.events:
        if kind == "in":
            index = first_bad(record.inputs)
            if index is not None:
                return _bad_input(record, index, done, data)
            continue
        index = first_bad(record.outputs)
        if index is not None:
            return _bad_output(record, index, done)
        done.append(record)
    return None


def _bad_output(record: Record, index: int, done: list[Record]) -> Culprit:
    number = f" {index + 1}" if len(record.outputs) > 1 else ""
    inputs = _inputs_of(record)
    return Culprit(
        FORWARD,
        record.layer,
        record.name,
        f"output{number}",
        record.outputs[index].dtype.name,
        inputs,
        [record.layer, *feeding(record, done), *around(record)],
        ("outputs", id(record.layer), record.call, index),
    )


def _bad_input(
    record: Record,
    index: int,
    done: list[Record],
    data: list[tuple[str, Any]],
) -> Culprit:
    """A tensor that was fine and is not when the next layer gets it.

    Either the cast to that layer's dtype did it, or the code of the layer
    around it.
    """
    tensor = record.inputs[index]
    key = ("inputs", id(record.layer), record.call, index)
    suspects = [record.layer, *feeding(record, done), *around(record)]
    for name, given in data:
        if is_cast_of(tensor, given):
            return Culprit(
                DATA,
                record.layer,
                record.name,
                f"{name} as {tensor.dtype.name}",
                tensor.dtype.name,
                {name: tally.largest(given)},
                suspects,
                key,
            )
    for earlier in reversed(done):
        for given in earlier.outputs:
            if is_cast_of(tensor, given):
                made = f"output of '{earlier.name}'"
                return Culprit(
                    FORWARD,
                    record.layer,
                    record.name,
                    f"input, cast to {tensor.dtype.name} from the "
                    f"{given.dtype.name} {made}",
                    tensor.dtype.name,
                    {made: tally.largest(given)},
                    suspects,
                    key,
                )
    owner = record.parent or record
    last = {
        f"output of '{earlier.name}'": tally.largest(given)
        for earlier in done[-1:]
        for given in earlier.outputs
    }
    return Culprit(
        FORWARD,
        owner.layer,
        owner.name,
        f"a value that its own code computes, on the way into '{record.name}'",
        tensor.dtype.name,
        last or _inputs_of(owner),
        [owner.layer, *(e.layer for e in done[-1:]), *suspects],
        key,
    )


def _inputs_of(record: Record) -> dict[str, float]:
    found = {}
    for index, tensor in enumerate(record.inputs):
        number = f" {index + 1}" if len(record.inputs) > 1 else ""
        found[f"input{number}"] = tally.largest(tensor)
    for variable in getattr(record.layer, "trainable_variables", []):
        size = tally.largest(tf.convert_to_tensor(variable.value))
        if size:
            found[f"weight '{variable.name}'"] = size
    return found
