"""Argument checks of the planning of grouped-query attention, and closed-form bounds of its schedules."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..batch_arguments import (
    check_batch_block_size,
    check_common,
    check_num_tokens,
    check_table_width,
    check_threshold,
)
from ..bounds import bounded_batch, check_host_lens, has_host_lens
from ..cache_arguments import check_ownership, check_rank_local_slots
from ..cache_format import CacheFormat
from ..checks import check, check_dtype, check_flag, check_int, check_tensor
from ..decode_schedule import DECODE_TILE
from ..errors import UnsupportedConfiguration
from ..metadata import CommonAttentionMetadata
from ..ownership import ONE_RANK, TokenOwnership, check_interleave
from ..support import QueryLenSupport
from .arguments import check_gqa_config, check_key_value_block_size, check_key_value_format
from .config import AttentionType, GQAConfig
from .metadata import CrossAttentionBatch
from .rank_config import check_shared_sequences
from .step_arguments import check_cross_batch

CPU = torch.device("cpu")


def check_gqa_planning(
    config: GQAConfig, block_size: int, ownership: TokenOwnership | None, cache_format: CacheFormat
) -> None:
    """Check the config, block size, ownership and cache format for which steps are planned.

    Raises:
        TypeError: an argument has another class.
        ValueError: the block size is not a multiple of `BLOCK_SIZE_UNIT` and of the interleave; the attention chunk is
            not a multiple of the block size; the cache format is not implemented.
        UnsupportedConfiguration: ranks share sequences, and the config has ALiBi or chunked local attention; the cache
            format is for the latent cache alone.
    """
    check_gqa_config(config)
    check_key_value_block_size("block_size", block_size)
    check_ownership(ownership)
    owned = ONE_RANK if ownership is None else ownership
    check_shared_sequences(config, owned.size)
    check_interleave(owned.interleave, block_size)
    check_key_value_format(cache_format)
    chunk = config.attention_chunk_size
    check(chunk is None or chunk % block_size == 0, "config.attention_chunk_size",
          f"a multiple of the block size {block_size}", chunk)  # fmt: skip


def check_gqa_build(
    config: GQAConfig,
    block_size: int,
    decode_threshold: int,
    query_len_support: QueryLenSupport,
    require_order: bool,
    ownership: TokenOwnership | None,
    num_programs: int | None,
    cache_format: CacheFormat,
    dtype: torch.dtype,
) -> None:
    """Check the arguments of `build_gqa_metadata` except the batch and the costs of a schedule."""
    check_gqa_planning(config, block_size, ownership, cache_format)
    check_dtype("dtype", dtype)
    check_threshold(decode_threshold, query_len_support)
    check_decoders_only(config, "decode_threshold", decode_threshold, 1)
    check_flag("require_order", require_order)
    if num_programs is not None:
        check_int("num_programs", num_programs, 0, "an int >= 0 or None")


def check_decoders_only(config: GQAConfig, argument: str, value: int, least: int) -> None:
    """Check that an argument of a feature that only decoders have keeps its smallest value for other attention types.

    The features are a shared prefix (prefix caching), and decodes with several query tokens (drafted tokens). The
    prefills of cross attention may have several query tokens: they are no decodes.

    Args:
        config: config of the layers.
        argument: name of the argument.
        value: the argument.
        least: the value without the feature.
    """
    kind = config.attention_type
    feature = "a shared prefix is" if argument == "common_prefix_len" else "decodes of several query tokens are"
    check(kind is AttentionType.DECODER or value == least, argument,
          f"{least} for attention type {kind.value}, because {feature} for decoders only", value)  # fmt: skip


def check_encoder_batch(common: CommonAttentionMetadata) -> None:
    """Check a batch for layers without a cache: every token of a request is a query token, in every request.

    The lengths are compared with the query lengths on the CPU. Without `seq_lens_cpu` the upper bounds are compared:
    they must be equal to the query lengths. The lengths of a batch on a CPU are compared in every case. If a batch on a
    GPU has neither lengths nor upper bounds on the CPU, nothing is compared. The layers then attend the query tokens
    alone, and ignore context.
    """
    check_common(common, host_lens=False)
    check_num_tokens(common)
    fields = {"seq_lens": common.seq_lens_cpu, "seq_lens_cpu_upper_bound": None}
    if not has_host_lens(common):
        fields["seq_lens_cpu_upper_bound"] = common.seq_lens_cpu_upper_bound
        if common.seq_lens.device == CPU:
            fields["seq_lens"] = common.seq_lens
    starts = common.query_start_loc if common.query_start_loc_cpu is None else common.query_start_loc_cpu
    for name, lens in fields.items():
        if lens is None or starts.device != CPU:
            continue
        query_lens = starts.diff()
        wrong = (lens != query_lens).nonzero()
        if wrong.numel():
            request = int(wrong[0])
            wanted = f"the query length {int(query_lens[request])} in an encoder, which has no context"
            check(False, f"common.{name}", wanted, f"{int(lens[request])} at request {request}")


def batch_of_gqa_plan(
    common: CommonAttentionMetadata,
    block_size: int,
    config: GQAConfig,
    decode_threshold: int,
    query_len_support: QueryLenSupport,
    ownership: TokenOwnership | None,
) -> CommonAttentionMetadata:
    """Check a batch, and return the batch over whose keys the plan is made.

    - Lengths that are missing on the CPU are replaced by upper bounds (`bounded_batch`).
    - For cross attention, lengths, block table and slots are those of the encoder's output.

    A block table without columns is legal if no request has context: the layers then attend their own keys and values.

    Raises:
        TypeError: the config is for cross attention, and the batch has no fields of the encoder.
        ValueError: a shape, dtype or device is wrong; `num_actual_tokens` is not the last of the offsets; the slots
            were computed for another block size; the block table has too few columns; for tensors on a CPU, a rank has
            slots for tokens that it does not own; the batch may have prefills, and its offsets or upper bounds are not
            on the CPU; a padding row has keys of an encoder.
    """
    check_batch_block_size(common, block_size)
    check_common(common, host_lens=False)
    check_num_tokens(common)
    owned = ONE_RANK if ownership is None else ownership
    column_tokens = block_size * owned.size
    if config.attention_type is AttentionType.CROSS:
        return _encoder_keys(common, column_tokens, decode_threshold, query_len_support)
    if common.block_table.shape[1] == 0:
        check_host_lens(common)
        contexts = common.num_computed_tokens_cpu
        if not bool((contexts > 0).any()):
            return common
    check_table_width(common, column_tokens)
    if ownership is not None and has_host_lens(common) and common.slot_mapping.device.type == "cpu":
        check_rank_local_slots(common, ownership)
    return bounded_batch(common, decode_threshold, query_len_support, column_tokens)


def _encoder_keys(
    common: CommonAttentionMetadata, column_tokens: int, decode_threshold: int, query_len_support: QueryLenSupport
) -> CommonAttentionMetadata:
    """Return a batch of cross attention with lengths, block table and slots of the encoder's output."""
    check_cross_batch(common)
    lens = common.encoder_seq_lens_cpu
    longest = int(lens.max()) if common.num_reqs else 0
    columns = common.encoder_block_table.shape[1]
    check(longest <= columns * column_tokens or columns == 0, "common.encoder_block_table",
          f"at least {-(-longest // column_tokens)} columns for {longest} tokens of an encoder", columns)  # fmt: skip
    bounded = bounded_batch(common, decode_threshold, query_len_support, column_tokens)
    if has_host_lens(common):
        wrong = ((common.seq_lens_cpu == 0) & (common.query_start_loc_cpu.diff() > 0) & (lens > 0)).nonzero()
        if wrong.numel():
            request = int(wrong[0])
            check(False, "common.encoder_seq_lens", "0 for a padding row", f"{int(lens[request])} at request {request}")
    return replace(
        bounded,
        seq_lens=common.encoder_seq_lens,
        seq_lens_cpu=lens,
        block_table=common.encoder_block_table,
        slot_mapping=common.encoder_slot_mapping,
        max_seq_len=longest,
    )


