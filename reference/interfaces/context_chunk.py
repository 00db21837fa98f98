"""A chunk of context: cached tokens of one or more requests whose keys and values a prefill computes at once."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from jaxtyping import Int32
from torch import Tensor

from .ownership import TokenOwnership


@dataclass(frozen=True, eq=False)
class ContextChunk:
    """Context tokens of one or more requests that a prefill expands to keys and values at once.

    A chunk has at most one range of consecutive context tokens of each request. It fits into the workspace, the memory
    in which a prefill expands one chunk after another.

    Attributes:
        starts: [B], position of each request's first token in this chunk.
        cu_seq_lens: [B + 1], prefix sum of the number of tokens that each request has in this chunk (0 is allowed).
        num_tokens: cu_seq_lens[-1], tokens in this chunk; an upper bound if `bounded`.
        max_seq_len: largest number of tokens of one request in this chunk; an upper bound if `bounded`.
        bounded: whether `num_tokens` and `max_seq_len` are upper bounds, because the CPU does not know the true lengths
            (`clamp_context_chunk`). A gather of the chunk then returns `num_tokens` rows, of which the rows from
            cu_seq_lens[-1] on are 0.
    """

    starts: Int32[Tensor, " B"]
    cu_seq_lens: Int32[Tensor, " B+1"]
    num_tokens: int
    max_seq_len: int
    bounded: bool = False

    @property
    def held(self) -> tuple[Int32[Tensor, " B"], Int32[Tensor, " B+1"]]:
        """Return `starts` and `cu_seq_lens` of the tokens in the cache of this rank: here, all tokens of the chunk."""
        return self.starts, self.cu_seq_lens

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are tensors, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> ContextChunk:
        """Return this chunk with all tensors on `device`."""
        return replace(self, **{name: x.to(device, non_blocking=True) for name, x in self.tensors().items()})


@dataclass(frozen=True, eq=False, kw_only=True)
class ContextParallelChunk(ContextChunk):
    """A `ContextChunk` whose tokens are distributed over the D ranks of a context-parallel group.

    The ranks own the tokens of a sequence in turn, I consecutive tokens at a time. The rank-local tokens are the tokens
    that one rank owns. The inherited fields describe the tokens of all ranks. Each request's first token in the chunk
    is at a multiple of D * I, so rank 0 owns this token.

    Attributes:
        local_starts: [B], starts / D: number of tokens that a rank has of each request before the chunk. The number is
            the same on every rank.
        local_cu_seq_lens: [D, B + 1], for each rank the prefix sum of the number of rank-local tokens of each request.
        local_tokens: number of tokens of this chunk on this rank.
        padded_tokens: number of rows that each rank sends in the all-gather: the number of tokens of rank 0, because no
            rank has more. Ranks with fewer tokens append padding.
        ownership: the tokens that this rank owns.
    """

    local_starts: Int32[Tensor, " B"]
    local_cu_seq_lens: Int32[Tensor, "D B+1"]
    local_tokens: int
    padded_tokens: int
    ownership: TokenOwnership

    @property
    def held(self) -> tuple[Int32[Tensor, " B"], Int32[Tensor, " B+1"]]:
        """Return `starts` and `cu_seq_lens` of the tokens that are in the cache of this rank."""
        return self.local_starts, self.local_cu_seq_lens[self.ownership.rank]


class ChunkRows(NamedTuple):
    """The rows of some consecutive requests among the gathered cache entries of a chunk.

    Attributes:
        chunk: index of the chunk in `PrefillMetadata.context_chunks`.
        first: first row of the requests.
        end: row after the last row of the requests.
    """

    chunk: int
    first: int
    end: int
