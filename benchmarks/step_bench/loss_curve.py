"""The loss curve of the GPT example with 8-bit moments, beside that with fp32 moments."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from step_bench import ROOT, child_variables, say
from step_bench.targets import Target

NUM_RANKS = 2  # as `make train` runs it


def loss_curves(steps: int | None) -> dict[str, Any]:
    """Train the example's GPT with fp32 and with 8-bit moments, alike in all else, and compare the logged losses.

    Returns:
        "difference": the largest relative one over all logged steps and the held-out losses; or "missing": why not.
    """
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for dtype in ("float32", "int8"):
            config = Path(directory) / f"{dtype}.toml"
            text = (ROOT / "examples" / "gpt.toml").read_text()
            config.write_text(text.replace("[zero]", f'[zero]\nstate_dtype = "{dtype}"', 1))
            out = Path(directory) / dtype
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
            command += [str(ROOT / "examples" / "train_gpt.py"), "--config", str(config)]
            command += ["--out", str(out), *(["--steps", str(steps)] if steps else [])]
            say(f"the GPT example, {dtype} moments")
            result = subprocess.run(command, capture_output=True, text=True, env=child_variables(1), check=False)
            if result.returncode != 0:
                reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
                return {"missing": f"examples/train_gpt.py with {dtype} moments failed: {reason[:200]}"}
            entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            names = ("train_loss", "held_out_loss")
            losses[dtype] = [entry[name] for entry in entries for name in names if name in entry]
    pairs = list(zip(losses["float32"], losses["int8"], strict=True))
    return {"difference": max(abs(a - b) / a for a, b in pairs), "final": pairs[-1], **losses}


def loss_line(curve: dict[str, Any]) -> str:
    """Return the target of the loss curve as a line, or why there is none."""
    target = Target("GPT example, 8-bit moments: largest difference of its losses", 0.01, curve.get("difference"), True)
    return target.line() + (f" ({curve['missing']})" if "missing" in curve else f"; final losses {curve['final']}")
