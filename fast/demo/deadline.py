"""Deadline that ends a process whose step waits for a dead rank.

A step of several ranks exchanges data through gloo (CPU) or NCCL (GPU). If a rank has died, gloo and NCCL differ:

- gloo: the exchange raises an error in the waiting process. No deadline is needed.
- NCCL: the launch of the exchange returns at once. When the process then reads a result, it waits and gets no error.
  PyTorch's watchdog ends the process after the timeout of the group of ranks. But the watchdog does not know the
  requests of the step, and it does not see exchanges in a replayed CUDA graph.

Over NCCL, a step therefore has a deadline a little before the timeout. When the deadline passes, the process writes the
requests of the step and the last exchange of each group to stderr, and ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence

from reference.distributed.groups import ContextParallel

EXIT_STATUS = 70  # EX_SOFTWARE of sysexits.h
TIMEOUT_FRACTION = 0.9  # deadline / timeout of the groups; below 1, so that the watchdog does not act first

logger = logging.getLogger(__name__)
# `_end` writes its line to stderr itself; without this handler, logging would write it to stderr once more
logger.addHandler(logging.NullHandler())


@contextlib.contextmanager
def deadline(context_parallel: ContextParallel | None, request_ids: Sequence[int]) -> Iterator[None]:
    """End the process if the `with` block takes longer than 0.9 x the timeout of the groups.

    Before it ends, the process writes one line with the reason to stderr. There is no deadline if `context_parallel` is
    None. There is also no deadline for groups whose exchanges raise an error themselves (gloo, or simulated ranks).

    The time of the block includes the compilation of kernels at their first use. `fast.warmup` can compile all kernels
    beforehand.

    Args:
        context_parallel: groups of ranks, or None.
        request_ids: ids of the requests of the step.
    """
    waits = [] if context_parallel is None else [
        group for group in (context_parallel.cp_group, context_parallel.tp_group) if not group.fails_on_its_own
    ]  # fmt: skip
    if not waits:
        yield
        return
    seconds = TIMEOUT_FRACTION * min(group.timeout_s for group in waits)
    timer = threading.Timer(seconds, _end, (waits, seconds, tuple(request_ids)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(groups, seconds: float, request_ids: tuple[int, ...]) -> None:
    waiting = "; ".join(
        f"{group.name}: rank {group.rank} among ranks {list(group.members)} waits; "
        f"the last operation that it started is {group.last_operation}"
        for group in groups
    )
    line = (
        f"no answer within {seconds:.1f} s: {waiting}; requests in flight: {', '.join(map(str, request_ids)) or 'none'}"
    )
    try:  # write to file descriptor 2: an error of sys.stderr or of a log handler must not keep the process alive
        os.write(2, f"{line}\n".encode())
        logger.critical(line)
    finally:
        os._exit(EXIT_STATUS)
