"""Tests of replayed calls: a repeated call only allocates its outputs and launches the kernels of an earlier call.

The first two calls with the same signature (shapes, dtypes and numbers) run, and the second call is recorded. If the
second call only allocated outputs and launched kernels, later calls replay this recording. In these tests, fake classes
replace Triton's kernels, launcher and driver, so the tests need no GPU. `tests/gpu/test_replays.py` replays real
kernels.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fast.backends import CheckedCalls, checked_calls, direct_launches, launch, replay_code
from fast.backends.repeated_launches import Launches
from fast.kernels.descriptors import box_descriptor

triton = pytest.importorskip("triton")


class Pair(NamedTuple):
    """Two kernel arguments in a named tuple."""

    first: Tensor
    second: Tensor


class CudaLauncher:
    """A fake of Triton's class of this name, which launches one kernel; the fake appends each launch to `seen`."""

    launch_cooperative_grid, launch_pdl = False, True
    arg_annotations, kernel_signature = "annotations", "signature"

    def __init__(self, described: bool, version: str):
        self.seen = []

        def launcher(*arguments):
            grid, (stream, function, cooperative, dependent), rest = arguments[:3], arguments[3:7], arguments[7:]
            if version == "3.6.0":
                assert rest[:6] == (None, None, "packed", None, None, None)
                given = rest[6:]
            else:
                assert rest[:-1] == ("packed", None, None, None, None, None, "annotations", "signature")
                given = rest[-1]
            assert (function, cooperative, dependent) == ("function", False, True)
            self.seen.append((grid, stream, tuple(given)))

        def inner(*arguments):
            raise AssertionError(f"a replay must not encode descriptors again: {launcher}")

        self.launch = inner if described else launcher


def make_tensordesc_arg(descriptor, metadata):
    """Encode a descriptor of TMA, the GPU's bulk copy engine; Triton has this function in its launcher's module."""
    return [f"{metadata} at {descriptor.base.data_ptr()}", *descriptor.shape, *descriptor.strides]


class FakeKernel:
    """A fake Triton kernel: `called` lists launches through Triton, `launcher.seen` lists launches by a replay."""

    arg_names = ("first", "second", "number", "WIDTH")

    def __init__(self, version: str, described: bool = False, scratch: int = 0):
        self.called, self.launcher = [], CudaLauncher(described, version)
        self.run, self.function, self.packed_metadata = self.launcher, "function", "packed"
        self.metadata = SimpleNamespace(
            global_scratch_size=scratch, profile_scratch_size=0, tensordesc_meta=["map"] if described else None
        )

    def __getitem__(self, grid):
        def run(*arguments, **_):
            self.called.append((grid, arguments))
            return self

        return run


class FakeDriver:
    """A fake of Triton's driver, with one stream for each device."""

    device = 3

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 100 + device


@pytest.fixture(params=["3.6.0", "3.7.1"])
def version(request, monkeypatch):
    """Run a test once for each version of Triton whose launch arguments `direct_launches` knows."""
    monkeypatch.setattr(direct_launches, "triton_version", lambda: request.param)
    return request.param


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    """Replace Triton's driver by a `FakeDriver`, which needs no GPU."""
    fake = FakeDriver()
    monkeypatch.setattr(triton.runtime.driver, "_active", fake, raising=False)
    monkeypatch.setattr(type(triton.runtime.driver), "active", property(lambda _: fake), raising=False)
    return fake


def test_a_replay_launches_with_new_addresses(version):
    """From the third call on, calls are replayed: each call allocates new outputs and uses its own addresses."""
    kernel, launches = FakeKernel(version), Launches()

    def call(x, pair, number):
        out, scratch = torch.empty(2, 3), torch.empty(8, dtype=torch.int32)
        launch(kernel, (7,), x[1:], Pair(pair.second, out), number, WIDTH=4)
        launch(kernel, (2, 5), scratch[2:], pair.first, number + 1, WIDTH=8)
        return out, x, None

    kept = []
    for step in range(5):
        x, pair = torch.zeros(4, 4), Pair(torch.zeros(2), torch.zeros(3))
        out, same, none = launches.run(call, x, pair, 5)
        kept.append((x, pair, out))
        assert same is x and none is None and out.shape == (2, 3) and len(kernel.called) == min(2 * step + 2, 4)
        if step < 2:
            continue
        first, second = kernel.launcher.seen[-2:]
        addresses = pair.second.data_ptr(), out.data_ptr()
        assert first == ((7, 1, 1), 103, (x.data_ptr() + 16, addresses, 5, 4))
        assert (*second[:2], second[2][1:]) == ((2, 5, 1), 103, (pair.first.data_ptr(), 6, 8))
    assert len({out.data_ptr() for *_, out in kept}) == 5
    assert launches.no_replay is None


