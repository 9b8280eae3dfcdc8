"""The runs of a preflight, and what is gathered from them."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed._switch import ModelSwitch
from tfmixed.audit import batches as batch_lib
from tfmixed.audit import draws
from tfmixed.audit import judge
from tfmixed.audit import observe as observe_lib
from tfmixed.audit import step
from tfmixed.audit import tally
from tfmixed.audit.batches import Batch
from tfmixed.audit.findings import Finding
from tfmixed.audit.rows import LayerRow
from tfmixed.audit.rows import Measured
from tfmixed.audit.rows import Table
from tfmixed.audit.steps_shown import StepsShown
from tfmixed.audit.window import ScaleWindow
from tfmixed.audit.window import window_of
from tfmixed.model import computes_in_float16

_HALF = ("float16", "bfloat16")


class Flight:
    """One preflight, from the data to the findings.

    Args:
        model: A built model.
        loss: What `compile(loss=...)` takes, or None.
        loss_scale: The scale to judge at; None for that of the model.
        policy: What to judge a float32 model under; None for the default.

    Attributes:
        table: What was measured, layer by layer.
        scale: The loss scale that is judged.
        policy: The policy that is judged; None for the model as it is.
        window: The safe loss scales; None if nothing computes in float16.
        findings: What is wrong.
        losses: The loss of each batch in float32.
        loss_kind: Which loss that is.
        examples: How many rows of data were run.
        notes: What to know about the measurement.
    """

    def __init__(
        self,
        model: keras.Model,
        loss: Any,
        loss_scale: float | None,
        policy: Any,
    ) -> None:
        self._model = model
        self._loss = loss
        self._first: step.Observation | None = None
        scale = step.loss_scale_of(model) if loss_scale is None else loss_scale
        self.scale = float(scale)
        self.policy = _policy_to_judge(model, policy)
        self.table = Table(observe_lib.paths(model), self.scale)
        self.window: ScaleWindow | None = None
        self.findings: list[Finding] = []
        self.losses: list[float] = []
        self.loss_kind = ""
        self.examples = 0
        self.notes: list[str] = []

    def run(
        self, taken: list[Batch], x: Any, y: Any, verbose: bool
    ) -> list[LayerRow]:
        """Measures and judges.

        Args:
            taken: The batches to run; those with bad data are left out.
            x: The data that they were taken from.
            y: The targets.
            verbose: Whether progress is shown.

        Returns:
            The rows, in the order of the forward pass.
        """
        bad = judge.bad_data(self._model, taken, x, y)
        self.findings += [judge.of_bad_data(one) for one in bad]
        good = [b for b in taken if not _has_bad(self._model, b)]
        with StepsShown(len(good) + 2, verbose) as shown:
            for batch in good:
                shown.next("running in float32")
                self._run_float32(batch)
            if good:
                self._run_judged(good[0], shown)
        self.examples = sum(len(batch) for batch in good)
        self.findings += judge.of_table(
            self.table, self.scale, self.window, self._model
        )
        self._add_notes()
        return [m.row() for m in self.table if not _is_container(m)]

    def _run_float32(self, batch: Batch) -> None:
        with switched(self._model, keras.DTypePolicy("float32")):
            found = step.observe(
                self._model, batch, loss=self._loss, same_draws=True
            )
        self.table.add_float32(found)
        self.losses.append(float(found.loss))
        self.loss_kind = found.loss_kind
        trouble = judge.of_float32(found)
        if trouble is not None and trouble not in self.findings:
            self.findings.append(trouble)
        if self._first is None:
            # The outputs are not needed any more, only these gradients.
            self._first = dataclasses.replace(found, records=[], events=[])

    def _run_judged(self, batch: Batch, shown: StepsShown) -> None:
        with switched(self._model, self.policy):
            try:
                found = self._observe(batch, 1.0, shown)
            except (tf.errors.OpError, TypeError, ValueError) as error:
                # It does run in float32, so the model is not to blame.
                reason = str(error).strip().splitlines()[0]
                self.notes.append(
                    "The model does not run here in 16 bits, so gradients "
                    f"were not compared: {reason}"
                )
                return
            self.table.add_judged(found)
            if computes_in_float16(self._model):
                found = self._find_window(batch, found, shown)
        if _all_finite(found) and self._first is not None:
            self.table.compare(self._first.weights, found)

    def _observe(
        self, batch: Batch, scale: float, shown: StepsShown
    ) -> step.Observation:
        shown.next("running in 16 bits")
        return step.observe(
            self._model,
            batch,
            loss=self._loss,
            loss_scale=scale,
            same_draws=True,
        )

    def _find_window(
        self, batch: Batch, unscaled: step.Observation, shown: StepsShown
    ) -> step.Observation:
        """Finds the window, and proves its upper end by running there.

        What overflows within a layer shows in no tensor of the float32 run.
        Returns the run that gradients are to be compared in: at the scale to
        be judged, or at the largest one that is finite.
        """
        largest_loss = max(map(abs, self.losses))
        window = window_of(self.table, largest_loss, unscaled)
        self.window = window
        if not all(map(tally.is_finite, _forward(unscaled))):
            # No scale helps, but the float32 run shows which might.
            return unscaled
        if not _all_finite(unscaled):
            self.window = ScaleWindow(window.lowest, None)
            return unscaled
        compared, highest = unscaled, window.highest or 1.0
        if self.scale < highest:
            tried = self._observe(batch, self.scale, shown)
            if _all_finite(tried):
                compared = tried
        # 2**low is finite; highest is tried first, as it mostly is, too.
        low, high = math.floor(math.log2(compared.loss_scale)), None
        middle = math.floor(math.log2(highest))
        while middle > low:
            tried = self._observe(batch, 2.0**middle, shown)
            if not _all_finite(tried):
                high = middle
            else:
                low = middle
                if tried.loss_scale <= self.scale:
                    compared = tried
            middle = low if high is None else (low + high) // 2
        self.window = ScaleWindow(window.lowest, 2.0**low)
        return compared

    def _add_notes(self) -> None:
        if self.loss_kind == step.STAND_IN:
            self.notes.append(f"The loss is {step.STAND_IN}.")
        sampled = [
            measured
            for measured in self.table
            for kind in (measured.outputs, measured.weight_gradients)
            if kind.sampled
        ]
        if sampled:
            self.notes.append(
                f"Shares in tensors of more than {tally.SAMPLE} values come "
                "from so many of them; the largest magnitudes from all."
            )
        if draws.recurrent_dropout(self._model):
            self.notes.append(
                "Dropout inside recurrent layers was off, because it draws "
                "other numbers in another precision."
            )


def _policy_to_judge(model: keras.Model, policy: Any) -> Any:
    layers = _keras.flatten_layers(model)
    if policy is None and any(layer.compute_dtype in _HALF for layer in layers):
        return None
    return keras.dtype_policies.get(policy or "mixed_float16")


@contextlib.contextmanager
def switched(model: keras.Model, policy: Any) -> Iterator[None]:
    """Inside the block the model computes as `policy` says; None: as it is."""
    if policy is None:
        yield
        return
    switch = ModelSwitch(model, policy)
    try:
        switch.on()
        yield
    finally:
        switch.off()


def _is_container(measured: Measured) -> bool:
    """Whether a model only hands on what a layer inside it puts out."""
    return measured.passes_on and isinstance(measured.layer, keras.Model)


def _has_bad(model: keras.Model, batch: Batch) -> bool:
    return any(
        batch_lib.bad_data(name, tensor) is not None
        for name, tensor in batch_lib.named(model, batch)
    )


def _forward(found: step.Observation) -> list[Any]:
    outputs = [t for record in found.records for t in record.outputs]
    return [*outputs, found.loss]


def _all_finite(found: step.Observation) -> bool:
    gradients = [
        *(g for record in found.records for g in record.gradients),
        *(weight.gradient for weight in found.weights),
    ]
    tensors = [*_forward(found), *(g for g in gradients if g is not None)]
    return all(map(tally.is_finite, tensors))
