"""Draws the picture of the README, `docs/loss-scale.png`, from a real training.

```bash
python -m docs.make_picture
```
"""

import pathlib

import keras
import matplotlib

matplotlib.use("Agg")

import tfmixed
from models.data import digits

TARGET = pathlib.Path(__file__).parent / "loss-scale.png"


def train() -> tfmixed.callbacks.LossScaleMonitor:
    """Trains on digits in float16 from a scale that is far too high."""
    keras.utils.set_random_seed(0)
    (x, y), _ = digits()
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model = tfmixed.prepare(model, "mixed_float16")
    scale = tfmixed.DynamicLossScale(initial=2.0**22, growth_interval=40)
    model.compile(
        tfmixed.LossScaleOptimizer("adam", scale),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    monitor = tfmixed.callbacks.LossScaleMonitor()
    model.fit(x, y, epochs=8, verbose=0, callbacks=[monitor])
    return monitor


if __name__ == "__main__":
    axes = train().plot()
    axes.figure.savefig(TARGET, dpi=110)
    print(f"Wrote {TARGET}.")
