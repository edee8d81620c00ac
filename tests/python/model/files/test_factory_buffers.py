# SPDX-License-Identifier: Apache-2.0
"""`load(factory)`: a computed buffer has the values of a model built plainly, or is refused.

Programs of three steps, every combination: how memory is made, how it is written, and what is
computed from it. Only values that the factory drops on purpose (random ones that were asked for as
such, and those of parameters) may be refused, and no other value may come out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import stowage

Step = Callable[[Tensor], Tensor]
N = 6


def steps(*lines: str) -> dict[str, Callable[..., Tensor]]:
    """Functions of a tensor `t` that run a line and give `t`, or the value of an expression."""

    def made(line: str) -> Callable[..., Tensor]:
        def run(t: Tensor | None = None) -> Tensor:
            names = {"torch": torch, "nn": nn, "F": nn.functional, "N": N, "t": t}
            try:
                code = compile(line, line, "eval")
            except SyntaxError:
                exec(line, names)
                return names["t"]  # type: ignore[return-value]
            value = eval(code, names)
            return value if isinstance(value, Tensor) else names["t"]  # type: ignore[return-value]

        return run

    return {line: made(line) for line in lines}


MAKE = steps(
    "torch.empty(N, N)",
    "torch.empty(N, N, device='cpu')",
    "torch.empty_strided((N, N), (1, N))",
    "torch.empty(N * N).view(N, N)",
    "torch.empty(2 * N, N)[N:]",
    "nn.Parameter(torch.empty(N, N)).detach()",
    "torch.Tensor(N, N)",
    "torch.zeros(N, N)",
    "torch.arange(N * N).float().view(N, N)",
    "torch.linspace(0, 1, N).repeat(N, 1)",
)
WRITE = steps(
    "t.normal_()",
    "t.uniform_(-1, 1)",
    "t.uniform_(-1, 1, generator=torch.Generator().manual_seed(3))",
    "t.bernoulli_(0.5)",
    "t.exponential_()",
    "t.fill_(float('-inf')).triu_(1)",
    "t.copy_(torch.arange(N))",
    "torch.nn.init.normal_(t)",
    "torch.nn.init.trunc_normal_(t)",
    "torch.nn.init.orthogonal_(t)",
    "torch.nn.init.xavier_uniform_(t)",
    "torch.nn.init.sparse_(t, 0.5)",
    "t[:, 0::2] = torch.arange(N).float()[:, None].sin(); t[:, 1::2] = 7",
    "t[:2].normal_(); t[2:].uniform_()",
    "torch.normal(torch.zeros(N, N), 1.0, out=t)",
    "torch.randn(N, N, out=t)",
    "torch.outer(torch.arange(N).float(), torch.ones(N), out=t)",
    "torch._foreach_zero_([t]); torch._foreach_add_([t], 2.0)",
    "t.data.normal_(); t.add_(1)",
)
COMPUTE = steps(
    "t",
    "t * 2",
    "t.abs_()",
    "t.cumsum(0)",
    "F.linear(torch.ones(1, N), t)",
    "torch.where(t > 0.25, 1.0, 0.0)",
    "torch.stack([t, t])[1]",
)


class Net(nn.Module):
    """The results of some programs, as buffers that no file holds and as attributes."""

    def __init__(self, *programs: Callable[[], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.attributes = []
        for i, program in enumerate(programs):
            self.register_buffer(f"buffer{i}", program(), persistent=False)
            self.attributes.append(program())

    def made(self) -> list[Tensor]:
        return [*self.buffers(), *self.attributes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    stowage.save(Net(), path)
    return path


def differing(folder: Path, *programs: Callable[[], Tensor]) -> list[int]:
    """Numbers of tensors that are not those of a model that is built plainly after the same seed"""
    torch.manual_seed(5)
    plain = Net(*programs).made()
    torch.manual_seed(5)
    loaded = stowage.load(lambda: Net(*programs), folder).made()
    assert len(loaded) == len(plain) == 2 * len(programs)
    pairs = enumerate(zip(loaded, plain, strict=True))
    return [i for i, (a, b) in pairs if not torch.equal(a.nan_to_num(), b.nan_to_num())]


@pytest.mark.parametrize("write", WRITE)
def test_written_buffers_have_their_values(write: str, folder: Path) -> None:
    def program(make: Step, compute: Step) -> Callable[[], Tensor]:
        return lambda: compute(WRITE[write](make()))  # type: ignore[call-arg]

    assert not differing(folder, *(program(m, c) for m in MAKE.values() for c in COMPUTE.values()))


RANDOM = steps(
    "torch.rand(N, N)",
    "torch.randn(N, N, device='cpu')",
    "torch.normal(0.0, 1.0, (N, N))",
    "torch.rand_like(torch.ones(N, N))",
    "torch.normal(torch.zeros(N, N), torch.ones(N, N))",
    "torch.randint(9, (N, N)).float()",
    "nn.Linear(N, N).weight.detach()",
    "nn.Parameter(torch.rand(N, N)).detach()",
    "nn.Embedding(N, N).weight.data",
)
DRAWN = list(RANDOM)[3:6]  # beside other tensors, or of integers: no parameter is made so
USE = steps(
    "t",
    "t * 2",
    "torch.zeros(N, N).add_(t)",
    "torch.ones(N, N).__imul__(t)",
    "torch.empty(N, N).copy_(t)",
    "torch.add(torch.ones(N, N), t, out=torch.empty(N, N))",
    "torch.zeros(N, N).masked_fill_(t > 0.5, 3.0)",
    "torch.zeros(N, N).fill_(t[0, 0])",
    "torch.zeros(N, N).addmm_(torch.ones(N, N), t)",
    "torch.zeros(N, N).scatter_(0, torch.zeros(N, N, dtype=torch.long), t)",
    "torch.ones(N, N) * t[0, 0]",
    "torch.ones(N, N) * float(t[0, 0] > 0.5)",
    "torch.cat([torch.zeros(N, N), t])",
    "F.linear(torch.ones(1, N), t)",
    "F.conv1d(torch.ones(1, N, N), t[:, :, None])",
    "torch.where(t > 0.5, 1.0, 0.0)",
    "i = torch.arange(2); x = torch.zeros(N, N); x[i] = t[:2]; t = x",
    "x = torch.zeros(N, N); x[x == 0] = t.flatten(); t = x",
    "x = torch.zeros(N, N); x[t > 0.5] = 3; t = x",
    "x = torch.zeros(N, N); x[:2] += t[:2]; t = x",
    "x = [torch.zeros(N, N)]; torch._foreach_add_(x, [t]); t = x[0]",
    "t = torch.tensor(t.tolist())",
)


@pytest.mark.parametrize("make", RANDOM)
def test_what_comes_from_dropped_values_is_refused(make: str, folder: Path) -> None:
    is_dropped = make not in DRAWN
    for use, compute in USE.items():
        with pytest.raises(ValueError) if is_dropped else contextlib.nullcontext():
            assert not differing(folder, lambda compute=compute: compute(RANDOM[make]())), use


def test_a_factory_may_ask_for_shapes_of_results(tmp_path: Path) -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.begin = nn.Conv2d(3, 4, 3, stride=2)
            wide = self.begin(torch.zeros(1, 3, 9, 9)).flatten(1).shape[1]
            self.head = nn.Linear(wide, 5)

    model = Sized()
    stowage.save(model, tmp_path)
    assert torch.equal(stowage.load(Sized, tmp_path).head.weight, model.head.weight)
