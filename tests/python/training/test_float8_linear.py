# SPDX-License-Identifier: Apache-2.0
"""convert_float8 on one process: against a slow reference, and what weights live through."""

import copy
import io
import math
from typing import Any

import float8_reference as reference
import pytest
import tiles
import torch
from torch import Tensor, nn

from stowage.training import RECIPES, TrainedWeight, convert_float8, refresh_scales, reset_history
from stowage.training.scaled_product import _scaled, cast, product

DTYPES = [torch.float32, torch.bfloat16]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 12), nn.GELU(), nn.Linear(12, 5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_equal_the_slow_reference_bit_for_bit(recipe: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(24, 10, dtype=dtype)
    w, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    convert_float8(layer, recipe)
    x = (torch.randn(6, 24) * torch.logspace(-3, 2, 24)).to(dtype).requires_grad_()
    g = (torch.randn(6, 10) * 1e-3).to(dtype)
    y = layer(x)
    y.backward(g)
    wanted, grad_x, grad_w = reference.linear(x.detach(), w, g, recipe)
    assert torch.equal(y, wanted + bias) and y.dtype == dtype
    assert torch.equal(x.grad, grad_x)  # type: ignore[arg-type]
    assert torch.equal(layer.weight.grad, grad_w)  # type: ignore[arg-type]
    assert torch.equal(layer.bias.grad, g.sum(0))  # type: ignore[arg-type]


def test_fp32_sums_are_close_to_the_exact_product_of_the_codes() -> None:
    torch.manual_seed(2)
    x, w = torch.randn(3, 512), torch.randn(4, 512)
    layer = nn.Linear(512, 4, bias=False)
    layer.weight.data.copy_(w)
    convert_float8(layer)
    a = reference.cast(x, reference.scale(x, None, reference.E4M3, False), reference.E4M3)
    b = reference.cast(w, reference.scale(w, None, reference.E4M3, False), reference.E4M3)
    exact = torch.from_numpy(reference.exact(a[0], b[0].t())) * a[1].double() * b[1].double()
    size = (a[0].abs() @ b[0].t().abs()).double() * a[1].double() * b[1].double()
    assert ((layer(x).double() - exact).abs() <= 520 * 2**-24 * size).all()


def test_the_modules_stay_and_the_weights_are_parameters() -> None:
    model = convert_float8(net(), filter=lambda name, module: name == "2")
    assert [type(m) for m in model] == [nn.Linear, nn.GELU, nn.Linear]
    assert type(model[0].weight) is nn.Parameter
    assert isinstance(model[2].weight, TrainedWeight) and isinstance(model[2].weight, nn.Parameter)
    assert model[2].weight.requires_grad and model[2].weight.is_leaf


def test_weights_shared_with_other_modules_stay_plain_and_shared_linears_stay_shared() -> None:
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    model[3].weight = model[2].weight
    convert_float8(model)
    assert type(model[1].weight) is nn.Parameter and model[1].weight is model[0].weight
    assert isinstance(model[2].weight, TrainedWeight) and model[3].weight is model[2].weight


@pytest.mark.parametrize("kind", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("recipe", RECIPES)
def test_optimizers_see_ordinary_parameters(recipe: str, kind: dict[str, Any]) -> None:
    model = convert_float8(net(), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, **kind)
    x, losses = torch.randn(8, 20), []
    for _ in range(8):
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] / 2 and not any(map(math.isnan, losses))
    assert type(optimizer.state[model[0].weight]["exp_avg"]) is Tensor


def writes() -> list[Any]:
    return [
        lambda w: w.data.mul_(5),
        lambda w: w.detach()[:3].mul_(5),
        lambda w: torch._foreach_mul_([w.data], 5),
        lambda w: w.detach().copy_(torch.ones(12, 20)),
        lambda w: torch.nn.init.normal_(w.data),
        lambda w: w.data.view(-1)[7].fill_(9),
    ]


@pytest.mark.parametrize("write", range(len(writes())))
def test_no_write_leaves_an_old_scale(write: int) -> None:
    layer = convert_float8(net())[0]
    x = torch.randn(2, 20)
    layer(x)
    writes()[write](layer.weight)
    dense = nn.Linear(20, 12)
    dense.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), convert_float8(dense)(x))


def test_weights_that_are_not_finite_are_named() -> None:
    for recipe in RECIPES:
        model = convert_float8(net(), recipe)
        with torch.no_grad():
            model[2].weight[1, 1] = math.inf
            model[0].weight[1, 1] = math.nan
        with pytest.raises(ValueError, match=r"0\.weight must be finite.*2\.weight must be finite"):
            refresh_scales(model)
        with pytest.raises(ValueError, match=r"0\.weight must be finite"):
            model(torch.randn(2, 20))


def test_autocast_chooses_the_dtype_of_inputs_and_results() -> None:
    model = convert_float8(nn.Linear(20, 12, bias=False))
    x = torch.randn(4, 20)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    wanted = reference.linear(x.bfloat16(), model.weight._value, y, "tensorwise")[0]
    assert torch.equal(y, wanted)
    y.sum().backward()
    assert model.weight.grad.dtype == torch.float32


