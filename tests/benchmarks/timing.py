"""Time calls on a CUDA device in four ways, and measure the ceilings of the device.

- *Flushed*: one call after the L2 cache was overwritten. The host launches the call while the GPU still overwrites the
  cache, so the time between the CUDA events around the call contains no host time. `Clock.host` measures the host time.
- *Rested*: a flushed call after the GPU was idle for 0.1 s. Without the rest, a few milliseconds of matrix products
  bring a GPU to its power limit, so that the time of a call depends on the calls before it.
- *Replayed*: many calls in a row from a CUDA graph. The graph has calls with several sets of inputs, which together are
  larger than the L2 cache where possible (`input_sets`). The times contain no time to launch a call, and the GPU is as
  warm as in a server.
- *Stepped*: a whole step from a CUDA graph, as an engine runs a step: the plan once, then the calls of LAYERS layers.
  The result is the time of the step divided by LAYERS.

A ceiling is the highest rate of a simple operation on this GPU: GB/s of a copy or a read, TFLOPS of a matrix product.

A contender is one implementation that is timed. Every round times every contender once, in a new random order, so that
a drift of the GPU's speed affects all contenders.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

Call = Callable[[], object]

FLUSH_BYTES = 1 << 30  # bytes written to overwrite the L2 cache, which is much smaller; takes about 0.3 ms on an H200
HOST_RUNS = 15
LAYERS = 61  # layers of DeepSeek-V3
MIN_ROUNDS, MAX_ROUNDS = 8, 200
COPY_BYTES = 4 << 30
MATMUL_SIZE = 8192
BURSTS, BURST_REST_S = 3, 0.3
REST_S = 0.1


@dataclass(frozen=True)
class Spread:
    """Repeated times of one call, in microseconds.

    Attributes:
        median_us: median of all runs.
        quartiles_us: first and third quartile of all runs.
        runs: number of runs.
    """

    median_us: float
    quartiles_us: tuple[float, float]
    runs: int

    @classmethod
    def of(cls, times_us: Sequence[float]) -> Spread:
        """Return median and quartiles of one or more times."""
        if len(times_us) == 1:
            return cls(times_us[0], (times_us[0], times_us[0]), 1)
        low, median, high = statistics.quantiles(times_us, n=4, method="inclusive")
        return cls(median, (low, high), len(times_us))


@dataclass(frozen=True)
class Ceilings:
    """Highest rates that simple operations reached on this GPU in this run.

    Attributes:
        copy_gb_s: rate of a large contiguous copy, bytes read plus bytes written.
        read_gb_s: rate of the sum of a large tensor, bytes read.
        matmul_tflops: rate of a bfloat16 product of random square matrices, the highest of several short bursts and a
            long run.
        sustained_matmul_tflops: rate of the same product in the long run, in which the GPU can reach its power limit.
    """

    copy_gb_s: float
    read_gb_s: float
    matmul_tflops: float
    sustained_matmul_tflops: float

    def as_json(self) -> dict[str, float]:
        """Return a dictionary of the ceilings, and of the sizes of the operations by which they were measured."""
        return {**asdict(self), "copy_bytes": COPY_BYTES, "matmul_size": MATMUL_SIZE}


def input_sets(bytes_per_call: int, l2_bytes: int, at_most: int = 32) -> int:
    """Return the number of sets of inputs that the calls of a replay use in turn, at most `at_most`.

    All sets together should have at least 4 times the bytes of the L2 cache, so that the cache does not hold the inputs
    of the next call. If this needs more than `at_most` sets, the function returns `at_most`.
    """
    return max(1, min(at_most, -(-4 * l2_bytes // bytes_per_call)))


def rounds_for(milliseconds: float, one_round_ms: float) -> int:
    """Return the number of rounds that fit into `milliseconds`, at least MIN_ROUNDS and at most MAX_ROUNDS."""
    return max(MIN_ROUNDS, min(MAX_ROUNDS, int(milliseconds / max(one_round_ms, 1e-6))))


def wall_times(call: Call, runs: int, before: Call = lambda: None, seconds: float = 0.0) -> Spread:
    """Return the spread of the wall time of a call, without garbage collection.

    Args:
        call: the call.
        runs: least number of timed calls.
        before: function that runs before each call and is not timed.
        seconds: further calls are timed until this time has passed.
    """
    times: list[float] = []
    gc.collect()
    gc.disable()  # a collection would be counted as part of one call
    try:
        stop = time.perf_counter() + seconds
        while len(times) < runs or time.perf_counter() < stop:
            before()
            start = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - start))
    finally:
        gc.enable()
    return Spread.of(times)


def in_turn(calls: Sequence[Call], count: int) -> Call:
    """Return a function that makes `count` calls; it goes through `calls` in order, as often as needed."""

    def body() -> None:
        for number in range(count):
            calls[number % len(calls)]()

    return body


class Clock:
    """Time contenders on the current CUDA device.

    Args:
        milliseconds: approximate duration of the timing of one contender in one way.
        seed: seed of the random order of the contenders.
    """

    def __init__(self, milliseconds: float = 200.0, seed: int = 0):
        self.milliseconds = milliseconds
        self.order = random.Random(seed)
        self.not_captured: dict[str, str] = {}
        self.flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self.flush.zero_()
        start, end = self._timed(self.flush.zero_)
        torch.cuda.synchronize()
        self.flush_us = 1e3 * start.elapsed_time(end)

    def host(self, contenders: Mapping[str, Sequence[Call]]) -> dict[str, Spread]:
        """Return the time that the host needs to launch one call while the device is idle."""
        self._warm_up(contenders)
        return {who: Spread.of([self._launch_us(calls[0]) for _ in range(HOST_RUNS)]) for who, calls in
                contenders.items()}  # fmt: skip

    def rested(self, contenders: Mapping[str, Sequence[Call]]) -> dict[str, Spread]:
        """Time calls as `flushed` does, each call after the GPU was idle for REST_S seconds."""
        return self.flushed(contenders, REST_S)

    def flushed(self, contenders: Mapping[str, Sequence[Call]], rest_s: float = 0.0) -> dict[str, Spread]:
        """Time calls, each after the L2 cache was overwritten; each round times the next call of every contender."""
        host = self.host(contenders)
        leads = {who: 1 + math.ceil(2 * spread.quartiles_us[1] / self.flush_us) for who, spread in host.items()}

        def one_round(number: int) -> dict[str, tuple[torch.cuda.Event, torch.cuda.Event]]:
            events = {}
            for who in self._shuffled(contenders):
                calls = contenders[who]
                if rest_s:
                    torch.cuda.synchronize()
                    time.sleep(rest_s)
                for _ in range(leads[who]):
                    self.flush.zero_()
                events[who] = self._timed(calls[number % len(calls)])
            return events

        return self._repeat(one_round, dict.fromkeys(contenders, 1))

    def replayed(self, contenders: Mapping[str, Sequence[Call]]) -> dict[str, Spread]:
        """Time calls in a row from a CUDA graph; the graph makes each call equally often, 8 or more calls in total.

        A contender that cannot be captured is missing in the result; `not_captured` has the reason.
        """
        repeats = {who: max(1, -(-8 // len(calls))) for who, calls in contenders.items()}
        bodies = {who: in_turn(calls, repeats[who] * len(calls)) for who, calls in contenders.items()}
        return self.captured(bodies, {who: repeats[who] * len(calls) for who, calls in contenders.items()})

    def stepped(self, steps: Mapping[str, Call]) -> dict[str, Spread]:
        """Time whole steps of LAYERS layers from CUDA graphs; a time is the time of the step / LAYERS.

        A contender that cannot be captured is missing in the result; `not_captured` has the reason.
        """
        return self.captured(steps, dict.fromkeys(steps, LAYERS))

    def captured(self, bodies: Mapping[str, Call], calls_in: Mapping[str, int]) -> dict[str, Spread]:
        """Capture each body in a CUDA graph and time replays; a time is divided by the number of calls in the body.

        Args:
            bodies: functions to capture; each function runs once before the capture.
            calls_in: number of calls in each body.

        Returns:
            The times of one call. A body that cannot be captured is missing; `not_captured` has the reason.
        """
        self._warm_up({who: [body] for who, body in bodies.items()})
        graphs = {}
        for who, body in bodies.items():
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    body()
            except RuntimeError as error:
                self.not_captured[who] = " ".join(str(error).split())
                continue
            graph.replay()
            graphs[who] = graph

        def one_round(number: int) -> dict[str, tuple[torch.cuda.Event, torch.cuda.Event]]:
            return {who: self._timed(graphs[who].replay) for who in self._shuffled(graphs)}

        return self._repeat(one_round, {who: calls_in[who] for who in graphs})

    def _shuffled(self, names: Mapping[str, object]) -> list[str]:
        return self.order.sample(list(names), len(names))

    def _warm_up(self, contenders: Mapping[str, Sequence[Call]]) -> None:
        # a library allocates buffers at its first use; so before the capture each call runs once on a side stream
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for calls in contenders.values():
                for call in calls:
                    call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()

    def _launch_us(self, call: Call) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - start)

    def _timed(self, call: Call) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        return start, end

    def _repeat(self, one_round, calls_per_run: Mapping[str, int]) -> dict[str, Spread]:
        whole = self._timed(lambda: one_round(0))
        torch.cuda.synchronize()
        rounds = rounds_for(self.milliseconds * len(calls_per_run), whole[0].elapsed_time(whole[1]))
        events = [one_round(number) for number in range(rounds)]
        torch.cuda.synchronize()
        times = {who: [1e3 * start.elapsed_time(end) for start, end in (turn[who] for turn in events)] for who in
                 calls_per_run}  # fmt: skip
        return {who: Spread.of([t / calls_per_run[who] for t in found]) for who, found in times.items()}


def _time_copy_and_read(clock: Clock) -> tuple[Spread, Spread]:
    """Time a copy and a read of COPY_BYTES bytes; the memory is free again when the function returns."""
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    copy = clock.flushed({"copy": [lambda: target.copy_(source)]})["copy"]
    return copy, clock.flushed({"read": [lambda: torch.sum(source)]})["read"]


def measure_ceilings(clock: Clock) -> Ceilings:
    """Measure the rates of a copy, a read and a matrix product on this GPU.

    A rate is computed from the median time of flushed calls. For the product, several short bursts and one long run are
    timed, and the highest rate is the ceiling.
    """
    copy, read = _time_copy_and_read(clock)
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    short, bursts = Clock(0.0), []
    for _ in range(BURSTS):
        time.sleep(BURST_REST_S)
        bursts.append(short.flushed({"matmul": [lambda: a @ b]})["matmul"].median_us)
    sustained = clock.flushed({"matmul": [lambda: a @ b]})["matmul"].median_us
    return Ceilings(
        copy_gb_s=2 * COPY_BYTES / copy.median_us / 1e3,
        read_gb_s=COPY_BYTES / read.median_us / 1e3,
        matmul_tflops=2 * MATMUL_SIZE**3 / min(*bursts, sustained) / 1e6,
        sustained_matmul_tflops=2 * MATMUL_SIZE**3 / sustained / 1e6,
    )
