"""The loss of the example GPT with gradients, and weights, in fewer bits on the wire; and the bytes sent.

    python benchmarks/bench_wire.py            # two ranks on this machine, some minutes
    python benchmarks/bench_wire.py --quick    # shows that it runs, numbers mean nothing

Every way trains the model of ``examples/gpt.toml`` alike in all else, one after the other in the same ranks, once for
each seed. The number to read is the difference to ``float32`` with the same seed, beside the spread that seeds alone
make. Two ways that were not built are emulated: codes rounded at random, and weights gathered in 8 bits at stage 3.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from step_bench import ROOT
from step_bench.report import environment, keep
from torch import Tensor
from train_bench.launch import OneLineParser, is_rank, join_group, public_command, run_ranks

import zero_shard
from zero_shard.stages.unit import UnitState
from zero_shard.wire_codec import dequantize, quantize

sys.path.insert(0, str(ROOT / "examples"))
from corpus import Corpus, read_corpus
from gpt import GPT, next_byte_loss
from settings import Settings, read_settings
from train_gpt import learning_rate

RESULTS = Path(__file__).parent / "results" / "bench_wire.json"
NUM_RANKS = 2
MEAN_OF = 10  # steps whose losses are averaged before they are compared
_BLOCK_NUMEL, _SCALE_NBYTES = 256, 4


class Way(NamedTuple):
    """One way of sending: its config, and what is done to an optimizer to emulate what there is not."""

    name: str
    config: dict[str, Any]
    change: Callable[[zero_shard.AdamW], None] | None = None


def round_at_random(optimizer: zero_shard.AdamW) -> None:
    """Replace the nearest code by one of its two neighbours, with the odds that keep the expected value."""
    exchanges = optimizer._reducer.exchanges
    generator = torch.Generator().manual_seed(dist.get_rank())

    def quantize_(wire: Tensor, values: Tensor) -> None:
        scales, _ = quantize(values)
        quotient = (values.view(-1, _BLOCK_NUMEL) / scales[:, None]).nan_to_num_()
        codes = (quotient + torch.rand(quotient.shape, generator=generator)).floor_().clamp_(-127, 127)
        blocks = wire.view(-1, _SCALE_NBYTES + _BLOCK_NUMEL)
        blocks[:, :_SCALE_NBYTES] = scales[:, None].view(torch.uint8)
        blocks[:, _SCALE_NBYTES:] = codes.to(torch.int8).view(torch.uint8)

    exchanges._kernels = exchanges._kernels._replace(quantize_=quantize_)


def gather_in_8_bits(optimizer: zero_shard.AdamW) -> None:
    """Compute with weights of stage 3 as they would come out of blocks of the wire; the shards stay exact."""
    gatherer = optimizer._stage._gatherer
    finish = gatherer.finish

    def finish_rounded(unit: Any) -> None:
        gatherer.wait(unit)
        if unit.state is not UnitState.WHOLE:
            for bucket in unit.buckets:
                numel = bucket.full.numel() // _BLOCK_NUMEL * _BLOCK_NUMEL
                scales, codes = quantize(bucket.full[:numel])
                wire = torch.cat([scales[:, None].view(torch.uint8), codes.view(torch.uint8)], 1)
                bucket.full[:numel] = dequantize(wire.view(-1))
        finish(unit)

    gatherer.finish = finish_rounded


WAYS = (
    Way("float32", {}),
    Way("bfloat16", {"reduce_dtype": "bfloat16"}),
    Way("int8", {"reduce_dtype": "int8"}),
    Way("int8, rounded at random (emulated)", {"reduce_dtype": "int8"}, round_at_random),
    Way("float32, weights gathered in int8 (emulated)", {}, gather_in_8_bits),
)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = OneLineParser(
        prog="bench_wire.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, help="default 200 (--quick: 2)")
    parser.add_argument("--batch", type=int, default=8, help="windows per step, over both ranks")
    parser.add_argument("--seeds", type=int, help="how many runs of each way, default 2 (--quick: 1)")
    parser.add_argument("--stage", type=int, default=3, help="all stages give the same bits; the last way needs 3")
    parser.add_argument("--quick", action="store_true", help="two steps of a small model")
    parser.add_argument("--out", type=Path, help=f"JSON, default {RESULTS.relative_to(ROOT)} (--quick: nowhere)")
    given = parser.parse_args(words)
    given.steps = given.steps if given.steps is not None else (2 if given.quick else 200)
    given.seeds = given.seeds if given.seeds is not None else (1 if given.quick else 2)
    for name in ("steps", "batch", "seeds"):
        if getattr(given, name) < (NUM_RANKS if name == "batch" else 1):
            parser.error(f"--{name} must be at least {NUM_RANKS if name == 'batch' else 1}, got {getattr(given, name)}")
    if given.stage not in (0, 1, 2, 3):
        parser.error(f"--stage must be 0 to 3, got {given.stage}")
    given.out = given.out or (None if given.quick else RESULTS)
    return given


def train(settings: Settings, corpus: Corpus, way: Way, seed: int) -> dict[str, Any]:
    """Train a new model; return the losses, the held-out loss at the end, and the bytes of a step."""
    config, rank = settings.train, dist.get_rank()
    torch.manual_seed(seed)
    model = GPT(settings.model)
    optimizer = zero_shard.AdamW(
        model.parameters(), lr=config.lr, betas=(0.9, 0.95), module=model, config={**settings.zero, **way.config}
    )
    if way.change is not None:
        way.change(optimizer)
    rows = range(rank * config.batch // NUM_RANKS, (rank + 1) * config.batch // NUM_RANKS)
    window_numel, losses = settings.model.context + 1, []
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.zero_grad()
        loss = next_byte_loss(model, corpus.training_windows(step, rows, config.batch, window_numel, seed))
        loss.backward()
        optimizer.clip_grad_norm_(config.max_grad_norm)
        optimizer.step()
        losses.append(loss.detach())
    usage = optimizer.usage()
    with torch.no_grad():
        windows = corpus.held_out_windows(config.held_out_windows, window_numel)
        held_out = torch.stack([next_byte_loss(model, part) for part in windows.split(config.batch)]).mean()
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return {
        "losses": [round(float(each), 7) for each in mean / NUM_RANKS],
        "held_out_loss": round(float(held_out), 5),
        "sent_mib": round(usage.sent_nbytes / 2**20, 3),
        "floor_mib": round(usage.floor_sent_nbytes / 2**20, 3),
    }


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each way. Both ranks call."""
    settings = read_settings(ROOT / "examples" / "gpt.toml", stage=given.stage, steps=given.steps, seed=None)
    settings = replace(settings, train=replace(settings.train, batch=given.batch))
    if given.quick:
        settings = replace(settings, model=replace(settings.model, width=64, context=16))
        settings = replace(settings, train=replace(settings.train, held_out_windows=8))
    corpus = read_corpus(settings.data, window_numel=settings.model.context + 1)
    rows: list[dict[str, Any]] = []
    for way in WAYS if given.stage == 3 else WAYS[:-1]:
        runs = [train(settings, corpus, way, seed) for seed in range(given.seeds)]
        exact = rows[0]["runs"] if rows else runs
        pairs = list(zip(runs, exact, strict=True))
        row = {
            "name": way.name,
            "held_out_loss": statistics.mean(run["held_out_loss"] for run in runs),
            "difference": statistics.mean(run["held_out_loss"] - other["held_out_loss"] for run, other in pairs),
            "largest_deviation": max(_deviation(run["losses"], other["losses"]) for run, other in pairs),
            "sent_mib": runs[0]["sent_mib"],
            "floor_mib": runs[0]["floor_mib"],
            "runs": runs,
        }
        rows.append(row)
        if dist.get_rank() == 0:
            print(line_of(row), flush=True)
    return rows


