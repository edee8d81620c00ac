# SPDX-License-Identifier: Apache-2.0
"""Every form in which a whole weight is written, as a function of a layer and of values.

Run one on a dense layer and on its stowed twin: what the twin then holds must be what quantizing
the dense result gives, byte for byte, whatever the weight held before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Write = Callable[[nn.Module, Tensor], object]


def _data(write: Callable[[Tensor, Tensor], object]) -> Write:
    """A form that writes through `w.data`."""
    return lambda layer, values: write(layer.weight.data, values)


def _quiet(write: Callable[[Tensor, Tensor], object]) -> Write:
    """A form that writes to the Parameter itself."""

    def run(layer: nn.Module, values: Tensor) -> None:
        with torch.no_grad():
            write(layer.weight, values)

    return run


def _initialised(init: Callable[[Tensor], object]) -> Write:
    return lambda layer, values: init(layer.weight)


def _every(w: Tensor) -> Tensor:
    return torch.arange(len(w))


def _mask(w: Tensor) -> Tensor:
    return torch.ones(w.shape, dtype=torch.bool)


ASSIGNED: dict[str, Write] = {
    "copy_": _quiet(lambda w, x: w.copy_(x)),
    "data.copy_": _data(lambda w, x: w.copy_(x)),
    "copy_ f64": _data(lambda w, x: w.copy_(x.double())),
    "data =": lambda layer, values: setattr(layer.weight, "data", values.clone()),
    "w[:] =": _quiet(lambda w, x: w.__setitem__(slice(None), x)),
    "w[...] =": _quiet(lambda w, x: w.__setitem__(..., x)),
    "w[:, :] =": _data(lambda w, x: w.__setitem__((slice(None), slice(None)), x)),
    "w[0:rows].copy_": _data(lambda w, x: w[0 : len(w)].copy_(x)),
    "w[every id] =": _data(lambda w, x: w.__setitem__(_every(w), x)),
    "w[every mask] =": _data(lambda w, x: w.__setitem__(_mask(w), x.reshape(-1))),
    "index_copy_": _data(lambda w, x: w.index_copy_(0, _every(w), x)),
    "index_copy_ 1": _data(lambda w, x: w.index_copy_(1, _every(w.t()), x)),
    "scatter_": _data(lambda w, x: w.scatter_(0, _every(w)[:, None].expand(w.shape), x)),
    "put_": _data(lambda w, x: w.put_(torch.arange(w.numel()), x.reshape(-1))),
    "masked_scatter_": _data(lambda w, x: w.masked_scatter_(_mask(w), x)),
    "load_state_dict": lambda layer, values: layer.load_state_dict({"weight": values}),
    "vector_to_parameters": lambda layer, values: nn.utils.vector_to_parameters(
        values.reshape(-1), layer.parameters()
    ),
    "view(-1).copy_": _data(lambda w, x: w.view(-1).copy_(x.reshape(-1))),
    "flatten().copy_": _data(lambda w, x: w.flatten().copy_(x.reshape(-1))),
    "t().copy_": _data(lambda w, x: w.t().copy_(x.t())),
    "permute.copy_": _data(lambda w, x: w.permute(1, 0).copy_(x.t())),
    "view(2, ...).copy_": _data(lambda w, x: w.view(2, -1).copy_(x.reshape(2, -1))),
    "unsqueeze(0).copy_": _data(lambda w, x: w.unsqueeze(0).copy_(x)),
    "as_strided.copy_": _data(lambda w, x: w.as_strided(w.shape, w.stride()).copy_(x)),
    "view(int32).copy_": _data(
        lambda w, x: w.view(torch.int32).copy_(x.to(w.dtype).view(torch.int32))
    ),
    "_foreach_copy_": _data(lambda w, x: torch._foreach_copy_([w], [x])),
    "_foreach_copy_ chunks": _data(
        lambda w, x: torch._foreach_copy_(list(w.chunk(3)), list(x.chunk(3)))
    ),
    "add out=": _data(lambda w, x: torch.add(x.to(w.dtype), 1, out=w)),
    "add out=w.T": _data(lambda w, x: torch.add(x.to(w.dtype).T, 1, out=w.T)),
}
COMPUTED: dict[str, Write] = {
    "mul_": _data(lambda w, x: w.mul_(x)),
    "w *= x": _quiet(lambda w, x: w.__imul__(x)),
    "div_": _data(lambda w, x: w.div_(3)),
    "neg_": _data(lambda w, x: w.neg_()),
    "add_": _data(lambda w, x: w.add_(x, alpha=300)),
    "lerp_": _data(lambda w, x: w.lerp_(x.to(w.dtype), 0.5)),
    "addcmul_": _data(lambda w, x: w.addcmul_(x.to(w.dtype), x.to(w.dtype), value=900)),
    "clamp_": _data(lambda w, x: w.clamp_(-0.5, 0.5)),
    "relu_": _data(lambda w, x: torch.relu_(w)),
    "triu_": _data(lambda w, x: w.triu_()),
    "mul out=": _data(lambda w, x: torch.mul(w, x.to(w.dtype), out=w)),
    "_foreach_mul_": _data(lambda w, x: torch._foreach_mul_([w], 0.25)),
}
FILLED: dict[str, Write] = {
    "fill_": _data(lambda w, x: w.fill_(0.25)),
    "fill_ by a tensor": _data(lambda w, x: w.fill_(x[1, 1])),
    "zero_": _data(lambda w, x: w.zero_()),
    "w[...] = 0": _quiet(lambda w, x: w.__setitem__(..., 0)),
    "masked_fill_": _data(lambda w, x: w.masked_fill_(_mask(w), 0.5)),
    "index_fill_": _data(lambda w, x: w.index_fill_(0, _every(w), 0.5)),
    "_foreach_zero_": _data(lambda w, x: torch._foreach_zero_(list(w.split(5)))),
    "normal_": _data(lambda w, x: w.normal_()),
    "uniform_": _data(lambda w, x: w.uniform_()),
    "init.zeros_": _initialised(nn.init.zeros_),
    "init.ones_": _initialised(nn.init.ones_),
    "init.constant_": _initialised(lambda w: nn.init.constant_(w, 0.5)),
    "init.eye_": _initialised(nn.init.eye_),
    "init.normal_": _initialised(nn.init.normal_),
    "init.uniform_": _initialised(nn.init.uniform_),
    "init.kaiming_uniform_": _initialised(nn.init.kaiming_uniform_),
    "init.xavier_normal_": _initialised(nn.init.xavier_normal_),
}
FORMS = {**ASSIGNED, **COMPUTED, **FILLED}
