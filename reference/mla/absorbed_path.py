"""The absorbed path of a layer: absorb the queries of decodes, attend the cached latents, compute the values."""

from __future__ import annotations

from jaxtyping import Float, Shaped
from torch import Tensor, nn

from ..interfaces import AttentionState, MLAMetadata, QuantizedWeight
from .cascade import cascade_attention
from .context_parallel import dcp_decode
from .decode import mla_decode
from .weights import latent_to_value, query_to_latent


def absorbed_output(
    layer: nn.Module,
    q_nope: Float[Tensor, "T N P"],
    q_pe: Shaped[Tensor, "T N R"],
    w_uk_t: Float[Tensor, "N P Lkv"] | QuantizedWeight,
    w_uv: Float[Tensor, "N Lkv V"] | QuantizedWeight,
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    metadata: MLAMetadata,
    output_scale: Float[Tensor, ""] | None = None,
) -> Shaped[Tensor, "T N V"]:
    """Compute the absorbed path for the query tokens of the decodes of a step.

    Args:
        layer: the `MLAAttention`.
        q_nope: [T, N, P], queries without their rope part; T is the number of query tokens of the decodes.
        q_pe: [T, N, R], rotated rope parts of the queries; in e4m3 if the mode of the layer needs such queries.
        w_uk_t: absorbed weight [N, P, Lkv].
        w_uv: absorbed weight [N, Lkv, V].
        kv_cache: cache, which already contains the new tokens.
        metadata: plan of the step.
        output_scale: float32 scale of an output in e4m3; None for an output in the dtype of the layer.

    Returns:
        [T, N, V].
    """
    ql_nope = query_to_latent(q_nope, w_uk_t, own_q_scale(layer))
    return latent_to_value(_attend(layer, ql_nope, q_pe, kv_cache, metadata).out, w_uv, output_scale=output_scale)


def own_q_scale(layer: nn.Module) -> Float[Tensor, "*heads"] | None:
    """Return the scale of this rank's queries in e4m3, [] or [heads of this rank]; None in the mode `converted`."""
    if layer.q_scale is None:
        return None
    scale, ranks = layer.q_scale.value, layer.context_parallel
    return scale if scale.dim() == 0 or ranks is None else ranks.own_heads(scale)


def _attend(layer, ql_nope, q_pe, kv_cache, metadata) -> AttentionState:
    """Return the attention state of the decodes, by a cascade, a decode over several ranks or a decode on one rank."""
    q_scale = None if layer.q_scale is None else layer.q_scale.value
    options = dict(
        cache_format=layer.cache_format, kv_scale=None if layer.kv_scale is None else layer.kv_scale.value,
        fp8_mode=layer.fp8_mode, q_scale=q_scale, out_dtype=layer.kv_a_layernorm.weight.dtype,
    )  # fmt: skip
    softmax_scale, ranks = layer.config.softmax_scale, layer.context_parallel
    if metadata.cascade is not None:
        return cascade_attention(ql_nope, q_pe, kv_cache, metadata.cascade, softmax_scale, **options)
    arguments = ql_nope, q_pe, kv_cache, metadata.decode, softmax_scale
    if ranks is None:
        return mla_decode(*arguments, metadata.schedule, **options)
    if q_scale is not None and q_scale.dim() == 1:
        options["q_scale"] = ranks.heads_of_group(q_scale)
    return dcp_decode(*arguments, ranks, metadata.schedule, **options)
