"""One MLA attention layer: projections, rotary embedding, cache write, and attention.

Decodes (requests with one or a few new tokens) take the absorbed path: attention over the cached latents themselves.
Prefills (requests with more new tokens) take the expanded path: attention over keys and values of every head.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from ..attention.rope import apply_rope
from ..cache.latent import concat_and_cache_mla
from ..distributed.arguments import check_output_projection, check_step_ownership
from ..distributed.groups import ContextParallel
from ..interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    MOST_WORKSPACE_TOKENS,
    AbsorbedWeights,
    CacheFormat,
    ContextWorkspace,
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
    check_no_bias,
    check_norm,
    check_output_scale,
    check_projections,
    check_rms_norm,
    check_scale_values,
    check_step,
    check_step_values,
    choose_kv_scale,
    is_plain_linear,
    layer_from_hf,
    linear_output,
    make_kv_scale,
    make_query_scale,
    observe_queries,
    reserve_largest,
    to_e4m3,
    wide_dtype,
)
from ..interfaces.layer_results import ProjectedTokens
from .absorbed_path import absorbed_output, own_q_scale
from .context_parallel import dcp_gather_context
from .module_expansion import expand_kv_by_module
from .prefill import forward_prefill, gather_context
from .weights import (
    absorb,
    dense_weight,
    expand_kv,
    quantize_weight,
    query_to_latent,
    split_kv_b_proj,
)


def rms_norm(x: Float[Tensor, "T L"], weight: Float[Tensor, " L"], eps: float) -> Float[Tensor, "T L"]:
    """Return the RMS norm x / sqrt(mean(x^2) + eps) * weight of each row (arXiv 1910.07467).

    The mean and the division are computed in float32 (float64 if `x` is float64).

    Args:
        x: [T, L], rows of any width L.
        weight: [L].
        eps: epsilon, at least 0.

    Returns:
        [T, L] in the dtype of `x`.

    Raises:
        ValueError: shapes or devices do not match.
    """
    check_rms_norm(x, weight, eps)
    wide = x.to(wide_dtype(x.dtype))
    return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)).to(x.dtype)


class _DownProjected(NamedTuple):
    """Queries [T, N, P] and [T, N, R], latents [T, Lkv] and rope keys [T, R], before the rotation and the norm."""

    q_nope: Tensor
    q_pe: Tensor
    kv_c: Tensor
    k_pe: Tensor


class MLAAttention(nn.Module):
    """Multi-head Latent Attention over a paged latent cache, for inference.

    The caller passes the projections as modules, under the names of DeepSeek's checkpoints. Any module works as a
    projection, also a quantised module. A projection returns its product, or (product, None) like the linear modules of
    vLLM and Megatron. The layer uses the weights of the modules without a copy, except a `kv_b_proj` that is not a
    plain `nn.Linear` (see `refresh_weights`).

    Args:
        config: dims, epsilon of the latent norms, rotary parameters.
        kv_a_proj_with_mqa: projection H -> Lkv + R, to the latent and the shared rope part of the key.
        kv_a_layernorm: RMS norm of the latent, with a weight [Lkv]. The layer takes the epsilon from `config`.
        kv_b_proj: projection Lkv -> N (P + V), from the latent to keys and values.
        o_proj: output projection N V -> H.
        q_proj: query projection H -> N (P + R); required if `config.q_lora_rank` is None. Otherwise `q_proj` must be
            None, and the next three modules are required.
        q_a_proj: projection H -> Lq, to the query latent.
        q_a_layernorm: RMS norm of the query latent, with a weight [Lq]. The layer takes the epsilon from `config`.
        q_b_proj: projection Lq -> N (P + R), from the query latent to the queries.
        workspace_tokens: largest number of context tokens that a prefill expands at once (one chunk). A call raises if
            its plan has a larger chunk. If the caller gives `workspace_tokens` to the builder of the plans, the layer
            needs the same number. The default is enough for a builder without this argument.
        context_parallel: the process groups of context parallelism; None for one rank. With groups, the projections
            `q_proj`, `q_b_proj`, `kv_b_proj` and `o_proj` have only this rank's N / TP heads (TP: number of
            tensor-parallel ranks), and `o_proj` has no bias. `config` still describes all N heads.
        cache_format: format of the layer's cache.
        workspace: memory in which a prefill gathers and expands one chunk; all layers of a model can share it. With
            None the layer uses the workspace of the plan (`MLAMetadata.workspace`). A memory-profile run (see
            `forward`) has no plan: with None, the layer then allocates the memory and frees it.
        kv_scale: scale of the layer's cache, only for a format with `CacheFormat.layer_scale`. With None, the first
            step sets the scale: from its values if it has a prefill, otherwise 1.0 (`reference.interfaces.kv_scales`).
        fp8_weights: whether the absorbed weights are stored in e4m3 (8 bits), with one scale for each head
            (`quantize_weight`). The constructor and `refresh_weights` quantise the weights.
        fp8_mode: mode of decodes over a cache in e4m3 (`mla_decode`). In the modes `fp8_query` and `fp8_product`, the
            ops that absorb and rotate the queries of decodes return them in e4m3.
        q_scale: scale of queries in e4m3, only for the modes `fp8_query` and `fp8_product`: a number, or a tensor [N]
            with a scale for each of all N heads. None means 1.0, with a warning (`reference.interfaces.query_scales`).
        expand_by_module: whether prefills expand latents by calling `kv_b_proj` (`expand_kv_by_module`). Otherwise
            prefills multiply latents by the dense weight of `kv_b_proj` (`expand_kv`). A call of a quantised module
            reads fewer bytes than `expand_kv`, and rounds as the module does. Only `expand_kv` writes its result into
            the workspace.

    Attributes:
        kv_scale: the scale as a `KVScale`, a buffer of the layer; None if the format has no such scale.
        q_scale: the scale of queries in e4m3 as a `QueryScale`, a buffer of the layer; None in the mode `converted`.
        observed: largest absolute value that each step wrote, while `calibrate_kv_scales` records; otherwise None.
        observed_queries: largest absolute value of the absorbed queries of each step, in the same calibration.
        fp8_weights: the absorbed weights in e4m3; None without the option `fp8_weights`.

    Raises:
        TypeError: a projection is not a module, or an argument has another type.
        ValueError: in one of the following cases:

            - the query projections do not fit `config`;
            - a norm has hooks or a wrong weight;
            - N is not a multiple of TP;
            - `o_proj` has a bias, and ranks share the heads;
            - `o_proj` returns its bias instead of adding it;
            - `kv_b_proj` has a bias;
            - `cache_format` does not support the dims of `config`;
            - `fp8_mode` is unknown, or does not suit `cache_format`;
            - a scale does not suit the format or the mode.
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
        check_flag("fp8_weights", fp8_weights)
        check_flag("expand_by_module", expand_by_module)
        check_context_workspace("workspace", workspace)
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
        self.expand_by_module = expand_by_module
        self.register_buffer("recovered_kv_b_weight", None, persistent=False)
        self.fp8_weights = AbsorbedWeights() if fp8_weights else None
        self.refresh_weights()

    @classmethod
    def from_hf(cls, module: nn.Module, **options: Any) -> MLAAttention:
        """Build a layer that shares the submodules of a DeepseekV2Attention or DeepseekV3Attention of transformers.

        Args:
            module: the attention module, with the projections of all heads. The layer takes the epsilon of the module's
                latent norms. With `context_parallel` the layer uses views of the weights of this rank's heads.
            options: keyword arguments of the constructor, such as `context_parallel` and `cache_format`. A scale that
                the checkpoint stores for the cache or for the queries is used if `kv_scale` or `q_scale` is not given.

        Raises:
            UnsupportedConfiguration: for the same reasons as `MLAConfig.from_hf`; the latent norms have different
                epsilons; `context_parallel` is given, and a projection is not a plain linear, so its heads cannot be
                separated.
            ValueError: a scale that the checkpoint stores is not finite and positive, has several elements, or was made
                for another scheme than e4m3 with one static scale (`reference.interfaces.checkpoint_scheme`).
        """
        return layer_from_hf(cls, module, options)

    def refresh_weights(self) -> None:
        """Read the weight of `kv_b_proj` again, after the caller changed it.

        If `kv_b_proj` is a plain `nn.Linear`, the layer uses its parameter directly. If `kv_b_proj` is quantised,
        wrapped or hooked, the layer keeps a dense copy of the weight (`dense_weight`), and this call updates the copy.
        With `fp8_weights`, this call quantises the absorbed weights again. The call overwrites the tensors in place if
        possible.

        With both `expand_by_module` and `fp8_weights`, the layer keeps no dense copy: prefills then call the module,
        and decodes read the quantised weights.

        Raises:
            ValueError: `kv_b_proj` has a bias.
        """
        dtype, held = self.kv_a_layernorm.weight.dtype, self.recovered_kv_b_weight
        plain = is_plain_linear(self.kv_b_proj, dtype)
        if plain:
            check_no_bias("kv_b_proj", self.kv_b_proj)
        if plain or (self.expand_by_module and self.fp8_weights is not None):
            self.recovered_kv_b_weight = None
        else:
            weight = dense_weight(self.kv_b_proj, self.config.kv_lora_rank, dtype)
            if held is not None and held.device == weight.device and held.dtype == weight.dtype:
                held.copy_(weight)
            else:
                self.recovered_kv_b_weight = weight
        if self.fp8_weights is not None:
            self.fp8_weights.store(*(quantize_weight(each, True) for each in absorb(*self.up_projections())))

    def up_projections(self) -> tuple[Float[Tensor, "Lkv N P"], Float[Tensor, "Lkv N V"]]:
        """Return W_UK [Lkv, N, P] and W_UV [Lkv, N, V] of this rank's heads, as views of the weight of `kv_b_proj`.

        If the layer keeps no dense copy (`refresh_weights`), this call computes the weight with `dense_weight`.
        """
        weight, c = self.recovered_kv_b_weight, self.local_config
        if weight is None:
            weight = dense_weight(self.kv_b_proj, c.kv_lora_rank, self.kv_a_layernorm.weight.dtype)
        return split_kv_b_proj(weight, c.num_heads, c.qk_nope_head_dim, c.v_head_dim)

    @torch.no_grad()
    def forward(
        self,
        hidden_states: Float[Tensor, "T H"],
        positions: Int[Tensor, " T"],
        kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
        metadata: MLAMetadata | None,
    ) -> Float[Tensor, "T H"]:
        """Compute the layer's output for one packed batch: decodes first, then prefills, then padding.

        Args:
            hidden_states: [T, H].
            positions: [T], position of each token in its request.
            kv_cache: cache of this layer; the new tokens are written to it.
            metadata: plan of the step. None is for a memory-profile run, in which an engine measures the largest memory
                of a step: the layer allocates its largest buffers and computes no attention.

        Returns:
            [T, H]. A padding token has the output of `o_proj` for zeros.

        Raises:
            ValueError: arguments do not match. If the method raises, it has not written to the cache.
        """
        check_layer_inputs(self.config, self.kv_a_layernorm.weight, hidden_states, positions)
        down = self._down_project(hidden_states)
        q_e4m3 = None
        if self.q_scale is not None:
            q_e4m3, _ = apply_rope(positions, down.q_pe, down.k_pe, self.config.rope, own_q_scale(self))
        projected = self._rotate_and_norm(positions, down)
        output = down.q_pe.new_empty(down.q_pe.shape[0], self.local_config.num_heads, self.config.v_head_dim)
        self._write_and_attend(*projected, kv_cache, metadata, output, q_e4m3)
        hidden = linear_output("o_proj", self.o_proj(rearrange(output, "tokens heads value -> tokens (heads value)")))
        return hidden if self.context_parallel is None else self.context_parallel.tp_group.all_reduce(hidden)

    def project(self, hidden_states: Float[Tensor, "T H"], positions: Int[Tensor, " T"]) -> ProjectedTokens:
        """Compute the queries, normed latents and rope keys of the new tokens.

        Args:
            hidden_states: [T, H].
            positions: [T], position of each token in its request.

        Returns:
            `ProjectedTokens`: q [T, N, P + R] with the rope part rotated, kv_c_normed [T, Lkv], and k_pe [T, R]
            rotated. N is the number of this rank's heads.

        Raises:
            ValueError: shapes, dtypes or devices do not match.
        """
        check_layer_inputs(self.config, self.kv_a_layernorm.weight, hidden_states, positions)
        return self._rotate_and_norm(positions, self._down_project(hidden_states))

    def _down_project(self, hidden_states: Tensor) -> _DownProjected:
        """Return queries, latents and rope keys of the new tokens, before rotation and norm."""
        c = self.local_config
        if self.q_proj is not None:
            q = linear_output("q_proj", self.q_proj(hidden_states))
        else:
            q_c = linear_output("q_a_proj", self.q_a_proj(hidden_states))
            q = linear_output("q_b_proj", self.q_b_proj(rms_norm(q_c, self.q_a_layernorm.weight, c.latent_norm_eps)))
        q = rearrange(q, "tokens (heads dim) -> tokens heads dim", heads=c.num_heads)
        down = linear_output("kv_a_proj_with_mqa", self.kv_a_proj_with_mqa(hidden_states))
        q_parts = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        return _DownProjected(*q_parts, *down.split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1))

    def _rotate_and_norm(self, positions: Tensor, down: _DownProjected) -> ProjectedTokens:
        """Return the results of `project`."""
        c = self.local_config
        q_pe, k_pe = apply_rope(positions, down.q_pe, down.k_pe, c.rope)
        kv_c_normed = rms_norm(down.kv_c, self.kv_a_layernorm.weight, c.latent_norm_eps)
        return ProjectedTokens(torch.cat((down.q_nope, q_pe), dim=-1), kv_c_normed, k_pe)

    @torch.no_grad()
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
        """Write the new tokens to the cache, then attend: decodes on the absorbed, prefills on the expanded path.

        Args:
            q: [T, N, P + R], queries with the rope part rotated.
            kv_c_normed: [T, Lkv], normed latents of the new tokens.
            k_pe: [T, R], rotated rope parts of the new tokens' keys.
            kv_cache: cache of this layer; written at `metadata.slot_mapping`.
            metadata: plan of the step. With None (a memory-profile run) the method allocates the largest buffers and
                fills `output` with zeros.
            output: [T, N, V], in the dtype of the layer, or in e4m3 if `output_scale` is given; every element is
                written.
            output_scale: float32 scale of an output in e4m3 (8 bits): the value that is stored is output / scale,
                rounded once. None for an output in the dtype of the layer.
            output_block_scale: must be None: an output with one scale for each group of elements is not supported.

        Raises:
            ValueError: arguments do not match. If the method raises, it has written nothing.
            UnsupportedConfiguration: `output_block_scale` is given.
        """
        check_output_scale(output_scale, output_block_scale, self.kv_a_layernorm.weight.device)
        check_scale_values("output_scale", output_scale)
        self._write_and_attend(q, kv_c_normed, k_pe, kv_cache, metadata, output, output_scale=output_scale)

    def _write_and_attend(
        self, q, kv_c_normed, k_pe, kv_cache, metadata, output, q_e4m3=None, output_scale: Tensor | None = None
    ) -> None:
        """Compute `forward_attention`.

        `q_e4m3` has the rotated rope parts [T, N, R] of the queries in e4m3. If it is None, they are computed from `q`,
        which is already rounded to the dtype of the layer.
        """
        c = self.local_config
        w_uk, w_uv = self.up_projections()
        expand = None
        if self.expand_by_module:
            dims = dict(num_heads=c.num_heads, qk_nope_head_dim=c.qk_nope_head_dim, v_head_dim=c.v_head_dim)
            expand = functools.partial(expand_kv_by_module, kv_b_proj=self.kv_b_proj, **dims)
        scale = None if self.kv_scale is None else self.kv_scale.value
        check_forward_attention(c, w_uk, q, kv_c_normed, k_pe, kv_cache, self.cache_format, scale)
        check_attention_output(c, output, output_scale, w_uk, q, kv_c_normed, k_pe, kv_cache)
        if metadata is None:
            workspace = ContextWorkspace() if self.workspace is None else self.workspace
            context, expanded = self._reserve(workspace, self.workspace_tokens, q)
            if expand is None:
                expand_kv(context[:, : c.kv_lora_rank].zero_(), w_uk, w_uv, workspace=expanded)
            else:
                expand(context[:, : c.kv_lora_rank].zero_())
            output.zero_()
            return
        check_step(metadata, q.shape[0], kv_cache, self.workspace_tokens, self.cache_format, self.fp8_mode)
        check_step_values(metadata, kv_cache)
        check_step_ownership(metadata, self.context_parallel)
        workspace = metadata.workspace if self.workspace is None else self.workspace
        if metadata.prefill.context_chunks:
            longest = max(chunk.num_tokens for chunk in metadata.prefill.context_chunks)
            self._reserve(workspace, max(longest, min(metadata.workspace_tokens, self.workspace_tokens)), q)

        end, split = metadata.num_actual_tokens, metadata.num_decode_tokens
        choose_kv_scale(self, metadata, lambda: (kv_c_normed, k_pe))
        concat_and_cache_mla(kv_c_normed[:end], k_pe[:end], kv_cache, metadata.slot_mapping, self.cache_format, scale)
        w_uk_t, w_uv_absorbed = absorb(w_uk, w_uv)
        if self.fp8_weights is not None:
            w_uk_t, w_uv_absorbed = self.fp8_weights.w_uk_t, self.fp8_weights.w_uv
        q_nope, q_pe = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        observe_queries(self, metadata, lambda: (query_to_latent(q_nope, w_uk_t), q_pe))
        if split > 0:
            if self.q_scale is not None and q_e4m3 is None:
                q_e4m3 = to_e4m3(q_pe, rearrange(own_q_scale(self), "... -> ... 1"))
            queries = q_nope[:split], (q_pe if q_e4m3 is None else q_e4m3)[:split]
            output[:split] = absorbed_output(self, *queries, w_uk_t, w_uv_absorbed, kv_cache, metadata, output_scale)
        if end > split:
            rows, gather = slice(split, end), gather_context
            if self.context_parallel is not None:
                gather = functools.partial(dcp_gather_context, context_parallel=self.context_parallel)
            output[rows] = forward_prefill(
                q[rows], kv_c_normed[rows], k_pe[rows], kv_cache, metadata.prefill, w_uk, w_uv, c.softmax_scale, gather,
                self.cache_format, return_lse=False, kv_scale=scale, output_scale=output_scale, expand=expand,
                workspace=workspace,
            )  # fmt: skip
        output[end:] = 0

    def _reserve(
        self, workspace: ContextWorkspace, tokens: int, q: Tensor
    ) -> tuple[Float[Tensor, "S head_size"], Float[Tensor, " elements"]]:
        """Reserve a workspace for chunks of up to `tokens` tokens; return its memory for context and for expansion."""
        size = None if self.context_parallel is None else self.context_parallel.size
        return reserve_largest(workspace, self.local_config, tokens, size, q.dtype, q.device)
