"""Finds and opens the files of a DeepSpeed checkpoint, and refuses what is not plain ZeRO."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_shard.interchange.inert_pickle import Inert, load_inert

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_FOREIGN_FILES = {
    "expp_rank_*": "a mixture of experts",
    "layer_*": "a pipeline or a mixture of experts",
    "mp_rank_01*": "tensor parallelism",
    "*_mp_rank_01_*": "tensor parallelism",
    "zero": "DeepSpeed's universal format",
}


@dataclass
class RankFile:
    """What one rank's optimizer file holds."""

    path: Path
    state: dict[str, Any]
    stage: int


def tag_directory(path: Path, tag: str | None) -> Path:
    """Return the directory that holds the files; what ``latest`` says may not lead out of ``path``."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no directory; expected one that DeepSpeed's save_checkpoint wrote")
    latest = path / "latest"
    if tag is None and not latest.is_file():
        if any(_OPTIMIZER_FILE.fullmatch(each.name) for each in path.iterdir()):
            return path
        raise FileNotFoundError(f"{latest} is missing; name the checkpoint with tag=, or pass its own directory")
    name = latest.read_text(encoding="utf-8", errors="replace").strip() if tag is None else tag
    if not name or name in (".", "..") or "\0" in name or Path(name).name != name:
        raise ValueError(f"{latest} names {name!r}, expected a directory beside it; name one with tag=")
    if not (path / name).is_dir():
        raise FileNotFoundError(f"{path / name} is missing; name another checkpoint with tag=")
    return path / name


def load_ranks(directory: Path, verify: bool) -> list[RankFile]:
    """Return every rank's optimizer file, read, after all of them have been found."""
    for pattern, what in _FOREIGN_FILES.items():
        for found in directory.glob(pattern):
            raise ValueError(f"{found} belongs to {what}, which cannot be imported; expected plain ZeRO 1 to 3")
    paths: dict[int, Path] = {}
    for path in sorted(directory.iterdir()):
        match = _OPTIMIZER_FILE.fullmatch(path.name)
        if match is not None and int(match[1]) in paths:
            raise ValueError(f"{path} and {paths[int(match[1])]} are both of rank {match[1]}; remove the older one")
        if match is not None:
            paths[int(match[1])] = path
    if 0 not in paths:
        raise FileNotFoundError(
            f"{directory / 'zero_pp_rank_0_mp_rank_00_optim_states.pt'} is missing; expected ZeRO's files"
        )
    first = _load_rank(paths[0], verify)
    num_ranks = _world_size(first)
    for rank in range(num_ranks):
        if rank not in paths:
            missing = paths[0].with_name(paths[0].name.replace("_rank_0_", f"_rank_{rank}_", 1))
            raise FileNotFoundError(
                f"{missing} is missing: {num_ranks} ranks wrote this checkpoint; copy all their files"
            )
    for rank, path in paths.items():
        if rank >= num_ranks:
            raise ValueError(f"{path} does not belong here: {num_ranks} ranks wrote this checkpoint; remove it")
    ranks = [first, *(_load_rank(paths[rank], verify) for rank in range(1, num_ranks))]
    for each in ranks:
        if (each.stage, _world_size(each)) != (first.stage, num_ranks):
            raise ValueError(f"{each.path} is of stage {each.stage} and {_world_size(each)} ranks, {first.path} is not")
    return ranks


def _load_rank(path: Path, verify: bool) -> RankFile:
    found = load_inert(path, verify)
    state = found.get("optimizer_state_dict") if isinstance(found, dict) else None
    if not isinstance(state, dict):
        raise ValueError(f"{path} has no optimizer_state_dict; it was not written by ZeRO")
    if "ds_zero_partition_groups" in state:
        raise ValueError(f"{path} belongs to a mixture of experts, which cannot be imported")
    stage = state.get("zero_stage", 1 if "single_partition_of_fp32_groups" in state else None)
    stage = stage.arguments[0] if isinstance(stage, Inert) and stage.arguments else stage
    if stage not in (1, 2, 3):
        raise ValueError(f"{path} is of ZeRO stage {stage!r}, which is not known; expected 1, 2 or 3")
    return RankFile(path, state, int(stage))


def _world_size(rank: RankFile) -> int:
    counts = rank.state.get("partition_count")
    different = set(counts) if isinstance(counts, list) else {counts}
    if len(different) != 1 or not isinstance(count := different.pop(), int) or count < 1:
        raise ValueError(f"{rank.path} has partition_count={counts!r}; expected one number of ranks for all groups")
    return count
