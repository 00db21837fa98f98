"""The up-projections of the latent, for keys and for values (DeepSeek-V2, arXiv 2405.04434, section 2.1).

The matrices W_UK and W_UV are views of the weight of `kv_b_proj`, so nothing is copied. If the weight or the result of
a product is in e4m3 (8 bits), the op `multiply_heads` of a backend computes the product. Any other product is one
`torch.bmm` over the heads.
`reference.mla.weights` explains the algebra; docs/glossary.md explains the letters of shapes.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from reference.interfaces import (
    E4M3,
    LEAST_WEIGHT,
    QuantizedWeight,
    check,
    check_dtype,
    check_expansion,
    check_int,
    check_no_bias,
    check_no_overlap,
    check_out,
    check_output_scale,
    check_scale,
    check_scale_values,
    check_tensor,
    check_type,
    check_weight,
    check_weight_to_quantize,
    e4m3_scale,
    is_plain_linear,
    linear_output,
    split_for_keys,
    to_e4m3,
)

from .. import backends
from ..backends import BackendChoice
from .head_products import bmm_into


def dense_weight(linear: nn.Module, in_features: int, dtype: torch.dtype) -> Float[Tensor, "out Lkv"]:
    """Return the dense weight of a linear module, even if the module stores the weight in another form.

    See `reference.mla.weights.dense_weight` for the result of a plain module, and of a quantised or wrapped module.

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


def recover_weight(linear: nn.Module, in_features: int, dtype: torch.dtype, held: Tensor | None) -> Tensor | None:
    """Return the dense weight of a module that is not a plain linear of `dtype`; None for a plain linear.

    `held` is an earlier result or None. If `held` has the device and dtype of the weight, the function overwrites
    `held` in place and returns `held`.

    Raises:
        ValueError: the module has a bias.
    """
    if is_plain_linear(linear, dtype):
        check_no_bias("kv_b_proj", linear)
        return None
    weight = dense_weight(linear, in_features, dtype)
    if held is None or held.device != weight.device or held.dtype != weight.dtype:
        return weight
    return held.copy_(weight)


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


def quantize_weight(
    weight: Float[Tensor, "N K M"], per_head: bool = False, *, out: QuantizedWeight | None = None
) -> QuantizedWeight:
    """Store an absorbed weight in e4m3 (8 bits), with one scale for the weight or one scale for each head.

    See `reference.mla.weights.quantize_weight` for the scales, for the errors of both kinds of scales, and for weights
    that are not finite.

    Args:
        weight: [N, K, M], from `absorb`.
        per_head: whether each head has its own scale.
        out: quantised weight that receives the result, with the same shape, kind of scales and device. A captured graph
            that reads `out` then reads the new weight. None allocates a quantised weight.

    Returns:
        The quantised weight, with a scale [] or [N]; `out` if it is given.

    Raises:
        ValueError: shape or dtype do not match, or `out` does not fit the weight.
    """
    check_weight_to_quantize(weight, per_head)
    if out is not None:
        check_type("out", out, QuantizedWeight, "a QuantizedWeight or None")
        check_out("out.values", out.values, tuple(weight.shape), E4M3, weight.device, weight)
        check_out("out.scale", out.scale, weight.shape[:1] if per_head else (), torch.float32, weight.device, weight)
    numbers = weight.detach().to(torch.float32)
    sizes = numbers.abs().nan_to_num_(nan=0.0, posinf=torch.finfo(torch.float32).max)
    largest = sizes.amax((1, 2)) if per_head else sizes.amax()
    scale = e4m3_scale(largest.clamp_(min=LEAST_WEIGHT))
    values = to_e4m3(numbers, scale[:, None, None] if per_head else scale)
    if out is None:
        return QuantizedWeight(values, scale)
    out.values.copy_(values)
    out.scale.copy_(scale)
    return out


