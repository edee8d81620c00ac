# SPDX-License-Identifier: Apache-2.0
"""Lightning Fabric with StowagePrecision: what rests, what trains, what a checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from lightning_fabric import Fabric
from torch import nn

import stowage
from stowage.integrations.fabric import StowagePrecision


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def adapted(model: nn.Module) -> Any:
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False)
    return peft.get_peft_model(model, lora)


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))


def fabric(*given: Any, **more: Any) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, plugins=StowagePrecision(*given, **more))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_rest_when_they_are_set_up(dtype: torch.dtype) -> None:
    fabrics = fabric("int8:row", skip=["2"], dtype=dtype).setup_module(net())
    model = fabrics.module
    expected = net()
    stowage.stow(expected, "int8:row", skip=["2"], compute_dtype=dtype)
    assert isinstance(model[0].weight, stowage.StowedTensor)
    assert type(model[2].weight.data) is torch.Tensor and model[2].weight.dtype == dtype
    found = fabrics(X)
    assert found.dtype == torch.float32 == torch.get_default_dtype()
    assert torch.equal(found, expected(X.to(dtype)).float())


def test_new_tensors_and_modules_have_the_dtype() -> None:
    made = fabric("nf4", dtype=torch.bfloat16)
    with made.init_tensor():
        assert torch.ones(2).dtype == torch.bfloat16
    with made.init_module():
        model = net()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    assert made.setup_module(model).module[0].weight.resting == "nf4:block64"


def steps(made: Fabric, model: Any, optimizer: Any, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = model(X).square().mean()
        made.backward(loss)
        made.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def started(storage: str | None) -> tuple[Fabric, Any, Any]:
    made = fabric(storage, dtype=torch.float32)
    model = adapted(net())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    model, optimizer = made.setup(model, optimizer)
    return made, model, optimizer


def test_adapters_train_and_a_checkpoint_goes_on_exactly(tmp_path: Path) -> None:
    made, model, optimizer = started("nf4")
    losses = steps(made, model, optimizer, 2)
    assert losses[1] < losses[0]
    made.save(tmp_path / "state", {"model": model, "optimizer": optimizer})
    further = steps(made, model, optimizer, 2)
    made, model, optimizer = started("nf4")
    made.load(tmp_path / "state", {"model": model, "optimizer": optimizer})
    assert steps(made, model, optimizer, 2) == further
    resting = [p for p in model.parameters() if isinstance(p, stowage.StowedTensor)]
    assert len(resting) == 2 and not any(p.requires_grad for p in resting)


def test_what_rests_already_stays_as_it_is() -> None:
    model = net()
    stowage.stow(model, "f8_e4m3:row")
    parts = [part.clone() for part in model[0].weight.parts.values()]
    found = fabric("nf4", dtype=torch.float32).setup_module(model).module[0].weight
    assert found.resting == "f8_e4m3:row"
    assert all(map(torch.equal, parts, found.parts.values()))


def test_what_is_misspelt_is_refused() -> None:
    with pytest.raises(stowage.InvalidArgument, match="got 'nf5'"):
        StowagePrecision("nf5")
    with pytest.raises(stowage.InvalidArgument, match="dtype must be one to work in"):
        StowagePrecision("nf4", dtype=torch.float8_e4m3fn)
    with pytest.raises(stowage.InvalidArgument, match="must match"):
        fabric(rules={"nothing": "nf4"}).setup_module(net())
