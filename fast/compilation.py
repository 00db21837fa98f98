"""Compilation ahead of time: every kernel that a layer can launch is launched once."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util

import torch
from torch import Tensor, nn

from reference.distributed.arguments import check_groups, check_invariant_merge
from reference.distributed.groups import ContextParallel
from reference.distributed.simulation import simulate
from reference.interfaces import (
    COMPUTE_FORMAT,
    MERGES,
    CacheFormat,
    CommonAttentionMetadata,
    DecodeSchedule,
    MLAConfig,
    check,
    check_config,
    check_device,
    check_dtype,
    check_format,
    check_int,
)

from . import backends
from .backends import BackendChoice
from .cache.blocks import copy_blocks, swap_blocks
from .cache.latent import allocate_kv_cache
from .mla.device_choices import DecodeLayer
from .mla.layer import MLAAttention
from .mla.metadata import build_mla_metadata
from .mla.padding_tokens import zero_padding_tokens
from .planning.advance import advance_step
from .planning.decode_schedule import plan_decode
from .planning.visible_lens import compute_visible_lens

LONG_CONTEXT = 16384  # tokens; so many that a decode splits the request and combines partial outputs
# Lengths of the only request of a decode. Splits, row blocks and the combine kernel depend on this length.
ALONE = (64, *(tokens << step for step in range(10) for tokens in (256, 384)))
MANY_REQUESTS = 512  # so many that they fill any GPU; the kernel then does not split a short decode


def warmup(
    config: MLAConfig,
    *,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 64,
    decode_threshold: int = 1,
    batch_invariant: bool = False,
    context_parallel: ContextParallel | None = None,
    cache_format: CacheFormat = COMPUTE_FORMAT,
    backend: BackendChoice = None,
) -> list[str]:
    """Compile every kernel that a layer of these dims can launch, so that no request waits for a compilation.

    The function runs steps of a layer whose projections return zeros: decodes with and without splits and schedules,
    and prefills with and without context. It also advances a batch and copies blocks. Triton stores compiled kernels on
    disk too.

    Args:
        config: configuration of the layer.
        device: device of the layer.
        dtype: dtype of the layer.
        block_size: tokens of a cache block.
        decode_threshold: number of query tokens up to which a request decodes, as in `build_mla_metadata`.
        batch_invariant: whether the decodes of the layer are batch-invariant.
        context_parallel: groups of ranks that share heads and sequences, or None. The processes exchange no data: each
            process simulates all ranks (`simulate`), so each process can call `warmup` alone.
        cache_format: format of the layer's cache.
        backend: the layer's `backend=`: a name, a mapping from op to name, or None (`fast.backends`).

    Returns:
        One line for each kernel that this call compiled, or loaded from Triton's cache on disk.

    Raises:
        ValueError: a size is below 1, the dtype is not supported, or the CUDA device does not exist.
        UnsupportedConfiguration: no backend that `backend` allows can serve an op.
    """
    check_dtype("dtype", dtype)
    check_config(config)
    check_int("block_size", block_size, 1, "at least 1")
    check_int("decode_threshold", decode_threshold, 1, "at least 1")
    check_invariant_merge(None, batch_invariant)
    check_groups(context_parallel)
    check_format(cache_format)
    device = check_device("device", device)
    seen = device.type != "cuda" or (device.index or 0) < torch.cuda.device_count()
    check(seen, "device", f"one of the {torch.cuda.device_count()} CUDA devices that torch sees", device)

    given = (config, device, dtype, block_size, decode_threshold, batch_invariant, cache_format, backends.bind(backend))
    with _compiling_ahead() as compiled:
        if context_parallel is None:
            _launch_all(None, *given)
        else:
            size, total = context_parallel.size, context_parallel.tp_group.size
            for merge in MERGES:
                simulate(size, context_parallel.interleave, lambda ranks: _launch_all(ranks, *given), total, merge)
    return compiled


def _launch_all(
    ranks: ContextParallel | None,
    config: MLAConfig,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    decode_threshold: int,
    batch_invariant: bool,
    cache_format: CacheFormat,
    backend: BackendChoice,
) -> None:
    """Run all kinds of steps on one rank. Without context parallelism, `ranks` is None."""
    num_blocks = -(-LONG_CONTEXT // block_size) + 2
    columns = cache_format.columns(config.kv_lora_rank, config.qk_rope_head_dim)
    kv_cache = allocate_kv_cache(num_blocks, block_size, columns, cache_format.dtype_for(dtype), device).zero_()
    ownership, heads, local = None, config.num_heads, config
    if ranks is not None:
        ownership, heads, local = ranks.ownership, ranks.gathered_heads(heads), ranks.local_config(config)
    projections = _projections_of_zeros(local, dtype, device)
    layer = MLAAttention(config, **projections, context_parallel=ranks, cache_format=cache_format, backend=backend)
    size = 1 if ownership is None else ownership.size
    decoded = DecodeLayer(dataclasses.replace(config, num_heads=heads), device, dtype, block_size, cache_format)
    costs = decoded.programs_and_costs(1, 0, None, backend, batch_invariant=True).costs

    def step(
        query_lens: list[int], seq_lens: list[int], threshold: int = decode_threshold, scheduled: bool = True
    ) -> None:
        common = _batch(query_lens, seq_lens, -(-max(seq_lens) // block_size), num_blocks, device)
        workspace = 4 * block_size * size * len(query_lens)
        plan = build_mla_metadata(common, block_size, workspace, threshold, ownership=ownership)
        tokens = sum(query_lens)
        hidden_states = torch.zeros(tokens, config.hidden_size, dtype=dtype, device=device)
        positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        layer(hidden_states, positions, kv_cache, plan)
        if plan.num_decodes and scheduled:
            programs = decoded.programs_and_costs(
                max(query_lens), None, costs, backend, batch_invariant=False
            ).num_programs
            few_and_many = (1, 16) if len(query_lens) == 1 else ()  # 16: partial outputs to combine
            for count in {programs, *few_and_many} - {0}:
                schedule = plan_decode(plan.decode.seq_lens, count, costs, batch_invariant, backend=backend)
                layer(hidden_states, positions, kv_cache, dataclasses.replace(plan, schedule=schedule))
        if plan.num_decodes and batch_invariant:
            schedule = DecodeSchedule(batch_invariant=True, split_rule=costs.split_rule)
            layer(hidden_states, positions, kv_cache, dataclasses.replace(plan, schedule=schedule))
        # an engine with its own projections calls these two methods instead of `forward`
        projected = layer.project(hidden_states, positions)
        # the rows of a mixed step's prefills may begin at an address that is not a multiple of 16 bytes
        output = hidden_states.new_empty(tokens + 1, local.num_heads, config.v_head_dim)[1:]
        layer.forward_attention(*projected, kv_cache, plan, output)

    # Triton compiles another variant if a stride is divisible by 16; some strides depend on the number of tokens
    for query_len in range(1, decode_threshold + 1):
        for requests in (1, 16):
            step([query_len] * requests, [LONG_CONTEXT] * requests)
        for length in ALONE:
            step([query_len], [max(length, query_len)], scheduled=False)
        for requests in (MANY_REQUESTS, MANY_REQUESTS + 1):
            step([query_len] * requests, [query_len] * requests)
    # `choose_path` may also choose the absorbed path for longer queries.
    # 17 tokens have more than 16 rows with any number of heads.
    longer = max(decode_threshold + 1, 17)
    for requests, length in ((1, LONG_CONTEXT), (16, LONG_CONTEXT), (64, longer)):
        step([longer] * requests, [length] * requests, longer)
    for requests in (300, 1100):
        lens = torch.zeros(requests, dtype=torch.int32, device=device)
        plan_decode(lens, 1, costs, batch_invariant, backend=backend)
    starts = torch.zeros(2, dtype=torch.int32, device=device)  # the ops that only captured batches need
    compute_visible_lens(starts, starts[1:], 1, ownership, backend=backend)
    output = torch.empty(2, local.num_heads, config.v_head_dim, dtype=dtype, device=device)
    zero_padding_tokens(output, starts, backend=backend)
    for long_query in (16 * (decode_threshold // 16 + 1), 2 * decode_threshold + 1):
        for context in (0, 16 * block_size, 3):
            step([long_query], [long_query + context])
    for ids in (torch.int32, torch.int64):
        token = torch.zeros(1, dtype=ids, device=device)
        positions = torch.zeros(1, dtype=torch.int64, device=device)
        common = _batch([1], [1], 2, num_blocks, device)
        advance_step(token, token.clone(), positions, common, block_size, ownership, backend=backend)
    step([long_query] * 3, [long_query, long_query + 3, long_query])  # requests with and without context
    pairs = torch.tensor([[0, 1]], dtype=torch.int64, device=device)
    copy_blocks([kv_cache], pairs, backend=backend)
    swap_blocks(kv_cache, torch.empty_like(kv_cache[:2]), pairs, backend=backend)


def _compiling_ahead():
    """Return a context manager that collects one line for each compiled kernel, or no line if Triton is missing."""
    if importlib.util.find_spec("triton") is None:
        return contextlib.nullcontext([])
    from .kernels.compile_log import compiling_ahead

    return compiling_ahead()


def _batch(
    query_lens: list[int], seq_lens: list[int], columns: int, num_blocks: int, device: torch.device
) -> CommonAttentionMetadata:
    """Return a batch whose requests all have the same cache blocks, and whose tokens are not written to the cache."""
    ends = torch.tensor([0, *query_lens], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
    table = (torch.arange(columns, dtype=torch.int32, device=device) % num_blocks).repeat(len(query_lens), 1)
    slots = torch.full((sum(query_lens),), -1, dtype=torch.int64, device=device)
    return CommonAttentionMetadata.make(ends, torch.tensor(seq_lens, dtype=torch.int32, device="cpu"), table, slots)


class _Zeros(nn.Module):
    """A projection or norm that returns zeros of a given width and computes nothing."""

    def __init__(self, width: int, weight: Tensor):
        super().__init__()
        self.width, self.weight = width, weight

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.width)


def _projections_of_zeros(config: MLAConfig, dtype: torch.dtype, device: torch.device) -> dict[str, nn.Module]:
    """Return the modules of a layer. Only the up-projection has a full weight, because the layer reads this weight."""
    c, kind = config, {"dtype": dtype, "device": device}
    up = nn.Linear(c.kv_lora_rank, c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), bias=False, **kind)
    nn.init.zeros_(up.weight)
    widths = {"kv_a_proj_with_mqa": c.head_size, "o_proj": c.hidden_size}
    norms = {"kv_a_layernorm": c.kv_lora_rank}
    if c.q_lora_rank is None:
        widths["q_proj"] = c.num_heads * c.qk_head_dim
    else:
        widths |= {"q_a_proj": c.q_lora_rank, "q_b_proj": c.num_heads * c.qk_head_dim}
        norms["q_a_layernorm"] = c.q_lora_rank
    modules = {name: _Zeros(width, torch.empty(0, **kind)) for name, width in widths.items()}
    modules |= {name: _Zeros(width, torch.ones(width, **kind)) for name, width in norms.items()}
    return modules | {"kv_b_proj": up}
