"""The fewest float32 layers: planted, found, needed, and nothing harmed."""

import json
import math
import os
import pathlib
import random
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import support
import tensorflow as tf
from keras import layers

import tfmixed
from models.data import digits
from tfmixed import _keras
from tfmixed.audit import minimal as minimal_lib
from tfmixed.audit import minimal_bench
from tfmixed.audit import minimal_errors
from tfmixed.audit import minimal_units
from tfmixed.audit.minimal import minimal_float32
from tfmixed.audit.minimal_search import Search
from tfmixed.audit.minimal_units import Unit
from tfmixed.layers.twins import FASTER

F16 = "mixed_float16"
BF16 = "mixed_bfloat16"
LOSS = "sparse_categorical_crossentropy"
LARGE = 1e6
ROOT = pathlib.Path(tfmixed.__file__).parents[1]


def data(rows=32, width=8):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, width)).astype("float32")
    return x, generator.integers(0, 3, rows)


def find(model, tolerance=0.05, policy=F16, *, xy=None, **options):
    x, y = xy or data()
    options = {"loss": LOSS, "batches": 1, "verbose": False, **options}
    return minimal_float32(model, x, y, tolerance, policy=policy, **options)


def keys(found, default=F16):
    """The keys of a map, whose values are all float32."""
    assert isinstance(found, keras.dtype_policies.DTypePolicyMap)
    assert found.default_policy.name == default
    assert {found[key].name for key in found} <= {"float32"}
    return list(found)


def plain_step(model, x, y):
    """Outputs, and the gradient of each weight, by no code of the audit."""
    scale = 2.0**10 if tfmixed.model.computes_in_float16(model) else 1.0
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        exact = tf.cast(outputs, "float32")
        loss = keras.losses.sparse_categorical_crossentropy(y, exact)
        scaled = scale * tf.reduce_mean(loss)
    variables = [v.value for v in model.trainable_variables]
    gradients = tape.gradient(scaled, variables)
    parts = [np.ravel(g).astype("float64") / scale for g in gradients]
    return np.ravel(outputs).astype("float64"), np.concatenate(parts), *parts


def error(model, policy, x, y):
    """The error of what `prepare` makes, against the model in float32."""
    exact = plain_step(model, x, y)
    other = plain_step(tfmixed.prepare(model, policy), x, y)
    errors = [
        np.linalg.norm(b - a) / np.linalg.norm(a)
        for a, b in zip(exact, other, strict=True)
        if np.linalg.norm(a) > 0.01 * np.linalg.norm(exact[1])
    ]
    return max(errors) if np.all(np.isfinite(errors)) else math.inf


def check_needed(model, found, tolerance=0.05, xy=None):
    """The map is enough, and not one entry of it can be spared."""
    x, y = xy or data()
    assert error(model, found, x, y) <= tolerance
    for left_out in found:
        fewer = keras.dtype_policies.DTypePolicyMap(
            found.default_policy.name,
            {key: found[key] for key in found if key != left_out},
        )
        assert error(model, fewer, x, y) > tolerance


def prepared_for(monkeypatch):
    """A list of the policies that `prepare` is called with from now on."""
    policies = []
    prepare = minimal_bench.prepare

    def note(model, policy):
        policies.append(policy)
        return prepare(model, policy)

    monkeypatch.setattr(minimal_bench, "prepare", note)
    return policies


def dtypes(model):
    return minimal_units.dtypes_by_path(model, minimal_units.paths_of(model))


def enlarge(*found, by=LARGE):
    for layer in found:
        layer.kernel.assign(layer.kernel * by)


def block(x, name):
    """Dense, and a normalization that makes its scale of no account."""
    x = layers.Dense(8, name=name)(x)
    return layers.LayerNormalization(name=f"{name}_norm")(x)


def chain(*names, **options):
    inputs = x = keras.Input((8,))
    for name in names:
        x = block(x, name)
    x = layers.Dense(3, activation="softmax", name="head")(x)
    return keras.Model(inputs, x, **options)


