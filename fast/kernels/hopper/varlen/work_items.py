"""Functions that find the work items (query tiles) of a program, and hand them from the producer to the consumers.

The producer (the warp that loads) finds each work item and writes it to shared memory with `write_item`. The consumers
(the warps that multiply) read it with `read_item`.

The order of work items decides how long programs idle at the end, and how often keys are read from the L2 cache:

1. Heads come in groups of `group_heads` heads. The launcher chooses groups whose keys and values fit into the L2.
2. In a group, query tiles come from the last to the first. With a causal mask, the last tile of a request has the most
   keys, so the last work items of a group are the shortest.
3. The heads of a group come one after another for each query tile.

Program p processes the items p, p + P, p + 2P, ... of P programs. The order needs no lengths on the host.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.arrivals import arrive
from .records import QUERY_TILE, Item

ITEMS_HELD = gl.constexpr(2)  # work items in shared memory: the current item and the next item
ITEM_FIELDS = gl.constexpr(6)  # fields of an `Item` that consumers need: all but `key_start`


@gluon.jit
@no_type_check
def _offset(cu_seqlens, request, limit):
    """Return the first token of a request, clamped to [0, limit], so that a wrong offset stays inside the tensors."""
    return gl.minimum(gl.maximum(gl.load(cu_seqlens + request), 0), limit)


@gluon.jit
@no_type_check
def _first_slot(request, ctx):
    """Return the first slot of a request.

    A slot is the place of a query tile in the order of one head. The slots of request b begin at
    cu_seqlens_q[b] // 128 + b, so a request gets the slots that its query tiles need, and sometimes one more.
    """
    return _offset(ctx.cu_seqlens_q, request, ctx.sizes.num_tokens) // QUERY_TILE + request


@gluon.jit
@no_type_check
def item_of(index, ctx, KEYS: gl.constexpr):
    """Return the work item at position `index` of the order that the module describes.

    If the slot at this position is empty, `rows` of the result is 0 or negative, and the other fields have no meaning.
    """
    sizes = ctx.sizes
    group_items = sizes.group_heads * sizes.num_slots
    group, in_group = index // group_items, index % group_items
    first_head = group * sizes.group_heads
    heads = gl.minimum(sizes.group_heads, sizes.num_heads - first_head)  # the last group may have fewer heads
    slot = sizes.num_slots - 1 - in_group // heads
    head = first_head + in_group % heads

    # bisection: the last request whose first slot is at most `slot`
    low, high = slot * 0, slot * 0 + sizes.num_requests - 1
    while low < high:
        middle = (low + high + 1) // 2
        below = _first_slot(middle, ctx) <= slot
        low = gl.where(below, middle, low)
        high = gl.where(below, high, middle - 1)

    query_start = _offset(ctx.cu_seqlens_q, low, sizes.num_tokens)
    query_len = gl.maximum(_offset(ctx.cu_seqlens_q, low + 1, sizes.num_tokens) - query_start, 0)
    key_start = _offset(ctx.cu_seqlens_k, low, sizes.num_keys)
    keys = gl.maximum(_offset(ctx.cu_seqlens_k, low + 1, sizes.num_keys) - key_start, 0)
    tile = slot - (query_start // QUERY_TILE + low)
    first_row = tile * QUERY_TILE
    rows = gl.where(tile < 0, 0, gl.minimum(query_len - first_row, QUERY_TILE))
    visible = gl.where(sizes.causal != 0, keys - query_len + first_row + 1, keys)
    most = gl.maximum(gl.minimum(visible + rows - 1, keys), 0)  # number of keys that the last row sees
    return Item((most + KEYS - 1) // KEYS, query_start + first_row, rows, head, keys, visible, key_start)


@gluon.jit
@no_type_check
def write_item(items, number, item, item_written):
    """In the producer, write work item `number` to shared memory and arrive at the barrier `item_written`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(ITEM_FIELDS):
        items.index(number % ITEMS_HELD * ITEM_FIELDS + i).store(gl.full([1], item[i], gl.int32, layout))
    arrive(item_written)


@gluon.jit
@no_type_check
def read_item(items, number):
    """In a consumer that has waited for the barrier `item_written`, read work item `number`; `key_start` is 0."""
    return Item(
        _field(items, number, 0), _field(items, number, 1), _field(items, number, 2), _field(items, number, 3),
        _field(items, number, 4), _field(items, number, 5), 0,
    )  # fmt: skip


@gluon.jit
@no_type_check
def _field(items, number, FIELD: gl.constexpr):
    """Return one field of work item `number` as a scalar."""
    index = number % ITEMS_HELD * ITEM_FIELDS + FIELD
    return gl.max(items.index(index).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
