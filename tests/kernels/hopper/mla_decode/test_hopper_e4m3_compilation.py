"""Tests that compile the Hopper decode over caches in `fp8_e4m3` for sm_90 without a GPU, and tests of launch choices.

`test_hopper_compilation` has the same tests of the kernels over caches in the dtype of the queries, and explains them.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial

import pytest
import torch

import fast
from fast import compilation
from fast.kernels.prescribed_splits import PARTIAL_DTYPES, prescribe_partial_dtype
from fast.kernels.schedule_costs import measured_schedule_costs
from reference.interfaces import COMPUTE_FORMAT, E4M3, FP8_E4M3, FP8_MODES, InvariantSplitRule

from ....support.factories import LOW_RANK, offsets
from ....test_compilation import serve, serve_captured

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from fast.kernels.combine import launch as combine_launch  # noqa: E402
from fast.kernels.hopper.mla_decode import launch as decode  # noqa: E402
from fast.kernels.hopper.mla_decode import select, split_cost  # noqa: E402

from ....support.barrier_memory import unused, used_again  # noqa: E402
from ....support.compiled import compiled  # noqa: E402
from ....support.machine_code import check_machine_code  # noqa: E402
from .test_hopper_compilation import (  # noqa: E402
    CUTS,
    DEEP,
    H200,
    ONLY_MANY,
    record,
    record_all,
    watched,
)
from .test_hopper_compilation import recorded as recorded_over_any_format  # noqa: E402

BF16, FP16 = torch.bfloat16, torch.float16
pytestmark = pytest.mark.usefixtures("without_shape_checks")
KERNEL = "_row_blocks_16_32_e4m3_kernel"
recorded = partial(recorded_over_any_format, cache_format=FP8_E4M3)
# Largest number of local-memory accesses in a main loop: one register is stored during the softmax and loaded again,
# and one value is loaded twice. A main loop has more than 1100 instructions.
MOST_LOCAL_ACCESSES = {(32, "scheduled"): 2, (32, "batch-invariant"): 4, (32, "batch-invariant, planned"): 4}
# The same for cache blocks of 16 tokens, if it is more.
MOST_WITH_SMALL_BLOCKS = {(16, "batch-invariant"): 2}
MANY = "_row_blocks_64_e4m3_kernel"
MODES = FP8_MODES[1:]
INVARIANT = "batch-invariant", "batch-invariant, planned"
# Largest numbers of local-memory accesses of a consumer of `row_blocks_64_e4m3`: in the loop that multiplies the
# probabilities and the values of a tile (227 to 301 instructions), and in the loop around it, which also computes the
# scores and the softmax of a tile (743 to 815 instructions). Each consumer keeps half of the sums, 128 numbers for each
# thread, in registers. The counts are what Triton 3.6 compiles; they may only become smaller.
MOST_IN_TILES = {"fp8_product": (1, 11), "fp8_query": (0, 0)}
MOST_IN_TILES_INVARIANT = {"fp8_product": (9, 23), "fp8_query": (0, 0)}


def recorded_in_mode(monkeypatch, mode, heads, cut, *given, out_dtype=BF16, **options):
    """Record a launch of `mla_decode` with queries in e4m3; the arguments are those of `recorded`."""
    with monkeypatch.context() as patch:
        patch.setattr(decode, "mla_decode", partial(decode.mla_decode, fp8_mode=mode, q_scale=torch.ones(heads)))
        return recorded(patch, heads, cut, *given, dtype=E4M3, out_dtype=out_dtype, **options)


def check_converted(kernel, folder, heads, cut, block_size=64):
    """Check the machine code of `row_blocks_16_32_e4m3`; `check_machine_code` has the list."""
    rows = 16 if heads <= 16 else 32
    most = MOST_LOCAL_ACCESSES.get((rows, cut), 0)
    if block_size == 16:
        most = max(most, MOST_WITH_SMALL_BLOCKS.get((rows, cut), 0))
    check_machine_code(kernel, folder, H200.shared, {"GMMA": most})


def check_in_mode(kernel, folder, mode, cut):
    """Check the machine code of `row_blocks_64_e4m3`; `check_machine_code` has the list.

    The two patterns find the innermost loops with products, and the innermost loops with the exponentials of the
    softmax.
    """
    most = (MOST_IN_TILES_INVARIANT if cut in INVARIANT else MOST_IN_TILES)[mode]
    check_machine_code(kernel, folder, H200.shared, dict(zip(("GMMA", r"MUFU\.EX2"), most, strict=True)))


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut not in ONLY_MANY])
@pytest.mark.parametrize("heads", [16, 32, 128])
def test_nothing_spills_where_it_multiplies(heads, cut, monkeypatch, tmp_path):
    """Compile a kernel -> no main loop spills registers, except for the accesses in `MOST_LOCAL_ACCESSES`.

    The assembler serialises no matrix product, and the arrivals at mbarriers are right.
    """
    check_converted(compiled(*recorded(monkeypatch, heads, cut)), tmp_path, heads, cut)


@pytest.mark.parametrize("block_size, widths, dtype, out_dtype", [
    (16, (512, 64), BF16, None), (32, (256, 32), FP16, None), (128, (512, 0), BF16, torch.float32),
    (64, (256, 64), BF16, None), (64, (512, 32), FP16, torch.float32), (16, (256, 0), BF16, None),
    (64, (512, 64), FP16, None), (64, (512, 64), BF16, torch.float32),
])  # fmt: skip
@pytest.mark.parametrize("heads, cut", [
    (16, "whole"), (16, "split"), (16, "batch-invariant"), (32, "whole"), (32, "scheduled"),
    (32, "batch-invariant, planned"),
])  # fmt: skip
def test_every_shape_spills_nothing(heads, cut, block_size, widths, dtype, out_dtype, monkeypatch, tmp_path):
    """Compile the kernel for each block size, entry width, dtype of the queries and dtype of the output.

    The checks are those of `test_nothing_spills_where_it_multiplies`.
    """
    always = (32, "batch-invariant, planned", 16, 512), (16, "whole", 32, 256), (16, "batch-invariant", 128, 512)
    if not DEEP and (heads, cut, block_size, widths[0]) not in always:
        pytest.skip("runs only with HYPOTHESIS_PROFILE=deep")
    kernel = compiled(*recorded(monkeypatch, heads, cut, block_size, widths, dtype, out_dtype=out_dtype))
    check_converted(kernel, tmp_path, heads, cut, block_size)


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut not in ONLY_MANY])
@pytest.mark.parametrize("mode", MODES)
def test_few_spills_with_queries_in_e4m3(mode, cut, monkeypatch, tmp_path):
    """Compile `row_blocks_64_e4m3` -> registers are spilled at most as often as `MOST_IN_TILES` says.

    The assembler serialises no matrix product, and the arrivals at mbarriers are right.
    """
    check_in_mode(compiled(*recorded_in_mode(monkeypatch, mode, 128, cut)), tmp_path, mode, cut)


def test_memory_of_barriers():
    """Read PTX -> the barriers that nothing uses, and the addresses of barriers at which other data begin."""
    clean = """
    add.s32 %r3, %r1, 1024;
    @%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
    @%p1 mbarrier.init.shared::cta.b64 [global_smem+1032], 1;
    mbarrier.try_wait.parity.shared.b64 complete, [%r3], %r9;
    ld.shared.b8 %r4, [%r5+1036];
    st.shared.b32 [%r6+1040], %r7;
    """
    assert used_again(clean) == unused(clean) == []  # the second barrier belongs to an array
    alone = clean.replace("1032", "1048")
    assert unused(alone) == [1048] and used_again(alone) == []
    assert used_again(clean + "add.s32 %r8, %r6, 1028; @%p2 st.shared.b32 [ %r8 + 0 ], %r7;") == [1028]
    assert used_again(clean + "ld.shared.v2.b32 {%r9, %r10}, [%r6+1032];") == [1032]
    chain = "add.s32 %r20, %r6, 1040;\nadd.s32 %r21, %r22, %r20;\nst.shared.b32 [%r21+-8], %r7;"
    assert used_again(clean + chain) == [1032]
    for unknown in ("mbarrier.init.shared::cta.b64 [%rd3], 1;", "st.shared.b32 [%rd3], %r7;"):
        with pytest.raises(ValueError, match=r"no known address|3 barriers, but 2"):
            unused(clean + unknown)


def test_partial_outputs_in_bfloat16_add_no_spills(monkeypatch, tmp_path):
    """The same check as above of a decode in `fp8_product` whose partial outputs are in bfloat16."""
    monkeypatch.setattr(decode, "LEAST_IN_BFLOAT16", 1)
    test_few_spills_with_queries_in_e4m3("fp8_product", "split", monkeypatch, tmp_path)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("heads, cut, block_size, widths, out_dtype", [
    (3, "whole", 16, (256, 32), FP16), (40, "split", 32, (256, 0), torch.float32),
    (128, "scheduled", 128, (512, 0), BF16), (64, "batch-invariant, planned", 64, (512, 32), torch.float32),
    (64, "batch-invariant", 16, (256, 64), BF16), (128, "whole", 64, (512, 64), FP16),
    (128, "split", 64, (512, 64), torch.float32), (128, "batch-invariant", 128, (512, 64), torch.float32),
])  # fmt: skip
def test_every_shape_spills_little_with_queries_in_e4m3(
    heads, cut, block_size, widths, out_dtype, mode, monkeypatch, tmp_path
):
    """Compile `row_blocks_64_e4m3` for each block size, entry width and dtype of the output.

    The checks are those of `test_few_spills_with_queries_in_e4m3`.
    """
    if not DEEP and heads not in (3, 40):
        pytest.skip("runs only with HYPOTHESIS_PROFILE=deep")
    kernel = compiled(*recorded_in_mode(monkeypatch, mode, heads, cut, block_size, widths, out_dtype=out_dtype))
    check_in_mode(kernel, tmp_path, mode, cut)


@pytest.mark.parametrize("mode", MODES)
def test_row_blocks_have_64_rows_with_queries_in_e4m3(mode, monkeypatch):
    """With queries in e4m3, all numbers of heads take row blocks of 64 rows, in every kind of decode.

    A schedule fills the device with such row blocks. Only `fp8_product` rounds probabilities to e4m3.
    """
    for heads in (1, 16, 33, 64, 128):
        for cut in CUTS:
            kernel, _, constants = recorded_in_mode(monkeypatch, mode, heads, cut, as_chosen=True)
            c = constants["c"]
            assert (kernel.fn.__name__, c.ROWS, c.HEADS, c.SLICES) == (MANY, 64, heads, 1)
            assert (mode == "fp8_product") == c.WEIGHTS_E4M3
    monkeypatch.setattr(decode, "device_facts", lambda _: H200)
    for heads, query_len, programs in ((16, 1, 132), (16, 5, 66), (64, 1, 132), (65, 1, 66), (128, 1, 66), (128, 9, 7)):
        given = (torch.device("cpu"), BF16, heads, 512, 64, 64, query_len, FP8_E4M3, mode)
        assert decode.decode_programs(*given) == programs
        assert decode.schedule_costs(*given[:6], FP8_E4M3, mode) == measured_schedule_costs(heads, True)


@pytest.mark.parametrize("cut, launched, partial_rows, kept", [
    ("whole", 2, 0, 0), ("split", 6, 3, 0), ("scheduled", 6, 4, 0), ("batch-invariant, planned", 6, 3, 64 * 512),
    ("batch-invariant", 2, 0, 64 * 512),
])  # fmt: skip
def test_room_for_parts_with_queries_in_e4m3(cut, launched, partial_rows, kept, monkeypatch):
    """The buffers have room for all partial outputs, and for all weighted sums that programs keep between splits."""
    launches = watched(monkeypatch)
    monkeypatch.setattr(select, "best_num_programs", lambda *_: 1)
    recorded_in_mode(monkeypatch, "fp8_product", 128, cut)
    ((name, programs, given),) = launches
    assert (name, programs) == (MANY, launched)
    assert given["written"].partial_out.numel() == partial_rows * 128 * 512 + programs * kept


@pytest.mark.parametrize("mode, cut, least, dtype", [
    ("fp8_product", "split", 3 * 128 * 512, BF16), ("fp8_product", "split", 3 * 128 * 512 + 1, torch.float32),
    ("fp8_product", "whole", 1, torch.float32), ("fp8_product", "scheduled", 1, torch.float32),
    ("fp8_product", "batch-invariant", 1, torch.float32),
    ("fp8_product", "batch-invariant, planned", 1, torch.float32), ("fp8_query", "split", 1, torch.float32),
])  # fmt: skip
def test_dtype_of_partial_outputs(mode, cut, least, dtype, monkeypatch):
    """Partial outputs are in bfloat16 only in `fp8_product`, if all requests have as many splits and there are many.

    The smallest number of elements in bfloat16 is `least`; a decode in three splits has 3 x 128 x 512 elements. A
    prescribed dtype is used in just these decodes, whatever their number of elements is.
    """
    launches = watched(monkeypatch)
    monkeypatch.setattr(decode, "LEAST_IN_BFLOAT16", least)
    recorded_in_mode(monkeypatch, mode, 128, cut)
    for prescribed in PARTIAL_DTYPES:
        with prescribe_partial_dtype(prescribed):
            recorded_in_mode(monkeypatch, mode, 128, cut)
    found = [given["written"].partial_out.dtype for *_, given in launches]
    chosen = mode == "fp8_product" and cut == "split"
    assert found == [dtype, *(PARTIAL_DTYPES if chosen else [torch.float32] * 2)]


@pytest.mark.parametrize("requests, keys, heads, dtype", [
    (1, 8192, 128, torch.float32), (16, 4096, 128, BF16), (4, 16384, 128, BF16), (1, 131072, 128, BF16),
    (1, 8192, 64, torch.float32), (16, 4096, 64, BF16), (1, 131072, 16, torch.float32),
])  # fmt: skip
def test_where_partial_outputs_are_in_bfloat16(requests, keys, heads, dtype):
    """On an H200, the decodes that were measured have the dtype that was faster."""
    sizes = decode._launch_sizes(
        requests, heads, 512, 64, 64, requests, keys, 1, 0, False, measured_schedule_costs(heads).split_rule,
        132, True, "fp8_product",
    )  # fmt: skip
    assert sizes.constants.SPLIT
    assert decode.partial_dtype(sizes.partial_out_size, sizes.constants) == dtype


def test_queries_in_words(monkeypatch):
    """The kernel gets queries in words of two elements, whose strides it can copy, and the stride of the scales.

    Torch cannot view queries at an odd address, or with an odd stride, as words; the launcher copies them.
    """
    launches = watched(monkeypatch)
    record(monkeypatch, {})
    monkeypatch.setattr(decode, "combine_partial_outputs", lambda *_: None)
    monkeypatch.setattr(decode, "device_facts", lambda _: H200)
    cache = torch.zeros(4, 64, 576).to(E4M3)
    lens, starts = torch.tensor([100], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    whole = torch.randn(1, 64, 577).to(E4M3)
    scales = torch.ones(64, 3)[:, 1]
    for scale, q_scale in ((0.1, torch.ones(())), (-0.1, scales)):
        for queries in (whole[..., :576].clone(), whole[..., 1:]):
            decode.mla_decode(
                queries[..., :512], queries[..., 512:], cache, torch.zeros(1, 4, dtype=torch.int32), lens, starts, lens,
                1, 256, scale, BF16, None, None, False, measured_schedule_costs(64).split_rule, FP8_E4M3,
                torch.ones(()), fp8_mode="fp8_query", q_scale=q_scale,
            )  # fmt: skip
            given = launches[-1][2]
            assert given["q_scale_stride"] == (3 if q_scale is scales else 0)
            for words, wanted in ((given["ql_nope"], queries[..., :512]), (given["q_pe"], queries[..., 512:])):
                assert words.data_ptr() % 16 == 0 and words.stride(2) == 1
                found = words.contiguous().view(E4M3).float()
                assert torch.equal(found, wanted.float() * (1 if scale > 0 else -1))
            assert given["scale_log2"] == pytest.approx(0.1 / math.log(2))
    with pytest.raises(ValueError, match="^cache_format: expected fp8_e4m3 for fp8_mode fp8_query, got compute_dtype"):
        decode.mla_decode(
            queries[..., :512], queries[..., 512:], cache, torch.zeros(1, 4, dtype=torch.int32), lens, starts, lens,
            1, 256, scale, BF16, None, None, False, measured_schedule_costs(64).split_rule, fp8_mode="fp8_query",
        )  # fmt: skip


def test_row_blocks_have_few_rows(monkeypatch):
    """Over caches in e4m3, with queries in 16 bits, all decodes take row blocks of 16 or 32 rows.

    A batch-invariant decode of a request never has two phases, and no two programs share its output columns.
    """
    for heads in (1, 16, 17, 32, 33, 64, 128):
        for cut in ("whole", "split", "scheduled", "batch-invariant", "batch-invariant, planned", *ONLY_MANY):
            kernel, _, constants = recorded(monkeypatch, heads, cut, as_chosen=True)
            c = constants["c"]
            assert (kernel.fn.__name__, c.HEADS, c.SLICES) == (KERNEL, heads, 1)
            assert (16 if heads <= 16 else 32) == c.ROWS
    monkeypatch.setattr(decode, "device_facts", lambda _: H200)
    for heads, query_len, programs in ((16, 1, 132), (16, 2, 132), (16, 3, 66), (33, 1, 66), (128, 1, 33), (128, 9, 3)):
        given = (torch.device("cpu"), BF16, heads, 512, 64, 64, query_len, FP8_E4M3)
        assert decode.decode_programs(*given) == programs


@pytest.mark.parametrize("heads, cut, launched, partial_rows, kept", [
    (128, "whole", 4, 0, 0), (128, "split", 12, 3, 0), (128, "scheduled", 12, 4, 0),
    (128, "batch-invariant, planned", 12, 3, 32 * 512), (32, "batch-invariant, planned", 3, 3, 32 * 512),
    (16, "batch-invariant, planned", 3, 10, 16 * 512), (16, "batch-invariant", 1, 0, 16 * 512),
])  # fmt: skip
def test_room_for_parts(heads, cut, launched, partial_rows, kept, monkeypatch):
    """The buffers have room for all partial outputs, and for all weighted sums that programs keep between splits."""
    launches = watched(monkeypatch)
    monkeypatch.setattr(select, "best_num_programs", lambda *_: 1)
    recorded(monkeypatch, heads, cut)
    ((name, programs, given),) = launches
    assert (name, programs) == (KERNEL, launched)
    assert given["written"].partial_out.numel() == partial_rows * heads * 512 + programs * kept


def test_choice_of_splits():
    """A single request gets many splits, each of at least one tile for each consumer; many requests get one split each.

    Row blocks of 32 rows need more time for a tile than the memory; row blocks of 16 rows do not, if all programs run.
    """
    for program_rows in (16, 32):
        choose = partial(select.best_num_splits, program_rows=program_rows, row_blocks=1, processors=132, e4m3=True)
        assert choose(items=1, rows=program_rows, keys=131072) > 40
        assert 32 <= choose(items=1, rows=program_rows, keys=8192) <= 64
        assert choose(items=128, rows=128 * program_rows, keys=4096) == 1
        assert choose(items=1, rows=program_rows, keys=128) == choose(items=1, rows=1, keys=0) == 1
        rule = measured_schedule_costs(program_rows, True).split_rule
        runs = partial(
            select.best_num_programs, heads=program_rows, program_rows=program_rows, processors=132, split_rule=rule,
            e4m3=True,
        )  # fmt: skip
        assert runs(items=1, rows=program_rows, keys=131072) > 20
        assert runs(items=256, rows=256 * program_rows, keys=4096) == 1
    few, more = (split_cost.cost_of_loop(rows, True) for rows in (16, 32))
    assert few.tile_ns < 132 * few.memory_tile_ns < more.tile_ns
    assert split_cost.cost_of_loop(16, False) == split_cost.cost_of_loop(32, False) != few


@pytest.mark.parametrize("fp8_mode", FP8_MODES)
def test_format_chooses_the_split_rule(fp8_mode):
    """With 16 heads or fewer, batch-invariant decodes over `fp8_e4m3` have a split rule of their own, in every mode."""
    for heads in (1, 16, 17, 32, 64, 128):
        for cache_format in (COMPUTE_FORMAT, FP8_E4M3):
            costs = decode.schedule_costs(torch.device("cpu"), BF16, heads, 512, 64, 64, cache_format, fp8_mode)
            own = heads <= 16 and cache_format == FP8_E4M3
            assert costs == measured_schedule_costs(heads, cache_format == FP8_E4M3)
            assert (costs.split_rule == InvariantSplitRule(8, 16, 16, 128)) == own
            assert (costs.split_cost == 6) == own


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("heads", [4, 20, 40, 64, 128])
def test_warmup_knows_a_request_alone(heads, query_len):
    """Warm-up launches every decode kernel and combine kernel that a single request of any length needs."""
    rows = heads * query_len

    def launched(length: int) -> set[tuple]:
        program_rows = select._rows_where_alone(select.rows_of_a_program(rows, True), 1, rows, length, 132)
        blocks = triton.cdiv(rows, program_rows)
        splits = select.best_num_splits(blocks, rows, length, program_rows, blocks, 132, True)
        return {(program_rows, splits > 1)} | ({combine_launch._tile_for(splits, heads, 1)} if splits > 1 else set())

    ahead = set().union(*map(launched, compilation.ALONE))
    assert set().union(*map(launched, range(64, 140_000, 960))) <= ahead


@pytest.mark.parametrize("heads, batch_invariant, latent", [
    (4, False, 256), (20, False, 256), (40, False, 256), (16, True, 256), (20, True, 512), (40, True, 256),
])  # fmt: skip
def test_warmup_specialises_for_every_step(heads, batch_invariant, latent, monkeypatch):
    """After warm-up, steps of every kind launch only kernel variants that warm-up has launched too."""
    found = record_all(monkeypatch)
    config = replace(LOW_RANK, num_heads=heads, kv_lora_rank=latent, qk_rope_head_dim=32)
    settings = dict(cache_format=FP8_E4M3)
    fast.warmup(
        config, device="cpu", dtype=BF16, block_size=16, decode_threshold=3, batch_invariant=batch_invariant, **settings
    )
    ahead = set(found)
    assert KERNEL in {key[0] for key in ahead}
    assert not {"_decode_kernel", "_scheduled_decode_kernel", "_row_blocks_64_kernel"} & {key[0] for key in ahead}
    serve(config, BF16, 3, batch_invariant, **settings)
    serve_captured(config, BF16, 3, batch_invariant, **settings)
    assert set(found) == ahead


@pytest.mark.parametrize("mode, heads, batch_invariant, latent", [
    ("fp8_product", 4, False, 256), ("fp8_query", 40, False, 256), ("fp8_product", 40, True, 512),
])  # fmt: skip
def test_warmup_specialises_for_queries_in_e4m3(mode, heads, batch_invariant, latent, monkeypatch):
    """After warm-up for queries in e4m3, steps and graphs launch only kernel variants that warm-up has launched too."""
    found = record_all(monkeypatch)
    config = replace(LOW_RANK, num_heads=heads, kv_lora_rank=latent, qk_rope_head_dim=32)
    settings = dict(cache_format=FP8_E4M3, fp8_mode=mode)
    fast.warmup(
        config, device="cpu", dtype=BF16, block_size=16, decode_threshold=2, batch_invariant=batch_invariant, **settings
    )
    ahead = set(found)
    assert MANY in {key[0] for key in ahead}
    assert not {"_decode_kernel", "_scheduled_decode_kernel", KERNEL} & {key[0] for key in ahead}
    partial_outputs = {key[1] for key in ahead if key[0] == "_combine_splits_kernel"}
    assert len(partial_outputs) == (2 if mode == "fp8_product" else 1)  # one for each dtype
    serve(config, BF16, 2, batch_invariant, **settings, q_scale=0.5)
    serve_captured(config, BF16, 2, batch_invariant, **settings, q_scale=0.5)
    assert set(found) == ahead
    monkeypatch.setattr(decode, "LEAST_IN_BFLOAT16", 1)
    serve(config, BF16, 2, batch_invariant, **settings, q_scale=0.5)
    assert set(found) == ahead


@pytest.mark.parametrize("heads", [4, 40, 128])
def test_warmup_knows_a_request_alone_in_e4m3(heads):
    """Warm-up launches every decode kernel and combine kernel that a single request of any length needs."""
    blocks = triton.cdiv(heads, 64)

    def launched(length: int) -> set[tuple]:
        splits = select.best_num_splits(blocks, heads, length, 64, blocks, 132, True)
        return {(splits > 1,)} | ({combine_launch._tile_for(splits, heads, 1)} if splits > 1 else set())

    ahead = set().union(*map(launched, compilation.ALONE))
    assert set().union(*map(launched, range(64, 140_000, 960))) <= ahead


@pytest.mark.parametrize("heads, batch_invariant", [(16, False), (128, False), (128, True)])
def test_warmup_knows_every_combine_after_a_schedule(heads, batch_invariant, monkeypatch):
    """Decodes with a schedule, of any number of requests, launch only combine kernels that warm-up has launched."""
    found = record_all(monkeypatch)
    for module in (decode, combine_launch, compilation):
        monkeypatch.setattr(module, "device_facts", lambda _: H200)
    config = replace(LOW_RANK, num_heads=heads, kv_lora_rank=256, qk_rope_head_dim=32)
    fast.warmup(
        config, device="cpu", dtype=BF16, block_size=64, decode_threshold=2, batch_invariant=batch_invariant,
        cache_format=FP8_E4M3,
    )  # fmt: skip
    ahead = set(found)
    for query_len in (1, 2):
        programs = decode.decode_programs(torch.device("cpu"), BF16, heads, 256, 32, 64, query_len, FP8_E4M3)
        for requests in (1, 2, 3, 9, 30, 300):
            rows, tokens = query_len * heads, requests * query_len
            indices = 2 * requests if batch_invariant else requests + programs
            combine_launch.combine_partial_outputs(
                torch.empty(indices * rows * 256), torch.empty(2 * indices * rows + 2 * requests * batch_invariant),
                offsets([query_len] * requests), query_len, torch.zeros(programs, 5, dtype=torch.int32),
                offsets([1] * requests), batch_invariant, torch.empty(tokens, heads, 256, dtype=BF16),
                torch.empty(heads, tokens),
            )  # fmt: skip
    assert set(found) == ahead
