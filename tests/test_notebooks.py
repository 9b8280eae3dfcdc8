"""The notebooks have one form, run from top to bottom, and hold what they say.

Each is run in a process of its own, without a network, with the small values
that its parameters cell brings for that (`nbmake` puts them in place).
"""

import ast
import copy
import json
import os
import pathlib
import re
import subprocess
import sys
import warnings

import nbformat
import pytest

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
COLAB = (
    "https://colab.research.google.com/github/tfmixed/tfmixed/blob/main/"
    "notebooks/"
)
DOWNLOADS = re.compile(
    r"keras\.datasets|google\.colab|tensorflow_datasets|huggingface|kagglehub|"
    r"imagenet|\b(urllib|requests|wget|curl|get_file|load_dataset|fetch_\w+)\b"
)
ABSOLUTE = re.compile(r"(?<![\w./:<-])/(?!/)[\w.-]+/|\b[A-Z]:\\|~/|file://")
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def faults(path):
    """What keeps a notebook from having the form that all have.

    Args:
        path: Path of the notebook.

    Returns:
        A list of sentences; empty if all is well.
    """
    notebook = json.loads(path.read_text())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            nbformat.validate(copy.deepcopy(notebook))
    except (nbformat.ValidationError, Warning) as error:
        return [f"no valid notebook: {error}"]
    cells = notebook["cells"]
    for cell in cells:
        cell["source"] = "".join(cell["source"])
    return [
        *faults_of_file(path, notebook),
        *faults_of_title(path.name, cells[0]),
        *faults_of_install(cells),
        *faults_of_parameters(cells),
        *faults_of_code(cells),
    ]


def faults_of_file(path, notebook):
    if not re.fullmatch(r"\d_[a-z0-9_]+\.ipynb", path.name):
        yield "the name is not a digit and words"
    if (notebook["nbformat"], notebook["nbformat_minor"]) != (4, 5):
        yield "the format is not 4.5"
    cells = notebook["cells"]
    if notebook["metadata"].get("kernelspec", {}).get("name") != "python3":
        yield "the kernel is not python3"
    if len(cells) > 45 or path.stat().st_size > 60_000:
        yield "too long: more than 45 cells or 60 kB"
    for cell in cells:
        if cell.get("outputs") or cell.get("execution_count") is not None:
            yield f"cell '{cell['id']}' has an output or a count"


def faults_of_title(name, cell):
    if cell["cell_type"] != "markdown" or not cell["source"].startswith("# "):
        yield "the first cell is no title"
    # A badge is a picture that is a link: the target comes last.
    targets = re.findall(r"\)\]\(([^)]*)\)", cell["source"])
    if targets != [f"{COLAB}{name}"]:
        yield "the badge does not lead to this file"


def faults_of_install(cells):
    skipped = [c for c in code_of(cells) if "skip-execution" in tags(c)]
    if len(skipped) != 1:
        yield "not exactly one cell is skipped: that which installs"
        return
    lines = skipped[0]["source"].replace("\\\n", "").splitlines()
    source = "\n".join(line for line in lines if not line.startswith("#"))
    if re.search(r"tensorflow|keras|\btf\b", source, re.I):
        yield "the install cell touches TensorFlow or Keras"
    installs = re.findall(r"\bpip install [^&|;\n]*", source)
    if not any("./tfmixed" in install for install in installs):
        yield "the install cell does not install tfmixed"
    if any("tfmixed" in i and "--no-deps" not in i for i in installs):
        yield "the install cell brings the dependencies of tfmixed"


def faults_of_parameters(cells):
    mocked = [cell for cell in cells if mocks(cell)]
    if len(mocked) != 1:
        yield "not exactly one cell has mocks: that with the parameters"
        return
    here = assigned(mocked[0]["source"])
    for name in mocks(mocked[0]):
        if name not in here:
            yield f"the mock '{name}' is no parameter"
    for cell in code_of(cells):
        if cell is not mocked[0]:
            again = sorted(here & assigned(cell["source"]))
            if again:
                yield f"the parameters {again} are assigned again"


