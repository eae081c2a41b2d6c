"""The command ``zero-shard``, also ``python -m zero_shard``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import zero_shard
from zero_shard import doctor
from zero_shard.commands import text_of
from zero_shard.interchange import command as import_config
from zero_shard.planning import command as plan_command
from zero_shard.reporting import command as report_command

try:
    from zero_shard.checkpoint import command as ckpt
except ImportError as error:  # the engine of checkpoints is a part of torch that not every build has
    ckpt_error: ImportError | None = error
else:
    ckpt_error = None

# What a user can mend is told in one line; anything else is a fault of ours, and shows where it is.
_MENDABLE = (OSError, ValueError, TypeError, RuntimeError, ImportError)  # with NotImplementedError


def make_parser() -> argparse.ArgumentParser:
    """Return the parser, whose result's ``run`` is the subcommand."""
    parser = argparse.ArgumentParser(prog="zero-shard", description=zero_shard.__doc__)
    parser.add_argument("--version", action="version", version=f"zero_shard {zero_shard.__version__}")
    commands = parser.add_subparsers(required=True, dest="command", metavar="command")
    examine = commands.add_parser(
        "doctor",
        help="which kernels are active and why, a self-check of each operator, and the measured bandwidth",
        description="Exits with 0 if all is well, with 1 if a self-check fails.",
    )
    examine.add_argument("--json", action="store_true", help="print JSON")
    examine.set_defaults(run=lambda given: doctor.run(is_json=given.json))
    if ckpt_error is None:
        ckpt.register(commands)
    else:
        commands.add_parser("ckpt", prefix_chars="\0").add_argument("arguments", nargs="*")
        commands.choices["ckpt"].set_defaults(run=_no_checkpoints)
    plan_command.register(commands)
    report_command.register(commands)
    import_config.register(commands)
    return parser


def _no_checkpoints(_: argparse.Namespace) -> int:
    raise RuntimeError(
        f"checkpoints need a torch that was built with torch.distributed; install one: {ckpt_error}"
    ) from ckpt_error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code: 2, after one line on what is wrong, where its input can't be used."""
    given = make_parser().parse_args(arguments)
    try:
        code: int = given.run(given)
        print(end="", flush=True)
        return code
    except BrokenPipeError:  # the reader of our output has seen enough
        code, text = 0, ""
    except KeyboardInterrupt:
        code, text = 128 + signal.SIGINT, "interrupted"
    except _MENDABLE as error:
        code, text = 2, text_of(error)
    try:
        print(end="", flush=True)
    except OSError as error:  # Python would try again, and complain, at its end
        text = text and f"the output can't be written: {error.strerror}; make room, or send it elsewhere"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if text:
        print(f"zero-shard {given.command}: {text}", file=sys.stderr)
    return code
