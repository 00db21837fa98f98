"""Tests of compilation ahead of time: `fast.warmup` launches every kernel, so that later steps compile nothing.

A variant of a kernel is a combination of argument types and constants. Triton compiles a variant at its first launch.
"""

from __future__ import annotations

import contextvars
import importlib
import itertools
import logging
import os
import re
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import fast
from fast import compilation
from fast.backends import GQA_OPS
from fast.kernels import cpu
from fast.kernels.schedule_costs import measured_schedule_costs
from reference.interfaces import CACHE_FORMATS, COMPUTE_FORMAT, E4M3, DecodeSchedule, MLAConfig

from .support.backends import cpu_backend, noting_kernels, with_backends
from .support.compiled import Recorded, compiled, without_products
from .support.factories import CONFIGS, DIRECT, LOW_RANK, make_batch, make_layer, make_weights
from .support.format_caches import FORMATS, SMALL, poisoned_cache

gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


pytestmark = pytest.mark.usefixtures("without_shape_checks")


@pytest.mark.parametrize("config, num_ranks", [*((each, 1) for each in CONFIGS.values()), (DIRECT, 2)])
def test_every_kernel_of_a_set_is_launched(monkeypatch, config, num_ranks):
    """Warm up a layer -> every kernel is launched, those of context parallelism by ranks that share sequences.

    To save time, the launches of `mla_decode` for more than two requests do not attend, and return zeros.
    """
    launched = set()
    with_backends(monkeypatch, cpu_backend(noting_kernels(launched)))
    config = replace(config, num_heads=num_ranks * config.num_heads)
    groups = fast.simulate(num_ranks, 8, lambda ranks: ranks)[0] if num_ranks > 1 else None
    settings = dict(device="cpu", dtype=torch.float32, block_size=16, decode_threshold=2, fp8_weights=True)
    assert fast.warmup(config, **settings, context_parallel=groups) == []
    of_ranks = {"merge_packed_attn_states", "pack_attn_state", "reorg_kvcache", "weight_attn_out"}
    assert launched == set(cpu.KERNELS) - {*GQA_OPS} - (of_ranks if groups is None else set())


def test_refusals(plain_errors):
    with pytest.raises(ValueError, match="^dtype: expected .*, got torch.int8$"):
        fast.warmup(DIRECT, device="cpu", dtype=torch.int8)
    with pytest.raises(ValueError, match="^block_size: expected at least 1, got 0$"):
        fast.warmup(DIRECT, device="cpu", block_size=0)
    with pytest.raises(ValueError, match="^fp8_mode: expected converted for format compute_dtype, got fp8_query$"):
        fast.warmup(DIRECT, device="cpu", fp8_mode="fp8_query")
    for name in ("fp8_weights", "fp8_output"):
        with pytest.raises(TypeError, match=f"^{name}: expected True or False, got int$"):
            fast.warmup(DIRECT, device="cpu", **{name: 1})
    with pytest.raises(ValueError, match="^device: expected one of the . CUDA devices that torch sees, got cuda:9$"):
        fast.warmup(DIRECT, device="cuda:9")
    with pytest.raises(ValueError, match="^decode_threshold: expected at least 1, got 0$"):
        fast.warmup(DIRECT, device="cpu", decode_threshold=0)
    with pytest.raises(fast.UnsupportedConfiguration, match="triton: serves device cuda, got cpu"):
        fast.warmup(DIRECT, device="cpu", backend="triton")


# Tests of log messages about compiled kernels.


def facts(module: str) -> dict:
    """Return the arguments with which Triton calls a compile hook for a kernel of the given module."""
    signature = {"out": "*bf16", "lse": "*fp32", "table": "*i32", "tokens": "i32", "HEADS": "constexpr"}
    kernel = SimpleNamespace(module=module, name="_decode_kernel", jit_function=f"kernel of {module}")
    return {
        "fn": kernel, "key": "", "repr": "", "is_manual_warmup": False,
        "already_compiled": False, "compile": {"signature": signature, "constants": {(4,): 16, (3,): 1}},
    }  # fmt: skip


