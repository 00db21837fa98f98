"""Expand latents by calling the module `kv_b_proj` itself; `reference.mla.module_expansion` explains why."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from reference.interfaces import check_module_expansion, check_tensor, linear_output

from .. import backends


def expand_kv_by_module(
    kv_c_normed: Float[Tensor, "S Lkv"], kv_b_proj: nn.Module, num_heads: int, qk_nope_head_dim: int, v_head_dim: int
) -> tuple[Float[Tensor, "S N P"], Float[Tensor, "S N V"]]:
    """Expand latents into keys (without their rope part) and values of every head by calling `kv_b_proj`.

    See `reference.mla.module_expansion.expand_kv_by_module` for the difference between the result and the result of
    `expand_kv`.

    Args:
        kv_c_normed: [S, Lkv], normed latents.
        kv_b_proj: module that takes [S, Lkv] and returns [S, N (P + V)], or (product, None) as in vLLM and Megatron.
        num_heads: N.
        qk_nope_head_dim: P.
        v_head_dim: V.

    Returns:
        k_nope [S, N, P] and v [S, N, V], views of the memory that the module allocated. In this memory, the V elements
        of `v` for a head follow the P elements of `k_nope` for the same head.

    Raises:
        ValueError: the latents are not on the device of the module, or the product has another shape, dtype or device.
    """
    check_module_expansion(kv_c_normed, kv_b_proj, num_heads, qk_nope_head_dim, v_head_dim)
    with backends.CallsOfOthers():
        product = linear_output("kv_b_proj", kv_b_proj(kv_c_normed))
    shape = kv_c_normed.shape[0], num_heads * (qk_nope_head_dim + v_head_dim)
    check_tensor("kv_b_proj(kv_c_normed)", product, shape, (kv_c_normed.dtype,), kv_c_normed.device)
    per_head = product.unflatten(1, (num_heads, -1))
    k_nope, v = per_head.split_with_sizes([qk_nope_head_dim, v_head_dim], dim=-1)
    backends.confirm(k_nope, v)
    return k_nope, v