def faults_of_code(cells):
    code = [c for c in code_of(cells) if "skip-execution" not in tags(c)]
    for cell in code:
        if parsed(cell["source"]) is None:
            yield f"cell '{cell['id']}' is not Python"
        if DOWNLOADS.search(cell["source"]):
            yield f"cell '{cell['id']}' downloads"
    for cell in cells:
        if ABSOLUTE.search(re.sub(r"https?://\S+", "", cell["source"])):
            yield f"cell '{cell['id']}' has an absolute path"
    if not any(
        re.search(r"tfmixed\.(hardware|enable)\(", cell["source"])
        for cell in code
    ):
        yield "no cell says what the machine can do"
    tree = parsed(cells[-1]["source"]) if cells[-1] in code else None
    if tree is None or not any(isinstance(n, ast.Assert) for n in tree.body):
        yield "the last cell asserts nothing"


def code_of(cells):
    return [cell for cell in cells if cell["cell_type"] == "code"]


def tags(cell):
    return cell["metadata"].get("tags", [])


def mocks(cell):
    return cell["metadata"].get("nbmake", {}).get("mock", {})


def parsed(source):
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def assigned(source):
    """The names that a cell assigns, but for those inside of other scopes."""
    own = ast.FunctionDef | ast.ClassDef | ast.Lambda | ast.comprehension
    names = set()
    nodes = list(getattr(parsed(source), "body", []))
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if not isinstance(node, own):
            nodes += ast.iter_child_nodes(node)
    return names


def run(path, folder, *, limit=280):
    """Runs a copy of a notebook in a process of its own.

    A cell is added to the copy that looks whether this Python has run it, and
    whether the small values of the parameters were in force to the end.

    Args:
        path: Path of the notebook.
        folder: An empty folder to run it in.
        limit: Seconds that one cell may take.

    Returns:
        None if it ran to the end, else what was printed.
    """
    notebook = nbformat.read(path, as_version=4)
    small = {k: v for c in notebook.cells for k, v in dict(mocks(c)).items()}
    check = (
        f"import sys\nassert sys.prefix == {sys.prefix!r}, sys.prefix\n"
        f"assert {small} == dict({equal_names(small)})"
    )
    notebook.cells.append(nbformat.v4.new_code_cell(check, id="mocks-held"))
    nbformat.write(notebook, folder / path.name)
    command = [sys.executable, "-m", "pytest", "--nbmake", "-q"]
    command += ["-c", ROOT / "setup.cfg", "--rootdir", folder]
    command += ["-p", "no:cacheprovider", f"--nbmake-timeout={limit}"]
    done = subprocess.run(
        [*command, folder / path.name],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=2 * limit + 60,
    )
    return None if done.returncode == 0 else done.stdout + done.stderr


def equal_names(names):
    return ", ".join(f"{name}={name}" for name in names)


