"""The models that the benchmarks train, in Keras.

Each builder returns a model under the global dtype policy, and knows nothing
of tfmixed. `torch_workloads.py` has the same models for PyTorch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
from keras import layers
from peer_data import DATA
from peer_data import FEATURES
from peer_data import IMAGE
from peer_data import NUM_CLASSES
from peer_data import ROWS
from peer_data import SEQUENCE
from peer_data import VOCABULARY


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its data and its optimizer.

    Attributes:
        title: What it is, for the tables.
        build: Returns the Keras model.
        data: Returns `(x, y)` for a batch size, from a fixed seed.
        batch: The batch size.
        optimizer: Returns the Keras optimizer.
    """

    title: str
    build: Callable[[], keras.Model]
    data: Callable[[int], tuple[Any, Any]]
    batch: int
    optimizer: Callable[[], keras.optimizers.Optimizer]


def mlp() -> keras.Model:
    inputs = keras.Input((1024,))
    x = inputs
    for _ in range(4):
        x = layers.Dense(2048, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, dtype="float32")(x))


def cnn() -> keras.Model:
    def conv(x: Any, filters: int) -> Any:
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        return layers.ReLU()(layers.BatchNormalization()(x))

    inputs = keras.Input(IMAGE)
    x = conv(inputs, 64)
    for filters in (64, 128, 256):
        x = layers.MaxPooling2D()(conv(conv(x, filters), filters))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, dtype="float32")(x))


def transformer() -> keras.Model:
    inputs = keras.Input((SEQUENCE,), dtype="int32")
    # Of a symbolic input: the layer would be no part of the model otherwise.
    positions = keras.ops.zeros_like(inputs[0]) + keras.ops.arange(SEQUENCE)
    x = layers.Embedding(VOCABULARY, 256)(inputs)
    x = x + layers.Embedding(SEQUENCE, 256)(positions)
    for _ in range(3):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 64)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(1024, activation="gelu")(y)
        x = x + layers.Dense(256)(y)
    x = layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(VOCABULARY, dtype="float32")(x))


def resnet50() -> keras.Model:
    model = keras.applications.ResNet50(
        weights=None, input_shape=IMAGE, classes=NUM_CLASSES
    )
    # Logits, as in the other models.
    return keras.Model(
        model.input,
        layers.Dense(NUM_CLASSES, dtype="float32")(model.layers[-2].output),
    )


def embedding() -> keras.Model:
    inputs = keras.Input((1,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(ROWS, 32)(inputs))
    x = layers.Dense(64, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, dtype="float32")(x))


def lstm() -> keras.Model:
    inputs = keras.Input((SEQUENCE, FEATURES))
    x = layers.LSTM(256, return_sequences=True)(inputs)
    x = layers.LSTM(256)(x)
    return keras.Model(inputs, layers.Dense(NUM_CLASSES, dtype="float32")(x))


def _adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam()


def _sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.01, momentum=0.9)


WORKLOADS = {
    "mlp": Workload("MLP", mlp, *DATA["mlp"], _adam),
    "cnn": Workload("CNN", cnn, *DATA["cnn"], _adam),
    "transformer": Workload(
        "Transformer", transformer, *DATA["transformer"], _adam
    ),
    "resnet50": Workload("ResNet-50", resnet50, *DATA["resnet50"], _sgd),
    "embedding": Workload("Embedding", embedding, *DATA["embedding"], _adam),
    "lstm": Workload("LSTM", lstm, *DATA["lstm"], _adam),
}


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
