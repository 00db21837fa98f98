"""Tests of `deadline`, which ends a process if a step takes too long.

A rank is a process of a group that serves requests together. If one rank has died, another rank can wait on the GPU
forever. The deadline then ends the waiting process, even if its output streams or log handlers are broken.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import logging, os, sys, time
from types import SimpleNamespace
from fast.demo.deadline import deadline

group = SimpleNamespace(name="cp_group", rank=1, members=(0, 1), last_operation="all_gather", timeout_s=0.5,
                        fails_on_its_own=sys.argv[1] == "gloo")
if sys.argv[1] == "closed":
    print("kept back", end="")
    sys.stdout.close()
if sys.argv[1] == "broken handler":
    class Broken(logging.Handler):
        def handle(self, record):
            raise OSError("of a test")
    logging.getLogger("fast").addHandler(Broken())
with deadline(SimpleNamespace(cp_group=group, tp_group=group), (3, 5)):
    time.sleep(0.1 if sys.argv[1] == "in time" else 1.0 if sys.argv[1] == "gloo" else 60)
time.sleep(0.6)
os._exit(0)
"""
WAITS = "cp_group: rank 1 among ranks [0, 1] waits; the last operation that it started is all_gather"
LINE = f"no answer within 0.5 s: {WAITS}; {WAITS}; requests in flight: 3, 5\n"


@pytest.mark.parametrize("case", ["plain", "closed", "broken handler", "in time", "gloo"])
def test_deadline(case):
    """Let a step exceed its deadline -> the process ends with status 70 and one message.

    If a step keeps its deadline, the process continues. With gloo there is no deadline, because gloo itself raises an
    error if a rank is dead.
    """
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", SCRIPT, case], cwd=root, capture_output=True, text=True, timeout=50,
                          check=False)  # fmt: skip
    ends = case not in ("in time", "gloo")
    assert done.returncode == (70 if ends else 0), done.stderr
    assert done.stderr.count(LINE) == int(ends)
