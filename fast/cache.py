"""The paged latent cache: [num_blocks, block_size, Lkv + R], one entry a token, latent then rope."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Int32, Int64
from torch import Tensor

from reference.interfaces import (
    RopeConfig,
    check,
    check_block_mapping,
    check_blocks,
    check_cache,
    check_cache_write,
    check_device,
    check_dtype,
    check_gather,
    check_number,
    check_offsets,
    check_readable,
    check_slots,
    check_swap,
    check_tensor,
    check_type,
    infer_global_hyperparameters,
    kv_cache_shape,
    stride_order,
)

from . import backends
from .backends import BackendChoice
from .rope import angles_of

__all__ = [
    "allocate_kv_cache",
    "concat_and_cache_mla",
    "copy_blocks",
    "gather_and_maybe_dequant_cache",
    "infer_global_hyperparameters",
    "kv_cache_shape",
    "stride_order",
    "swap_blocks",
]


def allocate_kv_cache(
    num_blocks: int,
    block_size: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    num_layers: int | None = None,
    layout: str = "layers_first",
) -> Float[Tensor, "*layers num_blocks block_size head_size"]:
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
    check_dtype("dtype", dtype)
    device = check_device("device", device)
    shape = kv_cache_shape(num_blocks, block_size, head_size, num_layers)
    order = stride_order(num_layers is not None, layout)
    stored = torch.empty([shape[axis] for axis in order], dtype=dtype, device=device)
    return stored.permute([order.index(axis) for axis in range(len(shape))])


def _select(op: str, kv_cache: Tensor, backend: BackendChoice) -> str:
    request = backends.KernelRequest(op, kv_cache.device, kv_cache.dtype, block_size=kv_cache.shape[1])
    return backends.select(request, backend).name


def concat_and_cache_mla(
    kv_c_normed: Float[Tensor, "T Lkv"],
    k_pe: Float[Tensor, "T R"],
    kv_cache: Float[Tensor, "num_blocks block_size head_size"],
    slot_mapping: Int64[Tensor, " slots"],
    *,
    backend: BackendChoice = None,
) -> None:
    """Write each token's latent and rotated key into its slot; bit-exact. Slots past T are ignored.

    Args:
        kv_c_normed: [T, Lkv], RMS-normed latents.
        k_pe: [T, R], rotated keys.
        kv_cache: written in place.
        slot_mapping: [>= T], -1 = padding.
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; on a CPU a slot outside the cache. Nothing is
            written then.
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    check_cache_write(kv_c_normed, k_pe, kv_cache, slot_mapping)
    chosen = _select("concat_and_cache_mla", kv_cache, backend)
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


