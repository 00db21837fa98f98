"""One op that rotates queries and keys, norms the latents and writes the new cache entries.

`MLAAttention.forward` calls this op. `forward_attention`, which gets rotated keys and normed latents, calls
`concat_and_cache_mla` of `fast/cache/latent.py` instead.

docs/glossary.md explains the terms and the letters of shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Int64, Shaped
from torch import Tensor

from reference.interfaces import (
    COMPUTE_FORMAT,
    E4M3,
    CacheFormat,
    GraphSupport,
    RopeConfig,
    check,
    check_formatted_cache,
    check_number,
    check_scale,
    check_scale_values,
    check_slots,
    check_tensor,
    format_named,
)

from .. import backends
from ..attention.rope import angles_of, check_angles
from ..backends import BackendChoice


@dataclass(frozen=True, eq=False)
class WrittenTokens:
    """Results of `rope_norm_and_cache`. The object unpacks: `q_pe, kv_c_normed, k_pe = written`.

    Attributes:
        q_pe: [T, N, R], rotated rope parts of the queries; in e4m3 (8 bits) if the call has a `q_scale`.
        kv_c_normed: [T, Lkv], normed latents.
        k_pe: [T, R], rotated rope parts of the keys.
    """

    q_pe: Shaped[Tensor, "T N R"]
    kv_c_normed: Float[Tensor, "T Lkv"]
    k_pe: Float[Tensor, "T R"]

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the fields in their order."""
        yield self.q_pe
        yield self.kv_c_normed
        yield self.k_pe


