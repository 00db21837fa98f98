"""A consumer (four warps): scores, softmax and weighted sums of 64 rows of a query tile, one key tile after another.

The products of one step overlap with the softmax of the next step. While the matrix unit multiplies the probabilities
of key tile i by its values, the warps already compute the softmax of key tile i + 1:

    issue S(i+1) = Q K(i+1)^T;  issue O += P(i) V(i);  wait for S(i+1);  softmax of S(i+1);  wait for O;  rescale O

Key tiles come from the last to the first. Only the first steps of an item then need a mask: the tiles that some row
does not see completely.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..common.arrivals import arrive
from ..common.epilogue import LEAST, shift_of
from .epilogue import write_partial_rows, write_rows
from .records import ROWS, SoftmaxState
from .work_items import read_item


@gluon.jit
@no_type_check
def _await_keys(count, wanted, ctx, c):
    """If `wanted`, wait until the `count`-th key tile of this program is in shared memory."""
    stage, lap = count % c.STAGES, count // c.STAGES
    mbarrier.wait(ctx.bars.k_full.index(stage), lap & 1, pred=wanted)


@gluon.jit
@no_type_check
def _issue_scores(count, ctx, c):
    """Issue the products of the scores of the `count`-th key tile of this program; return the accumulator."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.KEYS, 16])
    FIRST: gl.constexpr = gl.NVMMASharedLayout(128 if c.FIRST >= 64 else 2 * c.FIRST, 16)
    SECOND: gl.constexpr = gl.NVMMASharedLayout(128 if c.SECOND >= 64 else 2 * c.SECOND, 16)
    KEYS: gl.constexpr = c.KEYS  # `gl.zeros` accepts no field of a named tuple
    shared = ctx.shared
    dtype: gl.constexpr = shared.v.dtype
    stage = count % c.STAGES
    # always 0; with a literal 0, the compiler would keep the descriptors of all buffers in registers, which would spill
    zero = count >> 30
    queries = shared.q_first.index(c.CONSUMER + zero)._reinterpret(dtype, [ROWS, c.FIRST], FIRST)
    keys = shared.k_first.index(stage)._reinterpret(dtype, [c.KEYS, c.FIRST], FIRST)
    scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(queries, keys.permute([1, 0]), scores, use_acc=False, is_async=True)
    if c.SECOND > 0:
        queries = shared.q_second.index(c.CONSUMER + zero)._reinterpret(dtype, [ROWS, c.SECOND], SECOND)
        keys = shared.k_second.index(stage)._reinterpret(dtype, [c.KEYS, c.SECOND], SECOND)
        scores = warpgroup_mma(queries, keys.permute([1, 0]), scores, is_async=True)
    return scores


@gluon.jit
@no_type_check
def _issue_weighted(state, count, ctx, c):
    """Wait for the values of the `count`-th key tile; issue their product with the probabilities of the state."""
    shared, bars = ctx.shared, ctx.bars
    stage, lap = count % c.STAGES, count // c.STAGES
    mbarrier.wait(bars.v_full.index(stage), lap & 1)
    tile = shared.v.index(stage)._reinterpret(shared.v.dtype, [c.KEYS, c.VALUE], gl.NVMMASharedLayout(128, 16))
    VALUES: gl.constexpr = state.weighted.type.layout
    probabilities = _operand_of(state.packed, shared.v.dtype, VALUES)
    return warpgroup_mma(probabilities, tile, state.weighted, is_async=True), probabilities


@gluon.jit
@no_type_check
def _masked(scores, tile, visible, KEYS: gl.constexpr):
    """Replace the scores of the keys that a row does not see by -inf; `visible` counts the keys that each row sees.

    A key behind the end of the request may hold NaN. The function selects and does not add, so that NaN disappears.
    """
    key = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, scores.type.layout))
    return gl.where(key[None, :] < visible[:, None], scores, float("-inf"))


@gluon.jit
@no_type_check
def _halves(x):
    """Return the even and the odd columns of a tensor [ROWS, columns]; each thread keeps its numbers."""
    return gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))


@gluon.jit
@no_type_check
def _largest_of(scores):
    """Return the largest score of each row.

    The first step takes the larger one of each pair of columns, so that a thread does not compare its scores one after
    another.
    """
    even, odd = _halves(scores)
    return gl.convert_layout(gl.max(gl.maximum(even, odd), 1), gl.SliceLayout(1, scores.type.layout))


@gluon.jit
@no_type_check
def _total_of(weights):
    """Return the sum of the probabilities of each row; see `_largest_of`."""
    even, odd = _halves(weights)
    return gl.convert_layout(gl.sum(even + odd, 1), gl.SliceLayout(1, weights.type.layout))


@gluon.jit
@no_type_check
def _packed(weights, dtype: gl.constexpr):
    """Round probabilities [ROWS, KEYS] to `dtype` and return them as int32 [ROWS, KEYS // 2], two in each element.

    The main loop keeps this form from one step to the next. The compiler would keep 16-bit numbers one by one, and
    would split and join each pair in every step.
    """
    CONVERT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    even, odd = _halves(weights)
    return gl.inline_asm_elementwise(CONVERT, "=r,r,r", [even, odd], gl.int32, is_pure=True, pack=1)


