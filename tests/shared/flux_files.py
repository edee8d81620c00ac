# SPDX-License-Identifier: Apache-2.0
"""Files of a small Flux as its authors lay it out, in ComfyUI's forms and in GGUF."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from flux_models import built, original, theirs
from safetensors.torch import save_file

COMFYUI = {
    "f8_e4m3:tensor": "f8_e4m3:tensor",
    "f8_e5m2:tensor": "f8_e5m2:tensor",
    "mxfp8": "f8_e4m3:block32:e8m0",
    "nvfp4": "f4_e2m1:block16:e4m3_bf16",
}
PREFIX = "model.diffusion_model."


def converted(to: Path, storage: str, prefix: str = PREFIX, dialect: str = "comfyui") -> Path:
    """A file of Flux in the layout of its authors, put into ComfyUI's form by the program."""
    plain = to / "plain.safetensors"
    save_file(original(built().bfloat16().state_dict(), prefix), plain)
    program = str(Path(sys.executable).parent / "stowage")
    command = [program, "convert", str(plain), str(to / "out"), "--to", dialect]
    done = subprocess.run([*command, "--storage", storage], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next((to / "out").glob("*.safetensors"))


def scaled(to: Path) -> Path:
    """The older form, by torch alone: a scale and a number for activations beside each matrix."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in original(built().bfloat16().state_dict(), PREFIX).items():
        module = name.removesuffix(".weight")
        if "_blocks." in name and value.dim() == 2:
            scale = value.float().abs().max() / 448
            tensors[name] = (value.float() / scale).to(torch.float8_e4m3fn)
            tensors[f"{module}.scale_weight"] = scale
            tensors[f"{module}.scale_input"] = torch.tensor(0.5)
        else:
            tensors[name] = value
    tensors[f"{PREFIX}scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    save_file(tensors, to / "flux_scaled.safetensors", {"format": "pt"})
    return to / "flux_scaled.safetensors"


def packed(values: torch.Tensor, kind: str) -> Any:
    """Rows of blocks. The package writes no K-quants: bytes of all patterns, with scales that are
    finite."""
    import gguf

    type_ = gguf.GGMLQuantizationType[kind]
    if not kind.endswith("_K"):
        return gguf.quants.quantize(values.float().numpy(), type_)
    block, size = gguf.GGML_QUANT_SIZES[type_]
    bits = torch.randint(0, 256, (values.shape[0], values.shape[1] // block, size))
    bits = bits.to(torch.uint8)
    small = torch.randint(0, 2**12, bits.shape[:2]).to(torch.int16).view(torch.float16)
    places = {"Q4_K": (0, 2), "Q6_K": (208,)}[kind]
    for place in places:
        bits[..., place : place + 2] = small[..., None].view(torch.uint8)
    return bits.flatten(1).numpy()


def as_gguf(
    path: Path, kind: str, architecture: str = "flux", without: str = "", **more: Any
) -> tuple[Path, Any]:
    """A file as ComfyUI-GGUF makes them: matrices of blocks in `kind`, one of each model in F16,
    what lies before and behind the blocks in F32; and a model with the values that gguf's decoder
    reads."""
    import gguf

    model = built(**more)
    state = model.state_dict()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_quantization_version(2)
    decoded: dict[str, torch.Tensor] = {}
    for name, value in original(state).items():
        type_ = gguf.GGMLQuantizationType["F32"]
        if ".img_mlp.0.weight" in name or name.endswith("qkv.bias"):
            type_ = gguf.GGMLQuantizationType["F16"]
        elif ("_blocks." in name and value.dim() == 2) or name.startswith("final_layer.ada"):
            type_ = gguf.GGMLQuantizationType[kind if value.dim() == 2 else "F32"]
        made = value.numpy()
        if type_.name == "F16":
            made = value.half().numpy()
        elif type_.name != "F32":
            made = packed(value, kind)
        decoded[name] = torch.from_numpy(gguf.quants.dequantize(made, type_).copy()).float()
        if name != without:
            writer.add_tensor(name, made, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(theirs(model.inner_dim)(decoded))
    return path, model
