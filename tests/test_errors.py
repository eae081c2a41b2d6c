"""Promises 5 and 6: no silent wrong number, no silent hang. Every error says what, where, and what to do instead."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_shard

every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def _net(**kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6, **kwargs), nn.Tanh(), nn.Linear(6, 2, **kwargs))


def _build(model: nn.Module, stage: int, **hyper: Any) -> zero_shard.AdamW:
    return zero_shard.AdamW(model.parameters(), module=model, config={"stage": stage}, **hyper)


# --- reading a released parameter ---


def _iadd(p: nn.Parameter) -> None:
    with torch.no_grad():
        p += 1


def _set_item(p: nn.Parameter) -> None:
    with torch.no_grad():
        p[0] = 1


def _copy_into(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.copy_(torch.ones(6, 4))


_READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "add": lambda p: p + 1,
    "reflected add": lambda p: 1 + p,
    "matmul": lambda p: torch.ones(4) @ p.t(),
    "linear": lambda p: nn.functional.linear(torch.ones(4), p),
    "torch function": lambda p: torch.sum(p),
    "list argument": lambda p: torch.cat([torch.ones(6, 4), p]),
    "stack": lambda p: torch.stack([p, p]),
    "method": lambda p: p.mean(),
    "norm": lambda p: p.norm(),
    "compare": lambda p: p == 1,
    "allclose": lambda p: torch.allclose(p, torch.zeros(6, 4)),
    "equal": lambda p: torch.equal(torch.zeros(6, 4), p),
    "isnan": lambda p: p.isnan(),
    "numpy": lambda p: p.detach().numpy(),
    "array": lambda p: __import__("numpy").asarray(p),
    "item": lambda p: p.item(),
    "float": lambda p: float(p),
    "bool": lambda p: bool(p),
    "tolist": lambda p: p.tolist(),
    "data": lambda p: p.data,
    "set data": lambda p: setattr(p, "data", torch.ones(6, 4)),
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "view": lambda p: p.view(-1),
    "transpose": lambda p: p.t(),
    "T": lambda p: p.T,
    "index": lambda p: p[0],
    "index list": lambda p: p[[0, 1]],
    "iterate": lambda p: list(p),
    "to dtype": lambda p: p.to(torch.float64),
    "half": lambda p: p.half(),
    "copy from": lambda p: torch.empty(6, 4).copy_(p),
    "copy into": _copy_into,
    "in place": _iadd,
    "set item": _set_item,
    "fill": lambda p: nn.init.zeros_(p),
    "init": lambda p: nn.init.kaiming_uniform_(p),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "new parameter": lambda p: nn.Parameter(p),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "out": lambda p: torch.add(torch.ones(6, 4), 1, out=p),
    "dlpack": lambda p: p.__dlpack__(),
    "from_dlpack": lambda p: torch.from_dlpack(p),
}
# What reads one parameter after the other names the first.
_MODULE_READS: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda m: m.state_dict(),
    "load_state_dict": lambda m: m.load_state_dict(_net().state_dict()),
    "deepcopy of the model": copy.deepcopy,
    "pickle of the model": pickle.dumps,
    "model.to": lambda m: m.to(torch.float64),
    "functional_call": lambda m: (
        torch.func.functional_call(m, {"2.bias": torch.ones(2)}, torch.ones(1, 4)) * m[0].weight
    ),
}
_METADATA: dict[str, Callable[[nn.Parameter], Any]] = {
    "shape": lambda p: tuple(p.shape),
    "size": lambda p: (tuple(p.size()), p.size(0)),
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device,
    "numel": lambda p: (p.numel(), p.nelement(), torch.numel(p)),
    "stride": lambda p: (p.stride(), p.stride(0)),
    "is_contiguous": lambda p: p.is_contiguous(),
    "dim": lambda p: (p.dim(), p.ndim),
    "len": len,
    "requires_grad": lambda p: p.requires_grad,
    "is_leaf": lambda p: p.is_leaf,
    "grad": lambda p: p.grad is None,
    "grad_fn": lambda p: p.grad_fn,
    "layout": lambda p: p.layout,
    "element_size": lambda p: (p.element_size(), p.itemsize, p.nbytes),
    "is_floating_point": lambda p: (p.is_floating_point(), torch.is_floating_point(p), p.is_complex()),
    "is_cuda": lambda p: (p.is_cuda, p.is_meta, p.is_sparse),
    "isinstance": lambda p: (isinstance(p, nn.Parameter), isinstance(p, Tensor), torch.is_tensor(p)),
    "hash": lambda p: hash(p) == id(p) or hash(p) != 0,
    "in": lambda p: (p in {p}, {p: 1}[p]),
}


def _read_released(uses_gradients: bool) -> tuple[dict[str, str], dict[str, tuple[Any, Any]]]:
    """Return the error text of each read, "" for none, and the metadata of a released and a plain parameter."""
    model, plain = _net(), _net()
    optimizer = _build(model, 3)
    if uses_gradients:
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    texts = {}
    reads = {name: lambda read=read: read(model[0].weight) for name, read in _READS.items()}
    reads |= {name: lambda read=read: read(model) for name, read in _MODULE_READS.items()}
    for name, read in reads.items():
        texts[name] = ""
        try:
            read()
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"
    metadata = {name: (read(model[0].weight), read(plain[0].weight)) for name, read in _METADATA.items()}
    assert "0.weight" in repr(model[0].weight) and "(6, 4)" in str(model[0].weight)
    assert "Linear(in_features=4" in repr(model)
    with torch._C.DisableTorchFunctionSubclass():  # what C++ code sees that asks no Python
        assert bool(model[0].weight.detach().isnan().all())
    model(torch.ones(3, 4)).sum().backward()  # nothing of all that has done harm
    optimizer.step()
    with zero_shard.gathered(model):
        assert all(bool(param.isfinite().all()) for param in model.parameters())
    return texts, metadata


@pytest.mark.parametrize("uses_gradients", [False, True])
def test_reading_a_released_parameter_raises_with_its_name_and_the_remedy(uses_gradients: bool) -> None:
    for texts, _ in ranks.run(2, _read_released, uses_gradients):
        silent = [name for name, text in texts.items() if not text]
        assert not silent, f"these gave something for a released parameter: {silent}"
        for name, text in texts.items():
            assert text.startswith("RuntimeError"), f"{name}: {text}"
            assert "0.weight" in text and "zero_shard.gathered" in text, f"{name}: {text}"


def test_metadata_of_a_released_parameter_are_those_of_the_parameter() -> None:
    for _, metadata in ranks.run(2, _read_released, True):
        for name, (released, plain) in metadata.items():
            assert released == plain, name


def _read_when_whole() -> None:
    model = _net()
    optimizer = _build(model, 3)
    with zero_shard.gathered(model):
        assert type(model[0].weight) is nn.Parameter
        torch.testing.assert_close(model[0].weight.detach(), _net()[0].weight.detach(), rtol=0, atol=0)
        state = model.state_dict()
        copied = copy.deepcopy(model[0].weight)
    assert torch.equal(copied, _net()[0].weight)
    assert state["0.weight"].shape == (6, 4)
    with pytest.raises(RuntimeError, match=r"0\.weight.*gathered"):
        model[0].weight.sum()
    optimizer.zero_grad()


def test_a_gathered_parameter_is_an_ordinary_one() -> None:
    ranks.run(2, _read_when_whole)


# --- reading a sharded gradient ---

_UNSUPPORTED: dict[str, Callable[[Any], Any]] = {
    "add_ into a plain tensor": lambda g: torch.ones(6, 4).add_(g),
    "another shape": lambda g: g + torch.ones(2, 6, 4),
    "sum along a dimension": lambda g: g.sum(0),
    "median": lambda g: g.median(),
    "index": lambda g: g[0],
    "view": lambda g: g.view(-1),
    "numpy": lambda g: g.numpy(),
    "tolist": lambda g: g.tolist(),
    "copy_ from": lambda g: torch.empty(6, 4).copy_(g),
    "cat": lambda g: torch.cat([g, g]),
    "foreach into plain tensors": lambda g: torch._foreach_copy_([torch.empty(6, 4)], [g]),
    "foreach norm beside plain tensors": lambda g: torch._foreach_norm([g, torch.empty(6, 4)]),
    "to another device": lambda g: g.to("meta"),
    "norm along a dimension": lambda g: torch.linalg.vector_norm(g, dim=0),
    "pickle": pickle.dumps,
}


def _read_gradients(stage: int) -> dict[str, str]:
    model = _net()
    optimizer = _build(model, stage)
    model(torch.ones(3, 4)).sum().backward()
    grad = model[0].weight.grad
    assert isinstance(grad, zero_shard.ShardedGrad)
    assert (grad.shape, grad.dtype, grad.device) == ((6, 4), torch.float32, torch.device("cpu"))
    assert "ShardedGrad" in repr(grad)
    texts = {}
    for name, read in _UNSUPPORTED.items():
        texts[name] = ""
        try:
            read(grad)
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"
    optimizer.step()
    return texts


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_sharded_gradient_raises_with_its_name_where_it_can_not_answer(stage: int) -> None:
    for texts in ranks.run(2, _read_gradients, stage):
        silent = [name for name, text in texts.items() if not text]
        assert not silent, f"these gave something for a sharded gradient: {silent}"
        for name, text in texts.items():
            if name in ("numpy", "tolist"):  # torch itself refuses these for any subclass, before asking it
                assert "subclass" in text, f"{name}: {text}"
                continue
            assert "0.weight" in text and ("full()" in text or "grad.part" in text), f"{name}: {text}"


# --- what is refused at construction ---


class _Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        base = torch.ones(10)
        self.first, self.second = nn.Parameter(base[:6]), nn.Parameter(base[4:])


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.eye(3).to_sparse())


def _refused() -> dict[str, str]:
    attempts: dict[str, Callable[[int], Any]] = {
        "overlap": lambda stage: _build(_Overlapping(), stage),
        "complex": lambda stage: _build(_Complex(), stage),
        "sparse": lambda stage: _build(_Sparse(), stage),
        "no module": lambda stage: zero_shard.AdamW(_net().parameters(), config={"stage": 3}),
        "unit": lambda stage: zero_shard.AdamW(
            (m := _net()).parameters(), module=m, config={"stage": 3, "units": ["Linaer"]}
        ),
        "empty": lambda stage: zero_shard.AdamW([], config={"stage": stage % 3}),
        "differentiable": lambda stage: _build(_net(), stage, differentiable=True),
        "meta without module": lambda stage: zero_shard.AdamW(
            _net(device="meta").parameters(), config={"stage": stage % 3}
        ),
    }
    texts = {}
    for name, attempt in attempts.items():
        for stage in range(4):
            try:
                attempt(stage)
                texts[f"{name} {stage}"] = ""
            except Exception as error:
                texts[f"{name} {stage}"] = f"{type(error).__name__}: {error}"
    return texts


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_can_not_be_sharded_is_refused_by_name(world_size: int) -> None:
    expected = {
        "overlap": ["ValueError", "first", "second", "share memory"],
        "complex": ["NotImplementedError", "phase", "complex64", "view_as_real"],
        "sparse": ["NotImplementedError", "table", "sparse"],
        "no module": ["ValueError", "stage 3", "module=model"],
        "unit": ["ValueError", "Linaer", "Linear"],
        "empty": ["ValueError", "empty parameter list"],
        "differentiable": ["NotImplementedError", "differentiable"],
        "meta without module": ["ValueError", "param_groups[0]['params'][0]", "meta", "module=model"],
    }
    for texts in ranks.run(world_size, _refused):
        for name, text in texts.items():
            for word in expected[name.rsplit(" ", 1)[0]]:
                assert word in text, f"{name}: {text!r} lacks {word!r}"


class _SparseUse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


def _sparse_gradient(stage: int) -> None:
    model = _SparseUse()
    optimizer = _build(model, stage)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()


@every_stage
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sparse_gradient_is_refused_by_name(stage: int, world_size: int) -> None:
    for error in ranks.run_expecting_errors(world_size, _sparse_gradient, stage):
        assert isinstance(error, RuntimeError), repr(error)
        assert "table.weight" in str(error) and "sparse" in str(error), str(error)


# --- ranks that differ ---


class _Named(nn.Module):
    """Parameters of the given names in the given order."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Parameter(torch.ones(4)))


