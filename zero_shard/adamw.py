"""The optimizer: torch.optim.AdamW whose state, gradients and parameters are sharded by stages."""

from __future__ import annotations

import copy
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from zero_shard import ops
from zero_shard.agreement import build_on_all_ranks, facts_of, facts_of_group
from zero_shard.clipping import Clip
from zero_shard.collectives import Communicator, ProcessGroup, Ranks
from zero_shard.config import ZeroConfig, load_config, with_shard_size
from zero_shard.construction import Builder
from zero_shard.copying import copy_bucket
from zero_shard.failure_report import begin as begin_reports
from zero_shard.gradient_watch import GradientWatch
from zero_shard.groups import check_amsgrad, check_settings, pack_groups
from zero_shard.held_state import HeldState
from zero_shard.phases import Phase
from zero_shard.promises import Usage, describe_storage, usage_of
from zero_shard.rehearsal import choose_stage
from zero_shard.sharded_grad import ShardedGrad
from zero_shard.skipping import NonfiniteSkip
from zero_shard.stages import build_stage
from zero_shard.stages.reduction import Reducer
from zero_shard.state import check_state_dict, copy_state, full_state, pack_state
from zero_shard.tables import SlotTables
from zero_shard.tenure import Tenure, calling
from zero_shard.uneven_inputs import JoinHook, Operation
from zero_shard.update import Factors, Update

_LOG = logging.getLogger("zero_shard")


