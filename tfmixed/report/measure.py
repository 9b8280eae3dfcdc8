"""Takes the measurements in this process: step times, accuracy, skips."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import keras
import numpy as np

from tfmixed.report.candidate import ended_on_skip
from tfmixed.report.candidate import skipped_steps
from tfmixed.report.dataset import Data

# A round is long enough for the clock and short enough that the machine
# stays the same in it.
_ROUND_SECONDS = 0.2
_MOST_STEPS = 50
_LEAST_STEPS = 2
WARM_UP_STEPS = 2

_WORSE_WHEN_HIGHER = (
    "loss",
    "error",
    "crossentropy",
    "divergence",
    "mae",
    "mse",
    "mape",
    "msle",
    "perplexity",
)


@dataclass
class Record:
    """What has been measured of one policy so far.

    Args:
        policy: name of the dtype policy.
        jit_compile: whether XLA compiles the step; `None` before it is built.
        first_step_s: seconds of the first step, tracing included.
        rounds: seconds of the steps in each round.
        memory_mb: peak memory, or `None`.
        memory_note: why there is none.
        scores: the metric on the validation data, by seed.
        skipped_steps: steps left out while training, over all seeds.
        trained_steps: steps of training, over all seeds.
        ended_on_skip: seeds whose last step was left out.
    """

    policy: str
    jit_compile: bool | None = None
    first_step_s: float | None = None
    rounds: list[list[float]] = field(default_factory=list)
    memory_mb: float | None = None
    memory_note: str | None = None
    scores: dict[int, float] = field(default_factory=dict)
    skipped_steps: int | None = None
    trained_steps: int = 0
    ended_on_skip: list[int] = field(default_factory=list)

    def step_seconds(self) -> float | None:
        """Computes the median time of a step, in seconds."""
        return float(np.median(self.rounds)) if self.rounds else None

    def quartiles(self) -> tuple[float, float]:
        """Computes the quartiles of a step's time, in seconds."""
        low, high = np.percentile(self.rounds, [25, 75])
        return float(low), float(high)


def warm_up(record: Record, model: Any, batch: tuple[Any, ...]) -> float:
    """Runs the first steps, which trace and compile, apart from the rest.

    Args:
        record: takes the time of the first step.
        model: a compiled model.
        batch: `(x, y, sample_weight)` tensors.

    Returns:
        The seconds of the last step here, a first guess at a step's time.
    """
    record.first_step_s = _timed_step(model, batch)
    seconds = 0.0
    for _ in range(WARM_UP_STEPS):
        seconds = _timed_step(model, batch)
    return seconds


def steps_in_round(seconds: float) -> int:
    """Chooses how many steps a policy runs in a round.

    Args:
        seconds: about what a step takes.

    Returns:
        A number of steps that fills the round without making it long.
    """
    wanted = math.ceil(_ROUND_SECONDS / max(seconds, 1e-6))
    return max(_LEAST_STEPS, min(_MOST_STEPS, wanted))


def run_round(
    records: list[Record],
    models: dict[str, Any],
    steps: int,
    batch: tuple[Any, ...],
    backwards: bool,
) -> None:
    """Runs every policy for a few steps on the same batch.

    A round counts for all policies or for none, so that an interruption
    leaves equal numbers.

    Args:
        records: take the times.
        models: a compiled model for each policy.
        steps: steps for each policy.
        batch: `(x, y, sample_weight)` tensors.
        backwards: whether the last policy goes first. Taking turns keeps a
            slow drift of the machine from favouring one of them.
    """
    measured = []
    for record in reversed(records) if backwards else records:
        model = models[record.policy]
        times = [_timed_step(model, batch) for _ in range(steps)]
        measured.append((record, times))
    for record, times in measured:
        record.rounds.append(times)


def train(
    record: Record,
    model: Any,
    data: Data,
    epochs: int,
    batch_size: int,
    seed: int,
    step_seconds: float,
    advance: Callable[[float], None],
) -> str:
    """Trains a model and evaluates it on the validation data.

    Args:
        record: takes the score and the skipped steps, when all is done.
        model: a compiled model.
        data: the data.
        epochs: number of epochs.
        batch_size: size of a batch; datasets have their own.
        seed: decides the order of the examples, dropout and augmentation.
        step_seconds: what a step takes, for the progress.
        advance: called with the seconds that the steps since its last call
            take by that.

    Returns:
        The name of the metric.
    """
    # Building a model draws a number of seeds that depends on it. From here
    # on every policy has the same stream.
    keras.utils.set_random_seed(seed)
    data = data.reloaded()
    callback = _Steps(step_seconds, advance)
    if data.is_dataset:
        model.fit(
            data.train,
            epochs=epochs,
            verbose=0,
            callbacks=[callback],
            shuffle=False,
        )
        logs = model.evaluate(data.validation, verbose=0, return_dict=True)
    else:
        model.fit(
            *data.train,
            batch_size=batch_size,
            epochs=epochs,
            verbose=0,
            callbacks=[callback],
        )
        logs = model.evaluate(
            *data.validation,
            batch_size=batch_size,
            verbose=0,
            return_dict=True,
        )
    name = score_name(list(logs))
    record.scores[seed] = float(logs[name])
    steps = epochs * data.steps(batch_size)
    skipped = skipped_steps(model, steps)
    record.skipped_steps = (record.skipped_steps or 0) + skipped
    record.trained_steps += steps
    if ended_on_skip(model):
        record.ended_on_skip.append(seed)
    return name


def score_name(names: list[str]) -> str:
    """Chooses the metric that a model is judged by.

    Args:
        names: what `evaluate` returns, the loss among them.

    Returns:
        An accuracy if there is one, then another metric, then the loss.
    """
    others = [name for name in names if name != "loss"]
    accuracies = [name for name in others if is_accuracy(name)]
    return (accuracies + others + ["loss"])[0]


def is_accuracy(name: str) -> bool:
    """Tells an accuracy, a share of one, by its name.

    Args:
        name: name of the metric.

    Returns:
        True for example for `"acc"` and `"sparse_categorical_accuracy"`.
    """
    return name.lower() == "acc" or "accuracy" in name.lower()


def higher_is_better(name: str) -> bool:
    """Tells the direction of a metric by its name.

    Args:
        name: name of the metric.

    Returns:
        False for losses and errors.
    """
    return not any(word in name.lower() for word in _WORSE_WHEN_HIGHER)


def _timed_step(model: Any, batch: tuple[Any, ...]) -> float:
    """Times one step; `train_on_batch` returns when its numbers are here."""
    start = time.perf_counter()
    model.train_on_batch(*batch)
    return time.perf_counter() - start


class _Steps(keras.callbacks.Callback):
    """Reports the progress of `fit`."""

    def __init__(
        self, step_seconds: float, advance: Callable[[float], None]
    ) -> None:
        super().__init__()
        self._step_seconds = step_seconds
        self._advance = advance
        self._next = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._next = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # With `steps_per_execution` the index jumps.
        steps = batch + 1 - self._next
        self._next = batch + 1
        self._advance(steps * self._step_seconds)