def test_what_is_told(monkeypatch, caplog):
    pytest.importorskip("triton")
    from fast.kernels import compile_log

    others, hashed = [], []
    monkeypatch.setattr(compile_log, "hash_callees_first", hashed.append)
    runtime = SimpleNamespace(jit_cache_hook=lambda **facts: others.append(facts) or True, jit_post_compile_hook=None)
    monkeypatch.setattr(compile_log.knobs, "runtime", runtime)
    compile_log.install()
    caplog.set_level(logging.INFO, "fast.kernels")
    assert runtime.jit_cache_hook(**facts("fast.kernels.triton.decode")) is True  # the earlier hook is called
    assert runtime.jit_post_compile_hook(**facts("fast.kernels.triton.decode")) is None
    with compile_log.compiling_ahead() as lines:
        runtime.jit_cache_hook(**facts("fast.kernels.triton.decode"))
        runtime.jit_cache_hook(**facts("somebody.elses"))
    kernel = "decode_kernel (bf16, fp32, HEADS 16)"
    assert lines == [kernel] and len(others) == 3 and hashed == 2 * ["kernel of fast.kernels.triton.decode"]
    assert [(record.levelname, record.getMessage()) for record in caplog.records if "compiled" not in record.msg] == [
        ("WARNING", f"compiling {kernel} on first use; for MLA, fast.warmup(config) compiles it ahead"),
        ("INFO", f"compiling {kernel}"),
    ]
    assert "compiled decode_kernel in 0.0 s" in caplog.text


# After `warmup`, steps compile nothing. GPU tests count compilations. CPU tests record the variants that are launched.

STEPS = (
    ([1], [17]), ([1] * 16, [33] * 16), ([2, 1, 3, 0], [500, 1, 70, 9]), ([3] * 48, [31] * 48),
    ([1] * 7, [2000] * 7), ([1] * 100, [40] * 100), ([2] * 300, [40] * 300), ([1, 1, 16, 5], [97, 0, 33, 5]),
    ([64], [64]), ([4, 37, 9], [4, 100, 75]), ([1, 20, 17], [9, 2000, 900]),
)  # fmt: skip


def layer_of(config, dtype, cache_format, **options):
    """Return a layer of `fast` with random weights; a cache with one scale has the scale 0.5."""
    options |= {"cache_format": cache_format, "kv_scale": 0.5 if cache_format.layer_scale else None}
    return make_layer(fast, config, make_weights(config, dtype), dtype, **options)


def attend(layer, output_scale, hidden_states, positions, cache, plan):
    """Run the attention of a layer with an output in e4m3."""
    output = torch.empty(len(positions), layer.config.num_heads, layer.config.v_head_dim, dtype=E4M3)
    layer.forward_attention(*layer.project(hidden_states, positions), cache, plan, output, output_scale)


def serve(
    config, dtype, threshold, batch_invariant=False, cache_format=COMPUTE_FORMAT, output_scale=None, **options
):  # fmt: skip
    """Run a layer in all steps of `STEPS`, with several plans for a step.

    - The plan of `build_mla_metadata`.
    - If the step has decodes only: the plan that a captured CUDA graph has.
    - If the step has only decodes, at least two, all longer than one block, and `batch_invariant` is false: a plan for
      a shared prefix (cascade).
    - A plan with a schedule of `plan_decode`. The schedule is batch-invariant if `batch_invariant` is true.
    - With `batch_invariant`: a plan whose schedule is batch-invariant and has no work items.

    `options` are options of the layer. With an `output_scale`, only the attention of the layer runs.
    """
    layer = layer_of(config, dtype, cache_format, **options)
    run = layer if output_scale is None else partial(attend, layer, output_scale)
    costs = measured_schedule_costs(config.num_heads)
    for query_lens, seq_lens in STEPS:
        batch = make_batch(query_lens, seq_lens, padding=len(query_lens) % 2)
        cache = poisoned_cache(batch.num_blocks, 16, config, cache_format, dtype)
        asked = None if sum(query_lens) % 2 else config
        programs = 0 if batch_invariant else None  # 0: no schedule; batch-invariant steps get their schedule below
        plan = fast.build_mla_metadata(
            batch.common, 16, 16 * len(query_lens), threshold, asked, num_programs=programs, cache_format=cache_format,
            fp8_mode=layer.fp8_mode,
        )  # fmt: skip
        tokens = batch.common.slot_mapping.shape[0]
        inputs = torch.randn(tokens, config.hidden_size).to(dtype), torch.arange(tokens), cache
        run(*inputs, plan)
        shared = (min(seq_lens) - 1) // 16 * 16
        if max(query_lens) <= threshold and shared > 0 and len(seq_lens) > 1 and not batch_invariant:
            run(*inputs, replace(plan, cascade=fast.split_shared_prefix(plan.decode, shared, 16)))
        if max(query_lens) <= threshold:
            tokens = sum(query_lens)
            captured = fast.plan_captured_decodes(
                batch.common, 16, 0, costs, batch_invariant, cache_format=cache_format, fp8_mode=layer.fp8_mode
            )
            # these lengths replace undefined values: the kernel of `compute_visible_lens` was recorded and did not run
            visible = plan.decode.visible_lens
            captured = replace(captured, decode=replace(captured.decode, visible_lens=visible))
            run(inputs[0][:tokens], inputs[1][:tokens], cache, captured)
        planned = fast.plan_decode(plan.decode.seq_lens, 9, costs, batch_invariant)
        run(*inputs, replace(plan, schedule=planned))
        if batch_invariant:
            run(*inputs, replace(plan, schedule=DecodeSchedule(batch_invariant=True, split_rule=costs.split_rule)))


