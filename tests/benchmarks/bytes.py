"""Time the operations that move bytes, with the dims of DeepSeek-V3: gather, cache write, copies, reorder, merge.

    python -m tests.benchmarks.bytes
    python -m tests.benchmarks.bytes --rows gather,65536 merge,65536 --json bytes.json

For comparison, each row also has the time of a contiguous copy. The copy moves as many bytes as the operation, because
a small copy is slower per byte than a large copy.

The output of every operation except merge must have exactly the expected bits. A part of the output of a merge is
compared with `reference` in float64. The error of this part must be within a budget, which is computed from the error
of `reference` in the dtype of the inputs.

The table gives the speed of each operation, divided by the speed of the copy. The bytes of an operation count each
input and each output once. A stored entry has e bytes: 1152 in bfloat16, 576 in fp8_e4m3, 656 in fp8_ds_mla. For T
tokens in blocks of 64, the operations that depend on the cache format move these bytes:

- gather: T (e + 1152) + 4 T / 64 for the block table.
- cache_write: T (1152 + e) + 8 T for the slots.
- fused_write: T (1152 + e) + 1152 T for the normed latents and rotated keys + 16 T for slots and positions
  + 4096 T for the rope parts of the queries of 16 heads, read and written.

The operations whose names end in a cache format read or write a cache of this format: "gather_fp8_e4m3" dequantises the
entries that it reads, and "cache_write_fp8_e4m3" quantises the entries that it writes. Every "fused_write" also rotates
the queries and the keys, and applies the RMS norm to the latents. The queries have 16 heads, as on one of 8 ranks.

A swap copies blocks between the GPU and pinned host memory. Its bytes are counted once, because they cross the link
between the two once. The plain copy beside a swap is one `copy_` of as many bytes over the same link, and in the same
direction. The ceiling of the table, the copy within the memory of the GPU, does not apply to swaps.

- swap_out, swap_in: the blocks are in random order, and their numbers are on the GPU.
- swap_out_run, swap_in_run: the blocks follow each other, and their numbers are on the host.

The run compares its flushed times with the targets (LEAST_OF_COPY), and prints a verdict on each target: "met" or
"missed". The results file has the verdicts too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import fast
import reference
from fast.attention.rope import rotary_frequencies
from fast.mla.cache_write import rope_norm_and_cache
from fast.parity import Parity, compare_exact, compare_states
from reference.interfaces import (
    CACHE_FORMATS,
    COMPUTE_FORMAT,
    AttentionState,
    CacheFormat,
    ContextChunk,
    RopeConfig,
    TokenOwnership,
)

from .contest import OURS, Case, Contender, finite, run_benchmark
from .targets import judged, median
from .timing import input_sets

LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE
HEADS, VALUE = 128, 128
BLOCK_SIZE = 64
REQUESTS = 16
DTYPE = torch.bfloat16
CHECKED_TOKENS = 512
WRITE_HEADS = 16  # heads of the queries that a fused write rotates: 128 heads over 8 ranks
ROPE_CONFIG = RopeConfig(theta=10000.0)
KV_SCALE = 0.02  # scale of caches with one scale; largest stored number: 448 * 0.02 = 9
RANKS = 4
REORG_INTERLEAVE = {"reorg": 1, "reorg_64": 64}
COPY = "plain copy"
# target: least fraction of the copy's speed, flushed; a name stands for the operations that begin with it
LEAST_OF_COPY = {"fused_write": 0.85, "gather": 0.88, "merge": 0.90, "copy_blocks": 0.85, "swap": 0.85, "reorg": 0.85}
TARGET_TOKENS = 65536  # the targets hold for this number of tokens


@dataclass(frozen=True)
class Row:
    """One operation and its size.

    Attributes:
        op: a name in MAKERS. gather, cache_write and fused_write also occur with the name of a cache format, such as
            gather_fp8_e4m3. swap_out and swap_in copy blocks between the GPU and the host. reorg puts the context of 4
            ranks into token order; each rank in turn has 1 token (reorg) or 64 tokens (reorg_64). merge joins two
            float32 attention states, as in a prefill; merge_bfloat16 joins two bfloat16 states.
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

        A merge reads two attention states and writes one state. A swap counts each entry once, and leaves out the
        numbers of the blocks, which are few bytes. Every other operation reads each cache entry once,
        writes each cache entry once, and reads the indices. A fused write also writes the normed and rotated entries,
        reads the positions, and reads and writes the rope parts of the queries.
        """
        plain = WIDTH * DTYPE.itemsize
        entries = self.tokens * (plain + self.cache_format.entry_bytes(LATENT, ROPE, DTYPE))
        if self.op.startswith("merge"):
            return 3 * self.tokens * HEADS * (VALUE * merge_dtype(self).itemsize + torch.float32.itemsize)
        if self.op.startswith("swap"):
            return self.tokens * plain
        indices = {
            "gather": 4 * (self.tokens // BLOCK_SIZE),
            "cache_write": 8 * self.tokens,
            "fused_write": self.tokens * (8 + 8 + plain + 2 * WRITE_HEADS * ROPE * DTYPE.itemsize),
            "copy_blocks": 16 * (self.tokens // BLOCK_SIZE),
            "reorg": 0,
            "reorg_64": 0,
        }
        return entries + indices[self.kind]

    @property
    def kind(self) -> str:
        """Name of the operation without the cache format."""
        return self.op.removesuffix(f"_{self.cache_format.name}")

    @property
    def cache_format(self) -> CacheFormat:
        """Format of the cache; a name without a format means the compute dtype."""
        return next((each for name, each in CACHE_FORMATS.items() if self.op.endswith(f"_{name}")), COMPUTE_FORMAT)

    def storage(self, device: str) -> dict[str, Any]:
        """Return the keyword arguments of an operation for the cache format; none for the compute dtype."""
        if self.cache_format == COMPUTE_FORMAT:
            return {}
        scale = torch.tensor(KV_SCALE, device=device) if self.cache_format.layer_scale else None
        return {"cache_format": self.cache_format, "kv_scale": scale}


def merge_dtype(row: Row) -> torch.dtype:
    """Return the dtype of the two attention states of a merge."""
    return DTYPE if row.op == "merge_bfloat16" else torch.float32


def random_cache(blocks: int, device: str, storage: dict[str, Any] | None = None) -> Tensor:
    """Return a cache with random entries, [blocks, block_size, columns]."""
    if not storage:
        return torch.randn(blocks, BLOCK_SIZE, WIDTH, dtype=DTYPE, device=device)
    cache = poisoned_cache(blocks, device, storage["cache_format"])
    for entries in cache.view(-1, cache.shape[2]).split(1 << 17):
        entries.copy_(reference.quantize_entries(*random_entries(len(entries), device), **storage))
    return cache


def random_entries(tokens: int, device: str) -> list[Tensor]:
    """Return random latents [tokens, 512] and rope parts [tokens, 64]."""
    return [torch.randn(tokens, width, dtype=DTYPE, device=device) for width in (LATENT, ROPE)]


def poisoned_cache(blocks: int, device: str, cache_format: CacheFormat) -> Tensor:
    """Return a cache [blocks, block_size, columns] in which every byte is `CacheFormat.poison` of its format."""
    width = cache_format.entry_bytes(LATENT, ROPE, DTYPE)
    poisoned = torch.full((blocks, BLOCK_SIZE, width), cache_format.poison, dtype=torch.uint8, device=device)
    return poisoned.view(cache_format.dtype_for(DTYPE))


def gather(row: Row, sets: int, backend: str | None, device: str) -> tuple[list[Callable], Callable]:
    """Return calls that gather each request's tokens from its second block on, and a check of the output."""
    width, storage = row.tokens // REQUESTS // BLOCK_SIZE + 1, row.storage(device)
    cache = random_cache(sets * REQUESTS * width, device, storage)
    options = storage and {**storage, "out_dtype": DTYPE}
    index = dict(dtype=torch.int32, device=device)
    tables = torch.randperm(cache.shape[0], device=device).to(torch.int32).view(sets, REQUESTS, width)
    cu_seq_lens = row.tokens // REQUESTS * torch.arange(REQUESTS + 1, **index)
    starts = torch.full((REQUESTS,), BLOCK_SIZE, **index)
    outs = [torch.full((row.tokens, WIDTH), torch.nan, dtype=DTYPE, device=device) for _ in range(sets)]
    calls = [
        lambda t=table, out=out: fast.gather_and_maybe_dequant_cache(
            cache, t, cu_seq_lens, starts, row.tokens, out=out, backend=backend, **options
        )
        for table, out in zip(tables, outs, strict=True)
    ]

    def check(out: Tensor) -> list[Parity]:
        stored = cache.view(torch.uint8)[tables[0, :, 1:].long()].view(cache.dtype).view(-1, cache.shape[2])
        expected = reference.dequantize_entries(stored, out_dtype=DTYPE, **storage) if storage else stored
        return [compare_exact("gather_and_maybe_dequant_cache", out, expected)]

    return calls, check


