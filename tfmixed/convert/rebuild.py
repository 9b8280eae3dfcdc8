"""A functional or Sequential model, built anew layer by layer."""

import weakref
from typing import Any

import keras

from tfmixed import _keras
from tfmixed.convert import graph
from tfmixed.convert.assign import Place
from tfmixed.convert.clone import CopyError
from tfmixed.convert.clone import copy_layer
from tfmixed.convert.clone import copy_state
from tfmixed.convert.settle import Settler
from tfmixed.layers.to_float32 import ToFloat32
from tfmixed.model import FunctionalModel
from tfmixed.model import Sequential
from tfmixed.preparation import Account
from tfmixed.preparation import Change

_HALF = ("float16", "bfloat16")
# Layers that stand in a prepared model and in the one that was handed in,
# which their dtypes do not make a mixed one.
IN_PLACE: weakref.WeakSet[Any] = weakref.WeakSet()


class Rebuilder:
    """Makes a model again, with the dtypes that a settler gives.

    Args:
        settler: Sets the dtypes of each copied layer.
        account: Takes note of operations and of what could not be copied.
        protect: Whether operations that are unsafe in 16 bits get float32.
        share: Whether layers that cannot be copied may be in both models.
    """

    def __init__(
        self,
        settler: Settler,
        account: Account,
        protect: bool,
        share: bool = True,
    ) -> None:
        self._settler = settler
        self._account = account
        self._protect = protect
        self._share = share
        self._demands: dict[int, str] = {}
        self._tame: set[int] = set()
        self._names: set[str] = set()
        self._copies: dict[int, Any] = {}
        # Pairs whose state is to be copied once everything is built.
        self._pairs: list[tuple[Any, Any]] = []
        # Keeps the originals alive: they are known by `id`.
        self._originals: list[Any] = []

    def rebuild(self, model: Any, model_class: type) -> Any:
        """Returns the model anew, weights included.

        Args:
            model: A functional or Sequential model.
            model_class: The class of the new model; models nested in it keep
                the class of Keras that they have.

        Raises:
            CopyError: If it cannot be done without sharing layers.
        """
        # Those of an earlier `prepare` are taken out, and put in anew.
        self._names = {
            operation.name
            for operation in _keras.graph_operations(model)
            if not isinstance(operation, ToFloat32)
        }
        if self._protect:
            self._demands = graph.demands(model)
        new = self._model(model, model_class, "")
        for original, copy in self._pairs:
            copy_state(original, copy)
        _check_sharing(model, new)
        return new

    def _model(self, model: Any, model_class: type, path: str) -> Any:
        functional = _keras.graph_of(model)
        if functional is not None:
            self._tame |= graph.tame_products(functional)
        if isinstance(model, keras.Sequential):
            new = self._sequential(model, model_class, path)
        else:
            new = self._functional(model, model_class, path)
        if not model.trainable:
            new.trainable = False
        return new

    def _functional(self, model: Any, model_class: Any, path: str) -> Any:
        old_inputs, structure = _keras.graph_inputs(model)
        inputs = [self._input(x._keras_history.operation) for x in old_inputs]

        def call(operation: Any, args: Any, kwargs: Any) -> Any:
            return self._call(operation, path, args, kwargs)

        outputs = _keras.run_graph(model, inputs, call)
        packed = keras.tree.pack_sequence_as(structure, inputs)
        return model_class(inputs=packed, outputs=outputs, name=model.name)

    def _sequential(self, model: Any, model_class: Any, path: str) -> Any:
        functional = _keras.graph_of(model)
        calls: dict[int, Any] = {}
        for node in _keras.graph_nodes(functional) if functional else ():
            calls.setdefault(id(node.operation), node)
        layers, dtype = [], "float32"
        for layer in _keras.sequential_layers(model):
            if isinstance(layer, keras.layers.InputLayer):
                layers.append(self._input_layer(layer))
                continue
            call = _symbolic_call(calls.get(id(layer)), dtype)
            copy = self._copy(layer, path, call)
            layers.append(copy)
            dtype = copy.compute_dtype
        return model_class(layers, name=model.name)

    def _input_layer(self, layer: Any) -> Any:
        config = layer.get_config()
        if config.get("dtype") in _HALF:
            # A Sequential model built under a 16-bit policy declares it.
            config["dtype"] = "float32"
        return type(layer).from_config(config)

    def _input(self, layer: Any) -> Any:
        return self._input_layer(layer).output

    def _call(self, operation: Any, path: str, args: Any, kwargs: Any) -> Any:
        if isinstance(operation, ToFloat32):
            # Put in by an earlier `prepare`, and put in anew where needed.
            return args[0]
        if not isinstance(operation, keras.Layer):
            return self._operation(operation, path, args, kwargs)
        return self._copy(operation, path, (args, kwargs))(*args, **kwargs)

    def _operation(
        self, operation: Any, path: str, args: Any, kwargs: Any
    ) -> Any:
        copy = self._copies.get(id(operation))
        if copy is None:
            copy = _keras.copy_operation(operation)
            self._remember(operation, copy)
        dtypes = [
            x.dtype
            for x in keras.tree.flatten((args, kwargs))
            if isinstance(x, keras.KerasTensor) and x.dtype in _HALF
        ]
        forced = self._demands.get(id(operation))
        if self._protect and dtypes:
            unsafe = graph.needs_float32(operation, args, kwargs, dtypes[0])
            if forced or unsafe:
                why = forced or (
                    f"`keras.ops` {type(operation).__name__} is unsafe in "
                    f"{dtypes[0]}."
                )
                args, kwargs = self._widen(operation, path, why, args, kwargs)
        return copy(*args, **kwargs)

    def _widen(
        self, operation: Any, path: str, why: str, args: Any, kwargs: Any
    ) -> Any:
        """Puts a ToFloat32 layer before each 16-bit argument."""
        where = f"{path}/{operation.name}" if path else operation.name
        kind = type(operation).__name__
        change = Change(where, kind, "-", "float32", why)
        self._account.record(operation, change)
        count = 0

        def widen(value: Any) -> Any:
            nonlocal count
            if not isinstance(value, keras.KerasTensor):
                return value
            if value.dtype not in _HALF:
                return value
            count += 1
            name = f"{operation.name}_float32" + (
                f"_{count}" if count > 1 else ""
            )
            layer = ToFloat32(name=self._free(name), dtype="float32")
            return layer(value)

        return keras.tree.map_structure(widen, (args, kwargs))

    def _free(self, name: str) -> str:
        """The name, with a number if a layer of the model has it already."""
        number, free = 1, name
        while free in self._names:
            number, free = number + 1, f"{name}_{number + 1}"
        self._names.add(free)
        return free

    def _copy(self, layer: Any, path: str, call: Any) -> Any:
        """The copy of a layer, made and settled when it is first needed."""
        if id(layer) in self._copies:
            return self._copies[id(layer)]
        where = f"{path}/{layer.name}" if path else layer.name
        place = Place(
            where,
            force=self._demands.get(id(layer)),
            tame=id(layer) in self._tame,
        )
        nested = plain_class(layer)
        if nested is not None:
            copy = self._nested(layer, nested, place)
        else:
            copy = self._leaf(layer, place, call)
        self._remember(layer, copy)
        return copy

    def _nested(self, model: Any, model_class: type, place: Place) -> Any:
        why = place.force or self._settler.demand(model, place)
        if why is not None and self._protect:
            for operation in _keras.graph_operations(model):
                self._demands.setdefault(id(operation), why)
        copy = self._model(model, model_class, place.path)
        self._settler.settle_container(model, copy, place)
        return copy

    def _leaf(self, layer: Any, place: Place, call: Any) -> Any:
        try:
            copy = copy_layer(layer)
        except CopyError as error:
            if not self._share:
                raise
            self._account.note(
                f"{error}, so it was converted in place: the model that was "
                "handed in has it, too."
            )
            copy = layer
            IN_PLACE.update(_keras.flatten_layers(layer))
        self._settler.settle(copy, place, call, original=layer)
        if copy is not layer:
            self._pairs.append((layer, copy))
        return copy

    def _remember(self, original: Any, copy: Any) -> None:
        self._originals.append(original)
        self._copies[id(original)] = copy


