"""What a DeepSpeed config says about optimizer, scheduler and batches, as lines of Python."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Mapping
from typing import Any

import torch

from zero_shard.interchange.deepspeed_reading import AUTO, Reading

# optimizer.params -> where the Trainer of transformers has its value for "auto".
_TRAINER = {
    "lr": "args.learning_rate",
    "betas": "(args.adam_beta1, args.adam_beta2)",
    "eps": "args.adam_epsilon",
    "weight_decay": "args.weight_decay",
    "warmup_max_lr": "args.learning_rate",
    "warmup_min_lr": "0.0",
    "warmup_num_steps": "args.warmup_steps",
    "total_num_steps": "args.max_steps",
}
_SWITCHES = (
    *("bias_correction", "adam_w_mode", "torch_adam", "amsgrad", "set_grad_none", "fp32_optimizer_states"),
    *("foreach", "fused", "maximize", "capturable"),
)
_ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}  # DeepSpeed's own Adam
_ONLY_ADAMW = "there is AdamW only; remove it and pass your optimizer's parameters to zero_shard.AdamW"
_WARMUPS = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000},
    "WarmupDecayLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "total_num_steps": None},
    "WarmupCosineLR": {
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "total_num_steps": None,
        "cos_min_ratio": 0.0001,
    },
}
_ELSEWHERE = {
    "OneCycle": "use torch.optim.lr_scheduler.OneCycleLR in the script",
    "LRRangeTest": "use torch.optim.lr_scheduler.LambdaLR in the script",
}


def script_of(reading: Reading, out: str) -> str:
    """Return the lines, and note what is different.

    Raises:
        ValueError: Another optimizer than Adam, an unknown parameter, a schedule that torch does not have, or batch
            sizes that do not fit together.
    """
    optimizer, lr = _optimizer(reading, out)
    scheduler = _scheduler(reading, lr)
    loop = _loop(reading, bool(scheduler))
    imports = ["contextlib"] if any("contextlib" in line for line in loop) else []
    imports += ["math"] if any("math." in line for line in scheduler) else []
    head = [f"import {name}" for name in imports] + [""] * bool(imports) + ["import torch", "", "import zero_shard", ""]
    return "\n".join([*head, *optimizer, *scheduler, *loop]) + "\n"


def _optimizer(reading: Reading, out: str) -> tuple[list[str], str]:
    """Return the lines that build the optimizer, and the learning rate that a scheduler begins with."""
    name, given = reading.get("optimizer.type", str, None), reading.get("optimizer.params", dict, {})
    end = f"module=model, config={json.dumps(out)}"
    if name is None:
        if reading.values.get("optimizer.params"):
            raise ValueError("optimizer.params is set without optimizer.type; name the optimizer")
        reading.notes.append("there is no optimizer in the file: pass what your script passes to torch.optim.AdamW")
        return [f"optimizer = zero_shard.AdamW(model.parameters(), {end})"], ""
    if name.lower() not in ("adam", "adamw"):
        raise ValueError(f"optimizer.type = {json.dumps(name)}: {_ONLY_ADAMW}")
    if "max_grad_norm" in given:
        raise ValueError("optimizer.params.max_grad_norm: DeepSpeed refuses it, too; write gradient_clipping")
    _check_names("optimizer.params", given, (*_ADAM, *_SWITCHES))
    defaults = dict(_ADAM)
    is_torch = _switch(given, "torch_adam", False)
    is_adamw = name.lower() == "adamw" or _switch(given, "adam_w_mode", True)
    if is_torch and is_adamw:
        defaults["weight_decay"] = 0.01
    values = {key: given.get(key, default) for key, default in defaults.items()}
    if not is_adamw and values["weight_decay"] != 0:
        raise ValueError(
            "optimizer.params: adam_w_mode = false adds weight_decay to the gradient; "
            "there is AdamW only, so set weight_decay to 0 or leave adam_w_mode out"
        )
    if not _switch(given, "bias_correction", True):
        raise ValueError("optimizer.params.bias_correction = false: AdamW corrects its moments; remove it")
    if not _switch(given, "fp32_optimizer_states", True):
        reading.notes.append('fp32_optimizer_states = false is for offload only; here state_dtype = "bfloat16" does it')
    if "weight_decay" not in given:
        reading.notes.append(f"weight_decay is not set: DeepSpeed's default is {values['weight_decay']:g}, ours 0.01")
    texts = [f"{key}={_number(f'optimizer.params.{key}', key, value)}" for key, value in values.items()]
    texts += [f"{key}=True" for key in ("amsgrad", "maximize") if _switch(given, key, False)]
    lines = ["optimizer = zero_shard.AdamW(", *(f"    {text}," for text in ("model.parameters()", *texts, end)), ")"]
    return lines, _number("optimizer.params.lr", "lr", values["lr"])


def _scheduler(reading: Reading, lr: str) -> list[str]:
    name, given = reading.get("scheduler.type", str, None), reading.get("scheduler.params", dict, {})
    if name is None:
        return []
    if name in _ELSEWHERE:
        raise ValueError(
            f"scheduler.type = {json.dumps(name)}: its numbers are not torch's; remove it and {_ELSEWHERE[name]}"
        )
    if name not in _WARMUPS:
        return _torch_scheduler(name, given)
    defaults = _WARMUPS[name]
    _check_names("scheduler.params", given, (*defaults, "warmup_type", "last_batch_iteration"))
    if given.get("last_batch_iteration", -1) != -1:
        raise ValueError("scheduler.params.last_batch_iteration: load the scheduler's state instead; remove it")
    values = {key: default if given.get(key) is None else given[key] for key, default in defaults.items()}
    texts = {key: _number(f"scheduler.params.{key}", key, value) for key, value in values.items() if value is not None}
    if values.get("warmup_max_lr", "") is None:
        texts["warmup_max_lr"] = lr or 'optimizer.param_groups[0]["lr"]'
    if values.get("total_num_steps", "") is None:
        raise ValueError(f"scheduler.params.total_num_steps is missing; {name} needs it")
    is_linear = given.get("warmup_type", "log") == "linear"
    is_cosine = name == "WarmupCosineLR"
    lines = ["", f"{', '.join(texts)} = {', '.join(texts.values())}"]
    lines += ["warmup_num_steps = max(2, warmup_num_steps)", "", "", "def factor(step):"]
    lines += [f'    """{name} of DeepSpeed, which is one step behind the schedulers of torch."""']
    lines += ["    if step == 0:", "        return 0.0"] if is_cosine else []
    lines += ["    done = max(0, step - 1)", "    share = " + _share(name)]
    warmup = "done / warmup_num_steps" if is_linear else "math.log(done + 1) / math.log(warmup_num_steps)"
    lines += ["    if done < warmup_num_steps:", f"        share = {warmup}"]
    if is_cosine:
        lines += ["        return warmup_min_ratio + (1.0 - warmup_min_ratio) * share"]
        lines += ["    return max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * share)"]
    else:
        lines += ["    return (warmup_min_lr + (warmup_max_lr - warmup_min_lr) * share) / warmup_max_lr"]
        lines += ["", "", "for group in optimizer.param_groups:", '    group["lr"] = warmup_max_lr']
    return [
        *lines,
        *([""] * 2 if is_cosine else []),
        "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)",
    ]


def _share(name: str) -> str:
    """How far the rate is up after the warm-up."""
    if name == "WarmupLR":
        return "1.0"
    if name == "WarmupDecayLR":
        return "max(0.0, (total_num_steps - done) / max(1, total_num_steps - warmup_num_steps))"
    end = "max(1, total_num_steps - warmup_num_steps)"
    return f"(1.0 + math.cos(math.pi * min(1.0, (done - warmup_num_steps + 1) / {end}))) / 2"


def _torch_scheduler(name: str, given: Mapping[str, Any]) -> list[str]:
    found = getattr(torch.optim.lr_scheduler, name, None)
    if not inspect.isclass(found):
        close = difflib.get_close_matches(name, [*_WARMUPS, *dir(torch.optim.lr_scheduler)], n=1)
        raise ValueError(
            f"scheduler.type = {json.dumps(name)} is neither DeepSpeed's nor torch's"
            + (f"; did you mean {close[0]}?" if close else "; remove it and make the scheduler in the script")
        )
    if AUTO in given.values():
        raise ValueError(f'scheduler.params has "auto", which {name} of torch does not know; write numbers')
    _check_names("scheduler.params", given, tuple(inspect.signature(found).parameters))
    texts = "".join(f", {key}={value!r}" for key, value in given.items())
    return [f"scheduler = torch.optim.lr_scheduler.{name}(optimizer{texts})"]


def _loop(reading: Reading, has_scheduler: bool) -> list[str]:
    count = _batches(reading)
    lines = ["", f"num_micro_batches = {count or 'args.gradient_accumulation_steps'}"]
    is_scaled = reading.get("fp16.enabled", bool, False)
    scaled = "scaler.scale(loss / num_micro_batches)" if is_scaled else "(loss / num_micro_batches)"
    autocast = _autocast(reading)
    if is_scaled:
        lines.append(_scaler(reading))
    lines += ["for number, batch in enumerate(loader, start=1):", "    is_last = number % num_micro_batches == 0"]
    lines += ["    with contextlib.nullcontext() if is_last else optimizer.no_sync():"]
    lines += [f"        {autocast}", "            loss = loss_of(model, batch)"] if autocast else []
    lines += [] if autocast else ["        loss = loss_of(model, batch)"]
    lines += [f"        {scaled}.backward()", "    if is_last:"]
    lines += (
        ["        scaler.step(optimizer)", "        scaler.update()"] if is_scaled else ["        optimizer.step()"]
    )
    lines += ["        scheduler.step()"] if has_scheduler else []
    return [*lines, "        optimizer.zero_grad()"]


def _batches(reading: Reading) -> int:
    """Return the number of micro-batches per step; 0 if the Trainer says it."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    is_auto = reading.is_auto(keys[2])
    whole, micro, count = (None if reading.is_auto(key) else reading.get(key, int, None, lower=1) for key in keys)
    if whole and micro and count and whole % (micro * count):
        raise ValueError(f"{keys[0]} = {whole} must be a multiple of {keys[1]} * {keys[2]} = {micro * count}")
    if micro:
        reading.notes.append(f"the data loader of each rank has batch_size={micro}")
    elif whole:
        reading.notes.append(f"the data loader of each rank has batch_size={whole} / (ranks * num_micro_batches)")
    if whole and micro and count:
        reading.notes.append(f"{keys[0]} = {whole} is that of {whole // (micro * count)} ranks")
    elif whole and micro and not is_auto:
        reading.notes.append(
            f"num_micro_batches is {whole} / ({micro} * ranks); it is written down for {whole // micro} ranks"
        )
    if reading.get("dataloader_drop_last", bool, False):
        reading.notes.append("the data loader has drop_last=True")
    if reading.get("managed_gradient_accumulation", bool, True) is False:
        reading.notes.append("managed_gradient_accumulation = false: step() is where you call it, as here")
    return 0 if is_auto else count or 1


