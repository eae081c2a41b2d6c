"""Names of parameters without the traces of wrappers around modules."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_TRANSPARENT = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and torch's checkpoint_wrapper


def plain_names(module: nn.Module) -> Callable[[str], str]:
    """Return what gives a name in ``module`` the form without compilation, checkpointing and DDP around modules."""
    wrappers = [
        f"{name}." if name else "" for name, each in module.named_modules() if isinstance(each, DistributedDataParallel)
    ]

    def plain(name: str) -> str:
        for prefix in reversed(wrappers):  # the innermost first
            if name.startswith(f"{prefix}module."):
                name = prefix + name[len(prefix) + len("module.") :]
        for part in _TRANSPARENT:
            name = name.replace(part, "")
        return name

    return plain


def plain_named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter once, under its plain name."""
    plain = plain_names(module)
    for name, param in module.named_parameters():
        yield plain(name), param


def wrapped_params(names: dict[int, str]) -> list[str]:
    """Return which of the parameters, given by id, belong to a DistributedDataParallel that lives."""
    everything = gc.get_objects()
    # Types first: there are few of them, and hundreds of thousands of objects.
    wrappers = {kind for kind in set(map(type, everything)) if issubclass(kind, DistributedDataParallel)}
    found: dict[str, None] = {}
    for wrapper in (each for each in everything if type(each) in wrappers) if wrappers else ():
        found |= {names[id(param)]: None for param in wrapper.parameters() if id(param) in names}
    return list(found)
