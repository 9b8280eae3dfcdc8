"""What the numbers say, in words: use it, or do not."""

import dataclasses
import math

import pytest

from tfmixed.report.comparison import Row
from tfmixed.report.verdict import judge

FLOAT32 = Row(
    "float32",
    accuracy_mean=0.95,
    accuracy_interval=(0.94, 0.96),
    metric_mean=0.95,
    metric_interval=(0.94, 0.96),
    scores=(0.945, 0.95, 0.955),
    step_ms=480.0,
    speedup=1.0,
    skipped_steps=0,
    trained_steps=192,
)
GOOD = dataclasses.replace(
    FLOAT32,
    policy="mixed_bfloat16",
    step_ms=320.0,
    speedup=1.5,
    speedup_interval=(1.45, 1.55),
    difference_mean=0.0,
    difference_interval=(-0.01, 0.01),
)


def change(**values):
    return dataclasses.replace(GOOD, **values)


def refused(row, because, **options):
    verdict = judge([FLOAT32, row], **options)
    assert not verdict.use
    assert verdict.policy == "float32"
    text = " ".join(verdict.reasons)
    assert because in text
    return text


def test_faster_and_as_good_is_used():
    verdict = judge([FLOAT32, GOOD])
    assert verdict.use
    assert verdict.policy == "mixed_bfloat16"
    assert verdict.reasons == (
        "It is faster: a step takes 320 ms with mixed_bfloat16 and 480 ms "
        "with float32: 1.50 times as fast (95 % interval 1.45 to 1.55).",
        "The accuracy holds: accuracy 95.0 % with mixed_bfloat16, 95.0 % "
        "with float32 (mean of 3 seeds; 95 % interval of float32 94.0 to "
        "96.0 %; difference seed by seed -1.0 to +1.0).",
    )


@pytest.mark.parametrize(
    ("speedup", "interval", "because"),
    [
        (0.9, (0.85, 0.95), "It is slower: "),
        (1.2, (0.9, 1.5), "It is not faster beyond chance: "),
        (1.05, (1.02, 1.08), "It gains less than 1.1 times: "),
        (1.5, None, "One round cannot tell a speed-up from chance: "),
    ],
)
def test_too_little_speed_is_refused(speedup, interval, because):
    row = change(speedup=speedup, speedup_interval=interval)
    text = refused(row, because)
    assert "too small" not in text


def test_a_small_model_is_named_as_such():
    small = dataclasses.replace(FLOAT32, step_ms=2.0)
    row = change(step_ms=2.2, speedup=0.91, speedup_interval=(0.9, 0.92))
    reasons = judge([small, row]).reasons
    assert "The model is too small to gain" in reasons[0]
    assert "2 ms with float32" in reasons[0]


def test_accuracy_outside_the_interval_is_refused():
    row = change(
        accuracy_mean=0.93,
        metric_mean=0.93,
        difference_mean=-0.02,
        difference_interval=(-0.05, 0.01),
    )
    text = refused(row, "The accuracy suffers: accuracy 93.0 % with mixed")
    assert "difference seed by seed -5.0 to +1.0" in text


def test_accuracy_that_is_lower_with_every_seed_is_refused():
    row = change(
        accuracy_mean=0.943,
        metric_mean=0.943,
        difference_mean=-0.007,
        difference_interval=(-0.008, -0.006),
    )
    refused(row, "difference seed by seed -0.8 to -0.6")


def test_a_small_difference_that_only_the_pairs_show_is_chance():
    # As happens after two epochs: three trainings, 3 to 5 images of 1000.
    row = change(
        accuracy_mean=0.946,
        metric_mean=0.946,
        difference_mean=-0.004,
        difference_interval=(-0.006, -0.002),
    )
    verdict = judge([FLOAT32, row], validation_size=1000)
    assert verdict.use
    assert verdict.reasons[1].startswith(
        "The accuracy may be a little worse, not enough to decide: accuracy "
        "94.6 % with mixed_bfloat16"
    )


def test_an_interval_that_is_narrow_by_chance_does_not_decide():
    narrow = dataclasses.replace(FLOAT32, metric_interval=(0.949, 0.951))
    row = change(
        accuracy_mean=0.947,
        metric_mean=0.947,
        difference_mean=-0.003,
        difference_interval=(-0.008, 0.002),
    )
    assert judge([narrow, row], validation_size=1000).use


