import os
import pathlib
import platform
import subprocess
import sys
import types
import warnings

import pytest

from tfmixed import _probe
from tfmixed.hardware import Cpu
from tfmixed.hardware import Device
from tfmixed.hardware import _hiding_variable
from tfmixed.hardware import describe
from tfmixed.hardware import hardware
from tfmixed.hardware import unreadable_cpu_findings
from tfmixed.hardware import unseen_gpu_finding

T4 = Device("GPU", "Tesla T4", (7, 5), 15360)
V100 = Device("GPU", "Tesla V100-SXM2-16GB", (7, 0))
A100 = Device("GPU", "NVIDIA A100-SXM4-40GB", (8, 0))
H100 = Device("GPU", "NVIDIA H100 80GB HBM3", (9, 0))
B200 = Device("GPU", "NVIDIA B200", (10, 0))
P100 = Device("GPU", "Tesla P100-PCIE-16GB", (6, 0))
AMD = Device("GPU", "AMD Instinct MI250X")
METAL = Device("GPU", "METAL")
TPU = Device("TPU", "TPU v4")

PLAIN = Cpu("Intel Xeon", "Linux", ("avx2", "fma"), onednn=True)
GENOA = Cpu("AMD EPYC", "Linux", ("avx512_bf16", "avx512f"), onednn=True)
SAPPHIRE = Cpu("Xeon 8480", "Linux", ("amx_bf16", "avx512_bf16"), onednn=True)
GRAVITON = Cpu("Neoverse-V1", "Linux", ("asimd", "bf16", "sve"), onednn=True)
OLD_ARM = Cpu("Cortex-A72", "Linux", ("asimd",), onednn=True)
APPLE = Cpu("Apple M3", "Darwin")


def host(cpu):
    return Device("CPU", cpu.name)


