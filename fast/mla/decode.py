"""Decode on the absorbed path: multi-query attention over the latent cache itself.

`reference.mla.decode` explains keys and values, and how many elements a kernel reads for each request.
docs/glossary.md explains the terms and the letters of shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from reference.interfaces import (
    CAUSAL_OVER_RANKS,
    COMPUTE_FORMAT,
    CONVERTED,
    NEUTRAL_SPLIT_RULE,
    VISIBLE_LENS,
    AttentionState,
    CacheFormat,
    DecodeMetadata,
    DecodeSchedule,
    GraphSupport,
    MLAConfig,
    QueryLenSupport,
    ScheduleCosts,
    TokenOwnership,
    check_causal_mask,
    check_config,
    check_decode,
    check_decode_values,
    check_device,
    check_dtype,
    check_eager_offsets,
    check_int,
    check_mode_of_format,
    check_number,
    check_out,
    check_scale_values,
    check_type,
    format_named,
    invariant_split_rule,
    wide_dtype,
)

from .. import backends
from ..backends import BackendChoice
from ..backends.kept_calls import kept_function
from ..backends.positive_scales import serves_scale, with_positive_scale
from ..backends.selection import check_same_backend, name_for


def decode_programs(
    config: MLAConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    block_size: int,
    query_len: int = 1,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    fp8_mode: str = CONVERTED,
    backend: BackendChoice = None,
) -> int:
    """Return how many programs of the decode kernel a device runs at the same time.

    Pass the result to `plan_decode` as `num_programs`. A builder calls this function itself if its `num_programs` is
    None.

    Args:
        config: config of the layer.
        device: device of the decode.
        dtype: dtype of the queries.
        block_size: tokens per cache block.
        query_len: length of the longest query in the decode.
        cache_format: format of the cache.
        fp8_mode: fp8 mode of the decode (`mla_decode`).
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Raises:
        ValueError: the format does not support the dims of the config or the mode.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    check_int("query_len", query_len)
    given = config, device, dtype, block_size, cache_format, fp8_mode, backend
    return _function_of("decode_programs", *given)(query_len, cache_format)


