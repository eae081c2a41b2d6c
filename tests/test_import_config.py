"""``zero-shard import-config``: every key of DeepSpeed is known, what it gives loads and runs, the rest is refused."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_shard
from zero_shard import cli
from zero_shard.config import load_config
from zero_shard.interchange.deepspeed_config import import_config
from zero_shard.interchange.deepspeed_keys import ALIASES, HARMLESS, KEYS, MAPPED, REFUSED

# Written by `_keys_of_deepspeed` below from version 0.19.8.
_KNOWN = Path(__file__).parent / "data" / "deepspeed_keys.json"
_ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1}}


class _Watched(dict[str, Any]):
    """A table that notes which keys are asked for; ``keys()`` is itself, since `in table.keys()` asks, too."""

    def __init__(self, *given: Any, **values: Any) -> None:
        super().__init__(*given, **values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def keys(self) -> Any:
        return self


def _keys_of_deepspeed() -> list[str]:
    """Return the keys that DeepSpeed reads: fields of its models, and what it asks its tables for."""
    config = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed")
    from deepspeed.runtime import precision_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    sections = {name: _Watched() for name in ("checkpoint", "data_types", "torch_autocast")}
    sections["torch_autocast"]["dtype"] = "bf16"
    whole = _Watched(train_batch_size=1, **sections)
    config.DeepSpeedConfig(whole)
    keys = whole.asked | config._REMOVED_TOP_LEVEL_CONFIG_KEYS.keys()
    keys |= {f"{name}.{key}" for name, section in sections.items() for key in section.asked}
    keys |= {f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS}
    for name, model in (
        ("zero_optimization", DeepSpeedZeroConfig),
        ("bf16", precision_config.DeepSpeedBF16Config),
        ("fp16", precision_config.DeepSpeedFP16Config),
    ):
        for field, info in model.model_fields.items():
            keys |= {f"{name}.{field}", f"{name}.{info.alias or field}"}
    return sorted(keys)


def test_table_has_every_key_of_deepspeed() -> None:
    known = set(json.loads(_KNOWN.read_text(encoding="utf-8")))
    assert len(known) > 120
    assert known <= KEYS, f"keys without a verdict: {sorted(known - KEYS)}"
    sections = {"optimizer", "scheduler", "zero_optimization"}
    beyond = {key for key in KEYS - known if key.partition(".")[0] not in sections}
    assert beyond == {"sequence_parallel_size", "data_parallel_size"}, "which deepspeed.initialize reads"
    verdicts = [MAPPED, HARMLESS.keys(), REFUSED.keys(), ALIASES.keys()]
    assert sum(map(len, verdicts)) == len(KEYS), "one verdict each"
    assert set(ALIASES.values()) <= KEYS


@pytest.mark.filterwarnings("ignore")
def test_list_of_keys_is_that_of_deepspeed() -> None:
    assert json.loads(_KNOWN.read_text(encoding="utf-8")) == _keys_of_deepspeed()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"train_batch_size": 8}, {"stage": 0, "max_grad_norm": 1.0}),
        ({"gradient_clipping": 0}, {"stage": 0}),
        ({"gradient_clipping": "auto", "zero_optimization": True}, {"stage": 1}),
        ({"gradient_clipping": 0.5, "zero_optimization": {"stage": 2}}, {"stage": 2, "max_grad_norm": 0.5}),
        (
            {"zero_optimization": {"stage": 1, "reduce_bucket_size": 5e6}, "gradient_clipping": 0},
            {"stage": 1, "bucket_mib": 19.07},
        ),
        (
            {
                "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e6, "offload_optimizer": {"device": "none"}},
                "bf16": {"enabled": True, "check_grad_overflow": False},
                "communication_data_type": "fp32",
                "gradient_clipping": 0,
            },
            {
                "stage": 2,
                "bucket_mib": 19.07,
                "reduce_dtype": "float32",
                "param_dtype": {"params": "bfloat16", "norms": "bfloat16"},
            },
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "stage3_prefetch_bucket_size": 0,
                    "mics_shard_size": 8,
                    "zero_quantized_gradients": True,
                },
                "bfloat16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
                "data_types": {"buffer_dtype": "bf16"},
                "gradient_clipping": 1,
            },
            {
                "stage": 3,
                "prefetch": 0,
                "reduce_dtype": "int8",
                "param_dtype": {"params": "bfloat16", "norms": "bfloat16", "buffers": "bfloat16"},
                "state_dtype": "bfloat16",
                "master": "none",
                "max_grad_norm": 1.0,
                "shard_size": 8,
                "skip_nonfinite": True,
            },
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}, "fp16": {"enabled": True}},
            {
                "stage": 3,
                "param_dtype": {"params": "float16", "norms": "float16"},
                "max_grad_norm": 1.0,
                "shard_size": 4,
            },
        ),
    ],
)
def test_settings_load_as_they_were_meant(given: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    imported = import_config(given)
    assert imported.settings == expected
    assert imported.reasons.keys() == expected.keys()
    (tmp_path / "made.toml").write_text(imported.toml("ds.json"), encoding="utf-8")
    assert load_config(tmp_path / "made.toml") == zero_shard.ZeroConfig(**expected)


def test_differences_in_meaning_are_told() -> None:
    given = {
        "optimizer": {"type": "Adam", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "ignore_unused_parameters": False},
        "prescale_gradients": True,
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True, "hysteresis": 2},
    }
    imported = import_config(given)
    notes = "\n".join(imported.notes)
    for part in (
        "gradient_clipping is not set: DeepSpeed 0.19 clips to 1.0",
        "weight_decay is not set: DeepSpeed's default is 0, ours 0.01",
        "prescale_gradients has no counterpart",
        "ignore_unused_parameters has no counterpart",
        "nothing need be done for zero_optimization.overlap_comm",
        "is that of 8 ranks",
        "fp16.hysteresis",
        "batch_size=4",
    ):
        assert part in notes
    assert "lr=args.learning_rate" in imported.script
    assert "init_scale=65536.0, growth_interval=1000" in imported.script
    assert "num_micro_batches = 2" in imported.script


def test_what_the_trainer_fills_in_is_told() -> None:
    given = {
        "bf16": {"enabled": "auto"},
        "fp16": {"hysteresis": 2},
        "zero_optimization": {"reduce_bucket_size": "auto"},
    }
    notes = "\n".join(import_config(given).notes)
    assert 'bf16=True, add param_dtype = "bfloat16"' in notes
    assert 'zero_optimization.reduce_bucket_size = "auto"' in notes
    assert "hysteresis" not in notes, "fp16 is not enabled"


# --- the script ---


def _run(script: str, num_batches: int) -> tuple[torch.nn.Linear, torch.optim.Optimizer, list[float]]:
    """Run the lines that were printed on a small model, and return the learning rate of every step."""
    torch.manual_seed(0)
    model, rates = torch.nn.Linear(4, 3), []

    def loader() -> Iterator[torch.Tensor]:
        for number in range(num_batches):
            yield torch.full((2, 4), 0.1 * (number + 1))

    def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        rates.append(names["optimizer"].param_groups[0]["lr"])
        return model(batch).float().square().mean()

    names: dict[str, Any] = {"model": model, "loader": loader(), "loss_of": loss_of, "device": "cpu"}
    exec(compile(script, "the script", "exec"), names)
    return model, names["optimizer"], rates


def test_script_trains_as_plain_adamw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"optimizer": _ADAMW, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}}
    Path("ds.json").write_text(json.dumps(given), encoding="utf-8")
    assert cli.main(["import-config", "ds.json"]) == 0
    model, optimizer, _ = _run(capsys.readouterr().out, 6)
    weight = zero_shard.full_state_dict(model)["weight"]
    assert isinstance(optimizer, zero_shard.AdamW) and optimizer.config.stage == 3
    torch.manual_seed(0)
    plain = torch.nn.Linear(4, 3)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(3):
        for number in (2 * step, 2 * step + 1):
            (plain(torch.full((2, 4), 0.1 * (number + 1))).square().mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        reference.step()
        reference.zero_grad()
    torch.testing.assert_close(weight, plain.weight.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("section", [{"fp16": {"enabled": True}}, {"torch_autocast": {"enabled": True}}])
def test_script_with_scaler_or_autocast_runs(
    section: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    imported = import_config({"optimizer": _ADAMW, "gradient_clipping": 1.0, **section})
    Path("zero_shard.toml").write_text(imported.toml("ds.json"), encoding="utf-8")
    _, optimizer, _ = _run(imported.script, 3)
    assert len(optimizer.state) == 2


def _log(done: int) -> float:
    return math.log(done + 1) / math.log(4)


# What DeepSpeed 0.19.8 gives after so many of its own steps; where it is installed, it is asked.
_SCHEDULES: list[tuple[str, dict[str, Any], Callable[[int], float]]] = [
    ("WarmupLR", {"warmup_num_steps": 4, "warmup_max_lr": 0.02}, lambda done: 0.02 * min(1.0, _log(done))),
    (
        "WarmupDecayLR",
        {"warmup_num_steps": 4, "warmup_type": "linear", "total_num_steps": 8, "warmup_max_lr": 0.02},
        lambda done: 0.02 * (done / 4 if done < 4 else max(0.0, (8 - done) / 4)),
    ),
    (
        "WarmupCosineLR",
        {"warmup_num_steps": 4, "total_num_steps": 9, "warmup_min_ratio": 0.1},
        lambda done: (
            0.01 * (0.1 + 0.9 * _log(done))
            if done < 4
            else 0.01 * (0.0001 + 0.9999 * (1 + math.cos(math.pi * min(1.0, (done - 3) / 5))) / 2)
        ),
    ),
]


def _rates(name: str, params: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.chdir(tmp_path)
    given = {"optimizer": _ADAMW, "scheduler": {"type": name, "params": params}, "gradient_clipping": 0}
    imported = import_config(given)
    Path("zero_shard.toml").write_text(imported.toml("ds.json"), encoding="utf-8")
    return _run(imported.script, 11)[2]


@pytest.mark.parametrize(("name", "params", "rate"), _SCHEDULES)
def test_schedules_have_the_numbers_of_deepspeed(
    name: str, params: dict[str, Any], rate: Callable[[int], float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _rates(name, params, tmp_path, monkeypatch)
    first = 0.0 if name == "WarmupCosineLR" else rate(0)
    assert found == pytest.approx([first, *(rate(max(0, step - 1)) for step in range(1, 11))], abs=1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "params"), [each[:2] for each in _SCHEDULES])
def test_schedules_are_those_of_deepspeed(
    name: str, params: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules", reason="deepspeed is not installed")
    found = _rates(name, params, tmp_path, monkeypatch)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.01)
    scheduler = getattr(schedules, name)(optimizer, **params)
    expected = []
    for _ in range(11):
        expected.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert found == pytest.approx(expected, abs=1e-12)


def test_torch_scheduler_is_written_down() -> None:
    given = {"optimizer": _ADAMW, "scheduler": {"type": "StepLR", "params": {"step_size": 3}}}
    assert "torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)" in import_config(given).script


# --- what can't be used ---

_STAGE3 = {"stage": 3}


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"zero_optimization": {**_STAGE3, "offload_param": {"device": "cpu"}}}, ["offload_param", "zero-shard plan"]),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, ["zero_optimization.cpu_offload"]),
        ({"pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2}}, ["pipeline:", "tensor_parallel:"]),
        ({"amp": {"enabled": True}}, ["amp:", "bf16"]),
        ({"gradient_allreduce_op": "sum"}, ["gradient_allreduce_op", "number of ranks"]),
        ({"zero_optimization": {**_STAGE3, "zero_quantized_weights": True}}, ["zero_quantized_weights", "bfloat16"]),
        ({"zero_optimisation": _STAGE3}, ["zero_optimisation", "did you mean zero_optimization?"]),
        (
            {"zero_optimization": {"stage3_prefetch_bucket": 1}},
            ["did you mean zero_optimization.stage3_prefetch_bucke"],
        ),
        ({"zero_optimization": {"stage": 4}}, ["zero_optimization.stage", "4"]),
        ({"zero_optimization": {"stage": "auto"}}, ["zero_optimization.stage", "auto"]),
        ({"zero_optimization": {"stage": 2.5}}, ["zero_optimization.stage", "2.5"]),
        ({"zero_optimization": [1]}, ["zero_optimization must be a table"]),
        ({"zero_optimization": {"stage": 2, "mics_shard_size": 2}}, ["mics_shard_size", "stage 2"]),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["both true"]),
        ({"bf16": {"enabled": "yes"}}, ["bf16.enabled must be true or false", "yes"]),
        ({"gradient_clipping": -1}, ["gradient_clipping", "-1"]),
        ({"gradient_clipping": "1"}, ["gradient_clipping must be a number"]),
        ({"gradient_clipping": float("nan")}, ["gradient_clipping", "NaN"]),
        ({"communication_data_type": "int8"}, ["communication_data_type", "int8"]),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, ["bf16_master_weights_and_grads"]),
        ({"bf16": {}, "bfloat16": {"enabled": True}, "fp16": 3}, ["fp16 must be a table"]),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, ["bf16.enabled and another name"]),
        ({"optimizer": {"type": "Lamb", "params": {}}}, ["Lamb", "AdamW only"]),
        ({"optimizer": {"type": "AdamW", "params": {"beta": [0.9, 0.9]}}}, ["optimizer.params.beta", "betas"]),
        ({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}}, ["optimizer.params.betas", "two numbers"]),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-3; import os"}}}, ["optimizer.params.lr", "a number"]),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, ["gradient_clipping"]),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
            ["adam_w_mode", "weight_decay"],
        ),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, ["OneCycle", "OneCycleLR"]),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {}}}, ["total_num_steps is missing"]),
        ({"scheduler": {"type": "WarmUpLR", "params": {}}}, ["WarmUpLR", "WarmupLR"]),
        (
            {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
            ["train_batch_size = 7", "multiple"],
        ),
        ({"train_batch_size": 0}, ["train_batch_size", "at least 1"]),
    ],
)
def test_refusals_are_one_line_and_write_nothing(
    given: dict[str, Any], parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "ds.json", tmp_path / "made.toml"
    source.write_text(json.dumps(given), encoding="utf-8")
    assert cli.main(["import-config", str(source), "--out", str(out)]) == 2
    _check_refusal(capsys, parts)
    assert [path.name for path in tmp_path.iterdir()] == ["ds.json"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["is not JSON"]),
        ("{}", ["must hold a table", "{}"]),
        ("[1, 2]", ["must hold a table"]),
        ('{"fp16": {"enabled": true},}', ["is not JSON"]),
        ('{"fp16": {}, // a comment\n "bf16": {}}', ["is not JSON", "comments"]),
        ('{"fp16": {}, "fp16": {}}', ["'fp16'", "twice"]),
        ("\x00\xff", ["is not JSON"]),
        (None, ["does not exist"]),
        (False, ["is a directory"]),
    ],
)
def test_files_that_are_no_config_are_refused(
    text: str | bool | None, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "ds.json"
    if isinstance(text, str):
        source.write_text(text, encoding="latin-1")
    elif text is False:
        source.mkdir()
    assert cli.main(["import-config", str(source), "--out", str(tmp_path / "made.toml")]) == 2
    _check_refusal(capsys, parts)
    assert not (tmp_path / "made.toml").exists()


def test_a_file_is_never_replaced_or_half_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "ds.json", tmp_path / "made.toml"
    source.write_text('{"train_batch_size": 8}', encoding="utf-8")
    out.write_text("mine", encoding="utf-8")
    assert cli.main(["import-config", str(source), "--out", str(out)]) == 2
    _check_refusal(capsys, ["exists already", "--out"])
    assert out.read_text(encoding="utf-8") == "mine"
    assert cli.main(["import-config", str(source), "--out", str(tmp_path / "made.json")]) == 2
    _check_refusal(capsys, [".toml"])
    assert cli.main(["import-config", str(source), "--out", str(tmp_path / "none" / "made.toml")]) == 2
    _check_refusal(capsys, ["none"])

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert cli.main(["import-config", str(source), "--out", str(tmp_path / "new.toml")]) == 2
    _check_refusal(capsys, ["No space left"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds.json", "made.toml"]


_ODD = [
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        -1,
        1.5,
        1e300,
        10**400,
        math.inf,
        math.nan,
        "",
        "x",
        "auto",
        "bf16",
        "AdamW",
        "Optimizer",
    ),
    *([], [1, 2], ["a"], {}, {"enabled": True}, {"lr": [1]}, {"betas": ["a", "b"]}, {"step_size": [1]}),
]


def test_odd_values_are_taken_or_refused() -> None:
    num_taken = 0
    for key, value in itertools.product(sorted(KEYS), _ODD):
        section, _, name = key.rpartition(".")
        given: dict[str, Any] = {"zero_optimization": {"stage": 3}}
        (given.setdefault(section, {}) if section else given)[name] = value
        try:
            imported = import_config(given)
        except ValueError as error:
            assert name in str(error) or section in str(error)
        else:
            compile(imported.script, "the script", "exec")
            num_taken += 1
    assert num_taken > 1000


def _check_refusal(capsys: pytest.CaptureFixture[str], parts: list[str]) -> None:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("zero-shard import-config: ") and err.count("\n") == 1 and err.endswith("\n")
    for part in parts:
        assert part in err
