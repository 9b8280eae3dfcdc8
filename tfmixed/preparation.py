"""The account of what `prepare` did to a model, and why."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Change:
    """What became of one layer or operation.

    Attributes:
        layer: Its path in the model, such as `"encoder/attention"`.
        kind: The name of its class.
        before: The dtype policy that it had; `"-"` for an operation.
        after: The dtype policy that it has now.
        reason: Why, as a sentence.
        twin: Whether it became a layer of `tfmixed.layers`.
    """

    layer: str
    kind: str
    before: str
    after: str
    reason: str
    twin: bool = False


@dataclasses.dataclass(frozen=True)
class Preparation:
    """What `prepare` did to a model; `print` shows it.

    Attributes:
        model: The name of the model.
        policy: The policy that it was prepared for.
        changes: One `Change` for each layer, in the order of the model.
        notes: What else a person should know, as sentences.
        in_place: Whether the model is the very object that was handed in,
            because it could not be copied.
    """

    model: str
    policy: str
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    in_place: bool = False

    def __str__(self) -> str:
        lines = [self._headline()]
        for (reason, what), changes in self._by_reason().items():
            kinds = sorted({change.kind for change in changes})
            names = ", ".join(change.layer for change in changes[:4])
            more = f" and {len(changes) - 4} more" if len(changes) > 4 else ""
            lines.append(f"  {what}: {names}{more} ({', '.join(kinds)})")
            lines.append(f"    {reason}")
        lines += [f"  Note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _headline(self) -> str:
        half = [c for c in self.changes if c.after.startswith("mixed_")]
        return (
            f"Model '{self.model}' is prepared for {self.policy}: "
            f"{len(half)} of {len(self.changes)} layers compute in 16 bits."
        )

    def _by_reason(self) -> dict[tuple[str, str], list[Change]]:
        """The layers that are not simply in the policy, grouped."""
        groups: dict[tuple[str, str], list[Change]] = {}
        for change in self.changes:
            if change.after != self.policy or change.twin:
                what = "twin" if change.twin else change.after
                groups.setdefault((change.reason, what), []).append(change)
        return groups


class Account:
    """Collects the changes while a model is being prepared."""

    def __init__(self) -> None:
        self._changes: dict[int, Change] = {}
        self._alive: list[object] = []
        self.notes: list[str] = []

    def record(self, target: object, change: Change) -> None:
        """Notes what became of a layer; a later word replaces an earlier."""
        # Ids are unique among objects that are alive.
        self._alive.append(target)
        self._changes[id(target)] = change

    def of(self, target: object) -> Change | None:
        """What has been noted about a layer so far."""
        return self._changes.get(id(target))

    def note(self, text: str) -> None:
        """Adds a sentence, once."""
        if text not in self.notes:
            self.notes.append(text)

    def close(self, model: str, policy: str, in_place: bool) -> Preparation:
        """Returns the finished account."""
        changes = tuple(self._changes.values())
        return Preparation(model, policy, changes, tuple(self.notes), in_place)
