"""Which weights the rest of a master belongs to."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class SeenWeights:
    """The 16-bit weights that a bucket's ``low`` belongs to. See Note [Edited weights] in ``masters.py``.

    Attributes:
        versions: Of the parameters; None: those that are here at the next step are right.
        num_steps: Since ``versions`` were read, each of which has added one to all of them.
        edited: Positions of parameters that were edited since the last step.
        watched: Those that were edited between the two steps before.
        last_shard: [n], as the last step left it; None if nothing is watched, and at stage 3.
        loaded_low: Position -> own part of ``low`` for a weight that is in ``full`` and not in ``shard`` (stage 3).
    """

    versions: list[int] | None = None
    num_steps: int = 0
    edited: set[int] = field(default_factory=set)
    watched: set[int] = field(default_factory=set)
    last_shard: Tensor | None = None
    loaded_low: dict[int, Tensor] = field(default_factory=dict)
