# SPDX-License-Identifier: Apache-2.0
"""torchao.float8.fsdp_utils: the weight that FSDP2 gathers in fp8, and its scales."""

from torch import nn

from stowage.training import TrainedWeight, refresh_scales

__all__ = ["WeightWithDynamicFloat8CastTensor", "precompute_float8_dynamic_scale_for_fsdp"]

WeightWithDynamicFloat8CastTensor = TrainedWeight  # for isinstance; convert_... makes them


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """All scales by one reduction; after the optimizer's step. A forgotten call costs nothing but
    the time: scales are never stale."""
    refresh_scales(module)
