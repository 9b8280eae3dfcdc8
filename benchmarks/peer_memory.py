"""Peak memory of a step, read in the process of a peer.

Does not import TensorFlow: the process of PyTorch must not hold it.
"""

import pathlib
import resource
import sys
from collections.abc import Callable

MEGABYTE = 1e6
_STEPS = 2
# Resident memory comes and goes by a few MB with the threads of a process.
LEAST_MEGABYTES = 10


def reset_resident_peak() -> None:
    """Forgets earlier peaks where the system can; elsewhere they count too."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def resident_peak() -> float:
    """Reads the peak resident memory of this process in bytes."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        # `ru_maxrss` cannot be reset, and starts with that of the parent.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def memory_of_step(
    use_batch: Callable[[int], None],
    step: Callable[[], float],
    reset: Callable[[], None],
    peak: Callable[[], float],
    batch: int,
) -> dict[str, float | str | None]:
    """Peak during steps with a batch less that with a batch of one.

    Args:
        use_batch: Makes a batch of a size the one to train on.
        step: Trains on it once.
        reset: Forgets the peak.
        peak: Reads the peak in bytes.
        batch: The batch size.

    Returns:
        `memory_mb`, or `None` for it and the reason as `memory_note`.
    """
    peaks = []
    for size in (1, batch):
        use_batch(size)
        # The first step traces, and that takes memory of its own.
        step()
        reset()
        for _ in range(_STEPS):
            step()
        peaks.append(peak())
    size_mb = (peaks[1] - peaks[0]) / MEGABYTE
    if size_mb < LEAST_MEGABYTES:
        return {
            "memory_mb": None,
            "memory_note": f"under {LEAST_MEGABYTES}",
        }
    return {"memory_mb": size_mb, "memory_note": None}
