"""Functions that find the work items (query tiles) of a program, and hand them from the producer to the consumers.

The producer (the warp that loads) finds each work item and writes it to shared memory with `write_item`. The consumers
(the warps that multiply) read it with `read_item`.

The order of work items decides how long programs idle at the end, and how often keys are read from the L2 cache:

1. Heads come in groups of `group_heads` heads. The launcher chooses groups whose keys and values fit into the L2.
2. In a group, query tiles come from the last to the first. With a causal mask, the last tile of a request has the most
   keys, so the last work items of a group are the shortest.
3. The heads of a group come one after another for each query tile.
4. With SPLIT, the splits of a query tile and head come one after another. A split has n // s or n // s + 1 of the n key
   tiles that the rows of the query tile see, for s splits. If n < s, some splits are empty.

Of P programs, program p begins with item p, and then takes the next item that no program has taken
(`producer._next_index`). The order needs no lengths on the host.
"""

from __future__ import annotations

from typing import no_type_check

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common.arrivals import arrive
from .records import QUERY_TILE, Item

ITEMS_HELD = gl.constexpr(2)  # work items in shared memory: the current item and the next item


@gluon.constexpr_function
def fields_of(c):
    """Return how many fields of an `Item` consumers need; `end` and `split` only with SPLIT, `key_start` never."""
    return 8 if c.SPLIT else 6


@gluon.jit
@no_type_check
def _offset(cu_seqlens, request, limit):
    """Return the first token of a request, clamped to [0, limit], so that a wrong offset stays inside the tensors."""
    return gl.minimum(gl.maximum(gl.load(cu_seqlens + request), 0), limit)


@gluon.jit
@no_type_check
def _first_candidate(request, ctx):
    """Return the first candidate of a request without SPLIT.

    A candidate is a possible query tile, in the order of one head. The candidates of request b begin at
    cu_seqlens_q[b] // 128 + b, so a request gets the candidates that its query tiles need, and sometimes one more.
    """
    return _offset(ctx.cu_seqlens_q, request, ctx.sizes.num_tokens) // QUERY_TILE + request


@gluon.jit
@no_type_check
def _tiles_of(request, ctx):
    """Return the number of query tiles of a request."""
    start = _offset(ctx.cu_seqlens_q, request, ctx.sizes.num_tokens)
    end = _offset(ctx.cu_seqlens_q, request + 1, ctx.sizes.num_tokens)
    return (gl.maximum(end - start, 0) + QUERY_TILE - 1) // QUERY_TILE


@gluon.jit
@no_type_check
def _count_tiles(ctx):
    """Return the number of query tiles of one head: the number of candidates with SPLIT, where no candidate is empty.

    With SPLIT, the number of work items is often exactly the number of programs. With an empty candidate,
    one program would get two work items and another program none. A call with SPLIT has few requests, so counting takes
    little time. The producer counts anew for each work item, because keeping the number would cost a register.
    """
    tiles = ctx.sizes.num_requests * 0
    for request in range(0, ctx.sizes.num_requests):
        tiles += _tiles_of(request, ctx)
    return tiles


@gluon.jit
@no_type_check
def _request_of(candidate, ctx):
    """Return the request of a candidate without SPLIT, found by bisection over the first candidates of requests."""
    low, high = candidate * 0, candidate * 0 + ctx.sizes.num_requests - 1
    while low < high:
        middle = (low + high + 1) // 2
        below = _first_candidate(middle, ctx) <= candidate
        low = gl.where(below, middle, low)
        high = gl.where(below, high, middle - 1)
    return low


@gluon.jit
@no_type_check
def _request_and_tile_of(candidate, ctx):
    """Return the request of a candidate and the index of its query tile in the request, with SPLIT."""
    request, tile = candidate * 0, candidate
    tiles = _tiles_of(request, ctx)
    while (tile >= tiles) & (request < ctx.sizes.num_requests - 1):
        tile -= tiles
        request += 1
        tiles = _tiles_of(request, ctx)
    return request, tile


