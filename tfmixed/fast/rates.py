"""The decay rates of an optimizer, as its kernel and as Keras use them.

A kernel subtracts a rate from one in float32, Keras in float64.
"""

import math
from typing import Any

import numpy as np
import tensorflow as tf

_TOLERANCE = 1e-6


def are_exact(optimizer: Any) -> bool:
    """Returns whether a kernel gets the numbers of Keras from the rates.

    Or gets them by `corrections`.

    Args:
        optimizer: A Keras optimizer.
    """
    names = ("rho", "beta_1", "beta_2")
    found = [getattr(optimizer, n) for n in names if hasattr(optimizer, n)]
    # Adam has a correction for beta_2, and Adamax subtracts it from nothing.
    if len(found) == 2 and _is_rate(found[1]):
        del found[1]
    return all(_is_exact(rate) for rate in found)


def corrections(optimizer: Any) -> list[Any]:
    """Returns what depends on the step alone, and so is the same for all.

    That is beta_1 and beta_2 to the power of the step, and what
    `_second_moment` says, as far as the optimizer has them.
    """
    if not hasattr(optimizer, "beta_1"):
        return []
    step = tf.cast(optimizer.iterations + 1, tf.float32)
    return [
        tf.pow(tf.constant(optimizer.beta_1, tf.float32), step),
        tf.pow(tf.constant(optimizer.beta_2, tf.float32), step),
        _second_moment(optimizer.beta_2, step),
    ]


def _second_moment(beta: float, step: Any) -> Any:
    """Returns the factor between the roots of the kernel's moment and Keras's.

    `1 - 0.999` is 1.3e-5 smaller in float32 than in float64, and so is the
    weight of a new square in Adam's second moment. Without this factor the
    first updates would be 6e-6 larger than those of Keras. The moments of
    equal gradients differ by exactly this; the weights differ by less than
    1e-6 of the way they go.
    """
    if _is_exact(beta):
        return tf.constant(1.0)

    def moment(beta: float) -> Any:
        return -tf.math.expm1(step * math.log(beta))

    return tf.sqrt(moment(float(np.float32(beta))) / moment(beta))


def _is_rate(rate: Any) -> bool:
    return isinstance(rate, int | float) and 0 <= rate < 1


def _is_exact(rate: Any) -> bool:
    """Returns whether float32 knows how far from one a decay rate is."""
    if not _is_rate(rate):
        return False
    distance = 1.0 - rate
    rounded = 1.0 - float(np.float32(rate))
    return abs(rounded - distance) <= _TOLERANCE * distance
