"""Choose a dtype policy for this machine, set it, and say why.

`enable` once at the start of a program is enough: Keras forgets its global
policy in `keras.utils.clear_session()` and in every new thread, so the plan is
kept here and set again where Keras lost it (`check_policy_in_force`).
"""

import contextlib
import dataclasses
import difflib
import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import keras

from tfmixed import _keras
from tfmixed._switch import ModelSwitch
from tfmixed.hardware import hardware as detect_hardware
from tfmixed.plan import Plan
from tfmixed.plan import choose
from tfmixed.plan import objection_to
from tfmixed.plan import plan_for

__all__ = [
    "Plan",
    "check_policy_in_force",
    "choose",
    "current_plan",
    "decide",
    "disable",
    "enable",
    "precision",
]

POLICIES = ("auto", "mixed_float16", "mixed_bfloat16", "float32")
VARIABLE = "TFMIXED_POLICY"

_DISABLED = "disabled"


@dataclasses.dataclass(frozen=True)
class _Enabled:
    """What `enable` did, until `disable`; also its mark in a thread."""

    plan: Plan
    original: keras.DTypePolicy | None
    thread: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Block:
    """The mark of a thread that is inside a `precision` block."""


_lock = threading.RLock()
_enabled: _Enabled | None = None


def enable(policy: str = "auto", *, verbose: bool = True) -> Plan:
    """Chooses a dtype policy for this machine and makes it Keras's default.

    Layers that are built from now on use it. The environment variable
    `TFMIXED_POLICY` overrides `policy`, for programs that cannot be edited.

    Args:
        policy: `"auto"`, `"mixed_float16"`, `"mixed_bfloat16"` or `"float32"`.
            A policy that is slow or unsupported here is obeyed, with a
            `UserWarning` that says so.
        verbose: Whether to print the plan.

    Returns:
        The `Plan`: the policy, whether to compile with XLA, whether the loss
        is scaled, and the reasons.

    Raises:
        ValueError: For any other policy. Nothing is changed then.

    Example:

    >>> tfmixed.enable("mixed_float16", verbose=False).loss_scaling
    True
    """
    global _enabled
    plan = decide(policy)
    objection = objection_to(plan.policy, plan.hardware)
    if objection is not None:
        # Before anything is set: the warning may have been made an error.
        warnings.warn(
            f"tfmixed.enable: {plan.policy} was forced, but it is not known "
            f"to be fast here. {objection}",
            stacklevel=2,
        )
    with _lock:
        original = _enabled.original if _enabled else _keras.thread_policy()
        _enabled = _Enabled(plan, original, threading.get_ident())
        _put_in_force(_enabled)
    if verbose:
        print(plan)
    return plan


def decide(policy: str = "auto") -> Plan:
    """The plan that `enable` would put in force: nothing is set or printed.

    Args:
        policy: As for `enable`.

    Returns:
        The `Plan`.

    Raises:
        ValueError: For an unknown policy.
    """
    requested, reasons = _requested_policy(policy)
    machine = detect_hardware()
    if requested == "auto":
        plan = choose(machine)
        return dataclasses.replace(plan, reasons=reasons + plan.reasons)
    objection = objection_to(requested, machine)
    return plan_for(
        requested,
        machine,
        (reasons or (f"{requested} was asked for.",))
        + (() if objection is None else (objection,)),
    )


def _requested_policy(policy: str) -> tuple[str, tuple[str, ...]]:
    from_environment = os.environ.get(VARIABLE)
    if not from_environment:
        _check_known(policy, "")
        return policy, ()
    _check_known(from_environment, f" in the environment variable {VARIABLE}")
    return from_environment, (
        f"The environment variable {VARIABLE}={from_environment} overrides "
        f"{policy!r}, which the program asked for.",
    )


def _check_known(policy: Any, where: str) -> None:
    if isinstance(policy, str) and policy in POLICIES:
        return
    valid = ", ".join(repr(name) for name in POLICIES)
    # "float16" is more like "float32" than like what was meant.
    close = [name for name in POLICIES if str(policy) in name]
    close += difflib.get_close_matches(str(policy), POLICIES, n=1, cutoff=0.3)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"Unknown policy {policy!r}{where}. Expected one of {valid}.{hint}"
    )


def _put_in_force(enabled: _Enabled) -> None:
    keras.config.set_dtype_policy(enabled.plan.policy)
    _keras.set_thread_mark(enabled)


def disable() -> None:
    """Restores the global policy that stood before the first `enable`.

    It is restored in the calling thread, the only one Keras gives access to;
    new threads start with Keras's default again. Without an `enable` before,
    nothing happens.

    Example:

    >>> plan = tfmixed.enable("mixed_float16", verbose=False)
    >>> keras.config.dtype_policy().name
    'mixed_float16'
    >>> tfmixed.disable()
    >>> keras.config.dtype_policy().name
    'float32'
    """
    global _enabled
    with _lock:
        if _enabled is None:
            return
        _keras.set_thread_policy(_enabled.original)
        _keras.set_thread_mark(_DISABLED)
        _enabled = None