@gluon.jit
@no_type_check
def item_of(index, ctx, c):
    """Return the work item at position `index` of the order that the module describes.

    If the candidate at this position is empty, or with SPLIT behind the last candidate, `rows` of the result is 0 or
    negative, and the other fields have no meaning.
    """
    sizes = ctx.sizes
    split, num_candidates = 0, sizes.num_candidates
    if c.SPLIT:
        split, index = index % sizes.num_splits, index // sizes.num_splits
        num_candidates = _count_tiles(ctx)
        exists = index < num_candidates * sizes.num_heads
        index = gl.where(exists, index, 0)
        num_candidates = gl.maximum(num_candidates, 1)
    group_items = sizes.group_heads * num_candidates
    group, in_group = index // group_items, index % group_items
    first_head = group * sizes.group_heads
    heads = gl.minimum(sizes.group_heads, sizes.num_heads - first_head)  # the last group may have fewer heads
    candidate = num_candidates - 1 - in_group // heads
    head = first_head + in_group % heads
    if c.SPLIT:
        request, tile = _request_and_tile_of(candidate, ctx)
    else:
        request = _request_of(candidate, ctx)
    query_start = _offset(ctx.cu_seqlens_q, request, sizes.num_tokens)
    query_len = gl.maximum(_offset(ctx.cu_seqlens_q, request + 1, sizes.num_tokens) - query_start, 0)
    key_start = _offset(ctx.cu_seqlens_k, request, sizes.num_keys)
    keys = gl.maximum(_offset(ctx.cu_seqlens_k, request + 1, sizes.num_keys) - key_start, 0)
    if not c.SPLIT:
        tile = candidate - (query_start // QUERY_TILE + request)
    first_row = tile * QUERY_TILE
    rows = gl.where(tile < 0, 0, gl.minimum(query_len - first_row, QUERY_TILE))
    visible = gl.where(sizes.causal != 0, keys - query_len + first_row + 1, keys)
    most = gl.maximum(gl.minimum(visible + rows - 1, keys), 0)  # number of keys that the last row sees
    steps = (most + c.KEYS - 1) // c.KEYS
    end = steps
    if c.SPLIT:
        first, end = steps * split // sizes.num_splits, steps * (split + 1) // sizes.num_splits
        steps = end - first
        rows = gl.where(exists, rows, 0)
    return Item(steps, query_start + first_row, rows, head, keys, visible, end, split, key_start)


@gluon.jit
@no_type_check
def write_item(items, number, item, item_written, c):
    """In the producer, write work item `number` to shared memory and arrive at the barrier `item_written`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    FIELDS: gl.constexpr = fields_of(c)
    for i in gl.static_range(FIELDS):
        items.index(number % ITEMS_HELD * FIELDS + i).store(gl.full([1], item[i], gl.int32, layout))
    arrive(item_written)


@gluon.jit
@no_type_check
def read_item(items, number, c):
    """In a consumer that has waited for the barrier `item_written`, read work item `number`; `key_start` is 0."""
    steps = read_steps(items, number, c)
    end, split = steps, 0
    if c.SPLIT:
        end, split = _field(items, number, 6, c), _field(items, number, 7, c)
    return Item(
        steps, _field(items, number, 1, c), _field(items, number, 2, c), _field(items, number, 3, c),
        _field(items, number, 4, c), _field(items, number, 5, c), end, split, 0,
    )  # fmt: skip


@gluon.jit
@no_type_check
def read_steps(items, number, c):
    """Return only the number of key tiles of work item `number`; see `read_item`."""
    return _field(items, number, 0, c)


@gluon.jit
@no_type_check
def _field(items, number, FIELD: gl.constexpr, c):
    """Return one field of work item `number` as a scalar."""
    index = number % ITEMS_HELD * fields_of(c) + FIELD
    return gl.max(items.index(index).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
