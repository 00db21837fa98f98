"""The batch and the cache on which the main job compares two packages op by op (`op_parity`).

docs/glossary.md explains the terms and the letters of shapes.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    CacheFormat,
    CommonAttentionMetadata,
    check,
    to_e4m3,
)

GARBAGE = 2147480000  # block-table entry behind the last block of a request; no op may read this block
WEIGHTS = (4, 3, 2, 1)  # relative lengths of the requests: two decodes, then at most two prefills
PROBABILITIES = {"fp8_query": torch.float16, "fp8_product": torch.float8_e4m3fn}  # narrowest dtype in an fp8 mode


@dataclasses.dataclass(frozen=True, eq=False)
class Storage:
    """How the cache of the compared layer stores its entries, and in which fp8 mode decodes read them.

    Attributes:
        cache_format: format of the cache.
        kv_scale: float32 scale of the cache, a tensor []; None if the format has no such scale.
        fp8_mode: fp8 mode of the decodes.
        q_scale: float32 scale of queries in e4m3, a tensor [] or [N]; None in the mode `converted`.
    """

    cache_format: CacheFormat
    kv_scale: Tensor | None
    fp8_mode: str = CONVERTED
    q_scale: Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of an op for this cache; empty for the format `compute_dtype`."""
        if self.cache_format == COMPUTE_FORMAT:
            return {}
        return {"cache_format": self.cache_format, "kv_scale": self.kv_scale}

    @property
    def decode_options(self) -> dict[str, Any]:
        """Return the keyword arguments of a decode or of a layer for this cache, with its fp8 mode."""
        if self.fp8_mode == CONVERTED:
            return self.options
        return {**self.options, "fp8_mode": self.fp8_mode, "q_scale": self.q_scale}

    @property
    def probability_error(self) -> float:
        """Return the largest relative error with which a decode in the fp8 mode may round a probability.

        The reference rounds no probability, so the budget of a decode's output needs this error in addition. In the
        mode `converted`, probabilities have the dtype of the model, whose rounding the budget already contains.
        """
        return 0.0 if self.fp8_mode == CONVERTED else torch.finfo(PROBABILITIES[self.fp8_mode]).eps / 2

    def stored_queries(self, ql_nope: Tensor, q_pe: Tensor) -> tuple[Tensor, Tensor]:
        """Return absorbed queries [T, N, Lkv] and rope parts [T, N, R] in the dtype that the fp8 mode needs."""
        if self.fp8_mode == CONVERTED:
            return ql_nope, q_pe
        return to_e4m3(ql_nope, self.q_scale.view(-1, 1)), to_e4m3(q_pe, self.q_scale.view(-1, 1))

    def empty(self, like: Tensor, num_blocks: int, block_size: int, dims: tuple[int, int]) -> Tensor:
        """Return a cache full of NaN (the poison byte of the format), so that a wrong read changes the result."""
        width = self.cache_format.entry_bytes(*dims, like.dtype)
        poisoned = torch.full((num_blocks, block_size, width), self.cache_format.poison, dtype=torch.uint8)
        return poisoned.view(self.cache_format.dtype_for(like.dtype)).to(like.device)


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """A step with decodes and prefills. The tokens of all requests follow each other in one stream of T tokens.

    Attributes:
        lens: tokens of each request.
        starts: index of each request's first token in the stream.
        query_lens: query tokens of each request in this step; 1 for a decode.
        positions: [T], position of each token of the stream within its request.
        block_table: [B, W] int32; each row has the shuffled blocks of a request, then GARBAGE.
        num_blocks: number of blocks of the cache; two of them belong to no request.
        block_size: tokens of a block.
        num_decodes: number of decodes; decodes come before prefills.
    """

    lens: list[int]
    starts: list[int]
    query_lens: list[int]
    positions: Tensor
    block_table: Tensor
    num_blocks: int
    block_size: int
    num_decodes: int

    def offsets(self, lens: list[int]) -> Tensor:
        """Return the prefix sums of `lens`, beginning with 0: [B + 1] int32 on the CPU."""
        return torch.tensor([sum(lens[:i]) for i in range(len(lens) + 1)], dtype=torch.int32)

    def rows_of_last(self, query_lens: list[int]) -> Tensor:
        """Return where the last tokens of each request are in the stream: their indices, request by request.

        Args:
            query_lens: for each request, how many of its last tokens are wanted.
        """
        ends = [start + length for start, length in zip(self.starts, self.lens, strict=True)]
        rows = [row for end, count in zip(ends, query_lens, strict=True) for row in range(end - count, end)]
        return torch.tensor(rows, device=self.positions.device)

    def common(self, oracle: ModuleType, query_lens: list[int]) -> CommonAttentionMetadata:
        """Return the batch of a step in which each request has the given number of query tokens."""
        starts, lens = self.offsets(query_lens), torch.tensor(self.lens, dtype=torch.int32)
        slots = oracle.slot_mapping(starts, lens, self.block_table.cpu(), self.block_size, int(starts[-1]))
        slots = slots.to(self.block_table.device)
        return CommonAttentionMetadata.make(starts, lens, self.block_table, slots, self.block_size)


def make_batch(tokens: int, block_size: int, num_prefills: int, device: torch.device) -> Batch:
    """Divide `tokens` tokens into two decodes and `num_prefills` prefills with cached context."""
    weights = WEIGHTS[: 2 + num_prefills]
    check(tokens >= 4 * sum(weights), "tokens", f"at least {4 * sum(weights)} for the parity run", tokens)
    lens = [tokens * weight // sum(weights) for weight in weights[:-1]]
    lens.append(tokens - sum(lens))
    starts = [sum(lens[:i]) for i in range(len(lens))]
    query_lens = [1, 1, *(max(2, length // 3) for length in lens[2:])]
    used = [-(-length // block_size) for length in lens]
    num_blocks = sum(used) + 2
    shuffled = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
    table = torch.full((len(lens), max(used) + 1), GARBAGE, dtype=torch.int32)
    for request, count in enumerate(used):
        table[request, :count] = torch.tensor([shuffled.pop() for _ in range(count)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lens]).to(device)
    return Batch(lens, starts, query_lens, positions, table.to(device), num_blocks, block_size, num_decodes=2)
