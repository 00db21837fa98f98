"""Tasks for ranks that divide the heads and sequences of grouped-query attention (decode context parallelism).

Simulated ranks and real processes run the same tasks. A task draws all inputs from a fixed seed. D is the number of
ranks that share a sequence, TP the number of ranks that divide the query heads. Each rank in turn keeps I consecutive
tokens of a sequence.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from reference.distributed.groups import ContextParallel
from reference.interfaces import COMPUTE_FORMAT, CacheFormat, CommonAttentionMetadata
from reference.interfaces.gqa import GQAConfig

from .factories import integers, offsets, table_without_blocks
from .gqa import poisoned_cache
from .gqa_layers import GQAStep, width_of
from .gqa_plans import held
from .ranks import make_groups, owners

BLOCK = 16
# (query tokens, tokens after the step) of each request in each step: prefills, short decodes, a long prefill
STEPS = (
    ((40, 40), (5, 5), (1, 1)),
    ((1, 41), (90, 95), (1, 2)),
    ((2, 43), (1, 96), (1, 3)),
    ((3, 46), (60, 156), (0, 3)),
)


def rank_batch(lens, table: Tensor, ranks: ContextParallel | None) -> CommonAttentionMetadata:
    """Return the batch of a step with the slots of one rank, found by walking over the owner of every token."""
    size, rank, interleave = (1, 0, 1) if ranks is None else (ranks.size, ranks.rank, ranks.interleave)
    slots = []
    for request, (query_len, length) in enumerate(lens):
        local = 0
        for token, owner in enumerate(owners(length, size, interleave)):
            if token >= length - query_len:
                slot = int(table[request, local // BLOCK]) * BLOCK + local % BLOCK
                slots.append(slot if owner == rank else -1)
            local += owner == rank
    query_lens, seq_lens = [q for q, _ in lens], [s for _, s in lens]
    return CommonAttentionMetadata.make(
        offsets(query_lens).cpu(), integers(*seq_lens).cpu(), table,
        torch.tensor(slots, dtype=torch.int64, device=table.device), BLOCK,
    )  # fmt: skip


def free_blocks(
    common: CommonAttentionMetadata, kv_cache: Tensor, config: GQAConfig, ownership
) -> CommonAttentionMetadata:
    """Return the batch after the blocks that a window no longer reaches were freed; their bytes become NaN."""
    if config.sliding_window is None:
        return common
    table, query_lens = common.block_table.clone(), common.query_start_loc_cpu.diff().tolist()
    freed = table_without_blocks(*table.shape)
    for request, (query_len, length) in enumerate(zip(query_lens, common.seq_lens_cpu.tolist(), strict=True)):
        first = held(max(0, length - query_len - config.sliding_window + 1), ownership) if query_len else 0
        for column in range(first // BLOCK):
            if table[request, column] != freed[request, column]:
                kv_cache.view(torch.uint8)[:, int(table[request, column])] = 0xFF
            table[request, column] = freed[request, column]
    common.block_table.copy_(table)
    return common


def serve_gqa(
    ops: ModuleType,
    config: GQAConfig,
    ranks: ContextParallel | None = None,
    dtype: torch.dtype = torch.float64,
    steps=STEPS,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    device: str = "cpu",
    **options,
) -> list[Tensor]:
    """Run a layer over steps; return the outputs [query tokens, query heads of this rank, Dh] of each step.

    Slots of the cache to which this rank writes no token contain NaN. The random numbers are drawn on the CPU, so every
    device gets the same numbers. `options` are options of the layer.
    """
    torch.manual_seed(11)
    size = 1 if ranks is None else ranks.size
    longest = [max(step[request][1] for step in steps) for request in range(len(steps[0]))]
    draw = [
        [torch.randn(length, heads, config.head_dim, dtype=torch.float64).to(device, dtype) for length in longest]
        for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    ]
    sinks = torch.randn(config.num_heads, dtype=torch.float64).to(device, dtype) if config.attention_sinks else None
    columns = [-(-length // (BLOCK * size)) for length in longest]  # a column is one block on each rank
    free = torch.randperm(sum(columns) + 2).tolist()
    table = table_without_blocks(len(longest), max(columns) + 1)
    for request, count in enumerate(columns):
        table[request, :count] = integers(*(free.pop() for _ in range(count)))
    local = config if ranks is None else ranks.local_gqa_config(config)
    heads, kv_heads = slice(None), list(range(config.num_kv_heads))
    if ranks is not None:
        first = ranks.tp_group.rank * local.num_heads
        heads, kv_heads = slice(first, first + local.num_heads), list(ranks.kv_heads(config))
    layer = ops.GQAAttention(config, cache_format, ranks, sinks=sinks, **options)
    cache = poisoned_cache(sum(columns) + 2, BLOCK, local, dtype, cache_format).to(device)
    table = table.to(device)
    builder = ops.GQAMetadataBuilder(
        config, BLOCK, 256, 8, num_speculative_tokens=1, num_programs=3, context_parallel=ranks, dtype=dtype,
        cache_format=cache_format, **({"device": device} if ops.__name__ == "fast" else {}),
    )  # fmt: skip
    outputs = []
    for step in steps:
        common = free_blocks(rank_batch(step, table, ranks), cache, config, builder.ownership)
        q, k, v = (torch.cat([own[s - n : s] for own, (n, s) in zip(each, step, strict=True)]) for each in draw)
        plan = builder.build(0, common)
        outputs.append(layer(q[:, heads].contiguous(), k[:, kv_heads], v[:, kv_heads], cache, plan))
    return outputs


# Tasks for real processes; the result of a task is pickled.


def serve_over_groups(
    size: int,
    interleave: int,
    config: GQAConfig,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    options: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Run the steps of both packages with both merges in this process; return its outputs on the CPU by name.

    `options` are options of the layer, such as `cache_format`.
    """
    import fast
    import reference

    found = {}
    for merge in ("a2a", "ag_rs"):
        ranks = make_groups(size, interleave, merge)
        for ops in (reference, fast):
            outputs = serve_gqa(ops, config, ranks, dtype, device=device, **(options or {}))
            found |= {f"{ops.__name__} {merge} step {number}": x.cpu() for number, x in enumerate(outputs)}
    return found


