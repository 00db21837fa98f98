"""Set up every test: run-time shape checks, uninitialised memory filled with NaN, fixed seeds, at most two threads.

If pytest-xdist is installed, `pytest` without options runs the test files in parallel worker processes, and a worker
runs one file at a time. If only one file is given, this file runs in the pytest process itself. With `-n 0` all files
run in the pytest process.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import zlib

if (WORKERS := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
    # this must precede the first import of torch; the processes that tests start inherit the variable
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // WORKERS)))

# The hook needs about 15 s in each process. Runs in Triton's interpreter do without it: other tests run the code around
# the kernels with the hook.
if importlib.util.find_spec("beartype") is not None and os.environ.get("TRITON_INTERPRET") != "1":
    from jaxtyping import install_import_hook

    from tests.support.runtime_types import make_checks_cheaper

    make_checks_cheaper()
    install_import_hook(["reference", "fast"], "beartype.beartype")  # must precede the first import of either package

import jaxtyping
import pytest
import torch

from reference.interfaces import UnsupportedConfiguration

from .support.commands import share_of

try:
    import hypothesis
except ModuleNotFoundError:  # property tests are skipped (tests/support/properties.py)
    hypothesis = None

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
torch.set_num_threads(max(1, min(2, CORES // WORKERS)))
# torch.empty returns NaN, or the largest integer of the dtype; so a test fails if an element of a result is not written
torch.set_deterministic_debug_mode("warn")  # unlike `use_deterministic_algorithms`, it does not import the compiler
torch.utils.deterministic.fill_uninitialized_memory = True


class TorchRandom:
    """Let hypothesis seed torch's random generator, so that a repeated example gets the same tensors."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()  # a global variable, because hypothesis keeps only a weak reference to the generator
if hypothesis is not None:
    hypothesis.register_random(TORCH_RANDOM)
    quiet = dict(deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    hypothesis.settings.register_profile("default", max_examples=25, derandomize=True, **quiet)
    hypothesis.settings.register_profile("deep", max_examples=2000, print_blob=True, **quiet)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="device of the tests' tensors: cpu (default) or cuda")
    parser.addoption(
        "--shard", type=share_of, default=(1, 1), metavar="K/N", help="run only the K-th of N equal parts of the tests"
    )
    parser.addoption("--backend", default=None, metavar="NAME", help="run the tests of adapters for this backend only")
    parser.addoption(
        "--adapter-report", default=None, metavar="FILE", help="write the results of the adapters, by backend (JSON)"
    )


def pytest_configure(config):
    """Write a report of the adapters' tests if `--adapter-report` is given."""
    if config.getoption("--adapter-report") and "PYTEST_XDIST_WORKER" not in os.environ:
        from tests.support.adapters import Report

        config.pluginmanager.register(Report(config))


MOST_WORKERS = 8  # limits memory: each worker holds torch, transformers and one or two models
# Words in the names of the slowest files. These files start first, so that no slow file runs alone at the end.
LONG = ("triton", "compilation", "site", "notebooks", "context_parallel", "process_groups", "docs", "transformers")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Use parallel workers if several files run on the CPU and the command line does not set workers itself."""
    several = len(config.args) > 1 or any(os.path.isdir(argument) for argument in config.args)
    defaults = {"numprocesses": None, "dist": "no", "device": "cpu"}
    if "PYTEST_XDIST_WORKER" in os.environ:  # a worker, or a pytest that a test started, must not start workers
        return
    if several and all(config.getoption(name, Ellipsis) == value for name, value in defaults.items()):
        config.option.numprocesses = "logical"
        config.option.dist, config.option.loadscopereorder = "loadfile", False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Return the number of workers: one for each core, at most MOST_WORKERS."""
    return min(CORES, MOST_WORKERS)


def pytest_collection_modifyitems(config, items):
    """Put the slowest files first, keep the order within a file, and deselect the tests outside `--shard`."""
    items.sort(key=lambda item: next((rank for rank, word in enumerate(LONG) if word in item.path.name), len(LONG)))
    number, count = config.getoption("--shard")
    first, end = (number - 1) * len(items) // count, number * len(items) // count
    config.hook.pytest_deselected(items=items[:first] + items[end:])
    items[:] = items[first:end]


def pytest_collection_finish():
    """Leave modules and collected tests out of garbage collections; a full collection then takes 10 ms, not 0.2 s."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """After each test file, leave its objects out of later garbage collections.

    Benchmarks collect garbage before each timing, which takes long in a process with many objects.
    """
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def default_device(request):
    """Create tensors on the device of `--device` by default, so that the kernels of this device serve the test."""
    device = request.config.getoption("--device")
    if device == "cpu":  # the context would add several us to every call of torch, and a CPU is the default device
        yield
        return
    with torch.device(device):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip a test that fails on a GPU because the kernels of `fast` support float64 on a CPU only."""
    try:
        return (yield)
    except UnsupportedConfiguration as error:
        if item.config.getoption("--device") == "cpu" or "float64" not in str(error):
            raise
        pytest.skip("fast serves float64 on a CPU only")


@pytest.fixture(autouse=True)
def no_earlier_calls():
    """Make `fast` forget earlier calls; it then checks all arguments of the first call with each signature."""
    if "fast.backends.checked_calls" in sys.modules:
        sys.modules["fast.backends.checked_calls"].forget_calls()


@pytest.fixture(autouse=True)
def fixed_seed(request):
    """Seed torch from the names of the test and of its file, so that a test always gets the same inputs."""
    name = request.node.nodeid.partition("::")[2]
    torch.manual_seed(zlib.crc32(f"tests/{request.node.path.name}::{name}".encode()))


@pytest.fixture(params=["reference", "fast"])
def ops(request):
    """Run the test twice: with the package `reference` and with the package `fast`."""
    return importlib.import_module(request.param)


@pytest.fixture
def without_shape_checks():
    """Switch off the run-time shape checks: in a test of thousands of calls they take a fifth of the time."""
    was = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", was)


@pytest.fixture
def plain_errors(without_shape_checks):
    """Switch off the run-time shape checks of the tests, so that a test gets the same error message as a user."""
