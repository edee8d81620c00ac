# SPDX-License-Identifier: Apache-2.0
"""Plans of mixtures that are carried out: the experts that a plan keeps stay, from published files
and from stacks, within its limit, and the results are those of all in memory."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import FAMILIES, WAYS, build, logits, published
from links_here import give_links

import stowage
from stowage._ops.library import composite_forced

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")

MIB = 1 << 20


@pytest.fixture(autouse=True)
def links(monkeypatch: pytest.MonkeyPatch) -> None:
    give_links(monkeypatch)


def make(family: str) -> Any:
    torch.manual_seed(0)
    return build(family)


def limit(model: Any, part: float, **options: Any) -> int:
    """Of RAM: all that a plan needs but for this part of its experts."""
    whole = stowage.plan(model, ram="1GiB", **options)
    experts = sum(u.bytes for u in whole.units if "experts" in u.name and not u.stays)
    return whole.predicted.peak["ram"] - int(experts * (1 - part))


def kept(plan: stowage.Plan) -> set[str]:
    """Experts, as "layer[3]"."""
    named = (name.split(".experts.") for name in plan.names("ram") if ".experts." in name)
    return {f"{of}[{''.join(c for c in rest if c.isdigit())}]" for of, rest in named}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_published_mixture_is_loaded_by_its_plan(family: str, way: str, tmp_path: Path) -> None:
    wanted = logits(make(family), way)
    folder = published(family, tmp_path / "m")
    ram = limit(folder, 0.5)
    plan = stowage.plan(folder, ram=ram)
    assert plan.predicted.hits is not None and 0.1 < plan.predicted.hits < 0.7
    assert plan.predicted.peak["ram"] <= ram
    plan.save(tmp_path / "plan.json")
    model = stowage.load(lambda: make(family), folder, plan=tmp_path / "plan.json")
    for _ in range(3):
        assert torch.equal(logits(model, way), wanted)
    before = stowage.engine_report(model)
    for _ in range(3):
        assert torch.equal(logits(model, way), wanted)
    report = stowage.engine_report(model)
    assert report.peak <= ram and report.borrowed == 0
    # What the plan keeps is not read again; each of the rest is once in a pass, where it is used.
    moving = sum(u.bytes for u in plan.units if u.tier == "disk" and not u.rows)
    assert report.since(before).bytes_read <= 3 * moving + moving // 4
    assert torch.equal(logits(copy.deepcopy(model), way), wanted)
    stowage.rebudget(model, limit(folder, 0.9))
    assert torch.equal(logits(model, way), wanted)
    stowage.onload(model)
    assert torch.equal(logits(model, way), wanted)


@pytest.mark.parametrize("storage", [None, "int8:row2", "nf4"])
def test_the_experts_that_a_plan_keeps_are_those_that_stay(
    storage: str | None, tmp_path: Path
) -> None:
    model = make("Qwen3Moe")
    if storage is not None:
        stowage.stow(model, "int8", rules={"*.experts.*_proj": storage})
    wanted = logits(model, "eager")
    counts = {
        f"model.layers.{layer}.mlp.experts.gate_up_proj": stowage.WeightUses(
            hits=9, by_index=(1, 200, 1, 200)
        )
        for layer in range(2)
    }
    hot = stowage.Uses(counts)
    plan = stowage.plan(model, ram=limit(model, 0.66), uses=hot)
    assert kept(plan) == {f"model.layers.{n}.mlp[{e}]" for n in range(2) for e in (1, 3)}
    assert plan.predicted.hits is not None and plan.predicted.hits > 0.8
    stowage.offload(model, plan=plan, folder=tmp_path / "w", reads="direct")
    for _ in range(2):
        assert torch.equal(logits(model, "eager"), wanted)
    for _ in range(40):  # others are used most here; what the plan keeps stays all the same
        use(model, 0, 2)
    before = stowage.engine_report(model)
    use(model, 1, 3)
    once = stowage.engine_report(model).since(before)
    assert once.hits == 8 and once.bytes_read == 0 and once.borrowed == 0
    use(model, 0, 2)
    assert stowage.engine_report(model).since(before).bytes_read > 0
    assert torch.equal(logits(model, "eager"), wanted)


def use(model: Any, *experts: int) -> None:
    x = torch.ones(1, 256, dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        for expert in experts if name.endswith("experts.gate_up_proj") else ():
            ends = [int(number >= expert) for number in range(4)]
            stowage.grouped_linear(x, weight, ends)
        for expert in experts if name.endswith("experts.down_proj") else ():
            ends = [int(number >= expert) for number in range(4)]
            stowage.grouped_linear(x[:, :128], weight, ends)


def test_what_a_run_used_plans_the_next(tmp_path: Path) -> None:
    wanted = logits(make("Mixtral"), "eager")  # the file has other names than the model
    folder = published("Mixtral", tmp_path / "m")
    model = stowage.load(lambda: make("Mixtral"), folder, ram=limit(folder, 0.5))
    for _ in range(2):
        assert torch.equal(logits(model, "eager"), wanted)
    uses = stowage.uses(model)
    uses.save(tmp_path / "uses.json")
    ram = limit(folder, 0.5)
    plan = stowage.plan(folder, ram=ram, uses=tmp_path / "uses.json")
    assert plan.to_json() == stowage.plan(folder, ram=ram, uses=uses).to_json()
    alike = stowage.plan(folder, ram=ram)
    assert plan.predicted.hits is not None and alike.predicted.hits is not None
    assert plan.predicted.hits >= alike.predicted.hits
    loaded = stowage.load(lambda: make("Mixtral"), folder, plan=plan)
    for _ in range(2):
        assert torch.equal(logits(loaded, "eager"), wanted)


def test_experts_are_used_as_the_config_says(tmp_path: Path) -> None:
    folder = published("Qwen3Moe", tmp_path / "m")

    def uses(**options: Any) -> set[float]:
        plan = stowage.plan(folder, ram="64MiB", **options)
        return {round(u.uses, 6) for u in plan.units if ".experts." in u.name}

    assert uses() == {0.5}  # two of four
    assert uses(rows=3) == {1 - 0.5**3}
    assert uses(routed=1) == {0.25}
    assert uses(uses={"*.experts.*": 0.75}) == {0.75}
    on_model = stowage.plan(make("Qwen3Moe"), ram="64MiB")
    assert {round(u.uses, 6) for u in on_model.units if ".experts." in u.name} == {0.5}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": None}))
    assert uses() == {1.0}


def test_of_gguf_the_metadata_say_it(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe")
    writer.add_expert_used_count(2)
    for name in ("ffn_gate_exps", "ffn_up_exps"):
        values = torch.zeros(8, 128, 256, dtype=torch.float16).numpy()
        writer.add_tensor(f"blk.0.{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plan = stowage.plan(tmp_path / "m.gguf", ram="64MiB")
    assert len(plan.units) == 16 and {u.uses for u in plan.units} == {2 / 8}


def test_a_map_of_devices_names_stacks(tmp_path: Path) -> None:
    model = make("Qwen3Moe")
    plan = stowage.plan(model, ram=limit(model, 0.5))
    places = plan.device_map()
    assert not [name for name in places if "[" in name]
    assert places["model.layers.0.mlp.experts"] == "disk"
    assert all(places[f"model.layers.{n}.self_attn"] == "cpu" for n in range(2))


def test_uses_of_another_model_are_refused() -> None:
    model = make("Qwen3Moe")
    other = {"model.layers.7.mlp.experts.w": stowage.WeightUses(hits=1, by_index=(1, 1, 1, 1))}
    with pytest.raises(
        stowage.InvalidArgument, match=r"layers that the model has, got .*layers\.7"
    ):
        stowage.plan(model, ram="64MiB", uses=stowage.Uses(other))
    fewer = {"model.layers.0.mlp.experts.w": stowage.WeightUses(hits=1, by_index=(1, 1))}
    with pytest.raises(stowage.InvalidArgument, match=r"all 4 of model\.layers\.0, got 2"):
        stowage.plan(model, ram="64MiB", uses=stowage.Uses(fewer))
    for routed in (-1, 1.5, True, "2"):
        with pytest.raises(stowage.InvalidArgument, match="routed must be a number of experts"):
            stowage.plan(model, ram="64MiB", routed=routed)  # type: ignore[arg-type]
    with pytest.raises(stowage.InvalidArgument, match="uses must be a mapping"):
        stowage.plan(model, ram="64MiB", uses=5)  # type: ignore[arg-type]
    dense = torch.nn.Linear(64, 64)
    with pytest.raises(stowage.InvalidArgument, match="a model that has some"):
        stowage.plan(dense, ram="64MiB", routed=2)
