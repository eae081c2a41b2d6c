"""``zero-shard import-config``: the JSON config of DeepSpeed as settings and lines of a script."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from zero_shard.commands import check_place, written_whole
from zero_shard.interchange.deepspeed_config import import_config
from zero_shard.interchange.deepspeed_reading import read_json


def register(commands: Any) -> None:
    """Add the subcommand to those of ``zero-shard``."""
    parser = commands.add_parser(
        "import-config",
        help="turn the JSON config of DeepSpeed into a file of settings and the lines of a training script",
        description="Writes the settings, prints notes (as comments) and the lines for the script. Exits with 0, or "
        "with 2 and one line if the file can't be used or asks for what does not exist here; then nothing is written.",
    )
    parser.add_argument("source", type=Path, metavar="ds_config.json", help="what deepspeed.initialize gets as config")
    parser.add_argument("--out", type=Path, default=Path("zero_shard.toml"), help="file to write (zero_shard.toml)")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Write the settings and print the script."""
    if given.out.suffix != ".toml":
        raise ValueError(f"--out must end in .toml, got {given.out}")
    if given.out.exists():
        raise ValueError(f"{given.out} exists already; name another file with --out")
    check_place(given.out, "--out")
    imported = import_config(read_json(given.source), str(given.out))
    with written_whole(given.out, "--out") as half:
        half.write_text(imported.toml(given.source.name), encoding="utf-8")
    for note in imported.notes:
        print(f"# note: {note}")
    print(f"# settings: {given.out}\n\n{imported.script}", end="")
    return 0
