"""One training step without the update, watched; the model stays as it was."""

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed.audit import observe as observe_lib
from tfmixed.audit.batches import Batch
from tfmixed.audit.observe import Record
from tfmixed.casting import float32_activity_regularizers
from tfmixed.casting import to_float32
from tfmixed.guard import Snapshot
from tfmixed.loss_scale import DynamicLossScale
from tfmixed.loss_scale import NoLossScale
from tfmixed.model import computes_in_float16

GIVEN = "the loss that was given"
COMPILED = "the loss that the model was compiled with"
STAND_IN = (
    "a stand-in, the mean of the squares of the outputs, because the model is "
    "not compiled and no loss and targets were given"
)


@dataclasses.dataclass(eq=False)
class WeightGradient:
    """The gradient of the loss with respect to one variable.

    Args:
        layer: The innermost watched layer that has the variable.
        variable: The Keras variable.
        gradient: A tensor, `tf.IndexedSlices`, or None where the loss does
            not depend on the variable.
    """

    layer: Any
    variable: Any
    gradient: Any


@dataclasses.dataclass(eq=False)
class Observation:
    """What happened in one step.

    Args:
        records: The calls of layers, in the order in which they ended.
        events: `("in", record)` and `("out", record)` in order.
        loss: The loss, a float32 scalar, not scaled.
        loss_scale: What the loss was multiplied with.
        loss_kind: Which loss it was, in words.
        weights: The gradients of the trainable variables, times the scale.
    """

    records: list[Record]
    events: list[tuple[str, Record]]
    loss: Any
    loss_scale: float
    loss_kind: str
    weights: list[WeightGradient]

    def path_of(self, layer: Any) -> str:
        """What a layer is called in the records."""
        paths = (r.path for r in self.records if r.layer is layer)
        return next(paths, str(layer.name))


def observe(
    model: keras.Model,
    batch: Batch,
    *,
    loss: Any = None,
    loss_scale: float = 1.0,
    same_draws: bool = False,
) -> Observation:
    """Runs a model forward and backward, eagerly, and takes notes.

    Weights, statistics, seeds and metrics are put back afterwards, so that
    two runs differ in nothing but what was changed between them.

    Args:
        model: A Keras model. If it is not built, it is built.
        batch: What to run it on.
        loss: What `compile(loss=...)` takes; by default the loss that the
            model was compiled with, or a stand-in.
        loss_scale: What the loss is multiplied with before the backward pass.
        same_draws: Whether random layers draw the same in each precision.

    Returns:
        The `Observation`. Its gradients are those of the scaled loss.
    """
    build(model, batch)
    with (
        unchanged(model),
        float32_activity_regularizers(model),
        observe_lib.recording(model, same_draws) as recorder,
    ):
        # What no trained weight depends on is not to have gradients: nobody
        # would use them, and they might overflow.
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([v.value for v in model.trainable_variables])
            training = _keras.takes_training(model)
            arguments = {"training": True} if training else {}
            outputs = model(batch.x, **arguments)
            recorder.finish()
            value, kind = _loss(model, batch, outputs, loss)
            scaled = value * loss_scale
        weights = _backward(model, recorder, tape, scaled)
    return Observation(
        recorder.records, recorder.events, value, loss_scale, kind, weights
    )


def _backward(
    model: keras.Model,
    recorder: observe_lib.Recorder,
    tape: tf.GradientTape,
    scaled: Any,
) -> list[WeightGradient]:
    # A nested model returns the tensor of its last layer.
    tensors = {
        id(tensor): tensor
        for record in recorder.records
        for tensor in record.outputs
    }
    owners = observe_lib.owners(model)
    sources = [*tensors.values(), *(v.value for v, _ in owners)]
    gradients = tape.gradient(scaled, sources)
    by_tensor = dict(zip(tensors, gradients, strict=False))
    for record in recorder.records:
        record.gradients = [by_tensor[id(t)] for t in record.outputs]
    return [
        WeightGradient(layer, variable, gradient)
        for (variable, layer), gradient in zip(
            owners, gradients[len(tensors) :], strict=True
        )
    ]


def _loss(
    model: keras.Model, batch: Batch, outputs: Any, loss: Any
) -> tuple[Any, str]:
    """The loss in float32, with everything that layers add, and its name."""
    for layer in _keras.flatten_layers(model):
        added = [to_float32(value) for value in _keras.added_losses(layer)]
        _keras.set_added_losses(layer, added)
    outputs = keras.tree.map_structure(to_float32, outputs)
    if loss is None and _has_loss(model):
        total = _keras.compute_loss(
            model, batch.x, batch.y, outputs, batch.weights
        )
        return to_float32(total), COMPILED
    if loss is None:
        kind = STAND_IN
        values = observe_lib.floats(outputs)
        first = tf.add_n([tf.reduce_mean(tf.square(v)) for v in values])
    else:
        kind = GIVEN
        compiled = _keras.compile_loss(model, loss)
        first = compiled(batch.y, outputs, batch.weights)
    added = [to_float32(value) for value in model.losses]
    return tf.add_n([to_float32(first), *added]), kind


def _has_loss(model: keras.Model) -> bool:
    """Returns whether the model knows its loss itself."""
    own = type(model).compute_loss is not keras.Model.compute_loss
    return own or getattr(model, "loss", None) is not None


def build(model: keras.Model, batch: Batch) -> None:
    """Creates the weights of a model that has never been called."""
    if all(layer.built for layer in _keras.flatten_layers(model)):
        return
    model(batch.x)


@contextlib.contextmanager
def unchanged(model: keras.Model) -> Iterator[None]:
    """What happens to the state of the model in the block is undone."""
    losses = _keras.kept_losses(model)
    known = {id(metric) for metric in model.metrics}
    draws = random.getstate()
    seed = _keras.global_seed()
    seeds = [] if seed is None else [seed.state]
    state = Snapshot([*model.variables, *model.metrics_variables, *seeds])
    try:
        yield
    finally:
        state.restore_unless(tf.constant(False))
        for metric in model.metrics:
            if id(metric) not in known:
                metric.reset_state()
        _keras.restore_losses(losses)
        # What draws without a seed of its own makes one from Python's.
        _keras.set_global_seed(seed)
        random.setstate(draws)


def loss_scale_of(model: keras.Model) -> float:
    """The loss scale that the next step of a model would use.

    That of its optimizer; for a model that is not compiled the first one of
    `tfmixed.DynamicLossScale`. A model that computes in float16 and was
    compiled with an optimizer that scales nothing has 1.0.

    Args:
        model: A Keras model.
    """
    optimizer = getattr(model, "optimizer", None)
    default = DynamicLossScale().initial
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        if isinstance(getattr(optimizer, "loss_scale", None), NoLossScale):
            return 1.0 if computes_in_float16(model) else default
        if optimizer.built:
            return float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))
        first = getattr(optimizer, "first_state", None)
        return float(first.scale if first else optimizer.initial_scale)
    if optimizer is None:
        return default
    factor = getattr(optimizer, "loss_scale_factor", None)
    if factor is None:
        return 1.0 if computes_in_float16(model) else default
    return float(factor)
