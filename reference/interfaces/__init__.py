"""The types and checks that the packages `reference` and `fast` share: configs, plans, errors and argument checks.

This package depends on torch and jaxtyping alone. All docstrings write shapes with these letters:

- T: query tokens of all requests; B: requests; W: columns of a block table.
- S, Sq and C: all tokens of a request, its query tokens, and its context (S - Sq).
- H: hidden size; N: heads; Lq and Lkv: widths of the query latent and of the key/value latent.
- P and R: in a query or key head, widths of the parts without and with rope (R may be 0); V: width of a value head.
- Dv: width of an output; D: ranks that share each sequence; I: consecutive tokens that each rank owns in turn.
"""

from .advance_arguments import advanced_batch, check_advance, check_advance_values
from .attention_arguments import (
    check_attention,
    check_attention_settings,
    check_causal_mask,
    check_context,
    check_decode,
    check_decode_values,
    check_expanded,
    check_expanded_pair,
    check_merge,
    check_prefill,
    check_prefix_split,
    check_schedule,
    check_state,
)
from .batch_arguments import (
    check_batch_block_size,
    check_batch_size,
    check_chunking,
    check_common,
    check_common_prefix,
    check_no_prefill_padding,
    check_table_width,
    check_threshold,
)
from .bounds import bounded_batch, check_host_lens, has_host_lens, longest_decode_lens
from .builder import AttentionMetadataBuilder, captured_batch, graph_support_of, most_captured_tokens
from .cache_arguments import (
    cache_halves,
    check_block_cache,
    check_block_mapping,
    check_cache,
    check_cache_write,
    check_chunk,
    check_entries,
    check_formatted_cache,
    check_gather,
    check_ownership,
    check_rank_local_slots,
    check_rank_offsets,
    check_reorg,
    check_stored_entries,
    check_swap,
)
from .cache_format import (
    CACHE_FORMATS,
    COMPUTE_FORMAT,
    E4M3,
    E4M3_MAX,
    FP8_DS_MLA,
    FP8_E4M3,
    CacheFormat,
    EntryLayout,
    check_format,
    check_kv_scale,
    element_bytes,
    format_named,
)
from .checks import (
    FLOAT_DTYPES,
    check,
    check_blocks,
    check_device,
    check_dtype,
    check_eager_offsets,
    check_flag,
    check_function,
    check_int,
    check_lengths,
    check_longest,
    check_not_negative,
    check_number,
    check_offsets,
    check_out,
    check_readable,
    check_scale_values,
    check_slots,
    check_tensor,
    check_type,
    is_plain_linear,
    is_positive_int,
    linear_output,
    wide_dtype,
)
from .config import MLAConfig
from .context_chunk import ChunkRows, ChunkRun, ContextChunk, ContextParallelChunk
from .costs import CascadeCosts, PathCosts, check_cascade_costs
from .decode_schedule import (
    DECODE_TILE,
    NEUTRAL_COSTS,
    NEUTRAL_SPLIT_RULE,
    UNDIVIDED,
    DecodeSchedule,
    InvariantSplitRule,
    ScheduleChoice,
    ScheduleCosts,
    check_schedule_costs,
    choose_schedule,
    invariant_split_rule,
    invariant_split_tiles,
    most_invariant_splits,
)
from .errors import GroupError, UnsupportedConfiguration
from .graph_arguments import (
    batch_of_capture,
    batch_of_update,
    check_captured,
    check_captured_lens,
    check_graph_batch,
    check_graph_formats,
    check_graph_plan,
    check_graph_query_len,
    check_graph_sizes,
    check_graph_support,
    graph_kind,
    longest_query,
    requests_with_tokens,
)
from .graphs import GraphBuffers, GraphMemory, captured_tensors, check_not_replaced, write_captured
from .hf_attention import layer_from_hf
from .kv_cache import allocate_kv_cache
from .kv_scales import (
    CalibratedScales,
    KVScale,
    ScaleSource,
    calibrate_kv_scales,
    check_equal_scales,
    checkpoint_scale,
    choose_kv_scale,
    largest_entry,
    load_kv_scales,
    make_kv_scale,
    save_kv_scales,
    scale_number,
)
from .layer_arguments import (
    check_attention_output,
    check_config,
    check_costs,
    check_forward_attention,
    check_layer_inputs,
    check_module_expansion,
    check_modules,
    check_no_bias,
    check_norm,
    check_projections,
    check_rms_norm,
    check_step,
    check_step_values,
    latent_norm_eps,
)
from .metadata import (
    AttentionState,
    BatchSplit,
    CascadeMetadata,
    CommonAttentionMetadata,
    ContextParallelMetadata,
    DecodeMetadata,
    MLAMetadata,
)
from .ownership import (
    MERGES,
    ONE_RANK,
    TokenOwnership,
    absorbed_decode_mask,
    check_interleave,
    check_rank,
    dcp_gather_bytes,
    dcp_wire_bytes,
    decode_mask,
    get_dcp_local_seq_lens,
    visible_lens_of_tokens,
)
from .prefill_metadata import MOST_PARTS, PrefillMetadata, PrefillPart
from .presets import PRESETS
from .quantization import (
    CONVERTED,
    FP8_MODES,
    LEAST_WEIGHT,
    AbsorbedWeights,
    QuantizedWeight,
    check_fp8_mode,
    check_mode_of_format,
    check_output_scale,
    check_scale,
    check_weight,
    check_weight_to_quantize,
    e4m3_scale,
    from_e4m3,
    to_e4m3,
)
from .query_scales import QueryScale, checkpoint_query_scale, make_query_scale, observe_queries
from .rope_config import RopeConfig, YarnConfig, yarn_mscale
from .sizes import (
    MOST_WORKSPACE_TOKENS,
    GlobalHyperparameters,
    chunked_prefill_workspace_size,
    context_unit,
    infer_global_hyperparameters,
    kv_cache_shape,
    reorder_batch_threshold,
    stride_order,
)
from .slots import check_new_blocks, slots_of_tokens
from .support import CAUSAL, CAUSAL_OVER_RANKS, DECODE_MASKS, VISIBLE_LENS, GraphSupport, QueryLenSupport, is_capturing
from .workspace import (
    ContextWorkspace,
    check_context_workspace,
    check_expansion,
    check_no_overlap,
    check_rows,
    context_workspace_size,
    expanded_elements,
    reserve_for_chunks,
    reserve_largest,
    split_for_keys,
)

