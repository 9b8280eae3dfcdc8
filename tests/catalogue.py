"""All layers of Keras, each with inputs that show what float16 does to it.

`CASES` has at least one case of each layer class that Keras exports, or
`EXEMPT` says why there is none: `missing()` is empty.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable

import keras
import numpy as np
from keras import layers

# From little above the subnormals of float16 to little below its 65504.
MAGNITUDES = (1e-3, 1.0, 300.0, 3000.0, 60000.0)

VERSION = tuple(map(int, keras.__version__.split(".")[:2]))
OLDEST, NEWER = (3, 10), (3, 15)
BATCH = 2
SEED = 1
NAME = "probed"
# More than 2048, from where on float16 does not have every integer.
VOCABULARY = 5000
NUMBERS = list(range(1, VOCABULARY))
WORDS = [f"word{index}" for index in range(50)]
# What an input can hold, and the dtype that it arrives in.
KINDS = {
    "signed": "float32",
    "positive": "float32",
    "ids": "float32",
    "integers": "int32",
    "words": "string",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A layer, how a model calls it and what goes into that model.

    Args:
        name: The class, and after a hyphen what is special about the case.
        layer: Makes the layer, of the global policy, with the name "probed".
        shapes: Of the inputs, without the batch.
        kind: What they hold, a key of `KINDS`.
        masked: How much of the first sample is masked: "" for nothing,
            "partly" for the last third of its steps, "wholly" for all.
        before: Makes a layer that stands between an input and the probed one.
        spread: Whether the layer takes its inputs as arguments of their own
            instead of as a list.
        booleans: Arguments that get boolean inputs, and the shapes of these.
        call: Other arguments of the call.
        training: What to call the model with: augmentation, dropout and
            batch statistics need True.
        random: Whether the layer draws in its compute dtype. Such draws
            differ between policies, so their outputs cannot be compared.
    """

    name: str
    layer: Callable[[], keras.layers.Layer]
    shapes: tuple[tuple[int, ...], ...]
    kind: str = "signed"
    masked: str = ""
    before: Callable[[], keras.layers.Layer] | None = None
    spread: bool = False
    booleans: dict = dataclasses.field(default_factory=dict)
    call: dict = dataclasses.field(default_factory=dict)
    training: bool = False
    random: bool = False

    def model(self):
        """A new model of the global policy; its weights are always the same."""
        keras.utils.set_random_seed(SEED)
        dtype = KINDS[self.kind]
        inputs = [keras.Input(shape, dtype=dtype) for shape in self.shapes]
        tensors = inputs
        if self.before:
            tensors = [self.before()(x) for x in tensors]
        if self.masked:
            tensors = [layers.Masking()(x) for x in tensors]
        if not self.spread and len(tensors) > 1:
            tensors = [tensors]
        booleans = {
            argument: keras.Input(shape, dtype="bool")
            for argument, shape in self.booleans.items()
        }
        outputs = self.layer()(*tensors, **booleans, **self.call)
        x = keras.tree.flatten(outputs)[0]
        if "int" in x.dtype:
            x = layers.Embedding(VOCABULARY + 1, 4)(x)
        # Not flattened before: Flatten warns of a mask that it drops.
        x = layers.Dense(2, name="head")(x)
        return keras.Model([*inputs, *booleans.values()], x)

    def inputs(self, magnitude):
        """Arrays for the model; those of floats reach about `magnitude`."""
        generator = np.random.default_rng(SEED)
        arrays = [self._array(generator, s, magnitude) for s in self.shapes]
        for x in arrays if self.masked else ():
            x[0, 0 if self.masked == "wholly" else -(x.shape[1] // 3) :] = 0
        for shape in self.booleans.values():
            array = generator.random((BATCH, *shape)) < 0.7
            array[0, 0] = False
            arrays.append(array)
        return arrays

    def probe(self, model):
        """The part of a model like `model()` that ends at the layer."""
        return keras.Model(model.inputs, model.get_layer(NAME).output)

    def _array(self, generator, shape, magnitude):
        shape = (BATCH, *shape)
        if self.kind in ("signed", "positive"):
            x = generator.normal(size=shape).clip(-3, 3) * (magnitude / 3)
            return (x if self.kind == "signed" else abs(x)).astype("float32")
        ids = generator.integers(1, VOCABULARY, size=shape)
        if self.kind == "words":
            return np.array(WORDS, "object")[ids % len(WORDS)]
        return ids.astype(KINDS[self.kind])


def cases_of(table, *shapes, **common):
    """The cases of a table, those that this version of Keras can run.

    Args:
        table: Maps names of cases, which begin with those of their classes,
            to fields of `Case` and arguments of the class. Besides, `masks`
            lists values of `masked` to have further cases of, `layer` is
            what makes the layer where that is not just its class, and
            `since` the first version of Keras known to run the case.
        *shapes: The inputs of all that have no `shapes` of their own.
        **common: Fields for the whole table.
    """
    names = {field.name for field in dataclasses.fields(Case)}
    for name, row in table.items():
        layer_class = getattr(layers, name.partition("-")[0], None)
        if layer_class is None:
            continue
        options = {"shapes": shapes, "masks": (), "layer": layer_class}
        options |= common | row
        if options.pop("since", OLDEST) > VERSION:
            continue
        known = inspect.signature(layer_class.__init__).parameters
        masks, make = options.pop("masks"), options.pop("layer")
        fields = {key: options.pop(key) for key in names & options.keys()}
        if make is layer_class and "seed" in known:
            options["seed"] = SEED

        def layer(make=make, options=options):
            return make(name=NAME, **options)

        yield Case(name, layer, **fields)
        for mask in masks:
            yield Case(f"{name}-masked-{mask}", layer, masked=mask, **fields)


def wrap(wrapper, make_inner, **options):
    """Makes a wrapper, each time around a new layer."""
    return lambda name: wrapper(make_inner(), name=name, **options)


def adapted(**options):
    layer = layers.Normalization(**options)
    data = np.random.default_rng(SEED).normal(1e4, 1000, (256, *VECTOR))
    layer.adapt(data.astype("float32"))
    return layer


def pipeline(*makers):
    """A Pipeline; also for a layer that a functional model would lose."""
    return lambda name: layers.Pipeline([make() for make in makers], name=name)


def stacked():
    return layers.StackedRNNCells(
        [layers.LSTMCell(8), layers.GRUCell(8), layers.SimpleRNNCell(8)]
    )


def root_mean_square(x):
    return keras.ops.sqrt(keras.ops.mean(x * x, axis=-1, keepdims=True))


DENSE = functools.partial(layers.Dense, 8)
CONV = functools.partial(layers.Conv2D, 8, 3)
LSTM = functools.partial(layers.LSTM, 8)
GRU = functools.partial(layers.GRU, 8, return_sequences=True)
GRAY = functools.partial(layers.RandomGrayscale, 1.0)
SPECTRAL = layers.SpectralNormalization

VECTOR, SEQUENCE, IDS = (64,), (12, 64), (16,)
IMAGE, PLANE, VOLUME = (16, 16, 3), (16, 16, 8), (8, 8, 8, 4)
MASKED = {"masks": ("partly", "wholly")}
TRAINING = {"training": True}
DROPS = {"training": True, "random": True}
POSITIVE = {"kind": "positive"}
INTEGERS = {"kind": "integers"}
CAUSAL = {"call": {"use_causal_mask": True}}
SQUARE = {"kernel_size": 3, "filters": 8}
TO_8 = {"input_dim": VOCABULARY, "output_dim": 8}
IDF = {
    "kind": "words",
    "vocabulary": WORDS,
    "idf_weights": [0.1 * index for index in range(len(WORDS))],
    "output_mode": "tf_idf",
}
MEL = {
    "shapes": ((1024,),),
    "fft_length": 256,
    "num_mel_bins": 16,
    "sequence_stride": 128,
}
EDGES = [-3e4, -1e3, -99.9, -0.1, -1e-4, 1e-4, 0.1, 99.9, 1e3, 3e4]
SCALE = (0.3, 0.3)

VECTORS = {
    "Dense": {"units": 32},
    "Dense-wide": {"units": 8, "shapes": ((1024,),)},
    "Dense-softmax": {"units": 32, "activation": "softmax"},
    "Normalization": {"layer": adapted},
    "Normalization-invert": {"layer": adapted, "invert": True},
    "Normalization-given": {"mean": 1e4, "variance": 1e6},
    "SpectralNormalization": {"layer": wrap(SPECTRAL, DENSE), **TRAINING},
    "RepeatVector": {"n": 3},
    "Discretization": {"bin_boundaries": EDGES},
    "Discretization-hot": {"bin_boundaries": EDGES, "output_mode": "multi_hot"},
}

ID_LISTS = {
    "Embedding": TO_8,
    "Embedding-reshaped": {**TO_8, "before": lambda: layers.Reshape((4, 4))},
    "Embedding-integers": {**TO_8, **INTEGERS, "mask_zero": True},
    "ReversibleEmbedding": TO_8,
    "CategoryEncoding": {"num_tokens": VOCABULARY},
    "CategoryEncoding-integers": {"num_tokens": VOCABULARY, **INTEGERS},
    "Discretization-ids": {"bin_boundaries": [n + 0.5 for n in NUMBERS]},
    "Hashing": {"num_bins": VOCABULARY},
    "Hashing-integers": {"num_bins": VOCABULARY, **INTEGERS},
    "HashedCrossing": {"num_bins": 99, **INTEGERS, "shapes": ((1,), (1,))},
    "IntegerLookup": {"vocabulary": NUMBERS},
    "IntegerLookup-hot": {"vocabulary": NUMBERS, "output_mode": "multi_hot"},
    "StringLookup": IDF,
    "TextVectorization": {**IDF, "shapes": ((1,),)},
}

# All that Keras has, but those that need more than the values.
ACTIVATIONS = {
    f"Activation-{name}": {"activation": name}
    for name, function in vars(keras.activations).items()
    if inspect.isfunction(function)
    and name == function.__name__
    and name not in ("deserialize", "get", "serialize", "threshold")
}

SEQUENCES = {
    "EinsumDense": {"equation": "abc,cd->abd", "output_shape": (12, 8)},
    "Identity": MASKED,
    "Lambda": {"function": root_mean_square},
    "Masking": {},
    "ReversibleEmbedding-reverse": {
        "call": {"reverse": True},
        "input_dim": 500,
        "output_dim": 64,
    },
    "ELU": {},
    "LeakyReLU": {},
    "PReLU": {"alpha_initializer": "glorot_uniform"},
    "ReLU": {"max_value": 6.0, "negative_slope": 0.1},
    "Softmax": {},
    "Softmax-axis": {"axis": 1},
    "Softmax-axes": {"axis": (1, 2)},
    "Softmax-mask": {"booleans": {"mask": SEQUENCE}},
    "Softmax-axes-mask": {"axis": (1, 2), "booleans": {"mask": SEQUENCE}},
    "BatchNormalization-axis": {"axis": 1, **TRAINING},
    "BatchNormalization-steps": {**MASKED, **TRAINING},
    "GroupNormalization": {"groups": 4, **MASKED},
    "LayerNormalization": MASKED,
    "RMSNormalization": {},
    "RMSNormalization-axes": {"axis": (1, 2), "since": NEWER},
    "UnitNormalization": MASKED,
    "UnitNormalization-axis": {"axis": 1},
    "Conv1D": SQUARE,
    "Conv1DTranspose": {**SQUARE, "strides": 2},
    "DepthwiseConv1D": {"kernel_size": 5},
    "SeparableConv1D": SQUARE,
    "GRU": {"units": 16, **MASKED},
    "GRU-before": {"units": 16, "reset_after": False},
    "GRU-steps": {"units": 16, "return_sequences": True, **MASKED},
    "LSTM": {"units": 16, **MASKED},
    "LSTM-state": {"units": 16, "return_state": True},
    "LSTM-steps": {"units": 16, "return_sequences": True, **MASKED},
    "LSTM-unrolled": {"units": 16, "unroll": True},
    "SimpleRNN": {"units": 16, **MASKED},
    "SimpleRNN-steps": {"units": 16, "return_sequences": True, **MASKED},
    "RNN": {"layer": wrap(layers.RNN, stacked), **MASKED},
    "Bidirectional": {"layer": wrap(layers.Bidirectional, LSTM), **MASKED},
    "Bidirectional-sum": {
        "layer": wrap(layers.Bidirectional, GRU, merge_mode="sum"),
    },
    "TimeDistributed": {"layer": wrap(layers.TimeDistributed, DENSE), **MASKED},
    "Flatten": {},
    "Permute": {"dims": (2, 1)},
    "Reshape": {"target_shape": (64, 12)},
    "ActivityRegularization": {"l1": 1e-4, "l2": 1e-4},
    "AlphaDropout": {"rate": 0.2},
    "AlphaDropout-training": {"rate": 0.2, **DROPS},
    "Dropout": {"rate": 0.2},
    "Dropout-training": {"rate": 0.2, **DROPS},
    "GaussianDropout": {"rate": 0.2},
    "GaussianDropout-training": {"rate": 0.2, **DROPS},
    "GaussianNoise": {"stddev": 0.5},
    "GaussianNoise-training": {"stddev": 0.5, **DROPS},
    "MelSpectrogram": MEL,
    "MelSpectrogram-power": {**MEL, "power_to_db": False},
} | {
    f"STFTSpectrogram-{mode}": {"mode": mode, "shapes": ((1024, 1),)}
    for mode in ("angle", "log", "magnitude", "psd", "stft")
}

PAIRS = {
    "Attention": {},
    "Attention-steps": {**MASKED, "since": NEWER},
    "Attention-scale": {"use_scale": True},
    "Attention-causal": {**CAUSAL, **MASKED},
    "Attention-concat": {"score_mode": "concat"},
    "Attention-dropout": {"dropout": 0.1, **DROPS},
    "AdditiveAttention": {},
    "AdditiveAttention-steps": {**MASKED, "since": NEWER},
    "AdditiveAttention-causal": CAUSAL,
    "AdditiveAttention-plain": {"use_scale": False},
    "Dot": {"axes": 1, "shapes": (VECTOR, VECTOR)},
    "Dot-unit": {"axes": 1, "normalize": True, "shapes": (VECTOR, VECTOR)},
    "Dot-steps": {"axes": 2},
    "Dot-steps-unit": {"axes": 2, "normalize": True},
    "Subtract": {},
}
HEADED = {
    name + variant: heads | options
    for name, heads in (
        ("MultiHeadAttention", {"num_heads": 2, "key_dim": 64}),
        (
            "GroupQueryAttention",
            {"head_dim": 64, "num_query_heads": 4, "num_key_value_heads": 2},
        ),
    )
    for variant, options in {
        "": MASKED,
        "-causal": {**CAUSAL, **MASKED},
        "-mask": {"booleans": {"attention_mask": (12, 12)}},
        "-gate": {"use_gate": True, "since": NEWER},
        "-scores": {"call": {"return_attention_scores": True}},
        # A rate takes another path in Keras, even where nothing is dropped.
        "-dropout": {"dropout": 0.1, **MASKED},
        "-dropout-training": {"dropout": 0.1, **DROPS},
    }.items()
}

MERGES = dict.fromkeys(
    ("Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply"), MASKED
)

# Windows are large enough for the sum of one to leave float16.
WINDOWS = {
    f"{name}{rank}D": {"shapes": (shape,), **options}
    for rank, shape, size in (
        (1, (256, 8), 16),
        (2, (64, 64, 2), 16),
        (3, (16, 16, 16, 2), 8),
    )
    for name, options in {
        "AdaptiveAveragePooling": {"output_size": 2, **POSITIVE},
        "AdaptiveMaxPooling": {"output_size": 2},
        "AveragePooling": {"pool_size": size, **POSITIVE},
        "Cropping": {"cropping": 1},
        "GlobalAveragePooling": POSITIVE if rank > 1 else POSITIVE | MASKED,
        "GlobalMaxPooling": {},
        "MaxPooling": {"pool_size": size},
        "SpatialDropout": {"rate": 0.2, **DROPS},
        "UpSampling": {"size": 2},
        "ZeroPadding": {"padding": 1},
    }.items()
}

PLANES = {
    "BatchNormalization": {},
    "BatchNormalization-training": TRAINING,
    "GroupNormalization-plane": {"groups": 2},
    "LayerNormalization-axes": {"axis": (1, 2)},
    "Conv2D": {**SQUARE, "activation": "relu"},
    "Conv2DTranspose": {**SQUARE, "strides": 2},
    "DepthwiseConv2D": {"kernel_size": 5},
    "SeparableConv2D": SQUARE,
    "SpectralNormalization-conv": {"layer": wrap(SPECTRAL, CONV), **TRAINING},
    "Conv3D": {**SQUARE, "shapes": (VOLUME,)},
    "Conv3DTranspose": {**SQUARE, "shapes": (VOLUME,)},
    "ConvLSTM1D": {**SQUARE, "shapes": ((4, 8, 3),)},
    "ConvLSTM2D": {**SQUARE, "shapes": ((4, 8, 8, 3),)},
    "ConvLSTM3D": {**SQUARE, "shapes": ((3, 4, 4, 4, 2),)},
    "TimeDistributed-conv": {
        "layer": wrap(layers.TimeDistributed, CONV),
        "shapes": ((4, *IMAGE),),
    },
}

# A factor with two equal ends leaves nothing to chance.
IMAGES = {
    "AugMix": DROPS,
    "AutoContrast": {},
    "CenterCrop": {"height": 8, "width": 8},
    "ContrastLimitedAdaptiveHistogramEqualization": {"tile_grid_size": (2, 2)},
    "CutMix": DROPS,
    "Equalization": {"layer": pipeline(layers.Equalization)},
    "MaxNumBoundingBoxes": {"max_number": 4},
    "MixUp": {},
    "Pipeline": {"layer": pipeline(lambda: layers.Rescaling(1 / 255.0))},
    "RandAugment": DROPS,
    "RandomBrightness": {"factor": SCALE},
    "RandomColorDegeneration": {"factor": SCALE},
    "RandomColorJitter": {"hue_factor": 0.3, "contrast_factor": 0.3, **DROPS},
    "RandomContrast": {"factor": 0.3, **DROPS},
    "RandomCrop": {"height": 8, "width": 8},
    "RandomElasticTransform": {"factor": (1.0, 1.0), "scale": SCALE, **DROPS},
    "RandomErasing": DROPS,
    "RandomFlip": {},
    "RandomGaussianBlur": {"factor": (1.0, 1.0), "sigma": (1.0, 1.0)},
    "RandomGrayscale": {"layer": pipeline(GRAY)},
    "RandomHue": {"factor": SCALE},
    "RandomInvert": {"factor": (1.0, 1.0)},
    "RandomPerspective": {"factor": (1.0, 1.0), **DROPS},
    "RandomPosterization": {"factor": 3},
    "RandomRotation": {"factor": (0.1, 0.1)},
    "RandomSaturation": {"factor": SCALE},
    "RandomSharpness": {"factor": SCALE},
    "RandomShear": {"x_factor": SCALE, "y_factor": SCALE, **DROPS},
    "RandomTranslation": {"height_factor": SCALE, "width_factor": SCALE},
    "RandomZoom": {"height_factor": SCALE},
    "Rescaling": {"scale": 1 / 255.0},
    "Rescaling-up": {"scale": 255.0, "offset": -1.0},
    "Resizing-antialias": {"height": 5, "width": 5, "antialias": True},
    "Solarization": {},
    "UpSampling2D-bilinear": {"interpolation": "bilinear"},
} | {
    f"Resizing-{how}": {"height": 9, "width": 7, "interpolation": how}
    for how in ("bicubic", "bilinear", "lanczos3", "nearest")
}

CASES = (
    *cases_of(VECTORS, VECTOR),
    *cases_of(ID_LISTS, IDS, kind="ids"),
    *cases_of(ACTIVATIONS, SEQUENCE),
    *cases_of(SEQUENCES, SEQUENCE),
    *cases_of(PAIRS, SEQUENCE, SEQUENCE),
    *cases_of(HEADED, SEQUENCE, SEQUENCE, spread=True),
    *cases_of(MERGES, SEQUENCE, SEQUENCE, SEQUENCE),
    *cases_of(WINDOWS),
    *cases_of(PLANES, PLANE),
    *cases_of(IMAGES, IMAGE, kind="positive", training=True),
)

CELL = "A cell computes one step; the cases of RNN and of its layers run it."
FOREIGN = "It runs another framework, which casts as that framework likes."
# By name, for a Keras that does not have one of them.
REASONS = {
    "Layer": "The base class computes nothing.",
    "Wrapper": "The base class of wrappers has no call of its own.",
    "InputLayer": "It computes nothing; each model of a case begins with one.",
    "GRUCell": CELL,
    "LSTMCell": CELL,
    "SimpleRNNCell": CELL,
    "StackedRNNCells": CELL,
    "FlaxLayer": FOREIGN,
    "JaxLayer": FOREIGN,
    "TorchModuleWrapper": FOREIGN,
    "TFSMLayer": "It runs a SavedModel, whose dtypes were fixed on export.",
}
EXEMPT = {
    getattr(layers, name): reason
    for name, reason in REASONS.items()
    if hasattr(layers, name)
}


def layer_classes():
    """The layer classes of `keras.layers`, each once whatever its aliases."""
    return {
        value
        for value in vars(layers).values()
        if isinstance(value, type) and issubclass(value, keras.layers.Layer)
    }


def missing():
    """The layer classes that have neither a case nor an exemption."""
    cased = {getattr(layers, case.name.partition("-")[0]) for case in CASES}
    return layer_classes() - cased - EXEMPT.keys()
