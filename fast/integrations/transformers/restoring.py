"""Undo `use_mla` or `use_attention`."""

from __future__ import annotations

from typing import Any

from transformers.modeling_utils import PreTrainedModel
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Model
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Model

from . import attention
from .gqa import restore_attention


def has_latent_attention(model: Any) -> bool:
    """Return whether a model has Multi-head Latent Attention, which `use_mla` serves."""
    base = model.base_model if isinstance(model, PreTrainedModel) else None
    return isinstance(base, DeepseekV2Model | DeepseekV3Model)


def restore(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `use_mla` or `use_attention`: remove what the function has put into the model, and return the same model.

    Raises:
        ValueError: the model is under neither function, or a `forward` was replaced again after it.
    """
    return attention.restore(model) if has_latent_attention(model) else restore_attention(model)
