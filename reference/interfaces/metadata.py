"""Data types that functions pass to each other: attention states, the batch of a step, and the plan of a step.

A step is one forward pass over a batch of requests. Its plan has the integers that attention needs, such as lengths and
cache slots. A decode is a request with one or a few new tokens; it takes the absorbed path (attention over the cached
latents). A prefill takes the expanded path (attention over keys and values of every head). A padding row is a request
of length 0, with which an engine fills up a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, SupportsIndex

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from .cache_format import COMPUTE_FORMAT, CacheFormat
from .checks import check, check_lengths, check_not_negative, check_tensor, is_positive_int, lens_on_cpu
from .decode_schedule import NEVER_PLANNED, DecodeSchedule, ScheduleChoice
from .ownership import ONE_RANK, TokenOwnership, check_interleave
from .prefill_metadata import PrefillMetadata
from .quantization import CONVERTED
from .slots import check_new_blocks, slots_of_tokens
from .support import VISIBLE_LENS, GraphSupport
from .workspace import ContextWorkspace


@dataclass(frozen=True, eq=False)
class AttentionState:
    """Output and log-sum-exp (LSE) of softmax attention over a set of keys. A state unpacks: `out, lse = state`.

    A caller needs the LSE to merge this state with a state over other keys (`merge_attn_states`). If the state covers
    all keys of the queries, a caller may drop the LSE.

    Attributes:
        out: [T, N, Dv], the softmax-weighted sum of the values; 0 for a query without keys. Dv is V on the expanded
            path and Lkv on the absorbed path.
        lse: [N, T], natural logarithm of the sum of exp(score) over the keys; -inf for a query without keys. The dtype
            is float32, or float64 if `out` is float64.
    """

    out: Float[Tensor, "T N Dv"]
    lse: Float[Tensor, "N T"]

    def __iter__(self) -> Iterator[Tensor]:
        """Yield `out`, then `lse`, so that a state unpacks into the two tensors."""
        yield self.out
        yield self.lse


class BatchSplit(NamedTuple):
    """Number of requests and query tokens in the two parts of a batch: decodes first, then prefills.

    Attributes:
        num_decodes: number of leading requests that decode, padding rows included.
        num_prefills: number of requests after the decodes.
        num_decode_tokens: number of query tokens of the decodes.
        num_prefill_tokens: number of query tokens of the prefills.
    """

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


@dataclass(frozen=True, eq=False)
class CommonAttentionMetadata:
    """The batch of one step, from which the plan of the step is computed.

    The constructor does not validate, because engines call it in every step. Invalid input gives an undefined plan. The
    methods `make` and `from_lens` validate.

    Attributes:
        seq_lens: [B], tokens of each request after this step (context + query).
        query_start_loc: [B + 1], prefix sum of the query lengths; a query length of 0 is allowed.
        seq_lens_cpu: [B], copy of `seq_lens` on the CPU. Plans are computed from this copy, so that planning does not
            wait for the device. None if the engine does not know the lengths; plans are then computed from upper bounds
            on the CPU, and from the tensors on the device.
        query_start_loc_cpu: [B + 1], copy of `query_start_loc` on the CPU. It may be None if `seq_lens_cpu` is None and
            the step has no prefills.
        block_table: [B, W], block ids of each request. Two kinds of entries may have any value: entries after the last
            block of a request, and entries of freed blocks before a window.
        slot_mapping: [T], cache slot (place in the paged cache) of each token; -1 for a token that is not written to
            the cache. Tokens from index `num_actual_tokens` on are padding and have slot -1.
        max_query_len: upper bound of the query lengths.
        num_actual_tokens: query_start_loc[-1], number of query tokens of all requests.
        max_seq_len: upper bound of `seq_lens`. Under context parallelism, lengths count the tokens of all ranks.
        block_size: tokens per block for which `slot_mapping` was computed, or None if unknown. To plan the batch for
            another block size is an error.
        seq_lens_cpu_upper_bound: [B], upper bound of the tokens of each request, on the CPU. It is needed if
            `seq_lens_cpu` is None and the step has prefills.
    """

    seq_lens: Int32[Tensor, " B"]
    query_start_loc: Int32[Tensor, " B+1"]
    seq_lens_cpu: Int32[Tensor, " B"] | None
    query_start_loc_cpu: Int32[Tensor, " B+1"] | None
    block_table: Int32[Tensor, "B W"]
    slot_mapping: Int64[Tensor, " T"]
    max_query_len: int
    num_actual_tokens: int
    max_seq_len: int
    block_size: int | None = None
    seq_lens_cpu_upper_bound: Int32[Tensor, " B"] | None = None

    @property
    def num_reqs(self) -> int:
        """Return B, the number of requests."""
        return self.seq_lens.shape[0]

    @property
    def num_computed_tokens(self) -> Int32[Tensor, " B"]:
        """Return the context lengths [B] on the device: tokens cached before this step; 0 for padding rows."""
        return (self.seq_lens - self.query_start_loc.diff()).clamp_(min=0)

    @property
    def num_computed_tokens_cpu(self) -> Int32[Tensor, " B"]:
        """Return the context lengths [B] on the CPU; 0 for padding rows. `seq_lens_cpu` must not be None."""
        check(self.seq_lens_cpu is not None, "seq_lens_cpu", "a tensor on the CPU", None)
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
        """Validate a batch and copy its lengths to the device of `block_table`.

        `from_lens` is easier to call: it takes lengths, and computes the offsets and the slots itself.

        Args:
            query_start_loc_cpu: [B + 1], prefix sum of the query lengths, on the CPU.
            seq_lens_cpu: [B], tokens of each request after this step, on the CPU.
            block_table: [B, W], block ids of each request.
            slot_mapping: [T], cache slot of each token.
            block_size: tokens per block for which `slot_mapping` was computed; None if unknown.

        Returns:
            The validated batch.

        Raises:
            ValueError: in one of the following cases. The message names the argument and, where possible, the request.

                - a shape or dtype is wrong;
                - `query_start_loc_cpu` decreases;
                - the length of a request that is not a padding row is below its number of query tokens;
                - there are fewer slots than query tokens;
                - a slot after the slot of the last token is not -1 (checked for slots on a CPU).
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
                check(False, "slot_mapping", f"-1 after {num_tokens} tokens", f"{slot_mapping[token]} at index {token}")
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
            seq_lens: [B], tokens of each request after this step, with the same types as `query_lens`. 0 marks a
                padding row, whose slots are -1.
            block_table: [B, W], block ids of each request; the batch is created on the device of this tensor. Only the
                blocks of new tokens are read.
            block_size: tokens per block.
            ownership: the tokens that this context-parallel rank owns; tokens of other ranks get slot -1. None means
                that one rank owns all tokens.

        Returns:
            The batch, with sum(query_lens) tokens and no padding tokens.

        Raises:
            TypeError: the lengths are not ints, or `block_table` is not a tensor.
            ValueError: in one of the following cases:

                - a shape is wrong;
                - a length is negative;
                - the length of a request that is not a padding row is below its number of query tokens;
                - `block_table` has too few columns for the longest request;
                - the block id of a new token is negative (checked for a block table on a CPU);
                - `block_size` is not a multiple of the interleave of `ownership`.
        """
        check(is_positive_int(block_size), "block_size", "a positive int", block_size)
        check_tensor("block_table", block_table, ("B", "W"), (torch.int32,))
        requests, device = block_table.shape[0], block_table.device
        query_lens_cpu = lens_on_cpu("query_lens", query_lens, requests)
        seq_lens_cpu = lens_on_cpu("seq_lens", seq_lens, requests)
        check_not_negative("query_lens", query_lens_cpu)
        check(ownership is None or isinstance(ownership, TokenOwnership), "ownership", "a TokenOwnership or None",
              type(ownership).__name__)  # fmt: skip
        owned = ONE_RANK if ownership is None else ownership
        check_interleave(owned.interleave, block_size)
        num_tokens = sum(query_lens_cpu.tolist())
        check(num_tokens < 2**31, "query_lens", "fewer than 2^31 tokens in all", num_tokens)
        starts_cpu = torch.nn.functional.pad(query_lens_cpu.cumsum(0), (1, 0)).to(torch.int32)
        check_lengths(starts_cpu, seq_lens_cpu, ("query_lens", "seq_lens"))
        longest = int(seq_lens_cpu.max()) if requests else 0
        column_tokens = block_size * owned.size
        if longest > block_table.shape[1] * column_tokens or device.type == "cpu":
            check_new_blocks(starts_cpu, seq_lens_cpu, block_table, column_tokens)
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
class DecodeMetadata:
    """The part of a step's plan for the absorbed path: the requests that decode.

    `visible_lens` is the causal mask, as one number for each query token: token t attends the first `visible_lens[t]`
    keys of its request.

    Attributes:
        block_table: [B, W], block ids of these requests.
        seq_lens: [B], keys of each request in the cache, the new tokens included; 0 for padding rows.
        query_start_loc: [B + 1], prefix sum of the query lengths. The last element is T. If `graph` is ANY, the last
            element may be below T; the tokens from this index on are then padding.
        max_query_len: upper bound of the query lengths.
        visible_lens: [T], number of keys that each query token attends: S - Sq + i + 1 for query token i of a request
            with S keys and Sq query tokens, and 0 for a padding row (`compute_visible_lens`).
        max_seq_len: upper bound of `seq_lens`, in every replay if the decode is in a CUDA graph. Kernels size buffers
            by this upper bound. On a GPU, kernels attend no key behind it.
        block_size: tokens per block for which the plan was computed. A call with a cache of another block size raises.
        graph: which batches a CUDA graph with this decode must serve. In `fast`, kernels that do not support such a
            graph are not used.
        mask: promise about `visible_lens`, which a kernel without `visible_lens` needs (`decode_mask`). CAUSAL: it is a
            causal mask. CAUSAL_OVER_RANKS: it is a causal mask over whole sequences, of whose tokens this rank owns
            every D-th token. VISIBLE_LENS promises nothing.
        backend: name of the backend of `fast` that must attend this decode; None if any backend may.
        prepared: tensors that this backend computed ahead for its kernel, such as the schedule of a library.
        total_seq_lens: in a plan of MLA under context parallelism, [B], lengths of the whole sequences over all ranks,
            0 for padding rows. None in other plans.
        ownership: in a plan of MLA under context parallelism, the tokens that this rank owns. None in other plans.
    """

    block_table: Int32[Tensor, "B W"]
    seq_lens: Int32[Tensor, " B"]
    query_start_loc: Int32[Tensor, " B+1"]
    max_query_len: int
    visible_lens: Int32[Tensor, " T"]
    max_seq_len: int
    block_size: int
    graph: GraphSupport = GraphSupport.NONE
    mask: str = VISIBLE_LENS
    backend: str | None = None
    prepared: tuple[Tensor, ...] = ()
    total_seq_lens: Int32[Tensor, " B"] | None = None
    ownership: TokenOwnership | None = None


@dataclass(frozen=True, eq=False)
class CascadeMetadata:
    """The plans of a cascade: a decode over a prefix that all requests share, and a decode over the suffixes.

    Attributes:
        prefix: plan with one request: its query tokens are those of all requests, and its keys are the shared blocks.
        suffix: plan with all requests, and the keys after the shared blocks.
    """

    prefix: DecodeMetadata
    suffix: DecodeMetadata


@dataclass(frozen=True, eq=False)
class MLAMetadata:
    """The plan of one step, which all layers use.

    The tokens of the batch are in this order; each of the three ranges may be empty:

    - tokens [0, num_decode_tokens) decode, on the absorbed path;
    - tokens [num_decode_tokens, num_actual_tokens) prefill, on the expanded path;
    - tokens from num_actual_tokens on are padding and get output 0.

    Attributes:
        slot_mapping: [T], cache slot of every token of the batch, padding included.
        num_actual_tokens: number of tokens without padding.
        num_decodes: number of requests on the absorbed path; these requests come first in the batch.
        num_decode_tokens: number of query tokens of the requests on the absorbed path.
        decode: the part of the plan for the absorbed path.
        prefill: the part of the plan for the expanded path.
        workspace_tokens: largest number of context tokens that a chunk of `prefill` may have.
        schedule: optional schedule, which assigns the keys of the decode to the programs of a kernel. With None the
            kernel divides the keys itself.
        cascade: plans over a shared prefix and over the suffixes, which the layer uses in place of `decode`. None if
            the requests share no prefix, or if a cascade would take longer.
        schedule_choice: the decision whether the decode has a schedule, and the numbers behind this decision.
        workspace: memory in which a layer gathers and expands one chunk. A builder puts the same workspace into each of
            its plans with context, so all layers share it.
        cache_format: format of the caches for which the step was planned; a layer with another format refuses the plan.
        fp8_mode: mode of the decodes for which the step was planned (`mla_decode`); a layer with another mode refuses
            the plan.
        captured: pairs of name and tensor for the tensors that a CUDA graph reads. The builder sets them in a plan for
            a graph, and `update_captured` raises if a tensor was replaced. None for other plans.
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
    workspace: ContextWorkspace = field(default_factory=ContextWorkspace)
    cache_format: CacheFormat = COMPUTE_FORMAT
    fp8_mode: str = CONVERTED
    captured: tuple[tuple[str, Tensor | None], ...] | None = None

    @property
    def num_prefills(self) -> int:
        """Return the number of requests on the expanded path."""
        return self.prefill.block_table.shape[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class ContextParallelMetadata(MLAMetadata):
    """The plan of one step on one rank of a context-parallel group, whose ranks divide every sequence among themselves.

    This plan differs from an `MLAMetadata` in three points:

    - `slot_mapping` is -1 for tokens that another rank owns.
    - `decode.seq_lens`, `decode.max_seq_len` and `decode.visible_lens` count the keys that this rank owns.
    - The chunks of `prefill` are `ContextParallelChunk` objects.

    Attributes:
        ownership: the tokens that this rank owns.
    """

    ownership: TokenOwnership
