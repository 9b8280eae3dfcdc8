"""The update against stock Keras: every optimizer, every setting."""

import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import number
from support import numpy_of

import tfmixed

# No power of two: dividing by it rounds.
SCALE = 1000.0
# Large enough for a cluster.
SHAPES = ((800, 640), (3,))
STEPS = 6
WRAPPERS = ("Optimizer", "LossScaleOptimizer", "OptimizerMap", "MultiOptimizer")
# Found, not listed: an optimizer of a newer Keras is tested too.
OPTIMIZERS = {
    name: value
    for name, value in sorted(vars(keras.optimizers).items())
    if inspect.isclass(value)
    and issubclass(value, keras.optimizers.Optimizer)
    and name not in WRAPPERS
}
SETTINGS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "clipnorm": {"clipnorm": 0.5},
    "global_clipnorm": {"global_clipnorm": 0.5},
    "wide_clipnorm": {"global_clipnorm": 1e6},
    "clipvalue": {"clipvalue": 0.3},
    "ema": {"use_ema": True, "ema_overwrite_frequency": 3},
    "accumulation": {"gradient_accumulation_steps": 2, "clipnorm": 0.5},
    "schedule": {
        "learning_rate": keras.optimizers.schedules.ExponentialDecay(
            0.05, 2, 0.5
        )
    },
    "amsgrad": {"amsgrad": True},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "centered": {"centered": True},
    "centered_momentum": {"centered": True, "momentum": 0.9},
    "slow_rho": {"rho": 0.999},
    "slow_beta": {"beta_1": 0.999},
    "odd_betas": {"beta_1": 0.5, "beta_2": 0.9999, "epsilon": 1e-2},
}


def takes(cls, setting):
    base = inspect.signature(keras.optimizers.Optimizer.__init__).parameters
    own = inspect.signature(cls.__init__).parameters
    return all(name in own or name in base for name in setting)


CASES = [
    (name, setting)
    for name, cls in OPTIMIZERS.items()
    for setting, arguments in SETTINGS.items()
    if takes(cls, arguments)
]
ADAM_TAKES = {setting for name, setting in CASES if name == "Adam"}


def slow_cases(*cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def compiled_cases(*fast):
    """All, of which most are left to the long run.

    Eagerly each case is tested. What a graph may change is seen in each
    optimizer, and in each setting of one with a kernel and of one without.
    """
    chosen = {
        (name, setting)
        for name, setting in CASES
        if setting == "plain"
        or name in ("Adam", "Nadam")
        or setting not in ADAM_TAKES
    }
    rest = [case for case in CASES if case not in fast]
    return [
        *fast,
        *slow_cases(*(case for case in rest if case in chosen)),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in rest
            if case not in chosen
        ),
    ]


def make(name, setting="plain"):
    return OPTIMIZERS[name](**{"learning_rate": 0.01, **SETTINGS[setting]})


@functools.cache
def values():
    random = np.random.default_rng(0)
    return [random.normal(size=s) for s in SHAPES]


def weights(dtype="float32"):
    return [
        keras.Variable(value, dtype=dtype, name=f"w{i}")
        for i, value in enumerate(values())
    ]


# Of half a million numbers each, in most tests the same.
@functools.cache
def all_gradients(steps=STEPS, seed=1):
    random = np.random.default_rng(seed)
    return [
        [random.normal(size=s).astype("float32") for s in SHAPES]
        for _ in range(steps)
    ]


def stock(optimizer, variables, steps):
    """Stock Keras, eagerly, with gradients that were never scaled."""
    optimizer.build(variables)
    for gradients in steps:
        optimizer.apply([tf.constant(g) for g in gradients], variables)


def wrapped(optimizer, variables, how="eager", scale=SCALE):
    """Returns the wrapper and a step: a function of unscaled gradients."""
    wrapper = tfmixed.LossScaleOptimizer(optimizer, scale)
    wrapper.build(variables)

    def step(*gradients):
        # Says that the gradients are those of a scaled loss.
        wrapper.scale_loss(tf.constant(1.0))
        wrapper.apply([times(g, scale) for g in gradients], variables)

    if how != "eager":
        step = tf.function(step, jit_compile=how == "xla", autograph=False)
    return wrapper, step


def times(gradient, factor):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            gradient.values * factor, gradient.indices, gradient.dense_shape
        )
    return gradient * tf.cast(factor, gradient.dtype)


