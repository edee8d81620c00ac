# SPDX-License-Identifier: Apache-2.0
"""`import stowage` is small, leaves the process as it was, and hides no name."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import fresh
import pytest
import torch

import stowage

EAGER = {"_ops", "_tensor", "_shard", "integrations", "tensor"}
MOST_MODULES = 65

# What an import may add to, where torch and Python keep registers: each entry is ours alone.
REGISTERS = {
    ("multiprocessing.reduction", "ForkingPickler", "_extra_reducers"),  # how weights are sent
    ("torch._weights_only_unpickler", "_marked_safe_globals_set"),  # types that torch.load makes
    ("torch.ops", "_dir"),  # operators, and what torch keeps of them
    ("torch.ops", "loaded_libraries"),
    ("torch._library.custom_ops", "OPDEF_TO_LIB"),
    ("torch.fx.node", "_side_effectful_functions"),
    ("torch.fx.experimental.proxy_tensor", "_side_effectful_functions"),
    ("torch.jit._builtins", "_builtin_table"),
    ("torch.library", "_defs"),
    ("torch.library", "_impls"),
    ("torch.library", "_keep_alive"),
    ("weakref", "finalize", "_registry"),
}
CACHES = ("inspect", "linecache", "re", "sys", "functools", "importlib")

# Lists what an import has changed: names of modules and of classes, and what containers hold.
CHANGES = """
import atexit, multiprocessing.reduction, os, signal, sys, warnings
import torch, torch.optim, torch.serialization, torch.utils.data

warnings.simplefilter("ignore")
forks = []
real = os.register_at_fork
os.register_at_fork = lambda **given: (forks.append(given), real(**given))


def entries(path, named):
    for name, value in named:
        yield (*path, name), id(value)
        if isinstance(value, (dict, list, set)):
            yield (*path, name, "holds"), tuple(map(id, value))


def state():
    found = {}
    for path, module in [*before]:
        for name, value in list(vars(module).items()):
            found.update(entries((path,), [(name, value)]))
            if isinstance(value, type) and value.__module__ == path:
                found.update(entries((path, name), list(vars(value).items())))
    found["atexit", "callbacks"] = atexit._ncallbacks()
    found["signals", "handlers"] = tuple(map(str, map(signal.getsignal, signal.valid_signals())))
    return found


before = [(p, m) for p, m in sys.modules.items() if m is not None and p[:2] != "__"]
was, names, finders = state(), set(sys.modules), [*sys.meta_path, *sys.path_hooks]
import stowage

assert finders == [*sys.meta_path, *sys.path_hooks]
assert not forks, forks
now = state()
for path in was.keys() | now.keys():
    made_of_import = path not in was and ".".join(path).removesuffix(".holds") in sys.modules
    operators = path not in was and path[0] == "torch.ops"  # a namespace that was asked for
    if was.get(path) != now.get(path) and not made_of_import and not operators:
        print(*[part for part in path if part != "holds"])
