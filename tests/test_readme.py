"""The README holds what it promises."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def section(text, title):
    return re.search(rf"^## {title}\n(.*?)(?=^## )", text, re.M | re.S).group(1)


def test_quick_start_is_two_commands_of_one_line():
    quick_start = section(README.read_text(), "Quick start")
    commands = blocks(quick_start, "bash")
    assert quick_start.count("```") == 4
    assert [command.count("\n") for command in commands] == [1, 1]
    assert commands[0].rstrip().endswith("tfmixed compare")
    assert "pytest" in commands[1]
    assert "[test]" in commands[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*training step")
def test_python_of_the_readme_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(README.read_text(), "python"))
    assert code.count("tfmixed.") > 5
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert "tfmixed: " in capsys.readouterr().out
    assert names["model"].optimizer.iterations.numpy() > 0
