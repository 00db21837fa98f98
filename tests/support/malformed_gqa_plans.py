"""Valid calls of planning and context parallelism of grouped-query attention (GQA), for `tests.malformed_calls`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from reference.interfaces import FP8_E4M3, CascadeCosts, GraphSupport, QueryLenSupport, ScheduleCosts, TokenOwnership

from .factories import integers, make_batch
from .gqa_plans import CROSS, PLAIN, WINDOW, cross_batch


def planning_calls(ops: Any, call_type: type, call: Callable[..., Any], backend: dict, graph: dict) -> list[Any]:
    """Return calls that succeed for the planning functions of this family.

    Args:
        ops: the package.
        call_type: the class `Call` of `tests.malformed_calls`.
        call: function that makes a `Call` from the name of a function of `ops`, and its arguments.
        backend: the keyword `backend` of functions of `fast`; empty for `reference`.
        graph: the keywords `graph` and `backend` of functions of `fast`; empty for `reference`.
    """
    is_fast = ops.__name__ == "fast"
    ranks = ops.simulate(1, 1, lambda ranks: ranks)[0]
    step, decodes = make_batch([1, 1, 5, 7], [20, 33, 40, 7]).common, make_batch([1, 1], [20, 33]).common
    prefix = make_batch([1, 1], [40, 40]).common
    table = prefix.block_table.clone()
    table[1, :2] = table[0, :2]
    prefix = dataclasses.replace(prefix, block_table=table)
    crossing = cross_batch(make_batch([1, 4], [20, 4]), [30, 17], ran=(1,))
    sizes = dict(block_size=16, max_model_len=4096, max_num_seqs=8)
    builder = ops.GQAMetadataBuilder(WINDOW, **sizes, num_programs=2)
    shared = ops.GQAMetadataBuilder(PLAIN, **sizes, num_programs=2)
    crossed = ops.GQAMetadataBuilder(CROSS, **sizes)
    captured = builder.build_for_cudagraph_capture(decodes)
    settings = dict(
        query_len_support=QueryLenSupport.VARLEN, ownership=None, num_programs=2, schedule_costs=ScheduleCosts(),
        cache_format=FP8_E4M3,
    )  # fmt: skip
    plan = ops.build_gqa_metadata(decodes, 16, dataclasses.replace(WINDOW, attention_sinks=True)).decode
    lens = dict(query_start_loc=step.query_start_loc, seq_lens=step.seq_lens)

    def method(owner: Any, name: str, /, title: str = "GQAMetadataBuilder", **arguments: Any) -> Any:
        return call_type(f"{title}.{name}", getattr(owner, name), arguments)

    in_eighths = torch.ones(2, 8, 16, 2, 32).to(torch.float8_e4m3fn)
    scales = {name: torch.tensor(0.25) for name in ("k_scale", "v_scale", "q_scale")}
    return [
        call("compute_first_visible", **lens, num_tokens=16, sliding_window=5, ownership=TokenOwnership(2, 0, 2),
             attention_chunk_size=16, **graph),
        call("build_gqa_metadata", common=step, block_size=16, config=WINDOW, decode_threshold=2, require_order=False,
             **settings, dtype=torch.float32, **backend),
        call_type("build_gqa_metadata of cross attention", ops.build_gqa_metadata,
                  dict(common=crossing, block_size=16, config=CROSS)),
        call("plan_captured_gqa_decodes", common=decodes, block_size=16, config=WINDOW, num_programs=2,
             costs=ScheduleCosts(), batch_invariant=False, ownership=None, graph=GraphSupport.ANY,
             cache_format=FP8_E4M3, **backend),
        call("use_gqa_cascade_attention", common_prefix_len=32, query_lens=integers(1, 1), seq_lens=integers(40, 40),
             config=PLAIN, dtype=torch.float32, num_processors=4, costs=CascadeCosts(kernel_bytes=3)),
        call("GQAMetadataBuilder", config=WINDOW, **sizes, num_speculative_tokens=0, batch_invariant=False,
             context_parallel=ranks, dtype=torch.float32, graph_support=GraphSupport.ANY, cascade_costs=CascadeCosts(),
             **{name: value for name, value in settings.items() if name != "ownership"},
             **({"num_processors": 4, "device": torch.device("cpu")} if is_fast else {}), **backend),
        method(shared, "build", common_prefix_len=32, common=prefix, fast_build=False),
        method(crossed, "build", "GQAMetadataBuilder of cross attention", common_prefix_len=0, common=crossing),
        method(builder, "build_for_cudagraph_capture", common=decodes),
        method(builder, "update_captured", captured=captured, common=decodes),
        method(builder, "can_run_in_cudagraph", common=decodes),
        method(builder, "reorder_batch", query_lens=integers(9, 1), context_lens=integers(5, 100)),
        method(shared, "use_cascade_attention", common_prefix_len=32, query_lens=integers(1, 1),
               seq_lens=integers(40, 40)),
        method(ranks, "local_gqa_config", "ContextParallel", config=PLAIN),
        method(ranks, "kv_heads", "ContextParallel", config=PLAIN),
        call("gqa_dcp_attention", q=torch.randn(2, 4, 32), kv_cache=in_eighths, metadata=plan,
             config=dataclasses.replace(WINDOW, attention_sinks=True), context_parallel=ranks,
             sinks=torch.randn(4), schedule=ops.plan_decode(plan.seq_lens, 2), out_dtype=torch.float32,
             cache_format=FP8_E4M3, **scales, **({"out": torch.zeros(2, 4, 32)} if is_fast else {}), **backend),
    ]  # fmt: skip
