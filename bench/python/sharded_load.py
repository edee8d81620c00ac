# SPDX-License-Identifier: Apache-2.0
"""Files of each dialect in a model that is spread over processes: each reads its rows, beside a
load of the whole in each, which is spread then. The files lie in the page cache.

read     bytes that a process asks the system for, of those of the files; its share is 1 / ranks
memory   anonymous memory of a process at its most, likewise
seconds  until the last process is done
Run: python bench/python/sharded_load.py [--json] [--gigabytes 0.5] [--ranks 2] [--only gptq]
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from load_dialects import CASES, files_of, layers_of, write
from torch import nn
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/shared"))
from load import model
from ranks import on_ranks

import stowage

SECONDS = 500


def _figure(file: str, name: str) -> int:
    lines = Path("/proc/self", file).read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


@contextmanager
def _most(found: dict[str, float], total: int) -> Iterator[None]:
    """Memory, bytes and time of the block; memory is looked at every millisecond."""
    done, most = threading.Event(), [0]
    before = {"memory": _figure("status", "RssAnon"), "read": _figure("io", "rchar")}

    def look() -> None:
        while not done.wait(0.001):
            most[0] = max(most[0], _figure("status", "RssAnon"))

    thread = threading.Thread(target=look)
    thread.start()
    begun = time.perf_counter()
    try:
        yield
    finally:
        found["seconds"] = time.perf_counter() - begun
        done.set()
        thread.join()
        found["memory"] = (most[0] - before["memory"]) * 1024 / total
        found["read"] = (_figure("io", "rchar") - before["read"]) / total


def _spread(made: nn.Module) -> nn.Module:
    for layer in made:  # type: ignore[attr-defined]
        fully_shard(layer)
    return fully_shard(made)


def _by_rows(build: Callable[[], nn.Module], folder: str) -> nn.Module:
    made = _spread(stowage.load(build, folder, device="meta"))
    stowage.sharding.load(made, folder)
    return made


def _whole(build: Callable[[], nn.Module], folder: str) -> nn.Module:
    return _spread(stowage.load(build, folder))


WAYS = {"rows": _by_rows, "whole": _whole}


def _here(way: str, layers: int, folder: str, total: int) -> dict[str, float]:
    """On a rank."""
    found: dict[str, float] = {}
    _spread(nn.Sequential(nn.Sequential(nn.Linear(8, 8))))  # what the first one imports
    dist.barrier()
    with _most(found, total):
        WAYS[way](lambda: model(layers).bfloat16(), folder)
        dist.barrier()
    return found


def measure(case: tuple[str, str], given: argparse.Namespace, root: Path) -> dict[str, Any]:
    dialect, storage = case
    layers = layers_of(given.gigabytes, dialect, storage, root)
    write(root / "model", layers, dialect, storage)
    total = sum(file.stat().st_size for file in files_of(root / "model"))
    found: dict[str, Any] = {"name": f"{dialect} {storage}", "bytes": total}
    for way in WAYS:
        arguments = (way, layers, str(root / "model"), total)
        ranks = on_ranks(given.ranks, _here, *arguments, seconds=SECONDS)
        found[way] = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--folder", help="where files are made; default: a temporary one")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        if given.only in " ".join(case):
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                row = measure(case, given, Path(folder))
            rows.append(row)
            if not given.json:
                cells = (
                    f"{way}: read {row[way]['read']:.3f} memory {row[way]['memory']:.3f} "
                    f"{row[way]['seconds']:.2f} s"
                    for way in WAYS
                )
                print(f"{row['name']:50} {'   '.join(cells)}", flush=True)
    if given.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
