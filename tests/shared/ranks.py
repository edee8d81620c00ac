# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several gloo ranks, each a process, none of which can hang.

A collective that waits for a minute fails; a rank that is still there after `seconds`, or
that a signal ends, says where it is. Either way the test fails with the text of every rank.
"""

import datetime
import faulthandler
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE_SECONDS = 60
PRELOADED = ["torch.distributed.fsdp", "torch.utils.checkpoint"]
PRELOADED += ["stowage.training", "stowage.sharding"]
PRELOADED += [
    "transformers.models.qwen3_moe.modeling_qwen3_moe"
]  # takes seconds, where there is one


def _rank(
    rank: int, world: int, folder: str, seconds: int, function: Any, args: Any, pipe: Any
) -> None:
    with Path(folder, f"waiting{rank}").open("w") as waiting:
        faulthandler.enable(waiting)
        faulthandler.dump_traceback_later(seconds, exit=True, file=waiting)
        torch.set_num_threads(1)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=COLLECTIVE_SECONDS),
            )
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
            if dist.is_initialized():
                dist.destroy_process_group()
            faulthandler.disable()


def on_ranks(world: int, function: Callable[..., Any], *args: Any, seconds: int = 120) -> list[Any]:
    """What `function(*args)`, of a module in tests/shared, returns on each rank."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            mine, theirs = context.Pipe(False)
            facts = (rank, world, folder, seconds, function, args, theirs)
            process = context.Process(target=_rank, args=facts)
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        answers = []
        for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
            try:
                answers.append(pipe.recv())
            except EOFError:
                process.join()
                text = Path(folder, f"waiting{rank}").read_text()
                answers.append((False, f"ended, exit code {process.exitcode}; it was at\n{text}"))
            process.join()
    if not all(good for good, _ in answers):
        texts = ["done" if good else text for good, text in answers]
        lines = [f"--- rank {rank}: {text}" for rank, text in enumerate(texts)]
        raise AssertionError("\n".join(lines))
    return [value for _, value in answers]


def at_odds() -> None:
    """The second rank waits for the first, which is busy."""
    if dist.get_rank():
        dist.barrier()
    time.sleep(300)


def broken_off() -> None:
    """The second rank dies, as of a fault in C."""
    if dist.get_rank():
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()
