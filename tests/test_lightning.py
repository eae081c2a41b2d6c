"""Lightning on 2 ranks: ZeroShardStrategy and the plain optimizer give what strategy="ddp" with torch's AdamW gives."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from example_runs import run_main
from oracle import Snapshot, Tolerance, assert_snapshots_close, plain_snapshot, sharded_snapshot
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zero_shard

pytest.importorskip("lightning", reason="lightning is not installed: pip install 'zero-shard[lightning]'")

# Imported by the rank processes as well, which is where it counts.
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from zero_shard.integrations.lightning import ZeroShardStrategy

NUM_BATCHES, NUM_ROWS, WIDTH = 4, 3, 6
STAGES = (0, 1, 2, 3)


class Net(LightningModule):
    """Blocks, a weight of its own, and dropout where it is asked for; a schedule, logged numbers."""

    def __init__(self, make: Any, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Linear(2, 2).requires_grad_(False)
        self.to(dtype)
        self._make = make
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x * self.scale)  # type: ignore[no-any-return]

    def _loss(self, batch: list[Tensor]) -> Tensor:
        return (self(batch[0]).squeeze(1) - batch[1]).square().mean()

    def training_step(self, batch: list[Tensor], index: int) -> dict[str, Any]:
        loss = self._loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return {"loss": loss, "note": "not a tensor"}

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = self._make(self)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def torch_adamw(model: Net) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def sharded_adamw(model: Net) -> Any:
    config = model.trainer.strategy.config
    return zero_shard.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, module=model, config=config)


def data(dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * NUM_BATCHES * NUM_ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return DataLoader(TensorDataset(x, x.sum(1).sin()), batch_size=NUM_ROWS)


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """Be a rank that torchrun has started, as Lightning sees it; its own advice is no error."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    environment = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": world_size}
    environment |= {"LOCAL_WORLD_SIZE": world_size, "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1"}
    with mock.patch.dict(os.environ, environment | {"MASTER_PORT": "1"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", message=".*(does not have many workers|isinstance.treespec)")
        yield


def trainer(root: Path, strategy: Any, **options: Any) -> Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": True,
    }
    options = {"max_epochs": 2, "enable_checkpointing": False, **options}
    return Trainer(accelerator="cpu", devices=2, strategy=strategy, default_root_dir=root, **quiet, **options)


def fitted(root: Path, strategy: Any, make: Any, model: Net | None = None, **options: Any) -> tuple[Net, Any, Trainer]:
    model = model or Net(make)
    run = trainer(root, strategy, **options)
    run.fit(model, data(model.dtype), data(model.dtype))
    return model, run.optimizers[0], run


def reference(root: Path, **options: Any) -> Snapshot:
    model, optimizer, _ = fitted(root, "ddp", torch_adamw, **options)
    return plain_snapshot(model, optimizer)


# ---- training -------------------------------------------------------------------------------------------------------

_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip and accumulate": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
    "clip by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 3},
}


def _train(root: Path) -> None:
    tolerance = Tolerance(1e-10, 1e-10)
    with launched():
        for name, options in _OPTIONS.items():
            want = reference(root, **options)
            for stage in STAGES:
                model, optimizer, run = fitted(root, ZeroShardStrategy(stage=stage), sharded_adamw, **options)
                got = sharded_snapshot(model, optimizer)
                losses = torch.stack([run.callback_metrics["train_loss"], run.callback_metrics["val_loss"]])
                of_ranks = [torch.empty_like(losses) for _ in range(2)]
                dist.all_gather(of_ranks, losses)
                assert torch.equal(*of_ranks), "sync_dist"
                if dist.get_rank() == 0:
                    assert_snapshots_close(got, want, tolerance, f"{name}, stage {stage}")


def test_strategy_trains_as_ddp_does_at_every_stage(tmp_path: Path) -> None:
    ranks.run(2, _train, tmp_path, limit_s=180)


def _train_bf16(root: Path) -> None:
    with launched():
        want = reference(root, model=Net(torch_adamw, torch.float32), precision="bf16-mixed")
        for stage in (2, 3):
            model = Net(sharded_adamw, torch.float32)
            fitted_model, optimizer, _ = fitted(
                root, ZeroShardStrategy(stage=stage), None, model, precision="bf16-mixed"
            )
            got = sharded_snapshot(fitted_model, optimizer)
            if dist.get_rank() == 0:
                assert_snapshots_close(got, want, None, f"stage {stage}", num_steps=2 * NUM_BATCHES)


def test_bf16_mixed(tmp_path: Path) -> None:
    ranks.run(2, _train_bf16, tmp_path, limit_s=120)


def _train_under_ddp(root: Path, stage: int) -> None:
    def make(model: Net) -> Any:
        return zero_shard.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, module=model, config={"stage": stage})

    with launched():
        want = reference(root)
        with pytest.warns(UserWarning, match="DistributedDataParallel") if stage < 3 else contextlib.nullcontext():
            got = sharded_snapshot(*fitted(root, "ddp", make)[:2])
        if dist.get_rank() == 0:
            assert_snapshots_close(got, want, Tolerance(1e-10, 1e-10), f"stage {stage}")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_plain_optimizer_under_ddp(tmp_path: Path, stage: int) -> None:
    ranks.run(2, _train_under_ddp, tmp_path, stage, limit_s=120)