def replay_gqa_decodes(
    size: int, merge: str, config: GQAConfig, device: str, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Run decode steps of a layer of `fast`, each eagerly and by graph replay; return both outputs of each step."""
    import fast

    ranks = make_groups(size, 4, merge)
    local = ranks.local_gqa_config(config)
    torch.manual_seed(5)
    sinks, table = torch.randn(config.num_heads, dtype=torch.float64), torch.randperm(40).view(4, 10).int()
    keys = torch.randn(size, 2, 40, BLOCK, local.num_kv_heads, config.head_dim, dtype=torch.float64)[ranks.rank]
    layer = fast.GQAAttention(config, context_parallel=ranks, sinks=sinks.to(device, dtype))
    step = GQAStep(local, layer, keys.to(device, dtype), [])
    builder = fast.GQAMetadataBuilder(
        config, BLOCK, 512, 4, num_speculative_tokens=1, context_parallel=ranks, dtype=dtype, device=device
    )
    width, table = width_of(local), table.to(device)
    graph = fast.DecodeGraph(step, builder, [2, 4], 10, width, dtype, torch.device(device), 2, layers=[layer])
    found = []
    for lens in (((2, 90), (1, 33), (2, 17)), ((1, 200), (2, 3)), ((1, 64), (1, 65), (2, 66), (0, 160))):
        common = rank_batch(lens, table[: len(lens)], ranks)
        hidden = torch.randn(common.num_actual_tokens, width, dtype=torch.float64).to(device, dtype)
        positions = torch.zeros(common.num_actual_tokens, dtype=torch.int64, device=device)
        eager = step(hidden, positions, builder.build(0, common))
        found.append((eager.cpu(), graph.run(hidden, positions, common).cpu()))
    return found
