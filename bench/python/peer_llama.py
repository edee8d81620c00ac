# SPDX-License-Identifier: Apache-2.0
"""A mixture of `large_checkpoints` in llama.cpp: the same numbers in one GGUF file of bf16, which
it maps, and which the page cache holds as much of as it may.

llama_cpp (PyPI llama-cpp-python) is imported from wherever the path of Python has it.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

FILE = "model.gguf"
_SAME = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "block_sparse_moe.gate.weight": "ffn_gate_inp.weight",
}
_STACKS = {"w1": "ffn_gate_exps.weight", "w3": "ffn_up_exps.weight", "w2": "ffn_down_exps.weight"}
_ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


class _Published:
    """The tensors of a folder."""

    def __init__(self, folder: Path) -> None:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        self._folder, self._where = folder, index["weight_map"]
        self.config = json.loads((folder / "config.json").read_text())

    def get(self, name: str) -> torch.Tensor:
        with safe_open(self._folder / self._where[name], "pt") as file:
            return file.get_tensor(name)

    def all(self) -> Iterator[tuple[str, torch.Tensor]]:
        """By the names of llama.cpp, in the order of use; a stack at a time."""
        for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
            yield _ENDS[name], self.get(name)
        experts = range(self.config["num_local_experts"])
        for layer in range(self.config["num_hidden_layers"]):
            there, here = f"model.layers.{layer}.", f"blk.{layer}."
            for theirs, ours in _SAME.items():
                yield here + ours, self.get(there + theirs)
            for side, count in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
                matrix = self.get(f"{there}self_attn.{side}_proj.weight")
                heads = matrix.view(self.config[count], 2, -1, matrix.shape[1])  # its rotation
                yield f"{here}attn_{side}.weight", heads.transpose(1, 2).reshape(matrix.shape)
            for theirs, ours in _STACKS.items():
                names = [f"{there}block_sparse_moe.experts.{e}.{theirs}.weight" for e in experts]
                yield here + ours, torch.stack([self.get(name) for name in names])


def write(folder: Path) -> Path:
    """The folder's GGUF file, whose tensors are written one after the other."""
    import gguf

    source, path = _Published(folder), folder / FILE
    said, kind = source.config, gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, "llama")
    heads = said["num_attention_heads"]
    writer.add_context_length(4096)
    writer.add_embedding_length(said["hidden_size"])
    writer.add_block_count(said["num_hidden_layers"])
    writer.add_feed_forward_length(said["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(said["num_key_value_heads"])
    writer.add_rope_dimension_count(said["hidden_size"] // heads)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(said["rms_norm_eps"])
    writer.add_expert_count(said["num_local_experts"])
    writer.add_expert_used_count(said["num_experts_per_tok"])
    writer.add_vocab_size(said["vocab_size"])
    writer.add_tokenizer_model("no_vocab")

    def bytes_of(name: str, tensor: torch.Tensor) -> Any:
        small = tensor.dim() == 1 or name.endswith("ffn_gate_inp.weight")
        return tensor.float().numpy() if small else tensor.view(torch.uint8).numpy()

    for name, tensor in source.all():
        held = bytes_of(name, tensor)
        form = kind.F32 if held.dtype == np.float32 else kind.BF16
        writer.add_tensor_info(name, held.shape, held.dtype, held.nbytes, form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in source.all():
        writer.write_tensor_data(bytes_of(name, tensor))
    writer.close()
    return path


@cache
def _library() -> Any:
    import llama_cpp

    llama_cpp.llama_backend_init()
    return llama_cpp


class Talk:
    """Goes on from a prompt, greedily, on as many threads as torch has."""

    def __init__(self, folder: Path, prompt: list[int]) -> None:
        library = _library()
        begun = time.perf_counter()
        how = library.llama_model_default_params()
        how.use_mmap = True
        model = library.llama_model_load_from_file(str(folder / FILE).encode(), how)
        there = library.llama_context_default_params()
        there.n_ctx, there.n_batch = 512, 512
        there.n_threads = there.n_threads_batch = torch.get_num_threads()
        self._context = library.llama_init_from_model(model, there)
        if not self._context:
            raise OSError(f"llama.cpp cannot read {folder / FILE}")
        self._numbers = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        self.load = time.perf_counter() - begun
        begun = time.perf_counter()
        self._step(prompt)
        self.prompt = time.perf_counter() - begun

    def _step(self, ids: list[int]) -> None:
        library = _library()
        tokens = (library.llama_token * len(ids))(*ids)
        if library.llama_decode(self._context, library.llama_batch_get_one(tokens, len(ids))):
            raise OSError("llama.cpp could not decode")
        found = library.llama_get_logits_ith(self._context, -1)
        logits = np.ctypeslib.as_array(ctypes.cast(found, ctypes.POINTER(ctypes.c_float)),
                                       shape=(self._numbers,))  # fmt: skip
        self.last = int(logits.argmax())

    def tokens(self, count: int) -> list[float]:
        """Seconds of each."""
        taken = []
        for _ in range(count):
            begun = time.perf_counter()
            self._step([self.last])
            taken.append(time.perf_counter() - begun)
        return taken
