# SPDX-License-Identifier: Apache-2.0
"""What coming steps need, read on other threads before they are taken: one core copies less than
memory gives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
Call = Callable[[], T]

_MOST = 8  # threads: more read no faster
_EACH = 2  # calls that wait for a thread to be free


@contextmanager
def ahead(calls: Iterator[Call[T] | None]) -> Iterator[Iterator[Call[T] | None]]:
    """Gives for each of the calls, in their order, what returns its result, or raises its error; a
    few of the next run meanwhile. None stays None. Where torch has one thread they run when their
    results are asked for. What has not begun at the end of the block never does."""
    threads = min(torch.get_num_threads(), _MOST)
    if threads == 1:
        yield calls
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="stowage-load")
    try:
        yield _results(calls, pool, threads * _EACH)
    finally:
        pool.shutdown(cancel_futures=True)


def _results(
    calls: Iterator[Call[T] | None], pool: ThreadPoolExecutor, depth: int
) -> Iterator[Call[T] | None]:
    coming: deque[Future[T] | None] = deque()
    for call in calls:
        coming.append(None if call is None else pool.submit(call))
        if len(coming) > depth:
            yield _result(coming.popleft())
    while coming:
        yield _result(coming.popleft())


def _result(future: Future[T] | None) -> Call[T] | None:
    return None if future is None else future.result
