# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint by itself, over models whose weights rest."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as checkpoints
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import stowage

X = torch.linspace(-1, 1, 4 * 64).view(4, 64)


def net(storage: str, factor: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    stowage.stow(model, rules={"*.weight": storage})
    return model


def biases(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(X).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved_behind_the_back(storage: str, offloaded: bool) -> list[bool]:
    """An asynchronous save holds what was there when it was called, model and optimizer."""
    model = net(storage)
    optimizer = biases(model)
    step(model, optimizer)
    if offloaded:
        stowage.offload(model, ram="24KiB", folder=tempfile.mkdtemp())
    expected = model(X).detach()
    weights, moments = get_state_dict(model, optimizer)
    folder = tempfile.mkdtemp()
    saving = checkpoints.async_save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    saving.result()
    other = net(storage, 0.25)
    others = biases(other)
    step(other, others)
    weights, moments = get_state_dict(other, others)
    state = {"model": weights, "optimizer": moments}
    checkpoints.load(state, checkpoint_id=folder)
    set_state_dict(
        other, others, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    rests = all(type(p) is stowage.StowedTensor for n, p in other.named_parameters() if "w" in n)
    mine, theirs = others.state_dict()["state"], optimizer.state_dict()["state"]
    same = all(torch.equal(mine[i]["exp_avg"], theirs[i]["exp_avg"]) for i in theirs)
    return [torch.equal(other(X), expected), rests, same]


def loaded_into_rows(storage: str) -> str:
    """What torch's own load does where rows of weights are spread: "as saved", or what it says."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    model, other = net(storage), net(storage, 0.5)
    expected = [model[i].weight.dequantize() for i in (0, 2)]
    for each in (model, other):
        fully_shard(each, mesh=mesh)
    checkpoints.save(get_model_state_dict(model), checkpoint_id=folder[0])
    state = get_model_state_dict(other)
    try:
        checkpoints.load(state, checkpoint_id=folder[0])
    except BaseException as error:
        return str(error)
    set_model_state_dict(other, state)
    found = [other[i].weight.full_tensor().dequantize() for i in (0, 2)]
    return "as saved" if all(map(torch.equal, found, expected)) else "lost"


def written_to_what_is_given(storage: str) -> list[str]:
    """What a copy says that a DTensor of all rows gives, where it is written to."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    model = net(storage)
    fully_shard(model, mesh=mesh)
    given = get_model_state_dict(model)["0.weight"].to_local()
    said = []
    for values in (given.clone(), torch.zeros(given.shape)):
        try:
            given.copy_(values)
        except stowage.Unsupported as error:
            said.append(str(error))
    given.clone().zero_()  # of one's own
    return said
