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

import tfmixed
from tfmixed import loss_scale as lib
from tfmixed import skips
from tfmixed.loss_scale import LossScaleState
from tfmixed.loss_scale import StepOutcome
from tfmixed.predictive_loss_scale import PredictiveLossScale

# Every field away from its default.
CUSTOM = PredictiveLossScale(
    initial=256.0,
    beta=0.9,
    deviations=2.0,
    headroom=1.5,
    warm_up=3,
    backoff_factor=0.25,
    growth_interval=4,
    minimum=2.0,
    maximum=2.0**20,
)


class PythonScale:
    """In plain Python, with weights of all past steps written out."""

    def __init__(self, algorithm):
        self.algorithm = algorithm
        self.scale, self.ceiling = algorithm.initial, algorithm.maximum
        self.good = self.bad = 0
        self.seen = []

    def step(self, finite, largest):
        a = self.algorithm
        if finite:
            self.good, self.bad = self.good + 1, 0
            if largest > 0:
                self.seen.append(math.log2(largest))
            if self.good == a.growth_interval:
                self.ceiling, self.good = min(self.ceiling * 2, a.maximum), 0
        else:
            self.good, self.bad = 0, self.bad + 1
            self.ceiling = max(self.scale * a.backoff_factor, a.minimum)
        wanted = self.scale
        if len(self.seen) >= a.warm_up:
            wanted = 2.0 ** math.floor(self.exponent())
        self.scale = max(min(wanted, self.ceiling), a.minimum)

    def statistics(self):
        ages = np.arange(len(self.seen))[::-1]
        weights = self.algorithm.beta**ages
        weights = weights / weights.sum()
        mean = float(np.sum(weights * self.seen))
        return mean, float(np.sum(weights * (np.array(self.seen) - mean) ** 2))

    def exponent(self):
        a = self.algorithm
        mean, variance = self.statistics()
        spread = a.deviations * math.sqrt(variance)
        return math.log2(65504) - a.headroom - mean - spread

    def is_on_edge(self):
        """Rounding of float32 may decide which whole number is below."""
        if len(self.seen) < self.algorithm.warm_up:
            return False
        exponent = self.exponent()
        return abs(exponent - round(exponent)) < 1e-3


def algorithms():
    return st.builds(
        PredictiveLossScale,
        initial=st.sampled_from([4.0, 2.0**10, 2.0**15]),
        beta=st.sampled_from([0.1, 0.9, 0.99]),
        deviations=st.sampled_from([0.0, 1.0, 3.0]),
        headroom=st.sampled_from([0.0, 1.25, 4.0]),
        warm_up=st.integers(1, 5),
        backoff_factor=st.sampled_from([0.25, 0.5]),
        growth_interval=st.integers(1, 4),
        minimum=st.sampled_from([0.25, 4.0]),
        maximum=st.sampled_from([2.0**15, 2.0**24]),
    )


def histories():
    # Steps: not finite, all gradients 0, or with a largest gradient.
    largest = st.floats(-20, 20).map(lambda exponent: 2.0**exponent)
    step = st.one_of(
        st.sampled_from([(False, math.inf), (False, math.nan), (True, 0.0)]),
        largest.map(lambda value: (True, value)),
    )
    return st.lists(step, min_size=1, max_size=25)


@settings(max_examples=40, deadline=None)
@given(algorithms(), histories())
def test_follows_the_python_model(algorithm, history):
    @tf.function
    def run(finite, largest):
        return states_of(algorithm, finite, largest, len(history))

    check_states(run(*arrays_of(history)), algorithm, history)


def arrays_of(history):
    finite, largest = zip(*history, strict=True)
    return tf.constant(finite), tf.constant(largest, tf.float32)


def states_of(algorithm, finite, largest, count):
    first = algorithm.initial_state()
    zero = tf.constant(0, tf.int64)
    state = LossScaleState(tf.constant(first.scale), zero, zero, first.memory)
    states = []
    for index in range(count):
        outcome = StepOutcome(finite[index], 1.0, largest[index])
        state = algorithm.update(state, outcome)
        states.append(state)
    return states


def check_states(states, algorithm, history):
    expected = PythonScale(algorithm)
    for (finite, largest), state in zip(history, states, strict=True):
        expected.step(finite, largest)
        mean, variance, steps, ceiling = (float(m) for m in state.memory)
        if expected.seen:
            statistics = expected.statistics()
            assert mean == pytest.approx(statistics[0], abs=1e-4)
            assert variance == pytest.approx(statistics[1], rel=1e-4, abs=1e-4)
        assert steps == len(expected.seen)
        assert int(state.good_steps) == expected.good
        assert int(state.bad_steps) == expected.bad
        if expected.is_on_edge():
            return
        assert float(state.scale) == expected.scale
        assert ceiling == expected.ceiling


