"""Where the numbers go, on rank 0: JSON lines, a progress bar, TensorBoard."""

from __future__ import annotations

import json
import math
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
_LOG_FILE_INTERVAL_S = 10.0  # a log file keeps every line of a bar, where a terminal draws over the last one
_SHORT_NAMES = {"loss": "loss {:.4f}", "grad_norm": "norm {:.3g}", "tokens_per_s": "{:,.0f} tokens/s"}


def check_installed(name: str, option: str) -> None:
    """Raise ModuleNotFoundError, with the remedy, unless a library is there."""
    if find_spec(name) is None:
        raise ModuleNotFoundError(
            f"Monitor({option}=True) needs {name}, which is not installed: pip install 'zero-shard[monitor]', or pass "
            f"{option}=False"
        )


class JsonLines:
    """Appends to a file, one line at a time. A last line that a crash has cut is taken off first."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.has_lines = _cut_last_line(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, entry: Entry) -> None:
        """Append an entry."""
        self._file.write(json.dumps(_valid(entry), allow_nan=False, default=float) + "\n")

    step = event = write

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _cut_last_line(path: Path) -> bool:
    """Remove what follows the last newline; return whether anything is left."""
    if not path.exists():
        return False
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 4096)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            end = start if found < 0 else start + found + 1
            if found >= 0:
                break
        file.truncate(end)
    return end > 0


def _valid(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # "nan", "inf", "-inf"
    if isinstance(value, dict):
        return {key: _valid(each) for key, each in value.items()}
    return [_valid(each) for each in value] if isinstance(value, list) else value


class ProgressBar:
    """Shows the last step in one line, and events above it."""

    def __init__(self, total: int | None) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

        self._is_terminal = sys.stderr.isatty()
        interval_s = 0.1 if self._is_terminal else _LOG_FILE_INTERVAL_S
        self._bar = tqdm(total=total, unit="step", dynamic_ncols=True, mininterval=interval_s, file=sys.stderr)

    def begin_at(self, step: int) -> None:
        """Count from a step on."""
        self._bar.initial = self._bar.n = step

    def advance(self) -> None:
        """Count one step."""
        self._bar.update()

    def step(self, entry: Entry) -> None:
        """Show the numbers of a step."""
        parts = [form.format(entry[key]) for key, form in _SHORT_NAMES.items() if entry[key] is not None]
        parts += [f"lr {rate:.3g}" for rate in entry["lr"][:1]]
        self._bar.set_postfix_str(", ".join([*parts, f"peak {entry['peak_mib']:,.0f} MiB"]), refresh=False)

    def event(self, entry: Entry) -> None:
        """Print an event."""
        self._bar.write(f"step {entry['step']}: {entry['event']}: {entry['message']}", file=sys.stderr)

    def close(self) -> None:
        """Leave the last line."""
        self._bar.close()


class TensorBoard:
    """Writes every number as a scalar, and events as text."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory))

    def step(self, entry: Entry) -> None:
        """Write the numbers of a step."""
        for key, value in entry.items():
            if isinstance(value, float):
                self._writer.add_scalar(f"zero_shard/{key}", value, entry["step"])
        for number, rate in enumerate(entry["lr"]):
            self._writer.add_scalar(f"zero_shard/lr/{number}", rate, entry["step"])

    def event(self, entry: Entry) -> None:
        """Write an event."""
        self._writer.add_text(f"zero_shard/{entry['event']}", entry["message"], entry["step"])

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