def _scaler(reading: Reading) -> str:
    scale = reading.get("fp16.loss_scale", float, 0.0, lower=0)
    power = reading.get("fp16.initial_scale_power", int, 16, lower=0, upper=127)
    window = reading.get("fp16.loss_scale_window", int, 1000, lower=1)
    if scale:
        reading.notes.append("fp16.loss_scale is static in DeepSpeed; GradScaler halves it when a step overflows")
        return f"scaler = torch.amp.GradScaler(device, init_scale={float(scale)}, growth_interval=2**31 - 1)"
    return f"scaler = torch.amp.GradScaler(device, init_scale={float(2**power)}, growth_interval={window})"


def _autocast(reading: Reading) -> str:
    if not reading.get("torch_autocast.enabled", bool, False):
        return ""
    name = reading.get("torch_autocast.dtype", str, "bfloat16").lower()
    dtypes = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "bfloat16": "bfloat16", "float16": "float16"}
    name = name.removeprefix("torch.")
    if name not in dtypes:
        raise ValueError(f"torch_autocast.dtype must be bfloat16 or float16, got {json.dumps(name)}")
    return f"with torch.autocast(device, torch.{dtypes[name]}):"


def _switch(given: Mapping[str, Any], key: str, default: bool) -> bool:
    value = given.get(key, default)
    if value == AUTO or value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"optimizer.params.{key} must be true or false, got {json.dumps(value)}")
    return value


def _number(where: str, key: str, value: Any) -> str:
    """Return a number, or a pair for betas, as it is written in Python."""
    if value == AUTO:
        if key not in _TRAINER:
            raise ValueError(f'{where} must be a number, got "auto"')
        return _TRAINER[key]
    numbers = value if key == "betas" and isinstance(value, list) and len(value) == 2 else [value]
    if (key == "betas" and numbers == [value]) or not all(type(each) in (int, float) for each in numbers):
        raise ValueError(f"{where} must be {'two numbers' if key == 'betas' else 'a number'}, got {json.dumps(value)}")
    if key == "betas":
        return f"({numbers[0]}, {numbers[1]})"
    return str(int(value) if key.endswith("_steps") else value)


def _check_names(section: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"
            raise ValueError(f"{section}.{name} is not known{hint}")
