"""Training scripts as people write them. Each is one function, run with ``torch.optim.AdamW`` and with ours.

A script knows nothing of sharding but what the README asks for: it builds the optimizer with ``job.adamw``, feeds its
rank's rows of each batch, and looks at whole weights inside ``zero_shard.gathered``. It returns, or collects in
``job.results``, what must be the same.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from oracle import plain_snapshot, sharded_snapshot
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import zero_shard

D = torch.float64
NUM_ROWS = 12


class Job:
    """What a launcher gives to a script: who it is, its rows, and the optimizer class of this run.

    Args:
        stage: None trains with ``torch.optim.AdamW`` on all rows in one process.
    """

    def __init__(self, stage: int | None) -> None:
        self.stage = stage
        self.rank = 0 if stage is None else dist.get_rank()
        self.world = 1 if stage is None else dist.get_world_size()
        self.results: list[Any] = []

    def adamw(self, params: Any, module: nn.Module, **hyper: Any) -> torch.optim.AdamW:
        """Build the optimizer: the one line that differs."""
        if self.stage is None:
            return torch.optim.AdamW(params, **hyper)
        return zero_shard.AdamW(params, module=module, config={"stage": self.stage, "bucket_mib": 1e-4}, **hyper)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of a batch: the mean of the means over ranks is the mean over all rows."""
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(NUM_ROWS, 6, generator=generator, dtype=D)
        y = torch.randn(NUM_ROWS, 1, generator=generator, dtype=D)
        return x[self.rank :: self.world], y[self.rank :: self.world]

    def mean(self, value: Tensor) -> float:
        """Return the mean of a number over the ranks, as a metric is logged."""
        value = value.detach().clone()
        if self.stage is not None:
            dist.all_reduce(value)
        return value.item() / self.world

    def note(self, *values: Any) -> None:
        """Collect numbers that must be the same."""
        self.results.append(list(values))

    def note_state(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Collect every weight and moment."""
        self.results.append(
            sharded_snapshot(model, optimizer)
            if isinstance(optimizer, zero_shard.AdamW)
            else plain_snapshot(model, optimizer)
        )


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 1)
    ).double()


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def train(job: Job, model: nn.Module, optimizer: Optimizer, steps: range, after: Callable[[], Any] = lambda: 0) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, job.batch(step)).backward()
        optimizer.step()
        after()


def through_disk(state: Any) -> Any:
    """Save and load, as from an untrusted file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# --- schedulers ---

S = lr_scheduler
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: S.LambdaLR(o, [lambda n: 0.9**n, lambda n: 1 / (n + 1)]),
    "MultiplicativeLR": lambda o: S.MultiplicativeLR(o, lambda n: 0.8),
    "StepLR": lambda o: S.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: S.MultiStepLR(o, [1, 3], gamma=0.3),
    "ConstantLR": lambda o: S.ConstantLR(o, factor=0.5, total_iters=3),
    "LinearLR": lambda o: S.LinearLR(o, start_factor=0.2, total_iters=4),
    "ExponentialLR": lambda o: S.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: S.PolynomialLR(o, total_iters=5, power=2.0),
    "CosineAnnealingLR": lambda o: S.CosineAnnealingLR(o, T_max=4),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2),
    "CyclicLR": lambda o: S.CyclicLR(o, 0.001, 0.05, step_size_up=2, cycle_momentum=False),
    "CyclicLR with betas": lambda o: S.CyclicLR(o, 0.001, 0.05, step_size_up=2, cycle_momentum=True),
    "OneCycleLR": lambda o: S.OneCycleLR(o, max_lr=0.05, total_steps=8),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.02, anneal_epochs=3),
    "ReduceLROnPlateau": lambda o: S.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.5),
    "SequentialLR": lambda o: S.SequentialLR(
        o, [S.LinearLR(o, start_factor=0.1, total_iters=2), S.CosineAnnealingLR(o, T_max=4)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: S.ChainedScheduler(
        [S.ConstantLR(o, factor=0.1, total_iters=2), S.ExponentialLR(o, gamma=0.9)]
    ),
}


def scheduled(job: Job, name: str) -> None:
    """Two groups under a scheduler; both are saved and loaded half-way, into themselves and into a new scheduler."""
    model = net()
    groups = [{"params": model[:3].parameters(), "lr": 0.05}, {"params": model[3:].parameters(), "weight_decay": 0.0}]
    optimizer = job.adamw(groups, model, lr=0.02, weight_decay=0.1)
    scheduler = SCHEDULERS[name](optimizer)

    def advance() -> None:
        if isinstance(scheduler, S.ReduceLROnPlateau):
            with torch.no_grad():
                scheduler.step(job.mean(loss_of(model, job.batch(0))))
        else:
            scheduler.step()
        job.note([[group["lr"], *group["betas"]] for group in optimizer.param_groups], scheduler.get_last_lr())

    train(job, model, optimizer, range(3), advance)
    saved = through_disk({"optimizer": optimizer.state_dict(), "scheduler": _plain(scheduler.state_dict())})
    train(job, model, optimizer, range(3, 4), advance)
    scheduler = SCHEDULERS[name](optimizer)
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    assert scheduler.optimizer.param_groups is optimizer.param_groups if hasattr(scheduler, "optimizer") else True
    train(job, model, optimizer, range(4, 7), advance)
    job.note([sorted(group) for group in optimizer.param_groups])
    job.note_state(model, optimizer)


def _plain(state: Any) -> Any:
    """Drop from a scheduler's state what ``weights_only`` does not read (a counter of one)."""
    if isinstance(state, dict):
        return {k: _plain(v) for k, v in state.items() if not callable(v)}
    return [_plain(v) for v in state] if isinstance(state, list) else state


def tensor_lr(job: Job) -> None:
    """Lr as a tensor, which schedulers change in place, and betas as tensors."""
    model = net()
    betas = (torch.tensor(0.8, dtype=D), torch.tensor(0.95, dtype=D))
    lr = torch.tensor(0.05, dtype=D)
    optimizer = job.adamw(model.parameters(), model, lr=lr, betas=betas, foreach=False)
    scheduler = S.ExponentialLR(optimizer, 0.8)
    train(job, model, optimizer, range(3), scheduler.step)
    saved = through_disk(optimizer.state_dict())
    job.note(saved["param_groups"])
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"].mul_(0.5)
    train(job, model, optimizer, range(3, 5))
    job.note(optimizer.param_groups[0]["lr"], *optimizer.param_groups[0]["betas"])
    job.note_state(model, optimizer)


# --- groups ---


def edited_groups(job: Job) -> None:
    """Settings of groups change in mid-run, by hand."""
    model = net()
    decay = [param for param in model.parameters() if param.dim() > 1]
    no_decay = [param for param in model.parameters() if param.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.3}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = job.adamw(groups, model, lr=0.05)
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (step + 1)
        if step == 2:
            optimizer.param_groups[0]["betas"] = (0.7, 0.9)
            optimizer.param_groups[1]["eps"] = 1e-3
        if step == 4:
            optimizer.param_groups[1]["weight_decay"] = 0.5
            optimizer.param_groups[0]["maximize"] = True
        train(job, model, optimizer, range(step, step + 1))
        job.note_state(model, optimizer)
    for group in optimizer.param_groups:
        job.note(sum(param.numel() for param in group["params"]), [tuple(p.shape) for p in group["params"]])


def later_group(job: Job) -> None:
    """An empty group from the start, a group added later, one emptied, under a scheduler (O20)."""
    model = net()
    groups: list[dict[str, Any]] = [{"params": [], "lr": 0.5}, {"params": model[:3].parameters(), "lr": 0.01}]
    optimizer = job.adamw(groups, model, weight_decay=0.1)
    scheduler = S.LambdaLR(optimizer, [lambda n: 0.1, lambda n: 1.0])
    job.note([group["lr"] for group in optimizer.param_groups])
    train(job, model, optimizer, range(2), scheduler.step)
    optimizer.add_param_group({"params": list(model[3:].parameters()), "lr": 0.2})
    train(job, model, optimizer, range(2, 4))
    saved = through_disk(optimizer.state_dict())
    job.note([sorted(group) for group in saved["param_groups"]], [g["params"] for g in saved["param_groups"]])
    optimizer.load_state_dict(saved)
    train(job, model, optimizer, range(4, 5))
    job.note(len(optimizer.state), len(optimizer.param_groups))
    job.note_state(model, optimizer)


def unfreezing(job: Job) -> None:
    """Gradual unfreezing from the top, then freezing the bottom again."""
    model = net()
    model.requires_grad_(False)
    model[5].requires_grad_(True)
    optimizer = job.adamw(model.parameters(), model, lr=0.05, weight_decay=0.1)
    train(job, model, optimizer, range(2))
    model[2:4].requires_grad_(True)
    train(job, model, optimizer, range(2, 4))
    model.requires_grad_(True)
    train(job, model, optimizer, range(4, 6))
    job.note_state(model, optimizer)
    optimizer.zero_grad()
    model[0].requires_grad_(False)
    train(job, model, optimizer, range(6, 8))
    job.note(len(optimizer.state), [int(optimizer.state[p]["step"]) for p in model.parameters()])
    job.note_state(model, optimizer)


def only_what_trains(job: Job) -> None:
    """The optimizer gets what requires a gradient, as fine-tuning scripts do; what is unfrozen comes as a group."""
    model = net()
    model[:3].requires_grad_(False)
    optimizer = job.adamw(filter(lambda p: p.requires_grad, model.parameters()), model, lr=0.05)
    train(job, model, optimizer, range(2))
    model[2].requires_grad_(True)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})
    train(job, model, optimizer, range(2, 4))
    job.note_state(model, optimizer)


