# SPDX-License-Identifier: Apache-2.0
"""Models with resting weights and adapters, and what tests do with them in several processes."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import stowage
import stowage.training
from stowage import sharding


def run(world: int, task: Callable[..., Any], *args: Any) -> Any:
    """What `task(mesh, *args)` returns in process 0 of `world`."""
    return on_ranks(world, _with_mesh, task, args)[0]


def _with_mesh(task: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    result = task(dist.init_device_mesh("cpu", (dist.get_world_size(),)), *args)
    dist.barrier()  # who waits for a process that has ended would say only that it has
    return result


class Adapted(nn.Module):
    """A frozen Linear and an adapter of rank 4."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, inputs) * 0.1)
        self.b = nn.Parameter(torch.randn(outputs, 4) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.a.t()) @ self.b.t()


class Block(nn.Module):
    def __init__(self, columns: int, rows: int, recompute: bool) -> None:
        super().__init__()
        self.up, self.down = Adapted(columns, rows), Adapted(rows, columns)
        self.recompute = recompute

    def _forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)


def blocks(storage: str, shape: tuple[int, int], recompute: bool = False) -> nn.Sequential:
    """Two blocks whose weights have `shape` and its transpose, frozen and at rest."""
    torch.manual_seed(0)
    rows, columns = shape
    model = nn.Sequential(Block(columns, rows, recompute), Block(columns, rows, recompute))
    stowage.stow(model, rules={"*.base.weight": storage})
    return model


