"""Tests of the workspace: the memory in which a prefill gathers and expands one chunk of its context.

The memory-profile run is a call of a layer without a plan. An engine measures the memory of this run, so no later step
must need more memory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast.mla import layer as mla_layer
from fast.mla import memory_profile
from reference.interfaces import context_workspace_size

from ..support.allocations import HeldMemory
from ..support.factories import DIRECT, LOW_RANK, assert_same_bits, make_batch, make_layer, make_weights, new_cache

TOKENS = 64  # workspace_tokens of most tests
SMALL_LATENT = replace(DIRECT, kv_lora_rank=12)  # a prefill of this config needs more memory than its decode


def one_step(layer, config, query_lens, context_lens, builder):
    """Run a step of a layer with fixed random inputs; return the output and the plan."""
    torch.manual_seed(0)
    dtype = layer.kv_a_layernorm.weight.dtype
    batch = make_batch(query_lens, [q + c for q, c in zip(query_lens, context_lens, strict=True)])
    cache = new_cache(batch, config.head_size, dtype, new_tokens=False)
    plan = builder.build(0, batch.common)
    hidden = torch.randn(batch.num_tokens, config.hidden_size).to(dtype)
    return layer(hidden, torch.arange(batch.num_tokens), cache, plan), plan


def make_builder(ops, config, **options):
    return ops.MLAMetadataBuilder(config, 16, 2000, 8, workspace_tokens=TOKENS, batch_invariant=True, **options)


@pytest.mark.parametrize("config", [DIRECT, LOW_RANK, replace(DIRECT, num_heads=1)])
@pytest.mark.parametrize("size", [None, 1, 2, 8])
def test_size(config, size):
    """A workspace for 1000 tokens has room for the cache entries of these tokens and for further elements.

    The further elements are either the keys and values of the 1000 tokens, or the cache entries that `size` ranks send
    to each other, whichever are more.
    """
    elements, width = context_workspace_size(config, 1000, size), config.head_size
    expanded = 1000 * config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
    exchanged = 0 if size is None else (size + 1) * -(-1000 // size) * width
    assert 0 <= elements - 1000 * width - max(expanded, exchanged) < 256
    if size is not None and expanded >= exchanged:
        assert elements == context_workspace_size(config, 1000)


def test_one_workspace_for_all_layers(ops):
    """All plans of a builder and all layers use the builder's workspace, which is allocated once."""
    config = LOW_RANK
    builder = make_builder(ops, config)
    layers = [make_layer(ops, config, make_weights(config, torch.float32), torch.float32) for _ in range(3)]
    assert builder.workspace.memory is None
    addresses = set()
    for contexts in ([17], [500], [1, 300, 0], [90, 0]):
        for layer in layers:
            _, plan = one_step(layer, config, [5] * len(contexts), contexts, builder)
            assert plan.workspace is builder.workspace and layer.workspace is None
            addresses.add(builder.workspace.memory.data_ptr())
    assert len(addresses) == 1
    assert builder.workspace.memory.shape[0] == context_workspace_size(config, TOKENS)
    other = ops.build_mla_metadata(make_batch([5], [30]).common, 16, TOKENS)
    assert other.workspace is not builder.workspace


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_workspace_changes_no_result(ops, dtype):
    """A layer gives the same bits with the workspace of the plan, with its own workspace, and with given memory."""
    config, weights = LOW_RANK, make_weights(LOW_RANK, dtype)
    size = context_workspace_size(config, TOKENS)
    memory = torch.full((size + 7,), torch.nan, dtype=dtype)
    shared = ops.ContextWorkspace(memory)
    outputs = []
    for workspace in (None, ops.ContextWorkspace(), shared, shared):
        layer = make_layer(ops, config, weights, dtype, workspace=workspace)
        builder = make_builder(ops, config)
        outputs.append(one_step(layer, config, [1, 5, 3, 4], [9, 100, 0, 77], builder)[0])
        assert (builder.workspace.memory is None) == (workspace is not None)
        assert_same_bits(outputs[-1], outputs[0])
    assert shared.memory is memory and not memory[: TOKENS * config.head_size].isnan().any()


