"""`compare` from end to end, on a small model and real digits."""

import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from models.data import digits
from models.mlp import tiny_mlp
from tfmixed.hardware import Cpu
from tfmixed.hardware import Device
from tfmixed.hardware import describe
from tfmixed.policy import choose
from tfmixed.report.compare import choose_policies
from tfmixed.report.compare import compare

pytestmark = pytest.mark.slow

QUICK = {"epochs": 1, "batch_size": 64, "rounds": 2, "memory": False}


def regression_data():
    x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    y = x.sum(axis=1)
    return (x, y), (x, y)


def digit_datasets():
    train, validation = (
        tf.data.Dataset.from_tensor_slices(part) for part in digits()
    )
    return train.shuffle(2000).batch(64), validation.batch(64)


def regression():
    return keras.Sequential(
        [keras.Input((3,)), layers.Dense(1, dtype="float32")]
    )


def bad_classes():
    (x, y), _ = digits()
    return (x, y + 5), (x, y + 5)


@pytest.fixture(scope="module")
def result():
    return compare(
        tiny_mlp,
        digits,
        policies=["mixed_float16"],
        seeds=2,
        learning_rate=0.01,
        progress=False,
        **QUICK | {"epochs": 3},
    )


def test_every_policy_is_measured(result):
    assert [row.policy for row in result.rows] == ["float32", "mixed_float16"]
    for row in result.rows:
        assert len(row.scores) == 2
        assert 0.5 < row.accuracy_mean <= 1.0
        low, high = row.accuracy_interval
        assert low <= row.accuracy_mean <= high
        assert row.step_ms > 0
        low, high = row.step_ms_quartiles
        assert low <= row.step_ms <= high
        # Tracing takes far longer than a step.
        assert 1000 * row.first_step_s > row.step_ms
        assert row.trained_steps == 2 * 3 * 23
        assert row.peak_memory_mb is None
        assert row.jit_compile is False
    half = result.rows[1]
    assert half.speedup == pytest.approx(result.rows[0].step_ms / half.step_ms)
    assert half.speedup_interval is not None
    assert half.difference_mean == pytest.approx(
        half.accuracy_mean - result.rows[0].accuracy_mean
    )
    # Pairs of the same weights and order stay close together.
    assert abs(half.difference_mean) < 0.05


def test_a_tiny_model_is_told_not_to(result):
    assert not result.verdict.use
    assert result.verdict.policy == "float32"


def test_the_report_says_what_and_where(result):
    assert result.metric == "accuracy"
    assert result.validation_size == 359
    assert result.settings["model"] == "models.mlp:tiny_mlp"
    assert result.settings["data"] == "models.data:digits"
    assert result.settings["batch_size"] == 64
    assert result.environment["keras"] == keras.__version__
    assert not result.partial
    assert json.loads(result.to_json())["rows"][0]["policy"] == "float32"
    for text in (str(result), result.to_markdown(), result.to_html()):
        assert "mixed_float16" in text.replace("\\", "")
    assert "not measured" in result.to_markdown()


def test_the_global_policy_is_as_before(result):
    assert keras.config.dtype_policy().name == "float32"


def test_a_seed_pairs_the_policies_and_seeds_differ():
    first_weights = []

    def build():
        model = tiny_mlp()
        first_weights.append(model.get_weights()[0].copy())
        return model

    compare(build, digits, seeds=2, progress=False, **QUICK)
    # Two models for the step times, then a pair for each seed.
    assert len(first_weights) == 6
    pairs = first_weights[2:4], first_weights[4:6]
    for ours, theirs in pairs:
        np.testing.assert_array_equal(ours, theirs)
    assert not np.array_equal(pairs[0][0], pairs[1][0])


def test_a_file_is_compared_and_the_seeds_explained(tmp_path):
    model = tiny_mlp()
    model.save(tmp_path / "net.keras")
    result = compare(
        str(tmp_path / "net.keras"),
        digits,
        policies=["mixed_bfloat16"],
        seeds=2,
        progress=False,
        **QUICK,
    )
    assert result.rows[1].difference_mean is not None
    assert "every seed starts from the same" in result.notes[-1]
    assert result.notes[-1] in result.to_markdown()


