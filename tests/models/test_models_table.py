"""`python -m models`: real runs, interruption, the table in the README."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import models
from models import table
from models.__main__ import main

ROOT = pathlib.Path(models.__file__).parent
NOT_MODELS = {
    "__init__",
    "__main__",
    "adversarial",
    "arguments",
    "data",
    "frechet",
    "images",
    "interactions",
    "registry",
    "sample",
    "scenes",
    "table",
}
README = (
    "# Title\r\n\nText before.\n"
    f"{table.BEGIN}\nold table\n{table.END}"
    "\n\nText after, with no end of line  "
)


def row(policy, mean, interval, **values):
    return {
        "policy": policy,
        "accuracy_mean": mean,
        "metric_mean": mean,
        "metric_interval": interval,
        "step_ms": 20.0,
        "speedup": 1.0,
        "speedup_interval": None,
        "peak_memory_mb": None,
        "skipped_steps": 0,
        "trained_steps": 64,
        **values,
    }


def result(mean=0.94, interval=(0.93, 0.97), higher_is_better=True, **plan):
    return {
        "rows": [
            row("float32", 0.95, interval),
            row("mixed_bfloat16", mean, (0.9, 0.96), **plan),
        ],
        "verdict": {"use": mean == 0.94, "policy": "x", "reasons": []},
        "metric": "accuracy",
        "higher_is_better": higher_is_better,
        "validation_size": 200,
        "settings": {"seeds": 3},
        "environment": {
            "date": "2026-11-30T10:00:00+00:00",
            "devices": ["CPU of two cores"],
            "python": "3.11",
            "tensorflow": "2.21",
            "keras": "3.15",
            "numpy": "2.0",
            "tfmixed": "0.1",
        },
    }


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "README.md").write_bytes(README.encode())
    return tmp_path


def command(folder, *arguments):
    return [
        sys.executable,
        "-m",
        "models",
        "--folder",
        str(folder),
        "--seeds",
        "2",
        "--epochs",
        "1",
        *arguments,
    ]


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("*.py")), ids=lambda path: path.stem
)
def test_each_model_is_one_short_file(path):
    if path.stem in NOT_MODELS:
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 150
    assert f"def {path.stem}(" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("*.py")), ids=lambda path: path.stem
)
def test_each_float32_has_a_reason_above_it(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    for index, line in enumerate(lines):
        # Of layers; `ops.arange` makes numbers, not a choice of precision.
        if 'dtype="float32"' in line and "arange" not in line:
            above = "\n".join(lines[max(0, index - 12) : index])
            assert "# float32: " in above, f"line {index + 1}"


@pytest.mark.parametrize(
    ("mean", "interval", "higher", "expected"),
    [
        (0.93, (0.93, 0.97), True, "yes"),
        # Less than one of 200 examples.
        (0.926, (0.93, 0.97), True, "yes"),
        (0.974, (0.93, 0.97), True, "yes"),
        (0.97, (0.93, 0.97), False, "yes"),
        (0.92, (0.93, 0.97), True, "worse"),
        (0.92, (0.93, 0.97), False, "better"),
        (0.98, (0.93, 0.97), True, "better"),
        (0.98, (0.93, 0.97), False, "worse"),
        (None, (0.93, 0.97), True, "not finite"),
        (0.92, None, True, "one seed"),
    ],
)
def test_within_the_interval(mean, interval, higher, expected):
    assert table.within(result(mean, interval, higher)) == expected


def test_a_loss_has_no_finest_step():
    error = result(0.974, higher_is_better=False)
    for row in error["rows"]:
        row["accuracy_mean"] = None
    assert table.within(error) == "worse"


def test_table():
    results = {
        "gan": result(0.5, higher_is_better=False, skipped_steps=7),
        "mlp": result(speedup_interval=(0.9, 1.1), peak_memory_mb=30.0),
    }
    lines = table.to_markdown(results, ("mlp", "vit", "gan")).splitlines()
    assert len({line.count("|") for line in lines[:4]}) == 1
    assert lines[2] == (
        "| mlp | accuracy | 95.0 % (93.0–97.0) | mixed_bfloat16 | "
        "94.0 % (90.0–96.0) | 20 → 20 | 1.00 (0.90–1.10) | ? → 30 | 0 of 64 "
        "| yes |"
    )
    assert lines[3].startswith("| gan |")
    assert lines[3].endswith("| not measurable | 7 of 64 | better |")
    assert lines[5] == (
        "**The metric with the plan lies within the 95 % interval of float32 "
        "for 1 of 2 models; better: gan. `tfmixed compare` advises 16 bits "
        "for mlp.**"
    )
    assert lines[-1] == (
        "Measured 2026-11-30 on CPU of two cores; python 3.11, tensorflow "
        "2.21, keras 3.15, numpy 2.0, tfmixed 0.1."
    )


def test_results_of_two_machines_are_told_apart():
    other = result()
    other["environment"] = {**other["environment"], "keras": "3.10"}
    lines = table.to_markdown(
        {"mlp": result(), "gan": other}, ("mlp", "gan")
    ).splitlines()
    assert [line.startswith("Measured") for line in lines[-2:]] == [True] * 2


def test_the_rest_of_the_readme_stays_to_the_byte(folder):
    path = folder / "README.md"
    for text in ("first", "second"):
        table.write_table(path, text)
        before, after = README.split("old table")
        expected = f"{before}\n{text}\n\n{after[1:]}"
        assert path.read_bytes() == expected.encode()


def test_results_survive_being_written_and_read(folder):
    path = folder / "results.json"
    assert table.read_results(path) == {}
    results = {"mlp": json.loads(json.dumps(result()))}
    table.write_results(path, results)
    assert table.read_results(path) == results
    assert sorted(os.listdir(folder)) == ["README.md", "results.json"]


@pytest.mark.parametrize("text", ["{", "[1]", '{"mlp": {"rows": []}}'])
def test_a_file_of_something_else_is_an_error(folder, text, capsys):
    (folder / "results.json").write_text(text)
    assert main(["--folder", str(folder)]) == 2
    message = capsys.readouterr().err
    assert "results.json does not hold results" in message
    assert "delete it to begin anew" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "gann"], "no reference model 'gann'. Did you mean 'gan'"),
        (["--folder", "/nowhere"], "README.md cannot be read: No such file"),
    ],
)
def test_mistakes_are_told_before_the_work(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_readme_without_a_place_is_an_error(folder, capsys):
    (folder / "README.md").write_text(f"# Title\n{table.BEGIN}\n")
    assert main(["--folder", str(folder)]) == 2
    assert "has no place for the table" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5"])
def test_counts_are_whole_numbers(value, capsys):
    with pytest.raises(SystemExit) as stop:
        main([f"--seeds={value}"])
    assert stop.value.code == 2
    assert f"got {value!r}; expected a whole number" in capsys.readouterr().err


def test_list(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(models.names())


@pytest.mark.parametrize("option", ["--help", "--list"])
def test_does_not_import_tensorflow_to_answer(option):
    script = (
        "import runpy, sys\n"
        f"sys.argv = ['models', {option!r}]\n"
        "try:\n    runpy.run_module('models', run_name='__main__')\n"
        "finally:\n    print('LOADED', 'tensorflow' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert "LOADED False" in done.stdout
    assert done.returncode == 0


@pytest.mark.slow
def test_a_real_run_is_kept_and_goes_on(folder):
    def run(*arguments):
        return subprocess.run(
            command(folder, *arguments), capture_output=True, text=True
        )

    done = run("--models", "tiny_mlp")
    assert done.returncode == 0, done.stderr
    assert "[1/1] tiny_mlp" in done.stderr
    kept = table.read_results(folder / "results.json")
    assert list(kept) == ["tiny_mlp"]
    assert kept["tiny_mlp"]["settings"]["seeds"] == 2
    assert not kept["tiny_mlp"]["partial"]
    text = (folder / "README.md").read_bytes().decode()
    assert "| tiny_mlp | accuracy |" in text
    assert "old table" not in text
    assert text.startswith("# Title\r\n\nText before.\n")
    assert text.endswith("\n\nText after, with no end of line  ")


@pytest.mark.slow
def test_an_interruption_keeps_what_was_finished(folder):
    with subprocess.Popen(
        command(folder, "--models", "tiny_mlp,autoencoder"),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        for line in process.stderr:
            if "autoencoder" in line:
                break
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        message = process.stderr.read()
        assert process.wait() == 130
    assert "interrupted. What was finished is kept" in message
    kept = table.read_results(folder / "results.json")
    assert list(kept) == ["tiny_mlp"]
    assert "| tiny_mlp |" in (folder / "README.md").read_text()