def rope_norm_and_cache(
    positions: Int[Tensor, " T"],
    q_pe: Float[Tensor, "T N R"],
    kv_c: Float[Tensor, "T Lkv"],
    k_pe: Float[Tensor, "T R"],
    kv_cache: Float[Tensor, "num_blocks block_size head_size"],
    slot_mapping: Int64[Tensor, " slots"],
    norm_weight: Float[Tensor, " Lkv"],
    eps: float,
    rope: RopeConfig,
    *,
    frequencies: Float[Tensor, " R/2"] | None = None,
    backend: BackendChoice = None,
) -> tuple[Float[Tensor, "T N R"], Float[Tensor, "T Lkv"], Float[Tensor, "T R"]]:
    """`apply_rope`, `rms_norm` of the latent and `concat_and_cache_mla` in one.

    Args:
        positions: [T], position of each token in its request.
        q_pe: [T, N, R].
        kv_c: [T, Lkv], before its norm.
        k_pe: [T, R].
        kv_cache: written in place.
        slot_mapping: a slot for each of the first tokens, -1 = padding; tokens past its end are not written.
        norm_weight: [Lkv].
        eps: of the norm.
        rope: rotary parameters.
        frequencies: `rotary_frequencies(rope, R, float32 or float64)` on the device, where the caller keeps them.
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Returns:
        Rotated q_pe [T, N, R], normed latents [T, Lkv], rotated k_pe [T, R]: new tensors, the last two what is written.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; on a CPU a slot outside the cache. Nothing is
            written then.
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    check_tensor("kv_c", kv_c, ("T", "Lkv"))
    tokens, latent = kv_c.shape
    check_tensor("q_pe", q_pe, (tokens, "N", "R"), (kv_c.dtype,), kv_c.device)
    check_tensor("k_pe", k_pe, (tokens, q_pe.shape[2]), (kv_c.dtype,), kv_c.device)
    check_cache(kv_cache, latent + k_pe.shape[1], kv_c.dtype, kv_c.device)
    check_tensor("slot_mapping", slot_mapping, ("slots",), (torch.int64,), kv_c.device)
    check_tensor("norm_weight", norm_weight, (latent,), device=kv_c.device)
    check_number("eps", eps, 0)
    frequencies, magnitude = angles_of(positions, q_pe, rope, frequencies)
    chosen = _select("rope_norm_and_cache", kv_cache, backend)
    return torch.ops.mla_twins.rope_norm_and_cache(
        positions, q_pe, kv_c, k_pe, kv_cache, slot_mapping, norm_weight.to(kv_c.dtype), eps, frequencies, magnitude,
        rope.interleaved, chosen,
    )  # fmt: skip


@torch.library.custom_op(
    "mla_twins::rope_norm_and_cache",
    mutates_args=("kv_cache",),
    schema="(Tensor positions, Tensor q_pe, Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping,"
    " Tensor norm_weight, float eps, Tensor frequencies, float magnitude, bool interleaved, str backend)"
    " -> (Tensor, Tensor, Tensor)",
)
def _rope_norm_and_cache(
    positions, q_pe, kv_c, k_pe, kv_cache, slot_mapping, norm_weight, eps, frequencies, magnitude, interleaved, backend
):
    if kv_cache.device.type == "cpu":
        check_slots(slot_mapping[: kv_c.shape[0]], kv_cache.shape[0] * kv_cache.shape[1])
    return backends.kernel(backend, "rope_norm_and_cache")(
        positions, q_pe, kv_c, k_pe, kv_cache, slot_mapping, norm_weight, eps, frequencies, magnitude, interleaved
    )


@_rope_norm_and_cache.register_fake
def _(positions, q_pe, kv_c, k_pe, kv_cache, slot_mapping, norm_weight, eps, frequencies, magnitude, interleaved,
      backend):  # fmt: skip
    return q_pe.new_empty(q_pe.shape), kv_c.new_empty(kv_c.shape), k_pe.new_empty(k_pe.shape)


def gather_and_maybe_dequant_cache(
    kv_cache: Float[Tensor, "num_blocks block_size head_size"],
    block_table: Int32[Tensor, "B W"],
    cu_seq_lens: Int32[Tensor, " B+1"],
    starts: Int32[Tensor, " B"],
    num_tokens: int,
    *,
    out: Float[Tensor, "num_tokens head_size"] | None = None,
    backend: BackendChoice = None,
) -> Float[Tensor, "num_tokens head_size"]:
    """Copy a piece of each request's tokens out of the pages, packed one request after another; bit-exact.

    Request b contributes its tokens [starts[b], starts[b] + cu_seq_lens[b + 1] - cu_seq_lens[b]).

    Args:
        kv_cache: the cache.
        block_table: [B, W].
        cu_seq_lens: [B + 1], prefix sum of the pieces' lengths.
        starts: [B], first token of each piece.
        num_tokens: cu_seq_lens[-1].
        out: where to put the result, such as the head of a workspace.
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Returns:
        [num_tokens, Lkv + R]; `out` where given.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; on a CPU offsets that fall or a block outside the
            cache. Nothing is written then.
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    check_gather(kv_cache, block_table, cu_seq_lens, starts, num_tokens)
    chosen = _select("gather_and_maybe_dequant_cache", kv_cache, backend)
    if out is None:
        return torch.ops.mla_twins.gather_cache(kv_cache, block_table, cu_seq_lens, starts, num_tokens, chosen)
    check_tensor("out", out, (num_tokens, kv_cache.shape[2]), (kv_cache.dtype,), kv_cache.device)
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
    schema="(Tensor kv_cache, Tensor block_table, Tensor cu_seq_lens, Tensor starts, SymInt num_tokens, str backend)"
    " -> Tensor",
)
def _gather_cache(kv_cache, block_table, cu_seq_lens, starts, num_tokens, backend):
    out = kv_cache.new_empty(num_tokens, kv_cache.shape[2])
    torch.ops.mla_twins.gather_cache_out(kv_cache, block_table, cu_seq_lens, starts, out, backend)
    return out


