"""The codes of the audit: stable, each with its cause and its fix.

`docs/audit-codes.md` says the same with an example; a test compares the two.
"""

import dataclasses

ERROR = "error"
WARNING = "warning"
NOTE = "note"
SEVERITIES = (ERROR, WARNING, NOTE)


@dataclasses.dataclass(frozen=True)
class Code:
    """What one code means.

    Args:
        code: Such as `"TM001"`; never given to anything else.
        title: A few words.
        severity: Of a finding that does not say otherwise.
        cause: Why it is wrong, as a sentence or two.
        fix: What to do, as a sentence or two.
        float16: Whether it concerns models that compute in float16.
        bfloat16: Whether it concerns models that compute in bfloat16.
    """

    code: str
    title: str
    severity: str
    cause: str
    fix: str
    float16: bool = True
    bfloat16: bool = True


_CODES = (
    Code(
        "TM001",
        "unprotected head",
        ERROR,
        "The output of the model is in 16 bits. The softmax rounds a "
        "confident wrong answer to exactly one and its gradient to zero, and "
        "losses and metrics start from rounded numbers.",
        'Give the last layer dtype="float32", or use tfmixed.prepare(model).',
    ),
    Code(
        "TM002",
        "loss scaling absent",
        ERROR,
        "Something computes in float16 and the optimizer does not scale the "
        "loss, so small gradients become exactly zero. Keras adds scaling "
        'only when the policy of the model itself is "mixed_float16" at the '
        "time of compile.",
        "Compile with tfmixed.wrap_optimizer(optimizer), or use "
        "tfmixed.prepare(model) before compile.",
        bfloat16=False,
    ),
    Code(
        "TM003",
        "softmax in 16 bits",
        WARNING,
        "A softmax or an exponential inside of the model is computed in 16 "
        "bits: small probabilities vanish, and large logits overflow the "
        "exponential.",
        'Give the layer dtype="float32", or use tfmixed.prepare(model).',
    ),
    Code(
        "TM004",
        "epsilon rounds to zero",
        ERROR,
        "A constant that is to prevent a division by zero is smaller than the "
        "smallest number of the format, becomes zero and prevents nothing.",
        "Use an epsilon of 1e-4 or more in float16, or compute in float32.",
        bfloat16=False,
    ),
    Code(
        "TM005",
        "constant outside of the range",
        ERROR,
        "A constant such as -1e9 for masked logits is infinite in the format; "
        "infinity times zero, or minus itself, is NaN.",
        "Use a constant that float16 holds, such as -3e4, or compute in "
        "float32.",
    ),
    Code(
        "TM006",
        "ids rounded before a lookup",
        ERROR,
        "Ids pass through a 16-bit layer as floating point numbers: float16 "
        "holds every integer up to 2048 only, bfloat16 up to 256. Larger ids "
        "become their neighbours.",
        'Declare the input as integers, keras.Input(shape, dtype="int32"), '
        "and let nothing in 16 bits stand before the lookup.",
    ),
    Code(
        "TM007",
        "dimension misses tensor cores",
        NOTE,
        "Tensor cores are used fully when the dimensions of a matrix product "
        "are multiples of 8 in 16-bit formats; otherwise the GPU pads or "
        "takes a slower kernel.",
        "Round the dimension up to a multiple of 8.",
    ),
    Code(
        "TM008",
        "model too small to gain",
        NOTE,
        "Its matrix products are so small that a step is spent on starting "
        "operations; casts to 16 bits only add to them.",
        "Stay with float32, or use a larger batch. tfmixed.compare measures "
        "which one is faster.",
    ),
    Code(
        "TM009",
        "batch normalization of a small batch",
        NOTE,
        "Statistics over few examples are noisy in any precision, and 16-bit "
        "inputs add to the noise.",
        "Use batches of 16 or more for each replica, or GroupNormalization.",
    ),
    Code(
        "TM010",
        "layer left in float32",
        NOTE,
        "A matrix product computes in float32 although the model around it "
        "computes in 16 bits, so it gains nothing. Setting "
        "`layer.dtype_policy` does not reach the layers inside of it.",
        "Use tfmixed.prepare(model), or build the layer under the 16-bit "
        "policy. Leave it if you chose float32.",
    ),
    Code(
        "TM011",
        "runs eagerly",
        WARNING,
        "run_eagerly=True runs every operation by itself: casts cost more "
        "than 16 bits gain.",
        "Compile with run_eagerly=False, except to debug.",
    ),
    Code(
        "TM012",
        "slow format",
        WARNING,
        "This machine has no fast kernels for the 16-bit format of the model.",
        "Use the policy that tfmixed.enable() chooses here.",
    ),
    Code(
        "TM013",
        "loss scaling of Keras",
        WARNING,
        "keras.optimizers.LossScaleOptimizer has no lower and no upper bound "
        "of the scale, lets each replica decide alone, and skips steps "
        "without a word.",
        "Compile with tfmixed.wrap_optimizer(optimizer), which takes over its "
        "state.",
    ),
    Code(
        "TM014",
        "misuse in a custom step",
        ERROR,
        "The training step scales, unscales or clips in the wrong place, so "
        "that the update is wrong by the loss scale, or is not guarded.",
        "Take the gradients of optimizer.scale_loss(loss) and hand them to "
        "optimizer.apply; between the two only optimizer.unscale may touch "
        "them. Derive the model from tfmixed.Model.",
    ),
    Code(
        "TM015",
        "unsafe layer in 16 bits",
        WARNING,
        "The layer computes in 16 bits what needs the range or the digits of "
        "float32.",
        'Give the layer dtype="float32", or use tfmixed.prepare(model).',
    ),
    Code(
        "TM016",
        "attention in 16 bits",
        WARNING,
        "Keras multiplies queries and keys in 16 bits before it scales them: "
        "with 64 dimensions, entries of 32 overflow float16.",
        "Use tfmixed.prepare(model), which scales first and keeps the logits "
        "in float32.",
    ),
    Code(
        "TM017",
        "custom layer in 16 bits",
        WARNING,
        "A custom layer sums, squares, exponentiates or divides in 16 bits, "
        "or could not be looked at.",
        'Give the layer dtype="float32", or use tfmixed.prepare(model).',
    ),
    Code(
        "TM018",
        "no 16-bit kernel",
        ERROR,
        "TensorFlow has no kernel for the layer in this format on this "
        "device, so the step fails.",
        'Give the layer dtype="float32", or use tfmixed.prepare(model).',
    ),
    Code(
        "TM019",
        "preprocessing in 16 bits",
        ERROR,
        "The layer works on raw data, whose range and digits 16 bits cannot "
        "hold; Normalization even keeps its mean and variance in 16 bits.",
        'Give the layer dtype="float32", or use tfmixed.prepare(model).',
    ),
    Code(
        "TM020",
        "extra loss or metric meets 16 bits",
        ERROR,
        "An activity regularizer, add_loss or a metric function of your own "
        "gets 16-bit values in a model without the guarded step: it overflows, "
        "or adding it to the float32 loss is a TypeError.",
        "Use tfmixed.prepare(model) or derive the model from tfmixed.Model.",
    ),
    Code(
        "TM101",
        "values overflow",
        ERROR,
        "On this data the layer produces values beyond the largest number of "
        "the format.",
        "Keep the layer in float32, normalize its input, or use bfloat16.",
    ),
    Code(
        "TM102",
        "activations vanish",
        WARNING,
        "On this data many activations of the layer become zero or subnormal "
        "in the format.",
        "Normalize or rescale the input of the layer, or keep it in float32.",
    ),
    Code(
        "TM103",
        "gradients vanish",
        WARNING,
        "At the present loss scale many gradients of the layer become zero in "
        "the format.",
        "Raise the loss scale, or keep the layer in float32.",
    ),
    Code(
        "TM104",
        "gradients are inexact",
        WARNING,
        "The gradients of the layer are far from those of float32.",
        "Keep the layer in float32, or use tfmixed.prepare(model).",
    ),
    Code(
        "TM105",
        "not finite in float32 either",
        ERROR,
        "The values are NaN or infinite in float32 as well, so the precision "
        "is not the cause: the data or the model is.",
        "Look at the data and the learning rate before the precision.",
    ),
    Code(
        "TM106",
        "loss scale outside of its window",
        ERROR,
        "Below the window of safe loss scales gradients vanish, above it they "
        "overflow; the present scale lies outside, or there is no window.",
        "Use a dynamic loss scale that starts inside of the window.",
        bfloat16=False,
    ),
    Code(
        "TM107",
        "data not finite",
        ERROR,
        "The data contain NaN or infinity.",
        "Remove or replace these examples.",
    ),
)

CODES: dict[str, Code] = {code.code: code for code in _CODES}
