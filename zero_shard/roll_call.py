"""A roll call through the key-value store of a process group: who is there, and who is not, by number.

A collective that lacks a rank fails with the address of a socket, or when its time is up. The store, which every rank
reaches on a way of its own, can tell which rank it was.
"""

from __future__ import annotations

import time
from typing import Any

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
_PATIENCE_S = 2.0  # with ranks that give no sign after a failure


class RollCall:
    """The ranks of one group.

    Args:
        store: Of the group; None: a world of one, or a torch that has no store for it. Then nobody is ever missing.
        rank, num_ranks: This rank's number, and how many there are.
        name: Equal on all ranks, and used by no other roll call on this store.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, name: str) -> None:
        self._store, self._rank, self._num_ranks, self._name = store, rank, num_ranks, name
        self._numbers: dict[str, int] = {}  # of calls of each kind so far
        self._answered: set[str] = set()  # keys under which this rank has said that it is here

    def take(self, label: str, patience_s: float) -> None:
        """Return when every rank has come here. All ranks call; costs one small message and a few questions.

        Args:
            label: What is called, its kind first: "saving runs/step-3".
            patience_s: How long to wait.
        Raises:
            RuntimeError: Somebody is missing when patience ends, by number; a later call waits for the same ones.
        """
        if self._store is None:
            return
        kind = label.split()[0]  # a rank that saves does not answer one that loads
        number = self._numbers.setdefault(kind, 0)
        key = f"{self._name}/{kind}/{number}"
        if key not in self._answered:
            self._answer(key)
        self._answered.add(key)
        missing = self._missing(key, patience_s)
        if missing:
            raise RuntimeError(
                f"{label}: {_ranks(missing)} did not take part within {patience_s:.0f} s. All ranks must call it"
            )
        self._numbers[kind] = number + 1
        self._answered.discard(key)

    def describe_missing(self) -> str:
        """Return in words who gives no sign after a failure that every other rank has noticed; "" if all do."""
        if self._store is None:
            return ""
        try:
            key = f"{self._name}/failed"
            self._answer(key)
            missing = self._missing(key, _PATIENCE_S)
        except RuntimeError:
            return "the process that holds the store of the group, which is rank 0 unless torchrun does, is gone"
        return f"{_ranks(missing)} gave no sign within {_PATIENCE_S:.0f} s" if missing else ""

    def _answer(self, key: str) -> None:
        self._store.set(f"{key}/{self._rank}", "here")
        self._store.add(f"{key}/count", 1)

    def _missing(self, key: str, patience_s: float) -> list[int]:
        """Wait for all ranks; return those that have not come."""
        end, pause = time.monotonic() + patience_s, _FIRST_PAUSE_S
        while self._store.add(f"{key}/count", 0) < self._num_ranks:
            if time.monotonic() > end:
                return [rank for rank in range(self._num_ranks) if not self._store.check([f"{key}/{rank}"])]
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return []


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank{'s' * (len(numbers) > 1)} {shown}"
