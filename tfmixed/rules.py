"""ONE table: what stays in 16 bits, what in float32, and why.

Three lists, from the coarse to the fine: layers of Keras (`TABLE`), operations
of `keras.ops` in a functional graph (`SAFE_OPERATIONS`), and the TensorFlow
operations inside a custom layer (`UNSAFE_KERNELS`). Everything is read here and
nowhere else: `prepare` obeys it, `audit` explains it.

The sorting follows what PyTorch's autocast and NVIDIA's training guide do
(https://docs.nvidia.com/deeplearning/performance/mixed-precision-training):
matrix products gain from 16 bits and accumulate in float32 inside the kernel;
sums, powers, exponentials and quotients leave the range or lose the digits.
"""

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import keras
import tensorflow as tf

SIXTEEN = "16 bits"
FLOAT32 = "float32"
TWIN = "twin"
ALONE = "left alone"
LOOK = "looked into"


@dataclasses.dataclass(frozen=True)
class Rule:
    """What becomes of one kind of layer.

    Attributes:
        kind: What the layers have in common, for people.
        layers: The layer classes of Keras.
        float16: The treatment under a float16 policy: `SIXTEEN`, `FLOAT32`,
            `TWIN` (a subclass from `tfmixed.layers` that is safe in 16 bits),
            `ALONE` or `LOOK` (decided by what the layer computes).
        bfloat16: The treatment under a bfloat16 policy.
        reason: Why, as a sentence.
        only_on_gpu: The treatment holds on a GPU; a CPU has no such kernel
            and gets float32.
    """

    kind: str
    layers: tuple[type, ...]
    float16: str
    bfloat16: str
    reason: str
    only_on_gpu: bool = False

    def treatment(self, dtype: str) -> str:
        """Returns the treatment under a 16-bit compute dtype, on this machine.

        Args:
            dtype: `"float16"` or `"bfloat16"`.
        """
        if self.only_on_gpu and not _has_gpu():
            return FLOAT32
        return self.float16 if dtype == "float16" else self.bfloat16


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _has_gpu() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))


def _layers(names: str) -> tuple[type, ...]:
    """The classes of `keras.layers` of these names that this Keras has."""
    found = (getattr(keras.layers, name, None) for name in names.split())
    return tuple(layer for layer in found if layer is not None)


