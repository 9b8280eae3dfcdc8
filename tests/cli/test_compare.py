"""`tfmixed compare` as a person runs it: in a process, from their folder."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tfmixed.cli import main

pytestmark = pytest.mark.slow

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
            layers.Dense(2, activation="softmax", dtype="float32"),
        ]
    )


def load():
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    y = (x[:, 0] > 0).astype("int32")
    return (x, y), (x, y)
"""
QUICK = ["--epochs", "1", "--batch-size", "16", "--rounds", "2", "--no-memory"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "nets.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("nets", None)


def start(folder, *arguments):
    # Without the current folder in the path, as for an installed command.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tfmixed", "compare", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.fspath(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_json_alone_on_stdout_and_files_beside(folder):
    process = start(folder, "nets:build", "nets:load", "--json", *QUICK)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    printed = json.loads(out)
    assert [row["policy"] for row in printed["rows"]][0] == "float32"
    assert printed["rows"][0]["peak_memory_mb"] is None
    assert len(printed["rows"][1]["scores"]) == 3
    assert printed == json.loads((folder / "tfmixed-compare.json").read_text())
    assert (folder / "tfmixed-compare.md").read_text().startswith("# Mixed")
    assert "Written: tfmixed-compare.json, tfmixed-compare.md" in err
    assert "seed 3 of 3" in err


@pytest.mark.skipif(sys.platform == "win32", reason="signals as on Unix")
def test_ctrl_c_prints_what_has_been_measured(folder):
    process = start(folder, "nets:build", "nets:load", "--seeds", "500", *QUICK)
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line.startswith("mixed_bfloat16, seed 1 of 500"):
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, (lines, err)
    assert "Verdict (partial: interrupted)" in out
    rows = json.loads((folder / "tfmixed-compare.json").read_text())["rows"]
    assert all(row["step_ms"] > 0 for row in rows)
    assert all(len(row["scores"]) >= 1 for row in rows)
    assert "Traceback" not in err


def test_options_reach_the_comparison(folder, capsys):
    arguments = [
        "nets:build",
        "nets:load",
        "--policies=mixed_float16",
        "--seeds=1",
        "--learning-rate=0.5",
        "--optimizer=sgd",
        "--jit-compile",
        "--output=out",
        "--html",
        *QUICK,
    ]
    assert main(["compare", *arguments]) == 0
    out = capsys.readouterr().out
    assert "model nets:build, data nets:load, batch size 16, epochs 1" in out
    assert "Verdict: do not use mixed precision here" in out
    assert out.endswith("Written: out.json, out.md, out.html\n")
    result = json.loads((folder / "out.json").read_text())
    assert [row["policy"] for row in result["rows"]] == [
        "float32",
        "mixed_float16",
    ]
    assert all(row["jit_compile"] for row in result["rows"])
    assert result["settings"]["learning_rate"] == 0.5
    assert (folder / "out.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nets:build"], "MODEL is 'nets:build' and DATA is missing"),
        (["nets:biuld", "nets:load"], "Did you mean 'build'?"),
        (["nest:build", "nets:load"], "Did you mean 'nets'?"),
        (["nets:build", "nets:load", "--seeds=0"], "`seeds` got 0"),
        (["nets:build", "nets:load", "--policies=fp8"], "got 'fp8'"),
        (["nets:build", "nets:load", "--batch-size=65"], "only 64 examples"),
        (["nets:build", "nets:load", "--output=."], "which is a folder"),
        (["nets:build", "nets:load", "--output=no/x"], "'no' is not a folder"),
        (["nets:build", "nets:load", "--epochs=x"], "invalid int value: 'x'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    folder, capsys, arguments, message
):
    assert main(["compare", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("tfmixed")
    assert message in last
    assert not (folder / "tfmixed-compare.json").exists()


def test_without_a_models_folder_it_says_what_to_pass(folder):
    # An installed wheel has no `models` beside it.
    (folder / "models.py").write_text("")
    process = start(folder, *QUICK)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 2
    assert out == ""
    assert "Pass your own: tfmixed compare module:build_model" in err


def test_the_default_is_the_first_reference_model(monkeypatch):
    called = {}

    def compare(**arguments):
        called.update(arguments)
        raise ValueError("enough")

    monkeypatch.setattr("tfmixed.report.compare.compare", compare)
    assert main(["compare", "--epochs", "7"]) == 2
    assert called["builder"] == "models.convnet:convnet"
    assert called["data"] == "models.data:mnist5k"
    assert called["batch_size"] == 128
    assert called["epochs"] == 7
    assert called["learning_rate"] == 1e-3
    assert main(["compare", "tiny_mlp"]) == 2
    assert called["builder"] == "models.mlp:tiny_mlp"
    assert called["data"] == "models.data:digits"
