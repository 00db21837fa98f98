"""Tests of layers over fp8 caches: both packages agree, and all ways to compute a step give the same output.

In float64 the outputs are the same if the format stores all entries exactly (`exact_entries`). A prefill reads the
entries of its new tokens before they are quantised, and a decode reads the stored entries. Entries that the format
rounds therefore give different outputs.
"""

from __future__ import annotations

import dataclasses
import functools
import sys

import pytest
import torch

import fast
import reference
from fast.parity import compare
from reference.interfaces import (
    COMPUTE_FORMAT,
    FP8_DS_MLA,
    FP8_E4M3,
    CommonAttentionMetadata,
    GraphSupport,
    MLAConfig,
    TokenOwnership,
)

from ..support.commands import run
from ..support.factories import (
    DIRECT,
    GARBAGE,
    assert_close64,
    assert_same_bits,
    make_batch,
    make_layer,
    make_weights,
)
from ..support.format_caches import FORMATS, SMALL, exact_entries, poisoned_cache, step_of
from ..support.ranks import Steps, serve

LENS = (21, 21)
# new tokens of each step; every request has the same steps. Steps of up to 3 tokens are decodes.
PARTITIONS = {
    "chunks": (16, 1, 4), "decodes": (10, *[1] * 11), "drafts": (9, *[3] * 4), "no prefill": (1, 2, *[3] * 6),
}  # fmt: skip
# (new tokens, tokens after the step) of each request: prompts; drafted tokens; mixed; decodes
GROWING = (((40, 40), (5, 5)), ((1, 41), (3, 8)), ((2, 43), (90, 98)), ((60, 103), (1, 99)), ((1, 104), (2, 101)))


@pytest.fixture(params=FORMATS)
def format_config(request):
    """Return a cache format, a config for it, and a scale of the cache."""
    return FORMATS[request.param]


def attend(ops, layer, batch, inputs, steps, cache, workspace_tokens=16):
    """Run `forward_attention` over the steps; return the outputs of each request, [tokens, N, V].

    Args:
        ops: package of the layer.
        layer: the layer.
        batch: the requests after the last step; they determine the slot of each token.
        inputs: queries, latents and rope parts of the tokens of each request.
        steps: new tokens of each step; every request has the same steps.
        cache: the cache, written in place.
        workspace_tokens: largest number of context tokens of a chunk.
    """
    done, outputs = 0, [[] for _ in batch.seq_lens]
    for query_len in steps:
        new, done = slice(done, done + query_len), done + query_len
        common = step_of(batch, ((query_len, done),) * len(batch.seq_lens))
        plan = ops.build_mla_metadata(common, 16, workspace_tokens, 3, cache_format=layer.cache_format)
        q, kv_c, k_pe = (torch.cat([own[new] for own in each]) for each in inputs)
        output = q.new_empty(q.shape[0], q.shape[1], layer.config.v_head_dim)
        layer.forward_attention(q, kv_c, k_pe, cache, plan, output)
        for own, out in zip(outputs, output.split(query_len), strict=True):
            own.append(out)
    return [torch.cat(own) for own in outputs]


def make_inputs(config, lens, dtype, scale, exact=True):
    """Return the `inputs` of `attend`: queries, latents and rope parts of the tokens of each request."""
    queries = [torch.randn(length, config.num_heads, config.qk_head_dim, dtype=torch.float64) for length in lens]
    if exact:
        entries = [exact_entries(length, config, dtype, scale) for length in lens]
    else:
        entries = [[torch.randn(length, width).to(dtype) for width in (config.kv_lora_rank, config.qk_rope_head_dim)]
                   for length in lens]  # fmt: skip
    return [q.to(dtype) for q in queries], *(list(each) for each in zip(*entries, strict=True))


