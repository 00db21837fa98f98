"""The up-projections of the latent, for keys and for values (DeepSeek-V2, arXiv 2405.04434, section 2.1).

The matrices W_UK and W_UV are views of the weight of `kv_b_proj`, so nothing is copied. Each product is one `torch.bmm`
over the heads. `reference.mla.weights` explains the algebra; docs/glossary.md explains the letters of shapes.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reference.interfaces import (
    check,
    check_dtype,
    check_expansion,
    check_int,
    check_no_overlap,
    check_out,
    check_tensor,
    is_plain_linear,
    linear_output,
    split_for_keys,
)

from .. import backends


def dense_weight(linear: nn.Module, in_features: int, dtype: torch.dtype) -> Float[Tensor, "out Lkv"]:
    """Return the dense weight of a linear module, even if the module stores the weight in another form.

    The weight of a quantised or wrapped module is recovered from its products with the unit vectors.

    Args:
        linear: module that takes [.., Lkv] and returns the product, or (product, None) as vLLM and Megatron do.
        in_features: Lkv.
        dtype: dtype of the result and of the unit vectors.

    Returns:
        [out, Lkv]. For a plain linear of `dtype`, the result shares memory with the parameter.

    Raises:
        ValueError: the module has a bias, or its products have another shape than [rows, out].
    """
    check_int("in_features", in_features)
    check_dtype("dtype", dtype)
    if is_plain_linear(linear, dtype):
        check(linear.bias is None, "linear", "no bias", "a bias")
        return linear.weight.detach()
    device = next((t.device for t in _tensors_of(linear)), torch.device("cpu"))
    probes = torch.zeros(in_features + 1, in_features, dtype=dtype, device=device)
    probes[1:].fill_diagonal_(1)
    with torch.no_grad(), torch.inference_mode(False):  # the result may be overwritten outside of inference mode
        products = linear_output("linear", linear(probes))  # row 0 of `probes` is zero, so its product is the bias
        check_tensor("linear(identity)", products, (in_features + 1, "out"))
        check(not products[0].any(), "linear", "no bias", "a bias")
        return products[1:].to(dtype).T.contiguous()


def _tensors_of(linear: nn.Module) -> list[Tensor]:
    """Return all tensors of a module: parameters, buffers and plain attributes."""
    plain = (value for value in vars(linear).values() if isinstance(value, Tensor))
    return [*linear.parameters(), *linear.buffers(), *plain]


def split_kv_b_proj(
    kv_b_weight: Float[Tensor, "rows Lkv"], num_heads: int, qk_nope_head_dim: int, v_head_dim: int
) -> tuple[Float[Tensor, "Lkv N P"], Float[Tensor, "Lkv N V"]]:
    """Split the weight of `kv_b_proj` into the up-projections W_UK for keys and W_UV for values.

    Args:
        kv_b_weight: [N (P + V), Lkv]; each head has P rows for keys, then V rows for values.
        num_heads: N.
        qk_nope_head_dim: P.
        v_head_dim: V.

    Returns:
        W_UK [Lkv, N, P] and W_UV [Lkv, N, V], views of the weight.

    Raises:
        ValueError: the weight does not have N (P + V) rows.
    """
    _check_up_projection(kv_b_weight, num_heads, qk_nope_head_dim, v_head_dim)
    per_head = kv_b_weight.view(num_heads, qk_nope_head_dim + v_head_dim, -1).permute(2, 0, 1)
    return per_head.split([qk_nope_head_dim, v_head_dim], dim=-1)


@backends.CheckedOnce
def _check_up_projection(kv_b_weight, num_heads, qk_nope_head_dim, v_head_dim):
    for name, value in (("num_heads", num_heads), ("qk_nope_head_dim", qk_nope_head_dim), ("v_head_dim", v_head_dim)):
        check_int(name, value)
    check_tensor("kv_b_weight", kv_b_weight, (num_heads * (qk_nope_head_dim + v_head_dim), "Lkv"))


def absorb(
    w_uk: Float[Tensor, "Lkv N P"], w_uv: Float[Tensor, "Lkv N V"]
) -> tuple[Float[Tensor, "N P Lkv"], Float[Tensor, "N Lkv V"]]:
    """Transpose the up-projections into one matrix for each head, as the absorbed path needs them.

    Args:
        w_uk: [Lkv, N, P].
        w_uv: [Lkv, N, V].

    Returns:
        w_uk_t [N, P, Lkv] (query to latent) and w_uv [N, Lkv, V] (latent to value), views of the arguments.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    _check_absorption(w_uk, w_uv)
    return w_uk.permute(1, 2, 0), w_uv.transpose(0, 1)


@backends.CheckedOnce
def _check_absorption(w_uk, w_uv):
    check_tensor("w_uk", w_uk, ("Lkv", "N", "P"))
    check_tensor("w_uv", w_uv, (*w_uk.shape[:2], "V"), (w_uk.dtype,), w_uk.device)


