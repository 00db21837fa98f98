"""What travels between rooms: attention states, the batch of a step, and its plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, SupportsIndex

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from .checks import check, check_blocks, check_lengths, check_not_negative, check_tensor, is_positive_int, lens_on_cpu
from .decode_schedule import NEVER_PLANNED, DecodeSchedule, ScheduleChoice
from .ownership import TokenOwnership, check_interleave
from .slots import slots_of_tokens
from .support import GraphSupport


@dataclass(frozen=True, eq=False)
class AttentionState:
    """Softmax attention over some set of keys, in the form that merges. It unpacks: `out, lse = mla_decode(...)`.

    Attributes:
        out: [T, N, Dv], normalised; Dv is V on the expanded path, Lkv on the absorbed one.
        lse: [N, T], natural log of the sum of exponentials; float32, or float64 where `out` is float64.
            A row that attended nothing has out = 0 and lse = -inf.
    """

    out: Float[Tensor, "T N Dv"]
    lse: Float[Tensor, "N T"]

    def __iter__(self) -> Iterator[Tensor]:
        """Yield `out`, then `lse`."""
        yield self.out
        yield self.lse


class BatchSplit(NamedTuple):
    """Sizes of the two parts of a batch: the leading requests that decode, and the prefills behind them.

    Attributes:
        num_decodes: leading requests that decode, padding rows among them.
        num_prefills: requests after the decodes.
        num_decode_tokens: query tokens of the decodes.
        num_prefill_tokens: query tokens of the prefills.
    """

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


@dataclass(frozen=True, eq=False)
class CommonAttentionMetadata:
    """One step's batch, as a scheduler knows it. The `_cpu` twins hold the same values on the CPU.

    Constructing it directly checks nothing (the hot path): what `make` would refuse then gives plans without meaning.

    Attributes:
        seq_lens: [B], tokens of each request after this step (context + query).
        query_start_loc: [B + 1], prefix sum of the query lengths; a query length of 0 is legal.
        seq_lens_cpu: the same on the CPU; plans are made from it, so that nothing is read back from a device.
        query_start_loc_cpu: likewise.
        block_table: [B, W], block ids; entries past a request's last block are garbage.
        slot_mapping: [T], cache slot of each token; -1 from `num_actual_tokens` on, and wherever nothing is written.
        max_query_len: an upper bound on the query lengths.
        num_actual_tokens: query_start_loc[-1]; tokens past it are padding.
        max_seq_len: an upper bound on the lengths of the whole sequences, known on the host.
        block_size: tokens a block for which `slot_mapping` was made, or None where nobody recorded it. A plan for
            another block size raises.
    """

    seq_lens: Int32[Tensor, " B"]
    query_start_loc: Int32[Tensor, " B+1"]
    seq_lens_cpu: Int32[Tensor, " B"]
    query_start_loc_cpu: Int32[Tensor, " B+1"]
    block_table: Int32[Tensor, "B W"]
    slot_mapping: Int64[Tensor, " T"]
    max_query_len: int
    num_actual_tokens: int
    max_seq_len: int
    block_size: int | None = None

    @property
    def num_reqs(self) -> int:
        """B."""
        return self.seq_lens_cpu.shape[0]

    @property
    def num_computed_tokens(self) -> Int32[Tensor, " B"]:
        """Context lengths on the device: tokens that were in the cache before this step; 0 for padding rows."""
        return (self.seq_lens - self.query_start_loc.diff()).clamp_(min=0)

    @property
    def num_computed_tokens_cpu(self) -> Int32[Tensor, " B"]:
        """Context lengths on the CPU."""
        return (self.seq_lens_cpu - self.query_start_loc_cpu.diff()).clamp_(min=0)

    @classmethod
    def make(
        cls,
        query_start_loc_cpu: Int32[Tensor, " offsets"],
        seq_lens_cpu: Int32[Tensor, " B"],
        block_table: Int32[Tensor, "B W"],
        slot_mapping: Int64[Tensor, " T"],
        block_size: int | None = None,
    ) -> CommonAttentionMetadata:
        """Validate a batch and put it on the device of `block_table`.

        `from_lens` needs no offsets and computes the slots as well.

        Args:
            query_start_loc_cpu: [B + 1], prefix sum of the query lengths.
            seq_lens_cpu: [B], tokens of each request after this step.
            block_table: [B, W].
            slot_mapping: [T], cache slot of each token.
            block_size: tokens a block for which `slot_mapping` was made; None records nothing.

        Raises:
            ValueError: wrong shape or dtype, a `query_start_loc` that falls, 0 < S < Sq, fewer slots than tokens, or
                (on a CPU) a slot other than -1 past the last token; the message names the argument and the request.
        """
        check_tensor("query_start_loc_cpu", query_start_loc_cpu, ("B + 1",), (torch.int32,), torch.device("cpu"))
        num_reqs = query_start_loc_cpu.shape[0] - 1
        check(num_reqs >= 0, "query_start_loc_cpu", "at least one element", 0)
        check_tensor("seq_lens_cpu", seq_lens_cpu, (num_reqs,), (torch.int32,), torch.device("cpu"))
        check_tensor("block_table", block_table, (num_reqs, "W"), (torch.int32,))
        check_tensor("slot_mapping", slot_mapping, ("T",), (torch.int64,), block_table.device)
        check(block_size is None or is_positive_int(block_size), "block_size", "a positive int or None", block_size)
        check_lengths(query_start_loc_cpu, seq_lens_cpu, ("query_start_loc_cpu", "seq_lens_cpu"))
        num_tokens = int(query_start_loc_cpu[-1])
        check(
            slot_mapping.shape[0] >= num_tokens, "slot_mapping", f"at least {num_tokens} slots", slot_mapping.shape[0]
        )
        device = block_table.device
        if device.type == "cpu":
            written = (slot_mapping[num_tokens:] != -1).nonzero()
            if written.numel():
                token = num_tokens + int(written[0])
                check(False, "slot_mapping", f"-1 past the {num_tokens} tokens", f"{slot_mapping[token]} at {token}")
        return cls(
            seq_lens=seq_lens_cpu.to(device, non_blocking=True),
            query_start_loc=query_start_loc_cpu.to(device, non_blocking=True),
            seq_lens_cpu=seq_lens_cpu,
            query_start_loc_cpu=query_start_loc_cpu,
            block_table=block_table,
            slot_mapping=slot_mapping,
            max_query_len=int(query_start_loc_cpu.diff().max()) if num_reqs else 0,
            num_actual_tokens=num_tokens,
            max_seq_len=int(seq_lens_cpu.max()) if num_reqs else 0,
            block_size=block_size,
        )

    @classmethod
    def from_lens(
        cls,
        query_lens: Sequence[SupportsIndex] | Tensor,
        seq_lens: Sequence[SupportsIndex] | Tensor,
        block_table: Int32[Tensor, "B W"],
        block_size: int,
        ownership: TokenOwnership | None = None,
    ) -> CommonAttentionMetadata:
        """Make a batch from lengths: compute the offsets and the cache slot of every new token.

        Args:
            query_lens: [B], new tokens of each request; a list of ints or a CPU tensor of any int dtype.
            seq_lens: [B], tokens of each request after this step, likewise; 0 is a padding row, whose slots are -1.
            block_table: [B, W]; the batch lies on its device.
            block_size: tokens a block.
            ownership: the tokens that a context-parallel rank owns; tokens of other ranks get slot -1. None: one rank
                owns all tokens.

        Returns:
            The batch, with sum(query_lens) tokens and no padding tokens.

        Raises:
            TypeError: lengths that are no ints, or a block table that is no tensor.
            ValueError: wrong shapes; a negative length; 0 < S < Sq; a block table with too few columns; on a CPU a
                negative block of a request; a block size that `ownership` does not fit.
        """
        check(is_positive_int(block_size), "block_size", "a positive int", block_size)
        check_tensor("block_table", block_table, ("B", "W"), (torch.int32,))
        requests, device = block_table.shape[0], block_table.device
        query_lens_cpu = lens_on_cpu("query_lens", query_lens, requests)
        seq_lens_cpu = lens_on_cpu("seq_lens", seq_lens, requests)
        check_not_negative("query_lens", query_lens_cpu)
        check(ownership is None or isinstance(ownership, TokenOwnership), "ownership", "a TokenOwnership or None",
              type(ownership).__name__)  # fmt: skip
        size, interleave = (1, 1) if ownership is None else (ownership.size, ownership.interleave)
        check_interleave(interleave, block_size)
        num_tokens = sum(query_lens_cpu.tolist())
        check(num_tokens < 2**31, "query_lens", "fewer than 2^31 tokens in all", num_tokens)
        starts_cpu = torch.nn.functional.pad(query_lens_cpu.cumsum(0), (1, 0)).to(torch.int32)
        check_lengths(starts_cpu, seq_lens_cpu, ("query_lens", "seq_lens"))
        longest = int(seq_lens_cpu.max()) if requests else 0
        if longest > block_table.shape[1] * block_size * size or device.type == "cpu":
            check_blocks(block_table, seq_lens_cpu.tolist(), block_size * size, num_blocks=2**31)
        starts, lens = (lengths.to(device, non_blocking=True) for lengths in (starts_cpu, seq_lens_cpu))
        return cls(
            seq_lens=lens,
            query_start_loc=starts,
            seq_lens_cpu=seq_lens_cpu,
            query_start_loc_cpu=starts_cpu,
            block_table=block_table,
            slot_mapping=slots_of_tokens(starts, lens, block_table, block_size, num_tokens, ownership),
            max_query_len=int(query_lens_cpu.max()) if requests else 0,
            num_actual_tokens=num_tokens,
            max_seq_len=longest,
            block_size=block_size,
        )


@dataclass(frozen=True, eq=False)
class ContextChunk:
    """A piece of the cached context of some requests, small enough for the workspace.

    Attributes:
        starts: [B], first context token of each request's piece.
        cu_seq_lens: [B + 1], prefix sum of the pieces' lengths (a length may be 0).
        num_tokens: cu_seq_lens[-1].
        max_seq_len: the longest piece.
    """

    starts: Int32[Tensor, " B"]
    cu_seq_lens: Int32[Tensor, " B+1"]
    num_tokens: int
    max_seq_len: int

    @property
    def held(self) -> tuple[Int32[Tensor, " B"], Int32[Tensor, " B+1"]]:
        """First token and offsets of the pieces as the cache of this rank holds them."""
        return self.starts, self.cu_seq_lens

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are tensors."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> ContextChunk:
        """The same chunk with its tensors on `device`."""
        return replace(self, **{name: x.to(device, non_blocking=True) for name, x in self.tensors().items()})


@dataclass(frozen=True, eq=False, kw_only=True)
class ContextParallelChunk(ContextChunk):
    """A piece of the cached context whose tokens lie on the D ranks of a group.

    `starts`, `cu_seq_lens` and the rest are of the whole pieces, in the order of their tokens, as on one rank. Pieces
    begin where the first rank's turn does (`context_unit`), so that each rank holds its part of them in one run.

    Attributes:
        local_starts: [B], first token of each piece in the cache of any rank, starts / D.
        local_cu_seq_lens: [D, B + 1], for each rank the prefix sum of its tokens of the pieces.
        local_tokens: of the pieces' tokens, how many lie here.
        padded_tokens: rows that each rank hands in: as many as the first rank holds, which has the most.
        ownership: which tokens lie here.
    """

    local_starts: Int32[Tensor, " B"]
    local_cu_seq_lens: Int32[Tensor, "D B+1"]
    local_tokens: int
    padded_tokens: int
    ownership: TokenOwnership

    @property
    def held(self) -> tuple[Int32[Tensor, " B"], Int32[Tensor, " B+1"]]:
        """First token and offsets of the pieces as the cache of this rank holds them."""
        return self.local_starts, self.local_cu_seq_lens[self.ownership.rank]


@dataclass(frozen=True, eq=False)
class PrefillMetadata:
    """The requests that take the expanded path.

    Attributes:
        block_table: [B, W].
        query_start_loc: [B + 1], from 0.
        max_query_len: the longest query.
        context_chunks: the cached context, in pieces; empty where no request has any.
        block_size: tokens a block of the cache that the plan was made for; a cache of another block size raises.
    """

    block_table: Int32[Tensor, "B W"]
    query_start_loc: Int32[Tensor, " B+1"]
    max_query_len: int
    context_chunks: tuple[ContextChunk, ...]
    block_size: int


@dataclass(frozen=True, eq=False)
class DecodeMetadata:
    """The requests that take the absorbed path. The mask is data: row t sees `visible_lens[t]` keys.

    Attributes:
        block_table: [B, W].
        seq_lens: [B], keys in the cache, the new tokens included; 0 for padding rows.
        query_start_loc: [B + 1], from 0.
        max_query_len: an upper bound on the query lengths.
        visible_lens: [T], keys of its request that each row sees (S - Sq + i + 1); 0 = an empty row.
        max_seq_len: an upper bound on `seq_lens`, known on the host: kernels size their splits and buffers by it, and
            on a GPU a longer length is read as this one. Under context parallelism it bounds the rank-local lengths;
            inside a captured graph it bounds every replay.
        block_size: tokens a block of the cache that the plan was made for; a cache of another block size raises.
        graph: graphs in which a decode of this plan is replayed; a backend that cannot be captured so is not chosen.
    """

    block_table: Int32[Tensor, "B W"]
    seq_lens: Int32[Tensor, " B"]
    query_start_loc: Int32[Tensor, " B+1"]
    max_query_len: int
    visible_lens: Int32[Tensor, " T"]
    max_seq_len: int
    block_size: int
    graph: GraphSupport = GraphSupport.NONE


@dataclass(frozen=True, eq=False)
class CascadeMetadata:
    """A decode whose requests share their first blocks: the shared prefix attended once, then each one's rest.

    Attributes:
        prefix: one request with all rows, over the shared blocks.
        suffix: the requests without the shared blocks.
    """

    prefix: DecodeMetadata
    suffix: DecodeMetadata


@dataclass(frozen=True, eq=False)
class MLAMetadata:
    """One step for one layer: rows [0, num_decode_tokens) decode, the rest up to num_actual_tokens prefill.

    Either part may hold no request.

    Attributes:
        slot_mapping: [T], of the whole batch, padding included.
        num_actual_tokens: rows that belong to requests; rows past it are padding and get output 0.
        num_decodes: requests on the absorbed path; they come first.
        num_decode_tokens: their rows.
        decode: plan of the absorbed path.
        prefill: plan of the expanded path.
        workspace_tokens: most context tokens that a chunk may expand at once; the plan was cut for this workspace.
        schedule: how the decode is cut over programs; None leaves it to the kernel.
        cascade: the decode once more, its shared prefix apart; None where that is not worth it. Without it the layer
            attends `decode`.
        schedule_choice: why the decode has a schedule or none.
    """

    slot_mapping: Int64[Tensor, " T"]
    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    decode: DecodeMetadata
    prefill: PrefillMetadata
    workspace_tokens: int
    schedule: DecodeSchedule | None = None
    cascade: CascadeMetadata | None = None
    schedule_choice: ScheduleChoice = NEVER_PLANNED

    @property
    def num_prefills(self) -> int:
        """Requests on the expanded path."""
        return self.prefill.block_table.shape[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class ContextParallelMetadata(MLAMetadata):
    """One step on a rank of a group that shares every sequence: its slots, its keys, its part of the context.

    Slots of tokens that lie elsewhere are -1; `decode` counts the keys that lie here, and its mask is the local count
    of the keys that a row sees; the chunks of `prefill` are `ContextParallelChunk`s.

    Attributes:
        ownership: which tokens lie here.
    """

    ownership: TokenOwnership