def schedule_costs(
    config: MLAConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    block_size: int,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    fp8_mode: str = CONVERTED,
    backend: BackendChoice = None,
) -> ScheduleCosts:
    """Return the measured costs of a device's decode kernel, from which `plan_decode` computes a schedule.

    A builder calls this function itself if its `schedule_costs` is None.

    Args:
        config: config of the layer.
        device: device of the decode.
        dtype: dtype of the queries.
        block_size: tokens per cache block.
        cache_format: format of the cache.
        fp8_mode: fp8 mode of the decode (`mla_decode`).
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Raises:
        ValueError: the format does not support the dims of the config or the mode.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    given = config, device, dtype, block_size, cache_format, fp8_mode, backend
    return _function_of("schedule_costs", *given)(cache_format)


def _function_of(op, config, device, dtype, block_size, cache_format, fp8_mode, backend):
    """Return the chosen backend's function for `op`, with its first arguments and the mode.

    The function gets no mode for `converted`, so a backend that has no other mode need not take the argument.
    """
    check_config(config)
    device = check_device("device", device)
    check_type("dtype", dtype, torch.dtype)
    check_int("block_size", block_size)
    check_mode_of_format(fp8_mode, cache_format, config)
    widths = config.kv_lora_rank, config.qk_rope_head_dim
    # An automatic choice must also serve decodes of any query lengths. A named backend has its own limits, which its
    # decodes check.
    lens = QueryLenSupport.VARLEN if name_for(op, backend) is None else QueryLenSupport.SINGLE_ONLY
    request = backends.decode_request(
        device, dtype, *widths, block_size, lens, op=op, cache_format=cache_format, fp8_mode=fp8_mode
    )
    function = backends.kernel(backends.select(request, backend).name, op)
    mode = {} if fp8_mode == CONVERTED else {"fp8_mode": fp8_mode}
    return functools.partial(function, device, dtype, config.num_heads, *widths, block_size, **mode)


def mla_decode(
    ql_nope: Shaped[Tensor, "T N Lkv"],
    q_pe: Shaped[Tensor, "T N R"],
    kv_cache: Shaped[Tensor, "num_blocks block_size columns"],
    metadata: DecodeMetadata,
    softmax_scale: float,
    schedule: DecodeSchedule | None = None,
    out_dtype: torch.dtype | None = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    kv_scale: Float[Tensor, ""] | None = None,
    fp8_mode: str = CONVERTED,
    q_scale: Float[Tensor, "*heads"] | None = None,
    *,
    out: Float[Tensor, "T N Lkv"] | None = None,
    backend: BackendChoice = None,
) -> AttentionState:
    """Compute attention of the query tokens of each request over its cached latents (absorbed path).

    See `reference.mla.decode.mla_decode` for the use of the LSE, for the schedule and for the modes of a cache in e4m3.

    Args:
        ql_nope: [T, N, Lkv], queries with W_UK absorbed (`query_to_latent`).
        q_pe: [T, N, R], rotated rope parts of the queries.
        kv_cache: cache, which already contains the new tokens.
        metadata: decode part of the plan; query token t attends the first `visible_lens[t]` keys of its request. If the
            plan names a backend (`DecodeMetadata.backend`), this backend serves the call.
        softmax_scale: (P + R)^-1/2, times YaRN's factor; not (Lkv + R)^-1/2.
        schedule: schedule (`plan_decode`), which assigns keys to the programs of the kernel. With None, the kernel
            divides the keys itself. A schedule changes results by rounding alone. The backend "cpu" ignores `schedule`.
        out_dtype: dtype of `out`; None means the dtype of `ql_nope`, and is refused for queries in e4m3.
        cache_format: format of the cache. The backend "triton" converts stored e4m3 numbers to the dtype of the queries
            or to float16, both without rounding. It may also convert bfloat16 queries to float16, divided by a power of
            two so that no query overflows.
        kv_scale: float32 scale of the layer's cache, []; None if the format has no such scale.
        fp8_mode: which products over a cache in e4m3 have only factors in e4m3: `converted` (none), `fp8_query` or
            `fp8_product`; `reference.mla_decode` explains the modes. A backend declares which modes it supports, and
            never computes in another mode. If the processor cannot multiply e4m3 numbers, the backend multiplies the
            same numbers in a wider dtype: "cpu" in float32 or float64, and "triton" in float16.
        q_scale: float32 scale of queries in e4m3, [] or [N]; None for `converted`.
        out: contiguous tensor [T, N, Lkv] in `out_dtype` that receives the output; `out` must share no memory with the
            other tensors. The backend "hopper" needs an address that is a multiple of 16 bytes. None allocates a
            tensor.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        An `AttentionState`: out [T, N, Lkv] and lse [N, T]. Apply `latent_to_value` to `out` next. On a GPU, the rows
        of padding tokens (token `query_start_loc[-1]` and all later tokens) are undefined; a layer sets them to zero
        (`zero_padding_tokens`).

    Raises:
        ValueError: in one of these cases:

            - shapes, dtypes or devices do not match, or the plan was made for another block size;
            - the tensors are on the CPU, and an offset, a length, a visible length or a block of the plan is invalid;
            - the queries do not have the dtype that `fp8_mode` needs, or the cache has no e4m3 numbers for this mode;
            - the tensors are on the CPU, and a scale is not finite and positive;
            - `backend` names another backend than the plan.

        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    calls = _DECODES if out is None else _DECODES_INTO
    signature = calls.signature(
        ql_nope, q_pe, kv_cache, metadata, softmax_scale, schedule, out_dtype, cache_format, kv_scale,
        fp8_mode, q_scale, out, backend,
    )  # fmt: skip
    chosen = calls.backend_of(signature)
    if chosen is None:
        check_decode(ql_nope, q_pe, kv_cache, metadata, cache_format, schedule, kv_scale, fp8_mode, q_scale, out_dtype)
        check_number("softmax_scale", softmax_scale)
        if out_dtype is not None:
            check_dtype("out_dtype", out_dtype)
        request = backends.decode_request(
            ql_nope.device, ql_nope.dtype, ql_nope.shape[2], q_pe.shape[2], kv_cache.shape[1],
            QueryLenSupport.VARLEN  # a replay may have other query lengths, which only the device knows
            if metadata.graph is GraphSupport.ANY
            else backends.query_lens_of(ql_nope.shape[0], metadata.seq_lens.shape[0], metadata.max_query_len),
            backends.cache_in_words(kv_cache), out_dtype=ql_nope.dtype if out_dtype is None else out_dtype,
            cache_format=cache_format, batch_invariant=schedule is not None and schedule.batch_invariant,
            graph=metadata.graph, fp8_mode=fp8_mode, mask=metadata.mask,
            head_scales=q_scale is not None and q_scale.numel() > 1,
        )  # fmt: skip
        check_same_backend("mla_decode", metadata.backend, backend, "metadata.backend", "the backend of the call")
        chosen = backends.select(request, metadata.backend or backend).name
    out_dtype = ql_nope.dtype if out_dtype is None else out_dtype
    tile_ranges, split_offsets, batch_invariant, split_rule = None, None, False, NEUTRAL_SPLIT_RULE
    if schedule is not None:
        tile_ranges, split_offsets = schedule.tile_ranges, schedule.split_offsets
        batch_invariant, split_rule = schedule.batch_invariant, schedule.split_rule
    if metadata.graph is not GraphSupport.ANY:
        check_eager_offsets("metadata.query_start_loc", metadata.query_start_loc, ql_nope.shape[0])
    inputs = (
        ql_nope, q_pe, kv_cache, metadata.block_table, metadata.seq_lens, metadata.query_start_loc,
        metadata.visible_lens,
    )  # fmt: skip
    arguments = (
        *inputs, metadata.max_query_len, metadata.max_seq_len, softmax_scale, out_dtype, tile_ranges, split_offsets,
        batch_invariant, list(split_rule.numbers), cache_format.name, kv_scale, fp8_mode,
        q_scale, list(metadata.prepared), *_ranks_of(metadata),
    )  # fmt: skip
    if out is None:
        return AttentionState(*_DECODES.run(signature, chosen, *arguments))
    # Check `out` in every call: a signature (shapes, dtypes, devices) does not show whether two tensors share memory.
    check_out("out", out, tuple(ql_nope.shape), out_dtype, ql_nope.device, *inputs, contiguous=True)
    return AttentionState(out, _DECODES_INTO.run(signature, chosen, *arguments, out))


