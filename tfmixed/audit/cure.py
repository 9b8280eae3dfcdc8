"""Trying out what makes a step finite again: nothing is claimed untried."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras

from tfmixed import _keras
from tfmixed.audit import culprit as culprit_lib
from tfmixed.audit import step
from tfmixed.audit import suspect
from tfmixed.audit.batches import Batch
from tfmixed.audit.flight import switched
from tfmixed.audit.suspect import Culprit
from tfmixed.model import computes_in_float16

_HALF = ("float16", "bfloat16")
# More layers than this in float32 are no small change any more.
_MOST = 12


@dataclasses.dataclass(frozen=True, eq=False)
class Cure:
    """What made the step finite when it was tried.

    Args:
        layers: The layers that computed in float32.
        loss_scale: The loss scale, if it had to be lowered.
        policy: The policy for the whole model, where nothing less helped.
    """

    layers: tuple[Any, ...] = ()
    loss_scale: float | None = None
    policy: str | None = None


class Trials:
    """Runs one step again and again, with something changed each time.

    Args:
        model: The model; after each run it is as it was.
        batch: The batch on which its step was not finite.
        loss: What `compile(loss=...)` takes, or None.
        data: The tensors of the batch, with their names.
    """

    def __init__(
        self,
        model: keras.Model,
        batch: Batch,
        loss: Any,
        data: list[tuple[str, Any]],
    ) -> None:
        self._model = model
        self._batch = batch
        self._loss = loss
        self._data = data
        # Whether the data enters the model in float32.
        self.exact_inputs = False

    def run(
        self, loss_scale: float, kept: Sequence[Any] = (), policy: Any = None
    ) -> step.Observation:
        """Runs the step.

        Args:
            loss_scale: For a model that computes in float16.
            kept: Layers that compute in float32, with all inside them.
            policy: A policy for the whole model; by default its own.
        """
        if policy is not None:
            policy = keras.DTypePolicy(policy)
        with switched(self._model, policy), self._in_float32(kept):
            scale = loss_scale if computes_in_float16(self._model) else 1.0
            return step.observe(
                self._model, self._batch, loss=self._loss, loss_scale=scale
            )

    def culprit(
        self, loss_scale: float, kept: Sequence[Any] = (), policy: Any = None
    ) -> Culprit | None:
        """Runs the step; returns what is not finite, None if all is."""
        return culprit_lib.find(self.run(loss_scale, kept, policy), self._data)

    def can_keep(self, layer: Any) -> bool:
        """Returns whether a layer computes in 16 bits, or one inside it."""
        return bool(self._parts(layer))

    def _parts(self, layer: Any) -> list[Any]:
        if not isinstance(layer, keras.Layer):
            return []
        whole = layer is self._model
        parts = [layer] if whole else _keras.flatten_layers(layer)
        return [part for part in parts if part.compute_dtype in _HALF]

    @contextlib.contextmanager
    def _in_float32(self, kept: Sequence[Any]) -> Iterator[None]:
        parts = {id(p): p for layer in kept for p in self._parts(layer)}
        if self.exact_inputs:
            parts.update({id(p): p for p in self._parts(self._model)})
        before = [(p, _keras.layer_policy(p)) for p in parts.values()]
        inputs = self._half_inputs() if self.exact_inputs else []
        try:
            for part, _ in before:
                _keras.set_layer_policy(part, keras.DTypePolicy("float32"))
            for layer, _ in inputs:
                _keras.set_input_dtype(layer, "float32")
            yield
        finally:
            for part, policy in before:
                _keras.set_layer_policy(part, policy)
            for layer, dtype in inputs:
                _keras.set_input_dtype(layer, dtype)

    def _half_inputs(self) -> list[tuple[Any, str]]:
        found = [
            (layer, _keras.input_dtype(layer))
            for layer in _keras.flatten_layers(self._model)
        ]
        return [(layer, dtype) for layer, dtype in found if dtype in _HALF]


def find_cure(
    trials: Trials, first: Culprit, loss_scale: float, order: list[int]
) -> Cure | None:
    """Looks for the smallest change with which the step is finite.

    A lower loss scale, if the backward pass alone overflows; else the fewest
    layers in float32, one more at a time, because an overflow may move on to
    the cast of the next layer; else bfloat16.

    Args:
        trials: Runs the step.
        first: What is not finite as things are.
        loss_scale: The scale as it is.
        order: The `id` of the layers, in the order of the forward pass.

    Returns:
        The `Cure`, or None if nothing that was tried helps.
    """
    kept: list[Any] = []
    bad: Culprit | None = first
    trials.exact_inputs = first.where == suspect.DATA
    while bad is not None:
        if bad.where in (suspect.BACKWARD, suspect.LOSS):
            lower = highest_scale(trials, loss_scale, kept)
            if lower is not None:
                kept = _fewest(trials, lower, kept)
                return Cure(_in_order(kept, order), lower)
        layer = next(
            (s for s in bad.suspects if s not in kept and trials.can_keep(s)),
            None,
        )
        if layer is None or len(kept) == _MOST:
            return _in_bfloat16(trials)
        kept.append(layer)
        bad = trials.culprit(loss_scale, kept)
    return Cure(_in_order(_fewest(trials, loss_scale, kept), order))


def _in_order(layers: list[Any], order: list[int]) -> tuple[Any, ...]:
    rank = {key: place for place, key in enumerate(order)}
    return tuple(sorted(layers, key=lambda layer: rank.get(id(layer), 0)))


def highest_scale(
    trials: Trials, loss_scale: float, kept: Sequence[Any]
) -> float | None:
    """Returns the largest power of two below the scale that is finite.

    None if 1 is not, or if the scale is 1 already.
    """
    if loss_scale <= 1 or trials.culprit(1.0, kept) is not None:
        return None
    # 2**low is finite, 2**high is not.
    low, high = 0, math.ceil(math.log2(loss_scale))
    while high - low > 1:
        middle = (low + high) // 2
        if trials.culprit(2.0**middle, kept) is None:
            low = middle
        else:
            high = middle
    return 2.0**low


def _fewest(trials: Trials, loss_scale: float, kept: list[Any]) -> list[Any]:
    """Leaves out each layer that need not be in float32 after all."""
    for layer in list(kept):
        fewer = [other for other in kept if other is not layer]
        if trials.culprit(loss_scale, fewer) is None:
            kept = fewer
    return kept


def _in_bfloat16(trials: Trials) -> Cure | None:
    policy = "mixed_bfloat16"
    if trials.culprit(1.0, (), policy) is None:
        return Cure(policy=policy)
    return None
