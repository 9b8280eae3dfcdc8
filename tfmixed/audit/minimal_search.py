"""The search for the fewest units, by what was measured and nothing else."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Sequence

from tfmixed.audit.minimal_units import Unit
from tfmixed.audit.minimal_units import wholes_of

_FIRST_GROUPS = 8
_PARTS = 4
_MANY = 0.75
# Groups leave most of the tolerance to single layers, which can be chosen.
_SHARE = 0.5
Kept = frozenset[Unit]
Group = tuple[Unit, ...]


class Search:
    """Gives back to 16 bits whatever need not be in float32.

    From everything in float32 on: groups of layers that follow each other are
    given back, those with the least error of their own first, as many as the
    tolerance allows, which is found by bisection. The groups that are left are
    split, and so on; in the end each single layer is tried.

    Args:
        error: Measures the error with these units in float32. With `True`
            for its second argument it may be quick, and is only compared.
        tolerance: The largest error that is allowed.
        limit: After how many measurements to be content with what there is.

    Attributes:
        best: The fewest layers in float32 so far that are within tolerance.
        is_complete: Whether no single unit of them can be given back.
    """

    def __init__(
        self,
        error: Callable[[Kept, bool], float],
        tolerance: float,
        limit: int,
    ) -> None:
        self._error = error
        self._tolerance = tolerance
        self._left = limit
        self._known: dict[tuple[Kept, bool], float] = {}
        self.best: Kept = frozenset()
        self.is_complete = False

    def run(self, units: Sequence[Unit]) -> None:
        """Searches.

        Args:
            units: All units, in the order of the model. With all of them in
                float32 the error is within tolerance.
        """
        self.best = frozenset(units)
        wholes = wholes_of(units)
        parts = [unit for unit in units if unit not in wholes]
        try:
            # A custom layer as a whole only where its own code needs it.
            kept = self._fewest(wholes, parts)
            inside = {layer for unit in kept for layer in unit.layers}
            rest = [unit for unit in parts if not unit.layers <= inside]
            kept = self._prune([*kept, *self._fewest(rest, kept)], ())
            self.best = frozenset(kept)
            self.is_complete = True
        except _EnoughError:
            pass

    def _fewest(
        self, units: Collection[Unit], always: Collection[Unit]
    ) -> list[Unit]:
        """The units that are needed in float32 besides others."""
        if not units or self._fits(always):
            return []
        groups = _split(tuple(units), _FIRST_GROUPS)
        while True:
            count = len(groups)
            groups = self._give_back(groups, always)
            if all(len(group) == 1 for group in groups):
                return self._prune([group[0] for group in groups], always)
            # Where most are needed there is no use in larger groups.
            most = len(groups) > _MANY * count
            parts = len(units) if most else _PARTS
            groups = [part for g in groups for part in _split(g, parts)]

    def _give_back(
        self, groups: list[Group], always: Collection[Unit]
    ) -> list[Group]:
        """The groups without those that can be given back at once.

        In the order of their own errors, the largest last.
        """
        is_last = all(len(group) == 1 for group in groups)
        share = 1.0 if is_last else _SHARE

        def without(first: int) -> list[Unit]:
            return [*always, *(u for g in ranked[first:] for u in g)]

        ranked = list(groups)
        everything = without(0)
        own = {
            group: self._measured(set(everything) - set(group), True)
            for group in groups
        }
        ranked.sort(key=lambda group: (own[group], -len(group)))
        low = 0
        high = sum(own[g] <= share * self._tolerance for g in groups)
        middle = high
        while low < high:
            if self._fits(without(middle), share):
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return ranked[low:]

    def _prune(
        self, units: Sequence[Unit], always: Collection[Unit]
    ) -> list[Unit]:
        """The units without each one that need not be there, one by one."""
        kept, needed = list(units), 0
        while needed < len(kept):
            # From one that could go on, all others are tried once more.
            unit = kept.pop(0)
            if self._fits([*always, *kept]):
                needed = 0
            else:
                kept.append(unit)
                needed += 1
        return kept

    def _fits(self, kept: Iterable[Unit], share: float = 1.0) -> bool:
        """Whether these units are enough for a share of the tolerance."""
        units = frozenset(kept)
        if self._known.get((units, True), 0.0) > self._tolerance:
            return False
        error = self._measured(units, False)
        if error <= self._tolerance and _size(units) <= _size(self.best):
            self.best = units
        return error <= share * self._tolerance

    def _measured(self, kept: Iterable[Unit], quick: bool) -> float:
        units = frozenset(kept)
        if (units, quick) not in self._known:
            if not self._left:
                raise _EnoughError
            self._left -= 1
            self._known[units, quick] = self._error(units, quick)
        return self._known[units, quick]


class _EnoughError(Exception):
    """As much was measured as was allowed."""


def _size(units: Kept) -> tuple[int, int]:
    layers = {layer for unit in units for layer in unit.half}
    return len(layers), len(units)


def _split(units: Group, parts: int) -> list[Group]:
    """Consecutive groups of about the same length."""
    parts = min(parts, len(units))
    edges = [len(units) * i // parts for i in range(parts + 1)]
    return [
        units[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True) if a < b
    ]