def _launch_decode(
    ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, max_query_len, max_seq_len,
    softmax_scale, out_dtype, tile_ranges, split_offsets, batch_invariant, split_rule, cache_format, kv_scale, fp8_mode,
    q_scale, prepared, total_seq_lens, ownership, backend, *out,
):  # fmt: skip
    if ql_nope.device.type == "cpu":
        metadata = DecodeMetadata(
            block_table, seq_lens, query_start_loc, max_query_len, visible_lens, max_seq_len, kv_cache.shape[1],
            GraphSupport.ANY,  # allows padding tokens; `mla_decode` has rejected them if they are not allowed
            total_seq_lens=total_seq_lens, ownership=TokenOwnership(*ownership) if ownership else None,
        )  # fmt: skip
        check_decode_values(metadata, ql_nope.shape[0], kv_cache.shape[1], kv_cache.shape[0])
        if VISIBLE_LENS not in backends.support_of(backend, "mla_decode").masks:
            check_causal_mask(metadata)
        check_scale_values("kv_scale", kv_scale)
        check_scale_values("q_scale", q_scale)
    options = _options_of_launcher(backend, ownership)(fp8_mode, q_scale, prepared, total_seq_lens)
    softmax_scale, (ql_nope, q_pe) = with_positive_scale(backend, softmax_scale, ql_nope, q_pe)
    state = backends.kernel(backend, "mla_decode")(
        ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, max_query_len, max_seq_len,
        softmax_scale, out_dtype, tile_ranges, split_offsets, batch_invariant, invariant_split_rule(*split_rule),
        format_named(cache_format), kv_scale, *out, **options,
    )  # fmt: skip
    shape, written = tuple(ql_nope.shape), (*out, None) if out else (None, None)
    backends.check_state(backend, "mla_decode", state, shape, out_dtype, ql_nope.device, written=written)
    return state


def _ranks_of(metadata: DecodeMetadata) -> tuple[torch.Tensor | None, list[int]]:
    """Return what a kernel without `visible_lens` needs for CAUSAL_OVER_RANKS: the whole lengths; D, rank, interleave.

    For any other mask, the result is None and an empty list.
    """
    owned = metadata.ownership
    if metadata.mask != CAUSAL_OVER_RANKS:
        return None, []
    return metadata.total_seq_lens, [owned.size, owned.rank, owned.interleave]


def _options_of_launcher(backend: str, ownership: list[int]) -> Callable[..., dict]:
    """Return a function that gives the keyword arguments of a launcher, from those arguments that differ by call.

    Args:
        backend: name of the backend.
        ownership: the second result of `_ranks_of`.
    """
    constant = {}
    if ownership and VISIBLE_LENS not in backends.support_of(backend, "mla_decode").masks:
        constant = {"ownership": TokenOwnership(*ownership)}

    def options(fp8_mode, q_scale, prepared, total_seq_lens):
        found = {} if fp8_mode == CONVERTED else {"fp8_mode": fp8_mode, "q_scale": q_scale}
        if prepared:
            found["prepared"] = tuple(prepared)
        return found | constant | {"total_seq_lens": total_seq_lens} if constant else found

    return options


