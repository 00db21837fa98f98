"""From a scheduler's batch to the plan of a step: one function, and a builder for engines that ask step by step.

Plans are made on the CPU from the CPU twins of a batch; nothing is read back from a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from jaxtyping import Int32
from torch import Tensor

from reference.distributed.arguments import check_invariant_merge
from reference.distributed.groups import ContextParallel
from reference.interfaces import (
    MOST_WORKSPACE_TOKENS,
    CommonAttentionMetadata,
    ContextChunk,
    ContextParallelMetadata,
    DecodeMetadata,
    DecodeSchedule,
    MLAConfig,
    MLAMetadata,
    PathCosts,
    PrefillMetadata,
    QueryLenSupport,
    SequenceShare,
    check,
    check_batch_block_size,
    check_captured,
    check_chunking,
    check_common,
    check_common_prefix,
    check_config,
    check_costs,
    check_dtype,
    check_flag,
    check_int,
    check_interleave,
    check_no_prefill_padding,
    check_sequence_share,
    check_slots_of_share,
    check_table_width,
    check_tensor,
    check_threshold,
    check_type,
    choose_schedule,
    chunked_prefill_workspace_size,
    context_unit,
    get_dcp_local_seq_lens,
    reorder_batch_threshold,
)

from ..backends import BackendChoice, bind
from ..planning.batch import reorder_batch_to_split_decodes_and_prefills, split_decodes_and_prefills
from ..planning.context_chunks import plan_context_chunks, share_chunk
from ..planning.decode_schedule import plan_decode
from ..planning.shared_prefix import split_shared_prefix
from .cascade import use_cascade_attention
from .choose_path import choose_path, choose_paths
from .decode import decode_programs

PLANNING_OPS = ("decode_programs", "plan_decode")


def build_mla_metadata(
    common: CommonAttentionMetadata,
    block_size: int,
    workspace_tokens: int,
    decode_threshold: int = 1,
    config: MLAConfig | None = None,
    costs: PathCosts | None = None,
    query_len_support: QueryLenSupport = QueryLenSupport.VARLEN,
    policy: str = "packed",
    require_order: bool = False,
    share: SequenceShare | None = None,
    num_programs: int | None = None,
    *,
    staging: StagingBuffer | None = None,
    dtype: torch.dtype = torch.bfloat16,
    backend: BackendChoice = None,
) -> MLAMetadata:
    """Plan one step: the leading requests that may take the absorbed path decode, the rest prefill (expanded).

    Which may: queries up to `decode_threshold`; with a `config` and a kernel for any lengths (VARLEN) every request for
    which `choose_path` says so besides; under UNIFORM only rows as long as the first. One that stands behind an
    expanded request is expanded as well: correct, but slower (`reorder_batch_to_split_decodes_and_prefills` says how to
    avoid it).

    Args:
        common: the batch.
        block_size: tokens a block.
        workspace_tokens: most context tokens that are expanded at once.
        decode_threshold: longest query that always decodes (`reorder_batch_threshold`).
        config: the layer, for `choose_path` and `num_programs`; None leaves the choice of paths to the threshold.
        costs: of `choose_path`.
        query_len_support: of the decode kernel.
        policy: of `plan_context_chunks`.
        require_order: an absorbed request behind an expanded one is an error.
        share: of a rank under context parallelism: `common` has whole lengths and this rank's slots
            (`dcp_slot_mapping`). Requests choose their path as on one rank.
        num_programs: programs that a schedule cuts the decode over; 0 never plans. None takes as many as suit the
            device (`decode_programs`) where a `config` is given, and never plans without one. Whether the decode gets a
            schedule follows from its lengths (`choose_schedule`), and `schedule_choice` of the plan reports it.
        staging: pinned memory through which plans go to a GPU; None takes it from PyTorch's allocator each time.
        dtype: of queries and cache, for the number of programs; a plan serves any dtype.
        backend: of `decode_programs` and `plan_decode`: a name, which binds those of the two that this backend
            declares, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Returns:
        The plan, its tensors on the device of `common`; a `ContextParallelMetadata` where a `share` is given.

    Raises:
        ValueError: `decode_threshold` below 1, or above 1 with SINGLE_ONLY; `num_programs` without a `config`; slots
            that were made for another block size; a block table narrower than the longest request; a workspace that is
            too small; (on a CPU) more slots than a rank has new tokens; a padding row (S = 0 < Sq) that does not stand
            among the decodes; an order that is not as required.
    """
    backend = bind(backend, PLANNING_OPS)
    check_dtype("dtype", dtype)
    check_threshold(decode_threshold, query_len_support)
    if num_programs is not None:
        check_int("num_programs", num_programs, 0, "an int >= 0 or None")
    check_config(config, optional=True)
    check(config is not None or not num_programs, "config", "an MLAConfig beside num_programs", None)
    check_costs(costs)
    check_flag("require_order", require_order)
    check_sequence_share(share)
    check_type("staging", staging, (StagingBuffer, type(None)), "a StagingBuffer or None")
    size, interleave = (1, 1) if share is None else (share.size, share.interleave)
    check_interleave(interleave, block_size)
    check_batch_block_size(common, block_size)
    check_table_width(common, block_size * size)
    if share is not None and common.slot_mapping.device.type == "cpu":
        check_slots_of_share(common, share)
    requests, starts_cpu = common.num_reqs, common.query_start_loc_cpu
    check_chunking(policy, workspace_tokens, context_unit(block_size, size, interleave))
    decodes, query_lens = requests, None
    if query_len_support is QueryLenSupport.UNIFORM:
        decodes = split_decodes_and_prefills(common, decode_threshold, require_uniform=True)[0]
    elif common.max_query_len > decode_threshold:
        query_lens = starts_cpu.diff()
        decodes = _first_expanded(common, query_lens, decode_threshold, config, costs, query_len_support)
    if require_order and decodes < requests:
        query_lens = starts_cpu.diff() if query_lens is None else query_lens
        _check_order(common, query_lens, decodes, decode_threshold, config, costs, query_len_support)
    decode_tokens = common.num_actual_tokens if decodes == requests else int(starts_cpu[decodes])
    one_each = decode_tokens == decodes and (common.max_query_len <= 1 or decode_threshold == 1)
    if query_lens is None and not (one_each and decodes == requests):
        query_lens = starts_cpu.diff()
    if one_each and query_lens is not None and config is not None:  # longer ones may have chosen this path
        one_each = _longest(query_lens[:decodes]) <= 1

    # what neither the batch nor a view of it holds is computed here on the CPU, and goes to the device in one copy
    pieces: list[Tensor] = []
    if not one_each:
        before = common.seq_lens_cpu[:decodes] - starts_cpu[1 : decodes + 1]
        rows = torch.arange(1, decode_tokens + 1, dtype=torch.int32, device="cpu")
        visible = torch.repeat_interleave(before, query_lens[:decodes], output_size=decode_tokens)
        visible = visible.add_(rows).clamp_(min=0)  # S - Sq + i + 1; below 1 where S = 0
        pieces.append(visible if share is None else get_dcp_local_seq_lens(visible, size, share.rank, interleave))
    if share is not None:
        pieces.append(get_dcp_local_seq_lens(common.seq_lens_cpu[:decodes], size, share.rank, interleave))
    chunks: tuple[ContextChunk, ...] = ()
    if decodes < requests:
        check_no_prefill_padding(common, decodes)
        pieces.append(starts_cpu[decodes:] - decode_tokens)
        contexts = (common.seq_lens_cpu[decodes:] - query_lens[decodes:]).clamp_(min=0)
        chunks = plan_context_chunks(contexts, workspace_tokens, block_size, policy, size, interleave)
        if share is not None:
            chunks = tuple(share_chunk(chunk, share) for chunk in chunks)
        pieces += [piece for chunk in chunks for piece in chunk.tensors().values()]
    pieces = _to_device(pieces, common.block_table.device, staging)
    seq_lens, block_table, query_start_loc = common.seq_lens, common.block_table, common.query_start_loc
    if decodes < requests:
        seq_lens, block_table = seq_lens[:decodes], block_table[:decodes]
        query_start_loc = query_start_loc[: decodes + 1]
    visible_lens = None if one_each else pieces.pop(0)
    if share is not None:
        seq_lens = pieces.pop(0)
    visible_lens = seq_lens if one_each else visible_lens
    prefill_starts = pieces.pop(0) if decodes < requests else common.query_start_loc[:1]
    if common.block_table.is_cuda:
        moved = iter(pieces)
        chunks = tuple(
            dataclasses.replace(chunk, **{name: next(moved) for name in chunk.tensors()}) for chunk in chunks
        )
    longest = common.max_seq_len
    if decodes < requests:
        longest = int(common.seq_lens_cpu[:decodes].max()) if decodes else 0
    if share is not None:  # the first rank owns the most
        longest = SequenceShare(size, 0, interleave).count(longest)
    kind, which = (MLAMetadata, {}) if share is None else (ContextParallelMetadata, {"share": share})
    metadata = kind(
        **which,
        slot_mapping=common.slot_mapping,
        num_actual_tokens=common.num_actual_tokens,
        num_decodes=decodes,
        num_decode_tokens=decode_tokens,
        decode=DecodeMetadata(
            block_table=block_table,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            max_query_len=min(1, decode_tokens) if one_each else _longest(query_lens[:decodes]),
            visible_lens=visible_lens,
            max_seq_len=longest,
            block_size=block_size,
        ),
        prefill=PrefillMetadata(
            block_table=common.block_table[decodes:],
            query_start_loc=prefill_starts,
            max_query_len=_longest(query_lens[decodes:]) if decodes < requests else 0,
            context_chunks=chunks,
            block_size=block_size,
        ),
        workspace_tokens=workspace_tokens,
    )
    if config is None or decode_tokens == 0 or num_programs == 0:
        return metadata
    if num_programs is None:
        device = common.block_table.device
        num_programs = _device_programs(config, device, dtype, block_size, metadata.decode.max_query_len, backend)
    lens = _decode_lens(common, decodes, share)
    return _with_schedule(metadata, lens, num_programs, config.num_heads, backend=backend)


def _decode_lens(
    common: CommonAttentionMetadata, num_decodes: int, share: SequenceShare | None
) -> Int32[Tensor, " decodes"]:
    """The keys of each decode that lie here, on the CPU."""
    lens = common.seq_lens_cpu[:num_decodes]
    return lens if share is None else get_dcp_local_seq_lens(lens, share.size, share.rank, share.interleave)


def _device_programs(
    config: MLAConfig, device: torch.device, dtype: torch.dtype, block_size: int, query_len: int, backend: BackendChoice
) -> int:
    """`decode_programs`, kept: every step of a builder asks for it."""
    named = None if backend is None else tuple(sorted(backend.items()))
    return _kept_programs(config, device, dtype, block_size, query_len, named)


@functools.lru_cache(maxsize=1024)
def _kept_programs(config, device, dtype, block_size, query_len, named) -> int:
    return decode_programs(
        config, device=device, dtype=dtype, block_size=block_size, query_len=query_len,
        backend=None if named is None else dict(named),
    )  # fmt: skip


def _with_schedule(
    metadata: MLAMetadata,
    decode_lens: Int32[Tensor, " decodes"],
    num_programs: int,
    num_heads: int,
    batch_invariant: bool = False,
    captured: bool = False,
    backend: BackendChoice = None,
) -> MLAMetadata:
    """The plan with a schedule where its lengths ask for one, and the choice beside it.

    A captured plan has a schedule whatever its lengths are: the lengths of the replays are not known yet.
    """
    choice = choose_schedule(decode_lens, num_programs, num_heads, batch_invariant)
    if captured:
        choice = dataclasses.replace(choice, num_programs=num_programs, planned=num_programs > 0)
    schedule = DecodeSchedule(batch_invariant=True) if batch_invariant else None
    if choice.planned:
        schedule = plan_decode(
            metadata.decode.seq_lens, num_programs, num_heads, batch_invariant=batch_invariant, backend=backend
        )
    return dataclasses.replace(metadata, schedule=schedule, schedule_choice=choice)


def _first_expanded(common, query_lens, decode_threshold, config, costs, query_len_support) -> int:
    """The first request that does not take the absorbed path; the number of requests where all do."""
    longer = (query_lens > decode_threshold).nonzero().flatten()
    if longer.numel() == 0:
        return common.num_reqs
    first = int(longer[0])
    if config is None or query_len_support is not QueryLenSupport.VARLEN:
        return first
    query_len = int(query_lens[first])
    if choose_path(query_len, max(0, int(common.seq_lens_cpu[first]) - query_len), config, costs) == "expanded":
        return first  # as it is most of the time: nobody else need be asked
    contexts = common.num_computed_tokens_cpu[longer]
    expanded = longer[~choose_paths(query_lens[longer], contexts, decode_threshold, config, costs)]
    return int(expanded[0]) if expanded.numel() else common.num_reqs


def _check_order(common, query_lens, decodes, decode_threshold, config, costs, query_len_support) -> None:
    """Raise where an absorbed request stands behind the first expanded one."""
    ahead, behind = query_lens[:decodes], query_lens[decodes:]
    if query_len_support is QueryLenSupport.UNIFORM:
        absorbed = behind == (ahead.max() if ahead.numel() else 0)
    else:
        contexts = (common.seq_lens_cpu[decodes:] - behind).clamp_(min=0)
        absorbed = choose_paths(behind, contexts, decode_threshold, config, costs, query_len_support)
    absorbed &= behind > 0  # a request without new tokens takes neither path
    if bool(absorbed.any()):
        late = decodes + int(absorbed.int().argmax())
        check(False, "common", f"absorbed requests before the expanded one at request {decodes}", f"one at {late}")


def _longest(query_lens: Tensor) -> int:
    return int(query_lens.max()) if query_lens.numel() else 0


def _to_device(pieces: list[Tensor], device: torch.device, staging: StagingBuffer | None) -> list[Tensor]:
    """Tensors of int32 on the device, by one copy that nobody waits for; on a CPU as they are."""
    if device.type == "cpu" or not pieces:
        return pieces
    shapes, pieces = [piece.shape for piece in pieces], [piece.reshape(-1) for piece in pieces]
    sizes = [piece.shape[0] for piece in pieces]
    if staging is not None:
        moved = staging.send(pieces, device)
    else:  # the allocator keeps pinned memory from being handed out again before its copy has run
        pinned = torch.empty(sum(sizes), dtype=torch.int32, device="cpu", pin_memory=True)
        moved = torch.cat(pieces, out=pinned).to(device, non_blocking=True)
    return [piece.view(shape) for piece, shape in zip(moved.split(sizes), shapes, strict=True)]


class StagingBuffer:
    """Pinned memory that is used again and again to send plans to a GPU, two steps at a time.

    An event guards each half: it is written again only after the copy out of it has run. So the next step is planned
    while this one runs, and nobody waits unless two plans are under way. For one thread.
    """

    def __init__(self):
        self._halves: dict[torch.device, list[tuple[Tensor, torch.cuda.Event]]] = {}

    def send(self, pieces: list[Tensor], device: torch.device) -> Tensor:
        """The pieces one after another in one int32 vector on a CUDA device.

        Args:
            pieces: vectors of int32 on the CPU.
            device: where to.
        """
        total = sum(piece.shape[0] for piece in pieces)
        halves = self._halves.setdefault(device, [])
        half, event = torch.empty(0, dtype=torch.int32, device="cpu"), torch.cuda.Event()
        if len(halves) == 2:
            half, event = halves.pop(0)
            event.synchronize()
        if half.shape[0] < total:
            half = torch.empty(2 * total, dtype=torch.int32, device="cpu", pin_memory=True)
        try:
            return torch.cat(pieces, out=half[:total]).to(device, non_blocking=True)
        finally:
            event.record(torch.cuda.current_stream(device))
            halves.append((half, event))


class MLAMetadataBuilder:
    """Plans steps for an engine that asks as vLLM's asks its builders.

    Args:
        config: the layers' (`infer_global_hyperparameters` says whether they share one).
        block_size: tokens a block.
        max_model_len: longest sequence.
        max_num_seqs: most requests in a batch.
        query_len_support: of the decode kernel.
        num_speculative_tokens: drafted tokens a request and step.
        costs: of `choose_path`.
        num_programs: programs that a schedule cuts a decode over; 0 never plans. None takes as many as suit the device
            (`decode_programs`). A number holds for queries up to the threshold, and longer queries are left to the
            kernel; a function gives the number for the longest query. Whether a decode gets a schedule follows from its
            lengths (`choose_schedule`), and `schedule_choice` of the plan reports it.
        batch_invariant: what the decode gives a request does not depend on its neighbours, bit for bit, however many
            programs there are. `choose_path` is not asked then: queries beyond the threshold are expanded.
        workspace_tokens: context tokens expanded at once; `chunked_prefill_workspace_size` where None, but no more than
            `MOST_WORKSPACE_TOKENS`, which a layer allows by default.
        context_parallel: the groups, where ranks share sequences. Batches then have whole lengths and this rank's
            slots; prefixes that decodes share are not attended apart.
        dtype: of queries and cache, for the number of programs; a plan serves any dtype.
        backend: of `decode_programs` and `plan_decode`: a name, which binds those of the two that this backend
            declares, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Raises:
        ValueError: a number below its least value; heads that TP does not divide; `batch_invariant` with "ag_rs".
    """

    def __init__(
        self,
        config: MLAConfig,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        query_len_support: QueryLenSupport = QueryLenSupport.VARLEN,
        num_speculative_tokens: int = 0,
        costs: PathCosts | None = None,
        num_programs: int | Callable[[int], int] | None = None,
        batch_invariant: bool = False,
        workspace_tokens: int | None = None,
        context_parallel: ContextParallel | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        backend: BackendChoice = None,
    ):
        check_invariant_merge(context_parallel, batch_invariant)
        check_config(config)
        check_costs(costs)
        self.share = None if context_parallel is None else context_parallel.share
        size, interleave = (1, 1) if self.share is None else (self.share.size, self.share.interleave)
        check_interleave(interleave, block_size)
        smallest = chunked_prefill_workspace_size(max_model_len, max_num_seqs, block_size, size, interleave)
        unit = context_unit(block_size, size, interleave)
        self._decode_heads = (
            config.num_heads if context_parallel is None else context_parallel.gathered_heads(config.num_heads)
        )
        if num_programs is not None and not callable(num_programs):
            check_int("num_programs", num_programs, 0, "an int >= 0, a function or None")
        self.config, self.block_size, self.costs = config, block_size, costs
        self.max_model_len, self.max_num_seqs = max_model_len, max_num_seqs
        self.query_len_support = query_len_support
        self.num_programs, self.batch_invariant = num_programs, batch_invariant
        check_dtype("dtype", dtype)
        self.dtype, self.backend = dtype, bind(backend, PLANNING_OPS)
        self._path_config = None if batch_invariant else config  # of `choose_path`; None disables the choice
        if workspace_tokens is None:  # packed chunks need no unit for each sequence, and a layer expands no more
            workspace_tokens = min(smallest, max(1, MOST_WORKSPACE_TOKENS // unit) * unit)
        self.workspace_tokens = workspace_tokens
        check_chunking("packed", self.workspace_tokens, unit)
        self.reorder_batch_threshold = reorder_batch_threshold(query_len_support, num_speculative_tokens)
        self._decode_config = dataclasses.replace(config, num_heads=self._decode_heads)
        self._staging = StagingBuffer()

    def build(self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False) -> MLAMetadata:
        """The plan of one step.

        Args:
            common_prefix_len: context that all decodes share, 0 for none; attended once where that is faster.
            common: the batch, ordered as `reorder_batch` says.
            fast_build: leave out what only speeds the kernels up: the cascade, and the decode's schedule where nothing
                else rests on it.

        Raises:
            ValueError: as `build_mla_metadata`; a prefix longer than some context; an order other than absorbed before
                expanded; more requests or longer ones than the builder was made for.
        """
        check_int("common_prefix_len", common_prefix_len, 0)
        check_flag("fast_build", fast_build)
        self._check_sizes(common)
        return self._build(common_prefix_len, common, fast_build)

    def _check_sizes(self, common: CommonAttentionMetadata) -> None:
        """Raise for more requests or longer ones than the builder was made for."""
        check_type("common", common, CommonAttentionMetadata)
        check_tensor("common.seq_lens_cpu", common.seq_lens_cpu, ("B",), (torch.int32,), torch.device("cpu"))
        check(common.num_reqs <= self.max_num_seqs, "common", f"at most {self.max_num_seqs} requests", common.num_reqs)
        if common.num_reqs and int(common.seq_lens_cpu.max()) > self.max_model_len:
            request = int(common.seq_lens_cpu.argmax())
            check(False, "common", f"at most {self.max_model_len} tokens a request",
                  f"{int(common.seq_lens_cpu[request])} at request {request}")  # fmt: skip

    def _build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False, captured: bool = False
    ) -> MLAMetadata:
        """The plan of one step; where a graph captures it, its lengths decide nothing, for others will follow."""
        metadata = build_mla_metadata(
            common, self.block_size, self.workspace_tokens, self.reorder_batch_threshold, self._path_config,
            self.costs, self.query_len_support, require_order=True, share=self.share, num_programs=0,
            staging=self._staging,
        )  # fmt: skip
        if metadata.num_decode_tokens == 0 or (fast_build and not self.batch_invariant):
            return metadata
        return self._with_hints(metadata, common_prefix_len, common, captured)

    def _with_hints(
        self, metadata: MLAMetadata, common_prefix_len: int, common: CommonAttentionMetadata, captured: bool
    ) -> MLAMetadata:
        """The plan with the cascade or the schedule of its decode."""
        if common_prefix_len > 0 and not self.batch_invariant and self.share is None:
            check_common_prefix(common, common_prefix_len, metadata.num_decodes)
            lengths = common.seq_lens_cpu[: metadata.num_decodes]
            query_lens = common.query_start_loc_cpu[: metadata.num_decodes + 1].diff()
            if use_cascade_attention(common_prefix_len, query_lens, lengths, self.config):
                row = int((lengths > 0).int().argmax())
                cascade = split_shared_prefix(metadata.decode, common_prefix_len, self.block_size, row)
                return dataclasses.replace(metadata, cascade=cascade)
        programs = self._programs_for(metadata.decode.max_query_len, common.block_table.device)
        lens = _decode_lens(common, metadata.num_decodes, self.share)
        return _with_schedule(
            metadata, lens, programs, self._decode_heads, self.batch_invariant, captured, self.backend
        )

    def _programs_for(self, query_len: int, device: torch.device) -> int:
        """Over how many programs a schedule cuts a decode, from its longest query; 0 leaves it to the kernel."""
        if self.num_programs is None:
            return _device_programs(self._decode_config, device, self.dtype, self.block_size, query_len, self.backend)
        if callable(self.num_programs):
            programs = self.num_programs(query_len)
            check_int("num_programs", programs, 0, "a function that gives at least 0")
            return programs
        return self.num_programs if query_len <= self.reorder_batch_threshold else 0

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> MLAMetadata:
        """The plan of a batch that is captured.

        What is not the batch's own (the schedule, visible lengths of several tokens) lies in tensors of this plan,
        which a graph goes on reading: keep it, and bring it up to date with `update_captured` before each replay.
        `DecodeGraph` needs none of this: it plans inside the graph.

        Raises:
            ValueError: a batch that `can_run_in_cudagraph` refuses.
        """
        check(self.can_run_in_cudagraph(common), "common",
              f"decodes of one query length up to {self.reorder_batch_threshold}",
              f"{common.num_actual_tokens} tokens in {common.num_reqs} requests of at most {common.max_query_len}",
              )  # fmt: skip
        table_keys = common.block_table.shape[1] * self.block_size * (1 if self.share is None else self.share.size)
        bound = min(self.max_model_len, table_keys)
        self._check_sizes(common)
        return self._build(0, dataclasses.replace(common, max_seq_len=bound), captured=True)

    def update_captured(self, captured: MLAMetadata, common: CommonAttentionMetadata) -> None:
        """Write the plan of another batch of the same shape into the tensors that a captured graph reads.

        The lengths, block table and slots are the caller's own buffers, which it writes itself. (Under context
        parallelism the lengths of this rank are the plan's, and are written here.)

        Args:
            captured: of `build_for_cudagraph_capture`.
            common: the batch that is to be replayed.

        Raises:
            ValueError: a batch that is not of the captured shape, or longer than captured. Nothing has been written
                then.
        """
        check_type("captured", captured, MLAMetadata)
        check_type("captured.decode", captured.decode, DecodeMetadata)
        check_int("captured.num_decodes", captured.num_decodes, 0)
        check_int("captured.decode.max_query_len", captured.decode.max_query_len, 0)
        check_int("captured.decode.max_seq_len", captured.decode.max_seq_len, 0)
        check_int("captured.decode.block_size", captured.decode.block_size)
        check(captured.decode.block_size == self.block_size, "captured.decode.block_size",
              f"{self.block_size}, as in the builder", captured.decode.block_size)  # fmt: skip
        check_type("captured.schedule", captured.schedule, (DecodeSchedule, type(None)), "a DecodeSchedule or None")
        shape = (captured.num_decodes, captured.decode.max_query_len)
        tokens = shape[0] * shape[1]
        fits = self.can_run_in_cudagraph(common) and (common.num_reqs, common.num_actual_tokens) == (shape[0], tokens)
        check(fits, "common", f"{shape[0]} requests of {shape[1]} tokens, as captured",
              f"{common.num_actual_tokens} tokens in {common.num_reqs} requests")  # fmt: skip
        self._check_sizes(common)
        scheduled = captured.schedule is not None and captured.schedule.tile_ranges is not None
        bound = captured.decode.max_seq_len
        longest = int(_decode_lens(common, common.num_reqs, self.share).max())
        check(longest <= bound, "common", f"at most {bound} keys a request, as captured", longest)
        plan = self._build(0, common, captured=scheduled)
        check_captured(captured, plan)
        if self.share is not None:
            captured.decode.seq_lens.copy_(plan.decode.seq_lens)
        if shape[1] > 1 or self.share is not None:
            captured.decode.visible_lens.copy_(plan.decode.visible_lens)
        if scheduled:
            captured.schedule.tile_ranges.copy_(plan.schedule.tile_ranges)
            captured.schedule.split_offsets.copy_(plan.schedule.split_offsets)

    def can_run_in_cudagraph(self, common: CommonAttentionMetadata) -> bool:
        """Whether a batch is of the captured kind: decodes only, queries of one length, those of padding included."""
        check_common(common)
        lens = common.query_start_loc_cpu.diff()
        if lens.numel() == 0 or not bool((lens == lens[0]).all()):
            return False
        return 1 <= int(lens[0]) <= self.reorder_batch_threshold

    def reorder_batch(
        self, query_lens: Int32[Tensor, " B"], context_lens: Int32[Tensor, " B"]
    ) -> tuple[tuple[int, int], ...]:
        """The fewest swaps of two requests that bring the absorbed ones to the front.

        Args:
            query_lens: [B], on the CPU.
            context_lens: [B], on the CPU.

        Raises:
            ValueError: tensors that do not fit; a length below 0.
        """
        absorbed = choose_paths(
            query_lens, context_lens, self.reorder_batch_threshold, self._path_config, self.costs,
            self.query_len_support,
        )  # fmt: skip
        if self.query_len_support is QueryLenSupport.UNIFORM:
            lens = query_lens[absorbed & (query_lens > 0)]
            counts = torch.bincount(lens, minlength=1)
            most = counts.shape[0] - 1 - int(counts.flip(0).argmax())  # of the most frequent ones the longest
            absorbed &= (query_lens == most) | (query_lens == 0)
        return reorder_batch_to_split_decodes_and_prefills(absorbed)
