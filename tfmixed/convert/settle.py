"""Gives one layer, and everything inside it, the dtypes that the rules say."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras

from tfmixed import _keras
from tfmixed import rules
from tfmixed.convert import graph
from tfmixed.convert import trace
from tfmixed.convert.choice import Choice
from tfmixed.layers.float32_inside import INSIDE
from tfmixed.layers.twins import TWINS
from tfmixed.layers.twins import stock_of
from tfmixed.preparation import Account
from tfmixed.preparation import Change

FLOAT32 = keras.DTypePolicy("float32")
KEPT = "`keep_float32` names it."
OUTER = "The model itself rounds no inputs; its layers cast for themselves."
BEFORE = "It was float32 in a mixed model before."
_ROUNDS = 8
_HALF = ("float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a layer stands.

    Attributes:
        path: Its path from the model on, `"encoder/dense"`.
        inside: Whether the code of a custom layer handles its output, which
            then has to be in 16 bits.
        force: Why the graph around it needs it in float32, or None.
        tame: Whether one of its factors is bounded in each of its calls.
    """

    path: str
    inside: bool = False
    force: str | None = None
    tame: bool = False

    def below(self, layer: Any, inside: bool) -> "Place":
        """The place of a layer inside this one."""
        path = f"{self.path}/{layer.name}" if self.path else layer.name
        return Place(path, inside)


