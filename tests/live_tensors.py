"""What live tensors hold: for tests of memory that count storages, not the resident memory of the process."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

import zero_shard


def storages() -> dict[int, torch.UntypedStorage]:
    """Return all distinct storages that live tensors hold, by identity."""
    gc.collect()
    found = {}
    with torch._C.DisableTorchFunctionSubclass():
        for candidate in gc.get_objects():
            kind = type(candidate)  # isinstance would ask proxies that only pretend to be tensors
            if issubclass(kind, Tensor) and not issubclass(kind, zero_shard.ShardedGrad) and not candidate.is_meta:
                for tensor in (candidate, candidate.grad if candidate.is_leaf else None):
                    if tensor is not None and not issubclass(type(tensor), zero_shard.ShardedGrad):
                        found[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
    return found


class Live:
    """Bytes of the storages that have come into the world since this object was made, and live."""

    def __init__(self) -> None:
        self._known = storages()  # held, so that no new storage takes the identity of an old one

    def nbytes(self) -> int:
        """Return how many there are now."""
        return sum(storage.nbytes() for key, storage in storages().items() if key not in self._known)
