"""Flash attention (arXiv 2307.08691) over packed requests of different lengths, for any GPU.

"Packed" means that the tokens of all requests follow each other in one tensor, without padding. One program attends
BLOCK_M queries of one head and one request, BLOCK_N keys at a time. The number of columns of a Triton tile must be a
power of two, so the scores are the sum of up to three products:

- the product with the first columns of the head's own part of the key (`k_nope`);
- if the width of `k_nope` is not a power of two (192 = 128 + 64), the product with the remaining columns of `k_nope`;
- the product with the rope part of the key (`k_pe`), which all heads share.
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...backends import launch
from ..descriptors import box_descriptor
from ..device import device_facts, device_of
from ..integers import cdiv
from .attention_sizes import MOST_QUERIES, launch_sizes

LOG2_E = 1.4426950408889634


class Strides(NamedTuple):
    """Strides in elements; `k_pe` has no head stride, because all heads share it."""

    q_token: Any
    q_head: Any
    q_column: Any
    k_token: Any
    k_head: Any
    k_column: Any
    k_pe_token: Any
    k_pe_column: Any
    v_token: Any
    v_head: Any
    v_column: Any
    out_token: Any
    out_head: Any
    out_column: Any


@triton.jit
@no_type_check
def _offset(cu_seqlens, request, limit):
    """Return the first token of a request, clamped to [0, limit], so that a wrong offset stays inside the tensors."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + request), 0), limit)


@triton.jit
@no_type_check
def _find_request(cu_seqlens_q, num_requests, num_tokens, tile, BLOCK_M: tl.constexpr):
    """Return the request that a tile belongs to, and the number of the tile within this request.

    A tile is BLOCK_M queries of one request. The first tile of request b has the number cu_seqlens_q[b] // BLOCK_M + b.
    With these numbers, a request gets the tiles that its queries fill, and sometimes one more tile, which stays empty.
    The numbers increase with b, so a bisection finds the last request whose first tile has a number of at most `tile`.
    """
    low = 0
    high = num_requests - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _offset(cu_seqlens_q, middle, num_tokens) // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low, tile - (_offset(cu_seqlens_q, low, num_tokens) // BLOCK_M + low)


@triton.jit
@no_type_check
def _load_keys(
    source, row, head, stride_row, stride_head, stride_column, key_end,
    FROM: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr, SHARED: tl.constexpr, MASKED: tl.constexpr,
    VALUES: tl.constexpr = False,
):  # fmt: skip
    """Load a tile [BLOCK_N, COLUMNS] of keys or values, from row `row` and column FROM on; columns past WIDTH become 0.

    SHARED means that `source` has no head dim. With MASKED, rows from `key_end` on may belong to another request. A
    tile of keys may keep these rows, because their scores are masked. A tile of values (VALUES) needs zeros in these
    rows: their probabilities are 0, but 0 times NaN is NaN.
    """
    rows = row + tl.arange(0, BLOCK_N)
    if USE_TMA:
        tile = source.load([row, FROM]) if SHARED else source.load([row, head, FROM]).reshape(BLOCK_N, COLUMNS)
        if MASKED and VALUES:
            tile = tl.where(rows[:, None] < key_end, tile, 0.0)
    else:
        columns = FROM + tl.arange(0, COLUMNS)
        base = source + row.to(tl.int64) * stride_row + head.to(tl.int64) * stride_head
        offsets = (
            tl.arange(0, BLOCK_N)[:, None].to(tl.int64) * stride_row + columns[None, :].to(tl.int64) * stride_column
        )
        inside = (columns < WIDTH)[None, :]
        if MASKED:
            inside = inside & (rows[:, None] < key_end)
        tile = tl.load(base + offsets, mask=inside, other=0.0)
    return tile


class SoftmaxState(NamedTuple):
    """State of the online softmax of BLOCK_M rows.

    Attributes:
        weighted: [BLOCK_M, VALUE], sum of exp2(score - largest) * value, not normalised.
        total: [BLOCK_M], sum of exp2(score - largest).
        largest: [BLOCK_M], largest score so far. Scores are multiplied by log2(e), so that exp2 can replace exp.
    """

    weighted: Any
    total: Any
    largest: Any