class Settler:
    """Sets the dtypes of layers as the caller and the rules want it.

    Args:
        choice: What the caller asked for.
        account: Takes note of every layer.
        exempt: The ids of layers that the user kept in float32 in a mixed
            model, or their paths.
    """

    def __init__(
        self, choice: Choice, account: Account, exempt: set[Any] | None = None
    ) -> None:
        self._choice = choice
        self._account = account
        self._exempt = exempt or set()

    def demand(self, container: Any, place: Place) -> str | None:
        """Why all of a nested model has to be float32; None if it need not."""
        if self._choice.keeps_float32(container, place.path):
            return KEPT
        return None

    def settle_outer(self, model: Any) -> None:
        """Sets the policy of the model that was handed in."""
        if _keras.graph_of(model) is not None or isinstance(
            model, keras.Sequential
        ):
            self.settle_container(model, model, Place(""))

    def settle_model(self, model: Any, original: Any) -> None:
        """Sets the dtypes of a model as a whole, its outputs in float32.

        Args:
            model: The model, or a copy that is not built.
            original: The model that was handed in.
        """
        place = Place("")
        self._inherit(original, model)
        self._assign(model, place)
        calls = list(_symbolic_calls(original))
        if not self._choice.is_16_bit:
            for args, kwargs in calls:
                with contextlib.suppress(trace.CallError):
                    trace.trace(model, args, kwargs)
                    break
            self._assign(model, place)
            return
        # With a policy of float32 the model itself does not round its inputs.
        for policy in (FLOAT32, self._choice.policy):
            for args, kwargs in calls:
                self._one(model, place, policy, OUTER)
                with contextlib.suppress(trace.CallError):
                    trace.trace(model, args, kwargs)
                    self._look(model, place, (args, kwargs))
                    self._protect_heads(model, place, (args, kwargs))
                    return
        self._look(model, place, calls[0] if calls else None)

    def _protect_heads(self, model: Any, place: Place, call: Any) -> None:
        """Keeps the layers that the outputs come from in float32."""
        args, kwargs = call
        heads = trace.trace(model, args, kwargs).heads(model)
        changed = [h for h in heads if self._is_free(h)]
        for head in changed:
            self._whole(head, self._place_of(head, place), FLOAT32, graph.HEAD)
        try:
            trace.trace(model, args, kwargs)
        except trace.CallError as failure:
            for head in changed:
                there = self._place_of(head, place)
                self._assign(head, dataclasses.replace(there, inside=True))
            self._account.note(
                "Its outputs come in 16 bits, because its own code does not "
                f"take float32 there: {_first_line(failure.cause)} Cast the "
                "outputs to float32 where they are used."
            )

    def _is_free(self, layer: Any) -> bool:
        """Whether a layer computes in 16 bits by the rules alone."""
        if layer.compute_dtype not in _HALF:
            return False
        known = self._account.of(layer)
        if known is None or rules.rule_for(layer).float16 == rules.ALONE:
            return False
        return self._choice.explicit(layer, known.layer) is None

    def settle_container(self, original: Any, copy: Any, place: Place) -> None:
        """Sets the policy of a model itself, whose layers are settled.

        A Sequential model casts its input, and would round ids that come as
        floats; its first layer casts well enough.
        """
        half = any(
            layer.compute_dtype in _HALF
            for layer in _keras.flatten_layers(copy)
            if layer is not copy
        )
        is_sequential = isinstance(copy, keras.Sequential)
        policy = FLOAT32 if is_sequential or not half else self._choice.policy
        if not self._choice.is_16_bit:
            policy = FLOAT32
        if place.path:
            self._choice.keeps_float32(original, place.path)
            self._choice.explicit(original, place.path)
        _keras.set_layer_policy(copy, policy)

    def settle(
        self, layer: Any, place: Place, call: Any = None, original: Any = None
    ) -> None:
        """Sets the dtypes of one layer and of those inside it, in place.

        Args:
            layer: A layer that no graph has called yet, or whose graph may
                keep the dtypes that it was traced with.
            place: Where it stands.
            call: `(args, kwargs)` of a call on symbolic tensors, which tells
                what a custom layer computes; None if it is not known.
            original: The layer that this one is a copy of, if it is one.
        """
        self._inherit(original, layer)
        self._assign(layer, place)
        if self._needs_a_look(layer, place):
            self._look(layer, place, call)

    def _inherit(self, original: Any, layer: Any) -> None:
        """Gives the layers of a copy their names, and keeps what was kept."""
        if original is None or original is layer:
            return
        # Layers that are made by `build` are not there yet.
        ours = _keras.flatten_layers(original)
        theirs = _keras.flatten_layers(layer)
        for one, other in zip(ours, theirs, strict=False):
            if isinstance(one, type(other)):
                other.name = one.name
                if id(one) in self._exempt:
                    self._exempt.add(id(other))

    def _assign(self, layer: Any, place: Place) -> None:
        explicit = self._choice.explicit(layer, place.path)
        if explicit is not None:
            self._whole(layer, place, explicit, "The policy map says so.")
        elif self._choice.keeps_float32(layer, place.path):
            self._whole(layer, place, FLOAT32, KEPT)
        elif not self._choice.is_16_bit:
            self._plain(layer, place)
        elif id(layer) in self._exempt or place.path in self._exempt:
            self._whole(layer, place, FLOAT32, BEFORE)
        elif place.force is not None:
            self._forced(layer, place)
        else:
            self._by_rule(layer, place)

    def _plain(self, layer: Any, place: Place) -> None:
        reason = "The policy of the whole model."
        if rules.rule_for(layer).treatment("float16") == rules.ALONE:
            self._by_rule(layer, place)
            return
        self._one(layer, place, FLOAT32, reason)
        for child in _keras.child_layers(layer):
            self._assign(child, place.below(child, place.inside))

    def _forced(self, layer: Any, place: Place) -> None:
        rule = rules.rule_for(layer)
        if rule.float16 == rules.ALONE:
            self._leave(layer, place, rule)
        else:
            self._whole(layer, place, FLOAT32, str(place.force))

    def _by_rule(self, layer: Any, place: Place) -> None:
        rule = rules.rule_for(layer)
        treatment = rule.treatment(self._choice.dtype)
        if place.tame and rule.kind == "product of activations":
            treatment = rules.SIXTEEN
        if treatment == rules.ALONE:
            self._leave(layer, place, rule)
        elif treatment == rules.FLOAT32:
            self._keep(layer, place, rule)
        elif treatment == rules.TWIN:
            self._twin(layer, place, rule)
        else:
            reason = rule.reason
            self._one(layer, place, self._choice.policy, reason)
            inside = place.inside or treatment == rules.LOOK
            self._children(layer, place, inside)

    def _leave(self, layer: Any, place: Place, rule: rules.Rule) -> None:
        policy = _keras.layer_policy(layer)
        self._note(layer, place, policy, rule.reason)
        if rule is not rules.OTHER_DTYPE:
            self._account.note(
                f"Layer '{place.path}' ({type(layer).__name__}) is left alone "
                f"in {policy.name}: {rule.reason[0].lower()}{rule.reason[1:]}"
            )

    def _keep(self, layer: Any, place: Place, rule: rules.Rule) -> None:
        twin = INSIDE.get(type(layer))
        if place.inside and twin is not None and rule is not rules.SOFTMAX:
            layer.__class__ = twin
            self._one(layer, place, self._choice.policy, rule.reason, True)
            return
        self._one(layer, place, FLOAT32, rule.reason)
        # A wrapper, as SpectralNormalization, has a layer of its own kind.
        self._children(layer, place, place.inside)

    def _twin(self, layer: Any, place: Place, rule: rules.Rule) -> None:
        twin = TWINS.get(type(layer))
        if not self._choice.fast or twin is None:
            reason = f"{rule.reason} `fast=False` asked for stock layers."
            self._whole(layer, place, FLOAT32, reason)
            return
        layer.__class__ = twin
        self._one(layer, place, self._choice.policy, rule.reason, True)
        self._children(layer, place, place.inside)

    def _children(self, layer: Any, place: Place, inside: bool) -> None:
        for child in _keras.child_layers(layer):
            below = place.below(child, inside)
            if rules.is_custom(type(layer)) or _is_container(layer):
                self._assign(child, below)
            elif rules.rule_for(child).float16 == rules.ALONE:
                self._leave(child, below, rules.rule_for(child))
            else:
                # Part of a layer of Keras, which looks after its parts.
                self._part(child, below, _keras.layer_policy(layer))

    def _part(self, part: Any, place: Place, policy: Any) -> None:
        self._one(part, place, policy, "Part of the layer that it stands in.")
        for child in _keras.child_layers(part):
            self._part(child, place.below(child, place.inside), policy)

    def _whole(self, layer: Any, place: Place, policy: Any, why: str) -> None:
        """Gives a layer and all inside it one policy, as stock layers."""
        self._one(layer, place, policy, why)
        for child in _keras.child_layers(layer):
            if rules.rule_for(child).float16 != rules.ALONE:
                self._whole(child, place.below(child, False), policy, why)

    def _one(
        self,
        layer: Any,
        place: Place,
        policy: Any,
        why: str,
        twin: bool = False,
    ) -> None:
        self._note(layer, place, policy, why, twin)
        stock = stock_of(type(layer))
        if stock is not None and not twin:
            layer.__class__ = stock
        _keras.set_layer_policy(layer, policy)

    def _note(
        self,
        layer: Any,
        place: Place,
        policy: Any,
        why: str,
        twin: bool = False,
    ) -> None:
        if rules.rule_for(layer) is rules.CONTAINER:
            return
        known = self._account.of(layer)
        before = known.before if known else _keras.layer_policy(layer).name
        kind = type(layer).__name__
        path = place.path or layer.name
        change = Change(path, kind, before, policy.name, why, twin)
        self._account.record(layer, change)

    def _needs_a_look(self, layer: Any, place: Place) -> bool:
        if not self._choice.is_16_bit:
            return False
        if not any(
            rules.is_custom(type(inner)) and inner.compute_dtype in _HALF
            for inner in _keras.flatten_layers(layer)
        ):
            return False
        return layer.compute_dtype in _HALF or bool(_keras.child_layers(layer))

    def _look(self, layer: Any, place: Place, call: Any) -> None:
        """Calls a custom layer on symbols until nothing in it is unsafe."""
        if call is None:
            self._unseen(place, "it has not been built; call it on a batch")
            return
        args, kwargs = call
        for _ in range(_ROUNDS):
            known = {id(inner) for inner in _keras.flatten_layers(layer)}
            try:
                traced = trace.trace(layer, args, kwargs)
            except trace.CallError as failure:
                if not self._retreat(layer, place, failure):
                    # It fails in float32, too: precision is not the cause.
                    self._assign(layer, place)
                    self._unseen(place, _first_line(failure.cause))
                    return
                continue
            if self._assign_new(layer, place, known):
                continue
            if not self._protect(layer, place, traced):
                return
        self._whole(layer, place, FLOAT32, "It stayed unsafe in 16 bits.")

    def _assign_new(self, layer: Any, place: Place, known: set[int]) -> bool:
        """Settles layers that came into being when the layer was built."""
        found = False
        for parent in _keras.flatten_layers(layer):
            if not rules.is_custom(type(parent)):
                continue
            for child in _keras.child_layers(parent):
                if id(child) not in known and self._account.of(child) is None:
                    self._assign(child, place.below(child, inside=True))
                    found = True
        return found

    def _protect(self, layer: Any, place: Place, traced: trace.Trace) -> bool:
        """Keeps in float32 what feeds unsafe operations; was there any?"""
        found = False
        for unsafe in traced.unsafe(self._choice.dtype):
            why = (
                f"'{unsafe.layer.name}' ({type(unsafe.layer).__name__}) uses "
                f"{unsafe.operation} on what it gives, which is unsafe in "
                f"{self._choice.dtype}."
            )
            for source in unsafe.sources:
                if source.compute_dtype not in _HALF:
                    continue
                found = True
                there = self._place_of(source, place)
                if source is unsafe.layer:
                    self._one(source, there, FLOAT32, why)
                else:
                    self._whole(source, there, FLOAT32, why)
        return found

    def _retreat(
        self, layer: Any, place: Place, failure: trace.CallError
    ) -> bool:
        """Puts more into float32 after a call failed; False at the end."""
        failed = failure.layer
        why = (
            f"'{failed.name}' ({type(failed).__name__}) does not run in "
            f"{self._choice.dtype}: {_first_line(failure.cause)}"
        )
        there = self._place_of(failed, place)
        if rules.is_custom(type(failed)) and failed.compute_dtype in _HALF:
            self._one(failed, there, FLOAT32, why)
            return True
        for whole in (failed, layer):
            if any(
                inner.compute_dtype in _HALF
                for inner in _keras.flatten_layers(whole)
            ):
                self._whole(whole, self._place_of(whole, place), FLOAT32, why)
                return True
        return False

    def _place_of(self, layer: Any, otherwise: Place) -> Place:
        known = self._account.of(layer)
        return Place(known.layer) if known else otherwise

    def _unseen(self, place: Place, why: str) -> None:
        self._account.note(
            f"The code of '{place.path}' could not be looked into: {why}. Its "
            "layers follow the table, its own operations are as they were."
        )