def rope_norm_and_cache(
    positions: Int[Tensor, " T"],
    q_pe: Float[Tensor, "T N R"],
    kv_c: Float[Tensor, "T Lkv"],
    k_pe: Float[Tensor, "T R"],
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    slot_mapping: Int64[Tensor, " slots"],
    norm_weight: Float[Tensor, " Lkv"],
    eps: float,
    rope: RopeConfig,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    kv_scale: Float[Tensor, ""] | None = None,
    q_scale: Float[Tensor, "*heads"] | None = None,
    *,
    frequencies: Float[Tensor, " R/2"] | None = None,
    graph: GraphSupport = GraphSupport.NONE,
    backend: BackendChoice = None,
) -> WrittenTokens:
    """Compute `apply_rope`, `rms_norm` of the latents and `concat_and_cache_mla` in one kernel.

    Args:
        positions: [T], position of each token in its request.
        q_pe: [T, N, R], rope parts of the queries.
        kv_c: [T, Lkv], latents before the norm.
        k_pe: [T, R], rope part of the keys, shared by all heads.
        kv_cache: cache, written in place.
        slot_mapping: cache slots of the tokens. A token with slot -1 (padding) is not written. If there are fewer than
            T slots, the last tokens are not written.
        norm_weight: [Lkv].
        eps: epsilon of the norm.
        rope: rotary parameters.
        cache_format: format of the cache. A format with scales stores exactly what `quantize_entries` returns for the
            normed latents and the rotated keys.
        kv_scale: float32 scale of the layer's cache; None if the format has no such scale.
        q_scale: float32 scale, [] or [N], with which the rotated `q_pe` is quantised to e4m3 (8 bits); only for a
            format with scales. None keeps the dtype of `q_pe`.
        frequencies: result of `rotary_frequencies` in float32 or float64 on the device of `q_pe`; None computes the
            frequencies in this call.
        graph: kind of the CUDA graph that contains the call; NONE if no graph contains the call.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        Rotated `q_pe` [T, N, R], normed latents [T, Lkv] and rotated `k_pe` [T, R], all new tensors. If `q_scale` is
        given, the rotated `q_pe` is in e4m3.

    Raises:
        ValueError: shapes, dtypes or devices do not match; for CPU tensors, a slot is outside the cache or a scale is
            not finite and positive. Nothing has been written then.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    signature = _WRITES.signature(
        positions, q_pe, kv_c, k_pe, kv_cache, slot_mapping, norm_weight, eps, rope, cache_format, kv_scale,
        q_scale, frequencies, graph, backend,
    )  # fmt: skip
    chosen = _WRITES.backend_of(signature)
    if chosen is None:
        check_tensor("kv_c", kv_c, ("T", "Lkv"))
        tokens, latent = kv_c.shape
        check_tensor("q_pe", q_pe, (tokens, "N", "R"), (kv_c.dtype,), kv_c.device)
        check_tensor("k_pe", k_pe, (tokens, q_pe.shape[2]), (kv_c.dtype,), kv_c.device)
        check_formatted_cache(kv_cache, cache_format, latent, k_pe.shape[1], kv_c.dtype, kv_c.device, kv_scale)
        check_tensor("slot_mapping", slot_mapping, ("slots",), (torch.int64,), kv_c.device)
        check_tensor("norm_weight", norm_weight, (latent,), device=kv_c.device)
        check_number("eps", eps, 0)
        check_angles(positions, q_pe, rope, frequencies)
        out_dtype = None
        if q_scale is not None:
            check_scale("q_scale", q_scale, q_pe.shape[1], q_pe.device)
            check(cache_format.scaled, "q_scale", f"None for format {cache_format.name}", "a scale")
            out_dtype = E4M3
        widths = (("kv_lora_rank", kv_c.shape[1]), ("qk_rope_head_dim", k_pe.shape[1]))
        request = backends.cache_request(
            "rope_norm_and_cache", kv_cache, widths, cache_format, kv_c.dtype, out_dtype, graph
        )
        chosen = backends.select(request, backend).name
    frequencies, magnitude = angles_of(q_pe, rope, frequencies)
    if norm_weight.dtype is not kv_c.dtype:
        norm_weight = norm_weight.to(kv_c.dtype)
    written = _WRITES.run(
        signature, chosen, positions, q_pe, kv_c, k_pe, kv_cache, slot_mapping, norm_weight, eps, frequencies,
        magnitude, rope.interleaved, cache_format.name, kv_scale, q_scale,
    )  # fmt: skip
    return WrittenTokens(*written)


def _launch_write(positions, q_pe, kv_c, k_pe, kv_cache, slot_mapping, norm_weight, eps, frequencies, magnitude,
                  interleaved, cache_format, kv_scale, q_scale, backend):  # fmt: skip
    if kv_cache.device.type == "cpu":
        check_slots(slot_mapping[: kv_c.shape[0]], kv_cache.shape[0] * kv_cache.shape[1])
        check_scale_values("kv_scale", kv_scale)
        check_scale_values("q_scale", q_scale)
    scale = () if q_scale is None else (q_scale,)
    return backends.kernel(backend, "rope_norm_and_cache")(
        positions, q_pe, kv_c, k_pe, kv_cache, slot_mapping, norm_weight, eps, frequencies, magnitude, interleaved,
        format_named(cache_format), kv_scale, *scale,
    )  # fmt: skip


_rope_norm_and_cache = torch.library.custom_op(
    "mla_twins::rope_norm_and_cache",
    _launch_write,
    mutates_args=("kv_cache",),
    schema="(Tensor positions, Tensor q_pe, Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping,"
    " Tensor norm_weight, float eps, Tensor frequencies, float magnitude, bool interleaved, str cache_format,"
    " Tensor? kv_scale, Tensor? q_scale, str backend) -> (Tensor, Tensor, Tensor)",
)
_WRITES = backends.CheckedCalls(torch.ops.mla_twins.rope_norm_and_cache, _launch_write, mutates=(4,))


@_rope_norm_and_cache.register_fake
def _(positions, q_pe, kv_c, k_pe, kv_cache, slot_mapping, norm_weight, eps, frequencies, magnitude, interleaved,
      cache_format, kv_scale, q_scale, backend):  # fmt: skip
    q_dtype = q_pe.dtype if q_scale is None else E4M3
    return q_pe.new_empty(q_pe.shape, dtype=q_dtype), kv_c.new_empty(kv_c.shape), k_pe.new_empty(k_pe.shape)
