"""Every setting has an effect that can be seen from outside, and every mistake in one is refused with its name."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from oracle import fingerprint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zero_shard
from zero_shard import ZeroConfig
from zero_shard.config import load_config
from zero_shard.ops import missing_reason

# --- every field has an effect ---


@contextlib.contextmanager
def _events() -> Iterator[list[str]]:
    """Collect the labels of the collectives in order; callers may add events of their own."""
    events: list[str] = []
    zero_shard.collectives.pending.before_collective = events.append
    try:
        yield events
    finally:
        zero_shard.collectives.pending.before_collective = None


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))).to(dtype)


def _build(model: nn.Module, config: dict[str, Any], **hyper: Any) -> zero_shard.AdamW:
    return zero_shard.AdamW(model.parameters(), lr=0.01, module=model, config=config, **hyper)


def _step(model: nn.Module, optimizer: zero_shard.AdamW, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    x = torch.ones(2, 32, dtype=optimizer.param_groups[0]["params"][0].dtype)
    (model(x).square().mean() * scale).backward()
    optimizer.step()


def _usage(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> zero_shard.Usage:
    model = _model(dtype)
    optimizer = _build(model, config)
    for _ in range(3):
        _step(model, optimizer)
    return optimizer.usage()


def _effect_of_stage() -> None:
    held, sent = [], []
    for stage in range(4):
        model = _model()
        optimizer = _build(model, {"stage": stage})
        for _ in range(3):
            _step(model, optimizer)
        sent.append(optimizer.usage().sent_nbytes)
        optimizer.zero_grad()
        model(torch.ones(1, 32)).sum().backward()
        held.append(optimizer.usage().held_nbytes)  # stage 1 keeps local gradients whole until the step
        optimizer.step()
    assert held == sorted(held, reverse=True) and len(set(held)) == 4, held
    assert sent[3] > 1.4 * sent[2], sent


def _effect_of_bucket_mib() -> None:
    counts = []
    for bucket_mib in (25, 2 * 32 * 33 * 4 / 2**20, 1e-5):  # all parameters, two layers, and one parameter in a bucket
        model = _model()
        optimizer = _build(model, {"stage": 2, "bucket_mib": bucket_mib})
        with _events() as events:
            _step(model, optimizer)
        counts.append(len([label for label in events if label.startswith("the gradients of bucket")]))
    assert counts == [1, 2, 8], counts


def _effect_of_units() -> None:
    def gathered_with(config: dict[str, Any]) -> list[str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Bilinear(8, 8, 8))
        model.forward = lambda x: model[1](model[0](x), x)  # type: ignore[method-assign]
        optimizer = _build(model, {"stage": 3, **config})
        with _events() as events:
            model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        return sorted({label for label in events if label.startswith("the parameters of")})

    assert gathered_with({}) == ["the parameters of 0", "the parameters of 1"]
    assert gathered_with({"units": ["Sequential"]}) == ["the parameters of the rest of the model"]
    assert gathered_with({"units": "Bilinear"}) == ["the parameters of 1", "the parameters of the rest of the model"]


def _effect_of_reshard_after_forward() -> None:
    kept = _usage({"stage": 3, "reshard_after_forward": False}).sent_nbytes
    again = _usage({"stage": 3}).sent_nbytes
    assert 1.4 < again / kept < 1.6, (kept, again)


def _effect_of_prefetch() -> None:
    """Count the gathers that have been started before the first module of the third forward runs."""

    def num_ahead(prefetch: int) -> int:
        model = _model()
        optimizer = _build(model, {"stage": 3, "prefetch": prefetch})
        for _ in range(2):
            _step(model, optimizer)
        with _events() as events:
            model[0].register_forward_hook(lambda *_: events.append("first module done"))
            _step(model, optimizer)
        before = events[: events.index("first module done")]
        return len([label for label in before if label.startswith("the parameters of")]) - 1

    assert [num_ahead(prefetch) for prefetch in (0, 1, 2, 16)] == [0, 1, 2, 3]


def _effect_of_param_dtype() -> None:
    full = _usage({"param_dtype": None}).sent_nbytes
    half = _usage({"param_dtype": "bfloat16"}).sent_nbytes
    assert 0.45 < half / full < 0.55, (half, full)


def _effect_of_reduce_dtype() -> None:
    full = _usage({"stage": 2}).sent_nbytes
    half = _usage({"stage": 2, "reduce_dtype": "bf16"}).sent_nbytes
    assert 0.73 < half / full < 0.77, (half, full)  # the gather of weights stays fp32


def _effect_of_state_dtype() -> None:
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        model = _model()
        optimizer = _build(model, {"state_dtype": name})
        _step(model, optimizer)
        state = optimizer.state[model[0].weight]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == dtype


def _effect_of_master() -> None:
    """A change of a bf16 weight by less than half a unit in the last place adds up only with a master."""
    moved = {}
    for master in ("auto", "none"):
        model = nn.Linear(4, 4, bias=False).bfloat16()
        nn.init.ones_(model.weight)
        optimizer = zero_shard.AdamW(model.parameters(), lr=2**-11, weight_decay=0, config={"master": master})
        for _ in range(16):
            optimizer.zero_grad()
            model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        moved[master] = (1 - model.weight.detach().float()).max().item()
    assert moved["auto"] == pytest.approx(16 * 2**-11, rel=0.3)
    assert moved["none"] == 0
    assert (
        _usage({"master": "auto"}, torch.bfloat16).held_nbytes > _usage({"master": "none"}, torch.bfloat16).held_nbytes
    )


def _effect_of_max_grad_norm() -> None:
    def first_moment(config: dict[str, Any]) -> float:
        model = _model(torch.float64)
        optimizer = _build(model, config)
        _step(model, optimizer, 1000.0)
        moments = [value["exp_avg"].flatten() for value in optimizer.full_state_dict().get("state", {}).values()]
        return torch.cat(moments).norm().item() if moments else 0.1 * 0.5

    assert first_moment({"max_grad_norm": 0.5}) == pytest.approx(0.1 * 0.5, rel=1e-5)
    if dist.get_rank() == 0:
        assert first_moment({}) > 1
    else:
        first_moment({})


def _effect_of_shard_size() -> None:
    promised = [_usage({"stage": 2, "shard_size": size}).promised_nbytes for size in (1, 2, None)]
    assert promised[0] > promised[1] == promised[2], promised


def _effect_of_sync_module_states() -> None:
    def different() -> nn.Module:
        torch.manual_seed(dist.get_rank())
        return nn.Linear(3, 3)

    model = different()
    _build(model, {"sync_module_states": True})
    prints = [""] * dist.get_world_size()
    dist.all_gather_object(prints, fingerprint(model))
    assert len(set(prints)) == 1
    with pytest.raises(ValueError, match=r"different values of (weight|bias).*sync_module_states"):
        _build(different(), {"sync_module_states": False})


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def _effect_of_kernels() -> None:
    def runs_compiled_code(kernels: str) -> bool:
        model = _model()
        optimizer = _build(model, {"kernels": kernels})
        model(torch.ones(1, 32)).sum().backward()
        with _Operators() as operators:
            optimizer.step()
        return "zero_shard::adamw_" in operators.names

    assert not runs_compiled_code("torch")
    if missing_reason() is None:
        assert runs_compiled_code("native") and runs_compiled_code("auto")
    else:
        with pytest.raises(RuntimeError, match="kernels='native'"):
            runs_compiled_code("native")


def _effect_of_check() -> None:
    lr = 0.1 * (dist.get_rank() + 1)
    with pytest.raises(ValueError, match=r"param_groups\[0\].*0\.1.*0\.2"):
        zero_shard.AdamW(_model().parameters(), lr=lr, config={"check": "start"})
    zero_shard.AdamW(_model().parameters(), lr=lr, config={"check": "off"})
    for check, is_caught in (("start", False), ("every_step", True)):
        model = _model()
        optimizer = _build(model, {"check": check})
        model(torch.ones(1, 32)).sum().backward()
        with contextlib.nullcontext() if not is_caught else pytest.raises(RuntimeError, match=r"2\.weight"):
            optimizer.param_groups[0]["lr"] = 0.01
            _forget_gradient_on_rank_1(optimizer, model[2].weight)
            optimizer.step()


def _forget_gradient_on_rank_1(optimizer: zero_shard.AdamW, param: nn.Parameter) -> None:
    """Break the agreement about gradients behind the optimizer's back, just before the update reads it."""
    if dist.get_rank() == 1:
        optimizer.register_step_pre_hook(lambda *_: setattr(param, "grad", None))