def test_a_regression_is_judged_by_its_loss():
    result = compare(
        regression, regression_data, seeds=2, progress=False, **QUICK
    )
    assert result.metric == "loss"
    assert not result.higher_is_better
    for row in result.rows:
        assert row.accuracy_mean is None
        assert row.metric_mean > 0


def test_datasets_and_a_single_policy_and_a_note(capsys):
    result = compare(
        lambda: tiny_mlp(classifier_activation=None),
        digit_datasets,
        policies="float32",
        seeds=1,
        **QUICK,
    )
    assert [row.policy for row in result.rows] == ["float32"]
    assert result.rows[0].trained_steps == 23
    assert result.rows[0].accuracy_mean > 0.1
    assert result.settings["batch_size"] == "of the dataset"
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "All of it will take about" in captured.err
    assert "float32, seed 1 of 1: accuracy" in captured.err


def test_memory_that_cannot_be_measured_says_why():
    result = compare(
        lambda: regression(),
        regression_data,
        policies=["float32"],
        seeds=1,
        progress=False,
        **QUICK | {"memory": True},
    )
    assert result.rows[0].peak_memory_mb is None
    assert "put it into a module" in result.rows[0].memory_note
    assert "not measurable here" in result.to_markdown()


def interrupted(builds):
    """A builder that is interrupted at its build of that number."""
    count = iter(range(1, 100))

    def build():
        if next(count) == builds:
            raise KeyboardInterrupt
        return tiny_mlp()

    return build


def test_an_interruption_loses_nothing(capsys):
    # Two builds for the step times, two for seed 0, one for seed 1.
    result = compare(
        interrupted(6), digits, policies=["mixed_bfloat16"], **QUICK
    )
    assert result.partial
    assert [len(row.scores) for row in result.rows] == [2, 1]
    assert all(row.step_ms for row in result.rows)
    assert "interrupted" in result.verdict.reasons[0]
    assert "partial" in str(result)
    assert "Interrupted" in capsys.readouterr().err
    json.loads(result.to_json())


def test_an_interruption_before_anything_was_measured_is_passed_on():
    with pytest.raises(KeyboardInterrupt):
        compare(interrupted(2), digits, progress=False, **QUICK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seeds": 0}, "`seeds` got 0. Expected a whole number of at least 1"),
        ({"seeds": True}, "`seeds` got True"),
        ({"epochs": 1.5}, "`epochs` got 1.5"),
        ({"batch_size": -4}, "`batch_size` got -4"),
        ({"rounds": 0}, "`rounds` got 0"),
        ({"learning_rate": -1.0}, "`learning_rate` got -1.0"),
        (
            {"policies": ["mixed_float61"]},
            "`policies` got 'mixed_float61'. Did you mean 'mixed_float16'?",
        ),
        ({"policies": []}, "`policies` is empty"),
        ({"batch_size": 2000}, "has only 1438 examples for training"),
        ({"builder": "models.mlp:tiny"}, "has no 'tiny'"),
        ({"builder": "models.nets:tiny"}, "no module 'models.nets'"),
        ({"data": lambda: 3}, "returned int"),
        ({"data": regression_data}, "does not take a batch of `data`"),
        ({"data": bad_classes}, "classes from 5 to 14 need at least 15"),
        (
            {"builder": lambda: keras.Sequential([layers.Flatten()])},
            "no trainable weights",
        ),
    ],
)
def test_bad_input_is_an_error_before_anything_is_measured(
    arguments, message, capsys
):
    given = QUICK | {"builder": tiny_mlp, "data": digits} | arguments
    with pytest.raises(ValueError, match=re.escape(message)):
        compare(**given)
    assert "first step" not in capsys.readouterr().err


def plan(*features):
    cpu = Cpu("Some CPU", "Linux", features, onednn=True)
    return choose(describe((Device("CPU", "Some CPU"),), cpu))


def test_the_plan_decides_what_is_compared():
    assert choose_policies(None, plan("avx512_bf16")) == (
        ("float32", "mixed_bfloat16"),
        [],
    )


def test_a_plan_of_float32_still_has_something_to_compare():
    policies, (note,) = choose_policies(None, plan())
    assert policies == ("float32", "mixed_bfloat16")
    assert note.startswith("The plan here is float32. mixed_bfloat16 is meas")


def test_float32_comes_first_and_once():
    names = ["mixed_float16", "float32", "mixed_float16"]
    assert choose_policies(names, plan())[0] == ("float32", "mixed_float16")
