"""A readable specification of Multi-head Latent Attention serving, in PyTorch and einops.

The package runs on any device and in any float dtype. The package `fast` has the same functions and classes, with the
same arguments, in an optimised form. Code that gets one of the two packages as an argument works with both.
"""

from .attention.merge import merge_attn_states
from .attention.rope import apply_rope, rotary_cos_sin, rotary_frequencies, rotate
from .attention.varlen import flash_attn_varlen
from .cache.blocks import copy_blocks, swap_blocks
from .cache.formats import dequantize_entries, quantize_entries
from .cache.key_value import reshape_and_cache
from .cache.latent import concat_and_cache_mla, gather_and_maybe_dequant_cache
from .distributed.groups import ContextParallel, verify_group
from .distributed.merge import cp_lse_a2a, cp_lse_ag_out_rs
from .distributed.reorg import reorg_kvcache
from .distributed.simulation import simulate
from .gqa.attention import gqa_paged_attention, gqa_varlen_attention
from .gqa.builder import GQAMetadataBuilder
from .gqa.captured import plan_captured_gqa_decodes
from .gqa.cascade import gqa_cascade_attention
from .gqa.choose_cascade import use_gqa_cascade_attention
from .gqa.context_parallel import gqa_dcp_attention
from .gqa.layer import GQAAttention
from .gqa.metadata import build_gqa_metadata
from .interfaces import (
    CACHE_FORMATS,
    PRESETS,
    AttentionState,
    BatchSplit,
    CacheFormat,
    CalibratedScales,
    CascadeCosts,
    CascadeMetadata,
    ChunkRows,
    ChunkRun,
    CommonAttentionMetadata,
    ContextChunk,
    ContextParallelChunk,
    ContextParallelMetadata,
    ContextWorkspace,
    DecodeMetadata,
    DecodeSchedule,
    GlobalHyperparameters,
    GraphBuffers,
    GraphMemory,
    GraphSupport,
    GroupError,
    InvariantSplitRule,
    KVScale,
    MLAConfig,
    MLAMetadata,
    PathCosts,
    PrefillMetadata,
    PrefillPart,
    QuantizedWeight,
    QueryLenSupport,
    QueryScale,
    RopeConfig,
    ScaleSource,
    ScheduleChoice,
    ScheduleCosts,
    TokenOwnership,
    UnsupportedConfiguration,
    YarnConfig,
    allocate_kv_cache,
    calibrate_kv_scales,
    choose_schedule,
    chunked_prefill_workspace_size,
    context_workspace_size,
    dcp_gather_bytes,
    dcp_wire_bytes,
    get_dcp_local_seq_lens,
    infer_global_hyperparameters,
    is_plain_linear,
    kv_cache_shape,
    load_kv_scales,
    reorder_batch_threshold,
    save_kv_scales,
    stride_order,
)
from .interfaces._version import __version__ as __version__
from .interfaces.gqa import (
    AttentionType,
    CrossAttentionBatch,
    EncoderMetadata,
    GQAConfig,
    GQAHyperparameters,
    GQAMetadata,
    LayerParameters,
    PagedAttentionMetadata,
    allocate_key_value_cache,
    get_per_layer_parameters,
    group_layers,
    key_value_cache_shape,
    key_value_stride_order,
)
from .mla.builder import MLAMetadataBuilder, build_mla_metadata
from .mla.captured import plan_captured_decodes
from .mla.cascade import cascade_attention, use_cascade_attention
from .mla.choose_path import choose_path, choose_paths
from .mla.context_parallel import dcp_decode, dcp_gather_context
from .mla.decode import mla_decode
from .mla.layer import MLAAttention, rms_norm
from .mla.module_expansion import expand_kv_by_module
from .mla.prefill import forward_prefill, gather_context, run_prefill_context_chunk, run_prefill_new_tokens
from .mla.weights import (
    absorb,
    dense_weight,
    expand_kv,
    latent_to_value,
    quantize_weight,
    query_to_latent,
    split_kv_b_proj,
)
from .planning.advance import advance_step
from .planning.batch import reorder_batch_to_split_decodes_and_prefills, split_decodes_and_prefills
from .planning.context_chunks import clamp_context_chunk, plan_chunk_runs, plan_context_chunks, rank_local_chunk
from .planning.decode_schedule import plan_decode
from .planning.graphs import DecodeGraph
from .planning.local_attention import make_local_attention_virtual_batches
from .planning.shared_prefix import common_prefix_len, split_shared_prefix
from .planning.slots import dcp_slot_mapping, slot_mapping
from .planning.visible_lens import compute_first_visible, compute_visible_lens

