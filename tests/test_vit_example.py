"""The vision transformer learns to read digits, and the number of ranks and the stage don't matter to it."""

from __future__ import annotations

import re

import pytest
from example_runs import run_main

pytest.importorskip("sklearn", reason="examples/vit.py needs scikit-learn")


def test_reads_held_out_digits() -> None:
    printed = run_main("vit", "--stage", "3")
    (accuracy,) = re.findall(r"accuracy on 360 held-out digits: ([\d.]+) %", printed)
    assert float(accuracy) > 95, printed
    assert printed.count("step ") == 8 and "stage 3, 2 ranks on cpu over gloo" in printed


def test_stages_print_the_same_losses() -> None:
    first, second = (run_main("vit", "--stage", stage, "--steps", "20").splitlines()[1:] for stage in ("0", "2"))
    assert first == second