__all__ = [
    "CACHE_FORMATS", "CAUSAL", "CAUSAL_OVER_RANKS", "COMPUTE_FORMAT", "CONVERTED", "DECODE_MASKS", "DECODE_TILE",
    "E4M3", "E4M3_MAX", "FLOAT_DTYPES", "FP8_DS_MLA", "FP8_E4M3", "FP8_MODES", "LEAST_WEIGHT", "MERGES", "MOST_PARTS",
    "MOST_WORKSPACE_TOKENS", "NEUTRAL_COSTS", "NEUTRAL_SPLIT_RULE", "ONE_RANK", "PRESETS", "UNDIVIDED", "VISIBLE_LENS",
    "AbsorbedWeights", "AttentionMetadataBuilder", "AttentionState", "BatchSplit", "CacheFormat", "CalibratedScales",
    "CascadeCosts", "CascadeMetadata", "ChunkRows", "ChunkRun", "CommonAttentionMetadata", "ContextChunk",
    "ContextParallelChunk", "ContextParallelMetadata", "ContextWorkspace", "DecodeMetadata", "DecodeSchedule",
    "EntryLayout", "GlobalHyperparameters", "GraphBuffers", "GraphMemory", "GraphSupport", "GroupError",
    "InvariantSplitRule", "KVScale", "MLAConfig", "MLAMetadata", "PathCosts", "PrefillMetadata", "PrefillPart",
    "QuantizedWeight", "QueryLenSupport", "QueryScale", "RopeConfig", "ScaleSource", "ScheduleChoice", "ScheduleCosts",
    "TokenOwnership", "UnsupportedConfiguration", "YarnConfig", "absorbed_decode_mask", "advanced_batch",
    "allocate_kv_cache", "batch_of_capture", "batch_of_update", "bounded_batch", "cache_halves", "calibrate_kv_scales",
    "captured_batch", "captured_tensors", "check", "check_advance", "check_advance_values", "check_attention",
    "check_attention_output", "check_attention_settings", "check_batch_block_size", "check_batch_size",
    "check_block_cache", "check_block_mapping", "check_blocks", "check_cache", "check_cache_write", "check_captured",
    "check_captured_lens", "check_cascade_costs", "check_causal_mask", "check_chunk", "check_chunking", "check_common",
    "check_common_prefix", "check_config", "check_context", "check_context_workspace", "check_costs", "check_decode",
    "check_decode_values", "check_device", "check_dtype", "check_eager_offsets", "check_entries", "check_equal_scales",
    "check_expanded", "check_expanded_pair", "check_expansion", "check_flag", "check_format", "check_formatted_cache",
    "check_forward_attention", "check_fp8_mode", "check_function", "check_gather", "check_graph_batch",
    "check_graph_formats", "check_graph_plan", "check_graph_query_len", "check_graph_sizes", "check_graph_support",
    "check_host_lens", "check_int", "check_interleave", "check_kv_scale", "check_layer_inputs", "check_lengths",
    "check_longest", "check_merge", "check_mode_of_format", "check_module_expansion", "check_modules",
    "check_new_blocks",
    "check_no_bias", "check_no_overlap", "check_no_prefill_padding", "check_norm", "check_not_negative",
    "check_not_replaced", "check_number", "check_offsets", "check_out", "check_output_scale", "check_ownership",
    "check_prefill", "check_prefix_split", "check_projections", "check_rank", "check_rank_local_slots",
    "check_rank_offsets", "check_readable", "check_reorg", "check_rms_norm", "check_rows", "check_scale",
    "check_scale_values", "check_schedule", "check_schedule_costs", "check_slots", "check_state", "check_step",
    "check_step_values", "check_stored_entries", "check_swap", "check_table_width", "check_tensor", "check_threshold",
    "check_type", "check_weight", "check_weight_to_quantize", "checkpoint_query_scale", "checkpoint_scale",
    "choose_kv_scale", "choose_schedule", "chunked_prefill_workspace_size", "context_unit", "context_workspace_size",
    "dcp_gather_bytes", "dcp_wire_bytes", "decode_mask", "e4m3_scale", "element_bytes", "expanded_elements",
    "format_named", "from_e4m3", "get_dcp_local_seq_lens", "graph_kind", "graph_support_of", "has_host_lens",
    "infer_global_hyperparameters", "invariant_split_rule", "invariant_split_tiles", "is_capturing", "is_plain_linear",
    "is_positive_int", "kv_cache_shape", "largest_entry", "latent_norm_eps", "layer_from_hf", "linear_output",
    "load_kv_scales", "longest_decode_lens", "longest_query", "make_kv_scale", "make_query_scale",
    "most_captured_tokens", "most_invariant_splits", "observe_queries", "reorder_batch_threshold",
    "requests_with_tokens", "reserve_for_chunks", "reserve_largest", "save_kv_scales", "scale_number",
    "slots_of_tokens", "split_for_keys", "stride_order", "to_e4m3", "visible_lens_of_tokens", "wide_dtype",
    "write_captured", "yarn_mscale",
]  # fmt: skip
