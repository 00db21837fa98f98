"""Argument checks of the planning functions: batches, and the sizes of a plan.

"Read no values" means that a check looks at shapes, dtypes and devices alone, so it does not wait for a GPU.
"""

from __future__ import annotations

import torch

from .bounds import check_bounds, check_host_lens, has_host_lens
from .checks import check, check_int, check_tensor, check_type
from .metadata import CommonAttentionMetadata
from .support import QueryLenSupport


def check_common(common: CommonAttentionMetadata, host_lens: bool = True) -> None:
    """Check shapes, dtypes and devices of a batch; read no values.

    Args:
        common: the batch.
        host_lens: whether the batch must have its lengths and offsets on the CPU.
    """
    check_type("common", common, CommonAttentionMetadata)
    int32 = (torch.int32,)
    if host_lens:
        check_host_lens(common)
    check_tensor("common.block_table", common.block_table, ("B", "W"), int32)
    requests, device = common.block_table.shape[0], common.block_table.device
    check_tensor("common.seq_lens", common.seq_lens, (requests,), int32, device)
    check_bounds(common)
    check_tensor("common.query_start_loc", common.query_start_loc, (requests + 1,), int32, device)
    check_tensor("common.slot_mapping", common.slot_mapping, ("slots",), (torch.int64,), device)
    check_int("common.max_query_len", common.max_query_len, 0)
    check_int("common.num_actual_tokens", common.num_actual_tokens, 0)
    check_int("common.max_seq_len", common.max_seq_len, 0)
    if common.block_size is not None:
        check_int("common.block_size", common.block_size, 1, "a positive int or None")


def check_num_tokens(common: CommonAttentionMetadata, exactly: bool = True) -> None:
    """Check that `num_actual_tokens` is the last element of the offsets; read no values on a GPU.

    The offsets are `query_start_loc_cpu`. If this field is None, the check reads `query_start_loc` of a batch on a CPU,
    and does nothing for a batch on another device.

    Args:
        common: the batch.
        exactly: whether the two numbers must be equal. If False, `num_actual_tokens` may be larger; the further tokens
            are then padding.
    """
    starts = common.query_start_loc_cpu
    if starts is None and common.query_start_loc.device.type == "cpu":
        starts = common.query_start_loc
    if starts is not None:
        last, tokens = int(starts[-1]), common.num_actual_tokens
        check(tokens == last or (tokens > last and not exactly), "common.num_actual_tokens",
              f"{'' if exactly else 'at least '}{last}, the last of the offsets", tokens)  # fmt: skip


def check_no_prefill_padding(common: CommonAttentionMetadata, num_decodes: int) -> None:
    """Check that no prefill is a padding row: every prefill with query tokens has a length above 0."""
    if num_decodes == common.num_reqs or int(common.seq_lens_cpu[num_decodes:].min()) > 0:
        return
    query_lens = common.query_start_loc_cpu.diff()[num_decodes:]
    wrong = ((query_lens > 0) & (common.seq_lens_cpu[num_decodes:] == 0)).nonzero()
    if wrong.numel():
        check(False, "seq_lens", "padding rows among the decodes only",
              f"length 0 at request {num_decodes + int(wrong[0])}")  # fmt: skip


def check_chunking(workspace_tokens: int, unit: int) -> None:
    """Check that a workspace has at least `unit` tokens, the smallest chunk (`context_unit`)."""
    check_int("workspace_tokens", workspace_tokens, unit, f"at least one unit of {unit} tokens")


def check_threshold(decode_threshold: int, query_len_support: QueryLenSupport) -> None:
    """Check that the decode kernel supports `decode_threshold` query tokens of a request."""
    check_int("decode_threshold", decode_threshold, 1, "at least 1")
    check_type("query_len_support", query_len_support, QueryLenSupport)
    single = query_len_support is QueryLenSupport.SINGLE_ONLY
    check(decode_threshold == 1 or not single, "decode_threshold", "1 with SINGLE_ONLY", decode_threshold)


def check_common_prefix(common: CommonAttentionMetadata, common_prefix_len: int, num_decodes: int) -> None:
    """Check that the context of every decode has at least `common_prefix_len` tokens. Padding rows are ignored."""
    contexts, lengths = common.num_computed_tokens_cpu[:num_decodes], common.seq_lens_cpu[:num_decodes]
    wrong = ((contexts < common_prefix_len) & (lengths > 0)).nonzero()
    if wrong.numel():
        request = int(wrong[0])
        check(False, "common_prefix_len", f"at most the context {int(contexts[request])} of request {request}",
              common_prefix_len)  # fmt: skip


def check_batch_size(common: CommonAttentionMetadata, max_num_seqs: int, max_model_len: int) -> None:
    """Check that a batch has at most `max_num_seqs` requests, and a request at most `max_model_len` tokens.

    If `seq_lens_cpu` is None, the check uses the upper bounds of the lengths.
    """
    check_common(common, host_lens=False)
    requests = common.num_reqs
    check(requests <= max_num_seqs, "common", f"at most {max_num_seqs} requests", requests)
    lens = common.seq_lens_cpu if has_host_lens(common) else common.seq_lens_cpu_upper_bound
    if requests and lens is not None and int(lens.max()) > max_model_len:
        request = int(lens.argmax())
        name = "common" if has_host_lens(common) else "common.seq_lens_cpu_upper_bound"
        check(False, name, f"at most {max_model_len} tokens a request", f"{int(lens[request])} at request {request}")


def check_batch_block_size(common: CommonAttentionMetadata, block_size: int) -> None:
    """Check that the slots of a batch were computed for `block_size`, if `common.block_size` is not None."""
    check_type("common", common, CommonAttentionMetadata)
    if common.block_size is not None:
        check_int("common.block_size", common.block_size, 1, "a positive int or None")
    check(common.block_size in (None, block_size), "common.block_size", f"{block_size}, the block size of the plan",
          common.block_size)  # fmt: skip


def check_table_width(common: CommonAttentionMetadata, block_size: int) -> None:
    """Check that the block table has a column for every block of every request.

    If `seq_lens_cpu` is None, the lengths are not checked. Kernels then read a request that is too long only up to the
    end of the block table.
    """
    check_common(common, host_lens=False)
    check_int("block_size", block_size)
    if not has_host_lens(common):
        return
    width = common.block_table.shape[1]
    longest = int(common.seq_lens_cpu.max()) if common.num_reqs else 0
    check(longest <= common.max_seq_len, "common.max_seq_len", f"at least the longest request, {longest}",
          common.max_seq_len)  # fmt: skip
    if longest > width * block_size:
        request = int((common.seq_lens_cpu > width * block_size).nonzero()[0])
        needed = -(-int(common.seq_lens_cpu[request]) // block_size)
        check(False, "block_table", f"at least {needed} columns for request {request}", width)
