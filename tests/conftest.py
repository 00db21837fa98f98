"""What every test runs under: checked shapes, poisoned memory, fixed seeds, two threads or a worker's share of them.

Several files run side by side, a file in one process, where pytest-xdist is installed: plain `pytest` takes every core.
One file runs in this process, and `-n 0` runs all of them here.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import zlib

if importlib.util.find_spec("beartype") is not None:
    from jaxtyping import install_import_hook

    install_import_hook(["reference", "fast"], "beartype.beartype")  # before the first import of either

import jaxtyping
import pytest
import torch

from reference.interfaces import UnsupportedConfiguration

try:
    import hypothesis
except ModuleNotFoundError:  # the tests that use it are left out, with the reason
    hypothesis = None

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, min(2, CORES // WORKERS)))
# torch.empty is NaN (integers: their largest value): what nobody wrote reaches nothing, or a test turns red
torch.use_deterministic_algorithms(True, warn_only=True)
torch.utils.deterministic.fill_uninitialized_memory = True


class TorchRandom:
    """torch's generator, so that hypothesis replays an example with the same tensors."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()  # hypothesis keeps a weak reference only
if hypothesis is not None:
    hypothesis.register_random(TORCH_RANDOM)
    quiet = dict(deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    hypothesis.settings.register_profile("default", max_examples=25, derandomize=True, **quiet)
    hypothesis.settings.register_profile("deep", max_examples=2000, print_blob=True, **quiet)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where tests make their tensors: cpu (default) or cuda")
    parser.addoption(
        "--share", type=_share, default=(1, 1), metavar="K/N", help="only the K-th of N equal parts of the tests"
    )


def _share(said: str) -> tuple[int, int]:
    number, _, count = said.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"expected K/N with 1 <= K <= N, got {said}")
    return int(number), int(count)


MOST_WORKERS = 8  # each holds torch, transformers and a model or two
# files that take longest begin first, or one of them is still running when all others are done
LONG = ("triton", "site", "notebooks", "context_parallel", "process_groups", "docs", "transformers", "hopper")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Several files on the CPU: one process a core, unless the command says otherwise."""
    several = len(config.args) > 1 or any(os.path.isdir(argument) for argument in config.args)
    unsaid = {"numprocesses": None, "dist": "no", "device": "cpu"}
    if "PYTEST_XDIST_WORKER" in os.environ:  # this is a worker, or a run that a test started: no workers of its own
        return
    if several and all(config.getoption(name, Ellipsis) == value for name, value in unsaid.items()):
        config.option.numprocesses = "logical"
        config.option.dist, config.option.loadscopereorder = "loadfile", False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """All cores, up to a number."""
    return min(CORES, MOST_WORKERS)


def pytest_collection_modifyitems(config, items):
    """The files that take longest first; within a file the order stands. Of those, one share."""
    items.sort(key=lambda item: next((rank for rank, word in enumerate(LONG) if word in item.path.name), len(LONG)))
    number, count = config.getoption("--share")
    first, end = (number - 1) * len(items) // count, number * len(items) // count
    config.hook.pytest_deselected(items=items[:first] + items[end:])
    items[:] = items[first:end]


@pytest.fixture(autouse=True)
def default_device(request):
    """Tensors that name no device lie on the one under test, and so the kernels of that device serve."""
    with torch.device(request.config.getoption("--device")):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test of fast in float64 on a GPU is left out: no kernel set serves that type there, and selection says so."""
    try:
        return (yield)
    except UnsupportedConfiguration as error:
        if item.config.getoption("--device") == "cpu" or "float64" not in str(error):
            raise
        pytest.skip("fast serves float64 on a CPU only")


@pytest.fixture(autouse=True)
def fixed_seed(request):
    """Each test its own seed, whatever ran before it and in whatever folder its file lies."""
    name = request.node.nodeid.partition("::")[2]
    torch.manual_seed(zlib.crc32(f"tests/{request.node.path.name}::{name}".encode()))


@pytest.fixture(params=["reference", "fast"])
def ops(request):
    """Either wing, as a module that keeps the contract."""
    return importlib.import_module(request.param)


@pytest.fixture
def plain_errors():
    """Shape checks by annotation off, so that a test sees the message that a user sees."""
    was = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", was)
