"""Time the absorbed and the expanded path over a grid of lengths, and fit the constants that `choose_path` uses.

    python -m tests.benchmarks.crossover --costs fast/assets/costs
    python -m tests.benchmarks.crossover --heads 16 128 --json crossover.json

The absorbed path attends over the cached latents themselves. The expanded path first turns the latents into keys and
values of every head. `choose_path` predicts the times of both paths and chooses the faster path for a request.

Each point of the grid is a batch of equal requests. A time contains attention and the up-projections: on the absorbed
path `query_to_latent`, `mla_decode` with a schedule and `latent_to_value`, on the expanded path `forward_prefill`.

1. The grid is measured twice, and the constants of `PathCosts` are fitted to the mean times. The loss of a chosen path
   is its time / the time of the faster path, minus 1. The fit minimises this loss.
2. The grid is measured once more. The table shows the times of both paths and the loss at every point.

`choose_path` uses the constants also for lengths between the points of the grid, and for other numbers of heads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fast
from fast.mla.choose_path import costs_file
from reference.interfaces import CommonAttentionMetadata, MLAConfig, PathCosts, PrefillMetadata

from .command_line import check_device, run, write_report
from .report import provenance
from .timing import Clock

QUERY_LENS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512)
CONTEXT_LENS = (0, 128, 512, 2048, 8192, 32768)
REQUESTS = 2  # requests of a batch; the contexts of two requests fit into the workspace
BLOCK_SIZE, WORKSPACE = 64, 65536
MOST_LOST = 0.10  # the last line of the output says whether the loss of a chosen path is larger at any point
SLOWER = 8.0  # an absorbed path that takes more than 8 x the time of the expanded path is not timed for longer queries
CONSTANTS = tuple(asdict(PathCosts()))


@dataclass(frozen=True)
class Point:
    """One batch and its times.

    Attributes:
        N: number of heads.
        query_len: new tokens of each request.
        context_len: context tokens of each request.
        absorbed_us: time of the absorbed path for one request (time of the batch / REQUESTS), infinity if the
            path was not timed.
        expanded_us: time of the expanded path for one request.
    """

    N: int
    query_len: int
    context_len: int
    absorbed_us: float
    expanded_us: float


class Paths:
    """Run both paths over one batch of equal requests with random values.

    Args:
        config: dimensions of the layer.
        query_len: new tokens of each request.
        context_len: context tokens of each request.
        dtype: dtype of all tensors.
        device: device of all tensors.
    """

    def __init__(self, config: MLAConfig, query_len: int, context_len: int, dtype: torch.dtype, device: str):
        c, length = config, query_len + context_len
        tokens, width = REQUESTS * query_len, -(-length // BLOCK_SIZE)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=dtype, device=device)

        self.config = config
        self.q = rand(tokens, c.num_heads, c.qk_head_dim)
        self.latents, self.k_pe = rand(tokens, c.kv_lora_rank), rand(tokens, c.qk_rope_head_dim)
        self.w_uk = rand(c.kv_lora_rank, c.num_heads, c.qk_nope_head_dim) * c.kv_lora_rank**-0.5
        self.w_uv = rand(c.kv_lora_rank, c.num_heads, c.v_head_dim) * c.kv_lora_rank**-0.5
        self.cache = rand(REQUESTS * width, BLOCK_SIZE, c.head_size)
        table = torch.randperm(REQUESTS * width, device=device).to(torch.int32).view(REQUESTS, width)
        starts = query_len * torch.arange(REQUESTS + 1, dtype=torch.int32)
        lens = torch.full((REQUESTS,), length, dtype=torch.int32)
        slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        common = CommonAttentionMetadata.make(starts, lens, table, slots)
        self.decode = fast.build_mla_metadata(common, BLOCK_SIZE, WORKSPACE, decode_threshold=query_len).decode
        served = {"device": device, "dtype": dtype, "block_size": BLOCK_SIZE}
        programs = fast.decode_programs(config, query_len=query_len, **served)
        self.schedule = fast.plan_decode(self.decode.seq_lens, programs, fast.schedule_costs(config, **served))
        contexts = torch.full((REQUESTS,), context_len, dtype=torch.int32)
        chunks = fast.plan_context_chunks(contexts, WORKSPACE, BLOCK_SIZE)
        self.prefill = PrefillMetadata(
            table,
            common.query_start_loc,
            query_len,
            tuple(chunk.to(table.device) for chunk in chunks),
            BLOCK_SIZE,
        )

    def absorbed(self) -> Tensor:
        """Return the output of the absorbed path, [query tokens, heads, value dim]."""
        c = self.config
        w_uk_t, w_uv = fast.absorb(self.w_uk, self.w_uv)
        q_nope, q_pe = self.q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        ql_nope = fast.query_to_latent(q_nope, w_uk_t)
        state = fast.mla_decode(ql_nope, q_pe, self.cache, self.decode, c.softmax_scale, self.schedule)
        return fast.latent_to_value(state.out, w_uv)

    def expanded(self) -> Tensor:
        """Return the output of the expanded path, [query tokens, heads, value dim]."""
        return fast.forward_prefill(
            self.q, self.latents, self.k_pe, self.cache, self.prefill, self.w_uk, self.w_uv, self.config.softmax_scale
        ).out


def measure(config: MLAConfig, clock: Clock) -> list[Point]:
    """Return the measured grid for the number of heads of `config`."""
    points = []
    for context_len in CONTEXT_LENS:
        too_slow: set[str] = set()
        for query_len in QUERY_LENS:
            paths = Paths(config, query_len, context_len, torch.bfloat16, "cuda")
            calls = {who: [getattr(paths, who)] for who in ("absorbed", "expanded") if who not in too_slow}
            found = {who: spread.median_us / REQUESTS for who, spread in clock.flushed(calls).items()}
            times = [found.get(who, float("inf")) for who in ("absorbed", "expanded")]
            points.append(Point(config.num_heads, query_len, context_len, *times))
            if times[0] > SLOWER * times[1]:
                too_slow.add("absorbed")  # absorbed_us / expanded_us grows with every further query token
            del paths, calls
            torch.cuda.empty_cache()
    return points


def mean(once: Sequence[Point], again: Sequence[Point]) -> list[Point]:
    """Return the points with the means of the times of two measurements."""
    return [
        replace(a, absorbed_us=(a.absorbed_us + b.absorbed_us) / 2, expanded_us=(a.expanded_us + b.expanded_us) / 2)
        for a, b in zip(once, again, strict=True)
    ]


def features(points: Sequence[Point], config: MLAConfig) -> tuple[Tensor, Tensor]:
    """Return the work of the absorbed path and of the expanded path, each [points, 7].

    `model` multiplies each of the seven amounts of work by one constant. `choose_path` documents the formula.
    """
    rows: tuple[list[list[float]], list[list[float]]] = ([], [])
    for point in points:
        c, n, q, s = config, point.N, point.query_len, point.query_len + point.context_len
        pairs = q * point.context_len + q * (q + 1) / 2
        both, wide = c.qk_nope_head_dim + c.v_head_dim, 2 * c.kv_lora_rank + c.qk_rope_head_dim
        attention, projection = 2 * n * pairs * wide, 2 * n * q * c.kv_lora_rank * both
        rows[0].append([1, 0, 0, attention, 0, projection, 2 * (s * c.head_size + 2 * n * q * wide)])
        attention, expansion = 2 * n * pairs * (both + c.qk_rope_head_dim), 2 * n * s * c.kv_lora_rank * both
        moved = 2 * (s * c.head_size + 2 * n * s * both)
        rows[1].append([0, 1, point.context_len > 0, 0, attention, expansion, moved])
    return torch.tensor(rows[0], dtype=torch.float64), torch.tensor(rows[1], dtype=torch.float64)


def model(constants: Tensor, work: Tensor) -> Tensor:
    """Return the time of one path in microseconds that the constants predict for each point, [points]."""
    fixed = work[:, :3] @ constants[:3]
    return fixed + torch.maximum(work[:, 3:6] @ constants[3:6], work[:, 6] * constants[6])


def fit(points: Sequence[Point], config: MLAConfig, steps: int = 3000, trials: int = 20_000) -> PathCosts:
    """Return the constants with which `choose_path` loses the least time.

    1. Gradient descent on squared errors of three logarithms: the time of the absorbed path, the time of the expanded
       path, and the ratio of the two times. The error of the ratio has a higher weight where the ratio is near 1.
    2. Random search with small changes of the constants. A change is kept if it lowers the largest loss. A change is
       also kept if the largest loss stays the same and the sum of the losses gets lower.

    Args:
        points: measured grid.
        config: dimensions of the layer.
        steps: number of steps of the gradient descent.
        trials: number of changes that the random search tries.
    """
    work = features(points, config)
    times = torch.tensor([(p.absorbed_us, p.expanded_us) for p in points], dtype=torch.float64)
    timed = times.isfinite()
    both = timed.all(1)
    ratio = (times[both, 0] / times[both, 1]).log()
    weight = 1 / (0.05 + ratio.abs())
    start = torch.tensor([5.0, 10.0, 5.0, 4e-9, 3e-9, 2e-9, 4e-7], dtype=torch.float64)
    logs = start.log().requires_grad_()
    optimiser = torch.optim.Adam([logs], lr=0.02)
    for _ in range(steps):
        costs = torch.stack([model(logs.exp(), part) for part in work], 1).log()
        error = ((costs[both, 0] - costs[both, 1] - ratio) ** 2 * weight).mean()
        error = error + 0.1 * ((costs - times.log())[timed] ** 2).mean()
        optimiser.zero_grad()
        error.backward()
        optimiser.step()

    def losses(constants: Tensor) -> tuple[float, float]:
        absorbed = model(constants, work[0]) <= model(constants, work[1])
        chosen = torch.where(absorbed, times[:, 0], times[:, 1]) / times.amin(1) - 1
        return float(chosen.max()), float(chosen.sum())

    best = logs.detach().exp()
    least, random = losses(best), torch.Generator().manual_seed(0)
    for _ in range(trials):
        trial = best * (0.05 * torch.randn(len(best), generator=random, dtype=torch.float64)).exp()
        found = losses(trial)
        if found < least:
            best, least = trial, found
    return PathCosts(**dict(zip(CONSTANTS, best.tolist(), strict=True)))


def lost(point: Point, config: MLAConfig, costs: PathCosts | None) -> float:
    """Return the loss of the path that `choose_path` chooses: its time / the time of the faster path, minus 1."""
    path = fast.choose_path(point.query_len, point.context_len, config, costs)
    return getattr(point, f"{path}_us") / min(point.absorbed_us, point.expanded_us) - 1


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the grid, fit the constants and write both; the exit status is 2 without a CUDA device, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.crossover", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--heads", type=int, nargs="+", default=[16, 128], metavar="N", help="numbers of heads (default: 16 128)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="file for hardware, versions, points and constants")
    parser.add_argument("--costs", type=Path, metavar="DIR", help="folder for the constants, one file for each number "
                        "of heads; fast.mla.choose_path.measured_path_costs reads fast/assets/costs")  # fmt: skip
    parser.add_argument("--time", type=float, default=20.0, metavar="MS", help="milliseconds of timing for each point "
                        "and path (default: %(default)s)")  # fmt: skip
    return run(_run, argv, parser)


def _run(argv: Sequence[str], arguments: argparse.Namespace) -> int:
    check_device("cuda")
    console, worst, results = Console(width=120), 0.0, []
    clock = Clock(arguments.time)
    for heads in arguments.heads:
        config = MLAConfig.from_preset("deepseek-v3", num_heads=heads)
        points = mean(measure(config, clock), measure(config, clock))
        costs = fit(points, config)
        # measure again: the losses must be computed from other times than the fit used
        points = measure(config, clock)
        losses = {
            "measured": [lost(p, config, costs) for p in points],
            "counted": [lost(p, config, None) for p in points],
        }
        table = Table(
            title=f"{heads} heads: us for each request, absorbed / expanded, chosen path (a or e) and its loss"
        )
        for column in ("new tokens", *(f"{length} cached" for length in CONTEXT_LENS)):
            table.add_column(column, justify="right")
        for query_len in QUERY_LENS:
            cells = []
            for p, loss in zip(points, losses["measured"], strict=True):
                if p.query_len == query_len:
                    choice = fast.choose_path(p.query_len, p.context_len, config, costs)
                    cells.append(
                        f"{p.absorbed_us:.0f} / {p.expanded_us:.0f} {choice[0]}" + (f" +{loss:.0%}" if loss else "")
                    )
            table.add_row(str(query_len), *cells)
        console.print(table)
        console.print(
            f"largest loss: {max(losses['measured']):.1%} with the fitted constants, {max(losses['counted']):.1%} with "
            f"counted operations in their place; {costs}"
        )
        worst = max(worst, *losses["measured"])
        results.append({
            "N": heads, "costs": asdict(costs), "lost": {who: max(found) for who, found in losses.items()},
            "points": [asdict(p) | {"lost": loss} for p, loss in zip(points, losses["measured"], strict=True)],
        })  # fmt: skip
        if arguments.costs is not None:
            arguments.costs.mkdir(parents=True, exist_ok=True)
            costs.save(arguments.costs / costs_file(torch.cuda.get_device_name(), heads))
    if arguments.json is not None:
        head = provenance("crossover", argv, device="cuda")
        grid = {"requests": REQUESTS, "block_size": BLOCK_SIZE, "workspace_tokens": WORKSPACE}
        write_report(arguments.json, {**head, "grid": grid, "heads": results})
    console.print(
        f"loss at most {MOST_LOST:.0%} at all points"
        if worst <= MOST_LOST
        else f"loss above {MOST_LOST:.0%} at one point or more"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