HISTORY = [
    *[(True, 2.0**-7.3), (True, 0.0), (True, 2.0**-8.1), (False, math.nan)],
    *[(True, 2.0**-6.2), (True, 2.0**-5.7), (False, math.inf), (True, 3e-3)],
    *[(True, 2.0**-exponent) for exponent in range(3, 16)],
]


@pytest.mark.parametrize(
    "mode",
    [lambda f: f, lambda f: tf.function(f, jit_compile=True)],
    ids=["eager", "xla"],
)
@pytest.mark.parametrize("algorithm", [CUSTOM, PredictiveLossScale(warm_up=2)])
def test_follows_the_python_model_in_other_modes(mode, algorithm):
    run = mode(lambda *parts: states_of(algorithm, *parts, len(HISTORY)))
    check_states(run(*arrays_of(HISTORY)), algorithm, HISTORY)


def test_history_is_never_on_edge():
    """So that the test above compares all of it."""
    for algorithm in (CUSTOM, PredictiveLossScale(warm_up=2)):
        model = PythonScale(algorithm)
        for step in HISTORY:
            model.step(*step)
            assert not model.is_on_edge()


def run_constant(algorithm, largest, count, state=None):
    state = state or algorithm.initial_state()
    scales = []
    for _ in range(count):
        state = algorithm.update(state, StepOutcome(True, 1.0, largest))
        scales.append(float(state.scale))
    return state, scales


@pytest.mark.parametrize(
    ("largest", "headroom", "expected"),
    # 65504 is just below 2^16.
    [
        (1.0, 0.0, 2.0**15),
        (1.0, 2.0, 2.0**13),
        (2.0**-3.5, 2.0, 2.0**17),
        (2.0**-60, 2.0, 2.0**24),
        (2.0**40, 2.0, 1.0),
    ],
)
def test_constant_gradients_have_a_closed_form(largest, headroom, expected):
    algorithm = PredictiveLossScale(warm_up=3, headroom=headroom)
    _, scales = run_constant(algorithm, largest, 5)
    assert scales == [2.0**15, 2.0**15, expected, expected, expected]
    if 1.0 < expected < 2.0**24:
        assert 65504 / 2 < expected * largest * 2.0**headroom <= 65504


def test_the_spread_leaves_room():
    """G of -1 and 1 by turns: mean near 0, deviation near 1."""
    algorithm = PredictiveLossScale(headroom=0.0, deviations=3.0, beta=0.999)
    state = algorithm.initial_state()
    for step in range(1000):
        outcome = StepOutcome(True, 1.0, 2.0 if step % 2 else 0.5)
        state = algorithm.update(state, outcome)
    assert float(state.memory[0]) == pytest.approx(0.0, abs=2e-3)
    assert float(state.memory[1]) == pytest.approx(1.0, abs=2e-3)
    # 65504 / 2^3 = 2^12.9993, less the bit of the mean.
    assert float(state.scale) == 2.0**12


def test_growth_is_foreseen_without_a_skip():
    """Gradients that double every 20 steps never reach the limit."""
    algorithm = PredictiveLossScale()
    state = algorithm.initial_state()
    for step in range(600):
        largest = 2.0 ** (-18 + step / 20)
        assert largest * float(state.scale) < 65504
        state = algorithm.update(state, StepOutcome(True, 1.0, largest))


def test_it_does_not_jump_back_after_a_bad_step():
    algorithm = PredictiveLossScale(warm_up=2, growth_interval=10)
    state, scales = run_constant(algorithm, 2.0**-4, 4)
    level = scales[-1]
    assert level == 2.0**17
    bad = StepOutcome(False, math.inf, math.inf)
    state = algorithm.update(algorithm.update(state, bad), bad)
    assert float(state.scale) == level / 4
    _, scales = run_constant(algorithm, 2.0**-4, 25, state)
    assert scales == [level / 4] * 9 + [level / 2] * 10 + [level] * 6


def test_gradients_of_zero_teach_nothing():
    algorithm = PredictiveLossScale(warm_up=2)
    start, _ = run_constant(algorithm, 2.0**-4, 4)
    # Also where a logarithm would see 0.
    for nothing in (0.0, 1e-45):
        state, scales = run_constant(algorithm, nothing, 5, start)
        assert scales == [float(start.scale)] * 5
        assert [float(m) for m in state.memory] == [
            float(m) for m in start.memory
        ]


def test_bounds_hold_when_all_steps_are_bad():
    state = CUSTOM.initial_state()
    for _ in range(20):
        state = CUSTOM.update(state, StepOutcome(False, math.inf, math.inf))
    assert float(state.scale) == CUSTOM.minimum
    assert int(state.bad_steps) == 20


