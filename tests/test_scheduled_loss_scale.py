import dataclasses
import json
import math
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from support import number

import tfmixed
from tfmixed import loss_scale as lib
from tfmixed import skips
from tfmixed.loss_scale import LossScaleState
from tfmixed.loss_scale import StepOutcome
from tfmixed.scheduled_loss_scale import MAX_STEP
from tfmixed.scheduled_loss_scale import ScheduledLossScale

# Every field away from its default.
CUSTOM = ScheduledLossScale(
    {0: 96.0, 3: 2.0**10, 7: 24.0},
    growth_interval=2,
    backoff_factor=0.25,
    minimum=3.0,
)


def python_states(algorithm, history):
    """The scheduled scale in plain Python: (scale, good, bad) by step."""
    points = dict(algorithm.points)
    scale = ceiling = points[0]
    good = bad = 0
    for step, finite in enumerate(history, start=1):
        good, bad = (good + 1, 0) if finite else (0, bad + 1)
        if not finite:
            scale = max(scale * algorithm.backoff_factor, algorithm.minimum)
        elif good == algorithm.growth_interval:
            scale, good = min(scale * 2, ceiling), 0
        if step in points:
            scale, ceiling, good = points[step], points[step], 0
        yield scale, good, bad


def algorithms():
    points = st.dictionaries(
        st.integers(1, 20), st.integers(0, 20).map(lambda e: 2.0**e)
    )
    return st.builds(
        lambda points, first, **rest: ScheduledLossScale(
            {**points, 0: first}, **rest
        ),
        points=points,
        first=st.sampled_from([1.0, 96.0, 2.0**18]),
        growth_interval=st.integers(1, 4),
        backoff_factor=st.sampled_from([0.25, 0.5, 0.75]),
        minimum=st.sampled_from([0.25, 1.0]),
    )


@settings(max_examples=30, deadline=None)
@given(algorithms(), st.lists(st.booleans(), min_size=1, max_size=25))
def test_follows_the_python_model(algorithm, history):
    @tf.function
    def run(finite_steps):
        return states_of(algorithm, finite_steps, len(history))

    check_states(run(tf.constant(history)), algorithm, history)


def states_of(algorithm, finite_steps, count):
    first = algorithm.initial_state()
    zero = tf.constant(0, tf.int64)
    state = LossScaleState(tf.constant(first.scale), zero, zero, first.memory)
    states = []
    for index in range(count):
        outcome = StepOutcome(finite_steps[index], 1.0)
        state = algorithm.update(state, outcome)
        states.append(state)
    return states


def check_states(states, algorithm, history):
    expected = list(python_states(algorithm, history))
    for step, (state, (scale, good, bad)) in enumerate(
        zip(states, expected, strict=True), start=1
    ):
        assert float(state.scale) == pytest.approx(scale, rel=1e-6)
        assert (int(state.good_steps), int(state.bad_steps)) == (good, bad)
        assert [float(m) for m in state.memory] == [step]


@pytest.mark.parametrize(
    "mode",
    [lambda f: f, lambda f: tf.function(f, jit_compile=True)],
    ids=["eager", "xla"],
)
def test_follows_the_python_model_in_other_modes(mode):
    history = [True, False, True, True, True, False, True, True, True, True]
    run = mode(lambda finite: states_of(CUSTOM, finite, len(history)))
    check_states(run(tf.constant(history)), CUSTOM, history)


def test_by_hand():
    """96; down at step 1, a point at 3, growth back to 24 after 7."""
    history = [True, False, True, True, True, True, False, False, True, True]
    assert [scale for scale, _, _ in python_states(CUSTOM, history)] == [
        *[96.0, 24.0],  # the schedule jumps after the third step
        *[1024.0, 1024.0, 1024.0, 1024.0],
        *[24.0, 6.0, 6.0, 12.0],
    ]


def test_python_numbers_are_enough():
    state = CUSTOM.initial_state()
    for _ in range(3):
        state = CUSTOM.update(state, StepOutcome(True, 1.0))
    assert float(state.scale) == 1024.0


def test_the_count_stands_still_where_float32_ends():
    """And does not take each later step for the last point."""
    algorithm = ScheduledLossScale({0: 64.0, MAX_STEP: 16.0})
    state = LossScaleState(64.0, 0, 0, (MAX_STEP - 1.0,))
    scales = []
    for finite in (True, False, True):
        state = algorithm.update(state, StepOutcome(finite, 1.0))
        scales.append(float(state.scale))
    assert scales == [16.0, 8.0, 8.0]
    assert float(state.memory[0]) == MAX_STEP


@pytest.mark.parametrize(
    "points",
    [
        {0: 96.0, 3: 1024, 7: 24},
        {7: 24, 3: 1024, 0: 96},
        [(0, 96), (3, 1024), (7, 24)],
        [[7, 24.0], [0, 96.0], [3.0, 1024.0]],
        {"0": 96.0, "3": 1024.0, "7": 24.0},
        np.array([[0, 96], [3, 1024], [7, 24]]),
    ],
)
def test_points_may_be_given_in_many_ways(points):
    algorithm = ScheduledLossScale(points, 2, 0.25, 3.0)
    assert algorithm == CUSTOM
    assert hash(algorithm) == hash(CUSTOM)
    assert algorithm.points == ((0, 96.0), (3, 1024.0), (7, 24.0))
    assert (algorithm.initial, algorithm.adapts) == (96.0, True)


