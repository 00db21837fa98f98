"""`get_mla_metadata` and `flash_mla_with_kvcache` with the signatures of FlashMLA."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

import fast
from fast.backends import BackendChoice
from fast.mla.device_choices import DecodeLayer
from reference.interfaces import (
    CAUSAL,
    COMPUTE_FORMAT,
    CONVERTED,
    E4M3,
    FLOAT_DTYPES,
    FP8_DS_MLA,
    FP8_E4M3,
    VISIBLE_LENS,
    CacheFormat,
    DecodeMetadata,
    DecodeSchedule,
    GraphSupport,
    MLAConfig,
    UnsupportedConfiguration,
    check,
    check_blocks,
    check_flag,
    check_int,
    check_number,
    check_scale_values,
    check_tensor,
    check_type,
    is_capturing,
)


class _Call(NamedTuple):
    """The properties of a call that must be the same in all calls with one schedule."""

    batch_size: int
    query_len: int
    num_heads: int
    width: int
    head_dim_v: int
    dtype: torch.dtype
    block_size: int
    columns: int
    causal: bool
    is_fp8_kvcache: bool
    backend: tuple[tuple[str, str], ...]


class _Identity(NamedTuple):
    """Where the elements of a tensor are, and how often the tensor was changed in place.

    Tensors with equal identities have the same elements, with two exceptions: PyTorch does not count the changes by a
    replayed CUDA graph, and an inference tensor has no count. There the caller needs a new schedule object, as in
    FlashMLA.
    """

    device: torch.device
    address: int
    storage_offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    changes: int | None

    @classmethod
    def of(cls, x: Tensor) -> _Identity:
        """Return the identity of a tensor."""
        changes = None if x.is_inference() else x._version
        return cls(x.device, x.data_ptr(), x.storage_offset(), x.shape, x.stride(), changes)


class _Plan(NamedTuple):
    """The plan of a decode, and what it was made for.

    Attributes:
        seq_lens: the lengths. The plan keeps their memory, so that no other tensor can get its address.
        identity: identity of the lengths when the plan was made.
        graph: kind of the CUDA graph that captured the computation of the plan.
        query_start_loc: [B + 1], first query token of each request.
        visible_lens: [T], number of keys that each query token attends.
        schedule: schedule of the decode; None for a batch without requests, and for a backend without schedules.
        one: the scale 1 as a tensor [].
    """

    seq_lens: Tensor
    identity: _Identity
    graph: GraphSupport
    query_start_loc: Tensor
    visible_lens: Tensor
    schedule: DecodeSchedule | None
    one: Tensor

    def serves(self, seq_lens: Tensor, graph: GraphSupport) -> bool:
        """Return whether the plan was made for these lengths and for this kind of graph; do not read the lengths."""
        return _Identity.of(seq_lens) == self.identity and graph is self.graph


@dataclass
class FlashMLASchedMeta:
    """Schedule of FlashMLA's calls; opaque to the caller.

    The first call of `flash_mla_with_kvcache` computes the schedule. Later calls with the same shapes and the same
    tensor `cache_seqlens`, such as the calls of the other layers of a step, use it again. A call inside a CUDA graph
    does not use the schedule of a call outside, and the reverse. Every captured graph needs an object of its own.
    """

    _call: _Call | None = None
    _plan: _Plan | None = None


def get_mla_metadata(
    cache_seqlens: Int32[Tensor, " B"] | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *,
    num_heads_per_head_k: int | None = None,
) -> tuple[FlashMLASchedMeta, None]:
    """Return a new schedule object for `flash_mla_with_kvcache`.

    The first call that gets the object computes the schedule, so all arguments may be left out. FlashMLA's versions of
    2026 work in the same way. The arguments of earlier versions are checked and not used.

    Args:
        cache_seqlens: [B], keys of each request.
        num_q_tokens_per_head_k: number of rows of a request: Sq N / (number of key heads).
        num_heads_k: number of key heads; only 1.
        num_heads_q: N.
        is_fp8_kvcache: whether the cache has e4m3 numbers (8 bits).
        topk: number of keys of sparse attention; only None.
        num_heads_per_head_k: name of `num_q_tokens_per_head_k` in the first version of FlashMLA.

    Returns:
        The schedule object, and None in place of FlashMLA's number of splits. Pass both to `flash_mla_with_kvcache`.

    Raises:
        TypeError: an argument has another type.
        ValueError: a number is below 1, or `cache_seqlens` is not a vector of int32.
        UnsupportedConfiguration: `topk` is given, or `num_heads_k` is not 1.
    """
    if cache_seqlens is not None:
        check_tensor("cache_seqlens", cache_seqlens, ("B",), (torch.int32,))
    for name, value in (("num_q_tokens_per_head_k", num_q_tokens_per_head_k), ("num_heads_k", num_heads_k),
                        ("num_heads_q", num_heads_q), ("num_heads_per_head_k", num_heads_per_head_k)):  # fmt: skip
        if value is not None:
            check_int(name, value)
    check_flag("is_fp8_kvcache", is_fp8_kvcache)
    if num_heads_k not in (None, 1):
        raise UnsupportedConfiguration([f"num_heads_k: only 1 is supported, got {num_heads_k}"])
    _refuse(topk=topk)
    return FlashMLASchedMeta(), None


@fast.backends.without_gradients
def flash_mla_with_kvcache(
    q: Shaped[Tensor, "B Sq N D"],
    k_cache: Shaped[Tensor, "num_blocks block_size key_heads columns"],
    block_table: Int32[Tensor, "B W"] | None,
    cache_seqlens: Int32[Tensor, " B"] | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    *,
    descale_q: Float[Tensor, "*descale_q_shape"] | None = None,
    descale_k: Float[Tensor, "*descale_k_shape"] | None = None,
    backend: BackendChoice = None,
) -> tuple[Float[Tensor, "B Sq N V"], Float[Tensor, "B N Sq"]]:
    """Attend cached latents with FlashMLA's arguments, layouts and conventions.

    With `is_fp8_kvcache`, the width of `k_cache` determines the format of the cache: D columns are `fp8_e4m3`, and 656
    columns are `fp8_ds_mla`. Queries in 16 bits are then multiplied by converted keys. Queries in e4m3 are multiplied
    in e4m3, and so are the probabilities (`fp8_mode="fp8_product"` of `fast.mla_decode`), and the output is in
    bfloat16.

    Args:
        q: [B, Sq, N, D], queries with W_UK absorbed, then their rotated rope parts.
        k_cache: [blocks, block size, 1, columns], the paged cache.
        block_table: [B, W], cache blocks of each request; entries behind the last block of a request are not read.
        cache_seqlens: [B], keys of each request, the keys of the query tokens included.
        head_dim_v: V, the width of a latent.
        tile_scheduler_metadata: result of `get_mla_metadata`. Use a new one if values of `cache_seqlens` change, and
            one for each captured CUDA graph.
        num_splits: None, the second result of `get_mla_metadata`.
        softmax_scale: factor of the scores; None means D^-1/2.
        causal: whether query token i of Sq attends only the first S - Sq + 1 + i of S keys. Otherwise each query token
            attends all keys of its request.
        is_fp8_kvcache: whether the cache has e4m3 numbers (8 bits).
        indices: only None: sparse attention is not supported.
        attn_sink: only None.
        extra_k_cache: only None.
        extra_indices_in_kvcache: only None.
        topk_length: only None.
        extra_topk_length: only None.
        descale_q: float32 scale of queries in e4m3, [1] or []; None means 1. The meaning of this argument and of the
            next one is that of vLLM's version of FlashMLA, where both stand at other positions.
        descale_k: float32 scale of a cache of the format `fp8_e4m3`, [1] or []; None means 1.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        Output [B, Sq, N, V] in the dtype of `q` (bfloat16 if `q` is in e4m3), and LSE [B, N, Sq] in float32 (float64 if
        `q` is float64), natural logarithm. A query token without keys has output 0 and LSE +inf.

    Raises:
        TypeError: an argument has another type.
        ValueError: shapes, dtypes or devices do not match; `tile_scheduler_metadata` was used with other shapes.
        UnsupportedConfiguration: an argument asks for sparse attention, a sink or a second cache; the cache has several
            key heads; no backend that `backend` allows can serve the call.
    """
    check_type("tile_scheduler_metadata", tile_scheduler_metadata, FlashMLASchedMeta, "a result of get_mla_metadata")
    check(num_splits is None, "num_splits", "None, the second result of get_mla_metadata", num_splits)
    _refuse(
        indices=indices, attn_sink=attn_sink, extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache, topk_length=topk_length,
        extra_topk_length=extra_topk_length,
    )  # fmt: skip
    check_flag("causal", causal)
    check_flag("is_fp8_kvcache", is_fp8_kvcache)
    check_tensor("q", q, ("B", "Sq", "N", "D"), (*FLOAT_DTYPES, E4M3))
    batch_size, query_len, num_heads, width = q.shape
    check(0 not in q.shape[1:], "q", "at least one query token, head and column", f"shape {list(q.shape)}")
    check_int("head_dim_v", head_dim_v)
    check(head_dim_v <= width, "head_dim_v", f"at most the width {width} of q", head_dim_v)
    check_tensor("block_table", block_table, (batch_size, "W"), (torch.int32,), q.device)
    check_tensor("cache_seqlens", cache_seqlens, (batch_size,), (torch.int32,), q.device)
    if softmax_scale is None:
        softmax_scale = width**-0.5
    check_number("softmax_scale", softmax_scale)
    check_type("k_cache", k_cache, Tensor, "a tensor")
    if k_cache.dim() == 4 and k_cache.shape[2] != 1:
        raise UnsupportedConfiguration([f"k_cache: only 1 key head is supported, got {k_cache.shape[2]}"])
    storage = _check_cache(k_cache, q, head_dim_v, is_fp8_kvcache)
    if q.is_cpu and not torch.compiler.is_compiling():
        _check_values(cache_seqlens, block_table, k_cache)

    meta, bound, graph = tile_scheduler_metadata, fast.backends.bind(backend), _graph_of(q)
    call = _Call(
        *q.shape, head_dim_v, q.dtype, k_cache.shape[1], k_cache.shape[3], causal, is_fp8_kvcache,
        () if bound is None else bound.pairs,
    )  # fmt: skip
    check(meta._call in (None, call), "tile_scheduler_metadata", f"calls with {meta._call}, as the first call", call)
    plan = meta._plan
    if plan is None or not plan.serves(cache_seqlens, graph):
        plan = _make_plan(cache_seqlens, graph, call, storage, bound)
    cache_format, in_e4m3 = storage.cache_format, storage.fp8_mode != CONVERTED
    kv_scale = _scale("descale_k", descale_k, plan.one, cache_format.layer_scale, f"the format {cache_format.name}")
    q_scale = _scale("descale_q", descale_q, plan.one, in_e4m3, f"queries in {q.dtype}")
    decode = DecodeMetadata(
        block_table, cache_seqlens, plan.query_start_loc, query_len, plan.visible_lens,
        max_seq_len=block_table.shape[1] * call.block_size, block_size=call.block_size, graph=graph,
        mask=CAUSAL if causal or query_len == 1 else VISIBLE_LENS,
    )  # fmt: skip
    rows = q.reshape(batch_size * query_len, num_heads, width)
    state = fast.mla_decode(
        rows[..., :head_dim_v], rows[..., head_dim_v:], storage.kv_cache, decode, softmax_scale, plan.schedule,
        storage.out_dtype, cache_format, kv_scale, storage.fp8_mode, q_scale, backend=bound,
    )  # fmt: skip
    meta._call, meta._plan = call, plan
    lse = state.lse.unflatten(1, (batch_size, query_len)).transpose(0, 1)
    with_inf = torch.nan_to_num(lse, nan=math.nan, posinf=math.inf, neginf=math.inf, out=lse.new_empty(lse.shape))
    return state.out.unflatten(0, (batch_size, query_len)), with_inf


class _Storage(NamedTuple):
    """The cache [blocks, block size, columns] in the dtype of its format, and how its products are computed.

    Attributes:
        kv_cache: the cache.
        cache_format: format of the cache.
        fp8_mode: fp8 mode of the decode (`fast.mla_decode`).
        out_dtype: dtype of the output.
    """

    kv_cache: Tensor
    cache_format: CacheFormat
    fp8_mode: str
    out_dtype: torch.dtype


def _check_cache(k_cache: Tensor, q: Tensor, head_dim_v: int, is_fp8_kvcache: bool) -> _Storage:
    """Check shape, dtype and device of a cache with one key head, and return how it is stored."""
    dims, dtypes, cache_format = (head_dim_v, q.shape[3] - head_dim_v), (q.dtype,), COMPUTE_FORMAT
    fp8_mode, out_dtype = CONVERTED, q.dtype
    if is_fp8_kvcache:
        dtypes, cache_format = (E4M3, torch.uint8), FP8_E4M3
        if dims == FP8_DS_MLA.dims and k_cache.shape[-1] == FP8_DS_MLA.columns(*dims):
            cache_format = FP8_DS_MLA
    if q.dtype == E4M3:
        check(is_fp8_kvcache, "q", "another dtype than e4m3 without is_fp8_kvcache", q.dtype)
        fp8_mode, out_dtype = "fp8_product", torch.bfloat16
    shape = ("num_blocks", "block_size", 1, cache_format.columns(*dims))
    check_tensor("k_cache", k_cache, shape, dtypes, q.device)
    return _Storage(k_cache.squeeze(2).view(cache_format.dtype_for(out_dtype)), cache_format, fp8_mode, out_dtype)


def _check_values(cache_seqlens: Tensor, block_table: Tensor, k_cache: Tensor) -> None:
    """Check the values of lengths and block table on a CPU; `fast.mla_decode` would name its own arguments."""
    (num_blocks, block_size), columns, lengths = k_cache.shape[:2], block_table.shape[1], cache_seqlens.tolist()
    for request, length in enumerate(lengths):
        check(0 <= length <= columns * block_size, "cache_seqlens",
              f"lengths from 0 to {columns * block_size}, for {columns} blocks of {block_size} tokens",
              f"{length} at request {request}")  # fmt: skip
    check_blocks(block_table, lengths, block_size, num_blocks)


def _scale(argument: str, scale: Tensor | None, one: Tensor, used: bool, owner: str) -> Tensor | None:
    """Return a scale as a tensor [], or None if `owner` has no such scale; a scale that is not given is 1.

    Args:
        argument: name of the argument.
        scale: the argument, [] or [1].
        one: the scale 1.
        used: whether `owner` has this scale.
        owner: what the scale belongs to, for the error message.
    """
    if not used:
        check(scale is None, argument, f"None for {owner}", "a scale")
        return None
    if scale is None:
        return one
    check_type(argument, scale, Tensor, "a tensor or None")
    check_tensor(argument, scale, (1,) if scale.dim() else (), (torch.float32,), one.device)
    check_scale_values(argument, scale)
    return scale.view(())


def _refuse(**arguments: object) -> None:
    """Raise if an argument that is not supported is not None."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise UnsupportedConfiguration([f"{name}: is not supported; pass None" for name in given])


