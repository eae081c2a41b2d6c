"""Cases of ``adamw_``: every scheme of storage, against the update in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero_shard.number_formats import join_remainder, split_remainder
from zero_shard.selfcheck.case import Case, Expected, Results
from zero_shard.selfcheck.inputs import BLOCK_NUMEL, WEIGHT_STEP, normal, segments

_CODE_STEP = 1.0 / 63  # of a block's largest value; the levels lie 257 / 16384 apart at the most
_HYPER = [
    # lr, beta1, beta2, eps, weight_decay, is_amsgrad, is_maximize
    [1e-2, 0.9, 0.999, 1e-8, 0.1, 0.0, 0.0],
    [3e-3, 0.4, 0.95, 1e-6, 0.0, 0.0, 1.0],
    [1e-2, 0.0, 0.5, 1e-8, 0.01, 0.0, 0.0],
]
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class _Scheme(NamedTuple):
    """How weight, gradient and moments are stored."""

    name: str
    param: torch.dtype
    low: torch.dtype | None = None
    moment: torch.dtype = torch.float32
    grad: torch.dtype = torch.float32
    is_stochastic: bool = False
    is_amsgrad: bool = False


_SCHEMES = (
    _Scheme("float32", torch.float32),
    _Scheme("float32, amsgrad", torch.float32, is_amsgrad=True),
    _Scheme("float32, bfloat16 moments", torch.float32, moment=torch.bfloat16),
    _Scheme("float32, 8-bit moments", torch.float32, moment=torch.int8),
    _Scheme("float64", torch.float64, moment=torch.float64, grad=torch.float64),
    _Scheme("float64, amsgrad", torch.float64, moment=torch.float64, grad=torch.float64, is_amsgrad=True),
    _Scheme("bfloat16, remainder", torch.bfloat16, torch.int16),
    _Scheme("bfloat16, remainder, bfloat16 gradient", torch.bfloat16, torch.int16, grad=torch.bfloat16),
    _Scheme("bfloat16, remainder, bfloat16 moments", torch.bfloat16, torch.int16, torch.bfloat16, is_amsgrad=True),
    _Scheme("bfloat16, remainder, 8-bit moments", torch.bfloat16, torch.int16, torch.int8, torch.bfloat16),
    _Scheme("bfloat16, rounded", torch.bfloat16),
    _Scheme("bfloat16, stochastic", torch.bfloat16, is_stochastic=True),
    _Scheme("bfloat16, stochastic, 8-bit moments", torch.bfloat16, moment=torch.int8, is_stochastic=True),
    _Scheme("float16, master", torch.float16, torch.float32),
    _Scheme("float16, master, float16 gradient", torch.float16, torch.float32, grad=torch.float16),
    _Scheme("float16, rounded, 8-bit moments", torch.float16, moment=torch.int8),
)


def cases(numel: int, is_special: bool) -> Iterator[Case]:
    """Update under every scheme, and skip one update."""
    for scheme in _SCHEMES:
        yield _adamw_case(scheme, numel, is_special)
    yield _skipped_case(numel)


class _Shard(NamedTuple):
    """Optimizer state of a shard as it is stored; also as results."""

    param: Tensor
    low: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    exp_avg_scale: Tensor | None
    exp_avg_sq_scale: Tensor | None

    @classmethod
    def of(cls, results: Results) -> _Shard:
        return cls(*(results.get(name) for name in cls._fields))  # type: ignore[arg-type]

    def master(self) -> Tensor:
        """The weight in float64, with all the bits that it has."""
        if self.low is None:
            return self.param.double()
        return (join_remainder(self.param, self.low) if self.low.dtype == torch.int16 else self.low).double()

    def moment(self, name: str) -> Tensor:
        """A moment in float64."""
        codes: Tensor = getattr(self, name)
        scales: Tensor | None = getattr(self, f"{name}_scale", None)
        if scales is None:
            return codes.double()
        # See Note [Block codec]: code k > 0 is level k + 1.
        magnitude = codes.double().abs()
        level = torch.where(magnitude == 0, 0.0, magnitude + 1)
        share = (level / 128) ** 2 if codes.dtype == torch.int8 else (level / 256) ** 4
        return share * codes.double().sign() * _spread(scales, codes.numel()).double()


def _spread(scales: Tensor, numel: int) -> Tensor:
    return scales.repeat_interleave(BLOCK_NUMEL)[:numel]


def _make_shard(scheme: _Scheme, numel: int, is_special: bool) -> _Shard:
    param, low = normal(numel, scheme.param, 1, is_special), None
    if scheme.low == torch.int16:
        param, low = split_remainder(normal(numel, torch.float32, 1, is_special))
    elif scheme.low is not None:
        low = normal(numel, scheme.low, 1, is_special)
        param = low.to(scheme.param)
    if scheme.moment == torch.int8:
        random = torch.Generator().manual_seed(numel)
        num_blocks = -(-numel // BLOCK_NUMEL)
        codes = torch.randint(-127, 128, (numel,), generator=random).to(torch.int8)
        square_codes = torch.randint(0, 256, (numel,), generator=random).to(torch.uint8)
        scales = [normal(num_blocks, torch.float32, seed).abs() for seed in (2, 3)]
        return _Shard(param, low, codes, square_codes, None, *scales)
    exp_avg = normal(numel, scheme.moment, 2, is_special)
    square = normal(numel, scheme.moment, 3, is_special).abs()
    largest = normal(numel, scheme.moment, 4, is_special).abs() if scheme.is_amsgrad else None
    return _Shard(param, low, exp_avg, square, largest, None, None)


def _adamw_case(scheme: _Scheme, numel: int, is_special: bool) -> Case:
    shard = _make_shard(scheme, numel, is_special)
    table = segments(numel, BLOCK_NUMEL if scheme.moment == torch.int8 else 1)
    grad, cut = normal(numel, scheme.grad, 5, is_special), table[2][0]
    steps, is_active, groups = [1.0, 7.0, 1000.0, 1e6], [1, 1, 0, 1], [0, 1, 0, 2]
    hyper = [[*row[:5], float(scheme.is_amsgrad), row[6]] for row in _HYPER]
    scale = 0.3
    arguments = (
        *(shard.param, shard.low, [grad[:cut], grad[cut:], grad[:0]], [0, cut, numel]),
        *(shard.exp_avg, shard.exp_avg_sq, shard.max_exp_avg_sq, shard.exp_avg_scale, shard.exp_avg_sq_scale),
        *(torch.tensor(table), torch.tensor(steps), torch.tensor(is_active, dtype=torch.uint8)),
        *(torch.tensor(groups, dtype=torch.int32), torch.tensor([3, 1, 4, 15]), torch.tensor(hyper).double()),
        *(torch.tensor(scale), torch.tensor(0.0), scheme.is_stochastic),
    )
    positions = {"param": 0, "low": 1, "exp_avg": 4, "exp_avg_sq": 5, "max_exp_avg_sq": 6}
    positions |= {"exp_avg_scale": 7, "exp_avg_sq_scale": 8}
    outputs = {name: position for name, position in positions.items() if arguments[position] is not None}
    if is_special:
        return Case("adamw_", scheme.name, arguments, outputs)
    rows = [
        (slice(start, start + count), torch.tensor(hyper[groups[slot]]).double().tolist(), steps[slot])
        for start, count, slot, _ in table
        if is_active[slot]
    ]
    expected = _expected_step(scheme, shard, grad.double() * arguments[-3].double(), rows)
    # A block's codes are compared in units of its largest value.
    units = {name: _largest_of_blocks(each.values) for name, each in expected.items() if not each.is_relative}

    def read(results: Results) -> Results:
        after = _Shard.of(results)
        values = {"weight": after.master(), "param": after.param.double()}
        for name in expected:
            if name not in values:
                values[name] = after.moment(name)
        return {name: each / units[name] if name in units else each for name, each in values.items()}

    scaled = {name: each._replace(values=each.values / units.get(name, 1.0)) for name, each in expected.items()}
    return Case("adamw_", scheme.name, arguments, outputs, scaled, read)


def _skipped_case(numel: int) -> Case:
    """Nothing changes where a gradient was not finite."""
    case = _adamw_case(_SCHEMES[0], numel, False)
    *arguments, _, is_stochastic = case.arguments
    arguments += [torch.tensor(math.nan), is_stochastic]
    before = {name: arguments[position].double() for name, position in case.outputs.items()}
    expected = {name: Expected(values, 0.0) for name, values in before.items()}
    return Case("adamw_", "float32, skipped", tuple(arguments), case.outputs, expected)


def _largest_of_blocks(values: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(values.abs(), (0, -values.numel() % BLOCK_NUMEL))
    return _spread(padded.view(-1, BLOCK_NUMEL).amax(1).clamp(min=1e-30), values.numel())


def _expected_step(
    scheme: _Scheme, shard: _Shard, grad: Tensor, rows: Sequence[tuple[slice, list[float], float]]
) -> dict[str, Expected]:
    """Return the update of arXiv:1711.05101, algorithm 2, in float64, written from the paper."""
    # Clones, because float64 state is its own float64 copy.
    weight, exp_avg, exp_avg_sq = (each.clone() for each in (shard.master(), *map(shard.moment, _MOMENTS[:2])))
    largest = None if shard.max_exp_avg_sq is None else shard.max_exp_avg_sq.double().clone()
    for at, (lr, beta1, beta2, eps, decay, _, is_maximize), step in rows:
        gradient = -grad[at] if is_maximize else grad[at]
        exp_avg[at] = beta1 * exp_avg[at] + (1 - beta1) * gradient
        exp_avg_sq[at] = beta2 * exp_avg_sq[at] + (1 - beta2) * gradient**2
        square = exp_avg_sq[at]
        if largest is not None:
            square = largest[at] = torch.maximum(largest[at], square)
        denom = (square / (1 - beta2**step)).sqrt() + eps
        weight[at] = weight[at] * (1 - lr * decay) - lr * exp_avg[at] / (1 - beta1**step) / denom
    stored = scheme.param if scheme.low is None else torch.float32
    share = 1.0 if scheme.is_stochastic else 0.51
    compute_limit = 16 * WEIGHT_STEP[torch.float64 if scheme.param == torch.float64 else torch.float32]
    expected = {"weight": Expected(weight, share * WEIGHT_STEP[stored] + compute_limit)}
    # With a master, the weight of the model is the rounded one; that the last place is right, its bits show.
    steps = share if scheme.low is None else 2.0
    expected["param"] = Expected(weight, steps * WEIGHT_STEP[scheme.param] + compute_limit)
    for name, values in zip(_MOMENTS, (exp_avg, exp_avg_sq, largest), strict=True):
        if values is None:
            continue
        is_code = scheme.moment == torch.int8
        limit = _CODE_STEP if is_code else 0.51 * WEIGHT_STEP[scheme.moment] + compute_limit
        expected[name] = Expected(values, limit, is_relative=not is_code)
    return expected