TABLE: tuple[Rule, ...] = (
    Rule(
        "attention",
        _layers(
            "MultiHeadAttention GroupQueryAttention Attention AdditiveAttention"
        ),
        float16=TWIN,
        bfloat16=TWIN,
        reason="Keras multiplies queries and keys before it scales them, and "
        "its softmax and masks run in 16 bits; the twin scales first and keeps "
        "logits and softmax in float32.",
    ),
    Rule(
        "fused normalization",
        _layers(
            "BatchNormalization LayerNormalization GroupNormalization "
            "RMSNormalization"
        ),
        float16=TWIN,
        bfloat16=TWIN,
        reason="Means and variances are sums of many values or squares, which "
        "leave the range of float16; the twin takes 16 bits, sums in float32 "
        "and gives 16 bits on, in one pass.",
    ),
    Rule(
        "normalization",
        _layers("UnitNormalization SpectralNormalization"),
        float16=FLOAT32,
        bfloat16=FLOAT32,
        reason="Means, variances and norms are sums of many values or squares: "
        "inputs above 256 overflow float16 when they are squared.",
    ),
    Rule(
        "pooling that averages",
        _layers(
            "AveragePooling1D AveragePooling2D AveragePooling3D "
            "GlobalAveragePooling1D GlobalAveragePooling2D "
            "GlobalAveragePooling3D AdaptiveAveragePooling1D "
            "AdaptiveAveragePooling2D AdaptiveAveragePooling3D"
        ),
        float16=FLOAT32,
        bfloat16=FLOAT32,
        reason="The sum over the window overflows or loses its last digits "
        "before it is divided.",
    ),
    Rule(
        "pooling without a 16-bit kernel",
        _layers(
            "MaxPooling3D GlobalMaxPooling3D AdaptiveMaxPooling1D "
            "AdaptiveMaxPooling2D AdaptiveMaxPooling3D"
        ),
        float16=SIXTEEN,
        bfloat16=SIXTEEN,
        reason="TensorFlow has no 16-bit kernel for it on a CPU; taking the "
        "largest is exact in any format.",
        only_on_gpu=True,
    ),
    Rule(
        "product of activations",
        _layers("Multiply"),
        float16=FLOAT32,
        bfloat16=SIXTEEN,
        reason="The product of two activations leaves the range of float16 "
        "from 256 on; a product with the output of a sigmoid, tanh or softmax "
        "cannot, and stays in 16 bits.",
    ),
    Rule(
        "sum of products",
        _layers("Dot Average"),
        float16=FLOAT32,
        bfloat16=FLOAT32,
        reason="It sums or normalizes products of activations, or sums before "
        "it divides, with an output too small to make float32 dear.",
    ),
    Rule(
        "softmax",
        _layers("Softmax"),
        float16=FLOAT32,
        bfloat16=FLOAT32,
        reason="Exponentials of 16-bit logits lose the small probabilities, "
        "and the gradient of a confident wrong answer becomes exactly 0.",
    ),
    Rule(
        "preprocessing",
        _layers(
            "Normalization Rescaling Resizing CenterCrop Discretization "
            "CategoryEncoding Hashing HashedCrossing StringLookup "
            "IntegerLookup TextVectorization MelSpectrogram STFTSpectrogram "
            "Pipeline AugMix AutoContrast "
            "ContrastLimitedAdaptiveHistogramEqualization CutMix Equalization "
            "MaxNumBoundingBoxes MixUp RandAugment RandomBrightness "
            "RandomColorDegeneration RandomColorJitter RandomContrast "
            "RandomCrop RandomElasticTransform RandomErasing RandomFlip "
            "RandomGaussianBlur RandomGrayscale RandomHue RandomInvert "
            "RandomPerspective RandomPosterization RandomRotation "
            "RandomSaturation RandomSharpness RandomShear RandomTranslation "
            "RandomZoom Solarization"
        ),
        float16=FLOAT32,
        bfloat16=FLOAT32,
        reason="It works on raw data, whose range and digits 16 bits cannot "
        "hold.",
    ),
    Rule(
        "comparison with a value",
        _layers("Masking"),
        float16=FLOAT32,
        bfloat16=FLOAT32,
        reason="Rounding to 16 bits makes values equal to the mask value that "
        "are not.",
    ),
    Rule(
        "penalty",
        _layers("ActivityRegularization"),
        float16=FLOAT32,
        bfloat16=FLOAT32,
        reason="It sums squares over the whole output.",
    ),
    Rule(
        "opaque function",
        _layers("Lambda TFSMLayer FlaxLayer JaxLayer TorchModuleWrapper"),
        float16=FLOAT32,
        bfloat16=FLOAT32,
        reason="What it computes cannot be seen; constants written in "
        "TensorFlow are float32, and some lie outside the range of float16.",
    ),
    Rule(
        "matrix product",
        _layers(
            "Dense EinsumDense Conv1D Conv2D Conv3D Conv1DTranspose "
            "Conv2DTranspose Conv3DTranspose DepthwiseConv1D DepthwiseConv2D "
            "SeparableConv1D SeparableConv2D"
        ),
        float16=SIXTEEN,
        bfloat16=SIXTEEN,
        reason="This is where 16 bits pay; the kernels sum in float32.",
    ),
    Rule(
        "lookup",
        _layers("Embedding ReversibleEmbedding"),
        float16=SIXTEEN,
        bfloat16=SIXTEEN,
        reason="It copies rows; the ids that reach it are kept exact.",
    ),
    Rule(
        "recurrent",
        _layers(
            "LSTM GRU SimpleRNN LSTMCell GRUCell SimpleRNNCell "
            "StackedRNNCells RNN ConvLSTM1D ConvLSTM2D ConvLSTM3D "
            "Bidirectional"
        ),
        float16=SIXTEEN,
        bfloat16=SIXTEEN,
        reason="Gates are bounded by sigmoid and tanh.",
    ),
    Rule(
        "elementwise or shape",
        _layers(
            "Activation LeakyReLU PReLU ReLU Add Subtract Concatenate "
            "Maximum Minimum Identity Dropout AlphaDropout GaussianDropout "
            "GaussianNoise SpatialDropout1D SpatialDropout2D SpatialDropout3D "
            "Cropping1D Cropping2D Cropping3D Flatten Permute RepeatVector "
            "Reshape UpSampling1D UpSampling2D UpSampling3D ZeroPadding1D "
            "ZeroPadding2D ZeroPadding3D MaxPooling1D MaxPooling2D "
            "GlobalMaxPooling1D GlobalMaxPooling2D TimeDistributed Wrapper "
            "InputLayer"
        ),
        float16=SIXTEEN,
        bfloat16=SIXTEEN,
        reason="The result is no larger and no less exact than the input.",
    ),
)

# The kinds that compute a mean, a variance or a norm.
NORMALIZATION = ("normalization", "fused normalization")

