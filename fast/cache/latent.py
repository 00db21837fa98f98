"""Write entries into the paged latent cache, and gather entries from it.

A cache entry is the latent and the rotated key part of one token. A slot is the place of one entry in the cache.
`reference.cache.latent` gives the block and the offset of a slot.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int32, Int64, Shaped
from torch import Tensor

from reference.interfaces import (
    COMPUTE_FORMAT,
    CacheFormat,
    GraphSupport,
    check,
    check_blocks,
    check_cache_write,
    check_eager_offsets,
    check_flag,
    check_gather,
    check_offsets,
    check_out,
    check_scale_values,
    check_slots,
    format_named,
)

from .. import backends
from ..backends import BackendChoice


def concat_and_cache_mla(
    kv_c_normed: Float[Tensor, "T Lkv"],
    k_pe: Float[Tensor, "T R"],
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    slot_mapping: Int64[Tensor, " slots"],
    cache_format: CacheFormat = COMPUTE_FORMAT,
    kv_scale: Float[Tensor, ""] | None = None,
    *,
    graph: GraphSupport = GraphSupport.NONE,
    backend: BackendChoice = None,
) -> None:
    """Write the latent and the rotated key of each token into the token's slot.

    `reference.cache.latent.concat_and_cache_mla` explains which formats quantise the entries.

    Args:
        kv_c_normed: [T, Lkv], RMS-normed latents.
        k_pe: [T, R], rotated keys.
        kv_cache: cache, written in place.
        slot_mapping: [at least T], slot of each token. A token with slot -1 is not written. Slots after the first T
            are ignored.
        cache_format: format of the cache.
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale.
        graph: kind of the CUDA graph that captures this call; NONE without a graph.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Raises:
        ValueError: shapes, dtypes or devices do not match. For CPU tensors also: a slot is outside the cache, or the
            scale is not finite and positive. Nothing has been written when the error is raised.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    signature = _WRITES.signature(kv_c_normed, k_pe, kv_cache, slot_mapping, cache_format, kv_scale, graph, backend)
    chosen = _WRITES.backend_of(signature)
    if chosen is None:
        check_cache_write(kv_c_normed, k_pe, kv_cache, slot_mapping, cache_format, kv_scale)
        widths = (("kv_lora_rank", kv_c_normed.shape[1]), ("qk_rope_head_dim", k_pe.shape[1]))
        request = backends.cache_request(
            "concat_and_cache_mla", kv_cache, widths, cache_format, kv_c_normed.dtype, graph=graph
        )
        chosen = backends.select(request, backend).name
    _WRITES.run(signature, chosen, kv_c_normed, k_pe, kv_cache, slot_mapping, cache_format.name, kv_scale)


def _launch_write(kv_c_normed, k_pe, kv_cache, slot_mapping, cache_format, kv_scale, backend):
    if kv_cache.device.type == "cpu":
        check_slots(slot_mapping[: kv_c_normed.shape[0]], kv_cache.shape[0] * kv_cache.shape[1])
        check_scale_values("kv_scale", kv_scale)
    backends.kernel(backend, "concat_and_cache_mla")(
        kv_c_normed, k_pe, kv_cache, slot_mapping, format_named(cache_format), kv_scale
    )


_concat_and_cache_mla = torch.library.custom_op(
    "mla_twins::concat_and_cache_mla",
    _launch_write,
    mutates_args=("kv_cache",),
    schema="(Tensor kv_c_normed, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, str cache_format,"
    " Tensor? kv_scale, str backend) -> ()",
)
_WRITES = backends.CheckedCalls(torch.ops.mla_twins.concat_and_cache_mla, _launch_write, mutates=(2,))


@_concat_and_cache_mla.register_fake
def _(kv_c_normed, k_pe, kv_cache, slot_mapping, cache_format, kv_scale, backend):
    return None


