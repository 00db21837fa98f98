"""The prefill kernel: a producer (one warp) and two consumers (four warps each) attend one query tile after another."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .consumer import consume
from .producer import produce
from .records import CONSUMERS, ROWS, Bars, Context, Outputs, Shared, Sizes, Tensors, of_consumer
from .work_items import ITEMS_HELD, fields_of


@gluon.jit(
    do_not_specialize=[
        "num_tokens", "num_keys", "num_requests", "num_heads", "num_candidates", "group_heads", "num_splits", "causal",
    ],
    do_not_specialize_on_alignment=["cu_seqlens_q", "cu_seqlens_k", "taken", "lse"],
)  # fmt: skip
@no_type_check
def _varlen_kernel(
    q_first, q_second, k_first, k_second, v, cu_seqlens_q, cu_seqlens_k, taken, out, lse, out_strides,
    num_tokens, num_keys, num_requests, num_heads, num_candidates, group_heads, num_splits, causal, scale_log2,
    c: gl.constexpr,
):  # fmt: skip
    """Attend all query tiles of all requests and heads.

    Args:
        q_first: TMA descriptor of the queries, as [N, T, columns], for boxes of 64 tokens and FIRST columns.
        q_second: the same for SECOND columns; `q_first` again if SECOND is 0.
        k_first: TMA descriptor of the keys, as [N, S, columns], for boxes of KEYS keys and FIRST columns.
        k_second: TMA descriptor for boxes of KEYS keys and SECOND columns: of the shared part [1, S, SECOND] if
            SHARED, otherwise of the same tensor as `k_first`; `k_first` again if SECOND is 0.
        v: TMA descriptor of the values, as [N, S, VALUE], for boxes of KEYS keys.
        cu_seqlens_q: [B + 1], first query token of each request.
        cu_seqlens_k: [B + 1], first key of each request.
        taken: see `Context`.
        out: see `Outputs`.
        lse: see `Outputs`.
        out_strides: see `Outputs`.
        num_tokens: see `Sizes`.
        num_keys: see `Sizes`.
        num_requests: see `Sizes`.
        num_heads: see `Sizes`.
        num_candidates: see `Sizes`.
        group_heads: see `Sizes`.
        num_splits: see `Sizes`.
        causal: see `Sizes`.
        scale_log2: see `Sizes`.
        c: `Constants`.
    """
    dtype: gl.constexpr = v.dtype
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    STAGES: gl.constexpr = c.STAGES  # `static_range` accepts no field of a named tuple
    FIELDS: gl.constexpr = fields_of(c)
    q_first_memory = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, ROWS, c.FIRST], q_first.layout)
    k_first_memory = gl.allocate_shared_memory(dtype, [STAGES, 1, c.KEYS, c.FIRST], k_first.layout)
    v_memory = gl.allocate_shared_memory(dtype, [STAGES, 1, c.KEYS, c.VALUE], v.layout)
    q_second_memory, k_second_memory = q_first_memory, k_first_memory
    if c.SECOND > 0:
        q_second_memory = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, ROWS, c.SECOND], q_second.layout)
        k_second_memory = gl.allocate_shared_memory(dtype, [STAGES, 1, c.KEYS, c.SECOND], k_second.layout)
    items = gl.allocate_shared_memory(gl.int32, [ITEMS_HELD * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BAR)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BAR)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    tail_loaded = gl.allocate_shared_memory(gl.int64, [1, 1], BAR)
    item_written = gl.allocate_shared_memory(gl.int64, [1], BAR)
    item_begun = gl.allocate_shared_memory(gl.int64, [1], BAR)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), 1)
        mbarrier.init(q_empty.index(i), 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), 1)
        mbarrier.init(k_empty.index(i), CONSUMERS)
        mbarrier.init(v_full.index(i), 1)
        mbarrier.init(v_empty.index(i), CONSUMERS)
    mbarrier.init(tail_loaded.index(0), 1)
    mbarrier.init(item_written, 1)
    mbarrier.init(item_begun, CONSUMERS)
    fence_async_shared()

    sizes = Sizes(
        num_tokens, num_keys, num_requests, num_heads, num_candidates, group_heads, num_splits, causal, scale_log2
    )
    shared = Shared(q_first_memory, q_second_memory, k_first_memory, k_second_memory, v_memory, items)
    bars = Bars(q_full, q_empty, k_full, k_empty, v_full, v_empty, tail_loaded, item_written, item_begun)
    ctx = Context(cu_seqlens_q, cu_seqlens_k, taken, Outputs(out, lse, out_strides), sizes, shared, bars)
    tensors = Tensors(q_first, q_second, k_first, k_second, v)
    gl.warp_specialize(
        [
            (consume, (ctx, c)),
            (consume, (ctx, of_consumer(c, 1))),
            (produce, (tensors, ctx, c)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