@gluon.jit
@no_type_check
def _operand_of(packed, dtype: gl.constexpr, VALUES: gl.constexpr):
    """Return packed probabilities as left operand [ROWS, KEYS] of a matrix product."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [packed], (gl.int16, gl.int16), is_pure=True, pack=1
    )
    both = gl.join(even, odd).to(dtype, bitcast=True).reshape([packed.shape[0], 2 * packed.shape[1]])
    return gl.convert_layout(both, gl.DotOperandLayout(0, VALUES, 2))


@gluon.jit
@no_type_check
def _begin(tile, visible, count, more, ctx, c):
    """Compute scores and softmax of the first key tile of an item; return the state, in which no value is added yet.

    The tile is masked in every case. A row that sees none of its keys keeps the largest score `LEAST`.
    """
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.VALUE, 16])
    VALUE: gl.constexpr = c.VALUE
    scale_log2 = ctx.sizes.scale_log2
    _await_keys(count, True, ctx, c)
    scores = warpgroup_mma_wait(0, deps=[_issue_scores(count, ctx, c)])
    arrive(ctx.bars.k_empty.index(count % c.STAGES))
    scores = _masked(scores, tile, visible, c.KEYS)
    largest = gl.maximum(_largest_of(scores), LEAST)
    weights = gl.exp2(scores * scale_log2 - shift_of(largest, scale_log2)[:, None])
    weighted = gl.zeros([ROWS, VALUE], gl.float32, VALUES)
    _await_keys(count + 1, more, ctx, c)
    return SoftmaxState(largest, _total_of(weights), weighted, _packed(weights, ctx.shared.v.dtype))


@gluon.jit
@no_type_check
def _attend(state, tile, visible, count, more, ctx, c, MASKED: gl.constexpr):
    """Compute scores and softmax of key tile `tile`, and add the values of the preceding step; return the new state.

    Args:
        state: state after the preceding step.
        tile: index of the key tile in its request.
        visible: number of keys that each row sees.
        count: number of key tiles that this program has processed before this step.
        more: whether the item has another key tile, for which the function waits at its end.
        ctx: `Context`.
        c: `Constants`.
        MASKED: whether some row may not see all keys of the tile.
    """
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.VALUE, 16])
    bars, scale_log2 = ctx.bars, ctx.sizes.scale_log2
    scores = _issue_scores(count, ctx, c)
    weighted, probabilities = _issue_weighted(state, count - 1, ctx, c)
    scores = warpgroup_mma_wait(1, deps=[scores])  # the product with the values still runs
    arrive(bars.k_empty.index(count % c.STAGES))
    if MASKED:
        scores = _masked(scores, tile, visible, c.KEYS)
    largest = gl.maximum(state.largest, _largest_of(scores))
    shift = shift_of(largest, scale_log2) if MASKED else largest * scale_log2
    weights = gl.exp2(scores * scale_log2 - shift[:, None])
    decay = gl.exp2((state.largest - largest) * scale_log2)
    total = state.total * decay + _total_of(weights)
    packed = _packed(weights, ctx.shared.v.dtype)
    # Without this wait, which has a branch, the compiler would wait for the product with the values before the softmax.
    _await_keys(count + 1, more, ctx, c)
    weighted, _ = warpgroup_mma_wait(0, deps=[weighted, probabilities])
    arrive(bars.v_empty.index((count - 1) % c.STAGES))
    weighted = weighted * gl.convert_layout(decay, gl.SliceLayout(1, VALUES))[:, None]
    return SoftmaxState(largest, total, weighted, packed)


@gluon.jit
@no_type_check
def consume(ctx, c):
    """Run a consumer: attend the rows [64 * c.CONSUMER, 64 * c.CONSUMER + 64) of all query tiles of this program."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.KEYS, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.VALUE, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    VALUE: gl.constexpr = c.VALUE
    bars, items = ctx.bars, ctx.shared.items
    number = 0  # work items read so far
    loads = 0  # query tiles multiplied so far
    count = 0  # key tiles processed so far
    mbarrier.wait(bars.item_written, 0)
    item = read_item(items, 0, c)
    while item.steps >= 0:
        arrive(bars.item_begun)
        steps, end = item.steps, item.end
        first_row = c.CONSUMER * ROWS
        offset = gl.where(ctx.sizes.causal != 0, 1, 0)
        row = gl.arange(0, ROWS, ROW)
        visible = gl.minimum(item.visible + (first_row + row) * offset, item.keys)
        # key tiles that all rows of this consumer see completely
        whole = gl.maximum(gl.minimum(item.visible + first_row * offset, item.keys), 0) // c.KEYS
        largest = gl.full([ROWS], LEAST, gl.float32, ROW)
        total = gl.zeros([ROWS], gl.float32, ROW)
        weighted = gl.zeros([ROWS, VALUE], gl.float32, VALUES)
        if steps > 0:
            mbarrier.wait(bars.q_full.index(c.CONSUMER), loads & 1)
            state = _begin(end - 1, visible, count, steps > 1, ctx, c)
            masked_steps = gl.minimum(gl.maximum(end - whole, 1), steps)
            for step in range(1, masked_steps):
                state = _attend(state, end - 1 - step, visible, count + step, step + 1 < steps, ctx, c, True)
            for step in range(masked_steps, steps):
                state = _attend(state, end - 1 - step, visible, count + step, step + 1 < steps, ctx, c, False)
            count += steps
            arrive(bars.q_empty.index(c.CONSUMER))
            loads += 1
            weighted, probabilities = _issue_weighted(state, count - 1, ctx, c)
            weighted, _ = warpgroup_mma_wait(0, deps=[weighted, probabilities])
            arrive(bars.v_empty.index((count - 1) % c.STAGES))
            largest, total = state.largest, state.total
        item = read_item(items, number, c)
        if c.SPLIT:
            write_partial_rows(largest, total, weighted, item, ctx, c)
        else:
            write_rows(largest, total, weighted, item, ctx, c)
        number += 1
        mbarrier.wait(bars.item_written, number & 1)
        item = read_item(items, number, c)
