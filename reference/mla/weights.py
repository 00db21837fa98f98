"""The up-projections of the latent, and their absorption (DeepSeek-V2, arXiv 2405.04434, section 2.1).

`kv_b_proj` turns a latent c [Lkv] into the key W_UK c [P] and the value W_UV c [V] of each head. Absorption applies
both matrices to the query tokens instead of the cached tokens, so that attention runs on the latents themselves. Here q
is the query of a head, and p_s is the softmax probability of cached token s:

- (W_UK c) . q = c . (W_UK^T q), so W_UK can be applied to the query before attention.
- sum_s p_s (W_UV c_s) = W_UV (sum_s p_s c_s), so W_UV can be applied to the output after attention.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange, reduce
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from ..interfaces import (
    LEAST_WEIGHT,
    QuantizedWeight,
    check,
    check_dtype,
    check_expansion,
    check_int,
    check_no_overlap,
    check_output_scale,
    check_scale,
    check_scale_values,
    check_tensor,
    check_weight,
    check_weight_to_quantize,
    e4m3_scale,
    is_plain_linear,
    linear_output,
    split_for_keys,
    to_e4m3,
    wide_dtype,
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


def quantize_weight(weight: Float[Tensor, "N K M"], per_head: bool = False) -> QuantizedWeight:
    """Store an absorbed weight in e4m3 (8 bits), with one scale for the weight or one scale for each head.

    The largest absolute value becomes the largest e4m3 number, 448. If the largest absolute value is below 1e-10, the
    scale maps 1e-10 to 448, so that a weight of zeros has a scale above 0.

    The function reads no value on the host, so it accepts weights that are not finite. NaN stays NaN and does not
    change the scale. An infinite weight is stored as 448 or -448, and its scale is the largest float32 number / 448,
    about 7.6e35. Ordinary weights with the same scale are then stored as 0. If a weight may have such numbers, check it
    with `torch.isfinite` first.

    e4m3 has a relative error of at most 1/16 for quotients of at least 2^-6; smaller quotients lose digits. One scale
    for the weight therefore costs precision in heads whose weights are much smaller than the largest weight. The table
    shows this for 16 heads of random weights, after the weights of one head were multiplied by a factor. The errors in
    the table are relative errors of the other 15 heads: the root mean square of the error, divided by the root mean
    square of the weights.

    | factor | one scale for the weight | one scale for each head |
    |---|---|---|
    | 1 | 2.6e-2 | 2.6e-2 |
    | 1e3 | 2.6e-2 | 2.6e-2 |
    | 1e4 | 5.3e-2 | 2.6e-2 |
    | 1e5 | 5.2e-1 | 2.6e-2 |

    One scale for each head is never worse, and a product then reads only one more float32 number for each head. A layer
    with `fp8_weights` therefore has one scale for each head. One scale for the weight is the default of this function,
    because many checkpoints and kernels of other projects have only this kind of scale.

    Args:
        weight: [N, K, M], from `absorb`.
        per_head: whether each head has its own scale.

    Returns:
        The quantised weight, with a scale [] or [N], for `query_to_latent` or `latent_to_value`.

    Raises:
        ValueError: shape or dtype do not match.
    """
    check_weight_to_quantize(weight, per_head)
    sizes = torch.nan_to_num(weight.to(torch.float32).abs(), nan=0.0, posinf=torch.finfo(torch.float32).max)
    largest = reduce(sizes, "heads k m -> heads" if per_head else "heads k m ->", "max")
    scale = e4m3_scale(largest.clamp(min=LEAST_WEIGHT))
    return QuantizedWeight(to_e4m3(weight, _for_heads(scale, "heads -> heads 1 1")), scale)


def _for_heads(scale: Float[Tensor, "*heads"], pattern: str) -> Float[Tensor, "*any"]:
    """Return a scale [N] rearranged by the einops `pattern`; return a scale [] unchanged."""
    return scale if scale.dim() == 0 else rearrange(scale, pattern)


def _multiply_heads(
    x: Float[Tensor, "T N K"],
    argument: str,
    weight: Float[Tensor, "N K M"] | QuantizedWeight,
    scale: Float[Tensor, "*heads"] | None,
) -> Shaped[Tensor, "T N M"]:
    """Return the product of the rows of each head and the matrix of this head; in e4m3 if `scale` is given.

    `argument` is the name of the weight in an error message.

    Sums are computed in the dtype of `x` if there is neither a quantised weight nor a scale. Otherwise they are
    computed in float32 (float64 if `x` is float64), and the result is rounded once.
    """
    product = "tokens heads k, heads k m -> tokens heads m"
    if scale is None and not isinstance(weight, QuantizedWeight):
        return einsum(x, weight, product)
    wide = wide_dtype(x.dtype)
    if isinstance(weight, QuantizedWeight):
        check_scale_values(f"{argument}.scale", weight.scale)
        factor = _for_heads(weight.scale.to(wide), "heads -> heads 1")
        out = einsum(x.to(wide), weight.values.to(wide), product) * factor
    else:
        out = einsum(x.to(wide), weight.to(wide), product)
    return out.to(x.dtype) if scale is None else to_e4m3(out, _for_heads(scale, "heads -> heads 1"))


def query_to_latent(
    q_nope: Float[Tensor, "T N P"],
    w_uk_t: Float[Tensor, "N P Lkv"] | QuantizedWeight,
    q_scale: Float[Tensor, "*heads"] | None = None,
) -> Shaped[Tensor, "T N Lkv"]:
    """Absorb W_UK into the query: [T, N, P] -> [T, N, Lkv]. FLOPs: 2 T N P Lkv.

    Args:
        q_nope: [T, N, P], query parts without rope.
        w_uk_t: [N, P, Lkv], from `absorb`, or this weight in e4m3 (`quantize_weight`).
        q_scale: float32 scale of returned queries in e4m3, [] or [N]; None returns queries in the dtype of `q_nope`.

    Returns:
        [T, N, Lkv], queries that can attend the cached latents; e4m3 if `q_scale` is given.

    Raises:
        ValueError: shapes, dtypes or devices do not match; a scale is not finite and positive.
    """
    check_tensor("q_nope", q_nope, ("T", "N", "P"))
    check_weight("w_uk_t", w_uk_t, (*q_nope.shape[1:], "Lkv"), q_nope)
    if q_scale is not None:
        check_scale("q_scale", q_scale, q_nope.shape[1], q_nope.device)
        check_scale_values("q_scale", q_scale)
    return _multiply_heads(q_nope, "w_uk_t", w_uk_t, q_scale)


def latent_to_value(
    latent: Float[Tensor, "T N Lkv"],
    w_uv: Float[Tensor, "N Lkv V"] | QuantizedWeight,
    *,
    output_scale: Float[Tensor, ""] | None = None,
    output_block_scale: Tensor | None = None,
) -> Shaped[Tensor, "T N V"]:
    """Apply W_UV to the output of absorbed attention: [T, N, Lkv] -> [T, N, V]. FLOPs: 2 T N Lkv V.

    Args:
        latent: [T, N, Lkv], output of `mla_decode`.
        w_uv: [N, Lkv, V], from `absorb`, or this weight in e4m3 (`quantize_weight`).
        output_scale: float32 scale of an output in e4m3; None for an output in the dtype of `latent`. The product is
            not rounded to 16 bits before it is divided by the scale.
        output_block_scale: must be None: an output with one scale for each group of elements is not supported.

    Returns:
        [T, N, V], the output of each head; e4m3 if `output_scale` is given.

    Raises:
        ValueError: shapes, dtypes or devices do not match; a scale is not finite and positive.
        UnsupportedConfiguration: `output_block_scale` is given.
    """
    check_tensor("latent", latent, ("T", "N", "Lkv"))
    check_weight("w_uv", w_uv, (*latent.shape[1:], "V"), latent)
    check_output_scale(output_scale, output_block_scale, latent.device)
    check_scale_values("output_scale", output_scale)
    return _multiply_heads(latent, "w_uv", w_uv, output_scale)


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