def test_given_memory_that_does_not_fit(ops, plain_errors):
    """A workspace in memory that is too small, or has another dtype or device, raises before the cache is written."""
    config, size = DIRECT, context_workspace_size(DIRECT, TOKENS)
    weights = make_weights(config, torch.float32)
    for memory, message in (
        (torch.empty(size - 1), f"workspace.memory: expected at least {size} elements, got {size - 1}$"),
        (torch.empty(size).double(), "workspace.memory: expected dtype torch.float32, got torch.float64$"),
        (torch.empty(size, device="meta"), "workspace.memory: expected device cpu, got meta$"),
    ):
        layer = make_layer(ops, config, weights, torch.float32, workspace=ops.ContextWorkspace(memory))
        batch = make_batch([5], [80])
        cache = torch.zeros(batch.num_blocks, 16, config.head_size)
        given = torch.randn(5, config.hidden_size), torch.arange(5), cache
        layer.workspace_tokens = TOKENS
        for plan in (ops.build_mla_metadata(batch.common, 16, TOKENS), None):
            with pytest.raises(ValueError, match=f"^{message}"):
                layer(*given, plan)
        assert not cache.any()
        prompts = make_batch([5], [5])  # a step without context needs no workspace
        layer(*given[:2], torch.zeros(prompts.num_blocks, 16, config.head_size),
              ops.build_mla_metadata(prompts.common, 16, TOKENS))  # fmt: skip
    for wrong, message in ((torch.zeros(2, 2), r"memory: expected shape \[elements\], got \[2, 2\]$"),
                           (torch.zeros(8)[::2], "memory: expected a contiguous tensor, got strides")):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{message}"):
            ops.ContextWorkspace(wrong)
    with pytest.raises(TypeError, match="^workspace: expected a ContextWorkspace or None, got Tensor$"):
        make_layer(ops, config, weights, torch.float32, workspace=torch.zeros(9))


def test_a_workspace_of_its_own_follows_the_layers():
    """A workspace without given memory allocates again only if a call needs more memory or another dtype or device."""
    workspace, cpu = fast.ContextWorkspace(), torch.device("cpu")
    memory = workspace.reserve(100, torch.float32, cpu)
    assert memory.shape == (100,) and workspace.reserve(60, torch.float32, cpu) is memory
    assert workspace.reserve(101, torch.float32, cpu).shape == (101,)
    assert workspace.reserve(10, torch.bfloat16, cpu).dtype == torch.bfloat16


