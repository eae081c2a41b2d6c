"""Settings of the whole test run."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import ranks
import torch


@pytest.fixture(scope="session", autouse=True)
def _rank_processes() -> Iterator[None]:
    """End the rank processes after the last test; they start when the first test needs them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell has put into the background
    torch.set_num_threads(1)  # two cores: the test process must not compete with its ranks
    yield
    ranks.close()
