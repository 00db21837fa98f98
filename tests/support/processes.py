"""Start ranks as processes of one machine, run a task on each rank, and end every process.

torchrun is not used: when a rank dies, torchrun kills the surviving ranks, but the tests check the errors of the
surviving ranks. The processes are forked from a server process that has already imported all modules, because the
imports would take seconds in each rank.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "fast",
    "fast.demo.serving",
    "reference",
    "tests.support.ranks",
)


@dataclass(frozen=True)
class Outcome:
    """Result of one rank.

    Attributes:
        value: value that the task returned; None if the task did not return.
        error: type and message of the exception that the task raised; None if the task raised no exception.
        exit_status: exit status of the process; -n if signal n ended the process; None if the process was still alive
            when the run ended.
        seconds: time from the start of the task to its return or exception; None if the task did not end.
        stderr: text that the rank wrote to stderr.
        ended: value of `time.monotonic()` when the end of the process was noticed.
    """

    value: Any
    error: str | None
    exit_status: int | None
    seconds: float | None
    stderr: str
    ended: float


def run_ranks(
    size: int,
    task: Callable[..., Any],
    *arguments: Any,
    backend: str = "gloo",
    timeout_s: float = 30.0,
    limit_s: float = 60.0,
    meanwhile: Callable[[list[int]], None] | None = None,
    stands_still: int | None = None,
) -> list[Outcome]:
    """Run `task(*arguments)` on every rank of a process group.

    Args:
        size: number of ranks.
        task: function of a module that can be imported.
        arguments: arguments of the task; each rank gets a pickled copy.
        backend: gloo or nccl; with nccl, rank r uses CUDA device r.
        timeout_s: timeout of the process group in seconds.
        limit_s: time limit of the run in seconds; ranks that run longer are killed.
        meanwhile: function that is called with the process ids of the ranks, after every rank has called `serving`.
        stands_still: a rank that does not end by itself, or None; it is killed when all other ranks have ended.

    Returns:
        The outcome of every rank, in rank order.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        processes, ended = [], {}
        try:
            for rank in range(size):
                given = (rank, size, store.port, backend, timeout_s, limit_s, folder, task, arguments)
                processes.append(context.Process(target=_rank, args=given))
                processes[-1].start()
            if meanwhile is not None:
                store.wait([f"serving {rank}" for rank in range(size)], datetime.timedelta(seconds=limit_s))
                meanwhile([process.pid for process in processes])
            end = time.monotonic() + limit_s
            while len(ended) < size - (stands_still is not None) and time.monotonic() < end:
                time.sleep(0.02)
                for rank, process in enumerate(processes):
                    if rank not in ended and not process.is_alive():
                        ended[rank] = time.monotonic()
        finally:
            for process in processes:
                process.kill()
                process.join()
        outcomes = []
        for rank, process in enumerate(processes):
            stderr, result = (Path(folder, f"{rank}.{what}") for what in ("stderr", "result"))
            value, error, seconds = pickle.loads(result.read_bytes()) if result.exists() else (None, None, None)
            text = stderr.read_text(errors="replace") if stderr.exists() else ""
            status = process.exitcode if rank in ended else None
            outcomes.append(Outcome(value, error, status, seconds, text, ended.get(rank, time.monotonic())))
    return outcomes


_STORE: list[dist.TCPStore] = []  # connection of a rank's process to the key-value store of the run


def serving() -> None:
    """Report to `run_ranks` that this rank has begun its work; further calls have no effect."""
    _STORE[0].set(f"serving {dist.get_rank()}", "")


def _rank(rank, size, port, backend, timeout_s, limit_s, folder, task, arguments) -> None:
    """Join the process group, run the task and write its result to a file; this function runs in a rank's process."""
    signal.alarm(int(2 * limit_s) + 30)  # ends this process even if the parent process has died
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.dup2(os.open(Path(folder, f"{rank}.stderr"), os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    _STORE.append(store)
    started, status = time.monotonic(), 0
    try:
        outcome = task(*arguments), None, time.monotonic() - started
    except BaseException as error:
        traceback.print_exc()
        outcome, status = (None, f"{type(error).__name__}: {error}", time.monotonic() - started), 1
    written = Path(folder, f"{rank}.writing")
    written.write_bytes(pickle.dumps(outcome))
    written.rename(Path(folder, f"{rank}.result"))
    sys.stderr.flush()
    os._exit(status)  # an ordinary exit would wait for the other ranks, even if they have died


def values_of(outcomes: list[Outcome]) -> list[Any]:
    """Assert that the task of every rank returned, and return the values."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_status == 0, f"rank {rank}: {outcome.error or outcome.exit_status}\n{outcome.stderr}"
    return [outcome.value for outcome in outcomes]
