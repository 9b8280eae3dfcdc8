"""Runs the three measurements of a comparison and keeps what it has."""

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from tfmixed.policy import precision
from tfmixed.report.candidate import Recipe
from tfmixed.report.candidate import build
from tfmixed.report.candidate import without_effect
from tfmixed.report.dataset import Data
from tfmixed.report.measure import Record
from tfmixed.report.measure import is_accuracy
from tfmixed.report.measure import run_round
from tfmixed.report.measure import steps_in_round
from tfmixed.report.measure import train
from tfmixed.report.measure import warm_up
from tfmixed.report.progress import Progress
from tfmixed.report.progress import duration
from tfmixed.report.sources import Source
from tfmixed.report.wording import number

# A run longer than this is worth a word on how to shorten it.
LONG_SECONDS = 600.0
# Guesses that only the time left rests on: starting TensorFlow in a process,
# and the forward pass as a share of a step.
_PROCESS_SECONDS = 15.0
_FORWARD_SHARE = 0.35


@dataclass
class Session:
    """A comparison while it runs.

    What is measured goes into `records` at once, so that nothing is lost when
    a person interrupts.

    Args:
        source: builds the models.
        data: the data.
        recipe: how the models are trained.
        policies: names of the dtype policies, float32 first.
        seeds: how often each policy is trained.
        rounds: rounds of step times.
        with_memory: whether memory is measured.
        progress: the display.
    """

    source: Source
    data: Data
    recipe: Recipe
    policies: tuple[str, ...]
    seeds: int
    rounds: int
    with_memory: bool
    progress: Progress
    records: list[Record] = field(init=False)
    metric: str = "accuracy"
    notes: list[str] = field(default_factory=list)
    first_models: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.records = [Record(policy) for policy in self.policies]

    def prepare(self) -> None:
        """Builds a model for each policy, which finds most mistakes.

        Raises:
            ValueError: builder, data or settings do not fit each other.
        """
        for record in self.records:
            self.progress.describe(f"building under {record.policy}")
            model = self._build(record, 0)
            record.jit_compile = bool(model.jit_compile)
            note = without_effect(model, record.policy)
            if note:
                self.notes.append(note)
                self.progress.say(f"Note: {note}")
            self.first_models[record.policy] = model

    def time_steps(self) -> None:
        """Measures step times, all policies in turns."""
        batch = self.data.batch(self.recipe.batch_size)
        guesses = {}
        for record in self.records:
            self.progress.describe(f"first step under {record.policy}")
            model = self.first_models[record.policy]
            with precision(record.policy):
                guesses[record.policy] = warm_up(record, model, batch)
            self.progress.say(
                f"{record.policy}: first step {record.first_step_s:.1f} s, "
                f"then about {number(1000 * guesses[record.policy])} ms"
            )
        # All policies run equally many steps in a round, as the bootstrap of
        # rounds expects.
        steps = steps_in_round(max(guesses.values()))
        self._announce(guesses, steps)
        for turn in range(self.rounds):
            self.progress.describe(f"step times, round {turn + 1}")
            run_round(
                self.records, self.first_models, steps, batch, turn % 2 == 1
            )
            self.progress.advance(steps * sum(guesses.values()))
        # The models make room for the next ones.
        self.first_models.clear()
        for record in self.records:
            milliseconds = 1000 * (record.step_seconds() or 0.0)
            self.progress.say(
                f"{record.policy}: {number(milliseconds)} ms a step, median "
                f"of {self.rounds} rounds"
            )

    def measure_memory(self) -> None:
        """Measures peak memory, each policy in a process of its own."""
        if not self.with_memory:
            return
        from tfmixed.report.memory import measure

        for record in self.records:
            self.progress.describe(f"memory under {record.policy}")
            result = measure(self.source, self.data, self.recipe, record.policy)
            record.memory_mb = result.megabytes
            record.memory_note = result.note
            self.progress.advance(_PROCESS_SECONDS)
            self.progress.say(
                f"{record.policy}: peak memory "
                + (
                    f"{number(result.megabytes)} MB"
                    if result.megabytes is not None
                    else f"not measurable here, {result.note}"
                ),
                with_time=True,
            )

    def train_all(self) -> None:
        """Trains every policy with every seed; a seed is the outer loop.

        So an interruption leaves whole pairs.
        """
        for seed, record in self._trainings():
            what = f"{record.policy}, seed {seed + 1} of {self.seeds}"
            self.progress.describe(f"training {what}")
            model = self._build(record, seed)
            step = record.step_seconds() or 0.0
            with precision(record.policy):
                self.metric = train(
                    record,
                    model,
                    self.data,
                    self.recipe.epochs,
                    self.recipe.batch_size,
                    seed,
                    step,
                    self.progress.advance,
                )
            self.progress.advance(self._rest_of_training(record, step))
            self.progress.say(
                f"{what}: {self.metric} "
                f"{number(record.scores[seed], is_accuracy(self.metric))}",
                with_time=True,
            )

    def _trainings(self) -> Iterator[tuple[int, Record]]:
        for seed in range(self.seeds):
            for record in self.records:
                yield seed, record

    def _build(self, record: Record, seed: int) -> Any:
        return build(self.source, self.data, self.recipe, record.policy, seed)

    def _rest_of_training(self, record: Record, step: float) -> float:
        """Estimates the seconds of a training outside its steps."""
        batches = self.data.validation_steps(self.recipe.batch_size)
        return (record.first_step_s or 0.0) + _FORWARD_SHARE * step * batches

    def _announce(self, guesses: dict[str, float], steps: int) -> None:
        """Says how long all of it will take, and how to shorten it."""
        in_epoch = self.data.steps(self.recipe.batch_size)
        seconds = steps * self.rounds * sum(guesses.values())
        if self.with_memory:
            seconds += _PROCESS_SECONDS * len(self.records)
        for record in self.records:
            step = guesses[record.policy]
            seconds += self.seeds * (
                self.recipe.epochs * in_epoch * step
                + self._rest_of_training(record, step)
            )
        self.progress.expect(seconds)
        self.progress.say(f"All of it will take {duration(seconds)}.")
        if seconds > LONG_SECONDS:
            self.progress.say(
                "That is long. Fewer seeds or epochs make it shorter, for "
                "example `--seeds 1 --epochs 1`; Ctrl-C stops and prints what "
                "has been measured."
            )