def longest_scheduled_len(
    max_seq_len: int, max_query_len: int, sliding_window: int | None, ownership: TokenOwnership | None
) -> int:
    """Return an upper bound of the keys of a request that count for its schedule (`scheduled_lens`).

    Args:
        max_seq_len: upper bound of the lengths of whole sequences.
        max_query_len: upper bound of the query lengths.
        sliding_window: W; None means no window.
        ownership: the tokens that this rank owns; None if one rank owns all tokens.
    """
    owned = ONE_RANK if ownership is None else ownership
    longest = owned.most(max_seq_len)
    if sliding_window is None:
        return longest
    seen = min(max_seq_len, sliding_window + max(1, max_query_len) - 1)
    return min(longest, owned.most(seen) + DECODE_TILE - 1)


ROW_BLOCK = 64  # rows that a program attends together, for the estimate of a cascade's time; a row is a token of a head


def supports_cascade(config: GQAConfig) -> bool:
    """Return whether layers may attend a shared prefix apart: they are decoders, and count no positions of keys.

    ALiBi, a window and attention chunks depend on the positions of keys. A part of a cascade counts keys from its own
    first key.
    """
    names = ("alibi_slopes", "sliding_window", "attention_chunk_size")
    positions = any(getattr(config, name) is not None for name in names)
    return config.attention_type is AttentionType.DECODER and not positions