def test_workspaces_of_the_ops(ops, plain_errors):
    """`gather_context` and `expand_kv` write into given memory, and refuse memory that is too small or has gaps."""
    batch = make_batch([2], [40])
    plan = ops.build_mla_metadata(batch.common, 16, TOKENS).prefill
    (chunk,) = plan.context_chunks
    cache = torch.randn(batch.num_blocks, 16, DIRECT.head_size)
    wanted = ops.gather_context(cache, plan, chunk)
    rows = torch.full((41, DIRECT.head_size), 7.0)
    found = ops.gather_context(cache, plan, chunk, workspace=rows)
    assert found.data_ptr() == rows.data_ptr() and rows[38:].eq(7).all()
    assert_same_bits(found, wanted)
    for wrong, message in ((rows[:37], "at least 38 rows without gaps, got 37 rows$"),
                           (rows[::2], "at least 38 rows without gaps, got 21 rows with gaps$"),
                           (rows.double(), "dtype torch.float32, got torch.float64$"),
                           (rows.to("meta"), "device cpu, got meta$")):  # fmt: skip
        with pytest.raises(ValueError, match=f"^workspace: expected {message}"):
            ops.gather_context(cache, plan, chunk, workspace=wrong)
    w_uk, w_uv = torch.randn(24, 3, 12), torch.randn(24, 3, 10)
    latents = torch.randn(7, 24)
    memory = torch.full((7 * 36 + 4 + 7 * 30 + 5,), 7.0)  # keys: 7 * 36 = 252; values: 256 to 256 + 7 * 30 = 466
    keys, values = ops.expand_kv(latents, w_uk, w_uv, workspace=memory)
    assert keys.data_ptr() == memory.data_ptr() and values.data_ptr() == memory[256:].data_ptr()
    for made, expected in zip((keys, values), ops.expand_kv(latents, w_uk, w_uv), strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-6)
    assert memory[252:256].eq(7).all() and memory[466:].eq(7).all()
    for wrong, message in ((memory[:465], "at least 466 elements without gaps, got 465 elements$"),
                           (memory.double(), "dtype torch.float32, got torch.float64$")):  # fmt: skip
        with pytest.raises(ValueError, match=f"^workspace: expected {message}"):
            ops.expand_kv(latents, w_uk, w_uv, workspace=wrong)


