"""Collect the facts with which a results file begins: hardware, versions, date and a digest of the code."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import pathlib
import platform
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import torch

import fast


def digest(*folders: pathlib.Path) -> str:
    """Return the sha256 of the Python sources of `folders`; the sources of a folder are sorted by path."""
    total = hashlib.sha256()
    for root in folders:
        for path in sorted(root.rglob("*.py")):
            total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def fast_digest() -> str:
    """Return the sha256 of the Python sources of `fast`."""
    return digest(pathlib.Path(fast.__file__).parent)


def processor() -> str:
    """Return the name of the CPU from /proc/cpuinfo, or from `platform.processor` if /proc/cpuinfo has no name."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def graphics_driver() -> str:
    """Return the version of NVIDIA's driver from nvidia-smi; "unknown" if nvidia-smi is missing or prints nothing."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.split()
    return said[0] if said else "unknown"


def package_version(name: str) -> str:
    """Return the version of an installed distribution, or "missing" if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def device_facts() -> dict[str, Any]:
    """Return name, compute capability, number of multiprocessors and driver version of the current CUDA device."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "driver": graphics_driver(),
    }


def provenance(benchmark: str, arguments: Sequence[str], device: str = "cpu", **versions: str) -> dict[str, Any]:
    """Return the first fields of a results file: command, hardware, versions, date, and digest of `fast`.

    Args:
        benchmark: name of the benchmark's module.
        arguments: arguments of the command line.
        device: device of the benchmark; "cuda" adds the GPU, its driver, and the versions of Triton and CUDA.
        versions: versions of packages other than Python and torch.
    """
    on_gpu = device == "cuda"
    if on_gpu:
        versions = {"triton": package_version("triton"), "cuda": str(torch.version.cuda), **versions}
    return {
        "command": " ".join(["python -m", f"tests.benchmarks.{benchmark}", *arguments]),
        **({"hardware": torch.cuda.get_device_name(), **device_facts(), "processor": processor()} if on_gpu else
           {"hardware": processor()}),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **versions},
        "date": datetime.date.today().isoformat(),
        "fast_sha256": fast_digest(),
    }  # fmt: skip
