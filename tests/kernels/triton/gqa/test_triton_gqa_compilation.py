"""Tests that compile the Triton kernels of grouped-query attention without a GPU, for Ampere to Blackwell.

A fault that the tests look for makes a kernel much slower but does not change its results: spilled registers, products
that the assembler serialises, and an estimate of shared memory that is too small or much too large.
"""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

from reference.interfaces import COMPUTE_FORMAT, FP8_E4M3, NEUTRAL_SPLIT_RULE
from reference.interfaces.gqa import GQAConfig

from ....support.compiled import Recorded, compiled, waiting_stores
from ....support.factories import integers, offsets

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import triton

from fast.kernels.device import DeviceFacts
from fast.kernels.triton.gqa import packed, paged, scheduled, sizes

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CHIPS = {  # name: (compute capability, bytes of shared memory that a program may use)
    "Ampere": ((8, 0), 166912), "Ada": ((8, 9), 101376), "Hopper": ((9, 0), 232448), "Blackwell": ((10, 0), 232448),
}  # fmt: skip
FORMATS = {"compute": COMPUTE_FORMAT, "fp8_e4m3": FP8_E4M3}
LLAMA = GQAConfig(64, 8, 128)
GPT_OSS = GQAConfig(64, 8, 64, sliding_window=128, attention_sinks=True)
GEMMA = GQAConfig(8, 4, 256, sliding_window=1024, logits_soft_cap=50.0)
CONFIGS = {"Llama": LLAMA, "gpt-oss": GPT_OSS, "Gemma": GEMMA}
KINDS = ("decode", "split decode", "schedule", "batch-invariant", "prefill", "packed")
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
ALL = [(chip, kind, name, stored) for chip in CHIPS for kind in KINDS for name in CONFIGS for stored in FORMATS
       if (kind, stored) != ("packed", "fp8_e4m3")]  # fmt: skip
# by default one launch of each kind, chip, config and format; with HYPOTHESIS_PROFILE=deep all launches
FEW = [
    ("Ampere", "split decode", "gpt-oss", "fp8_e4m3"), ("Ada", "prefill", "Gemma", "compute"),
    ("Hopper", "decode", "Llama", "compute"), ("Hopper", "schedule", "Llama", "fp8_e4m3"),
    ("Hopper", "prefill", "Llama", "compute"), ("Hopper", "packed", "gpt-oss", "compute"),
    ("Blackwell", "prefill", "Llama", "fp8_e4m3"), ("Blackwell", "batch-invariant", "Gemma", "compute"),
]  # fmt: skip


@cache
def built(chip: str, kind: str, name: str, stored: str, dtype: torch.dtype = torch.bfloat16):
    """Compile the attention kernel that a call launches on a chip; return the compiled kernel and its constants."""
    (capability, shared), config, cache_format = CHIPS[chip], CONFIGS[name], FORMATS[stored]
    launches, requests, query_len = {}, 2, 1024 if kind in ("prefill", "packed") else 1
    tokens, heads, kv_heads, width = requests * query_len, config.num_heads, config.num_kv_heads, config.head_dim
    q, keys = torch.zeros(tokens, heads, width, dtype=dtype), torch.zeros(tokens, kv_heads, width, dtype=dtype)
    sinks = torch.zeros(heads, dtype=dtype) if config.attention_sinks else None
    starts, visible = offsets([query_len] * requests), torch.full((tokens,), 4096, dtype=torch.int32)
    scales = [torch.ones(())] * 2 if cache_format.scaled else [None, None]
    ranges = (integers(*[0] * 15).view(3, 5), starts) if kind == "schedule" else (None, None)
    with pytest.MonkeyPatch.context() as patch:
        for module, kernel in (
            (paged, "_gqa_paged_kernel"),
            (scheduled, "_gqa_scheduled_kernel"),
            (packed, "_gqa_packed_kernel"),
        ):
            patch.setattr(module, kernel, Recorded(getattr(module, kernel), launches))
        for module in (paged, packed):
            patch.setattr(module, "device_facts", lambda _: DeviceFacts(132, capability, shared))
        patch.setattr(paged, "combine_partial_outputs", lambda *_, **__: None)
        patch.setattr(paged, "_num_splits", lambda *_: 4 if kind == "split decode" else 1)
        if kind == "packed":
            packed.gqa_varlen_attention(
                q, keys, keys, starts, starts, query_len, query_len, 0.1, "decoder", config.sliding_window, None,
                config.logits_soft_cap, None, sinks, dtype,
            )  # fmt: skip
        else:
            paged.gqa_paged_attention(
                q, torch.zeros(2, 64, 64, kv_heads, width, dtype=cache_format.dtype_for(dtype)),
                torch.zeros(requests, 64, dtype=torch.int32), integers(*[4096] * requests), starts, visible,
                None if config.sliding_window is None else visible - config.sliding_window, query_len, 4096, 4096, 0.1,
                config.logits_soft_cap, None, sinks, dtype, *ranges, kind == "batch-invariant", NEUTRAL_SPLIT_RULE,
                cache_format, *scales,
            )  # fmt: skip
    ((kernel, kinds, constants),) = launches.values()
    return compiled(kernel, kinds, constants, capability), constants


