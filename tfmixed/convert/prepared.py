"""The class of a prepared model that a user's own class was before."""

import functools
import inspect
from typing import Any

import keras

from tfmixed import _keras
from tfmixed.dtypes import KEY
from tfmixed.dtypes import default_policy
from tfmixed.model import FunctionalModel
from tfmixed.model import GuardedTraining
from tfmixed.model import Sequential
from tfmixed.optimizer import LossScaleOptimizer
from tfmixed.wrapping import wrap_optimizer


def guarded_class(model_class: Any) -> type:
    """The class for a prepared model, with the guarded step.

    Args:
        model_class: The class of the model before.
    """
    if model_class in (keras.Model, _keras.Functional, FunctionalModel):
        return FunctionalModel
    if model_class in (keras.Sequential, Sequential):
        return Sequential
    return model_class if is_prepared(model_class) else _custom(model_class)


def original_class(model_class: Any) -> Any:
    """The class that a prepared model had before, or would have in Keras."""
    if is_prepared(model_class):
        return next(
            base
            for base in model_class.__bases__
            if base not in (Prepared, GuardedTraining)
        )
    if model_class is FunctionalModel:
        return _keras.Functional
    return keras.Sequential if model_class is Sequential else model_class


def is_prepared(model_class: type) -> bool:
    """Whether a class was made here from a user's own."""
    return issubclass(model_class, Prepared)


class Prepared:
    """Mixed into a user's model class: the guarded step, saved as a whole."""

    preparation: Any
    restore_dtypes: Any

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration of the user's class, and the dtypes."""
        user_class = original_class(type(self))
        config = super().get_config()  # type: ignore[misc]
        return {
            "model": {
                "module": user_class.__module__,
                "class_name": user_class.__name__,
                "registered_name": keras.saving.get_registered_name(user_class),
                "config": {k: v for k, v in config.items() if k != KEY},
            },
            KEY: self.saved_dtypes(),  # type: ignore[attr-defined]
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], **kwargs: Any) -> Any:
        """Makes the user's model, with the dtypes that were saved."""
        saved = config[KEY]
        with default_policy(saved["policy"]):
            model = keras.saving.deserialize_keras_object(
                config["model"], **kwargs
            )
        become_guarded(model)
        model.restore_dtypes(saved)
        return model


def become_guarded(model: keras.Model) -> None:
    """Gives a model, in place, the class with the guarded step."""
    model.__class__ = guarded_class(type(model))


@functools.cache
def _custom(model_class: Any) -> type:
    bases = [Prepared, GuardedTraining, model_class]
    if issubclass(model_class, GuardedTraining):
        bases.remove(GuardedTraining)
    members: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": model_class.__doc__,
        "__qualname__": f"Prepared[{model_class.__qualname__}]",
    }
    if _has_own_compile(model_class):
        members["compile"] = _compile_of(model_class)
    prepared = type("Prepared", tuple(bases), members)
    register = keras.saving.register_keras_serializable(
        package="tfmixed", name="Prepared"
    )
    registered: type = register(prepared)
    return registered


def has_own_compile(model_class: type) -> bool:
    """Whether `compile` is a user's own, with arguments of its own."""
    return _has_own_compile(original_class(model_class))


def _has_own_compile(model_class: Any) -> bool:
    return model_class.compile not in (
        keras.Model.compile,
        keras.Sequential.compile,
        GuardedTraining.compile,
    )


def _compile_of(model_class: Any) -> Any:
    """A user's own `compile`, whose optimizers are wrapped afterwards."""

    @functools.wraps(model_class.compile)
    def compile_(self: Any, *args: Any, **kwargs: Any) -> None:
        model_class.compile(self, *args, **kwargs)
        scale = "dynamic" if self.computes_in_float16 else "none"
        for name, value in list(vars(self).items()):
            # One that is wrapped already keeps the scale that it was given.
            if isinstance(value, keras.optimizers.Optimizer) and not isinstance(
                value, LossScaleOptimizer
            ):
                setattr(self, name, wrap_optimizer(value, loss_scale=scale))

    compile_.__signature__ = (  # type: ignore[attr-defined]
        inspect.signature(model_class.compile)
    )
    return compile_


# What a file names; the classes made above take its place when they exist.
keras.saving.register_keras_serializable(package="tfmixed", name="Prepared")(
    Prepared
)