def _graph_of(q: Tensor) -> GraphSupport:
    """Return the kind of the CUDA graph that captures the call; all requests have one query length."""
    return GraphSupport.ONE_QUERY_LEN if is_capturing(q.device) else GraphSupport.NONE


def _make_plan(seq_lens: Tensor, graph: GraphSupport, call: _Call, storage: _Storage, bound) -> _Plan:
    """Compute query offsets, mask and schedule on the device; the host does not wait."""
    size, query_len, device = call.batch_size, call.query_len, seq_lens.device
    starts = torch.arange(size + 1, dtype=torch.int32, device=device) * query_len
    visible = seq_lens[:, None].expand(size, query_len)
    if call.causal:
        later = torch.arange(query_len - 1, -1, -1, dtype=torch.int32, device=device)  # query tokens after each one
        visible = (visible - later).clamp(min=0)
    config = MLAConfig(  # a decode depends on three of these numbers: heads, and both widths of a cache entry
        hidden_size=1, num_heads=call.num_heads, q_lora_rank=None, kv_lora_rank=call.head_dim_v, qk_nope_head_dim=1,
        qk_rope_head_dim=call.width - call.head_dim_v, v_head_dim=1,
    )  # fmt: skip
    layer = DecodeLayer(
        config, device, storage.out_dtype, call.block_size, storage.cache_format, storage.fp8_mode
    )  # fmt: skip
    programs, costs = layer.programs_and_costs(query_len, None, None, bound, batch_invariant=False)
    schedule = None
    if size > 0 and programs > 0:
        schedule = fast.plan_decode(seq_lens, programs, costs, graph=graph, backend=bound)
    one = torch.ones((), dtype=torch.float32, device=device)
    visible = visible.reshape(-1).contiguous()
    kept = seq_lens.detach()  # stays the same if the caller gives the tensor object other memory
    return _Plan(kept, _Identity.of(seq_lens), graph, starts, visible, schedule, one)