@keras.saving.register_keras_serializable("test_audit_minimal")
class Block(layers.Layer):
    """A custom layer around two of Keras."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(8, name="dense")
        self.norm = layers.LayerNormalization(name="norm")

    def build(self, shape):
        self.dense.build(shape)
        self.norm.build((*shape[:-1], 8))
        self.built = True

    def call(self, x):
        return self.norm(self.dense(x))


@keras.saving.register_keras_serializable("test_audit_minimal")
class Scaled(Block):
    """A weight of its own is too large for float16."""

    def build(self, shape):
        self.scale = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(LARGE)
        )
        super().build(shape)

    def call(self, x):
        return self.norm(self.dense(x) * self.scale)


@keras.saving.register_keras_serializable("test_audit_minimal")
class Subclassed(keras.Model):
    """A model whose layers only its own code knows."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = Block(name="first")
        self.second = Block(name="second")
        self.head = layers.Dense(3, activation="softmax", name="head")

    def call(self, x):
        return self.head(self.second(self.first(x)))


def subclassed(**options):
    model = Subclassed(**options)
    model(data()[0])
    return model


def test_a_model_that_needs_nothing_gets_an_empty_map(capsys):
    model = chain("a", "b")
    found = find(model, tolerance=0.1, policy=BF16, verbose=True)
    assert keys(found, BF16) == []
    printed = capsys.readouterr().out
    assert "None of 4 layers has to be in float32." in printed
    assert "on 32 rows, tolerance 0.1, 1 measurement:" in printed


def test_the_layer_that_overflows_is_found_and_no_other():
    model = chain("a", "b", "c", "d")
    enlarge(model.get_layer("c"))
    x, y = data()
    assert error(model, F16, x, y) == math.inf
    found = find(model)
    assert keys(found) == ["c"]
    check_needed(model, found)


def test_two_planted_layers_are_both_found():
    model = chain("a", "b", "c", "d", "e")
    enlarge(model.get_layer("b"), model.get_layer("e"), by=1e5)
    found = find(model)
    assert keys(found) == ["b", "e"]
    check_needed(model, found)


@pytest.mark.slow
def test_an_overflow_among_many_layers_takes_few_measurements(capsys):
    inputs = keras.Input((8,))
    x = layers.Dense(8, name="first")(inputs)
    for i in range(12):
        x = layers.Add(name=f"add{i}")([x, block(x, f"layer{i}")])
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(x))
    enlarge(model.get_layer("layer7"))
    found = find(model, tolerance=0.1, verbose=True)
    assert keys(found) == ["layer7"]
    printed = capsys.readouterr().out
    (count,) = re.findall(r"(\d+) measurements", printed)
    # There are 25 layers.
    assert int(count) < 25


def test_a_tight_tolerance_in_bfloat16_takes_more_layers():
    model = chain("a", "b", "c")
    x, y = data()
    before = error(model, BF16, x, y)
    few = find(model, tolerance=before * 0.8, policy=BF16)
    many = find(model, tolerance=1e-6, policy=BF16)
    assert 0 < len(few) <= len(many)
    assert {"a", "b", "c"} <= set(keys(many, BF16))
    check_needed(model, few, before * 0.8)


def test_an_overflow_in_the_second_batch_counts():
    model = chain("a", "b", "c")
    x, y = data()
    # The rows of arrays are dealt out to the batches in turn.
    x[1::2] *= LARGE
    xy = (x, y)
    found = find(model, xy=xy, batches=2, batch_size=16)
    assert keys(found) == ["a"]
    check_needed(model, found, xy=xy)


def test_nested_sequential_and_shared_layers():
    inner_inputs = keras.Input((8,))
    inner = keras.Model(inner_inputs, block(inner_inputs, "deep"), name="in")
    row = keras.Sequential(
        [keras.Input((8,)), layers.Dense(8, name="flat"), Block(name="own")],
        name="row",
    )
    shared = layers.Dense(8, name="shared")
    normal = layers.LayerNormalization(name="normal")
    inputs = keras.Input((8,))
    x = normal(shared(normal(shared(row(inner(inputs))))))
    head = layers.Dense(3, activation="softmax", name="head")
    model = keras.Model(inputs, head(x))
    enlarge(inner.get_layer("deep"), shared, row.get_layer("own").dense)
    found = find(model)
    assert set(keys(found)) == {"in/deep", "row/own/dense", "shared"}
    check_needed(model, found)