def environment(folder):
    """The variables of this process, less what changes how a notebook runs."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "MPL", "JUPYTER_", "TFMIXED_"))
    }
    # Nothing listens there, so that a download fails and says so.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    # What a person has set up for Jupyter or stored for Keras is not used.
    own = ("IPYTHONDIR", "JUPYTER_DATA_DIR", "KERAS_HOME")
    kept.pop("no_proxy", None)
    return kept | nowhere | {name: str(folder / name) for name in own}


def test_there_are_notebooks():
    assert [path.name[:2] for path in NOTEBOOKS[:3]] == ["1_", "2_", "3_"]


@by_name
def test_form(path):
    assert faults(path) == []


def strip_command():
    """The command of the pre-commit hook that strips outputs."""
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    arguments = re.search(r"entry: nbstripout (.*)", config).group(1)
    return [sys.executable, "-m", "nbstripout", *arguments.split(), "--verify"]


def test_the_hook_would_leave_the_notebooks_as_they_are(tmp_path):
    assert subprocess.run([*strip_command(), *NOTEBOOKS]).returncode == 0
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    code_of(notebook.cells)[0].execution_count = 1
    nbformat.write(notebook, tmp_path / "counted.ipynb")
    stripped = subprocess.run([*strip_command(), tmp_path / "counted.ipynb"])
    assert stripped.returncode == 1


def test_the_list_names_each_notebook():
    text = (FOLDER / "README.md").read_text()
    rows = re.findall(r"^\| \[[^]]+\]\(([^)]+)\) \| (.*) \|$", text, re.M)
    assert [name for name, _ in rows] == [path.name for path in NOTEBOOKS]
    for name, row in rows:
        assert f"]({COLAB}{name})" in row


@pytest.mark.slow
@by_name
def test_runs_and_holds_what_it_says(path, tmp_path):
    failure = run(path, tmp_path)
    assert failure is None, failure


# A notebook in the form that all have, for tests that break it.
NAME = "9_sound.ipynb"
SOUND = [
    ("title", f"# Sound\n\n[![Open in Colab](badge.svg)]({COLAB}{NAME})"),
    ("install", "!pip install --no-deps ./tfmixed"),
    ("parameters", "epochs = 5000"),
    ("hardware", "# tfmixed.hardware()\nepochs_made = epochs"),
    ("claims", "assert epochs_made < 10, f'{epochs_made} is too many'"),
]
EXTRA = {
    "install": {"tags": ["skip-execution"]},
    "parameters": {"nbmake": {"mock": {"epochs": 2}}},
}


def written(folder, *, name=NAME, change=None, **sources):
    """Writes the sound notebook, changed.

    Args:
        folder: Where to.
        name: Name of the file.
        change: Is called with the notebook as a dict before it is written.
        **sources: What to write in a cell, by its id.

    Returns:
        Its path.
    """
    cells = []
    for cell_id, source in SOUND:
        cell = {"cell_type": "markdown", "id": cell_id, "metadata": {}}
        cell["source"] = sources.get(cell_id, source)
        if cell_id != "title":
            cell["cell_type"] = "code"
            cell |= {"execution_count": None, "outputs": []}
            cell["metadata"] = copy.deepcopy(EXTRA.get(cell_id, {}))
        cells.append(cell)
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": {"name": "python3", "display_name": "P"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    if change is not None:
        change(notebook)
    path = folder / name
    path.write_text(json.dumps(notebook))
    return path


def cell_of(notebook, cell_id):
    return next(c for c in notebook["cells"] if c["id"] == cell_id)


def test_the_sound_notebook_has_no_fault(tmp_path):
    assert faults(written(tmp_path)) == []


BROKEN_SOURCES = {
    "no title": {"title": f"Sound [![O](b.svg)]({COLAB}{NAME})"},
    "badge does not lead": {
        "title": f"# Sound\n[![O](b.svg)]({COLAB}8_other.ipynb)"
    },
    "touches TensorFlow": {
        "install": "!pip install --no-deps ./tfmixed\n!pip install -U keras"
    },
    "does not install tfmixed": {"install": "!pip install archspec"},
    "brings the dependencies": {"install": "!pip install ./tfmixed"},
    "no parameter": {"parameters": "epoch = 5000"},
    "assigned again": {"claims": "epochs = 9\nassert epochs"},
    "not Python": {"hardware": "!ls\n# tfmixed.hardware()"},
    "downloads": {
        "hardware": "# tfmixed.hardware()\nkeras.datasets.mnist.load_data()"
    },
    "absolute path": {
        "hardware": "# tfmixed.hardware()\nopen('/content/data.csv')"
    },
    "what the machine can do": {"hardware": "epochs_made = epochs"},
    "asserts nothing": {"claims": "print('assert')"},
}


@pytest.mark.parametrize("fault", BROKEN_SOURCES)
def test_a_fault_in_a_cell_is_found(fault, tmp_path):
    found = faults(written(tmp_path, **BROKEN_SOURCES[fault]))
    assert len(found) == 1
    assert fault in found[0]


BROKEN_FORMS = {
    "no valid": lambda n: cell_of(n, "claims").pop("outputs"),
    "no valid notebook": lambda n: cell_of(n, "claims").pop("id"),
    "not 4.5": lambda n: n.update(nbformat_minor=6),
    "Non-unique cell id": lambda n: cell_of(n, "claims").update(id="title"),
    "not python3": lambda n: n["metadata"].pop("kernelspec"),
    "too long": lambda n: cell_of(n, "title").update(
        source=cell_of(n, "title")["source"] + "x" * 60_000
    ),
    "a count": lambda n: cell_of(n, "claims").update(execution_count=1),
    "an output": lambda n: cell_of(n, "claims").update(
        outputs=[{"output_type": "stream", "name": "stdout", "text": "1"}]
    ),
    "not exactly one cell is skipped": lambda n: cell_of(n, "install").update(
        metadata={}
    ),
    "not exactly one cell has mocks": lambda n: cell_of(n, "parameters").update(
        metadata={"mock": {"epochs": 2}}
    ),
    "not exactly one cell has": lambda n: cell_of(n, "claims").update(
        metadata={"nbmake": {"mock": {"epochs": 1}}}
    ),
    "the last cell asserts": lambda n: n["cells"].append(
        {"cell_type": "markdown", "id": "end", "metadata": {}, "source": "."}
    ),
}


@pytest.mark.parametrize("fault", BROKEN_FORMS)
def test_a_fault_in_the_form_is_found(fault, tmp_path):
    found = faults(written(tmp_path, change=BROKEN_FORMS[fault]))
    assert any(fault in sentence for sentence in found)


def test_a_name_without_a_number_is_found(tmp_path):
    found = faults(written(tmp_path, name="sound.ipynb"))
    assert "the name is not a digit and words" in found


@pytest.mark.slow
def test_the_sound_notebook_runs(tmp_path):
    (tmp_path / "run").mkdir()
    failure = run(written(tmp_path), tmp_path / "run")
    assert failure is None, failure


BROKEN_RUNS = {
    "1 is too many": {"claims": "assert False, '1 is too many'"},
    "no_such_name": {"hardware": "epochs_made = no_such_name"},
    # What a mock in the wrong place does: the large value is in force.
    "5000 is too many": {
        "change": lambda n: cell_of(n, "parameters").update(
            metadata={"mock": {"epochs": 2}}
        )
    },
    "'epochs': 2": {"claims": "epochs = 3"},
    "Timeout waiting": {"claims": "while True:\n    pass"},
    "127.0.0.1:9": {
        "claims": "import urllib.request as r\nassert 0, r.getproxies()"
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("message", BROKEN_RUNS)
def test_a_notebook_that_fails_is_caught(message, tmp_path):
    (tmp_path / "run").mkdir()
    path = written(tmp_path, **BROKEN_RUNS[message])
    limit = 5 if message == "Timeout waiting" else 60
    failure = run(path, tmp_path / "run", limit=limit)
    assert message in failure


@pytest.mark.slow
def test_in_a_notebook_a_table_is_text_and_progress_warns_of_nothing(tmp_path):
    body = """
import warnings

import keras
import numpy as np

import tfmixed

warnings.simplefilter("error", UserWarning)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="one")])
x, y = np.ones((8, 4)), np.ones((8, 1))
result = tfmixed.audit(model, x, y, loss="mse", policy="mixed_bfloat16")
assert "gradient error" in str(result), str(result)
tfmixed.minimal_float32(model, x, y, 0.9, policy="mixed_bfloat16", loss="mse")
both = (x, y), (x, y)
result = tfmixed.compare(
    lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]),
    lambda: both,
    policies=["mixed_bfloat16"], seeds=1, rounds=1, batch_size=8, memory=False
)
assert "float32        no" in str(result), str(result)
"""
    path = written(tmp_path, claims=body)
    folder = tmp_path / "run"
    folder.mkdir()
    assert run(path, folder) is None
