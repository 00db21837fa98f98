"""Call every public function of a package with one malformed argument at a time, and report the outcomes.

`python -m tests.malformed_calls fast` prints one JSON object. The tests start this command as a new process. The
process of the tests has run-time checks of annotations (see conftest.py), which a user's process does not have.

If you add a public function, add a valid call of this function to `valid_calls`. The malformed values are derived from
the annotations of its arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import json
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    E4M3,
    FP8_DS_MLA,
    FP8_E4M3,
    AttentionState,
    CascadeCosts,
    ContextWorkspace,
    GraphSupport,
    InvariantSplitRule,
    MLAConfig,
    PathCosts,
    QuantizedWeight,
    QueryLenSupport,
    RopeConfig,
    ScaleSource,
    ScheduleCosts,
    TokenOwnership,
)

from .support.factories import (
    DIRECT,
    YARN,
    integers,
    linear,
    make_batch,
    make_layer,
    make_up_projections,
    make_weights,
    new_cache,
    norm,
    offsets,
)
from .support.malformed_gqa import contract_calls
from .support.malformed_gqa_ops import op_calls
from .support.malformed_gqa_plans import planning_calls
from .support.malformed_models import HFConfig, hf_config, tiny_model
from .support.malformed_values import malformed

CPU = torch.device("cpu")
SECONDS_A_CALL = 5  # limit of CPU time for each call, because a malformed number could start an endless loop


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that succeeds.

    Attributes:
        name: name in the report, such as "mla_decode" or "DecodeGraph.run".
        function: the function, class or bound method.
        arguments: all arguments by name, including the tensors that the function writes.
        hidden: annotations by argument name, for arguments that have no annotation in the signature.
        runs: False if the valid call is too slow. The function is then called only with malformed values of a wrong
            type, which must give an error.
    """

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    hidden: dict[str, str] = dataclasses.field(default_factory=dict)
    runs: bool = True


# Valid calls.