"""


def printed(text: str) -> list[str]:
    done = fresh.run(text)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_import_leaves_the_process_as_it_was() -> None:
    changed = {tuple(line.split()) for line in printed(CHANGES)}
    wrong = {path for path in changed - REGISTERS if path[0].partition(".")[0] not in CACHES}
    assert not wrong


def test_the_list_of_changes_sees_a_patch() -> None:
    patch = (
        "import stowage\nfrom torch.nn.modules import module\n"
        "torch.nn.Module.requires_grad_ = len\n"
        "module.register_module_buffer_registration_hook(print)\n"
    )
    changed = printed(CHANGES.replace("import stowage\n", patch))
    assert "torch.nn.modules.module Module requires_grad_" in changed
    assert "torch.nn.modules.module _global_buffer_registration_hooks" in changed


def test_an_import_loads_what_tensors_need() -> None:
    text = "import stowage, sys\nfor name in sys.modules: print(name)"
    own = [name for name in printed(text) if name.split(".")[0] == "stowage"]
    assert len(own) <= MOST_MODULES
    assert {name.split(".")[1] for name in own if "." in name} == EAGER


@pytest.mark.parametrize("name", [*stowage.__all__, *stowage._MODULES])
def test_names_come_without_another_import(name: str) -> None:
    assert name in dir(stowage)
    assert getattr(stowage, name) is not None


def test_no_other_name_is_shown() -> None:
    """A private module that an import binds, `linear` or `tiles`, would look like a function."""
    shown = [name for name in dir(stowage) if not name.startswith("__")]
    assert shown == sorted([*stowage.__all__, *stowage._MODULES])
    assert printed("import stowage; print(hasattr(stowage, 'linear'))") == ["False"]


def test_every_name_comes_first() -> None:
    """In a process of its own each, since a module that was imported for another name is there."""
    asked = "; ".join(f"stowage.{name}" for name in ("skips.AUTO", "loading.load", "stow"))
    assert printed(f"import stowage; {asked}; print(stowage.planning.plan is stowage.plan)") == [
        "True"
    ]


def test_unknown_names_are_refused_as_by_any_module() -> None:
    with pytest.raises(AttributeError, match="'stowage' has no attribute 'nothing'"):
        _ = stowage.nothing


def test_type_checkers_see_the_names_that_come_later() -> None:
    tree = ast.parse(Path(stowage.__file__).read_text())
    block, _ = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        (node.module.removeprefix("stowage."), alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
    later = {(module, name) for name, module in stowage._LATER.items()}
    assert seen == later | {("stowage", name) for name in stowage._MODULES}


WEIGHT = "weight = stowage.quantize(torch.randn(8, 8), 'int8:row')\n"


@pytest.mark.parametrize(
    ("what", "holds"),
    [
        (
            "model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)\n"
            "stowage.stow(model[1], 'int8:row', skip=())\n"
            "try: model.requires_grad_()\n"
            "except stowage.Unsupported: print(model[0].weight.requires_grad)",
            "False",
        ),
        (
            "module = nn.Module()\n" + WEIGHT + "module.register_buffer('w', weight)\n"
            "print(module.bfloat16().w.resting)",
            "int8:row",
        ),
        (
            "module = nn.Module()\n" + WEIGHT + "module.w = nn.Parameter(weight, False)\n"
            "print(*module.__dict__['_stowage_rested'])",
            "w",
        ),
    ],
    ids=["requires_grad_", "buffers", "what rested"],
)
def test_modules_know_of_weights_from_the_first_on(what: str, holds: str) -> None:
    assert printed(f"import stowage, torch; from torch import nn\n{what}") == [holds]


def test_training_watches_modules_from_the_first_layer_on() -> None:
    counted = "print(len(module._global_parameter_registration_hooks))"
    convert = "training.convert_float8(torch.nn.Sequential(torch.nn.Linear(16, 16)))"
    text = "import torch; from torch.nn.modules import module; from stowage import training"
    assert printed("\n".join([text, counted, convert, counted, convert, counted])) == list("011")


def test_torch_is_told_once() -> None:
    again = "hooks = dict(module._global_buffer_registration_hooks)\n" + WEIGHT
    text = "import stowage, torch; from torch.nn.modules import module\n" + WEIGHT + again
    compared = "print(len(hooks), hooks == module._global_buffer_registration_hooks)"
    assert printed(text + compared) == ["1 True"]


def test_files_of_weights_are_read_by_a_process_that_only_imports(tmp_path: Path) -> None:
    torch.save(stowage.quantize(torch.ones(8, 8), "int8:row"), tmp_path / "weight.pt")
    text = f"weight = torch.load({str(tmp_path / 'weight.pt')!r}, weights_only=True)"
    assert printed(f"import stowage, torch\n{text}\nprint(type(weight).__name__)") == [
        "StowedTensor"
    ]


def test_plans_are_unpickled_by_a_process_that_imports_nothing() -> None:
    name = pickle.dumps(stowage.Plan)
    text = f"import pickle\nprint(pickle.loads({name!r}).__name__)"
    assert subprocess.check_output([sys.executable, "-c", text], text=True) == "Plan\n"
