# SPDX-License-Identifier: Apache-2.0
"""Every public name says what it takes, gives and raises, and its example runs."""

from __future__ import annotations

import ast
import builtins
import doctest
import importlib
import inspect
import re
import runpy
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from docstrings import raised
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import stowage

ROOT = Path(__file__).resolve().parents[2]
MODULES = runpy.run_path(str(ROOT / "tools/site_reference.py"))["MODULES"]  # the site's pages
SPREAD = ("stowage.sharding", "stowage.training")  # whose examples may name a mesh
# Methods that say bytes of a Setting, which their class explains, and those that torch alone calls.
FORMULAS = ("stowage.training.scaling.Group.", "stowage.training.scaling.Weight.")
OF_TORCH = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
# Rates of some machine, as `measured_links` gives them.
LINKS = {
    "key": "a machine of 4 cores",
    "disk": 2e9,
    "cached": 6e9,
    "memcpy": 1e10,
    "linear": {"f32": {"read": 8e9, "multiply": 2e11}},
    "accelerators": {},
}
SLOW = "stowage.measured_links"  # it measures


def listed() -> dict[str, Any]:
    """Public functions and classes by their shortest name, each once."""
    found: dict[str, Any] = {}
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            thing = getattr(importlib.import_module(module), name)
            plain = inspect.isfunction(thing) or inspect.isclass(thing)
            if plain and not any(thing is other for other in found.values()):
                found[f"{module}.{name}"] = thing
    return found


def is_own(function: Callable[..., Any]) -> bool:
    """Not a peer's name, which the import of a facade enters."""
    return not function.__module__.startswith("stowage.compat")


def methods(name: str, kind: type) -> Iterator[tuple[str, Callable[..., Any], bool]]:
    """Public ones that the class itself defines; whether it is a property."""
    for key, value in vars(kind).items():
        plain = getattr(value, "fget", None) or getattr(value, "func", None)
        function = plain or getattr(value, "__func__", value)
        if not key.startswith("_") and inspect.isfunction(function) and is_own(function):
            yield f"{name}.{key}", function, plain is not None


PUBLIC = listed()
METHODS = [row for name, thing in PUBLIC.items() if inspect.isclass(thing)
           for row in methods(name, thing)]  # fmt: skip


def sections(thing: Any) -> dict[str, str]:
    text = inspect.cleandoc(thing.__doc__ or "")
    parts = re.split(r"^(Args|Returns|Raises|Example):\n", text, flags=re.M)
    return {"summary": parts[0].strip(), **dict(zip(parts[1::2], parts[2::2], strict=True))}


def said(section: str) -> list[str]:
    """The names that a section explains, in its order."""
    return re.findall(r"^    (\w+): \S", section, re.M)


def explained(section: str) -> dict[str, str]:
    """What a section says of each name."""
    lines = re.sub(r"\n      +", " ", section)  # each name in one
    return dict(re.findall(r"^    (\w+): (.+)", lines, re.M))


# ---- what a number counts, and how long a tensor is in each dimension ----
TENSOR = re.compile(r"(?:<class ')?(?:torch\.)?Tensor(?:'>)?(?: \| None)?")
SHAPE = re.compile(r"\[.*\]|\b(?:shape|size|scalar)")
NUMBER = re.compile(r"\b(?:int|float)\b")
UNIT = re.compile(
    r"(?i)\b(?:bytes?|seconds|rows?|columns|threads|steps|events|numbers?|counts?|uses|how many"
    r"|values|weights|relative error|power|multiple|seed|part|calls|shape|as above|as in)\b"
)


def unsaid(what: str, annotation: Any, text: str) -> list[str]:
    """What an explanation leaves open: the shape of a tensor, the unit of a number."""
    if TENSOR.fullmatch(str(annotation)) and not SHAPE.search(text):
        return [f"{what} must say a shape, says {text!r}"]
    if NUMBER.search(str(annotation)) and what != "seed" and not UNIT.search(text):
        return [f"{what} must say a unit, says {text!r}"]
    return []


def measures(function: Callable[..., Any], found: dict[str, str], is_property: bool) -> list[str]:
    signature, args = inspect.signature(inspect.unwrap(function)), explained(found.get("Args", ""))
    problems = [p for name, parameter in signature.parameters.items() if name in args
                for p in unsaid(name, parameter.annotation, args[name])]  # fmt: skip
    given = found["summary"] if is_property else found.get("Returns", "")
    return problems + unsaid("the result", signature.return_annotation, given)


def taken(function: Callable[..., Any]) -> list[str]:
    names = list(inspect.signature(inspect.unwrap(function)).parameters)
    return [name for name in names if name not in ("self", "cls")]


