"""Data-movement-friendly decode: multi-query attention over the latent cache itself."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from reference.interfaces import (
    AttentionState,
    DecodeMetadata,
    DecodeSchedule,
    MLAConfig,
    QueryLenSupport,
    check_config,
    check_decode,
    check_decode_values,
    check_device,
    check_dtype,
    check_int,
    check_number,
    check_type,
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
    backend: BackendChoice = None,
) -> int:
    """How many programs `plan_decode` should cut a decode over: as many as run at once on a device.

    A builder asks for it by itself (`num_programs=None`).

    Args:
        config: the layer.
        device: where it runs.
        dtype: of queries and cache.
        block_size: tokens a cache block.
        query_len: longest query of a decode.
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Raises:
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    check_config(config)
    device = check_device("device", device)
    check_type("dtype", dtype, torch.dtype)
    check_int("block_size", block_size)
    check_int("query_len", query_len)
    c = config
    widths = c.kv_lora_rank, c.qk_rope_head_dim
    request = backends.decode_request(device, dtype, *widths, block_size, QueryLenSupport.VARLEN, op="decode_programs")
    launch = backends.kernel(backends.select(request, backend).name, "decode_programs")
    return launch(device, dtype, c.num_heads, *widths, block_size, query_len)


def mla_decode(
    ql_nope: Float[Tensor, "T N Lkv"],
    q_pe: Float[Tensor, "T N R"],
    kv_cache: Float[Tensor, "num_blocks block_size Lkv+R"],
    metadata: DecodeMetadata,
    softmax_scale: float,
    schedule: DecodeSchedule | None = None,
    out_dtype: torch.dtype | None = None,
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
    arguments = _arguments("mla_decode", ql_nope, q_pe, kv_cache, metadata, softmax_scale, schedule, out_dtype, backend)
    return AttentionState(*torch.ops.mla_twins.mla_decode(*arguments))


def _arguments(op, ql_nope, q_pe, kv_cache, metadata, softmax_scale, schedule, out_dtype, backend) -> tuple:
    """The checked arguments of the op, the name of the backend that serves it last."""
    check_decode(ql_nope, q_pe, kv_cache, metadata, schedule)
    check_number("softmax_scale", softmax_scale)
    check_dtype("out_dtype", ql_nope.dtype if out_dtype is None else out_dtype)
    query_lens = backends.query_lens_of(ql_nope.shape[0], metadata.seq_lens.shape[0], metadata.max_query_len)
    request = backends.decode_request(
        ql_nope.device, ql_nope.dtype, ql_nope.shape[2], q_pe.shape[2], kv_cache.shape[1], query_lens,
        backends.cache_in_words(kv_cache), op, out_dtype or ql_nope.dtype,
    )  # fmt: skip
    chosen = backends.select(request, backend)
    return (
        ql_nope, q_pe, kv_cache, metadata.block_table, metadata.seq_lens, metadata.query_start_loc,
        metadata.visible_lens, metadata.max_query_len, metadata.max_seq_len, softmax_scale, out_dtype or ql_nope.dtype,
        None if schedule is None else schedule.tile_ranges, None if schedule is None else schedule.split_offsets,
        schedule is not None and schedule.batch_invariant, chosen.name,
    )  # fmt: skip


@torch.library.custom_op(
    "mla_twins::mla_decode",
    mutates_args=(),
    schema="(Tensor ql_nope, Tensor q_pe, Tensor kv_cache, Tensor block_table, Tensor seq_lens,"
    " Tensor query_start_loc, Tensor visible_lens, SymInt max_query_len, SymInt max_seq_len,"
    " float softmax_scale, ScalarType out_dtype,"
    " Tensor? tile_ranges, Tensor? split_offsets, bool batch_invariant, str backend) -> (Tensor, Tensor)",
)
def _mla_decode(
    ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, max_query_len, max_seq_len,
    softmax_scale, out_dtype, tile_ranges, split_offsets, batch_invariant, backend,
):  # fmt: skip
    if ql_nope.device.type == "cpu":
        metadata = DecodeMetadata(
            block_table, seq_lens, query_start_loc, max_query_len, visible_lens, max_seq_len, kv_cache.shape[1]
        )
        check_decode_values(metadata, ql_nope.shape[0], kv_cache.shape[1], kv_cache.shape[0])
    return backends.kernel(backend, "mla_decode")(
        ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, max_query_len, max_seq_len,
        softmax_scale, out_dtype, tile_ranges, split_offsets, batch_invariant,
    )  # fmt: skip


@_mla_decode.register_fake
def _(
    ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, max_query_len, max_seq_len,
    softmax_scale, out_dtype, tile_ranges, split_offsets, batch_invariant, backend,
):  # fmt: skip
    tokens, heads, _ = ql_nope.shape
    out = ql_nope.new_empty(ql_nope.shape, dtype=out_dtype)
    return out, ql_nope.new_empty(heads, tokens, dtype=wide_dtype(out_dtype))
