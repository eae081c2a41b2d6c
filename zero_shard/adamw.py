"""The optimizer: torch.optim.AdamW whose state, gradients and parameters are sharded by stages."""

from __future__ import annotations

import copy
import logging
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from zero_shard import ops
from zero_shard.agreement import build_on_all_ranks, describe_group, describe_param
from zero_shard.buffers import Bucket
from zero_shard.collectives import Communicator, ProcessGroup
from zero_shard.config import ZeroConfig, load_config
from zero_shard.construction import Builder, check_amsgrad
from zero_shard.copying import copy_bucket
from zero_shard.gathering import register_layer
from zero_shard.groups import Groups, number_params, pack_groups, unpack_groups
from zero_shard.masters import note_weights
from zero_shard.plan import Usage, describe_storage, floor_sent_nbytes, promised_nbytes
from zero_shard.sharded_grad import ShardedGrad
from zero_shard.stages import build_stage
from zero_shard.stages.reduction import Reducer
from zero_shard.stages.slots import GradSlot
from zero_shard.state import (
    LAYOUT_KEY,
    check_state_dict,
    clear_state,
    copy_state,
    full_state,
    layout_entry,
    low_parts,
)
from zero_shard.tables import SlotTables
from zero_shard.uneven_inputs import JoinHook, Operation

_LOG = logging.getLogger("zero_shard")
_HOST = "cpu"  # what the host can read without waiting