GRAPH_SIZES = (1, 2, 3, 4, 8, 16, 17, 64, 130, 513)


def serve_captured(
    config, dtype, threshold, batch_invariant=False, sizes=GRAPH_SIZES, longest=4096, cache_format=COMPUTE_FORMAT,
    **options,
):  # fmt: skip
    """Run a `DecodeGraph` of many batch sizes for each query length from 1 to `threshold`.

    The block table has room for requests of `longest` tokens. `options` are options of the layer.
    """
    layer = layer_of(config, dtype, cache_format, **options)
    cache = poisoned_cache(4, 16, config, cache_format, dtype)
    columns = longest // 16
    builder = fast.MLAMetadataBuilder(
        config, 16, longest, sizes[-1], num_speculative_tokens=threshold - 1, batch_invariant=batch_invariant,
        dtype=dtype, cache_format=cache_format, fp8_mode=layer.fp8_mode,
    )  # fmt: skip

    def step(hidden_states, positions, plan):
        # zeros replace undefined values: the kernel of `compute_visible_lens` was recorded and did not run
        visible = torch.zeros_like(plan.decode.visible_lens)
        return layer(hidden_states, positions, cache, replace(plan, decode=replace(plan.decode, visible_lens=visible)))

    for query_len in range(1, threshold + 1):
        graph = fast.DecodeGraph(step, builder, sizes, columns, config.hidden_size, dtype, cache.device, query_len)
        for size in sizes:
            graph.replay(size)


LAUNCHERS = (
    "combine.launch", "triton.advance", "triton.attention", "triton.cache", "triton.cache_formats", "triton.decode",
    "triton.merge", "triton.padding_tokens", "triton.rope", "triton.schedule", "triton.scheduled_decode",
    "triton.visible_lens", "triton.weights",
)  # fmt: skip
KERNELS = {
    "_advance_step_kernel", "_combine_scheduled_kernel", "_combine_splits_kernel", "_copy_blocks_kernel",
    "_decode_kernel", "_flash_attn_varlen_kernel", "_gather_kernel", "_merge_kernel", "_plan_decode_kernel",
    "_rope_kernel", "_rope_norm_cache_kernel", "_scheduled_decode_kernel", "_visible_lens_kernel", "_write_kernel",
    "_zero_padding_kernel",
}  # fmt: skip


MODE_CASES = [("fp8_e4m3", True), ("fp8_ds_mla", False)]  # cache format, whether the absorbed weights are in e4m3
if os.environ.get("HYPOTHESIS_PROFILE") == "deep":
    MODE_CASES = list(itertools.product(FORMATS, (False, True)))


