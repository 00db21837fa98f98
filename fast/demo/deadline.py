"""Deadline that ends a process whose step waits for a dead rank.

The two libraries for exchanges differ:

- Over gloo, an exchange with a dead rank raises an error in the waiting process; nothing else is needed.
- Over NCCL, a launch returns before the exchange ends, and the host sees no error until a result is read. PyTorch's
  watchdog ends such a process, but the watchdog does not log the requests of the step, and does not see exchanges in a
  replayed CUDA graph.

Over NCCL, a step therefore has a deadline a little before the timeout of its groups. When the deadline passes, this
process logs the requests and the exchanges of the step and ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence

from reference.distributed.groups import ContextParallel

EXIT_STATUS = 70  # EX_SOFTWARE of sysexits.h
# The deadline is this fraction of the groups' timeout, so that the deadline passes before PyTorch's watchdog acts. The
# watchdog starts to count later: at the exchange, and not at the start of the step.
TIMEOUT_FRACTION = 0.9

logger = logging.getLogger(__name__)
# `_end` writes its line to stderr itself. Without a handler, logging would write the line to stderr a second time.
logger.addHandler(logging.NullHandler())


@contextlib.contextmanager
def deadline(context_parallel: ContextParallel | None, request_ids: Sequence[int]) -> Iterator[None]:
    """End the process, after one line with the reason, if the body takes longer than 0.9 x the groups' timeout.

    The time includes the compilation of kernels on first use (`fast.warmup` compiles the kernels beforehand).
    Without groups there is no deadline. If the exchanges of a group raise an error by themselves (gloo, a simulation),
    the group has no deadline either.

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
        f"it started {group.last_operation} last"
        for group in groups
    )
    line = (
        f"no answer within {seconds:.1f} s: {waiting}; requests in flight: {', '.join(map(str, request_ids)) or 'none'}"
    )
    try:  # write to the descriptor: a broken sys.stderr or a log handler must not keep the process alive
        os.write(2, f"{line}\n".encode())
        logger.critical(line)
    finally:
        os._exit(EXIT_STATUS)
