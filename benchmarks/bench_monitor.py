"""What zero_shard.Monitor costs a step of the example GPT, in processor time of each rank's only thread.

    python benchmarks/bench_monitor.py                                                     # one rank
    torchrun --standalone --nproc-per-node 2 benchmarks/bench_monitor.py --stage 2         # two

Processor time, since it does not depend on what else the machine does, and in it two numbers: what the monitor's own
functions take, and the median of the ratios of whole steps with and without a monitor that take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import zero_shard
from zero_shard.gradient_watch import GradientWatch
from zero_shard.monitor.timer import Timer

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT, next_byte_loss
from processes import joined
from settings import read_settings

CONFIG = Path(__file__).parent.parent / "examples" / "gpt.toml"
ENTRIES = {
    zero_shard.Monitor: ("log", "_before_step", "_after_step", "before_zero_grad"),
    Timer: ("_enter", "_leave", "_gradient_arrives", "finish_backward"),
    GradientWatch: ("_look",),
}
"""What is called from outside of the monitor; no one calls another."""
spent_s = 0.0


def timed(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its processor time added to ``spent_s``."""

    def measured(*args: Any, **kwargs: Any) -> Any:
        global spent_s
        start = time.thread_time()
        result = call(*args, **kwargs)
        spent_s += time.thread_time() - start
        return result

    return measured


def make_step(stage: int, path: str | None) -> Callable[[], None]:
    """Return one training step of a new model, watched if there is a path."""
    settings = read_settings(CONFIG, stage=stage, steps=None, seed=None)
    torch.manual_seed(0)
    model = GPT(settings.model)
    optimizer = zero_shard.AdamW(model.parameters(), lr=1e-3, module=model, config=settings.zero)
    windows = torch.randint(256, (settings.train.batch // 2, settings.model.context + 1))
    monitor = None if path is None else zero_shard.Monitor(optimizer, path, tokens_per_step=windows.numel())

    def step() -> None:
        loss = next_byte_loss(model, windows)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.log(loss=loss)

    return step


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    for kind, names in ENTRIES.items():
        for name in names:
            setattr(kind, name, timed(getattr(kind, name)))
    global spent_s
    with joined(timeout_s=60) as ranks, tempfile.TemporaryDirectory() as path:
        torch.set_num_threads(1)
        steps = {"without": make_step(given.stage, None), "with": make_step(given.stage, path)}
        times: dict[str, list[float]] = {name: [] for name in steps}
        own = []
        for number in range(-3, given.rounds):
            for name in sorted(steps, reverse=number % 2 == 0):
                spent_s, start = 0.0, time.thread_time()
                steps[name]()
                if number >= 0:
                    times[name].append(time.thread_time() - start)
                    if name == "with":
                        own.append(spent_s)
        step_ms = 1e3 * statistics.median(times["with"])
        own_ms = 1e3 * statistics.median(own)
        ratio = statistics.median(a / b for a, b in zip(times["with"], times["without"], strict=True))
        for text in ranks.gather(
            f"rank {ranks.rank}: step {step_ms:.1f} ms; the monitor's functions {own_ms:.3f} ms = "
            f"{own_ms / step_ms:.2%}; whole step {ratio - 1:+.2%}"
        ):
            ranks.say(text)


if __name__ == "__main__":
    main()
