"""Trains a small GPT on the source of Python's standard library, its state sharded by zero_shard.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --config examples/gpt.toml

Runs on NCCL where every rank has a GPU, on gloo otherwise, and without torchrun as one plain process.
Steps with NaN in a row, or a spike of the loss, end in the last good checkpoint, and their batches are left out.
``--resume`` continues an interrupted run from its newest checkpoint, bit for bit; so does torchrun by itself, with
``--max-restarts``, when a rank dies. With another number of ranks the result is the same to rounding: they share one
batch. Needs matplotlib and tqdm.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from corpus import Corpus, read_corpus
from gpt import GPT, next_byte_loss
from processes import Ranks, joined
from report import MIB, chart, peak_memory_mib, usage_table
from settings import Settings, TrainConfig, read_settings
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from tqdm import tqdm

import zero_shard

FINAL_LR_FRACTION = 0.1
KEPT_CHECKPOINTS = 2
"""The newest, and one before it in case the newest turns out to be of no use."""


@dataclass(kw_only=True)
class Run:
    """Everything one rank trains with."""

    settings: Settings
    ranks: Ranks
    corpus: Corpus
    model: nn.Module
    optimizer: zero_shard.AdamW
    history: list[dict[str, Any]]  # one entry per logged step, on rank 0 also in metrics.jsonl
    out: Path
    rows: range  # of the batch, this rank's

    @property
    def window_numel(self) -> int:
        return self.settings.model.context + 1


@record
def main() -> None:
    """Train, evaluate, report."""
    arguments = parse_arguments()
    settings = read_settings(arguments.config, stage=arguments.stage, steps=arguments.steps, seed=arguments.seed)
    os.environ.setdefault("ZERO_SHARD_REPORT_DIR", f"{arguments.out}/failures")  # what each rank did when one fails
    with joined(timeout_s=settings.train.timeout_s) as ranks:
        run = build(settings, ranks, Path(arguments.out))
        first_step = resume(run) if arguments.resume or must_go_on(run) else start(run)
        last_step = settings.train.steps
        if arguments.stop_after is not None:
            last_step = min(last_step, arguments.stop_after)
        train(run, first_step, last_step)
        if last_step == settings.train.steps:
            finish(run)
        else:
            ranks.say(f"stopped after step {last_step} of {settings.train.steps}; --resume continues")


def parse_arguments() -> argparse.Namespace:
    """Read the command line; what is not given there comes from the configuration file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("gpt.toml"), help="TOML file")
    parser.add_argument("--stage", type=int, help="ZeRO stage, 0 to 3, in place of [zero] stage")
    parser.add_argument("--steps", type=int, help="optimizer steps, in place of [train] steps")
    parser.add_argument("--seed", type=int, help="of weights and data order, in place of [train] seed")
    parser.add_argument("--out", default="runs/gpt", help="directory for checkpoints, metrics and the chart")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    parser.add_argument("--stop-after", type=int, metavar="STEP", help="end early, as an interruption would")
    return parser.parse_args()


