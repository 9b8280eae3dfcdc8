"""Any Keras model, made safe and fast in 16 bits; and back to stock Keras."""

from typing import Any

import keras

from tfmixed import _keras
from tfmixed import rules
from tfmixed.convert.assign import BEFORE
from tfmixed.convert.carry import carry_compile
from tfmixed.convert.choice import Choice
from tfmixed.convert.clone import CopyError
from tfmixed.convert.clone import copy_layer
from tfmixed.convert.clone import copy_state
from tfmixed.convert.prepared import become_guarded
from tfmixed.convert.prepared import guarded_class
from tfmixed.convert.prepared import original_class
from tfmixed.convert.rebuild import IN_PLACE
from tfmixed.convert.rebuild import Rebuilder
from tfmixed.convert.rebuild import plain_class
from tfmixed.convert.settle import Settler
from tfmixed.dtypes import default_policy
from tfmixed.preparation import Account

_HALF = ("float16", "bfloat16")


def prepare(
    model: keras.Model,
    policy: Any = None,
    *,
    keep_float32: Any = (),
    fast: bool = True,
    report: bool = False,
) -> Any:
    """Returns a model of the same weights that trains safely in 16 bits.

    Matrix products compute in 16 bits; outputs, normalization, averages,
    softmax and preprocessing stay in float32 or are replaced by a safe twin,
    as the table in `tfmixed.rules` says. The step is that of `tfmixed.Model`.
    Layers that are already mixed are kept as they are where they are safe, and
    float32 layers of a mixed model stay float32.

    The model that is handed in is left alone: layers, weights and optimizer
    state are copied. Layers that Keras cannot make again, because they have
    no `get_config`, are converted in place; so is a subclassed model of that
    kind. The report says so.

    Args:
        model: Any Keras model: functional, Sequential or subclassed, built or
            not, compiled or not. Of a model that is not built, and of custom
            layers in it, less can be known: build it first.
        policy: `None` for the policy of the model if it is mixed already, else
            for the one in force (`tfmixed.enable`), else for the best one
            here; `"auto"` for the best one here; a name such as
            `"mixed_float16"`; a `keras.DTypePolicy`; or a
            `keras.dtype_policies.DTypePolicyMap`, whose entries win over all
            rules.
        keep_float32: What shall stay float32: names of layers, paths
            (`"encoder/dense"`), regular expressions (a string has to match
            all of the name, a compiled pattern a part of it) or layer classes;
            one or several.
        fast: Whether layers of tfmixed may take the place of layers of Keras
            that are unsafe in 16 bits. `False` keeps those in float32.
        report: Whether to return the account, too.

    Returns:
        The prepared model; with `report=True` a pair of it and a
        `Preparation`, which `print` shows. `model.preparation` is the same.

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: For a policy that cannot be used, or if an entry of
            `keep_float32` or of the policy map matches no layer.

    Example:

    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    >>> prepared = tfmixed.prepare(model, "mixed_bfloat16")
    >>> prepared.layers[0].dtype_policy.name
    'float32'
    """
    _check_model(model, "prepare")
    choice = Choice(_policy_for(model, policy), keep_float32, fast)
    account = Account()
    settler = Settler(choice, account, _kept_before(model))
    with default_policy(choice.policy.name):
        prepared = _converted(model, settler, account, choice.is_16_bit, True)
    choice.check_all_used()
    prepared.preparation = account.close(
        model.name, choice.policy.name, prepared is model
    )
    carry_compile(model, prepared, account)
    prepared.preparation = account.close(
        model.name, choice.policy.name, prepared is model
    )
    return (prepared, prepared.preparation) if report else prepared


