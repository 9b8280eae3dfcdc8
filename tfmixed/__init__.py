"""Mixed precision for Keras on TensorFlow: measured, guarded, visible."""

from tfmixed import _start

if _start.names_wanted:
    from tfmixed import callbacks
    from tfmixed.archive import save_half
    from tfmixed.audit.audit import audit
    from tfmixed.audit.blame import blame
    from tfmixed.audit.minimal import minimal_float32
    from tfmixed.hardware import hardware
    from tfmixed.loss_scale import DynamicLossScale
    from tfmixed.loss_scale import FixedLossScale
    from tfmixed.loss_scale import NoLossScale
    from tfmixed.model import Model
    from tfmixed.model import Sequential
    from tfmixed.optimizer import LossScaleOptimizer
    from tfmixed.policy import current_plan
    from tfmixed.policy import disable
    from tfmixed.policy import enable
    from tfmixed.policy import precision
    from tfmixed.predictive_loss_scale import PredictiveLossScale
    from tfmixed.prepare import prepare
    from tfmixed.prepare import to_float32
    from tfmixed.report.compare import compare
    from tfmixed.scheduled_loss_scale import ScheduledLossScale
    from tfmixed.wrapping import wrap_optimizer

__all__ = [
    "DynamicLossScale",
    "FixedLossScale",
    "LossScaleOptimizer",
    "Model",
    "NoLossScale",
    "PredictiveLossScale",
    "ScheduledLossScale",
    "Sequential",
    "audit",
    "blame",
    "callbacks",
    "compare",
    "current_plan",
    "disable",
    "enable",
    "hardware",
    "minimal_float32",
    "precision",
    "prepare",
    "save_half",
    "to_float32",
    "wrap_optimizer",
]
