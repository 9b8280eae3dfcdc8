"""Gives layers the dtypes that the caller and the table of rules say."""

import dataclasses
from typing import Any

import keras

from tfmixed import _keras
from tfmixed import rules
from tfmixed.convert.choice import Choice
from tfmixed.layers.twins import INSIDE
from tfmixed.layers.twins import TWINS
from tfmixed.layers.twins import faster_of
from tfmixed.layers.twins import stock_of
from tfmixed.preparation import Account
from tfmixed.preparation import Change

FLOAT32 = keras.DTypePolicy("float32")
KEPT = "`keep_float32` names it."
BEFORE = "It was float32 in a mixed model before."
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


class Assigner:
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
        self.choice = choice
        self.account = account
        self._exempt = exempt or set()
        # By the id of a layer that was given one policy as a whole.
        self.wholes: dict[int, tuple[Any, str]] = {}
        self._originals: dict[int, Any] = {}

    def demand(self, container: Any, place: Place) -> str | None:
        """Why all of a nested model has to be float32; None if it need not."""
        if self.choice.keeps_float32(container, place.path):
            return KEPT
        return None

    def settle_outer(self, model: Any) -> None:
        """Sets the policy of the model that was handed in."""
        if _keras.graph_of(model) is not None or isinstance(
            model, keras.Sequential
        ):
            self.settle_container(model, model, Place(""))

    def is_free(self, layer: Any) -> bool:
        """Whether a layer computes in 16 bits by the rules alone."""
        if layer.compute_dtype not in _HALF:
            return False
        known = self.account.of(layer)
        if known is None or rules.rule_for(layer).float16 == rules.ALONE:
            return False
        return self.choice.explicit(layer, known.layer) is None

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
        policy = FLOAT32 if is_sequential or not half else self.choice.policy
        if not self.choice.is_16_bit:
            policy = FLOAT32
        if place.path:
            self.choice.keeps_float32(original, place.path)
            self.choice.explicit(original, place.path)
        _keras.set_layer_policy(copy, policy)

    def inherit(self, original: Any, layer: Any) -> None:
        """Gives the layers of a copy their names, and keeps what was kept."""
        if original is None or original is layer:
            return
        # Layers that are made by `build` are not there yet.
        for one, other in zip(
            _keras.flatten_layers(original),
            _keras.flatten_layers(layer),
            strict=False,
        ):
            if isinstance(one, type(other)):
                other.name = one.name
                self._originals[id(other)] = one
                if id(one) in self._exempt:
                    self._exempt.add(id(other))

    def inherit_children(self, parent: Any) -> None:
        """Does the same for what the `build` of a copied layer has made."""
        original = self._originals.get(id(parent))
        if original is not None:
            ours = _keras.child_layers(original)
            theirs = _keras.child_layers(parent)
            for one, other in zip(ours, theirs, strict=False):
                if id(other) not in self._originals:
                    self.inherit(one, other)

    def assign(self, layer: Any, place: Place) -> None:
        """Gives a layer, and those inside it, what the rules say."""
        explicit = self.choice.explicit(layer, place.path)
        if explicit is not None:
            self.whole(layer, place, explicit, "The policy map says so.")
        elif self.choice.keeps_float32(layer, place.path):
            self.whole(layer, place, FLOAT32, KEPT)
        elif not self.choice.is_16_bit:
            self._plain(layer, place)
        elif id(layer) in self._exempt or place.path in self._exempt:
            self.whole(layer, place, FLOAT32, BEFORE)
        elif place.force is not None:
            self._forced(layer, place)
        else:
            self._by_rule(layer, place)

    def _plain(self, layer: Any, place: Place) -> None:
        reason = "The policy of the whole model."
        if rules.rule_for(layer).treatment("float16") == rules.ALONE:
            self._by_rule(layer, place)
            return
        self.one(layer, place, FLOAT32, reason)
        for child in _keras.child_layers(layer):
            self.assign(child, place.below(child, place.inside))

    def _forced(self, layer: Any, place: Place) -> None:
        rule = rules.rule_for(layer)
        if rule.float16 == rules.ALONE:
            self._leave(layer, place, rule)
        else:
            self.whole(layer, place, FLOAT32, str(place.force))

    def _by_rule(self, layer: Any, place: Place) -> None:
        rule = rules.rule_for(layer)
        treatment = rule.treatment(self.choice.dtype)
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
            self.one(layer, place, self.choice.policy, reason)
            inside = place.inside or treatment == rules.LOOK
            self._children(layer, place, inside)

    def _leave(self, layer: Any, place: Place, rule: rules.Rule) -> None:
        policy = _keras.layer_policy(layer)
        self._note(layer, place, policy, rule.reason)
        if rule is not rules.OTHER_DTYPE:
            self.account.note(
                f"Layer '{place.path}' ({type(layer).__name__}) is left alone "
                f"in {policy.name}: {rule.reason[0].lower()}{rule.reason[1:]}"
            )

    def _keep(self, layer: Any, place: Place, rule: rules.Rule) -> None:
        twin = INSIDE.get(type(layer))
        if place.inside and twin is not None and rule is not rules.SOFTMAX:
            layer.__class__ = twin
            self.one(layer, place, self.choice.policy, rule.reason, True)
            return
        self.one(layer, place, FLOAT32, rule.reason)
        # A wrapper, as SpectralNormalization, has a layer of its own kind.
        self._children(layer, place, place.inside)

    def _twin(self, layer: Any, place: Place, rule: rules.Rule) -> None:
        stock = stock_of(type(layer)) or type(layer)
        twin = TWINS.get(stock)
        if not self.choice.fast:
            # The code around it may still need 16 bits.
            twin = INSIDE.get(stock) if place.inside else None
        if twin is None:
            reason = f"{rule.reason} `fast=False` asked for stock layers."
            self.whole(layer, place, FLOAT32, reason)
            return
        layer.__class__ = twin
        self.one(layer, place, self.choice.policy, rule.reason, True)
        self._children(layer, place, place.inside)

    def _children(self, layer: Any, place: Place, inside: bool) -> None:
        for child in _keras.child_layers(layer):
            below = place.below(child, inside)
            if rules.is_custom(type(layer)) or _is_container(layer):
                self.assign(child, below)
            elif rules.rule_for(child).float16 == rules.ALONE:
                self._leave(child, below, rules.rule_for(child))
            else:
                # Part of a layer of Keras, which looks after its parts.
                self._part(child, below, _keras.layer_policy(layer))

    def _part(self, part: Any, place: Place, policy: Any) -> None:
        self.one(part, place, policy, "Part of the layer that it stands in.")
        for child in _keras.child_layers(part):
            self._part(child, place.below(child, place.inside), policy)

    def whole(self, layer: Any, place: Place, policy: Any, why: str) -> None:
        """Gives a layer and all inside it one policy, as stock layers."""
        self.one(layer, place, policy, why)
        # Also for layers that its `build` has not made yet.
        self.wholes[id(layer)] = (policy, why)
        for child in _keras.child_layers(layer):
            if rules.rule_for(child).float16 != rules.ALONE:
                self.whole(child, place.below(child, False), policy, why)

    def one(
        self,
        layer: Any,
        place: Place,
        policy: Any,
        why: str,
        twin: bool = False,
    ) -> None:
        """Gives a policy to one layer alone; as a twin if `twin` is set."""
        self._note(layer, place, policy, why, twin)
        if not twin:
            self._as_stock_or_faster(layer, policy)
        _keras.set_layer_policy(layer, policy)

    def _as_stock_or_faster(self, layer: Any, policy: Any) -> None:
        wanted = stock_of(type(layer)) or type(layer)
        if self.choice.fast and policy.compute_dtype in _HALF:
            wanted = faster_of(layer) or wanted
        if wanted is not type(layer):
            layer.__class__ = wanted

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
        known = self.account.of(layer)
        before = known.before if known else _keras.layer_policy(layer).name
        kind = type(layer).__name__
        path = place.path or layer.name
        change = Change(path, kind, before, policy.name, why, twin)
        self.account.record(layer, change)

    def place_of(self, layer: Any, otherwise: Place) -> Place:
        """Where a layer stands, if it has been assigned before."""
        known = self.account.of(layer)
        return Place(known.layer) if known else otherwise


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