def query_to_latent(
    q_nope: Float[Tensor, "T N P"],
    w_uk_t: Float[Tensor, "N P Lkv"] | QuantizedWeight,
    q_scale: Float[Tensor, "*heads"] | None = None,
    *,
    backend: BackendChoice = None,
) -> Shaped[Tensor, "T N Lkv"]:
    """Multiply the query of each head by W_UK of this head: [T, N, P] -> [T, N, Lkv]. FLOPs: 2 T N P Lkv.

    Args:
        q_nope: [T, N, P].
        w_uk_t: [N, P, Lkv], or this weight in e4m3 (`quantize_weight`).
        q_scale: float32 scale of returned queries in e4m3, [] or [N]; None returns queries in the dtype of `q_nope`.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).
            PyTorch multiplies if neither the weight nor the result is in e4m3.

    Returns:
        [T, N, Lkv]; e4m3 if `q_scale` is given.

    Raises:
        ValueError: shapes, dtypes or devices do not match. For CPU tensors also: a scale is not finite and positive.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    _check_queries(q_nope, w_uk_t, q_scale)
    _check_backend(backend)
    return multiply_heads(q_nope, w_uk_t, q_scale, "w_uk_t", "q_scale", backend)


@backends.CheckedOnce
def _check_queries(q_nope, w_uk_t, q_scale):
    check_tensor("q_nope", q_nope, ("T", "N", "P"))
    check_weight("w_uk_t", w_uk_t, (*q_nope.shape[1:], "Lkv"), q_nope)
    if q_scale is not None:
        check_scale("q_scale", q_scale, q_nope.shape[1], q_nope.device)


def _check_backend(backend: BackendChoice) -> None:
    """Check the argument `backend` of a caller, also if PyTorch multiplies and no backend is used."""
    backends.bind(backend)


def multiply_heads(
    x: Float[Tensor, "T N K"],
    weight: Float[Tensor, "N K M"] | QuantizedWeight,
    scale: Float[Tensor, "*heads"] | None = None,
    weight_name: str = "w_uk_t",
    scale_name: str = "scale",
    backend: BackendChoice = None,
) -> Shaped[Tensor, "T N M"]:
    """Multiply the rows x[:, n] of each head n by weight[n]; the caller has checked the tensors.

    If `scale` is given, the result is in e4m3: the float32 product divided by the scale. `weight_name` and
    `scale_name` are the names of the weight and of the scale in an error message.
    """
    if scale is None and type(weight) is not QuantizedWeight:
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
    arguments = x, *_values_and_scale(weight, weight_name, scale, scale_name), scale
    signature = _PRODUCTS.signature(x, weight, scale, backend)
    chosen = _PRODUCTS.backend_of(signature) or backends.select(_product_request(x, scale), backend).name
    return _PRODUCTS.run(signature, chosen, *arguments)


def latent_to_value(
    latent: Float[Tensor, "T N Lkv"],
    w_uv: Float[Tensor, "N Lkv V"] | QuantizedWeight,
    *,
    output_scale: Float[Tensor, ""] | None = None,
    output_block_scale: Tensor | None = None,
    out: Shaped[Tensor, "T N V"] | None = None,
    backend: BackendChoice = None,
) -> Shaped[Tensor, "T N V"]:
    """Multiply the output of the absorbed path by W_UV: [T, N, Lkv] -> [T, N, V]. FLOPs: 2 T N Lkv V.

    Args:
        latent: [T, N, Lkv], output of `mla_decode`.
        w_uv: [N, Lkv, V], or this weight in e4m3 (`quantize_weight`).
        output_scale: float32 scale of an output in e4m3; None for an output in the dtype of `latent`.
        output_block_scale: must be None: an output with one scale for each group of elements is not supported.
        out: tensor [T, N, V] that receives the result, with any strides; `out` must share no memory with the other
            arguments. Its dtype is e4m3 if `output_scale` is given, otherwise the dtype of `latent`. None allocates a
            tensor.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).
            PyTorch multiplies if neither the weight nor the output is in e4m3.

    Returns:
        [T, N, V], e4m3 if `output_scale` is given; the tensor `out` if `out` is given.

    Raises:
        ValueError: shapes, dtypes or devices do not match, or `out` overlaps an argument. For CPU tensors also: a scale
            is not finite and positive.
        UnsupportedConfiguration: `output_block_scale` is given, or no backend that `backend` allows can serve the call.
    """
    _check_latents(latent, w_uv, output_scale, output_block_scale)
    _check_backend(backend)
    if out is None:
        return multiply_heads(latent, w_uv, output_scale, "w_uv", "output_scale", backend)
    shape, dtype = (*latent.shape[:2], w_uv.shape[2]), latent.dtype if output_scale is None else E4M3
    read = w_uv.values if type(w_uv) is QuantizedWeight else w_uv
    check_out("out", out, shape, dtype, latent.device, latent, read)
    return write_values(latent, w_uv, out, output_scale, backend)


@backends.CheckedOnce
def _check_latents(latent, w_uv, output_scale, output_block_scale):
    check_tensor("latent", latent, ("T", "N", "Lkv"))
    check_weight("w_uv", w_uv, (*latent.shape[1:], "V"), latent)
    check_output_scale(output_scale, output_block_scale, latent.device)


def write_values(
    latent: Float[Tensor, "T N Lkv"],
    w_uv: Float[Tensor, "N Lkv V"] | QuantizedWeight,
    out: Shaped[Tensor, "T N V"],
    output_scale: Float[Tensor, ""] | None = None,
    backend: BackendChoice = None,
) -> Shaped[Tensor, "T N V"]:
    """Compute `latent_to_value` without checks, write the result to `out`, and return `out`."""
    if output_scale is None and type(w_uv) is not QuantizedWeight:
        bmm_into(latent.transpose(0, 1), w_uv, out.transpose(0, 1))
        return out
    arguments = latent, *_values_and_scale(w_uv, "w_uv", output_scale, "output_scale"), output_scale
    signature = _PRODUCTS_INTO.signature(latent, w_uv, output_scale, out, backend)
    chosen = _PRODUCTS_INTO.backend_of(signature)
    if chosen is None:
        chosen = backends.select(_product_request(latent, output_scale), backend).name
    _PRODUCTS_INTO.run(signature, chosen, *arguments, out)
    return out


def _values_and_scale(weight, weight_name, scale, scale_name):
    """Return a weight and its scale or None; check, on the CPU, this scale and the `scale` of the result."""
    values, weight_scale = weight, None
    if type(weight) is QuantizedWeight:
        values, weight_scale = weight.values, weight.scale
        check_scale_values(f"{weight_name}.scale", weight_scale)
    check_scale_values(scale_name, scale)
    return values, weight_scale


def _product_request(x: Tensor, scale: Tensor | None) -> backends.KernelRequest:
    out_dtype = x.dtype if scale is None else E4M3
    return backends.KernelRequest("multiply_heads", x.device, x.dtype, out_dtype=out_dtype)


def _launch_product_into(x, weight, weight_scale, output_scale, out, backend):
    backends.kernel(backend, "multiply_heads")(x, weight, weight_scale, output_scale, out)


def _new_product(x, weight, weight_scale, output_scale, backend):
    return x.new_empty(*x.shape[:2], weight.shape[2], dtype=x.dtype if output_scale is None else E4M3)


def _launch_product(x, weight, weight_scale, output_scale, backend):
    out = _new_product(x, weight, weight_scale, output_scale, backend)
    _launch_product_into(x, weight, weight_scale, output_scale, out, backend)
    return out


_multiply_heads = torch.library.custom_op(
    "mla_twins::multiply_heads",
    _launch_product,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? weight_scale, Tensor? output_scale, str backend) -> Tensor",
)
_multiply_heads.register_fake(_new_product)
_PRODUCTS = backends.CheckedCalls(torch.ops.mla_twins.multiply_heads, _launch_product)

_multiply_heads_out = torch.library.custom_op(
    "mla_twins::multiply_heads_out",
    _launch_product_into,
    mutates_args=("out",),
    schema="(Tensor x, Tensor weight, Tensor? weight_scale, Tensor? output_scale, Tensor(a!) out, str backend) -> ()",
)
_PRODUCTS_INTO = backends.CheckedCalls(torch.ops.mla_twins.multiply_heads_out, _launch_product_into, mutates=(4,))


@_multiply_heads_out.register_fake
def _(x, weight, weight_scale, output_scale, out, backend):
    return None


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
        workspace: contiguous vector that receives the results; `workspace` must share no memory with the other
            arguments. `reference.mla.weights.expand_kv` gives its size. None allocates tensors.

    Returns:
        k_nope [S, N, P] and v [S, N, V]; k_nope[:, n] and v[:, n] of each head n are contiguous. Both are views of
        `workspace` if it is given.

    Raises:
        ValueError: shapes, dtypes or devices do not match; `workspace` is too small or overlaps an argument.
    """
    if workspace is not None:  # check in every call: a signature does not show whether two tensors share memory
        check_expansion_once(kv_c_normed, w_uk, w_uv, workspace)
        check_no_overlap(workspace, kv_c_normed, w_uk, w_uv)
    return expand_into(kv_c_normed, w_uk, w_uv, workspace)


