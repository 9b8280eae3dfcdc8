"""The stages of a step: scaled, perhaps unscaled by hand, applied.

A call in the wrong order gives wrong updates and no word in stock Keras: an
unscaled loss, a gradient divided twice, clipping against a scaled norm. Here
each of them is an error or a warning, as far as it can be seen.
"""

import contextlib
import re
import threading
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfmixed import gradients as gradient_lib
from tfmixed import skips

_CLIPPING = re.compile(r"(^|/)clip_by_(value|norm|global_norm|average_norm)")
_SCALING = ("Mul", "RealDiv", "DivNoNan", "MulNoNan")
# What may stand between the variable and the factor that was made of it.
_PASSING = (
    *_SCALING,
    "Cast",
    "Identity",
    "Inv",
    "ReadVariableOp",
    "Reciprocal",
)


class Stages(threading.local):
    """Where the step of this thread stands; replicas are threads."""

    def __init__(self) -> None:
        super().__init__()
        self._unscaled = False
        self._flags: list[Any] = []
        self._check: Callable[[], Any] | None = None

    @contextlib.contextmanager
    def watch(self, check: Callable[[], Any]) -> Iterator[None]:
        """Inside the block a step also has to pass `check()` to be applied.

        Args:
            check: Returns a boolean scalar tensor.
        """
        outer, self._check = self._check, check
        try:
            yield
        finally:
            self._check = outer

    def scaled(self, loss: Any) -> None:
        """A loss was scaled: a step begins, whatever became of the last."""
        self._unscaled = False
        self._flags = [tf.reduce_all(tf.math.is_finite(loss))]

    def unscaled(self, finite: Any) -> None:
        """Gradients were unscaled by hand.

        Args:
            finite: Whether they were finite then; clipping by value would
                hide an infinite one from `apply`.

        Raises:
            RuntimeError: If they already were in this step.
        """
        if self._unscaled:
            raise RuntimeError(
                "unscale() has already been called on this optimizer since "
                "the last apply(). The gradients are unscaled now: pass them "
                "to apply()."
            )
        self._unscaled = True
        self._flags.append(finite)

    def applied(self) -> tuple[bool, list[Any]]:
        """The step ends.

        Returns:
            Whether the gradients are already unscaled, and the flags that
            have to be true besides: the loss was finite, the gradients were
            before they were changed by hand, and what `watch` asks for.
        """
        unscaled, flags = self._unscaled, self._flags
        self._unscaled, self._flags = False, []
        flags = [flag for flag in flags if gradient_lib.is_reachable(flag)]
        if self._check is not None:
            flags.append(self._check())
        return unscaled, flags


def check_untouched(gradients: Iterable[Any], scale: Any) -> None:
    """Looks for changes to gradients that are still scaled.

    Only a graph remembers how a tensor came about, so nothing is found when
    the step runs eagerly.

    Args:
        gradients: What `apply` was given, without `unscale` before it.
        scale: The variable that holds the loss scale.

    Raises:
        RuntimeError: If a gradient was divided by the scale by hand.
    """
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            gradient = gradient.values
        if gradient is None or not tf.is_symbolic_tensor(gradient):
            continue
        name = gradient.op.name
        if "gradient_tape" in name:
            continue
        if gradient.op.type in _SCALING and _made_of(gradient.op, scale):
            raise RuntimeError(
                "apply() was given gradients that had been multiplied or "
                "divided by the loss scale by hand, and would divide them "
                "again. Pass the gradients as they are, or call "
                "`gradients = optimizer.unscale(gradients)`, after which "
                "apply() does not divide."
            )
        if _CLIPPING.search(name):
            skips.warn(
                "Gradients were clipped while they were still multiplied by "
                "the loss scale, so the limit means something else at each "
                "step. Clip in the inner optimizer (clipnorm=..., clipvalue="
                "..., global_clipnorm=...), or call `gradients = "
                "optimizer.unscale(gradients)` before clipping."
            )
            return


def _made_of(operation: Any, variable: Any, depth: int = 4) -> bool:
    """Returns whether an operand is computed from `variable`."""
    handles = _handles(operation.graph, variable)
    waiting = [(operation, depth)]
    while waiting:
        current, left = waiting.pop()
        for tensor in current.inputs:
            if id(tensor) in handles:
                return True
            above = tensor.op
            # Through the backward pass every gradient is made of it.
            backward = "gradient_tape" in above.name
            if left and above.type in _PASSING and not backward:
                waiting.append((above, left - 1))
    return False


def _handles(graph: Any, variable: Any) -> set[int]:
    """Returns the ids of the graph's own names for a variable's handles."""
    value = variable.value
    replicas = getattr(value, "values", (value,))
    outer = {id(replica.handle) for replica in replicas}
    captures = getattr(graph, "captures", ())
    return {id(inside) for outside, inside in captures if id(outside) in outer}
