# SPDX-License-Identifier: Apache-2.0
"""Takes private names from torch and tells, by a line of JSON each, what stowage says then.

Run as a program with the names of the core and of corners. torch is imported once; each name is
taken in a process forked from that, since what is imported stays.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp
from torch import nn

FLAGS = ["torch.autograd.forward_ad._current_level", "torch.autograd.profiler._is_profiler_enabled"]


class Gone:
    """In the place of a class attribute, whose own place is a C type that nobody can change."""

    def __get__(self, *owner: object) -> None:
        raise AttributeError


def place(path: str) -> tuple[Any, str, Any]:
    """Who holds the name, and what it names; modules on the way are imported."""
    holder, _, name = path.rpartition(".")
    owner: Any = torch
    seen = "torch"
    for part in holder.split(".")[1:]:
        seen += f".{part}"
        owner = getattr(owner, part) if hasattr(owner, part) else importlib.import_module(seen)
    found = getattr(owner, name) if hasattr(owner, name) else importlib.import_module(path)
    return owner, name, found


def take(path: str) -> Callable[[], None]:
    """Takes the name from torch; what it returns puts it back."""
    owner, name, found = place(path)
    if isinstance(owner, type):
        setattr(owner, name, Gone())
    else:
        delattr(owner, name)
    if path in sys.modules:
        sys.modules[path] = None  # type: ignore[assignment]

    def put_back() -> None:
        setattr(owner, name, found)
        if path in sys.modules:
            sys.modules[path] = found

    return put_back


def tell(path: str, where: str, call: Callable[[], object]) -> None:
    try:
        call()
        said = ["none", ""]
    except Exception as error:
        said = [type(error).__name__, str(error)]
    print(json.dumps([path, where, *said]), flush=True)


def forked(call: Callable[[], None]) -> None:
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        try:
            call()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


# --- corners: the least that needs the name -------------------------------------------------------


def _imported(module: str) -> Callable[[], object]:
    return lambda: importlib.import_module(module)


def _called(module: str, name: str, *args: Any) -> Callable[[], object]:
    return lambda: getattr(importlib.import_module(module), name)(*args)


def _stowed() -> object:
    import stowage

    return stowage.stow(nn.Linear(64, 64), "nf4")


def _described() -> object:
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    spread = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
    return _called("stowage._shard.local_shards", "_rows_text", spread)()


def _moved() -> object:
    from stowage.compat.bitsandbytes.nn import Params4bit

    return Params4bit(torch.ones(64, 64), False).to("cpu", torch.float64)


def _built() -> object:
    return _called("stowage._model.files.factory", "build", lambda: nn.Linear(4, 4))()


def _hashed() -> object:
    from stowage.training.gathered_weight import Float8Weight

    return Float8Weight._stable_hash_for_caching(None)  # type: ignore[arg-type]


def _read_under_grad() -> object:
    from stowage._ops import library as ops

    def told(x: torch.Tensor) -> torch.Tensor:
        assert "version" in ops.text(ops.info())
        return x.sum()

    return torch.func.grad(told)(torch.ones(1))


CORNERS: dict[str, Callable[[], object]] = {
    "_make_subclass": _called(
        "stowage.compat.bitsandbytes.nn", "Params4bit", torch.ones(64, 64), False
    ),
    "get_unwrapped": _read_under_grad,
    "_parse_to": _moved,
    "_foreach_copy_": _imported("stowage.training"),
    "BypassAOTAutogradCache": _hashed,
    "_scaled_mm": _imported("stowage.training"),
    "FSDP_FLATTENED": _stowed,
    "compute_local_shape_and_global_offset": _described,
    "_module_state_mapping": _called("stowage._shard.reshard_check", "check_resharding"),
    "_apply": _imported("stowage.compat.bitsandbytes.nn"),
    "_load_from_state_dict": _imported("stowage.compat.bitsandbytes.nn"),
    "_save_to_state_dict": _imported("stowage.compat.bitsandbytes.nn"),
    "_device_constructors": _built,
}


def main(core: list[str], corners: list[str]) -> None:
    for path in core + FLAGS:
        forked(lambda path=path: (take(path), tell(path, "import", _imported("stowage"))))  # type: ignore[misc]
    for path in corners:
        place(path)  # imports what it stands in, before any is taken
    back = {path: take(path) for path in corners}
    importlib.import_module("stowage")  # needs none of them
    for path in corners:

        def one(path: str = path) -> None:
            for other in corners:
                if other != path:
                    back[other]()
            tell(path, "corner", CORNERS[path.rpartition(".")[2]])

        forked(one)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
