"""Comparison of two packages op by op, on the activations of a real model.

`ops` is the package under test, and `oracle` is the specification. Both get inputs in the dtype of the model. The error
of `ops` must be within a budget, which `fast.parity` computes from two results of `oracle`: gold (computed in float64)
and low (computed in the dtype of the model). Ops that only copy data or compute integers must give equal bits.

docs/glossary.md explains the terms and the letters of shapes.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from reference.interfaces import (
    CACHE_FORMATS,
    COMPUTE_FORMAT,
    CONVERTED,
    DECODE_MASKS,
    FLOAT_DTYPES,
    FP8_MODES,
    AttentionState,
    CacheFormat,
    ContextWorkspace,
    DecodeMetadata,
    DecodeSchedule,
    MLAConfig,
    MLAMetadata,
    check,
)
from reference.interfaces.layer_results import ProjectedTokens

from ..backends import BackendChoice, bind
from ..parity import Parity, compare, compare_exact, compare_states
from .parity_inputs import Batch, Storage, make_batch

PROGRAMS = 3  # programs of a decode schedule: with 4 requests, only some requests are split


class WithBackend:
    """Wrap a package, so that each of its functions with a parameter `backend` gets the same `backend`.

    Args:
        ops: the package.
        backend: mapping from op to backend name, or None, which changes nothing.
    """

    def __init__(self, ops: ModuleType, backend: BackendChoice):
        self._ops, self._backend = ops, backend

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        takes_it = inspect.isfunction(found) and "backend" in inspect.signature(found).parameters
        return partial(found, backend=self._backend) if takes_it and self._backend is not None else found


class Comparison:
    """Compare ops of two packages, and collect one row for each comparison in `rows`.

    Args:
        ops: the package under test.
        oracle: the package that is the specification.
    """

    def __init__(self, ops: Any, oracle: ModuleType):
        self.ops, self.oracle = ops, oracle
        self.rows: list[Parity] = []

    def within_budget(
        self, op: str, call: Callable[..., Any], *arguments: Any, parts: tuple[str, ...] = (), relative: float = 0.0
    ) -> None:
        """Call an op of both packages, and compare the error of `ops` with its budget.

        Args:
            op: name of the op in the table.
            call: function that gets a package and `arguments`, and returns a tensor, an attention state or a tuple.
            arguments: arguments of the op, in the dtype of the model.
            parts: names of the elements, if `call` returns a tuple.
            relative: additional relative error of the output of an attention state, which the budget allows. The budget
                of an attention state also allows the error that rounded scores cause (`rounding_of_scores`).
        """
        value, low = call(self.ops, *arguments), call(self.oracle, *arguments)
        gold = call(self.oracle, *(widen(argument) for argument in arguments))
        if isinstance(gold, AttentionState):
            self.rows += compare_states(op, value, low, gold, relative + rounding_of_scores(gold, low.lse.dtype))
        elif isinstance(gold, tuple):
            for part, *results in zip(parts, value, low, gold, strict=True):
                self.rows.append(compare(f"{op}: {part}", *results))
        else:
            self.rows.append(compare(op, value, low, gold))

    def exact(self, op: str, call: Callable[..., Any], *arguments: Any) -> None:
        """Call an op of both packages, and compare the two results (tensors or plans) bit by bit."""
        value, expected = (flatten(call(module, *arguments)) for module in (self.ops, self.oracle))
        differs = Parity(op, math.inf, math.inf, 0.0, 0.0, same_infinities=False)
        self.rows.append(compare_exact(op, value, expected) if value.shape == expected.shape else differs)


def rounding_of_scores(gold: AttentionState, dtype: torch.dtype) -> float:
    """Return the relative error of probabilities whose scores are rounded to `dtype`.

    Rounding changes a score s by up to eps * |s|, and its probability exp(s - LSE) by the same relative amount. The
    scores that matter are close to the LSE, so the largest LSE takes the place of s.
    """
    finite = gold.lse[gold.lse.isfinite()]
    return torch.finfo(dtype).eps * finite.abs().max().item() if finite.numel() else 0.0


def widen(argument: Any) -> Any:
    """Convert a float tensor, an attention state or a module to float64; return other arguments unchanged.

    Stored entries of a format with a `storage_dtype` stay unchanged too, because gold must read the same bytes.
    """
    if isinstance(argument, Tensor):
        return argument.double() if argument.dtype in FLOAT_DTYPES else argument
    if isinstance(argument, AttentionState):
        return AttentionState(argument.out.double(), argument.lse.double())
    if isinstance(argument, nn.Module):
        return copy.deepcopy(argument).double()
    return argument


def flatten(value: Any) -> Tensor:
    """Return all numbers of a tensor or plan as one vector; leave out the workspace of a plan."""
    if isinstance(value, Tensor):
        return value.flatten()
    value = list(CACHE_FORMATS).index(value.name) if isinstance(value, CacheFormat) else value
    value = (*FP8_MODES, *DECODE_MASKS).index(value) if isinstance(value, str) else value
    if dataclasses.is_dataclass(value):
        value = [getattr(value, each.name) for each in dataclasses.fields(value)]
    if isinstance(value, enum.Enum):
        value = list(type(value)).index(value)
    if isinstance(value, list | tuple):
        parts = [flatten(each) for each in value]
        counts = torch.tensor([part.numel() for part in parts], dtype=torch.int64)
        return torch.cat([counts, *(part.cpu() for part in parts)])
    if value is None or isinstance(value, ContextWorkspace):
        return torch.empty(0)
    return torch.tensor([value])


@torch.inference_mode()
def run_parity(
    attention: nn.Module,
    hidden_states: Tensor,
    ops: ModuleType,
    oracle: ModuleType,
    block_size: int,
    workspace_tokens: int,
    backend: BackendChoice = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    kv_scale: float | None = None,
    fp8_mode: str = CONVERTED,
    q_scale: float | Tensor | None = None,
) -> list[Parity]:
    """Compare two packages op by op.

    Args:
        attention: attention module of transformers (DeepseekV2Attention or DeepseekV3Attention); `use_mla` must not
            have replaced its `forward`.
        hidden_states: [T, H], input of this module; T is at least 40.
        ops: the package under test.
        oracle: the package that is the specification.
        block_size: tokens of a block.
        workspace_tokens: largest number of context tokens that a prefill expands at once.
        backend: `backend=` of `ops`: a name, a mapping from op to name, or None.
        cache_format: format of the cache.
        kv_scale: scale of the cache; None if the format has no such scale.
        fp8_mode: fp8 mode of the decodes.
        q_scale: scale of queries in e4m3, a number or a tensor [N]; None in the mode `converted`.

    Returns:
        One row for each result of each op.

    Raises:
        ValueError: T is too small, or `workspace_tokens` is below `block_size`.
    """
    check(workspace_tokens >= block_size, "workspace_tokens", f"at least one block of {block_size}", workspace_tokens)
    device, backend = hidden_states.device, bind(backend)
    batch = make_batch(hidden_states.shape[0], block_size, min(2, workspace_tokens // block_size), device)
    compared = Comparison(WithBackend(ops, backend), oracle)
    layer = oracle.MLAAttention.from_hf(attention)

    plans(compared, batch, workspace_tokens, layer.config)
    projected = projections(compared, layer, hidden_states, batch)
    q, kv_c_normed, k_pe = projected.q, projected.kv_c_normed, projected.k_pe
    scales = (
        None if scale is None else torch.as_tensor(scale, dtype=torch.float32, device=device)
        for scale in (kv_scale, q_scale)
    )  # fmt: skip
    storage = Storage(cache_format, next(scales), fp8_mode, next(scales))
    kv_cache = caches(compared, kv_c_normed, k_pe, batch, storage)
    common = batch.common(oracle, batch.query_lens)
    formats = {"cache_format": cache_format, "fp8_mode": fp8_mode}
    metadata = oracle.build_mla_metadata(common, block_size, workspace_tokens, **formats)
    attentions(compared, layer, q, kv_c_normed, k_pe, kv_cache, batch, metadata, storage)

    rows, options = batch.rows_of_last(batch.query_lens), {} if backend is None else {"backend": backend}
    if cache_format.scaled:
        # The layer writes nothing and reads the stored entries. If it wrote entries, two activations that differ in the
        # last bit could become different e4m3 numbers. The budget does not cover such a difference.
        metadata = dataclasses.replace(metadata, slot_mapping=torch.full_like(metadata.slot_mapping, -1))

    def forward(module: Any, attention: nn.Module, hidden: Tensor, kv_cache: Tensor) -> Tensor:
        # Gold does not quantise the queries. Two queries that differ in the last bit could become different e4m3
        # numbers; the budget, which contains the error of the quantisation in `low`, covers such a difference.
        gold = hidden.dtype == torch.float64
        stored, plan = storage.decode_options, metadata
        if gold:
            stored, plan = storage.options, dataclasses.replace(metadata, fp8_mode=CONVERTED)
        layer = module.MLAAttention.from_hf(attention, **stored, **(options if module is compared.ops else {}))
        return layer(hidden, batch.positions[rows], kv_cache.clone(), plan)

    compared.within_budget("MLAAttention.forward", forward, attention, hidden_states[rows], kv_cache)
    return compared.rows


def plans(compared: Comparison, batch: Batch, workspace_tokens: int, config: MLAConfig) -> None:
    """Compare the functions that compute integers: slots, chunks, plans, chosen paths, a schedule, `advance_step`."""
    lens, table = torch.tensor(batch.lens, dtype=torch.int32), batch.block_table.cpu()
    starts, tokens = batch.offsets(batch.lens), sum(batch.lens)
    compared.exact("slot_mapping", lambda m: m.slot_mapping(starts, lens, table, batch.block_size, tokens + 3))
    common = batch.common(compared.oracle, batch.query_lens)
    context = common.num_computed_tokens_cpu[batch.num_decodes :]
    compared.exact("plan_context_chunks", lambda m: m.plan_context_chunks(context, workspace_tokens, batch.block_size))
    compared.exact("build_mla_metadata", lambda m: m.build_mla_metadata(common, batch.block_size, workspace_tokens))
    query_lens = common.query_start_loc_cpu.diff()
    compared.exact("choose_paths", lambda m: m.choose_paths(query_lens, common.num_computed_tokens_cpu, 1, config))
    compared.exact("plan_decode", lambda m: m.plan_decode(common.seq_lens, PROGRAMS))

    def advance(module: Any) -> tuple[Any, ...]:
        step = batch.common(compared.oracle, batch.query_lens)
        sampled = torch.arange(len(batch.lens), device=batch.positions.device)
        ids, positions = sampled.new_zeros(step.num_actual_tokens), sampled.new_zeros(step.num_actual_tokens)
        return module.advance_step(sampled, ids, positions, step, batch.block_size), ids, positions

    compared.exact("advance_step", advance)


def projections(compared: Comparison, layer: nn.Module, hidden_states: Tensor, batch: Batch) -> ProjectedTokens:
    """Compare norm, rotation and up-projections.

    Returns:
        The queries, the normed latents and the rotated rope keys of the oracle.
    """
    c = layer.config
    projected = layer.project(hidden_states, batch.positions)
    q, kv_c_normed = projected.q, projected.kv_c_normed
    kv_c, k_pe_raw = layer.kv_a_proj_with_mqa(hidden_states).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
    unrotated = q[..., c.qk_nope_head_dim :]  # any activations of the right shape serve as q_pe
    compared.within_budget(
        "rms_norm", lambda m, x, weight: m.rms_norm(x, weight, c.latent_norm_eps), kv_c, layer.kv_a_layernorm.weight
    )
    compared.within_budget(
        "apply_rope", lambda m, *tensors: m.apply_rope(batch.positions, *tensors, c.rope), unrotated, k_pe_raw,
        parts=("q_pe", "k_pe"),
    )  # fmt: skip
    w_uk, w_uv = layer.up_projections()
    w_uk_t, _ = compared.oracle.absorb(w_uk, w_uv)
    compared.within_budget(
        "query_to_latent", lambda m, q, w: m.query_to_latent(q, w), q[..., : c.qk_nope_head_dim], w_uk_t
    )
    compared.within_budget(
        "expand_kv", lambda m, *tensors: m.expand_kv(*tensors), kv_c_normed, w_uk, w_uv, parts=("k_nope", "v")
    )
    return projected


def caches(compared: Comparison, kv_c_normed: Tensor, k_pe: Tensor, batch: Batch, storage: Storage) -> Tensor:
    """Compare cache writes, gathers and copies bit by bit.

    Returns:
        A cache with the entries of all tokens. All slots without a token are NaN, so that the comparison detects an op
        that reads such a slot.
    """
    slots = batch.common(compared.oracle, batch.lens).slot_mapping
    dims = kv_c_normed.shape[1], k_pe.shape[1]
    empty = storage.empty(kv_c_normed, batch.num_blocks, batch.block_size, dims)

    def write(module: Any) -> Tensor:
        kv_cache = empty.clone()
        module.concat_and_cache_mla(kv_c_normed, k_pe, kv_cache, slots, **storage.options)
        return kv_cache

    compared.exact("concat_and_cache_mla", write)
    kv_cache = write(compared.oracle)
    options = storage.options and {**storage.options, "out_dtype": kv_c_normed.dtype}

    starts = torch.tensor([length // 4 for length in batch.lens], dtype=torch.int32)
    gathered = batch.offsets([length // 2 for length in batch.lens]).to(kv_cache.device)

    def gather(module: Any) -> Tensor:
        return module.gather_and_maybe_dequant_cache(
            kv_cache, batch.block_table, gathered, starts.to(kv_cache.device), int(gathered[-1]), **options
        )

    compared.exact("gather_and_maybe_dequant_cache", gather)
    pairs = torch.tensor([[0, batch.num_blocks - 1], [1, batch.num_blocks - 2]])

    def copy_within(module: Any) -> Tensor:
        copied = kv_cache.clone()
        module.copy_blocks([copied], pairs)
        return copied

    def swap(module: Any) -> Tensor:
        target = empty.clone()
        module.swap_blocks(kv_cache, target, pairs, storage.kv_scale, storage.kv_scale)
        return target

    compared.exact("copy_blocks", copy_within)
    compared.exact("swap_blocks", swap)
    return kv_cache


def decode(
    module: Any,
    like: Tensor,
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    plan: DecodeMetadata,
    scale: float,
    storage: Storage,
    schedule: DecodeSchedule | None = None,
) -> AttentionState:
    """Call `mla_decode` of a package; if the queries are in e4m3, the output gets the dtype of `like`."""
    options = storage.decode_options
    if storage.fp8_mode != CONVERTED:
        options["out_dtype"] = like.dtype
    return module.mla_decode(ql_nope, q_pe, kv_cache, plan, scale, schedule, **options)


def attentions(
    compared: Comparison,
    layer: nn.Module,
    q: Tensor,
    kv_c_normed: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    batch: Batch,
    metadata: MLAMetadata,
    storage: Storage,
) -> None:
    """Compare attention of packed sequences, merge, decode and prefill."""
    c, oracle, device = layer.config, compared.oracle, q.device
    scale = c.softmax_scale
    w_uk, w_uv = layer.up_projections()
    w_uk_t, w_uv_absorbed = oracle.absorb(w_uk, w_uv)
    k_nope, v = oracle.expand_kv(kv_c_normed, w_uk, w_uv)
    k = torch.cat((k_nope, k_pe[:, None].expand(-1, c.num_heads, -1)), dim=-1)
    offsets, longest = batch.offsets(batch.lens).to(device), max(batch.lens)
    new_rows = batch.rows_of_last(batch.query_lens)
    new_offsets, longest_new = batch.offsets(batch.query_lens).to(device), max(batch.query_lens)

    for op, queries, q_offsets, longest_q, causal in (
        ("flash_attn_varlen (causal)", q, offsets, longest, True),
        ("flash_attn_varlen (unmasked)", q[new_rows], new_offsets, longest_new, False),
    ):
        compared.within_budget(
            op,
            lambda m, q, k, v, starts=q_offsets, most=longest_q, causal=causal: m.flash_attn_varlen(
                q, k, v, starts, offsets, most, longest, scale, causal
            ),
            queries, k, v,
        )  # fmt: skip

    causal = oracle.flash_attn_varlen(q, k, v, offsets, offsets, longest, longest, scale, True)
    whole = oracle.flash_attn_varlen(q, k, v, offsets, offsets, longest, longest, scale, False)
    compared.within_budget("merge_attn_states", lambda m, a, b: m.merge_attn_states(a, b), causal, whole)

    for count, op in ((1, "mla_decode (1 token)"), (3, "mla_decode (3 tokens)")):
        query_lens = [count] * batch.num_decodes + [0] * (len(batch.lens) - batch.num_decodes)
        rows = batch.rows_of_last(query_lens)
        common = batch.common(oracle, query_lens)
        plan = oracle.build_mla_metadata(common, batch.block_size, batch.block_size, decode_threshold=count).decode
        ql_nope = oracle.query_to_latent(q[rows][..., : c.qk_nope_head_dim], w_uk_t)
        queries = storage.stored_queries(ql_nope, q[rows][..., c.qk_nope_head_dim :])
        compared.within_budget(
            op, partial(decode, plan=plan, scale=scale, storage=storage), q[:0], *queries, kv_cache,
            relative=storage.probability_error,
        )  # fmt: skip
    schedule = oracle.plan_decode(plan.seq_lens, PROGRAMS)
    scheduled = partial(decode, plan=plan, scale=scale, storage=storage, schedule=schedule)
    compared.within_budget("mla_decode (scheduled)", scheduled, q[:0], *queries, kv_cache,
                           relative=storage.probability_error)  # fmt: skip
    latent = decode(oracle, q[:0], *queries, kv_cache, plan, scale, storage).out
    compared.within_budget("latent_to_value", lambda m, *tensors: m.latent_to_value(*tensors), latent, w_uv_absorbed)

    rows = new_rows[metadata.num_decode_tokens :]
    compared.within_budget(
        "forward_prefill",
        lambda m, q, kv_c, k_pe, kv_cache, w_uk, w_uv: m.forward_prefill(
            q, kv_c, k_pe, kv_cache, metadata.prefill, w_uk, w_uv, scale, **storage.options
        ),
        q[rows], kv_c_normed[rows], k_pe[rows], kv_cache, w_uk, w_uv,
    )  # fmt: skip