def test_a_sequential_model():
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(8, name="a"),
            layers.LayerNormalization(),
            layers.Dense(8, name="b"),
            layers.LayerNormalization(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    enlarge(model.get_layer("a"))
    found = find(model)
    assert keys(found) == ["a"]
    check_needed(model, found)


def test_a_subclassed_model():
    model = subclassed()
    enlarge(model.second.dense)
    found = find(model)
    assert keys(found) == ["second/dense"]
    check_needed(model, found)


def test_a_custom_layer_is_kept_whole_where_its_own_code_needs_it():
    inputs = keras.Input((8,))
    x = Scaled(name="scaled")(Block(name="block")(inputs))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(x))
    found = find(model)
    assert keys(found) == ["scaled"]
    check_needed(model, found)


def test_layers_that_build_makes_without_a_name_are_found():
    @keras.saving.register_keras_serializable("test_audit_minimal")
    class Late(Block):
        def __init__(self, **kwargs):
            layers.Layer.__init__(self, **kwargs)

        def build(self, shape):
            self.dense, self.norm = layers.Dense(8), layers.LayerNormalization()
            super().build(shape)

    inputs = keras.Input((8,))
    x = Late(name="second")(Late(name="first")(inputs))
    head = layers.Dense(3, activation="softmax", name="head")
    model = keras.Model(inputs, head(x))
    enlarge(model.get_layer("second").dense)
    found = find(model)
    late = model.get_layer("second").dense.name
    assert keys(found) == [f"second/{late}"]
    check_needed(model, found)


def test_what_is_inside_a_composite_layer_of_keras_counts_with_it(monkeypatch):
    policies = prepared_for(monkeypatch)
    inputs = keras.Input((4, 8))
    attention = layers.MultiHeadAttention(2, 4, name="attention")
    x = layers.LayerNormalization()(attention(inputs, inputs))
    x = layers.Bidirectional(layers.GRU(4), name="both")(x)
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(x))
    x, y = data(width=32)
    xy = (x.reshape(-1, 4, 8), y)
    found = find(model, tolerance=1e-6, xy=xy)
    assert {"attention", "both"} <= set(keys(found))
    # What was switched in place is what `prepare` makes: one proof is enough.
    assert len(policies) == 2
    prepared = tfmixed.prepare(model, found)
    assert type(prepared.get_layer("attention")) is layers.MultiHeadAttention
    assert {x.compute_dtype for x in _keras.flatten_layers(prepared)} == {
        "float32",
        # The model itself and its input compute nothing.
        *(x.compute_dtype for x in (prepared, prepared.layers[0])),
    }


def test_layers_of_one_name_count_as_one_where_a_map_cannot_tell_them():
    inputs = keras.Input((8,))
    x = Block(name="block")(inputs)
    x = layers.LayerNormalization()(layers.Dense(8, name="dense")(x))
    head = layers.Dense(3, activation="softmax", name="head")
    model = keras.Model(inputs, head(x))
    enlarge(model.get_layer("block").dense)
    assert keys(find(model)) == ["block/dense"]
    enlarge(model.get_layer("block").dense, by=1 / LARGE)
    enlarge(model.get_layer("dense"))
    found = find(model)
    assert keys(found) == ["dense"]
    check_needed(model, found)
    prepared = tfmixed.prepare(model, found)
    assert prepared.get_layer("block").dense.compute_dtype == "float32"


