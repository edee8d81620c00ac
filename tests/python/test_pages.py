# SPDX-License-Identifier: Apache-2.0
"""The tables of README.md and docs/ that the code can be asked for: storages, their parts and
names in files, error codes, environment variables."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from storages import formats
from torch import nn

import stowage
from stowage._ops import errors
from stowage._ops.storage import Storage

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
README, FORMATS, NUMBERS = "README.md", "docs/formats.md", "docs/numbers.md"


def refused(text: str) -> bool:
    try:
        Storage(text)
    except stowage.InvalidArgument:
        return True
    return False


CODES = [*formats(), "nf4:torchao"]
LOW_FIRST = [Storage(name) for name in formats() if Storage(name).packing == "low_first"]
PACKED = [storage.codes for storage in LOW_FIRST if not storage.record]
RECORDS = [storage for storage in LOW_FIRST if storage.record]
ZEROS = [name for name in formats() if not refused(f"{name}:zero")]
KINDS = ("none", "tensor", "row", "row2", "block<N>")
SHAPE = (256, 256)


def table(page: str, head: str) -> list[list[str]]:
    """Cells of the table whose first line begins so."""
    text = (ROOT / page).read_text()
    lines = text[text.index(f"\n| {head}") + 1 :].split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[2:]]


def quoted(cell: str) -> list[str]:
    return [name for text in re.findall(r"`([^`]+)`", cell) for name in text.split()]


def bits_per_weight(storage: str) -> float:
    of = Storage(storage).for_values(torch.float32)
    shape = (4, 512, 512) if of.kind == "row2" else (1024, 1024)
    return sum(t.itemsize * math.prod(s) for _, t, s in of.layout(shape)) * 8 / math.prod(shape)


def test_the_storages_of_the_readme() -> None:
    seen = set()
    for cell, bits, _ in table(README, "storage | bits per weight"):
        names = [name.replace("<N>", "128") for name in quoted(cell)]
        codes = {name.split(":")[0] for name in names if name[0] != ":"}
        names += [of + name for name in names if name[0] == ":" for of in codes]
        for storage in (Storage(name) for name in names if name[0] != ":"):
            seen.add((storage.codes, storage.kind))
            near = 0.3 if "scales" in bits else 0.005
            stated = [float(number) for number in re.findall(r"[\d.]+", bits)]
            got = bits_per_weight(storage.name)
            assert any(abs(got - number) < near for number in stated), (storage, got)
    legal = {
        (codes, kind)
        for codes in CODES
        for kind in (k.replace("<N>", "") for k in KINDS)
        if not refused(f"{codes}:{kind}{'64' * (kind == 'block')}" if kind != "none" else codes)
    }
    assert {(codes, kind) for codes, kind in legal if ":" not in codes and kind != "none"} <= seen
    assert {codes for codes, _ in seen} == {Storage(codes).codes for codes in CODES}


def test_the_storages_of_the_formats_page() -> None:
    rows = {
        name: (dict(zip(quoted(codes), bits.split(", "), strict=False)).get(name, bits), *rest)
        for codes, bits, *rest in table(FORMATS, "codes | bits | largest")
        for name in quoted(codes.replace(",", ""))
    }
    assert sorted(rows) == sorted(CODES)
    for name, (_, largest, scaling, default, _) in rows.items():
        plain = Storage(name)
        if largest:
            assert plain.largest == float(largest), name
        spelled = [s.rstrip("0123456789") if s != "row2" else s for s in default.split(", ")]
        assert plain.kind in spelled, name
        for kind in KINDS:
            takes = kind in scaling.replace("`", "").split(", ")
            text = name if kind == "none" else f"{name}:{kind.replace('<N>', '128')}"
            if kind == "none" and not takes:  # the name alone is the default then
                assert plain.kind != "none", name
            else:
                assert refused(text) is not takes, text
        assert refused(f"{name}:nested") is not (name in ("nf4", "fp4")), name


def test_the_sizes_of_blocks() -> None:
    text = (ROOT / FORMATS).read_text()
    found = re.search(
        r"N is (\d+) to (\d+) for 8-bit codes, an even number of these for (.+?), "
        r"and for (.+?) a power of two from (\d+) \(`nf4:torchao`: (\d+)\) to\s(\d+)",
        text,
    )
    scalers = re.search(r"M block scales \(a power of two from (\d+) to (\d+)\)", text)
    assert found and scalers
    assert quoted(found[3]) == PACKED
    least, most, four, torchao, most_four = map(int, found.group(1, 2, 5, 6, 7))
    for name, low, high, step in (
        ("int8:block", least, most, lambda n: n - 1 if n < most else n + 1),
        *(
            (f"{name}:block", least, most, lambda n: n - 1 if n < most else n + 1)
            for name in PACKED
        ),
        *((f"{name}:block", four, most_four, None) for name in quoted(found[4])),
        ("nf4:torchao:block", torchao, most_four, None),
        ("nf4:torchao:scaler", *map(int, scalers.groups()), None),
    ):
        below, above = (low - 1, high + 1) if step else (low // 2, high * 2)
        assert not refused(f"{name}{low}") and not refused(f"{name}{high}"), name
        assert refused(f"{name}{below}") and refused(f"{name}{above}"), name
        assert (step is None) is refused(f"{name}{low * 3}"), name


def test_the_parts_in_memory() -> None:
    named: dict[str, list[tuple[str, str]]] = {}
    for codes, parts in table(FORMATS, "codes | parts, in this order"):
        stated = re.findall(r"`(\w+)` ?(uint8|int8|f32|D|in that dtype)?", parts.split("; with")[0])
        scale = re.findall(r"with scaling `(\w+)` (f32)", parts)
        whose = [name for name in quoted(codes) if name != ":nested"]
        for name in [f"{n}:nested" for n in whose] if ":nested" in codes else whose:
            named[name] = stated + scale
    dtypes = {"uint8": torch.uint8, "int8": torch.int8, "f32": torch.float32, "D": torch.float16}
    for row, storage in {
        "f8_*": "f8_e4m3:row",
        "int8": "int8:block32",
        "nf4": "nf4",
        "fp4:nested": "nf4:nested",
        "nf4:torchao:<D>": "nf4:torchao:f16",
        "bf16": "bf16",
    }.items():
        layout = Storage(storage).layout((128, 128))
        assert [name for name, _ in named[row]] == [name for name, _, _ in layout], row
        for (_, stated), (part, dtype, _) in zip(named[row], layout, strict=True):
            assert dtypes.get(stated, dtype) == dtype, (row, part)


FILES = {
    "casts": ["f32", "bf16", "f16", "f8_e4m3", "f8_e5m2"],
    "f8 and int8 with scales": ["f8_e4m3:row", "f8_e5m2:tensor", "int8", "int8:block64"],
    "integers with zeros": [
        f"{name}{of}" for name in ZEROS for of in (":row:zero", ":block64:bf16:zero")
    ],
    "`q4_k`, `q6_k`": ["q4_k", "q6_k"],
    "`f4_e2m1`, integers of less than 8 bits": [
        f"{name}{of}" for name in (*PACKED, "int2", "int7") for of in ("", ":row:bf16")
    ],
    "with `zero_sum` or `zero_rounded`": ["int4:block64:bf16:zero_sum", "uint4:row:zero_rounded"],
    "`int8` with absmax": ["int8:row:absmax"],
    "`f4_e2m1` with e4m3": ["nvfp4", "f4_e2m1:block32:e4m3_bf16"],
    "`nf4`, `fp4`": ["nf4", "fp4"],
    "`nf4:torchao:<D>`": ["nf4:torchao:f16"],
    "nested": ["nf4:nested", "fp4:nested"],
}


def test_the_names_in_files(tmp_path: Path) -> None:
    rows = {row[0]: quoted(row[1]) for row in table(FORMATS, "storage | tensors | who reads")}
    assert rows.keys() == FILES.keys()
    rows["nested"] = rows["`nf4`, `fp4`"] + rows["nested"][1:]
    for row, storages in FILES.items():
        for storage in storages:
            model = nn.Module()
            model.W = nn.Parameter(torch.randn(SHAPE))
            stowage.stow(model, rules={"W": storage})
            stowage.save(model, folder := tmp_path / storage.replace(":", "-"))
            with safe_open(folder / "model.safetensors", "pt") as file:
                wanted = {n for n in rows[row] if n[0] == "W"}
                if storage[:3] in ("nf4", "fp4") and "torchao" not in storage:
                    state = f"W.quant_state.bitsandbytes__{storage[:3]}"
                    wanted = {n for n in wanted if "quant_state" not in n} | {state}
                assert set(file.keys()) == wanted, storage


def test_what_becomes_of_infinity_and_nan() -> None:
    values = torch.ones(128, 128)
    for codes, infinity, nan in table(NUMBERS, "storage | infinity | NaN"):
        names = quoted(codes.split(", which")[0].replace(",", "")) or []
        if "scaled" in codes:
            names = [
                "f8_e4m3:row",
                "f8_e5m2:tensor",
                "int8",
                "f4_e2m1",
                "int4:zero",
                "nf4:nested",
                "nf4:torchao",
            ]
            assert infinity == nan == "refused"
        for name in names:
            for value, said in ((math.inf, infinity), (math.nan, nan)):
                given = values.clone()
                given[3, 5] = value
                with pytest.raises(stowage.InvalidArgument, match="finite"):
                    stowage.quantize(given, name)
                if said == "refused":
                    with pytest.raises(stowage.InvalidArgument, match="finite"):
                        stowage.quantize(given, name, keep_nonfinite=True)
                    continue
                got = stowage.quantize(given, name, keep_nonfinite=True).dequantize()
                assert bool(got.isinf()[3, 5]) is (said == "infinity") or name in ("nf4", "fp4")
                shared = got[3, :64] if name in ("nf4", "fp4") else got[3, 5]
                assert not bool(shared.isfinite().any()), name
                assert int((~got.isfinite()).sum()) <= 64


def test_typical_errors() -> None:
    text = (ROOT / "docs/choosing.md").read_text()
    line = re.search(r"Typical errors of normal weights: (.+)\.", text)
    assert line
    torch.manual_seed(0)
    model = nn.Linear(512, 512, bias=False)
    for name, low, high in re.findall(r"`([\w:]+)` ([\d.]+)(?: to ([\d.]+))?", line[1]):
        nn.init.normal_(model.weight)
        report = stowage.stow(model, rules={"weight": name})
        error = report.rows[0].relative_error
        assert 0.9 * float(low) < error < 1.1 * float(high or low), (name, error)
        stowage.unstow(model)


def test_the_codes_of_errors() -> None:
    header = (ROOT / "include/stowage/error.h").read_text()
    codes = re.search(r"enum class Code \{ ([\w, ]+) \}", header)
    rows = table("docs/errors.md", "code | when | in Python")
    assert codes and [quoted(row[0])[0] for row in rows] == codes[1].split(", ")
    named = {errors.StowageError}
    for code, _, where in rows:
        kinds = {getattr(stowage, name) for name in re.findall(r"`stowage\.(\w+)`", where)}
        assert errors._CLASSES[quoted(code)[0]] in kinds
        for kind, base in re.findall(r"`stowage\.(\w+)` \(an? `(\w+)`", where):
            assert issubclass(getattr(stowage, kind), __builtins__[base])  # type: ignore[index]
        named |= kinds
    every = {k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, Exception)}
    assert named == every
    assert all(issubclass(kind, RuntimeError) for kind in every)


def test_every_variable_is_on_its_page() -> None:
    """What Python, the tools and the Makefile read; test_tools.py has the core's own."""
    page = (ROOT / "docs/env.md").read_text()
    sources = [*(ROOT / "python").rglob("*.py"), *(ROOT / "tools").iterdir(), ROOT / "Makefile"]
    read = set()
    for path in sources:
        if path.is_file():
            text = path.read_text(errors="ignore")
            read |= set(re.findall(r"environ(?:\.get\(|\[)\s*\"(\w+)\"", text))
            read |= set(re.findall(r"\"(STOWAGE_\w+)\"", text)) - {"STOWAGE_API"}
            read |= set(re.findall(r"\$\((STOWAGE_\w+|TORCH_INDEX_URL)\)", text))
    assert read and not [name for name in sorted(read) if f"`{name}`" not in page]


