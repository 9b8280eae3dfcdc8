"""The audit of a model: what 16 bits would do to it, before it trains."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import keras

from tfmixed import policy as policy_lib
from tfmixed._switch import ModelSwitch
from tfmixed.audit import tables
from tfmixed.audit.findings import Finding
from tfmixed.audit.static import checks as static
from tfmixed.audit.static import subject as static_subject
from tfmixed.audit.static import walk as static_walk
from tfmixed.audit.static.rows import Layer
from tfmixed.audit.static.rows import plain
from tfmixed.audit.static.rows import row_of
from tfmixed.audit.static.rows import with_details
from tfmixed.audit.static.subject import Subject
from tfmixed.hardware import Hardware
from tfmixed.hardware import hardware as detect_hardware

_POLICIES = ("mixed_float16", "mixed_bfloat16", "float16", "bfloat16")
_FALLBACK = "mixed_float16"


@dataclasses.dataclass(frozen=True)
class Audit:
    """What an audit found; prints as a table.

    Args:
        model: Name of the model.
        policy: The policy that it was audited under.
        assumed: Whether the model is a float32 one that was audited as if it
            had that policy.
        findings: What is wrong: errors first, then in the order of the model.
        layers: A row a layer.
        measured: Whether data were run through the model.
        notes: What to know about the measurement.
    """

    model: str
    policy: str
    assumed: bool
    findings: tuple[Finding, ...]
    layers: tuple[Layer, ...]
    measured: bool = False
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not any(one.severity == "error" for one in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, without NaN or infinity."""
        values = plain(dataclasses.asdict(self))
        return {"ok": self.ok, **values}

    def to_json(self) -> str:
        """Everything as strict JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def __str__(self) -> str:
        return tables.to_text(self)

    def __rich__(self) -> str:
        return tables.escaped(tables.to_text(self))


def audit(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    *,
    loss: Any = None,
    policy: str | None = None,
    batch_size: int | None = None,
    hardware: Hardware | None = None,
) -> Audit:
    """Looks for what goes wrong with a model in 16 bits.

    Without data it looks at layers, policies, the optimizer, constants and
    the source of a custom training step: nothing is computed. With data it
    also runs a few batches, forward and backward, and measures. The model is
    afterwards what it was; one that was not built is built by its data.

    Args:
        model: Any Keras model, compiled or not.
        x: Inputs, as `model.fit` takes them.
        y: Targets.
        loss: What `compile(loss=...)` takes; by default the loss that the
            model was compiled with.
        policy: A float32 model is audited as if it had this policy: by
            default the one that `tfmixed.enable()` chooses here, and
            `"mixed_float16"` where that is float32. A model that computes in
            16 bits is audited as it is.
        batch_size: How large batches are in training.
        hardware: The machine to audit for; by default this one.

    Returns:
        An `Audit`: `findings`, `layers`, `ok`, `to_json()`.

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: For an unknown policy, or one for a 16-bit model.

    Example:

    >>> inputs = keras.Input((8,))
    >>> outputs = keras.layers.Dense(3, "softmax")(inputs)
    >>> model = keras.Model(inputs, outputs)
    >>> result = tfmixed.audit(model, policy="mixed_float16")
    >>> [finding.code for finding in result.findings][:1]
    ['TM001']
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"audit(model) expects a Keras model, got {type(model).__name__}. "
            "Pass the model itself, for example audit(build_model())."
        )
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"`batch_size` got {batch_size}. Expected 1 or more.")
    if not model.built and x is not None:
        _build(model, x)
    assumed = _assumed_policy(model, policy, hardware)
    machine = detect_hardware() if hardware is None else hardware
    size = batch_size or _batch_size_of(model, x)
    with _as_if(model, assumed):
        walk = static_walk.walk(model, _sample(x))
        places = static_subject.places(model)
        subject = Subject(model, places, walk, machine, size, assumed)
        found = static.findings(subject)
        rows = [row_of(place) for place in places]
        name = assumed or _policy_name(model, subject)
    measured = _measure(model, x, y, loss, policy=assumed, batch_size=size)
    found += [] if measured is None else measured.findings
    return Audit(
        model=model.name,
        policy=name,
        assumed=assumed is not None,
        findings=tuple(static.in_order(found, [row.path for row in rows])),
        layers=tuple(with_details(rows, found, measured)),
        measured=measured is not None,
        notes=() if measured is None else tuple(measured.notes),
    )


