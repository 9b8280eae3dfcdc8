"""Trains a model under several policies and says whether 16 bits pay."""

import datetime
import importlib.metadata
import platform
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmixed.hardware import Hardware
from tfmixed.policy import Plan
from tfmixed.policy import decide
from tfmixed.report.candidate import Recipe
from tfmixed.report.comparison import BASELINE
from tfmixed.report.comparison import Comparison
from tfmixed.report.comparison import make_row
from tfmixed.report.dataset import check_batch_size
from tfmixed.report.dataset import load_data
from tfmixed.report.measure import higher_is_better
from tfmixed.report.measure import is_accuracy
from tfmixed.report.memory import METHODS
from tfmixed.report.names import suggest
from tfmixed.report.progress import Progress
from tfmixed.report.progress import without_retracing_notes
from tfmixed.report.session import Session
from tfmixed.report.sources import find_source
from tfmixed.report.verdict import judge

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")


def compare(
    builder: Any,
    data: Any,
    *,
    policies: Sequence[str] | None = None,
    seeds: int = 3,
    epochs: int = 2,
    batch_size: int = 128,
    learning_rate: float | None = None,
    optimizer: Any = None,
    loss: Any = None,
    metrics: list[Any] | None = None,
    jit_compile: bool | None = None,
    rounds: int = 10,
    memory: bool = True,
    progress: bool = True,
) -> Comparison:
    """Trains a model under several policies, side by side, and judges them.

    Every policy is trained once with each seed. A seed gives the same first
    weights and the same order of the data under every policy, so that they
    are compared pair by pair. Step times are taken from all policies in
    turns, peak memory in fresh processes. The seeds of Python, NumPy and
    TensorFlow are set, and stay so.

    Ctrl-C ends the comparison early; what has been measured is returned, with
    `partial` true.

    Args:
        builder: function without arguments that returns a `keras.Model`, its
            name `module:function`, a `.keras` file, or
            `applications:ResNet50`. The model follows the global policy that
            stands when the function is called. A model that it compiled keeps
            its settings. A file always has the weights that were saved, so a
            seed only decides the order of the data.
        data: function without arguments, or its name `module:function`, that
            returns `(x_train, y_train), (x_val, y_val)` as NumPy arrays, or
            two batched `tf.data.Dataset`s. `x` has the shape `(n, ...)`.
        policies: names of dtype policies. float32, which the others are
            compared with, is always added. Default: float32 and what
            `tfmixed.enable()` would choose here.
        seeds: how often each policy is trained.
        epochs: epochs of each training.
        batch_size: size of a batch; datasets have their own.
        learning_rate: learning rate; the optimizer's own where `None`.
        optimizer: name, optimizer or function that returns one; the builder's
            own or Adam where `None`.
        loss: as in `compile`; the builder's own, or what targets and output
            show, where `None`.
        metrics: as in `compile`. The first accuracy among them, or else the
            first metric, is compared; without metrics the loss.
        jit_compile: whether XLA compiles the step, the same for all policies;
            the builder's own, or the plan's, where `None`.
        rounds: rounds of step times.
        memory: whether peak memory is measured.
        progress: whether progress is shown on the standard error.

    Returns:
        A `Comparison`; print it, or call `to_json`, `to_markdown`, `to_html`.

    Raises:
        ValueError: builder, data or a setting is wrong; the message names the
            value and the fix. Raised before the first measurement.

    Example:

    >>> def build():
    ...     return keras.Sequential(
    ...         [keras.Input((4,)), keras.layers.Dense(2, "softmax")]
    ...     )
    >>> def load():
    ...     x = np.random.default_rng(0).normal(size=(300, 4))
    ...     y = (x.sum(axis=1) > 0).astype("int32")
    ...     return (x[:200], y[:200]), (x[200:], y[200:])
    >>> comparison = tfmixed.compare(
    ...     build,
    ...     load,
    ...     policies=["mixed_bfloat16"],
    ...     rounds=3,
    ...     memory=False,
    ...     progress=False,
    ... )
    >>> [row.policy for row in comparison.rows]
    ['float32', 'mixed_bfloat16']
    >>> use_it, why = comparison.verdict.use, comparison.verdict.reasons
    """
    _check_counts(
        seeds=seeds, epochs=epochs, batch_size=batch_size, rounds=rounds
    )
    _check_learning_rate(learning_rate)
    plan = decide()
    chosen, notes = choose_policies(policies, plan)
    source = find_source(builder)
    loaded = load_data(data)
    check_batch_size(loaded, batch_size)
    recipe = Recipe(
        epochs=epochs,
        batch_size=batch_size,
        optimizer=optimizer,
        learning_rate=learning_rate,
        loss=loss,
        metrics=metrics,
        jit_compile=jit_compile,
        plan_jit_compile=plan.jit_compile,
    )
    with without_retracing_notes(), Progress(progress) as display:
        for note in notes:
            display.say(f"Note: {note}")
        session = Session(
            source, loaded, recipe, chosen, seeds, rounds, memory, display
        )
        session.notes += notes
        partial = _run(session)
    return _result(session, plan.hardware, partial)


