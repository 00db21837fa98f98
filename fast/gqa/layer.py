"""One layer of grouped-query attention: cache write and attention. Projections and rope belong to the model.

`reference.gqa.layer` explains which keys a step writes and attends. docs/glossary.md explains the terms and the letters
of shapes. `torch.compile(fullgraph=True)` can trace `forward`.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from reference.distributed.arguments import check_groups
from reference.distributed.groups import ContextParallel
from reference.interfaces import (
    COMPUTE_FORMAT,
    E4M3,
    CacheFormat,
    DecodeMetadata,
    DecodeSchedule,
    KVScale,
    check,
    check_causal_mask,
    check_flag,
    check_int,
    check_output_scale,
    check_scale_values,
    from_e4m3,
    to_e4m3,
    wide_dtype,
)
from reference.interfaces.gqa import (
    AttentionType,
    Descales,
    EncoderMetadata,
    GQAConfig,
    GQAMetadata,
    PagedAttentionMetadata,
    check_gqa_layer,
    check_gqa_output,
    check_gqa_step_values,
    choose_key_value_scales,
    expand_scale,
    has_cache,
    make_gqa_query_scale,
    make_key_value_scale,
    observe_gqa_queries,
    scale_without_cache,
    scales_of_write,
)

from .. import backends
from ..backends import BackendChoice
from ..backends.selection import for_part
from ..cache.key_value import reshape_and_cache
from .attention import gqa_paged_attention, gqa_varlen_attention
from .backend_choice import StepBackends, check_layer_step
from .cascade import CASCADE_OPS, gqa_cascade_attention
from .checked_plans import CheckedPlans
from .context_parallel import GQA_DCP_OPS, gqa_dcp_attention

GQA_LAYER_OPS = tuple(sorted({"gqa_varlen_attention", "reshape_and_cache", *CASCADE_OPS, *GQA_DCP_OPS}))
_check_step = backends.CheckedOnce(check_layer_step)


class _Scales(NamedTuple):
    """Scales of keys, values and queries, each float32 [] or None."""

    k_scale: Tensor | None
    v_scale: Tensor | None
    q_scale: Tensor | None


class _Written(NamedTuple):
    """Keys and values that a step writes to the cache, and whether the step has tokens of a prefill."""

    has_prefill: bool
    k: Tensor
    v: Tensor


class _Output:
    """The tensor that receives the output of a step.

    Attributes:
        output: [T, N, Dh].
        scale: scale of an output in e4m3, or None.
        dtype: dtype in which attention writes its output: the dtype of `output`, or a wide dtype for an output in e4m3.
    """

    def __init__(self, output: Tensor, scale: Tensor | None, dtype: torch.dtype):
        self.output, self.scale, self.dtype = output, scale, dtype

    def rows(self, start: int, stop: int) -> Tensor | None:
        """Return the rows [start, stop) of the output for attention to write; None if `store` must round them."""
        return self.output[start:stop] if self.scale is None else None

    def store(self, start: int, stop: int, out: Tensor) -> None:
        """Write the output of attention, which attention has not written itself, to the rows [start, stop)."""
        self.output[start:stop] = out if self.scale is None else to_e4m3(out, self.scale)

    def keep(self, kept: Tensor) -> None:
        """Set the first rows to 0, except those for which `kept` is True."""
        rows = self.output[: kept.shape[0]]
        rows = rows if self.scale is None else rows.view(torch.uint8)  # torch has few operations on 8-bit floats
        rows.masked_fill_(~kept[:, None, None], 0)


class GQAAttention(nn.Module):
    """Grouped-query attention over a paged key/value cache, for inference only.

    The layer has no projections and no rope: the caller passes rotated queries and keys.

    Args:
        config: heads, mask and score function of the layer.
        cache_format: format of the layer's cache.
        context_parallel: groups of the ranks that share heads and sequences, or None. With groups, `config` has all N
            heads, and `forward` gets the query heads of this rank and the KV heads of its cache
            (`ContextParallel.kv_heads`).
        sinks: [N], attention sinks of all heads, for a config with `attention_sinks`; otherwise None. A parameter stays
            a parameter, and another tensor becomes a buffer.
        k_scale: scale of the keys in the cache, only for a format with `CacheFormat.layer_scale`. With None, the first
            step chooses the scale (`reference.interfaces.gqa.scales`). A layer that reads the cache of another layer
            needs the `KVScale` of that layer.
        v_scale: scale of the values in the cache, like `k_scale`.
        q_scale: scale with which queries are rounded to e4m3 (8 bits) before they are attended, one number for all
            heads; only for a format with `CacheFormat.layer_scale`. None means queries in their own dtype.
        check_every_call: if True, every op checks all its arguments in every call. If False, an op may skip a check
            that an earlier call with the same shapes, strides and dtypes has passed (`fast.backends.checked_calls`).
        backend: name of a backend, mapping from op to backend name, or None. A name applies to the ops that the backend
            declares. For every other op, the backend is chosen automatically in each call (`fast.backends`). A mapping
            may have the keys "gqa_decode" and "gqa_prefill", which name the backends of `gqa_paged_attention` for the
            decodes and for the prefills of a step. The environment may name these too (`fast.backends.environment`).

    Attributes:
        k_scale: the scale of the keys as a `KVScale`, a buffer of the layer; None if the format has no scales.
        v_scale: the scale of the values, like `k_scale`.
        q_scale: the scale of the queries as a `QueryScale`, a buffer of the layer; None for queries in their own dtype.
        observed: largest absolute key that each step wrote, while `calibrate_kv_scales` records; otherwise None.
        observed_values: largest absolute value that each step wrote, in the same calibration.
        observed_queries: largest absolute query of each step, in the same calibration.

    Raises:
        TypeError: an argument has another type.
        ValueError: the sinks, a scale or the groups do not suit the config or the format; `backend` has an unknown name
            or an unknown op.
        UnsupportedConfiguration: the format is for the latent cache alone; ranks cannot share the sequences or the
            heads of such a layer; the named backend declares no op of a layer.
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
        check_every_call: bool = False,
        backend: BackendChoice = None,
    ):
        super().__init__()
        check_groups(context_parallel)
        check_gqa_layer(config, cache_format, sinks, 1 if context_parallel is None else context_parallel.size)
        check_flag("check_every_call", check_every_call)
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
        self.check_every_call = check_every_call
        self.backend = backends.bind_with_environment(backend, GQA_LAYER_OPS)

    @backends.with_wanted_checks
    @backends.without_gradients
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

        `reference.gqa.layer.GQAAttention.forward` has a table of what each kind of step writes and attends. A step has
        no cache if `kv_cache` is None or empty, or if the block tables have no column. Such a step attends the given
        keys and values, writes nothing, and must have no context. A layer with `kv_sharing_layer` then needs the keys
        and values of the layer that it names. A step without a plan is a memory profile: it writes and attends nothing.

        Args:
            q: [T, N, Dh], queries; rotated.
            k: keys. In cross attention [S, Nkv, Dh], the packed keys of the encoders that ran in this step, one for
                each slot, or None if none ran. None for a layer that reads the cache of another layer. Otherwise
                [T, Nkv, Dh], rotated.
            v: values, like `k`.
            kv_cache: the cache of this layer, or of the layer that `kv_sharing_layer` names. None for an encoder.
            metadata: plan of the step; an `EncoderMetadata` for an encoder. None for a memory profile.
            output: [T, N, Dh], any strides, written in place; in the dtype of `q`, or in e4m3 if `output_scale` is
                given. None allocates it.
            output_scale: float32 scale of an output in e4m3 (8 bits): the value that is stored is output / scale,
                rounded once. None for an output in the dtype of `q`.

        Returns:
            `output`, or a new tensor [T, N, Dh]. Rows behind the last token are 0.

        Raises:
            TypeError: an argument has another type.
            ValueError: arguments do not match. If the method raises, it has written nothing.
            UnsupportedConfiguration: the cache format is for the latent cache alone; no backend can serve the step.
                The method has written nothing, unless `torch.compile` compiled it and a kernel ignores scales.
        """
        config = self.local_config
        chosen = self._check(q, k, v, kv_cache, metadata, output_scale)
        if output is None:
            output = q.new_empty(q.shape, dtype=q.dtype if output_scale is None else E4M3)
        check_gqa_output(output, output_scale, q, k, v, kv_cache)
        if metadata is None:
            return output.zero_()
        cross, end = config.attention_type is AttentionType.CROSS, metadata.num_actual_tokens
        check_gqa_step_values(metadata, kv_cache, config, k.shape[0] if cross and k is not None else None)
        if chosen.ignoring or chosen.causal:
            self._check_kernels(chosen, k, v, metadata)
        observe_gqa_queries(self, end, q)
        target = _Output(output, output_scale, q.dtype if output_scale is None else wide_dtype(q.dtype))
        if isinstance(metadata, EncoderMetadata):
            offsets, longest = metadata.query_start_loc, metadata.max_query_len
            self._attend_packed(target, q[:end], k[:end], v[:end], offsets, offsets, longest, longest)
        elif has_cache(kv_cache, metadata):
            if k is not None:
                self._write(*self._written(k, v, metadata), kv_cache, metadata)
            if q.device.type != "cpu" or torch.compiler.is_compiling():
                self._attend_cache(target, q, kv_cache, metadata)
            else:
                with CheckedPlans(kv_cache, *_plans_of(metadata)):
                    self._attend_cache(target, q, kv_cache, metadata)
        elif k is not None:
            self._attend_new_keys(target, q, k, v, metadata)
        else:  # no query token attends a key
            output[:end].zero_()
        if end < output.shape[0]:
            output[end:] = 0
        return output

    def descales(self, num_requests: int) -> Descales:
        """Return the scales of queries, keys and values with one element for each request and KV head, without copies.

        `reference.gqa.layer.GQAAttention.descales` explains which kernels take these tensors.

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

    def _scales(self) -> _Scales:
        """Return the scales of keys, values and queries, each float32 [] or None."""
        scales = self.k_scale, self.v_scale, self.q_scale
        return _Scales(*[None if scale is None else scale.value for scale in scales])

    def _check(self, q, k, v, kv_cache, metadata, output_scale) -> StepBackends:
        """Check the arguments of `forward` except the values of the plan; read no values but those of scales.

        Returns:
            What the layer must check in the values of the step, because of the backends that serve the step.
        """
        groups, scales = self.context_parallel, self._scales()
        ownership, ranks = (None, None) if groups is None else (groups.ownership, (groups.size, groups.merge))
        chosen = _check_step(
            metadata, q, k, v, kv_cache, self.local_config, self.config, self.cache_format, *scales,
            self.sinks, ownership, ranks, output_scale is not None, self.backend,
        )  # fmt: skip
        check_output_scale(output_scale, None, q.device)
        check_scale_values("output_scale", output_scale)
        check_scale_values("q_scale", scales.q_scale)
        return chosen

    def _check_kernels(self, chosen: StepBackends, k, v, metadata: GQAMetadata) -> None:
        """Check the values that some kernels refuse, before the cache is written: scales and visible keys.

        The launch of a kernel checks them too, and alone does so under torch.compile.
        """
        if torch.compiler.is_compiling():
            return
        if metadata.slot_mapping.device.type == "cpu":
            for name in chosen.causal:
                check_causal_mask(operator.attrgetter(name)(metadata))
        if chosen.ignoring:
            scales = self.k_scale.value, self.v_scale.value
            if k is not None:
                scales = scales_of_write(self, metadata.slot_mapping, *self._written(k, v, metadata))
            for op, name in chosen.ignoring:
                backends.check_ignored_scales(name, op, k_scale=scales[0], v_scale=scales[1])

    def _written(self, k: Tensor, v: Tensor, metadata: GQAMetadata) -> _Written:
        """Return what a step writes to the cache."""
        cross = self.config.attention_type is AttentionType.CROSS
        tokens = k.shape[0] if cross else metadata.num_actual_tokens
        return _Written(cross or tokens > metadata.num_decode_tokens, k[:tokens], v[:tokens])

    def _write(self, has_prefill: bool, k: Tensor, v: Tensor, kv_cache: Tensor, metadata: GQAMetadata) -> None:
        """Write keys and values to the cache; first choose the scales of the cache, if they are not chosen yet."""
        if self.k_scale is not None or self.observed is not None:
            choose_key_value_scales(self, metadata.slot_mapping, has_prefill, k, v)
        scales = self._scales()
        reshape_and_cache(
            k, v, kv_cache, metadata.slot_mapping, self.cache_format, scales.k_scale, scales.v_scale,
            graph=metadata.decode.graph, backend=self.backend,
        )  # fmt: skip

    def _attend_cache(self, target: _Output, q: Tensor, kv_cache: Tensor, metadata: GQAMetadata) -> None:
        """Attend the cache with the queries of the decodes and of the prefills."""
        config, ranks, split, end = (
            self.local_config, self.context_parallel, metadata.num_decode_tokens, metadata.num_actual_tokens,
        )  # fmt: skip
        sinks = self.sinks if self.sinks is None or ranks is None else ranks.heads_of_group(self.sinks)
        options = target.dtype, self.cache_format, *self._scales()
        of_decodes, of_prefills = (for_part(self.backend, part) for part in ("gqa_decode", "gqa_prefill"))

        def attend(
            start: int, stop: int, plan: PagedAttentionMetadata, schedule: DecodeSchedule | None, backend: BackendChoice
        ) -> None:
            given, out = (q[start:stop], kv_cache, plan, config), target.rows(start, stop)
            if ranks is None:
                state = gqa_paged_attention(*given, sinks, schedule, *options, out=out, backend=backend)
            else:
                state = gqa_dcp_attention(*given, ranks, sinks, schedule, *options, out=out, backend=backend)
            if out is None:
                target.store(start, stop, state.out)

        if split > 0 and metadata.cascade is not None:
            given, out = (q[:split], kv_cache, metadata.cascade, config, sinks), target.rows(0, split)
            state = gqa_cascade_attention(*given, *options, out=out, backend=of_decodes)
            if out is None:
                target.store(0, split, state.out)
        elif split > 0:
            attend(0, split, metadata.decode, metadata.schedule, of_decodes)
        if end > split:
            attend(split, end, metadata.prefill, metadata.prefill_schedule, of_prefills)

    def _attend_new_keys(self, target: _Output, q: Tensor, k: Tensor, v: Tensor, metadata: GQAMetadata) -> None:
        """Attend the given keys and values in a step without a cache, with one call for decodes and prefills.

        In cross attention the keys of the requests are packed. In a decoder, queries and keys are the same tokens. The
        output of a token without visible keys, such as the token of a padding row, is set to 0 afterwards, so that the
        host need not know which tokens these are.
        """
        end, split, decode, prefill = (
            metadata.num_actual_tokens, metadata.num_decode_tokens, metadata.decode, metadata.prefill,
        )  # fmt: skip
        # padding tokens behind the last decode count as its queries; they have no visible keys
        queries = torch.cat((decode.query_start_loc[:-1], prefill.query_start_loc + split))
        attends = torch.cat((decode.visible_lens, prefill.visible_lens)) > 0
        max_query_len = max(decode.max_query_len, prefill.max_query_len)
        if self.config.attention_type is AttentionType.CROSS:
            lengths = torch.cat((decode.seq_lens, prefill.seq_lens))
            keys = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
            max_key_len = max(decode.max_seq_len, prefill.max_seq_len)
            _check_number_of_keys(k, keys)
        else:
            keys, max_key_len = queries, max_query_len
            k, v = (x[:end].masked_fill(~attends[:, None, None], 0) for x in (k, v))
        if self.k_scale is not None:
            k, v = (_rounded(x, scale_without_cache(s, x)) for x, s in ((k, self.k_scale), (v, self.v_scale)))
        if self.q_scale is not None:
            q = _rounded(q, self.q_scale.value)
        self._attend_packed(target, q[:end], k, v, queries, keys, max_query_len, max_key_len)
        target.keep(attends)

    def _attend_packed(self, target, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> None:
        """Attend packed keys and values without a cache."""
        ranks, sinks = self.context_parallel, self.sinks
        if sinks is not None and ranks is not None:
            sinks = ranks.own_heads(sinks)
        out = target.rows(0, q.shape[0])
        state = gqa_varlen_attention(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, self.local_config, sinks, target.dtype,
            out=out, backend=self.backend,
        )  # fmt: skip
        if out is None:
            target.store(0, q.shape[0], state.out)


def _plans_of(metadata: GQAMetadata) -> tuple[DecodeMetadata, ...]:
    """Return the plans over the cache in the plan of a step."""
    cascade = metadata.cascade
    parts = () if cascade is None else (cascade.prefix, cascade.suffix)
    return (metadata.decode, metadata.prefill, *parts)


def _check_number_of_keys(k: Tensor, cu_seqlens_k: Tensor) -> None:
    """Check that the packed keys of cross attention are those of the plan; do nothing under torch.compile."""
    if not torch.compiler.is_compiling():
        total = int(cu_seqlens_k[-1])
        check(k.shape[0] == total, "k", f"the {total} keys of metadata.seq_lens in a step without a cache", k.shape[0])


def _rounded(x: Float[Tensor, "tokens heads dim"], scale: Float[Tensor, ""]) -> Float[Tensor, "tokens heads dim"]:
    """Return numbers as they would be read from storage in e4m3, in the dtype of `x`."""
    return from_e4m3(to_e4m3(x, scale), scale, x.dtype)
