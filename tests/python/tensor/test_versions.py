# SPDX-License-Identifier: Apache-2.0
"""A backward whose weight was written since its forward raises, whichever op saved the weight and
whoever wrote it. (That every form of write moves `_version`: test_writes.py, test_whole_writes.py.)
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stowage
from stowage._tensor.requantize import Change


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


# Each makes a result of x, whose gradient needs the weight.
READS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "linear": ((8, 16), (4, 16), F.linear),
    "matmul": ((8, 16), (4, 8), torch.matmul),
    "matmul t": ((8, 16), (4, 16), lambda x, w: x @ w.t()),
    "rows": ((16, 16), (4, 16), lambda x, w: F.linear(x, w[2:9][1:3])),
    "rows of blocks": ((8, 16), (4, 16), lambda x, w: F.linear(x, w[4:])),
    "an expert": ((2, 8, 16), (4, 16), lambda x, w: F.linear(x, w[1])),
    "conv1d": ((8, 16, 3), (2, 16, 9), F.conv1d),
    "conv2d": ((8, 16, 3, 3), (2, 16, 9, 9), F.conv2d),
    "conv2d by tiles": ((640, 640, 3, 3), (1, 640, 3, 3), F.conv2d),
    "conv_transpose2d": ((16, 8, 3, 3), (2, 16, 9, 9), F.conv_transpose2d),
    "bilinear": ((8, 4, 16), (2, 4), lambda x, w: F.bilinear(x, torch.ones(2, 16), w)),
    "mul": ((8, 16), (8, 16), torch.mul),
    "mul by a row": ((8, 16), (16,), lambda x, w: x * w[3]),
    "mul by a column": ((8, 16), (8,), lambda x, w: x * w[:, 3]),
    "einsum": ((8, 16), (4, 16), lambda x, w: torch.einsum("bi,oi->bo", x, w)),
    "bmm": ((3, 8, 16), (3, 4, 8), torch.bmm),
    "layer_norm": ((8, 16), (2, 8, 16), lambda x, w: F.layer_norm(x, (8, 16), w)),
    "prelu": ((8,), (2, 8), F.prelu),
    "grouped_linear": ((2, 8, 16), (4, 16), lambda x, w: stowage.grouped_linear(x, w, [2, 4])),
}
WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "copy_": lambda w, x: w.copy_(x),
    "data.copy_": lambda w, x: w.data.copy_(x),
    "data[0] =": lambda w, x: w.data.__setitem__(0, x[0]),
    "detach().mul_": lambda w, x: w.detach().mul_(2),
    "data =": lambda w, x: setattr(w, "data", x),
    "view": lambda w, x: w.data.view(-1).copy_(x.view(-1)),
    "_foreach_copy_": lambda w, x: torch._foreach_copy_([w], [x]),
    "stowed copy_": lambda w, x: w.copy_(stowage.quantize(x, "int8")),
    "masters and merges": lambda w, x: Change(w, stowage.quantize(x, "int8")._parts()).commit(),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("read", READS)
def test_backward_raises_where_the_weight_was_written(read: str, write: str) -> None:
    shape, size, run = READS[read]
    w = nn.Parameter(stowage.quantize(drawn(*shape), "int8"), requires_grad=False)
    x = torch.ones(size, requires_grad=True)
    run(x, w).sum().backward()  # as it is
    result = run(x, w)
    with torch.no_grad():
        WRITES[write](w, 2 * drawn(*shape))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
