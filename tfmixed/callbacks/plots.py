"""Plots of what the callbacks have recorded."""

from typing import Any

import numpy as np


def axes(ax: Any = None) -> Any:
    """Returns the axes to draw on, new ones for None.

    Raises:
        ModuleNotFoundError: If `matplotlib` is not installed.
    """
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plot() needs matplotlib, which is not installed: "
            'pip install "tfmixed[plot]".'
        ) from error
    return plt.subplots(figsize=(8, 3), layout="constrained")[1]


def loss_scale(records: dict[str, np.ndarray], ax: Any = None) -> Any:
    """Draws the loss scale over the steps, with skipped steps marked.

    Args:
        records: `LossScaleMonitor.records`.
        ax: Axes to draw on; by default new ones.

    Returns:
        The axes.
    """
    ax = axes(ax)
    step, scale = records["step"], records["loss_scale"]
    ax.step(step, scale, where="post", color="tab:blue", label="loss scale")
    bad = ~records["finite"]
    if bad.any():
        ax.plot(
            step[bad],
            scale[bad],
            "x",
            color="tab:red",
            label=f"skipped ({int(bad.sum())})",
        )
    ax.set_yscale("log", base=2)
    ax.set_xlabel("step")
    ax.set_ylabel("loss scale")
    ax.legend(loc="best")
    return ax
