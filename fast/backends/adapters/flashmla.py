"""Adapter to FlashMLA: absorbed decode of queries of equal lengths, over caches in 16 bits and in e4m3 (8 bits).

The kernels come from the package `flash_mla`, or from vLLM, whichever can be imported first. The kernel for e4m3 is in
vLLM alone. FlashMLA pads no heads: it processes the rows (heads times query tokens) of a request in row blocks of 64.

An eager call costs two launches besides the library's call: one copy that joins both parts of the queries, and one
conversion of the LSE, with the output if its dtype or its place differs (`conversion.StateConversion`). For e4m3, this
conversion also sets empty rows to 0, because the kernel does not write valid numbers there.

Block tables: both kernels read no entry after the last block of a request that has keys. For a request without keys:

- The kernel for 16 bits reads the first entry of the request's row. Its loads (TMA) are checked against the number of
  blocks, so that any number is safe.
- The kernel for e4m3 reads the entry before the request's row, and loads the block with that number without a check.
  The adapter gives this kernel a copy of the block table with a column of zeros in front (two small ops on the table;
  one time for all layers, if the step is prepared).

FlashMLA trusts `seq_lens`: a length above `W * block_size` makes a kernel read outside the block table.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    FP8_E4M3,
    CacheFormat,
    DecodeMetadata,
    GraphSupport,
    InvariantSplitRule,
    QueryLenSupport,
)

from ..registry import Backend
from .conversion import Convention, StateConversion
from .flash_attn import HALF, STATE_DTYPES, decode_ops
from .sources import Source, loaded, missing_artifacts, missing_package

FP8_PRODUCT = "fp8_product"
LATENT, ROPE, BLOCK = 512, 64, 64
SOURCES = (Source("flash_mla", "flash_mla.flash_mla_interface"),
           Source("vllm", "vllm.third_party.flashmla.flash_mla_interface"))  # fmt: skip
SOURCES_E4M3 = (Source("vllm", "vllm._flashmla_extension_C"),)


class DecodeCall:
    """Absorbed attention by FlashMLA, for calls with equal properties (`fast.backends.kept_calls`).

    The constructor has the arguments of the first call (`__call__`); later calls have equal shapes, strides, dtypes,
    devices, alignments and numbers.
    """

    def __init__(
        self, ql_nope: Tensor, q_pe: Tensor, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
        query_start_loc: Tensor, visible_lens: Tensor, longest_q: int, longest_k: int, scale: float,
        out_dtype: torch.dtype, *_, fp8_mode: str = CONVERTED, **__,
    ):  # fmt: skip
        tokens, heads, _ = ql_nope.shape
        self._tokens, self._heads, self._requests = tokens, heads, seq_lens.shape[0]
        self._is_empty = tokens == 0 or heads == 0 or self._requests == 0
        if self._is_empty:
            return
        self._in_e4m3 = fp8_mode == FP8_PRODUCT
        # FlashMLA gives rows with NaN, and rows without keys, the LSE +inf
        convention = Convention() if self._in_e4m3 else Convention(poison=True, empty_is_inf=True)
        self._convert = StateConversion(convention, out_dtype, LATENT)
        self._rows = self._requests, tokens // self._requests, heads, LATENT + ROPE
        self._scale, self._copies_lens = scale, not seq_lens.is_contiguous()
        self._copies_table = block_table.stride(-1) != 1
        self._library = _operators() if self._in_e4m3 else loaded(SOURCES)[1]

    def __call__(
        self,
        ql_nope: Tensor,
        q_pe: Tensor,
        kv_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        visible_lens: Tensor,
        max_query_len: int,
        max_seq_len: int,
        softmax_scale: float,
        out_dtype: torch.dtype,
        tile_ranges: Tensor | None = None,
        split_offsets: Tensor | None = None,
        batch_invariant: bool = False,
        split_rule: InvariantSplitRule | None = None,
        cache_format: CacheFormat = COMPUTE_FORMAT,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
        *,
        fp8_mode: str = CONVERTED,
        q_scale: Tensor | None = None,
        prepared: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """Compute absorbed attention of the query tokens of each request over its cached latents, with a causal mask.

        Args:
            ql_nope: [T, N, 512], absorbed queries; bfloat16, float16, or e4m3 in the fp8 mode "fp8_product". Every
                request has T / B query tokens.
            q_pe: [T, N, 64], rope part of the queries.
            kv_cache: [num_blocks, 64, 576] in the dtype of the queries.
            block_table: [B, W].
            seq_lens: [B], keys of each request.
            query_start_loc: not used, because all queries have equal lengths.
            visible_lens: [T], number of keys that each query token sees; it must be the causal mask. The kernel for
                e4m3 gives no valid numbers for rows without keys, and the adapter finds these rows by `visible_lens`.
            max_query_len: not used.
            max_seq_len: not used.
            softmax_scale: factor of the scores.
            out_dtype: dtype of the output.
            tile_ranges: not used, because the library makes its own schedule.
            split_offsets: not used.
            batch_invariant: False, because the declaration excludes True.
            split_rule: not used.
            cache_format: `compute_dtype`, or `fp8_e4m3` in the fp8 mode "fp8_product".
            kv_scale: float32 scale of the layer's cache, []; None for `compute_dtype`.
            out: [T, N, 512] in `out_dtype`, contiguous, written in place; None allocates a tensor.
            fp8_mode: "converted" for `compute_dtype`, "fp8_product" for `fp8_e4m3`.
            q_scale: float32 scale of queries in e4m3, [] or [1]; None for "converted".
            prepared: the library's schedule, and for e4m3 the padded block table, from `prepare`. Empty: this call
                makes them.

        Returns:
            out [T, N, 512] and lse [N, T], natural log, float32. Rows without keys: output 0 and LSE -inf.
        """
        if self._is_empty:
            out = ql_nope.new_empty(ql_nope.shape, dtype=out_dtype) if out is None else out
            shape = self._heads, self._tokens
            return out.zero_(), torch.full(shape, -torch.inf, dtype=torch.float32, device=ql_nope.device)
        lens = seq_lens.contiguous() if self._copies_lens else seq_lens
        attend = self._attend_e4m3 if self._in_e4m3 else self._attend
        made, made_lse = attend(ql_nope, q_pe, kv_cache.unsqueeze(2), block_table, lens, kv_scale, q_scale, prepared)
        return self._convert(
            made.view(self._tokens, self._heads, LATENT), made_lse.transpose(0, 1), out,
            # the kernel for e4m3 gives no valid numbers for rows without keys
            visible_lens=visible_lens.contiguous() if self._in_e4m3 else None,
        )  # fmt: skip

    def _attend(self, ql_nope, q_pe, pages, block_table, lens, kv_scale, q_scale, prepared) -> tuple[Tensor, Tensor]:
        """Call the kernel for 16 bits; return the output and the LSE of the library."""
        q = torch.cat((ql_nope, q_pe), dim=-1).view(self._rows)
        plan, _ = self._library.get_mla_metadata()
        if prepared:
            plan.tile_scheduler_metadata, plan.num_splits = prepared
        table = block_table.contiguous() if self._copies_table else block_table
        return self._library.flash_mla_with_kvcache(
            q, pages, table, lens, LATENT, plan, softmax_scale=self._scale, causal=True
        )

    def _attend_e4m3(self, ql_nope, q_pe, pages, block_table, lens, kv_scale, q_scale, prepared) -> list[Tensor]:
        """Call the kernel for e4m3; return the output and the LSE of the library."""
        q = torch.cat((ql_nope.view(torch.uint8), q_pe.view(torch.uint8)), dim=-1).view(ql_nope.dtype)
        *schedule, table = prepared or (
            *_schedule_e4m3(lens, self._rows[1] * self._heads), _padded_table(block_table)
        )  # fmt: skip
        return self._library.fwd_kvcache_mla_fp8(
            q.view(self._rows), pages, LATENT, lens, table, self._scale, True, *schedule, q_scale.view(1),
            kv_scale.view(1),
        )  # fmt: skip


def kept_decode(*arguments, **options) -> DecodeCall:
    """Return the function for later calls with the same signature."""
    return DecodeCall(*arguments, **options)


def mla_decode(*arguments, **options) -> tuple[Tensor, Tensor]:
    """Compute absorbed attention over cached latents, with a causal mask (`DecodeCall.__call__`)."""
    return DecodeCall(*arguments, **options)(*arguments, **options)


def _operators() -> Any:
    """Return the namespace of the operators for e4m3, which the import of vLLM's extension registers."""
    loaded(SOURCES_E4M3)
    return torch.ops._flashmla_extension_C


