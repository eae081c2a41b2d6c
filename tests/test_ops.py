"""The operators as torch sees them, and which form of them is chosen."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from op_cases import each_form, make_step, native, needs_native
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero_shard import apex_kernels, ops, twins

OP_NAMES = ("flatten_", "unflatten_", "quantize_", "reduce_slices_", "sum_squares_", "sum_pairs_", "adamw_")


@needs_native
@pytest.mark.parametrize("scheme", ["fp32", "fp64", "bf16_remainder", "fp16_master_int8", "bf16_stochastic_int8"])
def test_opcheck_adamw(scheme: str) -> None:
    for has_max, scale in ((True, 0.5), (False, None)):
        step = make_step(17, scheme, has_max=has_max, scale=scale).with_split_grads()
        torch.library.opcheck(native().adamw_.default, tuple(step.arguments()))


@needs_native
@pytest.mark.parametrize("name", OP_NAMES[:-1])
def test_opcheck(name: str) -> None:
    tensors, scale = [torch.ones(2, 2).t(), torch.ones(3).bfloat16()], torch.tensor(0.5)
    segments, sums = torch.tensor([[0, 2, 0, 0], [2, 1, 1, 0]]), torch.zeros(2, 2, dtype=torch.float64)
    calls: dict[str, list[tuple[Any, ...]]] = {
        "flatten_": [(torch.ones(9), tensors, [0, 5], scale), (torch.ones(9), tensors, [0, 5], None)],
        "unflatten_": [(tensors, torch.ones(9), [0, 5], scale), ([], torch.ones(9), [], None)],
        "quantize_": [(torch.empty(520, dtype=torch.uint8), torch.ones(512))],
        "reduce_slices_": [
            (torch.ones(512), torch.zeros(2, 520, dtype=torch.uint8), 2, True, None, None),
            (torch.ones(3), torch.ones(2, 3), 2, True, None, None),
            (torch.ones(3), torch.ones(2, 3), 2, False, segments, sums),
            (torch.ones(3), torch.ones(2, 3), 2, False, segments, sums, torch.ones(3), 1),
        ],
        "sum_squares_": [(sums, [torch.ones(2), torch.ones(1)], [0, 2], 3, segments), (sums, [], [], 3, segments)],
        "sum_pairs_": [(torch.zeros(2, dtype=torch.float64), sums)],
    }
    for arguments in calls[name]:
        torch.library.opcheck(getattr(native(), name).default, arguments)


@needs_native
@pytest.mark.parametrize("name", OP_NAMES)
def test_schema_names_the_arguments_of_the_twin(name: str) -> None:
    schema = getattr(native(), name).default._schema
    assert [argument.name for argument in schema.arguments] == list(inspect.signature(getattr(twins, name)).parameters)
    assert schema.returns == []


@each_form
def test_every_form_has_every_operator(form: str) -> None:
    kernels = ops.select(form)
    assert kernels.name == form
    assert kernels._fields[1:] == OP_NAMES
    assert all(callable(getattr(kernels, name)) for name in OP_NAMES)


class _LargestTemporary(TorchDispatchMode):
    """Watches the largest tensor that is allocated."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in given:
                self.nbytes = max(self.nbytes, each.untyped_storage().nbytes())
        return result


def test_twins_allocate_nothing_that_grows_with_the_shard() -> None:
    chunk, numel = 1 << 20, (1 << 21) + 1024
    flat, segments, sums = torch.zeros(numel), torch.tensor([[0, numel, 0, 0]]), torch.zeros(1, 2, dtype=torch.float64)
    rows, slices = torch.zeros(numel // 4, 4).t(), torch.zeros(2, numel, dtype=torch.bfloat16)
    calls: list[tuple[str, list[Any]]] = [
        ("flatten_", [flat, [rows], [0], torch.tensor(0.5)]),
        ("unflatten_", [[rows], flat, [0], torch.tensor(0.5)]),
        ("quantize_", [torch.empty(numel // 256 * 260, dtype=torch.uint8), flat]),
        ("reduce_slices_", [flat, slices, 2, True, segments, sums]),
        ("reduce_slices_", [flat, torch.zeros(2, numel // 256 * 260, dtype=torch.uint8), 2, True, segments, sums]),
        ("sum_squares_", [sums, [flat], [0], numel, segments]),
        *(("adamw_", make_step(numel, scheme).arguments()) for scheme in ("fp32", "bf16_stochastic_int8")),
    ]
    for name, arguments in calls:
        with _LargestTemporary() as largest:
            getattr(twins, name)(*arguments)
        assert 0 < largest.nbytes <= 8 * chunk, f"{name} allocates {largest.nbytes} bytes at once"


def test_select_and_describe(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops.select("torch").name == "torch"
    with pytest.raises(ValueError, match=r"kernels must be .*got 'fast'"):
        ops.select("fast")
    monkeypatch.setattr(ops, "_MISSING", {"cpu": "no compiler found", "cuda": "no nvcc found"})
    monkeypatch.setattr(ops, "_warned", set())
    with pytest.raises(RuntimeError, match=r"kernels='native' needs compiled cpu kernels.*no compiler found"):
        ops.select("native")
    assert [ops.select("auto").name for _ in range(3)] == ["torch"] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "zero_shard: no compiled cpu kernels (no compiler found); the slower PyTorch path is used."
    ]
    assert "cpu: PyTorch twins (no compiler found)" in ops.describe()
    assert "\n" not in ops.describe()


def test_apex_replaces_the_update_of_the_best_other_form(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def load(kernels: ops.Kernels, device: Any) -> ops.Kernels:
        seen.append((kernels.name, device))
        return kernels._replace(name="apex")

    monkeypatch.setattr(apex_kernels, "load", load)
    assert ops.select("apex").name == "apex"
    assert ops.select("apex", "cuda:1").name == "apex"
    assert seen == [(ops.select("auto").name, None), (ops.select("auto", "cuda:1").name, "cuda:1")]


@needs_native
def test_native_is_chosen_where_present() -> None:
    assert ops.select("auto").name == "native"
    assert f"cpu: native ({native().cpu_instruction_set()})" in ops.describe()
    with pytest.raises(RuntimeError, match=r"name must be avx512, avx2 or scalar.*got 'sse9'"):
        native().force_cpu_instruction_set("sse9")


@needs_native
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_OP_NAMES", (*OP_NAMES, "added_later_"))
    for reason in ops._load().values():
        assert reason.endswith("was built from another version: it has no added_later_; build it again")


def test_kernels_for_another_release_of_cuda_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert ops._unfit_cuda({}) is ops._unfit_cuda({"cuda_release": "12.4"}) is None
    reason = ops._unfit_cuda({"cuda_release": "13.0"})
    assert reason == f"the kernels were built for CUDA 13.0, but torch {torch.__version__} for CUDA 12.8"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert ops._unfit_cuda({}) == f"torch {torch.__version__} was built for no CUDA"


@needs_native
def test_the_environment_narrows_the_instruction_set() -> None:
    code = "from zero_shard import ops; print(ops.instruction_set())"
    root = Path(__file__).parent.parent
    environment = {**os.environ, "ZERO_SHARD_CPU_CAPABILITY": "scalar"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "scalar", result.stderr


@needs_native
def test_cuda_tensors_are_served_without_a_cuda_build() -> None:
    for name in OP_NAMES:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"zero_shard::{name}", "CUDA")
