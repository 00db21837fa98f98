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
from .work_items import read_item, read_steps


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
def _issue_first_scores(steps, loads, count, ctx, c):
    """Wait for the queries and the first key tile of an item of `steps` key tiles; issue the products of their scores.

    If the item has no key tile, the function waits for nothing, and the scores have no meaning.
    """
    mbarrier.wait(ctx.bars.q_full.index(c.CONSUMER), loads & 1, pred=steps > 0)
    _await_keys(count, steps > 0, ctx, c)
    return _issue_scores(count, ctx, c)


@gluon.jit
@no_type_check
def _await_first_scores(scores, steps, count, ctx, c):
    """Wait for the result of `_issue_first_scores`, and release the key tile of an item of `steps` key tiles."""
    scores = warpgroup_mma_wait(0, deps=[scores])
    arrive(ctx.bars.k_empty.index(count % c.STAGES), pred=steps > 0)
    arrive(ctx.bars.q_empty.index(c.CONSUMER), pred=steps == 1)
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
    key = gl.arange(0, KEYS, gl.SliceLayout(0, scores.type.layout))  # in the tile
    return gl.where(key[None, :] < (visible - tile * KEYS)[:, None], scores, float("-inf"))


@gluon.jit
@no_type_check
def _packed(weights, dtype: gl.constexpr):
    """Round probabilities [ROWS, KEYS] to `dtype` and return them as int32 [ROWS, KEYS // 2], two in each element.

    The main loop keeps this form from one step to the next. The compiler would keep 16-bit numbers one by one, and
    would split and join each pair in every step.
    """
    CONVERT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    even, odd = gl.split(weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]))
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
def _begin(scores, tile, visible, count, more, ctx, c):
    """Compute the softmax of the first key tile of an item; return the state, in which no value is added yet.

    The tile is masked in every case. A row that sees none of its keys keeps the largest score `LEAST`.
    """
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.VALUE, 16])
    VALUE: gl.constexpr = c.VALUE
    scale_log2 = ctx.sizes.scale_log2
    scores = _masked(scores, tile, visible, c.KEYS)
    largest = gl.maximum(gl.max(scores, 1), LEAST)
    weights = gl.exp2(scores * scale_log2 - shift_of(largest, scale_log2)[:, None])
    weighted = gl.zeros([ROWS, VALUE], gl.float32, VALUES)
    _await_keys(count + 1, more, ctx, c)
    return SoftmaxState(largest, gl.sum(weights, 1), weighted, _packed(weights, ctx.shared.v.dtype))


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
    arrive(bars.q_empty.index(c.CONSUMER), pred=more == 0)
    if MASKED:
        scores = _masked(scores, tile, visible, c.KEYS)
    largest = gl.maximum(state.largest, gl.max(scores, 1))
    shift = shift_of(largest, scale_log2) if MASKED else largest * scale_log2
    weights = gl.exp2(scores * scale_log2 - shift[:, None])
    decay = gl.exp2((state.largest - largest) * scale_log2)
    total = state.total * decay + gl.sum(weights, 1)
    packed = _packed(weights, ctx.shared.v.dtype)
    # Without this wait, which has a branch, the compiler would wait for the product with the values before the softmax.
    _await_keys(count + 1, more, ctx, c)
    weighted, _ = warpgroup_mma_wait(0, deps=[weighted, probabilities])
    arrive(bars.v_empty.index((count - 1) % c.STAGES))
    weighted = weighted * gl.convert_layout(decay, gl.SliceLayout(1, VALUES))[:, None]
    return SoftmaxState(largest, total, weighted, packed)


@gluon.jit
@no_type_check
def _attend_item(item, scores, count, ctx, c):
    """Attend all key tiles of an item with key tiles, up to the softmax of the last tile; return the state."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.KEYS, 16])
    steps, end = item.steps, item.end
    first_row = c.CONSUMER * ROWS
    offset = gl.where(ctx.sizes.causal != 0, 1, 0)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    visible = gl.minimum(item.visible + (first_row + row) * offset, item.keys)
    # key tiles that all rows of this consumer see completely
    whole = gl.maximum(gl.minimum(item.visible + first_row * offset, item.keys), 0) // c.KEYS
    state = _begin(scores, end - 1, visible, count, steps > 1, ctx, c)
    masked_steps = gl.minimum(gl.maximum(end - whole, 1), steps)
    for step in range(1, masked_steps):
        state = _attend(state, end - 1 - step, visible, count + step, step + 1 < steps, ctx, c, True)
    for step in range(masked_steps, steps):
        state = _attend(state, end - 1 - step, visible, count + step, step + 1 < steps, ctx, c, False)
    return state


@gluon.jit
@no_type_check
def _write(largest, total, weighted, item, ctx, c):
    """Store the results of an item: its outputs and LSEs, or its partial outputs and partial LSEs."""
    if c.SPLIT:
        write_partial_rows(largest, total, weighted, item, ctx, c)
    else:
        write_rows(largest, total, weighted, item, ctx, c)


@gluon.jit
@no_type_check
def consume(ctx, c):
    """Run a consumer: attend the rows [64 * c.CONSUMER, 64 * c.CONSUMER + 64) of all query tiles of this program.

    The first scores of the next item are computed while the results of the current item are stored.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.KEYS, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.VALUE, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    VALUE: gl.constexpr = c.VALUE
    bars, items = ctx.bars, ctx.shared.items
    number = 0  # work items read so far
    loads = 0  # query tiles multiplied so far
    count = 0  # key tiles processed so far
    mbarrier.wait(bars.item_written, 0)
    steps = read_steps(items, 0, c)
    scores = _await_first_scores(_issue_first_scores(steps, loads, count, ctx, c), steps, count, ctx, c)
    while steps >= 0:
        arrive(bars.item_begun)
        if steps > 0:
            state = _attend_item(read_item(items, number, c), scores, count, ctx, c)
            count += steps
            loads += 1
            weighted, probabilities = _issue_weighted(state, count - 1, ctx, c)
            mbarrier.wait(bars.item_written, (number + 1) & 1)
            steps = read_steps(items, number + 1, c)
            scores = _issue_first_scores(steps, loads, count, ctx, c)
            weighted, _ = warpgroup_mma_wait(1, deps=[weighted, probabilities])
            arrive(bars.v_empty.index((count - 1) % c.STAGES))
            _write(state.largest, state.total, weighted, read_item(items, number, c), ctx, c)
            scores = _await_first_scores(scores, steps, count, ctx, c)
        else:
            nothing = gl.zeros([ROWS], gl.float32, ROW)
            weighted = gl.zeros([ROWS, VALUE], gl.float32, VALUES)
            _write(nothing + LEAST, nothing, weighted, read_item(items, number, c), ctx, c)
            mbarrier.wait(bars.item_written, (number + 1) & 1)
            steps = read_steps(items, number + 1, c)
            scores = _issue_first_scores(steps, loads, count, ctx, c)
            scores = _await_first_scores(scores, steps, count, ctx, c)
        number += 1
