"""Expand latents by calling `kv_b_proj` itself, without a dense copy of its weight.

A quantised `kv_b_proj` stores its weight in few bits, and a call of the module reads this stored weight. `expand_kv`
needs the dense weight instead, which has more bytes.
"""

from __future__ import annotations

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ..interfaces import check_module_expansion, check_tensor, linear_output


def expand_kv_by_module(
    kv_c_normed: Float[Tensor, "S Lkv"], kv_b_proj: nn.Module, num_heads: int, qk_nope_head_dim: int, v_head_dim: int
) -> tuple[Float[Tensor, "S N P"], Float[Tensor, "S N V"]]:
    """Expand latents into keys (without their rope part) and values of every head by calling `kv_b_proj`.

    The result differs from `expand_kv` with the dense weight of the module (`dense_weight`) by rounding alone: a
    quantised module may round the latents, and the dense weight is rounded to the dtype of the latents.

    Args:
        kv_c_normed: [S, Lkv], normed latents.
        kv_b_proj: module that takes [S, Lkv] and returns [S, N (P + V)], or (product, None) as in vLLM and Megatron.
        num_heads: N.
        qk_nope_head_dim: P.
        v_head_dim: V.

    Returns:
        k_nope [S, N, P] and v [S, N, V], views of the memory that the module allocated.

    Raises:
        ValueError: the latents are not on the device of the module, or its product has another shape, dtype or device.
    """
    check_module_expansion(kv_c_normed, kv_b_proj, num_heads, qk_nope_head_dim, v_head_dim)
    product = linear_output("kv_b_proj", kv_b_proj(kv_c_normed))
    shape = kv_c_normed.shape[0], num_heads * (qk_nope_head_dim + v_head_dim)
    check_tensor("kv_b_proj(kv_c_normed)", product, shape, (kv_c_normed.dtype,), kv_c_normed.device)
    per_head = rearrange(product, "tokens (heads dim) -> tokens heads dim", heads=num_heads)
    return per_head[..., :qk_nope_head_dim], per_head[..., qk_nope_head_dim:]