def random_slots(row: Row, sets: int, device: str) -> Tensor:
    """Return the slots of randomly chosen blocks, [sets, tokens]; the cache has twice as many blocks."""
    blocks = sets * row.tokens // BLOCK_SIZE
    order = torch.randperm(2 * blocks, device=device)[:blocks]
    return (order[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)).view(sets, row.tokens)


def written_cache(row: Row, cache: Tensor, slots: Tensor, entries: Sequence[Tensor], device: str) -> list[Parity]:
    """Compare a cache with the stored form of `entries` at `slots`; all other bytes must still be the poison byte."""
    expected = poisoned_cache(cache.shape[0], device, row.cache_format).view(torch.uint8)
    stored = reference.quantize_entries(*entries, **row.storage(device)).view(torch.uint8)
    expected.view(-1, expected.shape[2])[slots] = stored
    return [compare_exact(row.kind, cache.view(torch.uint8), expected)]


def cache_write(row: Row, sets: int, backend: str | None, device: str) -> tuple[list[Callable], Callable]:
    """Return calls that write new entries to a random half of a cache's blocks, and a check of the cache."""
    cache = poisoned_cache(2 * sets * row.tokens // BLOCK_SIZE, device, row.cache_format)
    slots, storage = random_slots(row, sets, device), row.storage(device)
    news = [random_entries(row.tokens, device) for _ in range(sets)]

    def write(entries: list[Tensor], where: Tensor) -> Tensor:
        fast.concat_and_cache_mla(*entries, cache, where, backend=backend, **storage)
        return cache

    def check(written: Tensor) -> list[Parity]:
        return written_cache(row, written, slots[0], news[0], device)

    return [lambda e=e, w=w: write(e, w) for e, w in zip(news, slots, strict=True)], check


def fused_write(row: Row, sets: int, backend: str | None, device: str) -> tuple[list[Callable], Callable]:
    """Return calls that rotate and normalise new entries and write them, and a check of the cache.

    The check takes the normed latents and rotated keys from the output of the call: the cache must have their stored
    form, bit for bit. Other tests check the norm and the rotation.
    """
    cache = poisoned_cache(2 * sets * row.tokens // BLOCK_SIZE, device, row.cache_format)
    slots, storage = random_slots(row, sets, device), row.storage(device)
    news = [random_entries(row.tokens, device) for _ in range(sets)]
    queries = [torch.randn(row.tokens, WRITE_HEADS, ROPE, dtype=DTYPE, device=device) for _ in range(sets)]
    positions, norm = torch.arange(row.tokens, device=device), torch.ones(LATENT, dtype=DTYPE, device=device)
    frequencies = rotary_frequencies(ROPE_CONFIG, ROPE).to(device)

    def write(q_pe: Tensor, entries: list[Tensor], where: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, *written = rope_norm_and_cache(
            positions, q_pe, *entries, cache, where, norm, 1e-6, ROPE_CONFIG, frequencies=frequencies, backend=backend,
            **storage,
        )  # fmt: skip
        return cache, *written

    def check(written: tuple[Tensor, Tensor, Tensor]) -> list[Parity]:
        return written_cache(row, written[0], slots[0], written[1:], device)

    return [lambda q=q, e=e, w=w: write(q, e, w) for q, e, w in zip(queries, news, slots, strict=True)], check


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


def host_cache(blocks: int, device: str) -> Tensor:
    """Return a cache of random entries on the host, in pinned memory if `device` is a GPU."""
    cache = random_cache(blocks, device)
    return torch.empty_like(cache, device="cpu", pin_memory=device == "cuda").copy_(cache)


def swap(row: Row, sets: int, backend: str | None, device: str) -> tuple[list[Callable], Callable]:
    """Return calls that copy blocks between the device and the host, and a check of the target."""
    pairs, out, run = row.tokens // BLOCK_SIZE, row.op.startswith("swap_out"), row.op.endswith("_run")
    on_device, on_host = random_cache(sets * pairs, device), host_cache(sets * pairs, device)
    source, target = (on_device, on_host) if out else (on_host, on_device)
    if run:
        mappings = torch.arange(sets * pairs).view(sets, pairs, 1).expand(-1, -1, 2).contiguous()
    else:
        mappings = torch.stack([torch.randperm(sets * pairs) for _ in range(2)], -1).view(sets, pairs, 2).to(device)
    before = target.clone()

    def copy(mapping: Tensor) -> Tensor:
        fast.swap_blocks(source, target, mapping, backend=backend)
        return target

    def check(copied: Tensor) -> list[Parity]:
        read, written = mappings[0].cpu().unbind(1)
        before[written.to(before.device)] = source[read.to(source.device)].to(before.device)
        return [compare_exact("swap_blocks", copied, before)]

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


SCALED = [name for name, each in CACHE_FORMATS.items() if each.scaled]
MAKERS = {
    "gather": gather,
    "cache_write": cache_write,
    "fused_write": fused_write,
    "copy_blocks": copy_blocks,
    "swap_out": swap,
    "swap_in": swap,
    "swap_out_run": swap,
    "swap_in_run": swap,
    "reorg": reorg,
    "reorg_64": reorg,
    "merge": merge,
    "merge_bfloat16": merge,
    **{f"gather_{name}": gather for name in SCALED},
    **{f"cache_write_{name}": cache_write for name in SCALED},
    **{f"fused_write_{name}": fused_write for name in SCALED},
}
ROWS = tuple(Row(op, 65536) for op in MAKERS)


def plain_copies(row: Row, sets: int, device: str) -> tuple[list[Callable], Tensor, Tensor]:
    """Return calls that copy as many bytes as a row moves in one piece, and source and target of the first call.

    A swap is compared with copies over the link between the GPU and the host, in the direction of the swap. A call
    waits for the end of its copy, as a swap does, except while a CUDA graph is captured.
    """
    if not row.op.startswith("swap"):
        half = row.bytes // 4  # bfloat16 numbers that are read; as many are written
        sources, targets = ([torch.randn(half, device=device).to(torch.bfloat16) for _ in range(sets)] for _ in "rw")
        # `mul` by 1 copies with a kernel; `copy_` would be a memcpy node in a CUDA graph, with another speed on some
        # GPUs
        calls = [lambda s=s, t=t: torch.mul(s, 1, out=t) for s, t in zip(sources, targets, strict=True)]
        return calls, sources[0], targets[0]
    blocks = row.tokens // BLOCK_SIZE
    on_device, on_host = random_cache(sets * blocks, device), host_cache(sets * blocks, device)
    ends = (on_device, on_host) if row.op.startswith("swap_out") else (on_host, on_device)
    parts = list(zip(*(end.split(blocks) for end in ends), strict=True))

    def copy(source: Tensor, target: Tensor) -> Tensor:
        return target.copy_(source, non_blocking=device == "cuda" and torch.cuda.is_current_stream_capturing())

    return [lambda s=source, t=target: copy(s, t) for source, target in parts], *parts[0]


def make_case(row: Row, peers: ModuleType | None, backend: str | None, device: str = "cuda") -> Case:
    """Return the inputs of one row and its contenders (the implementations to time).

    The argument `peers` is not used, because no other project offers these operations.
    """
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device == "cuda" else 1
    calls, check = MAKERS[row.op](row, input_sets(row.bytes, l2_bytes), backend, device)
    copies, source, target = plain_copies(row, len(calls), device)

    def check_either(output) -> list[Parity]:
        return [compare_exact("copy", output, source.to(output.device))] if output is target else check(output)

    return Case(0, row.bytes, {OURS: Contender(calls), COPY: Contender(copies)}, check_either)


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the verdict on LEAST_OF_COPY of each operation: time of the copy / time of `fast`, flushed."""
    found = []
    for row in rows:
        op = row["dims"]["op"]
        least = next((bound for name, bound in LEAST_OF_COPY.items() if op.startswith(name)), None)
        ours, copy = (median(row, "flushed", [who]) for who in (OURS, COPY))
        if row["dims"]["tokens"] == TARGET_TOKENS and None not in (least, ours, copy):
            found.append(judged(f"{op}: fraction of the copy's speed, flushed", copy / ours, least=least, op=op))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Check and time the rows, and return the exit status."""
    return run_benchmark(
        "bytes", __doc__.splitlines()[0], ROWS, make_case, argv, ways=("flushed", "replayed"), bandwidth="copy_gb_s",
        epilog="A row has an operation and a number of tokens.", verdicts=verdicts,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
