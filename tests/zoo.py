"""Small models of every kind, for the tests of `prepare` and `audit`.

Each function returns a float32 model and an input for it.
"""

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
package = keras.saving.register_keras_serializable(package="zoo")


def _x(*shape, scale=1.0):
    return np.random.default_rng(0).normal(0, scale, shape).astype("float32")


def _ids(*shape, below=5000):
    return np.random.default_rng(0).integers(below // 2, below, shape)


def dense():
    inputs = keras.Input((8,))
    x = layers.Dense(16, activation="relu")(inputs)
    x = layers.BatchNormalization()(x)
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(x)), _x(
        4, 8
    )


def sequential():
    model = keras.Sequential(
        [
            keras.Input((16, 8)),
            layers.Conv1D(8, 3, activation="relu"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(4),
            layers.Activation("softmax"),
        ]
    )
    return model, _x(4, 16, 8)


def nested_and_shared():
    inner_inputs = keras.Input((8,))
    inner = keras.Model(
        inner_inputs,
        layers.Dense(8, name="deep")(layers.LayerNormalization()(inner_inputs)),
        name="inner",
    )
    one, two = keras.Input((8,)), keras.Input((8,))
    shared = layers.Dense(4, name="shared")
    merged = layers.Dot(1)([shared(inner(one)), shared(inner(two))])
    outputs = [merged, layers.Dense(2)(shared(inner(one)))]
    return keras.Model([one, two], outputs), [_x(4, 8), _x(4, 8) + 1]


def nested_sequential():
    body = keras.Sequential([layers.Dense(8), layers.Dense(8)], name="body")
    inputs = keras.Input((8,))
    return keras.Model(inputs, layers.Dense(2)(body(inputs))), _x(4, 8)


def named_inputs_and_outputs():
    inputs = {name: keras.Input((8,), name=name) for name in ("a", "b")}
    x = layers.Concatenate()([inputs["a"], inputs["b"]])
    outputs = {
        "p": layers.Dense(2, name="p")(x),
        "q": layers.Dense(3, activation="sigmoid", name="q")(x),
    }
    return keras.Model(inputs, outputs), {"a": _x(4, 8), "b": _x(4, 8) * 2}


def operations():
    inputs = keras.Input((16, 8))
    x = layers.Dense(8)(inputs)
    x = keras.ops.mean(keras.ops.square(x), axis=1)
    x = keras.ops.where(x > 0.5, x, -1e9 * keras.ops.ones_like(x))
    x = keras.ops.softmax(x) * 0.5 + 1.0
    return keras.Model(inputs, layers.Dense(2)(x)), _x(4, 16, 8, scale=200)


def wrappers():
    inputs = keras.Input((16, 8))
    lstm = layers.LSTM(4, return_sequences=True)
    x = layers.Bidirectional(lstm)(inputs)
    x = layers.TimeDistributed(layers.Dense(3))(x)
    x = layers.SpectralNormalization(layers.Dense(4))(x)
    cells = layers.StackedRNNCells([layers.GRUCell(3), layers.LSTMCell(4)])
    return keras.Model(inputs, layers.Dense(2)(layers.RNN(cells)(x))), _x(
        4, 16, 8
    )


def attention():
    inputs = keras.Input((16, 8))
    x = layers.MultiHeadAttention(2, 32)(inputs, inputs)
    x = layers.GroupQueryAttention(16, 2, 1)(x, x)
    x = layers.Attention(use_scale=True)([x, x])
    x = layers.GlobalAveragePooling1D()(layers.Add()([inputs, x]))
    return keras.Model(inputs, layers.Dense(2)(x)), _x(4, 16, 8, scale=5)


def masked():
    inputs = keras.Input((16,), dtype="int32")
    x = layers.Embedding(10, 8, mask_zero=True)(inputs)
    x = layers.LSTM(4, return_sequences=True)(x)
    x = layers.MultiHeadAttention(2, 4)(x, x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(2)(x)), _ids(4, 16, below=10) % 8


def float_ids():
    inputs = keras.Input((16,))
    x = layers.Reshape((4, 4))(inputs)
    x = layers.Flatten()(layers.Embedding(5000, 8)(x))
    return keras.Model(inputs, layers.Dense(2)(x)), _ids(4, 16).astype(
        "float32"
    )


def preprocessing():
    data = _x(100, 8, scale=1000) + 5000
    normalization = layers.Normalization()
    normalization.adapt(data)
    inputs = keras.Input((8,))
    x = layers.Dense(4)(normalization(inputs))
    return keras.Model(inputs, layers.Dense(2)(x)), data[:4]


def lookup():
    table = layers.StringLookup()
    table.adapt(np.array(["a", "b", "c"]))
    inputs = keras.Input((1,), dtype="string")
    x = layers.Flatten()(layers.Embedding(5, 3)(table(inputs)))
    return keras.Model(inputs, layers.Dense(2)(x)), tf.constant([["a"], ["c"]])


def functions():
    weight = 2.0
    inputs = keras.Input((8,))
    x = layers.Lambda(lambda v: v * tf.constant(weight))(inputs)
    x = layers.Dense(4, activation=lambda v: v * 0.5)(x)
    return keras.Model(inputs, layers.Dense(2)(x)), _x(4, 8)


def lora():
    layer = layers.Dense(8)
    inputs = keras.Input((8,))
    x = layer(inputs)
    layer.enable_lora(2)
    layer.lora_kernel_b.assign(keras.ops.ones((2, 8)))
    return keras.Model(inputs, layers.Dense(2)(layers.Dense(4)(x))), _x(4, 8)


def quantized():
    inputs = keras.Input((8,))
    x = layers.Dense(4, name="quantized")(inputs)
    model = keras.Model(inputs, layers.Dense(2)(layers.Dense(4)(x)))
    model.get_layer("quantized").quantize("int8")
    return model, _x(4, 8)


@package
class InstanceNorm(layers.Layer):
    """Written by hand, in the precision of its input."""

    def call(self, x):
        mean = tf.reduce_mean(x, 1, keepdims=True)
        variance = tf.reduce_mean((x - mean) ** 2, 1, keepdims=True)
        return (x - mean) / tf.sqrt(variance + 1e-5)


def custom_norm():
    inputs = keras.Input((16, 8))
    x = InstanceNorm()(layers.Dense(8)(inputs))
    x = layers.Flatten()(x)
    return keras.Model(inputs, layers.Dense(2)(x)), _x(4, 16, 8, scale=300)


@package
class Block(layers.Layer):
    """A post-norm transformer block, as in many tutorials."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.attention = layers.MultiHeadAttention(2, 4)
        self.norm = layers.LayerNormalization()
        self.feed_forward = keras.Sequential(
            [layers.Dense(16, activation="relu"), layers.Dense(units)]
        )
        self.last_norm = layers.LayerNormalization()
        self.dropout = layers.Dropout(0.1)

    def call(self, x, training=False):
        x = self.norm(x + self.attention(x, x))
        y = self.dropout(self.feed_forward(x), training=training)
        return self.last_norm(x + y)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def custom_blocks():
    inputs = keras.Input((16, 8))
    x = layers.GlobalAveragePooling1D()(Block(8)(Block(8)(inputs)))
    return keras.Model(inputs, layers.Dense(5)(x)), _x(4, 16, 8)


@package
class Attention(layers.Layer):
    """Attention by hand, with a large negative number for a mask."""

    def build(self, shape):
        self.query, self.key, self.value = (
            layers.Dense(shape[-1], name=n) for n in ("query", "key", "value")
        )
        super().build(shape)

    def call(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = tf.matmul(q, k, transpose_b=True) / 8.0
        ones = tf.linalg.band_part(tf.ones_like(scores), -1, 0)
        return tf.matmul(tf.nn.softmax(scores - 1e9 * (1 - ones)), v)


def custom_attention():
    inputs = keras.Input((16, 8))
    x = layers.Flatten()(Attention()(layers.Dense(8)(inputs)))
    return keras.Model(inputs, layers.Dense(2)(x)), _x(4, 16, 8, scale=30)


@package
class Net(keras.Model):
    """Subclassed, with layers of every kind."""

    def __init__(self, units=16, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.first = layers.Dense(units, activation="relu")
        self.block = Block(units)
        self.pool = layers.GlobalAveragePooling1D()
        self.head = layers.Dense(3, activation="softmax")

    def call(self, x, training=False):
        x = self.block(self.first(x), training=training)
        return self.head(self.pool(x))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def subclassed():
    return Net(), _x(4, 16, 8)


@package
class Bags(keras.Model):
    """Ids as floats into an embedding; no `**kwargs` in its constructor."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(5000, 8)
        self.pool = layers.GlobalAveragePooling1D()
        self.head = layers.Dense(2)

    def call(self, ids):
        return self.head(self.pool(self.embedding(ids)))


def subclassed_float_ids():
    return Bags(), _ids(4, 16).astype("float32")


def subclassed_int_ids():
    return Bags(), _ids(4, 16)


@package
class Constants(keras.Model):
    """Constants of TensorFlow, which are float32 whatever the policy."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(8)
        self.head = layers.Dense(2)

    def call(self, x):
        x = self.hidden(x * tf.constant(3.0)) + tf.constant(1.0)
        return self.head(x)


def raw_constants():
    return Constants(), _x(4, 8)


@package
class Autoencoder(keras.Model):
    """Variational, with `add_loss` and random numbers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mean = layers.Dense(4)
        self.log_variance = layers.Dense(4)
        self.hidden = layers.Dense(8, activation="relu")
        self.decoder = layers.Dense(8)

    def call(self, x):
        mean, log_variance = self.mean(x), self.log_variance(x)
        divergence = 1 + log_variance - mean**2 - keras.ops.exp(log_variance)
        self.add_loss(-0.5 * keras.ops.mean(divergence))
        z = mean + keras.ops.exp(0.5 * log_variance) * 0.1
        return self.decoder(self.hidden(z))


def autoencoder():
    return Autoencoder(), _x(4, 8)


def without_config(hidden=8):
    """A model with a layer that cannot be made from its configuration."""

    class Closed(layers.Layer):
        def __init__(self, function, **kwargs):
            super().__init__(**kwargs)
            self.function = function
            self.dense = layers.Dense(hidden)

        def call(self, x):
            return self.function(self.dense(x))

    inputs = keras.Input((8,))
    x = Closed(lambda v: v * 2, name="closed")(layers.Dense(8)(inputs))
    return keras.Model(inputs, layers.Dense(2)(x)), _x(4, 8)


KINDS = [
    dense,
    sequential,
    nested_and_shared,
    nested_sequential,
    named_inputs_and_outputs,
    operations,
    wrappers,
    attention,
    masked,
    float_ids,
    preprocessing,
    lookup,
    functions,
    lora,
    quantized,
    custom_norm,
    custom_blocks,
    custom_attention,
    subclassed,
    subclassed_float_ids,
    subclassed_int_ids,
    raw_constants,
    autoencoder,
]
# Keras cannot load lambdas in safe mode, nor a model class whose constructor
# does not take `**kwargs`.
_NOT_SAVEABLE = (functions, subclassed_float_ids, subclassed_int_ids)
SAVEABLE = [kind for kind in KINDS if kind not in _NOT_SAVEABLE]
