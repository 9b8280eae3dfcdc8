"""What 16 bits do to each layer alone, whatever it computes in just now.

The step runs once in float32, forward and backward. Then each layer runs
again by itself, on the exact inputs and the exact gradient of its outputs:
in float32, and in the 16 bits that it began with. The difference is its own
doing. In a step in which all layers round, a bad one spoils the gradients of
all that stand before it and the outputs of all behind it; and a layer that
has been moved to float32 shows nothing at all.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed import telemetry
from tfmixed._switch import ModelSwitch
from tfmixed.audit import draws
from tfmixed.audit import observe
from tfmixed.casting import to_float32
from tfmixed.health import statistics
from tfmixed.health.columns import EXPONENTS
from tfmixed.health.columns import Column
from tfmixed.health.columns import Part
from tfmixed.health.probe import Numbers
from tfmixed.health.probe import check
from tfmixed.health.probe import together


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


@dataclasses.dataclass(eq=False)
class _Call:
    """A call of a layer in the exact run."""

    layer: Any
    args: Any
    kwargs: Any
    outputs: list[Any]


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
                calls, gradients = self._exact(data)
                rows, pairs, scales = self._pairs(calls, gradients, scale)
        finally:
            switch.off()
        self._rows = rows
        if not pairs:
            pairs, scales = [(tf.zeros([1]), tf.zeros([1]))], [tf.constant(1.0)]
        return statistics.columns(pairs, scales)[: len(rows)]

    def _exact(self, data: Any) -> tuple[list[_Call], list[Any]]:
        """The calls in float32, and gradients of their outputs."""
        model = self._model
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        # Keras asks the scope for the weights that it regularizes.
        mapping = [
            (variable, tf.convert_to_tensor(variable.value))
            for variable in model.trainable_variables
            if getattr(variable, "regularizer", None) is not None
        ]
        with (
            keras.StatelessScope(mapping, collect_losses=True),
            tf.GradientTape(watch_accessed_variables=False) as tape,
        ):
            training = _keras.takes_training(model)
            with self._recorded(tape) as calls:
                outputs = model(x, **({"training": True} if training else {}))
            outputs = keras.tree.map_structure(to_float32, outputs)
            loss = _keras.compute_loss(model, x, y, outputs, weights)
            loss = to_float32(loss)
        gradients = tape.gradient(loss, [call.outputs for call in calls])
        return calls, gradients

    @contextlib.contextmanager
    def _recorded(self, tape: Any) -> Iterator[list[_Call]]:
        """Inside the block, calls of the layers are kept."""
        calls: list[_Call] = []
        graph = tf.compat.v1.get_default_graph()

        def watch(layer: Any, call: Any) -> Any:
            def watched(*args: Any, **kwargs: Any) -> Any:
                outputs = call(*args, **kwargs)
                # A tensor of a loop or a branch exists only there.
                if tf.compat.v1.get_default_graph() is graph:
                    found = observe.floats(outputs, graph)
                    tape.watch(found)
                    calls.append(_Call(layer, args, kwargs, found))
                return outputs

            return watched

        before = [(layer, vars(layer).get("call")) for layer in self._layers]
        try:
            for layer in self._layers:
                _keras.set_instance_call(layer, watch(layer, layer.call))
            yield calls
        finally:
            for layer, call in before:
                _keras.set_instance_call(layer, call)

    def _pairs(
        self, calls: list[_Call], gradients: list[Any], scale: Any
    ) -> tuple[list[tuple[Any, Part]], list[tuple[Any, Any]], list[Any]]:
        """The rows, and for each the exact and the rough tensor and a scale."""
        rows, pairs, scales = [], [], []
        one = tf.constant(1.0)
        for call, found in zip(calls, gradients, strict=True):
            if all(gradient is None for gradient in found):
                continue
            exact = _again(call, found, one)
            with self._in_16_bits(call.layer):
                rough = _again(call, found, scale)
            for (part, a), (_, b) in zip(exact, rough, strict=True):
                if a is not None and b is not None:
                    rows.append((call.layer, part))
                    pairs.append((a, b))
                    scales.append(one if part is Part.OUTPUTS else scale)
        return rows, pairs, scales

    @contextlib.contextmanager
    def _in_16_bits(self, layer: Any) -> Iterator[None]:
        """Inside the block, a layer computes in what it began with."""
        policies = self._policies[id(layer)]
        exact = [(inner, _keras.layer_policy(inner)) for inner, _ in policies]
        for inner, policy in policies:
            _keras.set_layer_policy(inner, policy)
        try:
            with contextlib.ExitStack() as stack:
                for inner, _ in policies:
                    if draws.only_draws(inner):
                        call = stack.enter_context(draws.in_float32(inner))
                        _keras.set_instance_call(inner, call)
                        stack.callback(_keras.set_instance_call, inner, None)
                yield
        finally:
            for inner, policy in exact:
                _keras.set_layer_policy(inner, policy)


def _again(
    call: _Call, gradients: list[Any], scale: Any
) -> list[tuple[Part, Any]]:
    """Outputs of a call, gradients of its weights and of its inputs."""
    graph = tf.compat.v1.get_default_graph()
    given = {id(t): t for t in observe.floats((call.args, call.kwargs), graph)}
    inputs = list(given.values())
    weights = [v.value for v in call.layer.trainable_variables]
    # A scope of its own, so that each run draws the same numbers.
    with (
        keras.StatelessScope(),
        tf.GradientTape(watch_accessed_variables=False) as tape,
    ):
        tape.watch([*inputs, *weights])
        outputs = observe.floats(call.layer(*call.args, **call.kwargs), graph)
    pairs = [
        (output, tf.cast(gradient * scale, output.dtype))
        for output, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None
    ]
    found = tape.gradient(
        [output for output, _ in pairs],
        [*weights, *inputs],
        output_gradients=[gradient for _, gradient in pairs],
    )
    parts = [Part.WEIGHTS] * len(weights) + [Part.GRADIENTS] * len(inputs)
    return [
        *((Part.OUTPUTS, output) for output in outputs),
        *zip(parts, found, strict=True),
    ]


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
