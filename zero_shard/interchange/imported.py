"""What an import gives: tensors by our keys that are read one at a time, and groups as torch.optim.AdamW has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that lies in files, in one or several pieces, until it is read.

    Args:
        shape: Of the whole.
        dtype: Of the whole.
        parts: At least one; 1-d pieces in row-major order, aliases of memory-mapped files, which have its elements.
    """

    shape: torch.Size
    dtype: torch.dtype
    parts: tuple[Tensor, ...] = field(repr=False)

    def read(self) -> Tensor:
        """Return the whole, on the CPU, as a copy of its own. Local."""
        return torch.cat(self.parts).view(self.shape)


def lazy(whole: Tensor) -> LazyTensor:
    """Return a tensor that is in one piece."""
    return LazyTensor(whole.shape, whole.dtype, (whole.detach().reshape(-1),))


def lazy_parts(shape: Sequence[int], parts: Sequence[Tensor]) -> LazyTensor:
    """Return a tensor of a shape from its 1-d pieces, at least one."""
    return LazyTensor(torch.Size(shape), parts[0].dtype, tuple(part.detach() for part in parts))


@dataclass
class Imported:
    """Model and optimizer of another library's checkpoint.

    Args:
        tensors: ``model.<name>``, ``optim.state.<name>.exp_avg``, ``.exp_avg_sq``, ``.step`` (and ``.max_exp_avg_sq``),
            each parameter once; float32 masters where there are some. A parameter that took no step has no state.
        param_groups: As torch.optim.AdamW writes them, with names in place of numbers in ``params``.
        steps: Step counts by parameter, as in ``tensors``.
        aliases: Other names of tied parameters, and the name under which each is in ``tensors``.
        notes: What was left out, and why.
    """

    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    steps: dict[str, float] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_step(self, name: str, count: float) -> None:
        """Note the step count of a parameter in both places."""
        self.steps[name] = count
        self.tensors[f"optim.state.{name}.step"] = lazy(torch.tensor(count, dtype=torch.float32))
