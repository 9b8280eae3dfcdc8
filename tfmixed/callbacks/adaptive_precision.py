"""`AdaptivePrecision`: float32 for the layers that need it, as measured."""

import dataclasses
import math
from typing import Any

import keras
import tensorflow as tf

from tfmixed import _keras
from tfmixed.audit import observe
from tfmixed.callbacks.executions import Executions
from tfmixed.callbacks.limits import Limits
from tfmixed.callbacks.limits import Move
from tfmixed.callbacks.limits import check_counts
from tfmixed.callbacks.limits import middle
from tfmixed.callbacks.moves import Moves
from tfmixed.health.alone import Alone
from tfmixed.health.alone import AloneProbe
from tfmixed.health.alone import units

_MEASUREMENTS = 4  # in an epoch, if the caller names no distance
_DISTANCE = 100  # steps, where the length of an epoch is not known


class AdaptivePrecision(keras.callbacks.Callback):
    """Moves layers to float32 that 16 bits spoil, and back when they do not.

    A few times in an epoch a batch is measured: once in float32, and then each
    layer by itself, on the exact inputs and the exact gradient of its outputs,
    in float32 and in 16 bits. So the rounding of a layer is told from what
    others did to its inputs and gradients, and a layer in float32 still shows
    what it would do in 16 bits.

    Before the first step layers go to float32 by the error in the first batch
    alone: a bad layer can spoil weights and moments of the optimizer within
    steps. At the end of each epoch a layer goes to float32 if the middle one
    of its measurements is above a limit: `up` for the error, `underflow`,
    `overflow`. It comes back when for `patience` epochs in a row all three
    were below `down / up` times their limit. In between it stays as it is.

    Only layers that began in 16 bits are moved; what is inside a layer moves
    with it. Weights are float32 anyway, so neither they nor the optimizer
    change by a move, but the step is traced anew, and under XLA compiled. What
    is measured is traced once a `fit`, in several times the time of a step. A
    measurement itself takes about four steps.

    The error of a layer is that of its own numbers. Where another layer
    magnifies the ordinary rounding of this one, this is not found here; see
    `GradientHealth`, whose errors are those of the whole step.

    `History` gets `float32_layers`: how many layers are in float32 by a move.

    Args:
        every: Integer, steps from one measurement to the next within an epoch,
            whose first step is always measured. By default as many as give
            four in an epoch.
        up: The relative error above which a layer goes to float32: of its
            outputs, of the gradients of its weights, or of its inputs. Layers
            without a fault stay below 0.1, in bfloat16 too.
        down: The error below which a layer comes back; below `up`.
        underflow: Share of gradients that 16 bits turn into 0, above which a
            layer goes to float32.
        overflow: Share of outputs and gradients that are not finite in 16
            bits, above which it does.
        patience: Integer, epochs in a row below the lower limits.
        max_moves: Integer, most layers that go to float32 at one epoch end,
            the worst first.
        max_retraces: Integer, how often layers are moved in one `fit` at most.
        at_start: Whether layers may be moved before the first step, too.
        verbose: Whether `summary()` is printed at the end of `fit`.

    Attributes:
        history: List of `Move` in the last `fit`: `epoch`, `path`, `before`,
            `after`, `reason`, `measured` (`error`, `underflow`, `overflow`).
        retraces: How often layers were moved in the last `fit`.
        latest: Dict of the middle measurement of each layer in the last epoch.

    Raises:
        ValueError: For an argument out of its range; in `fit`, if the model
            cannot be measured, or is trained by several workers.

    Example:

    >>> adaptive = tfmixed.callbacks.AdaptivePrecision(up=0.3)
    >>> model = tfmixed.Sequential(
    ...     [keras.Input((4,)), keras.layers.Dense(1, dtype="mixed_float16")]
    ... )
    >>> model.compile("sgd", "mae")
    >>> x, y = np.ones((8, 4)), np.ones((8, 1))
    >>> history = model.fit(x, y, verbose=0, callbacks=[adaptive])
    >>> adaptive.history
    []
    >>> history.history["float32_layers"]
    [0]
    """

    async_safe = True

    def __init__(
        self,
        every: int | None = None,
        *,
        up: float = 0.3,
        down: float = 0.1,
        underflow: float = 0.3,
        overflow: float = 0.0,
        patience: int = 2,
        max_moves: int = 8,
        max_retraces: int = 3,
        at_start: bool = True,
        verbose: bool = True,
    ) -> None:
        super().__init__()
        check_counts(
            every=1 if every is None else every,
            patience=patience,
            max_moves=max_moves,
            max_retraces=max_retraces,
        )
        self._limits = Limits(up, down, underflow, overflow)
        self._every = every
        self._patience = patience
        self._max_moves = max_moves
        self._max_retraces = max_retraces
        self._at_start = at_start
        self._is_first = False
        self._verbose = verbose
        self._executions = Executions(self._is_due, self._measured)
        self._watched: Any = None
        self._start()

    def _start(self) -> None:
        self.history: list[Move] = []
        self.retraces = 0
        self.latest: dict[str, Alone] = {}
        self._held: list[str] = []
        self._found: list[dict[int, Alone]] = []
        self._step = self._next = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Takes its place before the training function."""
        strategy = self.model.distribute_strategy
        if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            raise ValueError(
                "AdaptivePrecision: the model is trained by several workers, "
                "and each would move other layers. Find the layers on one "
                "worker, and give them dtype='float32' for all."
            )
        self._start()
        # In a later `fit` too, only layers that were 16 bits in the first one.
        if self._watched is not self.model:
            moves = Moves(self.model)
            self._units = units(self.model, moves.movable())
            self._probe = AloneProbe(self.model, self._units)
            self._moves = moves
            paths = observe.paths(self.model)
            self._paths = {id(u): paths[id(u)] for u in self._units}
            self._dtypes = {id(u): u.compute_dtype for u in self._units}
            self._quiet = dict.fromkeys(self._dtypes, 0)
            self._moved: dict[int, Any] = {}
            self._watched = self.model
            self._is_first = self._at_start
        if self._units:
            self._executions.attach(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts to measure for this epoch."""
        self._found = []
        self._step = self._next = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Takes its place again where the training function is another."""
        if self._units:
            self._executions.attach(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Moves layers, all of this epoch together."""
        if self._found:
            self._judge(epoch)
        if logs is not None:
            logs["float32_layers"] = len(self._moved)

    def on_train_end(self, logs: Any = None) -> None:
        """Gives the place back and says what was done."""
        if self._units:
            self._executions.detach()
        if self._verbose and self.params.get("verbose"):
            print(self.summary())

    def summary(self) -> str:
        """Returns what the last `fit` moved, a line for each move."""
        if self._watched is None:
            return "AdaptivePrecision: nothing was trained."
        text = (
            f"AdaptivePrecision: {len(self._moved)} of {len(self._units)} "
            f"layers in float32; moves: {len(self.history)}, retraces: "
            f"{self.retraces}."
        )
        if self._held:
            text += (
                f" No more than {self._max_retraces} are allowed: "
                f"{', '.join(map(repr, self._held))} stayed as they were."
            )
        return "\n  ".join([text, *map(str, self.history)])

    def _is_due(self) -> bool:
        step = self._step
        self._step += self.model.steps_per_execution
        if step < self._next:
            return False
        steps = self.params.get("steps")
        self._next = step + (
            self._every
            or (math.ceil(steps / _MEASUREMENTS) if steps else _DISTANCE)
        )
        return True

    def _measured(self, batches: list[Any], train: Any) -> Any:
        found = self._probe.measure(batches[0])
        self._found.append(found)
        if self._is_first:
            self._is_first = False
            # The first loss scale is a guess: what it makes overflow or vanish
            # says nothing yet.
            errors = {
                key: dataclasses.replace(one, underflow=0.0, overflow=0.0)
                for key, one in found.items()
            }
            self._decide(None, errors)
        return train(batches)

    def _judge(self, epoch: int) -> None:
        several = {
            key: [one[key] for one in self._found if key in one]
            for key in self._paths
        }
        found = {key: middle(ones) for key, ones in several.items() if ones}
        self.latest = {self._paths[key]: one for key, one in found.items()}
        self._decide(epoch, found)

    def _decide(self, epoch: int | None, found: dict[int, Alone]) -> None:
        up, back = self._wanted(found)
        self._held = []
        if not up and not back:
            return
        if self.retraces >= self._max_retraces:
            self._held = [self._paths[id(unit)] for unit in [*up, *back]]
            return
        self.retraces += 1
        for unit in up:
            reason = self._limits.reason(found[id(unit)])
            self._note(epoch, unit, "float32", reason, found[id(unit)])
            self._moved[id(unit)] = unit
        for unit in back:
            dtype, one = self._dtypes[id(unit)], found[id(unit)]
            reason = (
                f"quiet for {self._quiet[id(unit)]} epochs: error "
                f"{one.error:.2g}, underflow {one.underflow:.2%}, overflow "
                f"{one.overflow:.2%} if it were {dtype}"
            )
            self._note(epoch, unit, dtype, reason, one)
            del self._moved[id(unit)]
        self._carry_out(back)

    def _wanted(self, found: dict[int, Alone]) -> tuple[list[Any], list[Any]]:
        """The layers that should go to float32, and those that may be back."""
        up, back = [], []
        for unit in [u for u in self._units if id(u) in found]:
            one = found[id(unit)]
            if id(unit) not in self._moved:
                if self._limits.strain(one) > 1:
                    up.append(unit)
                continue
            is_quiet = self._limits.is_quiet(one)
            self._quiet[id(unit)] = self._quiet[id(unit)] + 1 if is_quiet else 0
            if self._quiet[id(unit)] >= self._patience:
                back.append(unit)
        up.sort(key=lambda unit: -self._limits.strain(found[id(unit)]))
        return up[: self._max_moves], back

    def _note(
        self,
        epoch: int | None,
        unit: Any,
        after: str,
        reason: str,
        measured: Alone,
    ) -> None:
        self._quiet[id(unit)] = 0
        before, path = unit.compute_dtype, self._paths[id(unit)]
        self.history.append(Move(epoch, path, before, after, reason, measured))

    def _carry_out(self, back: list[Any]) -> None:
        # A model may round its data to 16 bits before any layer sees it.
        doors = [
            layer
            for layer in _keras.flatten_layers(self.model)
            if isinstance(layer, keras.layers.InputLayer)
        ]
        if self._moved:
            self._moves.back(back)
            self._moves.to([*self._moved.values(), *doors], "float32")
        else:
            self._moves.back([*back, *doors])
