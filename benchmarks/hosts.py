"""Train on two hosts made of network namespaces, count what crosses the link between them, and time it slowed down.

    host 0: ranks 0, 1   --- veth pair: its counters, its rate (tc tbf) ---   host 1: ranks 2, 3

Every host is a namespace with one end of the link and its own torchrun; the two meet through torchrun's rendezvous.
Needs Linux, root and iproute2 (``ip`` and ``tc``), and leaves nothing behind:

    python benchmarks/hosts.py --mbit 200 --steps 3 --output benchmarks/results/hosts.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

RANK_SCRIPT = Path(__file__).with_name("hosts_rank.py")
DEVICE = "wire0"  # the end of the veth pair in every host
_PORT = 29555
_NUM_HOSTS = _NUM_LOCAL = 2

# What is compared by default: config, micro-batches per step.
DEFAULT_WAYS: list[dict[str, Any]] = [
    {"config": {"stage": stage, "shard_size": size}, "num_micros": micros}
    for micros in (1, 4)
    for stage in (2, 3)
    for size in (None, 2)
]


def why_not() -> str:
    """Return why namespaces can't be made here, "" if they can. Makes one, and removes it."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc (Debian: apt-get install iproute2) are not installed"
    name = f"zero-shard-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    try:
        if made.returncode == 0:
            made = subprocess.run(
                ["ip", "-n", name, "link", "add", "probe0", "type", "veth", "peer", "name", "probe1"],
                capture_output=True,
                text=True,
            )
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"network namespaces can't be made: {made.stderr.strip()}" if made.returncode else ""


class Hosts:
    """Two network namespaces joined by a veth pair. A context: leaving it ends their processes and removes them."""

    def __init__(self) -> None:
        self.names = [f"zero-shard-{os.getpid()}-{host}" for host in range(_NUM_HOSTS)]
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Hosts:
        try:
            for name in self.names:
                _run("ip", "netns", "add", name)
            first, second = self.names
            _run(*_in(first), "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", second)
            for host, name in enumerate(self.names):
                _run(*_in(name), "address", "add", f"{address(host)}/24", "dev", DEVICE)
                _run(*_in(name), "link", "set", DEVICE, "up")
                _run(*_in(name), "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:  # torchrun and what it has started
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def torchrun(
        self, script: Path, arguments: Sequence[str], folder: Path, expected: Sequence[Path], limit_s: float
    ) -> str:
        """Run a script under one torchrun per host, two ranks each; return what they have printed.

        Blocks until the expected files are there, all has ended, or the limit is reached.
        """
        for host, name in enumerate(self.names):
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes", str(_NUM_HOSTS), "--nproc-per-node", str(_NUM_LOCAL), "--rdzv-id", "hosts"]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address(0)}:{_PORT}"]
            command += ["--rdzv-conf", f"is_host={int(host == 0)}"]
            command += ["--local-addr", address(host), str(script), *arguments]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE}
            with (folder / f"host{host}.log").open("w", encoding="utf-8") as log:
                self._processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        deadline, has_ended = time.monotonic() + limit_s, False
        # Without its link torchrun waits for long for the other one to say goodbye.
        while not has_ended and not all(path.exists() for path in expected) and time.monotonic() < deadline:
            time.sleep(0.1)
            codes = [process.poll() for process in self._processes]
            has_ended = None not in codes or any(codes)
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(folder.glob("host*.log")))


def address(host: int) -> str:
    """Return the address of a host on the link."""
    return f"10.77.0.{host + 1}"


def measure(ways: Sequence[dict[str, Any]], limit_s: float, **settings: Any) -> list[dict[str, Any]]:
    """Run ``hosts_rank.py`` on two hosts of two ranks; return what every rank has found, in rank order.

    Args:
        ways: Each with ``config``, ``num_micros``, and maybe ``is_no_sync``.
        settings: ``mbit``, ``drop_link`` and so on: see `hosts_rank.Plan`.
    Raises:
        RuntimeError: A rank has found nothing; the text is what it has printed.
    """
    with tempfile.TemporaryDirectory(prefix="zero-shard-hosts-") as place, Hosts() as hosts:
        folder = Path(place)
        paths = [folder / f"{rank}.json" for rank in range(_NUM_LOCAL * _NUM_HOSTS)]
        plan = {"ways": list(ways), "folder": place, "device": DEVICE, **settings}
        printed = hosts.torchrun(RANK_SCRIPT, [json.dumps(plan)], folder, paths, limit_s)
        if not all(path.exists() for path in paths):
            raise RuntimeError(f"a rank has written nothing in {limit_s:g} s:\n{printed}")
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _in(name: str) -> tuple[str, ...]:
    return ("ip", "-n", name)


def _run(*command: str) -> None:
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        raise RuntimeError(f"{' '.join(command)}: {made.stderr.strip()}")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=200, help="rate of the slowed link")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5, help="timed steps, of which the median is shown")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    found = measure(
        DEFAULT_WAYS,
        900,
        mbit=arguments.mbit,
        num_layers=arguments.layers,
        width=arguments.width,
        num_timed=arguments.steps,
    )
    rows = found[0]["rows"]
    params_mib = found[0]["params_nbytes"] / 2**20
    print(f"\nparameters: {params_mib:.1f} MiB; link: {arguments.mbit:g} Mbit/s; 2 hosts x 2 ranks\n")
    print("| micro-batches | stage | shard_size | over the link, MiB per step and host | step on the slowed link, ms |")
    print("|---|---|---|---|---|")
    for row in rows:
        size = row["config"].get("shard_size") or "all"
        link = row["link_nbytes"] / 2**20
        print(f"| {row['num_micros']} | {row['config']['stage']} | {size} | {link:.2f} | {1e3 * row['step_s']:.0f} |")
    if arguments.output:
        settings = {key: value for key, value in vars(arguments).items() if key != "output"}
        report = {"settings": settings, "torch": torch.__version__, "cpus": os.cpu_count(), "ranks": found}
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
