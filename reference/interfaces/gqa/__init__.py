"""The contract of grouped-query attention (GQA): configs, plans, caches and argument checks.

The letters of shapes are those of `reference.interfaces`, and in addition: Nkv: key/value heads; Dh: head dim.
"""

from ..layer_parameters import GQAHyperparameters, LayerParameters
from .arguments import (
    KEY_VALUE_FORMATS,
    check_cached_type,
    check_gqa_cascade,
    check_gqa_config,
    check_gqa_inputs,
    check_gqa_varlen,
    check_gqa_varlen_values,
    check_key_value_block_size,
    check_key_value_cache,
    check_key_value_format,
    check_key_value_write,
    check_paged_attention,
    check_paged_plan,
    check_paged_values,
    check_plan_block_size,
    check_query_scale,
    check_sinks,
)
from .attention_type import AttentionType
from .cache import KEY_VALUE_LAYOUTS, allocate_key_value_cache, key_value_cache_shape, key_value_stride_order
from .config import GQAConfig
from .dims import BLOCK_SIZE_UNIT, HEAD_DIMS, check_head_dim
from .encoder_decoder import EncoderDecoderConfigs, encoder_decoder_configs_from_hf
from .groups import get_per_layer_parameters, group_layers
from .hf_config import configs_from_hf
from .layer_arguments import check_gqa_layer
from .metadata import CrossAttentionBatch, EncoderMetadata, GQAMetadata, PagedAttentionMetadata
from .plan_arguments import (
    ROW_BLOCK,
    batch_of_gqa_plan,
    check_cascade_choice,
    check_encoder_batch,
    check_gqa_build,
    check_gqa_planning,
    check_graph_config,
    graph_refusals,
    longest_scheduled_len,
    supports_cascade,
    without_encoder_slots,
)
from .rank_config import check_shared_sequences, gathered_config, kv_heads_of_ranks, rank_config
from .scales import (
    checkpoint_key_value_scales,
    choose_key_value_scales,
    largest_number,
    make_gqa_query_scale,
    make_key_value_scale,
    observe_gqa_queries,
    scale_without_cache,
)
from .step_arguments import (
    PLANNED_FIELDS,
    check_cross_batch,
    check_gqa_output,
    check_gqa_step,
    check_gqa_step_values,
    check_planned_config,
    has_cache,
)

__all__ = [
    "BLOCK_SIZE_UNIT",
    "HEAD_DIMS",
    "KEY_VALUE_FORMATS",
    "KEY_VALUE_LAYOUTS",
    "PLANNED_FIELDS",
    "ROW_BLOCK",
    "AttentionType",
    "CrossAttentionBatch",
    "EncoderDecoderConfigs",
    "EncoderMetadata",
    "GQAConfig",
    "GQAHyperparameters",
    "GQAMetadata",
    "LayerParameters",
    "PagedAttentionMetadata",
    "allocate_key_value_cache",
    "batch_of_gqa_plan",
    "check_cached_type",
    "check_cascade_choice",
    "check_cross_batch",
    "check_encoder_batch",
    "check_gqa_build",
    "check_gqa_cascade",
    "check_gqa_config",
    "check_gqa_inputs",
    "check_gqa_layer",
    "check_gqa_output",
    "check_gqa_planning",
    "check_gqa_step",
    "check_gqa_step_values",
    "check_gqa_varlen",
    "check_gqa_varlen_values",
    "check_graph_config",
    "check_head_dim",
    "check_key_value_block_size",
    "check_key_value_cache",
    "check_key_value_format",
    "check_key_value_write",
    "check_paged_attention",
    "check_paged_plan",
    "check_paged_values",
    "check_plan_block_size",
    "check_planned_config",
    "check_query_scale",
    "check_shared_sequences",
    "check_sinks",
    "checkpoint_key_value_scales",
    "choose_key_value_scales",
    "configs_from_hf",
    "encoder_decoder_configs_from_hf",
    "gathered_config",
    "get_per_layer_parameters",
    "graph_refusals",
    "group_layers",
    "has_cache",
    "key_value_cache_shape",
    "key_value_stride_order",
    "kv_heads_of_ranks",
    "largest_number",
    "longest_scheduled_len",
    "make_gqa_query_scale",
    "make_key_value_scale",
    "observe_gqa_queries",
    "rank_config",
    "scale_without_cache",
    "supports_cascade",
    "without_encoder_slots",
]
