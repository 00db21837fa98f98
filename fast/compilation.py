"""Compile kernels ahead of time: launch once every kernel that a layer can launch.

Triton compiles a kernel at its first launch. During most of the compilation, Triton releases Python's global
interpreter lock. `warmup` therefore launches kernels from several threads, so that several kernels are compiled at the
same time.

docs/glossary.md explains the terms, such as plan, schedule, split and cascade.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import torch
from torch import Tensor, nn

from reference.distributed.arguments import check_groups, check_invariant_merge
from reference.distributed.groups import ContextParallel
from reference.distributed.simulation import simulate, thread_state
from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    E4M3,
    MERGES,
    CacheFormat,
    CommonAttentionMetadata,
    DecodeSchedule,
    MLAConfig,
    MLAMetadata,
    allocate_kv_cache,
    check,
    check_config,
    check_device,
    check_dtype,
    check_flag,
    check_int,
    check_mode_of_format,
    check_type,
)
from reference.interfaces.gqa import GQAConfig

from . import backends
from .backends import OWN_BACKENDS, BackendChoice
from .cache.blocks import copy_blocks, swap_blocks
from .cache.formats import dequantize_entries, quantize_entries
from .kernels.device import device_facts
from .kernels.prescribed_splits import NUMBERS_OF_SPLITS, PARTIAL_DTYPES, prescribe_partial_dtype, prescribe_splits
from .mla.device_choices import DecodeLayer, programs_of_all_variants
from .mla.layer import MLAAttention
from .mla.metadata import build_mla_metadata
from .mla.padding_tokens import zero_padding_tokens
from .mla.prefill_choice import choose_prefill_backend, with_backend
from .planning.advance import advance_step
from .planning.decode_schedule import plan_decode
from .planning.shared_prefix import split_shared_prefix
from .planning.visible_lens import compute_visible_lens

LONG_CONTEXT = 16384  # tokens; a request of this length is split, and its partial outputs are combined
# Lengths (tokens) of a decode of one request. Depending on the length, different kernel variants are launched.
ALONE = (64, *(tokens << step for step in range(10) for tokens in (256, 384)))
MANY_REQUESTS = 512  # this number of short requests fills any GPU, so the kernel does not split them
# Cascades with these numbers of query tokens and of shared prefix tokens launch all variants of the decode kernel.
CASCADE_TOKENS = (2, 3, 7, 16, 32, 64, 128, 256, 512, 513)
CASCADE_PREFIXES = (1, 1024, 8192, 16384)
# Batches with these numbers of tokens launch all variants of the product of heads, whose tiles have 16, 32 or 64 rows.
# The numbers are those of `variant_tokens` of the backend "triton"; this module must not import that function.
PRODUCT_TOKENS = (1, 17, 33)
MOST_THREADS = 4  # more threads are hardly faster, and each thread needs a second to create its own cuBLAS handle

Launch = Callable[[], object]  # a function that runs a layer or an op once


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
    fp8_weights: bool = False,
    fp8_mode: str = CONVERTED,
    fp8_output: bool = False,
    backend: BackendChoice = None,
    threads: int | None = None,
    progress: bool | None = None,
) -> list[str]:
    """Compile every kernel that a layer with this config can launch, so that no request waits for a compilation.

    The function runs a layer whose projections return zeros: decodes with and without splits and schedules, cascades,
    and prefills with and without context and splits. It also runs the ops outside a layer, such as `copy_blocks`. A
    CUDA graph needs no further kernels. Triton also stores compiled kernels on disk. The layer that the function runs
    has the scale 1.0; the function does not set the scale (`KVScale`) of any other layer.

    Args:
        config: configuration of the layer. A `GQAConfig` is an error: the function does not know the kernels of
            grouped-query attention, which are compiled at their first launch.
        device: device of the layer.
        dtype: dtype of the layer.
        block_size: tokens of a cache block.
        decode_threshold: a request with at most this number of query tokens decodes, as in `build_mla_metadata`.
        batch_invariant: whether decodes and prefills of the layer are batch-invariant.
        context_parallel: groups of ranks that share heads and sequences, or None. Each process simulates all ranks
            (`simulate`) and exchanges no data, so a process can call `warmup` alone.
        cache_format: format of the layer's cache.
        fp8_weights: whether the absorbed weights of the layer are in e4m3 (8 bits).
        fp8_mode: fp8 mode of the layer's decodes (`mla_decode`).
        fp8_output: whether calls of `MLAAttention.forward_attention` pass an `output_scale`.
        backend: the layer's `backend=`: a name, a mapping from op to name, or None (`fast.backends`).
        threads: number of threads that launch kernels; None means the number of processor cores, at most
            `MOST_THREADS`. On a CPU or with `context_parallel`, the function uses one thread only.
        progress: whether to show a progress bar on stderr; None shows the bar if stderr is a terminal.

    Returns:
        One line for each kernel that this call compiled or loaded from Triton's cache on disk.

    Raises:
        TypeError: the config is not an `MLAConfig`.
        ValueError: a size or `threads` is below 1, the dtype is not supported, the format does not support the dims of
            the config, or the CUDA device does not exist.
        UnsupportedConfiguration: no backend that `backend` allows can serve an op.
    """
    check_dtype("dtype", dtype)
    if isinstance(config, GQAConfig):
        wanted = "an MLAConfig, because the kernels of grouped-query attention are compiled at their first launch"
        check_type("config", config, MLAConfig, wanted)
    check_config(config)
    check_int("block_size", block_size, 1, "at least 1")
    check_int("decode_threshold", decode_threshold, 1, "at least 1")
    check_invariant_merge(None, batch_invariant)
    check_groups(context_parallel)
    check_flag("fp8_weights", fp8_weights)
    check_flag("fp8_output", fp8_output)
    check_mode_of_format(fp8_mode, cache_format, config)
    device = check_device("device", device)
    seen = device.type != "cuda" or (device.index or 0) < torch.cuda.device_count()
    check(seen, "device", f"one of the {torch.cuda.device_count()} CUDA devices that torch sees", device)
    if threads is None:
        threads = min(MOST_THREADS, os.cpu_count() or 1)
    check_int("threads", threads, 1, "at least 1, or None")
    check(progress is None or isinstance(progress, bool), "progress", "a bool or None", progress)
    formats = cache_format, fp8_weights, fp8_mode, fp8_output, backends.bind_with_environment(backend)
    given = (config, device, dtype, block_size, decode_threshold, batch_invariant, *formats)
    with _of_compile_log("compiling_ahead", []) as compiled, _progress_bar(progress) as bar:
        if context_parallel is None:
            _run(_launches(None, *given), threads if device.type == "cuda" else 1, bar)
        else:
            size, total = context_parallel.size, context_parallel.tp_group.size

            def run_rank(ranks: ContextParallel) -> None:
                _run(_launches(ranks, *given), 1, bar)

            for merge in MERGES:
                simulate(size, context_parallel.interleave, run_rank, total, merge)
    return compiled


class _Bar:
    """Progress bar of a warm-up, which counts launches; this base class shows nothing."""

    def grow(self, launches: int) -> None:
        """Add `launches` to the expected number of launches."""

    def advance(self) -> None:
        """Count one launch."""


@contextlib.contextmanager
def _progress_bar(shown: bool | None) -> Iterator[_Bar]:
    """Yield a progress bar on stderr if `shown` is True, or if it is None and stderr is a terminal."""
    if not (sys.stderr.isatty() if shown is None else shown):
        yield _Bar()
        return
    from rich.console import Console
    from rich.progress import Progress

    class Shown(_Bar):
        def grow(self, launches: int) -> None:
            bar.update(task, total=(bar.tasks[0].total or 0) + launches)

        def advance(self) -> None:
            bar.advance(task)

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("compiling kernels", total=0)
        yield Shown()


def _run(launches: Sequence[Launch], threads: int, bar: _Bar) -> None:
    """Run all launches in `threads` threads; if several launches need the same kernel, one thread compiles it.

    Raises:
        Exception: the first exception that a launch raises; launches that have not begun then do not run.
    """
    bar.grow(len(launches))
    if threads == 1:
        for launch in launches:
            launch()
            bar.advance()
        return
    enter = thread_state()
    with _of_compile_log("share_compilations", None) as shared, ThreadPoolExecutor(threads, "warm-up") as pool:

        def run(launch: Launch) -> None:
            try:
                with enter():
                    launch()
            finally:
                if shared is not None:
                    shared.give_up()
            bar.advance()

        futures = [pool.submit(contextvars.copy_context().run, run, launch) for launch in launches]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _launches(
    ranks: ContextParallel | None,
    config: MLAConfig,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    decode_threshold: int,
    batch_invariant: bool,
    cache_format: CacheFormat,
    fp8_weights: bool,
    fp8_mode: str,
    fp8_output: bool,
    backend: BackendChoice,
) -> list[Launch]:
    """Return launches of all kernels of a layer on one rank; `ranks` is None without context parallelism."""
    num_blocks = -(-LONG_CONTEXT // block_size) + 2
    columns = cache_format.columns(config.kv_lora_rank, config.qk_rope_head_dim)
    kv_cache = allocate_kv_cache(num_blocks, block_size, columns, cache_format.dtype_for(dtype), device).zero_()
    ownership, heads, local = None, config.num_heads, config
    if ranks is not None:
        ownership, heads, local = ranks.ownership, ranks.gathered_heads(heads), ranks.local_config(config)
    projections = _projections_of_zeros(local, dtype, device)
    kv_scale, q_scale = 1.0 if cache_format.layer_scale else None, None if fp8_mode == CONVERTED else 1.0
    layer = MLAAttention(
        config, **projections, context_parallel=ranks, cache_format=cache_format, kv_scale=kv_scale,
        fp8_weights=fp8_weights, fp8_mode=fp8_mode, q_scale=q_scale, backend=backend,
    )  # fmt: skip
    size, processors = 1 if ownership is None else ownership.size, device_facts(device).processors
    many = processors // 2 + 1
    decoded = DecodeLayer(
        dataclasses.replace(config, num_heads=heads), device, dtype, block_size, cache_format, fp8_mode
    )
    costs = decoded.programs_and_costs(1, 0, None, backend, batch_invariant=True).costs
    outputs: list[tuple[torch.dtype, Tensor | None]] = [(dtype, None)]  # dtype and scale of outputs of attention
    if fp8_output:
        outputs.append((E4M3, torch.ones((), dtype=torch.float32, device=device)))
    launches: list[Launch] = []

    def step(query_lens, seq_lens, threshold=decode_threshold, scheduled=True, programs=(), splits=()) -> None:
        common = _batch(query_lens, seq_lens, -(-max(seq_lens) // block_size), num_blocks, device)
        workspace = 4 * block_size * size * len(query_lens)
        plan = build_mla_metadata(
            common, block_size, workspace, threshold, ownership=ownership, cache_format=cache_format, dtype=dtype,
            fp8_mode=fp8_mode,
        )  # fmt: skip
        plans, tokens = [plan], sum(query_lens)
        if batch_invariant and plan.num_prefills:  # other kernels, perhaps of another backend, serve such prefills
            name = choose_prefill_backend(plan.prefill, config, dtype, backend, True)
            served = with_backend(plan.prefill, name, True)
            plans += [dataclasses.replace(plan, prefill=served)] * (name in OWN_BACKENDS)

        def inputs() -> tuple[Tensor, Tensor]:
            positions = torch.zeros(tokens, dtype=torch.int64, device=device)
            return torch.zeros(tokens, config.hidden_size, dtype=dtype, device=device), positions

        def serve(schedule: DecodeSchedule | None, plan: MLAMetadata = plan) -> None:
            layer(*inputs(), kv_cache, dataclasses.replace(plan, schedule=schedule))

        def serve_planned(count: int) -> None:
            serve(plan_decode(plan.decode.seq_lens, count, costs, batch_invariant, backend=backend))

        def attend(plan: MLAMetadata) -> None:  # an engine may call `project` and `forward_attention`, not `forward`
            hidden_states, positions = inputs()
            projected = layer.project(hidden_states, positions)
            for out_dtype, output_scale in outputs:
                memory = torch.empty(tokens + 1, local.num_heads, config.v_head_dim, dtype=out_dtype, device=device)
                # memory[1:] need not be aligned to 16 bytes, like the output of prefills behind decodes. `forward` has
                # launched the kernels for other addresses, except for an output in e4m3.
                for output in (memory[1:],) if output_scale is None else (memory[1:], memory[:-1]):
                    layer.forward_attention(*projected, kv_cache, plan, output, output_scale)

        launches.extend(functools.partial(serve, None, each) for each in plans)
        launches.extend(prescribe_splits(count)(functools.partial(serve, None)) for count in splits)
        if plan.num_decodes and scheduled:
            found = decoded.programs_and_costs(max(query_lens), None, costs, backend, batch_invariant=False)
            rows = heads * max(query_lens)
            counts = {found.num_programs, *programs_of_all_variants(len(query_lens), rows, processors), *programs}
            counts |= {2 * many} if cache_format.layer_scale and 16 < rows <= 32 else set()
            launches.extend(functools.partial(serve_planned, count) for count in sorted(counts - {0}))
        if plan.num_decodes and batch_invariant:
            schedule = DecodeSchedule(batch_invariant=True, split_rule=costs.split_rule)
            launches.append(functools.partial(serve, schedule))
        launches.extend(functools.partial(attend, each) for each in plans)

    def cascade(requests: int, prefix: int, query_len: int) -> None:
        lens, tokens = [prefix + query_len + 1] * requests, requests * query_len
        common = _batch([query_len] * requests, lens, -(-lens[0] // block_size), num_blocks, device)
        plan = build_mla_metadata(
            common, block_size, block_size, decode_threshold, num_programs=0, cache_format=cache_format, dtype=dtype,
            fp8_mode=fp8_mode,
        )  # fmt: skip
        plan = dataclasses.replace(plan, cascade=split_shared_prefix(plan.decode, prefix, block_size))
        hidden_states = torch.zeros(tokens, config.hidden_size, dtype=dtype, device=device)
        layer(hidden_states, torch.zeros(tokens, dtype=torch.int64, device=device), kv_cache, plan)

    def plan_many(requests: int) -> None:
        lens = torch.zeros(requests, dtype=torch.int32, device=device)
        plan_decode(lens, 1, costs, batch_invariant, backend=backend)

    def captured() -> None:  # the ops that only captured batches need
        starts = torch.zeros(2, dtype=torch.int32, device=device)
        compute_visible_lens(starts, starts[1:], 1, ownership, backend=backend)
        for out_dtype, _ in outputs:
            output = torch.empty(2, local.num_heads, config.v_head_dim, dtype=out_dtype, device=device)
            zero_padding_tokens(output, starts, backend=backend)

    def advance(ids: torch.dtype) -> None:
        token = torch.zeros(1, dtype=ids, device=device)
        positions = torch.zeros(1, dtype=torch.int64, device=device)
        common = _batch([1], [1], 2, num_blocks, device)
        advance_step(token, token.clone(), positions, common, block_size, ownership, backend=backend)

    def copy() -> None:
        pairs = torch.tensor([[0, 1]], dtype=torch.int64, device=device)
        copy_blocks([kv_cache], pairs, backend=backend)
        swap_blocks(kv_cache, torch.empty_like(kv_cache[:2]), pairs, backend=backend)

    def convert() -> None:  # conversions of entries outside a cache, such as entries from other ranks
        widths = (config.kv_lora_rank, config.qk_rope_head_dim)
        latents, keys = (torch.zeros(2, width, dtype=dtype, device=device) for width in widths)
        scale = torch.ones((), dtype=torch.float32, device=device) if cache_format.layer_scale else None
        entries = quantize_entries(latents, keys, cache_format, scale, backend=backend)
        dequantize_entries(entries, cache_format, dtype, scale, backend=backend)

    # Triton compiles another variant of a kernel if a stride is divisible by 16. Some strides depend on the number of
    # tokens, so there are batches of 1 and of 16 requests. Two requests launch the combine kernel for all numbers of
    # splits. If `split` requests are split, programs of the combine kernel process several tiles.
    for query_len in range(1, decode_threshold + 1):
        for requests, splits in ((1, ()), (2, () if batch_invariant else NUMBERS_OF_SPLITS), (16, ())):
            step([query_len] * requests, [LONG_CONTEXT] * requests, splits=splits)
        for length in ALONE:
            step([query_len], [max(length, query_len)], scheduled=False)
        for requests in (MANY_REQUESTS, MANY_REQUESTS + 1):
            step([query_len] * requests, [query_len] * requests)
        split = 16 * processors // (heads * query_len) + 1
        step([query_len] * split, [query_len] * split, programs=(2 * split,))
        if cache_format.layer_scale:  # the decode has larger tiles for so many requests
            step([query_len] * many, [LONG_CONTEXT] * many)
        if ranks is None and not batch_invariant:  # a builder plans cascades only in this case
            launches.extend(
                functools.partial(cascade, max(2, -(-tokens // query_len)), prefix, query_len)
                for tokens in CASCADE_TOKENS
                for prefix in sorted({max(1, shared // block_size) * block_size for shared in CASCADE_PREFIXES})
            )
    # `choose_path` may choose the absorbed path for a query above the threshold. A query of 17 tokens has more than 16
    # rows for every number of heads. With many requests over e4m3, 17 to 32 rows have row blocks of 32 rows.
    longer, wide = max(decode_threshold + 1, 17), 32 // heads
    above = [(1, LONG_CONTEXT, longer), (16, LONG_CONTEXT, longer), (64, longer, longer)]
    if cache_format.layer_scale and wide > decode_threshold:
        above += [(many, LONG_CONTEXT, wide), (many, wide, wide)]
    for requests, length, query_len in above:
        step([query_len] * requests, [length] * requests, query_len)
    launches.extend(functools.partial(plan_many, requests) for requests in (65, 129, 300, 1100))
    launches.append(captured)
    for long_query in (16 * (decode_threshold // 16 + 1), 2 * decode_threshold + 1):
        for context in (0, 16 * block_size, 3):
            step([long_query], [long_query + context])
    launches.extend(functools.partial(advance, ids) for ids in (torch.int32, torch.int64))
    before = len(launches)
    step([long_query] * 3, [long_query, long_query + 3, long_query + 16 * block_size * size])  # one without context
    # This step runs once more with splits, as over a long context; it comes first, because its kernels compile slowly.
    launches[:0] = map(prescribe_splits(2), launches[before:])
    if fp8_weights or fp8_output or fp8_mode != CONVERTED:  # products of heads with a weight or a result in e4m3
        for tokens in PRODUCT_TOKENS:
            step([1] * tokens, [1] * tokens, scheduled=False)
    if fp8_mode != CONVERTED:  # `rope_norm_and_cache` is called once for the decodes and once for the prefills
        for decodes in (1, 2, 16):
            step([1] * decodes + [long_query], [2] * decodes + [long_query], scheduled=False)
    launches.extend((copy, convert))
    if fp8_mode == "fp8_product":  # on Hopper, the number of partial outputs determines their dtype
        return [prescribe_partial_dtype(dtype)(launch) for launch in launches for dtype in PARTIAL_DTYPES]
    return launches


def _of_compile_log(name: str, otherwise):
    """Return the context manager `name` of `fast.kernels.compile_log`; without Triton, one that yields `otherwise`."""
    if importlib.util.find_spec("triton") is None:
        return contextlib.nullcontext(otherwise)
    from .kernels import compile_log

    return getattr(compile_log, name)()


def _batch(
    query_lens: list[int], seq_lens: list[int], columns: int, num_blocks: int, device: torch.device
) -> CommonAttentionMetadata:
    """Return a batch whose requests share all their cache blocks, and whose tokens are not written to the cache."""
    ends = torch.tensor([0, *query_lens], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
    table = (torch.arange(columns, dtype=torch.int32, device=device) % num_blocks).repeat(len(query_lens), 1)
    slots = torch.full((sum(query_lens),), -1, dtype=torch.int64, device=device)
    return CommonAttentionMetadata.make(ends, torch.tensor(seq_lens, dtype=torch.int32, device="cpu"), table, slots)


class _Zeros(nn.Module):
    """A module in place of a projection or norm; it returns zeros of a given width."""

    def __init__(self, width: int, weight: Tensor):
        super().__init__()
        self.width, self.weight = width, weight

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.width)


def _projections_of_zeros(config: MLAConfig, dtype: torch.dtype, device: torch.device) -> dict[str, nn.Module]:
    """Return projections and norms that return zeros; only `kv_b_proj`, which the layer reads, has a full weight."""
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
