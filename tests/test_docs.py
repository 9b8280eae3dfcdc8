"""The documentation holds: its code runs, it prints what it shows."""

import doctest
import inspect
import re
import warnings

import keras
import numpy as np
import pytest
from test_readme import README

import tfmixed

DOCS = README.parent / "docs"
# Their blocks go on from each other.
RUN = ["callbacks.md", "loss-scale.md", "adaptive-precision.md"]
PUBLIC = [getattr(tfmixed.callbacks, n) for n in tfmixed.callbacks.__all__]
CALLBACKS = [c for c in PUBLIC if issubclass(c, keras.callbacks.Callback)]


def lines_of(text):
    """Lines without what differs from machine to machine: numbers and units."""
    bare = re.sub(r"\d+([.,]\d+)*(e[+-]?\d+)?", "#", text)
    bare = re.sub(r"# ms\b", "# s", bare)
    bare = bare.replace("GPU memory at the peak", "resident")
    return [" ".join(line.split()) for line in bare.splitlines()]


def run(text, printed):
    """Runs the Python of a text, block by block, in one namespace.

    Args:
        text: Markdown. What stands in a `text` block right after a block of
            Python has to be printed by it, line by line but for the numbers.
        printed: Returns what was printed since the last call.

    Returns:
        How many blocks were run, and how many had something to print.
    """
    found = re.findall(
        r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", text, re.M | re.S
    )
    names = {}
    for number, (code, shown) in enumerate(found):
        exec(compile(code, f"block {number}", "exec"), names)
        output = lines_of(printed())
        missing = [line for line in lines_of(shown) if line not in output]
        assert not missing, f"block {number} printed {output}"
    return len(found), sum(bool(shown) for _, shown in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_the_code_runs_and_prints_what_it_shows(
    name, capsys, tmp_path, monkeypatch
):
    if not (DOCS / name).exists():
        pytest.skip("not written")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*training step")
        count, shown = run(
            (DOCS / name).read_text(), lambda: capsys.readouterr().out
        )
    assert count
    assert shown or name != "callbacks.md"


@pytest.mark.parametrize(
    ("code", "shown", "error"),
    [
        ("no_such_name", "", NameError),
        ("print('1 step')", "2 steps", AssertionError),
        ("print('1 step')", "2 step", None),
        ("print('a  0.5')\nprint('b 1e-3')", "b 2\na 0.25", None),
        ("print('took 1.5 s')", "took 900 ms", None),
        ("pass", "something", AssertionError),
        ("x = 1\n```\n\n```python\nx / 0", "", ZeroDivisionError),
    ],
)
def test_a_broken_block_is_caught(code, shown, error, capsys):
    text = f"Words.\n\n```python\n{code}\n```\n\n```text\n{shown}\n```\n"
    if error is None:
        assert run(text, lambda: capsys.readouterr().out) == (1, 1)
    else:
        with pytest.raises(error):
            run(text, lambda: capsys.readouterr().out)


@pytest.mark.parametrize(
    "path", [README, *sorted(DOCS.glob("*.md"))], ids=lambda path: path.name
)
def test_links_lead_to_files(path):
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    local = [link for link in links if "://" not in link]
    assert [x for x in local if not (path.parent / x).exists()] == []


def test_every_document_is_linked_from_the_readme():
    named = {path.name for path in DOCS.glob("*.md")}
    links = re.findall(r"\]\(docs/([^)#\s]+)", README.read_text())
    assert named <= set(links)


@pytest.mark.parametrize("callback", CALLBACKS, ids=lambda c: c.__name__)
def test_callbacks_are_documented_by_an_example_that_runs(callback):
    globs = {"keras": keras, "np": np, "tfmixed": tfmixed}
    lines = inspect.getdoc(callback).splitlines()
    example = doctest.DocTestParser().get_doctest(
        "\n".join(lines), globs, callback.__name__, None, None
    )
    assert any("fit(" in one.source for one in example.examples)
    outcome = doctest.DocTestRunner(verbose=False).run(example)
    assert outcome.attempted == len(example.examples)
    assert outcome.failed == 0


def test_callbacks_are_all_there():
    names = {callback.__name__ for callback in CALLBACKS}
    assert {"AdaptivePrecision", "LossScaleMonitor"} <= names
    assert all(
        f"`{name}`" in (DOCS / "callbacks.md").read_text() for name in names
    )
