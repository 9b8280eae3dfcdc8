"""What the static checks look at: the layers of a model, in order, by path."""

import dataclasses
import functools
from typing import Any

import keras

from tfmixed import _keras
from tfmixed import rules
from tfmixed.audit import observe
from tfmixed.audit.static import walk as static_walk
from tfmixed.hardware import Hardware
from tfmixed.layers.twins import FASTER
from tfmixed.layers.twins import INSIDE
from tfmixed.model import GuardedTraining

HALF = ("float16", "bfloat16")
_ONLY_FASTER = set(FASTER.values()) - set(INSIDE.values())


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """A layer and where it stands.

    Args:
        layer: The layer.
        path: What the rows of the audit call it, unique in the model.
        parent: The place of the layer that it stands in; None for the model.
    """

    layer: Any
    path: str
    parent: "Place | None" = None

    @functools.cached_property
    def dtype(self) -> str:
        """What the layer computes in."""
        return str(self.layer.compute_dtype)

    @property
    def is_half(self) -> bool:
        """Whether the layer computes in 16 bits."""
        return self.dtype in HALF

    @functools.cached_property
    def rule(self) -> rules.Rule:
        """What the rules say about the layer."""
        return rules.rule_for(self.layer)

    @property
    def treatment(self) -> str:
        """What the rules want of the layer in its dtype; empty for float32."""
        return self.rule.treatment(self.dtype) if self.is_half else ""

    @property
    def is_ours(self) -> bool:
        """Whether tfmixed defines the class: a twin, safe by itself.

        A twin that is only faster is as safe as what Keras computes.
        """
        kind: Any = type(self.layer)
        return kind.__module__.split(".")[0] == "tfmixed" and (
            kind not in _ONLY_FASTER
        )

    @property
    def is_container(self) -> bool:
        """Whether it only runs other layers, as functional models do."""
        return isinstance(self.layer, keras.Model)

    def __str__(self) -> str:
        what = [type(self.layer).__name__]
        activation = rules.activation_name(self.layer)
        if activation not in (None, "linear"):
            what.append(str(activation))
        return f"Layer '{self.path}' ({', '.join(what)})"


def children(layer: Any) -> list[Any]:
    """The layers that stand directly inside a layer."""
    return list(_keras.child_layers(layer))


def places(model: keras.Model) -> tuple[Place, ...]:
    """The layers of a model, the model first, each once, in model order.

    Args:
        model: Any Keras model. InputLayers are left out.
    """
    names = observe.paths(model)
    root = Place(model, model.name)
    found = [root]
    seen = {id(model)}

    def visit(parent: Place) -> None:
        for layer in children(parent.layer):
            if id(layer) in seen or isinstance(layer, keras.layers.InputLayer):
                continue
            seen.add(id(layer))
            path = names.get(id(layer), f"{parent.path}/{layer.name}")
            place = Place(layer, path, parent)
            found.append(place)
            visit(place)

    visit(root)
    return tuple(found)


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A model under audit, with everything that the checks need.

    Args:
        model: The model.
        places: Its layers.
        walk: What happens when the model is called.
        hardware: The machine it is to run on.
        batch_size: Size of a batch, where known.
        as_if: The policy that a float32 model is audited under; None for a
            model that is looked at as it is.
    """

    model: keras.Model
    places: tuple[Place, ...]
    walk: static_walk.Walk
    hardware: Hardware
    batch_size: int | None = None
    as_if: str | None = None

    @functools.cached_property
    def by_id(self) -> dict[int, Place]:
        """The places by the `id` of their layers."""
        return {id(place.layer): place for place in self.places}

    @functools.cached_property
    def head_ids(self) -> frozenset[int]:
        """The `id`s of the layers that make the outputs of the model."""
        return frozenset(
            id(output.operation)
            for output in self.walk.outputs
            if output.operation is not None
        )

    @property
    def guarded(self) -> bool:
        """Whether the step of the model is that of tfmixed."""
        return isinstance(self.model, GuardedTraining)

    @functools.cached_property
    def formats(self) -> tuple[str, ...]:
        """The 16-bit formats that anything in the model computes in."""
        used = {place.dtype for place in self.places}
        return tuple(name for name in HALF if name in used)

    def name(self, operation: Any) -> str:
        """How messages call a layer or an operation of `keras.ops`."""
        place = self.by_id.get(id(operation))
        if place is not None:
            return str(place)
        kind = type(operation).__name__
        if isinstance(operation, keras.Layer):
            return f"Layer '{operation.name}' ({kind})"
        return f"Operation '{operation.name}' (keras.ops, {kind})"

    def path(self, operation: Any) -> str:
        """The path of a layer; the name of an operation of `keras.ops`."""
        place = self.by_id.get(id(operation))
        return str(operation.name) if place is None else place.path