@triton.jit
@no_type_check
def _attend_keys(
    state, q_first, q_second, q_pe, k_nope, k_rest, k_pe, v, head, last_seen, first, end,
    key_start, key_end, scale, strides, c, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend the keys [first, end) of a request, BLOCK_N at a time.

    MASKED is False if every row sees all of these keys; the loop then applies no mask.
    """
    values, total, largest = state.weighted, state.total, state.largest
    for start in tl.range(first, end, c.BLOCK_N):
        row = key_start + start
        k = _load_keys(k_nope, row, head, strides.k_token, strides.k_head, strides.k_column, key_end,
                       0, c.FIRST, c.P, c.BLOCK_N, c.USE_TMA, False, MASKED)  # fmt: skip
        scores = tl.dot(q_first, k.T, input_precision="ieee")  # [BLOCK_M, c.BLOCK_N]
        if c.SECOND:
            k = _load_keys(k_rest, row, head, strides.k_token, strides.k_head, strides.k_column, key_end,
                           c.FIRST, c.SECOND, c.P, c.BLOCK_N, c.USE_TMA, False, MASKED)  # fmt: skip
            scores = tl.dot(q_second, k.T, scores, input_precision="ieee")
        if c.ROPE:
            k = _load_keys(k_pe, row, head, strides.k_pe_token, 0, strides.k_pe_column, key_end,
                           0, c.ROPE, c.R, c.BLOCK_N, c.USE_TMA, True, MASKED)  # fmt: skip
            scores = tl.dot(q_pe, k.T, scores, input_precision="ieee")
        if MASKED:
            visible = start + tl.arange(0, c.BLOCK_N)[None, :] <= last_seen[:, None]
            scores = tl.where(visible, scores * scale, -float("inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            # in a row without keys so far, subtract 0, because -inf - (-inf) is NaN
            shift = tl.where(new_largest == -float("inf"), 0.0, new_largest)
            weights = tl.math.exp2(scores - shift[:, None])
        else:
            new_largest = tl.maximum(largest, tl.max(scores, 1) * scale)
            shift = new_largest
            weights = tl.math.exp2(scores * scale - shift[:, None])
        decay = tl.math.exp2(largest - shift)
        total = total * decay + tl.sum(weights, 1)
        values = values * decay[:, None]
        tile = _load_keys(v, row, head, strides.v_token, strides.v_head, strides.v_column, key_end,
                          0, c.VALUE, c.V, c.BLOCK_N, c.USE_TMA, False, MASKED, True)  # fmt: skip
        values = tl.dot(weights.to(tile.dtype), tile, values, input_precision="ieee")
        largest = new_largest
    return SoftmaxState(values, total, largest)


# `do_not_specialize`: one compiled kernel serves all lengths, with and without a causal mask
@triton.jit(
    do_not_specialize=["num_tokens", "num_keys", "num_requests", "num_tiles", "causal"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k"],
)
@no_type_check
def _flash_attn_varlen_kernel(
    q, k_nope, k_rest, k_pe, v, cu_seqlens_q, cu_seqlens_k, out, lse,
    num_tokens, num_keys, num_requests, num_tiles, softmax_scale, causal,
    strides, BLOCK_M: tl.constexpr, LOG2_E: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Attend one tile of BLOCK_M queries of one request and one head; store no LSE if `lse` is None.

    For a request with Sq queries and S keys, all programs together do 2 Sq S N (P + R + V) floating-point operations.
    With a causal mask and Sq = S, they do about half of these operations.

    Programs that run at the same time have the same head and read the same keys, mostly from the L2 cache. The last
    tile of a request starts first, because this tile sees the most keys under a causal mask.
    """
    # 1. find the head, the request and the rows of this program
    program = tl.program_id(0)
    head = program // num_tiles
    request, tile = _find_request(
        cu_seqlens_q, num_requests, num_tokens, num_tiles - 1 - program % num_tiles, BLOCK_M
    )  # fmt: skip
    query_start = _offset(cu_seqlens_q, request, num_tokens)
    query_end = tl.maximum(_offset(cu_seqlens_q, request + 1, num_tokens), query_start)
    key_start = _offset(cu_seqlens_k, request, num_keys)
    key_end = tl.maximum(_offset(cu_seqlens_k, request + 1, num_keys), key_start)
    query_len = query_end - query_start
    key_len = key_end - key_start
    first_row = tile * BLOCK_M
    if (first_row >= query_len) | (tile < 0):
        return

    # 2. load the queries; they stay unscaled, because the kernel multiplies the scores by the softmax scale
    rows = first_row + tl.arange(0, BLOCK_M)
    inside = (rows < query_len)[:, None]
    q_rows = q + head.to(tl.int64) * strides.q_head + (query_start + rows)[:, None].to(tl.int64) * strides.q_token
    columns = tl.arange(0, c.FIRST)[None, :].to(tl.int64)
    q_first = tl.load(q_rows + columns * strides.q_column, mask=inside & (columns < c.P), other=0.0)
    q_second = q_first
    q_pe = q_first
    if c.SECOND:
        columns = c.FIRST + tl.arange(0, c.SECOND)[None, :].to(tl.int64)
        q_second = tl.load(q_rows + columns * strides.q_column, mask=inside & (columns < c.P), other=0.0)
    if c.ROPE:
        columns = tl.arange(0, c.ROPE)[None, :].to(tl.int64)
        q_pe = tl.load(q_rows + (c.P + columns) * strides.q_column, mask=inside & (columns < c.R), other=0.0)
    scale = softmax_scale * LOG2_E

    # 3. attend the keys: first the tiles in which every row sees every key, then the tiles that need a mask
    seen = key_len - causal * query_len  # row i sees the keys up to index `seen` + i
    last_seen = tl.minimum(seen + rows, key_len - 1)
    whole = tl.maximum(tl.minimum(seen + first_row + 1, key_len), 0) // c.BLOCK_N * c.BLOCK_N
    end = tl.minimum(seen + first_row + BLOCK_M, key_len)
    if softmax_scale < 0:  # without a mask, `_attend_keys` would subtract the smallest scaled score, not the largest
        whole = 0
    VALUE: tl.constexpr = c.VALUE  # `tl.zeros` accepts no field of a named tuple in its shape
    state = SoftmaxState(
        tl.zeros([BLOCK_M, VALUE], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.full([BLOCK_M], -float("inf"), tl.float32),
    )
    state = _attend_keys(
        state, q_first, q_second, q_pe, k_nope, k_rest, k_pe, v, head, last_seen, 0, whole,
        key_start, key_end, scale, strides, c, False,
    )  # fmt: skip
    state = _attend_keys(
        state, q_first, q_second, q_pe, k_nope, k_rest, k_pe, v, head, last_seen, whole, end,
        key_start, key_end, scale, strides, c, True,
    )  # fmt: skip

    # 4. normalise; a row without keys gets output 0 and LSE -inf
    empty = state.total == 0
    total = tl.where(empty, 1.0, state.total)
    values = state.weighted / total[:, None]
    tokens = (query_start + rows).to(tl.int64)
    columns = tl.arange(0, c.VALUE)[None, :]
    out_rows = out + head.to(tl.int64) * strides.out_head + tokens[:, None] * strides.out_token
    out_columns = columns.to(tl.int64) * strides.out_column
    tl.store(out_rows + out_columns, values.to(out.dtype.element_ty), mask=inside & (columns < c.V))
    if lse is not None:
        natural = (state.largest + tl.math.log2(total)) / LOG2_E  # -inf in a row without keys, where `total` is 1
        tl.store(lse + head.to(tl.int64) * num_tokens + tokens, natural, mask=rows < query_len)


def _descriptors_of(sources: tuple[Tensor, ...], boxes: tuple[tuple[int, ...], ...]) -> list[TensorDescriptor] | None:
    """Return the TMA descriptors of keys and values; None if TMA cannot read one of them."""
    given = zip(sources, boxes, strict=True)
    made = [box_descriptor(x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), box) for x, box in given]
    return None if None in made else made


def flash_attn_varlen(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor | None,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of packed requests of different lengths.

    Args:
        q: [T, N, P + R], any strides.
        k_nope: [S, N, P], part of the keys without rope, any strides; [S, N, P + R], the whole keys, if `k_pe` is None.
        k_pe: [S, R], rotated part of the keys, which all heads share, any strides; or None.
        v: [S, N, V], any strides.
        cu_seqlens_q: [B + 1], first query token of each request.
        cu_seqlens_k: [B + 1], first key of each request.
        max_seqlen_q: not used by this backend.
        max_seqlen_k: not used by this backend.
        softmax_scale: factor of the scores.
        causal: if True, a request's last query sees all keys, and each query sees one key less than the next query.
        out_dtype: dtype of the output.
        out: [T, N, V] in `out_dtype`, any strides, written in place; None allocates `out` and `lse`.
        lse: [N, T], contiguous, written in place. If `out` is given and `lse` is None, no LSE is stored.
        batch_invariant: if True, the number of query tokens of the batch does not choose the sizes of the tiles.

    Returns:
        out [T, N, V], and lse [N, T] or None.

    Raises:
        UnsupportedConfiguration: the heads are too wide for the device's shared memory.
    """
    tokens, heads, _ = q.shape
    keys, _, nope = k_nope.shape
    value, requests = v.shape[2], cu_seqlens_q.shape[0] - 1
    if out is None:
        out = torch.empty(tokens, heads, value, dtype=out_dtype, device=q.device)
        lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    if tokens == 0 or heads == 0 or requests <= 0:
        return out, lse
    rope = 0 if k_pe is None else k_pe.shape[1]
    shared = k_pe if rope else k_nope[:, 0]  # without a rope part, the kernel ignores `shared`
    facts = device_facts(q.device)
    few = not batch_invariant and cdiv(tokens, MOST_QUERIES) * heads < facts.processors
    sizes = launch_sizes(q.dtype, facts, nope, rope, value, few)
    blocks, constants = sizes.blocks, sizes.constants
    sources, shared_strides = (k_nope, k_nope, shared, v), shared.stride()
    described = _descriptors_of(sources, sizes.boxes) if constants.USE_TMA else None
    constants, sources = constants._replace(USE_TMA=described is not None), described or sources
    num_tiles = tokens // blocks.block_m + requests
    with device_of(q):
        launch(
            _flash_attn_varlen_kernel, (num_tiles * heads,),
            q, *sources, cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), out, lse,
            tokens, keys, requests, num_tiles, softmax_scale, int(causal),
            Strides(*q.stride(), *k_nope.stride(), *shared_strides, *v.stride(), *out.stride()),
            BLOCK_M=blocks.block_m, LOG2_E=LOG2_E,
            c=constants, num_warps=blocks.num_warps, num_stages=blocks.num_stages,
        )  # fmt: skip
    return out, lse
