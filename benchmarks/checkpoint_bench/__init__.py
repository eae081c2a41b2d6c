"""The parts of bench_checkpoint.py."""

from __future__ import annotations

import sys

from step_bench import ROOT

sys.path.insert(0, str(ROOT / "examples"))
