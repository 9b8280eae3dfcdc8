"""Rows of the preflight: what each layer did in float32, in numbers."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from tfmixed.audit import tally as tally_lib
from tfmixed.audit.formats import Shares
from tfmixed.audit.observe import Record
from tfmixed.audit.step import Observation
from tfmixed.audit.step import WeightGradient
from tfmixed.audit.tally import Tally


@dataclasses.dataclass(frozen=True)
class LayerRow:
    """What was measured for one layer or `keras.ops` node.

    Magnitudes and shares are those of a float32 run, so that both formats can
    be judged. Gradients are not scaled; only for their shares in float16 are
    they multiplied with the loss scale.

    Args:
        path: What the layer is called, unique in the model.
        name: Its name, which `keep_float32` of `tfmixed.prepare` takes.
        class_name: Its class.
        dtype: What it puts out under the policy that is judged.
        calls: How often a step calls it.
        largest_output: Largest magnitude of its outputs.
        largest_output_gradient: The same of the gradient with respect to them;
            None where the backward pass does not come by.
        largest_weight_gradient: The same of the gradients of its weights; None
            for a layer without trainable weights.
        output_shares: By format, what a cast does to the outputs.
        output_gradient_shares: By format, to the gradient of the outputs.
        weight_gradient_shares: By format, to the gradients of the weights.
        gradient_error: Euclidean norm of the difference between the weight
            gradients in 16 bits and in float32, divided by the norm in
            float32; None where they cannot be compared.
        gradient_cosine: Cosine of the angle between the two.
    """

    path: str
    name: str
    class_name: str
    dtype: str | None
    calls: int
    largest_output: float | None
    largest_output_gradient: float | None
    largest_weight_gradient: float | None
    output_shares: dict[str, Shares]
    output_gradient_shares: dict[str, Shares]
    weight_gradient_shares: dict[str, Shares]
    gradient_error: float | None = None
    gradient_cosine: float | None = None


class Measured:
    """What is gathered about one layer, run by run.

    Args:
        layer: The layer or operation.
        path: What it is called.
        loss_scale: What float16 gradients are multiplied with.

    Attributes:
        passes_on: Whether all its outputs are those of a layer inside it.
        sources: The largest input, by where it comes from: the path of the
            layer that put it out, `FROM_PARENT` or `FROM_OUTSIDE`.
        dtype: What it puts out under the judged policy.
        input_dtype: What goes in there, after the cast.
        parent_input_dtype: The same of the layer around it.
        broken: Finite inputs gave outputs that are not, in the judged policy.
        error: Relative error of its weight gradients, and the cosine; None
            where they were not compared.
        gradient_norm: Norm of its weight gradients in float32.
    """

    FROM_PARENT = "<"
    FROM_OUTSIDE = ""

    def __init__(self, layer: Any, path: str, loss_scale: float) -> None:
        scales = {"float16": loss_scale}
        self.layer = layer
        self.path = path
        self.calls = 0
        self.outputs = Tally()
        self.output_gradients = Tally(scales)
        self.weight_gradients = Tally(scales)
        self.passes_on = True
        self.sources: dict[str, float] = {}
        self.dtype: str | None = None
        self.input_dtype: str | None = None
        self.parent_input_dtype: str | None = None
        self.broken = False
        self.error: tuple[float, float] | None = None
        self.gradient_norm = 0.0

    @property
    def kind(self) -> str:
        """Name, class and dtype, for people."""
        dtype = f", {self.dtype}" if self.dtype else ""
        return f"'{self.path}' ({type(self.layer).__name__}{dtype})"

    def row(self) -> LayerRow:
        """Returns what was gathered."""
        error, cosine = self.error or (None, None)
        return LayerRow(
            self.path,
            str(self.layer.name),
            type(self.layer).__name__,
            self.dtype,
            self.calls,
            self.outputs.largest,
            self.output_gradients.largest,
            self.weight_gradients.largest,
            dict(self.outputs.shares),
            dict(self.output_gradients.shares),
            dict(self.weight_gradients.shares),
            error,
            cosine,
        )


class Table:
    """The layers of a model, in the order in which they first finish.

    Args:
        names: The paths, by the `id` of the layer.
        loss_scale: What float16 gradients are multiplied with.
    """

    def __init__(self, names: dict[int, str], loss_scale: float) -> None:
        self._names = names
        self._loss_scale = loss_scale
        self._found: dict[int, Measured] = {}

    def __iter__(self) -> Any:
        return iter(self._found.values())

    def of(self, layer: Any) -> Measured:
        """What is gathered about a layer."""
        if id(layer) not in self._found:
            path = self._names.get(id(layer), str(layer.name))
            self._found[id(layer)] = Measured(layer, path, self._loss_scale)
        return self._found[id(layer)]

    def by_path(self, path: str) -> Measured | None:
        """What is gathered about the layer of that path."""
        return next((one for one in self if one.path == path), None)

    def add_float32(self, observation: Observation) -> None:
        """Counts a run in float32."""
        made: dict[int, tuple[str, float]] = {}
        for record in observation.records:
            measured = self.of(record.layer)
            measured.calls = record.calls
            if any(id(tensor) not in made for tensor in record.outputs):
                measured.passes_on = False
            for tensor in record.inputs:
                _add_source(measured, record, tensor, made)
            for tensor, gradient in zip(
                record.outputs, record.gradients, strict=True
            ):
                size = measured.outputs.add(tensor)
                made.setdefault(id(tensor), (record.path, size))
                if gradient is not None:
                    measured.output_gradients.add(gradient)
        for weight in observation.weights:
            if weight.gradient is not None:
                self.of(weight.layer).weight_gradients.add(weight.gradient)

    def add_judged(self, observation: Observation) -> None:
        """Notes the dtypes and the first trouble of a run in 16 bits."""
        for record in observation.records:
            measured = self.of(record.layer)
            measured.calls = record.calls
            measured.dtype = record.dtype
            if record.inputs:
                measured.input_dtype = record.inputs[0].dtype.name
            if record.parent is not None and record.parent.inputs:
                parent = record.parent.inputs[0]
                measured.parent_input_dtype = parent.dtype.name
            if all(map(tally_lib.is_finite, record.inputs)) and not all(
                map(tally_lib.is_finite, record.outputs)
            ):
                measured.broken = True

    def compare(
        self, float32: Iterable[WeightGradient], judged: Observation
    ) -> None:
        """Compares the gradients of the weights, layer by layer."""
        pairs: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        for one, other in zip(float32, judged.weights, strict=True):
            if one.gradient is None or other.gradient is None:
                continue
            pair = (
                tally_lib.dense(one.gradient),
                tally_lib.dense(other.gradient),
            )
            pairs.setdefault(id(one.layer), []).append(pair)
            self.of(one.layer)
        for key, found in pairs.items():
            exact, rough = (
                np.concatenate(part) for part in zip(*found, strict=True)
            )
            measured = self._found[key]
            measured.gradient_norm, measured.error = _difference(
                exact, rough, judged.loss_scale
            )


def _add_source(
    measured: Measured,
    record: Record,
    tensor: Any,
    made: dict[int, tuple[str, float]],
) -> None:
    if id(tensor) in made:
        source, size = made[id(tensor)]
    else:
        size = tally_lib.largest(tensor)
        given = record.parent.inputs if record.parent is not None else []
        by_parent = any(tensor is one for one in given)
        source = Measured.FROM_PARENT if by_parent else Measured.FROM_OUTSIDE
    measured.sources[source] = max(measured.sources.get(source, 0.0), size)


def _difference(
    exact: np.ndarray, rough: np.ndarray, scale: float
) -> tuple[float, tuple[float, float] | None]:
    """The norm of the exact one, and relative error and cosine.

    These are None where there is nothing to compare.
    """
    unit = float(np.abs(exact).max())
    if not unit or not np.isfinite(unit):
        return 0.0, None
    # Near 1, so that the squares are numbers of float32 as well.
    exact, rough = exact / unit, rough / np.float32(scale) / unit
    norm, other = np.linalg.norm(exact), np.linalg.norm(rough)
    if not np.isfinite(other):
        return float(norm) * unit, None
    error = float(np.linalg.norm(rough - exact) / norm)
    cosine = float(exact @ rough / (norm * other)) if other else 0.0
    return float(norm) * unit, (error, cosine)
