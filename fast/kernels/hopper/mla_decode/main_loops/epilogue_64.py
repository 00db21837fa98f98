"""What a group of `many_heads` does with what it found: outputs, parts for the merge, or kept for the next split."""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ...common.gluon_versions import partition_barrier
from ...common.loads import LN_2, STAYS, ask_queries, combine_weights, partial_rows_of, rows_at
from .tile_pairs import ROWS, scaled, slice_of_program


@gluon.jit
@no_type_check
def ask(note, asked, queries, sizes, OWN: gl.constexpr, HEADS: gl.constexpr, ROPE: gl.constexpr):
    """Ask for a piece's queries, those of half OWN of the columns, unless they are not wanted."""
    HALF: gl.constexpr = queries[2].shape[2] // 2
    if asked:
        ask_queries(note, queries, sizes, ROWS, HEADS, OWN * HALF, HALF, ROPE if OWN == 1 else 0)


@gluon.jit
@no_type_check
def _send_rows(left, right, where, out_rows, q_latent, OWN: gl.constexpr):
    """Write rows that are all of one token, by way of the queries' memory: half OWN of the columns.

    Nobody multiplies by the queries any more, and each half of them is one group's. The first row of a piece is
    somebody's (`seek`), and so are all of its token.
    """
    first_row = where[0] * where[5] + where[2] * ROWS
    WIDTH: gl.constexpr = left.shape[1]
    quarters = q_latent._reinterpret(q_latent.dtype, [4, ROWS, WIDTH], out_rows.layout)
    quarters.index(2 * OWN).store(left.to(q_latent.dtype))
    quarters.index(2 * OWN + 1).store(right.to(q_latent.dtype))
    fence_async_shared()
    partition_barrier()
    for quarter in gl.static_range(2 * OWN, 2 * OWN + 2):
        tma.async_copy_shared_to_global(out_rows, [first_row, quarter * WIDTH], quarters.index(quarter))
    tma.store_wait(0)
    partition_barrier()


@gluon.jit
@no_type_check
def _lines_of(left, right, q_latent, OWN: gl.constexpr, WIDE: gl.constexpr):
    """Both quarters as whole lines, by way of the queries' memory, which nobody multiplies by any more."""
    WIDTH: gl.constexpr = left.shape[1]
    staged = q_latent.index(0).slice(2 * OWN * WIDTH, 2 * WIDTH, dim=1)
    staged.slice(0, WIDTH, dim=1).store(left.to(q_latent.dtype))
    staged.slice(WIDTH, WIDTH, dim=1).store(right.to(q_latent.dtype))
    lines = staged.load(WIDE)
    partition_barrier()
    return lines