def _deviation(losses: list[float], exact: list[float]) -> float:
    """Return the largest relative difference of the means of ten steps."""
    starts = range(0, len(losses), MEAN_OF)
    means = [[statistics.mean(each[start : start + MEAN_OF]) for start in starts] for each in (losses, exact)]
    return max(abs(one - other) / other for one, other in zip(*means, strict=True))


def line_of(row: dict[str, Any]) -> str:
    """Return a row as text."""
    return (
        f"{row['name']:46} held-out loss {row['held_out_loss']:.4f} ({row['difference']:+.4f}), largest deviation "
        f"{row['largest_deviation']:.2%}; sent {row['sent_mib']:.2f} MiB, floor {row['floor_mib']:.2f}"
    )


def main(words: Sequence[str] | None = None) -> None:
    """Start the ranks, or be one of them."""
    arguments = list(sys.argv[1:] if words is None else words)
    given = parse_arguments(arguments)
    if not is_rank():
        return run_ranks(__file__, arguments, NUM_RANKS, threads=1)
    join_group("cpu", timeout_s=120)
    report: dict[str, Any] = {"environment": environment(public_command("bench_wire.py", arguments))}
    report |= {"num_ranks": NUM_RANKS, "steps": given.steps, "batch": given.batch, "stage": given.stage}
    report["rows"] = measure(given)
    if dist.get_rank() == 0 and given.out is not None:
        keep(report, given.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
