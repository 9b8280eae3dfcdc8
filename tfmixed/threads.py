"""How many threads TensorFlow computes with, against the cores it may use.

Left alone, TensorFlow takes one thread for each core that the process may be
scheduled on. It does not know the CPU quota of a container, and it obeys a
number that somebody has set. Nothing is changed here; what to change is said.
"""

import dataclasses
import math
from collections.abc import Mapping

INTRA_OP = "TF_NUM_INTRAOP_THREADS"
OPENMP = "OMP_NUM_THREADS"


@dataclasses.dataclass(frozen=True)
class Threads:
    """What was read from the machine and from TensorFlow.

    Args:
        logical_cores: The cores of the machine; None if unknown.
        affinity: The cores that the process may be scheduled on; None if
            unknown, as on macOS.
        quota: The cores whose time the control group grants, such as 1.5;
            None without a limit.
        intra_op: What `tf.config.threading` was told; 0 for nothing.
        inter_op: Likewise, for operations side by side.
    """

    logical_cores: int | None
    affinity: int | None
    quota: float | None
    intra_op: int = 0
    inter_op: int = 0

    @property
    def usable(self) -> int | None:
        """The cores that threads can keep busy; None if unknown."""
        limits = [self.affinity or self.logical_cores, self.quota]
        known = [math.ceil(limit) for limit in limits if limit]
        return min(known) if known else None


def recommend(
    threads: Threads, variables: Mapping[str, str]
) -> tuple[str, ...]:
    """Says what to set where threads and cores do not fit.

    Args:
        threads: The facts.
        variables: The environment variables.

    Returns:
        Sentences; empty where all is well.

    Example:

    >>> recommend(Threads(2, 2, None), {})
    ()
    """
    usable = threads.usable
    if usable is None:
        return ()
    found = []
    intra_op, cause = _intra_op(threads, variables)
    if intra_op != usable:
        effect = (
            "more threads than cores wait for each other"
            if intra_op > usable
            else f"{usable - intra_op} of the cores stay idle"
        )
        found.append(
            f"TensorFlow computes with {_count(intra_op, 'thread')} ({cause}), "
            f"but {_count(usable, 'core')} can be used{_why(threads)}: "
            f"{effect}. Start with {INTRA_OP}={usable} python train.py, or "
            "call tf.config.threading.set_intra_op_parallelism_threads("
            f"{usable}) before the first operation."
        )
    openmp = _number(variables.get(OPENMP))
    if openmp and openmp != usable:
        found.append(
            f"{OPENMP}={openmp} is not the number of usable cores ({usable}). "
            "TensorFlow from PyPI does not read it, NumPy and a TensorFlow "
            f"built with OpenMP do: use {OPENMP}={usable} python train.py, or "
            f"unset {OPENMP}."
        )
    if threads.inter_op == 1 and usable > 1:
        found.append(
            "TensorFlow runs one operation at a time (inter-op threads: 1). "
            "Leave out tf.config.threading.set_inter_op_parallelism_threads(1)."
        )
    return tuple(found)


def _intra_op(
    threads: Threads, variables: Mapping[str, str]
) -> tuple[int, str]:
    """The threads of an operation, and who said so."""
    if threads.intra_op:
        return threads.intra_op, "set by tf.config.threading"
    from_environment = _number(variables.get(INTRA_OP))
    if from_environment:
        return from_environment, f"set by {INTRA_OP}"
    automatic = threads.affinity or threads.logical_cores or 1
    return automatic, "one for each core it sees"


def _why(threads: Threads) -> str:
    """What keeps the process from using all cores."""
    limits = []
    if threads.quota is not None and threads.usable == math.ceil(threads.quota):
        limits.append(f"the CPU quota of the container is {threads.quota:g}")
    is_bound = None not in (threads.affinity, threads.logical_cores)
    if is_bound and threads.affinity != threads.logical_cores:
        limits.append(
            f"the process is bound to {threads.affinity} of "
            f"{threads.logical_cores}"
        )
    return f" ({'; '.join(limits)})" if limits else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _number(text: str | None) -> int | None:
    # OpenMP takes a list, one number for each level of nesting.
    first = (text or "").split(",")[0].strip()
    return int(first) if first.isdecimal() else None
