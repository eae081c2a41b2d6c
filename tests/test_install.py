"""Installing where there is no CUDA, no nvcc, no compiler, or no torch; the wheel; what an import costs.

Source: deepspeedai/DeepSpeed issues #6636 and #537: the installation fails for want of a CUDA toolkit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
COPIED = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "csrc", "zero_shard")
BUILD_TOOLS = ("setuptools", "pkg_resources", "_distutils_hack", "wheel", "packaging")
TIMEOUT_S = 120

# What a user would try first, with a known answer: the mean gradient of one rank is the gradient.
FIRST_STEP = """
import logging
logging.basicConfig(format="%(message)s")
import torch, zero_shard
from zero_shard import ops
weight = torch.nn.Parameter(torch.ones(4))
optimizer = zero_shard.AdamW([weight], lr=0.1, weight_decay=0.0)
(weight * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
optimizer.step()
exp_avg = optimizer.full_state_dict()["state"][0]["exp_avg"]
torch.testing.assert_close(exp_avg, torch.tensor([0.1, 0.2, 0.3, 0.4]))
torch.testing.assert_close(weight.detach(), torch.full((4,), 0.9))
print(zero_shard.__file__)
print(ops.describe())
"""


class Environment:
    """A virtual environment that sees the packages of this one, with or without torch; and a source copy."""

    def __init__(self, root: Path, has_torch: bool = True) -> None:
        self.root = root
        venv.create(root / "env", with_pip=False)
        self.python = root / "env" / "bin" / "python"
        self.source = root / "source"
        self.source.mkdir()
        for name in COPIED:
            path = REPOSITORY / name
            if path.is_dir():
                ignore = shutil.ignore_patterns("__pycache__", "_C*", "_build.json")
                shutil.copytree(path, self.source / name, ignore=ignore)
            elif path.exists():
                shutil.copy(path, self.source / name)
        # Links to the packages, and not the directory itself: pip would find an installed zero_shard there.
        self.packages = root / "packages"
        self.packages.mkdir()
        for path in Path(pytest.__file__).parent.parent.iterdir():
            is_ours = "zero_shard" in path.name or path.suffix == ".pth"
            is_wanted = not is_ours if has_torch else path.name.split("-")[0] in BUILD_TOOLS
            if is_wanted:
                (self.packages / path.name).symlink_to(path)
        self.site_packages = next((root / "env").glob("lib/python*/site-packages"))
        (self.site_packages / "packages.pth").write_text(f"{self.packages}\n")

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ZERO_SHARD", "CUDA", "PYTHON", "PIP_"))
        }
        # Only the system's tools, so that no nvcc is found.
        environment |= {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **variables}
        return subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )

    def pip(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        options = ("--disable-pip-version-check", "--no-input")
        return self.run(sys.executable, "-m", "pip", f"--python={self.python}", *options, *arguments, **variables)

    def install(self, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.pip(
            "install",
            "--no-index",
            "--no-deps",
            "--no-build-isolation",
            "--verbose",
            str(self.source),
            **variables,
        )

    def first_step(self) -> list[str]:
        """Run it, and return what it printed: where the package is, the active kernels, the log."""
        result = self.run(str(self.python), "-W", "error", "-c", FIRST_STEP)
        assert result.returncode == 0, result.stderr
        where, kernels = result.stdout.splitlines()
        assert Path(where).is_relative_to(self.site_packages)
        return [kernels, *result.stderr.splitlines()]

    def notes(self) -> dict[str, str]:
        notes: dict[str, str] = json.loads((self.site_packages / "zero_shard" / "_build.json").read_text())
        return notes


def stub_nvcc(directory: Path) -> str:
    """Return a PATH with an nvcc of long ago in front."""
    directory.mkdir()
    stub = directory / "nvcc"
    stub.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 9.0, V9.0.176'\n")
    stub.chmod(0o755)
    return f"{directory}:/usr/bin:/bin"


def quick_compiler(directory: Path) -> str:
    """Return g++ without its optimisations, which take most of its time: the wheel is installed here, not timed."""
    script = directory / "quick-g++"
    script.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that comes of the source distribution, with a compiler and an unfit nvcc."""
    if shutil.which("g++", path="/usr/bin:/bin") is None:
        pytest.skip("no C++ compiler")
    root = tmp_path_factory.mktemp("wheel")
    environment = Environment(root)
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(root)!r})"
    command = f"cd {environment.source} && {environment.python} -c {code!r}"
    result = environment.run("/bin/sh", "-c", command)
    assert result.returncode == 0, result.stdout + result.stderr
    (archive,) = root.glob("*.tar.gz")
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(root))
    tools = {"PATH": stub_nvcc(root / "bin"), "CXX": quick_compiler(root / "bin")}
    result = environment.pip("wheel", *options, str(archive), ZERO_SHARD_CPU="1", **tools)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = root.glob("*.whl")
    return built


