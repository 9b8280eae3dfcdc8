"""The documentation holds: its code runs, it prints what it shows."""

import ast
import doctest
import inspect
import pathlib
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_floors import floor_of
from test_readme import README

import tfmixed
from tfmixed.audit.codes import CODES

DOCS = README.parent / "docs"
# Their blocks go on from each other.
RUN = [
    "callbacks.md",
    "loss-scale.md",
    "adaptive-precision.md",
    "concepts.md",
    "choosing-a-policy.md",
    "from-pytorch.md",
    "from-tf-keras-2.md",
    "levels.md",
    "troubleshooting.md",
    "figures.md",
    "architecture.md",
    "prepare.md",
    "small-batches.md",
    "../models/README.md",
]
# Pieces of programs, each of which runs by itself.
PIECES = {
    f"{path.name} {number}": code
    for path in (DOCS / "audit-codes.md", DOCS / "reference.md")
    for number, code in enumerate(
        re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S)
    )
}
PUBLIC = [getattr(tfmixed.callbacks, n) for n in tfmixed.callbacks.__all__]
CALLBACKS = [c for c in PUBLIC if issubclass(c, keras.callbacks.Callback)]


def lines_of(text):
    """Lines without what differs from machine to machine: numbers and units."""
    bare = re.sub(r"\d+([.,]\d+)*(e[+-]?\d+)?", "#", text)
    bare = re.sub(r"# ms\b", "# s", bare)
    bare = bare.replace("GPU memory at the peak", "resident")
    return [" ".join(line.split()) for line in bare.splitlines()]