def valid_calls(ops: ModuleType, last: str | None = None) -> list[Call]:
    """Return one successful call of each public function, class and method, with new arguments.

    To save time, the list may end after the group of the call with the name `last`.
    """
    torch.manual_seed(0)
    is_fast = ops.__name__ == "fast"
    backend = {"backend": "cpu"} if is_fast else {}
    captured_op = {"graph": GraphSupport.NONE, **backend} if is_fast else {}
    formats = {"cache_format": FP8_E4M3, "dtype": torch.float32, "fp8_mode": "fp8_query"}
    batch = make_batch([1, 2, 3], [20, 33, 16])
    common, decodes = batch.common, make_batch([1, 1], [20, 33])
    cache = new_cache(batch, DIRECT.head_size, torch.float32)
    eighths = torch.ones(cache.shape).to(E4M3)
    # this scale is so small that no quotient (element of a cache entry / scale) is rounded to 0
    in_eighths = {"cache_format": FP8_E4M3, "kv_scale": torch.tensor(2.0**-8)}
    plan = ops.build_mla_metadata(common, 16, 4096, 8).decode
    schedule = ops.plan_decode(plan.seq_lens, 2)
    prefill = ops.build_mla_metadata(make_batch([2, 3], [33, 40]).common, 16, 64).prefill
    prefill_cache = torch.randn(8, 16, DIRECT.head_size)
    unscaled = {"kv_scale": None}
    scale, scales = torch.tensor(0.5), torch.full((3,), 0.5)
    to_e4m3 = {"output_scale": scale, "output_block_scale": None}
    w_uk, w_uv = make_up_projections(DIRECT, torch.float32)
    ql_nope, q_pe = torch.randn(6, 3, 24), torch.randn(6, 3, 8)
    ownership = TokenOwnership(2, 0, 2)
    ranks = ops.simulate(1, 1, lambda ranks: ranks)[0]
    shared = ops.plan_context_chunks(integers(20, 0, 33), 128, 16, 2, 2)[0]
    shared = ops.rank_local_chunk(shared, ownership)
    alone = ops.rank_local_chunk(ops.plan_context_chunks(integers(31, 37), 128, 16)[0], TokenOwnership(1, 0))
    weights = make_weights(DIRECT, torch.float32)
    modules = {name: linear(x) if x.dim() == 2 else norm(x) for name, x in weights.items()}
    layer = make_layer(ops, DIRECT, weights, torch.float32)
    step = make_batch([1, 1, 5, 7], [20, 33, 40, 7])
    step_plan = ops.build_mla_metadata(step.common, 16, 64)
    step_plan = dataclasses.replace(step_plan, schedule=ops.plan_decode(step_plan.decode.seq_lens, 2))
    step_cache = torch.randn(step.num_blocks, 16, DIRECT.head_size)
    hidden, positions = torch.randn(14, DIRECT.hidden_size), torch.arange(14)
    growing = make_batch([1, 2, 3], [20, 33, 17])  # each request already has the block of its next token
    prefix = make_batch([1, 1], [40, 40])
    table = prefix.common.block_table.clone()
    table[1, :2] = table[0, :2]
    prefix = dataclasses.replace(prefix.common, block_table=table)
    prefix_plan = ops.build_mla_metadata(prefix, 16, 64).decode
    cascade = ops.split_shared_prefix(prefix_plan, 32, 16)
    builder = ops.MLAMetadataBuilder(DIRECT, 16, 4096, 8, num_programs=2)
    captured = builder.build_for_cudagraph_capture(decodes.common)

    def run_step(hidden_states, positions, metadata):
        return hidden_states

    graph = ops.DecodeGraph(run_step, builder, (2, 4), 8, DIRECT.hidden_size, torch.float32, CPU)

    def state():
        return AttentionState(torch.randn(6, 4, 5), torch.randn(4, 6))

    absorbed = dict(ql_nope=ql_nope, q_pe=q_pe, kv_cache=cache, metadata=plan, softmax_scale=0.3)
    expanded = dict(q=torch.randn(5, 3, 20), k_nope=torch.randn(5, 3, 12), k_pe=torch.randn(5, 8),
                    v=torch.randn(5, 3, 10), metadata=prefill)  # fmt: skip
    context = prefill.context_chunks[0]
    keys = context.num_tokens
    slots = dict(query_start_loc=common.query_start_loc, seq_lens=common.seq_lens, block_table=common.block_table,
                 block_size=16, num_tokens=6)  # fmt: skip

    def out(*shape, dtype=torch.float32):
        return {"out": torch.zeros(*shape).to(dtype)} if is_fast else {}

    def stored(*shape):
        return (1 + torch.rand(shape)).to(E4M3)  # numbers from 1 to 2

    def weight(*shape):
        return QuantizedWeight(stored(*shape), scales.clone())

    def call(name: str, /, hidden=None, **arguments: Any) -> Call:
        target: Any = ops
        for part in name.split("."):
            target = getattr(target, part)
        return Call(name, target, with_dtypes(target, arguments), hidden or {})

    def with_dtypes(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        names = inspect.signature(function).parameters
        values = {"cache_format": COMPUTE_FORMAT, "out_dtype": torch.float32}
        return {name: value for name, value in values.items() if name in names} | arguments

    def method(owner: Any, name: str, /, **arguments: Any) -> Call:
        return Call(f"{type(owner).__name__}.{name}", getattr(owner, name), arguments)

    calls = [
        # attention
        call("flash_attn_varlen", q=torch.randn(6, 3, 8), k=torch.randn(7, 3, 8), v=torch.randn(7, 3, 5),
             cu_seqlens_q=offsets([4, 2]), cu_seqlens_k=offsets([5, 2]), max_seqlen_q=4, max_seqlen_k=5,
             softmax_scale=0.3, causal=True, out_dtype=torch.float32,
             **({"batch_invariant": False} if is_fast else {}), **backend),
        call("merge_attn_states", prefix=state(), suffix=state(), **to_e4m3,
             **({"out": AttentionState(stored(6, 4, 5), torch.randn(4, 6))} if is_fast else {}), **captured_op),
        call("mla_decode", **absorbed, schedule=schedule, out_dtype=torch.float32, **unscaled, fp8_mode=CONVERTED,
             q_scale=None, **out(6, 3, 24), **backend),
        Call("mla_decode of queries in e4m3", ops.mla_decode, absorbed | dict(ql_nope=stored(6, 3, 24),
             q_pe=stored(6, 3, 8), kv_cache=eighths, schedule=schedule, out_dtype=torch.float32, **in_eighths,
             fp8_mode="fp8_product", q_scale=scales) | out(6, 3, 24) | backend),
        call("cascade_attention", ql_nope=stored(2, 3, 24), q_pe=stored(2, 3, 8), kv_cache=stored(12, 16, 32),
             metadata=cascade, softmax_scale=0.3, **in_eighths, fp8_mode="fp8_query", q_scale=scales,
             out_dtype=torch.float32, **backend),
        call("forward_prefill", q=torch.randn(5, 3, 20), kv_c_normed=torch.randn(5, 24), k_pe=torch.randn(5, 8),
             kv_cache=prefill_cache, metadata=prefill, w_uk=w_uk, w_uv=w_uv, softmax_scale=0.3,
             gather=ops.gather_context, return_lse=True, **unscaled, **to_e4m3,
             expand=lambda latents: ops.expand_kv(latents, w_uk, w_uv), workspace=ops.ContextWorkspace(),
             **out(5, 3, 10, dtype=E4M3), **backend),
        call("run_prefill_new_tokens", **expanded, softmax_scale=0.3, return_lse=True, **out(5, 3, 10), **backend),
        call("run_prefill_context_chunk", **expanded | dict(k_nope=torch.randn(keys, 3, 12),
             k_pe=torch.randn(keys, 8), v=torch.randn(keys, 3, 10)), chunk=context, softmax_scale=0.3, **backend),
        call("gather_context", kv_cache=stored(*prefill_cache.shape), metadata=prefill, chunk=context, **in_eighths,
             workspace=torch.zeros(keys, 32), **backend),
        call("ContextWorkspace", memory=torch.zeros(100)),
        method(ops.ContextWorkspace(), "reserve", elements=100, dtype=torch.float32, device=CPU),
        call("context_workspace_size", config=DIRECT, workspace_tokens=64, context_parallel_size=2),
        # rotary, weights, norms
        call("apply_rope", positions=torch.arange(6), q_pe=torch.randn(6, 3, 8), k_pe=torch.randn(6, 8),
             rope=RopeConfig(yarn=YARN), q_scale=scales, **({"frequencies": torch.rand(4)} if is_fast else {}),
             **captured_op),
        call("rotary_cos_sin", positions=torch.arange(6), rope=RopeConfig(yarn=YARN), dim=8, dtype=torch.float32),
        call("rotary_frequencies", rope=RopeConfig(yarn=YARN), dim=8, dtype=torch.float32),
        call("rotate", x=torch.randn(6, 3, 8), cos=torch.randn(6, 4), sin=torch.randn(6, 4), interleaved=True),
        call("absorb", w_uk=w_uk, w_uv=w_uv),
        call("dense_weight", linear=modules["kv_b_proj"], in_features=24, dtype=torch.float32),
        call("is_plain_linear", linear=modules["kv_b_proj"], dtype=torch.float32),
        call("split_kv_b_proj", kv_b_weight=torch.randn(66, 24), num_heads=3, qk_nope_head_dim=12, v_head_dim=10),
        call("query_to_latent", q_nope=torch.randn(6, 3, 12), w_uk_t=torch.randn(3, 12, 24), q_scale=scales, **backend),
        call("latent_to_value", latent=torch.randn(6, 3, 24), w_uv=torch.randn(3, 24, 10), output_scale=None,
             output_block_scale=None, **out(6, 3, 10), **backend),
        Call("query_to_latent of a weight in e4m3", ops.query_to_latent,
             dict(q_nope=torch.randn(6, 3, 12), w_uk_t=weight(3, 12, 24), q_scale=None) | backend),
        Call("latent_to_value of a weight in e4m3", ops.latent_to_value,
             dict(latent=torch.randn(6, 3, 24), w_uv=weight(3, 24, 10)) | to_e4m3 | out(6, 3, 10, dtype=E4M3)
             | backend),
        call("quantize_weight", weight=torch.randn(3, 12, 24), per_head=False,
             **({"out": QuantizedWeight(stored(3, 12, 24), scale.clone())} if is_fast else {})),
        call("expand_kv_by_module", kv_c_normed=torch.randn(6, 24), kv_b_proj=modules["kv_b_proj"], num_heads=3,
             qk_nope_head_dim=12, v_head_dim=10),
        call("expand_kv", kv_c_normed=torch.randn(6, 24), w_uk=w_uk, w_uv=w_uv, workspace=torch.zeros(256 + 180)),
        call("rms_norm", x=torch.randn(6, 24), weight=torch.rand(24), eps=1e-6),
        # cache
        call("allocate_kv_cache", num_blocks=3, block_size=16, head_size=32, dtype=torch.float32, device=CPU,
             num_layers=2, layout="blocks_first"),
        call("kv_cache_shape", num_blocks=3, block_size=16, head_size=32, num_layers=2),
        call("stride_order", include_layers=True, layout="blocks_first"),
        call("infer_global_hyperparameters", layers={"first": DIRECT, "second": layer}),
        call("concat_and_cache_mla", kv_c_normed=torch.randn(6, 24), k_pe=torch.randn(6, 8), kv_cache=eighths,
             slot_mapping=common.slot_mapping, **in_eighths, **captured_op),
        call("gather_and_maybe_dequant_cache", kv_cache=eighths, block_table=common.block_table,
             cu_seq_lens=offsets([20, 3, 0]), starts=integers(0, 16, 0), num_tokens=23, **in_eighths, **out(23, 32),
             **({"bounded": False} if is_fast else {}), **backend),
        call("quantize_entries", kv_c_normed=torch.randn(6, 24), k_pe=torch.randn(6, 8), **in_eighths, **backend),
        call("dequantize_entries", entries=eighths[0], **in_eighths, **out(16, 32), **backend),
        call("copy_blocks", kv_caches=list(torch.randn(2, 4, 2, 3)), block_mapping=torch.tensor([[0, 1]]), **backend),
        call("swap_blocks", source=torch.randn(4, 2, 3), target=torch.randn(5, 2, 3),
             block_mapping=torch.tensor([[0, 4]]), source_scale=torch.tensor(0.5), target_scale=torch.tensor(0.5),
             **backend),
        # batches and plans
        call("slot_mapping", **slots),
        call("advance_step", sampled_token_ids=torch.tensor([5, 6, 7]), input_ids=torch.arange(6),
             positions=torch.arange(6), common=growing.common, block_size=16, ownership=TokenOwnership(1, 0),
             max_seq_len=4096, **captured_op),
        call("split_decodes_and_prefills", common=common, decode_threshold=2, require_uniform=True),
        call("reorder_batch_to_split_decodes_and_prefills", decodes=torch.tensor([False, True, True])),
        call("make_local_attention_virtual_batches", common=common, attention_chunk_size=32, block_size=16),
        call("choose_path", query_len=4, context_len=100, config=DIRECT, costs=PathCosts(), dtype=torch.float32),
        call("choose_paths", query_lens=integers(1, 9), context_lens=integers(5, 100), decode_threshold=1,
             config=DIRECT, costs=PathCosts(), query_len_support=QueryLenSupport.VARLEN, dtype=torch.float32),
        call("plan_context_chunks", context_lens=integers(20, 0, 33), workspace_tokens=64, block_size=16,
             context_parallel_size=1, interleave=1, batch_invariant=True),
        call("plan_chunk_runs", chunks=ops.plan_context_chunks(integers(20, 0, 33), 64, 16),
             query_start_loc=integers(0, 2, 3, 7)),
        call("plan_decode", seq_lens=integers(20, 0, 33), num_programs=2, costs=ScheduleCosts(), batch_invariant=False,
             **({"graph": GraphSupport.NONE} if is_fast else {}), **backend),
        call("plan_captured_decodes", common=decodes.common, block_size=16, num_programs=2, costs=ScheduleCosts(),
             batch_invariant=False, ownership=None, graph=GraphSupport.ANY, cache_format=FP8_E4M3,
             fp8_mode="fp8_query", **backend),
        call("compute_visible_lens", query_start_loc=common.query_start_loc, seq_lens=common.seq_lens, num_tokens=8,
             ownership=ownership, **captured_op),
        call("choose_schedule", seq_lens=integers(20, 0, 3300), num_programs=2, costs=ScheduleCosts(),
             batch_invariant=False),
        call("rank_local_chunk", chunk=ops.plan_context_chunks(integers(20, 0, 33), 128, 16, 2, 2)[0],
             ownership=ownership),
        call("clamp_context_chunk", chunk=ops.plan_context_chunks(integers(20, 0, 33), 128, 16)[0],
             context_lens=integers(18, 0, 33)),
        call("chunked_prefill_workspace_size", max_model_len=4096, max_num_seqs=8, block_size=16,
             context_parallel_size=2, interleave=2),
        call("reorder_batch_threshold", query_len_support=QueryLenSupport.VARLEN, num_speculative_tokens=2),
        call("common_prefix_len", common=prefix, block_size=16),
        call("use_cascade_attention", common_prefix_len=32, query_lens=integers(1, 1), seq_lens=integers(40, 40),
             config=DIRECT, dtype=torch.float32, costs=CascadeCosts()),
        call("split_shared_prefix", metadata=prefix_plan, common_prefix_len=32, block_size=16, row=1),
        call("build_mla_metadata", common=step.common, block_size=16, workspace_tokens=64, decode_threshold=2,
             config=DIRECT, costs=PathCosts(), query_len_support=QueryLenSupport.VARLEN,
             require_order=False, ownership=None, num_programs=2, schedule_costs=ScheduleCosts(),
             batch_invariant=False, **formats, **({"staging": None, **backend} if is_fast else {})),
        call("CommonAttentionMetadata.make", query_start_loc_cpu=integers(0, 1, 3), seq_lens_cpu=integers(4, 2),
             block_table=torch.zeros(2, 1, dtype=torch.int32), slot_mapping=torch.arange(3), block_size=16),
        call("CommonAttentionMetadata.from_lens", query_lens=[1, 2], seq_lens=integers(4, 2),
             block_table=torch.zeros(2, 1, dtype=torch.int32), block_size=16, ownership=ownership),
        # context parallelism
        call("get_dcp_local_seq_lens", seq_lens=integers(20, 0, 33), context_parallel_size=2, rank=1, interleave=2),
        call("dcp_slot_mapping", **slots, context_parallel_size=2, rank=1, interleave=2),
        call("dcp_wire_bytes", num_tokens=4, num_heads=16, kv_lora_rank=24, qk_rope_head_dim=8,
             context_parallel_size=2, merge="a2a", element_size=2, lse_size=4, query_size=1),
        call("dcp_gather_bytes", padded_tokens=4, kv_lora_rank=24, qk_rope_head_dim=8, context_parallel_size=2,
             cache_format=COMPUTE_FORMAT, dtype=torch.float32),
        call("reorg_kvcache", gathered=torch.randn(2, shared.padded_tokens, 32), chunk=shared,
             **out(shared.num_tokens, 32), **backend),
        call("dcp_gather_context", kv_cache=stored(*prefill_cache.shape), metadata=prefill, chunk=alone,
             context_parallel=ranks, **in_eighths, workspace=torch.zeros(2 * alone.padded_tokens, 32), **backend),
        call("cp_lse_ag_out_rs", state=state(), group=ranks.cp_group, **captured_op),
        call("cp_lse_a2a", state=state(), group=ranks.cp_group, **captured_op),
        call("dcp_decode", **absorbed | dict(kv_cache=eighths), context_parallel=ranks, schedule=schedule,
             out_dtype=torch.float32, **in_eighths, fp8_mode=CONVERTED, q_scale=None, **backend),
        call("verify_group", context_parallel=ranks),
        call("simulate", context_parallel_size=1, interleave=1, program=lambda ranks: None, tensor_parallel_size=2,
             merge="a2a"),
        # layer, builder, graph
        call("MLAAttention", config=DIRECT, **modules, workspace_tokens=64, context_parallel=ranks,
             cache_format=FP8_E4M3, workspace=ops.ContextWorkspace(),
             kv_scale=0.5, fp8_weights=True, fp8_mode="fp8_query", q_scale=0.5, expand_by_module=True,
             **({"check_every_call": False} if is_fast else {}), **backend),
        # scales of caches
        call("KVScale", value=0.5, source=ScaleSource.CHECKPOINT, device=CPU, name="k_scale"),
        method(ops.KVScale(), "choose", value=0.5, source=ScaleSource.CHECKPOINT),
        call("QueryScale", value=torch.ones(3), num_heads=3, source=ScaleSource.CHECKPOINT, device=CPU),
        method(ops.QueryScale(0.5, 3), "choose", value=0.5, source=ScaleSource.CHECKPOINT),
        Call("CalibratedScales", ops.CalibratedScales,
             {name: {"first": 0.5} for name in ("caches", "queries", "cached_values")},
             {name: "dict | None" for name in ("caches", "queries", "cached_values")}),
        Call("calibrate_kv_scales", lambda layers: ops.calibrate_kv_scales(layers).__enter__(),
             {"layers": {"first": layer}}, {"layers": "Mapping"}),
        # The malformed value named "a str" is "text", which is a valid path. The calls of `save_kv_scales` come first,
        # and one of them writes a file at this path. So the call of `load_kv_scales` with this path finds a file.
        Call("save_kv_scales", in_folder(ops.save_kv_scales),
             dict(path="scales.json", scales={"first": 0.5}, cache_format=FP8_E4M3), {"scales": "dict"}),
        Call("load_kv_scales", in_folder(ops.load_kv_scales), dict(path="scales.json", cache_format=FP8_E4M3)),
        method(layer, "forward", hidden_states=hidden, positions=positions, kv_cache=step_cache, metadata=step_plan),
        method(layer, "project", hidden_states=hidden, positions=positions),
        method(layer, "forward_attention", q=torch.randn(14, 3, 20), kv_c_normed=torch.randn(14, 24),
               k_pe=torch.randn(14, 8), kv_cache=step_cache, metadata=step_plan,
               output=torch.zeros(14, 3, 10).to(E4M3), **to_e4m3),
        call("MLAMetadataBuilder", config=DIRECT, block_size=16, max_model_len=4096, max_num_seqs=8,
             query_len_support=QueryLenSupport.VARLEN, num_speculative_tokens=0, costs=PathCosts(), num_programs=2,
             batch_invariant=False, workspace_tokens=1024, context_parallel=ranks, schedule_costs=ScheduleCosts(),
             **formats, graph_support=GraphSupport.ANY, cascade_costs=CascadeCosts(), **backend),
        method(builder, "build", common_prefix_len=32, common=prefix, fast_build=False),
        method(builder, "build_for_cudagraph_capture", common=decodes.common),
        method(builder, "update_captured", captured=captured, common=decodes.common),
        method(builder, "can_run_in_cudagraph", common=decodes.common),
        method(builder, "reorder_batch", query_lens=integers(9, 1), context_lens=integers(5, 100)),
        call("DecodeGraph", step=run_step, builder=builder, batch_sizes=(2, 4), max_blocks=8,
             hidden_size=DIRECT.hidden_size, dtype=torch.float32, device=CPU, query_len=1, layers=[]),
        method(graph, "run", hidden_states=torch.randn(2, DIRECT.hidden_size), positions=torch.arange(2),
               common=decodes.common),
        # classes whose constructor checks the fields
        call("CacheFormat", **{field.name: getattr(FP8_DS_MLA, field.name)
                               for field in dataclasses.fields(FP8_DS_MLA)}),
        call("InvariantSplitRule", small_tiles=4, small_splits=32, large_tiles=16, max_splits=128),
        call("ScheduleCosts", request_cost=5, split_cost=1, split_rule=InvariantSplitRule(4, 32, 16, 128),
             invariant_starts=4,
             splits_per_tile=10),
        call("MLAConfig", **{name: getattr(DIRECT, name) for name in inspect.signature(MLAConfig).parameters}),
        call("MLAConfig.from_preset", name="deepseek-v3"),
        call("MLAConfig.from_hf", config=hf_config()),
        Call("MLAConfig.from_hf of plain rope", MLAConfig.from_hf, dict(config=HFConfig())),
        call("RopeConfig", theta=10000.0, interleaved=True, yarn=YARN),
        call("YarnConfig", factor=40.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0,
             mscale=0.7, mscale_all_dim=1.0),
        call("PathCosts", absorbed_request=1.0, expanded_request=1.0, expanded_context=1.0, absorbed_flop=1.0,
             expanded_flop=1.0, projection_flop=1.0, byte=200.0),
        call("CascadeCosts", flops_per_byte=100, kernel_bytes=3),
        call("TokenOwnership", size=2, rank=1, interleave=2),
        method(ownership, "count", num_tokens=33),
        call("ContextParallel", cp_group=ranks.cp_group, tp_group=ranks.tp_group, interleave=1, merge="a2a"),
        method(ranks, "local_heads", num_heads=3),
        method(ranks, "local_config", config=DIRECT),
        method(ranks, "gathered_heads", num_heads=3),
    ]  # fmt: skip
    more = [
        lambda: contract_calls(ops, Call, call),
        lambda: op_calls(ops, Call, call, backend, captured_op),
        lambda: planning_calls(ops, Call, call, backend, captured_op),
        lambda: calls_of_fast(call, method, backend, graph) if is_fast else [],
    ]
    for make_group in more:
        if any(each.name == last for each in calls):
            break
        calls += make_group()
    return calls


def calls_of_fast(call: Callable[..., Call], method: Callable[..., Call], backend: dict, graph: Any) -> list[Call]:
    """Return calls that succeed for the public names that only `fast` has."""
    from fast import backends
    from fast.demo.blocks import BlockAllocator
    from fast.demo.serving import ServingLoop

    def within(module: str, name: str, /, **arguments: Any) -> Call:
        return Call(
            f"{module.rpartition('.')[2]}.{name}", getattr(importlib.import_module(f"fast.{module}"), name), arguments
        )

    formats = dict(cache_format=FP8_E4M3, fp8_mode="fp8_query")
    served = dict(config=DIRECT, device=CPU, dtype=torch.float32, block_size=16)
    allocator = BlockAllocator(8)
    taken = allocator.allocate(2)
    calls = [
        call("decode_programs", **served, query_len=1, **formats, **backend),
        call("schedule_costs", **served, **formats, **backend),
        Call("warmup", importlib.import_module("fast").warmup, dict(
            **served, decode_threshold=1, batch_invariant=False, context_parallel=None,
            **formats, fp8_weights=False, fp8_output=False, threads=1, progress=False, **backend), runs=False),
        method(graph, "replay", size=2),
        within("backends", "explain", **served, **formats, **backend),
        within("backends", "select", request=backends.KernelRequest("merge_attn_states", CPU, torch.float32),
               **backend),
        within("demo.blocks", "BlockAllocator", num_blocks=4, order=[3, 1, 0, 2]),
        method(allocator, "allocate", count=0),
        Call("BlockAllocator.free", lambda blocks: allocator.free(blocks), {"blocks": []}, {"blocks": "Iterable[int]"}),
    ]  # fmt: skip
    assert len(taken) == 2
    model = tiny_model()
    if model is None:
        return calls
    import fast
    from fast.integrations.transformers import restore, use_mla

    config = MLAConfig.from_hf(model.config)
    loop = dict(model=model, config=config, ops=fast, num_blocks=16, block_size=8, max_num_seqs=4, token_budget=16,
                workspace_tokens=64, decode_threshold=1, eos=3, block_order=list(range(16)),
                costs=PathCosts(), context_parallel=None)  # fmt: skip
    serving = ServingLoop(**loop)
    return [
        *calls,
        Call("serving.ServingLoop", ServingLoop, loop),
        method(serving, "add", prompt_ids=[1, 2, 3], max_new_tokens=2),
        Call("transformers.use_mla", lambda **options: restore(use_mla(**options)),
             dict(model=model, ops=fast, block_size=64, workspace_tokens=128, decode_threshold=1, costs=PathCosts(),
                  context_parallel=None),
             dict(model="PreTrainedModel", ops="ModuleType", block_size="int", workspace_tokens="int | None",
                  decode_threshold="int", costs="PathCosts | None", context_parallel="ContextParallel | None")),
        Call("transformers.restore", lambda model: use_mla(restore(model)),
             dict(model=use_mla(tiny_model())), dict(model="PreTrainedModel")),
    ]  # fmt: skip


FOLDER = tempfile.TemporaryDirectory()


def in_folder(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function` in a temporary folder, so that relative paths are in this folder."""

    @functools.wraps(function)
    def call(**arguments):
        with contextlib.chdir(FOLDER.name):
            return function(**arguments)

    return call


# Calls with malformed arguments.


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, in its fields and in its items; skip sparse, nested, quantised and meta tensors."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided and not (value.is_nested or value.is_quantized or value.is_meta):
            yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name, None))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


class TooLong(BaseException):
    """Raised if a call exceeds `SECONDS_A_CALL`."""


def outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[str, str]:
    """Make a call; return the type and the message of its exception, or ("", "") if the call succeeded."""

    def stop(*_):
        raise TooLong

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS_A_CALL)
    try:
        function(**arguments)
    except BaseException as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        kind = "refused" if kinds & {"ValueError", "TypeError"} else type(error).__name__
        if kind == "refused" and error.__traceback__ is not None:
            kind = type(error).__name__
        return kind, str(error)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return "", ""


def annotations_of(call: Call) -> dict[str, str]:
    """Return the annotation of every argument as text, from `call.hidden` or else from the signature."""
    found = dict(call.hidden)
    for name, parameter in inspect.signature(call.function).parameters.items():
        if name not in found and name in call.arguments:
            found[name] = str(parameter.annotation)
    return found


def report(ops: ModuleType) -> dict[str, Any]:
    """Make every call of a package with every malformed value, and return the result of `report_of`."""
    return report_of(valid_calls(ops), lambda last: valid_calls(ops, last))


def report_of(made: list[Call], make: Callable[[str], list[Call]] | None = None) -> dict[str, Any]:
    """Make every call with every malformed value.

    Args:
        made: calls that succeed.
        make: function that returns the same calls with new arguments, at least up to the call with the given name. It
            is called after a call that wrote to its arguments.

    Returns:
        A dictionary with three entries:

        - "failed": mapping from names to errors, for the calls in `made` that raised an error
        - "arguments": mapping from the name of a call to the names of its arguments
        - "calls": one row for each malformed call, with seven items: name of the call, path of the replaced argument or
          field, name of the malformed value, whether this value has the right type, type of the error ("" without an
          error), message of the error, whether a tensor was written before the error
    """
    failed, rows = {}, []
    arguments = {call.name: list(call.arguments) for call in made}
    for index, name in enumerate(arguments):
        call = made[index]
        if call.runs:
            kind, message = outcome(call.function, call.arguments)
            if kind:
                failed[name] = f"{kind}: {message}"
                continue
        annotations = annotations_of(call)
        kept_arguments = [(tensor, tensor.clone()) for good in call.arguments.values() for tensor in tensors_of(good)]
        for argument, good in call.arguments.items():
            for path, label, value, well in malformed(annotations[argument], good):
                if well and not call.runs:
                    continue
                given = call.arguments | {argument: value}
                kept = [(tensor, tensor.clone()) for other in given.values() for tensor in tensors_of(other)]
                kind, message = outcome(call.function, given)
                written = bool(kind) and not all(same_bits(tensor, was) for tensor, was in kept)
                rows.append((name, argument + path, label, well, kind, message, written))
                if (not kind or written) and make is not None and writes(call):  # the next call needs the old arguments
                    if has_state(call):
                        fresh = make(name)
                        made[: len(fresh)] = fresh
                        call = made[index]
                    else:
                        for tensor, was in kept_arguments:
                            tensor.copy_(was)
    return {"failed": failed, "arguments": arguments, "calls": rows}


def has_state(call: Call) -> bool:
    """Return whether a call may change more than tensors of its arguments: an object's state, such as a scale's."""
    states = [call.function, *call.arguments.values()]
    return any(inspect.ismethod(each) or isinstance(each, nn.Module | ContextWorkspace) for each in states)


def writes(call: Call) -> bool:
    """Return whether a call writes to its arguments when it succeeds."""
    return bool({"kv_cache", "kv_caches", "target", "output", "out", "workspace", "input_ids"} & set(call.arguments))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    json.dump(report(importlib.import_module(sys.argv[1])), sys.stdout)