@pytest.fixture
def launches(monkeypatch):
    """Let the Triton backend serve CPU tensors, record its launches instead of running them, and return the record."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("interpreted kernels are not compiled")
    from fast.kernels import triton as kernels

    found = {}
    for name in LAUNCHERS:
        module = importlib.import_module(f"fast.kernels.{name}")
        for kernel in [key for key in vars(module) if key.endswith("_kernel")]:
            monkeypatch.setattr(module, kernel, Recorded(getattr(module, kernel), found))
    without_products(monkeypatch)
    with_backends(monkeypatch, cpu_backend(kernels.KERNELS))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_warmup_specialises_for_every_step(launches, config, dtype):
    fast.warmup(config, device="cpu", dtype=dtype, block_size=16, decode_threshold=3)
    ahead = set(launches)
    assert {key[0] for key in ahead} == KERNELS - ({"_rope_kernel"} if config.qk_rope_head_dim == 0 else set())
    serve(config, dtype, 3)
    assert set(launches) == ahead
    serve_captured(config, dtype, 3)
    assert set(launches) == ahead


@pytest.mark.parametrize("name", FORMATS)
def test_warmup_specialises_for_formats(launches, name):
    """Warm up for an fp8 format -> steps over such a cache launch only kernel variants that warm-up launched."""
    cache_format, config, _ = FORMATS[name]
    fast.warmup(
        config, device="cpu", dtype=torch.bfloat16, block_size=16, decode_threshold=2, cache_format=cache_format
    )
    ahead = set(launches)
    serve(config, torch.bfloat16, 2, cache_format=cache_format)
    serve_captured(config, torch.bfloat16, 2, cache_format=cache_format)
    assert set(launches) == ahead


def test_warmup_specialises_for_fp8_weights(launches):
    """Warm up for absorbed weights in e4m3 -> steps of any size launch only kernel variants that warm-up launched."""
    given = dict(cache_format=FORMATS["fp8_e4m3"][0], fp8_weights=True)
    fast.warmup(SMALL, device="cpu", dtype=torch.bfloat16, block_size=16, decode_threshold=2, **given)
    ahead = set(launches)
    products = {key for key in ahead if key[0] == "_multiply_heads_kernel"}
    assert len(products) == 2 * len(compilation.PRODUCT_TOKENS)  # for W_UK and for W_UV
    serve(SMALL, torch.bfloat16, 2, **given)
    serve_captured(SMALL, torch.bfloat16, 2, **given)
    assert set(launches) == ahead


def test_warmup_specialises_for_outputs_in_e4m3(launches):
    """Warm up with `fp8_output` -> a layer with an `output_scale` writes outputs with variants of warm-up alone."""
    fast.warmup(DIRECT, device="cpu", dtype=torch.bfloat16, block_size=16, decode_threshold=2, fp8_output=True)
    ahead = set(launches)
    serve(DIRECT, torch.bfloat16, 2, output_scale=torch.tensor(0.5))
    assert not [key for key in set(launches) - ahead if "decode_kernel" not in key[0]]  # decodes write no e4m3
    assert "_multiply_heads_kernel" in {key[0] for key in ahead}


def test_product_tokens():
    """`PRODUCT_TOKENS` has one number of tokens for each kernel variant of `multiply_heads`."""
    pytest.importorskip("triton")
    from fast.kernels.triton.weights import variant_tokens

    assert variant_tokens(10**6) == list(compilation.PRODUCT_TOKENS)


@pytest.mark.parametrize("name, fp8_weights", MODE_CASES)
def test_warmup_specialises_for_modes(launches, name, fp8_weights):
    """Warm up for queries in e4m3 -> later steps, also with prefills, launch only variants that warm-up launched."""
    cache_format, config, _ = FORMATS[name]
    given = dict(cache_format=cache_format, fp8_weights=fp8_weights, fp8_mode="fp8_query")
    fast.warmup(config, device="cpu", dtype=torch.bfloat16, block_size=16, decode_threshold=2, **given)
    ahead = set(launches)
    assert {"_multiply_heads_kernel", "_rope_norm_quantize_kernel"} <= {key[0] for key in ahead}
    serve(config, torch.bfloat16, 2, **given, q_scale=0.5)
    serve_captured(config, torch.bfloat16, 2, **given, q_scale=0.5)
    assert set(launches) == ahead


def test_warmup_specialises_for_batch_invariance(launches):
    """Warm up for batch invariance -> later batch-invariant steps launch no kernel variant that is new."""
    fast.warmup(LOW_RANK, device="cpu", dtype=torch.bfloat16, block_size=16, decode_threshold=3, batch_invariant=True)
    ahead = set(launches)
    assert {"_plan_invariant_kernel", "_combine_invariant_kernel"} <= {key[0] for key in ahead}
    serve(LOW_RANK, torch.bfloat16, 3, batch_invariant=True)
    serve_captured(LOW_RANK, torch.bfloat16, 3, batch_invariant=True)
    assert set(launches) == ahead


def test_a_compiler_cannot_fuse_what_a_combination_rounds(launches):
    """Compile the combine kernel -> it rounds each product of weight and partial output before the addition.

    Some splits are combined by a program of the decode kernel, which rounds this product. If the compiler fused the
    product and the addition in the combine kernel, the results of the two kernels would differ. The combine kernel
    prevents the fusion: it computes `sum x 1 + product` with a factor 1 that the compiler does not know. The test
    counts the fused multiply-adds with this factor in the PTX (GPU assembly).
    """
    fast.warmup(LOW_RANK, device="cpu", dtype=torch.bfloat16, block_size=16, decode_threshold=3, batch_invariant=True)
    combines = [launch for key, launch in launches.items() if key[0] == "_combine_invariant_kernel"]
    assert combines
    for kernel, kinds, constants in combines:
        ptx = compiled(kernel, kinds, constants, (9, 0)).asm["ptx"]
        (one,) = set(re.findall(r"selp\.f32\s+(%\w+), 0f3F800000, 0f00000000", ptx))
        added = re.findall(rf"fma\.rn\.f32\s+%\w+, %\w+, {one}, %\w+;", ptx)
        values = constants["ROWS"] * constants["COLUMNS"] // (32 * constants["num_warps"])  # elements of one thread
        assert len(added) >= constants["SPLITS"] * max(1, values)


CHIPS = {  # GPU: number of multiprocessors, compute capability, bytes of shared memory available to a program
    "A100": (108, (8, 0), 166912),
    "RTX 4090": (128, (8, 9), 101376),
    "H200": (132, (9, 0), 232448),
    "B200": (148, (10, 0), 232448),
    "RTX 5090": (170, (12, 0), 101376),
}


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("chip", CHIPS)
def test_kernels_compile_for(chip, heads, launches, monkeypatch):
    """Compile the kernels of a layer with DeepSeek's dimensions for a GPU -> each kernel fits into shared memory.

    By default the test compiles only the decode kernels, the combine kernels, the attention kernel, and the kernel of
    `advance_step`, for two GPUs: an RTX 4090, which has the least shared memory, and an H200.

    If the constant `DEPENDENT` of a kernel is true, the kernel starts before the preceding kernel has ended. The test
    checks that `DEPENDENT` is true for the planner kernel, the combine kernels and the kernel of `advance_step` on GPUs
    that support such a start, and false on other GPUs.
    """
    from fast.kernels.combine import launch as combine_launch
    from fast.kernels.device import DeviceFacts
    from fast.kernels.triton import advance, attention, decode, schedule

    facts = DeviceFacts(*CHIPS[chip])
    deep = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
    if not deep and (chip, heads) not in (("RTX 4090", 128), ("H200", 128)):
        pytest.skip("runs only with HYPOTHESIS_PROFILE=deep")
    for module in (advance, attention, decode, combine_launch, schedule):
        monkeypatch.setattr(module, "device_facts", lambda device: facts)
    config = replace(MLAConfig.from_preset("deepseek-v2-lite"), num_heads=heads)
    fast.warmup(config, device="cpu", dtype=torch.bfloat16, block_size=64)
    wanted = {
        key: launch
        for key, launch in launches.items()
        if deep or any(word in key[0] for word in ("decode", "attn", "combine_s", "advance"))
    }
    followers = {
        key[0]: constants
        for key, (_, _, constants) in wanted.items()
        if {"combine", "plan", "advance"} & {*key[0].split("_")}
    }
    waiting = {"_advance_step_kernel", "_combine_scheduled_kernel", "_combine_splits_kernel", "_plan_decode_kernel"}
    assert waiting <= set(followers)
    assert all(found["DEPENDENT"] == facts.has_dependent_launch for found in followers.values())
    for launch in wanted.values():
        kernel = compiled(*launch, facts.capability)
        assert kernel.metadata.shared <= facts.shared, f"{launch[0].fn.__name__}: {kernel.metadata.shared} bytes"
        if launch[0].fn.__name__ == "_combine_scheduled_kernel" and facts.has_dependent_launch:
            reads_before_its_wait(kernel.asm["ptx"], launch[2]["ONE_TILE"])


def reads_before_its_wait(ptx, one_tile):
    """Assert that the combine kernel waits for the decode kernel before it reads partial outputs.

    Before the wait, the variant with one tile for each program reads the schedule of a single request: two offsets of
    splits and two of query tokens, with loads that bypass the L1 cache (`.cg`). The other variant reads nothing.
    """
    wait = "griddepcontrol.wait"
    steps = re.findall(r"griddepcontrol\.wait|ld\.global[.\w]*", ptx)
    early = [number for number, step in enumerate(steps) if ".cg" in step]
    assert all(".cg" in step for step in steps[: steps.index(wait)]) and steps[-1] != wait, steps
    assert len(early) == (4 if one_tile else 0) and steps.count(wait) == (2 if one_tile else 1), steps
    if early:  # the wait follows at once: no partial output is read before it
        assert early == list(range(early[0], early[-1] + 1)) and steps[early[-1] + 1] == wait, steps


def test_too_wide_for_a_chip():
    """Ask for tiles that are too wide for the GPU's shared memory -> an error of one line, and no launch."""
    pytest.importorskip("triton")
    from fast.kernels.device import DeviceFacts
    from fast.kernels.triton.attention_sizes import blocks_for
    from fast.kernels.triton.decode import launch_shape

    small = DeviceFacts(1, (8, 6), 101376)
    wanted = r"^triton: mla_decode has no tile for 2112 columns \(torch.float32\) within 101376 bytes of shared memory$"
    with pytest.raises(fast.UnsupportedConfiguration, match=wanted):
        launch_shape(1, 64, 2048 + 64, torch.float32, 4, small.capability, small.shared)
    wanted = "^triton: flash_attn_varlen has no tile for keys of 4096 columns and values of 4096 columns "
    with pytest.raises(fast.UnsupportedConfiguration, match=wanted):
        blocks_for(torch.bfloat16, small, 4096, 4096, False)


