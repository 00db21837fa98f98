"""What a backend must support to serve one call: the properties of the call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from reference.interfaces import (
    CONVERTED,
    DECODE_MASKS,
    CacheFormat,
    GraphSupport,
    QueryLenSupport,
    check,
    check_flag,
    check_fp8_mode,
    check_int,
    check_type,
)

MASKS = DECODE_MASKS
HEAD_DIMS = (  # names of widths in a `KernelRequest`
    "kv_lora_rank", "qk_rope_head_dim", "qk_head_dim", "v_head_dim",
    # for ops with one width: the columns of a cache, the width of an attention state's output, or Dh of a GQA head
    "head_dim",
)  # fmt: skip
OPS = (  # every op of MLA, and every op of both attention families; the other ops of grouped-query attention: GQA_OPS
    "advance_step", "apply_rope", "compute_visible_lens", "concat_and_cache_mla", "copy_blocks", "decode_programs",
    "dequantize_entries", "flash_attn_varlen", "gather_and_maybe_dequant_cache", "merge_attn_states",
    "merge_packed_attn_states", "mla_decode", "multiply_heads", "pack_attn_state", "plan_decode", "quantize_entries",
    "reorg_kvcache", "rope_norm_and_cache", "schedule_costs", "swap_blocks", "weight_attn_out", "zero_padding_tokens",
)  # fmt: skip
GQA_OPS = ("gqa_paged_attention", "gqa_varlen_attention", "reshape_and_cache")  # ops of grouped-query attention alone
FEATURES = (  # what a call of `GQA_OPS` may need in addition
    "alibi", "attention_chunk",
    "scales",  # scales of a cache in e4m3 that may differ from 1
    "sinks", "soft_cap", "window",
)  # fmt: skip


class AttentionSizes(NamedTuple):
    """Sizes of a call of `flash_attn_varlen`, each rounded up to a power of two, so that few calls have other sizes.

    Attributes:
        requests: number of requests.
        heads: N.
        query_len: upper bound of the query tokens of a request.
        key_len: upper bound of the keys of a request.
    """

    requests: int
    heads: int
    query_len: int
    key_len: int

    @classmethod
    def rounded(cls, requests: int, heads: int, query_len: int, key_len: int) -> AttentionSizes:
        """Return the sizes of a call, rounded up."""
        return cls(*(1 << max(0, size - 1).bit_length() for size in (requests, heads, query_len, key_len)))


@dataclass(frozen=True)
class KernelRequest:
    """Properties of one call of an op, which a backend must support to serve the call.

    Attributes:
        op: name of the op, such as "mla_decode".
        device: device of the tensors.
        dtype: dtype of queries and keys; None for a decode of queries in e4m3, and for an op that computes with
            integers only or copies bytes.
        head_dims: widths of the op's tensors as (name, size) pairs, with names from `HEAD_DIMS`.
        block_size: tokens of a cache block; None for an op without a cache.
        query_lens: kind of the query lengths in the batch: one token each, equal lengths, or any lengths.
        cache_in_words: True if the cache has at least one block, and every entry consists of aligned 16-byte words.
        out_dtype: dtype of the output; None for an op whose callers cannot choose the dtype.
        cache_format: format of the cache; None for an op without a cache, and for an op that copies any format.
        batch_invariant: True if the other requests of a batch must not change the result of a request.
        mask: one of `MASKS`; None for an op without a mask.
        graph: kind of the CUDA graph that captures the call.
        lse: True if the caller needs the LSE in addition to the output.
        fp8_mode: one of `FP8_MODES`, for a decode over a cache in e4m3.
        sizes: sizes of a call of `flash_attn_varlen`, from which the fastest backend is chosen
            (`fast.backends.measured`); None if the sizes must not influence the choice.
        features: what a call of `GQA_OPS` needs in addition, from `FEATURES`.
        head_scales: True for a decode of queries in e4m3 that have one scale for each head.
        direct: True for a call that no builder has planned. An automatic choice then takes no backend that would have
            to plan the call itself (`OpSupport.plans_steps`).
    """

    op: str
    device: torch.device
    dtype: torch.dtype | None = None
    head_dims: tuple[tuple[str, int], ...] = ()
    block_size: int | None = None
    query_lens: QueryLenSupport = QueryLenSupport.SINGLE_ONLY
    cache_in_words: bool = True
    out_dtype: torch.dtype | None = None
    cache_format: CacheFormat | None = None
    batch_invariant: bool = False
    mask: str | None = None
    graph: GraphSupport = GraphSupport.NONE
    lse: bool = False
    fp8_mode: str = CONVERTED
    sizes: AttentionSizes | None = None
    features: tuple[str, ...] = ()
    head_scales: bool = False
    direct: bool = False


def check_request(request: KernelRequest) -> None:
    """Check the types of a request's fields; do not check whether a backend can serve the request."""
    check_type("request", request, KernelRequest)
    check_type("request.op", request.op, str)
    check_type("request.device", request.device, torch.device)
    check_type("request.dtype", request.dtype, (torch.dtype, type(None)), "a dtype or None")
    check_type("request.out_dtype", request.out_dtype, (torch.dtype, type(None)), "a dtype or None")
    check_type("request.head_dims", request.head_dims, tuple, "a tuple of names and sizes")
    check_type("request.query_lens", request.query_lens, QueryLenSupport)
    check_type("request.cache_format", request.cache_format, (CacheFormat, type(None)), "a CacheFormat or None")
    check_type("request.graph", request.graph, GraphSupport)
    check(request.mask in (None, *MASKS), "request.mask", f"None or one of {', '.join(MASKS)}", request.mask)
    check_flag("request.batch_invariant", request.batch_invariant)
    check_flag("request.cache_in_words", request.cache_in_words)
    check_flag("request.lse", request.lse)
    check_flag("request.head_scales", request.head_scales)
    check_flag("request.direct", request.direct)
    check_type("request.sizes", request.sizes, (AttentionSizes, type(None)), "an AttentionSizes or None")
    check_fp8_mode(request.fp8_mode, "request.fp8_mode")
    check_features("request.features", request.features)
    if request.block_size is not None:
        check_int("request.block_size", request.block_size, 0)


def check_features(argument: str, features: tuple[str, ...]) -> None:
    """Check that an argument is a tuple of names from `FEATURES`."""
    check_type(argument, features, tuple, "a tuple of names")
    check(all(each in FEATURES for each in features), argument, f"some of {', '.join(FEATURES)}", features)