def _effect_of_skip_nonfinite() -> None:
    for is_skipping in (True, False):
        model = _model()
        optimizer = _build(model, {"skip_nonfinite": is_skipping})
        before = fingerprint(model)
        scale = math.inf if dist.get_rank() == 1 else 1.0  # one rank overflows
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _step(model, optimizer, scale)
        assert (fingerprint(model) == before) == is_skipping
        assert any("skipped a step" in str(each.message) for each in caught) == is_skipping


_EFFECTS: dict[str, Callable[[], None]] = {
    "stage": _effect_of_stage,
    "bucket_mib": _effect_of_bucket_mib,
    "units": _effect_of_units,
    "reshard_after_forward": _effect_of_reshard_after_forward,
    "prefetch": _effect_of_prefetch,
    "param_dtype": _effect_of_param_dtype,
    "reduce_dtype": _effect_of_reduce_dtype,
    "state_dtype": _effect_of_state_dtype,
    "master": _effect_of_master,
    "max_grad_norm": _effect_of_max_grad_norm,
    "shard_size": _effect_of_shard_size,
    "sync_module_states": _effect_of_sync_module_states,
    "kernels": _effect_of_kernels,
    "check": _effect_of_check,
    "skip_nonfinite": _effect_of_skip_nonfinite,
}


