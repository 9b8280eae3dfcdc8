"""A few batches through a model before it trains: what would 16 bits do?"""

import dataclasses
import json
from typing import Any

import keras
import numpy as np

from tfmixed.audit import batches as batch_lib
from tfmixed.audit import step
from tfmixed.audit.findings import Finding
from tfmixed.audit.flight import Flight
from tfmixed.audit.rows import LayerRow
from tfmixed.audit.window import ScaleWindow


@dataclasses.dataclass(frozen=True)
class Preflight:
    """What `preflight` measured.

    Args:
        rows: A `LayerRow` for each layer, in the order of the forward pass.
        findings: What is wrong, each with layer, value and fix.
        policy: The policy that was judged; "as it is" for a model that
            computes in 16 bits already.
        loss_scale: The scale that gradients were judged at.
        window: The safe loss scales; None if nothing computes in float16.
        loss: The mean loss in float32; None if no batch could be run.
        loss_kind: Which loss that is.
        examples: How many rows of data were run.
        notes: What to know about the measurement.
    """

    rows: tuple[LayerRow, ...]
    findings: tuple[Finding, ...]
    policy: str
    loss_scale: float
    window: ScaleWindow | None
    loss: float | None
    loss_kind: str
    examples: int
    notes: tuple[str, ...]

    def to_json(self) -> str:
        """Returns everything as strict JSON."""
        return json.dumps(_strict(dataclasses.asdict(self)), indent=2)

    def __str__(self) -> str:
        lines = [f"{len(self.rows)} layers, {self.examples} examples."]
        if self.window is not None:
            lines.append(f"Safe loss scales: {self.window}.")
        lines += [str(finding) for finding in self.findings]
        if not self.findings:
            lines.append("Nothing wrong was found.")
        return "\n".join([*lines, *self.notes])


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def preflight(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    loss: Any = None,
    batches: int = 2,
    batch_size: int = 16,
    loss_scale: float | None = None,
    policy: Any = None,
    verbose: bool = True,
) -> Preflight:
    """Measures on a few batches what 16 bits do to a model.

    The model runs forward and backward in float32 and, on the first batch, in
    16 bits. Nothing is trained: weights, statistics, seeds, metrics and
    policies are afterwards what they were.

    Args:
        model: A Keras model.
        x: Array, list, tuple or dict of arrays, `tf.data.Dataset`, or
            `keras.utils.PyDataset`. Datasets yield (x, y) or (x, y, weights).
        y: The targets, or None.
        loss: What `compile(loss=...)` takes. By default the loss that the
            model was compiled with; without one, a stand-in.
        batches: How many batches are run in float32.
        batch_size: How many rows of arrays are in a batch.
        loss_scale: The scale to judge float16 gradients at. By default that
            of the optimizer, or 2^15 if there is none.
        policy: What to judge a float32 model under: by default
            `"mixed_float16"`. A model that computes in 16 bits is judged as
            it is.
        verbose: Whether progress is shown, on a terminal.

    Returns:
        A `Preflight`.

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: If the arrays of the data do not fit each other.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "preflight(model, x, y) expects a Keras model. Received: "
            f"{model!r} of type {type(model).__name__}."
        )
    fixed = _fixed_batch_size(model)
    taken = list(batch_lib.take(x, y, batches, fixed or batch_size))
    if not taken:
        raise ValueError("The dataset yields no batch.")
    if fixed:
        taken = [b for b in taken if len(b) == fixed] or taken
    step.build(model, taken[0])
    flight = Flight(model, loss, loss_scale, policy)
    rows = flight.run(taken, x, y, verbose)
    return Preflight(
        tuple(rows),
        tuple(flight.findings),
        "as it is" if flight.policy is None else flight.policy.name,
        flight.scale,
        flight.window,
        float(np.mean(flight.losses)) if flight.losses else None,
        flight.loss_kind,
        flight.examples,
        tuple(flight.notes),
    )


def _fixed_batch_size(model: keras.Model) -> int | None:
    inputs = getattr(model, "inputs", None) or []
    return next((int(t.shape[0]) for t in inputs if t.shape[0]), None)
