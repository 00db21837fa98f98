"""What ends a step whose exchanges never come back: a GPU waits for a dead rank for ever, and its host with it.

Over gloo an exchange fails by itself, in the process that waits. Over NCCL a launch returns before the exchange ends,
and the host learns nothing until it reads a result. PyTorch's watchdog ends such a process, but does not know what was
being served, and sees nothing of a graph that is replayed. So a step is given a little less than the group's own
timeout; then this process says what it was doing and ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence

from reference.distributed.groups import ContextParallel

EXIT_STATUS = 70  # EX_SOFTWARE of sysexits.h
PART_OF_TIMEOUT = 0.9  # before PyTorch's watchdog, which counts from the exchange, not from the step

logger = logging.getLogger(__name__)
logger.addHandler(logging.NullHandler())  # the line is written to stderr in any case


@contextlib.contextmanager
def deadline(context_parallel: ContextParallel | None, request_ids: Sequence[int]) -> Iterator[None]:
    """End the process, with a line that says why, where the body takes longer than nine tenths of the groups' timeout.

    The time is that of the whole body: kernels that are compiled on first use count (`fast.warmup` compiles ahead).

    Over groups whose exchanges fail by themselves (gloo, a simulation), and without groups, it does nothing.

    Args:
        context_parallel: the groups.
        request_ids: what is being served.
    """
    waits = [] if context_parallel is None else [
        group for group in (context_parallel.cp_group, context_parallel.tp_group) if not group.fails_on_its_own
    ]  # fmt: skip
    if not waits:
        yield
        return
    seconds = PART_OF_TIMEOUT * min(group.timeout_s for group in waits)
    timer = threading.Timer(seconds, _end, (waits, seconds, tuple(request_ids)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(groups, seconds: float, request_ids: tuple[int, ...]) -> None:
    said = "; ".join(
        f"{group.name}: rank {group.rank} among ranks {list(group.members)} waits in or before {group.last_operation}"
        for group in groups
    )
    line = f"no answer within {seconds:.1f} s: {said}; requests in flight: {', '.join(map(str, request_ids)) or 'none'}"
    try:  # straight to the descriptor: a closed or broken sys.stderr, or a logger's handler, must not keep this alive
        os.write(2, f"{line}\n".encode())
        logger.critical(line)
    finally:
        os._exit(EXIT_STATUS)
