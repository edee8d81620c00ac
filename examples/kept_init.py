# SPDX-License-Identifier: Apache-2.0
"""What masters of fp8 weights should start from: signal to noise of four starts, and their losses.

A small transformer learns the bytes of sentences.txt with weights that rest as f8_e4m3:tensor and
fp32 masters (MasterOptimizer). All starts see the same init, batches and optimizer:

    kept        the exact values that the init drew, kept beside the resting form
    rounded     the values that rest
    perturbed   those, w + |w| (rand - 0.5) eps with eps = 2^-3, the spacing of e4m3
    scale 1     the values that a cast without a scale leaves, as under delayed scaling

Run: python examples/kept_init.py [--steps 200] [--seeds 8] [--picture kept_init.svg]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stowage
from stowage.training import MasterOptimizer, init_value, quantized_init
from stowage.training.recipes import amax_of, scale_of

STARTS = ("kept", "rounded", "perturbed", "scale 1")
COLOURS = ("#1b7837", "#2166ac", "#b2182b", "#e08214")
STORAGE, EPS = "f8_e4m3:tensor", 2.0**-3
WIDTH, CONTEXT, BATCH, BLOCKS = 64, 48, 16, 4


# --- signal to noise ------------------------------------------------------------------------------


def sqnr(exact: Tensor, seen: Tensor) -> float:
    """10 log10 (sum x^2 / sum (y - x)^2), in fp64."""
    x, y = exact.double(), seen.double()
    return float(10 * torch.log10(x.square().sum() / (y - x).square().sum()))


def starts_of(w: Tensor, made: torch.Generator) -> dict[str, Tensor]:
    """What each start makes of init values."""
    rounded = stowage.quantize(w, STORAGE).dequantize()
    noise = torch.rand(w.shape, generator=made) - 0.5
    return {
        "kept": w,
        "rounded": rounded,
        "perturbed": rounded + rounded.abs() * noise * EPS,
        "scale 1": stowage.quantize(w, "f8_e4m3").dequantize(),
    }


def table(count: int = 200_000) -> list[str]:
    """SQNR against the bf16 init, for three standard deviations of it."""
    lines = ["init std | scale 1 | flushed to 0 | scale 448/amax | power of 2 | perturbed | bf16"]
    for std in (0.02, 0.006, 0.0025):
        made = torch.Generator().manual_seed(0)
        exact = torch.randn(count, generator=made).mul(std)
        w = exact.bfloat16().float()
        found = starts_of(w, made)
        flushed = float(((found["scale 1"] == 0) & (w != 0)).float().mean())
        scale = scale_of(amax_of(w), torch.float8_e4m3fn, pow2=True)
        power = (w * scale).to(torch.float8_e4m3fn).float() / scale
        seen = (found["scale 1"], found["rounded"], power, found["perturbed"])
        one, best, two, other = (sqnr(w, values) for values in seen)
        lines.append(
            f"{std:<8} | {one:4.1f} dB | {flushed:11.1%} | {best:11.1f} dB | {two:7.1f} dB | "
            f"{other:6.1f} dB | {sqnr(exact, w):.1f} dB"
        )
    return lines


# --- losses ---------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    """Inits of GPT-2: std 0.02, and 0.02 / sqrt(2 x 32) for what adds to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                narrow = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.0025 if narrow else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _only_linear(name: str, module: nn.Module, parameter: Any) -> bool:
    return isinstance(module, nn.Linear) and name == "weight"


