"""Tasks for ranks that divide heads and sequences among themselves (decode context parallelism).

Simulated ranks and real processes run the same tasks. A task draws all inputs and weights from a fixed seed. D is the
number of ranks that share a sequence. Each rank in turn keeps I consecutive tokens of the sequence.
"""

from __future__ import annotations

import math
import os
import signal
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference.distributed.groups import ContextParallel
from reference.interfaces import (
    CACHE_FORMATS,
    COMPUTE_FORMAT,
    CONVERTED,
    FP8_E4M3,
    AttentionState,
    CacheFormat,
    CommonAttentionMetadata,
    MLAConfig,
)

from .factories import GARBAGE, LOW_RANK, integers, linear, make_weights, norm, offsets, positions_of
from .format_caches import poisoned_cache
from .processes import serving

VOCABULARY = 50
RANK_CONFIG = replace(LOW_RANK, num_heads=12)
WIDE_RANK_CONFIG = replace(RANK_CONFIG, kv_lora_rank=512, qk_rope_head_dim=64)  # the dims of the format fp8_ds_mla
STEPS = (((40, 40), (5, 5)), ((1, 41), (90, 95)), ((2, 43), (1, 96)), ((3, 46), (60, 156)))
HEAD_DIMENSION = {"q_proj": 0, "q_b_proj": 0, "kv_b_proj": 0, "o_proj": 1}


@dataclass(frozen=True)
class Steps:
    """Requests that grow step by step.

    Attributes:
        lens: for each step and each request, (new tokens, tokens after the step); decodes come first.
        block_size: number of tokens in a block.
        workspace_tokens: largest number of context tokens that a prefill expands at once.
        decode_threshold: largest number of new tokens of a decode; a request with more new tokens is a prefill.
    """

    lens: tuple[tuple[tuple[int, int], ...], ...]
    block_size: int
    workspace_tokens: int
    decode_threshold: int = 1


def owners(length: int, size: int, interleave: int) -> list[int]:
    """Return the rank that keeps each token: rank 0 keeps the first I tokens, rank 1 the next I tokens, and so on."""
    ranks: list[int] = []
    while len(ranks) < length:
        for rank in range(size):
            ranks += [rank] * interleave
    return ranks[:length]


def make_rank_layer(
    ops: ModuleType,
    config: MLAConfig,
    weights: dict[str, Tensor],
    dtype: torch.dtype,
    context_parallel: ContextParallel | None,
    device: str,
    **options,
):
    """Return a layer whose projections have only this rank's heads; `weights` are the weights of all heads."""
    modules = {name: linear(x.to(dtype)) if x.dim() == 2 else norm(x.to(dtype)) for name, x in weights.items()}
    if context_parallel is not None:
        for name in HEAD_DIMENSION.keys() & modules.keys():
            dim = HEAD_DIMENSION[name]
            modules[name] = context_parallel.shard_linear(name, modules[name], dim, config.num_heads)
    modules = {name: module.to(device) for name, module in modules.items()}
    return ops.MLAAttention(config, **modules, context_parallel=context_parallel, **options)