def check_close(actual, expected, rtol=1e-6, atol=1e-6):
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


def check_same(optimizer, variables, control, control_variables):
    rtol, atol = 1e-6, 1e-6
    if "Ftrl" in type(optimizer).__name__:
        # Differences of nearly equal numbers become the weights, so that the
        # last bit of a square root is seen, also between Keras and Keras.
        rtol, atol = 1e-4, 1e-4
    check_close(numpy_of(variables), numpy_of(control_variables), rtol, atol)
    # The kernel of Adam rounds `1 - beta_2` to float32.
    rtol = 3e-5 if "Adam" in type(optimizer).__name__ else max(rtol, 5e-6)
    check_close(
        numpy_of(optimizer.variables), numpy_of(control.variables), rtol, atol
    )


def run_against_stock(name, setting, how):
    """A bad step in the middle: it must leave no trace."""
    # Sums of gradients over steps may nearly cancel.
    exact = name == "Ftrl" or setting == "accumulation"
    scale = 1024.0 if exact else SCALE
    variables, others = weights(), weights()
    optimizer, control = make(name, setting), make(name, setting)
    steps = all_gradients()
    stock(control, others, steps)
    wrapper, step = wrapped(optimizer, variables, how, scale)
    for index, gradients in enumerate(steps):
        if index == 3:
            before = numpy_of(variables + optimizer.variables)
            bad = [g.copy() for g in gradients]
            bad[0][-1, -1] = np.inf
            step(*map(tf.constant, bad))
            after = numpy_of(variables + optimizer.variables)
            for one, other in zip(before, after, strict=True):
                np.testing.assert_array_equal(one, other)
        step(*map(tf.constant, gradients))
    assert number(wrapper.skipped_steps) == 1
    check_same(optimizer, variables, control, others)


def test_the_optimizers_are_found():
    assert {"SGD", "Adam", "Nadam", "Lion"} <= set(OPTIMIZERS)
    assert len(CASES) > 100


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_eager_like_stock(name, setting):
    run_against_stock(name, setting, "eager")


FEW = [
    ("SGD", "global_clipnorm"),
    ("SGD", "nesterov"),
    ("Adam", "clipnorm"),
    ("AdamW", "decay"),
    ("Nadam", "plain"),
    ("RMSprop", "schedule"),
]


@pytest.mark.parametrize(("name", "setting"), compiled_cases(*FEW))
def test_graph_like_stock(name, setting):
    run_against_stock(name, setting, "graph")


@pytest.mark.parametrize(("name", "setting"), compiled_cases(*FEW[:2]))
def test_xla_like_stock(name, setting):
    run_against_stock(name, setting, "xla")


def sparse_gradient(rows):
    return tf.IndexedSlices(
        tf.random.stateless_normal((3, 640), (1, 2)),
        tf.constant(rows),
        tf.constant(SHAPES[0]),
    )


@pytest.mark.parametrize("how", ["eager", "graph"])
# With a row that comes twice, and without one.
@pytest.mark.parametrize("rows", [[5, 7, 5], [7, 2, 5]])
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("SGD", "plain"),
        ("SGD", "momentum"),
        ("SGD", "nesterov"),
        ("SGD", "global_clipnorm"),
        ("Adam", "plain"),
        ("Adam", "decay"),
        ("AdamW", "clipnorm"),
        ("Adadelta", "plain"),
        *slow_cases(
            *(
                (name, "plain")
                for name in OPTIMIZERS
                if name not in ("SGD", "Adam", "Adadelta")
            )
        ),
    ],
)
def test_sparse_like_stock(name, setting, rows, how):
    variables, others = weights(), weights()
    optimizer, control = make(name, setting), make(name, setting)
    _, step = wrapped(optimizer, variables, how)
    control.build(others)
    dense = tf.constant([1.0, 2.0, -3.0])
    for _ in range(STEPS):
        try:
            control.apply([sparse_gradient(rows), dense], others)
        except (TypeError, ValueError, AttributeError):
            pytest.skip(f"{name} of Keras takes no sparse gradients")
        step(sparse_gradient(rows), dense)
    check_same(optimizer, variables, control, others)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_rows_that_come_and_go(name, amsgrad):
    kind = getattr(keras.optimizers, name)
    optimizer, control = (kind(0.01, amsgrad=amsgrad) for _ in range(2))
    variables, others = weights(), weights()
    _, step = wrapped(optimizer, variables, "graph")
    control.build(others)
    dense = tf.constant([1.0, 2.0, -3.0])
    for rows in ([5, 5, 5], [1, 5, 1], [1, 2, 3], [0, 0, 7], [7, 5, 7]):
        control.apply([sparse_gradient(rows), dense], others)
        step(sparse_gradient(rows), dense)
        check_same(optimizer, variables, control, others)


