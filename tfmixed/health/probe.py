"""The probe: measures a batch of a training, when it is asked to.

It is a function of its own beside the training step, compiled at its first
use, so that the step stays as it is: under XLA, in loops on the device, on
several replicas.
"""

import dataclasses
import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmixed import _keras
from tfmixed import telemetry
from tfmixed.audit import observe
from tfmixed.health.columns import EXPONENTS
from tfmixed.health.columns import NUM_EXPONENTS
from tfmixed.health.columns import Column
from tfmixed.health.columns import Part
from tfmixed.health.measure import Tensor
from tfmixed.health.measure import measure


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The numbers of one tensor, or of several together.

    Args:
        columns: Array with the columns of `Column`.
        exponents: How many magnitudes there are by binary exponent.
    """

    columns: np.ndarray
    exponents: np.ndarray

    def __getitem__(self, column: Column) -> float:
        return float(self.columns[column])

    def share(self, column: Column) -> float:
        """Returns a count as a share of the values that are not zero."""
        return self[column] / (self[Column.NONZERO] or 1.0)

    @property
    def error(self) -> float:
        """Norm of the error of the step, relative to the exact numbers."""
        squares = self[Column.SQUARES]
        return float(np.sqrt(self[Column.ERRORS] / squares)) if squares else 0.0


NOTHING = Numbers(
    np.array([0, 0, 0, np.inf, 0, 0, 0, 0, 0, 0, 1.0]), np.zeros(NUM_EXPONENTS)
)


def together(found: list[Numbers]) -> Numbers:
    """Returns the numbers of several tensors, or of several replicas."""
    if not found:
        return NOTHING
    stacked = np.stack([one.columns for one in found])
    columns = stacked.sum(axis=0)
    for column in (Column.LARGEST, Column.LARGEST_ROUGH):
        columns[column] = stacked[:, column].max()
    for column in (Column.SMALLEST, Column.ALL_FINITE):
        columns[column] = stacked[:, column].min()
    return Numbers(columns, np.sum([one.exponents for one in found], axis=0))


@dataclasses.dataclass(frozen=True)
class Reading:
    """What was measured of one batch.

    Args:
        tensors: What the numbers are about.
        numbers: For each of them the numbers, of all replicas together.
        paths: What each layer is called, by its `id`.
        loss: The loss in float32.
        rough_loss: The loss as the step computes it.
        bad_data: How many values of the data are not finite.
        bad_row: The first row of the batch with one; None if there is none.
        scale: The loss scale.
    """

    tensors: list[Tensor]
    numbers: list[Numbers]
    paths: dict[int, str]
    loss: float
    rough_loss: float
    bad_data: int
    bad_row: int | None
    scale: float

    def of(self, layer: Any, part: Part) -> Numbers:
        """Returns the numbers of a layer, of all its calls together."""
        return together(
            [
                numbers
                for tensor, numbers in zip(
                    self.tensors, self.numbers, strict=True
                )
                if tensor.layer is layer and tensor.part is part
            ]
        )

    @property
    def layers(self) -> list[Any]:
        """The layers and operations, in the order of the forward pass."""
        calls: dict[int, tuple[int, Any]] = {}
        for tensor in self.tensors:
            if tensor.part is Part.OUTPUTS:
                calls.setdefault(id(tensor.layer), (tensor.call, tensor.layer))
        return [
            layer for _, layer in sorted(calls.values(), key=lambda c: c[0])
        ]


class Probe:
    """Measures batches of a model.

    Args:
        model: A built model, compiled with a loss and an optimizer.

    Raises:
        ValueError: If the model cannot be measured; the message says why.
    """

    def __init__(self, model: keras.Model) -> None:
        check(model)
        self._model = model
        self._paths = observe.paths(model)
        self._function: Any = None
        self._dtypes: list[str] = []
        self._tensors: list[Tensor] = []

    def measure(self, data: Any, scale: float | None = None) -> Reading:
        """Runs a batch twice and returns what was measured; waits for it.

        Args:
            data: What `train_step` takes; with several replicas a value of
                each.
            scale: The loss scale to measure at; None for that of the
                optimizer.
        """
        dtypes = [
            layer.compute_dtype for layer in _keras.flatten_layers(self._model)
        ]
        if self._function is None or dtypes != self._dtypes:
            self._dtypes = dtypes
            self._function = self._compiled()
        strategy = self._model.distribute_strategy
        if scale is None:
            scale = telemetry.scale_of(self._model.optimizer)
        found = self._function(data, tf.cast(scale, tf.float32))
        replicas = [
            [part.numpy() for part in strategy.experimental_local_results(one)]
            for one in found
        ]
        tables, batches = replicas
        numbers = [
            together(
                [Numbers(t[: EXPONENTS.start], t[EXPONENTS]) for t in rows]
            )
            for rows in zip(*tables, strict=True)
        ]
        batch = np.stack(batches)
        row = float(batch[:, 3].min())
        return Reading(
            self._tensors,
            numbers,
            self._paths,
            float(batch[:, 0].sum()),
            float(batch[:, 1].sum()),
            int(batch[:, 2].sum()),
            int(row) if np.isfinite(row) else None,
            float(scale),
        )

    def _compiled(self) -> Any:
        model = self._model

        @tf.autograph.experimental.do_not_convert
        def step(data: Any, scale: Any) -> Any:
            self._tensors, table, batch = measure(model, data, scale)
            return table, batch

        @tf.autograph.experimental.do_not_convert
        def run(data: Any, scale: Any) -> Any:
            return model.distribute_strategy.run(step, args=(data, scale))

        # TensorFlow warns of a function that is traced often, and takes those
        # of one line of code for one; a partial is itself.
        return tf.function(functools.partial(run), reduce_retracing=True)


def check(model: keras.Model) -> None:
    """Raises a ValueError if a model cannot be measured, and says why."""
    own_loss = type(model).compute_loss is not keras.Model.compute_loss
    what = None
    if not model.built:
        what = "it is not built: call it on a batch before fit"
    elif getattr(model, "optimizer", None) is None:
        what = "it was compiled without an optimizer"
    elif not own_loss and getattr(model, "loss", None) is None:
        what = (
            "compile() was given no loss, and only the model's own train_step "
            "knows what to differentiate"
        )
    elif model.distribute_strategy.num_replicas_in_sync > 1 and any(
        getattr(layer, "synchronized", False)
        for layer in _keras.flatten_layers(model)
    ):
        what = (
            "a BatchNormalization with synchronized=True makes the replicas "
            "wait for each other in the midst of a pass"
        )
    if what is not None:
        raise ValueError(
            f"The model '{model.name}' cannot be measured: {what}."
        )
