"""Find out how the Triton kernels run in these tests: compiled if there is a GPU, else in Triton's interpreter.

Without a GPU, each file of kernel tests has one test that runs: it runs the file again in a new process with
TRITON_INTERPRET=1. This variable must be set before Triton is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import types
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


def make_interpreter_faster() -> None:
    """Let the interpreter replace the functions of `triton.language` once for a launch, not in every function call.

    For each call of a device function, the interpreter looks at every name of `triton.language`, and finds that it has
    replaced all of them at the start of the launch. This takes about 15 % of the time of a launch.
    """
    from triton.runtime import interpreter

    replace_language, replaced = interpreter._patch_lang, set()  # modules that the current launch has replaced

    def replace_missing(function):
        modules = {id(each) for each in function.__globals__.values() if isinstance(each, types.ModuleType)}
        language = modules & {id(interpreter.tl), id(interpreter.tl.core)}
        if replaced and language <= replaced:
            return interpreter._LangPatchScope()  # nothing to restore
        is_launch, scope = not replaced, replace_language(function)
        if is_launch:
            replaced.update(language)
            restore = scope.restore
            scope.restore = lambda: (replaced.clear(), restore())
        return scope

    interpreter._patch_lang = replace_missing


if INTERPRETED:
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
