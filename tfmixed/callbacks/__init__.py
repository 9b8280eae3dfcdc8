"""Callbacks for `fit`: see the numbers, and act on them."""

from tfmixed import _start

if _start.names_wanted:
    from tfmixed.callbacks.loss_scale_monitor import LossScaleMonitor

__all__ = [
    "LossScaleMonitor",
]
