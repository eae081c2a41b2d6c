"""The random number generators of this process: torch (CPU and the present GPU), NumPy, Python."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def random_states() -> dict[str, Any]:
    """Return the states, as something that ``torch.load(weights_only=True)`` reads."""
    name, keys, *rest = numpy.random.get_state(legacy=True)
    states = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Let the generators go on from states that `random_states` returned."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = states["numpy"]
    numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