def test_calls_with_other_numbers_share_the_source(version):
    """The decodes of successive steps differ in their numbers alone, so their replays share one compiled source."""
    kernel = FakeKernel(version)

    def call(x, number):
        out = torch.empty(2, number)
        launch(kernel, (number,), x, out, number, WIDTH=4)
        return out

    def replayed(number):
        launches = Launches()
        found = [launches.run(call, torch.zeros(2), number).shape for _ in range(3)]
        assert found == [(2, number)] * 3 and launches.replay is not None
        (grid, _, arguments) = kernel.launcher.seen[-1]
        assert grid == (number, 1, 1) and arguments[2] == number
        return launches.replay.run.__code__

    first = replayed(3)
    misses = replay_code._maker.cache_info().misses
    assert [replayed(number) is first for number in (5, 7)] == [True, True]
    assert replay_code._maker.cache_info().misses == misses


def test_a_replay_fills_new_tensors_with_zeros(version):
    """A tensor that a call allocates with `torch.zeros` is filled with zeros in every replay; others are not filled."""
    kernel, launches, filled = FakeKernel(version), Launches(), []

    def call(x):
        counter, out = torch.zeros(1000, dtype=torch.int32), torch.empty(4)
        launch(kernel, (1,), counter, x, 3, WIDTH=4)
        return counter, out

    for step in range(6):
        counter, out = launches.run(call, torch.ones(2))
        assert counter.dtype == torch.int32 and counter.shape == (1000,) and counter.eq(0).all(), step
        filled.append(counter.data_ptr())
        counter.fill_(7)  # the next call may get this memory again
        del counter, out
    assert len(kernel.launcher.seen) == 4 and launches.no_replay is None
    assert [arguments[0] for *_, arguments in kernel.launcher.seen] == filled[2:]
    assert [each.allocate for each in launches.replay._allocations] == [torch.zeros, torch.empty]


def test_a_replay_encodes_a_descriptor_once_for_each_address(version):
    """A replay passes a TMA descriptor of the call's own tensor; the descriptor is encoded once for each address."""
    kernel, launches = FakeKernel(version, described=True), Launches()
    encoded = []

    def call(x, y):
        shape, strides = tuple(y.shape), y.stride()
        launch(kernel, (1,), x, box_descriptor(y.data_ptr(), y.dtype, shape, strides, (4, 8)), 1, WIDTH=4)

    ys = [torch.zeros(8, 16) for _ in range(4)]
    assert all(y.data_ptr() % 16 == 0 for y in ys)
    for y in (*ys, *ys):
        launches.run(call, torch.zeros(1), y)
    launches.replay._launches[0]._arguments[1].maker._encode = lambda descriptor, _: encoded.append(descriptor)
    for y, (*_, arguments) in zip((ys[2], ys[3], *ys), kernel.launcher.seen, strict=True):
        assert arguments[1:] == (f"map at {y.data_ptr()}", 8, 16, 16, 1, 1, 4)
    for y in ys:
        launches.run(call, torch.zeros(1), y)
    assert not encoded and len(kernel.launcher.seen) == 10


@pytest.mark.parametrize("case", ["other op", "slice", "unknown", "list", "nothing", "scratch", "columns", "address"])
def test_a_call_that_does_more_is_not_replayed(version, case):
    """A call runs every time if it launches no kernel, or does more than allocate outputs and launch kernels.

    For example, one case uses a tensor that is no argument of the call, and another case returns a slice of a new
    tensor.
    """
    kernel, outside = FakeKernel(version, case == "address", 64 * (case == "scratch")), torch.zeros(3)
    launches, calls = Launches(), []

    def call(x, others):
        calls.append(x)
        out = torch.empty(2, 4) if case != "columns" else torch.empty_strided((2, 4), (1, 2))
        if case == "other op":
            out.zero_()
        second = outside if case == "unknown" else x
        if case == "address":  # `x` and `others` have the same address, so the descriptor could belong to either tensor
            second = box_descriptor(x.data_ptr(), x.dtype, (8, 16), (16, 1), (4, 8))
        if case != "nothing":
            launch(kernel, (1,), out, second, 3, WIDTH=4)
        return out[1:] if case == "slice" else out

    for step in range(4):
        x = torch.zeros(8, 16)
        launches.run(call, x, [x] if case == "list" else x[:4] if case == "address" else 1)
        assert len(calls) == step + 1 and calls[-1] is x
    assert launches.replay is None
    assert (launches.no_replay is None) is (case == "nothing")
    assert not kernel.launcher.seen


def test_another_version_of_triton_is_not_replayed(monkeypatch):
    """With an unknown version of Triton, no call is replayed: the arguments of Triton's C function could differ."""
    monkeypatch.setattr(direct_launches, "triton_version", lambda: "3.99.0")
    kernel, launches = FakeKernel("3.6.0"), Launches()
    for _ in range(3):
        launches.run(lambda x: launch(kernel, (1,), x, 1, 2, WIDTH=4), torch.zeros(2))
    assert len(kernel.called) == 3 and launches.no_replay == "launches of Triton 3.99.0 by CudaLauncher"


