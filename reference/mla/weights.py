"""The up-projections of the latent, and their absorption (DeepSeek-V2, arXiv 2405.04434, section 2.1).

`kv_b_proj` turns a latent c [Lkv] into the key W_UK c [P] and the value W_UV c [V] of each head. Absorption applies
both matrices to the query tokens instead of the cached tokens, so that attention runs on the latents themselves. Here q
is the query of a head, and p_s is the softmax probability of cached token s:

- (W_UK c) . q = c . (W_UK^T q), so W_UK can be applied to the query before attention.
- sum_s p_s (W_UV c_s) = W_UV (sum_s p_s c_s), so W_UV can be applied to the output after attention.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ..interfaces import (
    check,
    check_dtype,
    check_expansion,
    check_int,
    check_no_overlap,
    check_tensor,
    is_plain_linear,
    linear_output,
    split_for_keys,
)


def dense_weight(linear: nn.Module, in_features: int, dtype: torch.dtype) -> Float[Tensor, "out Lkv"]:
    """Return the weight W [out, Lkv] of a linear module as a dense tensor, also if the module stores W in another form.

    For a plain `nn.Linear` of `dtype` the result is the parameter of the module, detached but not copied. For any other
    module (quantised, wrapped, hooked) the function applies the module to the Lkv unit vectors; the outputs are the
    rows of W^T.

    Args:
        linear: module that takes [.., Lkv] and returns the product, or (product, None) as in vLLM and Megatron.
        in_features: Lkv.
        dtype: dtype of the result and of the unit vectors.

    Returns:
        [out, Lkv].

    Raises:
        ValueError: the module has a bias, or its output for the unit vectors is not [Lkv, out].
    """
    check_int("in_features", in_features)
    check_dtype("dtype", dtype)
    if is_plain_linear(linear, dtype):
        check(linear.bias is None, "linear", "no bias", "a bias")
        return linear.weight.detach()
    device = next((t.device for t in _tensors_of(linear)), torch.device("cpu"))
    with torch.no_grad(), torch.inference_mode(False):  # an inference tensor could not be overwritten later
        unit_vectors = torch.eye(in_features, dtype=dtype, device=device)
        at_zero = linear_output("linear", linear(torch.zeros_like(unit_vectors[:1])))
        check(not at_zero.any(), "linear", "no bias", "a bias")
        columns = linear_output("linear", linear(unit_vectors))
        check_tensor("linear(identity)", columns, (in_features, "out"))
        return columns.to(dtype).T.contiguous()


def _tensors_of(linear: nn.Module) -> list[Tensor]:
    """Return the tensors of a module: its parameters, its buffers and its attributes that are tensors."""
    plain = (value for value in vars(linear).values() if isinstance(value, Tensor))
    return [*linear.parameters(), *linear.buffers(), *plain]


def split_kv_b_proj(
    kv_b_weight: Float[Tensor, "rows Lkv"], num_heads: int, qk_nope_head_dim: int, v_head_dim: int
) -> tuple[Float[Tensor, "Lkv N P"], Float[Tensor, "Lkv N V"]]:
    """Split the weight of `kv_b_proj` into the key and the value up-projection.

    Args:
        kv_b_weight: [N (P + V), Lkv]; each head has P rows for its keys, then V rows for its values.
        num_heads: N.
        qk_nope_head_dim: P.
        v_head_dim: V.

    Returns:
        W_UK [Lkv, N, P] and W_UV [Lkv, N, V], views of the weight.

    Raises:
        ValueError: the weight does not have N (P + V) rows.
    """
    for name, value in (("num_heads", num_heads), ("qk_nope_head_dim", qk_nope_head_dim), ("v_head_dim", v_head_dim)):
        check_int(name, value)
    check_tensor("kv_b_weight", kv_b_weight, (num_heads * (qk_nope_head_dim + v_head_dim), "Lkv"))
    per_head = rearrange(kv_b_weight, "(heads dim) latent -> latent heads dim", heads=num_heads)
    return per_head[..., :qk_nope_head_dim], per_head[..., qk_nope_head_dim:]


def absorb(
    w_uk: Float[Tensor, "Lkv N P"], w_uv: Float[Tensor, "Lkv N V"]
) -> tuple[Float[Tensor, "N P Lkv"], Float[Tensor, "N Lkv V"]]:
    """Permute the up-projections for the absorbed path: one matrix for each head.

    Args:
        w_uk: [Lkv, N, P], key up-projection.
        w_uv: [Lkv, N, V], value up-projection.

    Returns:
        w_uk_t [N, P, Lkv] for `query_to_latent` and w_uv [N, Lkv, V] for `latent_to_value`, views of the arguments.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    check_tensor("w_uk", w_uk, ("Lkv", "N", "P"))
    check_tensor("w_uv", w_uv, (*w_uk.shape[:2], "V"), (w_uk.dtype,), w_uk.device)
    w_uk_t = rearrange(w_uk, "latent heads nope -> heads nope latent")
    return w_uk_t, rearrange(w_uv, "latent heads value -> heads latent value")


