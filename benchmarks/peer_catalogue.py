"""What `peers.py` compares: workloads, peers and targets.

Imports nothing, so that the command line answers at once.
"""

import dataclasses

OURS = "tfmixed"

# The names in `workloads.py`, which needs Keras.
WORKLOADS = ("mlp", "cnn", "transformer", "resnet50", "embedding", "lstm")

PEERS = {
    "keras-float32": "stock Keras",
    "keras-bfloat16": "stock Keras, global policy mixed_bfloat16",
    "keras-float16": "stock Keras, global policy mixed_float16; by default "
    "only on a GPU, for a CPU is six times slower",
    "tf-rewrite": "stock Keras in float32 under TensorFlow's own graph rewrite",
    "torch-amp": "PyTorch with torch.autocast, fused optimizer, channels_last; "
    "left out where torch is not installed",
    OURS: "tfmixed.enable() and tfmixed.prepare(model)",
}
ONLY_ON_GPU = ("keras-float16",)

# How many times as fast as the peer tfmixed shall be at least.
SPEEDUPS = {
    "mlp": {"keras-float32": 2.2},
    "cnn": {"keras-float32": 2.2},
    "transformer": {"keras-float32": 1.9},
    "resnet50": {"keras-float32": 1.9},
}

# Stock Keras in the format that tfmixed computes in.
SAME_FORMAT = {
    "float32": "keras-float32",
    "mixed_bfloat16": "keras-bfloat16",
    "mixed_float16": "keras-float16",
}
FIRST_STEP = 1.2

MEMORY_BASE = "keras-float32"
MEMORY = {"cnn": 0.55, "resnet50": 0.50, "transformer": 0.60}


@dataclasses.dataclass(frozen=True)
class MeanTarget:
    """A bound on the geometric mean of speed-ups, and one on each.

    Attributes:
        mean: The least geometric mean.
        each: The least speed-up of any workload.
        workloads: Over which workloads.
    """

    mean: float
    each: float
    workloads: tuple[str, ...]


MEANS = {
    "keras-bfloat16": MeanTarget(1.25, 1.0, WORKLOADS),
    "torch-amp": MeanTarget(1.2, 1.0, ("mlp", "cnn", "transformer")),
}
