"""Writing a checkpoint: every rank its own file, rank 0 the index, the manifest and the name."""

from __future__ import annotations

import os
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from zero_shard.adamw import AdamW
from zero_shard.checkpoint.contents import Contents, collect, holders
from zero_shard.checkpoint.directory import IncompleteDirectory, check_keep, opened, prune
from zero_shard.checkpoint.parts import SavePlanner
from zero_shard.checkpoint.writer import FileFacts, Writer
from zero_shard.collectives import Agreements

# plan, where everything lies, and the files, of one rank
_Report = tuple[SavePlan, list[WriteResult], dict[str, FileFacts]]


def save(
    path: str | os.PathLike[str], module: nn.Module, optimizer: AdamW, *, keep: int | None = None, **extra: Any
) -> None:
    """Write a checkpoint that loads at any stage and world size. All ranks must call; blocks.

    Weights, moments, step counts, groups with every option, random states of all ranks, and the extras. The directory
    is one of ``torch.distributed.checkpoint``; it stands under its name whole or not at all. Memory: nothing is
    gathered, and no more than one parameter's own part is copied at a time.

    Args:
        path: Directory, on a file system that all ranks share. A checkpoint of this name is replaced.
        keep: Remove older checkpoints beside it, so many remain. Needs a name that ends in a number.
        extra: Anything that ``torch.load(weights_only=True)`` reads; an object with ``state_dict`` and
            ``load_state_dict`` (a scheduler, a GradScaler) by its state; an `ExponentialMovingAverage`. Rank 0's is
            kept.
    Raises:
        RuntimeError: Writing failed on some rank, or a rank did not take part, by number; on all ranks. What stood at
            ``path`` before is untouched.
        FileExistsError: Something that is no checkpoint has this name.
        TypeError: An extra can't be loaded safely, by its key.
    """
    ranks, label = optimizer.held.ranks, f"saving {os.fspath(path)}"
    ranks.roll_call(label)
    with ranks.errors_on_all_ranks(label):
        contents = prepare(path, module, optimizer, keep, extra)
    write(contents, Path(os.path.realpath(path)), ranks, keep)


@torch.inference_mode(False)  # what it makes outlives the call
@torch.no_grad()
def prepare(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: AdamW,
    keep: int | None,
    extra: dict[str, Any],
    **options: Any,
) -> Contents:
    """Check the arguments and return what this rank writes. Local."""
    check_keep(Path(os.path.realpath(path)), keep)
    optimizer.held.check_in_charge()
    optimizer.held.take_edits()
    for held in holders(module):
        held.take_back_replaced()
    return collect(module, optimizer, extra, **options)


@torch.no_grad()
def write(contents: Contents, target: Path, ranks: Agreements, keep: int | None) -> None:
    """Write what each rank has collected and give it its name. All ranks call; blocks."""
    label = f"saving {target}"
    with ExitStack() as stack:
        incomplete: IncompleteDirectory | None = None
        with ranks.errors_on_all_ranks(label):
            if ranks.rank == 0:
                incomplete = IncompleteDirectory(target)
                stack.callback(incomplete.discard)
        targets = ranks.gather_objects((str(target), str(incomplete.path) if incomplete else ""), label)
        _check_same_target([path for path, _ in targets])
        where = Path(targets[0][1])
        with ranks.errors_on_all_ranks(label):
            report = _write_own(contents, where, ranks.rank)
        reports: list[_Report] = ranks.gather_to_first(report, label)
        with ranks.errors_on_all_ranks(label):
            if incomplete is not None:
                files = _write_index(contents, where, reports)
                incomplete.commit(files, {"num_ranks": ranks.num_ranks, "torch": torch.__version__})
                _prune(target, keep)


def _write_own(contents: Contents, where: Path, rank: int) -> _Report:
    if not where.is_dir():
        raise FileNotFoundError(f"{where}: rank 0 has made it, but it can't be seen here; save to a shared file system")
    planner = SavePlanner()
    planner.set_up_planner(contents.tree, is_coordinator=rank == 0)
    plan = planner.create_local_plan()
    with opened(where) as fd:
        writer = Writer(fd, rank)
        results = writer.write_data(plan, planner).wait()
    return plan, results, writer.facts


def _write_index(contents: Contents, where: Path, reports: list[_Report]) -> dict[str, FileFacts]:
    """Write DCP's index of everything, and return the facts of all files."""
    _, metadata = SavePlanner().create_global_plan([plan for plan, _, _ in reports])
    files = {name: facts for _, _, of_rank in reports for name, facts in of_rank.items()}
    with opened(where) as fd:
        writer = Writer(fd, 0, contents.group_names, contents.aliases)
        writer.finish(metadata, [results for _, results, _ in reports])
    return files | writer.facts


def _check_same_target(targets: list[str]) -> None:
    for rank, target in enumerate(targets):
        if target != targets[0]:
            raise ValueError(
                f"ranks save under different names: rank 0 {targets[0]!r}, rank {rank} {target!r}; pass the same one"
            )


def _prune(target: Path, keep: int | None) -> None:
    try:
        if keep is not None:
            prune(target, keep)
    except OSError as error:
        warnings.warn(f"{target} is saved, but an older checkpoint could not be removed: {error}", stacklevel=2)