def losses(start: str, seed: int, steps: int, text: Tensor) -> list[float]:
    """Of every step."""
    torch.manual_seed(seed)
    made = torch.Generator().manual_seed(seed)
    with quantized_init(STORAGE, preserve_init=True, filter=_only_linear):
        model = Model()
        with torch.no_grad():
            for p in model.parameters():
                if isinstance(p, stowage.StowedTensor) and start != "kept":
                    p.copy_(starts_of(init_value(p), made)[start])  # also what is kept
    optimizer = MasterOptimizer(torch.optim.AdamW, model, lr=2e-3)
    found = []
    batches = torch.Generator().manual_seed(100 + seed)
    for _ in range(steps):
        first = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=batches)
        ids = text[first + torch.arange(CONTEXT + 1)]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def verdict(start: str, curves: dict[str, list[list[float]]]) -> str:
    """One sentence, from the figures."""
    last = [_end(curve) for curve in curves[start]]
    mean = sum(last) / len(last)
    if start == "kept":
        return f"kept: ends at {mean:.4f}; the start that every other one is measured against."
    kept = [_end(curve) for curve in curves["kept"]]
    apart = [a - b for a, b in zip(last, kept, strict=True)]
    shift, error = sum(apart) / len(apart), math.inf
    if len(apart) > 1:
        error = float(torch.tensor(apart).std()) / math.sqrt(len(apart))
    first = max(abs(a[0] - b[0]) for a, b in zip(curves[start], curves["kept"], strict=True))
    most = max(
        abs(x - y)
        for a, b in zip(curves[start], curves["kept"], strict=True)
        for x, y in zip(a, b, strict=True)
    )
    side = "worse" if shift > 0 else "better"
    clear = side if abs(shift) > 3 * error else "no difference that these seeds can tell"
    return (
        f"{start}: ends at {mean:.4f}, {shift:+.4f} (+-{error:.4f}) from kept: {clear}; the first "
        f"losses are {first:.1e} apart, later ones up to {most:.4f}."
    )


def _end(curve: list[float]) -> float:
    tail = curve[-max(1, len(curve) // 10) :]
    return sum(tail) / len(tail)


# --- the picture ----------------------------------------------------------------------------------


def picture(curves: dict[str, list[list[float]]]) -> str:
    """SVG: above the mean losses, below how far each is from kept."""
    mean = {s: [sum(v) / len(v) for v in zip(*c, strict=True)] for s, c in curves.items()}
    away = {
        s: [math.log10(max(abs(a - b), 1e-6)) for a, b in zip(c, mean["kept"], strict=True)]
        for s, c in mean.items()
        if s != "kept"
    }
    body = _panel(mean, 20, "loss") + _panel(away, 260, "log10 |loss - loss of kept|")
    for i, start in enumerate(STARTS):
        body += f'<text x="{90 + 120 * i}" y="490" fill="{COLOURS[i]}">{start}</text>\n'
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="500" '
        f'font-family="sans-serif" font-size="13">\n{body}</svg>\n'
    )


def _panel(lines: dict[str, list[float]], top: int, title: str) -> str:
    every = [v for line in lines.values() for v in line]
    low, high = min(every), max(every)
    body = f'<text x="60" y="{top}">{title}</text>\n'
    for value, y in ((high, top + 10), (low, top + 200)):
        body += f'<text x="5" y="{y + 4}">{value:.2f}</text>'
        body += f'<line x1="60" x2="620" y1="{y}" y2="{y}" stroke="#ccc"/>\n'
    for start, line in lines.items():
        step = 560 / max(1, len(line) - 1)
        points = " ".join(
            f"{60 + step * i:.1f},{top + 10 + 190 * (high - v) / (high - low or 1):.1f}"
            for i, v in enumerate(line)
        )
        colour = COLOURS[STARTS.index(start)]
        body += f'<polyline points="{points}" fill="none" stroke="{colour}"/>\n'
    return body


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--steps", type=int, default=200)
    asked.add_argument("--seeds", type=int, default=8)
    asked.add_argument("--picture", type=Path, default=Path("kept_init.svg"))
    given = asked.parse_args()
    torch.set_num_threads(1)  # the model is small
    print("\n".join(table()), end="\n\n")
    text = torch.tensor(list((Path(__file__).parent / "sentences.txt").read_bytes()))
    curves = {
        start: [losses(start, seed, given.steps, text) for seed in range(given.seeds)]
        for start in STARTS
    }
    for start in STARTS:
        print(verdict(start, curves))
    given.picture.write_text(picture(curves))
    print(f"picture: {given.picture}")


if __name__ == "__main__":
    main()
