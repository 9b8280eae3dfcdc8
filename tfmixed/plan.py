"""The plan for a machine: which dtype policy, XLA or not, and the reasons.

Pure: nothing here detects or sets anything.
"""

import dataclasses
import textwrap

from tfmixed.hardware import BFLOAT16_FEATURES
from tfmixed.hardware import BFLOAT16_FROM
from tfmixed.hardware import TENSOR_CORES_FROM
from tfmixed.hardware import Hardware
from tfmixed.hardware import format_capability

_SLOW_FLOAT16 = "float16 on a CPU would be about six times slower than float32"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be done on this machine, and why.

    Args:
        policy: Name of the Keras dtype policy.
        jit_compile: Whether the whole step is compiled with XLA.
        loss_scaling: Whether gradients need a loss scale.
        reasons: Sentences that say why.
        hardware: The machine that the plan is for.

    Example:

    >>> plan = tfmixed.enable(verbose=False)
    >>> plan.policy, plan.jit_compile, plan.loss_scaling
    ('mixed_bfloat16', False, False)
    """

    policy: str
    jit_compile: bool
    loss_scaling: bool
    reasons: tuple[str, ...]
    hardware: Hardware

    def __str__(self) -> str:
        scaling = "with" if self.loss_scaling else "without"
        compiled = "compiled with XLA" if self.jit_compile else "without XLA"
        sentences = [
            f"tfmixed: {self.policy}, {scaling} loss scaling, {compiled}.",
            *self.reasons,
            *(f"Note: {finding}" for finding in self.hardware.findings),
        ]
        return textwrap.fill(
            " ".join(sentences), width=79, break_long_words=False
        )


def choose(hardware: Hardware) -> Plan:
    """The plan for a machine: pure, nothing is detected or set.

    Args:
        hardware: The machine, as `tfmixed.hardware()` returns it.

    Returns:
        The `Plan`.
    """
    policy, reason = _choose_policy(hardware)
    return plan_for(policy, hardware, (reason,))


def _choose_policy(hardware: Hardware) -> tuple[str, str]:
    name = _worker_name(hardware)
    if hardware.kind == "TPU":
        return "mixed_bfloat16", (
            f"{name} computes bfloat16 natively; its range is that of "
            "float32, so no loss scaling is needed."
        )
    if "float16" in hardware.fast_dtypes:
        return "mixed_float16", (
            f"{name} has tensor cores for float16. Its range is small, so "
            "the loss is scaled."
        )
    if "bfloat16" in hardware.fast_dtypes:
        features = [f for f in BFLOAT16_FEATURES if f in hardware.cpu_features]
        return "mixed_bfloat16", (
            f"{name} has bfloat16 instructions ({', '.join(features)}); "
            f"{_SLOW_FLOAT16}. XLA on a CPU computes bfloat16 through "
            "float32, so it would undo the gain."
        )
    return "float32", objection_to("mixed_float16", hardware) or ""


def plan_for(policy: str, hardware: Hardware, reasons: tuple[str, ...]) -> Plan:
    """The plan that follows from a policy on a machine."""
    return Plan(
        policy=policy,
        jit_compile=hardware.xla,
        loss_scaling=policy == "mixed_float16",
        reasons=reasons,
        hardware=hardware,
    )


def _worker_name(hardware: Hardware) -> str:
    """The device that does the work; among several GPUs, the weakest."""
    for device in hardware.devices:
        if device.kind == hardware.kind and (
            device.compute_capability == hardware.compute_capability
        ):
            if device.compute_capability is None:
                return device.name
            capability = format_capability(device.compute_capability)
            return f"{device.name} (compute capability {capability})"
    return hardware.cpu_name


def objection_to(policy: str, hardware: Hardware) -> str | None:
    """Why a 16-bit policy is a bad idea here; None when it is not."""
    dtype = policy.removeprefix("mixed_")
    if policy == "float32" or dtype in hardware.fast_dtypes:
        return None
    name = _worker_name(hardware)
    if hardware.kind == "TPU":
        return f"{name} has no fast float16; it computes bfloat16."
    if hardware.kind == "GPU":
        return _gpu_objection(dtype, name, hardware.compute_capability)
    usable = "bfloat16" in hardware.fast_dtypes
    if dtype == "float16" and usable:
        return f"{_SLOW_FLOAT16}; bfloat16 is fast on {name}."
    if any(f in hardware.cpu_features for f in BFLOAT16_FEATURES):
        cause = f"TensorFlow cannot use the bfloat16 instructions of {name}"
    else:
        cause = (
            f"{name} has no bfloat16 instructions that TensorFlow can use "
            "(AVX512_BF16, AMX_BF16, or BF16 on Arm Linux)"
        )
    return f"{cause}, and {_SLOW_FLOAT16}."


def _gpu_objection(
    dtype: str, name: str, capability: tuple[int, int] | None
) -> str:
    if capability is None:
        return (
            f"{name} reports no compute capability, so it is not known "
            f"whether {dtype} is fast on it. To find out, force a policy "
            "with enable('mixed_float16') and measure."
        )
    if capability < TENSOR_CORES_FROM:
        return (
            f"Your GPU is too old for fast {dtype}: {name}, tensor cores "
            f"begin at {format_capability(TENSOR_CORES_FROM)}."
        )
    return (
        f"{name} has no fast bfloat16, which begins at compute capability "
        f"{format_capability(BFLOAT16_FROM)}; float16 is fast on it."
    )