@gluon.jit
@no_type_check
def write_whole(
    state, where, results, scale_log2, following, asked, queries, sizes, OWN: gl.constexpr, HEADS: gl.constexpr,
    LATENT: gl.constexpr, ROPE: gl.constexpr, SCORES: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Outputs of rows that one program saw whole: half OWN of the columns. The following queries are asked for."""
    largest, total, left, right = state
    out, lse, _, _, out_rows = results
    q_latent = queries[2]
    num_tokens, num_heads = where[4], where[5]
    HALF: gl.constexpr = LATENT // 2
    WIDTH: gl.constexpr = LATENT // 4
    SPAN: gl.constexpr = left.shape[1]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [4, 1], [1, 0])
    number = slice_of_program(WIDTH // SPAN)
    divisor = gl.where(total == 0, 1.0, total)  # a row that saw nothing: values 0
    left, right = scaled(left, right, 1.0 / divisor, VALUES)
    if OWN == 0:
        _, token, head, real = rows_at(where, ROWS, gl.SliceLayout(1, SCORES))
        log = gl.where(total == 0, float("-inf"), largest * scale_log2 + gl.log2(divisor))
        gl.store(lse + head.to(gl.int64) * num_tokens + token, log * LN_2, mask=real & (number == 0))
    if out_rows is not None:
        _send_rows(left, right, where, out_rows, q_latent, OWN)
        ask(following, asked, queries, sizes, OWN, HEADS, ROPE)
    elif out.dtype.element_ty == q_latent.dtype and SPAN == WIDTH:
        _, token, head, real = rows_at(where, ROWS, gl.SliceLayout(1, WIDE))
        lines = _lines_of(left, right, q_latent, OWN, WIDE)
        ask(following, asked, queries, sizes, OWN, HEADS, ROPE)
        columns = OWN * HALF + gl.arange(0, HALF, gl.SliceLayout(0, WIDE))
        offsets = (token.to(gl.int64) * num_heads + head) * LATENT
        gl.store(out + offsets[:, None] + columns[None, :], lines, mask=real[:, None])
    else:
        ask(following, asked, queries, sizes, OWN, HEADS, ROPE)
        _, token, head, real = rows_at(where, ROWS, gl.SliceLayout(1, VALUES))
        columns = OWN * HALF + number * SPAN + gl.arange(0, SPAN, gl.SliceLayout(0, VALUES))
        offsets = (token.to(gl.int64) * num_heads + head) * LATENT
        place = out + offsets[:, None] + columns[None, :]
        gl.store(place, left.to(out.dtype.element_ty), mask=real[:, None])
        gl.store(place + WIDTH, right.to(out.dtype.element_ty), mask=real[:, None])


@gluon.jit
@no_type_check
def write_partial(
    state, where, results, scale_log2, slot, num_partials, OWN: gl.constexpr, LATENT: gl.constexpr,
    SCORES: gl.constexpr, VALUES: gl.constexpr, OF_REQUEST: gl.constexpr,
):  # fmt: skip
    """Parts of rows for the merge: half OWN of the columns, and one of largest and total."""
    largest, total, left, right = state
    _, _, partial_out, partial_lse, _ = results
    HALF: gl.constexpr = LATENT // 2
    WIDTH: gl.constexpr = LATENT // 4
    SPAN: gl.constexpr = left.shape[1]
    number = slice_of_program(WIDTH // SPAN)
    row, partial_rows, real = partial_rows_of(slot, where, ROWS, gl.SliceLayout(1, SCORES), OF_REQUEST)
    real = real & (number == 0)
    if OWN == 0:
        gl.store(partial_lse + row, gl.where(total == 0, float("-inf"), largest * scale_log2), mask=real)
    else:
        gl.store(partial_lse + num_partials.to(gl.int64) * partial_rows + row, total, mask=real)
    row, _, real = partial_rows_of(slot, where, ROWS, gl.SliceLayout(1, VALUES), OF_REQUEST)
    columns = OWN * HALF + number * SPAN + gl.arange(0, SPAN, gl.SliceLayout(0, VALUES))
    place = partial_out + (row * LATENT)[:, None] + columns[None, :]
    gl.store(place, left, mask=real[:, None], eviction_policy=STAYS)
    gl.store(place + WIDTH, right, mask=real[:, None], eviction_policy=STAYS)


@gluon.jit
@no_type_check
def based_on_two(state, scale_log2):
    """A state with its largest scores in base 2, -inf where nothing was seen."""
    largest, total, left, right = state
    return gl.where(total == 0, float("-inf"), largest * scale_log2), total, left, right


@gluon.jit
@no_type_check
def _kept_at(kept_values, OWN: gl.constexpr, LATENT: gl.constexpr, VALUES: gl.constexpr):
    """Where a group keeps the first quarter of its values; the second lies LATENT // 4 * ROWS elements further.

    In squares of 8 by 8, as the matrix unit deals them to the threads, so that a warp's accesses fill whole lines.
    """
    row = gl.arange(0, ROWS, gl.SliceLayout(1, VALUES))
    column = gl.arange(0, VALUES.instr_shape[1], gl.SliceLayout(0, VALUES))
    place = kept_values + gl.program_id(0).to(gl.int64) * (ROWS * LATENT) + OWN * (LATENT // 2) * ROWS
    return place + (row * 8)[:, None] + (column // 8 * (8 * ROWS) + column % 8)[None, :]


@gluon.jit
@no_type_check
def folded(
    state, kept, kept_values, OWN: gl.constexpr, LATENT: gl.constexpr, SCORES: gl.constexpr, VALUES: gl.constexpr
):
    """What the group kept of the splits before, and a state, as one: half OWN of the columns."""
    largest, total, left, right = state
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    largest, old, new = combine_weights(kept.index(2 * OWN).load(ROW), largest)
    total = gl.fma(kept.index(2 * OWN + 1).load(ROW), old, total * new)
    place = _kept_at(kept_values, OWN, LATENT, VALUES)
    old = gl.convert_layout(old, gl.SliceLayout(1, VALUES))[:, None]
    left, right = scaled(left, right, new, VALUES)
    left = gl.fma(gl.load(place), old, left)
    right = gl.fma(gl.load(place + LATENT // 4 * ROWS), old, right)
    return largest, total, left, right


@gluon.jit
@no_type_check
def keep(state, kept, kept_values, OWN: gl.constexpr, LATENT: gl.constexpr, VALUES: gl.constexpr):
    """Keep a state for the next split of the run: half OWN of the columns."""
    largest, total, left, right = state
    kept.index(2 * OWN).store(largest)
    kept.index(2 * OWN + 1).store(total)
    place = _kept_at(kept_values, OWN, LATENT, VALUES)
    gl.store(place, left, eviction_policy=STAYS)
    gl.store(place + LATENT // 4 * ROWS, right, eviction_policy=STAYS)
