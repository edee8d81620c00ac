# SPDX-License-Identifier: Apache-2.0
"""A step of LoRA on the experts of a mixture that rests: by products with each expert's factors,
and by the plain sum of the whole stack, which PEFT asks torch for.

Layers of a Qwen3-MoE of random weights at real widths, `target_parameters` of PEFT on both matrices
of its experts. Each way runs in a process of its own, so that what it holds beyond the model is
what the system counted. Run:
python bench/python/experts_lora.py [--layers 2] [--experts 128] [--width 2048] [--inner 768]
     [--storage nf4] [--rank 8] [--tokens 8 256] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import stowage
from stowage._tensor import tables

WAYS = ("plain sum", "factors")
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def build(options: argparse.Namespace) -> Any:
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=512, hidden_size=options.width, moe_intermediate_size=options.inner,
        num_hidden_layers=options.layers, num_attention_heads=16, num_key_value_heads=4,
        num_experts=options.experts, num_experts_per_tok=min(8, options.experts), pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    rules = {"*.experts.*_proj": options.storage}
    stowage.stow(model, options.storage, rules=rules, measure=False)
    lora = peft.LoraConfig(r=options.rank, target_modules=["q_proj"], target_parameters=TARGETS)
    return peft.get_peft_model(model, lora).train()


def held(name: str) -> int:
    """Bytes that the system counts for this process."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def measured(options: argparse.Namespace, tokens: int) -> dict[str, float]:
    """The best of some steps, and bytes beyond the model at most."""
    if options.way == WAYS[0]:
        del tables.FUNCTIONS[torch.baddbmm]
    model = build(options)
    ids = torch.randint(0, 512, (1, tokens))
    Path("/proc/self/clear_refs").write_text("5")  # what was held at most begins anew
    before, took = held("VmRSS"), []
    for _ in range(options.rounds):
        begun = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad()
        took.append(time.perf_counter() - begun)
    return {"seconds": min(took), "bytes": float(held("VmHWM") - before)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, number in (("layers", 2), ("experts", 128), ("width", 2048), ("inner", 768)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--storage", default="nf4")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(measured(options, options.tokens[0])))
        return
    lines: list[dict[str, Any]] = []
    rest = [a for name in ("layers", "experts", "width", "inner", "storage", "rank", "rounds")
            for a in (f"--{name}", str(getattr(options, name)))]  # fmt: skip
    for tokens in options.tokens:
        for way in WAYS:
            command = [sys.executable, __file__, *rest, "--tokens", str(tokens), "--way", way]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            lines.append({"tokens": tokens, "way": way, **json.loads(done.stdout.splitlines()[-1])})
    if options.json:
        print(json.dumps(lines))
        return
    for line in lines:
        size = line["bytes"] / 2**20
        print(
            f"{line['tokens']:5} tokens  {line['way']:10} {line['seconds']:8.3f} s {size:8.0f} MiB"
        )


if __name__ == "__main__":
    main()
