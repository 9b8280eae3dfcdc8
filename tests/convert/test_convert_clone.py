import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras import ops

from tfmixed import _keras
from tfmixed.convert.clone import CopyError
from tfmixed.convert.clone import copy_layer
from tfmixed.convert.clone import copy_state
from tfmixed.layers.twins import INSIDE
from tfmixed.layers.twins import TWINS

X = np.random.default_rng(0).normal(size=(3, 5, 4)).astype("float32")
ROW = X[:, 0]
WORDS = tf.constant([["a", "c", "zz"]])


def twice(x):
    return x * 2.0


def scale(factor):
    def scaled(x):
        return x * factor

    return scaled


def shouted(text):
    return tf.strings.upper(text)


class Halves(keras.initializers.Initializer):
    """Never registered, nor is the next."""

    def __call__(self, shape, dtype=None):
        return ops.full(shape, 0.5, dtype=dtype)

    def get_config(self):
        return {}


class Penalty(keras.regularizers.Regularizer):
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, weight):
        return self.factor * ops.sum(ops.abs(weight))

    def get_config(self):
        return {"factor": self.factor}


class NonPositive(keras.constraints.Constraint):
    def __call__(self, weight):
        return -ops.abs(weight)

    def get_config(self):
        return {}


class Plain(layers.Layer):
    """A constructor without `**kwargs`, and the `get_config` of Keras."""

    def __init__(self, units=3):
        super().__init__()
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units))

    def call(self, x):
        return ops.matmul(x, self.kernel)


class Own(Plain):
    """As before, with a `get_config` of its own that says all."""

    def get_config(self):
        return {**super().get_config(), "units": self.units}


class Short(Plain):
    """As before, with a `get_config` that says only its own."""

    def get_config(self):
        return {"units": self.units}


class Composite(layers.Layer):
    def __init__(self, units=4, **options):
        super().__init__(**options)
        self.units = units
        self.first = layers.Dense(units, activation=twice)
        self.second = layers.BatchNormalization()
        self.rest = [layers.Dense(units), layers.Dropout(0.5)]

    def call(self, x):
        x = self.second(self.first(x))
        for layer in self.rest:
            x = layer(x)
        return x

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def copied(layer, x=X):
    """The copy, built by a symbolic call as in a functional model."""
    copy = copy_layer(layer)
    if not copy.built:
        shape, dtype = tuple(x.shape), keras.backend.standardize_dtype(x.dtype)
        copy(keras.KerasTensor((None, *shape[1:]), dtype))
    copy_state(layer, copy)
    return copy


def variables(layer):
    return [ops.convert_to_numpy(v) for v in layer.variables]


