"""The example GPT with a rank that is killed once in mid-run: what test_elastic.py has torchrun start."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from example_runs import example

import zero_shard


def dying_at(step: int, *victims: int) -> Callable[..., Any]:
    """Return the example's ``take_step``, in whose ``step`` ranks are killed in their first life, after a save."""
    take_step = example("train_gpt").take_step

    def dying_step(run: Any, now: int) -> Any:
        is_first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if is_first_life and now == step and run.ranks.rank in victims:
            while zero_shard.latest_checkpoint(run.out) is None:  # it is written beside the steps
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return take_step(run, now)

    return dying_step


if __name__ == "__main__":
    example("train_gpt").take_step = dying_at(int(os.environ["DIES_AT"]), 1)
    example("train_gpt").main()
