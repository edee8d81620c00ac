# SPDX-License-Identifier: Apache-2.0
"""Stow a model, look at it, save it, load it without its float weights ever being in memory."""

import tempfile

import torch
from torch import nn

import stowage


def make_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(1000, 256), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 8))


torch.manual_seed(0)
model, ids = make_model(), torch.randint(1000, (4, 16))
expected = model(ids)

# In place. Rules are tried in order; the report has one row for each weight, with its error.
rules = {"0": "int8", "1.*": "nf4", "3": None}
report = stowage.stow(model, rules=rules, compute_dtype=torch.bfloat16)
print(report)
assert model[1].weight.dtype == torch.bfloat16  # code that asks sees the compute dtype
print("largest difference:", (model(ids).float() - expected).abs().max().item())

with tempfile.TemporaryDirectory() as folder:
    stowage.save(model, folder)  # ordinary safetensors; configuration files are your own
    loaded = stowage.load(make_model, folder)  # called so that its weights take no memory
    assert torch.equal(loaded(ids), model(ids))

    stowage.unstow(model)  # plain parameters again, and a float file
    stowage.save(model, folder)
    loaded = stowage.load(make_model, folder, "f8_e4m3:row")  # quantized while it is read
    print(loaded[1].weight.resting, loaded[1].weight.dequantize()[0, :4])
