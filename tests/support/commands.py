"""Run the commands of the GPU suite (tests/gpu_suite.py) in processes of their own."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def share_of(text: str) -> tuple[int, int]:
    """Return the numbers K and N of a command-line option K/N."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"expected K/N with 1 <= K <= N, got {text}")
    return int(number), int(count)


def run(command: Sequence[str], timeout: float, cwd: Path = ROOT, **environment: str) -> tuple[int, str]:
    """Run a command and return its exit status and output; a command that exceeds `timeout` seconds has status 124."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    settings = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **environment}
    try:
        done = subprocess.run(
            command, cwd=cwd, env=settings, timeout=timeout, check=False, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        return 124, f"{expired.stdout or ''}\nran longer than {timeout:.0f} s"
    return done.returncode, done.stdout
