# SPDX-License-Identifier: Apache-2.0
"""Caches of compiled graphs: a second process compiles nothing, other facts are another entry."""

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from torch import nn

import stowage

STORAGES = ["nf4", "nf4:block64:nested"]
STEP = """
    import json, sys
    import torch
    from torch import nn
    from torch._dynamo.utils import counters
    import stowage

    storage, columns, exact = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "exact"
    torch.manual_seed(0)

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = stowage.frozen_linear(columns, columns, storage, exact=exact)
            self.a, self.b = nn.Linear(columns, 4, bias=False), nn.Linear(4, columns, bias=False)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    model = Adapted()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    compiled = torch.compile(model, fullgraph=True)
    losses = []
    for _ in range(2):
        loss = compiled(torch.ones(3, columns)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = {k: v for part in ("inductor", "aot_autograd") for k, v in counters[part].items()}
    print(json.dumps({"losses": losses, **{k: v for k, v in found.items() if "cache" in k}}))
"""


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    done = fresh.run(textwrap.dedent(STEP), *arguments, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "storage", [STORAGES[0], pytest.param(STORAGES[1], marks=pytest.mark.nightly)]
)
def test_a_second_process_hits_the_cache(storage: str, tmp_path: Path) -> None:
    first = run(tmp_path, storage, "64", "")
    assert first["autograd_cache_miss"] == 1 and not first.get("autograd_cache_bypass")
    assert first["autograd_cache_saved"] == 1
    second = run(tmp_path, storage, "64", "")
    assert second["autograd_cache_hit"] == 1 and not second.get("autograd_cache_miss")
    assert not second.get("fxgraph_cache_miss")
    assert second["losses"] == first["losses"]


@pytest.mark.nightly
def test_another_storage_shape_or_mode_is_another_entry(tmp_path: Path) -> None:
    for arguments in (
        ("nf4", "64", ""),
        ("fp4", "64", ""),
        ("nf4", "128", ""),
        ("nf4", "64", "exact"),
    ):
        assert run(tmp_path, *arguments)["autograd_cache_miss"] == 1, arguments


def test_the_key_depends_on_facts_and_no_value() -> None:
    def key(storage: str = "nf4", seed: int = 0, rows: int = 48, **how: Any) -> str:
        torch.manual_seed(seed)
        return stowage.quantize(torch.randn(rows, 64), storage, **how)._stable_hash_for_caching()

    assert key() == key(seed=1)
    others = [key("fp4"), key(rows=50), key(exact=True), key(compute_dtype=torch.bfloat16)]
    trained = nn.Parameter(stowage.quantize(torch.randn(48, 64), "nf4"))
    keys = {key(), *others, key("nf4:block64:nested"), trained._stable_hash_for_caching()}
    assert len(keys) == 7
