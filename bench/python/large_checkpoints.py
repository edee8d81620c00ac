# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of published mixtures, as large as is asked: their real widths and counts of experts,
fewer layers, names and dtypes of the published files, random values.

They are written piece by piece, in a few MiB of memory, whatever they take on the disk. A tensor's
values are a part of an endless row of the same numbers, from a place that its name gives, so any
range of it is known without the file.

    python bench/python/large_checkpoints.py qwen3 /data/qwen3 --bytes 20e9
"""

from __future__ import annotations

import argparse
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

Shape = tuple[int, ...]
_ROW = (1 << 22) + 15  # numbers of a row before it begins again: longer than a matrix's line
_PIECE = 1 << 22  # numbers
_SHARD = 4 << 30  # bytes
_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8"} | {
    torch.float8_e4m3fn: "F8_E4M3"
}


@dataclass(frozen=True)
class Tensor:
    """One of the file: what its values are drawn from, as a name of `_row`."""

    name: str
    shape: Shape
    row: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _row(self.row).element_size()

    def values(self, begin: int, end: int) -> torch.Tensor:
        """Those from `begin` to `end` of its numbers in order."""
        row = _row(self.row)
        at = (zlib.crc32(self.name.encode()) + begin) % _ROW
        parts, missing = [], end - begin
        while missing:
            parts.append(row[at : at + missing])
            at, missing = 0, missing - len(parts[-1])
        found = torch.cat(parts) if len(parts) != 1 else parts[0]
        if self.row != "router":
            return found
        order = torch.randperm(self.shape[0], generator=_seeded(self.name))
        rank = 1 + order[torch.arange(begin, end) // self.shape[1]]
        return (found * 8 * rank**-0.25).bfloat16()  # larger rows win more often

    def pieces(self) -> Iterator[torch.Tensor]:
        numbers = math.prod(self.shape)
        for begin in range(0, numbers, _PIECE):
            yield self.values(begin, min(begin + _PIECE, numbers))


def _seeded(text: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(text.encode()))


@cache
def _row(kind: str) -> torch.Tensor:
    """Numbers of a kind, `_ROW` of them."""
    random = _seeded(kind)
    normal = torch.randn(_ROW, generator=random)
    if kind == "ones":
        return torch.ones(_ROW, dtype=torch.bfloat16)
    if kind in ("weights", "router"):
        return (normal * 0.02).bfloat16()
    if kind == "biases":
        return (normal * 0.001).float()
    if kind == "e4m3":  # beside a scale of about 2e-4, these are weights
        return (normal * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    if kind == "scales":
        return 2e-4 * (1 + 0.1 * torch.rand(_ROW, generator=random))
    if kind == "e2m1":  # two of a byte
        return torch.randint(0, 256, (_ROW,), dtype=torch.uint8, generator=random)
    assert kind == "e8m0", kind
    return torch.randint(118, 122, (_ROW,), dtype=torch.uint8, generator=random)


@dataclass(frozen=True)
class Family:
    """A published mixture.

    Attributes:
        config: of transformers, its class without `Config`, and what it says.
        matrices: what the file calls an expert's gate, up and down; none where it has stacks.
        fp8: whether matrices are in blocks of 128x128, which `lm_head` and routers never are.
        quantization: what `config.json` says of that.
    """

    config: tuple[str, dict[str, Any]]
    matrices: tuple[str, ...]
    fp8: bool
    quantization: dict[str, Any] | None
    block: str = "mlp"  # what the file calls the module of experts


_FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}  # fmt: skip
_GATED = ("gate_proj", "up_proj", "down_proj")
FAMILIES = {
    "qwen3": Family(  # Qwen3-235B-A22B-FP8
        ("Qwen3Moe", {
            "vocab_size": 151936, "hidden_size": 4096, "moe_intermediate_size": 1536,
            "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
            "num_experts": 128, "num_experts_per_tok": 8, "intermediate_size": 12288,
        }),
        _GATED, True, _FP8,
    ),
    "deepseek": Family(  # DeepSeek-V3
        ("DeepseekV3", {"first_k_dense_replace": 1}),
        _GATED, True, _FP8,
    ),
    "gpt-oss": Family(  # gpt-oss-120b
        ("GptOss", {
            "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "num_local_experts": 128, "num_experts_per_tok": 4,
        }),
        (), False, {"quant_method": "mxfp4"},
    ),
    "mixtral": Family(  # Mixtral-8x7B
        ("Mixtral", {}), ("w1", "w3", "w2"), False, None, "block_sparse_moe",
    ),
}  # fmt: skip


def build(family: str, layers: int, **smaller: Any) -> Any:
    """The model, of `layers` decoder layers; `smaller` replaces what its config says."""
    import transformers

    name, said = FAMILIES[family].config
    said = {**said, "num_hidden_layers": layers, "pad_token_id": 0, "tie_word_embeddings": False}
    config = getattr(transformers, f"{name}Config")(**{**said, **smaller})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def tensors(family: str, layers: int, **smaller: Any) -> list[Tensor]:
    """Of the file, in its order."""
    with torch.device("meta"):
        model = build(family, layers, **smaller)
    found: list[Tensor] = []
    for name, value in model.state_dict().items():
        found += _published(FAMILIES[family], name, tuple(value.shape))
    return found


def _published(family: Family, name: str, shape: Shape) -> list[Tensor]:
    name = name.replace(".mlp.", f".{family.block}.")
    if len(shape) == 3:
        return _experts(family, name, shape) if family.matrices else _blocks(name, shape)
    if name.endswith("norm.weight"):
        return [Tensor(name, shape, "ones")]
    if name.endswith("correction_bias"):
        return [Tensor(name, shape, "biases")]
    if name.endswith((".gate.weight", ".router.weight")):
        return [Tensor(name, shape, "router")]
    if len(shape) == 2 and ".layers." in name and ".experts." not in name:
        return _matrix(family, name, shape)
    return [Tensor(name, shape, "weights")]


def _experts(family: Family, name: str, shape: Shape) -> list[Tensor]:
    parent, _, stack = name.rpartition(".")
    count, rows, columns = shape
    gate, up, down = family.matrices
    names, rows = ((gate, up), rows // 2) if stack == "gate_up_proj" else ((down,), rows)
    found: list[Tensor] = []
    for i in range(count):
        for matrix in names:
            found += _matrix(family, f"{parent}.{i}.{matrix}.weight", (rows, columns))
    return found


def _matrix(family: Family, name: str, shape: Shape) -> list[Tensor]:
    if not family.fp8:
        return [Tensor(name, shape, "weights")]
    scales = tuple(-(-size // 128) for size in shape)
    return [Tensor(name, shape, "e4m3"), Tensor(f"{name}_scale_inv", scales, "scales")]


def _blocks(name: str, shape: Shape) -> list[Tensor]:
    count, columns, rows = shape  # the module has the transpose
    groups = (count, rows, columns // 32)
    return [
        Tensor(f"{name}_blocks", (*groups, 16), "e2m1"),
        Tensor(f"{name}_scales", groups, "e8m0"),
    ]


def write(family: str, layers: int, folder: Path, **smaller: Any) -> int:
    """Writes shards, their index and `config.json`; returns the tensors' bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors(family, layers, **smaller):
        if shards[-1] and sum(t.bytes for t in shards[-1]) + tensor.bytes > _SHARD:
            shards.append([])
        shards[-1].append(tensor)
    where: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / file, shard)
        where |= {tensor.name: file for tensor in shard}
    size = sum(tensor.bytes for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with torch.device("meta"):
        config = build(family, layers, **smaller).config.to_dict()
    if FAMILIES[family].quantization:
        config["quantization_config"] = FAMILIES[family].quantization
    (folder / "config.json").write_text(json.dumps(config))
    return size


def _write(path: Path, shard: list[Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in shard:
        begin, end = end, end + tensor.bytes
        said = {"dtype": _NAMES[_row(tensor.row).dtype], "shape": list(tensor.shape)}
        header[tensor.name] = said | {"data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in shard:
            for piece in tensor.pieces():
                file.write(piece.view(torch.uint8).numpy().data)


def layers_for(family: str, size: float, **smaller: Any) -> int:
    """The fewest layers, one of experts among them, that take `size` bytes."""
    for layers in range(2, 1000):
        if sum(tensor.bytes for tensor in tensors(family, layers, **smaller)) >= size:
            return layers
    raise ValueError(f"{family} has no {size} bytes")


def main() -> None:
    about = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    about.add_argument("family", choices=FAMILIES)
    about.add_argument("folder", type=Path)
    about.add_argument(
        "--bytes", type=float, default=20e9, help="at least; whole layers are written"
    )
    options = about.parse_args()
    layers = layers_for(options.family, options.bytes)
    size = write(options.family, layers, options.folder)
    print(f"{options.family}, {layers} layers: {size / 1e9:.1f} GB in {options.folder}")


if __name__ == "__main__":
    main()