check_expansion_once = backends.CheckedOnce(check_expansion)


def expand_into(
    kv_c_normed: Float[Tensor, "S Lkv"],
    w_uk: Float[Tensor, "Lkv N P"],
    w_uv: Float[Tensor, "Lkv N V"],
    workspace: Float[Tensor, " elements"] | None,
    block_rows: int = 0,
) -> tuple[Float[Tensor, "S N P"], Float[Tensor, "S N V"]]:
    """Compute `expand_kv` without the check that `workspace` overlaps no argument.

    `bmm_into` explains `block_rows`.
    """
    check_expansion_once(kv_c_normed, w_uk, w_uv, workspace)
    tokens, heads = kv_c_normed.shape[0], w_uk.shape[1]
    by_head = kv_c_normed.expand(heads, -1, -1)  # [N, S, Lkv], no copy
    if workspace is None and block_rows == 0:
        k_nope, v = torch.bmm(by_head, w_uk.transpose(0, 1)), torch.bmm(by_head, w_uv.transpose(0, 1))
        return k_nope.transpose(0, 1), v.transpose(0, 1)
    if workspace is None:
        k_nope, v = (kv_c_normed.new_empty(heads, tokens, weight.shape[2]) for weight in (w_uk, w_uv))
    else:
        parts = split_for_keys(workspace, tokens, heads, w_uk.shape[2], w_uv.shape[2])
        k_nope, v = (
            part.view(heads, tokens, weight.shape[2]) for part, weight in zip(parts, (w_uk, w_uv), strict=True)
        )
    for made, weight in ((k_nope, w_uk), (v, w_uv)):
        bmm_into(by_head, weight.transpose(0, 1), made, block_rows)
    return k_nope.transpose(0, 1), v.transpose(0, 1)