def query_to_latent(q_nope: Float[Tensor, "T N P"], w_uk_t: Float[Tensor, "N P Lkv"]) -> Float[Tensor, "T N Lkv"]:
    """Multiply the query of each head by W_UK of this head: [T, N, P] -> [T, N, Lkv]. FLOPs: 2 T N P Lkv.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    _check_queries(q_nope, w_uk_t)
    return multiply_heads(q_nope, w_uk_t)


@backends.CheckedOnce
def _check_queries(q_nope, w_uk_t):
    check_tensor("q_nope", q_nope, ("T", "N", "P"))
    check_tensor("w_uk_t", w_uk_t, (*q_nope.shape[1:], "Lkv"), (q_nope.dtype,), q_nope.device)


def multiply_heads(x: Float[Tensor, "T N K"], weight: Float[Tensor, "N K M"]) -> Float[Tensor, "T N M"]:
    """Multiply the rows x[:, n] of each head n by weight[n]; the caller has checked the tensors."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def latent_to_value(
    latent: Float[Tensor, "T N Lkv"],
    w_uv: Float[Tensor, "N Lkv V"],
    *,
    out: Float[Tensor, "T N V"] | None = None,
) -> Float[Tensor, "T N V"]:
    """Multiply the output of the absorbed path by W_UV: [T, N, Lkv] -> [T, N, V]. FLOPs: 2 T N Lkv V.

    Args:
        latent: [T, N, Lkv], output of `mla_decode`.
        w_uv: [N, Lkv, V].
        out: tensor [T, N, V] that receives the result, with any strides; it must share no memory with the arguments.
            None allocates a tensor.

    Returns:
        [T, N, V]; the tensor `out` if `out` is given.

    Raises:
        ValueError: shapes, dtypes or devices do not match, or `out` overlaps an argument.
    """
    _check_latents(latent, w_uv)
    if out is None:
        return multiply_heads(latent, w_uv)
    shape = (*latent.shape[:2], w_uv.shape[2])
    check_out("out", out, shape, latent.dtype, latent.device, latent, w_uv)
    return write_values(latent, w_uv, out)


@backends.CheckedOnce
def _check_latents(latent, w_uv):
    check_tensor("latent", latent, ("T", "N", "Lkv"))
    check_tensor("w_uv", w_uv, (*latent.shape[1:], "V"), (latent.dtype,), latent.device)


def write_values(
    latent: Float[Tensor, "T N Lkv"], w_uv: Float[Tensor, "N Lkv V"], out: Float[Tensor, "T N V"]
) -> Float[Tensor, "T N V"]:
    """Compute `latent_to_value` without checks, write the result to `out`, and return `out`."""
    _bmm_into(latent.transpose(0, 1), w_uv, out.transpose(0, 1))
    return out


def expand_kv(
    kv_c_normed: Float[Tensor, "S Lkv"],
    w_uk: Float[Tensor, "Lkv N P"],
    w_uv: Float[Tensor, "Lkv N V"],
    *,
    workspace: Float[Tensor, " elements"] | None = None,
) -> tuple[Float[Tensor, "S N P"], Float[Tensor, "S N V"]]:
    """Expand latents into keys (without their rope part) and values of every head. FLOPs: 2 S N Lkv (P + V).

    Args:
        kv_c_normed: [S, Lkv], RMS-normed latents.
        w_uk: [Lkv, N, P].
        w_uv: [Lkv, N, V].
        workspace: contiguous vector that receives the results; it must share no memory with the arguments.
            `reference.mla.weights.expand_kv` gives its size. None allocates tensors.

    Returns:
        k_nope [S, N, P] and v [S, N, V]; k_nope[:, n] and v[:, n] of each head n are contiguous. Both are views of
        `workspace` if it is given.

    Raises:
        ValueError: shapes, dtypes or devices do not match; `workspace` is too small or overlaps an argument.
    """
    if workspace is not None:  # checked in every call: a signature does not show whether two tensors share memory
        _check_expansion(kv_c_normed, w_uk, w_uv, workspace)
        check_no_overlap(workspace, kv_c_normed, w_uk, w_uv)
    return expand_into(kv_c_normed, w_uk, w_uv, workspace)


_check_expansion = backends.CheckedOnce(check_expansion)


def expand_into(
    kv_c_normed: Float[Tensor, "S Lkv"],
    w_uk: Float[Tensor, "Lkv N P"],
    w_uv: Float[Tensor, "Lkv N V"],
    workspace: Float[Tensor, " elements"] | None,
) -> tuple[Float[Tensor, "S N P"], Float[Tensor, "S N V"]]:
    """Compute `expand_kv` without the check that `workspace` overlaps no argument."""
    _check_expansion(kv_c_normed, w_uk, w_uv, workspace)
    tokens, heads = kv_c_normed.shape[0], w_uk.shape[1]
    by_head = kv_c_normed.expand(heads, -1, -1)  # [N, S, Lkv], no copy
    if workspace is None:
        k_nope, v = (torch.bmm(by_head, weight.transpose(0, 1)) for weight in (w_uk, w_uv))
        return k_nope.transpose(0, 1), v.transpose(0, 1)
    parts = split_for_keys(workspace, tokens, heads, w_uk.shape[2], w_uv.shape[2])
    k_nope, v = (part.view(heads, tokens, weight.shape[2]) for part, weight in zip(parts, (w_uk, w_uv), strict=True))
    for made, weight in ((k_nope, w_uk), (v, w_uv)):
        _bmm_into(by_head, weight.transpose(0, 1), made)
    return k_nope.transpose(0, 1), v.transpose(0, 1)


def _bmm_into(a: Float[Tensor, "N T K"], b: Float[Tensor, "N K M"], out: Float[Tensor, "N T M"]) -> None:
    """Write the batched product a b into `out`, which may have any strides.

    `torch.compile` cannot trace `torch.bmm(out=)` into a tensor that is not contiguous, so compiled code calls a custom
    op.
    """
    if torch.compiler.is_compiling():
        torch.ops.mla_twins.bmm_out(a, b, out)
    elif torch.is_grad_enabled():
        with torch.no_grad():
            torch.bmm(a, b, out=out)
    else:
        torch.bmm(a, b, out=out)


@torch.library.custom_op(
    "mla_twins::bmm_out", mutates_args=("out",), schema="(Tensor a, Tensor b, Tensor(a!) out) -> ()"
)
def _bmm_out(a, b, out):
    torch.bmm(a, b, out=out)


@_bmm_out.register_fake
def _(a, b, out):
    return None