def _padded_table(block_table: Tensor) -> Tensor:
    """Return a copy of the block table with a 0 in memory before each row, because the kernel for e4m3 reads it."""
    return pad(block_table, (1, 0))[:, 1:]


def _schedule_e4m3(seq_lens: Tensor, rows: int) -> list[Tensor]:
    """Return the library's schedule for a decode in e4m3: tile_scheduler_metadata and num_splits."""
    return _operators().get_mla_decoding_metadata_dense_fp8(seq_lens, rows, 1)


def _schedule(module: ModuleType, seq_lens: Tensor, width: int, query_len: int, heads: int) -> tuple[Tensor, Tensor]:
    """Return the library's schedule for a decode in 16 bits: tile_scheduler_metadata and num_splits.

    The library makes this schedule only inside of a decode. This function decodes queries of zeros over a cache with
    one block of zeros, which costs the time of the products of one layer's decode, and reads almost no memory.
    """
    options = {"dtype": torch.bfloat16, "device": seq_lens.device}
    q = torch.zeros(seq_lens.shape[0], query_len, heads, LATENT + ROPE, **options)
    cache = torch.zeros(1, BLOCK, 1, LATENT + ROPE, **options)
    table = torch.zeros(1, width, dtype=torch.int32, device=seq_lens.device).expand(seq_lens.shape[0], -1)
    plan, _ = module.get_mla_metadata()
    module.flash_mla_with_kvcache(q, cache, table, seq_lens, LATENT, plan, softmax_scale=1.0, causal=True)
    return plan.tile_scheduler_metadata, plan.num_splits