SOFTMAX = Rule(
    "softmax inside a layer",
    (),
    float16=FLOAT32,
    bfloat16=FLOAT32,
    reason="Its activation is a softmax or an exponential, which 16 bits "
    "cannot hold.",
)
FRAGILE = Rule(
    "activation that loses digits",
    (keras.layers.ELU,),
    float16=FLOAT32,
    bfloat16=FLOAT32,
    reason="It squares, subtracts nearly equal numbers or sums, which costs "
    "digits or range in 16 bits; float32 is cheap for it.",
)
QUANTIZED = Rule(
    "quantized",
    (),
    float16=ALONE,
    bfloat16=ALONE,
    reason="It is quantized; another policy would change its weights.",
)
LORA = Rule(
    "LoRA",
    (),
    float16=ALONE,
    bfloat16=ALONE,
    reason="It is being fine-tuned with LoRA; its policy is the user's choice.",
)
OTHER_DTYPE = Rule(
    "not floating point, or double",
    (),
    float16=ALONE,
    bfloat16=ALONE,
    reason="It computes in a dtype that mixed precision does not touch.",
)
PENALTY = Rule(
    "activity regularizer",
    (),
    float16=FLOAT32,
    bfloat16=FLOAT32,
    reason="Its activity regularizer sums squares over the whole output.",
)
CUSTOM_TWIN = Rule(
    "custom attention",
    (),
    float16=FLOAT32,
    bfloat16=FLOAT32,
    reason="It changes a layer of Keras that is unsafe in 16 bits, and a twin "
    "does not know what it changes.",
)
CUSTOM = Rule(
    "custom layer",
    (),
    float16=LOOK,
    bfloat16=LOOK,
    reason="What it computes decides: matrix products stay in 16 bits, sums, "
    "powers, exponentials and quotients need float32.",
)
UNKNOWN = Rule(
    "unknown layer of Keras",
    (),
    float16=FLOAT32,
    bfloat16=FLOAT32,
    reason="This version of tfmixed does not know it yet.",
)

CONTAINER = Rule(
    "model",
    (),
    float16=FLOAT32,
    bfloat16=FLOAT32,
    reason="It computes nothing itself; its layers cast for themselves.",
)

# Outputs within [-1, 1]: a factor that cannot make a product overflow.
BOUNDED = ("sigmoid", "hard_sigmoid", "tanh", "hard_tanh", "softsign")
# A factor up to here is as harmless as a sum of so many values.
LARGEST_FACTOR = 16.0
_EXPONENTIALS = ("softmax", "log_softmax", "sparsemax", "exponential")
_FRAGILE = ("elu", "selu", "celu", "tanh_shrink", "squareplus")


def rule_for(layer: keras.Layer) -> Rule:
    """Returns the rule for one layer, by what it is and how it is configured.

    Args:
        layer: Any Keras layer, custom ones included.
    """
    if layer.quantization_mode is not None:
        return QUANTIZED
    # Not `lora_enabled`, which is false until the layer is built.
    if getattr(layer, "lora_rank", None):
        return LORA
    if layer.compute_dtype not in ("float16", "bfloat16", "float32"):
        return OTHER_DTYPE
    if activation_name(layer) in _EXPONENTIALS:
        return SOFTMAX
    if _is_fragile(layer):
        return FRAGILE
    if layer.activity_regularizer is not None:
        return PENALTY
    if isinstance(layer, keras.Model) and not is_custom(type(layer)):
        return CONTAINER
    rule = _rule_for_class(type(layer))  # type: ignore[arg-type]
    if is_custom(type(layer)):
        return _rule_for_custom(type(layer), rule)
    return rule or UNKNOWN


def _is_fragile(layer: keras.Layer) -> bool:
    """Whether a layer does nothing but apply an activation that needs care.

    The same activation inside a Dense or a convolution does not make up for
    the matrix product that would be lost.
    """
    if isinstance(layer, keras.layers.ELU):
        return True
    is_activation = type(layer) is keras.layers.Activation
    return is_activation and activation_name(layer) in _FRAGILE


def _rule_for_custom(layer_class: Any, rule: Rule | None) -> Rule:
    if rule is not None and rule.kind == "fused normalization":
        # A twin does not know what a subclass changes.
        return next(r for r in TABLE if r.kind == "normalization")
    if rule is None or layer_class.call is not _stock_call(layer_class):
        if rule is not None and rule.float16 == rule.bfloat16 == FLOAT32:
            return rule
        return CUSTOM_TWIN if rule and rule.float16 == TWIN else CUSTOM
    return CUSTOM_TWIN if rule.float16 == TWIN else rule


