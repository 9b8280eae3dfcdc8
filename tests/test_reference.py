"""The reference names all that is public, and each example in it runs."""

import doctest
import importlib.util
import inspect
import pathlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfmixed

DOCS = pathlib.Path(__file__).parent.parent / "docs"
_SPEC = importlib.util.spec_from_file_location(
    "make_reference", DOCS / "make_reference.py"
)
reference = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(reference)
PUBLIC = dict(reference.public())


def run_examples(docstring):
    """Runs the examples of a docstring with what the reference imports.

    Returns:
        How many lines there were, and how many of them failed.
    """
    names = {"keras": keras, "np": np, "tf": tf, "tfmixed": tfmixed}
    test = doctest.DocTestParser().get_doctest(
        docstring, names, "example", None, None
    )
    tfmixed.disable()
    keras.config.set_dtype_policy("float32")
    keras.utils.clear_session()
    with warnings.catch_warnings():
        # A policy that is slow here is shown all the same.
        warnings.simplefilter("ignore")
        outcome = doctest.DocTestRunner(verbose=False).run(test)
    return outcome.attempted, outcome.failed


@pytest.fixture(autouse=True)
def _as_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    tfmixed.disable()
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_public_has_an_example_that_runs(name):
    attempted, failed = run_examples(inspect.getdoc(PUBLIC[name]))
    assert attempted
    assert failed == 0


@pytest.mark.parametrize(
    ("docstring", "counts"),
    [
        ("No example.", (0, 0)),
        (">>> tfmixed.no_such_name", (1, 1)),
        (">>> tfmixed.current_plan().policy\n'float16'", (1, 1)),
        (">>> tfmixed.current_plan().policy\n'float32'", (1, 0)),
        (">>> layers.Dense(1)", (1, 1)),
    ],
)
def test_a_broken_example_is_caught(docstring, counts, capsys):
    assert run_examples(docstring) == counts


def test_the_reference_is_that_of_the_docstrings():
    written = reference.TARGET.read_text()
    assert written == reference.make(), "run `python docs/make_reference.py`"


def test_the_reference_has_every_public_name_and_its_example():
    written = reference.TARGET.read_text()
    for name, thing in PUBLIC.items():
        _, _, entry = written.partition(f"### `{name}`\n")
        entry, _, _ = entry.partition("\n### ")
        assert "**Example**" in entry, name
        examples = doctest.DocTestParser().get_examples(inspect.getdoc(thing))
        for example in examples:
            assert example.source.splitlines()[0] in entry


def test_arguments_are_told_in_full():
    for name, thing in PUBLIC.items():
        if inspect.isclass(thing) and issubclass(thing, Exception):
            continue
        text = inspect.getdoc(thing)
        for argument in inspect.signature(thing).parameters.values():
            if argument.kind not in (
                argument.VAR_POSITIONAL,
                argument.VAR_KEYWORD,
            ):
                assert f"    {argument.name}: " in text, (name, argument.name)
