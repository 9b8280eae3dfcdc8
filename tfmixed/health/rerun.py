"""One layer of a model again, on what it got in an exact run."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed.audit import draws
from tfmixed.audit import observe
from tfmixed.casting import to_float32
from tfmixed.health.columns import Part


@dataclasses.dataclass(eq=False)
class Call:
    """A call of a layer in the exact run."""

    layer: Any
    args: Any
    kwargs: Any
    outputs: list[Any]


def exact_run(
    model: keras.Model, layers: list[Any], data: Any
) -> tuple[list[Call], list[Any]]:
    """Runs the model as it is, forward and backward.

    Args:
        model: The model, in float32 now.
        layers: The layers whose calls are wanted.
        data: What `train_step` takes.

    Returns:
        The calls, and for each the gradients of the loss with respect to its
        outputs, None where there is none.
    """
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
        with _recorded(layers, tape) as calls:
            outputs = model(x, **({"training": True} if training else {}))
        outputs = keras.tree.map_structure(to_float32, outputs)
        loss = _keras.compute_loss(model, x, y, outputs, weights)
        loss = to_float32(loss)
    gradients = tape.gradient(loss, [call.outputs for call in calls])
    return calls, gradients


@contextlib.contextmanager
def _recorded(layers: list[Any], tape: Any) -> Iterator[list[Call]]:
    """Inside the block, calls of the layers are kept."""
    calls: list[Call] = []
    graph = tf.compat.v1.get_default_graph()

    def watch(layer: Any, call: Any) -> Any:
        def watched(*args: Any, **kwargs: Any) -> Any:
            outputs = call(*args, **kwargs)
            # A tensor of a loop or a branch exists only there.
            if tf.compat.v1.get_default_graph() is graph:
                found = observe.floats(outputs, graph)
                tape.watch(found)
                calls.append(Call(layer, args, kwargs, found))
            return outputs

        return watched

    before = [(layer, vars(layer).get("call")) for layer in layers]
    try:
        for layer in layers:
            _keras.set_instance_call(layer, watch(layer, layer.call))
        yield calls
    finally:
        for layer, call in before:
            _keras.set_instance_call(layer, call)


def again(
    call: Call, gradients: list[Any], scale: Any
) -> list[tuple[Part, Any]]:
    """Runs a layer by itself.

    Args:
        call: A call of it in the exact run.
        gradients: Of each output; None where there is none.
        scale: What they are multiplied by before they are rounded.

    Returns:
        Outputs, gradients of its weights and of its inputs.
    """
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


@contextlib.contextmanager
def under(policies: list[tuple[Any, Any]]) -> Iterator[None]:
    """Inside the block, layers compute under other policies.

    What they draw, they draw as in float32.

    Args:
        policies: Layers, and the policy of each.
    """
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
