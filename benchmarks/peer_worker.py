"""A peer of a workload in a process of its own; `peers.py` starts it.

    python benchmarks/peer_worker.py WORKLOAD PEER

It imports its framework and says on which device it trains. Then it takes
commands, JSON objects on the lines of its standard input, and answers each
with a line on its standard output:

- `{"command": "build", "batch": 32}` builds the model and trains one step,
- `{"command": "run", "steps": 4}` trains, and gives the time of each step,
- `{"command": "memory", "batch": 128}` measures the memory of a step,
- `{"command": "quit"}` ends it, and so does the end of the input: at once,
  for then the parent is gone or has no more use for it.
"""

import json
import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from peer_catalogue import PEERS
from peer_catalogue import WORKLOADS
from peer_memory import memory_of_step
from peer_memory import reset_resident_peak
from peer_memory import resident_peak
from peer_process import MARK


def private_output() -> Any:
    """Takes the standard output away from the libraries.

    What they print, from C++ too, goes to the standard error from now on.
    """
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def check_names(workload: str, peer: str) -> None:
    """Raises a `ValueError` for names that the catalogue does not have."""
    if peer not in PEERS or workload not in WORKLOADS:
        raise ValueError(
            f"unknown: workload {workload!r} with peer {peer!r}; known are "
            f"{', '.join(WORKLOADS)} and {', '.join(PEERS)}"
        )


def load(workload: str, peer: str) -> Any:
    """Imports the framework of a peer and returns the peer."""
    if peer == "torch-amp":
        from peer_torch import TorchPeer

        return TorchPeer(workload)
    from peer_keras import KerasPeer

    return KerasPeer(peer, workload)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Calls a function; returns milliseconds and result."""
    start = time.perf_counter()
    result = function()
    return (time.perf_counter() - start) * 1e3, result


def build(peer: Any, batch: int | None = None) -> dict[str, Any]:
    """Builds the model and trains the first step."""
    batch = batch or peer.batch
    build_ms, _ = timed(peer.build)
    peer.use_batch(batch)
    first_step_ms, loss = timed(peer.step)
    return {
        "batch": batch,
        "format": peer.format,
        "build_ms": build_ms,
        "first_step_ms": first_step_ms,
        "loss": known(loss),
    }


def run(peer: Any, steps: int) -> dict[str, Any]:
    """Trains some steps, each of which waits for its loss."""
    results = [timed(peer.step) for _ in range(steps)]
    return {
        "step_ms": [milliseconds for milliseconds, _ in results],
        "loss": known(results[-1][1]),
    }


def memory(peer: Any, batch: int) -> dict[str, Any]:
    """Measures the memory of a step, in a process that did nothing else."""
    peer.build()
    on_gpu = peer.device == "GPU"
    return memory_of_step(
        peer.use_batch_of_any_size,
        peer.step,
        peer.reset_peak if on_gpu else reset_resident_peak,
        peer.peak if on_gpu else resident_peak,
        batch,
    )


def known(loss: float) -> float | None:
    """The loss, or `None` where it is none: JSON has no NaN."""
    return loss if math.isfinite(loss) else None


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "build": build,
    "run": run,
    "memory": memory,
}


def listen(lines: "queue.Queue[str]") -> None:
    """Passes on what the parent says, and ends with it, whatever goes on."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def serve(answer: Callable[[dict[str, Any]], None]) -> None:
    """Obeys the commands on the standard input."""
    workload, peer_name = sys.argv[1:]
    check_names(workload, peer_name)
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=listen, args=(lines,), daemon=True).start()
    peer = load(workload, peer_name)
    answer({"device": peer.device})
    while True:
        arguments = json.loads(lines.get())
        command = arguments.pop("command")
        if command == "quit":
            return
        answer(COMMANDS[command](peer, **arguments))


def main() -> int:
    output = private_output()

    def answer(content: dict[str, Any]) -> None:
        print(MARK + json.dumps(content), file=output, flush=True)

    try:
        serve(answer)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            answer({"absent": "torch is not installed"})
            return 0
        traceback.print_exc()
        lines = str(error).strip().splitlines() or ["no message"]
        answer({"error": f"{type(error).__name__}: {lines[0]}"})
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Not `sys.exit`: the thread that listens holds the standard input.
    os._exit(code)
