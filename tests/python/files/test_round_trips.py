# SPDX-License-Identifier: Apache-2.0
"""Every storage in shapes that fit no block, through every door: what comes back is what rested,
byte for byte, or it is refused. Names that other tools put beside codes are never ignored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import stowage
from stowage._model.rest.formation import obstacle
from stowage._ops.storage import Storage
from stowage._tensor.casts import stands_for_plain

_BLOCKS = (2, 3, 7, 16, 25, 32, 44, 48, 50, 64, 96, 128, 1000)
EIGHT = [
    f"{codes}{scaling}"
    for codes in ("f8_e4m3", "f8_e5m2", "int8")
    for scaling in ("", ":tensor", ":row", ":row2", *(f":block{n}" for n in _BLOCKS))
]
FOUR = [
    f"{codes}:block{n}{nested}"
    for codes in ("nf4", "fp4")
    for n in (32, 64, 128)
    for nested in ("", ":nested")
]
TORCHAO = ["nf4:torchao:block16:scaler1:bf16", "nf4:torchao:block32:scaler2:f32"]
STORAGES = [*EIGHT, *FOUR, *TORCHAO]
MORE = [(7,), (1, 1), (1, 96), (5, 96), (3, 130), (8, 64), (1, 4, 24), (4, 3, 2, 2)]
SHAPES = [
    *((1,), (4, 100), (6, 29), (2, 3, 48), (3, 1, 40)),
    *(pytest.param(shape, marks=pytest.mark.nightly) for shape in MORE),
]


class Bare(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


def resting(shape: tuple[int, ...]) -> nn.ModuleList:
    """One module for each storage that can hold the shape."""
    torch.manual_seed(0)
    values = torch.randn(shape)
    legal = [s for s in STORAGES if not obstacle("w", Storage(s), shape)]
    return nn.ModuleList(Bare(stowage.quantize(values, storage)) for storage in legal)


def plain(model: nn.ModuleList) -> nn.ModuleList:
    return nn.ModuleList(Bare(torch.zeros(m.weight.shape)) for m in model)


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: nn.ModuleList, b: nn.ModuleList) -> bool:
    assert len(a) == len(b)
    for one, two in zip(a, b, strict=True):
        x, y = one.weight, two.weight
        assert isinstance(y, stowage.StowedTensor), x.resting
        assert (x.resting, x.shape) == (y.resting, y.shape)
        for part, given in x.parts.items():
            assert bytes_of(given) == bytes_of(y.parts[part]), (x.resting, part)
    return True


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_rested_comes_back_through_every_door(shape: tuple[int, ...], tmp_path: Path) -> None:
    model = resting(shape)
    flat = stowage.state_dict(model)
    for state in (flat, model.state_dict()):
        other = plain(model)
        stowage.load_state_dict(other, state)
        assert same(model, other)
    for shard_bytes in (0, 1000):
        stowage.save(model, tmp_path / str(shard_bytes), shard_bytes=shard_bytes)
        assert same(model, stowage.load(plain(model), tmp_path / str(shard_bytes)))
    # Another writer has no manifest: names, types, shapes and labels are all there is.
    safetensors.torch.save_file(flat, tmp_path / "other.safetensors")
    assert same(model, stowage.load(plain(model), tmp_path / "other.safetensors"))
    assert same(model, stowage.load(plain(model), tmp_path / "other.safetensors", mmap=True))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_without_labels_values_are_right_or_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    """What a scale's shape says of blocks is a guess where writers choose neither powers of two nor
    even splits: then only a label tells, and nothing that has lost it is read as another block."""
    for module in resting(shape):
        flat = stowage.state_dict(module)
        bare = {name: t for name, t in flat.items() if not name.endswith(".stowage")}
        if bare.keys() == flat.keys():
            continue
        expected, storage = module.weight.dequantize(torch.float32), module.weight.resting
        safetensors.torch.save_file(bare, tmp_path / "m.safetensors")
        answers = []
        for door in ("state", "file"):
            other = Bare(torch.zeros(shape))
            try:
                if door == "state":
                    stowage.load_state_dict(other, bare)
                else:
                    stowage.load(other, tmp_path / "m.safetensors")
            except stowage.StowageError as error:
                answers.append(str(error).partition("'weight")[2])
                continue
            answers.append(other.weight.resting)
            found = other.weight.dequantize(torch.float32)
            usual = module.weight._storage.block in (16, 32, 64, 128)
            if usual or _is_even(storage, shape):
                assert torch.equal(found, expected), (storage, door)
        one, two = answers
        assert one.split("got")[-1] == two.split("got")[-1]  # both doors say the same


def _is_even(storage: str, shape: tuple[int, ...]) -> bool:
    block = Storage(storage).block
    return bool(block) and (torch.Size(shape).numel() // shape[0]) % block == 0


def test_a_block_that_may_be_two_is_told_by_a_label_or_refused() -> None:
    model = nn.ModuleList([Bare(stowage.quantize(torch.randn(4, 96), "int8:block48"))])
    flat = stowage.state_dict(model)
    label = json.loads(bytes(flat["0.weight.stowage"].tolist()))
    assert label == {"version": 1, "storage": "int8:block48", "shape": [4, 96]}
    del flat["0.weight.stowage"]
    with pytest.raises(stowage.BadFile, match=r"may be int8:block48 or int8:block64"):
        stowage.load_state_dict(plain(model), flat)


def test_usual_weights_carry_no_label() -> None:
    for storage in ("f8_e4m3", "f8_e4m3:row", "int8", "int8:tensor", "int8:block64", "nf4", "fp4"):
        model = nn.ModuleList([Bare(stowage.quantize(torch.randn(16, 128), storage))])
        assert not [name for name in stowage.state_dict(model) if name.endswith(".stowage")]


FOREIGN = (
    "weight_scale_inv",
    "weight_zero_point",
    "weight_scale_2",
    "weight_global_scale",
    "weight_g_idx",
    "weight.absmax",
    "weight.scale",
    "scale",
    "zero_point",
    "SCB",
    "scale_weight",
)
OF_ACTIVATIONS = ("input_scale", "output_scale", "k_scale")


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("scaled", [False, True])
def test_names_of_others_beside_codes_are_never_ignored(
    codes: torch.dtype, scaled: bool, tmp_path: Path
) -> None:
    base = {"0.weight": torch.ones(4, 8).to(codes), "0.bias": torch.zeros(4)}
    if scaled:
        base["0.weight_scale"] = torch.full((4, 1), 0.5)
    for name in (*FOREIGN, *OF_ACTIVATIONS):
        state = base | {f"0.{name}": torch.full((4, 1), 0.01)}
        safetensors.torch.save_file(state, tmp_path / "m.safetensors")
        for strict in (True, False):
            for door in ("state", "file"):
                model = nn.Sequential(nn.Linear(8, 4))
                before = model[0].weight.detach().clone()
                try:
                    if door == "state":
                        stowage.load_state_dict(model, state, strict=strict)
                    else:
                        stowage.load(model, tmp_path / "m.safetensors", strict=strict)
                except stowage.StowageError as error:
                    assert f"0.{name}" in str(error), (name, door, strict)
                    assert torch.equal(model[0].weight, before)
                    continue
                # Scales of activations say nothing of the weight's values.
                assert scaled and not strict and name in OF_ACTIVATIONS, (name, door)
                found = model[0].weight.dequantize(torch.float32)
                assert torch.equal(found, torch.full((4, 8), 0.5))


def test_names_of_the_model_beside_its_weights_come_back(tmp_path: Path) -> None:
    """A model's own `logit_scale` beside a resting weight is no scale of codes."""

    class Clip(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight, requires_grad=False)
            self.logit_scale, self.scale = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(8))

    for storage in ("f8_e4m3", "f8_e4m3:row", "int8"):
        for within in (lambda clip: clip, nn.Sequential):
            clip = Clip(stowage.quantize(torch.randn(8, 64), storage))
            model = within(clip)
            stowage.save(model, tmp_path / "ours")
            flat = stowage.state_dict(model)
            safetensors.torch.save_file(flat, tmp_path / "other.safetensors")
            for fill in (
                lambda m, flat=flat: stowage.load_state_dict(m, flat),
                lambda m: stowage.load(m, tmp_path / "ours"),
                lambda m: stowage.load(m, tmp_path / "other.safetensors"),
            ):
                other = Clip(torch.zeros(8, 64))
                fill(within(other))
                assert same(nn.ModuleList([clip]), nn.ModuleList([other]))


