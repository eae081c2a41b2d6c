"""Writes deepspeed.tar.xz: small ZeRO checkpoints by DeepSpeed itself, with what DeepSpeed says is in them.

    pip install torch==2.13.0 deepspeed==0.19.8
    torchrun --nproc-per-node 2 tests/data/make_deepspeed.py

Two ranks on the CPU train a tiny model. Beside each checkpoint lies ``expected.pt``: the whole float32 weights and
moments from ``safe_get_full_fp32_param`` and ``safe_get_full_optimizer_state``, and what is not trained.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn

ARCHIVE = Path(__file__).with_name("deepspeed.tar.xz")
NUM_STEPS = 3
BATCH = 4
CASES: dict[str, dict[str, Any]] = {
    "stage1_float32": {"stage": 1},
    "stage1_bfloat16": {"stage": 1, "parameter_alignment": True},
    "stage1_bfloat16_float32_sums": {"stage": 1, "data_types": {"grad_accum_dtype": "fp32"}},
    "stage2_float32": {"stage": 2, "round_robin_gradients": True},
    "stage2_bfloat16": {"stage": 2, "elastic_checkpoint": True, "gradient_accumulation_steps": 2},
    "stage3_float32": {"stage": 3, "gradient_accumulation_steps": 2},
    "stage3_bfloat16": {"stage": 3, "sub_group_size": 8},
}
"""What differs; the dtype is in the name. At stage 3, sub-groups of 8 elements end within a group."""


class Net(nn.Module):
    """Tied, frozen and empty parameters, one of a single element, buffers, and no length that divides by two ranks."""

    def __init__(self, has_nothing: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.body = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        if has_nothing:  # DeepSpeed's stage 3 cannot gather it
            self.nothing = nn.Parameter(torch.empty(0, 4))
        self.norm = nn.BatchNorm1d(5, affine=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token from itself, a scalar."""
        hidden = self.norm(self.body(self.frozen(self.embedding(tokens)))) * self.scale
        return nn.functional.cross_entropy(self.head(hidden).float(), tokens)


class ClientThing:
    """A class that whoever reads the checkpoint does not have."""

    def __init__(self) -> None:
        self.value = 1


def make_engine(name: str, options: dict[str, Any]) -> tuple[Net, Any]:
    """Return the model and its engine."""
    options = dict(options)
    outer = {key: options.pop(key) for key in ("data_types", "gradient_accumulation_steps") if key in options}
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": options,
        "bf16": {"enabled": "bfloat16" in name},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **outer,
    }
    torch.manual_seed(1)
    model = Net(has_nothing=options["stage"] < 3)
    names = {param: name for name, param in model.named_parameters()}
    matrices = [param for param in model.parameters() if param.dim() > 1 and param.numel()]
    others = [param for param in model.parameters() if param not in set(matrices)]
    assert names[matrices[0]] == "embedding.weight"
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.95), "kind": "others"},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    engine = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=settings, dist_init_required=False
    )[0]
    return model, engine


def expected_of(name: str, model: Net) -> dict[str, Tensor]:
    """Return by the keys of the import what DeepSpeed gives out. All ranks call."""
    torch.manual_seed(1)
    fresh = Net(hasattr(model, "nothing")).to(torch.bfloat16 if "bfloat16" in name else torch.float32).state_dict()
    expected = {f"model.{key}": fresh[key] for key in ("frozen.weight", "frozen.bias", "nothing") if key in fresh}
    expected |= {f"model.{key}": value.clone() for key, value in model.named_buffers()}
    for key, param in model.named_parameters():
        if f"model.{key}" in expected:
            continue
        expected[f"model.{key}"] = safe_get_full_fp32_param(param).clone()
        for kind in ("exp_avg", "exp_avg_sq"):
            expected[f"optim.state.{key}.{kind}"] = safe_get_full_optimizer_state(param, kind).clone()
        expected[f"optim.state.{key}.step"] = torch.tensor(float(NUM_STEPS))
    return expected


def write_case(name: str, options: dict[str, Any], directory: Path) -> None:
    """Train and save. All ranks call."""
    print(name, flush=True)
    model, engine = make_engine(name, options)
    accumulation = options.get("gradient_accumulation_steps", 1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(NUM_STEPS * accumulation + accumulation - 1):  # the last gradients are left over
        loss = engine(torch.randint(7, (BATCH,), generator=generator))
        engine.backward(loss)
        engine.step()
    if options["stage"] < 3:
        # DeepSpeed 0.19.8 links the moments after the step of the first group, when those of others do not exist yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    engine.save_checkpoint(str(directory / name), client_state={"epoch": 3, "thing": ClientThing()})
    expected = expected_of(name, model)
    if dist.get_rank() == 0:
        torch.save(expected, directory / name / "expected.pt")
    dist.barrier()


def pack(directory: Path) -> None:
    """Put the checkpoints into one archive, without DeepSpeed's script, times and owners."""
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for path in sorted(directory.rglob("*")):
            if path.is_file() and path.suffix != ".py":
                member = tarfile.TarInfo(path.relative_to(directory).as_posix())
                member.size = path.stat().st_size
                archive.addfile(member, io.BytesIO(path.read_bytes()))


def main() -> None:
    """Write all cases."""
    dist.init_process_group("gloo")
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    for name, options in CASES.items():
        write_case(name, options, Path(str(where[0])))
    if dist.get_rank() == 0:
        pack(Path(str(where[0])))
        print(f"{ARCHIVE.name}: {ARCHIVE.stat().st_size} bytes")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
