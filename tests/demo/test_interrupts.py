"""Tests of `repeated_interrupts`: Ctrl-C ends the main job even if Python discards the first KeyboardInterrupt.

Python discards an exception that a signal handler raises while a finaliser (`__del__`) runs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fast.demo.interrupts import repeated_interrupts

ROOT = Path(__file__).parents[2]
LOST = """
import os, signal, sys, time
from fast.demo.interrupts import repeated_interrupts

class Finalised:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # the handler runs here, and Python discards the exception

try:
    with repeated_interrupts(0.2):
        Finalised()
        print("still running", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_an_interrupt_in_a_finaliser_is_repeated():
    """Send Ctrl-C while a finaliser runs -> a timer raises KeyboardInterrupt again, and the process ends."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", LOST], env=environment, text=True, capture_output=True, timeout=120,
                          check=False)  # fmt: skip
    assert done.returncode == 130 and done.stdout == "still running\n", done.stderr
    assert "KeyboardInterrupt" in done.stderr  # Python's report of the exception that it ignored


def test_handlers_and_timer_are_as_before():
    earlier = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
    with pytest.raises(KeyboardInterrupt), repeated_interrupts(60.0):
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the handler did not raise")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)) == earlier
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_other_threads_change_no_handler():
    """Enter `repeated_interrupts` in a thread that is not the main thread -> no signal handler changes."""
    seen = []

    def in_a_thread():
        with repeated_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    earlier = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert seen == [earlier]
