"""Build the compiled kernels where that is possible; elsewhere leave them out and write down why.

Installing never fails for want of a compiler, nvcc or CUDA; metadata needs none of them, nor torch.
Environment variables:

    ZERO_SHARD_CPU, ZERO_SHARD_CUDA    0: leave that part out; 1: stop if it cannot be built; unset: try
    ZERO_SHARD_CUDA_ARCHS              compute capabilities, default "80,90"; the last is also kept as PTX
    ZERO_SHARD_WERROR=1                warnings of the compilers are errors
    CC, CXX, CUDACXX, CUDA_HOME        the tools, as everywhere
"""

import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

TARGET_TORCH = (2, 10)  # the stable ABI that csrc/register*.cpp is written for
MACROS = [("TORCH_TARGET_VERSION", f"0x{TARGET_TORCH[0]:02x}{TARGET_TORCH[1]:02x}000000000000")]
FLAGS = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"]
# One arithmetic on every path: no contraction. The others let the loops vectorise without changing a bit.
LOOP_FLAGS = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"]
X86_LOOPS = {
    "avx2": ["-mavx2"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"],
}
NVCC_FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-Xcompiler=-fPIC,-Wall,-Wextra,-fvisibility=hidden"]
ROOT = Path(__file__).parent
WERROR = os.environ.get("ZERO_SHARD_WERROR") == "1"


class Missing(Exception):
    """A part cannot be built here; the text says why."""


def find_torch():
    """Return the directory of the torch that will run the extension, and what its version.py says.

    Nothing of torch is imported. pip's build isolation hides the target environment by PYTHONPATH; -E looks
    past that.
    """
    code = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s else '')"
    for flags in ([], ["-E"]):
        command = [sys.executable, *flags, "-c", code]
        origin = subprocess.run(command, cwd=os.sep, capture_output=True, text=True).stdout.strip()
        if origin:
            info = runpy.run_path(str(Path(origin).parent / "version.py"))
            if tuple(int(n) for n in re.findall(r"\d+", info["__version__"])[:2]) < TARGET_TORCH:
                raise Missing(f"torch 2.10 or newer is needed, found {info['__version__']}")
            return Path(origin).parent, info
    raise Missing("torch was not found when zero_shard was installed")


def find_cuda(info):
    """Return nvcc and the toolkit that it says it belongs to; it may be a wrapper script outside of it."""
    torch_text = f"torch {info['__version__']} was built for CUDA {info['cuda']}".replace("CUDA None", "no CUDA")
    toolkit_bin = os.path.join(os.environ.get("CUDA_HOME", ""), "bin")
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or shutil.which("nvcc", path=toolkit_bin)
    if not nvcc:
        raise Missing(f"no nvcc was found, and {torch_text}")
    try:
        version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        dryrun = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True).stderr
    except OSError as error:
        raise Missing(f"{nvcc} does not run ({error}), and {torch_text}") from None
    release = re.search(r"release (\d+)\.(\d+)", version)
    if not release or release[1] != (info["cuda"] or "").split(".")[0]:
        raise Missing(f"nvcc is {release[0] if release else 'of unknown version'}, but {torch_text}")
    top = re.search(r"^#\$ TOP=(.+)$", dryrun, re.MULTILINE)
    return nvcc, Path(top[1]).resolve() if top else Path(nvcc).resolve().parent.parent


