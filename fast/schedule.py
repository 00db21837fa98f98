"""What runs when: context cut into chunks, decodes cut over programs. Vectorised; bit-exact with the reference."""

from __future__ import annotations

import torch
from jaxtyping import Int32
from torch import Tensor

from reference.interfaces import (
    ContextChunk,
    ContextParallelChunk,
    DecodeSchedule,
    MLAConfig,
    QueryLenSupport,
    SequenceShare,
    check,
    check_chunk,
    check_chunking,
    check_config,
    check_device,
    check_flag,
    check_int,
    check_not_negative,
    check_tensor,
    check_type,
    choose_schedule,
    chunked_prefill_workspace_size,
    context_unit,
    get_dcp_local_seq_lens,
    piece_overhead,
    reorder_batch_threshold,
)

from . import backends
from .backends import BackendChoice

__all__ = [
    "choose_schedule",
    "chunked_prefill_workspace_size",
    "plan_context_chunks",
    "plan_decode",
    "reorder_batch_threshold",
    "share_chunk",
]


def plan_context_chunks(
    context_lens: Int32[Tensor, " B"],
    workspace_tokens: int,
    block_size: int,
    policy: str = "packed",
    context_parallel_size: int = 1,
    interleave: int = 1,
) -> tuple[ContextChunk, ...]:
    """Cut the cached context of some requests into chunks that fit the workspace.

    Every context token lies in exactly one chunk, and every piece starts on a unit (`context_unit`: a block, and under
    context parallelism whole turns of the ranks). A piece takes whole units of the workspace.

    "packed" fills one chunk after another in the order of the requests: only the first request of a chunk continues
    from the chunk before, and there are ceil(units of all contexts / units of the workspace) chunks. "even" (vLLM's
    first planner) gives each request with context an equal share of the workspace, in whole units, in every chunk.

    Args:
        context_lens: [B], on the CPU; 0 = no context.
        workspace_tokens: most tokens in one chunk.
        block_size: tokens a block.
        policy: "packed" or "even".
        context_parallel_size: D, ranks that share each context.
        interleave: I, tokens that lie on one rank in a row.

    Returns:
        The chunks, on the CPU; none where no request has context.

    Raises:
        ValueError: a workspace smaller than one unit (for "even": one unit for each request with context); a negative
            length; another policy.
    """
    check_tensor("context_lens", context_lens, ("B",), (torch.int32,), torch.device("cpu"))
    unit = context_unit(block_size, context_parallel_size, interleave)
    check_chunking(policy, workspace_tokens, unit)
    check_not_negative("context_lens", context_lens)
    if context_lens.numel() == 0:
        return ()
    longest = int(context_lens.max())
    if longest == 0:
        return ()
    if policy == "packed":
        units = ((context_lens.long() + (unit - 1)) // unit).cumsum(0)
        if int(units[-1]) * unit <= workspace_tokens:  # one chunk holds it all: most steps
            offsets = torch.zeros(context_lens.shape[0] + 1, dtype=torch.int32, device="cpu")
            torch.cumsum(context_lens, 0, dtype=torch.int32, out=offsets[1:])
            return (ContextChunk(torch.zeros_like(context_lens), offsets, int(offsets[-1]), longest),)
        starts, pieces = _pack(context_lens, units, workspace_tokens // unit, unit)
    else:
        starts, pieces = _share_evenly(context_lens, workspace_tokens, unit, longest)
    offsets = torch.nn.functional.pad(pieces.cumsum(1, dtype=torch.int32), (1, 0))
    totals, longest_pieces = offsets[:, -1].tolist(), pieces.amax(1).tolist()
    return tuple(map(ContextChunk, starts.unbind(), offsets.unbind(), totals, longest_pieces))


def _pack(context_lens: Tensor, ends: Tensor, room: int, unit: int) -> tuple[Tensor, Tensor]:
    """Starts and lengths [chunks, B] of the pieces: contexts end to end in units, cut every `room` of them."""
    lens = context_lens.long()
    starts = torch.nn.functional.pad(ends, (1, 0))[:-1]
    cuts = torch.arange(0, int(ends[-1]), room, device="cpu")[:, None]  # [chunks, 1]
    first = (cuts - starts).clamp_(min=0).mul_(unit)  # [chunks, B], tokens of each request before the chunk
    end = torch.minimum((cuts + room - starts).clamp_(min=0).mul_(unit), lens)
    pieces = (end - first).clamp_(min=0)
    return (first * (pieces > 0)).to(torch.int32), pieces.to(torch.int32)


def _share_evenly(context_lens: Tensor, workspace_tokens: int, unit: int, longest: int) -> tuple[Tensor, Tensor]:
    """Starts and lengths [chunks, B] of the pieces: an equal share of the workspace for each request with context."""
    with_context = int(context_lens.count_nonzero())
    share = workspace_tokens // with_context // unit * unit
    check(share > 0, "workspace_tokens", f"at least a unit of {unit} tokens for each of {with_context} requests",
          workspace_tokens)  # fmt: skip
    starts = torch.arange(0, longest, share, dtype=torch.int32, device="cpu")[:, None]  # [chunks, 1]
    pieces = (context_lens - starts).clamp_(0, share)
    return torch.where(pieces > 0, starts, 0), pieces


def share_chunk(chunk: ContextChunk, share: SequenceShare) -> ContextParallelChunk:
    """Where the tokens of a piece of context lie on the ranks that share it.

    Args:
        chunk: of `plan_context_chunks` for as many ranks, so that its pieces begin with the first rank's turn.
        share: of this rank.

    Returns:
        The piece with each rank's part of it, on the same device.

    Raises:
        ValueError: a piece that begins within a turn of the ranks.
    """
    check_type("share", share, SequenceShare)
    check_type("chunk", chunk, ContextChunk)
    check_tensor("chunk.starts", chunk.starts, ("B",), (torch.int32,))
    check_chunk(chunk, chunk.starts.shape[0], chunk.starts.device)
    turn = share.size * share.interleave
    within = (chunk.starts % turn).nonzero() if chunk.starts.device.type == "cpu" else chunk.starts[:0]
    if within.numel():
        request = int(within[0])
        check(False, "chunk.starts", f"multiples of {turn}", f"{int(chunk.starts[request])} at request {request}")
    lengths = get_dcp_local_seq_lens(chunk.cu_seq_lens.diff(), share.size, None, share.interleave)
    offsets = torch.zeros(share.size, lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
    torch.cumsum(lengths.T, 1, dtype=torch.int32, out=offsets[:, 1:])
    return ContextParallelChunk(
        starts=chunk.starts,
        cu_seq_lens=chunk.cu_seq_lens,
        num_tokens=chunk.num_tokens,
        max_seq_len=chunk.max_seq_len,
        local_starts=chunk.starts.div(share.size, rounding_mode="floor"),
        local_cu_seq_lens=offsets,
        local_tokens=int(offsets[share.rank, -1]),
        padded_tokens=int(offsets[0, -1]),
        share=share,
    )


def plan_decode(
    seq_lens: Int32[Tensor, " B"],
    num_programs: int,
    num_heads: int,
    fixed_overhead: int | None = None,
    batch_invariant: bool = False,
    *,
    backend: BackendChoice = None,
) -> DecodeSchedule:
    """Cut the keys of a decode over programs, so that all take about as long.

    Lay the requests end to end, each as long as its tiles and the overhead of starting on it, and cut the line into
    pieces of Q = ceil(length / programs): program p takes the tiles in [p Q, (p + 1) Q). It pays the overhead of a
    request that it continues once more, so that none carries more than Q and one overhead. A request without keys lies
    nowhere and has no split; the combine writes its empty row.

    With `batch_invariant` a request is cut every `invariant_split_tiles` tiles, by its own length and N alone, whatever
    stands beside it. Splits are laid end to end, each with `fold_overhead` of the overhead (at most all), the first
    with all of it; a program takes those that start in its piece of the line.

    Args:
        seq_lens: [B], keys of each request.
        num_programs: that run at once.
        num_heads: N.
        fixed_overhead: what starting on a request costs, in tiles, or None for `piece_overhead`.
        batch_invariant: see above.
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Returns:
        The schedule, on the device of `seq_lens`.

    Raises:
        ValueError: a number below its least value; on a CPU a negative length (a GPU takes it for 0).
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    check_tensor("seq_lens", seq_lens, ("B",), (torch.int32,))
    check_int("num_programs", num_programs, 1, "at least 1")
    check_int("num_heads", num_heads, 1, "at least 1")
    check_flag("batch_invariant", batch_invariant)
    if fixed_overhead is None:
        fixed_overhead = piece_overhead(num_heads)
    check_int("fixed_overhead", fixed_overhead, 0, "an int >= 0 or None")
    chosen = backends.select(backends.KernelRequest("plan_decode", seq_lens.device), backend)
    tile_ranges, split_offsets = torch.ops.mla_twins.plan_decode(
        seq_lens, num_programs, num_heads, fixed_overhead, batch_invariant, chosen.name
    )
    return DecodeSchedule(tile_ranges, split_offsets, batch_invariant)


def decode_programs(
    config: MLAConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    block_size: int,
    query_len: int = 1,
    backend: BackendChoice = None,
) -> int:
    """How many programs `plan_decode` should cut a decode over: as many as run at once on a device.

    A builder asks for it by itself (`num_programs=None`).

    Args:
        config: the layer.
        device: where it runs.
        dtype: of queries and cache.
        block_size: tokens a cache block.
        query_len: longest query of a decode.
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Raises:
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    check_config(config)
    device = check_device("device", device)
    check_type("dtype", dtype, torch.dtype)
    check_int("block_size", block_size)
    check_int("query_len", query_len)
    c = config
    widths = c.kv_lora_rank, c.qk_rope_head_dim
    request = backends.decode_request(device, dtype, *widths, block_size, QueryLenSupport.VARLEN, op="decode_programs")
    launch = backends.kernel(backends.select(request, backend).name, "decode_programs")
    return launch(device, dtype, c.num_heads, *widths, block_size, query_len)


@torch.library.custom_op(
    "mla_twins::plan_decode",
    mutates_args=(),
    schema="(Tensor seq_lens, SymInt num_programs, SymInt num_heads, SymInt fixed_overhead, bool batch_invariant,"
    " str backend) -> (Tensor, Tensor)",
)
def _plan_decode(seq_lens, num_programs, num_heads, fixed_overhead, batch_invariant, backend):
    if seq_lens.device.type == "cpu":
        check_not_negative("seq_lens", seq_lens)
    launch = backends.kernel(backend, "plan_decode")
    return launch(seq_lens, num_programs, num_heads, fixed_overhead, batch_invariant)


@_plan_decode.register_fake
def _(seq_lens, num_programs, num_heads, fixed_overhead, batch_invariant, backend):
    return seq_lens.new_empty(num_programs, 5), seq_lens.new_empty(seq_lens.shape[0] + 1)