def serve(
    ops: ModuleType,
    config: MLAConfig,
    steps: Steps,
    dtype: torch.dtype = torch.float64,
    context_parallel: ContextParallel | None = None,
    seed: int = 0,
    device: str = "cpu",
    cache_format: CacheFormat = COMPUTE_FORMAT,
    **options,
) -> list[Tensor]:
    """Run a layer over the steps; return the output of each step, [query tokens, hidden size].

    Slots of the cache to which this rank writes no token contain NaN. `options` are options of the layer.
    """
    cp = context_parallel
    ownership = None if cp is None else cp.ownership
    size, rank, interleave = (1, 0, 1) if ownership is None else (ownership.size, ownership.rank, ownership.interleave)
    torch.manual_seed(seed)
    with torch.device("cpu"):
        weights = make_weights(config, torch.float64)
        longest = [max(step[request][1] for step in steps.lens) for request in range(len(steps.lens[0]))]
        hidden = [
            torch.randn(length, config.hidden_size, dtype=torch.float64).to(dtype) for length in longest
        ]  # drawn before the block table, whose size depends on D; so the hidden states are the same for every D
        column_tokens = steps.block_size * size  # a column of the block table is one block on each rank
        columns = [-(-length // column_tokens) for length in longest]
        free = torch.randperm(sum(columns) + 2).tolist()
        table = torch.full((len(longest), max(columns) + 1), GARBAGE, dtype=torch.int32)
        for request, count in enumerate(columns):
            table[request, :count] = integers(*(free.pop() for _ in range(count)))
    layer = make_rank_layer(ops, config, weights, dtype, cp, device, cache_format=cache_format, **options)
    cache = poisoned_cache(sum(columns) + 2, steps.block_size, config, cache_format, dtype, device)

    outputs = []
    for step in steps.lens:
        query_lens, seq_lens = [q for q, _ in step], [s for _, s in step]
        starts, lengths = offsets(query_lens).cpu(), integers(*seq_lens).cpu()
        slots = []
        for request, (query_len, length) in enumerate(step):
            held = 0
            for token, owner in enumerate(owners(length, size, interleave)):
                if token >= length - query_len:
                    block, at = table[request, held // steps.block_size], held % steps.block_size
                    slots.append(int(block) * steps.block_size + at if owner == rank else -1)
                held += owner == rank
        common = CommonAttentionMetadata.make(
            starts, lengths, table.to(device), torch.tensor(slots, dtype=torch.int64, device=device)
        )
        plan = ops.build_mla_metadata(
            common, steps.block_size, steps.workspace_tokens, steps.decode_threshold, ownership=ownership,
            cache_format=cache_format, fp8_mode=options.get("fp8_mode", CONVERTED),
        )  # fmt: skip
        positions = torch.cat([torch.arange(s - q, s, device=device) for q, s in step])
        new = torch.cat([hidden[request][s - q : s] for request, (q, s) in enumerate(step)]).to(device)
        outputs.append(layer(new, positions, cache, plan))
    return outputs


def make_groups(size: int, interleave: int = 1, merge: str = "a2a") -> ContextParallel:
    """Return this process's groups: `size` consecutive processes share a sequence; all processes divide the heads."""
    world, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return ContextParallel(groups[rank // size], dist.group.WORLD, interleave, merge)


class SmallModel(nn.Module):
    """Model with an embedding and two attention layers; `forward` takes the arguments that a serving loop passes.

    Args:
        ops: package of the layers, `reference` or `fast`.
        config: config of the layers.
        context_parallel: groups of ranks; None for a single rank.
        device: device of the weights.
        dtype: dtype of the weights.
        options: options of the layers, such as `cache_format`. With options, a serving loop finds the layers as in a
            model under `use_mla`, and takes the format of its caches from them.
    """

    def __init__(
        self,
        ops: ModuleType,
        config: MLAConfig,
        context_parallel: ContextParallel | None,
        device: str,
        dtype,
        options: dict[str, Any] | None = None,
    ):
        super().__init__()
        torch.manual_seed(0)
        self.device, self.dtype = torch.device(device), dtype
        self.config = SimpleNamespace(vocab_size=VOCABULARY, max_position_embeddings=4096, num_hidden_layers=2)
        table = torch.randn(2, VOCABULARY, config.hidden_size, dtype=torch.float64)
        self.embedding, self.unembedding = table.to(dtype).to(device)
        self.layers = nn.ModuleList(
            make_rank_layer(
                ops, config, make_weights(config, torch.float64), dtype, context_parallel, device, **(options or {})
            )
            for _ in range(2)
        )
        self.served = nn.ModuleList(nn.Module() for _ in self.layers if options)
        for module, layer in zip(self.served, self.layers, strict=False):
            module.forward = SimpleNamespace(attention=layer)

    def forward(self, ids, position_ids, use_cache, mla_metadata, mla_kv_caches, logits_to_keep):
        hidden = self.embedding[ids[0]]
        for layer, kv_cache in zip(self.layers, mla_kv_caches, strict=True):
            hidden = hidden + layer(hidden, position_ids[0], kv_cache, mla_metadata)
        return SimpleNamespace(logits=(hidden[logits_to_keep] @ self.unembedding.T)[None])


def make_loop(
    ops: ModuleType,
    config: MLAConfig,
    context_parallel: ContextParallel | None,
    device: str,
    dtype,
    shift=0,
    layer_options: dict[str, Any] | None = None,
    **options,
):
    """Return a serving loop over a small model with four waiting requests; `shift` changes the prompt tokens."""
    from fast.demo.serving import ServingLoop

    model = SmallModel(ops, config, context_parallel, device, dtype, layer_options)
    sizes = dict(num_blocks=40, block_size=16, max_num_seqs=4, token_budget=40, workspace_tokens=64)
    loop = ServingLoop(model, config, ops, **sizes | options, context_parallel=context_parallel)
    for request, length in enumerate((70, 9, 33, 5)):
        loop.add([(7 * token + request + shift) % VOCABULARY for token in range(length)], max_new_tokens=12)
    return loop


def die_at(context_parallel: ContextParallel, exchange: int) -> None:
    """Make this process kill itself at the beginning of an exchange.

    Args:
        context_parallel: groups of this process.
        exchange: number of the exchange between ranks; the exchanges of `cp_group` and of `tp_group` are counted
            together, from 1.
    """
    left = [exchange]
    for group in (context_parallel.cp_group, context_parallel.tp_group):
        begin = group._begin

        def counted(operation: str, num_bytes: int, begin=begin) -> None:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            begin(operation, num_bytes)

        group._begin = counted


# Tasks for real processes; the result of a task is pickled.


def exchange_everything(size: int, interleave: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Make the groups of this process and return the results of `everything` for both packages."""
    import fast
    import reference

    ranks = make_groups(size, interleave)
    return everything(ranks, {"reference": reference, "fast": fast}, dtype, device)


def everything(
    ranks: ContextParallel, packages: dict[str, ModuleType], dtype: torch.dtype, device: str
) -> dict[str, Tensor]:
    """Merge fixed attention states, and run the steps of a layer; do both with each of the two merge functions.

    Returns:
        This rank's results by name, on the CPU.
    """
    found = {}
    for name, ops in packages.items():
        for merge, function in (("a2a", ops.cp_lse_a2a), ("ag_rs", ops.cp_lse_ag_out_rs)):
            torch.manual_seed(1000 + ranks.rank)
            with torch.device("cpu"):
                out = torch.randn(9, 12, 20, dtype=torch.float64).to(dtype)
                lse = 5 * torch.randn(12, 9, dtype=torch.float64)
                empty = torch.rand(12, 9) < 0.3
            lse = lse.to(torch.float64 if dtype == torch.float64 else torch.float32).masked_fill(empty, -torch.inf)
            state = AttentionState(out.masked_fill(empty.T[..., None], 0).to(device), lse.to(device))
            merged = function(state, ranks.cp_group)
            found[f"{name} {merge} out"], found[f"{name} {merge} lse"] = merged.out, merged.lse
            steps = Steps(STEPS, 16, 4 * math.lcm(16, ranks.size * ranks.interleave), 2)
            outputs = serve(ops, RANK_CONFIG, steps, dtype, replace(ranks, merge=merge), device=device)
            found |= {f"{name} {merge} step {number}": x for number, x in enumerate(outputs)}
    return {name: x.cpu() for name, x in found.items()}


def serve_and_die(size: int, victim: int | None, exchange: int, device: str, dtype: torch.dtype) -> list[list[int]]:
    """Serve four requests and return the tokens; rank `victim` kills itself at exchange number `exchange`."""
    import fast

    if device == "cuda":  # compiles all kernels, so that no rank waits while another rank compiles
        fast.simulate(size, 4, lambda ranks: make_loop(fast, RANK_CONFIG, ranks, device, dtype).run(),
                      dist.get_world_size())  # fmt: skip
    ranks = make_groups(size, 4)
    loop = make_loop(fast, RANK_CONFIG, ranks, device, dtype)
    if dist.get_rank() == victim:
        die_at(ranks, exchange)
    return [request.generated_ids for request in loop.run()]


def generate_over_format(
    size: int, interleave: int, merge: str, name: str, fp8_mode: str, device: str, dtype: torch.dtype
) -> dict[str, dict[str, list]]:
    """Serve four requests over caches in a format, with both packages: once on one rank and once on all ranks.

    Args:
        size: number of ranks that share a sequence.
        interleave: number of consecutive tokens of a sequence on one rank.
        merge: how the ranks merge their attention states.
        name: name of the cache format.
        fp8_mode: fp8 mode of the decodes.
        device: device of the model.
        dtype: dtype of the model.

    Returns:
        For each package, and for "one rank" and "all ranks": the tokens of the requests, the dtypes of the caches, and
        the scales of the layers with their sources.
    """
    import fast
    import reference

    config = RANK_CONFIG if CACHE_FORMATS[name] is FP8_E4M3 else WIDE_RANK_CONFIG
    options: dict[str, Any] = {"cache_format": CACHE_FORMATS[name], "fp8_mode": fp8_mode}
    options |= {} if fp8_mode == CONVERTED else {"q_scale": 0.05}
    ranks, found = make_groups(size, interleave, merge), {}
    for ops in (reference, fast):
        for who, groups in (("one rank", None), ("all ranks", ranks)):
            loop = make_loop(ops, config, groups, device, dtype, layer_options=options)
            tokens = [request.generated_ids for request in loop.run()]
            scales = [layer.kv_scale for layer in loop.model.layers]
            found[f"{ops.__name__}, {who}"] = {
                "tokens": tokens,
                "dtypes": [str(cache.dtype) for cache in loop.kv_caches],
                "scales": [(scale.value.item(), scale.source.value) for scale in scales if scale is not None],
            }
    return found


def replay_decodes(
    size: int,
    merge: str,
    query_len: int,
    device: str,
    dtype: torch.dtype,
    cache_format: CacheFormat = COMPUTE_FORMAT,
) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """Run three decode steps of a layer, each eagerly and by graph replay.

    `cache_format` is the compute dtype or fp8_e4m3.

    Returns:
        Two values. The first value is a list with the eager and the replayed output of each step, [query tokens, hidden
        size]. For the second value, the bytes of reserved GPU memory are read after each step, and the value is the
        number of different results: 1 if no step changed the reserved memory.
    """
    import fast

    ranks = make_groups(size, 16, merge)
    ownership, tokens = ranks.ownership, 200
    torch.manual_seed(3)
    with torch.device("cpu"):
        weights = make_weights(RANK_CONFIG, torch.float32)
        caches = [torch.randn(40, 16, RANK_CONFIG.head_size) for _ in range(size)]
        table = torch.randperm(40).view(4, 10).int()
    stored = {"kv_scale": 2.0**-5} if cache_format.layer_scale else {}
    layer = make_rank_layer(fast, RANK_CONFIG, weights, dtype, ranks, device, cache_format=cache_format, **stored)
    cache = (caches[ranks.rank] / stored.get("kv_scale", 1.0)).to(cache_format.dtype_for(dtype)).to(device)
    builder = fast.MLAMetadataBuilder(
        RANK_CONFIG, 16, 4096, 4, num_speculative_tokens=query_len - 1, context_parallel=ranks, dtype=dtype,
        cache_format=cache_format,
    )  # fmt: skip
    graph = fast.DecodeGraph(
        lambda *step: layer(*step[:2], cache, step[2]), builder, [2, 4], 10, RANK_CONFIG.hidden_size, dtype, device,
        query_len,
    )  # fmt: skip
    found, held = [], set()
    for step, lens in enumerate(((90, 33, 17), (tokens, 3), (64, 65, 66, 160))):
        torch.manual_seed(step)
        requests = len(lens)
        starts = offsets([query_len] * requests)
        slots = fast.dcp_slot_mapping(starts, integers(*lens), table[:requests], 16, requests * query_len, size,
                                      ownership.rank, ownership.interleave)  # fmt: skip
        common = CommonAttentionMetadata.make(starts, integers(*lens), table[:requests].to(device), slots.to(device))
        hidden = torch.randn(requests * query_len, RANK_CONFIG.hidden_size).to(dtype).to(device)
        positions = positions_of([query_len] * requests, lens).to(device)
        plan = fast.build_mla_metadata(
            common, 16, 4096, query_len, ownership=ownership, cache_format=cache_format
        )  # fmt: skip
        eager = layer(hidden, positions, cache, plan)
        captured = graph.run(hidden, positions, common).clone()
        for _ in range(3):
            graph.run(hidden, positions, common)
        del plan
        held.add(torch.cuda.memory_reserved() if device == "cuda" else 0)
        found.append((eager.cpu(), captured.cpu()))
    return found, len(held)


def serve_for_ever(size: int, device: str, dtype: torch.dtype) -> None:
    """Serve the same requests in an endless loop; a signal ends the process."""
    import fast

    ranks = make_groups(size, 4)
    while True:
        make_loop(fast, RANK_CONFIG, ranks, device, dtype).run()
        serving()


def disagree(facts: dict[str, list]) -> None:
    """Call `verify_group` with groups or arguments that differ between ranks.

    Args:
        facts: mapping from a name to four values, one for each of four ranks. "size" is the number of ranks that share
            a sequence. "interleave" and "merge" are arguments of `ContextParallel`, and all other names are arguments
            of `verify_group`.
    """
    import fast

    mine = {name: values[dist.get_rank()] for name, values in facts.items()}
    twos = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    ones = [dist.new_group([rank]) for rank in range(4)]
    cp_group = ones[dist.get_rank()] if mine.pop("size", 2) == 1 else twos[dist.get_rank() // 2]
    of_groups = {name: mine.pop(name) for name in ("interleave", "merge") if name in mine}
    fast.verify_group(ContextParallel(cp_group, dist.group.WORLD, **of_groups), **mine)


def groups_of_a_mesh() -> tuple[int, int, tuple[int, ...]]:
    """Make groups from a device mesh; return the size, the sum of the ranks and the members of this rank's group."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("others", "context"))
    ranks = ContextParallel(mesh["context"], dist.group.WORLD)
    total = ranks.cp_group.all_reduce(torch.tensor([float(dist.get_rank())]))
    return ranks.size, int(total), ranks.cp_group.members


def disagree_in_a_loop(size: int, options: dict[str, list]) -> list:
    """Run a serving loop with options that differ between ranks, and return the tokens of its requests.

    Args:
        size: number of ranks that share a sequence.
        options: mapping from the name of an option to a list with one value for each rank.
    """
    import fast

    mine = {name: values[dist.get_rank()] for name, values in options.items()}
    loop = make_loop(fast, RANK_CONFIG, make_groups(size), "cpu", torch.float32, **mine)
    return [request.generated_ids for request in loop.run()]
