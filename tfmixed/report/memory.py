"""Peak memory of a training step, measured in a fresh process.

A process that has run other models cannot tell: memory that an allocator
once took stays with the process. So `measure` starts `python -m
tfmixed.report.memory`, which builds the model anew.

On a GPU the result is the peak of TensorFlow's allocator during the steps:
weights, optimizer state and step. On a CPU there is no such meter; the result
is the step alone: the peak resident memory during steps at the real batch
size, less the peak during steps with a batch of one.
"""

import json
import os
import pathlib
import subprocess
import sys
from dataclasses import asdict
from dataclasses import dataclass
from typing import Any

import keras
import psutil
import tensorflow as tf

from tfmixed.report.candidate import Recipe
from tfmixed.report.candidate import build
from tfmixed.report.dataset import Data
from tfmixed.report.dataset import load_data
from tfmixed.report.sources import Source
from tfmixed.report.sources import find_source

METHODS = {
    "GPU": "peak of the GPU allocator during training steps",
    "CPU": "peak resident memory during training steps, less that with a "
    "batch of one",
}
_MARK = "tfmixed-memory: "
_STEPS = 5
_PATIENCE_SECONDS = 900
_MEGABYTE = 1e6
# Resident memory comes and goes by a few MB with the threads of a process.
_LEAST_MEGABYTES = 10


@dataclass(frozen=True)
class Measurement:
    """A peak, or the reason why there is none.

    Args:
        megabytes: the peak in MB of a million bytes, or `None`.
        note: why it is `None`.
    """

    megabytes: float | None
    note: str | None = None


def measure(
    source: Source, data: Data, recipe: Recipe, policy: str
) -> Measurement:
    """Measures the peak memory of a training step under a policy.

    Args:
        source: builds the model.
        data: the data.
        recipe: how it is trained.
        policy: name of the dtype policy.

    Returns:
        The measurement; never an estimate.
    """
    for part in (source, data):
        if part.reference is None:
            return Measurement(
                None,
                f"{part.reason}, so a fresh process cannot load it; put it "
                "into a module",
            )
    try:
        job = json.dumps(
            {
                "builder": source.reference,
                "data": data.reference,
                "policy": policy,
                "recipe": _packed(recipe),
            }
        )
    except (TypeError, ValueError) as error:
        return Measurement(None, f"a fresh process cannot be told: {error}")
    return _ask(job)


def _ask(job: str) -> Measurement:
    environment = os.environ | {
        # What this process can import, the fresh one can.
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        # Otherwise two processes cannot share a GPU.
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tfmixed.report.memory"],
            input=job,
            capture_output=True,
            text=True,
            env=environment,
            timeout=_PATIENCE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Measurement(None, f"the fresh process failed: {error}")
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            return Measurement(**json.loads(line.removeprefix(_MARK)))
    if done.returncode == -9:
        return Measurement(None, "the fresh process was killed: out of memory?")
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Measurement(
        None, f"the fresh process ended with {done.returncode}: {last}"
    )


def main() -> None:
    """Does the job that stands on the standard input; prints the result."""
    job = json.loads(sys.stdin.read())
    try:
        source, data = find_source(job["builder"]), load_data(job["data"])
        recipe = _unpacked(job["recipe"])
        model = build(source, data, recipe, job["policy"], seed=0)
        result = _peak(model, data.batch(recipe.batch_size))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        result = Measurement(
            None, f"{type(error).__name__} in the fresh process: {lines[0]}"
        )
    print(_MARK + json.dumps(asdict(result)), flush=True)


def _peak(model: Any, batch: tuple[Any, ...]) -> Measurement:
    one = tf.nest.map_structure(
        lambda value: None if value is None else value[:1], batch
    )
    if tf.config.list_physical_devices("GPU"):
        _run(model, batch, 1)
        tf.config.experimental.reset_memory_stats("GPU:0")
        _run(model, batch, _STEPS)
        info = tf.config.experimental.get_memory_info("GPU:0")
        return Measurement(info["peak"] / _MEGABYTE)
    peaks = []
    for part in (one, batch):
        # The first step traces, and that takes memory of its own.
        _run(model, part, 1)
        _reset_resident_peak()
        _run(model, part, _STEPS)
        peaks.append(_resident_peak())
    return _checked(peaks[1] - peaks[0])


def _checked(size: float) -> Measurement:
    if size < _LEAST_MEGABYTES * _MEGABYTE:
        return Measurement(
            None,
            f"the step takes less than {_LEAST_MEGABYTES} MB, too little to "
            "tell from the rest of the process",
        )
    return Measurement(size / _MEGABYTE)


def _run(model: Any, batch: tuple[Any, ...], steps: int) -> None:
    for _ in range(steps):
        model.train_on_batch(*batch)


def _reset_resident_peak() -> None:
    """Forgets earlier peaks where the system can; elsewhere they count too."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _resident_peak() -> float:
    """Reads the peak resident memory of this process in bytes."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        # Not `ru_maxrss`: on Linux a child starts with that of its parent.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    info = psutil.Process().memory_info()
    if hasattr(info, "peak_wset"):
        return float(info.peak_wset)
    # Not on Windows, which returned above.
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def _packed(recipe: Recipe) -> dict[str, Any]:
    """Words a recipe in JSON."""
    packed = dict(vars(recipe))
    for name in ("optimizer", "loss", "metrics"):
        value = packed[name]
        if callable(value) and not hasattr(value, "get_config"):
            raise ValueError(f"`{name}` is a function")
        packed[name] = keras.saving.serialize_keras_object(value)
    return packed


def _unpacked(packed: dict[str, Any]) -> Recipe:
    for name in ("optimizer", "loss", "metrics"):
        value = packed[name]
        if not isinstance(value, str) and value is not None:
            packed[name] = keras.saving.deserialize_keras_object(value)
    return Recipe(**packed)


if __name__ == "__main__":
    main()