def check_same(layer, copy, x=X):
    """The same in all that a person could see, and nothing shared."""
    assert copy is not layer
    assert type(copy) is type(layer)
    assert copy.dtype_policy.name == layer.dtype_policy.name
    ours, theirs = _keras.flatten_layers(layer), _keras.flatten_layers(copy)
    assert [type(one) for one in ours] == [type(one) for one in theirs]
    assert [one.trainable for one in ours] == [one.trainable for one in theirs]
    assert not {id(one) for one in ours} & {id(one) for one in theirs}
    assert not {id(v) for v in layer.variables} & {
        id(v) for v in copy.variables
    }
    frozen = [[v.trainable for v in one.variables] for one in (layer, copy)]
    assert frozen[0] == frozen[1]
    for one, other in zip(variables(layer), variables(copy), strict=True):
        np.testing.assert_array_equal(one, other)
    for found, expected in zip(
        keras.tree.flatten(copy(x)), keras.tree.flatten(layer(x)), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def called(layer, x=X):
    layer(x)
    return layer


def drawn(layer):
    """With weights that no initializer would draw again."""
    layer(X)
    generator = np.random.default_rng(7)
    for variable in layer.weights:
        draws = generator.uniform(0.1, 0.9, size=variable.shape)
        variable.assign(ops.cast(draws, variable.dtype))
    return layer


LAYERS = {
    "Dense": lambda: layers.Dense(3, "tanh", name="mine"),
    "mixed": lambda: layers.Dense(3, dtype="mixed_bfloat16"),
    "without bias": lambda: layers.EinsumDense("abc,cd->abd", (5, 2)),
    "Conv1D": lambda: layers.Conv1D(2, 3, dilation_rate=2, padding="same"),
    "BatchNormalization": lambda: layers.BatchNormalization(momentum=0.5),
    "Bidirectional": lambda: layers.Bidirectional(layers.GRU(2)),
    "TimeDistributed": lambda: layers.TimeDistributed(layers.Dense(2)),
    "RNN": lambda: layers.RNN([layers.LSTMCell(2), layers.GRUCell(3)]),
    "spectral": lambda: layers.SpectralNormalization(layers.Dense(2)),
    "a function": lambda: layers.Dense(3, activation=twice),
    "a lambda": lambda: layers.Dense(3, activation=lambda x: x * 3.0),
    "a closure": lambda: layers.Conv1D(3, 2, activation=scale(4.0)),
    "an activation layer": lambda: layers.Activation(scale(-1.0)),
    "an activation that is a layer": lambda: layers.Dense(
        3, activation=layers.LeakyReLU(0.3)
    ),
    "two closures": lambda: layers.LSTM(
        3, activation=scale(0.5), recurrent_activation=scale(0.1)
    ),
    "two lambdas": lambda: layers.GRU(
        3,
        activation=lambda x: x * 0.5,
        recurrent_activation=lambda x: x * 0.1,
    ),
    "a Lambda with two": lambda: layers.Lambda(
        lambda x: x * 3.0, mask=lambda inputs, mask: mask
    ),
    "a function inside": lambda: layers.TimeDistributed(
        layers.Dense(3, activation=scale(2.0))
    ),
    "initializers": lambda: layers.Dense(
        3, kernel_initializer=Halves(), bias_initializer="ones"
    ),
    "an initializer that is a function": lambda: layers.Dense(
        3, kernel_initializer=lambda shape, dtype=None: ops.ones(shape, dtype)
    ),
    "a regularizer": lambda: layers.Dense(3, kernel_regularizer=Penalty(0.3)),
    "a constraint": lambda: layers.Dense(3, bias_constraint=NonPositive()),
    "no keywords": lambda: Plain(5),
    "no keywords, a config": lambda: Own(5),
    "no keywords, a short config": lambda: Short(5),
    "a composite": lambda: Composite(3, name="block"),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_copy_is_the_same(kind):
    layer = drawn(LAYERS[kind]())
    before = variables(layer)
    copy = copied(layer)
    check_same(layer, copy)
    for one, other in zip(before, variables(layer), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["Dense", "a composite", "no keywords"])
def test_a_copy_is_not_built(kind):
    assert copy_layer(drawn(LAYERS[kind]())).weights == []


@pytest.mark.parametrize(
    "layer",
    [
        layers.Dense(2, name="mine"),
        Plain(),
        Own(),
        layers.Lambda(twice, name="mine"),
        Composite(name="mine"),
    ],
)
def test_a_copy_has_the_name(layer):
    layer.name = "mine"
    assert copy_layer(layer).name == "mine"


def test_a_copy_keeps_what_it_was_configured_with():
    layer = called(
        layers.Dense(
            3,
            activation=twice,
            kernel_regularizer=Penalty(0.25),
            kernel_constraint=NonPositive(),
        )
    )
    copy = copied(layer)
    assert copy.activation is twice
    assert copy.kernel_regularizer.factor == 0.25
    assert isinstance(copy.kernel_constraint, NonPositive)
    assert float(copy.losses[0]) == float(layer.losses[0]) > 0


def test_two_functions_of_one_name_are_not_mistaken_for_each_other():
    """A copy may be refused; a wrong one must not be given."""
    cells = [
        layers.SimpleRNNCell(4, activation=scale(factor))
        for factor in (2.0, -3.0)
    ]
    for layer in (
        layers.RNN(layers.StackedRNNCells(cells)),
        layers.RNN(
            layers.LSTMCell(
                4, activation=scale(5.0), recurrent_activation=scale(0.5)
            )
        ),
    ):
        drawn(layer)
        try:
            copy = copied(layer)
        except CopyError:
            continue
        check_same(layer, copy)


def test_two_classes_of_one_name_are_not_mistaken_for_each_other():
    def penalty(factor):
        class Local(keras.regularizers.Regularizer):
            def __call__(self, weight):
                return factor * ops.sum(weight)

            def get_config(self):
                return {}

        return Local()

    layer = drawn(
        layers.Dense(
            2, kernel_regularizer=penalty(1.0), bias_regularizer=penalty(9.0)
        )
    )
    try:
        copy = copied(layer)
    except CopyError:
        return
    losses = [[float(x) for x in one.losses] for one in (layer, copy)]
    assert losses[0] == losses[1]


def test_a_lambda_keeps_its_function():
    factor = 3.0
    layer = layers.Lambda(
        lambda x, shift: x * factor + shift,
        arguments={"shift": 2.0},
        name="mine",
        dtype="mixed_float16",
    )
    copy = copied(layer)
    check_same(layer, copy)
    assert copy.function is layer.function
    assert copy.arguments == {"shift": 2.0}
    factor = 4.0
    check_same(layer, copy)


def test_copying_says_nothing_about_lambdas():
    layer = called(layers.Dense(2, activation=lambda x: x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied(layer)


@pytest.mark.parametrize("stock", sorted(TWINS, key=str) + [layers.Softmax])
def test_a_twin_is_copied_as_the_layer_of_keras(stock):
    options = {
        layers.MultiHeadAttention: {"num_heads": 1, "key_dim": 2},
        layers.GroupQueryAttention: {
            "head_dim": 2,
            "num_query_heads": 2,
            "num_key_value_heads": 1,
        },
    }
    layer = stock(**options.get(stock, {}), dtype="mixed_bfloat16", name="it")
    twin = {**TWINS, **INSIDE}[stock]
    layer.__class__ = twin
    copy = copy_layer(layer)
    assert type(copy) is stock
    assert copy.name == "it"
    assert copy.dtype_policy.name == "mixed_bfloat16"
    assert type(layer) is twin


def test_a_twin_of_a_lambda_is_copied_as_one_of_keras():
    layer = layers.Lambda(scale(2.0))
    layer.__class__ = INSIDE[layers.Lambda]
    copy = copy_layer(layer)
    assert type(copy) is layers.Lambda
    np.testing.assert_array_equal(copy(X), 2.0 * X)


def test_an_operation_is_copied():
    x = keras.KerasTensor((2, 4), "float32")
    operation = ops.reshape(x, (4, 2))._keras_history.operation
    copy = copy_layer(operation)
    assert copy is not operation
    assert copy.newshape == operation.newshape
    assert copy(x).shape == (4, 2)


class NoConfig(layers.Layer):
    """Takes what no configuration can hold."""

    def __init__(self, function):
        super().__init__(name="no_config")
        self.function = function

    def call(self, x):
        return self.function(x)


class Raises(Plain):
    def get_config(self):
        raise RuntimeError("no\n   such\nthing")


class Forgets(layers.Layer):
    """Its configuration leaves out what it needs."""

    def __init__(self, units, **options):
        super().__init__(**options)

    def get_config(self):
        return {"name": self.name}

    def call(self, x):
        return x


class Lies(layers.Layer):
    """Its configuration has what its constructor does not take."""

    def __init__(self, units=3):
        super().__init__()

    def get_config(self):
        return {"units": 3}

    @classmethod
    def from_config(cls, config):
        return cls(unit=config["units"])

    def call(self, x):
        return x


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            lambda: NoConfig(twice),
            "'no_config' (NoConfig) cannot be made again from its "
            "configuration (NotImplementedError: ",
        ),
        (
            Raises,
            "'raises' (Raises) cannot be made again from its configuration "
            "(RuntimeError: no such thing)",
        ),
        (
            lambda: Forgets(3, name="f"),
            "'f' (Forgets) cannot be made again from its configuration (",
        ),
        (
            Lies,
            "'lies' (Lies) cannot be made again from its configuration "
            "(TypeError: ",
        ),
        (
            lambda: layers.Dense(2, activation=functools.partial(twice)),
            "'dense' (Dense) cannot be made again from its configuration (",
        ),
    ],
)
def test_what_cannot_be_copied_is_an_error_in_one_line(layer, message):
    with pytest.raises(CopyError) as raised:
        copied(called(layer()))
    assert str(raised.value).startswith(message)
    assert len(str(raised.value)) < 400
    assert "\n" not in str(raised.value)


def test_a_state_that_does_not_fit():
    one = called(layers.Dense(3, name="one"), ROW)
    other = called(layers.Dense(4), ROW)
    before = variables(other)
    with pytest.raises(CopyError) as raised:
        copy_state(one, other)
    assert str(raised.value).startswith("the copy of 'one' (Dense) has 1 layer")
    for found, expected in zip(variables(other), before, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_state_with_other_layers():
    one = called(Composite(name="block"), ROW)
    other = called(Composite(), ROW)
    other.first._layers.append(layers.Flatten())
    with pytest.raises(CopyError) as raised:
        copy_state(one, other)
    assert str(raised.value) == (
        "the copy of 'block' (Composite) has 6 layers and "
        f"{len(other.variables)} variables, not 5 and {len(one.variables)}"
    )


def test_what_is_frozen_inside_stays_so():
    layer = called(Composite())
    layer.first.trainable = False
    layer.rest[1].trainable = False
    check_same(layer, copied(layer))
    layer = called(Composite())
    layer.trainable = False
    layer.second.trainable = True
    copy = copied(layer)
    check_same(layer, copy)
    assert not copy.trainable
    assert copy.second.trainable


def test_a_single_frozen_variable_stays_frozen():
    layer = called(layers.Dense(3), ROW)
    layer.kernel.trainable = False
    copy = copied(layer, ROW)
    check_same(layer, copy, ROW)
    assert len(copy.trainable_variables) == 1


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: layers.Dense(4), ROW),
        (lambda: layers.EinsumDense("ab,bc->ac", 4), ROW),
        (lambda: layers.Conv1D(4, 2), X),
        (lambda: layers.Embedding(9, 4), np.array([[1, 2]], "int32")),
    ],
)
def test_lora_weights_are_copied_bit_for_bit(make, x):
    layer = called(make(), x)
    layer.enable_lora(2)
    generator = np.random.default_rng(3)
    lora = [v for v in layer.trainable_weights if "lora" in v.name]
    assert len(lora) == 2
    for variable in lora:
        variable.assign(generator.normal(size=variable.shape))
    copy = copied(layer, x)
    assert copy.lora_enabled
    check_same(layer, copy, x)


