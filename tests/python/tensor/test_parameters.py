# SPDX-License-Identifier: Apache-2.0
"""Resting weights where modules hold them: as biases, as buffers, under `module.to()` while a graph
or a view lives, with what others noted on them, and under tracers."""

import copy
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import stowage

X = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
BIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "stowed": lambda b: b[:, 0].contiguous() if b.dim() == 3 else b[0].clone(),
    "a row": lambda b: b[1],
    "a column": lambda b: b.t()[:, 1],
    "a slice": lambda b: b.view(-1)[8:16],
    "a Parameter": lambda b: nn.Parameter(stowage.quantize(b.dequantize()[1], "int8"), False),
}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("form", BIASES)
def test_a_bias_may_rest_in_any_form(form: str, exact: bool) -> None:
    bias = BIASES[form](stowage.quantize(torch.randn(2, 8), "int8"))
    plain = bias if type(bias) is Tensor else bias.dequantize()
    w = stowage.quantize(torch.randn(8, 64), "int8", exact=exact)
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            assert torch.equal(F.linear(X, w, bias), F.linear(X, w, plain))
    x = X.clone().requires_grad_()
    F.linear(x, w, bias).sum().backward()
    assert x.grad is not None
    kernel = stowage.quantize(torch.randn(8, 4, 3), "int8")
    signal = torch.randn(1, 4, 9)
    assert torch.equal(F.conv1d(signal, kernel, bias), F.conv1d(signal, kernel, plain))


def test_grouped_products_take_a_stowed_bias() -> None:
    experts = stowage.quantize(torch.randn(2, 8, 64), "int8")
    bias = stowage.quantize(torch.randn(2, 8), "int8")
    for given in (bias, nn.Parameter(bias, requires_grad=False)):
        got = stowage.grouped_linear(X, experts, [1, 3], given)
        assert torch.equal(got, stowage.grouped_linear(X, experts, [1, 3], bias.dequantize()))


def test_buffers_stay_stowed_however_they_came_there() -> None:
    def empty() -> nn.Module:
        module = nn.Module()
        module.register_buffer("table", torch.zeros(8, 64))
        return module

    table = stowage.quantize(torch.randn(8, 64), "int8")
    by_assign, by_name, by_call = empty(), empty(), nn.Module()
    by_assign.load_state_dict({"table": table.clone()}, assign=True)
    by_name.table = table.clone()
    by_call.register_buffer("table", table.clone())
    for module in (by_assign, by_name, by_call):
        again = empty()
        again.load_state_dict(module.state_dict(), assign=True)
        for held in (module, again, copy.deepcopy(module)):
            held.double().bfloat16()
            assert type(held.table) is stowage.StowedTensor and held.table.dtype == torch.bfloat16


def test_a_refused_requires_grad_changes_no_parameter() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model.requires_grad_(False)
    stowage.stow(model, rules={"1.weight": "int8"})
    with pytest.raises(stowage.Unsupported, match="must stay frozen"):
        model.requires_grad_(True)
    assert not any(p.requires_grad for p in model.parameters())
    model[0].requires_grad_(True).requires_grad_(False)
    assert model.requires_grad_(False) is model


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 64), nn.Linear(64, 8)
        self.head.weight = self.table.weight


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "another dtype": lambda m: m.bfloat16(),
    "the same dtype": lambda m: m.float(),
    "the same device": lambda m: m.cpu(),
    "all the same": lambda m: m.to("cpu", torch.float32),
    "twice": lambda m: m.half().float(),
    "type": lambda m: m.type(torch.float64),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "share_memory": lambda m: m.share_memory(),
    "apply": lambda m: m._apply(torch.clone),
}


@pytest.mark.parametrize("move", MOVES)
def test_what_was_noted_on_a_parameter_survives_moves(move: str) -> None:
    stowed, dense = Tied(), Tied()
    stowage.stow(stowed, rules={"table.weight": "int8"})
    for model in (stowed, dense):
        for parameter in model.parameters():
            parameter.note = ["kept"]
        held = model.table.weight
        MOVES[move](model)
        assert model.head.weight is model.table.weight is held
        assert all(p.note == ["kept"] for p in model.parameters())
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        for other in (held.detach(), held.data, held.clone(), nn.Parameter(held, False)):
            assert not hasattr(other, "note")
    stowed.to("meta")  # where a plain one becomes another Parameter, without
    weight = stowed.table.weight
    assert isinstance(weight, stowage.StowedTensor) and weight.note == ["kept"]


KEEPERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv2d": (lambda: nn.Conv2d(16, 16, 3), (2, 16, 9, 9)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(16, 16, 3), (2, 16, 9)),
    "attention": (lambda: Attention(nn.MultiheadAttention(16, 4)), (3, 2, 16)),
    "linear": (lambda: nn.Linear(16, 16), (2, 16)),
    "bilinear": (lambda: Twice(nn.Bilinear(16, 16, 8)), (2, 16)),
    "gru": (lambda: First(nn.GRU(16, 16, batch_first=True)), (3, 2, 16)),
    "lstm": (lambda: First(nn.LSTM(16, 16, proj_size=8)), (3, 2, 16)),
    "gru cell": (lambda: nn.GRUCell(16, 16), (3, 16)),
}


class Twice(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](x, x)


class First(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](x)[0]


class Attention(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](x, x, x)[0]


@pytest.mark.parametrize("kind", KEEPERS)
def test_a_module_moves_while_a_graph_keeps_its_weight(kind: str) -> None:
    make, size = KEEPERS[kind]
    module, x = make(), torch.randn(size, requires_grad=True)
    stowage.stow(module, rules={"*weight*": "int8"})
    module(x).sum().backward()
    wanted, x.grad = x.grad, None
    result = module(x)
    module.to(torch.bfloat16)
    module.half()
    result.sum().backward()  # with the weights of its forward
    assert torch.allclose(x.grad, wanted)
    assert all(p.dtype == torch.float16 for p in module.parameters())


def test_a_view_of_a_weight_that_was_cast_shows_the_old_one() -> None:
    layer = nn.Linear(64, 8, bias=False)
    stowage.stow(layer, "int8")
    column, rows, values = layer.weight[:, 3], layer.weight[2:4], layer.weight.dequantize()
    layer.bfloat16()
    assert torch.equal(column.dequantize(), values[:, 3]) and column.dtype == torch.float32
    assert torch.equal(rows.dequantize(), values[2:4])
    assert layer.weight[:, 3].sum().dtype == torch.bfloat16


@pytest.mark.parametrize("trained", [False, True])
def test_tracing_records_the_op(trained: bool) -> None:
    layer = nn.Linear(64, 8)
    stowage.stow(layer, rules={"weight": "int8"})
    layer.bias.requires_grad_(trained)
    traced = torch.jit.trace(layer, X)
    assert torch.equal(traced(2 * X), layer(2 * X)) and "stowage::linear" in str(traced.graph)
    with pytest.raises(stowage.Unsupported, match="ONNX"):
        torch.onnx.export(layer, (X,), "/dev/null", dynamo=False)


@pytest.mark.parametrize("storage", ["int8", "nf4", "f8_e4m3:tensor"])
def test_data_may_get_another_shape(storage: str) -> None:
    """As tables of a model grow by new tokens: `old.weight.data = new.weight.data`."""
    layer = nn.Embedding(16, 64)
    stowage.stow(layer, storage)
    held, values = layer.weight, torch.randn(24, 64)
    layer.weight.data = values
    assert layer.weight is held and layer.weight.shape == (24, 64)
    assert torch.equal(held.dequantize(), stowage.quantize(values, storage).dequantize())
    assert torch.equal(layer(torch.tensor([20])), held.dequantize()[[20]])
    layer.weight.data = stowage.quantize(values[:8], storage)
    assert layer.weight.shape == (8, 64) and layer.weight.resting == held.resting


@pytest.mark.parametrize("tied", [False, True])
def test_token_embeddings_are_resized(tied: bool) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    stowage.stow(model, "int8", skip=None)
    rows = model.get_input_embeddings().weight.dequantize()
    for count in (72, 60):
        model.resize_token_embeddings(count, mean_resizing=False)
        table = model.get_input_embeddings().weight
        assert type(table) is stowage.StowedTensor and table.shape == (count, 64)
        assert torch.allclose(table.dequantize()[:60], rows[:60], atol=1e-6)
        assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, count)