@gpu_only
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_warmup_leaves_nothing_to_compile(dtype, batch_invariant):
    from fast.kernels.compile_log import compiling_ahead

    fast.warmup(
        LOW_RANK, device="cuda", dtype=dtype, block_size=16, decode_threshold=3, batch_invariant=batch_invariant
    )
    with torch.device("cuda"), compiling_ahead() as compiled:
        serve(LOW_RANK, dtype, 3, batch_invariant)
        serve_captured(LOW_RANK, dtype, 3, batch_invariant)
    assert compiled == []


@gpu_only
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("heads, name", [(16, "compute_dtype"), (128, "compute_dtype"), (16, "fp8_e4m3")])
def test_warmup_leaves_nothing_to_compile_of_published_dims(heads, name, batch_invariant):
    """Warm up for the dimensions of DeepSeek-V2-Lite -> later steps, eager and in CUDA graphs, compile nothing.

    On a Hopper GPU the kernels for Hopper serve these dimensions.
    """
    from fast.kernels.compile_log import compiling_ahead

    config = replace(MLAConfig.from_preset("deepseek-v2-lite"), num_heads=heads)
    given = dict(dtype=torch.bfloat16, batch_invariant=batch_invariant, cache_format=CACHE_FORMATS[name])
    fast.warmup(config, block_size=16, decode_threshold=2, **given)
    with torch.device("cuda"), compiling_ahead() as compiled:
        serve(config, threshold=2, **given)
        serve_captured(config, threshold=2, longest=32768, **given)
    assert compiled == []


