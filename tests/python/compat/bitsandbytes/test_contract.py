# SPDX-License-Identifier: Apache-2.0
"""What code for bitsandbytes relies on, asked of bitsandbytes and of the facade in one process: the
same answers, kinds of errors and warnings; and the facade in the place of bitsandbytes itself."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import stowage.compat.bitsandbytes as ours

theirs = pytest.importorskip("bitsandbytes")
pytest.importorskip("bitsandbytes.nn.parametrize")
Side = Any
Call = Callable[[Side], Any]


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """bitsandbytes compiles its fallbacks for each shape anew."""
    with torch.compiler.set_stance("force_eager"):
        yield


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def told(answer: Any) -> Any:
    """What of an answer must be equal on both sides."""
    if type(answer).__name__ == "QuantState":
        return {k: told(v) for k, v in answer.as_dict().items()}
    if isinstance(answer, torch.Tensor):
        kind = "tensor" if type(answer) in (torch.Tensor, nn.Parameter) else type(answer).__name__
        return kind, tuple(answer.shape), answer.dtype, answer.reshape(-1).tolist()
    if isinstance(answer, list | tuple):
        return [told(one) for one in answer]
    if isinstance(answer, dict):
        return {key: told(value) for key, value in answer.items()}
    return answer


def outcome(call: Call, side: Side) -> Any:
    """The answer or the error, and the categories of warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            answer = told(call(side))
        except Exception as error:
            answer = error
    return answer, sorted(w.category.__name__ for w in caught)


def blockwise(side: Side, **kwargs: Any) -> Any:
    return side.functional.quantize_blockwise(values(64, 65), **kwargs)


def blockwise_again(side: Side, **kwargs: Any) -> Any:
    codes, state = blockwise(side, **kwargs)
    again = side.functional.QuantState.from_dict(state.as_dict(), "cpu")
    return again, side.functional.dequantize_blockwise(codes, again)


def four_bit_again(side: Side, kind: str, packed: bool) -> Any:
    codes, state = side.functional.quantize_4bit(values(64, 64), quant_type=kind)
    again = side.functional.QuantState.from_dict(state.as_dict(packed=packed), "cpu")
    return again, side.functional.dequantize_4bit(codes, again)


def layer(side: Side, *shape: int, **kwargs: Any) -> Any:
    made = side.nn.Linear4bit(*shape, compress_statistics=False, **kwargs)
    with torch.no_grad():
        made.weight.copy_(values(*made.weight.shape))
        made.bias.zero_()
    return made.to("cpu").train()  # an eval forward of bitsandbytes rearranges the codes


def state_taken_away(side: Side) -> Any:
    made = layer(side, 64, 32)
    made(values(3, 64))
    made.weight.quant_state = None
    made(values(3, 64))
    return made.weight.quant_state


def parameter_taken_away(side: Side) -> Any:
    """As FSDP does it: bare codes where the Params4bit was."""
    made = layer(side, 64, 32)
    made(values(3, 64))
    made.weight = nn.Parameter(made.weight.data, requires_grad=False)
    made(values(3, 64))
    return type(made.weight).__name__, made.weight.quant_state, made.weight.blocksize


def transposed(side: Side) -> Any:
    packed, state = side.functional.quantize_4bit(values(64, 32), quant_type="nf4")
    return side.matmul_4bit(values(2, 64), packed, state).shape


def broken(side: Side, **changes: Any) -> Any:
    return side.functional.QuantState.from_dict(blockwise(side)[1].as_dict() | changes, "cpu")


def with_buffer() -> nn.Module:
    module = nn.Module()
    module.register_buffer("b", torch.ones(64))
    return module


CALLS: dict[str, Call] = {
    "blockwise": blockwise,
    "blockwise in small blocks": lambda s: blockwise(s, blocksize=64),
    "blockwise, nested, but for the sums": lambda s: blockwise(s, nested=True)[0],
    "a blockwise state by its dict": blockwise_again,
    "a nested blockwise state by its dict": lambda s: blockwise_again(s, nested=True)[0].nested,
    "an nf4 state by its dict": lambda s: four_bit_again(s, "nf4", False),
    "an fp4 state by its packed dict": lambda s: four_bit_again(s, "fp4", True),
    "a state without a type packs nothing": lambda s: sorted(blockwise(s)[1].as_dict(packed=True)),
    "the map of block scales": lambda s: s.functional.create_dynamic_map(),
    "the map without signs": lambda s: s.functional.create_dynamic_map(signed=False),
    "the map of 5 bits": lambda s: s.functional.create_dynamic_map(True, 4, 5),
    "the map of 4 exponent bits": lambda s: s.functional.create_dynamic_map(True, 4),
    "another map": lambda s: blockwise(s, code=s.functional.create_dynamic_map(signed=False)),
    "a state that was taken away": state_taken_away,
    "a parameter that was taken away": parameter_taken_away,
    "a weight the wrong way round": transposed,
    "no state": lambda s: s.matmul_4bit(values(2, 64), values(4, 1), None),
    "an int tensor": lambda s: s.functional.quantize_4bit(torch.ones(64, 64, dtype=torch.int32)),
    "a size of block": lambda s: s.functional.quantize_blockwise(values(64), blocksize=0),
    "neither state nor absmax": lambda s: s.functional.dequantize_blockwise(values(4)),
    "codes of another dtype": lambda s: s.functional.dequantize_blockwise(
        torch.ones(4, dtype=torch.int64), absmax=torch.ones(1)
    ),
    "a state without a type": lambda s: s.functional.QuantState.from_dict({}, "cpu"),
    "no such parameter": lambda s: s.nn.parametrize.replace_parameter_4bit(nn.Linear(4, 4), "w"),
    "no parameter": lambda s: s.nn.parametrize.replace_parameter_4bit(with_buffer(), "b"),
}


