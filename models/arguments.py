"""Checks of the arguments that the builders share."""

import os
from typing import Any


def check_positive(builder: str, **arguments: Any) -> None:
    """Raises where an argument is not a positive integer.

    Args:
        builder: name of the builder that was called, for the message.
        **arguments: the values by name: a number, or a sequence of numbers
            that must not be empty.

    Raises:
        ValueError: names the builder, the argument and the value.
    """
    for name, value in arguments.items():
        many = isinstance(value, tuple | list)
        numbers = tuple(value) if many else (value,)
        # `True` is an integer to Python and a typing slip to a person.
        if numbers and all(
            isinstance(number, int)
            and not isinstance(number, bool)
            and number > 0
            for number in numbers
        ):
            continue
        example = "(64, 128)" if many else "64"
        expected = "positive integers" if many else "a positive integer"
        raise ValueError(
            f"`{builder}` got `{name}={value!r}`. Expected {expected}. "
            f"Pass for example `{name}={example}`."
        )


def check_shape(builder: str, shape: Any, rank: int, example: str) -> None:
    """Raises where an input shape is not `rank` positive integers.

    Args:
        builder: name of the builder that was called, for the message.
        shape: the input shape without the batch dimension.
        rank: the number of dimensions it must have.
        example: a shape that would be right, for the message.

    Raises:
        ValueError: names the builder and the shape.
    """
    if (
        isinstance(shape, tuple | list)
        and len(shape) == rank
        and all(isinstance(size, int) and size > 0 for size in shape)
    ):
        return
    raise ValueError(
        f"`{builder}` got `input_shape={shape!r}`. Expected {rank} positive "
        "integers without the batch dimension. Pass for example "
        f"`input_shape={example}`."
    )


def check_fraction(builder: str, **arguments: float) -> None:
    """Raises where an argument is not in `[0, 1)`, as a dropout rate must be.

    Args:
        builder: name of the builder that was called, for the message.
        **arguments: the values by name.

    Raises:
        ValueError: names the builder, the argument and the value.
    """
    for name, value in arguments.items():
        if not 0 <= value < 1:
            raise ValueError(
                f"`{builder}` got `{name}={value!r}`. Expected a number from "
                f"0 up to, but without, 1. Pass for example `{name}=0.1`."
            )


def load_weights(model: Any, weights: str | os.PathLike[str] | None) -> None:
    """Loads weights into a fresh model, as `weights=` of a builder asks.

    Args:
        model: the Keras model that was just built.
        weights: `None` leaves the random weights; otherwise the path of a
            file that `model.save_weights` or `model.save` wrote.

    Raises:
        ValueError: there is no such file.
    """
    if weights is None:
        return
    path = os.fspath(weights)
    if not os.path.isfile(path):
        raise ValueError(
            f"`{model.name}` got `weights={path!r}`, and there is no such "
            "file. Expected `None` for random weights, or the path of a file "
            "that `model.save_weights('name.weights.h5')` wrote."
        )
    model.load_weights(path)