FOLDERS = "src|tests|python|tools|include|examples|bench|fuzz|cmake|requirements"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    """Files of the tree, targets of make, options of the benches, and public names of Python."""
    text = page.read_text()
    named = re.findall(rf"`(?:\.\./)?((?:{FOLDERS})/[\w./*-]+)`", text)
    named += [f"include/stowage/{name}" for name in re.findall(r"`stowage/(\w+\.h)`", text)]
    assert not [name for name in named if not list(ROOT.glob(name.rstrip("/")))]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert not [name for name in re.findall(r"`make ([a-z-]+)", text) if name not in targets]
    for script, rest in re.findall(r"python ((?:bench|examples)/[\w/]+\.py)(.*)", text):
        source = (ROOT / script).read_text()
        command = rest.split("`", 1)[0]
        options = re.findall(r"--([a-z-]+)", command)
        missing = [o for o in options if not re.search(rf"[\"'](--)?{o}[\"']", source)]
        assert not missing, (script, missing)
    for dotted in set(re.findall(r"\bstowage((?:\.[A-Za-z_]\w*)+)\(", text)):
        assert found(dotted[1:].split(".")), f"stowage{dotted}"


def found(path: list[str]) -> bool:
    """Whether `stowage.<path>` is there, as an attribute or a module."""
    here, name = stowage, "stowage"
    for part in path:
        name += f".{part}"
        if not hasattr(here, part):
            try:
                here = importlib.import_module(name)
            except ImportError:
                return False
        else:
            here = getattr(here, part)
    return True


