"""Time the operations that move bytes, with the dims of DeepSeek-V3: gather, cache write, block copy, reorder, merge.

    python -m tests.benchmarks.bytes
    python -m tests.benchmarks.bytes --rows gather,65536 merge,65536 --json bytes.json

For comparison, each row also has the time of a contiguous copy of the same number of bytes. A small copy is slower per
byte than a large copy. The output of every operation except merge must have exactly the expected bits. A part of the
output of a merge is compared with `reference` in float64. Its error must be within a budget, which is computed from the
error of `reference` in the dtype of the inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

import fast
import reference
from fast.parity import Parity, compare_exact, compare_states
from reference.interfaces import AttentionState, ContextChunk, TokenOwnership

from .contest import OURS, Case, Contender, finite, run_benchmark
from .timing import input_sets

LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE
HEADS, VALUE = 128, 128
BLOCK_SIZE = 64
REQUESTS = 16
DTYPE = torch.bfloat16
CHECKED_TOKENS = 512
RANKS = 4
REORG_INTERLEAVE = {"reorg": 1, "reorg_64": 64}


@dataclass(frozen=True)
class Row:
    """One operation and its size.

    Attributes:
        op: gather, cache_write, copy_blocks, reorg, reorg_64, merge or merge_bfloat16. reorg and reorg_64 put the
            context of 4 ranks into token order; the interleave is 1 token (reorg) or 64 tokens (reorg_64). merge joins
            two float32 attention states, as in a prefill; merge_bfloat16 joins two bfloat16 states.
        tokens: number of tokens.
    """

    op: str
    tokens: int

    @classmethod
    def parse(cls, op: str, tokens: str) -> Row:
        """Return the row of an operation and a number of tokens, both given as text.

        Raises:
            ValueError: the operation is unknown, or the number of tokens is invalid.
        """
        if op not in MAKERS or int(tokens) < 1 or int(tokens) % (REQUESTS * BLOCK_SIZE):
            raise ValueError(f"op is one of {', '.join(MAKERS)}; size is a multiple of {REQUESTS * BLOCK_SIZE} tokens")
        return cls(op, int(tokens))

    @property
    def bytes(self) -> int:
        """Bytes that the operation reads and writes.

        A merge reads two attention states and writes one state. Every other operation reads each cache entry once,
        writes each cache entry once, and reads the indices.
        """
        entries = 2 * self.tokens * WIDTH * DTYPE.itemsize
        if self.op.startswith("merge"):
            return 3 * self.tokens * HEADS * (VALUE * merge_dtype(self).itemsize + torch.float32.itemsize)
        indices = {
            "gather": 4 * (self.tokens // BLOCK_SIZE),
            "cache_write": 8 * self.tokens,
            "copy_blocks": 16 * (self.tokens // BLOCK_SIZE),
            "reorg": 0,
            "reorg_64": 0,
        }
        return entries + indices[self.op]


def merge_dtype(row: Row) -> torch.dtype:
    """Return the dtype of the two attention states of a merge."""
    return DTYPE if row.op == "merge_bfloat16" else torch.float32


def random_cache(blocks: int, device: str) -> Tensor:
    """Return a cache with random entries, [blocks, block_size, 576]."""
    return torch.randn(blocks, BLOCK_SIZE, WIDTH, dtype=DTYPE, device=device)


def gather(row: Row, sets: int, backend: str | None, device: str) -> tuple[list[Callable], Callable]:
    """Return calls that gather the tokens of all requests except their first blocks, and a check of the output."""
    width = row.tokens // REQUESTS // BLOCK_SIZE + 1
    cache = random_cache(sets * REQUESTS * width, device)
    index = dict(dtype=torch.int32, device=device)
    tables = torch.randperm(cache.shape[0], device=device).to(torch.int32).view(sets, REQUESTS, width)
    cu_seq_lens = row.tokens // REQUESTS * torch.arange(REQUESTS + 1, **index)
    starts = torch.full((REQUESTS,), BLOCK_SIZE, **index)
    outs = [torch.full((row.tokens, WIDTH), torch.nan, dtype=DTYPE, device=device) for _ in range(sets)]
    calls = [
        lambda t=table, out=out: fast.gather_and_maybe_dequant_cache(
            cache, t, cu_seq_lens, starts, row.tokens, out=out, backend=backend
        )
        for table, out in zip(tables, outs, strict=True)
    ]
    return calls, lambda out: [
        compare_exact("gather_and_maybe_dequant_cache", out, cache[tables[0, :, 1:].long()].view(-1, WIDTH))
    ]


def cache_write(row: Row, sets: int, backend: str | None, device: str) -> tuple[list[Callable], Callable]:
    """Return calls that write new entries to a random half of a cache's blocks, and a check of the cache."""
    cache = torch.full((2 * sets * row.tokens // BLOCK_SIZE, BLOCK_SIZE, WIDTH), torch.nan, dtype=DTYPE, device=device)
    order = torch.randperm(cache.shape[0], device=device)[: sets * row.tokens // BLOCK_SIZE]
    slots = (order[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)).view(sets, row.tokens)
    news = [
        [torch.randn(row.tokens, width, dtype=DTYPE, device=device) for width in (LATENT, ROPE)] for _ in range(sets)
    ]

    def write(entries: list[Tensor], where: Tensor) -> Tensor:
        fast.concat_and_cache_mla(*entries, cache, where, backend=backend)
        return cache

    def check(written: Tensor) -> list[Parity]:
        expected = torch.full_like(cache, torch.nan)
        expected.view(-1, WIDTH)[slots[0]] = torch.cat(news[0], dim=1)
        return [compare_exact("concat_and_cache_mla", written, expected)]

    return [lambda e=e, w=w: write(e, w) for e, w in zip(news, slots, strict=True)], check


def copy_blocks(row: Row, sets: int, backend: str | None, device: str) -> tuple[list[Callable], Callable]:
    """Return calls that copy whole blocks to other blocks of the same cache, and a check of the cache."""
    pairs = row.tokens // BLOCK_SIZE
    cache = random_cache(2 * sets * pairs, device)
    mappings = torch.randperm(cache.shape[0], device=device).view(sets, pairs, 2)
    before = cache.clone()

    def copy(mapping: Tensor) -> Tensor:
        fast.copy_blocks([cache], mapping, backend=backend)
        return cache

    def check(copied: Tensor) -> list[Parity]:
        before[mappings[0, :, 1]] = before[mappings[0, :, 0]]
        return [compare_exact("copy_blocks", copied, before)]

    return [lambda m=mapping: copy(m) for mapping in mappings], check


def reorg(row: Row, sets: int, backend: str | None, device: str) -> tuple[list[Callable], Callable]:
    """Return calls that put the context of RANKS ranks into token order, and a check of the output."""
    interleave, each = REORG_INTERLEAVE[row.op], row.tokens // REQUESTS
    gathered = [torch.randn(RANKS, row.tokens // RANKS, WIDTH, dtype=DTYPE, device=device) for _ in range(sets)]
    lens = each * torch.arange(REQUESTS + 1, dtype=torch.int32)
    chunk = ContextChunk(torch.zeros(REQUESTS, dtype=torch.int32), lens, row.tokens, each)
    chunk = fast.rank_local_chunk(chunk, TokenOwnership(RANKS, 0, interleave)).to(torch.device(device))
    outs = [torch.full((row.tokens, WIDTH), torch.nan, dtype=DTYPE, device=device) for _ in range(sets)]
    calls = [
        lambda x=x, out=out: fast.reorg_kvcache(x, chunk, out=out, backend=backend)
        for x, out in zip(gathered, outs, strict=True)
    ]

    def check(out: Tensor) -> list[Parity]:
        runs = gathered[0].view(RANKS, REQUESTS, each // RANKS // interleave, interleave, WIDTH)
        return [compare_exact("reorg_kvcache", out, runs.permute(1, 2, 0, 3, 4).reshape(-1, WIDTH))]

    return calls, check


def merge(row: Row, sets: int, backend: str | None, device: str) -> tuple[list[Callable], Callable]:
    """Return calls that merge two attention states of all heads, and a check of the merged state."""
    dtype = merge_dtype(row)

    def state() -> AttentionState:
        out = torch.randn(row.tokens, HEADS, VALUE, dtype=dtype, device=device)
        return AttentionState(out, 3 * torch.randn(HEADS, row.tokens, device=device))

    states = [(state(), state()) for _ in range(sets)]
    step = max(1, row.tokens // CHECKED_TOKENS)

    def part(whole: AttentionState, double: bool = False) -> AttentionState:
        out, lse = whole.out[::step].contiguous(), whole.lse[:, ::step].contiguous()
        return AttentionState(out.double(), lse.double()) if double else AttentionState(out, lse)

    def check(merged: AttentionState) -> list[Parity]:
        gold = reference.merge_attn_states(*(part(s, double=True) for s in states[0]))
        low = reference.merge_attn_states(*(part(s) for s in states[0]))
        op = "merge_attn_states"
        return [finite(op, merged.out), finite(op, merged.lse), *compare_states(op, part(merged), low, gold)]

    return [lambda p=p: fast.merge_attn_states(*p, backend=backend) for p in states], check


MAKERS = {
    "gather": gather,
    "cache_write": cache_write,
    "copy_blocks": copy_blocks,
    "reorg": reorg,
    "reorg_64": reorg,
    "merge": merge,
    "merge_bfloat16": merge,
}
ROWS = tuple(Row(op, 65536) for op in MAKERS)


def make_case(row: Row, peers: ModuleType | None, backend: str | None, device: str = "cuda") -> Case:
    """Return the inputs of one row and its contenders (the implementations to time).

    The argument `peers` is not used, because no other project offers these operations.
    """
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device == "cuda" else 1
    calls, check = MAKERS[row.op](row, input_sets(row.bytes, l2_bytes), backend, device)
    sources, targets = (
        [torch.randn(row.bytes // 4, device=device).to(torch.bfloat16) for _ in calls] for _ in range(2)
    )
    # `mul` by 1 copies with a kernel; `copy_` would be a memcpy node in a CUDA graph, with another speed on some GPUs
    copies = [lambda s=s, t=t: torch.mul(s, 1, out=t) for s, t in zip(sources, targets, strict=True)]

    def check_either(output) -> list[Parity]:
        return [compare_exact("copy", output, sources[0])] if output is targets[0] else check(output)

    return Case(0, row.bytes, {OURS: Contender(calls), "plain copy": Contender(copies)}, check_either)


def main(argv: Sequence[str] | None = None) -> int:
    """Check and time the rows, and return the exit status."""
    return run_benchmark(
        "bytes", __doc__.splitlines()[0], ROWS, make_case, argv, ways=("flushed", "replayed"), bandwidth="copy_gb_s",
        epilog="A row has an operation and a number of tokens.",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
