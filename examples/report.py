"""What the user sees at the end: the table of promised and measured bytes, and the loss curve."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch

import zero_shard

# Before pyplot: this backend needs no screen.
matplotlib.use("Agg")
import matplotlib.pyplot as plt

MIB = 2**20


def peak_memory_mib(device: torch.device) -> float:
    """Return the most memory this process has held: of the GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak * 1024 / MIB


def usage_table(usage: Sequence[zero_shard.Usage]) -> str:
    """Return a table with one line per rank: bytes held and sent, beside what was promised."""
    lines = [
        "         model state per rank          bytes sent per step",
        "rank     promised     measured         floor     measured",
    ]
    for rank, each in enumerate(usage):
        lines.append(
            f"{rank:4} {_mib(each.promised_nbytes)} {_mib(each.held_nbytes)}  "
            f"{_mib(each.floor_sent_nbytes)} {_mib(each.sent_nbytes)}"
        )
    return "\n".join(lines)


def chart(history: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw training and held-out loss over the steps, as a PNG."""
    training = [(entry["step"], entry["train_loss"]) for entry in history if "train_loss" in entry]
    held_out = [(entry["step"], entry["held_out_loss"]) for entry in history if "held_out_loss" in entry]
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes.plot(*zip(*training, strict=True), color="#1f5a94", linewidth=1.5, label="training")
    axes.plot(*zip(*held_out, strict=True), color="#c8501e", marker="o", linestyle="none", label="held out")
    for step, loss in held_out:
        axes.annotate(f"{loss:.2f}", (step, loss), textcoords="offset points", xytext=(4, 9), color="#c8501e")
    axes.set(xlabel="step", ylabel="loss in nats per byte", title="GPT on the source of Python's standard library")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:8.2f} MiB"