def test_plain_optimizer_under_ddp_is_refused_at_stage_3(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"wrapped in DistributedDataParallel.*at stage 3 do not wrap it"):
        ranks.run(2, _train_under_ddp, tmp_path, 3, limit_s=120)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def _resume(root: Path) -> None:
    def model() -> Net:
        return Net(sharded_adamw, dropout=0.3)

    def fit(strategy: Any, epochs: int, ckpt_path: Any = None) -> tuple[Net, Any, Trainer]:
        kept = ModelCheckpoint(root / "kept", monitor="val_loss", save_top_k=1, save_last=True)
        run = trainer(root, strategy, max_epochs=epochs, callbacks=[kept], enable_checkpointing=True)
        torch.manual_seed(dist.get_rank())
        net = model()
        run.fit(net, data(), data(), ckpt_path=ckpt_path)
        return net, run.optimizers[0], run

    with launched():
        *unbroken, run = fit(ZeroShardStrategy(stage=3), 3)
        want = sharded_snapshot(*unbroken)
        best = run.checkpoint_callback.best_model_path
        predictions = run.predict(ckpt_path="best", dataloaders=data())
        run.strategy.barrier()
        assert [path.name for path in (root / "kept").iterdir() if path.name != "last.ckpt"] == [Path(best).name]
        fit(ZeroShardStrategy(stage=2), 1)
        assert zero_shard.latest_checkpoint(root / "kept") is not None
        for stage in (1, 3):
            *resumed, run = fit(ZeroShardStrategy(stage=stage), 3, root / "kept" / "last.ckpt" if stage == 1 else best)
            got = sharded_snapshot(*resumed)
            if dist.get_rank() == 0 and stage == 1:
                assert_snapshots_close(got, want, Tolerance(0.0, 0.0), f"stage {stage}")
        fresh = model()
        zero_shard.load(best, fresh)
        fresh.eval()
        for got, (x, _) in zip(predictions, run.predict_dataloaders or data_of_rank(), strict=True):
            torch.testing.assert_close(got, fresh(x), rtol=1e-12, atol=1e-12)


def data_of_rank() -> list[Any]:
    """The batches that Lightning gives this rank."""
    x, y = data().dataset.tensors
    own = slice(dist.get_rank(), None, 2)
    return list(zip(x[own].split(NUM_ROWS), y[own].split(NUM_ROWS), strict=True))


def test_resumes_bit_for_bit_at_another_stage_and_predicts_from_the_best(tmp_path: Path) -> None:
    ranks.run(2, _resume, tmp_path, limit_s=120)


def _load_file_of_ddp(root: Path) -> None:
    with launched():
        _, _, run = fitted(root, "ddp", torch_adamw, max_epochs=1)
        run.save_checkpoint(root / "ddp.ckpt")
        want = reference(root, max_epochs=2)
        for stage in (1, 3):
            model, run = Net(sharded_adamw), trainer(root, ZeroShardStrategy(stage=stage))
            run.fit(model, data(), data(), ckpt_path=root / "ddp.ckpt")
            got = sharded_snapshot(model, run.optimizers[0])
            if dist.get_rank() == 0:
                assert_snapshots_close(got, want, Tolerance(1e-10, 1e-10), f"stage {stage}")


def test_goes_on_from_a_file_of_ddp(tmp_path: Path) -> None:
    ranks.run(2, _load_file_of_ddp, tmp_path, limit_s=120)


# ---- the example ----------------------------------------------------------------------------------------------------


def test_the_example_runs_and_goes_on_at_another_stage(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="examples/lightning_digits.py needs scikit-learn")
    first = run_main("lightning_digits", "--out", str(tmp_path), "--epochs", "1")
    second = run_main("lightning_digits", "--out", str(tmp_path), "--epochs", "2", "--stage", "1", "--resume")
    assert "held-out digits after epoch 1:" in first
    assert "held-out digits after epoch 2:" in second
    assert (tmp_path / "last.ckpt" / "manifest.json").is_file()


# ---- models and refusals --------------------------------------------------------------------------------------------


class Late(Net):
    """Built on the meta device by ``configure_model``."""

    def __init__(self) -> None:
        super().__init__(sharded_adamw)
        self.tower: nn.Module | None = None
        self.scale = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.tower is None:
            with torch.device("meta"):
                self.tower = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).double()

    def forward(self, x: Tensor) -> Tensor:
        assert self.tower is not None
        return self.head(self.tower(x))  # type: ignore[no-any-return]


def _fit_late(root: Path) -> float:
    with launched():
        model, run = Late(), trainer(root, ZeroShardStrategy(stage=3))
        run.fit(model, data(), data())
        first = run.callback_metrics["val_loss"].item()
        (again,) = run.validate(model, data(), verbose=False)
        assert again["val_loss"] == first
        with zero_shard.gathered(model):
            assert not any(param.is_meta or not param.isfinite().all() for param in model.parameters())
        return first


def test_a_meta_model_comes_to_life_and_is_validated(tmp_path: Path) -> None:
    first, second = ranks.run(2, _fit_late, tmp_path, limit_s=120)
    assert first == second


def _fit_with_torch(root: Path) -> None:
    with launched():
        fitted(root, ZeroShardStrategy(stage=3), torch_adamw)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"must return one zero_shard.AdamW under ZeroShardStrategy, got torch.*AdamW"):
        ranks.run(2, _fit_with_torch, tmp_path, limit_s=120)


def test_config_is_checked_at_once() -> None:
    with pytest.raises(ValueError, match="stag"):
        ZeroShardStrategy(stag=3)
    with pytest.raises(ValueError, match="either config or fields"):
        ZeroShardStrategy({"stage": 3}, stage=2)