__all__ = [
    "CACHE_FORMATS",
    "PRESETS",
    "AttentionState",
    "AttentionType",
    "BatchSplit",
    "CacheFormat",
    "CalibratedScales",
    "CascadeCosts",
    "CascadeMetadata",
    "ChunkRows",
    "ChunkRun",
    "CommonAttentionMetadata",
    "ContextChunk",
    "ContextParallel",
    "ContextParallelChunk",
    "ContextParallelMetadata",
    "ContextWorkspace",
    "CrossAttentionBatch",
    "DecodeGraph",
    "DecodeMetadata",
    "DecodeSchedule",
    "EncoderMetadata",
    "GQAAttention",
    "GQAConfig",
    "GQAHyperparameters",
    "GQAMetadata",
    "GQAMetadataBuilder",
    "GlobalHyperparameters",
    "GraphBuffers",
    "GraphMemory",
    "GraphSupport",
    "GroupError",
    "InvariantSplitRule",
    "KVScale",
    "LayerParameters",
    "MLAAttention",
    "MLAConfig",
    "MLAMetadata",
    "MLAMetadataBuilder",
    "PagedAttentionMetadata",
    "PathCosts",
    "PrefillMetadata",
    "PrefillPart",
    "QuantizedWeight",
    "QueryLenSupport",
    "QueryScale",
    "RopeConfig",
    "ScaleSource",
    "ScheduleChoice",
    "ScheduleCosts",
    "TokenOwnership",
    "UnsupportedConfiguration",
    "YarnConfig",
    "absorb",
    "advance_step",
    "allocate_key_value_cache",
    "allocate_kv_cache",
    "apply_rope",
    "build_gqa_metadata",
    "build_mla_metadata",
    "calibrate_kv_scales",
    "cascade_attention",
    "choose_path",
    "choose_paths",
    "choose_schedule",
    "chunked_prefill_workspace_size",
    "clamp_context_chunk",
    "common_prefix_len",
    "compute_first_visible",
    "compute_visible_lens",
    "concat_and_cache_mla",
    "context_workspace_size",
    "copy_blocks",
    "cp_lse_a2a",
    "cp_lse_ag_out_rs",
    "dcp_decode",
    "dcp_gather_bytes",
    "dcp_gather_context",
    "dcp_slot_mapping",
    "dcp_wire_bytes",
    "dense_weight",
    "dequantize_entries",
    "expand_kv",
    "expand_kv_by_module",
    "flash_attn_varlen",
    "forward_prefill",
    "gather_and_maybe_dequant_cache",
    "gather_context",
    "get_dcp_local_seq_lens",
    "get_per_layer_parameters",
    "gqa_cascade_attention",
    "gqa_dcp_attention",
    "gqa_paged_attention",
    "gqa_varlen_attention",
    "group_layers",
    "infer_global_hyperparameters",
    "is_plain_linear",
    "key_value_cache_shape",
    "key_value_stride_order",
    "kv_cache_shape",
    "latent_to_value",
    "load_kv_scales",
    "make_local_attention_virtual_batches",
    "merge_attn_states",
    "mla_decode",
    "plan_captured_decodes",
    "plan_captured_gqa_decodes",
    "plan_chunk_runs",
    "plan_context_chunks",
    "plan_decode",
    "quantize_entries",
    "quantize_weight",
    "query_to_latent",
    "rank_local_chunk",
    "reorder_batch_threshold",
    "reorder_batch_to_split_decodes_and_prefills",
    "reorg_kvcache",
    "reshape_and_cache",
    "rms_norm",
    "rotary_cos_sin",
    "rotary_frequencies",
    "rotate",
    "run_prefill_context_chunk",
    "run_prefill_new_tokens",
    "save_kv_scales",
    "simulate",
    "slot_mapping",
    "split_decodes_and_prefills",
    "split_kv_b_proj",
    "split_shared_prefix",
    "stride_order",
    "swap_blocks",
    "use_cascade_attention",
    "use_gqa_cascade_attention",
    "verify_group",
]
