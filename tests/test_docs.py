"""Every Python snippet of these pages runs, in order, in one process, warnings being errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

_DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's own functions, without a group
@pytest.mark.parametrize(
    ("page", "num_snippets"),
    [
        ("checkpoint-format.md", 6),
        ("checkpoints.md", 4),
        ("plan.md", 2),
        ("monitor.md", 2),
        ("when-it-goes-wrong.md", 1),
    ],
)
def test_snippets_run(page: str, num_snippets: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(
        r"^```python\n(.*?)^```", (_DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert len(snippets) == num_snippets
    names: dict[str, Any] = {}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"{page}, snippet {number}", "exec"), names)
