"""Attention of packed keys, which are in no cache: new tokens, encoders, and cross attention before the cache exists.

"Packed" means that the tokens of all requests follow each other in one tensor, without padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference.interfaces import COMPUTE_FORMAT

from ....backends import launch
from ...device import device_facts, device_of
from ...integers import cdiv
from .launch_arguments import box_descriptors, scores_of
from .records import Boxes, KeySource, Outputs, Scores, Sources, Strides
from .row_blocks import find_request, offset_of, rows_from, write_padding, write_rows
from .sizes import PADDING_TOKENS, launch_sizes
from .tiles import attend_tiles, keys_of_rows, load_queries


class PackedMask(NamedTuple):
    """Compile-time constants of the mask of packed keys.

    Attributes:
        CAUSAL: True if a token attends only itself and the tokens before it.
        WINDOW: number of keys of the window, the token itself included; 0 for no window.
        CHUNK: number of positions of an attention chunk; 0 for no chunks.
    """

    CAUSAL: Any
    WINDOW: Any
    CHUNK: Any


@triton.jit
@no_type_check
def _packed_keys(rows, query_start, query_len, key_len, most_queries, most_keys, mask, c):
    """Return the `RowKeys` of a row block whose keys are packed.

    Tokens from `most_queries` on attend no key, and keys from `most_keys` on are not attended. `visible_range` of
    `fast.kernels.gqa_scores` has the same rules in PyTorch.
    """
    index = rows.token - query_start
    position, end = index, index * 0 + key_len
    if mask.CAUSAL:
        position = index + (key_len - query_len)
        end = tl.minimum(position + 1, key_len)
    first = index * 0
    if mask.WINDOW > 0:
        first = tl.maximum(position - (mask.WINDOW - 1), 0)
        end = tl.minimum(end, position + mask.WINDOW)
    if mask.CHUNK > 0:
        first = tl.maximum(first, tl.maximum(position, 0) // mask.CHUNK * mask.CHUNK)
    end = tl.where(index < most_queries, tl.minimum(end, most_keys), 0)
    return keys_of_rows(first, end, position, rows.real, c)


# The parameters of the lists below are in no record, because Triton specialises each field of a record (`..arguments`).
@triton.jit(
    do_not_specialize=["num_tokens", "num_keys", "num_requests", "most_queries", "most_keys", "row_blocks",
                       "num_programs"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "slopes", "sinks"],
)  # fmt: skip
@no_type_check
def _gqa_packed_kernel(
    sources, cu_seqlens_q, cu_seqlens_k, factors, slopes, sinks, outputs, k_boxes, v_boxes,
    num_tokens, num_keys, num_requests, most_queries, most_keys, row_blocks, num_programs, strides,
    PADDING_TOKENS: tl.constexpr, mask: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Attend the packed keys of one request with one row block, or write padding tokens.

    `row_blocks` is the number of row blocks of all requests (`find_request`).
    """
    program = tl.program_id(0)
    if program >= num_programs:
        query_end = offset_of(cu_seqlens_q, num_requests, num_tokens)
        write_padding(program - num_programs, query_end, num_tokens, outputs, strides, c, PADDING_TOKENS)
        return
    kv_head, number = program // row_blocks, row_blocks - 1 - program % row_blocks
    request, first_row = find_request(cu_seqlens_q, num_requests, num_tokens, number, c)
    query_start = offset_of(cu_seqlens_q, request, num_tokens)
    query_end = tl.maximum(offset_of(cu_seqlens_q, request + 1, num_tokens), query_start)
    if (first_row < 0) | (query_start + first_row // c.GROUP >= query_end):
        return
    first_key = offset_of(cu_seqlens_k, request, num_keys)
    key_len = tl.maximum(offset_of(cu_seqlens_k, request + 1, num_keys) - first_key, 0)
    scores = Scores(factors, slopes, sinks, None, None, None)
    rows = rows_from(first_row, query_start, query_end, kv_head, c)
    queries = load_queries(sources.q, rows, scores, strides, c)
    keys = _packed_keys(rows, query_start, query_end - query_start, key_len, most_queries, most_keys, mask, c)
    head = kv_head.to(tl.int64)
    source = KeySource(
        sources.k + head * strides.k_head, sources.v + head * strides.v_head, cu_seqlens_k, 0, 0, first_key, kv_head
    )
    boxes = Boxes(k_boxes, v_boxes)
    state = attend_tiles(queries, keys, source, boxes, 0, tl.cdiv(keys.high, c.TILE), scores, strides, c)
    write_rows(state, rows, outputs, num_tokens, scores, strides, c)


def gqa_varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    attention_type: str,
    sliding_window: int | None,
    attention_chunk_size: int | None,
    soft_cap: float | None,
    alibi_slopes: Sequence[float] | None,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend packed keys with the query tokens of the same request.

    See `fast.kernels.cpu.gqa.gqa_varlen_attention` for the arguments.

    Returns:
        out [T, N, Dh] and lse [N, T]. Tokens behind the last request get output 0 and LSE -inf.

    Raises:
        UnsupportedConfiguration: no tile fits into the device's shared memory.
    """
    tokens, heads, width = q.shape
    keys, kv_heads, _ = k.shape
    requests = cu_seqlens_q.shape[0] - 1
    if out is None:
        out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    if tokens == 0:
        return out, lse
    if requests <= 0:
        return out.zero_(), lse.fill_(-math.inf)
    window = 0 if sliding_window is None or attention_type == "cross" else sliding_window
    mask = PackedMask(attention_type == "decoder", window, attention_chunk_size or 0)
    sizes = launch_sizes(
        heads // kv_heads, kv_heads, width, max(1, min(max_seqlen_q, tokens)), 0,
        mask.WINDOW > 0 or mask.CHUNK > 0, soft_cap is not None, q.dtype, COMPUTE_FORMAT, False,
        device_facts(q.device), False,
    )  # fmt: skip
    row_blocks = tokens * (heads // kv_heads) // sizes.shape.rows + requests
    programs = row_blocks * kv_heads
    strides = Strides(*q.stride(), 0, *k.stride(), 0, *v.stride(), *out.stride())
    k_boxes, v_boxes = box_descriptors(k, v, sizes.constants)
    sizes = sizes._replace(constants=sizes.constants._replace(BULK_COPY=k_boxes is not None))
    scores = scores_of(q, softmax_scale, soft_cap, alibi_slopes, sinks)
    with device_of(q):
        launch(
            _gqa_packed_kernel, (programs + cdiv(tokens, PADDING_TOKENS),),
            Sources(q, k, v), cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(),
            scores.factors, scores.slopes, scores.sinks, Outputs(out, lse, None, None),
            k_boxes, v_boxes, tokens, keys, requests, max_seqlen_q, max_seqlen_k, row_blocks, programs, strides,
            PADDING_TOKENS=PADDING_TOKENS, mask=mask, **sizes.options,
        )  # fmt: skip
    return out, lse
