"""The example GPT with a rank that dies once in mid-run: what test_elastic.py has torchrun start."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import train_gpt

VICTIM, STEP = int(os.environ["VICTIM"]), int(os.environ["DIES_AT"])
take_step = train_gpt.take_step


def dying_step(run: Any, step: int) -> Any:
    is_first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if is_first_life and step == STEP and run.ranks.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    return take_step(run, step)


train_gpt.take_step = dying_step
train_gpt.main()