def shard(model: nn.Sequential, mesh: Any, **options: Any) -> nn.Sequential:
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def train(model: nn.Module, columns: int, steps: int = 3) -> list[float]:
    """Losses of AdamW steps on the same inputs in every process."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    torch.manual_seed(1)
    for _ in range(steps):
        loss = model(torch.randn(5, columns)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def flat_bytes(weight: Any) -> list[bytes]:
    if hasattr(weight, "full_tensor"):
        weight = weight.full_tensor()
    parts = weight.parts.values()
    return [bytes(part.reshape(-1).view(torch.uint8).tolist()) for part in parts]


def bases(model: nn.Module) -> dict[str, Any]:
    return {n: p for n, p in model.named_parameters() if n.endswith("base.weight")}


# --- tasks ----------------------------------------------------------------------------------------


def losses_of(mesh: Any, cases: list[tuple[str, tuple[int, int], dict[str, Any]]]) -> list[Any]:
    """For each case the losses unsharded and sharded; checks bytes and that nothing was widened."""
    found = []
    for storage, shape, options in cases:
        given = dict(options)
        recompute = given.pop("recompute", False)
        if given.pop("offload", False):
            given["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        plain = blocks(storage, shape)
        before = {name: flat_bytes(p) for name, p in bases(plain).items()}
        want = train(plain, shape[1])
        model = shard(blocks(storage, shape, recompute), mesh, **given)
        stowage.fallbacks(clear=True)
        got = train(model, shape[1])
        assert not stowage.fallbacks(), (storage, shape, stowage.fallbacks())
        for name, weight in bases(model).items():
            assert flat_bytes(weight) == before[name], (storage, shape, name)
        found.append((want, got))
    return found


def wire_bytes(mesh: Any, cases: list[tuple[str, tuple[int, int]]]) -> list[list[int]]:
    """Bytes that this process sends for each gather of a lone frozen Linear without a bias."""
    sent: list[int] = []
    count_gathers(sent)
    found = []
    for storage, (rows, columns) in cases:
        linear = nn.Linear(columns, rows, bias=False).requires_grad_(False)
        model = nn.Sequential(linear)
        stowage.stow(model, rules={"*": storage})
        fully_shard(model[0], mesh=mesh)
        with torch.no_grad():
            model(torch.randn(2, columns))
        found.append(sent.copy())
        sent.clear()
    return found


def count_gathers(sent: list[int]) -> None:
    for name in ("all_gather_into_tensor", "all_gather_single"):
        original: Callable[..., Any] | None = getattr(dist, name, None)
        if original is None:
            continue

        def counted(
            out: Tensor, given: Tensor, *args: Any, _call: Any = original, **kw: Any
        ) -> Any:
            sent.append(given.nbytes)
            return _call(out, given, *args, **kw)

        setattr(dist, name, counted)


def memory(mesh: Any) -> list[tuple[list[int], list[int]]]:
    """Bytes of the gathered parts inside a forward, and after it: with resharding, and without."""
    return [_memory(mesh, reshard) for reshard in (True, False)]


def _memory(mesh: Any, reshard: bool) -> tuple[list[int], list[int]]:
    model = shard(blocks("nf4", (32, 64)), mesh, reshard_after_forward=reshard)
    seen: list[Any] = []
    during: list[list[int]] = []

    def look(module: Any, *_: Any) -> None:
        seen.append(module.weight)
        during.append(_sizes(module.weight))

    model[0].up.base.register_forward_hook(look)
    model(torch.randn(2, 64)).sum().backward()
    with torch.no_grad():
        model(torch.randn(2, 64))
    assert seen[0] is seen[1]
    if reshard:
        try:
            seen[0].dequantize()
        except stowage.InvalidArgument as error:
            assert "storage was released" in str(error), error
        else:
            raise AssertionError("a released weight was read")
    return during[1], _sizes(seen[1])


def _sizes(weight: Any) -> list[int]:
    return [part.untyped_storage().size() for part in weight.parts.values()]


def refused(mesh: Any, kind: str) -> str:
    """The text of what is refused, from every rank the same."""
    model = blocks("nf4", (32, 64))
    try:
        if kind == "int":  # known to FSDP2 alone, until a gather
            shard(model, mesh, reshard_after_forward=2)
            model(torch.randn(2, 64))
        elif kind == "dim1":
            fully_shard(model[0], mesh=mesh, shard_placement_fn=lambda _: Shard(1))
        else:
            if dist.get_rank() == 1:
                stowage.stow(model, rules={"0.up.base.weight": "fp4"}, restow=True)
            sharding.check(shard(model, mesh))
    except stowage.StowageError as error:
        weight = model[0].up.base.weight
        assert kind != "dim1" or isinstance(weight, stowage.StowedTensor), "it is sharded"
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, str(error))
        assert len(set(texts)) == 1, texts
        return str(error)
    raise AssertionError("not refused")


def mixed(mesh: Any) -> list[float]:
    """Frozen nf4 beside a trainable bf16 Linear and a resting embedding and convolution."""
    results = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(11, 48), nn.Unflatten(1, (3, 4, 4)), nn.Conv2d(3, 5, 3), nn.Flatten(1),
            nn.Linear(20, 7), nn.Linear(7, 20),
        ).to(torch.bfloat16)  # fmt: skip
        for i in (0, 2, 4):
            model[i].requires_grad_(False)
        stowage.stow(model, rules={"0": "int8:row", "2.weight": "f8_e4m3:row", "4.weight": "nf4"})
        if sharded:
            for i in (0, 2, 4, 5):
                fully_shard(model[i], mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        losses = []
        for _ in range(3):
            loss = model(torch.arange(6)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append(losses)
    assert results[0] == results[1], results
    return results[1]


def groups_of_columns(mesh: Any) -> None:
    """Each process has some rows of codes and all scales; pieces of columns are refused by name."""
    name, x = "uint4:column8:bf16:zero_rounded", torch.randn(3, 64)

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 64, bias=False))
        return sharding.prepare(stowage.stow(made.requires_grad_(False), name) and made)

    cut, whole = model(), model()
    dist.broadcast(x, 0)
    parallelize_module(cut, mesh, {"0": ColwiseParallel(), "1": ColwiseParallel()})
    rows = cut[0].weight.to_local()
    codes, scale, zero = whole[0].weight.parts.values()
    assert rows.nbytes_at_rest == codes.nbytes // mesh.size() + scale.nbytes + zero.nbytes
    full = cut[0].weight.full_tensor()
    assert all(map(torch.equal, full.parts.values(), (codes, scale, zero)))
    assert torch.equal(full.dequantize(), whole[0].weight.dequantize())
    torch.testing.assert_close(cut[0](x), whole[0](x).chunk(mesh.size(), 1)[dist.get_rank()])
    try:
        parallelize_module(model(), mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    except stowage.Unsupported as error:
        text = str(error)
        assert "stowage: 1.weight:" in text and "use Shard(0)" in text and name in text, text
    else:
        raise AssertionError("columns must be refused")


def bytes_of(model: nn.Module) -> list[bytes]:
    state = stowage.state_dict(model)
    return [bytes(t.reshape(-1).view(torch.uint8).tolist()) for t in state.values()]


def compiled(mesh: Any) -> None:
    """Blocks compiled before they are sharded: the same losses."""
    want = train(blocks("nf4", (6, 64)), 64)
    model = blocks("nf4", (6, 64))
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    got = train(shard(model, mesh), 64)
    assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(want, got, strict=True)), (
        want,
        got,
    )


def with_fp8_gather(mesh: Any) -> None:
    """Frozen nf4 beside a trainable layer that gathers fp8: losses as unsharded."""
    found = []
    for spread in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32).requires_grad_(False), nn.Linear(32, 16))
        stowage.stow(model, rules={"0.weight": "nf4"})
        stowage.training.convert_float8(model, recipe="gather_only", filter=lambda n, m: n == "1")
        assert hasattr(model[1].weight, "fsdp_pre_all_gather")
        if spread:
            for part in model:
                fully_shard(part, mesh=mesh)
            fully_shard(model, mesh=mesh)
        found.append(train(model, 64))
    assert found[0] == found[1], found


def two_by_two(mesh: Any) -> None:
    """Sharded in pairs that replicate each other, and in bf16 with gradients summed in fp32."""
    pairs = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "rows"))
    want = train(blocks("nf4:nested", (7, 33)), 33)
    model = shard(blocks("nf4:nested", (7, 33)), pairs)
    before = flat_bytes(blocks("nf4:nested", (7, 33))[0].up.base.weight)
    assert train(model, 33) == want
    assert flat_bytes(model[0].up.base.weight) == before
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(blocks("nf4", (32, 64)), pairs, mp_policy=policy)
    seen: list[Any] = []
    model[0].up.base.register_forward_hook(lambda module, *_: seen.append(module.weight.dtype))
    rough, exact = train(model, 64), train(blocks("nf4", (32, 64)), 64)
    assert seen[0] is torch.bfloat16
    assert all(math.isclose(a, b, rel_tol=0.05) for a, b in zip(rough, exact, strict=True))