def plain_class(layer: Any) -> Any:
    """The class of Keras for a model that is built from its graph; else None.

    A subclass that has a constructor of its own is not.
    """
    if isinstance(layer, Sequential):
        return keras.Sequential
    if isinstance(layer, FunctionalModel) and type(layer) is FunctionalModel:
        return _keras.Functional
    if type(layer) in (keras.Sequential, _keras.Functional):
        return type(layer)
    if isinstance(layer, _keras.Functional) and _keras.is_functional_like(
        type(layer)
    ):
        return type(layer)
    return None


def _symbolic_call(node: Any, dtype: str) -> Any:
    """The call of a layer in a Sequential model, with the dtype before it."""
    if node is None:
        return None

    def retype(value: Any) -> Any:
        if not isinstance(value, keras.KerasTensor):
            return value
        is_float = keras.backend.is_float_dtype(value.dtype)
        return keras.KerasTensor(
            value.shape, dtype if is_float else value.dtype
        )

    return keras.tree.map_structure(retype, (node.args, node.kwargs))


def _check_sharing(model: Any, new: Any) -> None:
    ours, theirs = len(_unique(model)), len(_unique(new))
    if ours != theirs:
        raise CopyError(
            f"the layers of '{model.name}' share variables in a way that their "
            f"configuration does not tell ({ours} variables would become "
            f"{theirs})"
        )


def _unique(model: Any) -> set[int]:
    return {id(variable) for variable in model.weights}
