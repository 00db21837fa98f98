"""Tests on a GPU: builders, layers and graphs never make the host wait for the GPU.

The tests serve caches in fp8 formats, grouped-query attention, and ranks that share sequences (simulated).
`tests/mla/test_device_lens.py` has the test of MLA over a cache in the dtype of the queries.

Each test runs all calls twice. The first calls compile kernels and allocate memory, and may wait. During the second
calls PyTorch raises an error where the host waits for the GPU.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

import fast
from reference.interfaces import COMPUTE_FORMAT, FP8_E4M3

from ..support.context_parallel import CONFIGS, of_rank
from ..support.factories import make_batch, make_layer, make_weights, moved
from ..support.format_caches import FORMATS
from ..support.gqa_layers import GQAStep, width_of
from ..support.gqa_plans import LOCAL, PLAIN, WINDOW
from ..support.planning import without_lens
from ..support.ranks import make_rank_layer
from ..support.synchronisation import no_synchronisation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICE, DTYPE, BLOCK = "cuda", torch.bfloat16, 16
# query lengths and sequence lengths: decodes; decodes of several tokens and a padding row; decodes and prefills
BATCHES = (([1, 1, 1], [9, 300, 40]), ([3, 1, 0, 0], [30, 7, 0, 0]), ([1, 2, 20, 9, 40], [33, 17, 90, 9, 41]))
DECODED = 3  # longest query of a decode
SIZES = dict(num_speculative_tokens=DECODED - 1, num_programs=3, dtype=DTYPE)


def test_the_mode_finds_what_waits():
    """Read a value of the GPU on the host under `no_synchronisation` -> an error, so the tests below can fail."""
    value = torch.ones((), device=DEVICE)
    with no_synchronisation(), pytest.raises(RuntimeError, match="synchronizing"):
        value.item()


def zeroed(cache: torch.Tensor) -> torch.Tensor:
    """Return a cache on the GPU with zeros in place of every byte, because no earlier step has written its context."""
    return torch.zeros_like(cache.view(torch.uint8), device=DEVICE).view(cache.dtype)


def new_batches() -> list:
    """Return the batches on the CPU, [`support.factories.Batch`]."""
    with torch.device("cpu"):
        return [make_batch(*lens, BLOCK) for lens in BATCHES]


def calls_of(builder, step, graph, batches, width, without_host_lens=True):
    """Return a function that plans and runs all batches, eager and in a graph.

    With `without_host_lens`, it also runs each batch without lengths on the host.
    """
    runs = []
    for batch, common in batches:
        hidden = torch.randn(batch.num_tokens, width, dtype=DTYPE, device=DEVICE)
        positions = torch.zeros(batch.num_tokens, dtype=torch.int64, device=DEVICE)
        runs += [(hidden, positions, one) for one in (common, without_lens(common, 9))[: 1 + without_host_lens]]
    slots = torch.full((4 * DECODED,), -1, dtype=torch.int64, device=DEVICE)

    def call() -> list[torch.Tensor]:
        outputs = []
        for hidden, positions, common in runs:
            outputs.append(step(hidden, positions, builder.build(0, common)))
            if common.max_query_len <= DECODED:
                if graph is not None:
                    outputs.append(graph.run(hidden, positions, common).clone())
                captured = builder.build_for_cudagraph_capture(replace(common, slot_mapping=slots))
                builder.update_captured(captured, common)
        return outputs

    return call


def assert_never_waits(call) -> None:
    """Call twice; the host must not wait in the second call, and all outputs are finite."""
    call()
    torch.cuda.synchronize()
    with no_synchronisation():
        outputs = call()
    assert outputs and all(bool(output.isfinite().all()) for output in outputs)


@pytest.mark.parametrize("fp8_mode", ["converted", "fp8_query"])
@pytest.mark.parametrize("name", FORMATS)
def test_fp8_caches(name, fp8_mode):
    """Serve over a cache in an fp8 format, with queries in bfloat16 or in e4m3 -> the host never waits."""
    cache_format, config, scale = FORMATS[name]
    batches = new_batches()
    with torch.device("cpu"):
        weights = make_weights(config, DTYPE)
    scales = dict(kv_scale=scale, q_scale=None if fp8_mode == "converted" else 0.5)
    layer = make_layer(fast, config, weights, DTYPE, cache_format=cache_format, fp8_mode=fp8_mode, **scales).to(DEVICE)
    builder = fast.MLAMetadataBuilder(
        config, BLOCK, 512, 8, workspace_tokens=32 * BLOCK, cache_format=cache_format, fp8_mode=fp8_mode, **SIZES
    )
    blocks = max(batch.num_blocks for batch in batches)
    columns = cache_format.columns(config.kv_lora_rank, config.qk_rope_head_dim)
    cache = zeroed(torch.empty(blocks, BLOCK, columns, dtype=cache_format.dtype_for(DTYPE), device="meta"))

    def step(hidden, positions, plan):
        return layer(hidden, positions, cache, plan)

    graph = fast.DecodeGraph(step, builder, [4], 32, config.hidden_size, DTYPE, torch.device(DEVICE), DECODED)
    moved_batches = [(batch, moved(batch.common, DEVICE)) for batch in batches]
    assert_never_waits(calls_of(builder, step, graph, moved_batches, config.hidden_size))


@pytest.mark.parametrize("cache_format", [COMPUTE_FORMAT, FP8_E4M3], ids=lambda each: each.name)
@pytest.mark.parametrize("config", [PLAIN, WINDOW, LOCAL, replace(PLAIN, attention_sinks=True)],
                         ids=["plain", "window", "chunks", "sinks"])  # fmt: skip
def test_grouped_query_attention(config, cache_format):
    """Serve a layer of grouped-query attention, also with windows, chunks and sinks -> the host never waits."""
    batches = new_batches()
    sinks = torch.zeros(config.num_heads, device=DEVICE) if config.attention_sinks else None
    scales = dict(k_scale=0.01, v_scale=0.02) if cache_format.layer_scale else {}
    builder = fast.GQAMetadataBuilder(config, BLOCK, 512, 8, cache_format=cache_format, device=DEVICE, **SIZES)
    blocks = max(batch.num_blocks for batch in batches)
    step = GQAStep.of(fast, config, 1, DTYPE, sinks, BLOCK, cache_format=cache_format, **scales)
    step.layer.to(DEVICE)
    shape = (2, blocks, BLOCK, config.num_kv_heads, config.head_dim)
    step.kv_cache = zeroed(torch.empty(shape, dtype=cache_format.dtype_for(DTYPE), device="meta"))
    width = width_of(config)
    graph = fast.DecodeGraph(step, builder, [4], 32, width, DTYPE, torch.device(DEVICE), DECODED)
    moved_batches = [(batch, moved(batch.common, DEVICE)) for batch in batches]
    known = config.attention_chunk_size is not None  # attention chunks need the lengths on the host
    assert_never_waits(calls_of(builder, step, graph, moved_batches, width, not known))


def run_on_ranks(program, merge) -> None:
    """Run `program(ranks)`, which returns a function, on two simulated ranks; the host must not wait in second calls.

    A rank waits in its exchanges until all ranks have made their first calls.
    """
    with contextlib.ExitStack() as mode:

        def run_rank(ranks):
            call = program(ranks)
            call()
            mode.enter_context(no_synchronisation())
            return call()

        found = fast.simulate(2, 4, run_rank, merge=merge)
    for outputs in found:
        assert outputs and all(bool(output.isfinite().all()) for output in outputs)


def shared_batches(ranks) -> list:
    """Return the batches of one rank on the GPU: the slots are those of the tokens that the rank owns."""
    made = new_batches()
    with torch.device("cpu"):
        commons = [of_rank(batch.common, BLOCK, ranks.ownership) for batch in made]
    return [(batch, moved(common, DEVICE)) for batch, common in zip(made, commons, strict=True)]


@pytest.mark.parametrize("merge", ["a2a", "ag_rs"])
@pytest.mark.parametrize("name", ["compute_dtype", "fp8_e4m3"])
def test_ranks_that_share_sequences(name, merge):
    """Serve an MLA layer on ranks that share sequences -> the host of no rank waits."""
    config = CONFIGS["direct"]
    cache_format, scale = (FORMATS[name][0], FORMATS[name][2]) if name in FORMATS else (COMPUTE_FORMAT, None)
    with torch.device("cpu"):
        weights = make_weights(config, DTYPE)

    def program(ranks):
        batches = shared_batches(ranks)
        layer = make_rank_layer(fast, config, weights, DTYPE, ranks, DEVICE, cache_format=cache_format, kv_scale=scale)
        builder = fast.MLAMetadataBuilder(
            config,
            BLOCK,
            512,
            8,
            workspace_tokens=64 * BLOCK,
            context_parallel=ranks,
            cache_format=cache_format,
            **SIZES,
        )
        blocks = max(batch.num_blocks for batch, _ in batches)
        columns = cache_format.columns(config.kv_lora_rank, config.qk_rope_head_dim)
        cache = zeroed(torch.empty(blocks, BLOCK, columns, dtype=cache_format.dtype_for(DTYPE), device="meta"))
        return calls_of(builder, lambda *given: layer(*given[:2], cache, given[2]), None, batches, config.hidden_size)

    run_on_ranks(program, merge)


@pytest.mark.parametrize("merge", ["a2a", "ag_rs"])
def test_ranks_that_share_keys_and_values(merge):
    """Serve a layer of grouped-query attention on ranks that share sequences -> the host of no rank waits."""

    def program(ranks):
        batches = shared_batches(ranks)
        local = ranks.local_gqa_config(PLAIN)
        builder = fast.GQAMetadataBuilder(PLAIN, BLOCK, 512, 8, context_parallel=ranks, device=DEVICE, **SIZES)
        blocks = max(batch.num_blocks for batch, _ in batches)
        layer = fast.GQAAttention(PLAIN, COMPUTE_FORMAT, ranks)
        cache = torch.zeros(2, blocks, BLOCK, local.num_kv_heads, PLAIN.head_dim, dtype=DTYPE, device=DEVICE)
        step = GQAStep(local, layer, cache, [])
        return calls_of(builder, step, None, batches, width_of(local))

    run_on_ranks(program, merge)