def prepare(decode: DecodeMetadata, num_heads: int, fp8_mode: str = CONVERTED) -> tuple[Tensor, ...]:
    """Return the library's schedule for the decodes of a step, and for e4m3 the padded block table.

    The sizes depend on the number of requests, on the number of rows of a request, on the width of the block table and
    on the GPU.

    Args:
        decode: decode part of the plan, with at least one request.
        num_heads: number of heads of the decode.
        fp8_mode: fp8 mode of the decode.
    """
    lens = decode.seq_lens.contiguous()
    query_len = decode.visible_lens.shape[0] // lens.shape[0]
    if fp8_mode == FP8_PRODUCT:
        return (*_schedule_e4m3(lens, query_len * num_heads), _padded_table(decode.block_table))
    return _schedule(loaded(SOURCES)[1], lens, decode.block_table.shape[1], query_len, num_heads)


def missing() -> list[str]:
    """Return why FlashMLA cannot be imported."""
    return missing_artifacts(SOURCES)


FLASHMLA = Backend(
    name="flashmla",
    priority=-100,
    device_type="cuda",
    ops=decode_ops(
        f"{__name__}:mla_decode",
        kept_call=f"{__name__}:kept_decode",
        dtypes=HALF,
        out_dtypes=STATE_DTYPES,
        cache_formats=(COMPUTE_FORMAT.name, FP8_E4M3.name),
        fp8_modes=(CONVERTED, FP8_PRODUCT),
        format_modes={COMPUTE_FORMAT.name: (CONVERTED,), FP8_E4M3.name: (FP8_PRODUCT,)},
        head_scales=False,
        head_dims={"kv_lora_rank": (LATENT,), "qk_rope_head_dim": (ROPE,)},
        block_sizes=(BLOCK,),
        batch_invariant=False,  # the splits of a request depend on the lengths of all requests
        query_lens=QueryLenSupport.UNIFORM,
        graph=GraphSupport.ONE_QUERY_LEN,
        needs_words=True,
    ),
    capability=(9, 0),
    capability_end=(10, 0),
    missing_package=missing_package(SOURCES),
    library="FlashMLA",
    install="pip install vllm, or build https://github.com/deepseek-ai/FlashMLA",
    missing_artifacts=f"{__name__}:missing",
    hooks="fast.mla.decode_hooks:FlashMLAHooks",
)