def gather_and_maybe_dequant_cache(
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    block_table: Int32[Tensor, "B W"],
    cu_seq_lens: Int32[Tensor, " B+1"],
    starts: Int32[Tensor, " B"],
    num_tokens: int,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    out_dtype: torch.dtype | None = None,
    kv_scale: Float[Tensor, ""] | None = None,
    *,
    out: Shaped[Tensor, "num_tokens head_size"] | None = None,
    bounded: bool = False,
    backend: BackendChoice = None,
) -> Shaped[Tensor, "num_tokens head_size"]:
    """For each request, copy the cache entries of a range of its tokens; the result has one request after another.

    See `reference.cache.latent.gather_and_maybe_dequant_cache` for the ranges and for the conversion of dtypes.

    Args:
        kv_cache: cache that is read.
        block_table: [B, W], blocks of each request.
        cu_seq_lens: [B + 1], first row of each request in the result, then the number of gathered tokens.
        starts: [B], first gathered token of each request.
        num_tokens: number of rows of the result; equal to cu_seq_lens[-1] unless `bounded` is True.
        cache_format: format of the cache.
        out_dtype: dtype of the result; None means the dtype of the cache. If the cache format has a `storage_dtype`, an
            `out_dtype` must be given. If `out_dtype` is this `storage_dtype`, the result has the stored entries, bit
            for bit.
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale.
        out: tensor that receives the result, with the shape and dtype of the result, for example the first rows of a
            workspace. `out` must share no memory with the other arguments. None allocates a tensor.
        bounded: if True, `num_tokens` may be larger than cu_seq_lens[-1]. The rows after the last request become 0.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        The tensor `out` if it is given; otherwise a new tensor [num_tokens, Lkv + R] in `out_dtype`. A result of stored
        entries has the columns of the cache instead of Lkv + R columns.

    Raises:
        ValueError: shapes, dtypes or devices do not match, or `out` overlaps another argument or itself. For CPU
            tensors also: `cu_seq_lens` decreases, a block is outside the cache, or the scale is not finite and
            positive. Nothing has been written when the error is raised.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    calls = _GATHERS if out is None else _GATHERS_INTO
    signature = calls.signature(
        kv_cache, block_table, cu_seq_lens, starts, num_tokens, cache_format, out_dtype, kv_scale, out, bounded, backend
    )
    chosen = calls.backend_of(signature)
    if chosen is None:
        _, dtype = check_gather(
            kv_cache, block_table, cu_seq_lens, starts, num_tokens, cache_format, out_dtype, kv_scale
        )
        check_flag("bounded", bounded)
        op = "gather_and_maybe_dequant_cache"
        if cache_format.returns_stored(dtype):
            request = backends.copy_request(op, kv_cache, cache_format)
        else:
            request = backends.cache_request(op, kv_cache, cache_format=cache_format, dtype=dtype, out_dtype=dtype)
        chosen = backends.select(request, backend).name
    width = cache_format.gathered_width(kv_cache.shape[2], out_dtype)
    dtype = cache_format.gathered_dtype(kv_cache.dtype, out_dtype)
    if out is not None:  # check `out` in every call: which tensors overlap cannot be seen from their shapes
        inputs = kv_cache, block_table, cu_seq_lens, starts, *(() if kv_scale is None else (kv_scale,))
        check_out("out", out, (num_tokens, width), dtype, kv_cache.device, *inputs)
    if not bounded:
        check_eager_offsets("cu_seq_lens", cu_seq_lens, num_tokens)
    if out is not None:
        _GATHERS_INTO.run(
            signature, chosen, kv_cache, block_table, cu_seq_lens, starts, cache_format.name, kv_scale, out
        )
        return out
    return _GATHERS.run(
        signature, chosen, kv_cache, block_table, cu_seq_lens, starts, num_tokens, width, dtype, cache_format.name,
        kv_scale,
    )  # fmt: skip


def _launch_gather_into(kv_cache, block_table, cu_seq_lens, starts, cache_format, kv_scale, out, backend):
    if kv_cache.device.type == "cpu":
        check_offsets("cu_seq_lens", cu_seq_lens, most=out.shape[0])
        check(not bool((starts < 0).any()), "starts", "values >= 0", starts.tolist())
        lengths = cu_seq_lens.diff().long()
        ends = torch.where(lengths > 0, starts + lengths, 0).tolist()
        check_blocks(block_table, ends, kv_cache.shape[1], kv_cache.shape[0])
        check_scale_values("kv_scale", kv_scale)
    backends.kernel(backend, "gather_and_maybe_dequant_cache")(
        kv_cache, block_table, cu_seq_lens, starts, out, format_named(cache_format), kv_scale
    )


_gather_cache_out = torch.library.custom_op(
    "mla_twins::gather_cache_out",
    _launch_gather_into,
    mutates_args=("out",),
    schema="(Tensor kv_cache, Tensor block_table, Tensor cu_seq_lens, Tensor starts, str cache_format,"
    " Tensor? kv_scale, Tensor(a!) out, str backend) -> ()",
)
_GATHERS_INTO = backends.CheckedCalls(torch.ops.mla_twins.gather_cache_out, _launch_gather_into, mutates=(6,))


@_gather_cache_out.register_fake
def _(kv_cache, block_table, cu_seq_lens, starts, cache_format, kv_scale, out, backend):
    return None


def _launch_gather(
    kv_cache, block_table, cu_seq_lens, starts, num_tokens, width, out_dtype, cache_format, kv_scale, backend
):  # fmt: skip
    out = kv_cache.new_empty(num_tokens, width, dtype=out_dtype)
    _launch_gather_into(kv_cache, block_table, cu_seq_lens, starts, cache_format, kv_scale, out, backend)
    return out


_gather_cache = torch.library.custom_op(
    "mla_twins::gather_cache",
    _launch_gather,
    mutates_args=(),
    schema="(Tensor kv_cache, Tensor block_table, Tensor cu_seq_lens, Tensor starts, SymInt num_tokens, SymInt width,"
    " ScalarType out_dtype, str cache_format, Tensor? kv_scale, str backend) -> Tensor",
)
_GATHERS = backends.CheckedCalls(torch.ops.mla_twins.gather_cache, _launch_gather)


@_gather_cache.register_fake
def _(kv_cache, block_table, cu_seq_lens, starts, num_tokens, width, out_dtype, cache_format, kv_scale, backend):
    return kv_cache.new_empty(num_tokens, width, dtype=out_dtype)
