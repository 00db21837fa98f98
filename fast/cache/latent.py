"""The paged latent cache: allocate, write and gather."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int32, Int64, Shaped
from torch import Tensor

from reference.interfaces import (
    COMPUTE_FORMAT,
    CacheFormat,
    check,
    check_blocks,
    check_cache_write,
    check_device,
    check_gather,
    check_offsets,
    check_slots,
    check_storage_dtype,
    check_tensor,
    kv_cache_shape,
    stride_order,
)

from .. import backends
from ..backends import BackendChoice


def allocate_kv_cache(
    num_blocks: int,
    block_size: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    num_layers: int | None = None,
    layout: str = "layers_first",
) -> Shaped[Tensor, "*layers num_blocks block_size columns"]:
    """An empty cache; its bytes are undefined until written (they may be NaN and reach nothing).

    Args:
        num_blocks: how many, 0 is legal.
        block_size: tokens a block.
        head_size: Lkv + R.
        dtype: float32, float64, bfloat16 or float16.
        device: where.
        num_layers: of one tensor for all layers, whose index gives a layer's cache; None for one layer.
        layout: how that tensor lies in memory (`stride_order`); every op takes a layer's cache with any strides.

    Returns:
        [num_blocks, block_size, Lkv + R], with `num_layers` in front where given.

    Raises:
        ValueError: a size below 1, or another dtype or layout.
    """
    check_storage_dtype("dtype", dtype)
    device = check_device("device", device)
    shape = kv_cache_shape(num_blocks, block_size, head_size, num_layers)
    order = stride_order(num_layers is not None, layout)
    stored = torch.empty([shape[axis] for axis in order], dtype=dtype, device=device)
    return stored.permute([order.index(axis) for axis in range(len(shape))])


def concat_and_cache_mla(
    kv_c_normed: Float[Tensor, "T Lkv"],
    k_pe: Float[Tensor, "T R"],
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    slot_mapping: Int64[Tensor, " slots"],
    cache_format: CacheFormat = COMPUTE_FORMAT,
    *,
    backend: BackendChoice = None,
) -> None:
    """Write each token's latent and rotated key into its slot; bit-exact. Slots past T are ignored.

    Args:
        kv_c_normed: [T, Lkv], RMS-normed latents.
        k_pe: [T, R], rotated keys.
        kv_cache: written in place.
        slot_mapping: [>= T], -1 = padding.
        cache_format: format of the cache.
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; on a CPU a slot outside the cache. Nothing is
            written then.
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    check_cache_write(kv_c_normed, k_pe, kv_cache, slot_mapping, cache_format)
    widths = (("kv_lora_rank", kv_c_normed.shape[1]), ("qk_rope_head_dim", k_pe.shape[1]))
    chosen = backends.select(
        backends.cache_request("concat_and_cache_mla", kv_cache, widths, cache_format, kv_c_normed.dtype), backend
    ).name
    torch.ops.mla_twins.concat_and_cache_mla(kv_c_normed, k_pe, kv_cache, slot_mapping, chosen)


@torch.library.custom_op(
    "mla_twins::concat_and_cache_mla",
    mutates_args=("kv_cache",),
    schema="(Tensor kv_c_normed, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, str backend) -> ()",
)
def _concat_and_cache_mla(kv_c_normed, k_pe, kv_cache, slot_mapping, backend):
    if kv_cache.device.type == "cpu":
        check_slots(slot_mapping[: kv_c_normed.shape[0]], kv_cache.shape[0] * kv_cache.shape[1])
    backends.kernel(backend, "concat_and_cache_mla")(kv_c_normed, k_pe, kv_cache, slot_mapping)


@_concat_and_cache_mla.register_fake
def _(kv_c_normed, k_pe, kv_cache, slot_mapping, backend):
    return None


