# SPDX-License-Identifier: Apache-2.0
"""bench/python/peer_llama.py: the GGUF file has a checkpoint's numbers by llama.cpp's names."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")
BENCHES = Path(__file__).resolve().parents[2] / "bench/python"
SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.slow
def test_the_file_has_the_numbers_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHES))
    import large_checkpoints
    import peer_llama

    large_checkpoints.write("mixtral", 2, tmp_path, **SMALL)
    held = {
        name: tensor
        for file in tmp_path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    read = {t.name: t for t in gguf.GGUFReader(peer_llama.write(tmp_path)).tensors}
    assert len(read) == 3 + 2 * 10

    def values(name: str) -> torch.Tensor:
        data = torch.from_numpy(read[name].data.copy())
        return data.view(torch.bfloat16) if data.dtype == torch.uint8 else data

    stack = values("blk.1.ffn_down_exps.weight")
    wanted = [held[f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight"] for e in range(4)]
    assert torch.equal(stack.view(4, 64, 96), torch.stack(wanted))
    assert torch.equal(values("output.weight").view(64, 64), held["lm_head.weight"])
    router = held["model.layers.0.block_sparse_moe.gate.weight"]
    assert torch.equal(values("blk.0.ffn_gate_inp.weight").view(4, 64), router.float())
    # Pairs that rotate are neighbors there, and half a head apart here.
    key = held["model.layers.0.self_attn.k_proj.weight"].view(2, 2, 8, 64)
    assert torch.equal(values("blk.0.attn_k.weight").view(2, 8, 2, 64), key.transpose(1, 2))