class AdamW(torch.optim.AdamW):
    """AdamW whose optimizer state, gradients and parameters are sharded over ranks (ZeRO stages 0 to 3).

    Takes what ``torch.optim.AdamW`` takes; ``foreach`` and ``fused`` choose nothing here (one fused kernel runs on the
    local shard). All ranks must build it with equal arguments; parameters and buffers of rank 0 are taken at the start.

    Args:
        params: Parameters, groups or named parameters.
        lr, betas, eps, weight_decay, amsgrad, maximize: As in torch, per group.
        module: The model; needed by stage 3, welcome at every stage (names, buffers).
        config: A ZeroConfig, a mapping of its fields, or the path of a TOML, YAML or JSON file.
        process_group: The ranks that train together: a process group or a device mesh of one dimension, or of two,
            (replicate, shard), which sets ``shard_size``. None = the default group; no group at all = a world of one.
    Raises:
        ValueError, TypeError: Bad argument or config, or ranks that differ; on every rank.
        NotImplementedError: A complex or sparse parameter, by name.
    Source: Decoupled weight decay (arXiv:1711.05101); ZeRO (arXiv:1910.02054).

    Attributes:
        config: The ZeroConfig in force.
        held: What this rank holds, for checkpoints and averages.
        gradient_watch: What the gradients are, for a monitor.

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
        process_group: Ranks | None = None,
    ) -> None:
        self._is_built, self._why_stage = False, ""
        communicator = Communicator(process_group)
        reporter = None if communicator.is_rehearsing else begin_reports()

        def build() -> dict[str, str]:
            self.config: ZeroConfig = with_shard_size(load_config(config), communicator.shard_size)
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
            if self.config.stage == "auto":
                self._settle_stage(communicator, module)
            communicator.agree_on_number()
            self._builder.build(self.param_groups)
            self._start()
        if reporter is not None:
            reporter.optimizers.add(self)

    # ---- construction --------------------------------------------------------------------------------------

    def _prepare(self, communicator: Communicator, module: nn.Module | None) -> dict[str, str]:
        """Check everything that one rank can check alone; return what ranks must agree on."""
        if self.config.stage == "auto":
            return {"config.stage": "auto"}
        self._set_up(communicator)
        self._builder = Builder(self.config, communicator, self._stage, self._reducer, module)
        self._builder.check(self.param_groups)
        return facts_of(self.config, self._builder.named_params(self.param_groups), self.param_groups)

    def _settle_stage(self, communicator: Communicator, module: nn.Module | None) -> None:
        choice = choose_stage(AdamW, self.config, self.param_groups, module, communicator)
        self.config, self._why_stage = self.config.replace(stage=choice.stage), choice.reason
        build_on_all_ranks(communicator, lambda: self._prepare(communicator, module))

    def _set_up(self, communicator: Communicator) -> None:
        """Make everything that needs the config only."""
        self._communicator = communicator
        self._kernels = ops.select(self.config.kernels, "meta" if communicator.is_rehearsing else "cpu")
        self._stage = build_stage(self.config, communicator)
        self._reducer = Reducer(communicator, self._kernels, self._stage.reduces_in_backward)
        self._reducer.exchanges.takes_squares = self.config.max_grad_norm is not None or self.config.skip_nonfinite
        self._tables = SlotTables()
        self._clip = Clip(self._reducer, self._tables)
        self._skip = NonfiniteSkip()
        self._tenure = Tenure(self._stage, self._reducer)
        self.held = HeldState(self, communicator, self._stage, self._reducer, self._tables, self._tenure)
        is_checked = self.config.check == "every_step"
        self.gradient_watch = GradientWatch(self._reducer, self._tables, communicator)
        self._update = Update(self.held, self._reducer, self._tables, self._kernels, is_checked)
        self._join_config: Any = None  # set by torch.distributed.algorithms.Join
        self._join_hook: JoinHook | None = None

    def _start(self) -> None:
        """Wire up what has been built."""
        self._after_new_buckets()
        if self._communicator.num_ranks > 1:
            builder, groups = self._builder, self.param_groups
            self._reducer.before_backward = calling(weakref.WeakMethod(self._clip.apply))
            self._reducer.before_first_backward = lambda: builder.notice_wrappers(groups)
        self._tenure.begin(self)
        self._is_built = True
        if self._communicator.rank == 0:
            text = describe_storage(self._reducer.buckets, self.config, self._communicator.num_ranks)
            _LOG.info("zero_shard: %s%s", text, self._why_stage and f"; stage auto: {self._why_stage}")

    def _after_new_buckets(self) -> None:
        """Make room for new slots."""
        if self._is_built:
            self.held.take_edits()
        slots = self._reducer.slots
        self._tables.extend(len(slots), slots[0].bucket.device if slots else torch.device("cpu"))
        self._tenure.claim()
        self.held.make_room()

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
            return {} if self.config.check == "off" else facts_of_group(self.param_groups[-1])

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
        self.held.check_in_charge()
        self.held.take_back_replaced()
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        with torch.inference_mode(False), torch.no_grad():
            buckets = [copy_bucket(bucket, memo) for bucket in self._reducer.buckets]
            settings = copy.deepcopy({"defaults": self.defaults, "param_groups": self.param_groups}, memo)
            copied.__setstate__({**settings, "state": defaultdict(dict)})  # type: ignore[no-untyped-call]
            copied._step_supports_amp_scaling, copied._is_built, copied._why_stage = False, False, ""
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
            self._clip.forget()
            self._reducer.zero_grad(set_to_none)
            for group in self.param_groups:
                with torch._C.DisableTorchFunctionSubclass():  # of parameters that are released
                    grads = list(map(attrgetter("grad"), group["params"]))
                for param, grad in zip(group["params"], grads, strict=True):
                    if grad is None:
                        continue
                    if set_to_none:
                        param.grad = None
                    elif not isinstance(grad, ShardedGrad):
                        if grad.grad_fn is not None:
                            grad.detach_()
                        with torch.no_grad():
                            grad.zero_()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the mean gradient in the next ``step()`` so that its global norm is at most ``max_norm``.

        All ranks must call; communicates. The gradients stay as they are until the update, or until another backward
        adds to them. In a world of one they are scaled at once, as torch does.

        Returns:
            The norm before clipping, a 0-dim tensor, equal on all ranks.
        """
        self._adopt_unfrozen()
        self._clip.settle()
        self._reducer.collect()
        if self._join_hook is not None:
            self._join_hook.announce(Operation.CLIP, [float(max_norm), float(norm_type)])
        norm = self._clip.fold(self.param_groups, max_norm, float(norm_type))
        if self._communicator.num_ranks == 1:
            self._clip.apply_alone(self.param_groups)
        return norm.to(self._tables.steps.device)

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
        with Phase("step"):
            self._take_step()
        return loss

    def _take_step(self) -> None:
        self._skip.report()
        self._adopt_unfrozen()
        check_settings(self.param_groups, self.config.state_dtype)
        self._reducer.take_back_replaced()
        self._clip.settle()
        self._reducer.collect()
        if self._join_hook is not None:
            self._join_hook.announce_step()
        self._stage.before_step()
        self.held.settle()
        self.held.take_edits()
        for average in self.held.averages:
            average.begin_new()
        with self._reducer.plain_gradients.steady():
            if self._is_step_allowed():
                self._update.run(self.param_groups, Factors(self._clip.coefficient, self._skip.found_inf))
        self._clip.after_step()
        self._skip.found_inf = None
        self._reducer.after_step()
        self._communicator.end_step()

    def _adopt_unfrozen(self) -> None:
        """Take charge of parameters that were frozen when the optimizer was built. All ranks unfreeze alike."""
        self._tenure.check_trainable()
        if self._builder.has_new_params(self.param_groups):
            self._builder.build(self.param_groups)
            self._after_new_buckets()

    def _is_step_allowed(self) -> bool:
        max_norm, is_skipping = self.config.max_grad_norm, self.config.skip_nonfinite
        if max_norm is None and not is_skipping:
            return True
        groups = self.param_groups
        norm = self._clip.global_norm(groups) if max_norm is None else self._clip.fold(groups, max_norm)
        return self._skip.allows(norm) if is_skipping else True

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
        return torch.device("cpu")

    @property
    def join_process_group(self) -> ProcessGroup | None:
        """The ranks that `Join` counts."""
        return self._communicator.control

    # ---- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state; never communicates.

        As in torch, with each moment cut to the part that this rank owns (8-bit ones as codes with their scales), the
        low halves of 16-bit masters (``low``), and a ``zero_shard`` entry that says which part it is. Loads into an
        optimizer of the same stage, world size and config; `full_state_dict` and `zero_shard.save` load anywhere.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self.held.take_edits()
        state_dict = pack_state(self.state, self._reducer.slots, self.param_groups, self._communicator)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

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
            self.held.load_groups(state_dict["param_groups"])
            self.held.settle()
            copy_state(loaded, self._reducer.slots, self._tables.steps)
            self.held.show_counted()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """Return what ``torch.optim.AdamW.state_dict()`` would be: full tensors on the CPU of rank 0, {} elsewhere.

        All ranks must call; communicates, one bucket at a time.
        """
        reducer = self._reducer
        self.held.take_edits()
        state = full_state(
            reducer.slots, reducer.buckets, self.param_groups, self._tables.steps, self._kernels, self._communicator
        )
        if self._communicator.rank != 0:
            return {}
        return {"state": state, "param_groups": pack_groups(self.param_groups)}

    @property
    def module(self) -> nn.Module | None:
        """The model, as it was given."""
        return self._builder.module

    def usage(self) -> Usage:
        """Return this rank's bytes: model state promised and held now, sent at the least and sent in the last step."""
        beside_nbytes = self._reducer.gradients.held_nbytes() + self._tables.steps.nbytes
        hops = [hop.num_ranks for hop in self._communicator.reduce_hops]
        return usage_of(self._reducer.buckets, self.config, hops, beside_nbytes, self._communicator.sent_in_step)
