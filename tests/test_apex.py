"""``kernels="apex"``: what is handed to NVIDIA's apex, and what is said where it is missing or wrong.

apex runs on GPUs only. Here a stand-in of two small modules takes its place: the same calls and formulas in torch.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_shard
from zero_shard import apex_kernels, ops

# Like apex, it computes in float32, keeps one step count per call, and starts at list entries, not at elements.
AMP_C = """
import torch
calls = []
def multi_tensor_adam(chunk_size, noop_flag, lists, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay):
    assert noop_flag.dtype == torch.int32 and noop_flag.shape == (1,) and mode == 1 and bias_correction == 1
    assert type(step) is int and len({len(each) for each in lists}) == 1
    calls.append([[tensor.numel() for tensor in each] for each in lists] + [step, lr])
    pending = []
    for grad, param, exp_avg, exp_avg_sq in zip(*lists):
        assert all(each.is_contiguous() for each in (grad, param, exp_avg, exp_avg_sq))
        if grad.numel():
            pending.append((grad, param, exp_avg, exp_avg_sq))
    if DROPS_WORK_AT_A_TRAILING_EMPTY_TENSOR and not lists[0][-1].numel():
        return
    for grad, param, exp_avg, exp_avg_sq in pending:
        exp_avg.copy_(beta1 * exp_avg + (1 - beta1) * grad)
        exp_avg_sq.copy_(beta2 * exp_avg_sq + (1 - beta2) * grad * grad)
        denom = (exp_avg_sq / (1 - beta2**CORRECTED_STEP)).sqrt() + eps
        param.sub_(lr * (exp_avg / (1 - beta1**CORRECTED_STEP) / denom + weight_decay * param))
"""
APPLIER = """
def multi_tensor_applier(op, noop_flag, lists, *args):
    return op(2048 * 32, noop_flag, lists, *args)
