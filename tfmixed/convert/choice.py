"""What the caller of `prepare` asks for, in one object."""

import contextlib
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
        kept = _entries(keep_float32)
        self._kept = _Finder(kept)
        self._unused: dict[Any, str] = dict.fromkeys(kept, "keep_float32")
        self._keys = _Finder(self._map or ())
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
        matching = self._kept.matching(layer, names)
        for entry in matching:
            self._unused.pop(entry, None)
        return bool(matching)

    def explicit(self, layer: Any, path: str) -> keras.DTypePolicy | None:
        """Returns the policy that the DTypePolicyMap has for a layer."""
        if self._map is None:
            return None
        keys = self._keys.matching(layer, self._names_of(layer, path))
        if not keys:
            return None
        self._unused.pop(keys[0], None)
        return _resolved(self._map[keys[0]])

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


class _Finder:
    """Finds the entries for a layer without trying each of them on it.

    There may be an entry for each layer, and a name can be looked up. Only
    regular expressions and classes have to be tried one by one.

    Args:
        entries: Names, regular expressions or classes of layers.
    """

    def __init__(self, entries: Iterable[Any]) -> None:
        self._entries = list(dict.fromkeys(entries))
        self._names: dict[str, int] = {}
        self._tried: list[tuple[int, Any]] = []
        for number, entry in enumerate(self._entries):
            if isinstance(entry, str):
                self._names[entry] = number
            if not isinstance(entry, str):
                self._tried.append((number, entry))
            elif _SPECIAL.search(entry):
                with contextlib.suppress(re.error):
                    whole = re.compile(entry).fullmatch
                    self._tried.append((number, whole))

    def matching(self, layer: Any, names: tuple[str, ...]) -> list[Any]:
        """The entries that mean a layer, in the order of all entries."""
        numbers = {self._names[name] for name in names if name in self._names}
        for number, entry in self._tried:
            if _matches(entry, layer, names):
                numbers.add(number)
        return [self._entries[number] for number in sorted(numbers)]


# What makes a string more than the name that it spells.
_SPECIAL = re.compile(r"[.^$*+?{}\[\]\\|()]")


def _matches(entry: Any, layer: Any, names: tuple[str, ...]) -> bool:
    if isinstance(entry, type):
        return isinstance(layer, entry)
    match = entry.search if isinstance(entry, re.Pattern) else entry
    return any(match(name) for name in names)
