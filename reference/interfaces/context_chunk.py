"""A chunk of context: cached tokens of one or more requests whose keys and values a prefill computes at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from jaxtyping import Int32
from torch import Tensor

from .ownership import TokenOwnership


class ChunkRun(NamedTuple):
    """The run of a chunk: the smallest range of consecutive requests that has every request with tokens in the chunk.

    Only the query tokens of these requests attend the chunk. Requests inside the range may have no token in the chunk.

    Attributes:
        first_request: first request of the run.
        end_request: request after the last request of the run.
        first_token: first query token of these requests, among the query tokens of the plan with the chunk.
        end_token: query token after the last query token of these requests.
        finished_token: no later chunk is attended by the query tokens from `first_token` up to this token, exclusive.
            For these query tokens, the merge of this chunk gives the final output.
        max_query_len: length of the longest query of these requests.
    """

    first_request: int
    end_request: int
    first_token: int
    end_token: int
    finished_token: int
    max_query_len: int

    @classmethod
    def of_chunks(
        cls, chunks: Sequence[ContextChunk], requests: int, num_tokens: int, max_query_len: int
    ) -> tuple[ChunkRun, ...]:
        """Return the run of each chunk of a plan, whose chunks all have a run or all have none.

        If the chunks have no run, the result is a run with all requests for each chunk. The output of all query tokens
        is then final after the last chunk.

        Args:
            chunks: chunks of the plan.
            requests: number of requests of the plan.
            num_tokens: number of query tokens of the plan.
            max_query_len: length of the longest query of the plan.
        """
        if chunks and chunks[0].run is not None:
            return tuple([chunk.run for chunk in chunks])
        return tuple(
            cls(0, requests, 0, num_tokens, num_tokens if number == len(chunks) else 0, max_query_len)
            for number in range(1, len(chunks) + 1)
        )


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
        run: the requests whose query tokens attend this chunk (`plan_chunk_runs`). With None, the query tokens of all
            requests attend the chunk.
        run_query_start_loc: [requests of the run + 1], prefix sum of the query lengths of the run; it starts at 0. None
            if `run` is None or has all requests: the offsets are then those of the plan.
    """

    starts: Int32[Tensor, " B"]
    cu_seq_lens: Int32[Tensor, " B+1"]
    num_tokens: int
    max_seq_len: int
    bounded: bool = False
    run: ChunkRun | None = None
    run_query_start_loc: Int32[Tensor, " offsets"] | None = None

    @property
    def run_cu_seq_lens(self) -> Int32[Tensor, " offsets"]:
        """Return the elements of `cu_seq_lens` for the run; the first is 0, as no earlier request has tokens here."""
        if self.run_query_start_loc is None:
            return self.cu_seq_lens
        return self.cu_seq_lens[self.run.first_request : self.run.end_request + 1]

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
