"""The parts of bench_step.py and gpu_check.py. The zero_shard beside them is measured, installed or not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))


def say(text: str) -> None:
    """Tell how far it is, beside the report."""
    print(text, file=sys.stderr, flush=True)


def child_variables(threads: int) -> dict[str, str]:
    """Return the variables of a child: OpenMP runtimes read their thread count when they start."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])  # where ninja may be
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PATH": path}
