import dataclasses
import math
import re

import keras
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from tfmixed import loss_scale as lib
from tfmixed.loss_scale import DynamicLossScale
from tfmixed.loss_scale import FixedLossScale
from tfmixed.loss_scale import LossScaleState
from tfmixed.loss_scale import NoLossScale
from tfmixed.loss_scale import StepOutcome

# Every field away from its default.
CUSTOM = DynamicLossScale(
    initial=96.0,
    growth_interval=7,
    growth_factor=3.0,
    backoff_factor=0.25,
    minimum=2.0,
    maximum=4096.0,
    hysteresis=2,
)
ALGORITHMS = [CUSTOM, FixedLossScale(48.0), NoLossScale()]


class PythonScale:
    """The dynamic scale in plain Python, for one history of steps."""

    def __init__(self, algorithm):
        self.algorithm = algorithm
        self.scale, self.good, self.bad = algorithm.initial, 0, 0

    def step(self, finite):
        a = self.algorithm
        if finite:
            self.good, self.bad = self.good + 1, 0
            if self.good == a.growth_interval:
                self.scale = min(self.scale * a.growth_factor, a.maximum)
                self.good = 0
            return
        self.good, self.bad = 0, self.bad + 1
        if self.bad >= a.hysteresis:
            self.scale = max(self.scale * a.backoff_factor, a.minimum)


def algorithms():
    exponents = st.integers(-4, 12)
    return st.builds(
        lambda low, middle, high, **rest: DynamicLossScale(
            minimum=2.0**low,
            initial=2.0 ** (low + middle),
            maximum=2.0 ** (low + middle + high),
            **rest,
        ),
        low=exponents,
        middle=st.integers(0, 6),
        high=st.integers(0, 6),
        growth_interval=st.integers(1, 4),
        growth_factor=st.sampled_from([1.0, 1.5, 2.0, 4.0]),
        backoff_factor=st.sampled_from([0.25, 0.5, 0.75]),
        hysteresis=st.integers(1, 3),
    )


@settings(max_examples=30, deadline=None)
@given(algorithms(), st.lists(st.booleans(), min_size=1, max_size=30))
def test_dynamic_scale_follows_the_python_model(algorithm, history):
    @tf.function
    def run(finite_steps):
        state = LossScaleState(tf.constant(algorithm.initial), zero(), zero())
        states = []
        for index in range(len(history)):
            outcome = StepOutcome(finite_steps[index], 1.0)
            state = algorithm.update(state, outcome)
            states.append(state)
        return states

    expected = PythonScale(algorithm)
    for finite, state in zip(history, run(tf.constant(history)), strict=True):
        expected.step(finite)
        assert float(state.scale) == pytest.approx(expected.scale, rel=1e-6)
        assert int(state.good_steps) == expected.good
        assert int(state.bad_steps) == expected.bad


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("finite", [True, False])
def test_memory_is_passed_on(algorithm, finite):
    """A subclass may keep some; these algorithms have none."""
    state = algorithm.initial_state()
    assert state.memory == ()
    outcome = StepOutcome(finite, 1.0)
    assert outcome.largest is None
    assert not algorithm.uses_largest
    assert algorithm.update(state, outcome).memory == ()
    kept = algorithm.update(state._replace(memory=(3.0, 5.0)), outcome)
    assert kept.memory == (3.0, 5.0)


def zero():
    return tf.constant(0, tf.int64)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_scale_stays_within_its_bounds_for_ever(jit_compile):
    algorithm = DynamicLossScale(growth_interval=1)

    @tf.function(jit_compile=jit_compile)
    def run(state, finite):
        def step(_, *state):
            outcome = StepOutcome(finite, 1.0)
            return (_ + 1, *algorithm.update(LossScaleState(*state), outcome))

        return tf.while_loop(lambda step, *_: step < 1000, step, (0, *state))[
            1:
        ]

    start = LossScaleState(tf.constant(2.0**15), zero(), zero())
    top = run(start, tf.constant(True))
    assert float(top[0]) == algorithm.maximum
    bottom = run(LossScaleState(*top), tf.constant(False))
    assert float(bottom[0]) == algorithm.minimum
    assert float(run(LossScaleState(*bottom), tf.constant(True))[0]) > 1


