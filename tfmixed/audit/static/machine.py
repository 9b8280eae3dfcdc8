"""TM012 and TM018: what this machine has no fast kernel, or no kernel, for."""

from collections.abc import Iterator

from tfmixed.audit.findings import Finding
from tfmixed.audit.findings import finding
from tfmixed.audit.static.heads import is_inside
from tfmixed.audit.static.subject import Subject
from tfmixed.plan import choose
from tfmixed.plan import objection_to

# By class and format: what a CPU has no kernel for. Not asked of TensorFlow by
# a trial: some layers end the process instead of raising.
_WITHOUT_KERNEL = {
    "MaxPooling3D": ("float16",),
    "AveragePooling3D": ("float16",),
    "AdaptiveAveragePooling3D": ("float16",),
    "AdaptiveMaxPooling3D": ("float16",),
}


def check_speed(subject: Subject) -> Iterator[Finding]:
    """TM012: the format is slow on this machine."""
    for dtype in subject.formats:
        objection = objection_to(f"mixed_{dtype}", subject.hardware)
        if objection is None:
            continue
        better = choose(subject.hardware).policy
        count = sum(place.dtype == dtype for place in subject.places)
        yield finding(
            "TM012",
            None,
            f"{count} of {len(subject.places)} layers compute in {dtype}, "
            f"which is not fast on this {subject.hardware.kind}. {objection}",
            f"Use the policy {better!r} here; tfmixed.enable() chooses it.",
        )


def check_kernels(subject: Subject) -> Iterator[Finding]:
    """TM018: a layer that cannot run in its format on this device."""
    if subject.hardware.kind != "CPU":
        return
    for place in subject.places:
        classes = type(place.layer).__mro__
        missing = {
            dtype
            for layer_class in classes
            for dtype in _WITHOUT_KERNEL.get(layer_class.__name__, ())
        }
        if place.dtype in missing and not is_inside(place):
            yield finding(
                "TM018",
                place.path,
                f"{place} computes in {place.dtype}, for which TensorFlow has "
                "no kernel on a CPU: the step fails.",
            )