@pytest.mark.parametrize("storage", ["f32", "bf16"])
def test_a_cast_of_itself_is_a_plain_value_in_a_state(storage: str) -> None:
    """It is quantized where the weight rests in the model, and rests nowhere else."""
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[storage]
    cast = stowage.quantize(torch.randn(8, 64, dtype=dtype), storage, exact=True)
    other, resting = Bare(torch.zeros(8, 64)), Bare(stowage.quantize(torch.zeros(8, 64), "int8"))
    moved = stands_for_plain(nn.Parameter(cast, False).to(torch.float16))  # while offloaded
    assert isinstance(moved, stowage.StowedTensor) and moved.dtype is torch.float16
    for given in (moved, cast):
        for model in (other, resting):
            stowage.load_state_dict(model, {"weight": given})
        assert type(other.weight) is nn.Parameter and resting.weight.resting == "int8:row"
    assert torch.equal(other.weight, cast.dequantize(torch.float32))
    wanted = stowage.quantize(cast.dequantize(torch.float32), "int8")
    assert same(nn.ModuleList([resting]), nn.ModuleList([Bare(wanted)]))


@pytest.mark.parametrize("storage", ["nf4", "fp4", "nf4:block64:nested"])
def test_the_table_of_another_format_is_refused(storage: str, tmp_path: Path) -> None:
    model = nn.Sequential(Bare(stowage.quantize(torch.randn(16, 64), storage)))
    flat = stowage.state_dict(model)
    for wrong in (
        torch.linspace(-1, 1, 16),
        flat["0.weight.quant_map"].flip(0).contiguous(),
        flat["0.weight.quant_map"] * (1 + 1e-4),
        torch.full((16,), torch.nan),
        torch.zeros(15),
    ):
        state = flat | {"0.weight.quant_map": wrong}
        safetensors.torch.save_file(state, tmp_path / "m.safetensors")
        other = nn.Sequential(Bare(torch.zeros(16, 64)))
        with pytest.raises(stowage.BadFile, match=r"0\.weight\.quant_map"):
            stowage.load_state_dict(other, state)
        with pytest.raises(stowage.BadFile, match=r"0\.weight\.quant_map"):
            stowage.load(other, tmp_path / "m.safetensors")
        assert torch.equal(other[0].weight, torch.zeros(16, 64))
