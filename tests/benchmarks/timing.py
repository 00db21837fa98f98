"""Times on a CUDA device, three ways, and the ceilings they are held against.

*Flushed*: the L2 is overwritten before each call, so many times over that the host has launched the call before the
overwriting ends; what the events enclose is the device's time alone. The host's own time is told beside it.
*Rested*: the same after the card lay idle for a moment. Milliseconds of products bring a card to its power limit, and
then the time of a call depends on what ran before it; rested calls all start from the same state.
*Replayed*: the calls of several sets of inputs, together larger than the L2, are captured into one graph and replayed
back to back; launch cost is out and the card is as warm as a server's. Contenders take turns in an order drawn anew
each round, so that a drift of the card is shared by all.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

Call = Callable[[], object]

FLUSH_BYTES = 1 << 30  # about 0.3 ms of writing on the fastest card of today, many times any L2
HOST_RUNS = 15
MIN_ROUNDS, MAX_ROUNDS = 8, 200
COPY_BYTES = 4 << 30
MATMUL_SIZE = 8192
BURSTS, BURST_REST_S = 3, 0.3
REST_S = 0.1


@dataclass(frozen=True)
class Spread:
    """Repeated times of one call, in microseconds.

    Attributes:
        median_us: of all runs.
        quartiles_us: first and third.
        runs: how many.
    """

    median_us: float
    quartiles_us: tuple[float, float]
    runs: int

    @classmethod
    def of(cls, times_us: Sequence[float]) -> Spread:
        """Median and quartiles of one or more times."""
        if len(times_us) == 1:
            return cls(times_us[0], (times_us[0], times_us[0]), 1)
        low, median, high = statistics.quantiles(times_us, n=4, method="inclusive")
        return cls(median, (low, high), len(times_us))


@dataclass(frozen=True)
class Ceilings:
    """What this card reached in this run.

    Attributes:
        copy_gb_s: a large contiguous copy, bytes read plus bytes written.
        read_gb_s: a large sum, bytes read.
        matmul_tflops: a bfloat16 product of random square matrices, a few at a time on a rested card.
        sustained_matmul_tflops: the same without rest, where the card's power limit may hold it back.
    """

    copy_gb_s: float
    read_gb_s: float
    matmul_tflops: float
    sustained_matmul_tflops: float

    def as_json(self) -> dict[str, float]:
        """The figures with what they were taken on."""
        return {**asdict(self), "copy_bytes": COPY_BYTES, "matmul_size": MATMUL_SIZE}


def input_sets(bytes_per_call: int, l2_bytes: int, at_most: int = 32) -> int:
    """How many sets of inputs keep a replay from finding its data in the L2."""
    return max(1, min(at_most, -(-4 * l2_bytes // bytes_per_call)))


def rounds_for(milliseconds: float, one_round_ms: float) -> int:
    """How many rounds fit a time, within bounds that keep quartiles meaningful and runs short."""
    return max(MIN_ROUNDS, min(MAX_ROUNDS, int(milliseconds / max(one_round_ms, 1e-6))))


class Clock:
    """Times contenders on the current CUDA device.

    Args:
        milliseconds: about how long each contender is timed, each way.
        seed: of the order of contenders.
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
        """How long the host needs to launch one call, from an idle device."""
        self._warm_up(contenders)
        return {who: Spread.of([self._launch_us(calls[0]) for _ in range(HOST_RUNS)]) for who, calls in
                contenders.items()}  # fmt: skip

    def rested(self, contenders: Mapping[str, Sequence[Call]]) -> dict[str, Spread]:
        """As `flushed`, each call after a rest of the card."""
        return self.flushed(contenders, REST_S)

    def flushed(self, contenders: Mapping[str, Sequence[Call]], rest_s: float = 0.0) -> dict[str, Spread]:
        """One call at a time behind an overwritten L2; each contender goes round its sets of inputs."""
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
        """Back to back out of a graph that holds one call for each set of inputs, several times over.

        A contender that cannot be captured is missing from the result; `not_captured` has the reason.
        """
        self._warm_up(contenders)
        graphs, counts = {}, {}
        for who, calls in contenders.items():
            repeats, graph = max(1, -(-8 // len(calls))), torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    for call in list(calls) * repeats:
                        call()
            except RuntimeError as error:
                self.not_captured[who] = " ".join(str(error).split())
                continue
            graph.replay()
            graphs[who], counts[who] = graph, repeats * len(calls)

        def one_round(number: int) -> dict[str, tuple[torch.cuda.Event, torch.cuda.Event]]:
            return {who: self._timed(graphs[who].replay) for who in self._shuffled(graphs)}

        return self._repeat(one_round, counts)

    def _shuffled(self, names: Mapping[str, object]) -> list[str]:
        return self.order.sample(list(names), len(names))

    def _warm_up(self, contenders: Mapping[str, Sequence[Call]]) -> None:
        stream = torch.cuda.Stream()  # as capture wants it: what a library allocates once is allocated now
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


def measure_ceilings(clock: Clock) -> Ceilings:
    """Copy, read and matrix product on this card, now; medians of flushed runs, the best of a few bursts."""
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    copy = clock.flushed({"copy": [lambda: target.copy_(source)]})["copy"]
    read = clock.flushed({"read": [lambda: torch.sum(source)]})["read"]
    del source, target
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