def test_one_seed_that_fails_is_enough():
    # The interval of the differences is so wide that it includes zero.
    row = change(
        accuracy_mean=0.66,
        metric_mean=0.66,
        difference_mean=-0.29,
        difference_interval=(-1.5, 0.9),
    )
    refused(row, "The accuracy suffers")


def test_one_example_more_or_less_is_no_difference():
    # Every seed of float32 got the same: an interval of no length.
    same = dataclasses.replace(FLOAT32, metric_interval=(0.95, 0.95))
    row = change(
        metric_mean=0.9495,
        difference_mean=-0.0005,
        difference_interval=(-0.0005, -0.0005),
    )
    assert judge([same, row], validation_size=1000).use
    assert not judge([same, row], validation_size=10000).use


def test_better_accuracy_is_no_reason_against():
    assert judge(
        [
            FLOAT32,
            change(
                metric_mean=0.99,
                difference_mean=0.04,
                difference_interval=(0.03, 0.05),
            ),
        ]
    ).use


def test_a_loss_is_better_when_lower():
    base = dataclasses.replace(
        FLOAT32, accuracy_mean=None, metric_mean=2.0, metric_interval=(1.9, 2.1)
    )
    row = change(accuracy_mean=None, metric_mean=2.05, difference_mean=0.05)
    options = {"metric": "loss", "higher_is_better": False}
    assert judge([base, row], **options).use
    worse = dataclasses.replace(row, metric_mean=2.2, difference_mean=0.2)
    verdict = judge([base, worse], **options)
    assert not verdict.use
    assert "loss 2.2 with mixed_bfloat16, 2 with float32" in verdict.reasons[1]
    better = dataclasses.replace(row, metric_mean=1.5, difference_mean=-0.5)
    assert judge([base, better], **options).use


def test_one_seed_cannot_tell():
    base = dataclasses.replace(FLOAT32, metric_interval=None)
    reasons = judge([base, change(difference_interval=None)]).reasons
    assert "One seed cannot tell whether accuracy suffers" in reasons[1]
    assert "Train with three or more" in reasons[1]


def test_divergence_is_refused():
    refused(change(metric_mean=math.nan), "mixed_bfloat16 diverged")


def test_skips_at_the_start_are_ordinary_and_at_the_end_are_not():
    settled = judge([FLOAT32, change(skipped_steps=9)])
    assert settled.use
    assert settled.reasons[-1] == (
        "mixed_bfloat16 skipped 9 of 192 training steps, while the loss "
        "scale settled."
    )
    refused(
        change(skipped_steps=9, ended_on_skip=(1,)),
        "skipped the last step of 1 of 3 trainings",
    )
    refused(change(skipped_steps=150), "too many to be the loss scale settling")


def test_the_fastest_good_policy_wins_and_the_others_say_why_not():
    slow = change(
        policy="mixed_float16", speedup=0.2, speedup_interval=(0.1, 0.3)
    )
    faster = change(policy="mixed_float16", speedup=2.0)
    verdict = judge([FLOAT32, slow, GOOD])
    assert verdict.policy == "mixed_bfloat16"
    assert verdict.reasons[0].startswith("It is faster")
    assert verdict.reasons[-1].startswith("It is slower: a step takes 320 ms")
    assert "mixed_float16" in verdict.reasons[-1]
    assert judge([FLOAT32, faster, GOOD]).policy == "mixed_float16"


def test_memory_is_named_when_it_is_saved():
    reasons = judge([FLOAT32, change(memory_ratio=0.52)]).reasons
    assert reasons[-1].startswith("It needs 52.0 % of the memory of float32")
    assert judge([FLOAT32, change(memory_ratio=0.97)]).reasons == (
        judge([FLOAT32, GOOD]).reasons
    )


def test_nothing_measured_is_not_used():
    empty = [Row("float32"), Row("mixed_bfloat16")]
    verdict = judge(empty, partial=True)
    assert not verdict.use
    assert verdict.reasons[0].startswith("The comparison was interrupted")
    assert "The step time of mixed_bfloat16 was not measured." in (
        verdict.reasons
    )
    assert "The accuracy of mixed_bfloat16 was not measured." in verdict.reasons


def test_float32_alone_is_nothing_to_judge():
    verdict = judge([FLOAT32])
    assert not verdict.use
    assert verdict.reasons == (
        "Only float32 was measured: there is nothing to judge.",
    )
