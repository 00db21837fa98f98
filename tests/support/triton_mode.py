"""Find out how the Triton kernels run in these tests: compiled if there is a GPU, else in Triton's interpreter.

Without a GPU, each file of kernel tests has one test that runs: it runs the file again in a new process with
TRITON_INTERPRET=1. This variable must be set before Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
ON_HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
DEVICE = torch.device("cuda" if ON_GPU else "cpu")

runs = pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="neither a GPU nor TRITON_INTERPRET=1")
gpu_only = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
starts_interpreter = pytest.mark.skipif(ON_GPU or INTERPRETED, reason="the kernels run in this process")


if INTERPRETED:
    from .fast_interpreter import make_interpreter_faster

    make_interpreter_faster()


def run_in_interpreter(file: str) -> None:
    """Run a test file in Triton's interpreter; assert that none of its tests fails and that at least one passes."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True,
        text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