def _differing(rank: int) -> dict[str, Callable[[int], Any]]:
    odd = rank == 1
    return {
        "shape": lambda stage: _build(nn.Linear(4, 3 + odd), stage),
        "one parameter more": lambda stage: _build(nn.Linear(4, 3, bias=odd), stage),
        "dtype": lambda stage: _build(nn.Linear(4, 3).to(torch.float64 if odd else torch.float32), stage),
        "order": lambda stage: _build(_Named(["a", "b"][:: -1 if odd else 1]), stage),
        "name": lambda stage: _build(_Named(["a", "c" if odd else "b"]), stage),
        "frozen": lambda stage: _build(_net().requires_grad_(not odd), stage),
        "lr": lambda stage: _build(_net(), stage, lr=0.1 + odd),
        "betas": lambda stage: _build(_net(), stage, betas=(0.9, 0.99 if odd else 0.999)),
        "weight_decay": lambda stage: _build(_net(), stage, weight_decay=0.1 * odd),
        "amsgrad": lambda stage: _build(_net(), stage, amsgrad=odd),
        "error on rank 1": lambda stage: _build(_Complex() if odd else _net(), stage),
    }


def _differ() -> dict[str, tuple[str, float]]:
    results = {}
    for name, attempt in _differing(dist.get_rank()).items():
        for stage in range(4):
            start = time.monotonic()
            try:
                attempt(stage)
                text = ""
            except Exception as error:
                text = str(error)
            results[f"{name} {stage}"] = (text, time.monotonic() - start)
    return results


