"""Batches without lengths on the CPU (`seq_lens_cpu` is None): upper bounds take the place of the lengths."""

from __future__ import annotations

import dataclasses

import torch
from jaxtyping import Int32
from torch import Tensor

from .checks import check, check_tensor
from .metadata import CommonAttentionMetadata
from .support import QueryLenSupport

CPU = torch.device("cpu")


def has_host_lens(common: CommonAttentionMetadata) -> bool:
    """Return whether a batch has its sequence lengths on the CPU. Otherwise plans are computed from upper bounds."""
    return common.seq_lens_cpu is not None


def check_host_lens(common: CommonAttentionMetadata) -> None:
    """Check that a batch has its lengths and offsets on the CPU."""
    for name in ("seq_lens_cpu", "query_start_loc_cpu"):
        check(getattr(common, name) is not None, f"common.{name}", "a tensor on the CPU", None)


def check_decode_tokens(common: CommonAttentionMetadata) -> None:
    """Check that `num_actual_tokens` is at most B times `max_query_len`, the most that B requests can have."""
    requests, longest, tokens = common.num_reqs, common.max_query_len, common.num_actual_tokens
    check(tokens <= requests * longest, "common.num_actual_tokens",
          f"at most {requests * longest} for {requests} requests of at most {longest} tokens", tokens)  # fmt: skip


def check_bound_values(common: CommonAttentionMetadata) -> None:
    """Check the values of `seq_lens_cpu_upper_bound`, if it is not None.

    - No upper bound is negative.
    - If the offsets are on the CPU, no upper bound is below the number of query tokens of its request. The upper bound
      0 of a padding row is the exception.
    - If the batch is on the CPU, no upper bound is below the length of its request.
    """
    bounds, starts = common.seq_lens_cpu_upper_bound, common.query_start_loc_cpu
    if bounds is None:
        return
    negative = (bounds < 0).nonzero()
    if negative.numel():
        request = int(negative[0])
        check(False, "common.seq_lens_cpu_upper_bound", "bounds >= 0", f"{int(bounds[request])} at request {request}")
    if starts is not None:
        _check_bound(bounds, starts.diff().where(bounds > 0, 0), "query tokens")
    if common.seq_lens.device == CPU:
        _check_bound(bounds, common.seq_lens, "keys")


def _check_bound(bounds: Int32[Tensor, " B"], counts: Int32[Tensor, " B"], what: str) -> None:
    """Check that no upper bound is below `counts`, the numbers of query tokens or of keys of the requests."""
    wrong = (bounds < counts).nonzero()
    if wrong.numel():
        request = int(wrong[0])
        check(False, "common.seq_lens_cpu_upper_bound", f"at least the {int(counts[request])} {what} of the request",
              f"{int(bounds[request])} at request {request}")  # fmt: skip


def bounded_batch(
    common: CommonAttentionMetadata, decode_threshold: int, query_len_support: QueryLenSupport, column_tokens: int
) -> CommonAttentionMetadata:
    """Return the batch with upper bounds in place of the lengths that are missing on the CPU.

    The new fields are:

    - `max_seq_len`: the smaller of two numbers: the old `max_seq_len`, and the number of tokens that one row of the
      block table can hold.
    - `seq_lens_cpu`: `seq_lens_cpu_upper_bound`, but at most the new `max_seq_len`. If `seq_lens_cpu_upper_bound` is
      None, all requests must be decodes, and each gets the new `max_seq_len`.
    - `query_start_loc_cpu`, if it is None: all requests must be decodes. Each request gets `max_query_len` query tokens
      until all `num_actual_tokens` tokens are assigned. These assumed offsets are in the CPU field alone; kernels read
      the true offsets on the device.

    Args:
        common: the batch; if it has `seq_lens_cpu`, it is returned unchanged.
        decode_threshold: requests with at most this number of query tokens decode.
        query_len_support: query lengths that the decode kernel supports.
        column_tokens: tokens of a sequence that one column of the block table holds.

    Raises:
        ValueError: in one of the following cases:

            - the batch may have prefills, and `query_start_loc_cpu` or `seq_lens_cpu_upper_bound` is None;
            - an upper bound is not valid (`check_bound_values`);
            - the requests may have different query lengths, `query_len_support` is UNIFORM, and `query_start_loc_cpu`
              is None.
    """
    if has_host_lens(common):
        return common
    requests, longest, tokens = common.num_reqs, common.max_query_len, common.num_actual_tokens
    starts, most = common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound
    if starts is None:
        check(longest <= decode_threshold, "common.query_start_loc_cpu",
              f"offsets on the CPU for queries of more than {decode_threshold} tokens", None)  # fmt: skip
        check_decode_tokens(common)
        uniform = query_len_support is not QueryLenSupport.UNIFORM or tokens == requests * longest
        check(uniform, "common.query_start_loc_cpu", "offsets on the CPU, because UNIFORM needs equal query lengths",
              None)  # fmt: skip
        starts = (longest * torch.arange(requests + 1, dtype=torch.int32, device=CPU)).clamp_(max=tokens)
    elif most is None:
        queries = int(starts.diff().max()) if requests else 0
        check(queries <= decode_threshold, "common.seq_lens_cpu_upper_bound",
              f"bounds on the CPU for queries of more than {decode_threshold} tokens", None)  # fmt: skip
    limit = min(common.max_seq_len, common.block_table.shape[1] * column_tokens)
    if most is None:
        most = torch.full((requests,), limit, dtype=torch.int32, device=CPU)
    check_bound_values(common)
    bounds = {"seq_lens_cpu": most.clamp(max=limit), "max_seq_len": limit}
    return dataclasses.replace(common, query_start_loc_cpu=starts, **bounds)


def longest_decode_lens(num_decodes: int, max_seq_len: int) -> Int32[Tensor, " decodes"]:
    """Return the lengths for which a schedule saves most time: `max_seq_len` for one request, and 1 for all others.

    If the true lengths are not on the CPU, `choose_schedule` gets these lengths. The decode then gets a schedule if any
    lengths of `num_decodes` requests, up to `max_seq_len`, would give the decode a schedule.

    Args:
        num_decodes: number of requests.
        max_seq_len: upper bound of the keys of a request.
    """
    lens = torch.ones(num_decodes, dtype=torch.int32, device=CPU)
    lens[:1] = max_seq_len
    return lens


def check_bounds(common: CommonAttentionMetadata) -> None:
    """Check shapes, dtypes and devices of the CPU tensors of a batch, each of which may be None. Read no values."""
    requests = common.num_reqs
    shapes = {"seq_lens_cpu": requests, "query_start_loc_cpu": requests + 1, "seq_lens_cpu_upper_bound": requests}
    for name, size in shapes.items():
        if getattr(common, name) is not None:
            check_tensor(f"common.{name}", getattr(common, name), (size,), (torch.int32,), CPU)
    both = common.seq_lens_cpu is None or common.query_start_loc_cpu is not None
    check(both, "common.query_start_loc_cpu", "offsets on the CPU beside seq_lens_cpu", None)
