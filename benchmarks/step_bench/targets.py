"""The targets of issue 3, and whether they were met."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from step_bench import names
from step_bench.timing import Row

CODE_SHARE = 0.255  # a quarter, and a scale of 4 bytes for every 1024 of fp32


class Target(NamedTuple):
    """What was to be reached, and what was."""

    what: str
    wanted: float
    measured: float | None
    is_upper_bound: bool = False

    @property
    def is_met(self) -> bool | None:
        """None: not measured."""
        if self.measured is None:
            return None
        return self.measured <= self.wanted if self.is_upper_bound else self.measured >= self.wanted

    def line(self) -> str:
        """Return it as a line of the report."""
        sign = "<=" if self.is_upper_bound else ">="
        if self.measured is None:
            return f"{self.what}: {sign} {self.wanted:g} / not measured"
        return f"{self.what}: {sign} {self.wanted:g} / {self.measured:.3f} / {'met' if self.is_met else 'NOT met'}"

    def as_dict(self) -> dict[str, Any]:
        """Return it for the results that are kept."""
        return {**self._asdict(), "is_met": self.is_met, "line": self.line()}


class _Table:
    """The rows by group, name and clipping."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = {(row.group, row.name, row.clipping): row for row in rows}

    def speed(
        self, wanted: float, group: str, mine: str, others: Sequence[str], ways: tuple[str, str] = ("", "")
    ) -> Target:
        """Compare the time per parameter with that of the fastest of the others; ways: how mine and theirs clip."""
        row = self.rows.get((group, mine, ways[0]))
        peers = [self.rows[key] for name in others if (key := (group, name, ways[1])) in self.rows]
        measured = min(each.ns_per_param for each in peers) / row.ns_per_param if row and peers else None
        named = [f"{name} ({way})" if way else name for name, way in ((mine, ways[0]), (others[0], ways[1]))]
        return Target(f"{named[0]}: times as fast as {named[1]}", wanted, measured)


def cpu_targets(rows: Sequence[Row]) -> list[Target]:
    """Return the targets that one thread count decides."""
    table = _Table(rows)
    limits = ((names.LOOP, 0.97), (names.FUSED, 1.0), (names.DEEPSPEED, 1.0))
    result = [
        table.speed(wanted, "fp32", mine, [other]) for mine in (names.OURS, names.OUR_ADAMW) for other, wanted in limits
    ]
    for wanted, mine, way in (
        (1.3, names.OURS, names.BY_REDUCTION),
        (1.15, names.OURS, names.BY_PASS),
        (1.15, names.OUR_ADAMW, names.BY_CONFIG),
    ):
        result.append(table.speed(wanted, "fp32", mine, [names.FUSED], (way, names.BY_TORCH)))
    for mine in (f"{names.OURS} bf16", f"{names.OUR_ADAMW} bf16"):
        result.append(table.speed(1.35, "bf16-master", mine, [names.WITH_MASTER, names.WITH_MASTER_FLAT]))
        result.append(table.speed(1.0, "bf16-master", mine, [names.DEEPSPEED_WITH_COPY]))
    code, wide = (table.rows.get(("8-bit", name, "")) for name in (names.OURS + names.EIGHT_BIT, names.OURS))
    share = code.moment_nbytes_per_param / wide.moment_nbytes_per_param if code and wide else None
    result.append(Target(f"{names.OURS}{names.EIGHT_BIT}: their bytes over those of fp32", CODE_SHARE, share, True))
    for mine in (names.OURS, names.OUR_ADAMW):
        result += [
            table.speed(1.0, "8-bit", mine + names.EIGHT_BIT, [other]) for other in (names.TORCHAO, names.BITSANDBYTES)
        ]
    return result + [table.speed(1.0, "small", mine + names.SMALL, [mine]) for mine in (names.OURS, names.OUR_ADAMW)]


def gpu_targets(rows: Sequence[Row]) -> list[Target]:
    """Return the targets for a GPU."""
    table = _Table(rows)
    result = []
    for group, name in (("fp32", names.OURS), ("fp32", names.OUR_ADAMW), ("bf16-master", f"{names.OURS} bf16")):
        row = table.rows.get((group, name, ""))
        result.append(Target(f"{name}: share of the bandwidth of a copy", 0.92, row.of_limit if row else None))
    for mine, way in (
        (names.OURS, names.BY_REDUCTION),
        (names.OURS, names.BY_PASS),
        (names.OUR_ADAMW, names.BY_CONFIG),
    ):
        result += [
            table.speed(1.0, "fp32", mine, [other], (way, names.BY_TORCH)) for other in (names.FUSED, names.APEX)
        ]
    return [*result, table.speed(1.0, "bf16-master", f"{names.OURS} bf16", [names.WITH_MASTER])]
