"""Tests of the peak memory of a step on a GPU (`torch.cuda.max_memory_allocated`).

Before an engine serves requests, it runs a layer without a plan (`metadata=None`) to measure the memory that a step
needs. The tests call this run of the layer the *profile run*.
"""

from __future__ import annotations

import pytest
import torch

import fast
from reference.interfaces import MLAConfig, context_workspace_size

from ..support.backends import own_backends, with_backends
from ..support.factories import make_layer, make_weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOKENS, WORKSPACE, BLOCK = 1024, 4096, 64


@pytest.fixture(scope="module")
def config():
    return MLAConfig.from_preset("deepseek-v2-lite")


@pytest.fixture(autouse=True)
def on_the_gpu(default_device):
    """Make tensors on the GPU, whatever `--device` is."""
    with torch.device("cuda"):
        yield


@pytest.fixture(autouse=True)
def own_kernels(monkeypatch):
    """Choose only among the backends of `fast`; kernels of other projects allocate memory of their own."""
    with_backends(monkeypatch, *own_backends())


@pytest.fixture(autouse=True)
def memory_without_poison():
    """Do not fill new memory with NaN, which takes time and changes no size."""
    was = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = was


def peak_of(call) -> int:
    """Return the peak of the allocated bytes during a call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del result
    return peak


def plan_of(builder, query_lens, context_lens):
    """Return the plan of a batch in which all requests read the same blocks of the cache."""
    seq_lens = [q + c for q, c in zip(query_lens, context_lens, strict=True)]
    columns = -(-max(seq_lens) // BLOCK)
    table = torch.arange(columns, dtype=torch.int32).repeat(len(seq_lens), 1)
    return builder.build(0, fast.CommonAttentionMetadata.from_lens(query_lens, seq_lens, table, BLOCK))


@pytest.mark.parametrize("shared", ["given", "of the plan"])
def test_a_prefill_needs_what_the_profile_run_touched(config, shared):
    """Run prefills with contexts of very different lengths -> no peak above that of the profile run, nor far below it.

    The peaks differ by less than an attention state of all query tokens: a chunk that some requests do not attend needs
    a smaller state.

    A layer expands the context in a workspace of fixed size. The workspace is an argument of the layer ("given") or
    belongs to the builder ("of the plan"). The workspace keeps its memory after the first step, so every later peak
    includes this memory.
    """
    dtype = torch.bfloat16
    workspace = None
    if shared == "given":
        workspace = fast.ContextWorkspace(torch.empty(context_workspace_size(config, WORKSPACE), dtype=dtype))
    layer = make_layer(
        fast, config, make_weights(config, dtype), dtype, workspace_tokens=WORKSPACE, workspace=workspace
    )
    builder = fast.MLAMetadataBuilder(config, BLOCK, 65536, 16, workspace_tokens=WORKSPACE, batch_invariant=True)
    cache = torch.zeros(1024, BLOCK, config.head_size, dtype=dtype)
    given = torch.randn(TOKENS, config.hidden_size).to(dtype), torch.arange(TOKENS), cache
    plans = [
        plan_of(builder, [1000, 24], contexts) for contexts in ([10, 7], [4000, 96], [60000, 1], [1, 50000])
    ]  # fmt: skip
    prompts = plan_of(builder, [1000, 24], [0, 0])
    for plan in (None, *plans, prompts):  # warm-up: compiles kernels, and lets cuBLAS allocate its own workspace
        layer(*given, plan)
    if workspace is None:
        builder.workspace.memory = None
    torch.cuda.empty_cache()
    profile = peak_of(lambda: layer(*given, None))
    peaks = [peak_of(lambda plan=plan: layer(*given, plan)) for plan in plans]
    state = TOKENS * config.num_heads * (config.v_head_dim + 1) * torch.float32.itemsize
    assert max(peaks) - min(peaks) < state, peaks
    assert max(peaks) <= profile, f"a step has {max(peaks) - profile} bytes more than the profile run"
    assert peak_of(lambda: layer(*given, prompts)) <= profile
    memory = builder.workspace.memory if workspace is None else workspace.memory
    assert memory.shape[0] == context_workspace_size(config, WORKSPACE)


def test_no_allocation_in_the_context_loop(config):
    """Run prefills with contexts of 1, 4 and 8 chunks, given a workspace and an output tensor -> equal peaks."""
    dtype = torch.bfloat16
    shape = TOKENS, config.num_heads
    q = torch.randn(*shape, config.qk_head_dim).to(dtype)
    latents, k_pe = torch.randn(TOKENS, config.kv_lora_rank).to(dtype), torch.randn(TOKENS, 64).to(dtype)
    cache = torch.randn(1024, BLOCK, config.head_size).to(dtype)
    up = torch.randn(config.kv_lora_rank, config.num_heads, config.qk_nope_head_dim + config.v_head_dim).to(dtype)
    w_uk, w_uv = up.split([config.qk_nope_head_dim, config.v_head_dim], -1)
    builder = fast.MLAMetadataBuilder(config, BLOCK, 65536, 16, workspace_tokens=WORKSPACE, batch_invariant=True)
    out, workspace = torch.empty(*shape, config.v_head_dim, dtype=dtype), fast.ContextWorkspace()
    workspace.reserve(context_workspace_size(config, WORKSPACE), dtype, q.device)
    peaks = []
    for context in (WORKSPACE, 4 * WORKSPACE, 8 * WORKSPACE):
        plan = plan_of(builder, [TOKENS], [context]).prefill
        assert len(plan.context_chunks) == context // WORKSPACE

        def run(plan=plan):
            return fast.forward_prefill(q, latents, k_pe, cache, plan, w_uk, w_uv, 0.1, return_lse=False, out=out,
                                        workspace=workspace)  # fmt: skip

        run()
        held = torch.cuda.memory_allocated()  # measured for each plan, because block tables have different lengths
        peaks.append(peak_of(run) - held)
    assert len(set(peaks)) == 1, peaks