def test_a_quantized_layer_stays_quantized():
    layer = called(layers.Dense(4), ROW)
    layer.quantize("int8")
    copy = copied(layer, ROW)
    check_same(layer, copy, ROW)
    assert copy.quantization_mode == "int8"


def adapted(layer, data):
    layer.adapt(data)
    return layer


NUMBERS = np.array([1, 5, 5, 7, 9, 9, 9])
SENTENCES = tf.constant(["a b", "b c", "c c d"])


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: adapted(layers.Normalization(), ROW * 100 + 7), ROW),
        (lambda: adapted(layers.Normalization(axis=None), ROW * 9), ROW),
        (lambda: layers.Normalization(mean=3.0, variance=2.0), ROW),
        (lambda: adapted(layers.Normalization(invert=True), ROW), ROW),
        (lambda: adapted(layers.Discretization(num_bins=3), ROW), ROW),
        (lambda: layers.Discretization([0.0, 1.0]), ROW),
        (
            lambda: adapted(
                layers.Discretization(num_bins=4, output_mode="one_hot"), ROW
            ),
            ROW[:, :1],
        ),
        (lambda: adapted(layers.IntegerLookup(), NUMBERS), NUMBERS[None]),
        (
            lambda: layers.IntegerLookup(vocabulary=[3, 9], num_oov_indices=2),
            NUMBERS[None],
        ),
        (lambda: adapted(layers.StringLookup(), SENTENCES), SENTENCES[None]),
        (lambda: layers.StringLookup(vocabulary=["a", "zz"]), WORDS),
        pytest.param(
            lambda: adapted(
                layers.StringLookup(output_mode="tf_idf"), WORDS[0][:, None]
            ),
            WORDS,
            marks=pytest.mark.skipif(
                keras.__version__ < "3.15",
                reason="this Keras cannot load what it saves of such a layer",
            ),
        ),
        (
            lambda: layers.StringLookup(
                vocabulary=["c", "a"],
                idf_weights=[0.1, 0.7],
                output_mode="tf_idf",
            ),
            WORDS,
        ),
        (
            lambda: adapted(
                layers.TextVectorization(output_sequence_length=4), SENTENCES
            ),
            SENTENCES[:, None],
        ),
        (
            lambda: adapted(
                layers.TextVectorization(standardize=shouted), SENTENCES
            ),
            SENTENCES[:, None],
        ),
        (
            lambda: adapted(
                layers.TextVectorization(output_mode="multi_hot", ngrams=2),
                SENTENCES,
            ),
            SENTENCES[:, None],
        ),
    ],
)
def test_what_was_adapted_stays_adapted(make, x):
    layer = make()
    expected = layer(x)
    copy = copied(layer, x)
    np.testing.assert_array_equal(copy(x), expected)
    np.testing.assert_array_equal(layer(x), expected)
    if hasattr(layer, "get_vocabulary"):
        assert copy.get_vocabulary() == layer.get_vocabulary()


