"""Tests that compile the Triton decode over fp8 caches without a GPU, for Ampere, Ada, Hopper and Blackwell.

The compiled code must not have the following faults, which make a kernel much slower but do not change its results. A
test that compares results therefore cannot find them.

- The kernel loads single bytes.
- The kernel converts a tile twice: once for the product with the queries, and once for the product with probabilities.
- The kernel waits for each product before it starts the next product.
"""

from __future__ import annotations

import os
import re
from functools import cache

import pytest
import torch

from reference.interfaces import COMPUTE_FORMAT, CONVERTED, E4M3, FP8_DS_MLA, FP8_E4M3, FP8_MODES, DecodeMetadata

from ...support.compiled import Recorded, compiled, waiting_stores
from ...support.decode_inputs import cut_of, schedule_of
from ...support.factories import integers, offsets

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from fast.kernels.device import DeviceFacts
from fast.kernels.triton import decode, decode_shapes, scheduled_decode

CHIPS = {  # name: (compute capability, bytes of shared memory that a program may use)
    "Ampere": ((8, 0), 166912), "Ada": ((8, 9), 101376), "Hopper": ((9, 0), 232448), "Blackwell": ((10, 0), 232448),
}  # fmt: skip
FORMATS = {"fp8_e4m3": FP8_E4M3, "fp8_ds_mla": FP8_DS_MLA}
KERNELS = ("_decode_kernel", "_scheduled_decode_kernel")
formats = pytest.mark.parametrize("cache_format", FORMATS)
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
# (chip, number of heads): by default three pairs; with HYPOTHESIS_PROFILE=deep all pairs
LAUNCHES = [(chip, heads) for chip in CHIPS for heads in (16, 128)
            if DEEP or (chip, heads) in (("Ampere", 16), ("Ada", 16), ("Hopper", 128))]  # fmt: skip


@cache
def built(
    chip: str, cache_format: str, heads: int, scheduled: bool = False, dtype: torch.dtype = torch.bfloat16,
    mode: str = CONVERTED, per_head: bool = False, processors: int = 132,
):  # fmt: skip
    """Compile the kernel that a decode of one request launches on a chip; return compiled kernel and constants.

    With one processor, one request counts as many requests, for which the tiles of some kernels are larger.
    """
    capability, shared = CHIPS[chip]
    stored, launches = FORMATS.get(cache_format, COMPUTE_FORMAT), {}
    q_scale = torch.ones(heads) if per_head else torch.ones(())
    modes = {} if mode == CONVERTED else {"fp8_mode": mode, "q_scale": q_scale}
    queries = [torch.zeros(1, heads, width).to(E4M3 if modes else dtype) for width in (512, 64)]
    with pytest.MonkeyPatch.context() as patch:
        for module, name in zip((decode, scheduled_decode), KERNELS, strict=True):
            patch.setattr(module, name, Recorded(getattr(module, name), launches))
        patch.setattr(decode, "device_facts", lambda _: DeviceFacts(processors, capability, shared))
        patch.setattr(decode, "combine_partial_outputs", lambda *_, **__: None)
        lens = integers(600)
        plan = DecodeMetadata(integers(*range(40))[None], lens, offsets([1]), 1, lens, 2560, 64)
        decode.mla_decode(
            *queries,
            torch.zeros(40, 64, stored.columns(512, 64), dtype=stored.dtype_for(dtype)), plan.block_table,
            plan.seq_lens, plan.query_start_loc, plan.visible_lens, 1, plan.max_seq_len, 0.1, dtype,
            *cut_of(schedule_of(plan, heads, 3) if scheduled else None), stored,
            torch.ones(()) if stored.layer_scale else None, **modes,
        )  # fmt: skip
    ((kernel, kinds, constants),) = launches.values()
    return compiled(kernel, kinds, constants, capability), constants


@formats
@pytest.mark.parametrize("chip, heads", LAUNCHES)
def test_compiles_for_every_chip(chip, heads, cache_format):
    """The kernels compile and fit into shared memory; only Ada and later chips have instructions for e4m3."""
    for scheduled in (False, True) if chip == "Hopper" else (False,):
        found, _ = built(chip, cache_format, heads, scheduled)
        assert found.metadata.shared <= CHIPS[chip][1]
        assert ("e4m3" in found.asm["ptx"]) == (chip != "Ampere")


@formats
@pytest.mark.parametrize("chip, heads", [("Ampere", 16), ("Hopper", 128)])
def test_float32_and_float16_queries(chip, heads, cache_format):
    for dtype in (torch.float16, torch.float32) if DEEP else (torch.float32,):
        found, _ = built(chip, cache_format, heads, dtype=dtype)
        assert found.metadata.shared <= CHIPS[chip][1]


