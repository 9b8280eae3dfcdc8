"""Which way the update takes, and that it leaves no trace."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common.variables import AutocastScope

import tfmixed
from tfmixed.fast import update

SHAPE = (800, 640)
GRADIENT = np.full(SHAPE, 2.0, "float32")


def pair(optimizer):
    variable = keras.Variable(np.ones(SHAPE), dtype="float32")
    wrapper = tfmixed.LossScaleOptimizer(optimizer, 1024.0)
    wrapper.build([variable])
    return wrapper, variable


def stepper(optimizer, gradient=GRADIENT):
    wrapper, variable = pair(optimizer)

    def step(gradient):
        wrapper.scale_loss(tf.constant(1.0))
        wrapper.apply([gradient], [variable])

    return step, variable


def nodes_of(optimizer, gradient=GRADIENT):
    """The operations of one step, those of all its functions included."""
    step, _ = stepper(optimizer)
    traced = tf.function(step, autograph=False)
    definition = traced.get_concrete_function(gradient).graph.as_graph_def()
    functions = definition.library.function
    compiled = any("_XlaMustCompile" in f.attr for f in functions)
    nodes = list(definition.node)
    for function in functions:
        nodes.extend(function.node_def)
    return {node.op for node in nodes}, compiled


opt = keras.optimizers


@pytest.mark.parametrize(
    ("optimizer", "kernel"),
    [
        (lambda: opt.SGD(), "ResourceApplyGradientDescent"),
        (lambda: opt.SGD(momentum=0.9), "ResourceApplyKerasMomentum"),
        (lambda: opt.Adam(), "ResourceApplyAdam"),
        (lambda: opt.Adam(amsgrad=True), "ResourceApplyAdamWithAmsgrad"),
        (lambda: opt.AdamW(), "ResourceApplyAdam"),
        (lambda: opt.Adamax(), "ResourceApplyAdaMax"),
        (lambda: opt.Adadelta(), "ResourceApplyAdadelta"),
        (lambda: opt.RMSprop(momentum=0.9), "ResourceApplyRMSProp"),
    ],
)
def test_one_kernel_a_weight(optimizer, kernel):
    operations, compiled = nodes_of(optimizer())
    assert kernel in operations
    assert not compiled


@pytest.mark.parametrize(
    "optimizer", [opt.Nadam, opt.Lion, opt.Adagrad, opt.RMSprop]
)
def test_one_cluster(optimizer):
    operations, compiled = nodes_of(optimizer())
    assert compiled
    assert not any(name.startswith("ResourceApply") for name in operations)


class OwnAdam(keras.optimizers.Adam):
    def update_step(self, gradient, variable, learning_rate):
        self.assign(variable, tf.zeros_like(gradient))


class OwnNadam(keras.optimizers.Nadam):
    pass


class OwnSchedule(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return tf.numpy_function(lambda: np.float32(0.5), [], tf.float32)


def test_a_subclass_runs_its_own_code():
    step, variable = stepper(OwnAdam())
    step(tf.constant(GRADIENT))
    np.testing.assert_array_equal(variable, 0.0)


def test_a_method_of_the_instance_is_respected():
    optimizer = keras.optimizers.SGD()
    step, variable = stepper(optimizer)

    def update_step(gradient, variable, learning_rate):
        variable.assign(tf.zeros_like(gradient))

    vars(optimizer)["update_step"] = update_step
    step(tf.constant(GRADIENT))
    np.testing.assert_array_equal(variable, 0.0)
    assert vars(optimizer)["update_step"] is update_step


@pytest.mark.parametrize(
    "optimizer", [lambda: OwnNadam(), lambda: opt.Nadam(OwnSchedule())]
)
def test_a_users_code_is_not_compiled(optimizer):
    assert not nodes_of(optimizer())[1]


@pytest.mark.parametrize("setting", [{}, {"global_clipnorm": 1.0}])
def test_no_trace_is_left(setting):
    optimizer = keras.optimizers.AdamW(weight_decay=0.1, **setting)
    config = optimizer.get_config()
    step, _ = stepper(optimizer)
    names = set(vars(optimizer))
    step(tf.constant(GRADIENT))
    assert set(vars(optimizer)) - names <= {"_exclude_from_weight_decay_cache"}
    assert optimizer.get_config() == config


def test_no_trace_is_left_by_an_error():
    optimizer = keras.optimizers.Adam()
    wrapper, variable = pair(optimizer)
    wrapper.scale_loss(tf.constant(1.0))
    other = keras.Variable(np.ones(SHAPE))
    with pytest.raises(ValueError, match="Unknown variable"):
        wrapper.apply([tf.constant(GRADIENT)], [other])
    assert "update_step" not in vars(optimizer)


def test_a_sparse_gradient_touches_its_rows_only():
    gradient = tf.IndexedSlices(
        tf.ones((2, 640)), tf.constant([1, 3]), tf.constant(SHAPE)
    )
    wrapper, variable = pair(keras.optimizers.SGD())

    @tf.function(autograph=False)
    def step(values):
        wrapper.scale_loss(tf.constant(1.0))
        slices = tf.IndexedSlices(
            values, gradient.indices, gradient.dense_shape
        )
        wrapper.apply([slices], [variable])

    definition = step.get_concrete_function(gradient.values).graph.as_graph_def(
        add_shapes=True
    )
    graphs = [definition.node] + [
        f.node_def for f in definition.library.function
    ]
    sizes = [
        shape.dim[0].size
        for nodes in graphs
        for node in nodes
        for shape in node.attr["_output_shapes"].list.shape
        if len(shape.dim) == 2
    ]
    assert sizes
    assert SHAPE[0] not in sizes


def test_inside_an_autocast_scope():
    variable = keras.Variable(np.ones(SHAPE), dtype="float32")
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build([variable])
    with AutocastScope("float16"):
        gradient = tf.constant(GRADIENT)
        update.apply(optimizer, [gradient], [variable], None, tf.norm(gradient))
        assert variable.dtype == "float16"
    np.testing.assert_array_equal(variable, 0.0)