@pytest.mark.parametrize(
    ("gpu", "fast_dtypes"),
    [
        (P100, ()),
        (V100, ("float16",)),
        (T4, ("float16",)),
        (A100, ("float16", "bfloat16")),
        (H100, ("float16", "bfloat16")),
        (B200, ("float16", "bfloat16")),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_nvidia_gpu(gpu, fast_dtypes):
    # The CPU beside a GPU has no say, though it is fast in bfloat16 here.
    machine = describe((host(GENOA), gpu), GENOA)
    assert machine.kind == "GPU"
    assert machine.compute_capability == gpu.compute_capability
    assert machine.fast_dtypes == fast_dtypes
    assert machine.xla
    assert machine.findings == ()


@pytest.mark.parametrize("gpus", [(H100, V100), (V100, H100)])
def test_weakest_of_several_gpus_decides(gpus):
    machine = describe(gpus, PLAIN)
    assert machine.compute_capability == (7, 0)
    assert machine.fast_dtypes == ("float16",)
    (finding,) = machine.findings
    assert "different compute capabilities" in finding
    assert "7.0" in finding
    assert "9.0" in finding


def test_capability_ten_is_more_than_nine():
    assert describe((B200, H100), PLAIN).compute_capability == (9, 0)


def test_equal_gpus_are_no_finding():
    assert describe((T4, T4), PLAIN).findings == ()


@pytest.mark.parametrize("gpus", [(AMD,), (METAL,), (A100, AMD)])
def test_gpu_without_compute_capability_is_not_guessed_at(gpus):
    machine = describe(gpus, PLAIN)
    assert machine.compute_capability is None
    assert machine.fast_dtypes == ()
    assert not machine.xla


def test_tpu():
    machine = describe((host(PLAIN), TPU), PLAIN)
    assert machine.kind == "TPU"
    assert machine.fast_dtypes == ("bfloat16",)
    assert machine.xla
    assert machine.compute_capability is None


@pytest.mark.parametrize(
    ("cpu", "fast_dtypes"),
    [
        (PLAIN, ()),
        (GENOA, ("bfloat16",)),
        (SAPPHIRE, ("bfloat16",)),
        (GRAVITON, ("bfloat16",)),
        (OLD_ARM, ()),
        (APPLE, ()),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_cpu(cpu, fast_dtypes):
    machine = describe((host(cpu),), cpu)
    assert machine.kind == "CPU"
    assert machine.fast_dtypes == fast_dtypes
    assert not machine.xla
    assert machine.findings == ()


def test_macos_on_a_cpu_with_bfloat16_has_no_fast_kernels():
    cpu = Cpu("Apple M4", "Darwin", ("bf16",), onednn=True)
    assert describe((host(cpu),), cpu).fast_dtypes == ()


@pytest.mark.parametrize(
    ("setting", "cause"),
    [("0", "TF_ENABLE_ONEDNN_OPTS=0"), (None, "by default")],
)
def test_bfloat16_cpu_without_onednn_is_a_finding(setting, cause):
    cpu = Cpu("AMD EPYC", "Linux", ("avx512_bf16",), False, setting)
    machine = describe((host(cpu),), cpu)
    assert machine.fast_dtypes == ()
    (finding,) = machine.findings
    assert "avx512_bf16" in finding
    assert cause in finding
    assert "TF_ENABLE_ONEDNN_OPTS=1" in finding


def test_only_features_that_matter_are_kept_strongest_first():
    cpu = Cpu("x", "Linux", ("aes", "avx2", "avx512_bf16", "fpu"), True)
    machine = describe((host(cpu),), cpu)
    assert machine.cpu_features == ("avx512_bf16", "avx2")


def test_text_names_what_a_person_looks_for():
    text = str(describe((T4,), PLAIN, ("Something is odd.",)))
    assert "GPU: Tesla T4, compute capability 7.5, 15360 MB" in text
    assert "Fast 16-bit formats: float16\n" in text
    assert "XLA for the whole step: pays" in text
    assert "Note: Something is odd." in text
    assert "Fast 16-bit formats: none" in str(describe((P100,), PLAIN))


@pytest.mark.parametrize(
    ("cuda_build", "hidden_by", "words"),
    [
        (False, None, "without CUDA"),
        (True, None, "libraries are missing"),
        (True, "CUDA_VISIBLE_DEVICES='-1'", "hidden by CUDA_VISIBLE"),
    ],
)
def test_unseen_gpu_says_why(cuda_build, hidden_by, words):
    finding = unseen_gpu_finding(
        ("NVIDIA L4",), cuda_build=cuda_build, hidden_by=hidden_by
    )
    assert finding.startswith("TensorFlow does not see")
    assert "NVIDIA L4" in finding
    assert words in finding
    assert ("tensorflow[and-cuda]" in finding) == (hidden_by is None)


@pytest.mark.parametrize(
    ("value", "hides"),
    [(None, False), ("0", False), ("0,1", False), ("", True), ("-1", True)],
)
def test_only_an_empty_list_of_visible_devices_hides_gpus(value, hides):
    assert (_hiding_variable(value) is not None) == hides


def write_program(folder, name, body):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def driver_files(tmp_path):
    information = tmp_path / "nvidia" / "gpus" / "0000:01:00.0" / "information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t NVIDIA L4\nIRQ:   \t\t 35\n")
    return tmp_path / "nvidia"


@pytest.mark.skipif(os.name == "nt", reason="runs a shell script")
class TestNvidiaGpus:
    def test_asks_nvidia_smi(self, tmp_path, monkeypatch, driver_files):
        write_program(
            tmp_path, "nvidia-smi", "printf 'NVIDIA L4, 23034\\nGB10, [N/A]\\n'"
        )
        monkeypatch.setenv("PATH", str(tmp_path))
        assert _probe.nvidia_gpus(driver_files) == (
            ("NVIDIA L4", 23034),
            ("GB10", None),
        )

    def test_no_driver_means_no_gpus(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        assert _probe.nvidia_gpus(tmp_path) == ()

    def test_reads_driver_files(self, tmp_path, monkeypatch, driver_files):
        monkeypatch.setenv("PATH", str(tmp_path))
        assert _probe.nvidia_gpus(driver_files) == (("NVIDIA L4", None),)

    def test_survives_a_broken_one(self, tmp_path, monkeypatch, driver_files):
        write_program(tmp_path, "nvidia-smi", "echo no devices; exit 9")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert _probe.nvidia_gpus(driver_files) == (("NVIDIA L4", None),)


class TestCpuFeatures:
    def test_keeps_what_the_machine_reports(self):
        info = types.SimpleNamespace(vendor="AuthenticAMD", features={"b", "a"})
        features = _probe.cpu_features(lambda: info)
        assert features == ("AuthenticAMD", ("a", "b"), "")

    def test_an_error_is_told_and_not_raised(self):
        def broken():
            raise KeyError("flags")

        vendor, features, problem = _probe.cpu_features(broken)
        assert (vendor, features) == ("", ())
        assert problem == "KeyError: 'flags'"

    def test_a_warning_is_told_and_not_raised(self):
        def odd():
            warnings.warn("no cpuinfo", stacklevel=1)
            return types.SimpleNamespace(vendor="generic", features=set())

        assert _probe.cpu_features(odd) == ("generic", (), "no cpuinfo")

    @pytest.mark.parametrize(
        ("cpu", "problem", "count"),
        [
            (PLAIN, "", 0),
            (APPLE, "", 0),
            (APPLE, "no sysctl", 1),
            (Cpu("RISC-V", "Linux"), "", 1),
            (Cpu("x", "Linux"), "KeyError: 'flags'", 1),
        ],
    )
    def test_unreadable_features_are_a_finding(self, cpu, problem, count):
        findings = unreadable_cpu_findings(cpu, problem)
        assert len(findings) == count
        assert all(cpu.name in finding for finding in findings)
        assert all(problem in finding for finding in findings)

    @pytest.mark.skipif(
        platform.system() != "Linux" or platform.machine() != "x86_64",
        reason="reads the flags of Linux on x86",
    )
    def test_agrees_with_the_kernel(self):
        text = pathlib.Path("/proc/cpuinfo").read_text()
        line = next(x for x in text.splitlines() if x.startswith("flags"))
        flags = set(line.partition(":")[2].split())
        machine = hardware()
        assert set(machine.cpu_features) <= flags
        assert ("avx512_bf16" in machine.cpu_features) == (
            "avx512_bf16" in flags
        )


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        text=True,
        env={**os.environ, **environment},
        timeout=60,
    ).stdout.split()


def test_this_machine():
    machine = hardware()
    assert machine.devices
    assert machine.devices[0].memory_mb > 100
    assert machine.cpu_name
    assert set(machine.fast_dtypes) <= {"float16", "bfloat16"}
    assert hash(machine) == hash(hardware())


@pytest.mark.slow
def test_detection_leaves_logical_devices_open_and_sees_onednn_off():
    lines = run_python(
        "import tensorflow as tf\n"
        "from tfmixed.hardware import hardware\n"
        "machine = hardware()\n"
        "cpu = tf.config.list_physical_devices('CPU')[0]\n"
        "two = [tf.config.LogicalDeviceConfiguration()] * 2\n"
        "tf.config.set_logical_device_configuration(cpu, two)\n"
        "print(len(tf.config.list_logical_devices('CPU')))\n"
        "print('bfloat16' in machine.fast_dtypes or machine.kind)\n"
        "print(any('avx512_bf16' in f for f in machine.findings)\n"
        "      == ('avx512_bf16' in machine.cpu_features))\n",
        TF_ENABLE_ONEDNN_OPTS="0",
        CUDA_VISIBLE_DEVICES="-1",
    )
    assert lines == ["2", "CPU", "True"]
