# SPDX-License-Identifier: Apache-2.0
"""The arguments `working` and `blocks`: what they choose, show and refuse."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stowage
from stowage._tensor.products import blocks as _blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.conv = nn.Linear(16, 16), nn.Conv1d(5, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.a(x))


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(16, 4))


def block_model() -> nn.Module:
    model = model_of()
    stowage.stow(model, "nf4", working="block", blocks=Block)
    return model


X = torch.linspace(-2, 2, 2 * 5 * 16).reshape(2, 5, 16)


def test_the_report_names_the_mode() -> None:
    rows = stowage.report(block_model())
    assert rows["0.a.weight"].working == "block" and rows["2.weight"].working == "layer"
    assert rows["0.a.bias"].working == ""
    model = nn.ModuleDict(
        {
            "conv": nn.Conv1d(4, 4, 3),
            "gru": nn.GRU(4, 4),
            "mha": nn.MultiheadAttention(4, 2),
            "table": nn.Embedding(4, 4),
        }
    )
    rows = stowage.stow(model, rules={"*weight*": "int8"})
    assert rows["conv.weight"].working == "tile" and "tile" in str(rows)
    assert rows["gru.weight_ih_l0"].working == "tile"
    assert rows["table.weight"].working == "rows"
    assert rows["mha.in_proj_weight"].working == "tile, else whole"
    assert stowage.stow(model, "int8", working="layer")["conv.weight"].working == "layer"


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(16, 16), (2, 5, 16)),
    "Conv1d": (lambda: nn.Conv1d(16, 16, 3), (2, 16, 5)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(16, 16, 3), (2, 16, 5, 5)),
    "Bilinear": (lambda: Twice(nn.Bilinear(16, 16, 4)), (2, 16)),
    "Embedding": (lambda: Ids(nn.Embedding(16, 16)), (2, 5)),
    "EmbeddingBag": (lambda: Ids(nn.EmbeddingBag(16, 16)), (2, 5)),
    "RNNCell": (lambda: nn.RNNCell(16, 16), (2, 16)),
    "GRUCell": (lambda: nn.GRUCell(16, 16), (2, 16)),
    "LSTMCell": (lambda: nn.LSTMCell(16, 16), (2, 16)),
    "RNN": (lambda: nn.RNN(16, 16, 2), (5, 2, 16)),
    "RNN, batch first": (lambda: nn.RNN(16, 16, 2, batch_first=True), (2, 5, 16)),
    "GRU": (lambda: nn.GRU(16, 16, bidirectional=True), (5, 2, 16)),
    "GRU, batch first": (lambda: nn.GRU(16, 16, batch_first=True), (2, 5, 16)),
    "LSTM": (lambda: nn.LSTM(16, 16), (5, 2, 16)),
    "LSTM, batch first": (lambda: nn.LSTM(16, 16, batch_first=True), (2, 5, 16)),
    "LSTM, projected": (lambda: nn.LSTM(16, 16, proj_size=8, batch_first=True), (2, 5, 16)),
}


class Twice(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](x, x)


class Ids(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](x.abs().long() % 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_report_is_right_about_what_is_widened(kind: str, dtype: torch.dtype) -> None:
    make, size = KINDS[kind]
    module = make().to(dtype)
    report = stowage.stow(module, rules={"*weight*": "int8"})
    modes = {row.working for row in report.rows} - {""}
    for grad in (False, True):
        stowage.fallbacks(clear=True)
        x = torch.randn(size, dtype=dtype, requires_grad=grad and "Embedding" not in kind)
        try:
            result = module(x)
        except RuntimeError as error:
            if "does not support bf16" in str(error).lower() or "not implemented" in str(error):
                pytest.skip(str(error))  # by this CPU, of a dense module too
            raise
        if x.requires_grad:
            (result[0] if isinstance(result, tuple) else result).sum().backward()
        if modes != {"tile, else whole"}:
            widened = stowage.fallbacks(clear=True)
            assert bool(widened) == (modes == {"whole"}), (modes, widened)


def test_stow_again_and_unstow() -> None:
    model = block_model()
    stowage.stow(model, "nf4", working="block", blocks=Block)
    assert len(model[0]._forward_hooks) == len(model[0]._forward_pre_hooks) == 1
    stowage.stow(model, "nf4", working="tile")
    assert not any(_blocks.is_block(m) for m in model.modules())
    assert not model[0].a.weight._exact
    model = block_model()
    stowage.unstow(model)
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not module._forward_hooks_always_called
    model(X)


def test_which_modules_a_pattern_makes_blocks() -> None:
    def blocks(pattern: Any) -> list[str]:
        model = model_of()
        stowage.stow(model, "int8", working="block", blocks=pattern)
        return [path for path, module in model.named_modules() if _blocks.is_block(module)]

    assert blocks("[01]*") == ["0", "1"]  # the outermost: * crosses dots
    assert blocks(("0", nn.Conv1d)) == ["0", "0.conv", "1.conv"]
    assert blocks("*") == blocks("") == [""]  # "" is the path of the model itself
    assert blocks(re.compile(r"^\d$")) == ["0", "1", "2"]
    assert blocks(lambda path, module: path == "1" and isinstance(module, Block)) == ["1"]
    assert blocks(Block) == ["0", "1"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"working": "leaf"}, "working must be one of tile, layer, block, got 'leaf'"),
        ({"working": "tile", "exact": True}, "exact=True needs working='layer' or 'block'"),
        ({"working": "block"}, "blocks must be given for working='block'"),
        ({"blocks": "0"}, "blocks must be given for working='block', and only then"),
        ({"working": "block", "blocks": "layers.*"}, "'layers.*': must match a module"),
        ({"working": "block", "blocks": 3}, "or a predicate(name, module), got 3"),
        ({"working": "block", "blocks": "*.convv"}, "matches none (near: conv)"),
        ({"working": "block", "blocks": re.compile("^b")}, "regex '^b': must match a module"),
        ({"working": "block", "blocks": nn.GRU}, "GRU: must match a module, matches none"),
        ({"working": "block", "blocks": [3]}, "blocks must be a glob, a regular expression"),
    ],
)
def test_refusals(options: dict[str, Any], text: str) -> None:
    model = model_of()
    with pytest.raises(stowage.InvalidArgument, match="stowage") as error:
        stowage.stow(model, "int8", **options)
    assert text in str(error.value)
    assert not any(isinstance(p, stowage.StowedTensor) for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_load_takes_the_same(tmp_path: Path) -> None:
    model = model_of()
    stowage.stow(model, "int8")
    stowage.save(model, tmp_path)
    loaded = stowage.load(model_of, tmp_path, working="block", blocks=Block)
    stowage.stow(model, "int8", exact=True)
    assert torch.equal(loaded(X), model(X)) and _blocks.is_block(loaded[0])
    with pytest.raises(stowage.InvalidArgument, match="must match a module"):
        stowage.load(model_of, tmp_path, working="block", blocks="h.*")