def faults(name: str, thing: Any, has_example: bool, is_property: bool = False) -> list[str]:
    found, problems = sections(thing), []
    if not found["summary"].endswith((".", "'.", ")")) and not found["summary"].endswith("?"):
        problems.append("must begin with a sentence")
    if has_example and ">>> " not in found.get("Example", ""):
        problems.append("must have an Example with >>> lines")
    if name.startswith(FORMULAS) or name.endswith(OF_TORCH):
        return problems
    if is_property:
        return problems + measures(thing, found, is_property)
    is_record = is_dataclass(thing) or (inspect.isclass(thing) and issubclass(thing, tuple))
    if inspect.isclass(thing) and (is_record or issubclass(thing, Exception)):
        return problems
    function = constructor(thing) if inspect.isclass(thing) else thing
    if said(found.get("Args", "")) != taken(function):
        problems.append(f"Args must be {taken(function)}, are {said(found.get('Args', ''))}")
    gives = inspect.signature(inspect.unwrap(function)).return_annotation
    if not inspect.isclass(thing) and (gives not in (None, "None")) != ("Returns" in found):
        problems.append(f"Returns must stand where something is returned, which is {gives}")
    if missing := raised(function) - set(said(found.get("Raises", ""))):
        problems.append(f"Raises must have {sorted(missing)}")
    for kind in said(found.get("Raises", "")):
        if not hasattr(stowage, kind) and not hasattr(builtins, kind):
            problems.append(f"Raises must name exceptions, has {kind}")
    return problems + measures(function, found, False)


def fields(kind: type) -> dict[str, str]:
    """The fields of a record with the line that declares each."""
    for path in Path(stowage.__file__).parent.rglob("*.py"):
        text = path.read_text()
        ours = f"class {kind.__name__}" in text and "compat" not in path.parts
        for node in ast.parse(text).body if ours else ():
            if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                lines, rows = text.splitlines(), [n for n in node.body if type(n) is ast.AnnAssign]
                return {ast.unparse(row.target): lines[row.lineno - 1] for row in rows}
    raise AssertionError(f"no module defines {kind}")


def test_the_fields_of_records_are_explained() -> None:
    """By a comment behind them, or in the docstring."""
    for name, kind in PUBLIC.items():
        if inspect.isclass(kind) and (is_dataclass(kind) or issubclass(kind, tuple)):
            told = inspect.cleandoc(kind.__doc__ or "")
            silent = [field for field, line in fields(kind).items() if "#" not in line]
            assert not [f for f in silent if f"`{f}`" not in told and f"    {f}: " not in told], (
                name
            )


def constructor(kind: type) -> Callable[..., Any]:
    return kind.__new__ if "__new__" in vars(kind) else kind.__init__  # type: ignore[misc]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_explained(name: str) -> None:
    assert not faults(name, PUBLIC[name], has_example=True)


@pytest.mark.parametrize(("name", "method", "is_property"), METHODS, ids=[m[0] for m in METHODS])
def test_public_methods_are_explained(
    name: str, method: Callable[..., Any], is_property: bool
) -> None:
    assert not faults(name, method, has_example=False, is_property=is_property)


def test_a_missing_section_is_a_fault() -> None:
    def given(a: int, b: int) -> int:
        """Adds.

        Args:
            a: one.
        """
        if a < b:
            raise ValueError("no")
        return a + b

    texts = " ".join(faults("given", given, has_example=True))
    for part in ("Example", "Args must be ['a', 'b'], are ['a']", "Returns", "['ValueError']"):
        assert part in texts
    assert "a must say a unit, says 'one.'" in texts


def test_a_shape_that_is_not_said_is_a_fault() -> None:
    assert unsaid("x", "torch.Tensor", "the values.") and not unsaid("x", "Tensor", "[rows, 4].")


class Lenient(doctest.OutputChecker):
    """A line behind which nothing is written may print anything."""

    def check_output(self, want: str, got: str, flags: int) -> bool:
        return not want or super().check_output(want, got, flags)


def surroundings(name: str) -> dict[str, Any]:
    """What examples take as given: a model of two layers, and rows for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    names = {"stowage": stowage, "torch": torch, "nn": nn, "model": model, "links": LINKS}
    names["x"] = torch.randn(2, 64)
    if "peft" in name:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["0", "2"], r=4, init_lora_weights=False)
        names |= {"peft": peft, "config": config, "base": model}
    return names


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """A mesh of this process alone, for examples that spread a model."""
    if not request.getfixturevalue("name").startswith(SPREAD):
        yield {}
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield {
        "mesh": init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)),
        "fully_shard": fully_shard,
        "parallelize_module": parallelize_module,
        "ColwiseParallel": ColwiseParallel,
        "sharding": stowage.sharding,
    }
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n == SLOW else []) for n in PUBLIC]
)
def test_examples_run(
    name: str, mesh: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = sections(PUBLIC[name])["Example"]
    names = surroundings(name) | mesh
    example = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    printed: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(Lenient(), optionflags=flags)
    failed = runner.run(example, out=printed.append).failed
    assert not failed, "".join(printed)
