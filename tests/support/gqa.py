"""Make random inputs of grouped-query attention (GQA), and compute expected results with an oracle.

The oracle is slow and calls no code of the packages. In the caches, every byte that belongs to no token is 0xFF, which
is NaN in every dtype of a cache. Table entries after a request's last block are no blocks (NO_BLOCKS), and so are the
entries of blocks that a window or an attention chunk no longer reaches.

The letters of shapes: B requests, T query tokens, S keys of a request, Sq query tokens of a request, N heads, Nkv
key/value heads, Dh head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reference.interfaces import (
    COMPUTE_FORMAT,
    AttentionState,
    CacheFormat,
    GraphSupport,
)
from reference.interfaces.gqa import AttentionType, GQAConfig, GQAMetadata, PagedAttentionMetadata

from .factories import integers, offsets, table_without_blocks

MHA = GQAConfig(3, 3, 32)
GROUPED = GQAConfig(6, 2, 80)
MQA = GQAConfig(4, 1, 96)
WIDE = GQAConfig(16, 8, 128)
SLOPES = (0.5, 0.25, 0.0, 1.0, 0.125, 2.0)  # ALiBi slopes of 6 heads; a slope of 0 is legal
CONFIGS = {
    "multi-head": MHA,
    "grouped": GROUPED,
    "multi-query": MQA,
    "8 KV heads": WIDE,
    "scale": replace(GROUPED, scale=0.3),
    "window 1": replace(GROUPED, sliding_window=1),
    "window of a page": replace(GROUPED, sliding_window=16),
    "window of a page - 1": replace(MHA, sliding_window=15),
    "window of a page + 1": replace(MQA, sliding_window=17),
    "window beyond the context": replace(GROUPED, sliding_window=1000),
    "soft cap": replace(GROUPED, logits_soft_cap=0.8),
    "ALiBi": replace(GROUPED, alibi_slopes=SLOPES),
    "sinks": replace(GROUPED, attention_sinks=True),
    "all of them": replace(
        GROUPED, scale=0.2, sliding_window=19, logits_soft_cap=1.1, alibi_slopes=SLOPES, attention_sinks=True
    ),
}
# (query tokens, tokens after the step) of each request: decodes, prefills with and without context, a padding row
LENS = ((1, 1), (1, 16), (1, 37), (0, 20), (1, 0), (2, 17), (15, 15), (16, 33), (17, 53), (1, 31))


def dtypes_of(ops, everything=True):
    """Return the dtypes in which a test runs a package; on a CPU only float64 unless `everything` is True."""
    if ops.__name__ == "reference":
        return (torch.float64,)
    lower = (torch.float32, torch.bfloat16)
    if torch.get_default_device().type != "cpu":
        return lower
    return (torch.float64, *lower) if everything else (torch.float64,)


@dataclass(frozen=True)
class GQABatch:
    """Requests with their queries, keys and values, and a paged cache that holds the keys and values.

    Attributes:
        config: config of the layer.
        lens: (Sq, S) of each request. S = 0 with query tokens is a padding row.
        block_size: number of tokens in a block.
        q: [T, N, Dh], queries of all requests, then of padding tokens.
        k: for each request the keys [S, Nkv, Dh] of all of its tokens, in the dtype of `q`.
        v: the values, like `k`.
        kv_cache: the cache [2, num_blocks, block_size, Nkv, Dh].
        metadata: plan of the attention, made by hand.
        slots: slot of every token of each request; -1 for a token in a block that was freed.
        sinks: [N], or None if the config has no attention sinks.
        cache_format: format of the cache.
        k_scale: scale of the keys in the cache, or None.
        v_scale: scale of the values in the cache, or None.
    """

    config: GQAConfig
    lens: tuple[tuple[int, int], ...]
    block_size: int
    q: Tensor
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    kv_cache: Tensor
    metadata: PagedAttentionMetadata
    slots: tuple[tuple[int, ...], ...]
    sinks: Tensor | None
    cache_format: CacheFormat = COMPUTE_FORMAT
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def scales(self) -> dict:
        """The cache format and the scales, as keyword arguments of the functions that read the cache."""
        return dict(cache_format=self.cache_format, k_scale=self.k_scale, v_scale=self.v_scale)

    @property
    def cached_k(self) -> tuple[Tensor, ...]:
        """Keys as they are read from the cache, in float64."""
        return tuple(as_cached(k, self.k_scale) for k in self.k)

    @property
    def cached_v(self) -> tuple[Tensor, ...]:
        """Values as they are read from the cache, in float64."""
        return tuple(as_cached(v, self.v_scale) for v in self.v)

    @property
    def new_k(self) -> Tensor:
        """Keys of the new tokens of all requests, packed [T, Nkv, Dh]; NaN for tokens of padding rows."""
        return self._new(self.k)

    @property
    def new_v(self) -> Tensor:
        """Values of the new tokens, like `new_k`."""
        return self._new(self.v)

    @property
    def slot_mapping(self) -> Tensor:
        """Slots of the new tokens of all requests and of padding tokens, int64 [T]."""
        slots = []
        for (query_len, length), own in zip(self.lens, self.slots, strict=True):
            slots += own[length - query_len :] if length else [-1] * query_len
        return torch.tensor(slots + [-1] * (self.q.shape[0] - len(slots)), dtype=torch.int64)

    def _new(self, per_request: tuple[Tensor, ...]) -> Tensor:
        rows = [self.q.new_empty(0, *per_request[0].shape[1:])] if per_request else [self.q[:0]]
        for (query_len, length), own in zip(self.lens, per_request, strict=True):
            rows.append(own[length - query_len :] if length else own.new_full((query_len, *own.shape[1:]), torch.nan))
        padding = self.q.shape[0] - sum(query_len for query_len, _ in self.lens)
        rows.append(rows[0].new_full((padding, *rows[0].shape[1:]), torch.nan))
        return torch.cat(rows)


def to_stored(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return numbers as a cache stores them: in e4m3 if there is a scale, otherwise unchanged."""
    if scale is None:
        return x
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def as_cached(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return numbers as they are read from a cache, in float64."""
    stored = to_stored(x, scale).double()
    return stored if scale is None else stored * scale.double()


def visible_ranges(config: GQAConfig, query_len: int, seq_len: int) -> list[tuple[int, int]]:
    """Return the keys [first, end) that each query token of a cached request attends; (0, 0) in a padding row."""
    ranges = []
    for index in range(query_len):
        if seq_len == 0:
            ranges.append((0, 0))
        elif config.attention_type is AttentionType.CROSS:
            ranges.append((0, seq_len))
        else:
            position = seq_len - query_len + index
            firsts = [0]
            if config.sliding_window is not None:
                firsts.append(position - config.sliding_window + 1)
            if config.attention_chunk_size is not None:
                firsts.append(position - position % config.attention_chunk_size)
            ranges.append((max(firsts), position + 1))
    return ranges


def poisoned_cache(
    num_blocks: int, block_size: int, config: GQAConfig, dtype: torch.dtype, cache_format=COMPUTE_FORMAT, layout="NHD"
) -> Tensor:
    """Return a key/value cache in which every byte is 0xFF."""
    stored = cache_format.dtype_for(dtype)
    heads, width = config.num_kv_heads, config.head_dim * stored.itemsize
    inner = (block_size, heads) if layout == "NHD" else (heads, block_size)
    cache = torch.full((2, num_blocks, *inner, width), 0xFF, dtype=torch.uint8).view(stored)
    return cache if layout == "NHD" else cache.transpose(2, 3)


def gqa_batch(
    config: GQAConfig,
    lens,
    block_size: int = 16,
    dtype: torch.dtype = torch.float64,
    layout: str = "NHD",
    cache_format: CacheFormat = COMPUTE_FORMAT,
    *,
    padding: int = 0,
    free_behind_window: bool = True,
    new_tokens: bool = True,
    spare_blocks: int = 3,
    seed: int | None = None,
) -> GQABatch:
    """Return a batch with random queries, keys and values, whose blocks are in random order.

    Args:
        config: config of the layer.
        lens: (Sq, S) of each request.
        block_size: number of tokens in a block.
        dtype: dtype of queries, keys and values.
        layout: "NHD" or "HND", the order of the cache's axes in memory.
        cache_format: format of the cache. With `fp8_e4m3` a few of the largest numbers saturate.
        padding: number of query tokens behind the last request; 0 if there is no request.
        free_behind_window: whether the blocks before the first key of all query tokens of a request are freed: their
            table entries are no blocks (NO_BLOCKS), and their tokens are not in the cache.
        new_tokens: whether the cache already holds the new tokens.
        spare_blocks: number of blocks that belong to no request.
        seed: seed of torch's generator; None leaves the generator as it is.
    """
    if seed is not None:
        torch.manual_seed(seed)
    lens = tuple((int(query_len), int(length)) for query_len, length in lens)
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(dtype)

    tokens = sum(query_len for query_len, _ in lens)
    q = 1.5 * random(tokens + padding, heads, dim)
    k, v = (tuple(random(length, kv_heads, dim) for _, length in lens) for _ in range(2))
    k_scale = v_scale = None
    if cache_format.layer_scale:
        k_scale, v_scale = torch.tensor(3.1 / 448), torch.tensor(2.7 / 448)
    ranges = [visible_ranges(config, *each) for each in lens]
    used = [math.ceil(length / block_size) for _, length in lens]
    num_blocks = sum(used) + spare_blocks
    free_blocks = torch.randperm(num_blocks).tolist()
    table = table_without_blocks(len(lens), max(used, default=0) + 2)
    cache = poisoned_cache(num_blocks, block_size, config, dtype, cache_format, layout)
    slots = []
    for request, (query_len, length) in enumerate(lens):
        first = min((first for first, end in ranges[request] if end > 0), default=0)
        own = []
        for column in range(used[request]):
            inside = range(column * block_size, min(length, (column + 1) * block_size))
            block = free_blocks.pop()
            if free_behind_window and inside.stop <= first:
                own += [-1] * len(inside)
                continue
            table[request, column] = block
            for token in inside:
                own.append(block * block_size + token % block_size)
                if new_tokens or token < length - query_len:
                    for half, (x, scale) in enumerate(((k, k_scale), (v, v_scale))):
                        cache[half, block, token % block_size] = to_stored(x[request][token], scale)
        slots.append(tuple(own))
    flat = [each for request in ranges for each in request] + [(0, 0)] * padding
    windowed = config.sliding_window is not None or config.attention_chunk_size is not None
    metadata = PagedAttentionMetadata(
        block_table=table,
        seq_lens=integers(*(length for _, length in lens)),
        query_start_loc=offsets([query_len for query_len, _ in lens]),
        max_query_len=max([0, *(query_len for query_len, _ in lens), -(-len(flat) // max(len(lens), 1))]),
        visible_lens=integers(*(end for _, end in flat)),
        max_seq_len=max((length for _, length in lens), default=0),
        block_size=block_size,
        graph=GraphSupport.ANY if padding else GraphSupport.NONE,
        first_visible=integers(*(first for first, _ in flat)) if windowed else None,
    )
    sinks = random(heads) if config.attention_sinks else None
    return GQABatch(
        config, lens, block_size, q, k, v, cache, metadata, tuple(slots), sinks, cache_format, k_scale, v_scale
    )


def oracle_request(
    config: GQAConfig, q: Tensor, k: Tensor, v: Tensor, ranges, positions, sinks: Tensor | None = None
) -> AttentionState:
    """Attend the keys and values of one request, row by row, in float64.

    Args:
        config: scale, soft cap, slopes and heads of the layer.
        q: [Sq, N, Dh].
        k: [S, Nkv, Dh].
        v: [S, Nkv, Dh].
        ranges: for each query token (first key, key after the last key), or the list of its keys.
        positions: for each query token its index among the keys, from which ALiBi measures distances.
        sinks: [N], or None.
    """
    scale = 1 / math.sqrt(config.head_dim) if config.scale is None else config.scale
    out = torch.zeros(*q.shape, dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float64)
    heads_of_a_group = config.num_heads // config.num_kv_heads
    groups = [kv_head for kv_head in range(config.num_kv_heads) for _ in range(heads_of_a_group)]
    k, v, q = k.double()[:, groups], v.double()[:, groups], q.double()  # keys and values of all N heads
    for row, keys in enumerate(ranges):
        keys = list(range(*keys)) if isinstance(keys, tuple) else list(keys)
        scores = torch.einsum("khd,hd->kh", k[keys], q[row]) * scale
        if config.logits_soft_cap is not None:
            scores = (scores / config.logits_soft_cap).tanh() * config.logits_soft_cap
        if config.alibi_slopes is not None:
            far = torch.tensor([abs(positions[row] - key) for key in keys], dtype=torch.float64)
            scores = scores - far[:, None] * torch.tensor(config.alibi_slopes, dtype=torch.float64)
        if sinks is not None:
            scores = torch.cat((scores, sinks[None].double()))
        if len(scores) == 0:
            continue
        top = scores.amax(0)
        weights = (scores - top).exp()
        lse[:, row] = top + weights.sum(0).log()
        out[row] = torch.einsum("kh,khd->hd", weights[: len(keys)] / weights.sum(0), v[keys])
    return AttentionState(out, lse)


def oracle_batch(batch: GQABatch, q: Tensor | None = None) -> AttentionState:
    """Return the attention state of a batch by the oracle, in float64; padding tokens have output 0 and LSE -inf.

    `q` replaces the queries of the batch, for example by queries that were rounded to e4m3.
    """
    q = batch.q if q is None else q
    out = torch.zeros(*q.shape, dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float64)
    start = 0
    for request, (query_len, length) in enumerate(batch.lens):
        rows = slice(start, start + query_len)
        ranges = visible_ranges(batch.config, query_len, length)
        k, v = batch.cached_k[request], batch.cached_v[request]
        state = oracle_request(batch.config, q[rows], k, v, ranges, [end - 1 for _, end in ranges], batch.sinks)
        out[rows], lse[:, rows] = state.out, state.lse
        start += query_len
    return AttentionState(out, lse)


def rows_of(metadata: PagedAttentionMetadata, requests: slice) -> PagedAttentionMetadata:
    """Return the plan of some consecutive requests alone; its query tokens are counted from 0."""
    starts = metadata.query_start_loc.tolist()
    count = len(starts) - 1
    first, end, _ = requests.indices(count)
    tokens = slice(starts[first], starts[max(first, end)])
    lengths, query_lens = metadata.seq_lens[first:end], metadata.query_start_loc.diff()[first:end]
    return replace(
        metadata,
        block_table=metadata.block_table[first:end],
        seq_lens=lengths,
        query_start_loc=offsets(query_lens.tolist()),
        max_query_len=max(query_lens.tolist(), default=0),
        visible_lens=metadata.visible_lens[tokens],
        max_seq_len=max(lengths.tolist(), default=0),
        first_visible=None if metadata.first_visible is None else metadata.first_visible[tokens],
        graph=GraphSupport.NONE,
    )


def gqa_step(batch: GQABatch, num_decodes: int) -> GQAMetadata:
    """Return the plan of a step, made by hand: the first `num_decodes` requests decode, and the others prefill."""
    decode_tokens = sum(query_len for query_len, _ in batch.lens[:num_decodes])
    return GQAMetadata(
        config=batch.config,
        slot_mapping=batch.slot_mapping,
        num_actual_tokens=sum(query_len for query_len, _ in batch.lens),
        num_decodes=num_decodes,
        num_decode_tokens=decode_tokens,
        decode=rows_of(batch.metadata, slice(0, num_decodes)),
        prefill=rows_of(batch.metadata, slice(num_decodes, None)),
        cache_format=batch.cache_format,
    )
