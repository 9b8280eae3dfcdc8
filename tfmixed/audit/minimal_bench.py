"""A prepared copy of a model, in which layers switch to float32 and back."""

import math
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed import rules
from tfmixed.audit import step
from tfmixed.audit.batches import Batch
from tfmixed.audit.minimal_errors import FAILED
from tfmixed.audit.minimal_errors import Errors
from tfmixed.audit.minimal_errors import Step
from tfmixed.audit.minimal_errors import compare
from tfmixed.audit.minimal_errors import is_finite
from tfmixed.audit.minimal_errors import step_of
from tfmixed.audit.minimal_original import Original
from tfmixed.audit.minimal_units import Unit
from tfmixed.audit.minimal_units import dtypes_by_path
from tfmixed.audit.minimal_units import in_float32
from tfmixed.audit.minimal_units import paths_of
from tfmixed.audit.minimal_units import units_of
from tfmixed.loss_scale import FixedLossScale
from tfmixed.prepare import prepare

_HALF = ("float16", "bfloat16")
# A dynamic loss scale falls until the gradients are finite; so does this one.
_SCALES_TRIED = 5
_SCALE_STEP = 16.0
# What TensorFlow raises where a kernel is missing or dtypes do not agree.
_DOES_NOT_RUN = (
    TypeError,
    ValueError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.UnimplementedError,
)


class Bench:
    """Measures a model with some of its layers in 16 bits.

    Args:
        original: The model as it was handed in.
        policy: What `prepare` takes.
        batches: What to measure on.
        loss: What `compile(loss=...)` takes, or None.
        tick: Called before each measurement.

    Attributes:
        policy: The name of the 16-bit policy.
        units: What can be switched.
        loss_kind: Which loss it is, in words.
        count: How many measurements there were.
        is_exact: Whether each measurement prepares the model anew. That is
            slow, and needed only where one dtype decides about another.
    """

    def __init__(
        self,
        original: Original,
        policy: Any,
        batches: Sequence[Batch],
        loss: Any,
        tick: Callable[[int], None],
    ) -> None:
        self._original = original
        self._batches = batches
        self._tick = tick
        self.count = 0
        self.is_exact = False
        self._map: Any = policy if _is_map(policy) else None
        self._copy = self._prepared(policy)
        self.policy: str = self._copy.preparation.policy
        self._base = {
            layer: (type(layer), _keras.layer_policy(layer))
            for layer in _keras.flatten_layers(self._copy)
        }
        self._paths = paths_of(original.model)
        self.units = units_of(self._copy, self._paths)
        self._loss = loss
        if loss is None and not self._copy.compiled:
            # One with a `compile` of its own is not compiled again.
            self._loss = getattr(original.model, "loss", None)
        self._scales = _scales(self._copy)
        self.loss_kind = ""
        self._reference: list[Step] = []

    def reference(self) -> Errors:
        """Measures the model in float32, twice; returns the difference.

        Raises:
            ValueError: If it is not finite.
        """
        everything = [
            layer
            for layer in self._base
            if layer.compute_dtype in _HALF
            and rules.rule_for(layer).float16 != rules.ALONE
        ]
        self._tick(self.count)
        self._switch(everything)
        self._reference = [self._run(self._copy, b, 1.0) for b in self._batches]
        if not all(map(is_finite, self._reference)):
            raise ValueError(
                "minimal_float32: in float32, too, the outputs or gradients of "
                f"'{self._original.model.name}' are not finite on this data, "
                "so no precision helps. tfmixed.blame finds the first layer "
                "that is not."
            )
        first = self._run(self._copy, self._batches[0], 1.0)
        return compare(self._reference[0], first)

    def policy_map(self, kept: Collection[Unit]) -> Any:
        """The map that puts units into float32.

        Args:
            kept: The units.
        """
        order = {unit: place for place, unit in enumerate(self.units)}
        entries: dict[str, Any] = {
            unit.key: keras.DTypePolicy("float32")
            for unit in sorted(kept, key=lambda unit: order[unit])
        }
        for key in self._map or ():
            # The first entry that matches is the one that counts.
            entries.setdefault(key, self._map[key])
        return keras.dtype_policies.DTypePolicyMap(self.policy, entries)

    def errors(
        self, kept: Collection[Unit], stop_at: float = math.inf, most: int = 0
    ) -> Errors:
        """Measures the model with these units in float32.

        Args:
            kept: The units.
            stop_at: An error above which no more batches are run.
            most: How many batches to run; 0 for all.
        """
        self._tick(self.count)
        self.count += 1
        if self.is_exact:
            model = self._prepared(self.policy_map(kept))
        else:
            model = self._copy
            self._switch({x for unit in kept for x in unit.layers})
        return self._measured(model, stop_at, most or len(self._batches))

    def proof(self, kept: Collection[Unit]) -> Errors | None:
        """Measures what `prepare` makes of the map of these units.

        Args:
            kept: The units.

        Returns:
            The errors, or None if it has other dtypes than were measured.
        """
        expected = None
        if not self.is_exact:
            self._switch({x for unit in kept for x in unit.layers})
            expected = dtypes_by_path(self._copy, self._paths)
        model = self._prepared(self.policy_map(kept))
        if expected not in (None, dtypes_by_path(model, self._paths)):
            return None
        self.count += 1
        return self._measured(model, math.inf, len(self._batches))

    def _prepared(self, policy: Any) -> Any:
        # What cannot be copied was converted in place the last time.
        self._original.put_back()
        return prepare(self._original.model, policy)

    def _switch(self, kept: Collection[Any]) -> None:
        """Gives the layers of the copy their dtypes, whatever they had."""
        for layer, state in self._base.items():
            layer_class, policy = in_float32(layer) if layer in kept else state
            if type(layer) is not layer_class:
                layer.__class__ = layer_class
            if _keras.layer_policy(layer) != policy:
                _keras.set_layer_policy(layer, policy)

    def _measured(self, model: Any, stop_at: float, most: int) -> Errors:
        errors = Errors()
        for exact, batch in zip(
            self._reference[:most], self._batches[:most], strict=True
        ):
            errors |= self._on(model, exact, batch)
            if errors.worst > stop_at:
                break
        return errors

    def _on(self, model: Any, exact: Step, batch: Batch) -> Errors:
        errors = FAILED
        for scale in self._scales:
            try:
                errors = compare(exact, self._run(model, batch, scale))
            except _DOES_NOT_RUN:
                return FAILED
            if math.isfinite(errors.gradient) or math.isinf(errors.outputs):
                break
        return errors

    def _run(self, model: Any, batch: Batch, scale: float) -> Step:
        found = step.observe(
            model, batch, loss=self._loss, loss_scale=scale, same_draws=True
        )
        self.loss_kind = found.loss_kind
        return step_of(found)


def _is_map(policy: Any) -> bool:
    return isinstance(policy, keras.dtype_policies.DTypePolicyMap)


def _scales(model: Any) -> tuple[float, ...]:
    """The loss scales to try, the first one first."""
    dtypes = {layer.compute_dtype for layer in _keras.flatten_layers(model)}
    if "float16" not in dtypes:
        return (1.0,)
    first = step.loss_scale_of(model)
    optimizer = getattr(model, "optimizer", None)
    if isinstance(getattr(optimizer, "loss_scale", None), FixedLossScale):
        return (first,)
    scales = (first / _SCALE_STEP**i for i in range(_SCALES_TRIED))
    return tuple(scale for scale in scales if scale >= 1) or (first,)
