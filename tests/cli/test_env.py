import json
import os
import re
import subprocess
import sys
import types

import numpy
import psutil
import pytest

from tfmixed import cli
from tfmixed.cli import _common
from tfmixed.cli import env
from tfmixed.hardware import Cpu
from tfmixed.hardware import Device
from tfmixed.hardware import describe
from tfmixed.hardware import hardware
from tfmixed.policy import choose

KEYS = {
    "hardware",
    "plan",
    "findings",
    "versions",
    "threads",
    "recommendations",
    "variables",
}

# The level that the tests set would hide what the program has to hide itself.
QUIET = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}


def run_program(*arguments, cwd=None, module=True, **environment):
    """Runs `python -m tfmixed` or the installed `tfmixed`."""
    program = os.path.join(os.path.dirname(sys.executable), "tfmixed")
    start = [sys.executable, "-m", "tfmixed"] if module else [program]
    return subprocess.run(
        [*start, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**QUIET, **environment},
        timeout=120,
    )


def guarded(run, **arguments):
    return _common.run_guarded(types.SimpleNamespace(run=run, **arguments))


class TestEnv:
    def test_json_is_what_the_library_says(self, capsys):
        assert cli.main(["env", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        machine = hardware()
        plan = choose(machine)
        assert set(report) == KEYS
        assert report["plan"] == {
            "policy": plan.policy,
            "jit_compile": plan.jit_compile,
            "loss_scaling": plan.loss_scaling,
            "reasons": list(plan.reasons),
        }
        assert report["hardware"]["fast_dtypes"] == list(machine.fast_dtypes)
        assert report["hardware"]["cpu_name"] == machine.cpu_name
        assert len(report["hardware"]["devices"]) == len(machine.devices)
        assert report["findings"] == list(machine.findings)
        assert report["versions"]["numpy"] == numpy.__version__
        assert report["threads"]["logical_cores"] == os.cpu_count()

    def test_table_shows_the_same(self, capsys):
        assert cli.main(["env"]) == 0
        text = capsys.readouterr().out
        plan = choose(hardware())
        assert plan.policy in text
        assert plan.hardware.cpu_name in text
        assert plan.hardware.tensorflow_version in text
        assert "intra-op threads" in text

    def test_variable_overrides_the_plan(self, capsys, monkeypatch):
        monkeypatch.setenv("TFMIXED_POLICY", "float32")
        assert cli.main(["env", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["plan"]["policy"] == "float32"
        assert report["variables"]["TFMIXED_POLICY"] == "float32"

    def test_bad_variable_is_one_line_and_code_2(self, capsys, monkeypatch):
        monkeypatch.setenv("TFMIXED_POLICY", "mixed_float61")
        assert cli.main(["env"]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert line.startswith("tfmixed: error: Unknown policy 'mixed_float61'")
        assert "TFMIXED_POLICY" in line
        assert "Did you mean 'mixed_float16'?" in line

    def test_report_of_another_machine(self, capsys):
        gpu = Device("GPU", "Tesla T4 [shared]", (7, 5), 15360)
        cpu = Cpu("Intel Xeon", "Linux", ("avx2",), onednn=True)
        plan = choose(describe((gpu,), cpu, ("A [bold] finding.",)))
        report = env._report(plan)
        (device,) = report["hardware"]["devices"]
        assert device == {
            "kind": "GPU",
            "name": "Tesla T4 [shared]",
            "compute_capability": "7.5",
            "memory_mb": 15360,
        }
        env._print_tables(plan, report)
        text = capsys.readouterr().out
        # Square brackets are text here, not the markup of rich.
        assert "Tesla T4 [shared], compute capability 7.5, 15360 MB" in text
        assert "Note: A [bold] finding." in text


class TestExitCodes:
    def test_bad_input(self, capsys):
        def run(args):
            raise _common.CliError("no such model:\n  'a:b'")

        assert guarded(run) == 2
        assert capsys.readouterr().err == (
            "tfmixed: error: no such model: 'a:b'\n"
        )

    def test_failure(self, capsys):
        def run(args):
            raise OSError("disk full")

        assert guarded(run) == 1
        assert (
            capsys.readouterr().err == "tfmixed: failed: OSError: disk full\n"
        )

    def test_interrupt(self, capsys):
        def run(args):
            raise KeyboardInterrupt

        assert guarded(run) == 130
        assert capsys.readouterr().err == "tfmixed: interrupted\n"

    def test_traceback_on_request(self, capsys, monkeypatch):
        monkeypatch.setenv("TFMIXED_DEBUG", "1")

        def run(args):
            raise OSError("disk full")

        assert guarded(run) == 1
        assert "Traceback" in capsys.readouterr().err

    @pytest.mark.parametrize("argv", [["evn"], ["env", "--jsno"], ["--x"]])
    def test_unknown_argument(self, argv, capsys):
        assert cli.main(argv) == 2
        assert argv[-1] in capsys.readouterr().err

    def test_no_command_shows_the_help(self, capsys):
        assert cli.main([]) == 2
        assert "env" in capsys.readouterr().err

    def test_help_and_version(self, capsys):
        assert cli.main(["--help"]) == 0
        assert "env" in capsys.readouterr().out
        assert cli.main(["env", "--help"]) == 0
        assert "--json" in capsys.readouterr().out
        assert cli.main(["--version"]) == 0
        assert re.fullmatch(
            r"tfmixed \d+\.\d+\.\d+\S*\n", capsys.readouterr().out
        )


@pytest.mark.slow
class TestProgram:
    def test_only_json_and_no_chatter(self):
        # Started like this, the package leaves TensorFlow to the command line.
        code = (
            "import sys\n"
            "sys.orig_argv = [sys.executable, '-m', 'tfmixed', '--help']\n"
            "from tfmixed.cli import main\n"
            "raise SystemExit(main(['env', '--json']))"
        )
        result = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=QUIET,
            timeout=120,
        )
        assert result.returncode == 0
        assert set(json.loads(result.stdout)) == KEYS
        assert result.stderr == ""

    def test_level_of_the_user_is_obeyed(self):
        result = run_program("env", "--json", TF_CPP_MIN_LOG_LEVEL="0")
        assert result.returncode == 0
        assert "oneDNN" in result.stderr or "cuda" in result.stderr.lower()

    @pytest.mark.skipif(
        not hasattr(os, "sched_setaffinity"), reason="Linux alone binds"
    )
    def test_threads_follow_a_binding_to_one_core(self):
        """TensorFlow sees it, so that there is nothing to recommend."""
        program = [sys.executable, "-m", "tfmixed", "env", "--json"]
        result = subprocess.run(
            ["taskset", "-c", "0", *program],
            capture_output=True,
            text=True,
            env={k: v for k, v in QUIET.items() if "NUM_THREADS" not in k},
            timeout=120,
        )
        report = json.loads(result.stdout)
        assert report["threads"]["logical_cores"] == os.cpu_count()
        assert report["threads"]["usable_cores"] == 1
        assert report["recommendations"] == []

    def test_more_threads_than_cores_are_told(self):
        usable = len(psutil.Process().cpu_affinity())
        number = str(8 * usable)
        result = run_program("env", "--json", TF_NUM_INTRAOP_THREADS=number)
        text = json.loads(result.stdout)["recommendations"][0]
        assert f"with {number} threads (set by TF_NUM_INTRAOP_THREADS)" in text
        result = run_program("env", TF_NUM_INTRAOP_THREADS=number)
        assert "Recommended: TensorFlow computes with" in result.stdout

    def test_installed_program_is_the_same(self, tmp_path):
        as_program = run_program("--version", module=False, cwd=tmp_path)
        as_module = run_program("--version", cwd=tmp_path)
        assert as_program.returncode == 0
        assert as_program.stdout == as_module.stdout

    def test_models_of_a_user_see_the_whole_package(self, tmp_path):
        (tmp_path / "sitecustomize.py").write_text(
            "import atexit, sys\n"
            "atexit.register(lambda: print(hasattr(sys.modules['tfmixed'], "
            "'enable'), file=sys.stderr))\n"
        )
        result = run_program("env", "--json", PYTHONPATH=str(tmp_path))
        assert result.stderr == "True\n"
        result = run_program("--help", PYTHONPATH=str(tmp_path))
        assert result.stderr == "False\n"

    def test_current_folder_is_importable(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        (tmp_path / "mymodel_of_test_env.py").write_text("VALUE = 7\n")
        assert cli.main(["env", "--json"]) == 0
        import mymodel_of_test_env

        assert mymodel_of_test_env.VALUE == 7


def test_chatter_is_dropped_and_the_rest_is_kept(capfd):
    with _common._without_chatter():
        os.write(2, b"I0000 00:00:1796.25 4045 port.cc:153] oneDNN is on\n")
        os.write(2, b"WARNING: All log messages before absl::Initialize\n")
        os.write(2, b"E0000 00:00:1796.25 4045 cuda.cc:1] driver is broken\n")
        print("a warning of Python", file=sys.stderr)
    # As a set: pytest and the descriptor have buffers of their own.
    assert set(capfd.readouterr().err.splitlines()) == {
        "E0000 00:00:1796.25 4045 cuda.cc:1] driver is broken",
        "a warning of Python",
    }


def test_nothing_is_lost_when_the_import_fails(capfd):
    def fail():
        with _common._without_chatter():
            os.write(2, b"libcuda: symbol not found\n")
            raise ImportError("no tensorflow")

    with pytest.raises(ImportError, match="no tensorflow"):
        fail()
    assert "symbol not found" in capfd.readouterr().err