def _symbolic_calls(model: Any) -> Iterator[Any]:
    """Calls of a model on symbols; where it tells no dtypes, of floats first.

    Args:
        model: A model that is built; there are no calls of another.
    """
    functional = _keras.graph_of(model)
    if functional is not None:
        yield (_keras.graph_inputs(functional)[1],), {}
        return
    shapes = _keras.build_shapes(model)
    for dtype in ("float32", "int32") if shapes else ():

        def symbol(shape: Any, dtype: str = dtype) -> Any:
            return keras.KerasTensor(tuple(shape), dtype)

        tensors = {
            name.removesuffix("_shape"): _map_shapes(symbol, shape)
            for name, shape in shapes.items()
        }
        if len(tensors) == 1:
            yield tuple(tensors.values()), {}
        else:
            yield (), tensors


def _map_shapes(function: Any, shapes: Any) -> Any:
    if isinstance(shapes, dict):
        return {k: _map_shapes(function, v) for k, v in shapes.items()}
    if any(isinstance(item, list | tuple | dict) for item in shapes):
        return [_map_shapes(function, item) for item in shapes]
    return function(shapes)


def _is_container(layer: Any) -> bool:
    """Whether the layers inside are a user's, not a part of a Keras layer."""
    return (
        isinstance(
            layer,
            keras.Model
            | keras.layers.Wrapper
            | keras.layers.Bidirectional
            | keras.layers.StackedRNNCells
            | keras.layers.Pipeline,
        )
        or type(layer) is keras.layers.RNN
    )


def _first_line(error: BaseException) -> str:
    lines = [
        line.strip()
        for line in str(error).splitlines()
        if line.strip() and "encountered when calling" not in line
    ]
    text = lines[0] if lines else type(error).__name__
    # Keras colours the messages that it passes on.
    return text.replace("\x1b[1m", "").replace("\x1b[0m", "")[:200]