WITH_THE_USUAL_MAP = {
    "blockwise",
    "blockwise in small blocks",
    "a blockwise state by its dict",
    "the map of block scales",
}


def usual_maps() -> tuple[torch.Tensor, torch.Tensor]:
    """Ours is a table; the peer computes it, with another last place where torch has no AVX2."""
    return ours.functional.create_dynamic_map(), theirs.functional.create_dynamic_map()


def test_the_usual_map() -> None:
    torch.testing.assert_close(*usual_maps(), rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("name", CALLS)
def test_same_outcome(name: str) -> None:
    if name in WITH_THE_USUAL_MAP and not torch.equal(*usual_maps()):
        pytest.skip("the peer computes another map of block scales on this CPU")
    (mine, our_warnings), (peer, warnings_there) = (
        outcome(CALLS[name], side) for side in (ours, theirs)
    )
    if isinstance(peer, Exception):
        assert isinstance(mine, type(peer))  # who catches theirs catches ours
    else:
        assert mine == peer
    assert our_warnings == warnings_there


def test_values_of_nested_blockwise_states() -> None:
    """The mean of block scales depends on the order of summing, its values on its last place."""
    results = []
    for side in (ours, theirs):
        codes, state = blockwise(side, nested=True)
        again = side.functional.QuantState.from_dict(state.as_dict(), "cpu")
        results.append(side.functional.dequantize_blockwise(codes, again))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def test_unknown_states_are_refused() -> None:
    """By an assertion there, or later."""
    for changes in ({"quant_type": "nf5"}, {"other": 1}):
        with pytest.raises(ValueError, match=r"quant_type must be|unknown \['other'\]"):
            broken(ours, **changes)


@pytest.mark.parametrize("kind", ["embedding", "linear"])
def test_a_state_that_was_taken_away_is_kept_through_the_life_of_a_module(kind: str) -> None:
    made: Any = layer(ours, 64, 32) if kind == "linear" else ours.nn.Embedding4bit(32, 64).to("cpu")
    x = values(3, 64) if kind == "linear" else torch.tensor([1, 31])
    expected, saved = made(x), made.state_dict()
    for lose in ("state", "parameter"):
        for survive in (copy.deepcopy, pickled, moved):
            lost = copy.deepcopy(made)
            if lose == "state":
                lost.weight.quant_state = None
            else:
                lost.weight = nn.Parameter(lost.weight.data, requires_grad=False)
            lost = survive(lost)
            assert [*lost.state_dict()] == [*saved]
            assert torch.equal(lost(x), expected) and type(lost.weight) is ours.nn.Params4bit
    made.weight = nn.Parameter(values(32, 64))
    with pytest.raises(ValueError, match="must be quantized before it computes"):
        made(x)


def pickled(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def moved(module: nn.Module) -> Any:
    return module.to("cpu").to(torch.bfloat16).to(torch.float32)


OVERLAID = """
import sys
import stowage.compat.bitsandbytes as ours
for name in [n for n in sys.modules if n.startswith("stowage.compat.bitsandbytes")]:
    sys.modules[name.removeprefix("stowage.compat.")] = sys.modules[name]
import torch
import bitsandbytes as bnb
assert bnb is ours
assert bnb.functional.create_dynamic_map(signed=False).shape == (256,)
x = torch.randn(64, 128)
packed, absmax = torch.ops.bitsandbytes.quantize_4bit(x, 64, "nf4", torch.uint8)
out = torch.empty(64, 128)
torch.ops.bitsandbytes.dequantize_4bit.out(packed, absmax, 64, "nf4", [64, 128], x.dtype, out=out)
assert (out - x).abs().max() < 1
for name in ("nn.Linear8bitLt", "nn.modules.Int8Params", "functional.int8_double_quant", "matmul",
             "optim.Adam8bit", "functional.create_fp8_map"):
    found = bnb
    for part in name.split("."):
        found = getattr(found, part)
    try:
        found(8, 8)
    except NotImplementedError as error:
        assert "must come from bitsandbytes" in str(error), error
    else:
        raise AssertionError(name)
try:
    bnb.functional.get_4bit_type("int4", "cpu")
except NotImplementedError:
    pass
else:
    raise AssertionError("get_4bit_type")
"""


def test_the_facade_in_the_place_of_bitsandbytes() -> None:
    """What it has not is not looked for in itself, and the ops are there."""
    done = subprocess.run([sys.executable, "-c", OVERLAID], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
