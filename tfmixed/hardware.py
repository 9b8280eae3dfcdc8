"""What this machine can do: devices, 16-bit formats that are fast here, XLA.

Detection (`hardware`) only collects facts; `describe` draws the conclusions
from them and is pure, so that it can be asked about any machine.
"""

import dataclasses
import os
import platform
from typing import Any

import keras
import psutil
import tensorflow as tf

from tfmixed import _probe

TENSOR_CORES_FROM = (7, 0)
BFLOAT16_FROM = (8, 0)

# Features that change how fast 16-bit or 8-bit arithmetic is, in the names
# that Linux uses. Listed strongest first.
_CPU_FEATURES = (
    "amx_bf16",
    "amx_fp16",
    "amx_int8",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "avx512f",
    "avx2",
    "f16c",
    "fma",
    "svebf16",
    "bf16",
    "sve2",
    "sve",
    "asimdhp",
    "asimd",
)
BFLOAT16_FEATURES = ("amx_bf16", "avx512_bf16", "svebf16", "bf16")


@dataclasses.dataclass(frozen=True)
class Device:
    """One device that TensorFlow sees.

    Args:
        kind: `"CPU"`, `"GPU"` or `"TPU"`.
        name: The name of the product, as far as it can be read.
        compute_capability: `(major, minor)` of an NVIDIA GPU, else None.
        memory_mb: Memory of the device in MiB; None where it cannot be read.
    """

    kind: str
    name: str
    compute_capability: tuple[int, int] | None = None
    memory_mb: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.kind}: {self.name}"]
        if self.compute_capability is not None:
            capability = format_capability(self.compute_capability)
            parts.append(f"compute capability {capability}")
        if self.memory_mb is not None:
            parts.append(f"{self.memory_mb} MB")
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class Cpu:
    """What was read from the processor; the input of `describe`.

    Args:
        name: The name of the product.
        system: The operating system, as `platform.system()` names it.
        features: Instruction sets, in the names that Linux uses.
        onednn: Whether this TensorFlow runs its oneDNN kernels here.
        onednn_setting: The value of the environment variable
            `TF_ENABLE_ONEDNN_OPTS`, None when it is not set.
    """

    name: str
    system: str
    features: tuple[str, ...] = ()
    onednn: bool = False
    onednn_setting: str | None = None


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What this machine can do for mixed precision.

    Args:
        devices: Every device that TensorFlow may use.
        compute_capability: `(major, minor)` of the weakest GPU, which decides
            for all; None without a GPU, or when one of them has none.
        cpu_name: The name of the processor.
        cpu_features: Its instruction sets that matter here.
        fast_dtypes: The 16-bit formats that are fast here, `"float16"` and
            `"bfloat16"`; empty when neither is.
        xla: Whether compiling the whole step with XLA pays here.
        findings: Sentences about what keeps this machine from doing better.
        tensorflow_version: The version of TensorFlow.
        keras_version: The version of Keras.

    Example:

    >>> machine = tfmixed.hardware()
    >>> isinstance(machine.xla, bool)
    True
    """

    devices: tuple[Device, ...]
    compute_capability: tuple[int, int] | None
    cpu_name: str
    cpu_features: tuple[str, ...]
    fast_dtypes: tuple[str, ...]
    xla: bool
    findings: tuple[str, ...] = ()
    tensorflow_version: str = tf.__version__
    keras_version: str = keras.__version__

    @property
    def kind(self) -> str:
        """The kind of device that does the work: TPU, GPU or CPU."""
        kinds = {device.kind for device in self.devices}
        return next((kind for kind in ("TPU", "GPU") if kind in kinds), "CPU")

    def __str__(self) -> str:
        lines = [
            f"TensorFlow {self.tensorflow_version}, Keras {self.keras_version}",
            *(str(device) for device in self.devices),
            f"CPU features: {', '.join(self.cpu_features) or 'unknown'}",
            f"Fast 16-bit formats: {', '.join(self.fast_dtypes) or 'none'}",
            f"XLA for the whole step: {'pays' if self.xla else 'does not pay'}",
            *(f"Note: {finding}" for finding in self.findings),
        ]
        return "\n".join(lines)


def format_capability(capability: tuple[int, int]) -> str:
    """`(7, 5)` as people write it: `"7.5"`."""
    return f"{capability[0]}.{capability[1]}"


def describe(
    devices: tuple[Device, ...], cpu: Cpu, findings: tuple[str, ...] = ()
) -> Hardware:
    """Draws the conclusions from what was detected.

    Args:
        devices: The devices that TensorFlow sees.
        cpu: The processor.
        findings: Sentences from the detection, kept as they are.

    Returns:
        The `Hardware`.

    Example:

    >>> describe((Device("GPU", "Tesla T4", (7, 5)),), cpu).fast_dtypes
    ('float16',)
    """
    gpus = [device for device in devices if device.kind == "GPU"]
    known = [gpu.compute_capability for gpu in gpus if gpu.compute_capability]
    weakest = min(known) if known and len(known) == len(gpus) else None
    has_tpu = any(device.kind == "TPU" for device in devices)

    if has_tpu:
        fast_dtypes: tuple[str, ...] = ("bfloat16",)
    elif gpus:
        fast_dtypes = _fast_on_gpu(weakest)
    else:
        fast_dtypes = ("bfloat16",) if _fast_on_cpu(cpu) else ()
    if not has_tpu:
        findings = findings + (
            _gpu_findings(gpus) if gpus else _cpu_findings(cpu)
        )
    return Hardware(
        devices=devices,
        compute_capability=weakest,
        cpu_name=cpu.name,
        cpu_features=tuple(f for f in _CPU_FEATURES if f in cpu.features),
        fast_dtypes=fast_dtypes,
        xla=has_tpu or weakest is not None,
        findings=findings,
    )


def _fast_on_gpu(capability: tuple[int, int] | None) -> tuple[str, ...]:
    if capability is None or capability < TENSOR_CORES_FROM:
        return ()
    if capability < BFLOAT16_FROM:
        return ("float16",)
    return ("float16", "bfloat16")


def _fast_on_cpu(cpu: Cpu) -> bool:
    # TensorFlow's own CPU kernels convert bfloat16 to float32 and back; only
    # oneDNN uses the instructions, and TensorFlow brings it to x86 and to
    # Linux on Arm, not to macOS.
    has_instructions = any(f in cpu.features for f in BFLOAT16_FEATURES)
    return has_instructions and cpu.onednn and cpu.system != "Darwin"


def _gpu_findings(gpus: list[Device]) -> tuple[str, ...]:
    capabilities = {gpu.compute_capability for gpu in gpus}
    if len(capabilities) < 2:
        return ()
    names = ", ".join(str(gpu) for gpu in gpus)
    return (
        f"The GPUs have different compute capabilities ({names}); the weakest "
        "one decides for all. Hide it with CUDA_VISIBLE_DEVICES to use the "
        "others to the full.",
    )


def _cpu_findings(cpu: Cpu) -> tuple[str, ...]:
    if cpu.onednn or cpu.system == "Darwin":
        return ()
    features = [f for f in BFLOAT16_FEATURES if f in cpu.features]
    if not features:
        return ()
    if cpu.onednn_setting is None:
        cause = "this TensorFlow does not use oneDNN on it by default"
    else:
        cause = (
            "oneDNN is switched off by TF_ENABLE_ONEDNN_OPTS="
            f"{cpu.onednn_setting}"
        )
    return (
        f"The CPU has bfloat16 instructions ({', '.join(features)}), but "
        f"{cause}. Set TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported.",
    )


def unseen_gpu_finding(
    names: tuple[str, ...],
    *,
    cuda_build: bool,
    hidden_by: str | None,
) -> str:
    """Says why TensorFlow does not see a GPU that is in the machine.

    Args:
        names: The names of the NVIDIA GPUs that the driver knows.
        cuda_build: Whether this TensorFlow was built with CUDA.
        hidden_by: What hides them on purpose, None when nothing does.

    Returns:
        One or two sentences: what is so, and what to do about it.
    """
    what = f"TensorFlow does not see the NVIDIA GPU ({', '.join(names)})"
    if hidden_by is not None:
        return f"{what}: it is hidden by {hidden_by}."
    if not cuda_build:
        return (
            f"{what}: TensorFlow {tf.__version__} was built without CUDA. "
            "Install a build with CUDA, on Linux or in WSL2: "
            "pip install 'tensorflow[and-cuda]'."
        )
    return (
        f"{what}: its CUDA libraries are missing or do not fit the driver. "
        "Try pip install 'tensorflow[and-cuda]', then nvidia-smi."
    )


def unreadable_cpu_findings(cpu: Cpu, problem: str) -> tuple[str, ...]:
    """A finding for a CPU whose features could not be read.

    Args:
        cpu: What could be read of it.
        problem: What went wrong; empty when nothing did.

    Returns:
        No finding or one. macOS names no features on Apple silicon: normal.
    """
    if cpu.features or (cpu.system == "Darwin" and not problem):
        return ()
    cause = problem or "it reports none"
    return (
        f"The features of the CPU ({cpu.name}) could not be read ({cause}); "
        "it is taken for one without fast bfloat16.",
    )


def hardware() -> Hardware:
    """Detects what this machine can do.

    Only lists devices: TensorFlow's runtime is not started, so that
    `tf.config.set_logical_device_configuration` is still possible afterwards.

    Returns:
        The `Hardware`. What cannot be read becomes a finding.

    Example:

    >>> machine = tfmixed.hardware()
    >>> set(machine.fast_dtypes) <= {"float16", "bfloat16"}
    True
    >>> machine.keras_version == keras.__version__
    True
    """
    cpu, findings = _detect_cpu()
    driver_gpus = _probe.nvidia_gpus()
    visible = tf.config.get_visible_devices()
    devices = tuple(
        _device(device, cpu, dict(driver_gpus)) for device in visible
    )
    if driver_gpus and not any(device.kind == "GPU" for device in devices):
        findings += (
            unseen_gpu_finding(
                tuple(name for name, _ in driver_gpus),
                cuda_build=tf.test.is_built_with_cuda(),
                hidden_by=_what_hides_gpus(),
            ),
        )
    return describe(devices, cpu, findings)


def _detect_cpu() -> tuple[Cpu, tuple[str, ...]]:
    vendor, features, problem = _probe.cpu_features()
    cpu = Cpu(
        name=_probe.cpu_name(vendor),
        system=platform.system(),
        features=features,
        onednn=_probe.onednn_in_use(),
        onednn_setting=os.environ.get("TF_ENABLE_ONEDNN_OPTS"),
    )
    return cpu, unreadable_cpu_findings(cpu, problem)


def _device(device: Any, cpu: Cpu, gpu_memory: dict[str, int | None]) -> Device:
    if device.device_type == "CPU":
        memory = psutil.virtual_memory().total // 2**20
        return Device("CPU", cpu.name, None, memory)
    details = tf.config.experimental.get_device_details(device)
    name = details.get("device_name", device.device_type)
    return Device(
        device.device_type,
        name,
        details.get("compute_capability"),
        gpu_memory.get(name),
    )


def _what_hides_gpus() -> str | None:
    if tf.config.list_physical_devices("GPU"):
        return "tf.config.set_visible_devices"
    return _hiding_variable(os.environ.get("CUDA_VISIBLE_DEVICES"))


def _hiding_variable(visible: str | None) -> str | None:
    # CUDA stops reading the list at the first invalid index, such as -1.
    if visible is None or visible.strip() not in ("", "-1"):
        return None
    return f"CUDA_VISIBLE_DEVICES={visible!r}"