@gpu_only
def test_first_use_is_told(caplog):
    """Call an op without warm-up -> the log names the kernel that is compiled and its constants."""
    with torch.device("cuda"):
        kv_c, k_pe = torch.randn(3, 56), torch.randn(3, 4)
        cache = torch.empty(2, 19, 60)
        fast.concat_and_cache_mla(kv_c, k_pe, cache, torch.arange(3))
    assert "compiling write_kernel (" in caplog.text and "LATENT 56" in caplog.text


# Threads that compile at the same time, and the progress bar.


def test_a_kernel_is_compiled_by_one_thread():
    """Two threads need the same kernel -> the second thread waits, and compiles it only if the first thread failed."""
    pytest.importorskip("triton")
    from fast.kernels.compile_log import SharedCompilations

    shared, events = SharedCompilations(), []

    def other() -> None:
        events.append(shared.claim("kernel"))
        shared.finish("kernel")

    assert shared.claim("kernel") and shared.claim("another")
    assert shared.claim("kernel"), "a thread does not wait for itself"
    thread = threading.Thread(target=other)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and events == []
    assert shared.finish("kernel")
    thread.join(10)
    assert events == [False] and not shared.claim("kernel") and not shared.finish("kernel")
    thread = threading.Thread(target=lambda: events.append(shared.claim("another")))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    shared.give_up()
    thread.join(10)
    assert events == [False, True]


