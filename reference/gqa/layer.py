"""One layer of grouped-query attention: cache write and attention. Projections and rope belong to the model."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from ..cache.key_value import reshape_and_cache
from ..distributed.arguments import check_groups
from ..distributed.groups import ContextParallel
from ..interfaces import (
    COMPUTE_FORMAT,
    E4M3,
    AttentionState,
    CacheFormat,
    DecodeSchedule,
    KVScale,
    check,
    check_int,
    check_output_scale,
    check_scale_values,
    from_e4m3,
    to_e4m3,
    wide_dtype,
)
from ..interfaces.gqa import (
    AttentionType,
    Descales,
    EncoderMetadata,
    GQAConfig,
    GQAMetadata,
    PagedAttentionMetadata,
    check_gqa_cascade,
    check_gqa_layer,
    check_gqa_output,
    check_gqa_step,
    check_gqa_step_values,
    check_query_scale,
    check_sinks,
    choose_key_value_scales,
    expand_scale,
    has_cache,
    make_gqa_query_scale,
    make_key_value_scale,
    observe_gqa_queries,
    scale_without_cache,
)
from .attention import gqa_paged_attention, gqa_varlen_attention
from .cascade import gqa_cascade_attention
from .context_parallel import gqa_dcp_attention


class GQAAttention(nn.Module):
    """Grouped-query attention over a paged key/value cache, for inference.

    The layer has no projections and no rope: the caller passes rotated queries and keys.

    Args:
        config: heads, mask and score function of the layer.
        cache_format: format of the layer's cache.
        context_parallel: the process groups of context parallelism; None for one rank. With groups, `config` describes
            all N heads. `forward` then gets the N / TP query heads of this rank (TP: number of tensor-parallel ranks)
            and the KV heads of its cache (`ContextParallel.kv_heads`).
        sinks: [N], the attention sinks of all heads, for a config with `attention_sinks`; otherwise None. A parameter
            stays a parameter, and another tensor becomes a buffer.
        k_scale: scale of the keys in the cache, only for a format with `CacheFormat.layer_scale`. With None, the first
            step sets the scale: from its keys if it has a prefill, otherwise 1.0 (`reference.interfaces.gqa.scales`). A
            layer that reads the cache of another layer needs the `KVScale` of that layer.
        v_scale: scale of the values in the cache, like `k_scale`.
        q_scale: scale with which queries are rounded to e4m3 (8 bits) before they are attended, one number for all
            heads; only for a format with `CacheFormat.layer_scale`. None means queries in their own dtype.

    Attributes:
        k_scale: the scale of the keys as a `KVScale`, a buffer of the layer; None if the format has no scales.
        v_scale: the scale of the values, like `k_scale`.
        q_scale: the scale of the queries as a `QueryScale`, a buffer of the layer; None for queries in their own dtype.
        observed: largest absolute key that each step wrote, while `calibrate_kv_scales` records; otherwise None.
        observed_values: largest absolute value that each step wrote, in the same calibration.
        observed_queries: largest absolute query of each step, in the same calibration.

    Raises:
        TypeError: an argument has another type.
        ValueError: the sinks, a scale or the groups do not suit the config or the format.
        UnsupportedConfiguration: the format is for the latent cache alone; ranks cannot share the sequences or the
            heads of such a layer.
    """

    def __init__(
        self,
        config: GQAConfig,
        cache_format: CacheFormat = COMPUTE_FORMAT,
        context_parallel: ContextParallel | None = None,
        *,
        sinks: Float[Tensor, " N"] | None = None,
        k_scale: float | Tensor | KVScale | None = None,
        v_scale: float | Tensor | KVScale | None = None,
        q_scale: float | Tensor | None = None,
    ):
        super().__init__()
        check_groups(context_parallel)
        check_gqa_layer(config, cache_format, sinks, 1 if context_parallel is None else context_parallel.size)
        self.config, self.cache_format, self.context_parallel = config, cache_format, context_parallel
        self.local_config = config if context_parallel is None else context_parallel.local_gqa_config(config)
        if isinstance(sinks, nn.Parameter):
            self.sinks = sinks
        else:
            self.register_buffer("sinks", sinks, persistent=False)
        device = None if sinks is None else sinks.device
        self.k_scale = make_key_value_scale("k_scale", config, cache_format, k_scale, device)
        self.v_scale = make_key_value_scale("v_scale", config, cache_format, v_scale, device)
        self.q_scale = make_gqa_query_scale(cache_format, q_scale, device)
        self.observed: list[Tensor] | None = None
        self.observed_values: list[Tensor] | None = None
        self.observed_queries: list[Tensor] | None = None

    @torch.no_grad()
    def forward(
        self,
        q: Float[Tensor, "T N Dh"],
        k: Float[Tensor, "S Nkv Dh"] | None,
        v: Float[Tensor, "S Nkv Dh"] | None,
        kv_cache: Shaped[Tensor, "2 num_blocks block_size Nkv Dh"] | None,
        metadata: GQAMetadata | EncoderMetadata | None,
        output: Shaped[Tensor, "T N Dh"] | None = None,
        output_scale: Float[Tensor, ""] | None = None,
    ) -> Shaped[Tensor, "T N Dh"]:
        """Write the new keys and values to the cache, then attend. Decodes come first, then prefills, then padding.

        | step | written | attended |
        |---|---|---|
        | decoder with a cache | the keys of all tokens, at `metadata.slot_mapping` | the cache |
        | layer with `kv_sharing_layer` and a cache | nothing | the cache of the layer that it names |
        | cross attention with keys | the keys of the encoder, at `metadata.slot_mapping` | the cache |
        | cross attention without keys | nothing | the cache |
        | encoder, or a step without a cache | nothing | the given keys and values |
        | memory profile (no plan) | nothing | nothing; the output is 0 |

        A step has no cache if `kv_cache` is None or empty, or if the block tables have no column. Such a step must have
        no context, and a layer with `kv_sharing_layer` then needs the keys and values of the layer that it names. If
        the cache format has scales, the keys and values are rounded as if they were read from the cache.

        Args:
            q: [T, N, Dh], queries; rotated.
            k: keys. In cross attention [S, Nkv, Dh], the packed keys of the encoders that ran in this step, one for
                each slot, or None if none ran. None for a layer that reads the cache of another layer. Otherwise
                [T, Nkv, Dh], rotated.
            v: values, like `k`.
            kv_cache: the cache of this layer, or of the layer that `kv_sharing_layer` names. None for an encoder.
            metadata: plan of the step; an `EncoderMetadata` for an encoder. None for a memory profile.
            output: [T, N, Dh], written in place; in the dtype of `q`, or in e4m3 if `output_scale` is given. None
                allocates it.
            output_scale: float32 scale of an output in e4m3 (8 bits): the value that is stored is output / scale,
                rounded once. None for an output in the dtype of `q`.

        Returns:
            `output`, or a new tensor [T, N, Dh]. Rows behind the last token are 0.

        Raises:
            TypeError: an argument has another type.
            ValueError: arguments do not match. If the method raises, it has written nothing.
            UnsupportedConfiguration: the cache format is for the latent cache alone.
        """
        config = self.local_config
        self._check(q, k, v, kv_cache, metadata, output_scale)
        if output is None:
            output = torch.empty_like(q, dtype=q.dtype if output_scale is None else E4M3)
        check_gqa_output(output, output_scale, q, k, v, kv_cache)
        if metadata is None:
            return output.zero_()
        cross = config.attention_type is AttentionType.CROSS
        check_gqa_step_values(metadata, kv_cache, config, k.shape[0] if cross and k is not None else None)
        observe_gqa_queries(self, metadata.num_actual_tokens, q)
        out_dtype = q.dtype if output_scale is None else wide_dtype(q.dtype)
        if isinstance(metadata, EncoderMetadata):
            parts = self._attend_encoder(q, k, v, metadata, out_dtype)
        elif has_cache(kv_cache, metadata):
            if k is not None:
                tokens = k.shape[0] if cross else metadata.num_actual_tokens
                has_prefill = cross or tokens > metadata.num_decode_tokens
                choose_key_value_scales(self, metadata.slot_mapping, has_prefill, k[:tokens], v[:tokens])
                stored = self.cache_format, *self._scales()
                reshape_and_cache(k[:tokens], v[:tokens], kv_cache, metadata.slot_mapping, *stored)
            parts = self._attend_cache(q, kv_cache, metadata, out_dtype)
        else:
            parts = self._attend_new_keys(q, k, v, metadata, out_dtype)
        output.zero_()
        for first_row, out in parts:
            output[first_row : first_row + out.shape[0]] = out if output_scale is None else to_e4m3(out, output_scale)
        return output

    def descales(self, num_requests: int) -> Descales:
        """Return the scales of queries, keys and values with one element for each request and KV head, without copies.

        A kernel such as FlashAttention-3 takes them as `q_descale`, `k_descale` and `v_descale` (`expand_scale`). The
        scale of keys or values is 1 until a step or an argument chooses it.

        Args:
            num_requests: B, number of requests of the call of the kernel.

        Returns:
            `Descales`: three float32 tensors [B, Nkv] with the KV heads of this rank's cache, or None for each. All
            three are None for a format without scales, and the scale of queries is None for queries in their own dtype.

        Raises:
            ValueError: `num_requests` is negative.
        """
        check_int("num_requests", num_requests, 0)
        heads = self.local_config.num_kv_heads
        scales = ("q_scale", self.q_scale), ("k_scale", self.k_scale), ("v_scale", self.v_scale)
        return Descales(*(
            None if scale is None else expand_scale(name, scale.value, num_requests, heads) for name, scale in scales
        ))  # fmt: skip

    def _scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the scales of keys and values, each float32 [] or None."""
        return tuple(None if scale is None else scale.value for scale in (self.k_scale, self.v_scale))

    def _check(self, q, k, v, kv_cache, metadata, output_scale) -> None:
        """Check the arguments of `forward` except the values of the plan; read no values but those of the scales."""
        config, ranks, scales = self.local_config, self.context_parallel, self._scales()
        ownership = None if ranks is None else ranks.ownership
        check_gqa_step(metadata, q, k, v, kv_cache, config, self.cache_format, *scales, ownership)
        check_sinks(self.sinks, self.config, q.device)
        q_scale = None if self.q_scale is None else self.q_scale.value
        check_query_scale(self.cache_format, q_scale, q.device)
        check_output_scale(output_scale, None, q.device)
        check_scale_values("output_scale", output_scale)
        if isinstance(metadata, GQAMetadata) and not has_cache(kv_cache, metadata):
            shared = ranks is not None and ranks.size > 1
            check(not shared, "kv_cache", "a cache, because ranks share the tokens of every sequence", "no cache")
        elif isinstance(metadata, GQAMetadata) and metadata.cascade is not None:
            queries, stored = q[: metadata.num_decode_tokens], (self.cache_format, *scales, q_scale)
            check_gqa_cascade(queries, kv_cache, metadata.cascade, config, self.sinks, None, *stored)

    def _attend_encoder(self, q, k, v, metadata: EncoderMetadata, out_dtype: torch.dtype) -> list[tuple[int, Tensor]]:
        """Attend the tokens of an encoder; return the first row and the rows of the output."""
        end, bounds = metadata.num_actual_tokens, (metadata.max_query_len, metadata.max_query_len)
        offsets = metadata.query_start_loc, metadata.query_start_loc
        state = gqa_varlen_attention(
            q[:end], k[:end], v[:end], *offsets, *bounds, self.local_config, self._rank_sinks(), out_dtype
        )
        return [(0, state.out)]

    def _attend_cache(self, q, kv_cache, metadata: GQAMetadata, out_dtype: torch.dtype) -> list[tuple[int, Tensor]]:
        """Attend the cache; return the first row and the rows of the output of the decodes and of the prefills."""
        config, ranks, split = self.local_config, self.context_parallel, metadata.num_decode_tokens
        q_scale = None if self.q_scale is None else self.q_scale.value
        options = out_dtype, self.cache_format, *self._scales(), q_scale

        def attend(queries: Tensor, plan: PagedAttentionMetadata, schedule: DecodeSchedule | None) -> AttentionState:
            if ranks is None:
                return gqa_paged_attention(queries, kv_cache, plan, config, self.sinks, schedule, *options)
            sinks = None if self.sinks is None else ranks.heads_of_group(self.sinks)
            return gqa_dcp_attention(queries, kv_cache, plan, config, ranks, sinks, schedule, *options)

        parts = []
        if split > 0 and metadata.cascade is not None:
            state = gqa_cascade_attention(q[:split], kv_cache, metadata.cascade, config, self.sinks, *options)
            parts.append((0, state.out))
        elif split > 0:
            parts.append((0, attend(q[:split], metadata.decode, metadata.schedule).out))
        if metadata.num_actual_tokens > split:
            queries = q[split : metadata.num_actual_tokens]
            parts.append((split, attend(queries, metadata.prefill, metadata.prefill_schedule).out))
        return parts

    def _attend_new_keys(self, q, k, v, metadata: GQAMetadata, out_dtype: torch.dtype) -> list[tuple[int, Tensor]]:
        """Attend the given keys and values in a step without a cache; return what `_attend_cache` returns.

        In cross attention the keys of the requests are packed. In a decoder, the tokens of padding rows (requests of
        length 0) have no keys.
        """
        if k is None:  # no query token attends a key
            return []
        end, split = metadata.num_actual_tokens, metadata.num_decode_tokens
        cross = self.config.attention_type is AttentionType.CROSS
        plans = metadata.decode, metadata.prefill
        if cross:
            lengths = [plan.seq_lens for plan in plans]
            total = int(sum(each.sum() for each in lengths))
            check(
                k.shape[0] == total, "k", f"the {total} keys of metadata.seq_lens in a step without a cache", k.shape[0]
            )
        else:
            lengths = [plan.query_start_loc.diff() * (plan.seq_lens > 0) for plan in plans]
            has_keys = torch.cat([plan.visible_lens for plan in plans]) > 0
            k, v = k[:end][has_keys], v[:end][has_keys]
        if self.k_scale is not None:
            k, v = (_rounded(x, scale_without_cache(s, x)) for x, s in ((k, self.k_scale), (v, self.v_scale)))
        if self.q_scale is not None:
            q = _rounded(q, self.q_scale.value)
        parts, first_key = [], 0
        for first_row, plan, own in zip((0, split), plans, lengths, strict=True):
            rows = slice(first_row, first_row + int(plan.query_start_loc[-1]))
            keys = slice(first_key, first_key + int(own.sum()))
            cu_seqlens_k = nn.functional.pad(own.cumsum(0), (1, 0)).to(torch.int32)
            state = gqa_varlen_attention(
                q[rows], k[keys], v[keys], plan.query_start_loc, cu_seqlens_k, plan.max_query_len,
                max(plan.max_seq_len, plan.max_query_len), self.local_config, self._rank_sinks(), out_dtype,
            )  # fmt: skip
            parts.append((first_row, state.out))
            first_key = keys.stop
        return parts

    def _rank_sinks(self) -> Float[Tensor, " heads"] | None:
        """Return the attention sinks of this rank's heads, or None."""
        ranks = self.context_parallel
        return self.sinks if self.sinks is None or ranks is None else ranks.own_heads(self.sinks)


def _rounded(x: Float[Tensor, "tokens heads dim"], scale: Float[Tensor, ""]) -> Float[Tensor, "tokens heads dim"]:
    """Return numbers as they would be read from storage in e4m3, in the dtype of `x`."""
    return from_e4m3(to_e4m3(x, scale), scale, x.dtype)
