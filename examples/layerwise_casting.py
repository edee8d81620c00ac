# SPDX-License-Identifier: Apache-2.0
"""A diffusers model whose weights rest in fp8: the calls of diffusers, by stowage.compat.

Needs diffusers. The model is a small one with random weights; use `from_pretrained` as ever.
"""

import copy

import torch
from diffusers import UNet2DModel

import stowage
from stowage.compat.diffusers import patched

torch.manual_seed(0)
unet = UNet2DModel(
    sample_size=16,
    layers_per_block=1,
    block_out_channels=(64, 128),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
).to(torch.bfloat16)
noise = torch.randn(1, 3, 16, 16, dtype=torch.bfloat16)


def denoise(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(noise, 10).sample


spare = copy.deepcopy(unet)
dense, dense_bytes = denoise(unet), unet.get_memory_footprint()

with patched():  # the only new line
    unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    rest_bytes = unet.get_memory_footprint()

error = (denoise(unet) - dense).norm() / dense.norm()
print(f"{rest_bytes / dense_bytes:.2f} of the bytes at rest, output changes by {error:.3f}")

# What diffusers has no call for: what became of each weight, undoing it, other storages.
report = stowage.report(unet)
print(f"{len(report.stowed)} weights rest, {len(report.plain)} parameters stay plain")
stowage.unstow(unet)  # plain weights with the rounded values
stowage.stow(spare, "int8:row")
print(f"int8 by rows changes it by {(denoise(spare) - dense).norm() / dense.norm():.3f}")