def gather_and_maybe_dequant_cache(
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    block_table: Int32[Tensor, "B W"],
    cu_seq_lens: Int32[Tensor, " B+1"],
    starts: Int32[Tensor, " B"],
    num_tokens: int,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    out_dtype: torch.dtype | None = None,
    *,
    out: Float[Tensor, "num_tokens head_size"] | None = None,
    backend: BackendChoice = None,
) -> Float[Tensor, "num_tokens head_size"]:
    """Copy a piece of each request's tokens out of the pages, packed one request after another.

    Request b contributes its tokens [starts[b], starts[b] + cu_seq_lens[b + 1] - cu_seq_lens[b]). In the dtype of the
    cache the copy is bit-exact; another `out_dtype` rounds each element once.

    Args:
        kv_cache: the cache.
        block_table: [B, W].
        cu_seq_lens: [B + 1], prefix sum of the pieces' lengths.
        starts: [B], first token of each piece.
        num_tokens: cu_seq_lens[-1].
        cache_format: format of the cache.
        out_dtype: dtype of the result; None for that of the cache. A format with a storage dtype of its own needs it.
        out: where to put the result, such as the head of a workspace.
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Returns:
        [num_tokens, Lkv + R] in `out_dtype`; `out` where given.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; on a CPU offsets that fall or a block outside the
            cache. Nothing is written then.
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    width, dtype = check_gather(kv_cache, block_table, cu_seq_lens, starts, num_tokens, cache_format, out_dtype)
    request = backends.cache_request(
        "gather_and_maybe_dequant_cache", kv_cache, cache_format=cache_format, dtype=dtype, out_dtype=dtype
    )
    chosen = backends.select(request, backend).name
    if out is None:
        return torch.ops.mla_twins.gather_cache(
            kv_cache, block_table, cu_seq_lens, starts, num_tokens, width, dtype, chosen
        )
    check_tensor("out", out, (num_tokens, width), (dtype,), kv_cache.device)
    torch.ops.mla_twins.gather_cache_out(kv_cache, block_table, cu_seq_lens, starts, out, chosen)
    return out


@torch.library.custom_op(
    "mla_twins::gather_cache_out",
    mutates_args=("out",),
    schema="(Tensor kv_cache, Tensor block_table, Tensor cu_seq_lens, Tensor starts, Tensor(a!) out, str backend)"
    " -> ()",
)
def _gather_cache_out(kv_cache, block_table, cu_seq_lens, starts, out, backend):
    if kv_cache.device.type == "cpu":
        check_offsets("cu_seq_lens", cu_seq_lens, out.shape[0])
        check(not bool((starts < 0).any()), "starts", "values >= 0", starts.tolist())
        lengths = cu_seq_lens.diff().long()
        ends = torch.where(lengths > 0, starts + lengths, 0).tolist()
        check_blocks(block_table, ends, kv_cache.shape[1], kv_cache.shape[0])
    backends.kernel(backend, "gather_and_maybe_dequant_cache")(kv_cache, block_table, cu_seq_lens, starts, out)


@_gather_cache_out.register_fake
def _(kv_cache, block_table, cu_seq_lens, starts, out, backend):
    return None


@torch.library.custom_op(
    "mla_twins::gather_cache",
    mutates_args=(),
    schema="(Tensor kv_cache, Tensor block_table, Tensor cu_seq_lens, Tensor starts, SymInt num_tokens, SymInt width,"
    " ScalarType out_dtype, str backend) -> Tensor",
)
def _gather_cache(kv_cache, block_table, cu_seq_lens, starts, num_tokens, width, out_dtype, backend):
    out = kv_cache.new_empty(num_tokens, width, dtype=out_dtype)
    torch.ops.mla_twins.gather_cache_out(kv_cache, block_table, cu_seq_lens, starts, out, backend)
    return out


@_gather_cache.register_fake
def _(kv_cache, block_table, cu_seq_lens, starts, num_tokens, width, out_dtype, backend):
    return kv_cache.new_empty(num_tokens, width, dtype=out_dtype)
