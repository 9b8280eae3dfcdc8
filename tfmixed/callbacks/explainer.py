"""Looks into steps that were not finite: overflow or bug?"""

from typing import Any

import keras

from tfmixed.callbacks.watch import Watch
from tfmixed.health import cause as causes
from tfmixed.health.cause import Cause
from tfmixed.health.probe import Probe

# To measure takes longer than a step.
_MOST = 10


class Explainer:
    """Measures the first batches of a training that are not finite.

    Attributes:
        causes: For each of them its number in the epoch, and the cause.
        watch: What sees the batches.
    """

    def __init__(self) -> None:
        self.causes: list[tuple[int, Cause]] = []
        self.watch = Watch(self._bad_step)
        self._probe: Probe | None = None

    def attach(self, model: keras.Model) -> None:
        """Begins to watch a model."""
        self.causes = []
        self._probe = Probe(model)
        self.watch.attach(model)

    def detach(self) -> None:
        """Ends it."""
        self.watch.check()
        self.watch.detach()

    def _bad_step(self, index: int, batch: Any) -> None:
        if self._probe is None or len(self.causes) >= _MOST:
            return
        reading = self._probe.measure(batch, self.watch.failed_scale)
        algorithm = getattr(self.watch.optimizer, "loss_scale", None)
        self.causes.append((index, causes.cause_of(reading, algorithm)))
