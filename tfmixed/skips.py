"""What to tell a person about skipped steps."""

import os
import sys
import warnings
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import keras

from tfmixed.loss_scale import LossScale
from tfmixed.loss_scale import NoLossScale

# Packages whose frames say nothing about where the user's mistake is.
_INSIDE = ("tfmixed", "keras", "tensorflow")

_BLAME = "tfmixed.blame(model, x, y) names the layer."


def describe(
    skips: int, steps: int, scale: float, in_a_row: int, algorithm: LossScale
) -> str | None:
    """Returns a message about skipped steps, or `None` if they are ordinary.

    A few skips while a dynamic scale finds its level are ordinary. Told are a
    tenth of the steps or more, a scale at its floor, several skips in a row
    up to now, and any skip where the scale cannot move.

    Args:
        skips: Steps skipped since the last report.
        steps: Steps since the last report, skipped ones included.
        scale: The loss scale now.
        in_a_row: Steps skipped in a row up to now.
        algorithm: The algorithm that moves the scale.

    Example:

    >>> algorithm = tfmixed.DynamicLossScale()
    >>> describe(1, 100, 1024.0, 0, algorithm) is None
    True
    """
    if skips <= 0:
        return None
    were = "was" if skips == 1 else "were"
    message = (
        f"{skips} of {steps} training steps {were} skipped because a gradient "
        "or the loss was not finite"
    )
    if isinstance(algorithm, NoLossScale):
        return (
            f"{message}. No loss scaling is in use, so the cause is in the "
            "data or the model: look for NaN in the inputs and targets, lower "
            f"the learning rate, or clip the gradients. {_BLAME}"
        )
    message += f"; the loss scale is now {scale:g}."
    if algorithm.at_floor(scale):
        return (
            f"{message} That is its minimum, so a smaller scale is no cure: "
            "look for NaN in the data or for a layer that overflows, lower the "
            f"learning rate, or clip the gradients. {_BLAME}"
        )
    if not algorithm.adapts:
        return f"{message} It does not adapt: {algorithm.remedy(scale)}."
    if in_a_row > 1:
        return (
            f"{message} The last {in_a_row} steps were among them, so it is "
            f"still falling: train on, or {algorithm.remedy(scale)}. If it "
            f"goes on, {_BLAME}"
        )
    if skips * 10 >= steps:
        return (
            f"{message} In the first steps that is how the scale finds its "
            f"level; if it goes on, {algorithm.remedy(scale)}, or look at the "
            f"data and the learning rate. {_BLAME}"
        )
    return None


class SkipReporter(keras.callbacks.Callback):
    """Tells after each epoch of the steps that were skipped in it.

    Args:
        find_optimizers: Returns the optimizers whose `report_skips` is asked.
            Called anew each time: the first step may replace one.
    """

    def __init__(self, find_optimizers: Callable[[], Iterable[Any]]) -> None:
        super().__init__()
        self._find_optimizers = find_optimizers

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Asks them all; the one time in an epoch to wait for the device."""
        for optimizer in self._find_optimizers():
            optimizer.report_skips()


def warn(message: str) -> None:
    """Warns at the line outside tfmixed, Keras and TensorFlow."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _is_inside(filename: str) -> bool:
    parts = filename.split(os.sep)
    # What AutoGraph makes of a user's function has no line of theirs.
    generated = parts[-1].startswith("__autograph_generated")
    return generated or any(package in parts for package in _INSIDE)