def _stock_call(layer_class: type) -> Any:
    stock = next(c for c in layer_class.__mro__ if not is_custom(c))
    return getattr(stock, "call", None)


@functools.cache
def _rule_for_class(layer_class: Hashable) -> Rule | None:
    # Not by the order of the table: AveragePooling and MaxPooling share bases.
    for candidate in layer_class.__mro__:  # type: ignore[attr-defined]
        for rule in TABLE:
            if candidate in rule.layers:
                return rule
    return None


def is_custom(layer_class: type) -> bool:
    """Returns whether neither Keras nor tfmixed defines this class."""
    return layer_class.__module__.split(".")[0] not in ("keras", "tfmixed")


def activation_name(layer: Any) -> str | None:
    """The name of a layer's activation function; None if it has none.

    An activation that is itself a layer, as in `Dense(8, activation=ReLU())`,
    goes by the name of its class in the spelling of functions.
    """
    activation = getattr(layer, "activation", None)
    if activation is None:
        return None
    if isinstance(activation, functools.partial):
        activation = activation.func
    name = getattr(activation, "__name__", type(activation).__name__)
    return str(name) if name.islower() else str(name).lower()


# Operations of `keras.ops` that stay in 16 bits; all others get float32. They
# move values, pick values, or are matrix products with weights.
SAFE_OPERATIONS = _names(
    """
    Abs Absolute Add All Amax Amin Any Append Arange Argmax Argmin
    Argsort ArraySplit BroadcastTo Cast Ceil Clip Concatenate Conv
    ConvTranspose Copy DepthToSpace DepthwiseConv Diag Diagonal Dsplit
    Dstack Equal ExpandDims ExtractPatches Fabs Flip Fliplr Flipud
    Floor Fmax Fmin Full FullLike GetItem Greater GreaterEqual
    HardSigmoid HardTanh Heaviside Hsplit Hstack Isfinite Isinf Isnan
    LeakyRelu Less LessEqual LogicalAnd LogicalNot LogicalOr Max MaxPool
    Maximum Meshgrid Min Minimum Moveaxis NanToNum Negative NotEqual
    OneHot OnesLike Pad Ravel Relu Relu6 Repeat Reshape Roll Rot90 Round
    Select SeparableConv Sigmoid Sign Slice Sort SpaceToDepth Split
    Squeeze Stack StopGradient Subtract Swapaxes Take TakeAlongAxis Tanh
    Tile TopK Transpose Tril Triu Unfold Unstack View Vsplit Vstack
    Where ZerosLike
    """
)
# Safe in the range of bfloat16, not in that of float16.
SAFE_IN_BFLOAT16 = _names(
    """
    Divide Einsum Gelu Matmul Multiply Silu Tensordot TrueDivide
    """
)

# TensorFlow operations that need float32 where a custom layer feeds them 16
# bits: by what can go wrong. The rest of a layer's operations may be anything.
UNSAFE_KERNELS = _names(
    """
    AvgPool AvgPool3D Cholesky Cosh Cumprod Cumsum CumulativeLogsumexp
    Digamma Elu Erfinv EuclideanNorm Exp Expm1 L2Loss LRN Lgamma Log
    Log1p LogSoftmax MatrixInverse Mean Pow Prod Reciprocal Rsqrt
    SegmentMean SegmentProd SegmentSum Selu Sinh Softmax
    SoftmaxCrossEntropyWithLogits Softplus SparseSegmentMean
    SparseSegmentSqrtN SparseSegmentSum
    SparseSoftmaxCrossEntropyWithLogits Square SquaredDifference Sum Tan
    UnsortedSegmentProd UnsortedSegmentSum Xdivy Xlog1py Xlogy
    """
)
# Unsafe in float16 only, and only between two values that are computed: a
# product with a weight or with the output of a sigmoid cannot run away.
UNSAFE_PRODUCTS = _names(
    """
    Div DivNoNan Mul RealDiv
    """
)
UNSAFE_MATRIX_PRODUCTS = _names(
    """
    BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum MatMul
    """
)
BOUNDED_KERNELS = _names(
    """
    Sigmoid Sign Softmax Softsign Tanh
    """
)


def is_safe_operation(operation: Any, dtype: str) -> bool:
    """Returns whether a `keras.ops` node may compute in 16 bits.

    Args:
        operation: A `keras.Operation` that is not a layer.
        dtype: `"float16"` or `"bfloat16"`.
    """
    name = type(operation).__name__
    if name in SAFE_OPERATIONS:
        return True
    return dtype == "bfloat16" and name in SAFE_IN_BFLOAT16