class AdamW(torch.optim.AdamW):
    """AdamW whose optimizer state, gradients and parameters are sharded over ranks (ZeRO stages 0 to 3).

    Takes what ``torch.optim.AdamW`` takes; ``foreach`` and ``fused`` choose nothing here (one fused kernel runs on the
    local shard). All ranks must build it with equal arguments; parameters and buffers of rank 0 are taken at the start.

    Args:
        params: Parameters, groups or named parameters.
        lr, betas, eps, weight_decay, amsgrad, maximize: As in torch, per group.
        module: The model; needed by stage 3, welcome at every stage (names, buffers).
        config: A ZeroConfig, a mapping of its fields, or the path of a TOML, YAML or JSON file.
        process_group: The ranks that train together; None = the default group; no group at all = a world of one.
    Raises:
        ValueError, TypeError: Bad argument or config, or ranks that differ; on every rank.
        NotImplementedError: A complex or sparse parameter, by name.
    Source: Decoupled weight decay (arXiv:1711.05101); ZeRO (arXiv:1910.02054).

    Example:
        >>> optimizer = zero_shard.AdamW(model.parameters(), lr=1e-3, module=model, config={"stage": 3})
        >>> model(batch).backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        module: nn.Module | None = None,
        config: Any = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self._is_built = False
        communicator = Communicator(process_group)

        def build() -> dict[str, str]:
            self.config: ZeroConfig = load_config(config)
            if differentiable:
                raise NotImplementedError("differentiable=True is not available; use torch.optim.AdamW for it")
            super(AdamW, self).__init__(
                params,
                lr=lr,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                amsgrad=amsgrad,
                maximize=maximize,
                foreach=foreach,
                capturable=capturable,
                differentiable=differentiable,
                fused=fused,
            )
            # torch would have a GradScaler leave the unscaling to a fused step; here it unscales the gradients.
            self._step_supports_amp_scaling = False
            return self._prepare(communicator, module)

        with torch.inference_mode(False), torch.no_grad():
            build_on_all_ranks(communicator, build)
            self._build()

    # ---- construction --------------------------------------------------------------------------------------

    def _prepare(self, communicator: Communicator, module: nn.Module | None) -> dict[str, str]:
        """Check everything that one rank can check alone; return what ranks must agree on."""
        self._set_up(communicator)
        self._builder = Builder(self.config, communicator, self._stage, self._reducer, module)
        self._builder.check(self.param_groups)
        facts = {"config.check": repr(self.config.check)}
        if self.config.check == "off":
            return facts
        facts |= {f"config.{name}": repr(value) for name, value in vars(self.config).items()}
        for name, param in self._builder.named_params(self.param_groups):
            facts[f"parameter {name}"] = describe_param(param)
        for number, group in enumerate(self.param_groups):
            facts[f"param_groups[{number}]"] = describe_group(group)
        facts["the order of parameters"] = ", ".join(name for name, _ in self._builder.named_params(self.param_groups))
        return facts

    def _set_up(self, communicator: Communicator) -> None:
        """Make everything that needs the config only."""
        self._communicator = communicator
        self._kernels = ops.select(self.config.kernels)
        self._stage = build_stage(self.config, communicator)
        self._reducer = Reducer(communicator, self._kernels, self.config.reduce_dtype, self._stage.reduces_in_backward)
        self._reducer.exchanges.takes_squares = self.config.max_grad_norm is not None or self.config.skip_nonfinite
        self._tables = SlotTables()
        self._is_exposed = torch.zeros(0, dtype=torch.uint8)  # [P]: `self.state` shows the slot's state
        self._clip_coefficient: Tensor | None = None
        self._found_inf: Tensor | None = None  # of the present step, where the host does not wait for it
        self._unreported_norm: Tensor | None = None
        self._sent_before_step = self._sent_in_step = 0
        self._is_lent = False  # the parameters hold other numbers for a while (averages)
        self._averages: weakref.WeakSet[Any] = weakref.WeakSet()  # ExponentialMovingAverage
        self._lost = ""  # name of a parameter that a later optimizer has taken over
        self._join_config: Any = None  # set by torch.distributed.algorithms.Join
        self._join_hook: JoinHook | None = None

    def _build(self) -> None:
        self._communicator.agree_on_number()
        self._builder.build(self.param_groups)
        self._start()

    def _start(self) -> None:
        """Wire up what has been built."""
        self._after_new_buckets()
        if self._communicator.num_ranks > 1:
            builder, groups = self._builder, self.param_groups
            self._reducer.before_backward = _calling(weakref.WeakMethod(self._apply_clip))
            self._reducer.before_first_backward = lambda: builder.notice_wrappers(groups)
        self._handles = [self._reducer.handles, getattr(self._stage, "handles", [])]
        weakref.finalize(self, _leave, self._handles, self._reducer.slots)
        self._stage.at_loss = _calling(weakref.WeakMethod(self._retire))
        self._is_built = True
        if self._communicator.rank == 0:
            _LOG.info(
                "zero_shard: %s", describe_storage(self._reducer.buckets, self.config, self._communicator.num_ranks)
            )

    def _after_new_buckets(self) -> None:
        """Make room for new slots."""
        if self._is_built:
            self._forget_cleared_state()
        slots = self._reducer.slots
        self._tables.extend(len(slots), slots[0].bucket.device if slots else torch.device("cpu"))
        self._is_exposed = torch.zeros(len(slots), dtype=torch.uint8)
        for slot in slots:
            former = register_layer(slot.param, self._stage)
            if former is not None and former.at_loss is not None:
                former.at_loss(slot.param)
        self._expose_state(self._tables.steps.cpu() > 0)

    def _retire(self, param: nn.Parameter) -> None:
        """Leave the parameters to a later optimizer that has taken over this one. Local."""
        if not self._lost:
            self._lost = next(slot.name for slot in self._reducer.slots if slot.param is param)
            _leave(self._handles, self._reducer.slots)
            for bucket in self._reducer.buckets:
                bucket.is_released = True  # its memory is no longer that of the parameters

    def check_in_charge(self) -> None:
        """Raise RuntimeError if a later optimizer has taken a parameter over. Local."""
        if self._lost:
            raise RuntimeError(
                f"a zero_shard.AdamW that was built later has taken over parameter {self._lost}: one optimizer trains "
                "it at a time. Use the later one, or one optimizer with several groups"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch. After construction all ranks must call it."""
        if not self._is_built:
            super().add_param_group(param_group)
            return

        def add() -> dict[str, str]:
            super(AdamW, self).add_param_group(param_group)
            try:
                self._builder.check(self.param_groups)
            except Exception:
                self.param_groups.pop()
                raise
            group = self.param_groups[-1]
            if self.config.check == "off":
                return {}
            facts = {"the added group": describe_group(group)}
            return facts | {f"parameter {i}": describe_param(p) for i, p in enumerate(group["params"])}

        build_on_all_ranks(self._communicator, add)
        self._builder.build(self.param_groups)
        self._after_new_buckets()

    def __deepcopy__(self, memo: dict[int, Any]) -> AdamW:
        """Return an optimizer like this one over copies of its parameters, without gradients. Local.

        ``copy.deepcopy((model, optimizer))`` copies both, so that they belong together; of the optimizer alone it
        copies the parameters, too. Hooks are not copied: as in torch.

        Raises:
            NotImplementedError: Stage 3, where the model can't be copied.
        """
        if getattr(self._stage, "units", ()):
            raise NotImplementedError(
                "copy.deepcopy of zero_shard.AdamW is not available at stage 3, where no rank has the whole model. For "
                "an average of the weights use zero_shard.ExponentialMovingAverage(optimizer); for a second model "
                "build it anew and load what zero_shard.save has written"
            )
        self.check_in_charge()
        self._reducer.take_back_replaced()
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        with torch.inference_mode(False), torch.no_grad():
            buckets = [copy_bucket(bucket, memo) for bucket in self._reducer.buckets]
            settings = copy.deepcopy({"defaults": self.defaults, "param_groups": self.param_groups}, memo)
            copied.__setstate__({**settings, "state": defaultdict(dict)})  # type: ignore[no-untyped-call]
            copied._step_supports_amp_scaling, copied._is_built = False, False
            copied.config = self.config
            copied._set_up(self._communicator.copy())
            copied._builder = self._builder.copy(copied._communicator, copied._stage, copied._reducer, memo)
            for bucket in buckets:
                copied._reducer.add_bucket(bucket)
            copied._tables.steps = self._tables.steps.clone()
            copied._start()
        return copied

    def __copy__(self) -> AdamW:
        raise NotImplementedError(
            "copy.copy of zero_shard.AdamW is not available: two optimizers can't share buffers. "
            "Use copy.deepcopy((model, optimizer))"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            "pickling zero_shard.AdamW is not available: it belongs to a process group. Save optimizer.state_dict(), "
            "full_state_dict() or zero_shard.save instead"
        )

    # ---- gradients -----------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward keeps gradients local; a later backward outside of it reduces the sum."""
        return self._reducer.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or set them to zero."""
        with torch.autograd.profiler.record_function(self._zero_grad_profile_name):
            self._clip_coefficient = None
            self._reducer.zero_grad(set_to_none)
            for group in self.param_groups:
                for param in group["params"]:
                    if set_to_none:
                        param.grad = None
                    elif param.grad is not None and not isinstance(param.grad, ShardedGrad):
                        if param.grad.grad_fn is not None:
                            param.grad.detach_()
                        with torch.no_grad():
                            param.grad.zero_()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the mean gradient in the next ``step()`` so that its global norm is at most ``max_norm``.

        All ranks must call; communicates. The gradients stay as they are until the update, or until another backward
        adds to them. In a world of one they are scaled at once, as torch does.

        Returns:
            The norm before clipping, a 0-dim tensor, equal on all ranks.
        """
        self._adopt_unfrozen()
        self._reducer.collect()
        if self._join_hook is not None:
            self._join_hook.announce(Operation.CLIP, [float(max_norm), float(norm_type)])
        norm = self._fold_clip(max_norm, float(norm_type))
        if self._communicator.num_ranks == 1:  # nothing tells when the next backward adds to the gradients
            coefficient, self._clip_coefficient = self._clip_coefficient, None
            assert coefficient is not None
            self._scale_gradients(coefficient)
        return norm.to(self._tables.steps.device)

    def _fold_clip(self, max_norm: float, order: float) -> Tensor:
        """Have the next update scale the gradient, as it stands clipped so far, to a norm of at most ``max_norm``."""
        norm, before = self._global_norm(order), self._clip_coefficient
        norm = norm if before is None else norm * before
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        self._clip_coefficient = coefficient if before is None else before * coefficient
        return norm

    @torch.no_grad()
    def _apply_clip(self) -> None:
        """Scale the gradients for good before another backward adds to them."""
        coefficient, self._clip_coefficient = self._clip_coefficient, None
        if coefficient is None:
            return
        self._reducer.scale_replaced(coefficient)
        for bucket in self._reducer.buckets:
            if bucket.grad is not None:
                bucket.grad.mul_(coefficient.to(bucket.grad))
                bucket.has_sums = False

    def _scale_gradients(self, coefficient: Tensor) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                grad: Tensor | None = param.grad
                if grad is not None:
                    grad.mul_(coefficient.to(grad.device))

    def _global_norm(self, order: float) -> Tensor:
        is_owned = self._tables.owned_flags(self._reducer.slots, self.param_groups)
        self._reducer.exchanges.takes_squares |= order == 2
        return self._reducer.norms.global_norm(order, is_owned)

    # ---- the step ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. All ranks must call; communicates.

        Args:
            closure: Re-evaluates the model and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._report_skipped()
        self._adopt_unfrozen()
        check_amsgrad(self.param_groups, self.config.state_dtype)
        self._reducer.take_back_replaced()
        self._reducer.collect()
        if self._join_hook is not None:
            self._join_hook.announce_step()
        self._stage.before_step()
        self._forget_cleared_state()
        for average in self._averages:
            average.begin_new()
        with self._reducer.plain_gradients.steady():
            if self._is_step_allowed():
                self._update()
        self._clip_coefficient = self._found_inf = None
        self._reducer.after_step()
        self._sent_in_step = self._communicator.sent_nbytes - self._sent_before_step
        self._sent_before_step = self._communicator.sent_nbytes
        return loss

    def _adopt_unfrozen(self) -> None:
        """Take charge of parameters that were frozen when the optimizer was built. All ranks unfreeze alike."""
        self.check_in_charge()
        if self._is_lent:
            raise RuntimeError(
                "the model holds averaged weights, which a step would train; leave ExponentialMovingAverage.applied() "
                "first"
            )
        if self._builder.has_new_params(self.param_groups):
            self._builder.build(self.param_groups)
            self._after_new_buckets()

    def _forget_cleared_state(self) -> None:
        """Start anew where the user has removed a parameter's entry from ``self.state``."""
        if len(self.state) >= int(self._is_exposed.sum()):
            return
        for index in self._is_exposed.nonzero().flatten().tolist():
            slot = self._reducer.slots[index]
            if slot.param not in self.state:
                clear_state(slot)
                self._tables.steps[index] = 0
                self._is_exposed[index] = 0

    def _is_step_allowed(self) -> bool:
        if self.config.max_grad_norm is not None:
            norm = self._fold_clip(self.config.max_grad_norm, 2.0)
        elif self.config.skip_nonfinite:
            norm = self._global_norm(2.0)
        else:
            return True
        if not self.config.skip_nonfinite:
            return True
        self._unreported_norm = norm
        if norm.device.type == _HOST:
            return self._report_skipped()
        self._found_inf = (~torch.isfinite(norm)).to(torch.float32)  # the kernels look; the host need not wait
        return True

    def _report_skipped(self) -> bool:
        """Warn if the last norm made the step be skipped; return whether all was well. May wait for a GPU."""
        norm, self._unreported_norm = self._unreported_norm, None
        if norm is None or bool(torch.isfinite(norm)):
            return True
        text = f"zero_shard skipped a step on all ranks: the gradient norm is {norm.item()}"
        warnings.warn(text, stacklevel=_depth_of_caller())
        return False

    def _update(self) -> None:
        flags = self._reducer.active_flags()
        if self.config.check == "every_step":
            self._compare_flags(flags)
        reducer = self._reducer
        updated = self._tables.begin_step(flags, reducer.slots, self.param_groups, self._found_inf)
        is_updated = updated.numpy()
        calls, changed = [], []  # all of Python first: the kernels drive it out of the caches
        for bucket in reducer.buckets:
            flags_here = is_updated[bucket.slots.start : bucket.slots.stop]
            if flags_here.any():
                calls.append((bucket, self._arguments(bucket)))
                changed.append(bucket.params if flags_here.all() else list(compress(bucket.params, flags_here)))
        for bucket, arguments in calls:
            self._kernels.adamw_(*arguments)
            self._stage.publish(bucket)
        self._stage.finish_publishing()
        with torch._C.DisableTorchFunctionSubclass():
            for params in changed:
                torch.autograd.graph.increment_version(params)
        for (bucket, _), params in zip(calls, changed, strict=True):
            note_weights(bucket, len(params))
        self._expose_state(updated)

    def _arguments(self, bucket: Bucket) -> tuple[Any, ...]:
        """Return what ``adamw_`` takes to update a bucket."""
        bucket.allocate_state()
        if bucket.max_exp_avg_sq is None and any(group["amsgrad"] for group in self.param_groups):
            bucket.allocate_max_exp_avg_sq()
            self._is_exposed.zero_()
        scale, found_inf = self._clip_coefficient, self._found_inf
        return (
            bucket.shard,
            bucket.low,
            *self._reducer.gradient_of(bucket),
            bucket.exp_avg,
            bucket.exp_avg_sq,
            bucket.max_exp_avg_sq,
            bucket.exp_avg_scale,
            bucket.exp_avg_sq_scale,
            bucket.segment_table,
            *self._tables.on(bucket.device),
            None if scale is None else scale.to(device=bucket.device, dtype=bucket.math_dtype),
            None if found_inf is None else found_inf.to(bucket.device),
            bucket.storage.is_stochastic,
        )

    def _compare_flags(self, flags: Tensor) -> None:
        lowest = self._communicator.agree(flags.clone(), "min", "the check of every step")
        highest = self._communicator.agree(flags.clone(), "max", "the check of every step")
        differing = (lowest != highest).nonzero().flatten().tolist()
        if differing:
            names = ", ".join(self._reducer.slots[index].name for index in differing[:4])
            raise RuntimeError(
                f"ranks differ in which parameters have a gradient: {names}. Clear gradients on all ranks alike"
            )

    # ---- torch.distributed.algorithms.Join -----------------------------------------------------------------

    def join_hook(self, **_: Any) -> JoinHook:
        """Return what has ranks that run out of data take part in what the others do. Called by `Join`.

        Raises:
            NotImplementedError: At stage 3, where a forward needs all ranks.
        """
        if self.config.stage == 3:
            raise NotImplementedError(
                "Join is not available at stage 3, where every forward needs the parameters of all ranks; use stage 2, "
                "or give ranks without data an empty batch"
            )
        self._join_hook = JoinHook(self, self._reducer, self._communicator)
        self._reducer.before_round = self._join_hook.announce_round
        return self._join_hook

    @property
    def join_device(self) -> torch.device:
        """Where `Join` counts ranks."""
        return torch.device(_HOST)

    @property
    def join_process_group(self) -> ProcessGroup | None:
        """The ranks that `Join` counts."""
        return self._communicator.control

    # ---- state ---------------------------------------------------------------------------------------------

    def _expose_state(self, has_state: Tensor) -> None:
        """Let ``self.state`` show the step count and the own part of the moments (aliases) of these slots."""
        for index in (has_state > self._is_exposed).nonzero().flatten().tolist():
            self.state[self._reducer.slots[index].param] = self._state_entry(index)
            self._is_exposed[index] = 1

    def _state_entry(self, index: int) -> dict[str, Tensor]:
        slot = self._reducer.slots[index]
        return {"step": self._tables.steps[index], **slot.bucket.state_entry(slot.position)}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state; never communicates.

        As in torch, with each moment cut to the part that this rank owns (8-bit ones as codes with their scales), the
        low halves of 16-bit masters (``low``), and a ``zero_shard`` entry that says which part it is. Loads into an
        optimizer of the same stage, world size and config; `full_state_dict` and `zero_shard.save` load anywhere.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state_dict = self._pack_state()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def _pack_state(self) -> dict[str, Any]:
        slots, numbers = self._reducer.slots, number_params(self.param_groups)
        state: dict[Any, Any] = {
            numbers.get(id(key)) if isinstance(key, Tensor) else key: entry for key, entry in self.state.items()
        }
        state.pop(None, None)  # of parameters that have left their group
        for number, low in low_parts(slots, self.param_groups).items():
            if number in state:
                state[number] = {**state[number], "low": low}
        layout = layout_entry(slots, self.param_groups, self._communicator)
        return {"state": state, "param_groups": pack_groups(self.param_groups), LAYOUT_KEY: layout}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of the same layout, or a full one as plain AdamW writes; never communicates.

        Raises:
            ValueError: Groups or shapes differ, or the layout is another one. Nothing has been changed then.
            NotImplementedError: A group has amsgrad, which 8-bit moments do not know; the same.
        """
        state_dict = state_dict.copy()  # hooks may change it
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._reducer.take_back_replaced()
        loaded = check_state_dict(state_dict, self._reducer.slots, self.param_groups)
        check_amsgrad(state_dict["param_groups"], self.config.state_dtype)
        with torch.inference_mode(False):
            self._load_groups(state_dict["param_groups"])
            copy_state(loaded, self._reducer.slots, self._tables.steps)
            self._expose_state(self._tables.steps.cpu() > 0)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load_groups(self, saved: Groups) -> None:
        """Take over the settings of saved groups; ``self.state`` shows nothing afterwards."""
        groups = unpack_groups(saved, self.param_groups)
        self.__setstate__({"state": defaultdict(dict), "param_groups": groups})  # type: ignore[no-untyped-call]
        self._is_exposed.zero_()

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """Return what ``torch.optim.AdamW.state_dict()`` would be: full tensors on the CPU of rank 0, {} elsewhere.

        All ranks must call; communicates, one bucket at a time.
        """
        reducer = self._reducer
        state = full_state(
            reducer.slots, reducer.buckets, self.param_groups, self._tables.steps, self._kernels, self._communicator
        )
        if self._communicator.rank != 0:
            return {}
        return {"state": state, "param_groups": pack_groups(self.param_groups)}

    def usage(self) -> Usage:
        """Return this rank's bytes: model state promised and held now, sent at the least and sent in the last step."""
        buckets = self._reducer.buckets
        ranks = self._communicator
        return Usage(
            promised_nbytes(buckets, self.config, ranks.num_ranks),
            sum(bucket.held_nbytes() for bucket in buckets) + self._reducer.held_nbytes() + self._tables.steps.nbytes,
            floor_sent_nbytes(buckets, self.config, ranks.num_ranks),
            self._sent_in_step,
        )


def _calling(method: weakref.WeakMethod[Callable[..., None]]) -> Callable[..., None]:
    def call(*args: Any) -> None:
        alive = method()
        if alive is not None:
            alive(*args)

    return call


def _depth_of_caller() -> int:
    """Return how many frames up from the calling function the first one outside of this package and torch is."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("zero_shard", "torch"):
        depth, frame = depth + 1, frame.f_back
    return depth


def _leave(lists: Sequence[list[Any]], slots: Sequence[GradSlot]) -> None:
    """Make the parameters of a deleted optimizer ordinary ones again."""
    for handles in lists:
        for handle in handles:
            handle.remove()
    for slot in slots:
        if isinstance(slot.param.grad, ShardedGrad) and slot.param.grad is slot.handed:
            slot.param.grad = slot.handed = None
