"""What the caller of `prepare` asks for, in one object."""

import difflib
import re
from collections.abc import Iterable
from typing import Any

import keras

from tfmixed import policy as policy_lib

_HALF = ("float16", "bfloat16")
_ACCEPTED = ("mixed_float16", "mixed_bfloat16", "float32")


class Choice:
    """The policy for a model, and the exceptions from it.

    Args:
        policy: `None` or `"auto"` for the policy of this machine, a name, a
            `keras.DTypePolicy`, or a `keras.dtype_policies.DTypePolicyMap`,
            whose entries are obeyed to the letter.
        keep_float32: Names, regular expressions or classes of layers.
        fast: Whether layers of tfmixed may take the place of those of Keras.

    Raises:
        TypeError: If an entry is of another type.
        ValueError: If a policy has no float32 variables, or is quantized.
    """

    def __init__(
        self, policy: Any, keep_float32: Any = (), fast: bool = True
    ) -> None:
        self.fast = fast
        self._map: Any = None
        if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
            self._map = policy
            policy = policy.default_policy
        self.policy = _resolved(policy)
        self.dtype: str = self.policy.compute_dtype
        self._kept = _entries(keep_float32)
        self._unused: dict[Any, str] = dict.fromkeys(self._kept, "keep_float32")
        for key in self._map or ():
            _resolved(self._map[key])
            self._unused[key] = "policy"
        self._names: set[str] = set()

    @property
    def is_16_bit(self) -> bool:
        """Whether anything is to be computed in 16 bits by default."""
        return self.dtype in _HALF

    def keeps_float32(self, layer: Any, path: str) -> bool:
        """Returns whether the caller wants a layer in float32.

        Args:
            layer: The layer.
            path: Its path from the model on, `"encoder/dense"`.
        """
        names = self._names_of(layer, path)
        matching = [e for e in self._kept if _matches(e, layer, names)]
        for entry in matching:
            self._unused.pop(entry, None)
        return bool(matching)

    def explicit(self, layer: Any, path: str) -> keras.DTypePolicy | None:
        """Returns the policy that the DTypePolicyMap has for a layer."""
        if self._map is None:
            return None
        names = self._names_of(layer, path)
        for key in self._map:
            if any(_same(key, name) for name in names):
                self._unused.pop(key, None)
                return _resolved(self._map[key])
        return None

    def check_all_used(self) -> None:
        """Raises a ValueError if an exception met no layer at all."""
        for entry, argument in self._unused.items():
            shown = getattr(entry, "__name__", None) or getattr(
                entry, "pattern", entry
            )
            close = difflib.get_close_matches(str(shown), self._names, n=3)
            hint = f" Did you mean {' or '.join(map(repr, close))}?"
            raise ValueError(
                f"prepare: {shown!r} in `{argument}` matches no layer of the "
                f"model.{hint if close else ''} Layers are matched by name, by "
                "path ('encoder/dense') or by class."
            )

    def _names_of(self, layer: Any, path: str) -> tuple[str, ...]:
        names = {layer.name, path, getattr(layer, "path", None) or path}
        self._names |= names
        return tuple(names)


def _resolved(policy: Any) -> keras.DTypePolicy:
    if policy is None or policy == "auto":
        policy = _policy_in_force(policy)
    policy = keras.dtype_policies.get(policy)
    if policy.quantization_mode is not None or policy.name not in _ACCEPTED:
        raise ValueError(
            f"prepare: the policy {policy.name!r} cannot be used. Expected one "
            "of 'auto', 'mixed_float16', 'mixed_bfloat16' and 'float32', whose "
            "variables are float32: in 16 bits small updates are lost."
        )
    return policy


def _policy_in_force(policy: str | None) -> str:
    """The policy of `enable`, or a global one, or the best for this machine."""
    plan = policy_lib.current_plan()
    is_set = plan.policy in _ACCEPTED[:2] or policy_lib.is_chosen()
    if policy is None and is_set:
        return plan.policy
    return policy_lib.decide("auto").policy


def _entries(keep_float32: Any) -> tuple[Any, ...]:
    if isinstance(keep_float32, str | re.Pattern | type):
        keep_float32 = (keep_float32,)
    if not isinstance(keep_float32, Iterable):
        keep_float32 = (keep_float32,)
    entries = tuple(keep_float32)
    for entry in entries:
        is_class = isinstance(entry, type) and issubclass(entry, keras.Layer)
        if not (isinstance(entry, str | re.Pattern) or is_class):
            raise TypeError(
                "prepare: `keep_float32` takes names of layers, regular "
                f"expressions and layer classes. Received: {entry!r} of type "
                f"{type(entry).__name__}."
            )
    return entries


def _matches(entry: Any, layer: Any, names: tuple[str, ...]) -> bool:
    if isinstance(entry, str):
        return any(_same(entry, name) for name in names)
    if isinstance(entry, re.Pattern):
        return any(entry.search(name) for name in names)
    return isinstance(layer, entry)


def _same(pattern: str, name: str) -> bool:
    if pattern == name:
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False
