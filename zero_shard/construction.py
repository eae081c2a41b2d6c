"""From parameter groups to buckets: names, checks, units, equal starting values."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from zero_shard.buffers import Bucket, Place, Storage, make_bucket
from zero_shard.collectives import Communicator
from zero_shard.config import ZeroConfig
from zero_shard.gathering import layer_of, widen
from zero_shard.groups import check_settings
from zero_shard.layout import capped_bucket_nbytes, piece_nbytes, split_into_buckets
from zero_shard.masters import home_of, keep_own
from zero_shard.module_names import plain_named_parameters, wrapped_params
from zero_shard.precision import Precision
from zero_shard.stages.base import Layer
from zero_shard.stages.materialize import check_buffers, materialize
from zero_shard.stages.parameters import ParameterSharding
from zero_shard.stages.reduction import Reducer
from zero_shard.stages.released import ReleasedParameter
from zero_shard.stages.units import TRAINABLE_DTYPES, find_units, stays_whole

_LOW_DTYPES = {torch.bfloat16: torch.int16, torch.float16: torch.float32}  # see docs/kernels.md
_SUM_CHUNK_NUMEL = 1 << 20
_SMALLEST_CODED_NUMEL = (
    4096  # 8 bits, moments or wire: smaller parameters (norms, biases) are sensitive and weigh nothing
)

NamedParam = tuple[str, nn.Parameter]


class Builder:
    """Makes the buckets of an optimizer, once at the start and again for parameters that come later."""

    def __init__(
        self,
        config: ZeroConfig,
        communicator: Communicator,
        stage: Layer,
        reducer: Reducer,
        module: nn.Module | None,
    ) -> None:
        self._config, self._communicator = config, communicator
        self._stage, self._reducer, self._module = stage, reducer, module
        self._names: dict[nn.Parameter, str] = {}
        self._known: set[int] = set()  # ids of parameters in a bucket or compared at the start
        self._bucketed: set[int] = set()
        self._seen: list[nn.Parameter] = []  # in the groups when `_waiting` was made
        self._waiting: list[nn.Parameter] = []  # those without a bucket
        self._num_shards = 0
        dtypes = config.param_dtypes
        self._precision = None if dtypes is None or module is None else Precision(dtypes, module)

    def copy(self, communicator: Communicator, stage: Layer, reducer: Reducer, memo: dict[int, Any]) -> Builder:
        """Return the builder of a deep copy: it knows the copies in ``memo``. Local."""
        copied = copy.copy(self)
        copied._communicator, copied._stage, copied._reducer = communicator, stage, reducer
        copied._module = memo.get(id(self._module))
        if self._precision is not None:
            copied._precision = None if copied._module is None else self._precision.copy(copied._module, memo)
        copied._names = {memo[id(param)]: name for param, name in self._names.items() if id(param) in memo}
        copied._known = {id(memo[param]) for param in self._known if param in memo}
        copied._bucketed = {id(memo[param]) for param in self._bucketed}
        copied._seen, copied._waiting = [], []
        return copied

    # ---- names and checks ----------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module | None:
        """The model, as it was given."""
        return self._module

    def named_params(self, groups: Sequence[dict[str, Any]]) -> list[NamedParam]:
        """Return every parameter that is taken charge of, with its name: those of the module first."""
        if not self._names and self._module is not None:
            self._names = {param: name for name, param in plain_named_parameters(self._module)}
        is_sharded = isinstance(self._stage, ParameterSharding)
        # Trainable parameters outside of the groups belong to somebody else; frozen ones are part of the computation.
        found = {
            param: name
            for param, name in self._names.items()
            if is_sharded or (not param.requires_grad and self._is_to_be_cast(param))
        }
        for number, group in enumerate(groups):
            given = group.get("param_names") or [None] * len(group["params"])
            for position, (param, name) in enumerate(zip(group["params"], given, strict=True)):
                default = name or f"param_groups[{number}]['params'][{position}]"
                found[param] = self._names.get(param, default)
        return [(name, param) for param, name in found.items()]

    def _is_to_be_cast(self, param: nn.Parameter) -> bool:
        """Whether this optimizer casts a parameter, or has: not those that another one has cast."""
        is_mine = id(param) in self._bucketed or home_of(param) is None
        return is_mine and self._cast_dtype(param) is not None

    def check(self, groups: Sequence[dict[str, Any]]) -> None:
        """Refuse what can't be sharded. Local.

        Raises:
            ValueError: Stage 3 or ``param_dtype`` without ``module``; overlapping parameters; ranks that ``shard_size``
                does not divide.
            NotImplementedError: A complex or non-floating parameter.
        """
        config, num_ranks = self._config, self._communicator.num_ranks
        if config.stage == 3 and self._module is None:
            raise ValueError("stage 3 needs the model: pass module=model beside the parameters, or choose stage 0 to 2")
        if config.param_dtype is not None and self._precision is None:
            raise ValueError("param_dtype needs the model: pass module=model beside the parameters, or leave it out")
        if config.shard_size is not None and num_ranks % config.shard_size:
            raise ValueError(f"shard_size must divide the {num_ranks} ranks, got {config.shard_size}")
        check_settings(groups, config.state_dtype)
        if self._precision is not None:
            self._precision.look()
        named = self.named_params(groups)
        if num_ranks > 1 or self._precision is not None:
            self.notice_wrappers(groups)
        for name, param in named:
            if isinstance(param, nn.UninitializedParameter):
                raise ValueError(f"parameter {name} has no shape yet (LazyModule); run a forward on all ranks before")
            self._check_free(name, param)
            _check_dtype(name, param)
            if self._precision is not None:
                self._precision.check(name, param)
            dtype = self._cast_dtype(param) or param.dtype
            if dtype == torch.float16 and config.master == "stochastic":
                raise ValueError(
                    f"parameter {name} has dtype {dtype}, and master='stochastic' rounds bfloat16 weights only; "
                    "use master='auto', or bfloat16"
                )
            has_plain_state = dtype == torch.float32 and config.state_dtype == torch.float32
            if config.kernels == "apex" and not has_plain_state:
                raise ValueError(
                    f"parameter {name} ({dtype}, state_dtype={config.state_dtype}) can't be updated by "
                    "kernels='apex', which takes float32 parameters with float32 moments; use kernels='auto'"
                )
            if param.layout != torch.strided:
                raise NotImplementedError(f"parameter {name} has layout {param.layout}, expected torch.strided")
            if param.is_meta and self._module is None and not self._communicator.is_rehearsing:
                raise ValueError(
                    f"parameter {name} is on the meta device; pass module=model so that it can be initialised"
                )
        _check_overlap([each for each in named if id(each[1]) not in self._bucketed])
        if isinstance(self._stage, ParameterSharding) and self._module is not None:
            find_units(self._module, config.units, self._bucket_nbytes(named))  # unknown class names raise here

    def _check_free(self, name: str, param: nn.Parameter) -> None:
        """Refuse a parameter that another optimizer shards at stage 3, or did until it was deleted."""
        former = layer_of(param)
        is_sharded = former is not self._stage and bool(getattr(former, "units", ()))
        if former is None and isinstance(param, ReleasedParameter):
            raise ValueError(
                f"parameter {name} was sharded by a zero_shard.AdamW (stage 3) that has been deleted, and its shards "
                "went with it; build the model anew and load a checkpoint"
            )
        if is_sharded:
            raise ValueError(
                f"parameter {name} is sharded by another zero_shard.AdamW (stage 3). To start anew on the same weights "
                "edit that one (optimizer.param_groups, optimizer.state.clear()), or zero_shard.save and load them in "
                "a new model; for several optimizers pass to each as module= only the part that it trains"
            )
        is_foreign = id(param) not in self._bucketed and home_of(param) is not None
        if is_foreign and self._precision is None and param.dtype != torch.float32:
            raise ValueError(
                f"parameter {name} is what another zero_shard.AdamW has cast to {param.dtype} by param_dtype, and the "
                "rest of its float32 value would be lost; pass param_dtype and module here, too, edit that optimizer "
                "(optimizer.param_groups, optimizer.state.clear()), or zero_shard.save and load into a new model"
            )

    def notice_wrappers(self, groups: Sequence[dict[str, Any]]) -> None:
        """Leave backward to DistributedDataParallel where it wraps the model. Local, equal on all ranks.

        Raises:
            ValueError: At stage 3, whose parameters it can't hold; a wrapped parameter is still to be cast.
        """
        named = self.named_params(groups)
        wrapped = wrapped_params({id(param): name for name, param in named})
        if not wrapped:
            return
        dtypes = {name: (param.dtype, self._cast_dtype(param) or param.dtype) for name, param in named}
        for name in wrapped:
            before, after = dtypes[name]
            if before != after:
                raise ValueError(
                    f"parameter {name} is {before} and would be cast to {after}, but belongs to a model wrapped in "
                    "DistributedDataParallel, whose buffers are made for the dtype that it was wrapped in; build the "
                    "optimizer first, then wrap, or do not wrap: zero_shard.AdamW averages gradients itself"
                )
        if self._communicator.num_ranks == 1:
            return
        if self._config.stage == 3:
            raise ValueError(
                f"parameter {wrapped[0]} belongs to a model wrapped in DistributedDataParallel, which needs whole "
                "parameters; at stage 3 do not wrap it: zero_shard.AdamW averages gradients itself"
            )
        self._reducer.stand_back(wrapped[0])

    def has_new_params(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Whether a parameter of the groups has no bucket yet though it trains. Local, equal on all ranks."""
        params = list(chain.from_iterable(group["params"] for group in groups))
        if len(params) != len(self._seen) or not all(map(is_, params, self._seen)):
            self._waiting = [param for param in params if id(param) not in self._bucketed]
            self._seen = params
        return any(param.requires_grad for param in self._waiting)

    def _bucket_nbytes(self, named: Sequence[NamedParam]) -> int:
        total = sum(self._nbytes(param) for _, param in named)
        return capped_bucket_nbytes(self._config.bucket_mib, total)

    def _nbytes(self, param: nn.Parameter) -> int:
        return param.numel() * (self._cast_dtype(param) or param.dtype).itemsize

    def _cast_dtype(self, param: nn.Parameter) -> torch.dtype | None:
        return None if self._precision is None else self._precision.dtype_of(param)

    # ---- building ------------------------------------------------------------------------------------------

    def build(self, groups: Sequence[dict[str, Any]]) -> None:
        """Make buckets for all parameters that have none and train. All ranks call; communicates."""
        is_first = self._num_shards == 0
        if is_first:
            limit = self._config.shard_size or self._communicator.num_ranks
            self._num_shards = self._stage.num_shards(limit)
            self._communicator.split(self._num_shards)
        named = self.named_params(groups)
        missing = [each for each in named if id(each[1]) not in self._bucketed and not stays_whole(each[1])]
        for name, param in missing:
            _check_dtype(name, param)  # may have been frozen at the start
        widen([param for _, param in missing])
        nbytes = self._bucket_nbytes(named)
        if is_first and isinstance(self._stage, ParameterSharding) and self._num_shards > 1:
            self._build_units(self._stage, nbytes)
        elif is_first and self._module is not None:
            self._materialize(self._module, list(self._module.parameters()))
        self._build_buckets([each for each in missing if id(each[1]) not in self._bucketed], nbytes)
        self._settle_rest(named)
        if self._precision is not None:
            self._precision.attach()
        self._known.update(id(param) for _, param in named)
        self._seen = []

    def _build_units(self, stage: ParameterSharding, nbytes: int) -> None:
        assert self._module is not None
        for plan in find_units(self._module, self._config.units, nbytes):
            self._materialize(self._module, [param for _, param in plan.params])
            buckets = [self._make(named) for named in self._by_kind(plan.params)]
            stage.add_unit(plan.name or "the rest of the model", plan.modules, buckets)
        stage.attach(self._module, self._reducer)

    def _materialize(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        if not self._communicator.is_rehearsing:  # else everything stays on the meta device
            materialize(module, params, _default_device(module))

    def _build_buckets(self, named: Sequence[NamedParam], nbytes: int) -> None:
        buckets: list[list[NamedParam]] = []
        if named:
            self._reducer.exchanges.expect(nbytes)
        is_native = self._communicator.is_native
        if not is_native:  # see Note [Exchanges in flight]
            nbytes = piece_nbytes(nbytes)
        for kind in self._by_kind(list(reversed(named))):
            sizes = [self._nbytes(param) for _, param in kind]
            buckets += [[kind[i] for i in each] for each in split_into_buckets(sizes, nbytes, not is_native)]
        for bucket in reversed(buckets):  # the reducer puts each new one first
            self._make(bucket)

    def _make(self, named: Sequence[NamedParam]) -> Bucket:
        """Move parameters into a new bucket with equal values on all ranks."""
        replicas = self._communicator.replicas
        place = Place(self._num_shards, self._communicator.shards.rank, replicas.num_ranks, replicas.rank)
        params, names = [param for _, param in named], [name for name, _ in named]
        bucket = make_bucket(params, names, len(self._reducer.slots), place, self._storage(params[0]))
        is_new = any(id(param) not in self._known for param in params)
        if is_new and self._config.sync_module_states:
            for flat in (bucket.full, bucket.low):
                if flat is not None:
                    wire = flat.view(torch.uint8) if flat.dtype == torch.int16 else flat  # backends know no int16
                    self._communicator.broadcast_(wire, f"the parameters of rank 0 ({names[0]} ...)")
        elif is_new:
            self._compare([(name, view) for name, view in zip(names, bucket.views, strict=True)])
            if bucket.low is not None:
                slots = zip(names, bucket.layout.slots, strict=True)
                self._compare([(name, bucket.low[start : start + numel]) for name, (start, numel) in slots])
        keep_own(bucket)
        self._reducer.add_bucket(bucket)
        self._bucketed.update(id(param) for param in params)
        return bucket

    def _by_kind(self, named: Iterable[NamedParam]) -> list[list[NamedParam]]:
        """Group parameters by what a bucket must have in common."""
        kinds: dict[Any, list[NamedParam]] = {}
        for name, param in named:
            kind = (self._cast_dtype(param) or param.dtype, param.device, param.requires_grad, self._storage(param))
            kinds.setdefault(kind, []).append((name, param))
        return list(kinds.values())

    def _storage(self, param: nn.Parameter) -> Storage:
        """Return how a parameter and its optimizer state are stored."""
        cast_dtype = self._cast_dtype(param)
        dtype = cast_dtype or param.dtype
        if dtype == torch.float64:
            return Storage(torch.float64, torch.float64)
        moment_dtype, master = self._config.state_dtype, self._config.master
        wire_dtype = self._config.reduce_dtype or dtype
        if param.numel() < _SMALLEST_CODED_NUMEL:
            moment_dtype = torch.float32 if moment_dtype == torch.int8 else moment_dtype
            wire_dtype = dtype if wire_dtype == torch.int8 else wire_dtype
        low_dtype = _LOW_DTYPES.get(dtype) if master == "auto" else None
        is_stochastic = master == "stochastic" and dtype == torch.bfloat16
        return Storage(moment_dtype, wire_dtype, low_dtype, is_stochastic, cast_dtype)

    def _settle_rest(self, named: Sequence[NamedParam]) -> None:
        """Make what is in no bucket equal on all ranks: frozen parameters, those outside the groups, buffers."""
        settled = self._bucketed | self._known  # once: of 20,000 parameters, a union for each takes seconds
        tensors = [(name, param.data) for name, param in named if id(param) not in settled]
        if self._module is not None and not self._known:
            taken = self._bucketed | {id(param) for _, param in named}
            others = [(n, p) for n, p in plain_named_parameters(self._module) if id(p) not in taken]
            if not self._communicator.is_rehearsing:
                check_buffers(self._module)
            tensors += [(name, param.data) for name, param in others]
            tensors += list(self._module.named_buffers())
        if not self._config.sync_module_states:
            self._compare(tensors)
            return
        for name, tensor in tensors:
            flat = tensor.reshape(-1)  # a copy where the tensor is not contiguous
            wire = flat if tensor.dtype in TRAINABLE_DTYPES else flat.view(torch.uint8)  # backends know few dtypes
            self._communicator.broadcast_(wire, f"{name} of rank 0")
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))

    def _compare(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Raise on all ranks, with the name, if a tensor differs from rank to rank. All ranks call."""
        if not tensors or self._communicator.num_ranks == 1:
            return
        sums = torch.tensor([_checksum(tensor) for _, tensor in tensors], dtype=torch.int64)
        lowest = self._communicator.agree(sums.clone(), "min", "the comparison of weights")
        highest = self._communicator.agree(sums.clone(), "max", "the comparison of weights")
        for (name, _), low, high in zip(tensors, lowest.tolist(), highest.tolist(), strict=True):
            if low != high:
                raise ValueError(
                    f"ranks start with different values of {name}, and sync_module_states is false; "
                    "load or seed them alike, or set sync_module_states = true to take those of rank 0"
                )


def _check_dtype(name: str, param: nn.Parameter) -> None:
    if not stays_whole(param) and param.dtype not in TRAINABLE_DTYPES:
        raise NotImplementedError(
            f"parameter {name} has dtype {param.dtype}, expected one of float32, float64, bfloat16, float16; "
            "keep it out of the optimizer, or store a complex parameter as two real ones (torch.view_as_real)"
        )


def _default_device(module: nn.Module) -> torch.device:
    """Where meta parameters come to life: beside the model's real ones, else on the GPU of this rank, else the CPU."""
    for tensor in _tensors_of(module):
        if not tensor.is_meta:
            return tensor.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _checksum(tensor: Tensor) -> int:
    """A 64-bit sum over the bytes of a tensor, weighted by position."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    total = 0
    for number, chunk in enumerate(raw.split(_SUM_CHUNK_NUMEL)):
        weights = torch.arange(1, chunk.numel() + 1, dtype=torch.int64)
        total = (total * 31 + number + int((chunk.to(torch.int64) * weights).sum())) % (2**62)
    return total


def _check_overlap(named: Sequence[NamedParam]) -> None:
    """Refuse different parameters that share memory: moving them into buckets would untie them silently."""
    spans = []
    for name, param in named:
        if param.is_meta or param.numel() == 0:
            continue
        last = sum((length - 1) * step for length, step in zip(param.shape, param.stride(), strict=True))
        start = param.data_ptr()
        spans.append((start, start + (last + 1) * param.element_size(), name))
    spans.sort()
    for (_, stop, first), (start, _, second) in pairwise(spans):
        if start < stop:
            raise ValueError(
                f"parameters {first} and {second} share memory but are different Parameter objects; tie them by using "
                "the same Parameter twice"
            )
