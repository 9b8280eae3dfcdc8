"""Peak memory, in real fresh processes."""

import math
import sys

import keras
import pytest

from tfmixed.report.candidate import Recipe
from tfmixed.report.dataset import load_data
from tfmixed.report.memory import _checked
from tfmixed.report.memory import measure
from tfmixed.report.sources import find_source

pytestmark = pytest.mark.slow

# The hidden activations of a batch: 64 MB that live until the backward pass.
ROWS, UNITS = 2048, 8192
MODULE = f"""
import os

import keras
import numpy as np
from keras import layers


def build():
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense({UNITS}, activation="gelu"),
            layers.Dense(2, activation="softmax", dtype="float32"),
        ]
    )


def fail():
    raise RuntimeError("no such weights")


def die():
    os._exit(3)


def load():
    x = np.zeros(({ROWS}, 4), "float32")
    y = np.zeros({ROWS}, "int32")
    return (x, y), (x, y)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "measured_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "measured_models"
    sys.modules.pop("measured_models", None)


def ask(builder, loader, policy="float32", **recipe):
    return measure(
        find_source(builder),
        load_data(loader),
        Recipe(batch_size=ROWS, **recipe),
        policy,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="reads the Linux way")
def test_the_step_holds_its_activations(module):
    result = ask(
        f"{module}:build",
        f"{module}:load",
        optimizer=keras.optimizers.SGD(0.1),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=["accuracy"],
    )
    assert result.note is None
    activations = ROWS * UNITS * 4 / 1e6
    # Input, output and gradient of the gelu; TensorFlow itself, some 600 MB,
    # is in no way part of it.
    assert activations < result.megabytes < 7 * activations


def test_a_failure_in_the_fresh_process_is_the_reason(module):
    result = ask(f"{module}:fail", f"{module}:load")
    assert result.megabytes is None
    assert result.note == ("RuntimeError in the fresh process: no such weights")


def test_a_process_that_dies_is_the_reason(module):
    result = ask(f"{module}:die", f"{module}:load")
    assert result.megabytes is None
    assert result.note.startswith("the fresh process ended with 3: ")


def test_what_cannot_travel_is_said_without_a_process(module, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere")
    result = ask(lambda: None, f"{module}:load")
    assert result.megabytes is None
    assert result.note.endswith("put it into a module")
    result = ask(f"{module}:build", f"{module}:load", loss=lambda y, p: p)
    assert result.note == (
        "a fresh process cannot be told: `loss` is a function"
    )
    result = ask(f"{module}:build", f"{module}:load")
    assert result.note.startswith("the fresh process failed: ")


def test_less_than_can_be_told_is_no_number():
    assert _checked(0).megabytes is None
    assert _checked(-5e6).megabytes is None
    assert "less than 10 MB" in _checked(9.9e6).note
    assert math.isclose(_checked(10.1e6).megabytes, 10.1)