def named(job: Job) -> None:
    """Named parameters: their names are in the groups and in the state dict."""
    model = net()
    named_params = list(model.named_parameters())
    groups = [{"params": named_params[:4]}, {"params": named_params[4:], "weight_decay": 0.0}]
    optimizer = job.adamw(groups, model, lr=0.05)
    train(job, model, optimizer, range(2))
    job.note([group["param_names"] for group in optimizer.param_groups])
    saved = through_disk(optimizer.state_dict())
    job.note([group["param_names"] for group in saved["param_groups"]])
    for group in saved["param_groups"]:
        del group["param_names"]
    optimizer.load_state_dict(saved)
    job.note([group["param_names"] for group in optimizer.param_groups])
    train(job, model, optimizer, range(2, 4))
    full = optimizer.full_state_dict() if isinstance(optimizer, zero_shard.AdamW) else optimizer.state_dict()
    job.note(full)
    job.note_state(model, optimizer)


# --- the step ---


def closures(job: Job) -> None:
    """A closure, as LBFGS asks for; the returned loss; a closure that is called by hand too."""
    model = net()
    optimizer = job.adamw(model.parameters(), model, lr=0.05, amsgrad=True)
    for step in range(4):
        batch = job.batch(step)

        def closure(batch: tuple[Tensor, Tensor] = batch) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        job.note(job.mean(optimizer.step(closure)), torch.is_grad_enabled())
    job.note_state(model, optimizer)


