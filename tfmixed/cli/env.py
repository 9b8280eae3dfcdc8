"""`tfmixed env`: what this machine can do, and what tfmixed would do on it."""

import argparse
import importlib.metadata
import os
import platform
from typing import TYPE_CHECKING
from typing import Any

from tfmixed.cli import _common

if TYPE_CHECKING:
    from tfmixed.hardware import Hardware
    from tfmixed.policy import Plan
    from tfmixed.threads import Threads

_VARIABLES = (
    "TFMIXED_POLICY",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_NUM_INTEROP_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_XLA_FLAGS",
)


def add_parser(subparsers: Any) -> None:
    """Registers the subcommand."""
    parser = subparsers.add_parser(
        "env",
        help="show the hardware, the plan for it, and the versions",
        description="Shows what this machine can do for mixed precision, "
        "the policy that tfmixed.enable() chooses on it and why, the "
        "versions, and the settings that change speed.",
    )
    _common.add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report as tables or, with `--json`, as one object."""
    from tfmixed import policy

    plan = policy.decide()
    report = _report(plan)
    if args.json:
        _common.print_json(report)
    else:
        _print_tables(plan, report)
    return 0


def _report(plan: "Plan") -> dict[str, Any]:
    from tfmixed.threads import recommend

    threads = _threads()
    return {
        "hardware": _hardware_report(plan.hardware),
        "plan": {
            "policy": plan.policy,
            "jit_compile": plan.jit_compile,
            "loss_scaling": plan.loss_scaling,
            "reasons": list(plan.reasons),
        },
        "findings": list(plan.hardware.findings),
        "versions": _versions(plan.hardware),
        "threads": _threads_report(threads),
        "recommendations": list(recommend(threads, os.environ)),
        "variables": {
            name: os.environ[name] for name in _VARIABLES if name in os.environ
        },
    }


def _hardware_report(hardware: "Hardware") -> dict[str, Any]:
    from tfmixed.hardware import format_capability

    def capability(value: tuple[int, int] | None) -> str | None:
        return None if value is None else format_capability(value)

    return {
        "kind": hardware.kind,
        "devices": [
            {
                "kind": device.kind,
                "name": device.name,
                "compute_capability": capability(device.compute_capability),
                "memory_mb": device.memory_mb,
            }
            for device in hardware.devices
        ],
        "compute_capability": capability(hardware.compute_capability),
        "cpu_name": hardware.cpu_name,
        "cpu_features": list(hardware.cpu_features),
        "fast_dtypes": list(hardware.fast_dtypes),
        "xla": hardware.xla,
    }


def _versions(hardware: "Hardware") -> dict[str, str]:
    return {
        "tfmixed": importlib.metadata.version("tfmixed"),
        "tensorflow": hardware.tensorflow_version,
        "keras": hardware.keras_version,
        "numpy": importlib.metadata.version("numpy"),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _threads() -> "Threads":
    import psutil
    import tensorflow as tf

    from tfmixed import _probe
    from tfmixed.threads import Threads

    try:
        affinity = len(psutil.Process().cpu_affinity())
    except AttributeError:  # macOS
        affinity = None
    return Threads(
        logical_cores=psutil.cpu_count(),
        affinity=affinity,
        quota=_probe.cpu_quota(),
        intra_op=tf.config.threading.get_intra_op_parallelism_threads(),
        inter_op=tf.config.threading.get_inter_op_parallelism_threads(),
    )


def _threads_report(threads: "Threads") -> dict[str, Any]:
    import psutil

    return {
        "logical_cores": threads.logical_cores,
        "physical_cores": psutil.cpu_count(logical=False),
        "usable_cores": threads.usable,
        "cpu_quota": threads.quota,
        # 0: TensorFlow decides.
        "intra_op": threads.intra_op,
        "inter_op": threads.inter_op,
    }


def _print_tables(plan: "Plan", report: dict[str, Any]) -> None:
    import rich.console
    import rich.markup
    import rich.table

    console = rich.console.Console(highlight=False)
    table = rich.table.Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    sections = (
        _hardware_rows(plan.hardware),
        _plan_rows(plan),
        list(report["versions"].items()),
        [*_thread_rows(report["threads"]), *report["variables"].items()],
    )
    for rows in sections:
        for name, value in rows:
            table.add_row(name, rich.markup.escape(value))
        table.add_section()
    console.print(table)
    for finding in report["findings"]:
        console.print(f"[yellow]Note:[/] {rich.markup.escape(finding)}")
    for sentence in report["recommendations"]:
        text = rich.markup.escape(sentence)
        console.print(f"[yellow]Recommended:[/] {text}")


def _hardware_rows(hardware: "Hardware") -> list[tuple[str, str]]:
    return [
        *(
            (device.kind, str(device).removeprefix(f"{device.kind}: "))
            for device in hardware.devices
        ),
        ("CPU features", ", ".join(hardware.cpu_features) or "unknown"),
        ("fast 16-bit formats", ", ".join(hardware.fast_dtypes) or "none"),
        ("XLA", "pays" if hardware.xla else "does not pay"),
    ]


def _plan_rows(plan: "Plan") -> list[tuple[str, str]]:
    return [
        ("policy", plan.policy),
        ("compile with XLA", "yes" if plan.jit_compile else "no"),
        ("loss scaling", "yes" if plan.loss_scaling else "no"),
        ("why", " ".join(plan.reasons)),
    ]


def _thread_rows(threads: dict[str, Any]) -> list[tuple[str, str]]:
    def count(name: str) -> str:
        value = threads[name]
        return "unknown" if value is None else str(value)

    def setting(name: str) -> str:
        return "automatic" if threads[name] == 0 else count(name)

    cores = ", ".join(
        f"{count(f'{kind}_cores')} {kind}"
        for kind in ("logical", "physical", "usable")
    )
    return [
        ("cores", cores),
        ("intra-op threads", setting("intra_op")),
        ("inter-op threads", setting("inter_op")),
    ]