def estimated_bytes(chip: str, constants: dict, stored: str, dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the estimate of shared memory for a launch."""
    c = constants["c"]
    shape = sizes.Shape(c.ROWS, c.TILE, constants["num_warps"], constants["num_stages"])
    return sizes._shared_bytes(shape, c.COLUMNS, dtype, stored != "compute", DeviceFacts(132, *CHIPS[chip]))


@pytest.mark.parametrize("chip, kind, name, stored", ALL if DEEP else FEW)
def test_compiles_for_every_chip(chip, kind, name, stored):
    """Compile a kernel -> it fits into shared memory, the estimate holds, and no register is spilled to memory."""
    kernel, constants = built(chip, kind, name, stored)
    assert kernel.metadata.shared <= CHIPS[chip][1]
    assert kernel.metadata.shared <= estimated_bytes(chip, constants, stored) <= 2 * kernel.metadata.shared + 4096
    assert ".local" not in kernel.asm["ptx"]
    instructions = {"Ampere": "mma.sync", "Ada": "mma.sync", "Hopper": "wgmma.mma_async", "Blackwell": "tcgen05.mma"}
    wanted = instructions[chip] if constants["c"].ROWS >= 64 else "mma.sync"
    assert wanted in kernel.asm["ptx"]


@pytest.mark.parametrize(
    "kernel", [paged._gqa_paged_kernel, scheduled._gqa_scheduled_kernel, packed._gqa_packed_kernel], ids=str
)
def test_arguments_of_a_kernel_are_in_records(kernel):
    """List the parameters of a kernel -> each is a record or a constant, or must be outside records.

    TMA descriptors must be outside records, and so must arguments that Triton should not specialise. The stride of the
    block table stands beside the stride of its rows, which Triton should not specialise.
    """
    records = {"sources", "factors", "outputs", "strides"}
    outside = {"k_boxes", "v_boxes", "table_stride"}
    names = {
        parameter.name for parameter in kernel.params
        if not (parameter.is_constexpr or parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
    }  # fmt: skip
    assert names - outside == records


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes(dtype):
    for chip, stored in (("Ampere", "fp8_e4m3"), ("Hopper", "compute")):
        kernel, _ = built(chip, "decode", "Llama", stored, dtype)
        assert kernel.metadata.shared <= CHIPS[chip][1]


def test_converted_values_are_stored_without_waiting():
    """A decode over an e4m3 cache stores its converted values in shared memory without conflicts of memory banks."""
    kernel, constants = built("Hopper", "decode", "Llama", "fp8_e4m3")
    assert waiting_stores(kernel.asm["ttgir"], f"{constants['c'].TILE}x128xf16") == [1]


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_tiles_are_prefetched_and_nothing_spills(kind, stored, tmp_path):
    """Assemble a Hopper kernel -> tiles are loaded asynchronously, and the assembler spills and serialises nothing."""
    kernel, constants = built("Hopper", kind, "Llama", stored)
    ptx = kernel.asm["ptx"]
    c, size = constants["c"], 1 if stored == "fp8_e4m3" else 2
    loads = len(re.findall(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", ptx))
    tile_loads = 2 * c.TILE * c.COLUMNS * size // (16 * 32 * constants["num_warps"])
    if c.BULK_COPY:  # keys and values, before each loop and in each loop
        assert ptx.count("cp.async.bulk.tensor.4d") >= 8 and loads == 0
    else:
        assert loads >= 2 * tile_loads  # 16 bytes each: before the loop, and in the loop
    assert ((kind, stored) == ("prefill", "compute")) == c.BULK_COPY
    (tmp_path / "kernel.ptx").write_text(ptx)
    command = [TOOLS / "ptxas", "-v", "-arch=sm_90a", "-o", tmp_path / "kernel.cubin", tmp_path / "kernel.ptx"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    messages = done.stdout + done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in messages and "serialized" not in messages