def current_plan() -> Plan:
    """The plan that is in force in this thread.

    Without `enable`, inside a `precision` block, or after the program has set
    another policy with `keras.config.set_dtype_policy`, it describes Keras's
    global policy as it stands, and its reasons say so.

    Returns:
        The `Plan`.

    Example:

    >>> plan = tfmixed.current_plan()
    >>> plan.policy, plan.loss_scaling
    ('float32', False)
    """
    check_policy_in_force()
    enabled = _enabled
    present = keras.config.dtype_policy()
    if enabled is not None and present.name == enabled.plan.policy:
        return enabled.plan
    if isinstance(_keras.thread_mark(), _Block):
        cause = "a tfmixed.precision block set it"
    elif enabled is not None:
        cause = (
            "the program set it after tfmixed.enable had chosen "
            f"{enabled.plan.policy}"
        )
    else:
        cause = "tfmixed.enable was not called"
    machine = detect_hardware()
    return Plan(
        policy=present.name,
        jit_compile=machine.xla,
        loss_scaling=present.compute_dtype == "float16",
        reasons=(f"This is Keras's global policy as it stands: {cause}.",),
        hardware=machine,
    )


def is_chosen() -> bool:
    """Returns whether `enable` or a `precision` block set the policy."""
    return _enabled is not None or isinstance(_keras.thread_mark(), _Block)


def check_policy_in_force() -> bool:
    """Sets the plan's policy again where Keras has lost it.

    Keras keeps its global policy per thread and drops it in
    `keras.utils.clear_session()`. A policy that the program itself set after
    `enable` is left alone. One case looks like a loss and is treated as one:
    the program sets Keras's *default* policy by hand after `clear_session()`
    or in a thread of its own. Call `disable` to give up the plan there.

    Returns:
        Whether the policy had been lost and was set again. A `UserWarning`
        says so then.
    """
    enabled = _enabled
    mark = _keras.thread_mark()
    if enabled is None or isinstance(mark, _Block):
        return False
    present = _keras.thread_policy()
    default = keras.config.floatx()
    name = default if present is None else present.name
    wanted = enabled.plan.policy
    if name == wanted:
        _put_in_force(enabled)
        return False
    if mark is enabled:
        return False
    # A mark that `enable` left in this thread before another `enable` did.
    stale = isinstance(mark, _Enabled) and name == mark.plan.policy
    if name != default and not stale:
        _keras.set_thread_mark(enabled)
        return False
    _put_in_force(enabled)
    if enabled.thread == threading.get_ident():
        cause = "keras.utils.clear_session() had reset it"
    else:
        cause = "Keras keeps it per thread, and this thread did not have it"
    warnings.warn(
        f"tfmixed.enable had set the global policy {wanted!r}, but it was "
        f"{name!r}: {cause}. It is set to {wanted!r} again. Layers that were "
        f"built in between compute in {name}; build them anew, or call "
        "tfmixed.enable() first in each thread and after clear_session().",
        stacklevel=3,
    )
    return True


@contextlib.contextmanager
def precision(
    policy: str | keras.DTypePolicy, *, model: keras.Model | None = None
) -> Iterator[None]:
    """Another precision inside a `with` block, the old one after it.

    The global policy of this thread is `policy` inside the block, and what it
    was before afterwards, also when the block raises. An `enable` or `disable`
    inside the block outlasts it.

    With `model`, the computing of that model switches as well, for every
    thread that uses it: all its layers, those inside composite layers and
    nested models included. Variables keep their dtype. Quantized layers stay
    as they are; so do the float32 layers of a model that also has 16-bit ones
    when `policy` is a 16-bit policy, because they were kept in float32 for a
    reason. `fit`, `evaluate` and `predict` trace their functions anew inside
    the block; the old functions are back after it, without a retrace. A cast
    that is written into the model (`keras.ops.cast`) stays.

    Args:
        policy: Any policy that Keras knows: a name such as `"float32"` or
            `"mixed_bfloat16"`, or a `keras.DTypePolicy`.
        model: A model to switch, or None for the global policy only.

    Raises:
        ValueError: For a policy that Keras does not know, or a quantized one
            together with `model`. Nothing is changed then.
        TypeError: If `model` is not a Keras model.

    Example:

    >>> inputs = keras.Input((8,))
    >>> outputs = keras.layers.Dense(2)(inputs)
    >>> model = tfmixed.prepare(keras.Model(inputs, outputs), "mixed_bfloat16")
    >>> model.compile("sgd", "mse")
    >>> x, y = np.ones((4, 8)), np.ones((4, 2))
    >>> with tfmixed.precision("float32", model=model):
    ...     loss = model.evaluate(x, y, verbose=0)
    """
    resolved = _resolve(policy)
    switch = None if model is None else ModelSwitch(model, resolved)
    block = _Block()
    old_policy, old_mark = _keras.thread_policy(), _keras.thread_mark()
    _keras.set_thread_policy(resolved)
    _keras.set_thread_mark(block)
    try:
        if switch is not None:
            switch.on()
        yield
    finally:
        if switch is not None:
            switch.off()
        # No mark: clear_session() ran inside the block.
        if _keras.thread_mark() in (block, None):
            _keras.set_thread_policy(old_policy)
            _keras.set_thread_mark(old_mark)


def _resolve(policy: Any) -> keras.DTypePolicy:
    try:
        if policy is None:
            raise ValueError("None names no policy.")
        return keras.dtype_policies.get(policy)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(
            f"precision() does not know the policy {policy!r}. Expected the "
            "name of a Keras dtype policy, such as 'float32', 'mixed_float16' "
            "or 'mixed_bfloat16', or a keras.DTypePolicy."
        ) from error
