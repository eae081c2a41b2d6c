"""What a rank says that it is doing."""

from __future__ import annotations

import threading
import time
import warnings

import pytest
import ranks
import torch
from torch import nn

import zero_shard
from zero_shard import phases
from zero_shard.collectives import pending
from zero_shard.phases import Phase


def test_innermost_phase_of_every_thread_is_known_and_time_adds_up() -> None:
    before = phases.seconds["for a test"]
    release, seen = threading.Event(), threading.Event()

    def work() -> None:
        with phases.in_background(), Phase("for a test", "elsewhere"):
            seen.set()
            release.wait()

    thread = threading.Thread(target=work)
    with Phase("outside"), Phase("for a test", "here") as here:
        assert here is None
        thread.start()
        seen.wait()
        own, other = phases.current()
        time.sleep(0.01)
    release.set()
    thread.join()
    assert (str(own), str(own.outer), str(other)) == (
        "zero_shard.for a test here",
        "zero_shard.outside",
        "zero_shard.for a test elsewhere",
    )
    assert phases.current() == []
    assert phases.seconds["for a test"] - before == pytest.approx(own.until_s - own.since_s)
    assert own.until_s - own.since_s >= 0.01


def test_phase_that_an_exception_ends_says_so() -> None:
    with pytest.raises(KeyError), Phase("outside"), Phase("inside"):
        raise KeyError
    outside, inside = list(phases.recent)[-2:]
    assert (outside.name, outside.error, inside.name, inside.error) == ("outside", KeyError, "inside", KeyError)
    assert phases.current() == []


def _names_in_a_step(stage: int) -> tuple[set[str], set[str], set[str]]:
    """Return ranges that a profiler saw in a step, where it counted time, and in what phases messages were sent."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = zero_shard.AdamW(model.parameters(), module=model, config={"stage": stage, "max_grad_norm": 1.0})
    senders: set[str] = set()

    def note(label: str) -> None:
        senders.update(str(phase) for phase in phases.current())

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)  # by torch 2.10, always
    step()
    before, pending.before_collective = dict(phases.seconds), note
    try:
        with torch.profiler.profile() as profiler:
            step()
    finally:
        pending.before_collective = None
    spent = {name for name, seconds in phases.seconds.items() if seconds > before.get(name, 0.0)}
    ranges = {event.name for event in profiler.events() if event.name.startswith("zero_shard.")}
    return ranges, spent, senders


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_profiler_shows_our_phases(stage: int) -> None:
    for ranges, spent, senders in ranks.run(2, _names_in_a_step, stage):
        names = {each.split(" ")[0].removeprefix("zero_shard.") for each in ranges}
        assert names == spent
        assert names == {"step", "norm", "reduce", "update", "publish", "wait"} | ({"gather"} if stage == 3 else set())
        assert any(each.startswith("zero_shard.reduce bucket 0 (") for each in ranges)
        assert any(each.startswith("zero_shard.wait the gradients of bucket 0") for each in ranges)
        if stage == 3:
            assert "zero_shard.gather 1" in ranges | senders
        assert any(each.startswith("zero_shard.reduce bucket 0 (") for each in senders)