def test_shared_compilations_are_told_once(monkeypatch, caplog):
    """Eight threads compile the same kernel -> the kernel is compiled and logged once."""
    pytest.importorskip("triton")
    from fast.kernels import compile_log

    runtime = SimpleNamespace(jit_cache_hook=None, jit_post_compile_hook=None)
    monkeypatch.setattr(compile_log.knobs, "runtime", runtime)
    monkeypatch.setattr(compile_log, "hash_callees_first", lambda _: None)
    compile_log.install()
    caplog.set_level(logging.INFO, "fast.kernels")
    with compile_log.compiling_ahead() as lines, compile_log.share_compilations():

        def compile_once() -> None:
            assert runtime.jit_cache_hook(**facts("fast.kernels.triton.decode")) is None
            runtime.jit_post_compile_hook(**facts("fast.kernels.triton.decode"))

        threads = [threading.Thread(target=contextvars.copy_context().run, args=(compile_once,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert len(lines) == 1 and [record.msg for record in caplog.records] == ["compiling %s", "compiled %s in %.1f s"]


class CountingBar(compilation._Bar):
    def __init__(self):
        self.expected = self.done = 0

    def grow(self, launches):
        self.expected += launches

    def advance(self):
        self.done += 1


@pytest.mark.parametrize("threads", [1, 3])
def test_launches_run_in_threads(threads):
    """Run 20 launches in threads -> each launch runs once with the caller's torch settings; the bar counts to 20.

    An error in one launch ends the warm-up before all launches have run.
    """
    bar, ran = CountingBar(), []

    def launch(number: int) -> None:
        assert torch.is_inference_mode_enabled() and torch.get_default_device().type == "meta"
        ran.append((number, threading.get_ident()))

    with torch.inference_mode(), torch.device("meta"):
        compilation._run([partial(launch, number) for number in range(20)], threads, bar)
    assert sorted(number for number, _ in ran) == list(range(20)) and (bar.expected, bar.done) == (20, 20)
    assert (threading.get_ident() in {thread for _, thread in ran}) == (threads == 1)

    def fail() -> None:
        raise fast.UnsupportedConfiguration(["no kernel"])

    with pytest.raises(fast.UnsupportedConfiguration, match="no kernel"):
        compilation._run([fail, *[lambda: time.sleep(0.01)] * 50], threads, bar)
    assert bar.done < 70


def test_progress_bar(plain_errors, monkeypatch, capsys):
    """Warm up with `progress=True` -> a bar on stderr; by default no bar, because stderr is no terminal here."""
    monkeypatch.setattr(compilation, "_launches", lambda *given: [lambda: None] * 7)
    settings = {"device": "cpu", "dtype": torch.float32, "block_size": 16}
    fast.warmup(DIRECT, **settings)
    assert capsys.readouterr() == ("", "")
    fast.warmup(DIRECT, **settings, progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "compiling kernels" in shown.err and "100%" in shown.err
    with pytest.raises(ValueError, match="^progress: expected a bool or None, got 3$"):
        fast.warmup(DIRECT, **settings, progress=3)
    with pytest.raises(ValueError, match="^threads: expected at least 1, or None, got 0$"):
        fast.warmup(DIRECT, **settings, threads=0)
