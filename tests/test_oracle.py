"""The guarded step against a control that never sees the bad batches.

A stock Keras model trains on the good batches only; a `tfmixed.Model` with the
same weights trains on all of them. Afterwards they have to agree in weights,
optimizer slots, normalization statistics and metrics, and the scale and the
counters have to be what a closed form says.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import batches
from support import number
from support import numpy_of
from support import slow
from support import small_model
from support import train_on

import tfmixed

INITIAL, INTERVAL = 64.0, 3
STEPS = 12
BAD = (2, 3, 8)
OPTIMIZERS = {
    "sgd": lambda **kw: keras.optimizers.SGD(0.05, momentum=0.9, **kw),
    "adam": lambda **kw: keras.optimizers.Adam(0.01, **kw),
    "adamw": lambda **kw: keras.optimizers.AdamW(0.01, **kw),
    "adafactor": lambda **kw: keras.optimizers.Adafactor(0.01, **kw),
}

NAMES = ["sgd", "adam", *slow("adamw", "adafactor")]


def expected_scales():
    """The scale after each step, from runs of good and bad steps."""
    scale, run, scales = INITIAL, 0, []
    for step in range(STEPS):
        if step in BAD:
            scale, run = scale / 2, 0
        else:
            run += 1
            if run % INTERVAL == 0:
                scale *= 2
        scales.append(scale)
    return scales


def test_expected_scales_is_the_closed_form():
    # Runs of good steps: 0-1, 4-7, 9-11; one growth in each of the last two.
    assert expected_scales()[-1] == INITIAL * 2.0**2 * 0.5 ** len(BAD)


def pair(name, strategy=None, compile_arguments=None, **optimizer_arguments):
    """A stock Keras control and a tfmixed model with the same weights."""
    scope = strategy.scope() if strategy else contextlib.nullcontext()
    with scope:
        control = small_model(keras.Model)
        model = small_model(tfmixed.Model)
        model.set_weights(control.get_weights())
        scale = tfmixed.DynamicLossScale(
            initial=INITIAL, growth_interval=INTERVAL
        )
        optimizer = tfmixed.LossScaleOptimizer(
            OPTIMIZERS[name](**optimizer_arguments), scale
        )
        for one, how in (
            (control, OPTIMIZERS[name](**optimizer_arguments)),
            (model, optimizer),
        ):
            one.compile(
                how, "mse", metrics=["mae"], **(compile_arguments or {})
            )
    return control, model


def check_same(control, model):
    for name in ("trainable_variables", "non_trainable_variables"):
        for expected, actual in zip(
            numpy_of(getattr(control, name)),
            numpy_of(getattr(model, name)),
            strict=True,
        ):
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
    inner = model.optimizer.inner_optimizer
    for expected, actual in zip(
        numpy_of(control.optimizer.variables),
        numpy_of(inner.variables),
        strict=True,
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def check_counters(model, steps=STEPS):
    done = [step for step in BAD if step < steps]
    optimizer = model.optimizer
    assert number(optimizer.dynamic_scale) == expected_scales()[steps - 1]
    assert number(optimizer.skipped_steps) == len(done)
    assert number(optimizer.last_step_finite) == (steps - 1 not in BAD)
    in_a_row = 0
    while steps - 1 - in_a_row in BAD:
        in_a_row += 1
    assert number(optimizer.consecutive_skips) == in_a_row


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "how",
    [{"run_eagerly": True}, {}, *slow({"jit_compile": True})],
    ids=["eager", "graph", "xla"],
)
def test_step_by_step(name, how):
    control, model = pair(name, compile_arguments=how)
    for step, (x, y) in enumerate(batches(STEPS, bad=BAD)):
        logs = train_on(model, x, y)
        if step in BAD:
            # `train_on_batch` reports this batch alone: no loss is known.
            assert np.isnan(logs["loss"])
            assert logs["mae"] == 0.0
        else:
            expected = train_on(control, x, y)
            assert logs == pytest.approx(expected, rel=1e-5)
        check_same(control, model)
        check_counters(model, step + 1)
        assert number(model.optimizer.iterations) == number(
            control.optimizer.iterations
        )


@pytest.mark.parametrize(
    ("name", "steps_per_execution", "value"),
    [("adam", 1, np.nan), ("sgd", 4, np.nan), ("adam", 4, 3e38)]
    + [
        pytest.param(name, steps, value, marks=pytest.mark.slow)
        for name in OPTIMIZERS
        for steps in (1, 4)
        for value in (np.nan, np.inf, -np.inf)
    ],
)
def test_fit(name, steps_per_execution, value):
    how = {"steps_per_execution": steps_per_execution}
    control, model = pair(name, compile_arguments=how)
    everything = batches(STEPS, bad=BAD, value=value)
    good = [batch for i, batch in enumerate(everything) if i not in BAD]
    expected = control.fit(dataset(good), shuffle=False, verbose=0).history
    with pytest.warns(UserWarning, match="3 of 12 training steps were skipped"):
        history = model.fit(
            dataset(everything), shuffle=False, verbose=0
        ).history
    for key, values in expected.items():
        assert history[key] == pytest.approx(values, rel=1e-5), key
    check_same(control, model)
    check_counters(model)


def dataset(pairs):
    x, y = (np.concatenate(part) for part in zip(*pairs, strict=True))
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8)


@pytest.mark.parametrize("name", NAMES)
def test_accumulation(name):
    control, model = pair(name, gradient_accumulation_steps=3)
    for step, (x, y) in enumerate(batches(STEPS, bad=BAD)):
        model.train_on_batch(x, y)
        if step not in BAD:
            control.train_on_batch(x, y)
        check_same(control, model)
        check_counters(model, step + 1)


@pytest.mark.parametrize("name", ["adam", *slow("sgd", "adamw", "adafactor")])
def test_two_replicas(name, two_replicas):
    control, model = pair(name, two_replicas)
    # Half of each batch goes to each replica: steps 2 and 8 are bad on the
    # first one only, step 3 on the second one only.
    everything = batches(STEPS, bad=BAD)
    everything[3] = batches(STEPS, bad=BAD, bad_row=7)[3]
    good = [batch for i, batch in enumerate(everything) if i not in BAD]
    expected = control.fit(dataset(good), shuffle=False, verbose=0).history
    with pytest.warns(UserWarning, match="3 of 12 training steps were skipped"):
        history = model.fit(
            dataset(everything), shuffle=False, verbose=0
        ).history
    for key, values in expected.items():
        assert history[key] == pytest.approx(values, rel=1e-5), key
    check_same(control, model)
    check_counters(model)
    for variable in model.trainable_variables:
        first, second = (v.numpy() for v in variable.value.values)
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("bad_row", [0, 7], ids=["replica 0", "replica 1"])
def test_stock_keras_lets_replicas_decide_alone(bad_row, two_replicas):
    """Why the flag is reduced: what the same case does in stock Keras."""
    with two_replicas.scope():
        model = small_model(keras.Model)
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(), INITIAL
        )
        model.compile(optimizer, "mse")
    model.fit(
        dataset(batches(1, bad=(0,), bad_row=bad_row)), shuffle=False, verbose=0
    )
    finite = all(np.isfinite(w).all() for w in model.get_weights()[:2])
    assert finite == (bad_row == 0)
