"""Times whole training steps of the example GPT on one rank: plain fused AdamW, and ours at each stage.

    python benchmarks/bench_overhead.py            # about two minutes
    python benchmarks/bench_overhead.py --quick    # shows that it runs, times mean nothing

What is compared is everything a step consists of (zero_grad, forward, backward, clipping by torch's clip_grad_norm_,
step), so that hooks and wrappers count wherever they act. All take turns, round after round, in one process; the number
to read is the median of the ratios to plain AdamW in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from step_bench import ROOT
from step_bench.report import environment, keep
from step_bench.timing import milliseconds

import zero_shard

sys.path.insert(0, str(ROOT / "examples"))
from gpt import GPT, next_byte_loss
from settings import read_settings

RESULTS = Path(__file__).parent / "results" / "bench_overhead.json"
PLAIN = "torch.optim.AdamW(fused=True)"
LIMIT = 1.03
STAGES = (0, 1, 2, 3)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="default 60 (--quick: 2)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="few rounds of a small model")
    parser.add_argument("--out", type=Path, help=f"JSON, default {RESULTS.relative_to(ROOT)} (--quick: nowhere)")
    given = parser.parse_args(words)
    given.rounds = given.rounds or (2 if given.quick else 60)
    given.out = given.out or (None if given.quick else RESULTS)
    return given


def make_step(stage: int | None, is_small: bool) -> Callable[[], None]:
    """Return one training step of a new model; ``stage`` None: plain AdamW."""
    settings = read_settings(ROOT / "examples" / "gpt.toml", stage=stage, steps=None, seed=None)
    torch.manual_seed(0)
    config = replace(settings.model, width=32, context=32) if is_small else settings.model
    model = GPT(config)
    optimizer: torch.optim.Optimizer
    if stage is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    else:
        optimizer = zero_shard.AdamW(model.parameters(), lr=1e-3, module=model, config=settings.zero)
    windows = torch.randint(256, (settings.train.batch // 2, config.context + 1))

    def step() -> None:
        optimizer.zero_grad()
        next_byte_loss(model, windows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def measure(rounds: int, is_small: bool) -> list[dict[str, Any]]:
    """Return a row for plain AdamW and each stage."""
    kinds = {PLAIN: None, **{f"zero_shard.AdamW, stage {stage}": stage for stage in STAGES}}
    steps = {name: make_step(stage, is_small) for name, stage in kinds.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-2, rounds):  # two rounds to warm up
        order = list(steps) if number % 2 == 0 else list(reversed(steps))
        for name in order:
            taken = milliseconds(steps[name])
            if number >= 0:
                times[name].append(taken)
    ratios = {name: [ours / plain for ours, plain in zip(times[name], times[PLAIN], strict=True)] for name in steps}
    return [
        {"name": name, "median_ms": statistics.median(times[name]), "ratio": statistics.median(ratios[name])}
        for name in steps
    ]


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, keep."""
    arguments = list(sys.argv[1:] if words is None else words)
    given = parse_arguments(arguments)
    torch.set_num_threads(given.threads)
    report = {"environment": environment(["benchmarks/bench_overhead.py", *arguments]), "threads": given.threads}
    report |= {"rounds": given.rounds, "rows": measure(given.rounds, given.quick)}
    print(f"a step of the example GPT on one rank, {given.threads} threads, median of {given.rounds} rounds")
    for row in report["rows"]:
        verdict = "" if row["name"] == PLAIN else f"  {'met' if row['ratio'] <= LIMIT else 'NOT met'}: <= {LIMIT}"
        print(f"{row['name']:32} {row['median_ms']:8.2f} ms  {row['ratio']:.3f} times plain{verdict}")
    if given.out is not None:
        keep(report, given.out)


if __name__ == "__main__":
    main()
