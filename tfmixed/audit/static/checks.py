"""The static part of the audit: everything that needs no data."""

from collections.abc import Callable
from collections.abc import Iterable

from tfmixed.audit.codes import SEVERITIES
from tfmixed.audit.findings import Finding
from tfmixed.audit.static import constants as static_constants
from tfmixed.audit.static import custom as static_custom
from tfmixed.audit.static import heads as static_heads
from tfmixed.audit.static import ids as static_ids
from tfmixed.audit.static import losses as static_losses
from tfmixed.audit.static import machine as static_machine
from tfmixed.audit.static import optimizer as static_optimizer
from tfmixed.audit.static import rules as static_rules
from tfmixed.audit.static import shapes as static_shapes
from tfmixed.audit.static import source as static_source
from tfmixed.audit.static.subject import Subject

CHECKS: tuple[Callable[[Subject], Iterable[Finding]], ...] = (
    static_heads.check_heads,
    static_optimizer.check_scaling,
    static_heads.check_softmax,
    static_constants.check_operations,
    static_constants.check_attributes,
    static_constants.check_optimizer_epsilon,
    static_custom.check_constants,
    static_ids.check_ids,
    static_shapes.check_dimensions,
    static_shapes.check_work,
    static_shapes.check_batch,
    static_rules.check_left_behind,
    static_optimizer.check_eager,
    static_machine.check_speed,
    static_optimizer.check_stock_scaling,
    static_source.check_steps,
    static_source.check_nesting,
    static_rules.check_rules,
    static_rules.check_attention,
    static_custom.check_unsafe,
    static_custom.check_unseen,
    static_machine.check_kernels,
    static_rules.check_preprocessing,
    static_losses.check_regularizers,
    static_losses.check_added_losses,
    static_losses.check_metrics,
)


def findings(subject: Subject) -> list[Finding]:
    """What the static checks find, unsorted.

    Args:
        subject: The model under audit.
    """
    return [one for check in CHECKS for one in check(subject)]


def in_order(found: Iterable[Finding], paths: Iterable[str]) -> list[Finding]:
    """Findings by severity, then in the order of the model.

    Args:
        found: Findings in any order.
        paths: The paths of the layers, in the order of the model.
    """
    position = {path: index for index, path in enumerate(paths)}
    return sorted(
        found,
        key=lambda one: (
            SEVERITIES.index(one.severity),
            -1 if one.layer is None else position.get(one.layer, len(position)),
            one.code,
        ),
    )
