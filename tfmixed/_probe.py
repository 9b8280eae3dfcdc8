"""Reads facts from this machine, without drawing conclusions from them.

Nothing here raises because of an odd machine: what cannot be read is empty.
"""

import functools
import os
import pathlib
import platform
import shutil
import subprocess
import warnings
from collections.abc import Callable
from typing import Any

from archspec.cpu import brand_string
from archspec.cpu.detect import detected_info


def nvidia_gpus(
    proc: pathlib.Path = pathlib.Path("/proc/driver/nvidia"),
) -> tuple[tuple[str, int | None], ...]:
    """The NVIDIA GPUs that the driver knows, whatever TensorFlow can use.

    Args:
        proc: Where the Linux driver describes itself. Elsewhere, and in WSL2,
            only `nvidia-smi` knows.

    Returns:
        A pair of name and memory in MiB for each GPU; the memory is None
        where only the driver's own files could be read.
    """
    program = shutil.which("nvidia-smi")
    gpus = _ask_nvidia_smi(program) if program else ()
    return gpus or tuple((name, None) for name in _proc_gpus(proc))


@functools.cache
def _ask_nvidia_smi(program: str) -> tuple[tuple[str, int | None], ...]:
    query = "--query-gpu=name,memory.total"
    try:
        answer = subprocess.run(
            [program, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            check=True,
            text=True,
            timeout=10,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [line.rpartition(",") for line in answer.splitlines() if "," in line]
    return tuple(
        (name.strip(), int(memory) if memory.strip().isdecimal() else None)
        for name, _, memory in rows
    )


def _proc_gpus(proc: pathlib.Path) -> list[str]:
    names = []
    for path in sorted(proc.glob("gpus/*/information")):
        fields = _colon_fields(path)
        names.append(fields.get("Model", "unknown model"))
    return names


def _colon_fields(path: pathlib.Path) -> dict[str, str]:
    """The first block of `key : value` lines; empty when unreadable."""
    fields: dict[str, str] = {}
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return fields
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if not colon and fields:
            break
        fields[key.strip()] = value.strip()
    return fields


def cpu_features(
    read: Callable[[], Any] = detected_info,
) -> tuple[str, tuple[str, ...], str]:
    """Reads the processor's instruction sets.

    Args:
        read: Returns an object with `vendor` and `features`. archspec's
            `detected_info` says what the machine reports; its `host()` answers
            with the nearest model it knows, and loses `avx512_bf16` that way.

    Returns:
        The vendor, the features, and what went wrong: empty when nothing did.
    """
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            info = read()
        problem = "; ".join(str(warning.message) for warning in caught)
        return info.vendor, tuple(sorted(info.features)), problem
    except Exception as error:
        return "", (), f"{type(error).__name__}: {error}"


def cpu_name(vendor: str) -> str:
    """The name of the processor, or the best that stands in for it."""
    name = _colon_fields(pathlib.Path("/proc/cpuinfo")).get("model name")
    if not name and platform.system() != "Linux":
        try:
            name = brand_string()
        except Exception:
            name = None
    return name or vendor or platform.processor() or platform.machine()


def onednn_in_use() -> bool:
    """Whether this TensorFlow runs its oneDNN kernels on this CPU."""
    # The default differs by system, by CPU and by version; only TensorFlow
    # itself knows, and it says so in a private module alone.
    try:
        from tensorflow.python.util import _pywrap_util_port
    except ImportError:
        on_by_default = platform.system() == "Linux"
        setting = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "")
        return on_by_default if not setting else setting not in ("0", "false")
    return bool(_pywrap_util_port.IsMklEnabled())


def cpu_quota(
    root: pathlib.Path = pathlib.Path("/sys/fs/cgroup"),
    own: pathlib.Path = pathlib.Path("/proc/self/cgroup"),
) -> float | None:
    """The cores whose time the control group grants; None without a limit.

    Args:
        root: Where Linux shows the control groups, of version 2 or 1.
        own: Says to which of them this process belongs. A limit of any group
            around it holds, too.
    """
    found = []
    for folder in _own_groups(root, own):
        limit = _text(folder / "cpu.max").split()
        if not limit:
            limit = [
                _text(folder / f"cpu.cfs_{name}_us").strip()
                for name in ("quota", "period")
            ]
        if all(part.isdecimal() and int(part) > 0 for part in limit):
            found.append(int(limit[0]) / int(limit[1]))
    return min(found, default=None)


def _own_groups(root: pathlib.Path, own: pathlib.Path) -> list[pathlib.Path]:
    folders = []
    for line in _text(own).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        # Version 1 has a folder for each controller, often under two names.
        tops = [root / "cpu", root / controllers] if controllers else [root]
        inner = pathlib.PurePosixPath(path.strip().lstrip("/"))
        for top in tops:
            folders += [top / group for group in (inner, *inner.parents)]
    return folders


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