def check_cascade_choice(
    common_prefix_len: int,
    query_lens: Tensor,
    seq_lens: Tensor,
    config: GQAConfig,
    cache_format: CacheFormat,
    dtype: torch.dtype,
    num_processors: int,
) -> None:
    """Check the arguments of `use_gqa_cascade_attention`; every request with tokens must have the whole prefix."""
    check_tensor("query_lens", query_lens, ("B",), (torch.int32,), CPU)
    check_tensor("seq_lens", seq_lens, (query_lens.shape[0],), (torch.int32,), CPU)
    check_int("common_prefix_len", common_prefix_len, 0)
    check_int("num_processors", num_processors)
    check_gqa_config(config)
    check_key_value_format(cache_format)
    check_dtype("dtype", dtype)
    wrong = ((seq_lens > 0) & (seq_lens < common_prefix_len)).nonzero()
    if wrong.numel():
        request = int(wrong[0])
        check(False, "common_prefix_len", f"at most the {int(seq_lens[request])} tokens of request {request}",
              common_prefix_len)  # fmt: skip


def graph_refusals(config: GQAConfig) -> tuple[str, ...]:
    """Return the reasons why no CUDA graph can serve layers of a config; empty if a graph can serve them."""
    kind = config.attention_type
    if kind is AttentionType.DECODER:
        return ()
    why = "a graph has decodes alone"
    if kind.cached:
        why = "the buffers of a graph have no blocks and lengths of an encoder"
    return (f"config.attention_type: expected decoder for a CUDA graph, got {kind.value} ({why})",)


def check_graph_config(config: GQAConfig) -> None:
    """Check that a CUDA graph can serve layers of a config.

    Raises:
        UnsupportedConfiguration: no graph can serve the layers (`graph_refusals`).
    """
    check_gqa_config(config)
    if reasons := graph_refusals(config):
        raise UnsupportedConfiguration(reasons)


def without_encoder_slots(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Return the batch of a step whose encoder does not run: a batch of cross attention loses its encoder's slots."""
    if not isinstance(common, CrossAttentionBatch):
        return common
    return replace(common, encoder_slot_mapping=common.encoder_slot_mapping[:0])