def test_every_field_has_a_test_of_its_effect() -> None:
    names = [field.name for field in dataclasses.fields(ZeroConfig)]
    assert sorted(names) == sorted(_EFFECTS)
    assert len(names) <= 15, "a setting more needs a reason, and one less"


@pytest.mark.parametrize("name", _EFFECTS)
def test_field_has_an_effect(name: str) -> None:
    ranks.run(2, _EFFECTS[name])


def test_config_is_the_one_in_force() -> None:
    given = {"stage": 1, "bucket_mib": 3, "reduce_dtype": "bf16"}
    optimizer = zero_shard.AdamW(nn.Linear(2, 2).parameters(), config=given)
    assert optimizer.config == ZeroConfig(stage=1, bucket_mib=3, reduce_dtype=torch.bfloat16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        optimizer.config.stage = 2  # type: ignore[misc]
    assert zero_shard.AdamW(nn.Linear(2, 2).parameters()).config == ZeroConfig()


# --- mistakes ---


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ZeroConfig)])
def test_misspelled_key_is_refused_with_the_real_one(name: str) -> None:
    misspelled = name[:-2] + name[-1] + name[-2] if len(name) > 5 else name + "s"
    with pytest.raises(ValueError, match=rf"{misspelled}.*did you mean '{name}'"):
        load_config({misspelled: 1})


def test_key_like_no_other_is_refused_with_all_keys() -> None:
    with pytest.raises(ValueError, match=r"'xyzzy'.*7.*stage.*skip_nonfinite"):
        load_config({"xyzzy": 7})