def test_bounds_hold_where_the_product_overflows_float32():
    algorithm = DynamicLossScale(
        initial=2.0**127, maximum=lib.FLOAT32_MAX, growth_interval=1
    )
    state = LossScaleState(tf.constant(2.0**127), zero(), zero())
    state = algorithm.update(state, StepOutcome(True, 1.0))
    assert float(state.scale) == lib.FLOAT32_MAX


@pytest.mark.parametrize("algorithm", [FixedLossScale(48.0), NoLossScale()])
def test_fixed_scales_never_move_but_count(algorithm):
    state = algorithm.initial_state()
    for finite, good, bad in [(True, 1, 0), (False, 0, 1), (False, 0, 2)]:
        state = algorithm.update(state, StepOutcome(finite, 1.0))
        assert float(state.scale) == algorithm.initial
        assert (int(state.good_steps), int(state.bad_steps)) == (good, bad)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_config_round_trip(algorithm):
    config = algorithm.get_config()
    copy = dict(config)
    assert type(algorithm).from_config(config) == algorithm
    assert config == copy
    serialized = keras.saving.serialize_keras_object(algorithm)
    name = f"tfmixed>{type(algorithm).__name__}"
    assert serialized["registered_name"] == name
    assert lib.get(serialized) == algorithm
    assert hash(lib.get(serialized)) == hash(algorithm)


def test_custom_has_no_default_value():
    """So that the round trip cannot lose a field unseen."""
    default = DynamicLossScale()
    for field in dataclasses.fields(CUSTOM):
        assert getattr(CUSTOM, field.name) != getattr(default, field.name)


@pytest.mark.parametrize(
    ("identifier", "expected"),
    [
        ("dynamic", DynamicLossScale()),
        ("none", NoLossScale()),
        (None, NoLossScale()),
        (128, FixedLossScale(128.0)),
        (0.5, FixedLossScale(0.5)),
        (CUSTOM, CUSTOM),
    ],
)
def test_get(identifier, expected):
    assert lib.get(identifier) == expected


@pytest.mark.parametrize(
    ("identifier", "error", "message"),
    [
        ("dynamik", ValueError, 'Unknown loss scale "dynamik". Give "dynamic"'),
        ("128", ValueError, 'Unknown loss scale "128"'),
        (True, TypeError, "`loss_scale` is True of type bool"),
        ([1.0], TypeError, "`loss_scale` is [1.0] of type list"),
        (-2, ValueError, "`value` is -2.0, but it must be a finite number"),
        (0, ValueError, "`value` is 0.0"),
        (math.nan, ValueError, "`value` is nan"),
        (math.inf, ValueError, "`value` is inf"),
        (1e39, ValueError, "`value` is 1e+39"),
    ],
)
def test_get_rejects(identifier, error, message):
    with pytest.raises(error, match=re.escape(message)):
        lib.get(identifier)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial": -1.0}, "`initial` is -1.0"),
        ({"minimum": 0.0}, "`minimum` is 0.0"),
        ({"maximum": math.inf}, "`maximum` is inf"),
        (
            {"minimum": 64.0, "maximum": 8.0},
            "`minimum` (64.0) is above `maximum` (8.0). Swap them",
        ),
        ({"initial": 0.5}, "`initial` (0.5) is outside [1.0, 16777216.0]"),
        ({"initial": 2.0**25}, "is outside [1.0, 16777216.0]"),
        ({"growth_factor": 0.5}, "`growth_factor` is 0.5"),
        ({"backoff_factor": 1.0}, "`backoff_factor` is 1.0"),
        ({"growth_interval": 0}, "`growth_interval` is 0, but it counts"),
        ({"growth_interval": 2.5}, "`growth_interval` is 2.5"),
        ({"hysteresis": math.nan}, "`hysteresis` is nan"),
        ({"hysteresis": "2"}, "`hysteresis` is '2'"),
    ],
)
def test_dynamic_rejects(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DynamicLossScale(**arguments)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(math.inf, 4096.0), (0.0, 2.0), (math.nan, 96.0), (100.0, 100.0)],
)
def test_a_scale_from_elsewhere_is_brought_into_bounds(scale, expected):
    assert CUSTOM.clip(scale) == expected
    assert CUSTOM.at_floor(CUSTOM.clip(scale)) == (expected == 2.0)
