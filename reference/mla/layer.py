"""One MLA attention layer: projections, rotary, cache write, and the two paths through attention."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

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
    MOST_WORKSPACE_TOKENS,
    CacheFormat,
    MLAConfig,
    MLAMetadata,
    UnsupportedConfiguration,
    check_format,
    check_forward_attention,
    check_int,
    check_modules,
    check_norm,
    check_number,
    check_projections,
    check_step,
    check_tensor,
    latent_norm_eps,
    linear_output,
    wide_dtype,
)
from .cascade import cascade_attention
from .context_parallel import dcp_decode, dcp_gather_context
from .decode import mla_decode
from .prefill import forward_prefill, gather_context
from .weights import absorb, dense_weight, expand_kv, is_plain_linear, latent_to_value, query_to_latent, split_kv_b_proj


def rms_norm(x: Float[Tensor, "T L"], weight: Float[Tensor, " L"], eps: float) -> Float[Tensor, "T L"]:
    """RMS norm, x / sqrt(mean(x^2) + eps) * weight, the mean in float32 or float64 (arXiv 1910.07467).

    Raises:
        ValueError: shapes or devices that do not fit.
    """
    check_tensor("x", x, ("T", "L"))
    check_tensor("weight", weight, (x.shape[1],), device=x.device)
    check_number("eps", eps, 0)
    wide = x.to(wide_dtype(x.dtype))
    return (weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)).to(x.dtype)


class MLAAttention(nn.Module):
    """Multi-head Latent Attention over a paged latent cache.

    The projections are modules that the caller owns and shares (any callable module: quantised ones too), under
    the names that DeepSeek's checkpoints use. Each returns its product, or (product, None) as the linears of vLLM and
    Megatron do. Inference only.

    Args:
        config: dims, epsilon, rotary parameters.
        kv_a_proj_with_mqa: H -> Lkv + R.
        kv_a_layernorm: RMS norm with a weight [Lkv]; its epsilon is the config's.
        kv_b_proj: Lkv -> N (P + V).
        o_proj: N V -> H.
        q_proj: H -> N (P + R), where the config has no q_lora_rank.
        q_a_proj: H -> Lq, where it has one.
        q_a_layernorm: RMS norm with a weight [Lq], likewise.
        q_b_proj: Lq -> N (P + R), likewise.
        workspace_tokens: most context tokens that a chunk of a plan may have. The memory-profile run
            (`metadata=None`) expands so many, and a plan with a larger chunk raises. The default is the most that a
            builder takes by itself; pass the number of the builder where it is another one.
        context_parallel: the groups, where ranks share heads and sequences: the projections that have heads are then
            this rank's share of them (N / TP), `o_proj` without a bias; the config is that of all heads.
        cache_format: format of the layer's cache.
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
    ):
        super().__init__()
        check_projections(config, q_proj, q_a_proj, q_a_layernorm, q_b_proj)
        check_output_projection(o_proj, context_parallel)
        check_modules(
            kv_a_proj_with_mqa=kv_a_proj_with_mqa, kv_b_proj=kv_b_proj, o_proj=o_proj, q_proj=q_proj,
            q_a_proj=q_a_proj, q_b_proj=q_b_proj,
        )  # fmt: skip
        check_int("workspace_tokens", workspace_tokens)
        check_format(cache_format)
        check_norm("kv_a_layernorm", kv_a_layernorm, config.kv_lora_rank)
        if q_a_layernorm is not None:
            check_norm("q_a_layernorm", q_a_layernorm, config.q_lora_rank)
        self.config, self.context_parallel = config, context_parallel
        self.local_config = config if context_parallel is None else context_parallel.local_config(config)
        self.q_proj, self.q_a_proj, self.q_b_proj = q_proj, q_a_proj, q_b_proj
        self.kv_a_proj_with_mqa, self.kv_b_proj, self.o_proj = kv_a_proj_with_mqa, kv_b_proj, o_proj
        self.q_a_layernorm, self.kv_a_layernorm = q_a_layernorm, kv_a_layernorm
        self.workspace_tokens, self.cache_format = workspace_tokens, cache_format
        self.register_buffer("recovered_kv_b_weight", None, persistent=False)
        self.refresh_weights()

    @classmethod
    def from_hf(cls, module: nn.Module, **options: Any) -> MLAAttention:
        """Build from a transformers DeepseekV2Attention or DeepseekV3Attention, sharing its submodules.

        Args:
            module: the attention module; its latent norm's epsilon is read, not assumed. With `context_parallel` its
                projections have all heads, and the layer takes views of this rank's share of their weights.
            options: keyword arguments of the constructor (`workspace_tokens`, `context_parallel`).

        Raises:
            UnsupportedConfiguration: as `MLAConfig.from_hf`; latent norms of different epsilons; projections whose
                heads cannot be taken apart.
        """
        if not hasattr(module, "config") or not hasattr(module, "kv_a_layernorm"):
            wanted = "module: expected a DeepseekV2Attention or DeepseekV3Attention"
            raise UnsupportedConfiguration([f"{wanted}, got {type(module).__name__}"])
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedConfiguration(["module.is_causal: only causal attention is implemented, got False"])
        config = MLAConfig.from_hf(module.config)
        low_rank = config.q_lora_rank is not None
        eps = latent_norm_eps(module.kv_a_layernorm, module.q_a_layernorm if low_rank else None)
        config = dataclasses.replace(config, latent_norm_eps=eps)
        # which dimension of a weight has heads
        with_heads = {"kv_b_proj": 0, "o_proj": 1, "q_b_proj" if low_rank else "q_proj": 0}
        projections = {name: getattr(module, name) for name in with_heads}
        if (context_parallel := options.get("context_parallel")) is not None:
            projections = {
                name: context_parallel.shard_linear(name, projections[name], dim, config.num_heads)
                for name, dim in with_heads.items()
            }
        return cls(
            config,
            kv_a_proj_with_mqa=module.kv_a_proj_with_mqa,
            kv_a_layernorm=module.kv_a_layernorm,
            q_a_proj=module.q_a_proj if low_rank else None,
            q_a_layernorm=module.q_a_layernorm if low_rank else None,
            **projections,
            **options,
        )

    def refresh_weights(self) -> None:
        """Read kv_b_proj again after its weights changed, in place where the shape stands.

        Needed only where the weight had to be recovered (a quantised, wrapped or hooked linear); the parameter of a
        plain linear is used as it is.
        """
        dtype = self.kv_a_layernorm.weight.dtype
        if is_plain_linear(self.kv_b_proj, dtype):
            self.recovered_kv_b_weight = None
            return
        weight, held = dense_weight(self.kv_b_proj, self.config.kv_lora_rank, dtype), self.recovered_kv_b_weight
        if held is not None and held.device == weight.device and held.dtype == weight.dtype:
            held.copy_(weight)
        else:
            self.recovered_kv_b_weight = weight

    def up_projections(self) -> tuple[Float[Tensor, "Lkv N P"], Float[Tensor, "Lkv N V"]]:
        """W_UK [Lkv, N, P] and W_UV [Lkv, N, V], views of kv_b_proj's weight."""
        weight = self.recovered_kv_b_weight
        if weight is None:
            weight = self.kv_b_proj.weight.detach()
        c = self.local_config
        return split_kv_b_proj(weight, c.num_heads, c.qk_nope_head_dim, c.v_head_dim)

    @torch.no_grad()
    def forward(
        self,
        hidden_states: Float[Tensor, "T H"],
        positions: Int[Tensor, " T"],
        kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
        metadata: MLAMetadata | None,
    ) -> Float[Tensor, "T H"]:
        """Attend one packed batch: decodes first, then prefills, then padding.

        Args:
            hidden_states: [T, H].
            positions: [T], position of each token in its request.
            kv_cache: this layer's cache; the new tokens are written to it.
            metadata: the plan of the step; None is the memory-profile run.

        Returns:
            [T, H]; zeros through o_proj where a row is padding.

        Raises:
            ValueError: arguments that do not fit, before the cache is written.
        """
        weight = self.kv_a_layernorm.weight
        check_tensor("hidden_states", hidden_states, ("T", self.config.hidden_size), (weight.dtype,), weight.device)
        q, kv_c_normed, k_pe = self.project(hidden_states, positions)
        output = q.new_empty(q.shape[0], self.local_config.num_heads, self.config.v_head_dim)
        self.forward_attention(q, kv_c_normed, k_pe, kv_cache, metadata, output)
        hidden = linear_output("o_proj", self.o_proj(rearrange(output, "tokens heads value -> tokens (heads value)")))
        return hidden if self.context_parallel is None else self.context_parallel.tp_group.all_reduce(hidden)

    def project(
        self, hidden_states: Float[Tensor, "T H"], positions: Int[Tensor, " T"]
    ) -> tuple[Float[Tensor, "T N D"], Float[Tensor, "T Lkv"], Float[Tensor, "T R"]]:
        """Down-project, norm, up-project the query, rotate.

        Returns:
            q [T, N, P + R] with its rope part rotated, kv_c_normed [T, Lkv], k_pe [T, R] rotated.
        """
        weight = self.kv_a_layernorm.weight
        check_tensor("hidden_states", hidden_states, ("T", self.config.hidden_size), (weight.dtype,), weight.device)
        check_tensor("positions", positions, (hidden_states.shape[0],), (torch.int64, torch.int32), weight.device)
        c = self.local_config
        if self.q_proj is not None:
            q = linear_output("q_proj", self.q_proj(hidden_states))
        else:
            q_c = linear_output("q_a_proj", self.q_a_proj(hidden_states))
            q = linear_output("q_b_proj", self.q_b_proj(rms_norm(q_c, self.q_a_layernorm.weight, c.latent_norm_eps)))
        q = rearrange(q, "tokens (heads dim) -> tokens heads dim", heads=c.num_heads)
        q_nope, q_pe = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        down = linear_output("kv_a_proj_with_mqa", self.kv_a_proj_with_mqa(hidden_states))
        kv_c, k_pe = down.split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        q_pe, k_pe = apply_rope(positions, q_pe, k_pe, c.rope)
        return torch.cat((q_nope, q_pe), dim=-1), rms_norm(kv_c, self.kv_a_layernorm.weight, c.latent_norm_eps), k_pe

    @torch.no_grad()
    def forward_attention(
        self,
        q: Float[Tensor, "T N D"],
        kv_c_normed: Float[Tensor, "T Lkv"],
        k_pe: Float[Tensor, "T R"],
        kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
        metadata: MLAMetadata | None,
        output: Float[Tensor, "T N V"],
    ) -> None:
        """Write the new tokens to the cache, send decodes down the absorbed path and prefills down the expanded one.

        Args:
            q: [T, N, P + R], rotated.
            kv_c_normed: [T, Lkv].
            k_pe: [T, R], rotated.
            kv_cache: written at `metadata.slot_mapping`.
            metadata: the plan; None touches the largest buffers and leaves `output` zero.
            output: [T, N, V], written whole.

        Raises:
            ValueError: arguments that do not fit, before anything is written.
        """
        c = self.local_config
        w_uk, w_uv = self.up_projections()
        check_forward_attention(c, w_uk, q, kv_c_normed, k_pe, kv_cache, output, self.cache_format)
        if metadata is None:
            context = q.new_zeros(self.workspace_tokens, c.head_size)
            expand_kv(context[:, : c.kv_lora_rank], w_uk, w_uv)
            output.zero_()
            return
        check_step(metadata, q.shape[0], kv_cache, self.workspace_tokens)
        check_step_ownership(metadata, self.context_parallel)

        end, split = metadata.num_actual_tokens, metadata.num_decode_tokens
        concat_and_cache_mla(kv_c_normed[:end], k_pe[:end], kv_cache, metadata.slot_mapping, self.cache_format)
        if split > 0:
            w_uk_t, w_uv_absorbed = absorb(w_uk, w_uv)
            q_nope, q_pe = q[:split].split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
            ql_nope = query_to_latent(q_nope, w_uk_t)
            if metadata.cascade is not None:
                state = cascade_attention(ql_nope, q_pe, kv_cache, metadata.cascade, c.softmax_scale, self.cache_format)
            elif self.context_parallel is not None:
                state = dcp_decode(
                    ql_nope, q_pe, kv_cache, metadata.decode, c.softmax_scale, self.context_parallel,
                    metadata.schedule, cache_format=self.cache_format,
                )  # fmt: skip
            else:
                state = mla_decode(
                    ql_nope, q_pe, kv_cache, metadata.decode, c.softmax_scale, metadata.schedule,
                    cache_format=self.cache_format,
                )  # fmt: skip
            output[:split] = latent_to_value(state.out, w_uv_absorbed)
        if end > split:
            rows, gather = slice(split, end), gather_context
            if self.context_parallel is not None:
                gather = functools.partial(dcp_gather_context, context_parallel=self.context_parallel)
            state = forward_prefill(
                q[rows], kv_c_normed[rows], k_pe[rows], kv_cache, metadata.prefill, w_uk, w_uv, c.softmax_scale, gather,
                self.cache_format,
            )  # fmt: skip
            output[rows] = state.out
        output[end:] = 0
