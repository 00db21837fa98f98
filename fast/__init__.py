"""MLA serving at the limit of the hardware: the names and signatures of `reference`, in kernels.

Functions may take keyword-only parameters besides, such as `backend=` (see `fast.backends`).
"""

from reference.interfaces import (
    PRESETS,
    AttentionState,
    CommonAttentionMetadata,
    ContextChunk,
    DecodeMetadata,
    DecodeSchedule,
    MLAConfig,
    MLAMetadata,
    PrefillMetadata,
    QueryLenSupport,
    RopeConfig,
    UnsupportedConfiguration,
    YarnConfig,
)

from .attention import flash_attn_varlen
from .batch import slot_mapping, split_decodes_and_prefills
from .cache import (
    allocate_kv_cache,
    concat_and_cache_mla,
    copy_blocks,
    gather_and_maybe_dequant_cache,
    kv_cache_shape,
    swap_blocks,
)
from .compilation import warmup as warmup  # fast alone: the reference compiles nothing
from .decode import mla_decode
from .layer import MLAAttention, rms_norm
from .merge import merge_attn_states
from .prefill import forward_prefill, gather_context, run_prefill_context_chunk, run_prefill_new_tokens
from .rope import apply_rope, rotary_cos_sin, rotary_frequencies, rotate
from .schedule import build_mla_metadata, chunked_prefill_workspace_size, plan_context_chunks
from .weights import absorb, dense_weight, expand_kv, is_plain_linear, latent_to_value, query_to_latent, split_kv_b_proj

__all__ = [
    "PRESETS",
    "AttentionState",
    "CommonAttentionMetadata",
    "ContextChunk",
    "DecodeMetadata",
    "DecodeSchedule",
    "MLAAttention",
    "MLAConfig",
    "MLAMetadata",
    "PrefillMetadata",
    "QueryLenSupport",
    "RopeConfig",
    "UnsupportedConfiguration",
    "YarnConfig",
    "absorb",
    "allocate_kv_cache",
    "apply_rope",
    "build_mla_metadata",
    "chunked_prefill_workspace_size",
    "concat_and_cache_mla",
    "copy_blocks",
    "dense_weight",
    "expand_kv",
    "flash_attn_varlen",
    "forward_prefill",
    "gather_and_maybe_dequant_cache",
    "gather_context",
    "is_plain_linear",
    "kv_cache_shape",
    "latent_to_value",
    "merge_attn_states",
    "mla_decode",
    "plan_context_chunks",
    "query_to_latent",
    "rms_norm",
    "rotary_cos_sin",
    "rotary_frequencies",
    "rotate",
    "run_prefill_context_chunk",
    "run_prefill_new_tokens",
    "slot_mapping",
    "split_decodes_and_prefills",
    "split_kv_b_proj",
    "swap_blocks",
]
