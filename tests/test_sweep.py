"""Every layer of Keras, prepared, in the middle of a model: as in float32.

What stays beyond is listed here with its reason, and `audit` tells it.
"""

import keras
import numpy as np
import pytest
from catalogue import CASES
from catalogue import MAGNITUDES
from catalogue import missing

import tfmixed

LARGEST = 65504.0
# Inputs far beyond what they are made for drive a recurrent layer into
# saturation, where the rounding of an input to 16 bits flips a gate. float32
# does the same to inputs and weights that were rounded before.
RECURRENT = ("GRU", "LSTM", "SimpleRNN", "RNN", "Bidirectional", "ConvLSTM")
# The sums inside (projections, scores) leave the range, or near-ties of
# one-hot attention flip, where the result still fits.
FROM_60000 = ("MultiHeadAttention", "GroupQueryAttention", "Attention")
ROUNDED = ("AdditiveAttention-steps-masked-wholly",)


def is_expected(case, magnitude):
    """Whether float16 cannot hold what this case computes."""
    name = case.name
    if name.startswith(RECURRENT) or name in ROUNDED:
        return magnitude >= 300
    return name.startswith(FROM_60000) and magnitude >= 60000


def outputs_of(case, model, x):
    outputs = case.probe(model)(x, training=case.training)
    return [
        keras.ops.convert_to_numpy(tensor)
        for tensor in keras.tree.flatten(outputs)
    ]


def compare(exact, rough, random):
    """The error, and whether float32 gives what float16 cannot hold."""
    if exact.dtype.kind not in "fV":
        return float((exact != rough).any()), False
    exact, rough = exact.astype("float64"), rough.astype("float64")
    finite = np.isfinite(exact)
    beyond = bool((np.abs(exact[finite]) > LARGEST).any())
    if not np.isfinite(rough[finite]).all():
        return np.inf, beyond
    if random or not finite.any():
        return 0.0, beyond
    exact, rough = exact[finite], rough[finite]
    return np.abs(exact - rough).max() / max(np.abs(exact).max(), 1e-30), beyond


def test_no_layer_of_keras_is_missing():
    assert missing() == set()


# One of each treatment; the whole sweep takes minutes.
FAST = (
    "Dense",
    "Conv2D",
    "UnitNormalization",
    "AveragePooling2D",
    "MaxPooling3D",
    "MultiHeadAttention",
    "Normalization",
    "Embedding-reshaped",
    "Lambda",
    "Multiply",
    "ELU",
    "Softmax-axes",
)


@pytest.mark.filterwarnings("ignore:.*does not support masking")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name,
            marks=[] if case.name in FAST else pytest.mark.slow,
        )
        for case in CASES
    ],
)
def test_prepared_float16_is_as_float32(case):
    keras.utils.set_random_seed(0)
    model = case.model()
    prepared = tfmixed.prepare(model, "mixed_float16")
    off = {}
    for magnitude in MAGNITUDES:
        x = case.inputs(magnitude)
        exact, rough = outputs_of(case, model, x), outputs_of(case, prepared, x)
        results = [
            compare(one, other, case.random)
            for one, other in zip(exact, rough, strict=True)
        ]
        error = max(error for error, _ in results)
        beyond = any(beyond for _, beyond in results)
        if error > 1e-2 and not (beyond or is_expected(case, magnitude)):
            off[magnitude] = error
    assert not off


@pytest.mark.parametrize(
    ("name", "magnitude", "code"),
    [
        ("Add", 60000.0, "TM101"),
        ("Conv2D", 60000.0, "TM101"),
        ("MultiHeadAttention", 60000.0, "TM101"),
        ("LSTM-steps", 300.0, "TM106"),
        ("GRU-steps", 3000.0, "TM104"),
        ("ConvLSTM3D", 3000.0, "TM106"),
    ],
)
def test_what_float16_cannot_hold_is_found_by_the_audit(name, magnitude, code):
    case = next(case for case in CASES if case.name == name)
    prepared = tfmixed.prepare(case.model(), "mixed_float16")
    x = case.inputs(magnitude)
    found = tfmixed.audit(prepared, x if len(x) > 1 else x[0])
    assert code in {finding.code for finding in found.findings}
    harmless = case.inputs(1.0)
    found = tfmixed.audit(prepared, harmless if len(x) > 1 else harmless[0])
    assert "TM101" not in {finding.code for finding in found.findings}
