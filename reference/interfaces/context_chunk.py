"""A chunk of context: the cached tokens of one or more requests that a prefill expands at once."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from jaxtyping import Int32
from torch import Tensor

from .ownership import TokenOwnership


@dataclass(frozen=True, eq=False)
class ContextChunk:
    """Context tokens of one or more requests that a prefill expands at once, few enough to fit into the workspace.

    A chunk has at most one range of consecutive context tokens of each request.

    Attributes:
        starts: [B], position of each request's first token in this chunk.
        cu_seq_lens: [B + 1], prefix sum of the number of tokens that each request has in this chunk (0 is legal).
        num_tokens: cu_seq_lens[-1], tokens in this chunk; an upper bound if `bounded`.
        max_seq_len: the largest number of tokens that one request has in this chunk; an upper bound if `bounded`.
        bounded: whether the numbers on the host are upper bounds (`clamp_context_chunk`). A gather of the chunk then
            has `num_tokens` rows, and the rows from cu_seq_lens[-1] on are 0.
    """

    starts: Int32[Tensor, " B"]
    cu_seq_lens: Int32[Tensor, " B+1"]
    num_tokens: int
    max_seq_len: int
    bounded: bool = False

    @property
    def held(self) -> tuple[Int32[Tensor, " B"], Int32[Tensor, " B+1"]]:
        """Return `starts` and `cu_seq_lens` of the tokens that the cache of this rank has, which are all tokens."""
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

    The fields of `ContextChunk` describe the tokens of all ranks together, in the order of the tokens. Each request's
    first token in the chunk is at a multiple of D * I (`context_unit`), so rank 0 owns this token. The rank-local
    tokens of a request in the chunk are therefore consecutive in the cache of each rank.

    Attributes:
        local_starts: [B], starts / D: index of each request's first rank-local token in the chunk, counted among the
            request's tokens on that rank. The index is the same on every rank.
        local_cu_seq_lens: [D, B + 1], for each rank the prefix sum of the number of rank-local tokens of each request.
        local_tokens: tokens of this chunk on this rank.
        padded_tokens: number of rows that each rank contributes to the all-gather. This number is the number of tokens
            of rank 0, because no rank has more tokens. Ranks with fewer tokens append padding.
        ownership: the tokens that this rank owns.
    """

    local_starts: Int32[Tensor, " B"]
    local_cu_seq_lens: Int32[Tensor, "D B+1"]
    local_tokens: int
    padded_tokens: int
    ownership: TokenOwnership

    @property
    def held(self) -> tuple[Int32[Tensor, " B"], Int32[Tensor, " B+1"]]:
        """Return `starts` and `cu_seq_lens` of the tokens that the cache of this rank has."""
        return self.local_starts, self.local_cu_seq_lens[self.ownership.rank]


class ChunkRows(NamedTuple):
    """The rows of some consecutive requests in a gathered chunk.

    Attributes:
        chunk: index of the chunk in `PrefillMetadata.context_chunks`.
        first: first row of the requests among the gathered cache entries of the chunk.
        end: row after the last row of the requests.
    """

    chunk: int
    first: int
    end: int
