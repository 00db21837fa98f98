"""A config and a tiny model of transformers, for the valid calls of `tests.malformed_calls`."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn


@dataclasses.dataclass
class HFConfig:
    """A config with the fields of a transformers config that `MLAConfig.from_hf` reads, made without transformers."""

    model_type: str = "deepseek_v3"
    hidden_size: int = 48
    num_attention_heads: int = 3
    q_lora_rank: int | None = None
    kv_lora_rank: int = 24
    qk_nope_head_dim: int = 12
    qk_rope_head_dim: int = 8
    v_head_dim: int = 10
    rope_interleave: bool = True
    rope_theta: float | None = 10000.0
    rope_parameters: dict | None = None
    max_position_embeddings: float | None = 4096
    partial_rotary_factor: float | None = 1.0
    sliding_window: int | None = None
    layer_types: list | None = None
    no_rope_layers: list | None = None
    kv_source_layers: list | None = None
    is_causal: bool | None = True
    position_embedding_type: str | None = None
    index_topk: int | None = None
    mla_scale_q_lora: bool | None = None


def hf_config() -> Any:
    """Return a config that `MLAConfig.from_hf` accepts, with the fields of YaRN."""
    yarn = dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0)
    return HFConfig(rope_parameters=yarn)


def tiny_model() -> nn.Module | None:
    """Return a model of transformers with one layer; None if transformers is not installed."""
    try:
        import transformers
    except ModuleNotFoundError:
        return None
    config = transformers.DeepseekV3Config(
        vocab_size=17, hidden_size=32, intermediate_size=16, num_hidden_layers=1, first_k_dense_replace=1,
        num_attention_heads=3, num_key_value_heads=3, q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=10,
        qk_rope_head_dim=4, v_head_dim=6, rope_interleave=True, max_position_embeddings=64, n_routed_experts=2,
        n_group=1, topk_group=1, num_experts_per_tok=1, moe_intermediate_size=8, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config).eval()
