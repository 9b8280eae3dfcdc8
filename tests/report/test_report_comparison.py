"""From measurements to rows, and to JSON."""

import json
import math

import pytest

from tfmixed.report.comparison import Comparison
from tfmixed.report.comparison import Row
from tfmixed.report.comparison import Verdict
from tfmixed.report.comparison import make_row
from tfmixed.report.measure import Record

BASE = Record(
    "float32",
    jit_compile=False,
    first_step_s=2.5,
    rounds=[[0.3, 0.3], [0.3, 0.5]],
    memory_mb=1000.0,
    scores={0: 0.9, 1: 0.8, 2: 0.7},
    skipped_steps=0,
    trained_steps=30,
)
HALF = Record(
    "mixed_float16",
    jit_compile=True,
    first_step_s=3.5,
    rounds=[[0.2, 0.2], [0.2, 0.2]],
    memory_mb=600.0,
    scores={0: 0.91, 1: 0.80, 2: 0.72},
    skipped_steps=4,
    trained_steps=30,
    ended_on_skip=[2],
)


def test_a_row_in_closed_form():
    row = make_row(HALF, BASE, is_accuracy=True)
    half = 4.3026527297 * math.sqrt(0.0091) / math.sqrt(3)
    assert row.policy == "mixed_float16"
    assert row.jit_compile is True
    assert row.accuracy_mean == pytest.approx(0.81)
    assert row.accuracy_interval[0] == pytest.approx(0.81 - half, abs=1e-6)
    # 0.81 + 0.24 is more than all of the examples.
    assert row.accuracy_interval[1] == 1.0
    assert row.scores == (0.91, 0.80, 0.72)
    assert row.difference_mean == pytest.approx(0.01)
    assert row.difference_interval == pytest.approx(
        (0.01 - 0.0248413770, 0.01 + 0.0248413770)
    )
    assert row.step_ms == pytest.approx(200)
    assert row.step_ms_quartiles == pytest.approx((200, 200))
    assert row.first_step_s == 3.5
    assert row.speedup == pytest.approx(1.5)
    # Resampling draws the first round twice, or the second, or one of each.
    assert row.speedup_interval == pytest.approx((1.5, 2.0))
    assert row.peak_memory_mb == 600.0
    assert row.memory_ratio == pytest.approx(0.6)
    assert (row.skipped_steps, row.trained_steps) == (4, 30)
    assert row.ended_on_skip == (2,)


def test_the_row_of_float32_is_its_own_measure():
    row = make_row(BASE, BASE, is_accuracy=True)
    assert row.speedup == 1.0
    assert row.memory_ratio == 1.0
    assert row.speedup_interval is None
    assert row.difference_mean is None


def test_another_metric_is_no_accuracy():
    row = make_row(HALF, BASE, is_accuracy=False)
    assert row.accuracy_mean is None
    assert row.accuracy_interval is None
    assert row.metric_mean == pytest.approx(0.81)
    assert row.metric_interval[1] > 1


def test_only_seeds_of_both_are_paired():
    row = make_row(
        Record("mixed_float16", scores={0: 0.5, 1: 0.6}),
        Record("float32", scores={0: 0.4}),
        is_accuracy=True,
    )
    assert row.difference_mean == pytest.approx(0.1)
    assert row.difference_interval is None


def test_what_was_not_measured_is_none():
    row = make_row(Record("mixed_float16"), Record("float32"), True)
    assert row == Row("mixed_float16")


def comparison(**values):
    rows = tuple(make_row(record, BASE, True) for record in (BASE, HALF))
    verdict = Verdict(False, "float32", ("It is slower.",))
    return Comparison(rows, verdict, **values)


def test_json_has_the_agreed_names():
    loaded = json.loads(comparison(notes=("word",), partial=True).to_json())
    row = loaded["rows"][1]
    assert set(row) >= {
        "policy",
        "jit_compile",
        "accuracy_mean",
        "accuracy_interval",
        "step_ms",
        "speedup",
        "peak_memory_mb",
        "memory_ratio",
        "skipped_steps",
    }
    assert row["accuracy_interval"][1] == 1.0
    assert loaded["verdict"] == {
        "use": False,
        "policy": "float32",
        "reasons": ["It is slower."],
    }
    assert loaded["notes"] == ["word"]
    assert loaded["partial"] is True


def test_json_has_null_for_what_is_no_number():
    rows = (Row("float32", metric_mean=math.nan, scores=(math.inf, 0.5)),)
    text = Comparison(rows, Verdict(False, "float32", ())).to_json()
    row = json.loads(text, parse_constant=pytest.fail)["rows"][0]
    assert row["metric_mean"] is None
    assert row["scores"] == [None, 0.5]
    assert row["peak_memory_mb"] is None