@pytest.mark.parametrize("jit_compile", [False, True])
def test_scales_are_exact_powers_of_two(jit_compile):
    algorithm = PredictiveLossScale(
        warm_up=1, headroom=0.0, minimum=2.0**-100, maximum=2.0**100
    )

    @tf.function(jit_compile=jit_compile)
    def scale(largest):
        first = algorithm.initial_state()
        return algorithm.update(first, StepOutcome(True, 1.0, largest)).scale

    for exponent in range(-84, 100):
        # Not whole, so that no rounding moves it to the next power.
        largest = tf.constant(2.0 ** (exponent + 0.5))
        assert float(scale(largest)) == 2.0 ** (15 - exponent)


def test_config_round_trip():
    config = CUSTOM.get_config()
    assert PredictiveLossScale.from_config(config) == CUSTOM
    assert json.loads(json.dumps(config)) == config
    serialized = keras.saving.serialize_keras_object(CUSTOM)
    assert serialized["registered_name"] == "tfmixed>PredictiveLossScale"
    assert lib.get(json.loads(json.dumps(serialized))) == CUSTOM
    assert hash(lib.get(serialized)) == hash(CUSTOM)


def test_custom_has_no_default_value():
    """So that the round trip cannot lose a field unseen."""
    default = PredictiveLossScale()
    assert len(dataclasses.fields(CUSTOM)) == len(CUSTOM.get_config()) == 9
    for field in dataclasses.fields(CUSTOM):
        assert getattr(CUSTOM, field.name) != getattr(default, field.name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial": 0.0}, "`initial` is 0.0"),
        ({"initial": 2.0**25}, "is outside [1.0, 16777216.0]"),
        ({"minimum": 64.0, "maximum": 8.0}, "(64.0) is above `maximum` (8.0)"),
        ({"beta": 1.0}, "`beta` is 1.0, but it is the weight of the past"),
        ({"beta": 0}, "`beta` is 0"),
        ({"beta": math.nan}, "`beta` is nan"),
        ({"deviations": -1}, "`deviations` is -1, but it must be a finite"),
        ({"headroom": math.inf}, "`headroom` is inf"),
        ({"headroom": "2"}, "`headroom` is '2'"),
        ({"warm_up": 0}, "`warm_up` is 0, but it counts steps"),
        ({"growth_interval": 1.5}, "`growth_interval` is 1.5"),
        ({"backoff_factor": 1.0}, "`backoff_factor` is 1.0, but the scale has"),
    ],
)
def test_rejects(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        PredictiveLossScale(**arguments)
    assert str(caught.value).startswith("PredictiveLossScale: ")


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(math.inf, 2.0**20), (0.0, 2.0), (math.nan, 256.0), (100.0, 100.0)],
)
def test_a_scale_from_elsewhere_is_brought_into_bounds(scale, expected):
    assert CUSTOM.clip(scale) == expected
    assert CUSTOM.at_floor(CUSTOM.clip(scale)) == (expected == 2.0)


@pytest.mark.parametrize(
    ("in_a_row", "scale", "message"),
    [
        (
            2,
            512.0,
            "still falling: train on, or start lower with tfmixed."
            "PredictiveLossScale(initial=512), or with a larger `headroom` "
            "(now 1.5). If it goes on, ",
        ),
        (0, 512.0, "finds its level; if it goes on, start lower with"),
        (0, 2.0, "That is its minimum, so a smaller scale is no cure"),
    ],
)
def test_what_is_told_of_skips(in_a_row, scale, message):
    told = skips.describe(9, 20, scale, in_a_row, CUSTOM)
    assert message in told
    assert "does not adapt" not in told
    assert skips.describe(1, 20, 512.0, 0, CUSTOM) is None


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_fit_sets_the_scale_from_the_gradients(steps_per_execution):
    """Inputs of 1e4 in one batch overflow float16; all others are alike."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, dtype="mixed_float16"),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    algorithm = PredictiveLossScale(initial=64.0, warm_up=3)
    # Weights that stay as they are: so do the gradients.
    optimizer = tfmixed.LossScaleOptimizer(keras.optimizers.SGD(0.0), algorithm)
    model.compile(
        *(optimizer, "mse"),
        jit_compile=False,
        steps_per_execution=steps_per_execution,
    )
    x, y = np.ones((96, 6), "float32"), np.full((96, 1), 100.0, "float32")
    x[40:48] *= 1e4
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(y[:8] - model(x[:8])))
    gradients = tape.gradient(loss, model.trainable_weights)
    largest = max(np.abs(g).max() for g in gradients)
    exponent = math.log2(65504 / largest) - algorithm.headroom
    assert abs(exponent - round(exponent)) > 0.02
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert int(optimizer.skipped_steps) == 1
    assert float(optimizer.dynamic_scale.numpy()) == 2.0 ** (
        math.floor(exponent) - 1
    )
