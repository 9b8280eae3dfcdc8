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
        # Each `fit` has a history of its own.
        self._history: Any = None

    def attach(self, model: keras.Model) -> None:
        """Takes its place; called again where Keras may have made a new one."""
        self._model = model
        self._history = getattr(model, "history", None)
        found = False
        for function in _chain(model):
            if getattr(function, "executions", None) is self:
                found = True
            elif (
                isinstance(function, _Wrapped) and function.executions.is_over()
            ):
                _take_out(model, function)
        if not found:
            model.make_train_function()
            _put_in(model, self)

    def is_over(self) -> bool:
        """Whether the training has ended that this was attached to.

        One that was interrupted does not say so.
        """
        return getattr(self._model, "history", None) is not self._history

    def detach(self) -> None:
        """Gives the place back."""
        for function in _chain(self._model):
            if getattr(function, "executions", None) is self:
                _take_out(self._model, function)

    def execute(self, function: Any, iterator: Any) -> Any:
        """What `fit` calls, in the place of `function(iterator)`."""
        if self.is_over() or not self._wants():
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


def _chain(model: Any) -> list[Any]:
    """What stands around the training function, the outermost first."""
    found = []
    function = model.train_function
    while hasattr(function, "inner"):
        found.append(function)
        function = function.inner
    return found


def _put_in(model: Any, executions: Executions) -> None:
    """Next to the function of Keras, inside whatever takes the time."""
    around = _chain(model)
    if around:
        around[-1].inner = _Wrapped(executions, around[-1].inner)
    else:
        model.train_function = _Wrapped(executions, model.train_function)


def _take_out(model: Any, wrapped: _Wrapped) -> None:
    if model.train_function is wrapped:
        model.train_function = wrapped.inner
    for function in _chain(model):
        if function.inner is wrapped:
            function.inner = wrapped.inner