def test_a_call_that_does_not_fit_runs(version, driver, monkeypatch):
    """The call runs instead of its replay if the replay would launch with wrong arguments, device or hooks.

    The cases are another value of a number, two tensors where the recorded call had one tensor twice (or the reverse),
    another current device, and a launch hook of a Triton profiler.
    """
    kernel, launches = FakeKernel(version), Launches()

    def call(x, y, number):
        launch(kernel, (1,), x, y, number, WIDTH=4)

    def runs(x, y, number):
        before = len(kernel.called)
        launches.run(call, x, y, number)
        return len(kernel.called) - before

    x, y = torch.zeros(2), torch.zeros(2)
    assert [runs(x, x, 1), runs(x, x, 1)] == [1, 1]  # recorded with the same tensor twice
    assert [runs(y, y, 1), runs(x, x, 1), runs(x, y, 1), runs(x, x, 2)] == [0, 0, 1, 1]
    driver.device = 4
    assert runs(x, x, 1) == 1
    driver.device = 3
    hook = triton.knobs.runtime.launch_enter_hook
    monkeypatch.setattr(hook, "calls", [lambda _: None])
    assert runs(x, x, 1) == 1
    monkeypatch.setattr(hook, "calls", [])
    assert runs(x, x, 1) == 0

    launches = Launches()
    assert [runs(x, y, 1), runs(x, y, 1), runs(y, x, 1), runs(x, x, 1)] == [1, 1, 0, 1]
    assert kernel.launcher.seen[-1][2] == (y.data_ptr(), x.data_ptr(), 1, 4)


def test_a_replay_keeps_no_tensor(version, monkeypatch):
    """No tensor of a call stays alive after the recorded call or after a replay."""
    kernel, launches, kept = FakeKernel(version), Launches(), []
    monkeypatch.setattr(kernel, "called", deque(maxlen=0))

    def call(x):
        out = torch.empty(3)
        launch(kernel, (1,), x, Pair(out, x[1:]), 1, WIDTH=4)
        kept.extend(map(weakref.ref, (x, out)))
        return out

    gc.disable()
    try:
        for _ in range(3):
            x = torch.zeros(3)
            kept += [weakref.ref(x), weakref.ref(launches.run(call, x))]
            del x
            assert not any(each() is not None for each in kept)
    finally:
        gc.enable()
    assert launches.replay is not None and len(kept) == 10


def test_an_interrupted_first_call_leaves_no_launch_out(version):
    """If an error ends the first call between its two launches, a later replay still has both launches."""
    kernel, launches, fails = FakeKernel(version), Launches(), [True]

    def call(x):
        launch(kernel, (1,), x, 1, 2, WIDTH=4)
        if fails.pop() if fails else False:
            raise KeyboardInterrupt
        launch(kernel, (2,), x, 3, 4, WIDTH=4)

    with pytest.raises(KeyboardInterrupt):
        launches.run(call, torch.zeros(2))
    for _ in range(3):
        x = torch.zeros(2)
        launches.run(call, x)
    expected = [((1, 1, 1), 103, (x.data_ptr(), 1, 2, 4)), ((2, 1, 1), 103, (x.data_ptr(), 3, 4, 4))]
    assert launches.replay is not None and kernel.launcher.seen[-2:] == expected


def test_tensors_on_another_device_are_not_replayed(version, monkeypatch):
    """A call with tensors on a device that is not the current device is never replayed.

    Triton's launcher makes the device of the tensors the current device, and a replay does not.
    """
    kernel, launches = FakeKernel(version), Launches()
    monkeypatch.setattr(Tensor, "get_device", lambda _: 1)
    for _ in range(4):
        launches.run(lambda x: launch(kernel, (1,), x, 1, 2, WIDTH=4), torch.zeros(2))
    assert len(kernel.called) == 4 and launches.no_replay == "tensors on a device that is not the current one"


@pytest.mark.parametrize("hook", [None, print])
def test_a_hook_of_another_kind(version, monkeypatch, hook):
    """If Triton's launch hook is a function, calls are not replayed; if the hook is None, calls are replayed."""
    kernel, launches = FakeKernel(version), Launches()
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
    for _ in range(4):
        launches.run(lambda x: launch(kernel, (1,), x, 1, 2, WIDTH=4), torch.zeros(2))
    assert launches.replay is not None and len(kernel.called) == (2 if hook is None else 4)


def test_a_backend_of_another_project_is_not_replayed(version):
    """The launcher of another project's backend runs in every call, because its work outside launches is unknown."""
    kernel, counted = FakeKernel(version), []

    def call(x, backend):
        counted.append(backend)
        launch(kernel, (1,), x, 1, 2, WIDTH=4)

    for name, most in (("triton", 2), ("other", 5)):
        counted.clear()
        calls = CheckedCalls(call, call)
        for _ in range(5):
            x = torch.zeros(2)
            calls.run(calls.signature(x), name, x)
        checked_calls._ALL_CALLS.remove(calls)
        assert len(counted) == most
