"""What lives on the meta device: every storage from its birth to its end, and the highest sum of a phase, by kind."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("weights", "gradients", "moments", "masters", "in flight", "buffers")
_SMALLEST_RISE = 1.005  # above the last picture before a new one is taken; the rest counts as in flight

Holdings = Iterable[tuple[str, Tensor]]


class Ledger(TorchDispatchMode):
    """Counts bytes of storages on the meta device that are made while it is entered, or tracked.

    Args:
        holdings: Returns the kind of each tensor that is held for a purpose; all else is in flight.
    """

    def __init__(self, holdings: Callable[[], Holdings]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._holdings = holdings
        self._nbytes: dict[int, int] = {}  # by identity of the storage
        self._references: dict[int, weakref.ref[Any]] = {}
        self._total = self._highest = 0
        self._pictured: float = math.inf  # no pictures before the first phase
        self._picture: dict[str, int] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Ledger:
        ledger = self

        def resize(storage: Any, nbytes: int) -> Any:  # torch dispatches no change of a storage
            result = ledger._resize(storage, nbytes)
            if storage.device.type == "meta":
                ledger._set(storage, nbytes)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment, method-assign]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and track what it has made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                self.track(leaf)
        return result

    def track(self, tensor: Tensor) -> None:
        """Count the storage of a tensor from now on."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._nbytes:
            self._set(storage, storage.nbytes())

    def begin_phase(self) -> None:
        """Forget the peak so far."""
        self._pictured, self._highest = 0, self._total
        self._look()

    def peak(self) -> dict[str, int]:
        """Return the bytes of each kind at the highest sum since ``begin_phase``."""
        self._look()
        peak = dict(self._picture)
        peak["in flight"] += self._highest - sum(peak.values())
        return peak

    def present(self) -> dict[str, int]:
        """Return the bytes of each kind that live now."""
        found, seen = dict.fromkeys(KINDS, 0), set()
        for kind, tensor in self._holdings():
            key = tensor.untyped_storage()._cdata
            if key not in seen:
                seen.add(key)
                found[kind] += self._nbytes.get(key, 0)
        found["in flight"] += self._total - sum(found.values())
        return found

    def _set(self, storage: Any, nbytes: int) -> None:
        key = storage._cdata
        if key not in self._references:
            self._references[key] = weakref.ref(storage, partial(self._forget, key))
        self._total += nbytes - self._nbytes.get(key, 0)
        self._nbytes[key] = nbytes
        self._highest = max(self._highest, self._total)
        if self._total > _SMALLEST_RISE * self._pictured:
            self._look()

    def _look(self) -> None:
        if self._total > self._pictured:
            self._pictured, self._picture = self._total, self.present()

    def _forget(self, key: int, _: Any) -> None:
        del self._references[key]
        self._total -= self._nbytes.pop(key)
