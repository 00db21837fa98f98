"""Valid calls of the ops and the layer of grouped-query attention (GQA), for `tests.malformed_calls`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from reference.interfaces import FP8_E4M3

from .factories import integers
from .gqa import MQA, gqa_batch, gqa_step, rows_of

CONFIG = dataclasses.replace(MQA, attention_sinks=True)


def op_calls(ops: Any, call_type: type, call: Callable[..., Any], backend: dict, graph: dict) -> list[Any]:
    """Return calls that succeed for the ops over a key/value cache and for the layer.

    Args:
        ops: the package.
        call_type: the class `Call` of `tests.malformed_calls`.
        call: function that makes a `Call` from the name of a function of `ops`, and its arguments.
        backend: the keyword `backend` of functions of `fast`; empty for `reference`.
        graph: the keywords `graph` and `backend` of functions of `fast`; empty for `reference`.
    """
    is_fast = ops.__name__ == "fast"
    ranks = ops.simulate(1, 1, lambda ranks: ranks)[0]
    lens = ((1, 20), (1, 33), (5, 40), (7, 7))

    def batch_of(config: Any, **options: Any) -> Any:
        return gqa_batch(config, lens, dtype=torch.float32, **options)

    stored = batch_of(dataclasses.replace(CONFIG, sliding_window=9), cache_format=FP8_E4M3)
    scales = stored.scales | {"q_scale": torch.tensor(0.01)}
    shared = batch_of(CONFIG, cache_format=FP8_E4M3)
    table = shared.metadata.block_table[:2].clone()
    table[1, 0] = table[0, 0]
    decodes = rows_of(shared.metadata, slice(0, 2))
    cascade = ops.split_shared_prefix(dataclasses.replace(decodes, block_table=table), 16, 16)
    step = batch_of(CONFIG, new_tokens=False)
    layer, plan = ops.GQAAttention(CONFIG, sinks=step.sinks), gqa_step(step, 2)
    plan = dataclasses.replace(plan, schedule=ops.plan_decode(plan.decode.seq_lens, 2))
    out = {"out": torch.zeros(stored.q.shape)} if is_fast else {}
    cascade_out = {"out": torch.zeros(shared.q[:2].shape)} if is_fast else {}
    packed = torch.randn(2, 16, 1, 96)
    lengths = dict(cu_seqlens_q=integers(0, 5, 14), cu_seqlens_k=integers(0, 5, 16), max_seqlen_q=9, max_seqlen_k=11)
    return [
        call("reshape_and_cache", key=stored.new_k, value=stored.new_v, kv_cache=stored.kv_cache,
             slot_mapping=stored.slot_mapping, **stored.scales, **graph),
        call("gqa_paged_attention", q=stored.q, kv_cache=stored.kv_cache, metadata=stored.metadata,
             config=stored.config, sinks=stored.sinks, schedule=ops.plan_decode(stored.metadata.seq_lens, 2),
             out_dtype=torch.float32, **scales, **out, **backend),
        call("gqa_varlen_attention", q=torch.randn(14, 4, 96), k=packed[0], v=packed[1], **lengths, config=CONFIG,
             sinks=torch.randn(4), out_dtype=torch.float32, **out, **backend),
        call("gqa_cascade_attention", q=shared.q[:2], kv_cache=shared.kv_cache, cascade=cascade, config=CONFIG,
             sinks=shared.sinks, out_dtype=torch.float32, **scales, **cascade_out, **backend),
        call("GQAAttention", config=CONFIG, cache_format=FP8_E4M3, context_parallel=ranks, sinks=torch.randn(4),
             k_scale=0.5, v_scale=0.5, q_scale=0.5, **({"check_every_call": False} if is_fast else {}), **backend),
        call_type("GQAAttention.forward", layer.forward,
                  dict(q=step.q, k=step.new_k, v=step.new_v, kv_cache=step.kv_cache, metadata=plan,
                       output=torch.zeros(step.q.shape).to(torch.float8_e4m3fn), output_scale=torch.tensor(0.5))),
        call_type("GQAAttention.descales", ops.GQAAttention(CONFIG, FP8_E4M3, sinks=step.sinks).descales,
                  dict(num_requests=2)),
        *([call_type("check_one_set_of_parameters", ops.backends.check_one_set_of_parameters,
                     dict(layers={"first": CONFIG}, device=torch.device("cpu"), dtype=torch.float32, block_size=16)
                     | backend)] if is_fast else []),
        call_type("copy_blocks of keys and values", ops.copy_blocks,
                  dict(kv_caches=[torch.randn(2, 4, 16, 1, 32)], block_mapping=torch.tensor([[0, 1]])) | backend),
        call_type("swap_blocks of keys and values", ops.swap_blocks,
                  dict(source=torch.randn(2, 4, 16, 1, 32), target=torch.randn(2, 5, 16, 1, 32),
                       block_mapping=torch.tensor([[0, 4]]), source_scale=torch.ones(2), target_scale=torch.ones(2))
                  | backend),
    ]  # fmt: skip
