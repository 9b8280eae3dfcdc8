"""Settles the dtypes of a layer: by the table, then by a look at its code."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras

from tfmixed import _keras
from tfmixed import rules
from tfmixed.convert import graph
from tfmixed.convert import trace
from tfmixed.convert.assign import FLOAT32
from tfmixed.convert.assign import Assigner
from tfmixed.convert.assign import Place

OUTER = "The model itself rounds no inputs; its layers cast for themselves."
_ROUNDS = 8
_HALF = ("float16", "bfloat16")


class Settler(Assigner):
    """Assigns dtypes, and corrects them where custom code needs it.

    A custom layer is called on symbols; what feeds operations that are unsafe
    in 16 bits is put into float32, until there are none left.
    """

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
        self.inherit(original, layer)
        self.assign(layer, place)
        if self._needs_a_look(layer, place):
            self._look(layer, place, call)
        elif id(layer) in self.wholes and rules.is_custom(type(layer)):
            self._build_whole(layer, place, call)

    def _build_whole(self, layer: Any, place: Place, call: Any) -> None:
        """Builds a custom layer of one policy, and what `build` makes, too."""
        if call is None or layer.built:
            return
        args, kwargs = call
        with contextlib.suppress(trace.CallError):
            trace.trace(layer, args, kwargs)
        for inner in _keras.flatten_layers(layer):
            self.inherit_children(inner)
        policy, why = self.wholes[id(layer)]
        self.whole(layer, place, policy, why)

    def settle_model(self, model: Any, original: Any) -> None:
        """Sets the dtypes of a model as a whole, its outputs in float32.

        Args:
            model: The model, or a copy that is not built.
            original: The model that was handed in.
        """
        place = Place("")
        self.inherit(original, model)
        self.assign(model, place)
        calls = list(_symbolic_calls(original))
        if not self.choice.is_16_bit:
            for args, kwargs in calls:
                with contextlib.suppress(trace.CallError):
                    trace.trace(model, args, kwargs)
                    break
            self.assign(model, place)
            return
        known = {id(inner) for inner in _keras.flatten_layers(model)}
        # With a policy of float32 the model itself does not round its inputs.
        for policy in (FLOAT32, self.choice.policy):
            for args, kwargs in calls:
                self.one(model, place, policy, OUTER)
                with contextlib.suppress(trace.CallError):
                    trace.trace(model, args, kwargs)
                    self._assign_new(model, place, known)
                    traced = self._look(model, place, (args, kwargs))
                    self._protect_heads(model, place, (args, kwargs), traced)
                    return
        self._look(model, place, calls[0] if calls else None)

    def _protect_heads(
        self,
        model: Any,
        place: Place,
        call: Any,
        traced: trace.Trace | None,
    ) -> None:
        """Keeps the layers that the outputs come from in float32.

        Args:
            model: The model.
            place: Where it stands.
            call: `(args, kwargs)` of a call on symbolic tensors.
            traced: Its trace as the model is now, if there is one: tracing
                is what takes the time.
        """
        args, kwargs = call
        traced = traced or trace.trace(model, args, kwargs)
        changed = [h for h in traced.heads(model) if self.is_free(h)]
        if not changed:
            return
        for head in changed:
            self.whole(head, self.place_of(head, place), FLOAT32, graph.HEAD)
        try:
            trace.trace(model, args, kwargs)
        except trace.CallError as failure:
            for head in changed:
                there = self.place_of(head, place)
                self.assign(head, dataclasses.replace(there, inside=True))
            self.account.note(
                "Its outputs come in 16 bits, because its own code does not "
                f"take float32 there: {_first_line(failure.cause)} Cast the "
                "outputs to float32 where they are used."
            )

    def _needs_a_look(self, layer: Any, place: Place) -> bool:
        if not self.choice.is_16_bit:
            return False
        if not any(
            rules.is_custom(type(inner)) and inner.compute_dtype in _HALF
            for inner in _keras.flatten_layers(layer)
        ):
            return False
        return layer.compute_dtype in _HALF or bool(_keras.child_layers(layer))

    def _look(self, layer: Any, place: Place, call: Any) -> trace.Trace | None:
        """Calls a custom layer on symbols until nothing in it is unsafe.

        Returns:
            The trace in which nothing was; None if there was no such.
        """
        if call is None:
            self._unseen(place, "it has not been built; call it on a batch")
            return None
        args, kwargs = call
        for _ in range(_ROUNDS):
            known = {id(inner) for inner in _keras.flatten_layers(layer)}
            try:
                traced = trace.trace(layer, args, kwargs)
            except trace.CallError as failure:
                if not self._retreat(layer, place, failure):
                    # It fails in float32, too: precision is not the cause.
                    self.assign(layer, place)
                    self._unseen(place, _first_line(failure.cause))
                    return None
                continue
            if self._assign_new(layer, place, known):
                continue
            if not self._protect(layer, place, traced):
                return traced
        self.whole(layer, place, FLOAT32, "It stayed unsafe in 16 bits.")
        return None

    def _assign_new(self, layer: Any, place: Place, known: set[int]) -> bool:
        """Settles layers that came into being when the layer was built."""
        found = False
        for parent in _keras.flatten_layers(layer):
            if not rules.is_custom(type(parent)):
                continue
            self.inherit_children(parent)
            there = self.place_of(parent, place)
            for child in _keras.child_layers(parent):
                if id(child) in known or self.account.of(child) is not None:
                    continue
                found = True
                below = there.below(child, inside=True)
                if id(parent) in self.wholes:
                    policy, why = self.wholes[id(parent)]
                    self.whole(child, below, policy, why)
                else:
                    self.assign(child, below)
        return found

    def _protect(self, layer: Any, place: Place, traced: trace.Trace) -> bool:
        """Keeps in float32 what feeds unsafe operations; was there any?"""
        found = False
        for unsafe in traced.unsafe(self.choice.dtype):
            why = (
                f"'{unsafe.layer.name}' ({type(unsafe.layer).__name__}) uses "
                f"{unsafe.operation} on what it gives, which is unsafe in "
                f"{self.choice.dtype}."
            )
            for source in unsafe.sources:
                if source.compute_dtype not in _HALF:
                    continue
                found = True
                there = self.place_of(source, place)
                if source is unsafe.layer:
                    self.one(source, there, FLOAT32, why)
                else:
                    self.whole(source, there, FLOAT32, why)
        return found

    def _retreat(
        self, layer: Any, place: Place, failure: trace.CallError
    ) -> bool:
        """Puts more into float32 after a call failed; False at the end."""
        failed = failure.layer
        why = (
            f"'{failed.name}' ({type(failed).__name__}) does not run in "
            f"{self.choice.dtype}: {_first_line(failure.cause)}"
        )
        there = self.place_of(failed, place)
        if rules.is_custom(type(failed)) and failed.compute_dtype in _HALF:
            self.one(failed, there, FLOAT32, why)
            return True
        for whole in (failed, layer):
            if any(
                inner.compute_dtype in _HALF
                for inner in _keras.flatten_layers(whole)
            ):
                self.whole(whole, self.place_of(whole, place), FLOAT32, why)
                return True
        return False

    def _unseen(self, place: Place, why: str) -> None:
        self.account.note(
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


def _first_line(error: BaseException) -> str:
    lines = [
        line.strip()
        for line in str(error).splitlines()
        if line.strip() and "encountered when calling" not in line
    ]
    text = lines[0] if lines else type(error).__name__
    # Keras colours the messages that it passes on.
    return text.replace("\x1b[1m", "").replace("\x1b[0m", "")[:200]