def step_hooks(job: Job) -> None:
    """Hooks around the step, of this optimizer and of all; one clips, one counts, one replaces the arguments."""
    model = net()
    optimizer = job.adamw(model.parameters(), model, lr=0.05)
    calls: list[str] = []

    def clip(_: Optimizer, args: Any, kwargs: Any) -> None:
        calls.append("clip")
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        job.note(norm.item())

    def drop_closure(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        calls.append("drop")
        return (args[:1], {})

    def everywhere(*_: Any) -> None:
        calls.append("global")

    handles = [
        optimizer.register_step_pre_hook(clip),
        optimizer.register_step_pre_hook(drop_closure),
        optimizer.register_step_post_hook(lambda *_: calls.append("post")),
        register_optimizer_step_pre_hook(everywhere),
        register_optimizer_step_post_hook(everywhere),
    ]
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, job.batch(step)).backward()
        optimizer.step(lambda: calls.append("never"))
    for handle in handles:
        handle.remove()
    train(job, model, optimizer, range(3, 4))
    job.note(calls)
    job.note_state(model, optimizer)


def state_hooks(job: Job) -> None:
    """Hooks around state dicts that change them: what they return counts."""
    model = net()
    optimizer = job.adamw(model.parameters(), model, lr=0.05)
    calls: list[Any] = []

    def wrap(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append(("saved", sorted(set(state_dict) - {"zero_shard"})))
        return {"wrapped": state_dict, "version": 3}

    def unwrap(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        inner = dict(state_dict["wrapped"])
        inner["param_groups"] = [{**group, "lr": 0.01} for group in inner["param_groups"]]
        inner["state"] = {
            number: {**entry, "step": entry["step"] + 5, "exp_avg": entry["exp_avg"] * 0.5}
            for number, entry in inner["state"].items()
        }
        return inner

    def loaded(optimizer: Optimizer) -> None:
        calls.append(("loaded", [float(optimizer.state[p]["step"]) for p in optimizer.param_groups[0]["params"]]))

    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before"))
    optimizer.register_state_dict_post_hook(wrap)
    optimizer.register_load_state_dict_pre_hook(unwrap)
    optimizer.register_load_state_dict_post_hook(loaded)
    train(job, model, optimizer, range(2))
    saved = optimizer.state_dict()
    calls.append((sorted(saved), saved["version"]))
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    train(job, model, optimizer, range(2, 4))
    job.note(list(calls))
    hooks = optimizer._optimizer_state_dict_post_hooks
    kept = dict(hooks)
    hooks.clear()  # so that the snapshot sees the plain form
    job.note_state(model, optimizer)
    hooks.update(kept)


def loading_in_place(job: Job) -> None:
    """A load hook that changes the dict it is given and returns nothing: new values, as torch does."""
    model = net()
    optimizer = job.adamw(model.parameters(), model, lr=0.05)
    train(job, model, optimizer, range(2))

    def smaller(_: Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict["param_groups"] = [{**group, "lr": 0.001} for group in state_dict["param_groups"]]

    handle = optimizer.register_load_state_dict_pre_hook(smaller)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    job.note(saved["param_groups"][0]["lr"], optimizer.param_groups[0]["lr"])
    handle.remove()
    train(job, model, optimizer, range(2, 4))
    job.note_state(model, optimizer)


def accumulation(job: Job) -> None:
    """Micro-batches with a clip before the step, and a last one that is not full."""
    model = net()
    optimizer = job.adamw(model.parameters(), model, lr=0.05, weight_decay=0.1)
    for micro in range(7):
        (loss_of(model, job.batch(micro)) / 3).backward()
        if micro % 3 == 2 or micro == 6:
            job.note(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
            optimizer.step()
            optimizer.zero_grad()
    job.note_state(model, optimizer)


def settings(job: Job) -> None:
    """Maximize with amsgrad, and what the object shows of itself."""
    model = net()
    optimizer = job.adamw(model.parameters(), model, lr=0.02, amsgrad=True, maximize=True, eps=1e-6)
    train(job, model, optimizer, range(3))
    job.note(optimizer.defaults, repr(optimizer), len(optimizer.state))
    job.note(
        isinstance(optimizer, torch.optim.AdamW), isinstance(optimizer, torch.optim.Adam), type(optimizer).__name__
    )
    for param in optimizer.param_groups[0]["params"]:
        entry = optimizer.state[param]
        job.note(sorted(entry), entry["step"].item(), entry["step"].dtype, entry["step"].shape)
    job.note_state(model, optimizer)


def state_in_place(job: Job) -> None:
    """A warm restart by hand: moments and step counts are reset in place; later the whole state is dropped."""
    model = net()
    optimizer = job.adamw(model.parameters(), model, lr=0.05)
    train(job, model, optimizer, range(3))
    for entry in optimizer.state.values():
        entry["exp_avg"].mul_(0.5)
        entry["exp_avg_sq"].zero_()
        entry["step"].zero_()
    train(job, model, optimizer, range(3, 5))
    job.note_state(model, optimizer)
    optimizer.state.clear()
    train(job, model, optimizer, range(5, 7))
    job.note_state(model, optimizer)
    optimizer.state.pop(model[2].weight)
    train(job, model, optimizer, range(7, 8))
    job.note_state(model, optimizer)


# --- several optimizers ---


def gan(job: Job) -> None:
    """Two networks, two optimizers, each step of one through the other."""
    generator, critic = net(1), nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    steer = job.adamw(generator.parameters(), generator, lr=0.02, betas=(0.5, 0.9))
    judge = job.adamw(critic.parameters(), critic, lr=0.05, betas=(0.5, 0.9))
    for step in range(4):
        x, y = job.batch(step)
        judge.zero_grad()
        (critic(generator(x).detach()).mean() - critic(y).mean()).backward()
        judge.step()
        steer.zero_grad()
        (-critic(generator(x)).mean()).backward()
        steer.step()
    job.note_state(generator, steer)
    job.note_state(critic, judge)


def two_in_one_model(job: Job) -> None:
    """One optimizer for the trunk and one for the head of the same model."""
    model = net()
    trunk = job.adamw(model[:3].parameters(), model[:3], lr=0.02)
    head = job.adamw(model[3:].parameters(), model[3:], lr=0.05)
    for step in range(3):
        for optimizer in (trunk, head):
            optimizer.zero_grad()
        loss_of(model, job.batch(step)).backward()
        for optimizer in (trunk, head):
            optimizer.step()
    job.note_state(model[:3], trunk)
    job.note_state(model[3:], head)


def warm_restart(job: Job) -> None:
    """A new optimizer on the same parameters takes the place of the old one, which is alive while it is built."""
    model = net()
    optimizer = job.adamw(model.parameters(), model, lr=0.05)
    train(job, model, optimizer, range(2))
    optimizer = job.adamw(model.parameters(), model, lr=0.02)
    job.note(len(optimizer.state))
    train(job, model, optimizer, range(2, 4))
    job.note_state(model, optimizer)
    old = optimizer
    optimizer = job.adamw(model.parameters(), model, lr=0.01)
    optimizer.load_state_dict(old.state_dict())
    train(job, model, optimizer, range(4, 6))
    del old
    train(job, model, optimizer, range(4, 6))
    job.note_state(model, optimizer)


def resume(job: Job) -> None:
    """Everything to disk, a new model and a new optimizer in its place, on with training."""
    model = net()
    optimizer = job.adamw(model.parameters(), model, lr=0.05, weight_decay=0.1)
    scheduler = S.CosineAnnealingLR(optimizer, T_max=5)
    train(job, model, optimizer, range(3), scheduler.step)
    with zero_shard.gathered(model):
        weights = copy.deepcopy({name: tensor.clone() for name, tensor in model.state_dict().items()})
    saved = {"model": weights, "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    saved = through_disk(saved)
    del model, optimizer, scheduler
    model = net(seed=5)
    model.load_state_dict(saved["model"])
    optimizer = job.adamw(model.parameters(), model, lr=0.05, weight_decay=0.1)
    scheduler = S.CosineAnnealingLR(optimizer, T_max=5)
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    train(job, model, optimizer, range(3, 6), scheduler.step)
    job.note_state(model, optimizer)


def profiled(job: Job) -> None:
    """The profiler sees the step under torch's name."""
    model = net()
    optimizer = job.adamw(model.parameters(), model, lr=0.05)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(job, model, optimizer, range(2))
    names = [event.name for event in profile.events()]
    job.note(names.count("Optimizer.step#AdamW.step"), names.count("Optimizer.zero_grad#AdamW.zero_grad"))
    job.note_state(model, optimizer)


Script = Callable[[Job], None]


def _scheduled(name: str) -> Script:
    return lambda job: scheduled(job, name)


SCRIPTS: dict[str, Script] = {
    **{f"scheduler {name}": _scheduled(name) for name in SCHEDULERS},
    **{
        script.__name__: script
        for script in (
            *(tensor_lr, edited_groups, later_group, unfreezing, only_what_trains, named, closures, step_hooks),
            *(state_hooks, loading_in_place, accumulation, settings, state_in_place, gan, two_in_one_model),
            *(warm_restart, resume, profiled),
        )
    },
}