def test_a_layer_that_custom_layers_share_has_all_its_paths_in_the_key():
    shared = layers.Dense(8, name="shared")

    class Holder(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.shared = shared

        def call(self, x):
            return self.shared(x)

    class Both(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.first, self.second = Holder(name="one"), Holder(name="two")
            self.norm = layers.LayerNormalization(name="norm")
            self.head = layers.Dense(3, activation="softmax", name="head")

        def call(self, x):
            return self.head(self.norm(self.second(self.norm(self.first(x)))))

    model = Both()
    model(data()[0])
    enlarge(shared)
    found = find(model)
    assert keys(found) == ["one/shared|two/shared"]
    check_needed(model, found)


def test_special_characters_in_a_name_are_escaped():
    model = chain("a.b", "a_b", "c(1)+")
    enlarge(model.get_layer("a.b"), model.get_layer("c(1)+"), by=1e5)
    found = find(model)
    assert keys(found) == [r"a\.b", r"c\(1\)\+"]
    assert found["a.b"].name == "float32"
    assert found["a_b"].name == F16
    check_needed(model, found)


def test_code_that_takes_its_own_dtype_only_is_prepared_anew_each_time():
    class Own(keras.Model):
        """TensorFlow multiplies what comes in with a weight of its own."""

        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = layers.Dense(8, name="dense")
            self.head = layers.Dense(3, activation="softmax", name="head")

        def build(self, shape):
            self.matrix = self.add_weight(shape=(8, 8), name="matrix")
            self.dense.build(shape)
            self.head.build((None, 8))

        def call(self, x):
            return self.head(tf.matmul(self.dense(x), self.matrix))

    model = Own()
    x, y = data()
    model(x)
    enlarge(model.dense)
    model.matrix.assign(model.matrix / LARGE)
    found = find(model)
    assert keys(found) == ["dense"]
    check_needed(model, found)


def test_prepare_makes_of_the_map_what_was_measured(monkeypatch):
    measured = []
    errors = minimal_bench.Bench.errors

    def note(self, kept, *args):
        result = errors(self, kept, *args)
        names = tuple(unit.key for unit in kept)
        measured.append((names, dtypes(self._copy)))
        return result

    monkeypatch.setattr(minimal_bench.Bench, "errors", note)
    model = chain("a", "b", "c", "d")
    enlarge(model.get_layer("b"), by=1e5)
    found = find(model)
    prepared = dtypes(tfmixed.prepare(model, found))
    assert prepared["b"] == [(str(layers.Dense), "float32")]
    assert prepared["c"] == [(str(FASTER[layers.Dense]), F16)]
    assert prepared in [d for names, d in measured if names == ("b",)]


def test_where_prepare_does_otherwise_each_measurement_is_exact(monkeypatch):
    policies = prepared_for(monkeypatch)
    monkeypatch.setattr(
        minimal_bench, "dtypes_by_path", lambda *args: {"": object()}
    )
    model = chain("a", "b")
    enlarge(model.get_layer("b"), by=1e5)
    assert keys(find(model)) == ["b"]
    # The copy, the first proof, and from then on each measurement.
    assert len(policies) > 4


def test_entries_of_a_policy_map_stay_and_count_first_as_before():
    model = chain("a", "b", "c")
    enlarge(model.get_layer("b"), by=1e5)
    given = keras.dtype_policies.DTypePolicyMap(
        F16, {"c": keras.DTypePolicy("float32"), "head": keras.DTypePolicy(F16)}
    )
    found = find(model, policy=given)
    assert list(found) == ["b", "c", "head"]
    assert [found[key].name for key in found] == ["float32", "float32", F16]
    assert list(given) == ["c", "head"]


def everything(model):
    """All that is part of a model, and of the randomness around it."""
    optimizer = model.optimizer
    return (
        support.numpy_of(model.variables + model.metrics_variables),
        support.numpy_of(optimizer.variables),
        [
            (type(layer), _keras.layer_policy(layer), layer.trainable)
            for layer in _keras.flatten_layers(model)
        ],
        optimizer,
        dict(vars(model)),
        random.getstate(),
    )


def check_unharmed(before, after):
    support.check_untouched(before[0], after[0])
    support.check_untouched(before[1], after[1])
    for one, other in zip(before[2], after[2], strict=True):
        assert one[0] is other[0]
        assert one[1] is other[1]
        assert one[2] == other[2]
    assert before[3] is after[3]
    assert before[4].keys() == after[4].keys()
    assert before[5] == after[5]


def trained(model):
    x, y = data()
    model.compile("adam", loss=LOSS, metrics=["accuracy"])
    model.train_on_batch(x, y)
    return model


def busy():
    """A model with all kinds of state."""
    inputs = keras.Input((8,))
    x = layers.BatchNormalization()(layers.Dense(8, name="a")(inputs))
    x = layers.Dropout(0.5, seed=1, name="dropout")(x)
    x = block(x, "b")
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(x))
    enlarge(model.get_layer("b"))
    return trained(model)


class Uncopyable(Subclassed):
    """No configuration tells of the function, so it is converted in place."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.head(self.function(self.second(self.first(x))))

    def get_config(self):
        raise NotImplementedError


def uncopyable():
    model = Uncopyable(lambda x: x * 1.0)
    model(data()[0])
    enlarge(model.first.dense)
    return trained(model)


@pytest.mark.parametrize("build", [busy, uncopyable])
def test_the_model_is_unharmed(build):
    model = build()
    x, y = data()
    outputs = model.predict(x, verbose=0)
    before = everything(model)
    found = find(model, tolerance=0.2, loss=None)
    assert len(found) > 0
    check_unharmed(before, everything(model))
    np.testing.assert_array_equal(model.predict(x, verbose=0), outputs)
    # It goes on training as if nothing had happened.
    assert np.isfinite(model.train_on_batch(x, y)).all()


@pytest.mark.parametrize("build", [busy, uncopyable])
def test_an_interrupted_search_leaves_the_model_unharmed(build, monkeypatch):
    model = build()
    compare, calls = minimal_errors.compare, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return compare(*args)

    before = everything(model)
    monkeypatch.setattr(minimal_bench, "compare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        find(model, loss=None)
    check_unharmed(before, everything(model))


class Interrupting(layers.Layer):
    """Interrupts where it is called in 16 bits for the third time."""

    calls = 0

    def call(self, x):
        if tf.executing_eagerly() and self.compute_dtype == "float16":
            Interrupting.calls += 1
            if Interrupting.calls > 2:
                raise KeyboardInterrupt
        return x


def test_an_interrupt_from_within_a_layer_leaves_the_model_unharmed():
    inputs = keras.Input((8,))
    x = Interrupting(name="interrupting")(block(inputs, "a"))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(x))
    enlarge(model.get_layer("a"))
    trained(model)
    before = everything(model)
    with pytest.raises(KeyboardInterrupt):
        find(model)
    check_unharmed(before, everything(model))


def test_dropout_drops_the_same_in_each_precision():
    inputs = keras.Input((8,))
    x = layers.Dropout(0.5, name="dropout")(block(inputs, "a"))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(x))
    assert keys(find(model, tolerance=0.1, policy=BF16), BF16) == []


def test_gradients_count_and_not_only_outputs():
    """The slope underflows in float16 where the output does not."""
    inputs = keras.Input((8,))
    x = layers.Dense(8, name="small")(inputs)
    x = layers.Dense(8, name="large")(x)
    model = keras.Model(inputs, layers.Dense(1, name="head")(x))
    enlarge(model.get_layer("small"), by=1e-8)
    enlarge(model.get_layer("large"), by=1e4)
    x, y = data()
    options = {"xy": (x, y[:, None].astype("float32")), "loss": "mse"}
    found = find(model, tolerance=0.05, **options)
    assert "small" in keys(found)


def test_a_loss_scale_that_overflows_is_lowered_as_in_training():
    model = chain("a", "b")

    def steep(y, p):
        return 1e3 * keras.ops.mean(p[:, 0])

    assert keys(find(model, loss=steep)) == []
    model.compile(tfmixed.LossScaleOptimizer("sgd", 2.0**24), loss=steep)
    # A fixed one is not lowered, and its layers have to bear it.
    assert len(find(model, loss=None)) > 0


def test_the_compiled_loss_is_used_and_a_stand_in_without_one(capsys):
    model = chain("a")
    x, y = data()
    minimal_float32(model, x, policy=BF16, tolerance=0.5)
    assert "The loss is a stand-in" in capsys.readouterr().out
    model.compile("sgd", loss=LOSS)
    minimal_float32(model, x, y, policy=BF16, tolerance=0.5)
    printed = capsys.readouterr().out
    assert "The loss is the loss that the model was compiled with" in printed
    assert "on 32 rows" in printed
    minimal_float32(model, x, y, policy=BF16, tolerance=0.5, loss=LOSS)
    assert "The loss is the loss that was given" in capsys.readouterr().out


def test_the_loss_of_a_model_with_a_compile_of_its_own_is_used(capsys):
    class Own(Subclassed):
        def compile(self, loss):
            super().compile("sgd", loss=loss)

    model = Own()
    x, y = data()
    model(x)
    model.compile(LOSS)
    minimal_float32(model, x, y, policy=BF16, tolerance=0.5)
    assert "The loss is the loss that was given" in capsys.readouterr().out


def test_the_summary_tells_what_was_measured(capsys):
    model = chain("a", "b", name="judged")
    enlarge(model.get_layer("b"))
    find(model, verbose=True)
    printed = capsys.readouterr()
    assert "Model 'judged' in mixed_float16 against float32" in printed.out
    assert "As `prepare` makes it: outputs not finite" in printed.out
    assert "of 4 layers in float32: outputs 0.0" in printed.out
    assert re.search(r"In float32: .*b\.\n", printed.out)
    assert "It took" in printed.out
    find(model)
    assert capsys.readouterr().out == ""


def test_at_the_limit_the_best_so_far_is_enough(capsys):
    model = chain("a", "b", "c", "d")
    enlarge(model.get_layer("c"))
    found = find(model, limit=3, verbose=True)
    assert "The limit was reached" in capsys.readouterr().out
    x, y = data()
    assert error(model, found, x, y) <= 0.05
    assert "c" in keys(found)


def test_a_model_that_is_not_built_is_built_by_its_data():
    model = keras.Sequential([layers.Dense(8), layers.Dense(3, "softmax")])
    assert keys(find(model, policy=BF16, tolerance=0.2), BF16) == []
    assert model.built


@pytest.mark.slow
def test_real_digits_in_a_dataset():
    (images, labels), _ = digits()
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(8, 3, name="one")(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Conv2D(8, 3, activation="relu", name="two")(x)
    x = layers.BatchNormalization()(x)
    x = layers.Dense(10, activation="softmax")(layers.Flatten()(x))
    model = keras.Model(inputs, x)
    model.compile("adam", loss=LOSS)
    model.fit(images, labels, epochs=1, batch_size=64, verbose=0)
    enlarge(model.get_layer("two"))
    rows = tf.data.Dataset.from_tensor_slices((images, labels)).batch(32)
    found = minimal_float32(
        model, rows, tolerance=0.05, policy=BF16, verbose=False
    )
    x, y = images[:32], labels[:32]
    assert error(model, found, x, y) <= 0.05
    keys(found, BF16)


def test_the_map_keeps_as_json_in_a_fresh_process(tmp_path):
    model = chain("a.b", "c")
    enlarge(model.get_layer("a.b"))
    found = find(model)
    text = json.dumps(keras.saving.serialize_keras_object(found))
    (tmp_path / "map.json").write_text(text)
    model.save(tmp_path / "model.keras")
    script = (
        "import json, keras, tfmixed\n"
        "text = open('map.json').read()\n"
        "found = keras.saving.deserialize_keras_object(json.loads(text))\n"
        "model = keras.models.load_model('model.keras')\n"
        "prepared = tfmixed.prepare(model, found)\n"
        "print([layer.compute_dtype for layer in prepared.layers[1:]])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    prepared = tfmixed.prepare(model, found)
    expected = [layer.compute_dtype for layer in prepared.layers[1:]]
    assert "float16" in expected
    assert done.stdout.strip() == str(expected)


@pytest.mark.parametrize("tolerance", [0, -1.0, math.nan, math.inf, "small"])
def test_the_tolerance_has_to_be_a_number_above_0(tolerance):
    with pytest.raises(ValueError, match=r"`tolerance` got .*above 0"):
        find(chain("a"), tolerance=tolerance)


@pytest.mark.parametrize("name", ["batch_size", "batches", "limit"])
def test_counts_have_to_be_1_or_more(name):
    with pytest.raises(ValueError, match=f"`{name}` got 0. Expected 1"):
        find(chain("a"), **{name: 0})


def test_other_misuse_is_told():
    with pytest.raises(TypeError, match="expects a Keras model. Received: 3"):
        find(3)
    with pytest.raises(ValueError, match="the policy is float32"):
        find(chain("a"), policy="float32")
    inputs = keras.Input((8,), batch_size=64)
    model = keras.Model(inputs, layers.Dense(3)(inputs))
    with pytest.raises(ValueError, match="no batch of 64 rows"):
        find(model)


def test_a_loss_without_targets_is_told():
    model, (x, _) = chain("a"), data()
    with pytest.raises(ValueError, match="a loss, but no targets"):
        minimal_float32(model, x, loss=LOSS)
    model.compile("sgd", loss=LOSS)
    with pytest.raises(ValueError, match="a loss, but no targets"):
        minimal_float32(model, x)


def test_what_is_not_finite_in_float32_is_told():
    model = chain("a")
    x, y = data()
    x[3, 2] = np.nan
    with pytest.raises(ValueError, match="in float32, too, .* not finite"):
        find(model, xy=(x, y))


def test_a_model_that_gives_another_result_each_time_is_told():
    inputs = keras.Input((8,))

    class Noise(layers.Layer):
        def call(self, x):
            return x + tf.random.normal(tf.shape(x), dtype=x.dtype)

    x = layers.Dense(3, activation="softmax")(Noise()(inputs))
    with pytest.raises(ValueError, match="gives another result each time"):
        find(keras.Model(inputs, x))


def test_where_no_layer_helps_it_is_told_what_was_reached(monkeypatch):
    model = chain("a", "b")
    enlarge(model.get_layer("b"))
    monkeypatch.setattr(minimal_bench, "units_of", lambda *args: [])
    with pytest.raises(
        ValueError, match="with all layers in float32"
    ) as caught:
        find(model)
    assert "outputs not finite" in str(caught.value)
    assert "tolerance of 0.05" in str(caught.value)
    assert 'try policy="mixed_bfloat16"' in str(caught.value)


class World:
    """Units of which some are culprits, with errors that add up."""

    def __init__(self, count, errors, wholes=()):
        self.units = [
            Unit(str(i), str(i), frozenset({i}), frozenset({i}))
            for i in range(count)
        ]
        for index, inside in enumerate(wholes):
            own = frozenset({1000 + index, *inside})
            self.units.append(Unit(f"w{index}", f"w{index}", own, own))
        self.errors = errors
        self.count = 0

    def measure(self, kept, quick):
        self.count += 1
        inside = {layer for unit in kept for layer in unit.layers}
        return math.hypot(
            *(e for i, e in self.errors.items() if i not in inside)
        )

    def search(self, tolerance=0.5, limit=10_000):
        search = Search(self.measure, tolerance, limit)
        search.run(self.units)
        return search, {unit.key for unit in search.best}


@pytest.mark.parametrize("culprits", [(0,), (99,), (50, 51), (3, 40, 77, 98)])
def test_culprits_are_found_in_fewer_measurements_than_layers(culprits):
    world = World(100, dict.fromkeys(culprits, math.inf))
    search, kept = world.search()
    assert kept == {str(i) for i in culprits}
    assert search.is_complete
    assert world.count < 100


def test_of_many_small_errors_the_largest_are_kept():
    generator = np.random.default_rng(3)
    errors = dict(enumerate(generator.uniform(0.01, 0.2, 60)))
    world = World(60, errors)
    search, kept = world.search()
    assert search.is_complete
    assert world.count < 110
    chosen = [unit for unit in world.units if unit.key in kept]
    assert world.measure(chosen, False) <= 0.5
    for unit in chosen:
        fewer = [other for other in chosen if other is not unit]
        assert world.measure(fewer, False) > 0.5
    # The best there is: the largest ones, until the rest is small enough.
    ordered = sorted(errors.values(), reverse=True)
    best = next(k for k in range(60) if math.hypot(*ordered[k:]) <= 0.5)
    assert len(kept) <= best * 1.1


def test_all_layers_are_kept_if_all_are_needed():
    world = World(30, dict.fromkeys(range(30), 1.0))
    search, kept = world.search()
    assert len(kept) == 30
    assert search.is_complete
    assert world.count < 1.5 * 30


def test_what_turns_out_not_to_be_needed_is_given_back_in_the_end():
    class Masking(World):
        """Unit 1 rounds what unit 0 has rounded already, if it has."""

        def measure(self, kept, quick):
            inside = {layer for unit in kept for layer in unit.layers}
            hidden = {1} if 0 not in inside else set()
            self.count += 1
            return math.hypot(
                *(e for i, e in self.errors.items() if i not in inside | hidden)
            )

    _, kept = Masking(4, {0: 0.1, 1: 0.6, 2: 0.9}).search()
    assert kept == {"2"}


def test_a_whole_is_kept_only_if_nothing_in_it_is_enough():
    _, kept = World(9, {4: 1.0}, wholes=[(3, 4), (5, 6)]).search()
    assert kept == {"4"}
    _, kept = World(9, {1000: 1.0, 8: 1.0}, wholes=[(3, 4), (5, 6)]).search()
    assert kept == {"w0", "8"}
    _, kept = World(9, {1000: 1.0, 4: 1.0}, wholes=[(3, 4), (5, 6)]).search()
    assert kept == {"w0"}


def test_the_limit_ends_a_search_with_what_is_known_to_do():
    world = World(100, {17: math.inf})
    search, kept = world.search(limit=12)
    assert not search.is_complete
    assert world.count == 12
    assert "17" in kept
    assert len(kept) < 100


def test_errors_are_those_of_the_formula():
    def step(outputs, *gradients):
        def tensor(value):
            return None if value is None else tf.constant(value, "float64")

        paths = [f"w{i}" for i in range(len(gradients))]
        parts = [tensor(g) for g in gradients]
        return minimal_errors.Step([tensor(o) for o in outputs], parts, paths)

    exact = step([[3.0, 4.0], [1.0]], [[6.0], [8.0]], [1e-4], None)
    other = step([[3.0, 4.5], [1.2]], [[6.0], [7.0]], [2e-4], None)
    found = minimal_errors.compare(exact, other)
    assert found.outputs == pytest.approx(0.2)
    # A gradient that is negligible counts in the whole vector only.
    assert found.gradient == pytest.approx(0.1)
    assert (found.weight, found.weight_path) == (pytest.approx(0.1), "w0")
    assert minimal_errors.compare(exact, exact).worst == 0.0
    for bad in (math.nan, math.inf):
        one = step([[3.0, bad], [1.0]], [[6.0], [8.0]], [1e-4], None)
        assert minimal_errors.compare(exact, one).outputs == math.inf
        one = step([[3.0, 4.0], [1.0]], [[6.0], [bad]], [1e-4], None)
        found = minimal_errors.compare(exact, one)
        assert (found.outputs, found.gradient) == (0.0, math.inf)
        assert found.worst == math.inf
    zero, tiny = step([[0.0]], [[1.0]]), step([[1e-9]], [[1.0]])
    assert minimal_errors.compare(zero, tiny).outputs == math.inf
    worse = minimal_errors.Errors(0.1, 0.5, 0.6, "w1")
    both = minimal_errors.Errors(0.2, 0.4, 0.5, "w0") | worse
    assert both == minimal_errors.Errors(0.2, 0.5, 0.6, "w1")


def test_progress_is_shown_on_a_terminal_only(monkeypatch, capsys):
    def shown(visible=True):
        with minimal_lib._shown(visible) as tick:
            tick(3)
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    assert shown() == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "3 measurements" in shown()
    assert shown(visible=False) == ""