def _assumed_policy(
    model: keras.Model, policy: str | None, hardware: Hardware | None
) -> str | None:
    """The policy to audit a float32 model under; None for a 16-bit one."""
    if policy not in (None, "auto", *_POLICIES):
        expected = ", ".join(map(repr, ("auto", *_POLICIES)))
        raise ValueError(
            f"`policy` got {policy!r}. Expected one of {expected}: in float32 "
            "there is nothing to audit."
        )
    places = static_subject.places(model)
    if any(place.is_half for place in places):
        own = {place.dtype for place in places if place.is_half}
        if policy not in (None, "auto") and policy.split("_")[-1] not in own:
            raise ValueError(
                f"`policy` got {policy!r}, but the model '{model.name}' "
                f"already computes in {' and '.join(sorted(own))}. Build it "
                "in float32 to audit it under another policy."
            )
        return None
    if policy in (None, "auto"):
        plan = (
            policy_lib.decide("auto")
            if hardware is None
            else policy_lib.choose(hardware)
        )
        chosen = plan.policy
        return _FALLBACK if chosen == "float32" else chosen
    return policy


@contextlib.contextmanager
def _as_if(model: keras.Model, policy: str | None) -> Iterator[None]:
    """Inside the block the layers of the model have this policy."""
    if policy is None:
        yield
        return
    switch = ModelSwitch(model, keras.dtype_policies.get(policy))
    try:
        switch.on()
        yield
    finally:
        switch.off()


def _policy_name(model: keras.Model, subject: Subject) -> str:
    """The policy of the model; of its layers, where it has none itself."""
    if subject.places[0].is_half:
        return str(model.dtype_policy.name)
    names = [place.layer.dtype_policy.name for place in subject.places]
    halves = [
        name
        for name, place in zip(names, subject.places, strict=True)
        if place.is_half
    ]
    return max(set(halves), key=halves.count) if halves else names[0]


def _build(model: keras.Model, x: Any) -> None:
    with contextlib.suppress(Exception):
        # As training would; what fails here is told by the walk.
        model(keras.tree.map_structure(lambda value: value[:1], _sample(x)))


def _sample(x: Any) -> Any:
    """Arrays for shapes and dtypes; None where the data are not arrays."""
    flat = keras.tree.flatten(x)
    arrays = all(hasattr(v, "shape") and hasattr(v, "dtype") for v in flat)
    return x if flat and x is not None and arrays else _first_of(x)


def _first_of(x: Any) -> Any:
    if x is None or not hasattr(x, "element_spec"):
        return None
    element = next(iter(x), None)
    return element[0] if isinstance(element, tuple) else element


def _batch_size_of(model: keras.Model, x: Any) -> int | None:
    """The batch size that the data or the inputs of the model fix."""
    if hasattr(x, "element_spec"):
        first = keras.tree.flatten(_first_of(x))
        return len(first[0]) if first and len(first[0].shape) else None
    shapes = [tensor.shape for tensor in getattr(model, "inputs", None) or []]
    return next((int(s[0]) for s in shapes if s and s[0]), None)


def _measure(
    model: keras.Model,
    x: Any,
    y: Any,
    loss: Any,
    *,
    policy: str | None,
    batch_size: int | None,
) -> Any:
    """What a few batches of data show; None without data."""
    if x is None:
        return None
    from tfmixed.audit.preflight import preflight

    options: dict[str, Any] = {"loss": loss, "policy": policy}
    if batch_size is not None:
        options["batch_size"] = batch_size
    return preflight(model, x, y, **options)