@pytest.mark.parametrize("cache_format, heads", [("fp8_e4m3", 128), ("fp8_ds_mla", 16), ("fp8_ds_mla", 128)])
def test_tiles_are_prefetched_and_converted_once(heads, cache_format):
    """On Hopper, tiles are copied to shared memory in words of 16 bytes, and every e4m3 number is converted once.

    A thread copies 16 elements of a latent with one instruction, and converts two numbers with one instruction. The
    kernel has two loops over tiles. The first loop is pipelined, so the code contains its loads once for every stage.
    """
    found, constants = built("Hopper", cache_format, heads)
    ptx, sizes = found.asm["ptx"], constants["c"]
    threads, stages = 32 * constants["num_warps"], constants["num_stages"]
    numbers = sizes.TILE * (sizes.LATENT + (sizes.ROPE if sizes.ROPE_E4M3 else 0))
    conversions = re.findall(r"cvt\.rn\.f16x2\.e4m3x2", ptx)
    assert len(conversions) == 2 * numbers // threads // 2
    copies = re.findall(r"cp\.async\.cg\.shared\.global.*?, 0x10,", ptx)
    assert not sizes.PREFETCH and len(copies) >= stages * (sizes.TILE * sizes.LATENT // 16 // threads)


@pytest.mark.parametrize("heads, processors, tile", [(16, 132, 32), (16, 1, 64), (32, 1, 64)])
@pytest.mark.parametrize("scheduled", [False, True])
def test_tiles_are_prefetched_in_registers(scheduled, heads, processors, tile):
    """With 16 or 32 heads over `fp8_e4m3`, a tile of 32 or 64 keys is loaded in words of 16 bytes, and converted once.

    A thread loads 16 numbers with one instruction. The code has these loads twice: for the first tile, and in the loop
    for the next tile. The kernel has no pipeline through shared memory, and two programs fit into an SM.
    """
    found, constants = built("Hopper", "fp8_e4m3", heads, scheduled, processors=processors)
    ptx, sizes = found.asm["ptx"], constants["c"]
    numbers = sizes.TILE * (sizes.LATENT + sizes.ROPE) // (32 * constants["num_warps"])  # of each thread
    assert sizes.PREFETCH and (constants["ROWS"], sizes.TILE, constants["num_stages"]) == (heads, tile, 1)
    assert len(re.findall(r"cvt\.rn\.f16x2\.e4m3x2", ptx)) == numbers // 2
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= 2 * (numbers // 16)
    assert not re.findall(r"cp\.async|ld\.global\.[bu]8|ld\.shared\.[bu]8", ptx)
    assert decode_shapes.RESIDENT * found.metadata.shared <= CHIPS["Hopper"][1]


@pytest.mark.parametrize("heads, mode", [(16, CONVERTED), (32, CONVERTED), *((16, mode) for mode in FP8_MODES[1:])])
def test_converted_tiles_are_stored_without_waiting(heads, mode):
    """The four column blocks of a converted tile are stored in shared memory without conflicts of memory banks."""
    found = built("Hopper", "fp8_e4m3", heads, mode=mode, processors=1)[0]
    assert waiting_stores(found.asm["ttgir"], "64x128xf16") == [1] * 4
    assert found.asm["ptx"].count("st.shared.b16") == 0


@pytest.mark.parametrize("mode", FP8_MODES[1:])
def test_modes_with_prefetched_tiles(mode):
    """The kernels of `fp8_query` and `fp8_product` prefetch the same tiles, and need no more memory than estimated."""
    found, constants = built("Hopper", "fp8_e4m3", 16, mode=mode, processors=1)
    assert constants["c"].PREFETCH and constants["c"].TILE == 64
    estimate = decode_shapes._shared_bytes(16, 64, 1, 512 + 64, torch.float16, 1, 1)
    assert found.metadata.shared <= estimate <= CHIPS["Hopper"][1] // decode_shapes.RESIDENT


@pytest.mark.parametrize("change", [{"heads": 17}, {"dtype": torch.float32}, {"chip": "Ada"}, {"chip": "Ampere"}])
def test_launches_without_prefetched_tiles(change):
    """Larger row blocks, float32 queries and chips with less shared memory keep the pipeline of the compiler."""
    constants = built(**{"chip": "Hopper", "cache_format": "fp8_e4m3", "heads": 16, **change})[1]
    assert not constants["c"].PREFETCH


@formats
def test_hopper_products_are_not_serialised(cache_format):
    """With 64 rows, the kernel for Hopper waits for groups of products, and not for every product."""
    found, constants = built("Hopper", cache_format, 128)
    assert constants["ROWS"] == 64
    ptx = found.asm["ptx"]
    products, waits = len(re.findall(r"wgmma\.mma_async", ptx)), len(re.findall(r"wgmma\.wait_group", ptx))
    assert products > 3 * waits > 0


def test_shapes_of_the_caches_in_the_dtype_of_the_queries_are_unchanged():
    """Caches in the dtype of the queries keep their launch shapes: rows of a row block, warps and pipeline stages.

    With 16 heads, `fp8_ds_mla` has the same launch shape, and `fp8_e4m3` has no pipeline. With 128 heads, fp8 caches
    have a third stage, and the tiles of `fp8_ds_mla` have 32 keys.
    """
    shapes = {
        (name, heads): tuple(built("Hopper", name, heads)[1][each] for each in ("ROWS", "num_warps", "num_stages"))
        for name in ("compute_dtype", *FORMATS) for heads in (16, 128)
    }  # fmt: skip
    assert shapes["compute_dtype", 16] == (16, 4, 3) and shapes["compute_dtype", 128] == (64, 8, 2)
    assert shapes["fp8_ds_mla", 16] == (16, 4, 3) and shapes["fp8_e4m3", 16] == (16, 4, 1)
    assert all(shapes[name, 128] == (64, 8, 3) for name in FORMATS)
    tiles = {name: built("Hopper", name, 128)[1]["c"].TILE for name in ("compute_dtype", *FORMATS)}
    assert tiles == {"compute_dtype": 64, "fp8_e4m3": 64, "fp8_ds_mla": 32}


modes = pytest.mark.parametrize("mode", FP8_MODES[1:])


@modes
@formats
@pytest.mark.parametrize("chip, heads", LAUNCHES)
def test_products_in_e4m3(chip, heads, cache_format, mode):
    """The kernels of `fp8_query` and `fp8_product` compile, fit into shared memory, and multiply in e4m3 if possible.

    Ada multiplies in e4m3 for every row block, and Hopper for row blocks of 64 rows. Ampere has no such instructions.
    On Blackwell, these launches have row blocks that are too small to multiply in e4m3.
    """
    in_e4m3 = chip == "Ada" or (chip == "Hopper" and heads == 128)
    instruction = {"Ada": "mma.sync", "Hopper": "wgmma.mma_async"}.get(chip, "tcgen05.mma")
    for scheduled in (False, True) if chip == "Hopper" else (False,):
        found, constants = built(chip, cache_format, heads, scheduled, mode=mode)
        assert found.metadata.shared <= CHIPS[chip][1]
        ptx, sizes = found.asm["ptx"], constants["c"]
        products = re.findall(r"^.*(?:mma\.sync|mma_async|tcgen05\.mma)\S*.*$", ptx, re.M)
        assert products
        own = [line for line in products if "e4m3" in line]
        assert sizes.E4M3_DOTS == bool(own) == in_e4m3
        assert all(instruction in line for line in own)
        # Products that are not in e4m3: the rope parts of `fp8_ds_mla` (bfloat16), and probabilities x values in
        # `fp8_query` (float16). If `in_e4m3` is False, no product is in e4m3.
        others = cache_format == "fp8_ds_mla" or mode == "fp8_query" or not in_e4m3
        assert (len(own) < len(products)) == others
        assert ("bf16.bf16" in ptx) == (cache_format == "fp8_ds_mla")
        assert bool(re.findall(r"cvt\.\S*satfinite\.e4m3x2\.", ptx)) == (mode == "fp8_product" and chip != "Ampere")


@modes
@formats
@pytest.mark.parametrize("chip, heads", [each for each in LAUNCHES if each[0] in ("Ada", "Hopper")])
def test_sums_of_products_in_e4m3_begin_with_zero(chip, heads, cache_format, mode):
    """Every e4m3 product begins with a sum of zero, because Tensor Cores add e4m3 products with few binary digits."""
    ir = built(chip, cache_format, heads, mode=mode)[0].asm["ttir"]
    zeros = set(re.findall(r"(%\S+) = arith\.constant dense<0\.000000e\+00>", ir))
    sums = re.findall(r"tt\.dot \S+, \S+, (%\S+?),? .*?: tensor<\d+x\d+xf8E4M3FN>", ir)
    assert len(sums) >= 2 * (8 if mode == "fp8_product" else 4)  # products in four column blocks, in each of two loops
    assert set(sums) <= zeros


@modes
@formats
@pytest.mark.parametrize("chip, heads", LAUNCHES)
def test_estimated_shared_memory(chip, heads, cache_format, mode):
    """The kernels need no more shared memory than `launch_shape` estimates."""
    found, constants = built(chip, cache_format, heads, mode=mode)
    shape = constants["ROWS"], constants["c"].TILE, constants["num_stages"], 512 + 64
    blocks = decode_shapes.column_blocks(FORMATS[cache_format], 512)
    if constants["c"].E4M3_DOTS:
        estimate = decode_shapes._shared_bytes_in_e4m3(*shape, blocks, mode)
    else:
        estimate = decode_shapes._shared_bytes(*shape, torch.float16, 1, blocks)
    assert found.metadata.shared <= estimate


@modes
@pytest.mark.parametrize("heads", [16, 128])
def test_two_programs_share_a_multiprocessor(heads, mode):
    """On Hopper, a program needs no more shared memory with queries in e4m3 than with queries in float16."""
    for cache_format in FORMATS:
        plain = built("Hopper", cache_format, heads, dtype=torch.float16)[0].metadata.shared
        assert built("Hopper", cache_format, heads, mode=mode)[0].metadata.shared <= plain


@modes
@formats
def test_one_variant_for_scales_of_layer_and_heads(cache_format, mode):
    """A single scale for the queries of all heads needs the same variant of the kernel as a scale for each head."""
    one, other = (built("Hopper", cache_format, 16, mode=mode, per_head=per_head) for per_head in (False, True))
    assert one[0].hash == other[0].hash and one[1] == other[1]