# EMA that overwrites is a merge call in a condition: in a graph stock Keras
# refuses. The scale is a power of two: sums over replicas may nearly cancel.
@pytest.mark.parametrize(
    ("name", "setting", "graph"),
    [
        ("SGD", "momentum", True),
        ("Adam", "global_clipnorm", True),
        ("AdamW", "ema", False),
        *slow_cases(
            ("SGD", "clipnorm", True),
            ("SGD", "momentum", False),
            ("Adam", "decay", True),
            ("Adam", "global_clipnorm", False),
            ("Nadam", "plain", True),
        ),
    ],
)
def test_two_replicas_like_stock(name, setting, graph, two_replicas):
    steps = [all_gradients(seed=s) for s in (1, 2)]
    results = []
    for scale in (None, 1024.0):
        with two_replicas.scope():
            variables = weights()
            optimizer = make(name, setting)
            if scale is None:
                optimizer.build(variables)
                outer = optimizer
            else:
                outer = tfmixed.LossScaleOptimizer(optimizer, scale)
                outer.build(variables)
        step = replica_step(outer, variables, scale)
        run = replica_run(two_replicas, step, graph)
        for pair in zip(*steps, strict=True):
            run(*two_replicas_values(two_replicas, pair))
        results.append((optimizer, variables))
    (control, others), (optimizer, variables) = results
    check_same(optimizer, variables, control, others)


def replica_step(optimizer, variables, scale):
    def step(*gradients):
        gradients = list(gradients)
        if scale is not None:
            optimizer.scale_loss(tf.constant(1.0))
            gradients = [g * scale for g in gradients]
        optimizer.apply(gradients, variables)

    return step


def replica_run(strategy, step, graph):
    def run(*gradients):
        strategy.run(step, args=gradients)

    return tf.function(run, autograph=False) if graph else run


def two_replicas_values(strategy, pair):
    return [
        strategy.experimental_distribute_values_from_function(
            lambda context, i=i: tf.constant(
                pair[context.replica_id_in_sync_group][i]
            )
        )
        for i in range(len(SHAPES))
    ]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "Nadam"])
def test_other_dtypes_take_the_way_of_keras(name, dtype):
    variables, others = weights(dtype), weights(dtype)
    optimizer, control = make(name, "decay"), make(name, "decay")
    _, step = wrapped(optimizer, variables, "eager", scale=1024.0)
    control.build(others)
    for gradients in all_gradients(3):
        gradients = [tf.cast(g, dtype) for g in gradients]
        step(*gradients)
        control.apply(gradients, others)
    check_close(
        [a.astype("float64") for a in numpy_of(variables)],
        [a.astype("float64") for a in numpy_of(others)],
    )


@pytest.mark.parametrize("how", ["eager", "graph"])
@pytest.mark.parametrize("setting", ["clipnorm", "global_clipnorm"])
def test_clipping_when_scaled_squares_overflow(setting, how):
    """1e17 times the scale has an infinite square, 1e17 has not."""
    variables, others = weights(), weights()
    optimizer, control = make("Adam", setting), make("Adam", setting)
    gradients = [tf.fill(s, 1e17) for s in SHAPES]
    stock(control, others, [gradients])
    wrapper, step = wrapped(optimizer, variables, how)
    step(*gradients)
    assert number(wrapper.last_step_finite)
    check_same(optimizer, variables, control, others)


def test_gradients_that_are_none_and_constraints():
    variables, others = weights(), weights()
    for pair in (variables, others):
        pair[0].constraint = keras.constraints.NonNeg()
    optimizer = make("SGD", "global_clipnorm")
    control = make("SGD", "global_clipnorm")
    gradient = tf.constant(all_gradients(1)[0][0])
    control.build(others)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        control.apply([gradient, None], others)
    outer = tfmixed.LossScaleOptimizer(optimizer, SCALE)
    outer.build(variables)
    outer.scale_loss(tf.constant(1.0))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        outer.apply([gradient * SCALE, None], variables)
    check_close(numpy_of(variables), numpy_of(others))
    assert numpy_of(variables)[0].min() >= 0
