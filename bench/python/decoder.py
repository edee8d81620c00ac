# SPDX-License-Identifier: Apache-2.0
"""A Llama-shaped decoder at rest in several forms, beside dense bf16 and what people use today.

24 layers, hidden 2048, feed-forward 5632, 32000 words, heads apart: 1.2e9 random weights, bf16.
Every form holds the same weights and runs in turn with all others in one process: a prompt of 128
tokens, then single tokens with its cache. Peers that are not installed are left out and said so.
Embedding and head stay bf16 in every form. What it prints is what README.md holds, to be pasted
there from one run on a quiet machine. Run: python bench/python/decoder.py [--json]
"""

import argparse
import copy
import datetime
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import stowage

STORAGES = ("f8_e4m3", "f8_e4m3:row", "int8:row", "nf4", "nf4:block64:nested")
PLAIN = {"model.embed_tokens": None, "lm_head": None}


@dataclass
class Row:
    """Times are medians over the rounds; `x_dense` is dense time / this time in the same run."""

    name: str
    rest_bytes: int
    decode_ms: float
    decode_x_dense: float
    prompt_ms: float
    prompt_x_dense: float
    relative_error: float  # of the prompt's logits, Frobenius, against dense bf16


def build(layers: int, hidden: int, words: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // 64, 1),
        num_key_value_heads=max(hidden // 64, 1),
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)


def _stowed(storage: str) -> Callable[[nn.Module], None]:
    def make(model: nn.Module) -> None:
        stowage.stow(model, storage, rules=PLAIN, measure=False)

    return make


def _layerwise(model: nn.Module) -> None:
    from diffusers.hooks import apply_layerwise_casting

    apply_layerwise_casting(
        model,
        storage_dtype=torch.float8_e4m3fn,
        compute_dtype=torch.bfloat16,
        skip_modules_pattern=["embed_tokens", "lm_head", "norm"],
    )


def _quanto(kind: str) -> Callable[[nn.Module], None]:
    def make(model: nn.Module) -> None:
        from optimum import quanto

        quanto.quantize(model, weights=getattr(quanto, kind), exclude=["lm_head"])
        quanto.freeze(model)

    return make


def _bitsandbytes(model: nn.Module) -> None:
    """Its NF4 layers; the first forward in eval mode rearranges them for its fused product."""
    import bitsandbytes as bnb

    for path, linear in list(model.named_modules()):
        if type(linear) is not nn.Linear or path == "lm_head":
            continue
        how = {"compress_statistics": False, "quant_type": "nf4"}
        sizes, dtype = (linear.in_features, linear.out_features), linear.weight.dtype
        layer = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=dtype, **how)
        layer.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, **how)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer.to("cpu").eval())


def forms(peers: bool) -> Iterator[tuple[str, Callable[[nn.Module], None] | None]]:
    """Name and what turns a dense copy into the form; None where its package is missing."""
    yield "dense bf16", lambda model: None
    for storage in STORAGES:
        yield f"stowage {storage}", _stowed(storage)
    if not peers:
        return
    yield "diffusers layerwise fp8", _layerwise if _has("diffusers") else None
    yield "bitsandbytes nf4", _bitsandbytes if _has("bitsandbytes") else None
    for kind in ("qfloat8", "qint8"):
        yield f"quanto {kind}", _quanto(kind) if _has("optimum.quanto") else None


def _has(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def rest_bytes(model: nn.Module) -> int:
    """Bytes of every inner tensor of the parameters, and of buffers."""
    total = 0
    for tensor in (*model.parameters(), *model.buffers()):
        names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
        parts = [getattr(tensor, name) for name in names] or [tensor]
        total += sum(part.nbytes for part in parts)
        if (state := getattr(tensor, "quant_state", None)) is not None:
            total += state.absmax.nbytes  # of bitsandbytes, beside the parameter
    return total


@torch.inference_mode()
def prompt(model: nn.Module, ids: torch.Tensor) -> tuple[float, torch.Tensor, object]:
    start = time.perf_counter()
    out = model(ids, use_cache=True)
    return time.perf_counter() - start, out.logits, out.past_key_values


@torch.inference_mode()
def decode(model: nn.Module, cache: object) -> float:
    token = torch.tensor([[7]])
    start = time.perf_counter()
    model(token, past_key_values=cache, use_cache=True)
    return time.perf_counter() - start


def copies(dense: nn.Module, peers: bool) -> dict[str, nn.Module]:
    """The dense model and a copy of it in each form."""
    models: dict[str, nn.Module] = {}
    for name, make in forms(peers):
        if make is None:
            print(f"{name}: not installed, left out", file=sys.stderr)
            continue
        model = dense if name == "dense bf16" else copy.deepcopy(dense)
        make(model)
        models[name] = model
    return models


def measure(models: dict[str, nn.Module], tokens: int, rounds: int, words: int) -> list[Row]:
    ids = torch.arange(tokens).unsqueeze(0) % words
    logits, caches = {}, {}
    for name, model in models.items():  # also warms up
        _, logits[name], caches[name] = prompt(model, ids)
        decode(model, copy.deepcopy(caches[name]))
    prompts: dict[str, list[float]] = {name: [] for name in models}
    decodes: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            prompts[name].append(prompt(model, ids)[0])
            cache = copy.deepcopy(caches[name])
            decodes[name].extend(decode(model, cache) for _ in range(3))
    one = {name: statistics.median(times) * 1e3 for name, times in decodes.items()}
    many = {name: statistics.median(times) * 1e3 for name, times in prompts.items()}
    base = logits["dense bf16"].float()
    return [
        Row(
            name=name,
            rest_bytes=rest_bytes(model),
            decode_ms=one[name],
            decode_x_dense=one["dense bf16"] / one[name],
            prompt_ms=many[name],
            prompt_x_dense=many["dense bf16"] / many[name],
            relative_error=float((logits[name].float() - base).norm() / base.norm()),
        )
        for name, model in models.items()
    ]


def machine() -> str:
    """The CPU by its name and numbers, and the instruction set of our kernels on it."""
    facts = dict(
        (part.strip() for part in line.split(":", 1))
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    )
    numbers = f"family {facts['cpu family']}, model {facts['model']}"
    return f"{facts['model name']} ({numbers}; `{stowage.info()['instruction_set']}`)"


def table(rows: list[Row], given: argparse.Namespace) -> list[str]:
    """What README.md holds, to be pasted whole: where it ran, and a row for each form."""
    threads = "one thread" if given.threads == 1 else f"{given.threads} threads"
    lines = [
        f"{machine()}, {threads}, torch {torch.__version__}, {datetime.date.today()}; "
        f"{given.layers} layers of {given.hidden}, median of {given.rounds} rounds:",
        "",
        f"| at rest | MiB | of dense | 1 token, ms | speed | {given.tokens} tokens, ms | speed "
        "| error of logits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        own = r.name.removeprefix("stowage ")
        name = own if own == r.name else f"`{own}`"
        lines.append(
            f"| {name} | {r.rest_bytes / 2**20:.0f} | {r.rest_bytes / rows[0].rest_bytes:.2f} "
            f"| {r.decode_ms:.0f} | {r.decode_x_dense:.2f} | {r.prompt_ms:.0f} "
            f"| {r.prompt_x_dense:.2f} | {r.relative_error:.3f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--words", type=int, default=32000)
    parser.add_argument("--tokens", type=int, default=128, help="length of the prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave peers out")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    models = copies(build(given.layers, given.hidden, given.words), given.peers)
    rows = measure(models, given.tokens, given.rounds, given.words)
    if given.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    print("\n".join(table(rows, given)))


if __name__ == "__main__":
    main()
