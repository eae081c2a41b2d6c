"""Measures what each stage holds and sends, and draws the two pictures of the README.

    python benchmarks/memory_chart.py            # measure, write the numbers, draw
    python benchmarks/memory_chart.py --draw     # draw the numbers that were written before

Trains the example's GPT for a few steps on 2 and on 4 CPU processes at every stage. Three sources are
compared, and a disagreement stops the script: what the optimizer reports, the storages of all tensors that
Python can still reach, and the byte counter of the loopback device.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
import torch.distributed as dist
import torch.multiprocessing

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from gpt import GPT, VOCABULARY_NUMEL, GPTConfig, next_byte_loss  # noqa: E402

import zero_shard  # noqa: E402

# Before pyplot: this backend needs no screen.
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "memory_chart.json"
IMAGES = ROOT / "docs" / "img"
MODEL = GPTConfig(width=256, num_layers=8, num_heads=4, context=64)
BATCH = 2
STAGES = (0, 1, 2, 3)
WORLD_SIZES = (2, 4)
NUM_STEPS = 4
GROUP_TIMEOUT_S = 120
MIB = 2**20
LIVE_TOLERANCE = 0.01
"""Step counts, segment tables and NaN placeholders are alive, too, and no part of the report."""
LOOPBACK_SENT_FIELD = 8  # after eight counters of what was received
LOOPBACK_TOLERANCE = 0.05
"""The device also counts TCP and IP headers, acknowledgements and gloo's own messages."""
COLORS = {2: "#1f5a94", 4: "#e08a3c"}
STAGE_NAMES = {
    0: "stage 0\nreplicated",
    1: "stage 1\n+ moments",
    2: "stage 2\n+ gradients",
    3: "stage 3\n+ parameters",
}


class Held(NamedTuple):
    """Model state of one rank at one moment."""

    reported_nbytes: int
    live_nbytes: int


def main() -> None:
    """Measure unless told not to, then draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw the numbers in benchmarks/results again")
    if not parser.parse_args().draw:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        rows = [row for world_size in WORLD_SIZES for row in measure(world_size)]
        RESULTS.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=2) + "\n")
    report = json.loads(RESULTS.read_text())
    print_table(report["rows"])
    IMAGES.mkdir(parents=True, exist_ok=True)
    draw(report, "held_nbytes", "promised_nbytes", "promised", "Model state held per rank", "memory.png")
    draw(report, "sent_nbytes", "floor_nbytes", "floor", "Bytes sent per rank and step", "traffic.png")


def measure(world_size: int) -> list[dict[str, Any]]:
    """Start ``world_size`` processes and return one row per stage and rank."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    port_file = RESULTS.parent / f".store-{os.getpid()}"
    store = f"file://{port_file}"
    torch.multiprocessing.spawn(_measure_rank, args=(world_size, store, queue), nprocs=world_size)
    port_file.unlink(missing_ok=True)
    rows = [row for _ in range(world_size) for row in queue.get()]
    return sorted(rows, key=lambda row: (row["stage"], row["rank"]))


