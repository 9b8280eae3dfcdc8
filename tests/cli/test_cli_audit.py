"""`tfmixed audit` as a person runs it: in a process, from their folder."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import keras
import pytest

from tfmixed.cli import main

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
MODULE = """
import keras
import numpy as np
from keras import layers


def build():
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="relu"),
            layers.Dense(2, activation="softmax", name="last"),
        ],
        name="small",
    )


def safe():
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, dtype="mixed_bfloat16"),
            layers.Dense(2, dtype="float32"),
        ]
    )


def number():
    return 7


def endless():
    print("waiting", flush=True)
    while True:
        pass


def load():
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    return (x, (x[:, 0] > 0).astype("int32")), (x, x[:, 0] > 0)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "auditnets.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("auditnets", None)


def start(folder, *arguments):
    # Without the current folder in the path, as for an installed command.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tfmixed", "audit", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.fspath(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class TestProgram:
    pytestmark = pytest.mark.slow

    def test_json_alone_on_stdout_and_exit_code_1(self, folder):
        process = start(
            folder,
            "auditnets:build",
            "--data=auditnets:load",
            "--policy=mixed_float16",
            "--loss=sparse_categorical_crossentropy",
            "--batch-size=4",
            "--json",
        )
        out, err = process.communicate(timeout=200)
        assert process.returncode == 1, err
        result = json.loads(out)
        assert result["ok"] is False
        assert result["policy"] == "mixed_float16"
        assert result["measured"] is True
        assert "TM001" in [one["code"] for one in result["findings"]]
        assert "building auditnets:build" in err

    def test_table_and_exit_code_0(self, folder):
        process = start(folder, "auditnets:safe")
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        assert out.startswith("Audit of 'sequential': policy mixed_bfloat16")
        assert "Traceback" not in err

    @pytest.mark.skipif(sys.platform == "win32", reason="signals as on Unix")
    def test_ctrl_c_is_quiet(self, folder):
        process = start(folder, "auditnets:endless")
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=200)
        assert process.returncode == 130
        assert err.splitlines()[-1] == "tfmixed: interrupted"
        assert "Traceback" not in err


def test_help_answers_without_tensorflow(capsys):
    code = (
        "import sys\n"
        "sys.argv = ['tfmixed', 'audit', '--help']\n"
        "sys.orig_argv = [sys.executable, '-m', *sys.argv]\n"
        "from tfmixed.cli import main\n"
        "code = main()\n"
        "assert 'tensorflow' not in sys.modules\n"
        "raise SystemExit(code)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "--batch-size" in result.stdout


def test_saved_file_and_its_policy(folder, capsys):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.save("net.keras")
    assert main(["audit", "net.keras", "--policy=mixed_float16"]) == 1
    out = capsys.readouterr().out
    assert "as if it had the policy mixed_float16" in " ".join(out.split())
    assert "ERROR TM001" in out


def test_reference_model_by_name(monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    arguments = ["audit", "tiny_mlp", "--json", "--policy=mixed_float16"]
    assert main(arguments) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["model"] == "tiny_mlp"
    (small,) = (f for f in result["findings"] if f["code"] == "TM008")
    # Its own batch size, from the registry.
    assert "for a batch of 64" in small["message"]


@pytest.mark.slow
def test_application(capsys):
    arguments = ["audit", "applications:MobileNet", "--json"]
    assert main([*arguments, "--policy=mixed_float16"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert "TM001" in [one["code"] for one in result["findings"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "MODEL is 'nothing'. Expected module:function"),
        (["auditnets:biuld"], "Did you mean 'build'?"),
        (["auditnet:build"], "Did you mean 'auditnets'?"),
        (["auditnets:number"], "which returned int"),
        (["no.keras"], "there is no such file"),
        (["applications:ResNet5"], "Did you mean 'ResNet50'?"),
        (["auditnets:build", "--policy=float32"], "`policy` got 'float32'"),
        (["auditnets:build", "--data=auditnets:lod"], "Did you mean 'load'?"),
        (["auditnets:build", "--batch-size=0"], "`batch_size` got 0"),
        (["auditnets:build", "--batch-size=x"], "invalid int value: 'x'"),
        ([], "the following arguments are required: MODEL"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    folder, capsys, arguments, message
):
    assert main(["audit", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("tfmixed")
    assert message in last
