"""The part of a step's plan for the expanded path, and its division into requests with and without context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int32
from torch import Tensor

from .context_chunk import ChunkRows, ContextChunk

MOST_PARTS = 8  # largest number of `parts` of a prefill; each part needs its own calls of the attention kernel


@dataclass(frozen=True, eq=False)
class PrefillMetadata:
    """The part of a step's plan for the expanded path: the requests that prefill.

    Attributes:
        block_table: [B, W], block ids of these requests.
        query_start_loc: [B + 1], prefix sum of the query lengths of these requests; it starts at 0.
        max_query_len: length of the longest query.
        context_chunks: the context of these requests (tokens that are already in the cache), cut into chunks; empty if
            no request has context.
        block_size: tokens per block for which the plan was computed. A call with a cache of another block size raises.
        parts: the requests, divided into parts of consecutive requests: all requests of a part have context and merge
            attention states, or none has context. `parts` is empty if there would be only one part or more than
            `MOST_PARTS` parts, or if the plan was made without lengths on the CPU.
        backend: name of the backend that a builder of `fast` chose for the attention of this step; a layer that binds
            this attention to another backend refuses the plan. None for a plan without such a choice.
        batch_invariant: whether the other requests must not change a bit of a request's attention.
    """

    block_table: Int32[Tensor, "B W"]
    query_start_loc: Int32[Tensor, " B+1"]
    max_query_len: int
    context_chunks: tuple[ContextChunk, ...]
    block_size: int
    parts: tuple[PrefillPart, ...] = ()
    backend: str | None = None
    batch_invariant: bool = False

    def all_parts(self, num_tokens: int) -> tuple[PrefillPart, ...]:
        """Return `parts`; if there are none, one part with all requests and their `num_tokens` query tokens."""
        if self.parts:
            return self.parts
        rows = tuple(ChunkRows(number, 0, chunk.num_tokens) for number, chunk in enumerate(self.context_chunks))
        return (PrefillPart(0, num_tokens, self, rows),)


@dataclass(frozen=True, eq=False)
class PrefillPart:
    """Consecutive prefills of a step that all have context, or that all have no context.

    Attributes:
        first_token: index of the part's first query token among the query tokens of all prefills.
        end_token: index after the part's last query token.
        plan: the plan of these requests alone. It has no parts.
        rows: for each chunk of `plan`, the rows of these requests in the gathered chunk of all prefills.
    """

    first_token: int
    end_token: int
    plan: PrefillMetadata
    rows: tuple[ChunkRows, ...]

    def tensors(self) -> dict[str, Tensor]:
        """Return {name: tensor} for the tensors of the part, except its block table."""
        found = {"query_start_loc": self.plan.query_start_loc}
        for number, chunk in enumerate(self.plan.context_chunks):
            found |= {f"chunk {number}: {name}": tensor for name, tensor in chunk.tensors().items()}
        return found

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> PrefillPart:
        """Return the part with other tensors, given by the names that the method `tensors` returns."""
        chunks = tuple(
            replace(chunk, **{name: tensors[f"chunk {number}: {name}"] for name in chunk.tensors()})
            for number, chunk in enumerate(self.plan.context_chunks)
        )
        plan = replace(self.plan, query_start_loc=tensors["query_start_loc"], context_chunks=chunks)
        return replace(self, plan=plan)

    def to(self, device: torch.device) -> PrefillPart:
        """Return this part with its tensors on `device`; the block table stays where it is."""
        return self.with_tensors({name: x.to(device, non_blocking=True) for name, x in self.tensors().items()})