def make_case(ops, format_config, dtype=torch.float64, weights=None):
    """Return a layer, the requests and an empty cache."""
    cache_format, config, scale = format_config
    weights = make_weights(config, torch.float64) if weights is None else weights
    layer = make_layer(ops, config, weights, dtype, cache_format=cache_format, kv_scale=scale)
    batch = make_batch(LENS, LENS)
    return layer, batch, poisoned_cache(batch.num_blocks, 16, config, cache_format, dtype)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_every_partition_is_one_prefill(ops, format_config, partition):
    """Prefills in chunks, decodes and drafts give the output of one prefill, and write the same bytes."""
    config, scale = format_config[1], format_config[2] or 2.0**-5
    weights, inputs = make_weights(config, torch.float64), make_inputs(config, LENS, torch.float64, scale)
    layer, batch, cache = make_case(ops, format_config, weights=weights)
    wanted = attend(ops, layer, batch, inputs, LENS[:1], cache)
    layer = make_case(ops, format_config, weights=weights)[0]
    written = poisoned_cache(batch.num_blocks, 16, config, format_config[0], torch.float64)
    found = attend(ops, layer, batch, inputs, PARTITIONS[partition], written)
    assert_same_bits(written, cache)
    for one, other in zip(found, wanted, strict=True):
        assert_close64(one, other)


def test_entries_that_are_not_exact_are_rounded(format_config):
    """If the format rounds the entries, decodes differ from a prefill, because decodes read the stored entries."""
    config, inputs = format_config[1], make_inputs(format_config[1], LENS, torch.float64, None, exact=False)
    weights, outputs = make_weights(config, torch.float64), []
    for steps in (LENS[:1], PARTITIONS["decodes"]):
        layer, batch, cache = make_case(reference, format_config, weights=weights)
        outputs.append(attend(reference, layer, batch, inputs, steps, cache))
    error = (outputs[0][0] - outputs[1][0]).abs().max() / outputs[0][0].abs().max()
    assert 1e-4 < error < 0.1


@pytest.mark.parametrize("steps", [(16, 1, 4), (9, *[3] * 4)], ids=["chunks", "drafts"])
def test_packages_agree(format_config, steps):
    """Both packages write the same bytes in float32, and the error of `fast` is within the budget."""
    config = format_config[1]
    weights = {name: x.float().double() for name, x in make_weights(config, torch.float64).items()}
    inputs, batch = make_inputs(config, LENS, torch.float32, None, exact=False), make_batch(LENS, LENS)
    found = {}
    for name, ops, dtype in (("value", fast, torch.float32), ("low", reference, torch.float32),
                             ("gold", reference, torch.float64)):  # fmt: skip
        layer, _, cache = make_case(ops, format_config, dtype, weights)
        cast = [[x.to(dtype) for x in each] for each in inputs]
        found[name] = torch.cat(attend(ops, layer, batch, cast, steps, cache)), cache
    for other in ("value", "low"):
        assert_same_bits(found[other][1], found["gold"][1])
    parity = compare("forward_attention", *(found[name][0] for name in ("value", "low", "gold")))
    assert parity.passed, parity


@functools.cache
def alone(name: str, scale: float | None) -> tuple[torch.Tensor, ...]:
    """Return the outputs of the reference on one rank in float64."""
    cache_format, config, _ = FORMATS[name]
    with torch.device("cpu"):
        return tuple(serve(reference, config, Steps(GROWING, 64, 4096, 3), cache_format=cache_format, kv_scale=scale))


@pytest.mark.parametrize("scale", ["given", "first prefill"])
@pytest.mark.parametrize("name", FORMATS)
def test_whole_layers_agree(ops, name, scale):
    """Both packages compute the same float64 output from hidden states, with one chunk of context and with several."""
    cache_format, config, given = FORMATS[name]
    given = given if scale == "given" else None
    for workspace_tokens in (4096, 64):
        steps = Steps(GROWING, 64, workspace_tokens, 3)
        outputs = serve(ops, config, steps, cache_format=cache_format, kv_scale=given)
        for found, wanted in zip(outputs, alone(name, given), strict=True):
            assert_close64(found, wanted)


