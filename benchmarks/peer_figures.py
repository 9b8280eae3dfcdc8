"""The figures of `peers.py`: pure functions of what was measured.

They read and return what the JSON file holds, so that anybody can recompute
them from the file. A speed-up over a peer is the median step time of the peer
divided by that of tfmixed, formed in each round; the figure is the median of
these ratios, on which the drift of a machine from round to round has no hold.
"""

import statistics
from typing import Any

from peer_catalogue import FIRST_STEP
from peer_catalogue import MEANS
from peer_catalogue import MEMORY
from peer_catalogue import MEMORY_BASE
from peer_catalogue import OURS
from peer_catalogue import SAME_FORMAT
from peer_catalogue import SPEEDUPS

Record = dict[str, Any]


def summarize(rounds: list[list[float]]) -> Record:
    """Median and interquartile range of the steps of all rounds."""
    steps = [step for turn in rounds for step in turn]
    if not steps:
        return {"median_ms": None, "iqr_ms": None}
    if len(steps) == 1:
        return {"median_ms": steps[0], "iqr_ms": 0.0}
    low, _, high = statistics.quantiles(steps, n=4, method="inclusive")
    return {"median_ms": statistics.median(steps), "iqr_ms": high - low}


def speedup(ours: list[list[float]], other: list[list[float]]) -> Record | None:
    """How many times as fast as the other we are, round by round.

    Rounds that only one of the two finished do not count.
    """
    ratios = [
        statistics.median(slow) / statistics.median(fast)
        for fast, slow in zip(ours, other, strict=False)
    ]
    if not ratios:
        return None
    return {"per_round": ratios, "median": statistics.median(ratios)}


def add_figures(workload: Record) -> None:
    """Adds to a workload what follows from its measurements."""
    peers = workload["peers"]
    for peer in peers.values():
        peer.update(summarize(peer["rounds"]))
    workload["speedups"] = {}
    workload["first_step"] = workload["memory"] = None
    ours = peers.get(OURS)
    if ours is None:
        return
    for name, peer in peers.items():
        ratio = speedup(ours["rounds"], peer["rounds"])
        if name != OURS and ratio:
            workload["speedups"][name] = ratio
    same = SAME_FORMAT.get(ours["format"], "")
    workload["first_step"] = _ratio(peers, same, "first_step_ms")
    workload["memory"] = _ratio(peers, MEMORY_BASE, "memory_mb")


def _ratio(peers: Record, other: str, key: str) -> Record | None:
    ours, theirs = peers[OURS][key], peers.get(other, {}).get(key)
    if ours is None or theirs is None:
        return None
    return {"over": other, "ratio": ours / theirs}


def geometric_means(workloads: Record) -> Record:
    """The geometric mean of the speed-ups over each peer that has a target."""
    means = {}
    for peer, target in MEANS.items():
        ratios = {
            name: workload["speedups"][peer]["median"]
            for name, workload in workloads.items()
            if name in target.workloads and peer in workload["speedups"]
        }
        if ratios:
            means[peer] = {
                "workloads": list(ratios),
                "mean": statistics.geometric_mean(ratios.values()),
                "least": min(ratios.values()),
            }
    return means


def judge(workloads: Record, means: Record) -> list[Record]:
    """Holds the figures against the targets.

    Returns:
        One entry a target whose workload was asked for: `what`, `bound`,
        `at_least` (or else at most), `value` and `passed`, of which the last
        two are `None` where nothing was measured.
    """
    verdicts = []
    for name, workload in workloads.items():
        for peer, bound in SPEEDUPS.get(name, {}).items():
            value = workload["speedups"].get(peer, {}).get("median")
            verdicts.append(
                _verdict(f"{name}: speed-up over {peer}", value, bound)
            )
        first = workload["first_step"] or {"over": "Keras", "ratio": None}
        verdicts.append(
            _verdict(
                f"{name}: first step against {first['over']}",
                first["ratio"],
                FIRST_STEP,
                at_least=False,
            )
        )
        if name in MEMORY:
            verdicts.append(
                _verdict(
                    f"{name}: memory of the step against {MEMORY_BASE}",
                    (workload["memory"] or {}).get("ratio"),
                    MEMORY[name],
                    at_least=False,
                )
            )
    return verdicts + _verdicts_on_means(workloads, means)


def _verdicts_on_means(workloads: Record, means: Record) -> list[Record]:
    verdicts = []
    for peer, target in MEANS.items():
        if not set(target.workloads) & set(workloads):
            continue
        mean = means.get(peer, {"workloads": [], "mean": None, "least": None})
        names = ", ".join(mean["workloads"]) or "nothing"
        verdicts += [
            _verdict(
                f"mean speed-up over {peer}, geometric ({names})",
                mean["mean"],
                target.mean,
            ),
            _verdict(
                f"least speed-up over {peer} ({names})",
                mean["least"],
                target.each,
            ),
        ]
    return verdicts


def _verdict(
    what: str, value: float | None, bound: float, at_least: bool = True
) -> Record:
    passed = None
    if value is not None:
        passed = value >= bound if at_least else value <= bound
    return {
        "what": what,
        "bound": bound,
        "at_least": at_least,
        "value": value,
        "passed": passed,
    }