def test_the_wheel_serves_every_python_and_needs_no_compiler(wheel: Path, tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    no_tools = {"PATH": str(tmp_path), "CC": "/bin/false", "CXX": "/bin/false"}
    result = environment.pip("install", "--no-index", "--no-deps", str(wheel), **no_tools)
    assert result.returncode == 0, result.stdout + result.stderr
    kernels, *log = environment.first_step()
    assert "cpu: native" in kernels
    assert log == []
    assert "release 9.0" in environment.notes()["cuda"], "the part for CUDA is left out"
    assert re.fullmatch(r"zero_shard-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)
    report = environment.site_packages / "zero_shard" / "reporting"
    assert {path.suffix for path in report.glob("page.*")} == {".py", ".html", ".css", ".js"}


def test_what_the_wheel_and_the_source_distribution_hold(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("METADATA"))
    assert {"zero_shard/py.typed", "zero_shard/_build.json", "zero_shard/_C.so"} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"zero_shard"}
    assert {"cuda", "bench"} <= set(re.findall(r"^Provides-Extra: (\w+)$", metadata, re.MULTILINE))
    (source,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    needed = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "csrc").rglob("*") if path.is_file()}
    assert needed | {"setup.py", "pyproject.toml", "LICENSE", "README.md", "zero_shard/py.typed"} <= held


def test_a_part_that_was_asked_for_stops_the_installation(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    asked = environment.install(PATH=stub_nvcc(tmp_path / "bin"), ZERO_SHARD_CUDA="1")
    text = asked.stdout + asked.stderr
    assert asked.returncode != 0
    assert "ZERO_SHARD_CUDA=1" in text
    assert "nvcc is release 9.0, but torch 2." in text


def test_install_without_compiler(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    result = environment.install(CC="/bin/false", CXX="/bin/false")
    assert result.returncode == 0, result.stdout + result.stderr
    reason = environment.notes()["cpu"]
    assert reason.startswith("the compiler failed:")
    assert "/bin/false" in reason
    kernels, *log = environment.first_step()
    assert f"cpu: PyTorch twins ({reason})" in kernels
    assert log == [f"zero_shard: no compiled cpu kernels ({reason}); the slower PyTorch path is used."]

    asked = environment.install(CC="/bin/false", CXX="/bin/false", ZERO_SHARD_CPU="1")
    assert asked.returncode != 0
    assert "ZERO_SHARD_CPU=1, but that part cannot be built" in asked.stdout + asked.stderr


def test_a_failed_build_leaves_no_old_library_behind(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    library = environment.source / "zero_shard" / "_C.so"
    library.write_bytes(b"left over")
    build = (str(environment.python), str(environment.source / "setup.py"), "build_ext", "--inplace")
    result = environment.run("/bin/sh", "-c", f"cd {environment.source} && {' '.join(build)}", CXX="/bin/false")
    assert result.returncode == 0, result.stderr
    assert not library.exists()


def test_metadata_without_torch(tmp_path: Path) -> None:
    environment = Environment(tmp_path, has_torch=False)
    assert environment.run(str(environment.python), "-c", "import torch").returncode != 0
    result = environment.pip(
        "download",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--dest",
        str(tmp_path),
        str(environment.source),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_install_without_torch_says_so(tmp_path: Path) -> None:
    environment = Environment(tmp_path, has_torch=False)
    result = environment.install()
    assert result.returncode == 0, result.stdout + result.stderr
    assert environment.notes()["cpu"] == "torch was not found when zero_shard was installed"


def test_torch_is_found_through_build_isolation(tmp_path: Path) -> None:
    """As pip isolates: PYTHONPATH leads to a sitecustomize that takes the environment's packages away."""
    environment = Environment(tmp_path)
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    remove = f"import sys\nsys.path[:] = [p for p in sys.path if p != {str(environment.packages)!r}]\n"
    (overlay / "sitecustomize.py").write_text(remove)
    for name in BUILD_TOOLS:
        if (environment.packages / name).exists():
            (overlay / name).symlink_to(environment.packages / name)
    code = (
        "import importlib.util, sys\n"
        "assert importlib.util.find_spec('torch') is None\n"
        f"sys.path.insert(0, {str(environment.source)!r})\n"
        "import setup\n"
        "print(setup.find_torch()[0])\n"
    )
    result = environment.run(str(environment.python), "-c", code, PYTHONPATH=str(overlay))
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()) == environment.packages / "torch"


# What `import zero_shard` brings in beside torch and NumPy.
IMPORT = """
import sys
import numpy, torch
before = set(sys.modules)
import zero_shard
print(*(name for name in sys.modules if name not in before))
assert "save" in dir(zero_shard) and "torch.distributed.checkpoint" not in sys.modules
from zero_shard import load
assert zero_shard.checkpoint.load is load and zero_shard.load is load
assert not hasattr(zero_shard, "sav")
"""


def test_import_brings_in_nothing_heavy() -> None:
    """Checkpoints' engine, with sympy, FSDP and DTensor behind it, would be 700 modules and as long as torch itself."""
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    brought = [name for name in done.stdout.split() if name.split(".")[0] != "zero_shard"]
    assert {name.split(".")[0] for name in brought} - sys.stdlib_module_names <= {"torch"}
    assert len(brought) <= 20, brought