@pytest.mark.parametrize(("size", "interleave", "merge"), [(2, 16, "a2a"), (3, 1, "ag_rs"), (4, 64, "a2a")])
@pytest.mark.parametrize("name", FORMATS)
def test_ranks_are_one(ops, name, size, interleave, merge):
    """Every rank of a context-parallel group gives the output of one rank; all ranks choose the same scale."""
    cache_format, config, _ = FORMATS[name]
    unit = reference.interfaces.context_unit(64, size, interleave)
    program = functools.partial(serve, ops, config, Steps(GROWING, 64, unit, 3), cache_format=cache_format)
    for outputs in ops.simulate(size, interleave, lambda ranks: program(context_parallel=ranks), merge=merge):
        for found, wanted in zip(outputs, alone(name, None), strict=True):
            assert_close64(found, wanted)


@pytest.mark.parametrize("workspace", ["none", "small", "with room"])
@pytest.mark.parametrize("out_dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_gathered_context_has_the_bits_of_one_rank(ops, format_config, size, out_dtype, workspace):
    """`dcp_gather_context` gives the bits of `gather_context` on one rank, with and without a workspace.

    The number of exchanged bytes is the result of `dcp_gather_bytes`.
    """
    cache_format, config, scale = format_config
    kv_scale = None if scale is None else torch.tensor(scale)
    batch = make_batch((5, 4, 7), (37, 4, 70))
    blocks = torch.cat([torch.arange(-(-length // 16)) for length in batch.seq_lens])
    stored = reference.quantize_entries(
        *(torch.randn(len(blocks) * 16, width) for width in (config.kv_lora_rank, config.qk_rope_head_dim)),
        cache_format, kv_scale,
    )  # fmt: skip
    firsts = [sum(-(-length // 16) * 16 for length in batch.seq_lens[:request]) for request in range(3)]

    def program(ranks):
        ownership = None if ranks is None else ranks.ownership
        owned = TokenOwnership(1, 0) if ownership is None else ownership
        cache = poisoned_cache(batch.num_blocks, 16, config, cache_format, out_dtype)
        for request, context in enumerate(batch.context_lens):
            held = [t for t in range(context) if t // owned.interleave % owned.size == owned.rank]
            for at, token in enumerate(held):
                block = int(batch.common.block_table[request, at // 16])
                cache[block, at % 16].view(torch.uint8).copy_(stored[firsts[request] + token].view(torch.uint8))
        common = dataclasses.replace(batch.common, slot_mapping=torch.full_like(batch.common.slot_mapping, -1))
        plan = ops.build_mla_metadata(common, 16, 4 * 16 * 4, ownership=ownership, cache_format=cache_format).prefill
        assert len(plan.context_chunks) > 0
        rows = []
        for chunk in plan.context_chunks:
            if ranks is None:
                gathered = ops.gather_context(cache, plan, chunk, cache_format, out_dtype, kv_scale)
            else:
                exchanged = (ranks.size + 1) * chunk.padded_tokens
                tokens = {"none": None, "small": exchanged, "with room": exchanged + chunk.num_tokens}[workspace]
                memory = None if tokens is None else torch.full((tokens, config.head_size), torch.nan, dtype=out_dtype)
                before = ranks.cp_group.received["all_gather"]
                gathered = ops.dcp_gather_context(
                    cache, plan, chunk, ranks, cache_format, out_dtype, kv_scale, workspace=memory
                )
                if workspace == "with room":
                    assert gathered.data_ptr() == memory.data_ptr()
                assert ranks.cp_group.received["all_gather"] - before == ops.dcp_gather_bytes(
                    chunk.padded_tokens, config.kv_lora_rank, config.qk_rope_head_dim, ranks.size, cache_format,
                    out_dtype,
                )  # fmt: skip
            rows.append(gathered.clone())
        return torch.cat(rows)

    wanted = program(None)
    assert wanted.isfinite().all()
    for found in ops.simulate(size, 4, program):
        assert_same_bits(found, wanted)


def test_bytes_of_a_gathered_chunk(ops):
    """For a cache entry, ranks exchange 1152 bytes in bfloat16, 576 bytes in fp8_e4m3 and 656 bytes in fp8_ds_mla."""
    of = functools.partial(ops.dcp_gather_bytes, 96, 512, 64, 4)
    assert of() == of(COMPUTE_FORMAT, torch.bfloat16) == 3 * 96 * 1152
    assert 2 * of(FP8_E4M3) == of()
    assert 1152 * of(FP8_DS_MLA) == 656 * of()
    assert ops.dcp_gather_bytes(96, 512, 64, 1) == 0
    for arguments, message in (
        ((-1, 512, 64, 2), "padded_tokens: expected"), ((4, 0, 64, 2), "kv_lora_rank: expected"),
        ((4, 512, 64, 0), "context_parallel_size: expected"), ((4, 256, 64, 2, FP8_DS_MLA), "cache_format: expected"),
        ((4, 512, 64, 2, FP8_E4M3, torch.int8), "dtype: expected"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            ops.dcp_gather_bytes(*arguments)


def test_cascade_is_a_decode(ops, format_config):
    """A cascade over a shared prefix gives the output of the decode without a cascade."""
    cache_format, config, scale = format_config
    layer, batch, cache = make_case(ops, format_config)
    table = batch.common.block_table.clone()
    table[1, 0] = table[0, 0]  # the requests share 16 tokens
    inputs = make_inputs(config, LENS, torch.float64, scale or 2.0**-5)
    attend(ops, layer, batch, inputs, (20,), cache)
    common = step_of(batch, ((1, 21), (1, 21)))
    common = CommonAttentionMetadata.make(common.query_start_loc_cpu, common.seq_lens_cpu, table, common.slot_mapping)
    plan = ops.build_mla_metadata(common, 16, 64, cache_format=cache_format)
    cascade = dataclasses.replace(plan, cascade=ops.split_shared_prefix(plan.decode, 16, 16))
    q, kv_c, k_pe = (torch.cat([own[20:21] for own in each]) for each in inputs)
    outputs = [q.new_empty(2, config.num_heads, config.v_head_dim) for _ in range(2)]
    for output, used in zip(outputs, (plan, cascade), strict=True):
        layer.forward_attention(q, kv_c, k_pe, cache, used, output)
    assert_close64(*outputs)


def builders(ops, cache_format, config):
    """Return a builder for a cache format, and a builder for caches in the dtype of the queries."""
    return [ops.MLAMetadataBuilder(config, 16, 128, 4, num_speculative_tokens=1, cache_format=each)
            for each in (cache_format, COMPUTE_FORMAT)]  # fmt: skip


def test_every_plan_has_the_format(ops, format_config):
    """Plans of steps, of captured decodes and of batches without lengths on the host have the format of the builder."""
    cache_format, config, _ = format_config
    builder, _ = builders(ops, cache_format, config)
    batch = make_batch((1, 2), (40, 23))
    prefill = make_batch((1, 9), (40, 23))
    unknown = dataclasses.replace(batch.common, seq_lens_cpu=None, max_seq_len=40)
    plans = [
        builder.build(0, batch.common), builder.build(0, prefill.common), builder.build(0, unknown),
        builder.build(0, batch.common, fast_build=True), builder.build_for_cudagraph_capture(batch.common),
        ops.build_mla_metadata(batch.common, 16, 64, 2, cache_format=cache_format),
        ops.build_mla_metadata(batch.common, 16, 64, 2, cache_format=cache_format, ownership=TokenOwnership(1, 0)),
        ops.plan_captured_decodes(batch.common, 16, 0, graph=GraphSupport.ANY, cache_format=cache_format),
    ]  # fmt: skip
    assert all(plan.cache_format == cache_format for plan in plans)


def test_plan_of_another_format_is_refused(ops, format_config):
    """A layer refuses a plan of another format with an error of one line, and writes nothing."""
    cache_format, config, _ = format_config
    layer, batch, cache = make_case(ops, format_config, torch.float32)
    before = cache.view(torch.uint8).clone()
    hidden = torch.randn(42, config.hidden_size)
    other = FP8_E4M3 if cache_format is FP8_DS_MLA else COMPUTE_FORMAT
    plan = ops.build_mla_metadata(batch.common, 16, 64, cache_format=other)
    message = f"metadata.cache_format: expected {cache_format.name}, the layer's format, got {other.name}"
    with pytest.raises(ValueError, match=message):
        layer(hidden, batch.positions, cache, plan)
    with pytest.raises(ValueError, match=message):
        layer.forward_attention(
            *layer.project(hidden, batch.positions), cache, plan,
            hidden.new_empty(42, config.num_heads, config.v_head_dim),
        )  # fmt: skip
    assert torch.equal(cache.view(torch.uint8), before)
    assert layer.kv_scale is None or not layer.kv_scale.written
    plain = make_layer(ops, config, make_weights(config, torch.float32), torch.float32)
    plan = ops.build_mla_metadata(batch.common, 16, 64, cache_format=cache_format)
    with pytest.raises(ValueError, match="metadata.cache_format: expected compute_dtype"):
        plain(hidden, batch.positions, poisoned_cache(batch.num_blocks, 16, config, COMPUTE_FORMAT, hidden.dtype), plan)


def test_captured_plan_of_another_format_is_refused(ops, format_config):
    """`update_captured` refuses a plan that a builder of another format captured, and writes nothing."""
    builder, other = builders(ops, *format_config[:2])
    batch = make_batch((1, 1), (40, 23))
    captured = other.build_for_cudagraph_capture(batch.common)
    before = captured.decode.visible_lens.clone()
    later = make_batch((1, 1), (44, 29))
    with pytest.raises(ValueError, match="captured.cache_format: expected fp8_.*, the builder's format, got compute"):
        builder.update_captured(captured, later.common)
    assert torch.equal(captured.decode.visible_lens, before)
    other.update_captured(captured, later.common)
    captured = builder.build_for_cudagraph_capture(batch.common)
    builder.update_captured(captured, later.common)
    assert captured.decode.visible_lens.tolist() == [44, 29]


def test_graphs(ops, format_config):
    """A `DecodeGraph` gives the output of the layer; a graph whose builder has another format is refused."""
    cache_format, config, _ = format_config
    layer, batch, cache = make_case(ops, format_config)
    hidden = torch.randn(42, config.hidden_size, dtype=torch.float64)
    layer(hidden, batch.positions, cache, ops.build_mla_metadata(batch.common, 16, 64, cache_format=cache_format))
    common = step_of(batch, ((1, 21), (1, 21)))
    arguments = hidden[:2], torch.tensor([20, 20]), common
    wanted = layer(*arguments[:2], cache, ops.build_mla_metadata(common, 16, 64, cache_format=cache_format))
    builder, other = builders(ops, cache_format, config)

    def graph(builder):
        columns = batch.common.block_table.shape[1]
        return ops.DecodeGraph(lambda h, p, plan: layer(h, p, cache, plan), builder, [4], columns, config.hidden_size,
                               torch.float64, torch.get_default_device())  # fmt: skip

    assert_close64(graph(builder).run(*arguments), wanted)
    before = cache.view(torch.uint8).clone()
    with pytest.raises(ValueError, match="metadata.cache_format: expected fp8_"):
        graph(other).run(*arguments)
    assert torch.equal(cache.view(torch.uint8), before)


def test_dims_that_the_format_does_not_support(ops):
    """A layer, builder or plan with dims that fp8_ds_mla does not support raises before any step."""
    weights, common = make_weights(SMALL, torch.float64), make_batch((3,), (3,)).common
    wanted = r"^cache_format: expected \(Lkv, R\) = \(512, 64\) for format fp8_ds_mla, got \(32, 16\)$"
    calls = [lambda: make_layer(ops, SMALL, weights, torch.float64, cache_format=FP8_DS_MLA)]
    for invariant in (False, True):
        options = {"cache_format": FP8_DS_MLA, "batch_invariant": invariant}
        calls.append(functools.partial(ops.MLAMetadataBuilder, SMALL, 16, 128, 4, **options))
        calls.append(functools.partial(ops.build_mla_metadata, common, 16, 64, config=SMALL, **options))
    if ops is fast:
        options = {"device": torch.get_default_device(), "dtype": torch.float32, "block_size": 16}
        for call in (fast.decode_programs, fast.schedule_costs, fast.warmup):
            calls.append(functools.partial(call, SMALL, **options, cache_format=FP8_DS_MLA))
    for call in calls:
        with pytest.raises(ValueError, match=wanted):
            call()


WRONG_CACHES = [(name, wrong) for name in FORMATS for wrong in ("dtype", "columns", "alignment")
                if wrong != "alignment" or FORMATS[name][0].alignment > 1]  # fmt: skip


@pytest.mark.parametrize("format_config, wrong", WRONG_CACHES, indirect=["format_config"])
def test_cache_that_is_not_of_the_format(ops, format_config, wrong):
    """A cache of another dtype, with other columns or at an unaligned address is refused, and nothing is written."""
    cache_format, config, _ = format_config
    layer, batch, cache = make_case(ops, format_config)
    plan = ops.build_mla_metadata(batch.common, 16, 64, cache_format=cache_format)
    if wrong == "dtype":
        cache = cache.view(torch.int8)
    elif wrong == "columns":
        cache = cache[..., :-1]
    else:
        cache = torch.full((cache.numel() + 1,), 0xFF, dtype=torch.uint8)[1:].view(cache.shape)
    before = cache.view(torch.uint8).clone()
    with pytest.raises(ValueError, match="kv_cache: expected"):
        layer(torch.randn(42, config.hidden_size, dtype=torch.float64), batch.positions, cache, plan)
    assert torch.equal(cache.view(torch.uint8), before)
    assert layer.kv_scale is None or not layer.kv_scale.written


def test_repeated_calls_reuse_their_checks(format_config):
    """A layer whose ops reuse earlier checks gives the bits of a layer that checks every call.

    With `fp8_e4m3`, the first call differs from later calls: it chooses the scale, for which it computes the entries
    before it writes them.
    """
    cache_format, config, _ = format_config
    weights, batch = make_weights(config, torch.float32), make_batch(LENS, LENS)
    plan = fast.build_mla_metadata(batch.common, 16, 64, cache_format=cache_format)
    step = fast.build_mla_metadata(step_of(batch, ((1, 21), (1, 21))), 16, 64, cache_format=cache_format)
    hidden = torch.randn(42, config.hidden_size)
    found = []
    for check_every_call in (False, True):
        layer = make_layer(
            fast, config, weights, torch.float32, cache_format=cache_format, check_every_call=check_every_call
        )
        cache, outputs = poisoned_cache(batch.num_blocks, 16, config, cache_format, torch.float32), []
        for _ in range(4):
            outputs.append(layer(hidden, batch.positions, cache, plan))
            outputs.append(layer(hidden[:2], torch.tensor([20, 20]), cache, step))
        found.append((torch.cat(outputs), cache))
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)


COMPILE = """
import sys
import torch
import fast
from tests.support.factories import make_batch, make_layer, make_weights
from tests.support.format_caches import FORMATS, poisoned_cache, step_of

torch.manual_seed(0)
if sys.argv[2] != "cpu":  # under a default device, torch.compile takes a third more time to trace a layer
    torch.set_default_device(sys.argv[2])
cache_format, config, scale = FORMATS[sys.argv[1]]
weights, batch = make_weights(config, torch.float32), make_batch((12, 5), (12, 5))
layer = make_layer(fast, config, weights, torch.float32, cache_format=cache_format)
hidden = torch.randn(17, config.hidden_size)
caches = [poisoned_cache(batch.num_blocks, 16, config, cache_format, torch.float32) for _ in range(2)]
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
prefill = fast.build_mla_metadata(batch.common, 16, 64, cache_format=cache_format)
if cache_format.layer_scale:
    try:
        compiled(hidden, batch.positions, caches[0], prefill)
    except Exception as error:
        assert "a scale before torch.compile traces the layer" in str(error), error
    else:
        raise AssertionError("a layer without a scale was traced")
    assert layer.kv_scale.source is None and caches[0].view(torch.uint8).eq(255).all()
layer(hidden, batch.positions, caches[0], prefill)  # chooses the scale
for lens in (((12, 12), (5, 5)), ((1, 12), (1, 5)), ((3, 12), (2, 5))):
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    plan = fast.build_mla_metadata(step_of(batch, lens), 16, 64, cache_format=cache_format)
    tokens, positions = sum(new for new, _ in lens), torch.cat([torch.arange(s - n, s) for n, s in lens])
    with torch.no_grad():
        wanted = layer(hidden[:tokens], positions, caches[0], plan)
        found = compiled(hidden[:tokens], positions, caches[1], plan)
    assert torch.equal(found, wanted) and found.isfinite().all()
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))
if cache_format.layer_scale:  # a layer with a given scale, which has not written its cache yet
    torch._dynamo.reset()
    other = make_layer(fast, config, weights, torch.float32, cache_format=cache_format, kv_scale=scale)
    torch.compile(other, fullgraph=True, backend="aot_eager")(hidden, batch.positions, caches[0], prefill)
    assert other.kv_scale.written
"""


@pytest.mark.parametrize("name", FORMATS)
def test_compiled_layer(name):
    """`torch.compile` traces a layer with a chosen scale in one graph, and gives the bits of the uncompiled layer.

    A compiled layer cannot choose a scale: without a scale it raises before it writes. The test runs in a process
    without the run-time shape checks of the tests, which `torch.compile` cannot trace.
    """
    code, said = run([sys.executable, "-c", COMPILE, name, str(torch.get_default_device())], 300)
    assert code == 0, said


def test_explain_names_the_format():
    """`explain` reports the backend of each op for a format, and refuses dims that the format does not support."""
    config = MLAConfig.from_preset("deepseek-v3")
    for cache_format in (FP8_E4M3, FP8_DS_MLA):
        lines = fast.backends.explain(config, device="cpu", dtype=torch.float32, cache_format=cache_format)
        assert all(": cpu" in line for line in lines.splitlines()), lines
        assert "quantize_entries: cpu" in lines and "reorg_kvcache: cpu" in lines
    with pytest.raises(ValueError, match="cache_format: expected"):
        fast.backends.explain(DIRECT, device="cpu", dtype=torch.float32, cache_format=FP8_DS_MLA)


def test_unowned_blocks_are_not_read(ops, format_config):
    """A layer neither reads nor writes bytes of the cache that belong to no token, which are NaN in this test."""
    config = format_config[1]
    layer, batch, cache = make_case(ops, format_config)
    assert int(batch.common.block_table.max()) == GARBAGE
    inputs = make_inputs(config, LENS, torch.float64, None, exact=False)
    for out in attend(ops, layer, batch, inputs, (17, 1, 3), cache):
        assert out.isfinite().all()
    owned = torch.zeros(batch.num_blocks, 16, dtype=torch.bool)
    for own in batch.slots:
        owned[tuple(torch.tensor(own).T)] = True
    assert cache.view(torch.uint8)[~owned].eq(0xFF).all()