def build(settings: Settings, ranks: Ranks, out: Path) -> Run:
    """Build text, model and optimizer. All ranks call it."""
    torch.manual_seed(settings.train.seed)
    model = GPT(settings.model).to(ranks.device)
    matrices = [param for param in model.parameters() if param.ndim >= 2]
    vectors = [param for param in model.parameters() if param.ndim < 2]
    optimizer = zero_shard.AdamW(
        [
            {"params": matrices, "weight_decay": settings.train.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=settings.train.lr,
        betas=(0.9, 0.95),
        module=model,
        config=settings.zero,
    )
    corpus = read_corpus(settings.data, window_numel=settings.model.context + 1)
    num_params = sum(param.numel() for param in model.parameters())
    ranks.say(
        f"{num_params / 1e6:.2f} M parameters, stage {optimizer.config.stage}, {ranks.describe()}\n"
        f"{corpus.training.numel() / 1e6:.1f} MB of text to train on, "
        f"{corpus.held_out.numel() / 1e6:.2f} MB held out"
    )
    batch, rank, world_size = settings.train.batch, ranks.rank, ranks.world_size
    if batch < world_size:
        raise ValueError(f"[train] batch must be at least the number of ranks, {world_size}, got {batch}")
    if batch // world_size < settings.train.accumulate:
        raise ValueError(
            f"[train] accumulate must be at most the rows of a rank, {batch // world_size}, "
            f"got {settings.train.accumulate}"
        )
    rows = range(rank * batch // world_size, (rank + 1) * batch // world_size)
    return Run(
        settings=settings,
        ranks=ranks,
        corpus=corpus,
        model=model,
        optimizer=optimizer,
        history=[],
        out=out,
        rows=rows,
    )


def must_go_on(run: Run) -> bool:
    """Whether torchrun has started ranks again, and there is something to go on from. All ranks call it."""
    was_restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    can_go_on = run.ranks.is_first and zero_shard.latest_checkpoint(run.out) is not None
    seen = run.ranks.gather((was_restarted, can_go_on))
    return any(restarted for restarted, _ in seen) and seen[0][1]


def start(run: Run) -> int:
    """Begin a new run in ``run.out``, in place of one that is there, and return its first step: 0."""
    if run.ranks.is_first:
        run.out.mkdir(parents=True, exist_ok=True)
        for stale in run.out.glob("checkpoint-*"):
            shutil.rmtree(stale)
        (run.out / "metrics.jsonl").write_text("")
    run.ranks.barrier()
    log(run, {"step": 0, "held_out_loss": evaluate(run)})
    return 0


def resume(run: Run) -> int:
    """Load the newest checkpoint in ``run.out`` and return the step that comes next. All ranks call it.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: The checkpoint is of another model.
    """
    if zero_shard.latest_checkpoint(run.out) is None:
        raise FileNotFoundError(f"--resume found no checkpoint in {run.out}; run without --resume first")
    extra = zero_shard.load(run.out, run.model, run.optimizer)
    step = int(extra["step"])
    before = {**extra["settings"], "world_size": extra["world_size"], "text": extra["text"]}
    now = {**run.settings.as_dict(), "world_size": run.ranks.world_size, "text": run.corpus.digest}
    # The stage is no part of it: all stages give the same bits.
    changed = [key for key in now if key not in ("zero", "rollback") and now[key] != before[key]]
    run.ranks.say(f"resumed from the checkpoint in {run.out} at step {step}")
    if changed == ["world_size"]:
        run.ranks.say(f"{before['world_size']} ranks before: the run goes on, equal to rounding and not bit for bit")
    elif changed:
        run.ranks.say(f"{', '.join(changed)} changed since then: the run goes on, but not bit for bit")
    forget_after(run, step)
    return step


def forget_after(run: Run, step: int) -> None:
    """Forget what was logged after a checkpoint that has been loaded: it is about to be done, and logged, again."""
    if run.ranks.is_first:
        lines = (run.out / "metrics.jsonl").read_text().splitlines()
        run.history[:] = [entry for entry in map(json.loads, lines) if entry["step"] <= step]
        (run.out / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in run.history))


def train(run: Run, first_step: int, last_step: int) -> None:
    """Take the steps after ``first_step`` up to ``last_step``. All ranks call it."""
    config, ranks = run.settings.train, run.ranks
    meter = Meter(run)
    rollback = zero_shard.Rollback(run.out, run.model, run.optimizer, run.settings.rollback)
    pending: zero_shard.PendingSave | None = None
    is_terminal = sys.stderr.isatty()
    with tqdm(
        total=config.steps,
        initial=first_step,
        desc="train",
        unit="step",
        disable=not ranks.is_first,
        dynamic_ncols=True,
        # A log file keeps every line, where a terminal draws over the last one.
        mininterval=0.2 if is_terminal else 10.0,
    ) as bar:
        step = first_step
        while step < last_step:
            if step + 1 not in rollback.bad_steps:
                loss, grad_norm = take_step(run, step)
                back = rollback.check(step + 1, loss, grad_norm)
                if back is not None:
                    step = back.step
                    forget_after(run, step)
                    meter.restart()
                    bar.update(step - bar.n)
                    continue
                meter.add(loss, grad_norm)
            step += 1
            is_last = step == last_step
            if meter.num_steps and (step % config.log_every == 0 or is_last):
                entry = meter.read()
                log(run, {"step": step, **entry})
                bar.set_postfix_str(describe(entry), refresh=is_terminal)
            bar.update()
            if step % config.checkpoint_every == 0 or is_last:
                if rollback.is_well:
                    pending = save_checkpoint(run, step)
                log(run, {"step": step, "held_out_loss": evaluate(run)})
                meter.restart()
    if pending is not None:
        pending.wait()


def take_step(run: Run, step: int) -> tuple[Tensor, Tensor]:
    """Return this rank's loss and the gradient norm over all ranks, both scalars. All ranks call it."""
    config, ranks, optimizer = run.settings.train, run.ranks, run.optimizer
    windows = run.corpus.training_windows(step, run.rows, config.batch, run.window_numel, config.seed)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step)
    # Here and not after step(), so that the report at the end finds the gradients still there.
    optimizer.zero_grad()
    total = torch.zeros((), device=ranks.device)
    micro_batches = windows.to(ranks.device).tensor_split(config.accumulate)
    for number, micro_batch in enumerate(micro_batches, 1):
        # Weighted, so that the mean over ranks is the mean over the batch where it does not divide evenly.
        loss = next_byte_loss(run.model, micro_batch) * (len(micro_batch) * ranks.world_size / config.batch)
        with nullcontext() if number == len(micro_batches) else optimizer.no_sync():
            loss.backward()
        total += loss.detach()
    grad_norm = optimizer.clip_grad_norm_(config.max_grad_norm)
    optimizer.step()
    return total, grad_norm


class Meter:
    """Averages what happened since the last reading, without making the device wait in between."""

    def __init__(self, run: Run) -> None:
        self.ranks = run.ranks
        self.optimizer = run.optimizer
        self.tokens_per_step = run.settings.train.batch * run.settings.model.context
        self.restart()

    def restart(self) -> None:
        """Forget everything; the clock starts now."""
        self.loss_sum = torch.zeros((), device=self.ranks.device)
        self.grad_norm = torch.zeros((), device=self.ranks.device)
        self.num_steps = 0
        self.mark = time.perf_counter()

    def add(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Count one step."""
        self.loss_sum += loss
        self.grad_norm = grad_norm
        self.num_steps += 1

    def read(self) -> dict[str, float]:
        """Return the means since the last reading and restart. All ranks call it."""
        entry = {
            "train_loss": self.ranks.mean(self.loss_sum) / self.num_steps,
            "grad_norm": float(self.grad_norm),
            "tokens_per_s": self.num_steps * self.tokens_per_step / (time.perf_counter() - self.mark),
            "state_mib": self.optimizer.usage().held_nbytes / MIB,
            "memory_mib": peak_memory_mib(self.ranks.device),
        }
        self.restart()
        return entry


def describe(entry: dict[str, float]) -> str:
    """Return one line for the progress bar."""
    return (
        f"loss {entry['train_loss']:.3f}, {entry['tokens_per_s']:,.0f} tokens/s, "
        f"grad norm {entry['grad_norm']:.2f}, memory per rank {entry['state_mib']:.1f} MiB model state, "
        f"{entry['memory_mib']:,.0f} MiB in all"
    )


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate of ``step``: linear warm-up, then a cosine down to a tenth."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * cosine)


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Return the loss on held-out text, in nats per byte, the same on every rank and for any number of ranks.

    All ranks call it and take part in every forward, because at stage 3 each brings its shard of the weights.
    """
    config, ranks = run.settings.train, run.ranks
    windows = run.corpus.held_out_windows(config.held_out_windows, run.window_numel)
    loss_sum = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for first in range(0, len(windows), config.batch):
        own = windows[first : first + config.batch][run.rows.start : run.rows.stop]
        # A rank that has no windows left still takes part, with one that does not count.
        loss = next_byte_loss(run.model, (own if len(own) else windows[:1]).to(ranks.device))
        loss_sum += loss.double() * len(own)
    return ranks.mean(loss_sum) * ranks.world_size / len(windows)


@torch.no_grad()
def sample(run: Run) -> str:
    """Return text that the model writes after the prompt. All ranks call it, see ``evaluate``."""
    config = run.settings.train
    generator = torch.Generator().manual_seed(config.seed)
    text = list(config.sample_prompt.encode())
    for _ in range(config.sample_numel):
        window = torch.tensor([text[-run.settings.model.context :]], device=run.ranks.device)
        odds = torch.softmax(run.model(window)[0, -1].float().cpu() / config.sample_temperature, dim=-1)
        text.append(int(torch.multinomial(odds, 1, generator=generator)))
    return bytes(text).decode(errors="replace")


def save_checkpoint(run: Run, step: int) -> zero_shard.PendingSave:
    """Begin to save everything the run needs to go on after ``step``. All ranks call it."""
    return zero_shard.async_save(
        run.out / f"checkpoint-{step:06}",
        run.model,
        run.optimizer,
        keep=KEPT_CHECKPOINTS,
        step=step,
        settings=run.settings.as_dict(),
        world_size=run.ranks.world_size,
        text=run.corpus.digest,
    )


def log(run: Run, entry: dict[str, Any]) -> None:
    """Append ``entry`` to the history, on rank 0 also to the metrics file."""
    if run.ranks.is_first:
        run.history.append(entry)
        with (run.out / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps(entry) + "\n")


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 of all weights, on rank 0; of nothing elsewhere. All ranks call it."""
    digest = hashlib.sha256()
    full_weights: dict[str, Tensor] = zero_shard.full_state_dict(model)
    for name, weight in sorted(full_weights.items()):
        digest.update(name.encode())
        digest.update(weight.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def finish(run: Run) -> None:
    """Report: losses, memory and traffic against the promise, a sample, the chart. All ranks call it."""
    ranks = run.ranks
    usage = ranks.gather(run.optimizer.usage())
    digest = weights_digest(run.model)
    text = sample(run)
    if not ranks.is_first:
        return
    held_out = [entry["held_out_loss"] for entry in run.history if "held_out_loss" in entry]
    chart(run.history, run.out / "loss.png")
    summary = {
        "stage": run.optimizer.config.stage,
        "world_size": ranks.world_size,
        "held_out_loss_before": held_out[0],
        "held_out_loss_after": held_out[-1],
        "usage": [each._asdict() for each in usage],
        "weights_sha256": digest,
    }
    (run.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    ranks.say(
        f"\nheld-out loss: {held_out[0]:.3f} before, {held_out[-1]:.3f} after, in nats per byte\n\n"
        f"{usage_table(usage)}\n\n"
        f"sample after {run.settings.train.sample_prompt!r}:\n{text}\n\n"
        f"weights: sha256 {digest}\n"
        f"checkpoint, metrics, loss.png: {run.out}"
    )


if __name__ == "__main__":
    main()