class BuildKernels(build_ext):
    """Build zero_shard/_C.so. It is no Python module: the stable ABI serves every Python and later torch."""

    def get_ext_filename(self, fullname):
        """Return the name without a Python tag."""
        return os.path.join(*fullname.split(".")) + ".so"

    def run(self):
        """Note whether the library goes beside the sources; setuptools clears the flag meanwhile."""
        self.is_in_source = bool(self.inplace or self.editable_mode)
        super().run()

    def build_extension(self, ext):
        """Build what can be, and leave the reasons for the rest in _build.json, for zero_shard/ops.py."""
        target = Path(self.get_ext_fullpath(ext.name))
        package_dirs = [target.parent] + [ROOT / "zero_shard"] * self.is_in_source
        for package_dir in package_dirs:  # an earlier build's library must not outlive a failure
            (package_dir / "_C.so").unlink(missing_ok=True)
        notes = {}
        self.attempt("cpu", notes, self.build_library, target, notes)
        if "cpu" in notes:
            notes["cuda"] = notes["cpu"]
        for package_dir in package_dirs:
            package_dir.mkdir(parents=True, exist_ok=True)
            (package_dir / "_build.json").write_text(json.dumps(notes) + "\n", encoding="utf-8")

    def attempt(self, part, notes, step, *args):
        """Do a step; where that is impossible note the reason, or stop if the part was asked for."""
        variable = f"ZERO_SHARD_{part.upper()}"
        asked = os.environ.get(variable)
        try:
            if asked == "0":
                raise Missing(f"left out by {variable}=0")
            return step(*args)
        except (Missing, CCompilerError, BaseError) as error:
            reason = str(error) if isinstance(error, Missing) else f"the compiler failed: {error}"
            if asked == "1":
                sys.exit(f"zero_shard: {variable}=1, but that part cannot be built: {reason}")
            notes[part] = reason
            print(f"zero_shard: no compiled {part} kernels ({reason}); the slower path is used", file=sys.stderr)
            return []

    def build_library(self, target, notes):
        """Compile both parts and link them into one library."""
        torch_dir, info = find_torch()
        cuda_objects = self.attempt("cuda", notes, self.compile_cuda, torch_dir, info)
        objects = [*self.compile_cpu(torch_dir), *cuda_objects]
        # No rpath: Torch's libraries are in memory when this one is loaded.
        libraries = ["torch", "torch_cpu", "c10"] + ["torch_cuda"] * bool(cuda_objects)
        directories = [str(torch_dir / "lib")]
        self.compiler.link_shared_object(objects, str(target), None, libraries, directories, target_lang="c++")

    def compile_one(self, name, source, macros, flags):
        """Compile one C++ file into a directory of its own name; return the object."""
        flags = [*FLAGS, *flags, *["-Werror"] * WERROR]
        output_dir = os.path.join(self.build_temp, name)
        return self.compiler.compile([source], output_dir, macros, extra_postargs=flags)[0]

    def compile_cpu(self, torch_dir):
        """Compile the loops once for each instruction set, their dispatch, and the registration."""
        is_x86 = platform.machine().lower() in ("x86_64", "amd64")
        jobs = [("cpu", "csrc/cpu/dispatch.cpp", [("ZERO_SHARD_HAS_X86_LOOPS", "1")] * is_x86, [])]
        for name, flags in {"scalar": [], **(X86_LOOPS if is_x86 else {})}.items():
            jobs.append((name, "csrc/cpu/loops.cpp", [("ZERO_SHARD_ISA", name)], [*LOOP_FLAGS, *flags]))
        for source in ("csrc/checker.cpp", "csrc/register.cpp", "csrc/register_cpu.cpp"):
            jobs.append(("cpu", source, MACROS, [f"-isystem{torch_dir / 'include'}"]))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda job: self.compile_one(*job), jobs))

    def compile_cuda(self, torch_dir, info):
        """Compile the kernels and their registration; the CUDA runtime is linked as torch's own will be."""
        nvcc, toolkit = find_cuda(info)
        runtimes = [path for lib in ("lib64", "lib") for path in (toolkit / lib).glob("libcudart.so*")]
        if not runtimes:
            raise Missing(f"there is no libcudart.so in {toolkit}")
        archs = os.environ.get("ZERO_SHARD_CUDA_ARCHS", "80,90").split(",")
        flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        flags += [f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}"]
        flags += ["-Werror=all-warnings"] * WERROR
        macros, includes = [*MACROS, ("USE_CUDA", "1")], [f"-isystem{torch_dir / 'include'}"]
        objects = [self.compile_one("cuda", "csrc/register_cuda.cpp", macros, includes)]
        for source in sorted(path.relative_to(ROOT) for path in ROOT.glob("csrc/cuda/*.cu")):
            objects.append(os.path.join(self.build_temp, "cuda", f"{source.stem}.o"))
            command = [nvcc, *NVCC_FLAGS, *flags, "-c", str(source), "-o", objects[-1]]
            if subprocess.run(command).returncode != 0:
                raise Missing(f"{nvcc} failed on {source}")
        return [*objects, str(runtimes[0])]


if __name__ == "__main__":
    sources = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("csrc/**/*.cpp"))]
    extension = Extension("zero_shard._C", sources, optional=True)  # the package is complete without it
    setup(ext_modules=[extension], cmdclass={"build_ext": BuildKernels})
