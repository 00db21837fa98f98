"""What every results file carries besides its rows: hardware, versions, date and the digest of the code."""

from __future__ import annotations

import datetime
import hashlib
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

import torch

import fast


def fast_digest() -> str:
    """sha256 over the sources of `fast`, by sorted path."""
    total = hashlib.sha256()
    root = pathlib.Path(fast.__file__).parent
    for path in sorted(root.rglob("*.py")):
        total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def processor() -> str:
    """The processor's name where the system tells it."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def provenance(benchmark: str, arguments: Sequence[str], **versions: str) -> dict[str, Any]:
    """The head of a results file.

    Args:
        benchmark: name of the benchmark's module.
        arguments: of its command line.
        versions: of packages besides Python and torch.
    """
    return {
        "command": " ".join(["python -m", f"tests.benchmarks.{benchmark}", *arguments]),
        "hardware": processor(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **versions},
        "date": datetime.date.today().isoformat(),
        "fast_sha256": fast_digest(),
    }
