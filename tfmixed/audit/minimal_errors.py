"""How far a step in 16 bits is from the same step in float32."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfmixed.audit.step import Observation

# A weight whose gradient has a smaller share of the norm of them all is not
# looked at alone: the bias before a normalization has a gradient of noise.
NEGLIGIBLE = 0.01


@dataclasses.dataclass(frozen=True)
class Errors:
    """Relative errors in the Euclidean norm, the largest over all batches.

    Args:
        outputs: Of the output that is farthest off.
        gradient: Of the gradient of all weights as one vector.
        weight: Of the gradient of the weight that is farthest off.
        weight_path: Which weight that is.
    """

    outputs: float = 0.0
    gradient: float = 0.0
    weight: float = 0.0
    weight_path: str = ""

    @property
    def worst(self) -> float:
        """The largest of the three."""
        return max(self.outputs, self.gradient, self.weight)

    def __or__(self, other: "Errors") -> "Errors":
        """The larger of each, of two batches."""
        is_worse = other.weight > self.weight
        return Errors(
            max(self.outputs, other.outputs),
            max(self.gradient, other.gradient),
            max(self.weight, other.weight),
            other.weight_path if is_worse else self.weight_path,
        )

    def __str__(self) -> str:
        of = f" ({self.weight_path})" if self.weight_path else ""
        return (
            f"outputs {number(self.outputs)}, gradient "
            f"{number(self.gradient)}, one weight {number(self.weight)}{of}"
        )


FAILED = Errors(math.inf, math.inf, math.inf)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """The outputs of a step, and the gradients of its weights, not scaled.

    Args:
        outputs: The floating-point outputs of the model.
        gradients: In the order of the trainable weights; None where the loss
            does not depend on one.
        paths: Of the weights.
    """

    outputs: Sequence[Any]
    gradients: Sequence[Any]
    paths: Sequence[str]


def step_of(found: Observation) -> Step:
    """What is compared of an observed step, in float64.

    Args:
        found: The step.
    """
    # The model itself is the last to end, and all outputs are its.
    outputs = found.records[-1].outputs
    return Step(
        [tf.cast(output, "float64") for output in outputs],
        [_unscaled(one.gradient, found.loss_scale) for one in found.weights],
        [str(one.variable.path) for one in found.weights],
    )


def _unscaled(gradient: Any, scale: float) -> Any:
    if gradient is None:
        return None
    return tf.cast(tf.convert_to_tensor(gradient), "float64") / scale


def is_finite(step: Step) -> bool:
    """Returns whether all of a step is finite.

    Args:
        step: The step.
    """
    tensors = [*step.outputs, *(g for g in step.gradients if g is not None)]
    return all(math.isfinite(_norm(tensor)) for tensor in tensors)


def compare(exact: Step, other: Step) -> Errors:
    """Returns the errors of one batch; infinite where values are not finite.

    Args:
        exact: The step in float32.
        other: The same step, with layers in 16 bits.
    """
    outputs = [
        _relative(_norm(b - a), _norm(a))
        for a, b in zip(exact.outputs, other.outputs, strict=True)
    ]
    triples = [
        (_norm(b - a), _norm(a), path)
        for a, b, path in zip(
            exact.gradients, other.gradients, exact.paths, strict=True
        )
        if a is not None and b is not None
    ]
    error = math.hypot(*(e for e, _, _ in triples))
    norm = math.hypot(*(n for _, n, _ in triples))
    alone = [
        (_relative(e, n), path)
        for e, n, path in triples
        if n > NEGLIGIBLE * norm
    ]
    weight, path = max(alone, default=(0.0, ""))
    return Errors(
        max(outputs, default=0.0),
        _relative(error, norm),
        weight,
        path if weight else "",
    )


def _relative(error: float, norm: float) -> float:
    if not math.isfinite(error):
        return math.inf
    if error == 0.0:
        return 0.0
    return error / norm if norm else math.inf


def _norm(tensor: Any) -> float:
    return float(keras.ops.norm(keras.ops.reshape(tensor, (-1,))))


def number(value: float) -> str:
    """Writes an error, short.

    Args:
        value: At least 0.
    """
    return "not finite" if math.isinf(value) else f"{value:.2g}"
