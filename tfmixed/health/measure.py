"""One batch, forward and backward, in float32 and as the step computes it.

Both runs read the same weights and draw the same random numbers, and neither
writes anything: `keras.StatelessScope` keeps every update to itself.
"""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed._switch import ModelSwitch
from tfmixed.audit import observe
from tfmixed.casting import float32_activity_regularizers
from tfmixed.casting import to_float32
from tfmixed.health import statistics
from tfmixed.health.columns import Part


@dataclasses.dataclass(eq=False)
class Run:
    """What a forward and a backward pass gave.

    Args:
        loss: The unscaled loss, a float32 scalar.
        records: The calls of layers, with outputs and their gradients.
        weights: Each trainable variable's layer, and its gradient.
    """

    loss: Any
    records: list[observe.Record]
    weights: list[tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What a row of the measured numbers is about.

    Args:
        layer: The layer or operation.
        part: Whose numbers.
        dtype: Of the tensor in the step: None for gradients of weights, which
            are always float32.
        passed_on: It is the output of a layer inside this one.
        call: Position of the call among all; -1 for gradients of weights.
    """

    layer: Any
    part: Part
    dtype: str | None
    passed_on: bool
    call: int


def measure(
    model: keras.Model, data: Any, scale: Any
) -> tuple[list[Tensor], Any, Any]:
    """Traces both runs and the numbers that are taken of them.

    Args:
        model: A built model that is compiled with a loss.
        data: What `train_step` takes.
        scale: Scalar tensor, the loss scale.

    Returns:
        What the rows are about, the numbers (a tensor with a row each), and a
        vector: the loss in float32, the loss of the step, how many values of
        the data are not finite, and the first row of the batch with one.
    """
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    switch = ModelSwitch(model, keras.DTypePolicy("float32"))
    switch.on()
    try:
        exact = _run(model, x, y, weights, tf.constant(1.0))
    finally:
        switch.off()
    rough = _run(model, x, y, weights, scale)
    tensors, pairs, scales = _pair(exact, rough, scale)
    batch = tf.stack([exact.loss, rough.loss, *_bad_data(data)])
    return tensors, statistics.columns(pairs, scales), batch


def _run(model: Any, x: Any, y: Any, weights: Any, scale: Any) -> Run:
    # Keras asks the scope for the weights that it regularizes, and only there.
    mapping = [
        (variable, tf.convert_to_tensor(variable.value))
        for variable in model.trainable_variables
        if getattr(variable, "regularizer", None) is not None
    ]
    mapped = {id(variable): tensor for variable, tensor in mapping}
    owners = observe.owners(model)
    with (
        keras.StatelessScope(mapping, collect_losses=True),
        float32_activity_regularizers(model),
        observe.recording(model, same_draws=True) as recorder,
    ):
        watched = [mapped.get(id(v), v.value) for v, _ in owners]
        # What no trained weight depends on has no gradients that matter.
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(watched)
            training = _keras.takes_training(model)
            outputs = model(x, **({"training": True} if training else {}))
            recorder.finish()
            outputs = keras.tree.map_structure(to_float32, outputs)
            loss = _keras.compute_loss(model, x, y, outputs, weights)
            scaled = to_float32(loss) * scale
    seen = {id(t): t for r in recorder.records for t in r.outputs}
    gradients = tape.gradient(scaled, [*seen.values(), *watched])
    by_tensor = dict(zip(seen, gradients, strict=False))
    for record in recorder.records:
        record.gradients = [by_tensor[id(t)] for t in record.outputs]
    layers = [layer for _, layer in owners]
    of_weights = zip(layers, gradients[len(seen) :], strict=True)
    return Run(to_float32(loss), recorder.records, list(of_weights))


def _pair(
    exact: Run, rough: Run, scale: Any
) -> tuple[list[Tensor], list[tuple[Any, Any]], list[Any]]:
    """Lays the tensors of two runs side by side."""
    found: list[tuple[Tensor, Any, Any]] = []
    for (layer, one), (_, other) in zip(
        exact.weights, rough.weights, strict=True
    ):
        about = Tensor(layer, Part.WEIGHTS, None, False, -1)
        found.append((about, one, other))
    twins = {(id(r.layer), r.call): r for r in exact.records}
    made: set[int] = set()
    for position, record in enumerate(rough.records):
        twin = twins.get((id(record.layer), record.call))
        if twin is None or len(twin.outputs) != len(record.outputs):
            continue
        for index, output in enumerate(record.outputs):
            known = id(output) in made
            made.add(id(output))
            for part, one, other in (
                (Part.OUTPUTS, twin.outputs[index], output),
                (
                    Part.GRADIENTS,
                    twin.gradients[index],
                    record.gradients[index],
                ),
            ):
                about = Tensor(
                    record.layer, part, output.dtype.name, known, position
                )
                found.append((about, one, other))
    kept = [t for t in found if t[1] is not None and t[2] is not None]
    one = tf.constant(1.0)
    scales = [one if t.part is Part.OUTPUTS else scale for t, _, _ in kept]
    return [t for t, _, _ in kept], [(a, b) for _, a, b in kept], scales


def _bad_data(data: Any) -> tuple[Any, Any]:
    """How many values of a batch are not finite, and the first row."""
    found = [
        statistics.bad_values(tensor)
        for tensor in keras.tree.flatten(data)
        if isinstance(tensor, tf.Tensor)
        and tensor.dtype.is_floating
        and tensor.shape.rank
    ]
    if not found:
        return tf.constant(0.0), tf.constant(float("inf"))
    counts, rows = zip(*found, strict=True)
    return tf.add_n(counts), tf.reduce_min(tf.stack(rows))
