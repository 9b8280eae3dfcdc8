"""What 16 bits do to each layer alone, whatever it computes in just now.

The step runs once in float32, forward and backward. Then each layer runs
again by itself, on the exact inputs and the exact gradient of its outputs:
in float32, and in the 16 bits that it began with. The difference is its own
doing. In a step in which all layers round, a bad one spoils the gradients of
all that stand before it and the outputs of all behind it; and a layer that
has been moved to float32 shows nothing at all.
"""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed import telemetry
from tfmixed._switch import ModelSwitch
from tfmixed.audit import draws
from tfmixed.health import statistics
from tfmixed.health.columns import EXPONENTS
from tfmixed.health.columns import Column
from tfmixed.health.columns import Part
from tfmixed.health.probe import Numbers
from tfmixed.health.probe import check
from tfmixed.health.probe import together
from tfmixed.health.rerun import Call
from tfmixed.health.rerun import again
from tfmixed.health.rerun import exact_run
from tfmixed.health.rerun import under


@dataclasses.dataclass(frozen=True)
class Alone:
    """What a layer would do to a batch if it alone computed in 16 bits.

    Args:
        error: The largest of three relative errors, each a Euclidean norm: of
            the outputs, of the gradients of the weights, of those of the
            inputs.
        part: Which of the three it is, in words.
        underflow: Share of the gradients, not zero in float32, that are zero.
        overflow: Share of outputs and gradients, finite in float32, that are
            not.
    """

    error: float
    part: str
    underflow: float
    overflow: float


_WORDS = {
    Part.OUTPUTS: "outputs",
    Part.WEIGHTS: "gradients of weights",
    Part.GRADIENTS: "gradients of inputs",
}


def units(model: keras.Model, movable: list[Any]) -> list[Any]:
    """Returns the layers that can be moved by themselves.

    What is inside a layer (of attention, a recurrent layer, a block of one's
    own) belongs to it; nested models are gone into.

    Args:
        model: The model.
        movable: The layers, inner ones too, that may change their dtype.
    """
    ids = {id(layer) for layer in movable}
    found: dict[int, Any] = {}

    def walk(layer: Any) -> None:
        for child in _keras.child_layers(layer):
            if isinstance(child, keras.Model):
                walk(child)
            elif not isinstance(child, keras.layers.InputLayer) and any(
                id(inner) in ids for inner in _keras.flatten_layers(child)
            ):
                found.setdefault(id(child), child)

    walk(model)
    return list(found.values())


class AloneProbe:
    """Measures layers of a model one by one, in one function.

    Args:
        model: A built model, compiled with a loss and an optimizer.
        layers: The layers to measure, of `units`.

    Raises:
        ValueError: If the model cannot be measured; the message says why.
    """

    def __init__(self, model: keras.Model, layers: list[Any]) -> None:
        check(model)
        self._model = model
        self._layers = layers
        # As they are now: the function is traced once, and moves later on
        # change nothing of what it measures.
        self._policies = {
            id(layer): [
                (inner, _keras.layer_policy(inner))
                for inner in _keras.flatten_layers(layer)
            ]
            for layer in layers
        }
        self._rows: list[tuple[Any, Part]] = []
        self._function: Any = None

    def measure(self, data: Any) -> dict[int, Alone]:
        """Measures a batch; waits for it.

        Args:
            data: What `train_step` takes; with several replicas a value of
                each.

        Returns:
            What was found of each layer, by its `id`; without those whose
            numbers are not finite in float32 either, and without those that
            the backward pass does not come by.
        """
        strategy = self._model.distribute_strategy
        if self._function is None:
            self._function = self._compiled()
        scale = telemetry.scale_of(self._model.optimizer)
        table = [
            replica.numpy()
            for replica in strategy.experimental_local_results(
                self._function(data, scale)
            )
        ]
        parts: dict[tuple[int, Part], list[Numbers]] = {}
        for replica in table:
            for (layer, part), row in zip(self._rows, replica, strict=True):
                numbers = Numbers(row[: EXPONENTS.start], row[EXPONENTS])
                parts.setdefault((id(layer), part), []).append(numbers)
        found = {}
        for layer in self._layers:
            own = {
                part: together(parts.get((id(layer), part), []))
                for part in Part
            }
            whole = together(list(own.values()))
            if whole[Column.SIZE] and not whole[Column.BAD]:
                found[id(layer)] = _of_parts(own)
        return found

    def _compiled(self) -> Any:
        strategy = self._model.distribute_strategy

        @tf.autograph.experimental.do_not_convert
        def run(data: Any, scale: Any) -> Any:
            return strategy.run(self._step, args=(data, scale))

        return tf.function(run, reduce_retracing=True)

    @tf.autograph.experimental.do_not_convert
    def _step(self, data: Any, scale: Any) -> Any:
        switch = ModelSwitch(self._model, keras.DTypePolicy("float32"))
        switch.on()
        try:
            with draws.without_recurrent_dropout(self._model):
                calls, gradients = exact_run(self._model, self._layers, data)
                rows, pairs, scales = self._pairs(calls, gradients, scale)
        finally:
            switch.off()
        self._rows = rows
        if not pairs:
            pairs, scales = [(tf.zeros([1]), tf.zeros([1]))], [tf.constant(1.0)]
        return statistics.columns(pairs, scales)[: len(rows)]

    def _pairs(
        self, calls: list[Call], gradients: list[Any], scale: Any
    ) -> tuple[list[tuple[Any, Part]], list[tuple[Any, Any]], list[Any]]:
        """The rows, and for each the exact and the rough tensor and a scale."""
        rows, pairs, scales = [], [], []
        one = tf.constant(1.0)
        for call, found in zip(calls, gradients, strict=True):
            if all(gradient is None for gradient in found):
                continue
            exact = again(call, found, one)
            with under(self._policies[id(call.layer)]):
                rough = again(call, found, scale)
            for (part, a), (_, b) in zip(exact, rough, strict=True):
                if a is not None and b is not None:
                    rows.append((call.layer, part))
                    pairs.append((a, b))
                    scales.append(one if part is Part.OUTPUTS else scale)
        return rows, pairs, scales


def _of_parts(parts: dict[Part, Numbers]) -> Alone:
    part = max(parts, key=lambda part: parts[part].error)
    gradients = together([parts[Part.WEIGHTS], parts[Part.GRADIENTS]])
    whole = together(list(parts.values()))
    return Alone(
        error=parts[part].error,
        part=_WORDS[part],
        underflow=gradients.share(Column.FLUSHED),
        overflow=whole[Column.OVERFLOWED] / (whole[Column.SIZE] or 1.0),
    )
