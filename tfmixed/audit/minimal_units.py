"""What a DTypePolicyMap can tell apart in a model that `prepare` made."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import keras

from tfmixed import _keras
from tfmixed import rules
from tfmixed.layers.to_float32 import ToFloat32
from tfmixed.layers.twins import stock_of

_HALF = ("float16", "bfloat16")
_SPECIAL = frozenset(r".^$*+?{}[]\|()")
# Layers of Keras that `prepare` looks into for names, beside custom ones.
_OPEN = (
    keras.Model,
    keras.layers.Wrapper,
    keras.layers.StackedRNNCells,
    keras.layers.Pipeline,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """Layers that are in float32 together, because of one entry of a map.

    Args:
        key: The key of the entry.
        path: What people call it.
        layers: The layers that the entry puts into float32: one, and those
            inside it, which follow it.
        half: Those of them that compute in 16 bits without the entry.
    """

    key: str
    path: str
    layers: frozenset[Any]
    half: frozenset[Any]


@dataclasses.dataclass(eq=False)
class _Spot:
    """A layer, and where it stands: at several places if it is shared."""

    layer: Any
    paths: list[str] = dataclasses.field(default_factory=list)
    is_named: bool = False
    is_own: bool = False

    def names(self) -> set[str]:
        path = getattr(self.layer, "path", None)
        return {self.layer.name, *self.paths, path or self.layer.name}


def paths_of(model: keras.Model) -> set[str]:
    """Where all layers of a model stand.

    Args:
        model: A built model.
    """
    return {path for spot in _spots(model) for path in spot.paths}


def units_of(model: keras.Model, known: set[str]) -> list[Unit]:
    """The units that compute in 16 bits, in the order of the model.

    A layer of Keras counts with all inside it. A custom layer is a unit that
    has those of its layers in it, which are units of their own besides.

    Args:
        model: A model that `prepare` made.
        known: The paths in the model that it was made of. Layers that `build`
            makes without a name are called something else in each copy, and
            no entry can tell which is meant.
    """
    named: dict[str, list[_Spot]] = {}
    spots = _spots(model)
    for spot in spots:
        for name in spot.names() if spot.is_named else ():
            named.setdefault(name, []).append(spot)
    units = [
        _unit(spot, named)
        for spot in spots
        if spot.is_own and known.issuperset(spot.paths)
    ]
    return [unit for unit in units if unit.half]


def wholes_of(units: Iterable[Unit]) -> list[Unit]:
    """The units that have all of another one in them.

    Args:
        units: All units of a model.
    """
    units = list(units)
    return [u for u in units if any(o.layers < u.layers for o in units)]


def dtypes_by_path(
    model: keras.Model, known: set[str]
) -> dict[str, list[tuple[str, str]]]:
    """Classes and policies of each layer, and of all that is inside it.

    Args:
        model: A model that `prepare` made.
        known: The paths in the model that it was made of.
    """
    return {
        path: sorted(
            # A twin has the name of the layer of Keras, in another module.
            (str(type(layer)), _keras.layer_policy(layer).name)
            for layer in _keras.flatten_layers(spot.layer)
            # It does nothing to float32, and a container computes nothing.
            if not isinstance(layer, ToFloat32) and not _is_container(layer)
        )
        for spot in _spots(model)
        for path in spot.paths
        if path in known
    }


def in_float32(layer: Any) -> tuple[Any, Any]:
    """The class and policy that an entry of a map gives to a layer.

    Args:
        layer: The layer.
    """
    return stock_of(type(layer)) or type(layer), keras.DTypePolicy("float32")


def _unit(spot: _Spot, named: dict[str, list[_Spot]]) -> Unit:
    """The unit of a layer, with others that answer to its paths if need be."""
    found = {id(s.layer): s.layer for path in spot.paths for s in named[path]}
    layers = frozenset(x for layer in found.values() for x in _whole(layer))
    half = frozenset(x for x in layers if x.compute_dtype in _HALF)
    key = "|".join(_escaped(path) for path in spot.paths)
    return Unit(key, spot.paths[0], layers, half)


def _escaped(path: str) -> str:
    return re.escape(path) if _SPECIAL & set(path) else path


def _whole(layer: Any) -> list[Any]:
    """The layer and what `prepare` gives the same policy inside it."""
    found = [layer]
    for child in _keras.child_layers(layer):
        if rules.rule_for(child).float16 != rules.ALONE:
            found += _whole(child)
    return found


def _is_container(layer: Any) -> bool:
    return isinstance(layer, keras.Model) and not rules.is_custom(type(layer))


def _spots(model: keras.Model) -> list[_Spot]:
    found: dict[int, _Spot] = {}

    def walk(parent: Any, path: str, named: bool, own: bool) -> None:
        for child in _keras.child_layers(parent):
            where = f"{path}/{child.name}" if path else child.name
            spot = found.setdefault(id(child), _Spot(child))
            if where in spot.paths:
                continue
            spot.paths.append(where)
            is_container = _is_container(child)
            is_input = isinstance(child, keras.layers.InputLayer)
            spot.is_named |= named and not is_container
            spot.is_own |= own and not is_container and not is_input
            custom = rules.is_custom(type(child))
            is_open = custom or isinstance(child, _OPEN)
            is_open |= type(child) is keras.layers.RNN
            walk(
                child,
                where,
                named and is_open,
                own and (custom or is_container),
            )

    walk(model, "", True, True)
    return list(found.values())