def query_to_latent(q_nope: Float[Tensor, "T N P"], w_uk_t: Float[Tensor, "N P Lkv"]) -> Float[Tensor, "T N Lkv"]:
    """Absorb W_UK into the query: [T, N, P] -> [T, N, Lkv]. FLOPs: 2 T N P Lkv.

    Args:
        q_nope: [T, N, P], query parts without rope.
        w_uk_t: [N, P, Lkv], from `absorb`.

    Returns:
        [T, N, Lkv], queries that can attend the cached latents.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    check_tensor("q_nope", q_nope, ("T", "N", "P"))
    check_tensor("w_uk_t", w_uk_t, (*q_nope.shape[1:], "Lkv"), (q_nope.dtype,), q_nope.device)
    return einsum(q_nope, w_uk_t, "tokens heads nope, heads nope latent -> tokens heads latent")


def latent_to_value(latent: Float[Tensor, "T N Lkv"], w_uv: Float[Tensor, "N Lkv V"]) -> Float[Tensor, "T N V"]:
    """Apply W_UV to the output of absorbed attention: [T, N, Lkv] -> [T, N, V]. FLOPs: 2 T N Lkv V.

    Args:
        latent: [T, N, Lkv], output of `mla_decode`.
        w_uv: [N, Lkv, V], from `absorb`.

    Returns:
        [T, N, V], the output of each head.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    check_tensor("latent", latent, ("T", "N", "Lkv"))
    check_tensor("w_uv", w_uv, (*latent.shape[1:], "V"), (latent.dtype,), latent.device)
    return einsum(latent, w_uv, "tokens heads latent, heads latent value -> tokens heads value")


def expand_kv(
    kv_c_normed: Float[Tensor, "S Lkv"],
    w_uk: Float[Tensor, "Lkv N P"],
    w_uv: Float[Tensor, "Lkv N V"],
    *,
    workspace: Float[Tensor, " elements"] | None = None,
) -> tuple[Float[Tensor, "S N P"], Float[Tensor, "S N V"]]:
    """Expand latents into keys (without their rope part) and values of every head. FLOPs: 2 S N Lkv (P + V).

    Args:
        kv_c_normed: [S, Lkv], normed latents.
        w_uk: [Lkv, N, P], key up-projection.
        w_uv: [Lkv, N, V], value up-projection.
        workspace: memory for the results, a contiguous vector in the dtype and on the device of `kv_c_normed`. It must
            not overlap the other arguments. `k_nope` takes the first S N P elements, and `v` begins at the next
            multiple of 128 elements. None allocates the results.

    Returns:
        k_nope [S, N, P] and v [S, N, V]; views of `workspace` if it is given.

    Raises:
        ValueError: shapes, dtypes or devices do not match; `workspace` is too small or overlaps an argument.
    """
    check_expansion(kv_c_normed, w_uk, w_uv, workspace)
    check_no_overlap(workspace, kv_c_normed, w_uk, w_uv)
    k_nope = einsum(kv_c_normed, w_uk, "tokens latent, latent heads nope -> tokens heads nope")
    v = einsum(kv_c_normed, w_uv, "tokens latent, latent heads value -> tokens heads value")
    if workspace is None:
        return k_nope, v
    keys, values = split_for_keys(workspace, *k_nope.shape, v.shape[2])
    return keys.view(k_nope.shape).copy_(k_nope), values.view(v.shape).copy_(v)