def test_config_round_trip():
    config = CUSTOM.get_config()
    read = json.loads(json.dumps(config))
    assert read == config
    assert ScheduledLossScale.from_config(read) == CUSTOM
    assert read == config
    by_key = {**config, "points": json.loads(json.dumps(dict(CUSTOM.points)))}
    assert ScheduledLossScale.from_config(by_key) == CUSTOM
    serialized = keras.saving.serialize_keras_object(CUSTOM)
    assert serialized["registered_name"] == "tfmixed>ScheduledLossScale"
    assert lib.get(json.loads(json.dumps(serialized))) == CUSTOM


def test_custom_has_no_default_value():
    """So that the round trip cannot lose a field unseen."""
    default = ScheduledLossScale({0: 1.0})
    for field in dataclasses.fields(CUSTOM):
        assert getattr(CUSTOM, field.name) != getattr(default, field.name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"points": {}}, "`points` is empty. Give {step: scale}, for example"),
        ({"points": []}, "`points` is empty"),
        ({"points": {5: 1.0}}, "`points` begins at step 5, so nothing says"),
        ({"points": {0: 1.0, -2: 1.0}}, "has the step -2, but steps are whole"),
        ({"points": {0: 1.0, 2.5: 1.0}}, "has the step 2.5"),
        ({"points": {0: 1.0, "two": 1.0}}, "has the step 'two'"),
        ({"points": {0: 1.0, "-1": 1.0}}, "has the step '-1'"),
        ({"points": {0: 1.0, None: 1.0}}, "has the step None"),
        ({"points": {False: 1.0}}, "has the step False"),
        ({"points": {0: 1.0, math.nan: 1.0}}, "has the step nan"),
        (
            {"points": {0: 1.0, MAX_STEP + 1: 1.0}},
            "has the step 16777217, but steps are counted in float32, which "
            "is exact up to 16777216 only",
        ),
        ({"points": [(0, 1.0), (0, 2.0)]}, "has two scales for step 0"),
        ({"points": {0: 1.0, 4: 2.0, "4": 2.0}}, "has two scales for step 4"),
        ({"points": {0: 0.0}}, "`points[0]` is 0.0, but it must be a finite"),
        ({"points": {0: 1.0, 2: math.inf}}, "`points[2]` is inf"),
        ({"points": {0: math.nan}}, "`points[0]` is nan"),
        ({"points": {0: "high"}}, "`points[0]` is 'high'"),
        ({"points": 128.0}, "`points` is 128.0, which is neither a mapping"),
        ({"points": "0: 128"}, "`points` is '0: 128', which is neither"),
        ({"points": [1, 2]}, "`points` is [1, 2], which is neither"),
        ({"points": {0: 0.5}}, "step 0 is 0.5, which is below `minimum` (1.0)"),
        ({"growth_interval": 0}, "`growth_interval` is 0, but it counts"),
        ({"backoff_factor": 1.0}, "`backoff_factor` is 1.0, but the scale has"),
        ({"minimum": -1.0}, "`minimum` is -1.0"),
    ],
)
def test_rejects(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        ScheduledLossScale(**{"points": {0: 1024.0}, **arguments})
    assert str(caught.value).startswith("ScheduledLossScale: ")


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(math.inf, 1024.0), (0.0, 3.0), (math.nan, 96.0), (100.0, 100.0)],
)
def test_a_scale_from_elsewhere_is_brought_into_bounds(scale, expected):
    assert CUSTOM.clip(scale) == expected
    assert CUSTOM.at_floor(CUSTOM.clip(scale)) == (expected == 3.0)


@pytest.mark.parametrize(
    ("in_a_row", "scale", "message"),
    [
        (
            2,
            512.0,
            "The last 2 steps were among them, so it is still falling: train "
            "on, or lower the schedule there, to 512 or less. If it goes on, ",
        ),
        (0, 512.0, "finds its level; if it goes on, lower the schedule there"),
        (0, 3.0, "That is its minimum, so a smaller scale is no cure"),
    ],
)
def test_what_is_told_of_skips(in_a_row, scale, message):
    told = skips.describe(9, 20, scale, in_a_row, CUSTOM)
    assert message in told
    assert "does not adapt" not in told
    assert "DynamicLossScale" not in told


def test_a_schedule_that_is_too_high_does_not_skip_for_ever():
    """Inputs of 1e4 in one batch overflow float16, and so does 2^18."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, dtype="mixed_float16"),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    optimizer = tfmixed.wrap_optimizer(
        keras.optimizers.SGD(1e-4),
        loss_scale=ScheduledLossScale({0: 64.0, 4: 2.0**24, 26: 8.0}),
    )
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.ones((28 * 8, 6), "float32")
    x[8:16] *= 1e4
    y = np.full((28 * 8, 1), 100.0, "float32")
    scales = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: scales.append(
            number(optimizer.dynamic_scale)
        )
    )
    with pytest.warns(UserWarning, match="16 of 28 training steps"):
        model.fit(
            *(x, y), batch_size=8, shuffle=False, verbose=0, callbacks=[watch]
        )
    assert scales[:4] == [64.0, 32.0, 32.0, 2.0**24]
    # Down by halves until steps are finite, and there it stays.
    settled = scales[24]
    assert 8.0 < settled < 2.0**24
    falls = int(math.log2(2.0**24 / settled))
    assert scales[4 : 4 + falls] == [
        2.0**24 / 2**fall for fall in range(1, falls + 1)
    ]
    assert scales[4 + falls : 25] == [settled] * (21 - falls)
    assert scales[25:] == [8.0, 8.0, 8.0]
    assert int(optimizer.skipped_steps) == 1 + falls
