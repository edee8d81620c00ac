# SPDX-License-Identifier: Apache-2.0
"""Each dialect's golden files in what people do with a model: an adapter beside resting weights, a
merge that is written again, weights left on a disk, weights spread over processes, the program.
docs/dialects.md has the table."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dialect_models import (
    DIALECTS,
    copied,
    file_of_model,
    module_of,
    opened,
    plain_of,
    weights_of,
)
from dialect_ranks import octets, read_by_rows, spread
from safetensors.torch import load_file
from sharded import run
from torch import nn

import stowage
from stowage._files.names import DISK_NAMES
from stowage.tensor import StowedTensor

peft = pytest.importorskip("peft")
from stowage.integrations import peft as stowed_peft  # noqa: E402

FOLDERS = list(DIALECTS)
ADAPTED = [f for f in FOLDERS if f != "mxfp4-gpt-oss"]  # whose experts are no Linear modules
# Codes in an order that no kernel takes are put in another when they are read.
FORMED = {
    folder
    for folder, dialect in DIALECTS.items()
    if dialect in ("gptq", "awq", "hqq", "gguf")
    or folder in ("comfy-nvfp4", "comfy-nvfp4-header", "ct-int4-channel-ragged", "ct-int8-pack")
    or folder in ("torchao-intx4", "torchao-int4")
}


def modules_of(folder: str) -> dict[str, str]:
    """Of each weight, its module."""
    return {name: module_of(name) for name in weights_of(folder)}


def loaded(folder: str, path: Path, **arguments: object) -> nn.Module:
    return opened(folder, path, compute_dtype=torch.float32, **arguments).requires_grad_(False)


def adapted(model: nn.Module, modules: list[str]) -> nn.Module:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False)
    return peft.inject_adapter_in_model(config, model)


def outputs_of(model: nn.Module, folder: str) -> dict[str, torch.Tensor]:
    found = {}
    for name, module in modules_of(folder).items():
        torch.manual_seed(2)
        layer = model.get_submodule(module)
        found[name] = layer(torch.randn(3, layer.in_features))
    return found


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """To a few last bits of the largest; NaN is NaN."""
    finite = want.isfinite()
    if not torch.equal(got.isnan(), want.isnan()) or not torch.equal(got.isfinite(), finite):
        return False
    apart = (got - want)[finite].abs()
    return bool((apart <= 2**-14 * want[finite].abs().max()).all())


@pytest.mark.parametrize("folder", ADAPTED)
def test_an_adapter_trains_beside_it(folder: str, tmp_path: Path) -> None:
    path = copied(folder, tmp_path)
    model, dense = loaded(folder, path), loaded(folder, path)
    stowage.unstow(dense)
    names = list(weights_of(folder))
    before = {name: octets(model.get_parameter(name)) for name in names}
    gradients = []
    for each in (model, dense):
        adapted(each, [*modules_of(folder).values()])
        outputs = outputs_of(each, folder)
        loss = sum(y.float().nan_to_num(0, 0, 0).square().mean() for y in outputs.values())
        loss.backward()
        found = {name: p.grad for name, p in each.named_parameters() if p.grad is not None}
        assert len(found) == 2 * len(names)
        gradients.append((outputs, found))
    (outputs, found), (wanted, others) = gradients
    for name, want in wanted.items():
        assert close(outputs[name], want), name
    for name, want in others.items():
        assert close(found[name], want), name
    for name, module in modules_of(folder).items():
        assert octets(model.get_parameter(f"{module}.base_layer.weight")) == before[name]


@pytest.mark.parametrize("folder", [f for f in ADAPTED if f != "gguf-nvfp4"])
def test_a_merge_writes_its_weight_alone(folder: str, tmp_path: Path) -> None:
    path = copied(folder, tmp_path)
    model = loaded(folder, path)
    name = next(
        n for n in weights_of(folder) if model.get_parameter(n).dequantize().isfinite().all()
    )
    before = octets(model.get_parameter(name))
    *parents, last = modules_of(folder)[name].split(".")
    adapted(model, [modules_of(folder)[name]])
    layer = model.get_submodule(modules_of(folder)[name])
    assert len(stowed_peft.merge(model)) == 1
    setattr(model.get_submodule(".".join(parents)), last, layer.base_layer)
    stowage.save(model, tmp_path / "merged", dialect=DIALECTS[folder])
    again = loaded(folder, tmp_path / "merged")
    assert octets(again.get_parameter(name)) == octets(model.get_parameter(name)) != before
    for other in weights_of(folder):
        if other != name:
            was, now = (octets(m.get_parameter(other)) for m in (model, again))
            assert was == now, other
    if not folder.startswith("gguf-"):
        was, now = (load_file(p / file_of_model(folder)) for p in (path, tmp_path / "merged"))
        assert was.keys() == now.keys()
        changed = {n for n, value in was.items() if octets_of(value) != octets_of(now[n])}
        assert changed and all(n.startswith(f"{modules_of(folder)[name]}.") for n in changed)
    setattr(model.get_submodule(".".join(parents)), last, layer)
    stowed_peft.unmerge(model)
    setattr(model.get_submodule(".".join(parents)), last, layer.base_layer)
    stowage.save(model, tmp_path / "same", dialect=DIALECTS[folder])
    for file in path.iterdir():
        assert (tmp_path / "same" / file.name).read_bytes() == file.read_bytes()


def test_nvfp4_of_gguf_has_no_place_for_another_scale(tmp_path: Path) -> None:
    """Its number over the scales is 1, or in a tensor that the file must have."""
    folder = "gguf-nvfp4"
    model = loaded(folder, copied(folder, tmp_path))
    with torch.no_grad():
        model.get_parameter(next(iter(weights_of(folder)))).mul_(-3)
    with pytest.raises(stowage.InvalidArgument, match=r"blk\.0\..*a number over scales must be 1"):
        stowage.save(model, tmp_path / "again", dialect="gguf")


def octets_of(plain: torch.Tensor) -> bytes:
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("folder", FOLDERS)
def test_it_rests_on_the_disk(folder: str, tmp_path: Path) -> None:
    """From the untouched file; codes that were put in another order, once they are saved so."""
    path = copied(folder, tmp_path)
    whole = loaded(folder, path)
    wanted = outputs_of(whole, folder)
    model = loaded(folder, path, ram="1MiB")
    for _ in range(2):
        for name, got in outputs_of(model, folder).items():
            assert close(got, wanted[name]), name
    engine, report = stowage.engine_report(model), stowage.report(whole)
    assert engine.acquired >= 2 * len(modules_of(folder)) and engine.borrowed == 0
    assert engine.peak <= 1 << 20
    assert (engine.bytes_formed > 0) >= (folder in FORMED)
    assert (engine.forming > 0) == (engine.bytes_formed > 0)
    assert (report.formed_bytes > 0) >= (folder in FORMED)
    assert (report.forming > 0) == (report.formed_bytes > 0) == ("in order" in str(report))
    for name in weights_of(folder):  # whoever touches it finds what the whole model has
        assert octets(model.get_parameter(name)) == octets(whole.get_parameter(name)), name


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_report_of_a_mapped_model_says_where_codes_lie(folder: str, tmp_path: Path) -> None:
    """Those that were put in order lie in memory, though the file is mapped."""
    model = loaded(folder, copied(folder, tmp_path), mmap=True)
    tiers = {row.name: row.tier for row in stowage.report(model).stowed}
    for name in weights_of(folder):
        codes = model.get_parameter(name).parts["codes"]
        is_mapped = not codes.untyped_storage().resizable()
        assert tiers[name] == ("disk" if is_mapped else "ram"), name
        assert not (is_mapped and folder in FORMED), name


@pytest.mark.parametrize("folder", ["gptq-v1", "awq-gemm", "gguf-q4-k", "comfy-nvfp4"])
def test_less_memory_than_the_weights_is_enough(folder: str, tmp_path: Path) -> None:
    path = copied(folder, tmp_path)
    wanted = outputs_of(loaded(folder, path), folder)
    with pytest.raises(stowage.InvalidArgument, match=r"and scratch of [0-9]+ for those") as raised:
        loaded(folder, path, ram=4096)
    sizes = re.search(r" of (\d+) bytes and scratch of (\d+) ", str(raised.value))
    assert sizes is not None
    least = sum(map(int, sizes.groups()))
    model = loaded(folder, path, ram=least)
    for _ in range(3):
        for name, got in outputs_of(model, folder).items():
            assert close(got, wanted[name]), name
    report = stowage.engine_report(model)
    assert report.evicted > 0 and report.borrowed == 0 and report.peak <= least
    with pytest.raises(stowage.InvalidArgument, match="another order"):
        loaded(folder, path, ram="1MiB", reads="mapped")
    stowage.save(model, tmp_path / "again", dialect=DIALECTS[folder])
    for file in path.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_it_is_spread_over_processes(tmp_path: Path) -> None:
    for folder in FOLDERS:
        copied(folder, tmp_path)
    assert run(2, spread, FOLDERS, str(tmp_path)) == FOLDERS


@pytest.mark.parametrize("world", [2, 3])
def test_each_process_reads_its_rows(world: int, tmp_path: Path) -> None:
    for folder in FOLDERS:
        copied(folder, tmp_path)
    assert run(world, read_by_rows, FOLDERS, str(tmp_path)) == FOLDERS


def ask(*arguments: str, code: int = 0) -> str:
    program = str(Path(sys.executable).parent / "stowage")
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_program_plans_packs_and_unpacks_it(folder: str, tmp_path: Path) -> None:
    path = str(copied(folder, tmp_path))
    plan = json.loads(ask("plan", path, "--ram", "1GiB", "--json"))
    assert plan["model"]["weights"] >= len(weights_of(folder))
    dtype = next(iter(weights_of(folder).values())).dtype
    ask("unpack", path, str(tmp_path / "plain"), "--compute", DISK_NAMES[dtype].lower())
    values = load_file(next((tmp_path / "plain").glob("*.safetensors")))
    weights = weights_of(folder)
    assert values.keys() == {*weights, *plain_of(folder, weights)}
    for name, value in weights.items():
        found = values[name] + 0 if folder == "modelopt-nvfp4" else values[name]
        assert torch.equal(found.nan_to_num(7), value.nan_to_num(7)), name
    ask("pack", path, str(tmp_path / "nf4"), "--storage", "nf4", "--keep-nonfinite")
    again, model = loaded(folder, tmp_path / "nf4"), loaded(folder, Path(path))
    for name in weights:
        other, found = again.get_parameter(name), model.get_parameter(name).dequantize()
        assert isinstance(other, StowedTensor), name
        # bitsandbytes rests so already; comfyui's scales are rounded to the files' dtype there.
        # Parameters of no Linear module rest as they did.
        same = DIALECTS[folder] != "bitsandbytes" and not folder.startswith("comfy-fp8")
        same = same and folder in ADAPTED
        if same and found.isfinite().all():
            assert octets(other) == octets(stowage.quantize(found, "nf4")), name