_WRONG_TYPES = [
    *(("stage", value) for value in (True, 2.0, "2", None)),
    *(("bucket_mib", value) for value in ("25", None, True, [25])),
    *(("units", value) for value in (3, None, ["Linear", 3], {"a": 1}, [""])),
    *(("reshard_after_forward", value) for value in (1, "true", None)),
    *(("prefetch", value) for value in (1.0, "1", True, None)),
    *(("param_dtype", value) for value in (32, ["bfloat16"], True)),
    *(("reduce_dtype", value) for value in (32, ["float32"], True)),
    *(("state_dtype", value) for value in (None, 16)),
    *(("master", value) for value in (None, True, 1)),
    *(("max_grad_norm", value) for value in ("1", True, [1.0])),
    *(("shard_size", value) for value in (2.0, "2", True)),
    *(("sync_module_states", value) for value in (0, "no")),
    *(("kernels", value) for value in (None, 1)),
    *(("check", value) for value in (None, True, False)),
    *(("skip_nonfinite", value) for value in (1, "yes")),
]
_WRONG_VALUES = [
    *(("stage", value) for value in (-1, 4)),
    *(("bucket_mib", value) for value in (0, -1, math.nan, math.inf, 1e6)),
    ("units", []),
    *(("param_dtype", value) for value in ("bf61", torch.float32, torch.int8, {})),
    *(("prefetch", value) for value in (-1, 17)),
    *(("reduce_dtype", value) for value in ("bf61", torch.int32, torch.complex64)),
    *(("state_dtype", value) for value in ("float8", torch.float16, torch.uint8)),
    *(("master", value) for value in ("", "Auto")),
    *(("max_grad_norm", value) for value in (0, -1.0, math.inf, math.nan)),
    *(("shard_size", value) for value in (0, -2)),
    *(("kernels", value) for value in ("cuda", "")),
    *(("check", value) for value in ("never", "")),
]


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        *((name, value, TypeError) for name, value in _WRONG_TYPES),
        *((name, value, ValueError) for name, value in _WRONG_VALUES),
    ],
    ids=str,
)
def test_wrong_value_is_refused_with_field_and_value(name: str, value: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        load_config({name: value})
    assert name in str(caught.value)
    shown = str(value).removeprefix("torch.") if name.endswith("dtype") else repr(value)
    assert shown in str(caught.value) or value == [], str(caught.value)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        *(("fp32", torch.float32), ("float32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)),
        *(("float64", torch.float64), (torch.bfloat16, torch.bfloat16), (None, None)),
    ],
    ids=str,
)
def test_dtypes_have_names(given: Any, dtype: torch.dtype | None) -> None:
    assert load_config({"reduce_dtype": given}).reduce_dtype == dtype


# --- files ---

_VALUES = {"stage": 3, "bucket_mib": 0.5, "units": ["Block", "Linear"], "reshard_after_forward": False}
_EXPECTED = ZeroConfig(stage=3, bucket_mib=0.5, units=("Block", "Linear"), reshard_after_forward=False)
_TOML = 'stage = 3\nbucket_mib = 0.5\nunits = ["Block", "Linear"]\nreshard_after_forward = false\n'
_YAML = "stage: 3\nbucket_mib: 0.5\nunits: [Block, Linear]\nreshard_after_forward: false\n"
_FILES = {
    "top.toml": _TOML,
    "table.toml": f"[train]\nsteps = 7\n[zero]\n{_TOML}",
    "top.json": json.dumps(_VALUES),
    "table.json": json.dumps({"train": {"steps": 7}, "zero": _VALUES}),
    "top.yaml": _YAML,
    "table.yml": "train:\n  steps: 7\nzero:\n" + "".join(f"  {line}\n" for line in _YAML.splitlines()),
}


def _skip_without_yaml(name: str) -> None:
    if Path(name).suffix in (".yaml", ".yml"):
        pytest.importorskip("yaml")


@pytest.mark.parametrize("name", _FILES)
@pytest.mark.parametrize("kind", [str, Path])
def test_file_gives_the_same_as_the_mapping(name: str, kind: Callable[[Path], Any], tmp_path: Path) -> None:
    _skip_without_yaml(name)
    path = tmp_path / name
    path.write_text(_FILES[name])
    assert load_config(kind(path)) == _EXPECTED == load_config(_VALUES) == load_config(_EXPECTED)


@pytest.mark.parametrize("name", ["typo.toml", "typo.json", "typo.yaml"])
def test_unknown_key_in_a_file_is_named_with_the_file(name: str, tmp_path: Path) -> None:
    _skip_without_yaml(name)
    path = tmp_path / name
    path.write_text({"toml": "stge = 3", "json": '{"stge": 3}', "yaml": "stge: 3"}[name.split(".")[1]])
    with pytest.raises(ValueError, match=rf"'stge'.*{name}.*did you mean 'stage'"):
        load_config(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.toml", "stage ="), ("a.json", "{"), ("a.json", "[1]"), ("a.json", "3"), ("a.txt", "stage = 3"), ("a", "")],
)
def test_file_that_holds_no_table_is_refused_with_its_name(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=name):
        load_config(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml")


# --- ranks ---

_DIFFERENT: dict[str, tuple[Any, Any]] = {
    "stage": (2, 3),
    "bucket_mib": (25, 26),
    "units": ("auto", ("Linear",)),
    "reshard_after_forward": (True, False),
    "prefetch": (1, 2),
    "param_dtype": (torch.bfloat16, torch.float16),
    "reduce_dtype": (None, torch.bfloat16),
    "state_dtype": (torch.float32, torch.bfloat16),
    "master": ("auto", "none"),
    "max_grad_norm": (1.0, 2.0),
    "shard_size": (1, 2),
    "sync_module_states": (True, False),
    "kernels": ("auto", "torch"),
    "check": ("start", "every_step"),
    "skip_nonfinite": (False, True),
}


def _differ_in_each_field() -> dict[str, str]:
    """Return what every field's difference between the ranks leads to."""
    texts = {}
    for name, values in _DIFFERENT.items():
        try:
            _build(_model(), {name: values[dist.get_rank()]})
            texts[name] = "no error"
        except ValueError as error:
            texts[name] = str(error)
    return texts


def test_ranks_with_different_configs_all_raise_with_both_values() -> None:
    assert set(_DIFFERENT) == set(_EFFECTS)
    for texts in ranks.run(2, _differ_in_each_field):
        for name, (first, second) in _DIFFERENT.items():
            assert f"config.{name}" in texts[name], texts[name]
            assert f"rank 0: {first!r}" in texts[name] and f"rank 1: {second!r}" in texts[name], texts[name]


def _check_off_on_one_rank() -> None:
    _build(_model(), {"check": "off" if dist.get_rank() == 1 else "start"})


def test_ranks_that_differ_in_whether_to_check_all_raise() -> None:
    for error in ranks.run_expecting_errors(2, _check_off_on_one_rank):
        assert isinstance(error, ValueError) and "config.check" in str(error), repr(error)


_BAD: list[tuple[dict[str, Any], str]] = [
    ({"stage": 7}, "stage"),
    ({"stge": 3}, "stge"),
    ({"bucket_mib": "big"}, "bucket_mib"),
    ({"state_dtype": "float16"}, "state_dtype"),
    ({"stage": 3, "units": ["Liner"]}, "Liner"),
    ({"shard_size": 5}, "shard_size"),
]


def _bad_on_one_rank(bad_rank: int) -> list[tuple[str, float]]:
    """Return each bad config's error and how long it took."""
    results = []
    for config, _ in _BAD:
        start = time.monotonic()
        try:
            _build(_model(), config if dist.get_rank() == bad_rank else {"stage": config.get("stage", 2) % 4})
            text = "no error"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        results.append((text, time.monotonic() - start))
    return results


@pytest.mark.parametrize("bad_rank", [0, 2])
def test_bad_config_on_one_rank_stops_all_within_seconds(bad_rank: int) -> None:
    for rank, results in enumerate(ranks.run(3, _bad_on_one_rank, bad_rank)):
        for (config, word), (text, time_s) in zip(_BAD, results, strict=True):
            assert word in text, f"rank {rank}, {config}: {text}"
            assert rank == bad_rank or f"rank {bad_rank}" in text, f"rank {rank}, {config}: {text}"
            assert time_s < 5, f"rank {rank}, {config}: {time_s:.1f} s"
