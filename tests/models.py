"""Small models whose gradients are known: the tests choose what each parameter is used for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

Use = Callable[[Tensor], Tensor]


class Cell(nn.Module):
    """One parameter, to be read only inside ``forward``, as stage 3 asks."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)

    def forward(self, use: Use) -> Tensor:
        """Return what ``use`` makes of the weight."""
        return use(self.weight)


class Cells(nn.Module):
    """Cells in a stack, so that each is a unit of its own at stage 3; parameter i is called ``cells.i.weight``."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__()
        self.cells = nn.ModuleList(Cell(value) for value in values)

    @property
    def weights(self) -> list[nn.Parameter]:
        """The parameters in order."""
        return [cell.weight for cell in self.cells]

    def forward(self, uses: Mapping[int, Use]) -> Tensor:
        """Return the float64 sum of what every use makes of its cell, in the order of ``uses``; others aren't read."""
        total = torch.zeros((), dtype=torch.float64)
        for index, use in uses.items():
            total = total + self.cells[index](use).to(torch.float64)
        return total


class OneModule(nn.Module):
    """The same with all parameters in one module, which is one unit at stage 3; parameter i is called ``weights.i``."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(values)

    def forward(self, uses: Mapping[int, Use]) -> Tensor:
        """Return the float64 sum of what every use makes of its parameter."""
        total = torch.zeros((), dtype=torch.float64)
        for index, use in uses.items():
            total = total + use(self.weights[index]).to(torch.float64)
        return total


class Scale(nn.Module):
    """Multiplies its input by one weight."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Return weight * x."""
        return self.weight * x


def linear_use(gradient: Tensor) -> Use:
    """Return a use of a parameter whose gradient is ``gradient``, in logical order, whatever the strides."""
    return lambda weight: (weight * gradient).sum()
