"""The new tokens of a step: make their queries and latents, and write their entries to the cache.

docs/glossary.md explains the terms and the letters of shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Int64, Shaped
from torch import Tensor, nn

from reference.interfaces import (
    GraphSupport,
    MLAConfig,
    MLAMetadata,
    check_rms_norm,
    choose_kv_scale,
    linear_output,
    observe_queries,
    wide_dtype,
)

from .. import backends
from ..attention.rope import rotary_frequencies
from .absorbed_path import absorbed_queries
from .cache_write import WrittenTokens, rope_norm_and_cache
from .state_rows import rows_of
from .weight_views import AttentionWeights

_check_rms_norm = backends.CheckedOnce(check_rms_norm)


class NewTokens(NamedTuple):
    """Results of the projections for the new tokens of a step, before the rotation and the norm.

    Attributes:
        positions: [T], position of each token in its request.
        q_pe: [T, N, R], rope parts of the queries.
        kv_c: [T, Lkv], latents.
        k_pe: [T, R], rope parts of the keys.
    """

    positions: Int[Tensor, " T"]
    q_pe: Float[Tensor, "T N R"]
    kv_c: Float[Tensor, "T Lkv"]
    k_pe: Float[Tensor, "T R"]

    def rows(self, first: int, end: int) -> NewTokens:
        """Return the tokens from `first` up to `end`, as views."""
        return NewTokens(*(rows_of(x, first, end) for x in self))

    def unwritten(self) -> WrittenTokens:
        """Return the tokens as they are, for a step whose last tokens are already written."""
        return WrittenTokens(self.q_pe, self.kv_c, self.k_pe)


def norm_rows(
    x: Float[Tensor, "T L"], weight: Float[Tensor, " L"], eps: float, checked: bool = False
) -> Float[Tensor, "T L"]:
    """Compute `rms_norm` of `fast.mla.layer`; if `checked` is True, the caller knows that the arguments are valid."""
    if not checked:
        with backends.CallsOfOthers():
            _check_rms_norm(x, weight, eps)
    if weight.dtype is not x.dtype:
        weight = weight.to(x.dtype)
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def down_project(
    config: MLAConfig, hidden_states: Float[Tensor, "T H"], weights: AttentionWeights
) -> tuple[Float[Tensor, "T N D"], Float[Tensor, "T L"]]:
    """Return queries before the rotation, and the latents with the rope keys as the projection returned them.

    Args:
        config: config with the heads of this rank.
        hidden_states: [T, H].
        weights: views of the layer's weights, and its projections.

    Returns:
        Queries [T, N, P + R]; latents and rope keys in one tensor [T, Lkv + R].
    """
    modules = weights.projections
    with backends.CallsOfOthers():
        if modules.q_proj is not None:
            q = linear_output("q_proj", modules.q_proj(hidden_states))
        else:
            q_c = linear_output("q_a_proj", modules.q_a_proj(hidden_states))
        down = linear_output("kv_a_proj_with_mqa", modules.kv_a_proj_with_mqa(hidden_states))
    if modules.q_proj is None:
        q_c = norm_rows(q_c, modules.q_norm_weight, config.latent_norm_eps, backends.confirm(q_c))
        with backends.CallsOfOthers():
            q = linear_output("q_b_proj", modules.q_b_proj(q_c))
    return q.reshape(-1, config.num_heads, config.qk_head_dim), down


def frequencies_for(layer: nn.Module, q: Tensor) -> Tensor:
    """Return the layer's rotary frequencies [R/2] on the device of `q`; float64 if `q` is float64, otherwise float32.

    The layer keeps the frequencies in `_frequencies`.
    """
    wide = wide_dtype(q.dtype)
    if layer._frequencies.device != q.device or layer._frequencies.dtype != wide:
        c = layer.local_config
        layer._frequencies = rotary_frequencies(c.rope, c.qk_rope_head_dim, wide).to(q.device)
    return layer._frequencies


def write_tokens(
    layer: nn.Module,
    new: NewTokens,
    slots: Int64[Tensor, " slots"],
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    graph: GraphSupport,
    weights: AttentionWeights,
    q_scale: Float[Tensor, "*heads"] | None = None,
) -> WrittenTokens:
    """Call `rope_norm_and_cache` for new tokens; the rope parts of the queries are in e4m3 if `q_scale` is given."""
    return rope_norm_and_cache(
        new.positions, new.q_pe, new.kv_c, new.k_pe, kv_cache, slots, weights.norm_weight, layer.config.latent_norm_eps,
        layer.config.rope, layer.cache_format, weights.kv_scale, q_scale, frequencies=frequencies_for(layer, new.q_pe),
        graph=graph, backend=layer.backend,
    )  # fmt: skip


def measure_step(
    layer: nn.Module,
    metadata: MLAMetadata,
    new: NewTokens,
    q_nope: Float[Tensor, "T N P"],
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    weights: AttentionWeights,
) -> None:
    """Choose the scale of the cache if no step has written to the cache yet; if a calibration runs, record the step.

    Call this function after all checks of the step and before the step writes to the cache.
    """
    made: list[WrittenTokens] = []

    def rotated() -> WrittenTokens:  # without a write to the cache
        if not made:
            slots = torch.empty(0, dtype=torch.int64, device=kv_cache.device)
            made.append(write_tokens(layer, new, slots, kv_cache, GraphSupport.NONE, weights))
        return made[0]

    def entries() -> tuple[Tensor, Tensor]:
        with backends.CallsOfOthers():  # no records for `nested_calls`: most steps do not call these ops
            return rotated().kv_c_normed, rotated().k_pe

    def queries() -> tuple[Tensor, Tensor]:
        with backends.CallsOfOthers():
            return absorbed_queries(layer, q_nope, weights), rotated().q_pe

    choose_kv_scale(layer, metadata, entries)
    observe_queries(layer, metadata, queries)