def to_float32(model: keras.Model) -> Any:
    """Returns the model in float32, of stock Keras classes, same weights.

    The inverse of `prepare`. A file saved from it loads where tfmixed is not
    installed. A model that `prepare` had to convert in place is converted
    back in place.

    Args:
        model: Any Keras model, prepared or not.

    Raises:
        TypeError: If `model` is not a Keras model.

    Example:

    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    >>> prepared = tfmixed.prepare(model, "mixed_bfloat16")
    >>> stock = tfmixed.to_float32(prepared)
    >>> type(stock).__module__.partition(".")[0], stock.dtype_policy.name
    ('keras', 'float32')
    >>> stock.save("model.keras")  # opens without tfmixed
    """
    _check_model(model, "to_float32")
    account = Account()
    settler = Settler(Choice("float32", fast=False), account)
    with default_policy("float32"):
        stock = _converted(model, settler, account, False, False)
    stock.__dict__.pop("preparation", None)
    carry_compile(model, stock, account)
    return stock


def stock_copy(model: keras.Model) -> Any:
    """A copy as `to_float32` makes it, not compiled; never in place.

    Args:
        model: Any Keras model.

    Raises:
        ValueError: If a layer cannot be made again from its configuration.
    """
    _check_model(model, "save_half")
    account = Account()
    settler = Settler(Choice("float32", fast=False), account)
    stock_class = original_class(type(model))
    with default_policy("float32"):
        try:
            if plain_class(model) is not None:
                rebuilder = Rebuilder(settler, account, False, share=False)
                return rebuilder.rebuild(model, stock_class)
            copy = _copied(model, settler)
        except CopyError as error:
            raise ValueError(f"save_half: {error}.") from error
    copy.__class__ = stock_class
    return copy


def _check_model(model: Any, function: str) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"{function} expects a Keras model. Received: {model!r} of type "
            f"{type(model).__name__}. Wrap a single layer in a "
            "keras.Sequential."
        )


def _policy_for(model: keras.Model, policy: Any) -> Any:
    if policy is not None:
        return policy
    half = _half_dtypes(model)
    return f"mixed_{half[0]}" if half else None


def _half_dtypes(model: keras.Model) -> list[str]:
    """The 16-bit dtypes in a model, but for what another one shares."""
    is_prepared = getattr(model, "preparation", None) is not None
    return [
        layer.compute_dtype
        for layer in _keras.flatten_layers(model)
        if layer.compute_dtype in _HALF
        and (is_prepared or layer not in IN_PLACE)
    ]


def _kept_before(model: Any) -> set[Any]:
    """The layers that a user kept in float32 in a mixed model: ids or paths."""
    preparation = getattr(model, "preparation", None)
    if preparation is not None:
        return {c.layer for c in preparation.changes if c.reason == BEFORE}
    if not _half_dtypes(model):
        return set()
    return {
        id(layer)
        for layer in _keras.flatten_layers(model)
        if layer.compute_dtype == "float32" and not _follows(layer)
    }


def _follows(layer: Any) -> bool:
    # A model's own policy says nothing about the layers in it.
    return isinstance(layer, keras.Model) or not (
        layer.weights and rules.rule_for(layer).float16 == rules.SIXTEEN
    )


def _converted(
    model: Any, settler: Settler, account: Account, protect: bool, guard: bool
) -> Any:
    """The model with other dtypes: a copy, or itself where there is none."""
    target = guarded_class if guard else _stock_class
    try:
        if plain_class(model) is not None:
            rebuilder = Rebuilder(settler, account, protect)
            new = rebuilder.rebuild(model, target(type(model)))
        else:
            new = _copied(model, settler)
    except CopyError as error:
        account.note(f"{error}, so the model itself was converted, in place.")
        new = model
        settler.settle_model(new, new)
    if guard:
        become_guarded(new)
    else:
        new.__class__ = _stock_class(type(new))
    settler.settle_outer(new)
    return new


def _stock_class(model_class: Any) -> Any:
    return original_class(model_class)


def _copied(model: Any, settler: Settler) -> Any:
    """A copy of a subclassed model, made from its configuration."""
    was = type(model)
    copy = copy_layer(model)
    settler.settle_model(copy, model)
    if model.built:
        if len(copy.weights) != len(model.weights):
            raise CopyError(
                f"'{model.name}' ({was.__name__}) cannot be built again: its "
                f"copy has {len(copy.weights)} of {len(model.weights)} weights"
            )
        copy_state(model, copy)
    return copy
