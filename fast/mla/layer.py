"""One MLA attention layer: projections, rotary embedding, cache write, and attention on the absorbed or expanded path.

`reference.mla.layer` explains which requests take which path, and docs/glossary.md explains the terms and the letters
of shapes. `torch.compile(fullgraph=True)` can trace `forward`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from reference.distributed.arguments import check_output_projection, check_step_ownership
from reference.distributed.groups import ContextParallel
from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    MOST_WORKSPACE_TOKENS,
    AbsorbedWeights,
    CacheFormat,
    ContextWorkspace,
    GraphSupport,
    MLAConfig,
    MLAMetadata,
    check_attention_output,
    check_context_workspace,
    check_flag,
    check_format,
    check_forward_attention,
    check_int,
    check_layer_inputs,
    check_modules,
    check_norm,
    check_output_scale,
    check_projections,
    check_scale_values,
    check_step,
    check_step_values,
    choose_kv_scale,
    layer_from_hf,
    linear_output,
    make_kv_scale,
    make_query_scale,
    observe_queries,
    to_e4m3,
)
from reference.interfaces.layer_results import ProjectedTokens

from .. import backends
from ..attention.rope import apply_rope, rotary_frequencies
from ..backends import BackendChoice
from ..cache.latent import concat_and_cache_mla
from .absorbed_path import absorbed_queries, decode
from .context_parallel import DCP_DECODE_OPS, dcp_gather_context
from .decode_choice import check_decode_backend
from .memory_profile import reserve_for_step, touch_largest
from .new_tokens import NewTokens, down_project, frequencies_for, measure_step, norm_rows, write_tokens
from .prefill import PREFILL_OPS, forward_prefill, gather_context
from .prefill_choice import check_prefill_backend
from .state_rows import rows_of
from .weight_views import AttentionWeights, WeightViews, dense_weight_of, refresh
from .weights import split_kv_b_proj

_check_forward_attention = backends.CheckedOnce(check_forward_attention)
_check_inputs = backends.CheckedOnce(check_layer_inputs)
_check_decode_backend = backends.CheckedOnce(check_decode_backend)
_check_prefill_backend = backends.CheckedOnce(check_prefill_backend)
_check_step = backends.CheckedOnce(check_step)
LAYER_OPS = (
    "apply_rope", "concat_and_cache_mla", "dequantize_entries", "multiply_heads", "reorg_kvcache",
    "rope_norm_and_cache", "zero_padding_tokens", *DCP_DECODE_OPS, *PREFILL_OPS,
)  # fmt: skip


def rms_norm(x: Float[Tensor, "T L"], weight: Float[Tensor, " L"], eps: float) -> Float[Tensor, "T L"]:
    """Compute the RMS norm x / sqrt(mean(x^2) + eps) * weight of each row of `x` (arXiv 1910.07467).

    See `reference.mla.layer.rms_norm` for the shapes and for the dtype of the computation.

    Raises:
        ValueError: shapes or devices do not match.
    """
    return norm_rows(x, weight, eps)


class MLAAttention(nn.Module):
    """Multi-head Latent Attention over a paged latent cache, for inference only.

    The caller passes the projections as modules. A projection may be any module, for example a quantised one. The
    module returns the product, or a pair (product, None) as the linear layers of vLLM and Megatron do. The parameters
    have the names of DeepSeek's checkpoints. `reference.mla.layer.MLAAttention` explains the computation.

    Args:
        config: dimensions, epsilon and rotary parameters.
        kv_a_proj_with_mqa: projection H -> Lkv + R.
        kv_a_layernorm: RMS norm with a weight [Lkv]; the layer uses the epsilon of the config.
        kv_b_proj: projection Lkv -> N (P + V).
        o_proj: projection N V -> H.
        q_proj: projection H -> N (P + R), only if `config.q_lora_rank` is None.
        q_a_proj: projection H -> Lq, only if the config has a `q_lora_rank`.
        q_a_layernorm: RMS norm with a weight [Lq], only if the config has a `q_lora_rank`.
        q_b_proj: projection Lq -> N (P + R), only if the config has a `q_lora_rank`.
        workspace_tokens: largest number of context tokens that a prefill expands at once. A plan with a larger chunk
            raises ValueError. The memory-profile run (`forward` with `metadata=None`) expands this number of tokens. If
            you pass `workspace_tokens` to the builder of the plans, pass the same number here.
        context_parallel: groups of the ranks that share heads and sequences, or None. With groups, `config` has all N
            heads, the projections have the N / TP heads of this rank (TP: tensor-parallel ranks), and `o_proj` has no
            bias.
        cache_format: format of the layer's cache.
        workspace: memory in which a prefill gathers and expands one chunk; all layers of a model can share it. None
            means the workspace of the plan. A memory-profile run, which has no plan, then allocates and frees a
            workspace.
        kv_scale: scale of the layer's cache, only for a format with `CacheFormat.layer_scale`. With None, the first
            step chooses the scale: a prefill computes it from the entries that the prefill writes, and a decode takes
            1.0 (`reference.interfaces.kv_scales`).
        fp8_weights: whether the absorbed weights are stored in e4m3 (8 bits), with one scale for each head
            (`quantize_weight`). The constructor and `refresh_weights` quantise the weights.
        fp8_mode: fp8 mode of the decodes (`mla_decode`). In the modes `fp8_query` and `fp8_product`, the kernels that
            absorb and rotate the queries of decodes also quantise these queries. `forward_attention` gets rotated
            queries, so it quantises their rope parts in a step of its own.
        q_scale: scale of queries in e4m3, only for the modes `fp8_query` and `fp8_product`: one number, or a tensor [N]
            with one number for each head of all ranks. None means 1.0, with a warning
            (`reference.interfaces.query_scales`).
        expand_by_module: whether prefills expand latents by calling `kv_b_proj` (`expand_kv_by_module`). Otherwise
            prefills multiply latents by the dense weight of `kv_b_proj` (`expand_kv`).
        check_every_call: if True, every op checks all its arguments in every call. If False, an op may skip a check
            that an earlier call with the same shapes, strides and dtypes has passed (`fast.backends.checked_calls`).
        backend: name of a backend, mapping from op to backend name, or None. A name applies to the ops that the backend
            declares. The environment may bind further ops (`fast.backends.environment`). For every other op, the
            backend is chosen automatically in each call (`fast.backends`).

    Attributes:
        kv_scale: the scale as a `KVScale`, a buffer of the layer; None if the format has no such scale.
        q_scale: the scale of queries in e4m3 as a `QueryScale`, a buffer of the layer; None in the mode `converted`.
        observed: largest absolute value that each step wrote, while `calibrate_kv_scales` records; otherwise None.
        observed_queries: largest absolute value of the absorbed queries of each step, in the same calibration.
        fp8_weights: the absorbed weights in e4m3; None without the option `fp8_weights`.

    Raises:
        ValueError: the projections do not match the config, `kv_b_proj` has a bias, `cache_format` does not support the
            dims of the config, `fp8_mode` or `kv_scale` does not fit `cache_format`, `q_scale` does not fit `fp8_mode`,
            or `backend` has an unknown name or an unknown op.
        UnsupportedConfiguration: the named backend declares no op of a layer.
    """

    def __init__(
        self,
        config: MLAConfig,
        kv_a_proj_with_mqa: nn.Module,
        kv_a_layernorm: nn.Module,
        kv_b_proj: nn.Module,
        o_proj: nn.Module,
        q_proj: nn.Module | None = None,
        q_a_proj: nn.Module | None = None,
        q_a_layernorm: nn.Module | None = None,
        q_b_proj: nn.Module | None = None,
        workspace_tokens: int = MOST_WORKSPACE_TOKENS,
        context_parallel: ContextParallel | None = None,
        cache_format: CacheFormat = COMPUTE_FORMAT,
        *,
        workspace: ContextWorkspace | None = None,
        kv_scale: float | Tensor | None = None,
        fp8_weights: bool = False,
        fp8_mode: str = CONVERTED,
        q_scale: float | Tensor | None = None,
        expand_by_module: bool = False,
        check_every_call: bool = False,
        backend: BackendChoice = None,
    ):
        super().__init__()
        check_projections(config, q_proj, q_a_proj, q_a_layernorm, q_b_proj)
        check_output_projection(o_proj, context_parallel)
        check_modules(
            kv_a_proj_with_mqa=kv_a_proj_with_mqa, kv_b_proj=kv_b_proj, o_proj=o_proj, q_proj=q_proj,
            q_a_proj=q_a_proj, q_b_proj=q_b_proj,
        )  # fmt: skip
        check_int("workspace_tokens", workspace_tokens)
        check_format(cache_format, config)
        check_context_workspace("workspace", workspace)
        check_flag("check_every_call", check_every_call)
        check_flag("fp8_weights", fp8_weights)
        check_flag("expand_by_module", expand_by_module)
        self.check_every_call, self.expand_by_module = check_every_call, expand_by_module
        check_norm("kv_a_layernorm", kv_a_layernorm, config.kv_lora_rank)
        if q_a_layernorm is not None:
            check_norm("q_a_layernorm", q_a_layernorm, config.q_lora_rank)
        self.config, self.context_parallel = config, context_parallel
        self.local_config = config if context_parallel is None else context_parallel.local_config(config)
        self.q_proj, self.q_a_proj, self.q_b_proj = q_proj, q_a_proj, q_b_proj
        self.kv_a_proj_with_mqa, self.kv_b_proj, self.o_proj = kv_a_proj_with_mqa, kv_b_proj, o_proj
        self.q_a_layernorm, self.kv_a_layernorm = q_a_layernorm, kv_a_layernorm
        self.workspace_tokens, self.cache_format, self.workspace = workspace_tokens, cache_format, workspace
        self.kv_scale = make_kv_scale(cache_format, kv_scale, kv_a_layernorm.weight.device)
        self.fp8_mode = fp8_mode
        self.q_scale = make_query_scale(fp8_mode, cache_format, q_scale, config.num_heads, kv_a_layernorm.weight.device)
        self.observed: list[Tensor] | None = None
        self.observed_queries: list[Tensor] | None = None
        self.backend = backends.bind_with_environment(backend, LAYER_OPS)
        self.register_buffer("recovered_kv_b_weight", None, persistent=False)
        self.fp8_weights = AbsorbedWeights() if fp8_weights else None
        self._frequencies = rotary_frequencies(config.rope, config.qk_rope_head_dim)
        self._weight_views = WeightViews()
        self.refresh_weights()

    @classmethod
    def from_hf(cls, module: nn.Module, **options: Any) -> MLAAttention:
        """Build the layer from a transformers DeepseekV2Attention or DeepseekV3Attention, and share its submodules.

        Args:
            module: the attention module; its projections have all heads. The layer takes the epsilon from the norms of
                the module. With `context_parallel`, the layer uses views of the weights that belong to the heads of
                this rank.
            options: keyword arguments of the constructor, such as `cache_format` and `backend`. Without `kv_scale` or
                `q_scale`, the layer takes the scale that the checkpoint stores for the cache or for the queries.

        Raises:
            UnsupportedConfiguration: `MLAConfig.from_hf` raises it; the two norms have different epsilons; the weight
                of a projection cannot be divided by heads.
            ValueError: a scale of the checkpoint is not valid, or was not made for e4m3.
        """
        return layer_from_hf(cls, module, options)

    def refresh_weights(self) -> None:
        """Read the weight of `kv_b_proj` again, after the caller changed this weight.

        The layer keeps a dense copy of this weight if `kv_b_proj` is not a plain linear module. With both
        `expand_by_module` and `fp8_weights`, the layer needs no dense weight and keeps no copy. This function updates
        the copy and the `fp8_weights`, in place if device and dtype have not changed.
        `reference.mla.layer.MLAAttention.refresh_weights` explains the copy and the `fp8_weights`.

        Raises:
            ValueError: `kv_b_proj` has a bias.
        """
        refresh(self)

    def up_projections(self) -> tuple[Float[Tensor, "Lkv N P"], Float[Tensor, "Lkv N V"]]:
        """Return W_UK [Lkv, N, P] and W_UV [Lkv, N, V], views of the dense weight of `kv_b_proj`.

        `reference.mla.layer.MLAAttention.up_projections` explains the case of a layer that keeps no dense weight.
        """
        weight, c = dense_weight_of(self), self.local_config
        return split_kv_b_proj(weight, c.num_heads, c.qk_nope_head_dim, c.v_head_dim)

    def _apply(self, fn: Callable, recurse: bool = True) -> MLAAttention:
        """Move or cast the layer, and drop the cached views of weights, which would keep the old memory alive."""
        self._weight_views.forget()
        return super()._apply(fn, recurse)

    @backends.with_wanted_checks
    @backends.without_gradients
    def forward(
        self,
        hidden_states: Float[Tensor, "T H"],
        positions: Int[Tensor, " T"],
        kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
        metadata: MLAMetadata | None,
    ) -> Float[Tensor, "T H"]:
        """Compute the output of the layer for one packed batch, and write the new tokens to the cache.

        The tokens of decodes come first, then the tokens of prefills, then padding tokens.

        Args:
            hidden_states: [T, H].
            positions: [T], position of each token in its request.
            kv_cache: cache of this layer.
            metadata: plan of the step. None selects the memory-profile run: it allocates the buffers of the largest
                step of T tokens, so that the engine can measure the peak memory.

        Returns:
            [T, H]. The output of a padding token is `o_proj` of zeros.

        Raises:
            ValueError: the arguments do not match. Nothing has been written to the cache then.
        """
        weights = self._weight_views.of(self)
        with weights.calls_inside(hidden_states, positions, kv_cache, metadata):
            output = self._attend(hidden_states, positions, kv_cache, metadata, weights)
        hidden = linear_output("o_proj", weights.projections.o_proj(output.flatten(1)))
        return hidden if self.context_parallel is None else self.context_parallel.tp_group.all_reduce(hidden)

    def _attend(self, hidden_states, positions, kv_cache, metadata, weights: AttentionWeights) -> Tensor:
        """Compute the output [T, N, V] of the heads, before `o_proj`."""
        w_uk, w_uv = weights.w_uk, weights.w_uv
        if not backends.repeats():
            with backends.CallsOfOthers():
                _check_inputs(self.config, weights.norm_weight, hidden_states, positions)
        c = self.local_config
        q, down = down_project(c, hidden_states, weights)
        checked = backends.confirm(q, down)
        kv_c, k_pe = down.split_with_sizes([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        output = q.new_empty(q.shape[0], c.num_heads, c.v_head_dim)
        if not checked:
            with backends.CallsOfOthers():  # no records for `nested_calls`: later calls skip these checks together
                _check_forward_attention(c, w_uk, q, kv_c, k_pe, kv_cache, self.cache_format, weights.kv_scale)
                if metadata is not None:
                    self._check_step(metadata, q, kv_cache)
        elif metadata is not None:
            check_step_values(metadata, kv_cache)
        if metadata is None:
            slots, graph = positions.new_empty(0, dtype=torch.int64), GraphSupport.NONE  # write nothing
        else:
            slots, graph = rows_of(metadata.slot_mapping, 0, metadata.num_actual_tokens), metadata.decode.graph
        workspace, largest = reserve_for_step(self, metadata, q)
        q_nope, q_pe = q.split_with_sizes([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        new = NewTokens(positions, q_pe, kv_c, k_pe)
        if metadata is not None and (weights.kv_scale is not None or self.observed is not None):
            measure_step(self, metadata, new, q_nope, kv_cache, weights)
        split, end = (0, q.shape[0]) if metadata is None else (metadata.num_decode_tokens, metadata.num_actual_tokens)
        in_e4m3 = 0 if weights.q_scale is None else split  # number of tokens whose queries are made in e4m3
        if in_e4m3 > 0:
            decoded = new.rows(0, split), rows_of(slots, 0, split)
            q_e4m3 = write_tokens(self, *decoded, kv_cache, graph, weights, weights.q_scale).q_pe
            new, slots = new.rows(split, q.shape[0]), rows_of(slots, split, end)
        writes = in_e4m3 < end or in_e4m3 == 0
        written = write_tokens(self, new, slots, kv_cache, graph, weights) if writes else new.unwritten()
        q_pe, kv_c_normed, k_pe = written.q_pe, written.kv_c_normed, written.k_pe
        del down, kv_c, new, written  # these views keep the memory of the down-projection alive
        if split > 0:
            decode(self, q_nope, q_e4m3 if in_e4m3 else q_pe, kv_cache, metadata, output, weights)
        expanded = split - in_e4m3, end - in_e4m3  # the rows of the prefills in the results of the last `write_tokens`
        if end > split:
            # only the expanded path needs both parts of a query in one tensor
            q = weights.projections.join_queries(rows_of(q, split, end), rows_of(q_pe, *expanded))
        del q_nope, q_pe
        if metadata is None:
            touch_largest(q, kv_c_normed, w_uk, w_uv, c, *largest, self.context_parallel, weights.expand)
            output.zero_()
        elif end > split:
            entries = rows_of(kv_c_normed, *expanded), rows_of(k_pe, *expanded)
            self._prefill(q, *entries, kv_cache, metadata, rows_of(output, split, end), weights, workspace)
        if end < output.shape[0]:
            output[end:] = 0
        return output

    @backends.with_wanted_checks
    def project(self, hidden_states: Float[Tensor, "T H"], positions: Int[Tensor, " T"]) -> ProjectedTokens:
        """Apply the down-projections and the norms, up-project the query, and rotate the rope parts.

        Returns:
            `ProjectedTokens`: q [T, N, P + R] with its rope part rotated, kv_c_normed [T, Lkv], k_pe [T, R] rotated.
        """
        weights = self._weight_views.of(self)
        _check_inputs(self.config, weights.norm_weight, hidden_states, positions)
        c = self.local_config
        q, down = down_project(c, hidden_states, weights)
        kv_c, k_pe = down.split_with_sizes([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        kv_c_normed = rms_norm(kv_c, weights.norm_weight, c.latent_norm_eps)
        q_nope, q_pe = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        q_pe, k_pe = apply_rope(
            positions, q_pe, k_pe, c.rope, frequencies=frequencies_for(self, q), backend=self.backend
        )
        return ProjectedTokens(torch.cat((q_nope, q_pe), dim=-1), kv_c_normed, k_pe)

    @backends.with_wanted_checks
    @backends.without_gradients
    def forward_attention(
        self,
        q: Float[Tensor, "T N D"],
        kv_c_normed: Float[Tensor, "T Lkv"],
        k_pe: Float[Tensor, "T R"],
        kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
        metadata: MLAMetadata | None,
        output: Shaped[Tensor, "T N V"],
        output_scale: Float[Tensor, ""] | None = None,
        output_block_scale: Tensor | None = None,
    ) -> None:
        """Write the new tokens to the cache; compute decodes on the absorbed path and prefills on the expanded path.

        Args:
            q: [T, N, P + R], rotated.
            kv_c_normed: [T, Lkv].
            k_pe: [T, R], rotated.
            kv_cache: cache, written at `metadata.slot_mapping`.
            metadata: plan of the step. None allocates the buffers of the largest step of T tokens, and writes zeros to
                `output`.
            output: [T, N, V], in the dtype of the layer, or in e4m3 if `output_scale` is given; the function writes
                every element.
            output_scale: float32 scale of an output in e4m3 (8 bits); None for an output in the dtype of the layer.
            output_block_scale: must be None: an output with one scale for each group of elements is not supported.

        Raises:
            ValueError: the arguments do not match. Nothing has been written then.
            UnsupportedConfiguration: `output_block_scale` is given.
        """
        weights = self._weight_views.of(self)
        check_output_scale(output_scale, output_block_scale, self.kv_a_layernorm.weight.device)
        check_scale_values("output_scale", output_scale)
        with weights.calls_inside(q, kv_c_normed, k_pe, kv_cache, metadata, output, output_scale):
            self._write_and_attend(q, kv_c_normed, k_pe, kv_cache, metadata, output, weights, output_scale)

    def _write_and_attend(self, q, kv_c_normed, k_pe, kv_cache, metadata, output, weights, output_scale) -> None:
        """Compute `forward_attention` with the given views of the weights."""
        c, w_uk, w_uv = self.local_config, weights.w_uk, weights.w_uv
        _check_forward_attention(c, w_uk, q, kv_c_normed, k_pe, kv_cache, self.cache_format, weights.kv_scale)
        check_attention_output(c, output, output_scale, w_uk, q, kv_c_normed, k_pe, kv_cache)
        if metadata is None:
            _, largest = reserve_for_step(self, None, q)
            touch_largest(q, kv_c_normed, w_uk, w_uv, c, *largest, self.context_parallel, weights.expand)
            output.zero_()
            return
        self._check_step(metadata, q, kv_cache, output_scale is not None)
        workspace, _ = reserve_for_step(self, metadata, q)
        split, end = metadata.num_decode_tokens, metadata.num_actual_tokens
        q_nope, q_pe = q.split_with_sizes([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        if self.kv_scale is not None or self.observed is not None:
            choose_kv_scale(self, metadata, lambda: (kv_c_normed, k_pe))
            observe_queries(self, metadata, lambda: (absorbed_queries(self, q_nope, weights), q_pe))
        concat_and_cache_mla(
            rows_of(kv_c_normed, 0, end), rows_of(k_pe, 0, end), kv_cache, metadata.slot_mapping, self.cache_format,
            weights.kv_scale, graph=metadata.decode.graph, backend=self.backend,
        )  # fmt: skip
        if split > 0:
            if weights.q_scale is not None:
                q_pe = to_e4m3(rows_of(q_pe, 0, split), weights.q_scale.unsqueeze(-1))
            decode(self, q_nope, q_pe, kv_cache, metadata, output, weights, output_scale)
        if end > split:
            parts = [rows_of(x, split, end) for x in (q, kv_c_normed, k_pe)]
            self._prefill(*parts, kv_cache, metadata, rows_of(output, split, end), weights, workspace, output_scale)
        if end < output.shape[0]:
            output[end:] = 0

    def _check_step(self, metadata: MLAMetadata, q: Tensor, kv_cache: Tensor, in_e4m3: bool = False) -> None:
        """Raise if the plan of a step does not fit the layer, the queries, the cache or an output in e4m3."""
        _check_step(metadata, q.shape[0], kv_cache, self.workspace_tokens, self.cache_format, self.fp8_mode)
        check_step_values(metadata, kv_cache)
        _check_prefill_backend(metadata.prefill, self.config, q.dtype, self.backend, in_e4m3)
        if metadata.decode.backend is not None or self.backend is not None:
            q_scale = None if self.q_scale is None else self.q_scale.value
            _check_decode_backend(metadata, self.config, q.dtype, kv_cache.shape[1], self.cache_format, self.fp8_mode,
                                  self.backend, q_scale)  # fmt: skip
        check_step_ownership(metadata, self.context_parallel)

    def _prefill(self, q, kv_c_normed, k_pe, kv_cache, metadata, output, weights, workspace, output_scale=None) -> None:
        """Compute the expanded path; all tensors except the cache contain only the tokens of the prefills."""
        gather = gather_context
        if self.context_parallel is not None:
            gather = functools.partial(dcp_gather_context, context_parallel=self.context_parallel, backend=self.backend)
        forward_prefill(
            q, kv_c_normed, k_pe, kv_cache, metadata.prefill, weights.w_uk, weights.w_uv, weights.softmax_scale,
            gather, self.cache_format, False, weights.kv_scale, output_scale=output_scale, expand=weights.expand,
            out=output, workspace=workspace, backend=self.backend,
        )  # fmt: skip
