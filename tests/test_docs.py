"""Every block of Python in these pages runs, page by page, in order, in one process; warnings are errors.

What a reader need not see comes before a block as ``<!-- run first ... -->``. A block that one process can't run is
marked ``<!-- compiled only: why -->``, and is compiled.
"""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

import zero_shard
from zero_shard.cli import make_parser

_ROOT = Path(__file__).parent.parent
_PAGES = {
    str(path.relative_to(_ROOT)): path.read_text(encoding="utf-8")
    for path in [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]
}
_BLOCK = re.compile(
    r"^<!-- run first\n(?P<hidden>.*?)^-->$"
    r"|(?P<mark>^<!-- compiled only: [^\n]+ -->\n+)?^```python[^\n]*\n(?P<shown>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
# Names that the one block of this page takes for granted; a comment in it would be seen on PyPI.
_BEFORE = {
    "README.md": "import torch\nclass model(torch.nn.Linear):\n    def forward(self, batch):\n"
    "        return super().forward(batch).sum()\nmodel, loader = model(4, 4), [torch.ones(2, 4)]\n"
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's own functions, without a group
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # when torch imports files of its own
@pytest.mark.parametrize("page", [page for page, text in _PAGES.items() if "```python" in text])
def test_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = list(_BLOCK.finditer(_PAGES[page]))
    assert sum(block["shown"] is not None for block in blocks) == _PAGES[page].count("```python"), "blocks are seen"
    names: dict[str, Any] = {}
    exec(_BEFORE.get(page, ""), names)
    for block in blocks:
        line = _PAGES[page].count("\n", 0, block.start("hidden" if block["shown"] is None else "shown"))
        code = compile("\n" * line + (block["shown"] or block["hidden"]), page, "exec")  # errors name the page's line
        if not block["mark"]:
            exec(code, names)


def _commands() -> list[tuple[str, str]]:
    """Return what the pages call ``zero-shard`` with; of choices the first, and what is optional, too."""
    found = []
    for page, text in _PAGES.items():
        for block in re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            found += [(page, line) for line in re.findall(r"^(?:\$ )?zero-shard ([^#\n]*)", block, re.MULTILINE)]
    return found


def test_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(parser: argparse.ArgumentParser, message: str) -> None:
        raise ValueError(message)

    monkeypatch.setattr(argparse.ArgumentParser, "error", fail)
    commands = _commands()
    assert len(commands) > 10
    for page, command in commands:
        try:
            make_parser().parse_args(shlex.split(re.sub(r"[][]|[|]\S+", " ", command)))
        except ValueError as error:
            pytest.fail(f"{page}: zero-shard {command}: {error}")


def test_reference_has_every_name_and_every_command() -> None:
    names, commands = (_PAGES[f"docs/reference/{page}.md"] for page in ("api", "config"))
    missing = [each for each in zero_shard.__all__ if f":: zero_shard.{each}\n" not in names + commands]
    assert not missing
    subcommands = next(each for each in make_parser()._actions if each.dest == "command").choices
    assert subcommands is not None
    assert not [each for each in subcommands if f"`zero-shard {each}" not in commands]


def test_pictures_are_those_that_the_script_draws() -> None:
    pictures = runpy.run_path(str(_ROOT / "docs" / "diagrams.py"))["PICTURES"]
    assert len(pictures) == 4
    for name, draw in pictures.items():
        path = _ROOT / "docs" / "img" / f"{name}.svg"
        assert path.read_text(encoding="utf-8") == draw().svg(), f"{path} is old; run python docs/diagrams.py"


def test_links_lead_to_files() -> None:
    """Where sphinx is installed, `make docs` looks at anchors, too."""
    for page, text in _PAGES.items():
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
            assert ((_ROOT / page).parent / target).exists(), f"{page} links to {target}"
