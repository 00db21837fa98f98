"""Rows of the benchmark `decode`: shapes with the dims of DeepSeek-V3, and random inputs for them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import reference
from reference.interfaces import COMPUTE_FORMAT, CacheFormat, CommonAttentionMetadata, DecodeMetadata

from .layers import BLOCK_SIZE, DTYPE

LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE
LENS = ("equal", "mixed", "ragged")
QUANTISED_AT_ONCE = 1 << 17  # cache entries that are quantised in one call, to limit the memory of the conversion


@dataclass(frozen=True)
class Row:
    """One shape.

    Attributes:
        B: number of requests.
        S: keys of the longest request, new tokens included.
        Sq: new tokens of each request.
        N: number of heads.
        lens: distribution of the numbers of keys. "equal": every request has S keys. "mixed": from S / 16 to S, evenly
            spaced on a logarithmic scale, in a fixed random order. "ragged": random, log-uniform from S / 128 to S.
            "80%" (or another percentage): evenly spaced from 80 % of S to S, in a fixed random order.
    """

    B: int
    S: int
    Sq: int
    N: int
    lens: str = "equal"

    @classmethod
    def parse(cls, *texts: str) -> Row:
        """Return the row of four sizes and a distribution of lengths, all given as text.

        Raises:
            ValueError: a text is not a number, or a value is out of range.
        """
        *sizes, lens = texts
        batch, keys, queries, heads = (int(text) for text in sizes)
        known = lens in LENS or (lens.endswith("%") and lens[:-1].isdecimal() and int(lens[:-1]) <= 100)
        if min(batch, keys, queries, heads) < 1 or queries > keys or not known:
            raise ValueError(f"sizes are at least 1, Sq is at most S, lens is {', '.join(LENS)}, or e.g. 80%")
        return cls(batch, keys, queries, heads, lens)

    @property
    def seq_lens(self) -> list[int]:
        """Number of keys of each request."""
        if self.lens == "equal" or self.B == 1:
            return [self.S] * self.B
        if self.lens == "ragged":
            draw = random.Random(0)
            return [max(self.Sq, round(self.S * 128 ** (draw.random() - 1))) for _ in range(self.B)]
        if self.lens.endswith("%"):
            least = int(self.lens[:-1]) / 100
            lens = [max(self.Sq, round(self.S * (1 - (1 - least) * place / (self.B - 1)))) for place in range(self.B)]
            return random.Random(0).sample(lens, self.B)
        lens = [max(self.Sq, round(self.S * 16 ** -(place / (self.B - 1)))) for place in range(self.B)]
        return random.Random(0).sample(lens, self.B)

    @property
    def flops(self) -> int:
        """Floating-point operations of both matrix products; masked keys count too."""
        return 2 * self.Sq * self.N * sum(self.seq_lens) * (WIDTH + LATENT)

    def bytes_over(self, cache_format: CacheFormat) -> int:
        """Return the bytes of the cache entries in a format, of the queries and of the output, each counted once."""
        entries = sum(self.seq_lens) * cache_format.entry_bytes(LATENT, ROPE, DTYPE)
        return entries + DTYPE.itemsize * self.B * self.Sq * self.N * (WIDTH + LATENT)

    @property
    def bytes(self) -> int:
        """Bytes of the cache entries in the compute dtype, of the queries and of the output, each counted once."""
        return self.bytes_over(COMPUTE_FORMAT)


ROWS = tuple(
    Row(*sizes)
    for sizes in (
        (1, 8192, 1, 128), (16, 4096, 1, 128), (128, 4096, 1, 128), (64, 16384, 1, 128), (32, 32768, 1, 128),
        (256, 1024, 1, 128), (1, 131072, 1, 128), (128, 4096, 2, 128),
        (128, 4096, 1, 64), (64, 16384, 1, 64), (128, 4096, 1, 32), (128, 16384, 1, 32),
        (1, 8192, 1, 16), (16, 4096, 1, 16), (128, 4096, 1, 16), (128, 16384, 1, 16), (1, 131072, 1, 16),
        (128, 4096, 2, 16), (96, 32768, 1, 128, "ragged"), (96, 32768, 1, 16, "ragged"),
        (128, 16384, 1, 128, "mixed"), (128, 16384, 1, 16, "mixed"), (16, 65536, 1, 128, "mixed"),
        (64, 4096, 1, 128),
    )
)  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """Random requests over one cache, with several disjoint block tables, so that consecutive calls read new blocks.

    Attributes:
        ql_nope: absorbed queries [B Sq, N, 512].
        q_pe: rope parts of the queries [B Sq, N, 64].
        cache: paged cache [blocks, block_size, columns]; each plan uses its own blocks.
        metadata: plans, each with one of the block tables.
        storage: keyword arguments `cache_format` and `kv_scale` of a decode over the cache.
    """

    ql_nope: Tensor
    q_pe: Tensor
    cache: Tensor
    metadata: list[DecodeMetadata]
    storage: dict[str, Any]


def random_cache(blocks: int, cache_format: CacheFormat, kv_scale: Tensor | None, device: torch.device | str) -> Tensor:
    """Return a cache of random entries, [blocks, block_size, columns]."""
    columns, dtype = cache_format.columns(LATENT, ROPE), cache_format.dtype_for(DTYPE)
    if not cache_format.scaled:
        return torch.randn(blocks, BLOCK_SIZE, columns, dtype=DTYPE, device=device)
    cache = torch.empty(blocks * BLOCK_SIZE, columns, dtype=dtype, device=device)
    for part in cache.split(QUANTISED_AT_ONCE):
        new = [torch.randn(len(part), width, dtype=DTYPE, device=device) for width in (LATENT, ROPE)]
        part.copy_(reference.quantize_entries(*new, cache_format, kv_scale))
    return cache.view(blocks, BLOCK_SIZE, columns)


def blocks_of(cache: Tensor, blocks: Tensor) -> Tensor:
    """Return some blocks of a cache; the bytes are copied, because PyTorch cannot index every dtype on every device."""
    return cache.view(torch.uint8)[blocks].view(cache.dtype)


def make_inputs(row: Row, sets: int, device: torch.device | str, cache_format: CacheFormat = COMPUTE_FORMAT) -> Inputs:
    """Return random queries and cache entries, and `sets` plans; the blocks of a request are in random order."""
    width = -(-row.S // BLOCK_SIZE)
    blocks = sets * row.B * width
    ql_nope, q_pe = (torch.randn(row.B * row.Sq, row.N, w, dtype=DTYPE, device=device) for w in (LATENT, ROPE))
    kv_scale = torch.ones((), device=device) if cache_format.layer_scale else None
    cache = random_cache(blocks, cache_format, kv_scale, device)
    tables = torch.randperm(blocks, device=device).to(torch.int32).view(sets, row.B, width)
    index = dict(dtype=torch.int32, device=device)
    seq_lens = torch.tensor(row.seq_lens, **index)
    starts = row.Sq * torch.arange(row.B + 1, **index)
    visible = (seq_lens[:, None] - row.Sq + 1 + torch.arange(row.Sq, **index)).flatten()
    plans = [DecodeMetadata(t, seq_lens, starts, row.Sq, visible, row.S, BLOCK_SIZE) for t in tables]
    return Inputs(ql_nope, q_pe, cache, plans, {"cache_format": cache_format, "kv_scale": kv_scale})


def batch_of(row: Row, inputs: Inputs) -> CommonAttentionMetadata:
    """Return a batch with the first block table; all slots are -1, so that a step writes no cache entries."""
    metadata, tokens = inputs.metadata[0], row.B * row.Sq
    starts = row.Sq * torch.arange(row.B + 1, dtype=torch.int32)
    no_slots = torch.full((tokens,), -1, dtype=torch.int64, device=metadata.block_table.device)
    lens = torch.tensor(row.seq_lens, dtype=torch.int32)
    return CommonAttentionMetadata.make(starts, lens, metadata.block_table, no_slots, BLOCK_SIZE)
