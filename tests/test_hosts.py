"""Two hosts with two ranks each, as network namespaces: what crosses the link between them, and what if it is lost."""

from __future__ import annotations

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
_WAYS: list[dict[str, Any]] = [
    {"config": {"stage": stage, "shard_size": size}, "num_micros": micros}
    for stage, size, micros in ((2, None, 1), (2, 2, 1), (2, 2, 4), (3, None, 1), (3, 2, 1), (3, 2, 4))
]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return hosts.measure(_WAYS, 60, mbit=200, drop_link=True, timeout_s=_TIMEOUT_S)


def test_print(found: list[dict[str, Any]]) -> None:
    for row in found[0]["rows"]:
        print(
            row["config"],
            row["num_micros"],
            row["link_nbytes"] / row["params_nbytes"],
            row["sent_nbytes"] / row["floor_nbytes"],
            row["step_s"],
        )
    print([(each["lost"]) for each in found])
