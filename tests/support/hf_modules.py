"""Modules with the attributes of an attention module of transformers, without transformers."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from .factories import linear, make_weights


class Attention(nn.Module):
    """An attention module; its norms and projections have other classes."""


def hf_module(config, **scales):
    """Return a module with the attributes of a DeepseekV3Attention of transformers that a layer reads."""
    weights = make_weights(config, torch.float64)
    module = Attention()
    for name, weight in weights.items():
        if weight.dim() == 2:
            setattr(module, name, linear(weight))
        else:
            norm = nn.Module()
            norm.weight, norm.variance_epsilon = nn.Parameter(weight, requires_grad=False), 1e-6
            setattr(module, name, norm)
    module.config = SimpleNamespace(
        model_type="deepseek_v3", hidden_size=config.hidden_size, num_attention_heads=config.num_heads,
        q_lora_rank=config.q_lora_rank, kv_lora_rank=config.kv_lora_rank, qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim, v_head_dim=config.v_head_dim, rope_theta=10000.0, rope_scaling=None,
        rope_interleave=True, max_position_embeddings=4096,
    )  # fmt: skip
    for name, value in scales.items():
        setattr(module, name, value)
    return module