def _measure_rank(rank: int, world_size: int, store: str, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, rank=rank, world_size=world_size, timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    queue.put([measure_stage(stage, rank, world_size) for stage in STAGES])
    dist.barrier()
    dist.destroy_process_group()


def measure_stage(stage: int, rank: int, world_size: int) -> dict[str, Any]:
    """Train a few steps and return this rank's row. All ranks call it."""
    before_nbytes = live_nbytes()
    torch.manual_seed(0)
    model = GPT(MODEL)
    num_params = sum(param.numel() for param in model.parameters())
    optimizer = zero_shard.AdamW(model.parameters(), lr=1e-3, module=model, config={"stage": stage})
    generator = torch.Generator().manual_seed(rank)
    loopback: list[int] = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        windows = torch.randint(VOCABULARY_NUMEL, (BATCH, MODEL.context + 1), generator=generator)
        dist.barrier()
        mark = loopback_nbytes()
        loss = next_byte_loss(model, windows)
        loss.backward()
        # Freed by now, but for the scalar, and no model state.
        del loss, windows
        after_backward = Held(optimizer.usage().held_nbytes, live_nbytes() - before_nbytes)
        optimizer.step()
        dist.barrier()
        loopback.append(loopback_nbytes() - mark)
    usage = optimizer.usage()
    held = max(after_backward, Held(usage.held_nbytes, live_nbytes() - before_nbytes))
    row = {
        "world_size": world_size,
        "stage": stage,
        "rank": rank,
        "num_params": num_params,
        "promised_nbytes": usage.promised_nbytes,
        "held_nbytes": held.reported_nbytes,
        "live_nbytes": held.live_nbytes,
        "floor_nbytes": usage.floor_sent_nbytes,
        "sent_nbytes": usage.sent_nbytes,
        # Whatever else uses the device only adds to it, so the least is the nearest.
        "loopback_all_ranks_nbytes": min(loopback),
    }
    sent = torch.tensor(usage.sent_nbytes)
    dist.all_reduce(sent)
    _require_close(row, "held_nbytes", "live_nbytes", held.live_nbytes, LIVE_TOLERANCE)
    _require_close(row, "sent_nbytes of all ranks", "loopback", min(loopback) / int(sent), LOOPBACK_TOLERANCE, 1.0)
    return row


def _require_close(
    row: dict[str, Any], name: str, other: str, got: float, tolerance: float, expected: float | None = None
) -> None:
    wanted = row[name] if expected is None else expected
    if abs(got - wanted) > tolerance * wanted:
        raise RuntimeError(
            f"stage {row['stage']}, rank {row['rank']} of {row['world_size']}: {name} is {wanted:,}, "
            f"but {other} gives {got:,}; expected a difference of {tolerance:.0%} at most"
        )


def live_nbytes() -> int:
    """Return the bytes of all tensor storages that Python can reach, each storage counted once."""
    gc.collect()
    storages: dict[int, int] = {}
    # A released parameter raises when it is read, and here only its storage is looked at.
    with torch._C.DisableTorchFunctionSubclass():
        for each in gc.get_objects():
            if not issubclass(type(each), torch.Tensor) or issubclass(type(each), zero_shard.ShardedGrad):
                continue
            if each.device.type == "meta":  # holds nothing
                continue
            storage = each.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def loopback_nbytes() -> int:
    """Return how many bytes the loopback device has sent since it was set up, for all processes."""
    fields = Path("/proc/net/dev").read_text().partition(" lo:")[2].split()
    return int(fields[LOOPBACK_SENT_FIELD])


def environment() -> dict[str, str]:
    """Return what the numbers depend on."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "command": "python benchmarks/memory_chart.py",
        "commit": commit.stdout.strip() or "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print all rows in MiB."""
    columns = ("promised_nbytes", "held_nbytes", "live_nbytes", "floor_nbytes", "sent_nbytes")
    print("ranks stage rank " + " ".join(f"{name.removesuffix('_nbytes'):>9}" for name in columns) + "   (MiB)")
    for row in rows:
        cells = " ".join(f"{row[name] / MIB:9.2f}" for name in columns)
        print(f"{row['world_size']:5} {row['stage']:5} {row['rank']:4} {cells}")


def draw(report: dict[str, Any], measured: str, limit: str, limit_label: str, title: str, name: str) -> None:
    """Draw a bar per stage and world size, for the fullest rank, with the limit as a line across it."""
    rows = report["rows"]
    num_params = rows[0]["num_params"]
    figure, axes = plt.subplots(figsize=(7.5, 4.2), dpi=150, layout="constrained")
    width = 0.36
    for offset, world_size in zip((-width / 2, width / 2), WORLD_SIZES, strict=True):
        for stage in STAGES:
            own = [row for row in rows if (row["stage"], row["world_size"]) == (stage, world_size)]
            value = max(row[measured] for row in own) / MIB
            bound = max(row[limit] for row in own) / MIB
            label = f"{world_size} ranks" if stage == 0 else None
            bar = axes.bar(stage + offset, value, width * 0.92, color=COLORS[world_size], label=label)
            axes.bar_label(bar, fmt="%.1f", padding=3, fontsize=9)
            line_label = limit_label if (stage, world_size) == (0, WORLD_SIZES[-1]) else None
            ends = (stage + offset - width / 2, stage + offset + width / 2)
            axes.hlines(bound, *ends, colors="black", linewidth=1.6, label=line_label)
    axes.set_xticks(STAGES, [STAGE_NAMES[stage] for stage in STAGES])
    axes.set_ylabel("MiB")
    axes.set_title(f"{title}, GPT of {num_params / 1e6:.1f} M fp32 parameters (measured)", fontsize=11)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    figure.savefig(IMAGES / name)
    plt.close(figure)


if __name__ == "__main__":
    main()
