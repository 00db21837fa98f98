"""The absorbed path of a layer: absorb the queries of decodes, attend cached latents, multiply the output by W_UV.

docs/glossary.md explains the terms and the letters of shapes.
"""

from __future__ import annotations

from jaxtyping import Float, Shaped
from torch import Tensor, nn

from reference.interfaces import AttentionState, GraphSupport, MLAMetadata

from .cascade import cascade_attention
from .context_parallel import dcp_decode
from .decode import mla_decode
from .padding_tokens import zero_padding_tokens
from .prefill import rows_of
from .weight_views import AttentionWeights
from .weights import multiply_heads, write_values


def decode(
    layer: nn.Module,
    q_nope: Float[Tensor, "T N P"],
    q_pe: Shaped[Tensor, "tokens N R"],
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    metadata: MLAMetadata,
    output: Shaped[Tensor, "T N V"],
    weights: AttentionWeights,
    output_scale: Float[Tensor, ""] | None = None,
) -> None:
    """Compute the absorbed path for the query tokens of the decodes, and write their rows of `output`.

    Args:
        layer: the `MLAAttention`.
        q_nope: [T, N, P], with the query tokens of the decodes in its first rows.
        q_pe: rotated rope parts of the queries, with the decodes in its first rows; in e4m3 if the fp8 mode of the
            layer needs queries in e4m3.
        kv_cache: cache, which already contains the new tokens.
        metadata: plan of the step.
        output: [T, N, V], in e4m3 if `output_scale` is given.
        weights: views of the layer's weights.
        output_scale: float32 scale of an output in e4m3; None for an output in the dtype of the layer.
    """
    tokens = metadata.num_decode_tokens
    q_nope, q_pe, output = rows_of(q_nope, 0, tokens), rows_of(q_pe, 0, tokens), rows_of(output, 0, tokens)
    ql_nope = multiply_heads(q_nope, weights.w_uk_t, weights.q_scale, scale_name="q_scale", backend=layer.backend)
    state = _attend(layer, ql_nope, q_pe, kv_cache, metadata, q_nope.dtype, weights)
    write_values(state.out, weights.w_uv_by_head, output, output_scale, backend=layer.backend)
    if metadata.decode.graph is GraphSupport.ANY:  # the decode leaves the rows of padding tokens undefined
        zero_padding_tokens(output, metadata.decode.query_start_loc, graph=metadata.decode.graph, backend=layer.backend)


def _attend(layer, ql_nope, q_pe, kv_cache, metadata, out_dtype, weights) -> AttentionState:
    """Compute the attention state of the decodes: as a cascade, or as a decode over several ranks or on one rank."""
    options = {"cache_format": layer.cache_format, "kv_scale": weights.kv_scale, "backend": layer.backend}
    ranks, scale = layer.context_parallel, weights.softmax_scale
    if weights.q_scale is not None:
        q_scale = layer.q_scale.value
        if q_scale.dim() == 1 and ranks is not None:
            q_scale = ranks.heads_of_group(q_scale)
        options |= {"fp8_mode": layer.fp8_mode, "q_scale": q_scale, "out_dtype": out_dtype}
    if metadata.cascade is not None:
        return cascade_attention(ql_nope, q_pe, kv_cache, metadata.cascade, scale, **options)
    if ranks is not None:
        return dcp_decode(ql_nope, q_pe, kv_cache, metadata.decode, scale, ranks, metadata.schedule, **options)
    return mla_decode(ql_nope, q_pe, kv_cache, metadata.decode, scale, metadata.schedule, **options)


def absorbed_queries(layer: nn.Module, q_nope: Float[Tensor, "T N P"], weights: AttentionWeights) -> Tensor:
    """Return the absorbed queries of a step, [T, N, Lkv] in the dtype of the layer; a calibration records them."""
    return multiply_heads(q_nope, weights.w_uk_t, backend=layer.backend)
