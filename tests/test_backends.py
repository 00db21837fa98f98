"""Kernel choice is data: by capability when nobody asks, never replaced when somebody does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
from fast import backends
from fast.backends import Backend, KernelRequest
from reference.interfaces import DecodeSchedule, MLAConfig, QueryLenSupport, UnsupportedConfiguration

from .factories import (
    CONFIGS,
    DIRECT,
    assert_same_bits,
    integers,
    make_batch,
    make_cache,
    make_entries,
    make_layer,
    make_weights,
)

CPU = torch.device("cpu")
REQUEST = KernelRequest("mla_decode", CPU, torch.float32, (("kv_lora_rank", 512),), 64)


def test_every_op_has_a_cpu_kernel():
    assert backends.select(REQUEST).name == "cpu"
    names = {"apply_rope", "concat_and_cache_mla", "copy_blocks", "flash_attn_varlen", "gather_and_maybe_dequant_cache",
             "merge_attn_states", "mla_decode", "swap_blocks"}  # fmt: skip
    for op in names:
        assert backends.select(replace(REQUEST, op=op)).name == "cpu"
        assert callable(backends.kernel("cpu", op))


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(op="wgmma"), "narrow: has no kernel for wgmma"),
        (dict(device=torch.device("meta")), "narrow: serves device cpu, got meta"),
        (dict(dtype=torch.float64), "narrow: serves torch.float32, got torch.float64"),
        (dict(head_dims=(("kv_lora_rank", 256),)), "narrow: serves kv_lora_rank in (512,), got 256"),
        (dict(block_size=7), "narrow: serves block sizes (64,), got 7"),
        (dict(query_lens=QueryLenSupport.VARLEN), "narrow: serves query lengths uniform, got varlen"),
    ],
)
def test_reasons(change, reason):
    """Each thing that a kernel set declares, refused in one line."""
    narrow = Backend(
        "narrow", 5, "cpu", {"mla_decode": print}, (torch.float32,), None, {"kv_lora_rank": (512,)}, (64,),
        QueryLenSupport.UNIFORM,
    )  # fmt: skip
    assert narrow.validate_configuration(REQUEST) == []
    assert narrow.validate_configuration(replace(REQUEST, query_lens=QueryLenSupport.UNIFORM)) == []
    assert narrow.validate_configuration(replace(REQUEST, **change)) == [reason]


def test_every_reason_at_once():
    narrow = Backend("narrow", 5, "cuda", {}, (torch.float16,), (9, 0), None, (128,))
    assert len(narrow.validate_configuration(REQUEST)) == 4


def test_choice_is_by_capability_then_priority(monkeypatch):
    kernels = {"mla_decode": print}
    table = (
        Backend("low", 1, "cpu", kernels), Backend("high", 3, "cpu", kernels, (torch.bfloat16,)),
        Backend("middle", 2, "cpu", kernels),
    )  # fmt: skip
    monkeypatch.setattr(backends, "BACKENDS", table)
    assert backends.select(REQUEST).name == "middle"
    assert backends.select(replace(REQUEST, dtype=torch.bfloat16)).name == "high"
    assert backends.select(REQUEST, "low").name == "low"
    with pytest.raises(UnsupportedConfiguration, match="^high: serves torch.bfloat16, got torch.float32$") as error:
        backends.select(REQUEST, "high")
    assert len(error.value.reasons) == 1
    with pytest.raises(UnsupportedConfiguration) as error:
        backends.select(replace(REQUEST, op="nothing"))
    assert [reason.split(":")[0] for reason in error.value.reasons] == ["high", "high", "middle", "low"]


def test_unknown_name():
    with pytest.raises(ValueError, match="^backend: expected one of .*cpu.*, got nosuch$"):
        backends.select(REQUEST, "nosuch")


def decode_arguments():
    batch = make_batch([1, 1], [20, 5])
    entries = make_entries(batch, DIRECT.head_size, torch.float32)
    plan = fast.build_mla_metadata(batch.common, 16, 64)
    return (
        torch.randn(2, 3, 24),
        torch.randn(2, 3, 8),
        make_cache(batch, entries, 32, torch.float32),
        plan.decode,
        0.3,
    )


def test_schedule_changes_no_value(ops):
    """It is a plan of time: the bits are those without it."""
    q, k_pe, cache, plan, scale = decode_arguments()
    schedule = DecodeSchedule(integers(0, 0, 0, 1, 0).view(1, 5), integers(0, 1, 2))
    with_schedule, without = (
        ops.mla_decode(q, k_pe, cache, plan, scale, schedule),
        ops.mla_decode(q, k_pe, cache, plan, scale),
    )
    assert torch.equal(with_schedule.out, without.out) and torch.equal(with_schedule.lse, without.lse)


@pytest.mark.parametrize(
    "lens, wanted",
    [((1, 1, 1), "SINGLE_ONLY"), ((0, 1), "VARLEN"), ((2, 2), "UNIFORM"), ((1, 3), "VARLEN"), ((2, 2, 0), "VARLEN")],
)
def test_query_lens_of(lens, wanted):
    """A batch is uniform only where every request is as long as the bound; a length of 0 breaks it."""
    assert backends.query_lens_of(sum(lens), len(lens), max(lens)).name == wanted


def test_layer_refuses_an_unknown_backend():
    with pytest.raises(ValueError, match="^backend: expected one of cpu, triton, hopper, got nosuch$"):
        make_layer(fast, DIRECT, make_weights(DIRECT, torch.float32), torch.float32, backend="nosuch")


def test_prefill_passes_the_backend_to_its_gather(monkeypatch):
    """Every op of a layer goes to the kernel set that was asked for."""
    asked = []
    right = backends.select
    monkeypatch.setattr(backends, "select", lambda request, name=None: asked.append(name) or right(request, name))
    batch = make_batch([3], [20])
    entries = make_entries(batch, DIRECT.head_size, torch.float32)
    layer = make_layer(fast, DIRECT, make_weights(DIRECT, torch.float32), torch.float32, backend="cpu")
    plan = fast.build_mla_metadata(batch.common, 16, 16)
    assert plan.prefill.context_chunks
    layer(torch.randn(3, DIRECT.hidden_size), torch.arange(17, 20), make_cache(batch, entries, 32, torch.float32), plan)
    assert len(asked) >= 5 and set(asked) == {"cpu"}


def test_an_explicit_request_is_never_replaced(plain_errors):
    """A kernel set that cannot serve raises at the call; nothing is written."""
    q, k_pe, cache, plan, scale = decode_arguments()
    calls = [
        lambda: fast.mla_decode(q, k_pe, cache, plan, scale, backend="nosuch"),
        lambda: fast.concat_and_cache_mla(q[:, 0], k_pe[:, 0], cache, torch.tensor([0, 1]), backend="nosuch"),
        lambda: fast.apply_rope(torch.arange(2), k_pe, k_pe[:, 0], DIRECT.rope, backend="nosuch"),
        lambda: fast.copy_blocks([cache], torch.tensor([[0, 1]]), backend="nosuch"),
        lambda: fast.swap_blocks(cache, cache.clone(), torch.tensor([[0, 1]]), backend="nosuch"),
        lambda: fast.gather_and_maybe_dequant_cache(
            cache, plan.block_table, integers(0, 1, 2), integers(0, 0), 2, backend="nosuch"
        ),
    ]
    before = cache.clone()
    for call in calls:
        with pytest.raises(ValueError, match="^backend: expected one of .*, got nosuch$"):
            call()
    assert_same_bits(cache, before)


def test_an_explicit_request_is_served():
    arguments = decode_arguments()
    named, chosen = fast.mla_decode(*arguments, backend="cpu"), fast.mla_decode(*arguments)
    assert_same_bits(named.out, chosen.out)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_explain(config):
    """A line an op, with who serves it; where nobody does, why."""
    lines = backends.explain(config, device="cpu", dtype=torch.bfloat16).splitlines()
    served = dict(line.split(": ", 1) for line in lines)
    assert served["mla_decode"].startswith("cpu") and served["flash_attn_varlen"].startswith("cpu")
    refused = backends.explain(config, device="meta", dtype=torch.float32).splitlines()
    assert all(": none (" in line and "serves device cpu, got meta" in line for line in refused)
    assert len(refused) == len(lines)
    with pytest.raises(ValueError, match="^backend: expected one of"):
        backends.explain(config, device="cpu", dtype=torch.float32, backend="nosuch")


@pytest.mark.parametrize("block_size, served", [(64, "hopper"), (48, "triton")])
def test_explain_decodes_together(block_size, served, monkeypatch):
    """What a decode is made of is of one kernel set, on a card that has several."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    config = MLAConfig.from_preset("deepseek-v3")
    lines = backends.explain(config, device="cuda", dtype=torch.bfloat16, block_size=block_size).splitlines()
    found = dict(line.split(": ", 1) for line in lines)
    for op in ("mla_decode", "mla_decode_parts", "merge_decode_parts", "decode_programs"):
        assert found[op].split(" ")[0] == served, op


def test_a_device_without_kernels_is_refused():
    """Tensors on a device that no kernel set serves: the reasons, not a wrong device's kernel."""
    with pytest.raises(UnsupportedConfiguration, match="cpu: serves device cpu, got meta"):
        fast.merge_attn_states(
            *(
                fast.AttentionState(torch.zeros(2, 3, 4, device="meta"), torch.zeros(3, 2, device="meta"))
                for _ in range(2)
            )
        )