def test_ranks_that_differ_all_raise_with_the_name_within_seconds() -> None:
    expected = {
        "shape": ["weight", "(3, 4)", "(4, 4)", "rank 0", "rank 1"],
        "one parameter more": ["bias", "missing"],
        "dtype": ["weight", "float32", "float64"],
        "order": ["order", "a, b", "b, a"],
        "name": ["parameter b", "missing"],
        "frozen": ["0.weight", "frozen", "trainable"],
        "lr": ["param_groups[0]", "0.1", "1.1"],
        "betas": ["param_groups[0]", "0.999", "0.99)"],
        "weight_decay": ["weight_decay"],
        "amsgrad": ["amsgrad"],
        "error on rank 1": ["phase"],
    }
    for results in ranks.run(2, _differ):
        for name, (text, time_s) in results.items():
            for word in expected[name.rsplit(" ", 1)[0]]:
                assert word in text, f"{name}: {text!r} lacks {word!r}"
            assert time_s < 5, f"{name}: {time_s:.1f} s"


# --- NaN ---


def _nan_on_one_rank(stage: int) -> list[tuple[bool, bool, float]]:
    """Return for each step whether all weights are NaN, whether the first moments are, and the norm."""
    seen = []
    model = _net()
    optimizer = _build(model, stage)
    for step in range(2):
        optimizer.zero_grad()
        scale = float("nan") if step == 1 and dist.get_rank() == 1 else 1.0
        (model(torch.ones(2, 4)).sum() * scale).backward()
        norm = optimizer.clip_grad_norm_(1e9).item()
        optimizer.step()
        with zero_shard.gathered(model):
            weights = torch.cat([param.detach().flatten() for param in model.parameters()])
        moments = torch.cat([torch.zeros(0), *(state["exp_avg"].flatten() for state in optimizer.state.values())])
        seen.append((bool(weights.isnan().all()), bool(moments.isnan().all()), norm))
    return seen


@every_stage
def test_nan_on_one_rank_reaches_all_of_them(stage: int) -> None:
    for first, second in ranks.run(2, _nan_on_one_rank, stage):
        assert first[:2] == (False, False) and first[2] > 0
        assert second[:2] == (True, True) and second[2] != second[2]
