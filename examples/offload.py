# SPDX-License-Identifier: Apache-2.0
"""A language model whose weights rest on a disk, in half the memory that they take.

A small Llama with random weights is built, stowed in int8 and saved; then it is loaded with a
budget of half its bytes. Weights are prefetched while others work, and the answers are those of the
model in memory, bit for bit. Needs transformers. Run: python examples/offload.py [FOLDER]
"""

import os
import sys
import tempfile
import time

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from transformers import AutoModelForCausalLM, LlamaConfig

import stowage

CONFIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=12,
    num_attention_heads=8,
    num_key_value_heads=4,
    eos_token_id=None,
)


def build() -> torch.nn.Module:
    return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).eval()


def answer(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model.generate(torch.tensor([[1, 17, 42]]), max_new_tokens=12, do_sample=False)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = sys.argv[1] if len(sys.argv) > 1 else scratch
        torch.manual_seed(0)
        model = build()
        stowage.stow(model, "int8")
        stowage.save(model, folder)
        size, expected = stowage.nbytes(model), answer(model)

        offloaded = stowage.load(build, folder, ram=size // 2)  # it never was in memory whole
        before = stowage.engine_report(offloaded)
        start = time.perf_counter()
        with stowage.trace(os.path.join(folder, "trace.json")):  # open it in ui.perfetto.dev
            assert torch.equal(answer(offloaded), expected)
        seconds = time.perf_counter() - start
        report = stowage.engine_report(offloaded)
        print(report.since(before))
        print(
            f"{size / 2**20:.1f} MiB of weights in {report.peak / 2**20:.1f} MiB of memory: "
            f"the same 12 tokens, {seconds / 12 * 1e3:.0f} ms each"
        )

        stowage.onload(offloaded)  # all in memory again
        assert torch.equal(answer(offloaded), expected)


if __name__ == "__main__":
    main()