"""
PLAIN = {"apex/__init__.py": "", "apex/multi_tensor_apply/__init__.py": APPLIER}


def amp_c(corrected_step: str = "step", drops: bool = False) -> str:
    return AMP_C.replace("CORRECTED_STEP", corrected_step).replace("DROPS_WORK_AT_A_TRAILING_EMPTY_TENSOR", str(drops))


Install = Callable[[dict[str, str]], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put files where Python looks for modules; no apex of this machine is seen meanwhile."""
    for name in [name for name in sys.modules if name == "amp_C" or name.split(".")[0] == "apex"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


def load() -> Any:
    return apex_kernels.load(ops.select("torch"), "cpu")


HYPER = [
    # lr, beta1, beta2, eps, weight_decay, is_amsgrad, is_maximize
    [1e-2, 0.9, 0.99, 1e-8, 0.1, 0.0, 0.0],
    [3e-3, 0.8, 0.95, 1e-6, 0.0, 0.0, 1.0],
]
# start, numel, slot, param_start: with a gap, an empty segment in the middle, and an empty one at the end
SEGMENTS = [[0, 10, 0, 0], [10, 7, 1, 0], [17, 0, 2, 0], [20, 30, 3, 5], [50, 5, 4, 0], [55, 9, 5, 0], [64, 0, 6, 0]]
GROUPS = [0, 0, 1, 1, 0, 1, 0]
STEPS = [2.0, 2.0, 5.0, 5.0, 7.0, 5.0, 2.0]
ACTIVE = [1, 1, 1, 1, 0, 1, 1]
NUMEL = 64


class Shard:
    """A shard, and the same parameters one by one under ``torch.optim.AdamW``."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.param, self.grad, self.exp_avg = torch.randn(3, NUMEL, generator=random).unbind()
        self.exp_avg_sq = torch.rand(NUMEL, generator=random)
        self.before = [self.param.clone(), self.exp_avg.clone(), self.exp_avg_sq.clone()]

    def arguments(self, cuts: list[int], **changes: Any) -> list[Any]:
        """The arguments of ``adamw_``; the gradient is cut into several tensors."""
        bounds = [0, *cuts, NUMEL]
        named: dict[str, Any] = {
            "param": self.param,
            "low": None,
            "grads": [self.grad[a:b] for a, b in itertools.pairwise(bounds)],
            "grad_offsets": bounds[:-1],
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
            "max_exp_avg_sq": None,
            "exp_avg_scale": None,
            "exp_avg_sq_scale": None,
            "segments": torch.tensor(SEGMENTS),
            "slot_steps": torch.tensor(STEPS),
            "slot_is_active": torch.tensor(ACTIVE, dtype=torch.uint8),
            "slot_groups": torch.tensor(GROUPS, dtype=torch.int32),
            "slot_numbers": torch.arange(len(GROUPS)),
            "group_hyper": torch.tensor(HYPER, dtype=torch.float64),
            "grad_scale": None,
            "found_inf": None,
            "stochastic": False,
        }
        return list({**named, **changes}.values())

    def expected(self, scale: float) -> list[Tensor]:
        """What torch makes of the same step: weights and moments."""
        result = [each.clone() for each in self.before]
        for start, numel, slot, _ in SEGMENTS:
            if not ACTIVE[slot]:
                continue
            at = slice(start, start + numel)
            lr, beta1, beta2, eps, decay, _, maximize = HYPER[GROUPS[slot]]
            param = torch.nn.Parameter(result[0][at].clone())
            param.grad = self.grad[at] * scale
            optimizer = torch.optim.AdamW([param], lr, (beta1, beta2), eps, decay, maximize=bool(maximize))
            optimizer.state[param] = {
                "step": torch.tensor(STEPS[slot] - 1),
                "exp_avg": result[1][at].clone(),
                "exp_avg_sq": result[2][at].clone(),
            }
            optimizer.step()
            result[0][at] = param.detach()
            result[1][at], result[2][at] = optimizer.state[param]["exp_avg"], optimizer.state[param]["exp_avg_sq"]
        return result

    def assert_is(self, expected: list[Tensor]) -> None:
        for name, wanted in zip(("param", "exp_avg", "exp_avg_sq"), expected, strict=True):
            # Other operation order: a few roundings of float32.
            assert torch.allclose(getattr(self, name), wanted, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("cuts", [[], [10], [17, 20, 50], [20, 20, 64]], ids=str)
@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize("drops", [False, True], ids=["", "drops_at_empty"])
def test_apex_updates_the_shard_as_torch_does(
    install: Install, cuts: list[int], scale: float | None, drops: bool
) -> None:
    """Also with an apex that drops the work of a list whose last tensor is empty: no such list is handed over."""
    install({**PLAIN, "amp_C.py": amp_c(drops=drops)})
    kernels, shard = load(), Shard()
    kernels.adamw_(*shard.arguments(cuts, grad_scale=None if scale is None else torch.tensor(scale).double()))
    shard.assert_is(shard.expected(1.0 if scale is None else scale))
    for *lists, _, _ in sys.modules["amp_C"].calls:
        assert all(0 < numel for numels in lists for numel in numels)


def test_apex_gets_one_list_for_each_group_and_step_count(install: Install) -> None:
    install({**PLAIN, "amp_C.py": amp_c()})
    kernels, shard = load(), Shard()
    calls = sys.modules["amp_C"].calls
    calls.clear()
    kernels.adamw_(*shard.arguments([]))
    # Neighbours of one group and step count are one tensor.
    assert calls == [[*[[17]] * 4, 2, 1e-2], [*[[30, 9]] * 4, 5, 3e-3]]


@pytest.mark.parametrize("found", [1.0, float("nan"), 0.0])
def test_found_inf_leaves_everything_as_it_is(install: Install, found: float) -> None:
    install({**PLAIN, "amp_C.py": amp_c()})
    kernels, shard = load(), Shard()
    kernels.adamw_(*shard.arguments([], found_inf=torch.tensor(found)))
    is_skipped = found != 0
    assert torch.equal(shard.param, shard.before[0]) == is_skipped
    assert torch.equal(shard.exp_avg, shard.before[1]) == is_skipped


def test_long_tensors_and_copies_of_gradients_are_bounded(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install({**PLAIN, "amp_C.py": amp_c()})
    kernels = load()
    monkeypatch.setattr(apex_kernels, "_MAX_NUMEL", 8)
    monkeypatch.setattr(apex_kernels, "_TEMPORARY_NUMEL", 11)
    calls = sys.modules["amp_C"].calls
    for scale in (None, 0.5):
        calls.clear()
        shard = Shard()
        kernels.adamw_(*shard.arguments([20], grad_scale=None if scale is None else torch.tensor(scale)))
        shard.assert_is(shard.expected(scale or 1.0))
        for grads, _, _, _, _, lr in calls:
            is_plain = scale is None and lr == HYPER[0][0]  # no factor, and no sign from maximize
            assert max(grads) <= (8 if is_plain else 11)
            assert is_plain or sum(grads) <= 11


def test_no_list_entry_has_2_to_the_31_elements() -> None:
    """On the index arithmetic; a meta tensor takes no memory."""
    numel = (1 << 31) + (1 << 30) + 5
    pieces = list(apex_kernels._pieces([(3, 4), (7, numel)], [torch.empty(numel + 7, device="meta")], [0], 1 << 30))
    assert [piece.numel for piece in pieces] == [1 << 30] * 3 + [9]
    assert pieces[-1].start + pieces[-1].numel == numel + 7
    assert apex_kernels._MAX_NUMEL < 1 << 31


def test_a_segment_outside_the_gradients_is_refused(install: Install) -> None:
    install({**PLAIN, "amp_C.py": amp_c()})
    kernels, shard = load(), Shard()
    with pytest.raises(RuntimeError, match=r"segment must lie within one of the gradients, got start 20, numel 30"):
        kernels.adamw_(*shard.arguments([33]))
    with pytest.raises(RuntimeError, match="got start 55, numel 9"):
        kernels.adamw_(*shard.arguments([], grads=[shard.grad[:60]], grad_offsets=[0]))


@pytest.mark.parametrize(
    "changes",
    [
        {"param": torch.zeros(NUMEL, dtype=torch.bfloat16), "low": torch.zeros(NUMEL, dtype=torch.int16)},
        {"param": torch.zeros(NUMEL, dtype=torch.bfloat16)},
        {"exp_avg": torch.zeros(NUMEL, dtype=torch.bfloat16), "exp_avg_sq": torch.zeros(NUMEL, dtype=torch.bfloat16)},
        {"exp_avg": torch.zeros(NUMEL, dtype=torch.int8), "exp_avg_scale": torch.zeros(1)},
        {"grads": [torch.zeros(NUMEL, dtype=torch.float64)]},
        {"stochastic": True},
        {"group_hyper": torch.tensor([[*row[:5], 1.0, 0.0] for row in HYPER], dtype=torch.float64)},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_what_apex_cannot_do_is_refused(install: Install, changes: dict[str, Any]) -> None:
    install({**PLAIN, "amp_C.py": amp_c()})
    kernels, shard = load(), Shard()
    with pytest.raises(NotImplementedError, match=r"kernels='apex' .*use kernels='auto'"):
        kernels.adamw_(*shard.arguments([], **changes))
    assert torch.equal(shard.param, shard.before[0])


# --- loading ----------------------------------------------------------------------------------------------

UNRELATED = {"apex/__init__.py": "raise ImportError('No module named pyramid')"}
HOW_TO = r"NVIDIA's apex \(https://github.com/NVIDIA/apex\), which comes as source only and needs CUDA: git clone .*"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, "not installed"),
        (UNRELATED, "the unrelated package called apex on PyPI, not NVIDIA's"),
        ({**UNRELATED, "amp_C.py": ""}, "the unrelated package called apex on PyPI, not NVIDIA's"),
        (PLAIN, r"NVIDIA's apex, built without its CUDA extensions \(no amp_C\)"),
    ],
    ids=["none", "unrelated", "unrelated_and_amp_c", "python_only"],
)
def test_missing_apex_says_what_it_is_and_how_it_is_built(install: Install, files: dict[str, str], found: str) -> None:
    install(files)
    with pytest.raises(RuntimeError, match=rf"{HOW_TO}APEX_CUDA_EXT=1 pip install.* Found: {found}\.$"):
        load()
    assert "apex" not in sys.modules


def test_status_of_a_complete_apex(install: Install) -> None:
    install({**PLAIN, "amp_C.py": "raise RuntimeError('imported')"})
    assert apex_kernels.status() == "NVIDIA's apex"


@pytest.mark.parametrize("fault", ["raise ImportError('undefined symbol: _ZN3c10')", "calls = []"])
def test_apex_that_does_not_load(install: Install, fault: str) -> None:
    install({**PLAIN, "amp_C.py": fault})
    with pytest.raises(RuntimeError, match=r"Found NVIDIA's apex, but it does not load: .*(undefined symbol|has no)"):
        load()


def test_only_the_update_is_replaced(install: Install) -> None:
    install({**PLAIN, "amp_C.py": amp_c()})
    native = ops.select("torch")
    kernels = apex_kernels.load(native, "cpu")
    assert kernels.name == "apex"
    changed = {field for field in native._fields if getattr(kernels, field) is not getattr(native, field)}
    assert changed == {"name", "adamw_"}


@pytest.mark.parametrize(
    ("corrected_step", "message"),
    [
        ("(step + 1)", r"after 3 steps apex gives weight -?[0-9.]+ where torch\.optim\.AdamW gives -?[0-9.]+; use"),
        ("float('nan')", r"gives weight nan where torch\.optim\.AdamW gives -?[0-9.]+"),
        ("(1 / 0)", "probe of amp_C.multi_tensor_adam on cpu failed: "),
    ],
)
def test_probe_refuses_other_numbers(install: Install, corrected_step: str, message: str) -> None:
    if corrected_step == "(1 / 0)":
        corrected_step = "unbound()"
    install({**PLAIN, "amp_C.py": amp_c(corrected_step) + "\ndef unbound(): raise RuntimeError('no kernel image')"})
    with pytest.raises(RuntimeError, match=message):
        load()


def test_probe_sees_a_wrong_second_moment(install: Install) -> None:
    """In the weight it would show much later."""
    install({**PLAIN, "amp_C.py": amp_c().replace("(1 - beta2) * grad * grad", "(1 - beta2) * 1.0001 * grad * grad")})
    with pytest.raises(RuntimeError, match=r"apex gives (weight|exp_avg_sq) "):
        load()


def test_select_apex(install: Install) -> None:
    install(UNRELATED)
    with pytest.raises(RuntimeError, match="unrelated package"):
        ops.select("apex")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_apex_without_a_gpu(install: Install) -> None:
    install({**PLAIN, "amp_C.py": amp_c()})
    with pytest.raises(RuntimeError, match=r"kernels='apex' runs on CUDA GPUs only, .*use kernels='auto'"):
        ops.select("apex")


def test_training_with_apex_kernels(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer in a world of one, with clipping, against torch."""
    install({**PLAIN, "amp_C.py": amp_c()})
    real_load = apex_kernels.load
    monkeypatch.setattr(apex_kernels, "load", lambda native, device: real_load(native, "cpu"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
    optimizer = zero_shard.AdamW(model.parameters(), **options, config={"kernels": "apex", "max_grad_norm": 0.1})
    plain_optimizer = torch.optim.AdamW(plain.parameters(), **options)
    calls = sys.modules["amp_C"].calls
    calls.clear()
    for _ in range(5):
        x = torch.randn(4, 7)
        for net in (model, plain):
            net.zero_grad()
            net(x).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        plain_optimizer.step()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(param, expected, rtol=1e-5, atol=1e-6)
    assert [call[-2] for call in calls] == [1, 2, 3, 4, 5]
    with pytest.raises(NotImplementedError, match=r"amsgrad"):
        optimizer.param_groups[0]["amsgrad"] = True
        optimizer.step()
