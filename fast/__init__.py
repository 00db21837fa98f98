"""MLA serving at the limit of the hardware: the names and signatures of `reference`, in kernels.

Functions may take keyword-only parameters besides, such as `backend=` (see `fast.backends`).
"""

from ._shadow import shadow_of_reference

if (_found := shadow_of_reference()) is not None:
    raise ImportError(
        f"fast: expected the package `reference` of mla-twins, got {_found}, which shadows it: rename that file"
    )

from reference.interfaces import (
    PRESETS,
    AttentionState,
    CascadeMetadata,
    CommonAttentionMetadata,
    ContextChunk,
    ContextParallel,
    ContextParallelChunk,
    ContextParallelMetadata,
    DecodeMetadata,
    DecodeSchedule,
    GlobalHyperparameters,
    GroupError,
    MLAConfig,
    MLAMetadata,
    PathCosts,
    PrefillMetadata,
    QueryLenSupport,
    RopeConfig,
    ScheduleChoice,
    SequenceShare,
    UnsupportedConfiguration,
    YarnConfig,
)
from reference.interfaces._version import __version__ as __version__

from . import backends as backends  # fast alone: which kernels serve
from .attention import flash_attn_varlen
from .batch import (
    make_local_attention_virtual_batches,
    reorder_batch_to_split_decodes_and_prefills,
    slot_mapping,
    split_decodes_and_prefills,
)
from .builder import MLAMetadataBuilder, build_mla_metadata
from .cache import (
    allocate_kv_cache,
    concat_and_cache_mla,
    copy_blocks,
    gather_and_maybe_dequant_cache,
    infer_global_hyperparameters,
    kv_cache_shape,
    stride_order,
    swap_blocks,
)
from .cascade import cascade_attention, common_prefix_len, split_shared_prefix, use_cascade_attention
from .compilation import warmup as warmup  # fast alone: the reference compiles nothing
from .context_parallel import (
    cp_lse_a2a,
    cp_lse_ag_out_rs,
    dcp_decode,
    dcp_gather_context,
    dcp_slot_mapping,
    dcp_wire_bytes,
    get_dcp_local_seq_lens,
    reorg_kvcache,
    simulate,
    verify_group,
)
from .decode import mla_decode
from .graphs import DecodeGraph
from .layer import MLAAttention, rms_norm
from .merge import merge_attn_states
from .path import choose_path, choose_paths
from .prefill import forward_prefill, gather_context, run_prefill_context_chunk, run_prefill_new_tokens
from .rope import apply_rope, rotary_cos_sin, rotary_frequencies, rotate
from .schedule import (
    choose_schedule,
    chunked_prefill_workspace_size,
    plan_context_chunks,
    plan_decode,
    reorder_batch_threshold,
    share_chunk,
)
from .schedule import decode_programs as decode_programs  # fast alone, as warmup
from .weights import absorb, dense_weight, expand_kv, is_plain_linear, latent_to_value, query_to_latent, split_kv_b_proj

__all__ = [
    "PRESETS",
    "AttentionState",
    "CascadeMetadata",
    "CommonAttentionMetadata",
    "ContextChunk",
    "ContextParallel",
    "ContextParallelChunk",
    "ContextParallelMetadata",
    "DecodeGraph",
    "DecodeMetadata",
    "DecodeSchedule",
    "GlobalHyperparameters",
    "GroupError",
    "MLAAttention",
    "MLAConfig",
    "MLAMetadata",
    "MLAMetadataBuilder",
    "PathCosts",
    "PrefillMetadata",
    "QueryLenSupport",
    "RopeConfig",
    "ScheduleChoice",
    "SequenceShare",
    "UnsupportedConfiguration",
    "YarnConfig",
    "absorb",
    "allocate_kv_cache",
    "apply_rope",
    "build_mla_metadata",
    "cascade_attention",
    "choose_path",
    "choose_paths",
    "choose_schedule",
    "chunked_prefill_workspace_size",
    "common_prefix_len",
    "concat_and_cache_mla",
    "copy_blocks",
    "cp_lse_a2a",
    "cp_lse_ag_out_rs",
    "dcp_decode",
    "dcp_gather_context",
    "dcp_slot_mapping",
    "dcp_wire_bytes",
    "dense_weight",
    "expand_kv",
    "flash_attn_varlen",
    "forward_prefill",
    "gather_and_maybe_dequant_cache",
    "gather_context",
    "get_dcp_local_seq_lens",
    "infer_global_hyperparameters",
    "is_plain_linear",
    "kv_cache_shape",
    "latent_to_value",
    "make_local_attention_virtual_batches",
    "merge_attn_states",
    "mla_decode",
    "plan_context_chunks",
    "plan_decode",
    "query_to_latent",
    "reorder_batch_threshold",
    "reorder_batch_to_split_decodes_and_prefills",
    "reorg_kvcache",
    "rms_norm",
    "rotary_cos_sin",
    "rotary_frequencies",
    "rotate",
    "run_prefill_context_chunk",
    "run_prefill_new_tokens",
    "share_chunk",
    "simulate",
    "slot_mapping",
    "split_decodes_and_prefills",
    "split_kv_b_proj",
    "split_shared_prefix",
    "stride_order",
    "swap_blocks",
    "use_cascade_attention",
    "verify_group",
]