@pytest.mark.parametrize("seed", [3, None])
@pytest.mark.parametrize(
    "make",
    [
        functools.partial(layers.Dropout, 0.5),
        functools.partial(layers.GaussianNoise, 0.5),
        functools.partial(layers.AlphaDropout, 0.3),
        functools.partial(layers.SpatialDropout1D, 0.5),
    ],
)
def test_a_copy_draws_on_where_the_original_is(make, seed):
    layer = make(seed=seed)
    for _ in range(3):
        layer(X, training=True)
    copy = copied(layer)
    for _ in range(2):
        np.testing.assert_array_equal(
            copy(X, training=True), layer(X, training=True)
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.LSTM(3, stateful=True),
        lambda: layers.RNN(layers.GRUCell(3), stateful=True),
        lambda: layers.Bidirectional(layers.GRU(3, stateful=True)),
    ],
)
def test_a_stateful_layer_goes_on_where_it_is(make):
    layer = called(called(make()))
    copy = copy_layer(layer)
    copy(X)
    copy_state(layer, copy)
    check_same(layer, copy)
    check_same(layer, copy)


class Ledger(layers.Layer):
    """Keeps something beside its variables, as a file would hold it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.total = 0.0

    def call(self, x):
        return x + self.total

    def save_own_variables(self, store):
        super().save_own_variables(store)
        store["total"] = np.array(self.total)

    def load_own_variables(self, store):
        self.total = float(np.array(store["total"]))


def test_what_a_layer_saves_itself_is_copied():
    layer = Ledger()
    layer.total = 2.5
    copy = copied(layer)
    assert copy.total == 2.5
    check_same(layer, copy)


class Vocabulary(layers.Layer):
    """Keeps something in a file of its own."""

    words = ("a",)

    def call(self, x):
        return x * len(self.words)

    def save_assets(self, folder):
        with open(f"{folder}/words.txt", "w") as file:
            file.write(" ".join(self.words))

    def load_assets(self, folder):
        with open(f"{folder}/words.txt") as file:
            self.words = tuple(file.read().split())


def test_what_a_layer_saves_as_a_file_is_copied():
    layer = Vocabulary()
    layer.words = ("b", "c", "d")
    copy = copied(layer)
    assert copy.words == ("b", "c", "d")
    check_same(layer, copy)


def test_a_state_may_have_been_rounded_before():
    """A copy made in float32 computes with the exact mean."""
    layer = layers.Normalization(dtype="mixed_float16")
    layer.adapt(ROW * 1000 + 1e5)
    copy = copied(layer, ROW)
    _keras.set_layer_policy(copy, keras.DTypePolicy("float32"))
    mean = (ROW.astype("float64") * 1000 + 1e5).mean(0)
    np.testing.assert_allclose(np.ravel(copy.mean), mean, rtol=1e-6)
