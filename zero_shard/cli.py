"""The command ``zero-shard``, also ``python -m zero_shard``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import zero_shard
from zero_shard import doctor
from zero_shard.checkpoint import command as ckpt
from zero_shard.interchange import command as import_config
from zero_shard.planning import command as plan_command
from zero_shard.reporting import command as report_command


def make_parser() -> argparse.ArgumentParser:
    """Return the parser, whose result's ``run`` is the subcommand."""
    parser = argparse.ArgumentParser(prog="zero-shard", description=zero_shard.__doc__)
    parser.add_argument("--version", action="version", version=f"zero_shard {zero_shard.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    examine = commands.add_parser(
        "doctor",
        help="which kernels are active and why, a self-check of each operator, and the measured bandwidth",
        description="Exits with 0 if all is well, with 1 if a self-check fails.",
    )
    examine.add_argument("--json", action="store_true", help="print JSON")
    examine.set_defaults(run=lambda given: doctor.run(is_json=given.json))
    ckpt.register(commands)
    plan_command.register(commands)
    report_command.register(commands)
    import_config.register(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code."""
    given = make_parser().parse_args(arguments)
    code: int = given.run(given)
    return code
