"""What every rank does for ``hosts.py``: train in several ways and read the counters of its host's link."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zero_shard


@dataclass
class Plan:
    """What to do.

    Attributes:
        ways: Each with ``config``, ``num_micros`` (backwards per step), and maybe ``is_no_sync``.
        folder: Where every rank leaves its findings.
        device: Name of the link.
        mbit: Rate of the slowed link; 0 = it is not slowed, and nothing is timed.
        num_layers, width: The model, a row of linear layers.
        num_counted, num_timed: Steps on the fast link, whose bytes are counted, and on the slowed one.
        drop_link: At the end take the link down in the middle of a step.
        lost_timeout_s: Of the process group that loses its link.
    """

    ways: list[dict[str, Any]]
    folder: str
    device: str
    mbit: float = 0
    num_layers: int = 12
    width: int = 256
    num_counted: int = 3
    num_timed: int = 3
    drop_link: bool = False
    lost_timeout_s: float = 5


def sent_over(device: str) -> int:
    """Return the bytes that this host has sent over its link since it was made."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == device:
            return int(counters.split()[8])
    raise RuntimeError(f"/proc/net/dev has no device {device}")


def on_link(device: str, mbit: float) -> None:
    """Slow this host's end of the link to a rate; 0 makes it fast again. One rank of the host calls."""
    if mbit:
        rate = ["rate", f"{mbit}mbit", "burst", "64kb", "latency", "200ms"]
        subprocess.run(["tc", "qdisc", "add", "dev", device, "root", "tbf", *rate], check=True)
    else:
        subprocess.run(["tc", "qdisc", "del", "dev", device, "root"], check=True)


class Training:
    """A model with its optimizer, and steps on it."""

    def __init__(self, plan: Plan, way: dict[str, Any], group: Any = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(plan.width, plan.width) for _ in range(plan.num_layers)))
        self.optimizer = zero_shard.AdamW(
            self.model.parameters(), module=self.model, config=way["config"], process_group=group
        )
        self._num_micros, self._is_no_sync = way.get("num_micros", 1), way.get("is_no_sync", False)
        self._inputs = torch.ones(1, plan.width)

    def step(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        for micro in range(self._num_micros):
            is_local = self._is_no_sync and micro < self._num_micros - 1
            with self.optimizer.no_sync() if is_local else contextlib.nullcontext():
                self.model(self._inputs).sum().backward()
        self.optimizer.step()


def count(plan: Plan, way: dict[str, Any]) -> dict[str, Any]:
    """Return what a step sends: over this host's link, and by this rank's own count."""
    training, is_slowed = Training(plan, way), plan.mbit > 0
    link: list[int] = []
    for number in range(1 + plan.num_counted):
        dist.barrier()
        before = sent_over(plan.device)
        dist.barrier()
        training.step()
        dist.barrier()
        if number > 0:  # the first also agrees about orders
            link.append(sent_over(plan.device) - before)
    usage = training.optimizer.usage()
    row = {**way, "link_nbytes": min(link), "sent_nbytes": usage.sent_nbytes, "floor_nbytes": usage.floor_sent_nbytes}
    row["across_nbytes"] = usage.sent_across_nbytes
    row["params_nbytes"] = sum(param.numel() for param in training.model.parameters()) * 4
    if is_slowed:
        row["step_s"] = timed(plan, training)
    return row


def timed(plan: Plan, training: Training) -> float:
    """Return the median time of a step on the slowed link."""
    is_first = int(os.environ["LOCAL_RANK"]) == 0
    if is_first:
        on_link(plan.device, plan.mbit)
    times = []
    for _ in range(plan.num_timed):
        dist.barrier()
        start = time.perf_counter()
        training.step()
        dist.barrier()
        times.append(time.perf_counter() - start)
    if is_first:
        on_link(plan.device, 0)
    return statistics.median(times)


def lose_link(plan: Plan) -> dict[str, Any]:
    """Train while the second host takes its link down in mid-step; return the error and the time until it came."""
    group = dist.new_group(timeout=timedelta(seconds=plan.lost_timeout_s))
    training = Training(plan, {"config": {"stage": 2}}, group)
    training.step()
    training.optimizer.zero_grad()
    loss = training.model(training._inputs).sum()
    # Files, since a barrier may still need the link on another rank when it is over on this one.
    marks = [Path(plan.folder, f"{rank}.ready") for rank in range(dist.get_world_size())]
    marks[dist.get_rank()].touch()
    _wait_for(marks)
    if dist.get_rank() == dist.get_world_size() - 1:
        subprocess.run(["ip", "link", "set", plan.device, "down"], check=True)
        Path(plan.folder, "down").touch()
    _wait_for([Path(plan.folder, "down")])
    start = time.monotonic()
    try:
        loss.backward()
        training.optimizer.step()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = ""
    return {"error": text, "after_s": time.monotonic() - start}


def _wait_for(paths: list[Path]) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(0.01)


def main() -> None:
    """Do what the plan in the first argument says."""
    plan = Plan(**json.loads(sys.argv[1]))
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found: dict[str, Any] = {"rows": [count(plan, way) for way in plan.ways]}
    found["params_nbytes"] = found["rows"][0]["params_nbytes"] if found["rows"] else 0
    if plan.drop_link:
        found["lost"] = lose_link(plan)
    path = Path(plan.folder, f"{dist.get_rank()}.json")
    path.with_suffix(".part").write_text(json.dumps(found), encoding="utf-8")
    path.with_suffix(".part").rename(path)
    if not plan.drop_link:
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # without the link nobody could say goodbye


if __name__ == "__main__":
    main()
