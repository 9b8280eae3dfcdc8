"""`tfmixed.Model`: a `keras.Model` whose training step is all or nothing."""

import functools
import inspect
from typing import TYPE_CHECKING
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed import guard
from tfmixed import policy as policy_lib
from tfmixed.casting import to_float32
from tfmixed.dtypes import KEY
from tfmixed.dtypes import apply_dtypes
from tfmixed.dtypes import default_policy
from tfmixed.dtypes import dtypes_of
from tfmixed.dtypes import warn_of_other_layers
from tfmixed.fast import clusters
from tfmixed.gradients import is_reachable
from tfmixed.loss_scale import NoLossScale
from tfmixed.preparation import Preparation
from tfmixed.retraces import RetraceReporter
from tfmixed.retraces import Shapes
from tfmixed.skips import SkipReporter
from tfmixed.skips import warn
from tfmixed.wrapping import wrap_optimizer

if TYPE_CHECKING:
    from keras import Model as _Mixable
else:
    # The class below is mixed into two classes of Keras.
    _Mixable = object


class GuardedTraining(_Mixable):
    """What `tfmixed.Model` and `tfmixed.Sequential` add to a Keras model."""

    optimizer: Any
    # What `tfmixed.prepare` did to the model; None if it was not prepared.
    preparation: Preparation | None = None
    _saved_dtypes: Any = None
    # For which shapes XLA has compiled the step; None before the first.
    _shapes: Shapes | None = None
    # Whether XLA compiles parts of the step by themselves.
    _has_clusters = False
    _auto_jit_compile = True
    _refused_jit_compile = False
    _auto_scale_loss = True
    _auto_loss_scale = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Guards a `train_step` that a subclass brings, too."""
        super().__init_subclass__(**kwargs)
        for name, wrap in (
            ("train_step", guard.all_or_nothing),
            ("test_step", guard.in_step),
        ):
            if name in vars(cls):
                setattr(cls, name, wrap(vars(cls)[name]))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model; within a step its outputs are float32."""
        outputs = super().__call__(*args, **kwargs)
        if guard.is_stepping(self):
            # Losses and metrics, also a user's own, see float32.
            outputs = keras.tree.map_structure(to_float32, outputs)
        return outputs

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: Any = "auto",
        auto_scale_loss: bool = True,
    ) -> None:
        """Configures the model for training, as the plan says.

        Takes what `keras.Model.compile` takes. Two defaults follow the plan
        of `tfmixed.enable()`; what you pass yourself wins.

        Args:
            optimizer: Wrapped in a `tfmixed.LossScaleOptimizer`: with a
                dynamic scale if anything in the model computes in float16,
                else without scaling, only to skip steps that are not finite.
                A `LossScaleOptimizer` is taken as it is.
            loss: As in Keras.
            loss_weights: As in Keras.
            metrics: As in Keras.
            weighted_metrics: As in Keras.
            run_eagerly: As in Keras.
            steps_per_execution: As in Keras.
            jit_compile: `"auto"` compiles with XLA where the plan found that
                to pay. `True` and `False` are obeyed, but for a `True` with
                several replicas: XLA cannot compile a step that writes to
                variables on several devices, so it runs as a graph.
            auto_scale_loss: `False` leaves the optimizer alone: no loss
                scaling, and no guard either.
        """
        policy_lib.check_policy_in_force()
        auto_loss_scale = False
        if auto_scale_loss and optimizer is not None:
            optimizer = keras.optimizers.get(optimizer)
            auto_loss_scale = not _scales(optimizer)
            if auto_loss_scale:
                scale = "dynamic" if computes_in_float16(self) else "none"
                optimizer = wrap_optimizer(optimizer, loss_scale=scale)
            else:
                optimizer = wrap_optimizer(optimizer)
        auto_jit_compile = jit_compile == "auto"
        if auto_jit_compile and not policy_lib.current_plan().jit_compile:
            jit_compile = False
        refused_jit_compile = bool(jit_compile) and not _can_use_xla(self)
        if refused_jit_compile:
            jit_compile = False
        super().compile(
            optimizer=optimizer,
            loss=loss,
            loss_weights=loss_weights,
            metrics=metrics,
            weighted_metrics=weighted_metrics,
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            jit_compile=jit_compile,
            auto_scale_loss=False,
        )
        # Last, so that a call that fails leaves the model as it was.
        self._auto_jit_compile = auto_jit_compile
        self._auto_scale_loss = auto_scale_loss
        self._auto_loss_scale = auto_loss_scale
        self._refused_jit_compile = refused_jit_compile
        self._shapes = None
        if refused_jit_compile and not auto_jit_compile:
            count = self.distribute_strategy.num_replicas_in_sync
            warn(
                f"jit_compile=True is not possible for the {count} replicas of "
                f"{type(self.distribute_strategy).__name__}: XLA compiles for "
                "one device, and the training step updates variables on "
                "several. The step runs as a graph instead. Say "
                'jit_compile=False, or "auto", to say so yourself.'
            )

    def prepare_step(self, data: Any) -> None:
        """Makes sure that everything exists before a step is guarded.

        A variable that the step itself created could not be put back; and
        layers that appear when the model is built may compute in float16.

        Args:
            data: What `train_step` takes.

        Raises:
            ValueError: If there is nothing to train.
        """
        with tf.init_scope():
            _keras.build_for_step(self, data)
        optimizer = self.optimizer
        if (
            self._auto_loss_scale
            and isinstance(optimizer.loss_scale, NoLossScale)
            and computes_in_float16(self)
        ):
            with tf.init_scope():
                self.optimizer = wrap_optimizer(optimizer.inner_optimizer)
                self.optimizer.telemetry = optimizer.telemetry
                self.optimizer.build(self.trainable_variables)
        if self.built and not self.trainable_variables:
            raise ValueError(
                f"The model '{self.name}' has no trainable weights, so there "
                "is nothing to train. Set `layer.trainable = True` on the "
                "layers to train, or use evaluate() and predict() only."
            )
        self._note_shapes(data)

    def _note_shapes(self, data: Any) -> None:
        """Has the step write down the shapes for which XLA compiles it."""
        is_compiled = self.jit_compile or self.preparation is not None
        if (
            is_compiled
            and not tf.executing_eagerly()
            and not tf.distribute.has_strategy()
        ):
            if self._shapes is None:
                self._shapes = Shapes(whole=bool(self.jit_compile))
            self._shapes.note(data)

    def _compiled_shapes(self) -> Shapes | None:
        is_compiled = self.jit_compile or self._has_clusters
        return self._shapes if is_compiled else None

    @functools.wraps(keras.Model.fit)
    def fit(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        call = inspect.signature(super().fit).bind(*args, **kwargs)
        callbacks = call.arguments.get("callbacks")
        # Somebody who brings a whole CallbackList knows what is in it.
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            reporter = SkipReporter(
                functools.partial(guard.loss_scale_optimizers, self)
            )
            retraces = RetraceReporter(self._compiled_shapes)
            call.arguments["callbacks"] = [
                *_as_list(callbacks),
                reporter,
                retraces,
            ]
        return super().fit(*call.args, **call.kwargs)

    @guard.all_or_nothing
    def train_step(self, data: Any) -> Any:
        """One guarded step: forward, backward, update, or nothing at all."""
        before = clusters.calls()
        logs = super().train_step(data)
        self._has_clusters = clusters.calls() > before
        return logs

    @guard.in_step
    def test_step(self, data: Any) -> Any:
        """One evaluation step; loss and metrics in float32."""
        return super().test_step(data)

    @property
    def losses(self) -> list[Any]:
        """Losses of `add_loss` and regularizers, as float32 scalars.

        As in Keras, what a step in a graph has added can be looked at only
        inside that graph; elsewhere it is returned as it is.
        """
        return [
            to_float32(loss) if is_reachable(loss) else loss
            for loss in super().losses
        ]

    def get_metrics_result(self) -> dict[str, Any]:
        """Returns the metrics; a loss over no finite step at all is NaN."""
        results = super().get_metrics_result()
        tracker = next(iter(self.metrics), None)
        if isinstance(tracker, keras.metrics.Mean) and tracker.name == "loss":
            # Keras would say 0.0, which looks like a perfect model.
            loss = tf.where(
                tf.convert_to_tensor(tracker.count) > 0,
                tf.convert_to_tensor(results["loss"]),
                float("nan"),
            )
            is_number = isinstance(results["loss"], float)
            results["loss"] = float(loss) if is_number else loss
        return results

    def get_compile_config(self) -> dict[str, Any]:
        """Returns the arguments of `compile`, as they were given."""
        config = super().get_compile_config()
        if config:
            config["auto_scale_loss"] = self._auto_scale_loss
            if self._auto_jit_compile:
                # Another machine may have another plan.
                config["jit_compile"] = "auto"
            elif self._refused_jit_compile:
                config["jit_compile"] = True
        return config

    @property
    def jit_compile_is_auto(self) -> bool:
        """Whether `compile` left it to the plan to use XLA or not."""
        return self._auto_jit_compile

    @property
    def loss_scale_is_auto(self) -> bool:
        """Whether `compile` chose the loss scaling, not the user."""
        return self._auto_loss_scale

    @property
    def computes_in_float16(self) -> bool:
        """Whether any layer of the model computes in float16."""
        return computes_in_float16(self)

    def saved_dtypes(self) -> dict[str, Any] | None:
        """What is saved of the dtypes of a prepared model; else None."""
        if self.preparation is None:
            return None
        return {"policy": self.preparation.policy, "layers": dtypes_of(self)}

    def restore_dtypes(self, saved: dict[str, Any]) -> None:
        """Gives the layers the dtypes that `saved_dtypes` had returned."""
        self.preparation = Preparation(
            self.name, saved["policy"], notes=("It was loaded.",)
        )
        if not apply_dtypes(self, saved["layers"]):
            # The layers may come into being when the model is built.
            self._saved_dtypes = saved["layers"]

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Builds a model that was loaded, and gives it its dtypes."""
        super().build_from_config(config)
        saved, self._saved_dtypes = self._saved_dtypes, None
        if saved is not None and not apply_dtypes(self, saved):
            warn_of_other_layers(self)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles the model as `get_compile_config` described."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)


class Model(GuardedTraining, keras.Model):
    """A `keras.Model` that trains safely in 16 bits.

    Use it as you would use `keras.Model`: with inputs and outputs, or as the
    base class of your own. `compile` wraps the optimizer as the plan says.
    When a gradient on any replica or the loss is not finite, the step leaves
    no trace: weights, optimizer slots, `iterations`, normalization statistics,
    seeds and metrics stay as they were. Only the loss scale and the counters
    of the optimizer move. Losses and metrics are computed in float32.

    A `train_step` of a subclass is guarded in the same way. It has to pass its
    loss through `self.optimizer.scale_loss`. With several optimizers (a GAN),
    each decides for its own variables; wrap those that `compile` does not know
    with `tfmixed.wrap_optimizer` and keep them as attributes of the model.

    Example:

    >>> inputs = keras.Input((8,))
    >>> outputs = keras.layers.Dense(1, dtype="float32")(inputs)
    >>> model = tfmixed.Model(inputs, outputs)
    >>> model.compile("sgd", "mse")
    >>> _ = model.fit(np.ones((4, 8)), np.ones((4, 1)), verbose=0)
    >>> int(model.optimizer.skipped_steps)
    0
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns a functional model if inputs and outputs are given."""
        if cls is Model and _is_functional(args, kwargs):
            return FunctionalModel.__new__(FunctionalModel, *args, **kwargs)
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        policy_lib.check_policy_in_force()
        if _is_functional(args, kwargs):
            _become_functional(type(self))
            _keras.Functional.__init__(self, *args, **kwargs)
        else:
            super().__init__(*args, **kwargs)


class _SavesDtypes(GuardedTraining):
    """Saves the dtypes of the layers of a prepared model."""

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration; of a prepared model with the dtypes."""
        config: dict[str, Any] = super().get_config()
        saved = self.saved_dtypes()
        return config if saved is None else {**config, KEY: saved}

    @classmethod
    def from_config(cls, config: dict[str, Any], **kwargs: Any) -> Any:
        """Makes a model from its configuration."""
        config = dict(config)
        saved = config.pop(KEY, None)
        with default_policy(saved and saved["policy"]):
            model = super().from_config(config, **kwargs)
        if saved is not None:
            model.restore_dtypes(saved)
        return model


@keras.saving.register_keras_serializable(package="tfmixed", name="Model")
class FunctionalModel(_SavesDtypes, Model, _keras.Functional):
    """What `Model(inputs, outputs)` returns; as `keras.Model` does it."""


@keras.saving.register_keras_serializable(package="tfmixed")
class Sequential(_SavesDtypes, keras.Sequential):
    """A `keras.Sequential` with the guarded step of `tfmixed.Model`.

    Example:

    >>> model = tfmixed.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> isinstance(model.optimizer, tfmixed.LossScaleOptimizer)
    True
    """


def _is_functional(args: Any, kwargs: Any) -> bool:
    given = len(args) + ("inputs" in kwargs) + ("outputs" in kwargs)
    return given == 2 and len(args) <= 2


def _become_functional(cls: type) -> None:
    """Puts `FunctionalModel` in the place of `Model` among the bases.

    Keras does the same with its own two classes, so that a subclass may call
    `super().__init__(inputs, outputs)`.
    """
    if issubclass(cls, FunctionalModel):
        return
    for base in cls.__bases__:
        if base is not Model and issubclass(base, Model):
            _become_functional(base)
    cls.__bases__ = tuple(
        FunctionalModel if base is Model else base for base in cls.__bases__
    )


def computes_in_float16(model: keras.Model) -> bool:
    """Returns whether any layer in the model computes in float16.

    Not only the model's own policy counts: layers may have policies of their
    own, and a float32 model may contain a mixed one.
    """
    return any(
        layer.compute_dtype == "float16"
        for layer in _keras.flatten_layers(model)
    )


def _can_use_xla(model: Any) -> bool:
    """Whether XLA can compile the step: not across the devices of replicas.

    A TPU is driven by XLA, whatever `jit_compile` says.
    """
    strategy = model.distribute_strategy
    is_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
    return is_tpu or strategy.num_replicas_in_sync == 1


def _as_list(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return (
        list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    )


def _scales(optimizer: Any) -> bool:
    """Returns whether the user has already said how the loss is scaled."""
    return (
        isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        or optimizer.loss_scale_factor is not None
    )
