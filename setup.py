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
from setuptools.command.bdist_wheel import bdist_wheel
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


def find_cuda():
    """Return torch's directory, nvcc, the toolkit that nvcc says it belongs to, and its release.

    nvcc may be a wrapper outside of the toolkit. The last place looked at is where the extra `cuda` puts it.
    """
    torch_dir, info = find_torch()
    torch_text = f"torch {info['__version__']} was built for CUDA {info['cuda']}".replace("CUDA None", "no CUDA")
    major = (info["cuda"] or "").split(".")[0]
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    for toolkit in (os.environ.get("CUDA_HOME", ""), torch_dir.parent / "nvidia" / f"cu{major}"):
        nvcc = nvcc or shutil.which("nvcc", path=os.path.join(toolkit, "bin"))
    if not nvcc:
        raise Missing(f"no nvcc was found, and {torch_text}")
    try:
        version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        dryrun = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True).stderr
    except OSError as error:
        raise Missing(f"{nvcc} does not run ({error}), and {torch_text}") from None
    release = re.search(r"release (\d+)\.(\d+)", version)
    if not release or release[1] != major:
        raise Missing(f"nvcc is {release[0] if release else 'of unknown version'}, but {torch_text}")
    top = re.search(r"^#\$ TOP=(.+)$", dryrun, re.MULTILINE)
    toolkit = Path(top[1]).resolve() if top else Path(nvcc).resolve().parent.parent
    return torch_dir, nvcc, toolkit, f"{release[1]}.{release[2]}"


class BuildKernels(build_ext):
    """Build zero_shard/_C.so and _C_cuda.so.

    They are no Python modules, and the stable ABI serves every Python and later torch. There are two, because the
    second one loads only where torch was built for CUDA.
    """

    def get_ext_filename(self, fullname):
        """Return the name without a Python tag."""
        return os.path.join(*fullname.split(".")) + ".so"

    def run(self):
        """Note whether the library goes beside the sources; setuptools clears the flag meanwhile."""
        self.is_in_source = bool(self.inplace or self.editable_mode)
        super().run()

    def build_extensions(self):
        """Build what can be, and leave the reasons for the rest in _build.json, for zero_shard/ops.py."""
        targets = [Path(self.get_ext_fullpath(ext.name)) for ext in self.extensions]
        package_dirs = [targets[0].parent] + [ROOT / "zero_shard"] * self.is_in_source
        for package_dir in package_dirs:  # an earlier build's library must not outlive a failure
            for target in targets:
                (package_dir / target.name).unlink(missing_ok=True)
        notes = {}
        cuda = self.attempt("cuda", notes, find_cuda)  # first, to stop at once where it was asked for in vain
        checks = self.attempt("cpu", notes, self.build_cpu, targets[0])
        if cuda:
            *tools, notes["cuda_release"] = cuda
            self.attempt("cuda", notes, self.build_cuda, targets[1], checks, *tools)
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

    def link(self, objects, target, torch_dir, libraries):
        """Link one library. No rpath: torch's libraries are in memory when it is loaded."""
        directories = [str(torch_dir / "lib")]
        self.compiler.link_shared_object(objects, str(target), None, libraries, directories, target_lang="c++")

    def compile_one(self, name, source, macros, flags):
        """Compile one C++ file into a directory of its own name; return the object."""
        flags = [*FLAGS, *flags, *["-Werror"] * WERROR]
        output_dir = os.path.join(self.build_temp, name)
        return self.compiler.compile([source], output_dir, macros, extra_postargs=flags)[0]

    def build_cpu(self, target):
        """Compile the loops once for each instruction set, their dispatch, and the registration.

        Returns the objects of the checks, which both libraries hold.
        """
        torch_dir, _ = find_torch()
        is_x86 = platform.machine().lower() in ("x86_64", "amd64")
        jobs = [("cpu", "csrc/cpu/dispatch.cpp", [("ZERO_SHARD_HAS_X86_LOOPS", "1")] * is_x86, [])]
        for name, flags in {"scalar": [], **(X86_LOOPS if is_x86 else {})}.items():
            jobs.append((name, "csrc/cpu/loops.cpp", [("ZERO_SHARD_ISA", name)], [*LOOP_FLAGS, *flags]))
        for name in ("schemas", "register_cpu", "checker", "register"):
            jobs.append(("cpu", f"csrc/{name}.cpp", MACROS, [f"-isystem{torch_dir / 'include'}"]))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda job: self.compile_one(*job), jobs))
        self.link(objects, target, torch_dir, ["torch", "torch_cpu", "c10"])
        return objects[-2:]

    def build_cuda(self, target, checks, torch_dir, nvcc, toolkit):
        """Compile the kernels and their registration; the CUDA runtime is linked as torch's own will be."""
        if not checks:
            raise Missing("it needs the part for the CPU")
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
        libraries = ["torch", "torch_cpu", "torch_cuda", "c10"]
        self.link([*checks, *objects, str(runtimes[0])], target, torch_dir, libraries)


class BuildWheel(bdist_wheel):
    """One wheel for a platform."""

    def get_tag(self):
        """Return the tag: any Python 3, any ABI of Python's."""
        return "py3", "none", super().get_tag()[2]


if __name__ == "__main__":
    sources = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("csrc/**/*.cpp"))]
    # The package is complete without them.
    libraries = [Extension(f"zero_shard.{name}", sources, optional=True) for name in ("_C", "_C_cuda")]
    setup(ext_modules=libraries, cmdclass={"build_ext": BuildKernels, "bdist_wheel": BuildWheel})
