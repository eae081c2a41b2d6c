"""Load the compiled operators, or put their PyTorch twins in their place and say so.

All arithmetic on shards is done by the operators in ``Kernels``, documented in ``twins.py``. The compiled ones live in
``csrc`` and are registered as ``torch.ops.zero_shard.*``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_shard import apex_kernels, twins

_LOG = logging.getLogger("zero_shard")
_PACKAGE_DIR = Path(__file__).parent


class Kernels(NamedTuple):
    """The operators in one form, as ``select`` hands them out."""

    name: str  # "native", "torch" or "apex"
    flatten_: Callable[..., None]
    unflatten_: Callable[..., None]
    quantize_: Callable[..., None]
    reduce_slices_: Callable[..., None]
    sum_squares_: Callable[..., None]
    sum_pairs_: Callable[..., None]
    adamw_: Callable[..., None]


_OP_NAMES = Kernels._fields[1:]


def _build_notes() -> dict[str, str]:
    """Return what the build wrote down: why it left out "cpu" or "cuda", and the "cuda_release" that it was for."""
    try:
        notes: dict[str, str] = json.loads((_PACKAGE_DIR / "_build.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return notes


def _load_library(name: str, reason: str | None) -> str | None:
    """Load a library of the package; return why that is not possible, in the words of ``reason`` if it is not there."""
    path = _PACKAGE_DIR / name
    if not path.exists():
        return reason or "the extension was not built (python setup.py build_ext --inplace builds it)"
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        return f"{name} does not load: {error}"
    return None


def _unfit_cuda(notes: dict[str, str]) -> str | None:
    """Return why the library for CUDA is not for this torch, or None. Two releases of the CUDA runtime don't mix."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built for no CUDA"
    built_for = notes.get("cuda_release", torch.version.cuda)
    if built_for.split(".")[0] != torch.version.cuda.split(".")[0]:
        torch_text = f"torch {torch.__version__} for CUDA {torch.version.cuda}"
        return f"the kernels were built for CUDA {built_for}, but {torch_text}"
    return None


def _load() -> dict[str, str]:
    """Load the extension; return, for each device without compiled kernels, the reason."""
    notes = _build_notes()
    reason = _load_library("_C.so", notes.get("cpu"))
    unknown = [name for name in _OP_NAMES if not hasattr(torch.ops.zero_shard, name)]
    if unknown and not reason:
        reason = f"_C.so was built from another version: it has no {', '.join(unknown)}; build it again"
    if reason:
        return {"cpu": reason, "cuda": reason}
    for name in _OP_NAMES:
        torch.library.register_fake(f"zero_shard::{name}", lambda *args, **kwargs: None)
    reason = _unfit_cuda(notes) or _load_library("_C_cuda.so", notes.get("cuda"))
    if not reason:
        return {}
    for name in _OP_NAMES:
        torch.library.register_kernel(f"zero_shard::{name}", "cuda", _cuda_twin(name))
    return {"cuda": reason}


def _cuda_twin(name: str) -> Callable[..., None]:
    """Return the twin as the kernel for CUDA tensors of an extension that was built without CUDA."""
    twin: Callable[..., None] = getattr(twins, name)

    def kernel(*args: Any, **kwargs: Any) -> None:
        _warn_once("cuda")
        twin(*args, **kwargs)

    return kernel


def _warn_once(kind: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        _LOG.warning("zero_shard: no compiled %s kernels (%s); the slower PyTorch path is used.", kind, _MISSING[kind])


_NONE = Kernels("none", *(lambda *args: None for _ in _OP_NAMES))  # for tensors without numbers
_TWINS = Kernels("torch", *(getattr(twins, name) for name in _OP_NAMES))
_MISSING = _load()
_warned: set[str] = set()


def _native() -> Kernels:
    namespace: Any = torch.ops.zero_shard
    return Kernels("native", *(getattr(namespace, name).default for name in _OP_NAMES))


def missing_reason(device: torch.device | str = "cpu") -> str | None:
    """Return why ``device`` has no compiled kernels, or None if it has."""
    return _MISSING.get(torch.device(device).type)


def select(kernels: str = "auto", device: torch.device | str = "cpu") -> Kernels:
    """Return the operators in the form that ``kernels`` names, for tensors on ``device``.

    Args:
        kernels: "auto" (compiled where present, else the twins and one line in the log), "native", "torch", or "apex"
            (as "auto", with NVIDIA apex's update; see Note [apex]).
        device: Where the shards live; on the meta device there is nothing to do.
    Raises:
        ValueError: an unknown name.
        RuntimeError: "native" where the compiled part is missing, "apex" where that is; the message says why.
    """
    if kernels not in ("auto", "native", "torch", "apex"):
        raise ValueError(f"kernels must be 'auto', 'native', 'torch' or 'apex', got {kernels!r}")
    if torch.device(device).type == "meta":
        return _NONE
    if kernels == "torch":
        return _TWINS
    if kernels == "apex":
        return apex_kernels.load(select("auto", device), device if torch.device(device).type == "cuda" else None)
    kind = torch.device(device).type
    reason = missing_reason(device)
    if reason is None:
        return _native()
    if kernels == "native":
        raise RuntimeError(
            f"kernels='native' needs compiled {kind} kernels, which are missing: {reason}. "
            "Install a C++ compiler and reinstall, or use kernels='auto'."
        )
    _warn_once(kind)
    return _TWINS


def instruction_set() -> str:
    """Return the instruction set that the compiled CPU kernels use here: avx512, avx2 or scalar."""
    namespace: Any = torch.ops.zero_shard
    return str(namespace.cpu_instruction_set())


def describe() -> str:
    """Return one line that says which kernels are active and why."""
    parts = []
    for kind in ("cpu", "cuda"):
        reason = missing_reason(kind)
        if reason is not None:
            parts.append(f"{kind}: PyTorch twins ({reason})")
        else:
            parts.append(f"{kind}: native ({instruction_set()})" if kind == "cpu" else f"{kind}: native")
    return "kernels: " + "; ".join(parts)
