"""A copy of a layer: the same configuration, the same state, new variables."""

import contextlib
import functools
import inspect
import tempfile
import types
import warnings
from collections.abc import Iterator
from typing import Any

import keras

from tfmixed import _keras
from tfmixed import rules
from tfmixed.layers.twins import stock_of


class CopyError(Exception):
    """A layer cannot be made again from its configuration; says why."""


def copy_layer(layer: Any) -> Any:
    """Returns a layer of the same stock class and configuration.

    Args:
        layer: A layer, or a `keras.ops` operation of a functional model.

    Returns:
        The copy, not built.

    Raises:
        CopyError: If the class has no usable `get_config`.
    """
    if not isinstance(layer, keras.Layer):
        return _keras.copy_operation(layer)
    try:
        with _quiet():
            if isinstance(layer, keras.layers.Lambda):
                return _copy_lambda(layer)
            return _from_config(stock_of(type(layer)) or type(layer), layer)
    except Exception as error:
        # Whatever a custom `get_config` raises: there is no copy.
        raise CopyError(
            f"'{layer.name}' ({type(layer).__name__}) cannot be made again "
            f"from its configuration ({_in_one_line(error)})"
        ) from error


def _from_config(stock: Any, layer: Any) -> Any:
    try:
        config = _with_functions(layer.get_config(), layer)
        return _constructed(stock, layer, config)
    except NotImplementedError:
        raise
    except Exception:
        # TextVectorization wants its functions in their serialized form.
        serialized = keras.saving.serialize_keras_object(layer)
        return _constructed(stock, layer, serialized["config"])


def _constructed(stock: Any, layer: Any, config: dict[str, Any]) -> Any:
    parts = _custom_parts(layer, config)
    with keras.saving.CustomObjectScope(parts):
        try:
            return stock.from_config(dict(config))
        except TypeError:
            # A constructor without `**kwargs` takes no `name` and `dtype`.
            parameters = inspect.signature(stock.__init__).parameters
            if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                raise
            accepted = {k: v for k, v in config.items() if k in parameters}
            if accepted.keys() == config.keys():
                raise
        copy = stock(**accepted)
    copy.name = layer.name
    return copy


def copy_state(source: Any, target: Any) -> None:
    """Copies weights, seeds, `trainable` and the like, sublayers included.

    Args:
        source: A layer.
        target: Its copy, built.

    Raises:
        CopyError: If the two do not have the same layers and variables.
    """
    ours, theirs = _keras.flatten_layers(source), _keras.flatten_layers(target)
    shapes = [[v.shape for v in layer.variables] for layer in (source, target)]
    if len(ours) != len(theirs) or shapes[0] != shapes[1]:
        raise CopyError(
            f"the copy of '{source.name}' ({type(source).__name__}) has "
            f"{len(theirs)} layers and {len(shapes[1])} variables, not "
            f"{len(ours)} and {len(shapes[0])}"
        )
    for one, other in zip(source.variables, target.variables, strict=True):
        other.assign(one)
    for one, other in zip(ours, theirs, strict=True):
        if one is not other:
            _copy_the_rest(one, other)
    for one, other in zip(source.variables, target.variables, strict=True):
        # A single variable may be frozen, in a layer that is not.
        if one.trainable != other.trainable:
            other.trainable = one.trainable


def _copy_the_rest(source: Any, target: Any) -> None:
    """Copies what is not a variable."""
    if target.trainable != source.trainable:
        target.trainable = source.trainable
    own = type(source).save_own_variables
    is_own = own is not keras.Layer.save_own_variables
    has_assets = hasattr(source, "save_assets")
    if has_assets or (is_own and rules.is_custom(type(source))):
        try:
            _copy_as_a_file_would(source, target, has_assets)
        except Exception as error:
            # Keras 3.10 cannot load an adapted tf-idf lookup.
            raise CopyError(
                f"the state of '{source.name}' ({type(source).__name__}) does "
                f"not fit its copy ({_in_one_line(error)})"
            ) from error
    if getattr(source, "stateful", False) and getattr(source, "states", None):
        for one, other in zip(source.states, target.states, strict=True):
            other.assign(one)
    _keras.refresh_cached_tensors(target)


def _copy_as_a_file_would(source: Any, target: Any, assets: bool) -> None:
    """Saves and loads: weights, then a vocabulary, which is a file."""
    store: dict[str, Any] = {}
    source.save_own_variables(store)
    target.load_own_variables(store)
    if assets:
        with tempfile.TemporaryDirectory() as folder:
            source.save_assets(folder)
            target.load_assets(folder)


def _copy_lambda(layer: Any) -> Any:
    # Its configuration would hold the byte code of the function.
    stock = stock_of(type(layer)) or type(layer)
    config = keras.Layer.get_config(layer)
    return stock(**_keras.lambda_arguments(layer), **config)


def _with_functions(config: dict[str, Any], layer: Any) -> dict[str, Any]:
    """Puts a user's own functions in the place of their serialized form.

    A lambda, or a function that was never registered, would not be found.
    """
    own = {}
    for key in config:
        value = getattr(layer, key, None)
        if isinstance(value, types.FunctionType | functools.partial) and (
            not _is_of_keras(value)
        ):
            own[key] = value
    return {**config, **own}


def _custom_parts(layer: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The classes and functions that a configuration may refer to."""
    parts: dict[str, Any] = {}
    text = repr(config)
    for inner in _keras.flatten_layers(layer):
        for value in (inner, *vars(inner).values()):
            is_function = isinstance(value, types.FunctionType)
            named = value if is_function else type(value)
            if _is_of_keras(named) or not (
                is_function or hasattr(named, "from_config")
            ):
                continue
            registered = keras.saving.get_registered_name(named)
            for name in {named.__name__, registered}:
                known = parts.setdefault(name, named)
                if known is not named and repr(name) in text:
                    raise ValueError(f"it uses two objects called {name!r}")
    return parts


def _is_of_keras(value: Any) -> bool:
    module = getattr(value, "__module__", "") or ""
    return module.split(".")[0] in ("keras", "tfmixed", "builtins")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # About lambdas that are unsafe to load: nothing is loaded here.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lambda.*")
        yield


def _in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
