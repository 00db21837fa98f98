"""Convert cache entries to the form in which a cache format stores them, and back.

`reference.cache.formats` explains the rounding, numbers beyond the largest e4m3 number, and NaN.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from reference.interfaces import (
    COMPUTE_FORMAT,
    CacheFormat,
    check_dtype,
    check_entries,
    check_out,
    check_scale_values,
    check_stored_entries,
    format_named,
)

from .. import backends
from ..backends import BackendChoice


def quantize_entries(
    kv_c_normed: Float[Tensor, "T Lkv"],
    k_pe: Float[Tensor, "T R"],
    cache_format: CacheFormat = COMPUTE_FORMAT,
    kv_scale: Float[Tensor, ""] | None = None,
    *,
    backend: BackendChoice = None,
) -> Shaped[Tensor, "T columns"]:
    """Return the cache entries of some tokens in the form in which a cache stores them.

    See `reference.cache.formats.quantize_entries` for the scales and for the rounding.

    Args:
        kv_c_normed: [T, Lkv], normed latents.
        k_pe: [T, R], rotated keys.
        cache_format: format of the cache.
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        [T, columns] in the dtype of the cache, a new tensor.

    Raises:
        ValueError: shapes, dtypes or devices do not match; the format does not support the dims. For CPU tensors also:
            the scale is not finite and positive.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    signature = _QUANTIZES.signature(kv_c_normed, k_pe, cache_format, kv_scale, backend)
    chosen = _QUANTIZES.backend_of(signature)
    if chosen is None:
        check_entries(kv_c_normed, k_pe, cache_format, kv_scale)
        widths = (("kv_lora_rank", kv_c_normed.shape[1]), ("qk_rope_head_dim", k_pe.shape[1]))
        request = backends.KernelRequest(
            "quantize_entries", kv_c_normed.device, kv_c_normed.dtype, widths, cache_format=cache_format
        )
        chosen = backends.select(request, backend).name
    columns, dtype = (
        cache_format.columns(kv_c_normed.shape[1], k_pe.shape[1]),
        cache_format.dtype_for(kv_c_normed.dtype),
    )
    return _QUANTIZES.run(signature, chosen, kv_c_normed, k_pe, columns, dtype, cache_format.name, kv_scale)


def _new_entries(kv_c_normed, k_pe, columns, dtype, cache_format, kv_scale, backend):
    return kv_c_normed.new_empty(kv_c_normed.shape[0], columns, dtype=dtype)


def _launch_quantize(kv_c_normed, k_pe, columns, dtype, cache_format, kv_scale, backend):
    check_scale_values("kv_scale", kv_scale)
    out = _new_entries(kv_c_normed, k_pe, columns, dtype, cache_format, kv_scale, backend)
    backends.kernel(backend, "quantize_entries")(kv_c_normed, k_pe, out, format_named(cache_format), kv_scale)
    return out


_quantize_entries = torch.library.custom_op(
    "mla_twins::quantize_entries",
    _launch_quantize,
    mutates_args=(),
    schema="(Tensor kv_c_normed, Tensor k_pe, SymInt columns, ScalarType dtype, str cache_format, Tensor? kv_scale,"
    " str backend) -> Tensor",
)
_quantize_entries.register_fake(_new_entries)
_QUANTIZES = backends.CheckedCalls(torch.ops.mla_twins.quantize_entries, _launch_quantize)


def dequantize_entries(
    entries: Shaped[Tensor, "S columns"],
    cache_format: CacheFormat = COMPUTE_FORMAT,
    out_dtype: torch.dtype | None = None,
    kv_scale: Float[Tensor, ""] | None = None,
    *,
    out: Float[Tensor, "S head_size"] | None = None,
    backend: BackendChoice = None,
) -> Float[Tensor, "S head_size"]:
    """Return stored cache entries as numbers, dequantised if the format has scales.

    See `reference.cache.formats.dequantize_entries` for the rounding.

    Args:
        entries: [S, columns], stored entries.
        cache_format: format of the cache.
        out_dtype: dtype of the result; None means the dtype of `entries`. It must be given if the format has a
            `storage_dtype`.
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale.
        out: tensor [S, Lkv + R] in `out_dtype` that receives the result; `out` must share no memory with the
            other arguments. None allocates a tensor.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        The tensor `out` if it is given; otherwise a new tensor [S, Lkv + R] in `out_dtype`.

    Raises:
        ValueError: shapes, dtypes or devices do not match, or `out` overlaps another argument or itself. For CPU
            tensors also: the scale is not finite and positive. Nothing has been written when the error is raised.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    calls = _DEQUANTIZES if out is None else _DEQUANTIZES_INTO
    signature = calls.signature(entries, cache_format, out_dtype, kv_scale, out, backend)
    chosen = calls.backend_of(signature)
    if chosen is None:
        dtype = check_stored_entries(entries, cache_format, out_dtype, kv_scale)
        check_dtype("out_dtype", dtype)
        request = backends.KernelRequest(
            "dequantize_entries", entries.device, dtype, (("head_dim", entries.shape[1]),), out_dtype=dtype,
            cache_format=cache_format,
        )  # fmt: skip
        chosen = backends.select(request, backend).name
    dtype = cache_format.gathered_dtype(entries.dtype, out_dtype)
    width = cache_format.gathered_width(entries.shape[1], dtype)
    if out is not None:  # check `out` in every call: which tensors overlap cannot be seen from their shapes
        inputs = (entries,) if kv_scale is None else (entries, kv_scale)
        check_out("out", out, (entries.shape[0], width), dtype, entries.device, *inputs)
        _DEQUANTIZES_INTO.run(signature, chosen, entries, cache_format.name, kv_scale, out)
        return out
    return _DEQUANTIZES.run(signature, chosen, entries, width, dtype, cache_format.name, kv_scale)


def _launch_dequantize_into(entries, cache_format, kv_scale, out, backend):
    check_scale_values("kv_scale", kv_scale)
    backends.kernel(backend, "dequantize_entries")(entries, out, format_named(cache_format), kv_scale)


_dequantize_entries_out = torch.library.custom_op(
    "mla_twins::dequantize_entries_out",
    _launch_dequantize_into,
    mutates_args=("out",),
    schema="(Tensor entries, str cache_format, Tensor? kv_scale, Tensor(a!) out, str backend) -> ()",
)
_DEQUANTIZES_INTO = backends.CheckedCalls(
    torch.ops.mla_twins.dequantize_entries_out, _launch_dequantize_into, mutates=(3,)
)


@_dequantize_entries_out.register_fake
def _(entries, cache_format, kv_scale, out, backend):
    return None


def _new_numbers(entries, width, out_dtype, cache_format, kv_scale, backend):
    return entries.new_empty(entries.shape[0], width, dtype=out_dtype)


def _launch_dequantize(entries, width, out_dtype, cache_format, kv_scale, backend):
    out = _new_numbers(entries, width, out_dtype, cache_format, kv_scale, backend)
    _launch_dequantize_into(entries, cache_format, kv_scale, out, backend)
    return out


_dequantize_entries = torch.library.custom_op(
    "mla_twins::dequantize_entries",
    _launch_dequantize,
    mutates_args=(),
    schema="(Tensor entries, SymInt width, ScalarType out_dtype, str cache_format, Tensor? kv_scale, str backend)"
    " -> Tensor",
)
_dequantize_entries.register_fake(_new_numbers)
_DEQUANTIZES = backends.CheckedCalls(torch.ops.mla_twins.dequantize_entries, _launch_dequantize)