def choose_policies(
    policies: Sequence[str] | None, plan: Plan
) -> tuple[tuple[str, ...], list[str]]:
    """Decides which policies are compared.

    Args:
        policies: what a person asked for, or `None`.
        plan: what would be chosen for this machine.

    Returns:
        Names of policies, float32 first, and notes about the choice.

    Raises:
        ValueError: a policy is unknown.
    """
    if policies is None:
        if plan.policy != BASELINE:
            return (BASELINE, plan.policy), []
        reason = " ".join(plan.reasons)
        return (BASELINE, "mixed_bfloat16"), [
            "The plan here is float32. mixed_bfloat16 is "
            f"measured as well, to have something to compare. {reason}"
        ]
    names = [policies] if isinstance(policies, str) else list(policies)
    for name in names:
        if name not in POLICIES:
            raise ValueError(
                f"`policies` got {name!r}."
                + suggest(str(name), POLICIES)
                + f" Expected some of: {', '.join(POLICIES)}."
            )
    if not names:
        raise ValueError(
            f"`policies` is empty. Expected some of: {', '.join(POLICIES)}."
        )
    return tuple(dict.fromkeys([BASELINE, *names])), []


def _run(session: Session) -> bool:
    """Runs all measurements; True when a person interrupted them."""
    try:
        session.prepare()
        session.time_steps()
        session.measure_memory()
        session.train_all()
    except KeyboardInterrupt:
        if not any(record.first_step_s for record in session.records):
            raise
        session.progress.say("Interrupted: showing what has been measured.")
        return True
    return False


def _result(session: Session, machine: Hardware, partial: bool) -> Comparison:
    metric = session.metric
    size = session.data.validation_size()
    rows = tuple(
        make_row(record, session.records[0], is_accuracy(metric))
        for record in session.records
    )
    if session.source.fixed_weights:
        session.notes.append(
            "The file holds the weights, so every seed starts from the same "
            "ones and decides only the order of the data."
        )
    return Comparison(
        rows=rows,
        verdict=judge(rows, metric, higher_is_better(metric), size, partial),
        metric=metric,
        higher_is_better=higher_is_better(metric),
        validation_size=size,
        environment=_environment(machine),
        settings=_settings(session, machine),
        notes=tuple(session.notes),
        partial=partial,
    )


def _settings(session: Session, machine: Hardware) -> dict[str, Any]:
    recipe = session.recipe
    return {
        "model": session.source.name,
        "data": session.data.name,
        "policies": list(session.policies),
        "seeds": session.seeds,
        "epochs": recipe.epochs,
        "batch_size": (
            "of the dataset" if session.data.is_dataset else recipe.batch_size
        ),
        "learning_rate": recipe.learning_rate,
        "rounds": session.rounds,
        "memory_method": METHODS.get(machine.kind),
    }


def _environment(machine: Hardware) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now().astimezone().isoformat("T", "seconds"),
        "devices": [str(device) for device in machine.devices],
        "cpu": machine.cpu_name,
        "cpu_features": list(machine.cpu_features),
        "system": platform.platform(),
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
        "tfmixed": _version(),
    }


def _version() -> str:
    try:
        return importlib.metadata.version("tfmixed")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _check_counts(**counts: Any) -> None:
    for name, value in counts.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < 1:
            raise ValueError(
                f"`{name}` got {value!r}. Expected a whole number of at least "
                f"1. Pass for example `{name}=3`."
            )


def _check_learning_rate(learning_rate: float | None) -> None:
    if learning_rate is not None and not 0 < learning_rate < float("inf"):
        raise ValueError(
            f"`learning_rate` got {learning_rate!r}. Expected a positive "
            "number. Pass for example `learning_rate=1e-3`."
        )
