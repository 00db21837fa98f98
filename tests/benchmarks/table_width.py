"""Time the absorbed decode with a wide block table, for two values of `max_seq_len`.

    python -m tests.benchmarks.table_width
    python -m tests.benchmarks.table_width --rows 1,1024,1,128,2560 --json table-width.json

An engine keeps one block table that is wide enough for the longest sequence that it serves. The variant "fast" gets the
length of the longest request of the step as `max_seq_len`. The variant "fast, by the table" gets the number of tokens
that fit into a row of the table, as in a CUDA graph that is captured for the longest sequence.

The variants with "planned" in their names follow a schedule of `plan_decode`, for the number of programs with which a
builder captures a graph: for one request it depends on `max_seq_len`. The run prints for each row whether the stepped
time of "fast, planned, by the table" is at most MOST_OVER_SHORT times that of "fast, planned".

A stepped time is the time of one layer in a CUDA graph of 61 layers. The graph makes the schedule once. In the other
ways of timing, every call makes its schedule. Blocks have 64 tokens, the dtype is bfloat16, and the dimensions are the
dimensions of DeepSeek-V3.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

import fast
from fast.mla.device_choices import programs_of_one_request
from reference.interfaces import MLAConfig

from . import decode
from .contest import OURS, Case, Contender, run_benchmark
from .decode import BLOCK_SIZE, PLANNED, SCALE
from .targets import judged, median, named
from .timing import LAYERS, in_turn

MOST_OVER_SHORT = 1.05  # target: most of (time of a graph captured for long requests) / (for requests of S keys)
BY_TABLE = f"{OURS}, by the table"
PLANNED_BY_TABLE = f"{PLANNED}, by the table"
FAR = 2147480000  # block number far outside the cache, for the unused columns of the table


@dataclass(frozen=True)
class Row:
    """One shape.

    Attributes:
        B: number of requests.
        S: keys of each request, new tokens included.
        Sq: new tokens of each request.
        N: number of heads.
        W: columns of the block table.
    """

    B: int
    S: int
    Sq: int
    N: int
    W: int

    @classmethod
    def parse(cls, *texts: str) -> Row:
        """Return the row of five sizes, each given as text.

        Raises:
            ValueError: a text is not a number, or a value is out of range.
        """
        row = cls(*(int(text) for text in texts))
        if min(vars(row).values()) < 1 or row.Sq > row.S or row.S > row.W * BLOCK_SIZE:
            raise ValueError(f"sizes are at least 1, Sq is at most S, S is at most {BLOCK_SIZE} W")
        return row


ROWS = tuple(
    Row(*sizes)
    for sizes in (
        (1, 1024, 1, 128, 2560), (1, 1024, 1, 16, 2560), (4, 1024, 1, 128, 2560), (16, 1024, 1, 128, 2560),
        (16, 4096, 1, 128, 2560), (64, 1024, 1, 16, 2560), (128, 4096, 1, 128, 2560), (256, 1024, 1, 128, 2560),
    )
)  # fmt: skip


def make_case(row: Row, peers: ModuleType | None, backend: str | None, device: str = "cuda") -> Case:
    """Return the inputs of one row and its contenders (the implementations to time)."""
    backend = fast.backends.bind(backend)
    shape = decode.Row(row.B, row.S, row.Sq, row.N)
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device == "cuda" else 1
    inputs = decode.make_inputs(shape, decode.input_sets(shape.bytes, l2_bytes), device)
    plans = []
    for plan in inputs.metadata:
        table = torch.full((row.B, row.W), FAR, dtype=torch.int32, device=device)
        table[:, : plan.block_table.shape[1]] = plan.block_table
        plans.append(replace(plan, block_table=table))
    config = MLAConfig.from_preset("deepseek-v3", num_heads=row.N)
    served = {"device": device, "dtype": decode.DTYPE, "block_size": BLOCK_SIZE, "backend": backend}
    programs, costs = fast.decode_programs(config, query_len=row.Sq, **served), fast.schedule_costs(config, **served)

    def decoded(metadata, schedule=None):
        return fast.mla_decode(inputs.ql_nope, inputs.q_pe, inputs.cache, metadata, SCALE, schedule, backend=backend)

    def schedule_of(metadata):
        count = programs_of_one_request(programs, metadata.max_seq_len, costs) if row.B == 1 else programs
        return fast.plan_decode(metadata.seq_lens, count, costs, backend=backend)

    def contender(bound: int, planned: bool) -> Contender:
        bounded = [replace(plan, max_seq_len=bound) for plan in plans]
        if not planned:
            return Contender([partial(decoded, plan) for plan in bounded])

        def whole_step() -> None:
            schedule = schedule_of(bounded[0])
            in_turn([partial(decoded, plan, schedule) for plan in bounded], LAYERS)()

        return Contender([lambda p=plan: decoded(p, schedule_of(p)) for plan in bounded], step=whole_step)

    contenders = {
        OURS: contender(row.S, False),
        BY_TABLE: contender(row.W * BLOCK_SIZE, False),
        PLANNED: contender(row.S, True),
        PLANNED_BY_TABLE: contender(row.W * BLOCK_SIZE, True),
    }
    return Case(shape.flops, shape.bytes, contenders, lambda value: decode.check(shape, inputs, value))


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the verdict on MOST_OVER_SHORT of each row with stepped times."""
    found = []
    for row in rows:
        short, wide = (median(row, "stepped", [who]) for who in (PLANNED, PLANNED_BY_TABLE))
        if short is not None and wide is not None:
            what = f"{named(row)}: time of {PLANNED_BY_TABLE} / time of {PLANNED}, stepped"
            found.append(judged(what, wide / short, most=MOST_OVER_SHORT, dims=row["dims"], way="stepped"))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Check and time the rows, and return the exit status."""
    return run_benchmark(
        "table_width", __doc__.splitlines()[0], ROWS, make_case, argv, ways=("flushed", "replayed", "stepped"),
        bandwidth="read_gb_s",
        epilog="A row has B requests of S keys with Sq new tokens each, N heads, and W columns of the block table.",
        verdicts=verdicts,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
