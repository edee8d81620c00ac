# SPDX-License-Identifier: Apache-2.0
"""State dicts of 4-bit weights: save, load, save gives equal bytes, whatever ran in between."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stowage
from stowage._ops.storage import Storage

STORAGES = ["nf4", "fp4:block128", "nf4:block64:nested"]
State = dict[str, Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(40, 63), nn.Linear(63, 50)
        self.head = nn.Linear(50, 40)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.inner(self.table(ids))))


IDS = torch.tensor([[1, 39, 0]])


def net(storage: str | None, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    model = Net()
    if storage is not None:
        stowage.stow(model, storage, rules={"head": storage})
    return model


def bytes_of(state: State) -> dict[str, bytes]:
    """Every inner tensor, by name."""
    flat: dict[str, bytes] = {}
    for name, t in state.items():
        parts = t.parts if isinstance(t, stowage.StowedTensor) else {"": t}
        for part, values in parts.items():
            flat[f"{name}.{part}"] = (
                values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
    return flat


def filed(state: State) -> tuple[State, bytes]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True), file.getvalue()


def infer(model: nn.Module) -> None:
    with torch.inference_mode():
        model.eval()(IDS)


def train(model: nn.Module) -> None:
    model.train()(IDS).sum().backward()
    model.zero_grad()


def move(model: nn.Module) -> None:
    model.to(torch.bfloat16)
    model(IDS)
    model.to("cpu").to(torch.float32)


RUNS: dict[str, Callable[[nn.Module], None]] = {
    "nothing": lambda model: None,
    "eval": infer,
    "train": train,
    "eval, train, eval": lambda model: (infer(model), train(model), infer(model))[0],
    "compiled": lambda model: torch.compile(model, backend="eager")(IDS).sum().backward(),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("storage", STORAGES)
def test_rows_62_67_save_load_save_gives_equal_bytes(storage: str, assign: bool, run: str) -> None:
    model = net(storage)
    before, first = filed(model.state_dict())
    RUNS[run](model)
    after, second = filed(model.state_dict())
    assert bytes_of(before) == bytes_of(after) and first == second
    other = net(storage, seed=1)
    RUNS[run](other)
    assert bytes_of(other.state_dict()) != bytes_of(before)
    assert not any(other.load_state_dict(after, strict=True, assign=assign))
    RUNS[run](other)
    again, third = filed(other.state_dict())
    assert bytes_of(again) == bytes_of(before) and third == first
    assert torch.equal(model(IDS), other(IDS))


@pytest.mark.parametrize("storage", STORAGES)
def test_row_65_moves_keep_the_bytes_that_rest(storage: str) -> None:
    """The biases, which are plain, are rounded by bf16; what rests is not."""
    model = net(storage)
    before = {k: v for k, v in bytes_of(model.state_dict()).items() if "bias" not in k}
    move(model)
    after = {k: v for k, v in bytes_of(model.state_dict()).items() if "bias" not in k}
    assert before == after
    assert bytes_of(copy.deepcopy(model).state_dict()) == bytes_of(model.state_dict())


@pytest.mark.parametrize("storage", STORAGES)
def test_files_are_equal_too(storage: str, tmp_path: Path) -> None:
    model = net(storage)
    for folder in ("one", "two"):
        stowage.save(model, tmp_path / folder)
        infer(model)
        train(model)
    loaded = stowage.load(lambda: net(None, 1), tmp_path / "two")
    infer(loaded)
    stowage.save(loaded, tmp_path / "three")
    names = sorted(p.name for p in (tmp_path / "one").iterdir())
    for folder in ("two", "three"):
        assert sorted(p.name for p in (tmp_path / folder).iterdir()) == names
        for name in names:
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / folder / name).read_bytes()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("into", [None, *STORAGES, "nf4:block32", "int8", "f8_e4m3"])
@pytest.mark.parametrize("of", [None, *STORAGES])
def test_row_76_every_form_loads_into_every_other(
    of: str | None, into: str | None, assign: bool
) -> None:
    """Float to stowed quantizes, stowed to stowed copies or quantizes the values, stowed to float
    dequantizes; `assign` takes the given tensors as they are."""
    source, target = net(of), net(into, seed=1)
    given = source.state_dict()
    before = bytes_of(given)
    assert not any(target.load_state_dict(given, strict=True, assign=assign))
    assert bytes_of(given) == before  # what was given is not changed
    got = target.state_dict()
    for name, value in given.items():
        stowed = isinstance(value, stowage.StowedTensor)
        wanted = value
        if (
            not assign
            and into is not None
            and value.dim() > 1
            and getattr(value, "resting", "") != Storage(into).name
        ):
            wide = value.dequantize(torch.float32) if stowed else value
            wanted = stowage.quantize(wide, into)
        elif not assign and into is None and stowed:
            wanted = value.dequantize()
        assert type(got[name]) is type(wanted) or not isinstance(wanted, stowage.StowedTensor)
        assert bytes_of({"": got[name]}) == bytes_of({"": wanted}), name


@pytest.mark.parametrize("storage", STORAGES)
def test_strict_names_what_is_missing_and_changes_shapes_never(storage: str) -> None:
    model = net(storage)
    before, state = bytes_of(model.state_dict()), net(storage, seed=1).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(
            {**state, "inner.weight": stowage.quantize(torch.ones(63, 50), storage)}
        )
    model = net(storage)
    del state["inner.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*inner\.weight"):
        model.load_state_dict(state)
    missing, unexpected = model.load_state_dict({**state, "other": torch.ones(1)}, strict=False)
    assert missing == ["inner.weight"] and unexpected == ["other"]
    kept = {k: v for k, v in bytes_of(model.state_dict()).items() if k.startswith("inner.weight")}
    assert kept == {k: v for k, v in before.items() if k.startswith("inner.weight")}


@pytest.mark.parametrize("storage", STORAGES)
def test_flat_states_and_optimizers_of_adapters_load_again(storage: str) -> None:
    model = net(storage)
    flat = stowage.state_dict(model)
    infer(model)
    again = stowage.state_dict(model)
    assert flat.keys() == again.keys() and all(torch.equal(flat[k], again[k]) for k in flat)
    other = net(storage, seed=1)
    stowage.load_state_dict(other, flat)
    assert bytes_of(other.state_dict()) == bytes_of(model.state_dict())