def test_delayed_starts_from_the_data_and_then_uses_the_past() -> None:
    x = torch.randn(4, 20)
    dynamic, delayed = convert_float8(net()), convert_float8(net(), "delayed", history_length=2)
    assert torch.equal(dynamic(x), delayed(x))
    refresh_scales(delayed)
    state = delayed[0].fp8_history.view(torch.float32)
    assert state[0, 2] == x.abs().max() and state[0, 0] == 448 / x.abs().max()
    delayed(x * 4)
    refresh_scales(delayed)
    refresh_scales(delayed)  # nothing seen in between: nothing changes
    assert state[0, 2:].tolist() == [(x * 4).abs().max(), x.abs().max()]
    delayed.half()
    assert torch.equal(delayed[0].fp8_history.view(torch.float32), state)
    delayed(x.half() * 16)  # four times what the scale was made for: saturates, no NaN
    assert delayed(x.half() * 16).isfinite().all()
    reset_history(delayed)
    assert delayed[0].fp8_history.view(torch.float32)[:, 0].tolist() == [0, 0, 0]


def test_the_rule_and_the_margin_of_delayed_scales() -> None:
    for rule, top in (("max", 8.0), ("most_recent", 2.0)):
        layer = convert_float8(nn.Linear(4, 4), "delayed", rule=rule, margin=1, scale_mode="te")
        for size in (8.0, 2.0):
            layer(torch.full((2, 4), size))
            refresh_scales(layer)
        assert layer.fp8_history.view(torch.float32)[0, 0] == 448 / top / 2


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_run_that_was_stopped_equals_one_that_was_not(recipe: str, explicit: bool) -> None:
    torch.manual_seed(3)
    batches = [torch.randn(4, 20) * 10**i for i in (0, 1, -1, 0, 1, -2)]

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: list[Tensor]) -> None:
        for x in steps:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if explicit:
                refresh_scales(model)

    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = convert_float8(net(), recipe)
        return model, torch.optim.AdamW(model.parameters(), 1e-2)

    whole, optimizer = start()
    run(whole, optimizer, batches)
    first, optimizer = start()
    run(first, optimizer, batches[:3])
    file = io.BytesIO()
    torch.save([first.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    second, optimizer = start()
    for target, state in zip((second, optimizer), torch.load(file, weights_only=True), strict=True):
        target.load_state_dict(state)
    run(second, optimizer, batches[3:])
    for (name, a), b in zip(whole.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_copies_casts_and_files() -> None:
    model = convert_float8(net(), "delayed")
    other = copy.deepcopy(model)
    assert other[0].weight._layer.module is other[0]
    with torch.no_grad():
        other[0].weight.mul_(2)
    assert not torch.equal(other[0].weight, model[0].weight)
    model.to(torch.bfloat16)
    assert isinstance(model[0].weight, TrainedWeight) and model[0].weight.dtype == torch.bfloat16
    assert model(torch.randn(2, 20).bfloat16()).dtype == torch.bfloat16
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert {type(v) for v in torch.load(file, weights_only=True).values()} == {Tensor}


def test_models_converted_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = convert_float8(nn.Sequential(nn.Linear(20, 12)), "delayed")
    model.to_empty(device="cpu")
    reset_history(model)
    model[0].reset_parameters()
    assert isinstance(model[0].weight, TrainedWeight)
    assert model(torch.randn(2, 20)).isfinite().all()


def test_refusals_name_everything_and_change_nothing() -> None:
    model = net()
    for wrong in ({"recipe": "tensor"}, {"scale_mode": "x"}, {"rule": "max"}, {"margin": -1}):
        with pytest.raises(ValueError, match="must"):
            convert_float8(model, **wrong)
    with pytest.raises(ValueError, match="got none"):
        convert_float8(model, filter=lambda name, module: False)
    assert {type(m.weight) for m in (model[0], model[2])} == {nn.Parameter}
    convert_float8(model)
    with pytest.raises(ValueError, match=r"0\.weight must not be converted"):
        convert_float8(model)
    with pytest.raises(ValueError, match="must have the weight's dtype"):
        model(torch.randn(2, 20).bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_the_installed_torchao_gives_the_same_but_for_the_order_of_factors(
    recipe: str, dtype: torch.dtype
) -> None:
    float8 = pytest.importorskip("torchao.float8", exc_type=ImportError)
    torch.manual_seed(4)
    mine = nn.Sequential(nn.Linear(64, 32, dtype=dtype))
    theirs = copy.deepcopy(mine)
    convert_float8(mine, recipe)
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    float8.convert_to_float8_training(theirs, config=config)
    x, g = torch.randn(16, 64, dtype=dtype), torch.randn(16, 32, dtype=dtype)
    found = []
    for model in (mine, theirs):
        given = x.clone().requires_grad_()
        y = model(given)
        y.backward(g)
        found.append([y, given.grad, model[0].weight.grad, model[0].bias.grad])
    for ours, peer in zip(*found, strict=True):
        error = (ours - peer).float().norm() / peer.float().norm()
        assert error < (1e-6 if dtype == torch.float32 else 4e-3), error


@pytest.mark.skipif(
    tiles.HAS_TILES and tiles.FORBIDDEN,
    reason="torch wants a product of fp8 from oneDNN where the CPU has AMX, and it is forbidden",
)
def test_the_kernel_of_torch_gives_what_is_emulated() -> None:
    """On a CPU, where torch has one too; GPUs call it through the same function."""
    torch.manual_seed(5)
    for shapes in (((), ()), ((16, 1), (1, 32))):
        a, b = torch.randn(16, 64), torch.randn(64, 32)
        left = cast(a, torch.full(shapes[0], 32.0), torch.float8_e4m3fn)
        right = cast(b, torch.full(shapes[1], 64.0), torch.float8_e4m3fn)
        theirs = _scaled(left, right, torch.bfloat16, False)
        ours = product(left, right, torch.bfloat16)
        assert (theirs.float() - ours.float()).norm() / ours.float().norm() < 4e-3
