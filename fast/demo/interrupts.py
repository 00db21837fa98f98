"""Repeat the KeyboardInterrupt that Ctrl-C raises, because Python may discard the first one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

SECONDS_BETWEEN = 2.0  # longer than the clean-up that the first interrupt starts


@contextlib.contextmanager
def repeated_interrupts(seconds: float = SECONDS_BETWEEN) -> Iterator[None]:
    """Raise KeyboardInterrupt repeatedly, from the first Ctrl-C until the `with` block ends.

    Python discards an exception that is raised inside a finaliser or a callback of a weak reference. If Ctrl-C comes at
    such a moment, its KeyboardInterrupt is lost and the program goes on. Therefore the first Ctrl-C starts a timer, and
    each signal of the timer raises KeyboardInterrupt again.

    Only the main thread may set signal handlers. In another thread this function does nothing.

    Args:
        seconds: time between two exceptions.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
        raise KeyboardInterrupt

    earlier = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGALRM)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in earlier.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: handler not set by Python