@pytest.mark.parametrize("size", [1, 4])
def test_ranks_in_one_workspace(ops, size):
    """On ranks that share sequences, `dcp_gather_context` returns the right rows inside the given workspace."""
    config = replace(DIRECT, num_heads=4)
    contexts, entries = [100, 9], torch.randn(109, config.head_size)

    def program(ranks):
        unit = reference.interfaces.context_unit(16, size, 1)
        chunks = ops.plan_context_chunks(torch.tensor(contexts, dtype=torch.int32), 2 * unit, 16, size, 1)
        table = torch.arange(14, dtype=torch.int32).view(2, 7)
        cache = torch.full((14, 16, config.head_size), torch.nan)
        for request, first, length in ((0, 0, 100), (1, 100, 9)):
            own = entries[first : first + length][ranks.rank :: size]
            for at, entry in enumerate(own):
                cache[table[request, at // 16], at % 16] = entry
        plan = reference.interfaces.PrefillMetadata(table, torch.tensor([0, 1, 2], dtype=torch.int32), 1, chunks, 16)
        elements = context_workspace_size(config, 2 * unit, size)
        memory = torch.empty(elements // config.head_size, config.head_size)
        found = []
        for chunk in chunks:
            gathered = ops.dcp_gather_context(
                cache, plan, ops.rank_local_chunk(chunk, ranks.ownership), ranks, workspace=memory
            )
            assert gathered.data_ptr() == memory.data_ptr()
            found.append(gathered.clone())
        return torch.cat(found)

    for found in ops.simulate(size, 1, program):
        assert_same_bits(found, entries)


# Tests of the memory of a step. `HeldMemory` counts tensors that Python code allocates, and does not count memory that
# a CPU kernel allocates inside an op.


def peaks(config, dtype, tokens, workspace, steps):
    """Return the peak memory in bytes of the memory-profile run and of each step.

    Args:
        config: config of the layer.
        dtype: dtype of the layer.
        tokens: query tokens of the memory-profile run and of each step.
        workspace: "layer" for a workspace of the layer, "plan" for the workspace of the plan.
        steps: (query lengths, context lengths, whether all requests decode) of each step.
    """
    layer = make_layer(
        fast, config, make_weights(config, dtype), dtype, workspace_tokens=TOKENS,
        workspace=fast.ContextWorkspace() if workspace == "layer" else None,
    )  # fmt: skip
    cache = torch.zeros(1, 16, config.head_size, dtype=dtype)
    given = torch.randn(tokens, config.hidden_size).to(dtype), torch.arange(tokens), cache
    layer(*given, None)  # the first call computes the rope frequencies, which the layer keeps
    layer.workspace = fast.ContextWorkspace() if workspace == "layer" else None
    builders = {limit: make_builder(fast, config, num_speculative_tokens=limit) for limit in (0, tokens)}
    found, memory = [], HeldMemory()
    with memory:
        layer(*given, None)
    found.append(memory.peak)
    for query_lens, context_lens, decodes in steps:
        batch = make_batch(query_lens, [q + c for q, c in zip(query_lens, context_lens, strict=True)])
        cache = torch.randn(batch.num_blocks, 16, config.head_size).to(dtype)
        plan = builders[tokens if decodes else 0].build(0, batch.common)
        plan = replace(plan, workspace=builders[0].workspace)
        assert plan.num_decode_tokens == (tokens if decodes else 0)
        memory.reset()
        with memory:
            layer(*given[:2], cache, plan)
        found.append(memory.peak)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("workspace", ["layer", "plan"])
def test_a_prefill_needs_what_the_profile_run_touched(workspace, dtype):
    """A prefill with context needs exactly the peak memory of the memory-profile run, for any context length."""
    contexts = ([20, 1], [60, 60], [700, 30], [1, 1900])
    steps = [([11, 9], lens, False) for lens in contexts] + [([20], [1500], False)]
    profile, *found = peaks(SMALL_LATENT, dtype, 20, workspace, steps)
    assert set(found) == {profile}


@pytest.mark.parametrize("config", [SMALL_LATENT, DIRECT, LOW_RANK])
def test_no_step_needs_more_than_the_profile_run(config):
    """No kind of step needs more memory than the memory-profile run; the largest kind needs exactly as much."""
    steps = [
        ([12, 8], [0, 0], False),  # prompts
        ([12, 8], [300, 0], False),  # a prefill with context and a prefill without
        ([3, 12, 5], [200, 0, 900], False),
        ([20], [900], False),
        ([10, 10], [40, 700], True),  # all tokens decode
    ]
    profile, *found = peaks(config, torch.bfloat16, 20, "layer", steps)
    assert max(found) == profile
    assert found[0] < found[3]


def test_growth_is_seen(monkeypatch):
    """If layers use no workspace, `peaks` returns more memory for longer contexts, so the tests above would fail."""
    reserve = memory_profile.reserve_for_step
    monkeypatch.setattr(mla_layer, "reserve_for_step", lambda layer, metadata, q: (None, None) if metadata else
                        reserve(layer, metadata, q))  # fmt: skip
    steps = [([20], [4], False), ([20], [64], False), ([20], [900], False)]
    _, short, longer, longest = peaks(SMALL_LATENT, torch.bfloat16, 20, "layer", steps)
    assert short < longer <= longest


def test_steps_in_and_outside_of_inference_mode(ops):
    """A workspace that was allocated in inference mode also works outside of this mode, and vice versa."""
    for modes in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
        builder = make_builder(ops, DIRECT)
        layer = make_layer(ops, DIRECT, make_weights(DIRECT, torch.float32), torch.float32)
        for mode in modes:
            with mode():
                assert one_step(layer, DIRECT, [5], [90], builder)[0].isfinite().all()


def test_expansion_refuses_overlap(ops, plain_errors):
    """`expand_kv` refuses a workspace that overlaps the latents, from which it computes keys and values."""
    memory = torch.randn(10_000)
    latents = memory[:64].view(4, 16)
    w_uk, w_uv = torch.randn(16, 3, 12), torch.randn(16, 3, 10)
    for _ in range(2):  # a call that was refused is refused again
        with pytest.raises(ValueError, match="^workspace: expected memory that no input has"):
            ops.expand_kv(latents, w_uk, w_uv, workspace=memory)
    k_nope, v = ops.expand_kv(latents, w_uk, w_uv, workspace=memory[64:])
    for found, wanted in zip((k_nope, v), ops.expand_kv(latents, w_uk, w_uv), strict=True):
        torch.testing.assert_close(found, wanted)
