"""Data-movement-friendly decode: multi-query attention over the latent cache itself."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from reference.interfaces import (
    COMPUTE_FORMAT,
    NEUTRAL_CUT,
    AttentionState,
    CacheFormat,
    DecodeMetadata,
    DecodeSchedule,
    MLAConfig,
    QueryLenSupport,
    ScheduleCosts,
    check_config,
    check_decode,
    check_decode_values,
    check_device,
    check_dtype,
    check_format,
    check_int,
    check_number,
    check_type,
    invariant_cut,
    wide_dtype,
)

from .. import backends
from ..backends import BackendChoice


def decode_programs(
    config: MLAConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    block_size: int,
    query_len: int = 1,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    backend: BackendChoice = None,
) -> int:
    """How many programs `plan_decode` should cut a decode over: as many as run at once on a device.

    A builder asks for it by itself (`num_programs=None`).

    Args:
        config: the layer.
        device: where it runs.
        dtype: of queries, and of a cache in the compute format.
        block_size: tokens a cache block.
        query_len: longest query of a decode.
        cache_format: format of the cache.
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Raises:
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    check_int("query_len", query_len)
    launch, shape = _fact_of_a_device("decode_programs", config, device, dtype, block_size, cache_format, backend)
    return launch(*shape, query_len)


def schedule_costs(
    config: MLAConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    block_size: int,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    backend: BackendChoice = None,
) -> ScheduleCosts:
    """What `plan_decode` should reckon with on a device: the costs that were measured for its decode kernel.

    A builder asks for them by itself (`schedule_costs=None`).

    Args:
        config: the layer.
        device: where it runs.
        dtype: of queries, and of a cache in the compute format.
        block_size: tokens a cache block.
        cache_format: format of the cache.
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Raises:
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    launch, shape = _fact_of_a_device("schedule_costs", config, device, dtype, block_size, cache_format, backend)
    return launch(*shape)


def _fact_of_a_device(op, config, device, dtype, block_size, cache_format, backend):
    """The function of a backend that tells something of a device's decode kernel, and the shape that it takes first."""
    check_config(config)
    device = check_device("device", device)
    check_type("dtype", dtype, torch.dtype)
    check_int("block_size", block_size)
    check_format(cache_format)
    widths = config.kv_lora_rank, config.qk_rope_head_dim
    request = backends.decode_request(
        device, dtype, *widths, block_size, QueryLenSupport.VARLEN, op=op, cache_format=cache_format
    )
    launch = backends.kernel(backends.select(request, backend).name, op)
    return launch, (device, dtype, config.num_heads, *widths, block_size)


def mla_decode(
    ql_nope: Float[Tensor, "T N Lkv"],
    q_pe: Float[Tensor, "T N R"],
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    metadata: DecodeMetadata,
    softmax_scale: float,
    schedule: DecodeSchedule | None = None,
    out_dtype: torch.dtype | None = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    *,
    backend: BackendChoice = None,
) -> AttentionState:
    """Absorbed attention of one or several query tokens a request over its cached latents.

    Args:
        ql_nope: [T, N, Lkv], queries with W_UK absorbed (`query_to_latent`).
        q_pe: [T, N, R], rotated.
        kv_cache: the cache; the new tokens are already in it.
        metadata: the requests; row t sees the first `visible_lens[t]` keys of its request.
        softmax_scale: (P + R)^-1/2, with YaRN's factor; never (Lkv + R)^-1/2.
        schedule: how the work is cut over programs (`plan_decode`); None leaves it to the kernel. It changes results by
            rounding alone; the `cpu` kernels, which cut nothing, do not look at it.
        out_dtype: dtype of `out`; that of `ql_nope` where None.
        cache_format: format of the cache.
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Returns:
        out [T, N, Lkv] (apply `latent_to_value` next), lse [N, T]. On a GPU, where offsets
        are not read to be checked, rows that `query_start_loc` gives to no request are undefined.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; a plan for another block size; on a CPU offsets that
            fall, lengths above `max_seq_len`, rows that see more keys than their request has, or a block outside the
            cache.
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    check_decode(ql_nope, q_pe, kv_cache, metadata, cache_format, schedule)
    check_number("softmax_scale", softmax_scale)
    out_dtype = ql_nope.dtype if out_dtype is None else out_dtype
    check_dtype("out_dtype", out_dtype)
    query_lens = backends.query_lens_of(ql_nope.shape[0], metadata.seq_lens.shape[0], metadata.max_query_len)
    batch_invariant = schedule is not None and schedule.batch_invariant
    request = backends.decode_request(
        ql_nope.device, ql_nope.dtype, ql_nope.shape[2], q_pe.shape[2], kv_cache.shape[1], query_lens,
        backends.cache_in_words(kv_cache), out_dtype=out_dtype, cache_format=cache_format,
        batch_invariant=batch_invariant, graph=metadata.graph,
    )  # fmt: skip
    cut = NEUTRAL_CUT if schedule is None else schedule.cut
    out, lse = torch.ops.mla_twins.mla_decode(
        ql_nope, q_pe, kv_cache, metadata.block_table, metadata.seq_lens, metadata.query_start_loc,
        metadata.visible_lens, metadata.max_query_len, metadata.max_seq_len, softmax_scale, out_dtype,
        None if schedule is None else schedule.tile_ranges, None if schedule is None else schedule.split_offsets,
        batch_invariant, list(cut.numbers), backends.select(request, backend).name,
    )  # fmt: skip
    return AttentionState(out, lse)


@torch.library.custom_op(
    "mla_twins::mla_decode",
    mutates_args=(),
    schema="(Tensor ql_nope, Tensor q_pe, Tensor kv_cache, Tensor block_table, Tensor seq_lens,"
    " Tensor query_start_loc, Tensor visible_lens, SymInt max_query_len, SymInt max_seq_len,"
    " float softmax_scale, ScalarType out_dtype,"
    " Tensor? tile_ranges, Tensor? split_offsets, bool batch_invariant, SymInt[] cut, str backend) -> (Tensor, Tensor)",
)
def _mla_decode(
    ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, max_query_len, max_seq_len,
    softmax_scale, out_dtype, tile_ranges, split_offsets, batch_invariant, cut, backend,
):  # fmt: skip
    if ql_nope.device.type == "cpu":
        metadata = DecodeMetadata(
            block_table, seq_lens, query_start_loc, max_query_len, visible_lens, max_seq_len, kv_cache.shape[1]
        )
        check_decode_values(metadata, ql_nope.shape[0], kv_cache.shape[1], kv_cache.shape[0])
    return backends.kernel(backend, "mla_decode")(
        ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, max_query_len, max_seq_len,
        softmax_scale, out_dtype, tile_ranges, split_offsets, batch_invariant, invariant_cut(*cut),
    )  # fmt: skip


@_mla_decode.register_fake
def _(
    ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, max_query_len, max_seq_len,
    softmax_scale, out_dtype, tile_ranges, split_offsets, batch_invariant, cut, backend,
):  # fmt: skip
    tokens, heads, _ = ql_nope.shape
    out = ql_nope.new_empty(ql_nope.shape, dtype=out_dtype)
    return out, ql_nope.new_empty(heads, tokens, dtype=wide_dtype(out_dtype))
