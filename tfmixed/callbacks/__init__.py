"""Callbacks for `fit`: see the numbers, and act on them."""

from tfmixed import _start

if _start.names_wanted:
    from tfmixed.callbacks.adaptive_precision import AdaptivePrecision
    from tfmixed.callbacks.gradient_health import GradientHealth
    from tfmixed.callbacks.loss_scale_monitor import LossScaleMonitor
    from tfmixed.callbacks.precision_guard import PrecisionGuard
    from tfmixed.callbacks.recovery import TrainingDivergedError
    from tfmixed.callbacks.standards import StandardMissedError
    from tfmixed.callbacks.step_timer import StepTimer

__all__ = [
    "AdaptivePrecision",
    "GradientHealth",
    "LossScaleMonitor",
    "PrecisionGuard",
    "StandardMissedError",
    "StepTimer",
    "TrainingDivergedError",
]
