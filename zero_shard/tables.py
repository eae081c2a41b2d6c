"""What the kernels look up per parameter: step count, activity, group, hyper-parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_shard.stages.slots import GradSlot

_HYPER_NAMES = ("lr", "beta1", "beta2", "eps", "weight_decay", "amsgrad", "maximize")


class SlotTables:
    """Tables with one row per slot [P] or group [G], on the device of the parameters.

    Attributes:
        steps: [P] fp32, updates of each parameter so far.
        is_active: [P] uint8, whether the present step updates the parameter.
        groups: [P] int32, the row of ``hyper`` of each parameter.
        numbers: [P] int64, position among all parameters of the groups; the key of their random bits.
        hyper: [G, 7] fp64: lr, beta1, beta2, eps, weight_decay, is_amsgrad, is_maximize.
    """

    def __init__(self) -> None:
        self.steps = torch.zeros(0, dtype=torch.float32)
        self.is_active = torch.zeros(0, dtype=torch.uint8)
        self.groups = torch.zeros(0, dtype=torch.int32)
        self.numbers = torch.zeros(0, dtype=torch.int64)
        self.hyper = torch.zeros(0, len(_HYPER_NAMES), dtype=torch.float64)
        self._is_owned = torch.zeros(0, dtype=torch.uint8)  # [P] on the CPU: in one of the groups
        self._rows: list[list[float]] = []
        self._signature: Any = None

    def extend(self, num_slots: int, device: torch.device) -> None:
        """Make room for new slots, with no steps."""
        device = torch.device("cpu") if device.type == "meta" else device  # in a rehearsal, counts are still counted
        old, self.steps = self.steps, torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.steps[: old.numel()] = old
        self._signature = None

    def owned_flags(self, slots: Sequence[GradSlot], groups: Sequence[dict[str, Any]]) -> Tensor:
        """Return [P] uint8 on the CPU: whether the parameter is in one of the groups."""
        self._read_groups(slots, groups)
        return self._is_owned

    def begin_step(
        self,
        flags: Tensor,
        slots: Sequence[GradSlot],
        groups: Sequence[dict[str, Any]],
        found_inf: Tensor | None = None,
    ) -> Tensor:
        """Count the step of every parameter that is updated, and read the groups.

        Args:
            flags: [P] uint8 on the CPU, whether the parameter has a gradient.
            found_inf: 0-dim fp32 beside the tables; not 0: the kernels will leave everything as it is.
        Returns:
            [P] uint8 on the CPU, whether it is updated: it also has to be in a group.
        """
        self._read_groups(slots, groups)
        updated = flags & self._is_owned
        self.is_active = updated.to(self.steps.device)
        self.steps += self.is_active if found_inf is None else self.is_active * (found_inf == 0)
        return updated

    def on(self, device: torch.device) -> list[Tensor]:
        """Return what the kernels take, in their order, on a device."""
        tables = (self.steps, self.is_active, self.groups, self.numbers, self.hyper)
        return [table.to(device) for table in tables]

    def _read_groups(self, slots: Sequence[GradSlot], groups: Sequence[dict[str, Any]]) -> None:
        device = self.steps.device
        rows = [_hyper_row(group) for group in groups]
        if rows != self._rows:  # a copy to a GPU only when something has changed
            self._rows = rows
            self.hyper = torch.tensor(rows, dtype=torch.float64, device=device).view(-1, len(_HYPER_NAMES))
        signature = [tuple(map(id, group["params"])) for group in groups]
        if signature == self._signature:
            return
        owners = [(id(param), row) for row, group in enumerate(groups) for param in group["params"]]
        places = {param: (row, number) for number, (param, row) in enumerate(owners)}
        self._is_owned = torch.tensor([id(slot.param) in places for slot in slots], dtype=torch.uint8)
        found = [places.get(id(slot.param), (0, 0)) for slot in slots]
        self.groups = torch.tensor([row for row, _ in found], dtype=torch.int32, device=device)
        self.numbers = torch.tensor([number for _, number in found], dtype=torch.int64, device=device)
        self._signature = signature


def _hyper_row(group: dict[str, Any]) -> list[float]:
    beta1, beta2 = group["betas"]
    values = (group["lr"], beta1, beta2, group["eps"], group["weight_decay"], group["amsgrad"], group["maximize"])
    return [float(value) for value in values]
