"""Two hosts with two ranks each, as network namespaces: what crosses the link between them, and what if it is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # as when the script is run

import hosts  # noqa: E402

_REASON = hosts.why_not()
pytestmark = pytest.mark.skipif(bool(_REASON), reason=f"two hosts: {_REASON}")

_TIMEOUT_S = 4.0
_MBIT = 50.0
# Config, backwards per step; P bytes that cross the link per step from each host. Every pass over the parameters costs
# P (H-1)/H on two hops: H = 2 hosts, whatever the ranks on each.
_WAYS: list[tuple[dict[str, Any], int, float]] = [
    ({"stage": 2}, 1, 1.0),  # reduce, gather
    ({"stage": 2}, 3, 2.0),
    ({"stage": 2, "shard_size": 2}, 3, 1.0),  # sums of each half there and back
    ({"stage": 3}, 3, 4.5),
    ({"stage": 3, "shard_size": 2}, 3, 1.0),
]
# Headers, acknowledgements, messages of gloo, the agreements of every step and the barriers of the test.
_DEVICE_LIMIT = 1.06


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What every rank has measured; the link is lost at the end."""
    ways = [{"config": config, "num_micros": num_micros} for config, num_micros, _ in _WAYS]
    return hosts.measure(ways, 150, mbit=_MBIT, num_counted=2, num_timed=1, drop_link=True, lost_timeout_s=_TIMEOUT_S)


def test_the_link_between_hosts_carries_each_sum_once(found: list[dict[str, Any]]) -> None:
    """By the counters of the link, and by the ranks' own."""
    for number, (config, num_micros, multiple) in enumerate(_WAYS):
        rows = [each["rows"][number] for each in found]
        for row in rows:
            measured = row["link_nbytes"] / row["params_nbytes"]
            where = f"{config}, {num_micros} backwards: {measured:.3f} P over the link"
            assert multiple <= measured <= _DEVICE_LIMIT * multiple, where
        counted = sum(row["across_nbytes"] for row in rows) / len(rows) * 2 / rows[0]["params_nbytes"]
        assert counted == pytest.approx(multiple, rel=0.02), f"{config}: ranks say {counted:.3f} P"


def test_a_slow_link_favours_copies_on_each_host(found: list[dict[str, Any]]) -> None:
    times = {(str(row["config"]), row["num_micros"]): row["step_s"] for row in found[0]["rows"]}
    for stage, gain in ((2, 1.2), (3, 1.5)):  # the link's bytes fall by 2 and 4.5; the rest of the step stays
        full, hybrid = times[str({"stage": stage}), 3], times[str({"stage": stage, "shard_size": 2}), 3]
        assert gain * hybrid < full, f"stage {stage}: {full:.3f} s, with shard_size=2 {hybrid:.3f} s"


def test_a_host_that_drops_off_makes_every_rank_raise_in_time(found: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(found):
        text, after_s = each["lost"]["error"], each["lost"]["after_s"]
        assert after_s < _TIMEOUT_S + 4, f"rank {rank} took {after_s:.1f} s"
        assert f"RuntimeError: zero_shard: rank {rank} was waiting for the gradients of bucket" in text, text
        assert f" from rank {(rank + 2) % 4}, but a peer" in text, text


def test_no_namespace_is_left(found: list[dict[str, Any]]) -> None:
    with pytest.raises(ZeroDivisionError), hosts.Hosts() as pair:
        assert set(pair.names) <= set(_namespaces())
        raise ZeroDivisionError
    assert not [name for name in _namespaces() if name.startswith(f"zero-shard-{os.getpid()}-")]


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines()]
