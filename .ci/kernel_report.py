"""Check what the compiler made of the CUDA kernels; print one line for each source and architecture.

    python .ci/kernel_report.py LOG DIRECTORY

LOG is the output of nvcc with -Xptxas=-v, DIRECTORY holds the .ptx files that it kept. Of every kernel: no register is
spilled; there are launch bounds, and the registers allow as many blocks per multiprocessor as they ask for; memory is
read and written 16 bytes at a time (in PTX, which says what each thread does; ptxas keeps the width).
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

REGISTERS = 65536  # of a multiprocessor
REGISTER_UNIT = 8  # a thread gets a multiple of so many
ACCESS_BITS = 128
# Fewer 16-byte loads and stores than these, and the kernel has lost some; kernels not named need one of each.
WIDE_ACCESSES = {
    r"adamw_kernel.*PlainWeightIfEEfLb0": (4, 3),  # param, grad and both moments; all but grad
    r"adamw_kernel.*PlainWeightIfEEfLb1": (4 + 5, 3 + 4),  # without amsgrad, and with it
    r"adamw_blocks_kernel.*PlainWeightIfE": (4, 2),  # two vectors of param and grad
    r"reduce_kernelIff": (4, 2),
    r"reduce_kernelIf.*Quantized": (2, 2),  # codes are read four at a time: blocks of 260 bytes
    r"quantize_kernelIf": (2, 0),  # and written so
    r"quantize_kernel": (0, 0),
    r"sum_squares_kernel": (1, 0),
    r"add_partials_kernel|sum_pairs_kernel": (0, 0),  # they read the few numbers that the others have left
}


def check(log: str, directory: Path) -> list[str]:
    """Return what is wrong, and print the numbers of each architecture."""
    bounds, accesses = {}, {}
    for path in sorted(directory.glob("*.ptx")):
        for text in re.split(r"(?=\.entry )", path.read_text())[1:]:
            name = re.match(r"\.entry (\w+)", text)[1]
            threads, blocks = re.search(r"\.maxntid (\d+)", text), re.search(r"\.minnctapersm (\d+)", text)
            bounds[name] = int(threads[1]) * int(blocks[1]) if threads and blocks else 0
            found = re.findall(r"\b(ld|st)\.global(?:\.\w+)*?\.v(\d)\.[a-z](\d+)", text)
            wide = [kind for kind, length, width in found if int(length) * int(width) == ACCESS_BITS]
            counts = wide.count("ld"), wide.count("st")
            accesses[name] = min(accesses.get(name, counts), counts)  # of all architectures
    pattern = r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    wrong, registers = [], defaultdict(list)
    for name, arch, spilled, used in re.findall(pattern, log, re.DOTALL):
        registers[arch].append(int(used))
        rounded = -(-int(used) // REGISTER_UNIT) * REGISTER_UNIT
        if int(spilled) > 0:
            wrong.append(f"{arch} {name}: {spilled} bytes of registers spilled")
        if bounds.get(name, 0) == 0 or rounded * bounds[name] > REGISTERS:
            wrong.append(f"{arch} {name}: {used} registers, too many for {bounds.get(name, 0)} threads")
    for name, counts in accesses.items():
        wanted = next((wanted for known, wanted in WIDE_ACCESSES.items() if re.search(known, name)), (1, 1))
        if counts[0] < wanted[0] or counts[1] < wanted[1]:
            wrong.append(f"{name}: {counts} loads and stores of 16 bytes, expected at least {wanted}")
    if not registers or any(len(found) != len(accesses) for found in registers.values()):
        wrong.append(f"{len(accesses)} kernels in PTX, but {[len(found) for found in registers.values()]} in the log")
    for arch, found in registers.items():
        print(f"{directory.name} {arch}: {len(found)} kernels, {min(found)} to {max(found)} registers, none spilled")
    return wrong


if __name__ == "__main__":
    problems = check(Path(sys.argv[1]).read_text(), Path(sys.argv[2]))
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    sys.exit(bool(problems))