MAP_GUARD, GEMM, CROSSOVER, DISPATCH, MATRICES, BUDGET = (
    "base/map_guard.h",
    "torch/gemm.cpp",
    "kernel/crossover.cpp",
    "kernel/dispatch_x86.cpp",
    "kernel/linear_matrices.cpp",
    "python/stowage/_model/choice/by_error.py",
)
CONSTANTS = [  # what a page says, and where the number is decided
    ("dispatch", r"Results of (\d+) MiB", "kernel/stream.h", r"kStreamBytes = \S+\{(\d+)\} << 20"),
    ("dispatch", r"fp32 (\d+) at a time", "kernel/scales.h", r"kExpandedScales = (\d+)"),
    ("benchmarks", r"expanded (\d+) at a time", "kernel/scales.h", r"kExpandedScales = (\d+)"),
    ("numbers", r"up to (\d+) rows of fp32", CROSSOVER, r"made.own = has_512 \? (\d+)"),
    ("numbers", r"up to (\d+) of bf16", CROSSOVER, r"own_bf16 = has_512 \? (\d+)"),
    ("numbers", r"`avx512bf16` up to (\d+), and", CROSSOVER, r"Isa::amx \? kAnyRows : (\d+)"),
    ("numbers", r"`avx512bf16` more than (\d+), in", DISPATCH, r": (\d+);  //"),
    ("numbers", r"of more than (\d+) rows in pairs", MATRICES, r"kMostByTiles = (\d+)"),
    ("working", r"at most (\d+) MiB of one weight", GEMM, r"kTileBytes = \S+\{(\d+)\} << 20"),
    ("choosing", r"Up to (\d+) weights", BUDGET, r"_EXACT_UNITS = (\d+)"),
    ("formats", r"At most (\d+) files are mapped", MAP_GUARD, r"kMostMappings = (\d+)"),
]


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda c: f"{c[0]}-{c[1][:12]}")
def test_numbers_of_pages_are_those_of_the_code(constant: tuple[str, str, str, str]) -> None:
    page, said, source, decided = constant
    path = ROOT / source if source.startswith("python") else ROOT / "src" / source
    here = re.search(said, (ROOT / f"docs/{page}.md").read_text())
    there = re.search(decided, path.read_text())
    assert here and there and here[1] == there[1]


def test_versions_of_peers_are_those_of_the_tests() -> None:
    pinned = {}
    for name in ("test", "peers"):
        text = (ROOT / f"requirements/{name}.txt").read_text()
        pinned |= dict(re.findall(r"^([\w-]+)==(\S+)$", text, re.M))
    seen = 0
    for page in (p for p in PAGES if p.name not in ("decisions.md", "CHANGELOG.md")):
        for name, version in re.findall(r"\b([A-Za-z]+) (\d+\.\d+(?:\.\d+)?)\b", page.read_text()):
            wanted = pinned.get(name.lower())
            if wanted is not None:
                seen += 1
                assert f"{wanted}.".startswith(f"{version}."), (page.name, name, version)
    assert seen >= 10
