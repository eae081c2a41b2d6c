"""Steps that are skipped on all ranks because the gradient is not finite (``skip_nonfinite``)."""

from __future__ import annotations

import sys
import warnings

import torch
from torch import Tensor

_HOST = "cpu"  # what the host can read without waiting


class NonfiniteSkip:
    """Decides by the gradient norm, which is equal on all ranks, whether a step updates anything.

    Attributes:
        found_inf: 0-dim fp32 of the present step, not 0 if it is skipped, where the kernels look and not the host.
    """

    def __init__(self) -> None:
        self.found_inf: Tensor | None = None
        self._unreported_norm: Tensor | None = None

    def allows(self, norm: Tensor) -> bool:
        """Return whether to go on with the step: on a GPU always, the kernels leave everything as it is."""
        if norm.is_meta:  # a rehearsal has no numbers to look at
            return True
        self._unreported_norm = norm
        if norm.device.type == _HOST:
            return self.report()
        self.found_inf = (~torch.isfinite(norm)).to(torch.float32)
        return True

    def report(self) -> bool:
        """Warn if the last norm made the step be skipped; return whether all was well. May wait for a GPU."""
        norm, self._unreported_norm = self._unreported_norm, None
        if norm is None or bool(torch.isfinite(norm)):
            return True
        text = f"zero_shard skipped a step on all ranks: the gradient norm is {norm.item()}"
        warnings.warn(text, stacklevel=_depth_of_caller())
        return False


def _depth_of_caller() -> int:
    """Return how many frames up from the calling function the first one outside of this package and torch is."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("zero_shard", "torch"):
        depth, frame = depth + 1, frame.f_back
    return depth