def _kept_decode(
    ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, longest_q, longest_k, scale,
    out_dtype, tile_ranges, split_offsets, batch_invariant, split_rule, cache_format, kv_scale, fp8_mode, q_scale,
    prepared, total_seq_lens, ownership, backend, *out,
):  # fmt: skip
    """Return a function for later calls of `_launch_decode` with the same signature; None if there is none."""
    if ql_nope.device.type == "cpu":  # the values of the plan are checked in each call
        return None
    if not serves_scale(backend, scale):
        return None
    rest = longest_q, longest_k, scale, out_dtype
    constants = batch_invariant, invariant_split_rule(*split_rule), format_named(cache_format)
    options_of = _options_of_launcher(backend, ownership)
    call = kept_function(
        backend, "mla_decode", ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, *rest,
        tile_ranges, split_offsets, *constants, kv_scale, *out,
        **options_of(fp8_mode, q_scale, prepared, total_seq_lens),
    )  # fmt: skip
    if call is None:
        return None
    shape, device = tuple(ql_nope.shape), ql_nope.device

    def again(
        ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, longest_q, longest_k, scale,
        out_dtype, tile_ranges, split_offsets, batch_invariant, split_rule, cache_format, kv_scale, fp8_mode, q_scale,
        prepared, total_seq_lens, ownership, backend, *out,
    ):  # fmt: skip
        state = call(
            ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, *rest, tile_ranges,
            split_offsets, *constants, kv_scale, *out, **options_of(fp8_mode, q_scale, prepared, total_seq_lens),
        )  # fmt: skip
        written = (*out, None) if out else (None, None)
        backends.check_state(backend, "mla_decode", state, shape, out_dtype, device, written=written)
        return state

    return again


def _kept_decode_into(*arguments):
    *inputs, out, backend = arguments
    kept = _kept_decode(*inputs, backend, out)
    return None if kept is None else lambda *given: kept(*given[:-2], given[-1], given[-2])[1]


def _launch_decode_into(*arguments):
    *inputs, out, backend = arguments
    return _launch_decode(*inputs, backend, out)[1]


_mla_decode = torch.library.custom_op(
    "mla_twins::mla_decode",
    _launch_decode,
    mutates_args=(),
    schema="(Tensor ql_nope, Tensor q_pe, Tensor kv_cache, Tensor block_table, Tensor seq_lens,"
    " Tensor query_start_loc, Tensor visible_lens, SymInt max_query_len, SymInt max_seq_len,"
    " float softmax_scale, ScalarType out_dtype,"
    " Tensor? tile_ranges, Tensor? split_offsets, bool batch_invariant, SymInt[] split_rule,"
    " str cache_format, Tensor? kv_scale, str fp8_mode, Tensor? q_scale, Tensor[] prepared,"
    " Tensor? total_seq_lens, SymInt[] ownership, str backend)"
    " -> (Tensor, Tensor)",
)
_DECODES = backends.CheckedCalls(torch.ops.mla_twins.mla_decode, _launch_decode, keep=_kept_decode)


@_mla_decode.register_fake
def _(
    ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, max_query_len, max_seq_len,
    softmax_scale, out_dtype, tile_ranges, split_offsets, batch_invariant, split_rule, cache_format, kv_scale, fp8_mode,
    q_scale, prepared, total_seq_lens, ownership, backend,
):  # fmt: skip
    tokens, heads, _ = ql_nope.shape
    out = ql_nope.new_empty(ql_nope.shape, dtype=out_dtype)
    return out, ql_nope.new_empty(heads, tokens, dtype=wide_dtype(out_dtype))


_mla_decode_out = torch.library.custom_op(
    "mla_twins::mla_decode_out",
    _launch_decode_into,
    mutates_args=("out",),
    schema="(Tensor ql_nope, Tensor q_pe, Tensor kv_cache, Tensor block_table, Tensor seq_lens,"
    " Tensor query_start_loc, Tensor visible_lens, SymInt max_query_len, SymInt max_seq_len,"
    " float softmax_scale, ScalarType out_dtype,"
    " Tensor? tile_ranges, Tensor? split_offsets, bool batch_invariant, SymInt[] split_rule,"
    " str cache_format, Tensor? kv_scale, str fp8_mode, Tensor? q_scale, Tensor[] prepared,"
    " Tensor? total_seq_lens, SymInt[] ownership, Tensor(a!) out, str backend) -> Tensor",
)
_DECODES_INTO = backends.CheckedCalls(
    torch.ops.mla_twins.mla_decode_out, _launch_decode_into, mutates=(22,), keep=_kept_decode_into
)


@_mla_decode_out.register_fake
def _(
    ql_nope, q_pe, kv_cache, block_table, seq_lens, query_start_loc, visible_lens, max_query_len, max_seq_len,
    softmax_scale, out_dtype, tile_ranges, split_offsets, batch_invariant, split_rule, cache_format, kv_scale, fp8_mode,
    q_scale, prepared, total_seq_lens, ownership, out, backend,
):  # fmt: skip
    tokens, heads, _ = ql_nope.shape
    return ql_nope.new_empty(heads, tokens, dtype=wide_dtype(out_dtype))
