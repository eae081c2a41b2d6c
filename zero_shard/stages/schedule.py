"""The order in which units are gathered during one pass, the same on all ranks whatever path each takes.

# Note [Walking and agreeing]
A gather needs all ranks, but which units a rank uses may depend on its data. The first pass is served by agreement:
each rank names the unit it wants, the smallest is gathered by all, until everyone is done. What was served is the
record. Later passes walk the record without asking: a rank that skips a unit still takes part in its gather when it
wants a later one. A rank that wants something outside of the rest of the record walks to its end, and says so in
the one small message that ends every pass; the others, who have arrived there too, then serve it by agreement.
Units of the record that nobody used are dropped from it.
"""

from __future__ import annotations

from typing import Protocol

import torch

from zero_shard.collectives import Communicator

_DONE = 2**31 - 1


class Server(Protocol):
    """Who gathers units when the schedule says so."""

    def start_gather(self, unit: int) -> None:
        """Start to gather a unit; all ranks do so in the same order."""

    def discard(self, unit: int) -> None:
        """End the gather of a unit that this rank does not use."""


class Schedule:
    """Order of gathers of one kind of pass (say, training forward, or backward)."""

    def __init__(self, communicator: Communicator, name: str) -> None:
        self._communicator, self._name = communicator, name
        self._record: list[int] | None = None
        self._served: list[int] = []
        self._is_used: list[bool] = []
        self._position = 0  # next entry of the record that this rank has not passed
        self._issued = 0  # entries whose gather has been started
        self._is_agreeing = False

    def begin(self) -> None:
        """Start a pass. All ranks call."""
        self._position = self._issued = 0
        self._is_agreeing = self._record is None
        self._served, self._is_used = [], [False] * len(self._record or ())

    def request(self, unit: int, server: Server, prefetch: int) -> None:
        """Have ``unit`` gathered (started, at least), with those before it, and the next ``prefetch`` ones started."""
        record = self._record
        if not self._is_agreeing and record is not None:
            try:
                found = record.index(unit, self._position)
            except ValueError:
                self._walk_to_end(server)
                self._exchange_end(wants_more=True)
            else:
                self._pass_by(found, server)
                self._issue(found + 1, server)
                self._is_used[found] = True
                self._position = found + 1
                self._issue(min(found + 1 + prefetch, len(record)), server)
                return
        self._serve_until(unit, server)

    def end(self, server: Server) -> None:
        """End a pass: take part in what others still need. All ranks call; blocks."""
        if not self._is_agreeing:
            self._walk_to_end(server)
            if not self._exchange_end(wants_more=False):
                return
        self._serve_until(_DONE, server)
        self._record = self._served
        self._is_agreeing = False

    def _issue(self, stop: int, server: Server) -> None:
        assert self._record is not None
        for unit in self._record[self._issued : stop]:
            server.start_gather(unit)
        self._issued = max(self._issued, stop)

    def _pass_by(self, stop: int, server: Server) -> None:
        assert self._record is not None
        for position in range(self._position, stop):
            self._issue(position + 1, server)
            server.discard(self._record[position])
        self._position = max(self._position, stop)

    def _walk_to_end(self, server: Server) -> None:
        assert self._record is not None
        self._pass_by(len(self._record), server)

    def _exchange_end(self, wants_more: bool) -> bool:
        """Tell all ranks which entries were used here; return whether any rank wants more."""
        assert self._record is not None
        message = torch.tensor([*self._is_used, wants_more], dtype=torch.uint8)
        union = self._communicator.agree(message, "max", f"the end of {self._name}").tolist()
        self._record = [unit for unit, is_used in zip(self._record, union, strict=False) if is_used]
        self._is_agreeing = bool(union[-1])
        self._served = list(self._record)
        return self._is_agreeing

    def _serve_until(self, wanted: int, server: Server) -> None:
        """Take turns with the other ranks until ``wanted`` has been gathered."""
        while True:
            message = torch.tensor([wanted], dtype=torch.int64)
            unit = int(self._communicator.agree(message, "min", f"the next unit of {self._name}").item())
            if unit == _DONE:
                return
            self._served.append(unit)
            server.start_gather(unit)
            if unit == wanted:
                return
            server.discard(unit)