@_gather_cache.register_fake
def _(kv_cache, block_table, cu_seq_lens, starts, num_tokens, backend):
    return kv_cache.new_empty(num_tokens, kv_cache.shape[2])


def copy_blocks(
    kv_caches: list[Float[Tensor, "num_blocks block_size head_size"]],
    block_mapping: Int64[Tensor, "pairs 2"],
    *,
    backend: BackendChoice = None,
) -> None:
    """Copy whole blocks within each cache (copy on write); bit-exact.

    Args:
        kv_caches: one cache a layer, all with the same number of blocks.
        block_mapping: [pairs, 2], (source block, target block).
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Raises:
        ValueError: a block outside the cache, written twice, or both read and written (on a CPU). Nothing is
            written then.
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    check_tensor("block_mapping", block_mapping, ("pairs", 2), (torch.int64,))
    check_readable("block_mapping", block_mapping)
    check_type("kv_caches", kv_caches, (list, tuple), "a list of caches")
    for kv_cache in kv_caches:
        check_cache(kv_cache)
        check_readable("kv_caches", kv_cache)
    if kv_caches:
        chosen = _select("copy_blocks", kv_caches[0], backend)
        torch.ops.mla_twins.copy_blocks(kv_caches, block_mapping, chosen)


@torch.library.custom_op(
    "mla_twins::copy_blocks",
    mutates_args=("kv_caches",),
    schema="(Tensor(a!)[] kv_caches, Tensor block_mapping, str backend) -> ()",
)
def _copy_blocks(kv_caches, block_mapping, backend):
    if block_mapping.device.type == "cpu":
        for kv_cache in kv_caches:
            check_block_mapping(block_mapping, kv_cache.shape[0], kv_cache.shape[0], same_cache=True)
    backends.kernel(backend, "copy_blocks")(kv_caches, block_mapping)


@_copy_blocks.register_fake
def _(kv_caches, block_mapping, backend):
    return None


def swap_blocks(
    source: Float[Tensor, "source_blocks block_size head_size"],
    target: Float[Tensor, "target_blocks block_size head_size"],
    block_mapping: Int64[Tensor, "pairs 2"],
    *,
    backend: BackendChoice = None,
) -> None:
    """Copy whole blocks from one cache into another, on the same or another device; bit-exact.

    Args:
        source: the cache that is read.
        target: the cache that is written; the same block size, entry width and dtype.
        block_mapping: [pairs, 2], (source block, target block).
        backend: a name, a mapping from op to name, or None for the choice by capability (`fast.backends`).

    Raises:
        ValueError: caches that do not fit, a block outside them or written twice (on a CPU). Nothing is written then.
        UnsupportedConfiguration: no backend, or not the named one, can serve.
    """
    check_swap(source, target, block_mapping)
    served = target if source.device.type == "cpu" else source  # between a host and a GPU the GPU's kernel set serves
    torch.ops.mla_twins.swap_blocks(source, target, block_mapping, _select("swap_blocks", served, backend))


@torch.library.custom_op(
    "mla_twins::swap_blocks",
    mutates_args=("target",),
    schema="(Tensor source, Tensor(a!) target, Tensor block_mapping, str backend) -> ()",
)
def _swap_blocks(source, target, block_mapping, backend):
    if block_mapping.device.type == "cpu":
        same_cache = source.data_ptr() == target.data_ptr()
        check_block_mapping(block_mapping, source.shape[0], target.shape[0], same_cache)
    backends.kernel(backend, "swap_blocks")(source, target, block_mapping)


@_swap_blocks.register_fake
def _(source, target, block_mapping, backend):
    return None
