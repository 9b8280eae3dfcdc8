"""Stands between `fit` and the training function: sees each batch.

Keras gives callbacks the number of a batch, never the batch. What `fit` calls
is the attribute `train_function` of the model, with an iterator; for the time
of a training a callback can put its own there, which takes the batches out and
hands them on. Keras runs its function on batches from any iterator.
"""

from collections.abc import Callable
from typing import Any

import keras


class Executions:
    """Lets a callback see the batches of some executions.

    Args:
        wants: Asked before each execution: whether to see its batches. What is
            not seen runs as it would otherwise, in a loop on the device.
        run: Called instead of the execution, with the batches (as many as
            `steps_per_execution` at most), and a function that trains on a
            list of batches and returns the logs.
    """

    def __init__(
        self,
        wants: Callable[[], bool],
        run: Callable[[list[Any], Callable[[list[Any]], Any]], Any],
    ) -> None:
        self._wants = wants
        self._run = run
        self._model: Any = None

    def attach(self, model: keras.Model) -> None:
        """Takes its place; called again where Keras may have made a new one."""
        self._model = model
        function = model.train_function
        while function is not None:
            if getattr(function, "executions", None) is self:
                return
            function = getattr(function, "inner", None)
        model.make_train_function()
        model.train_function = _Wrapped(self, model.train_function)

    def detach(self) -> None:
        """Gives the place back."""
        outer = None
        function = self._model.train_function
        while isinstance(function, _Wrapped):
            if function.executions is not self:
                outer = function
            elif outer is None:
                self._model.train_function = function.inner
            else:
                outer.inner = function.inner
            function = function.inner

    def execute(self, function: Any, iterator: Any) -> Any:
        """What `fit` calls, in the place of `function(iterator)`."""
        if not self._wants():
            return function(iterator)
        batches: list[Any] = []
        iterator = iter(iterator)
        while len(batches) < self._model.steps_per_execution:
            try:
                batches.append(next(iterator))
            except StopIteration:
                break
        if not batches:
            raise StopIteration
        return self._run(batches, lambda some: function(iter(some)))


class _Wrapped:
    """A training function with an `Executions` before it."""

    def __init__(self, executions: Executions, inner: Any) -> None:
        self.executions = executions
        self.inner = inner

    def __call__(self, iterator: Any) -> Any:
        return self.executions.execute(self.inner, iterator)
