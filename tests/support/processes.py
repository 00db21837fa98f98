"""Starts ranks as processes of this machine, on the loopback interface, and always ends them.

Not torchrun, which kills the survivors of a rank that died: what they say is what is tested. The processes fork off a
server that has imported everything, so that a start takes a moment, not seconds.
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
    """What became of one rank.

    Attributes:
        value: what its task returned, None where it did not.
        error: type and message of what it raised, None where it did not.
        exit_status: negative: the signal that ended it; None: it had to be killed after the limit.
        seconds: from the start of the task to the return or error; None where it ended otherwise.
        said: what it wrote to stderr.
        ended: when the process was seen to have ended, by the clock of `time.monotonic`.
    """

    value: Any
    error: str | None
    exit_status: int | None
    seconds: float | None
    said: str
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
        size: ranks.
        task: a function of a module that can be imported.
        arguments: that pickle.
        backend: gloo or nccl; with nccl rank r has CUDA device r.
        timeout_s: of the group.
        limit_s: after which ranks are killed and the run has hung.
        meanwhile: called with the process ids once all ranks have said that they serve (`serving`).
        stands_still: a rank that is not waited for.
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
            said, told = (Path(folder, f"{rank}.{what}") for what in ("said", "told"))
            value, error, seconds = pickle.loads(told.read_bytes()) if told.exists() else (None, None, None)
            words = said.read_text(errors="replace") if said.exists() else ""
            status = process.exitcode if rank in ended else None
            outcomes.append(Outcome(value, error, status, seconds, words, ended.get(rank, time.monotonic())))
    return outcomes


_STORE: list[dist.TCPStore] = []  # of a process that is a rank


def serving() -> None:
    """Tell the caller that this rank serves; more than once does nothing."""
    _STORE[0].set(f"serving {dist.get_rank()}", "")


def _rank(rank, size, port, backend, timeout_s, limit_s, folder, task, arguments) -> None:
    """What a process does: join, run, tell."""
    signal.alarm(int(2 * limit_s) + 30)  # ends it should nobody be there to do so
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.dup2(os.open(Path(folder, f"{rank}.said"), os.O_WRONLY | os.O_CREAT), 2)
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
    written.rename(Path(folder, f"{rank}.told"))
    sys.stderr.flush()
    os._exit(status)  # destroying a group waits for ranks that may be gone


def values_of(outcomes: list[Outcome]) -> list[Any]:
    """What every rank returned; a rank that did not is an error with all it said."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_status == 0, f"rank {rank}: {outcome.error or outcome.exit_status}\n{outcome.said}"
    return [outcome.value for outcome in outcomes]
