"""A plan: what each configuration holds, sends and takes, whether it fits, and all that in words and numbers."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from zero_shard.config import ZeroConfig
from zero_shard.planning.links import Links
from zero_shard.rehearsal import KINDS, Rehearsal

GIB = 2**30
_SHARDED_FROM = {"moments": 1, "masters": 1, "gradients": 2, "weights": 3}  # the stage
LARGEST_WORLD = 1 << 20


@dataclass(frozen=True)
class Machine:
    """What a plan is made for.

    Attributes:
        world_size: Ranks.
        ranks_per_node: Consecutive ranks that share a node.
        memory_gib: Of one GPU.
        reserve: Share of the memory that is not planned with: the context of the device, NCCL's buffers, fragments.
        activations_gib: What the user's forward keeps for backward on one rank, and its temporaries: not predicted.
        tokens: Per rank and step, for the time of the computation; None: it is left out.
        flops_per_s: That a GPU reaches in forward and backward.
        memory_bytes_per_s: That a GPU reaches in the update.
    """

    world_size: int
    ranks_per_node: int
    memory_gib: float
    links: Links = field(default_factory=Links)
    reserve: float = 0.05
    activations_gib: float = 0.0
    tokens: int | None = None
    flops_per_s: float = 4e14
    memory_bytes_per_s: float = 2e12

    @property
    def usable_nbytes(self) -> int:
        """Bytes that may be planned with."""
        return int(self.memory_gib * GIB * (1 - self.reserve) - self.activations_gib * GIB)


@dataclass(frozen=True)
class Times:
    """Seconds of a step, as predicted."""

    compute_s: float
    communication_s: float
    exposed_s: float  # communication beyond the computation of its phase
    update_s: float
    host_s: float
    step_s: float


@dataclass(frozen=True)
class Row:
    """One configuration.

    Attributes:
        rehearsal: What its steps on fake tensors did.
        num_params: Elements of the model's parameters.
    """

    rehearsal: Rehearsal
    machine: Machine
    num_params: int

    @property
    def config(self) -> ZeroConfig:
        """The configuration."""
        return self.rehearsal.config

    @property
    def label(self) -> str:
        """The configuration in words: the stage, and what is not as by default."""
        parts = [f"stage {self.config.stage}"]
        for each in dataclasses.fields(ZeroConfig):
            value = getattr(self.config, each.name)
            if each.name != "stage" and value != each.default:
                text = str(value).removeprefix("torch.")
                parts.append(f"{each.name}={text}")
        return ", ".join(parts)

    @property
    def peak_phase(self) -> str:
        """The part of a step in which most is held."""
        phases = self.rehearsal.phases
        return max(phases, key=lambda name: sum(phases[name].peak.values()))

    @property
    def peak(self) -> dict[str, int]:
        """Bytes of each kind at the peak of a step, without activations."""
        return self.rehearsal.phases[self.peak_phase].peak

    @property
    def peak_nbytes(self) -> int:
        """Bytes at the peak of a step, without activations."""
        return sum(self.peak.values())

    @property
    def sent_nbytes(self) -> dict[str, int]:
        """Bytes sent in a step, by hop: "shards", "replicas", "hosts"."""
        sent: dict[str, int] = {}
        for phase in self.rehearsal.phases.values():
            for message in phase.messages:
                hop = "hosts" if message.is_host else self._hop(message.members)
                sent[hop] = sent.get(hop, 0) + message.sent_nbytes
        return sent

    @property
    def num_messages(self) -> int:
        """Collectives (or point-to-point sends on gloo) of a step."""
        return sum(len(phase.messages) for phase in self.rehearsal.phases.values())

    @property
    def num_calls(self) -> int:
        """Calls of this package's Python functions in a step."""
        return sum(phase.num_calls for phase in self.rehearsal.phases.values())

    @property
    def fits(self) -> bool:
        """Whether the peak is within what may be used."""
        return self.peak_nbytes <= self.machine.usable_nbytes

    def _hop(self, members: range) -> str:
        is_hybrid = self.config.shard_size not in (None, self.machine.world_size)
        is_across = members.step > 1 or self.config.stage == 0 or self.config.shard_size == 1
        return "replicas" if is_hybrid and is_across else "shards"

    def times(self) -> Times:
        """Return how long a step takes by the alpha-beta model, with what runs at the same time overlapped."""
        machine = self.machine
        flops = 0.0 if machine.tokens is None else 2.0 * self.num_params * machine.tokens
        computes = {"forward": flops, "backward": 2 * flops, "step": 0.0}
        update_s = self.rehearsal.update_nbytes / machine.memory_bytes_per_s
        total = compute = communication = exposed = host = 0.0
        for name, phase in self.rehearsal.phases.items():
            seconds = [(each, machine.links.seconds(each, machine.ranks_per_node)) for each in phase.messages]
            on_device = sum(each_s for each, each_s in seconds if not each.is_host)
            on_host = sum(each_s for each, each_s in seconds if each.is_host)
            compute_s = computes[name] / machine.flops_per_s + (update_s if name == "step" else 0.0)
            compute += computes[name] / machine.flops_per_s
            communication += on_device + on_host
            exposed += max(on_device - compute_s, 0.0) + on_host
            host += phase.host_s
            total += max(compute_s, on_device, phase.host_s) + on_host
        return Times(compute, communication, exposed, update_s, host, total)

    def why(self) -> str:
        """Return in one sentence why it fits or does not."""
        usable, peak = self.machine.usable_nbytes, self.peak
        if self.fits:
            return (
                f"{self.label} fits: {_gib(self.peak_nbytes)} GiB at its peak (in the {self.peak_phase}) "
                f"of {_gib(usable)} GiB, which leaves {_gib(usable - self.peak_nbytes)} GiB for activations"
            )
        largest = sorted(((nbytes, kind) for kind, nbytes in peak.items() if nbytes), reverse=True)[:3]
        parts = ", ".join(f"{kind} {_gib(nbytes)}" for nbytes, kind in largest)
        return (
            f"{self.label} does not fit: {_gib(self.peak_nbytes)} GiB at its peak (in the {self.peak_phase}) of "
            f"{_gib(usable)} GiB: {parts}. {self._remedy()}"
        )

    def _remedy(self) -> str:
        usable, peak, stage = self.machine.usable_nbytes, self.peak, int(self.config.stage)
        whole = {kind: nbytes for kind, nbytes in peak.items() if nbytes and _SHARDED_FROM.get(kind, 4) > stage}
        num_shards = self.config.shard_size or self.machine.world_size
        room = usable - sum(whole.values())
        if room <= 0:
            kind = max(whole, key=lambda name: whole[name])
            is_whole = "every rank holds them whole" if kind in _SHARDED_FROM else "they do not shrink with more ranks"
            return f"More ranks do not help: {kind} take {_gib(whole[kind])} GiB, and {is_whole} at this stage"
        num_ranks = math.ceil((sum(peak.values()) - sum(whole.values())) * num_shards / room)
        if num_ranks > LARGEST_WORLD:
            return "More ranks hardly help"
        return f"It would fit on about {num_ranks} ranks that share one copy"

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, for JSON."""
        rehearsal = self.rehearsal
        return {
            "label": self.label,
            "stage": self.config.stage,
            "fits": self.fits,
            "why": self.why(),
            "peak_nbytes": self.peak_nbytes,
            "peak_phase": self.peak_phase,
            "held": rehearsal.held,
            "held_with_gradients": rehearsal.held_with_gradients,
            "phases": {
                name: {"peak": phase.peak, "num_messages": len(phase.messages), "host_s": phase.host_s}
                for name, phase in rehearsal.phases.items()
            },
            "sent_nbytes": self.sent_nbytes,
            "num_messages": self.num_messages,
            "num_calls": self.num_calls,
            "times": dataclasses.asdict(self.times()),
        }


@dataclass(frozen=True)
class Plan:
    """Configurations side by side.

    Attributes:
        name: Of the model.
        num_params: Elements of its parameters.
        rows: In the order in which they were asked for.
    """

    name: str
    num_params: int
    machine: Machine
    rows: tuple[Row, ...]

    @property
    def best(self) -> Row | None:
        """The lowest stage that fits, of those with the fewest options set; None if nothing fits."""
        fitting = [row for row in self.rows if row.fits]
        return min(fitting, key=lambda row: (row.config.stage, row.label.count(","))) if fitting else None

    def why(self) -> str:
        """Return which configuration to take, and why not those that hold more, one line each."""
        best = self.best
        if best is None:
            return "\n".join(["nothing fits", *(row.why() for row in self.rows)])
        below = [row for row in self.rows if not row.fits]
        return "\n".join([best.why(), *(row.why() for row in below)])

    def table(self) -> str:
        """Return a table of GiB per rank and seconds per step, with the reasons below."""
        machine = self.machine
        head = ["", *KINDS, "peak", "sent GiB", "messages", "step s", "host ms", "fits"]
        lines = [head, *(self._cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        text = [
            f"{self.name}: {self.num_params / 1e9:.2f} billion parameters on {machine.world_size} ranks, "
            f"{machine.ranks_per_node} per node; {_gib(machine.usable_nbytes)} of {machine.memory_gib:g} GiB usable",
            "GiB per rank at the peak of a step, without activations; GiB sent, collectives and seconds per step",
        ]
        for line in lines:
            first = line[0].ljust(widths[0])
            text.append("  ".join([first, *(cell.rjust(widths[i + 1]) for i, cell in enumerate(line[1:]))]).rstrip())
        return "\n".join([*text, "", self.why()])

    def _cells(self, row: Row) -> list[str]:
        times = row.times()
        return [
            row.label,
            *(_gib(row.peak.get(kind, 0)) for kind in KINDS),
            _gib(row.peak_nbytes),
            _gib(sum(row.sent_nbytes.values())),
            str(row.num_messages),
            f"{times.step_s:.3f}",
            f"{times.host_s * 1e3:.1f}",
            "yes" if row.fits else "no",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, for JSON."""
        return {
            "model": self.name,
            "num_params": self.num_params,
            "machine": {**dataclasses.asdict(self.machine), "usable_nbytes": self.machine.usable_nbytes},
            "best": None if self.best is None else self.best.label,
            "rows": [row.to_dict() for row in self.rows],
        }


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f}" if nbytes >= 0.05 * GIB else f"{nbytes / GIB:.3f}" if nbytes else "0"