def run(text, printed, language="python"):
    """Runs the Python of a text, block by block, in one namespace.

    Args:
        text: Markdown. What stands in a `text` block right after a block of
            Python has to be printed by it, line by line but for the numbers.
        printed: Returns what was printed since the last call.
        language: What the blocks are fenced as.

    Returns:
        How many blocks were run, and how many had something to print.
    """
    found = re.findall(
        rf"^```{language}\n(.*?)^```\n(?:\n```text\n(.*?)^```)?",
        text,
        re.M | re.S,
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


def stands_for():
    """What the names in the pieces stand for."""
    inputs = keras.Input((6, 4))
    attention = keras.layers.MultiHeadAttention(2, 2)
    hidden = attention(inputs, inputs)
    outputs = keras.layers.Dense(1)(keras.layers.Flatten()(hidden))
    model = keras.Model(inputs, outputs)
    model.compile("adam", "mse")
    x = np.ones((8, 6, 4), "float32")
    optimizer = tfmixed.LossScaleOptimizer("sgd")
    variables = model.trainable_variables
    optimizer.build(variables)
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_mean(model(x))
        scaled = optimizer.scale_loss(loss)
    logits = tf.zeros((2, 3))
    return {
        **{"keras": keras, "layers": keras.layers, "np": np, "tf": tf},
        **{"tfmixed": tfmixed, "inputs": inputs, "model": model, "v": x},
        **{"attention": attention, "optimizer": optimizer, "x": x},
        **{"y": np.ones((8, 1), "float32"), "logits": logits},
        **{"variables": variables, "tape": tape, "loss": loss},
        **{"scaled": scaled, "mask": logits > 0},
        "adam": keras.optimizers.Adam(),
        "loss_fn": keras.losses.MeanSquaredError(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", PIECES)
def test_the_pieces_run(name):
    with warnings.catch_warnings():
        # What is wrong may be told, and a slow policy is.
        warnings.simplefilter("ignore")
        exec(compile(PIECES[name], name, "exec"), stands_for())
    tfmixed.disable()
    keras.config.set_dtype_policy("float32")


def test_no_code_of_a_document_is_left_out():
    have = {p.name for p in DOCS.glob("*.md") if "```python" in p.read_text()}
    pieces = {name.split()[0] for name in PIECES}
    assert have == {*pieces, *RUN} - {"../models/README.md"}


@pytest.mark.slow
# TorchScript of PyTorch on newer Python, not ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_the_loop_of_pytorch_runs_where_pytorch_is_installed(capsys):
    pytest.importorskip("torch")
    text = (DOCS / "from-pytorch.md").read_text()
    ran = run(text, lambda: capsys.readouterr().out, language="py")
    assert ran == (1, 1)


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


PAGES = [README, *sorted(DOCS.glob("*.md"))]


def bare(text):
    """A text without what is fenced."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def anchors_of(text):
    """What GitHub makes of the headings of a text, to link to them."""
    plain = []
    found = []
    for heading in re.findall(r"^#+ (.*)$", bare(text), re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        again = plain.count(anchor)
        plain.append(anchor)
        found.append(f"{anchor}-{again}" if again else anchor)
    return found


def broken_links(path, text):
    """The relative links of a page that lead to no file, or to no heading."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", bare(text)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if name and not target.exists():
            broken.append(link)
        elif anchor:
            there = target.read_text() if name else text
            if anchor not in anchors_of(there):
                broken.append(link)
    return broken


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(path):
    assert broken_links(path, path.read_text()) == []


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("[a](no.md)", ["no.md"]),
        ("[a](callbacks.md) [b](https://no.where)", []),
        ("[a](callbacks.md#no)", ["callbacks.md#no"]),
        ("[a](callbacks.md#lossscalemonitor-overflow-or-bug)", []),
        ("## One: `two`_3?\n[a](#one-two_3) [b](#one)", ["#one"]),
        ("## A\n## A\n[a](#a) [b](#a-1) [c](#a-2)", ["#a-2"]),
        ("```python\n# comment\nx[0](1)\n```\n[a](#comment)", ["#comment"]),
    ],
)
def test_a_broken_link_is_caught(text, broken):
    assert broken_links(DOCS / "page.md", text) == broken


def section(name, title):
    text = (DOCS / name).read_text()
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return found.group(1)


def messages_of(source):
    """The texts in a source, each in one piece, with "…" for what varies."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [getattr(part, "value", "…") for part in node.values]
            found.append(
                "".join(p if isinstance(p, str) else "…" for p in parts)
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_messages_that_are_explained_are_those_of_the_code():
    root = pathlib.Path(tfmixed.__file__).parent
    said = [m for f in root.rglob("*.py") for m in messages_of(f.read_text())]
    rows = section("troubleshooting.md", "By message").splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("| `")]
    explained = [part for cell in cells for part in re.findall("`(.*?)`", cell)]
    assert len(explained) > 40
    unknown = [x for x in explained if not any(x in text for text in said)]
    assert unknown == []


def test_each_code_of_the_audit_stands_beside_a_symptom():
    told = section("troubleshooting.md", "By code of the audit")
    assert set(re.findall(r"\[(TM\d{3})\]", told)) == set(CODES)


def test_floors_are_those_that_are_documented():
    root = pathlib.Path(tfmixed.__file__).parent
    rooms = {p.stem for p in root.iterdir() if p.suffix == ".py"}
    rooms |= {p.parent.name for p in root.glob("*/__init__.py")}
    rows = re.findall(
        r"^\| (\d) \| (.*?) \|", section("architecture.md", "Floors"), re.M
    )
    told = {
        name: int(floor)
        for floor, names in rows
        for name in re.findall("`(.*?)`", names)
    }
    assert told == {name: floor_of(name) for name in rooms}


def test_every_page_with_figures_is_accounted_for():
    pages = set(
        re.findall(r"\(([\w.-]+\.md)\)", section("figures.md", "These pages"))
    )
    no_figures = {"audit-codes", "figures", "architecture", "reference"}
    no_figures |= {"troubleshooting"}
    assert pages == {
        p.name for p in DOCS.glob("*.md") if p.stem not in no_figures
    }


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
