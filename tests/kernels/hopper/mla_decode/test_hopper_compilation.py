"""Tests that compile the Hopper kernels for sm_90 without a GPU, and tests of launch choices and of warm-up.

If the compiler spills registers in a main loop, or if the assembler serialises matrix products, a kernel is a third
slower, but no test of results fails. The tests of this file find both faults in the installed version of Triton.

A row is one (query token, head) pair, and a row block is the 16, 32 or 64 rows of a request that a program processes
together. A split is a part of the keys of a request, in tiles of 64 keys, that is attended independently.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

import fast
from fast import compilation
from fast.kernels.schedule_costs import measured_schedule_costs
from reference.interfaces import COMPUTE_FORMAT, DecodeMetadata, InvariantSplitRule, format_named, invariant_split_tiles

from .... import memory_checks
from ....support.backends import cpu_backend, hopper_on_cpu, with_backends
from ....support.barrier_memory import unused, used_again
from ....support.compiled import Recorded, RecordedGluon, Source, compiled, without_products
from ....support.decode_inputs import cut_of, schedule_of
from ....support.factories import LOW_RANK, integers, offsets
from ....support.machine_code import arrivals_for_all, check_assembly, product_loops, run
from ....test_compilation import LAUNCHERS, serve, serve_captured

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)


from fast.kernels import hopper  # noqa: E402
from fast.kernels import triton as portable  # noqa: E402
from fast.kernels.combine import launch as combine_launch  # noqa: E402
from fast.kernels.compile_log import describe  # noqa: E402
from fast.kernels.device import DeviceFacts  # noqa: E402
from fast.kernels.hopper.mla_decode import launch as decode  # noqa: E402
from fast.kernels.hopper.mla_decode import select  # noqa: E402
from fast.kernels.hopper.mla_decode.two_phases import kernel as two_phases_kernels  # noqa: E402
from fast.kernels.hopper.mla_decode.two_phases import launch as two_phases_launch  # noqa: E402
from fast.kernels.hopper.varlen import combine as varlen_combine  # noqa: E402
from fast.kernels.hopper.varlen import kernel as varlen_kernels  # noqa: E402
from fast.kernels.hopper.varlen import launch as varlen  # noqa: E402

BF16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("without_shape_checks")
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
H200 = DeviceFacts(132, (9, 0), 232448)
# How a request is divided among programs. "whole": the request is one split. "split": it has three splits. "scheduled"
# and "planned": a schedule divides the request. "scheduled, two": it divides two requests. "sliced": two programs share
# each work item, and each computes half of the output columns. "two phases": programs first compute all scores, then
# all outputs.
CUTS = ("whole", "split", "scheduled", "batch-invariant", "batch-invariant, planned", "scheduled, two",
        "batch-invariant, sliced", "batch-invariant, two phases")  # fmt: skip
ONLY_MANY = CUTS[-3:]  # these cuts have kernels of their own only for more than 32 heads
LAUNCHED_BY = {decode._row_blocks_16_32_kernel: decode, decode._row_blocks_64_kernel: decode,
               decode._row_blocks_16_or_64_kernel: decode,
               decode._row_blocks_16_32_e4m3_kernel: decode, decode._row_blocks_64_e4m3_kernel: decode,
               two_phases_kernels._two_phases_kernel: two_phases_launch,
               two_phases_kernels._clear_kernel: two_phases_launch, varlen_kernels._varlen_kernel: varlen}  # fmt: skip


def record(monkeypatch, launches: dict) -> None:
    """Replace the Hopper kernels: a launch then only stores in `launches` which variant Triton would compile."""
    for kernel, launcher in LAUNCHED_BY.items():
        monkeypatch.setattr(launcher, kernel.fn.__name__, RecordedGluon(kernel, launches))


def recorded(
    monkeypatch, heads, cut="whole", block_size=64, widths=(512, 64), dtype=torch.bfloat16, as_chosen=False,
    out_dtype=None, cache_format=COMPUTE_FORMAT,
):  # fmt: skip
    """Record a launch of `mla_decode` for an H200; return kernel, argument kinds and constants.

    The batch has one request with one query token; for "scheduled, two", it has two such requests.
    """
    launches = {}
    record(monkeypatch, launches)
    monkeypatch.setattr(decode, "combine_partial_outputs", lambda *_, **__: None)
    monkeypatch.setattr(decode, "device_facts", lambda _: H200)
    monkeypatch.setattr(select, "best_num_splits", lambda *_: 3 if cut == "split" else 1)
    monkeypatch.setattr(select, "SLICES", 2 if cut == "batch-invariant, sliced" else 1)
    if cut != "batch-invariant, two phases" and not as_chosen:
        monkeypatch.setattr(select, "_scored_at_once", lambda *_: False)
    monkeypatch.setattr(select, "_rows_where_alone", lambda program_rows, *_: program_rows)
    latent, rope = widths
    requests, keys = 2 if cut == "scheduled, two" else 1, 40 * block_size
    lens, blocks = integers(*[600] * requests), integers(*range(40)).expand(requests, 40)
    plan = DecodeMetadata(blocks, lens, offsets([1] * requests), 1, lens, keys, block_size)
    schedule = None
    if cut.startswith("batch-invariant"):
        schedule = schedule_of(plan, heads, 0, True)
    if cut in ("scheduled", "scheduled, two", "batch-invariant, planned"):
        schedule = schedule_of(plan, heads, 3, cut == "batch-invariant, planned")
    decode.mla_decode(
        torch.zeros(requests, heads, latent, dtype=dtype), torch.zeros(requests, heads, rope, dtype=dtype),
        torch.zeros(40, block_size, latent + rope, dtype=cache_format.storage_dtype or dtype), plan.block_table,
        plan.seq_lens, plan.query_start_loc, plan.visible_lens, 1, plan.max_seq_len, 0.1, out_dtype or dtype,
        *cut_of(schedule), cache_format, torch.ones(()) if cache_format.layer_scale else None,
    )  # fmt: skip
    *_, launch = launches.values()  # the last launch: `_two_phases_kernel` comes after `_clear_kernel`
    return launch


def watched(monkeypatch) -> list[tuple]:
    """Return a list to which every recorded launch appends its kernel name, grid and arguments by name."""
    launches = []

    def noted(self, grid):
        def launch(*args, **constants):
            names = [parameter.name for parameter in self.kernel.params]
            launches.append((self.kernel.fn.__name__, *grid, dict(zip(names, args, strict=False))))
            Recorded.__getitem__(self, grid)(*args, **constants)

        return launch

    monkeypatch.setattr(RecordedGluon, "__getitem__", noted, raising=False)
    return launches


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("heads", [16, 32, 128])
def test_nothing_spills_where_it_multiplies(heads, cut, monkeypatch, tmp_path):
    """Compile a kernel and check its main loops and its arrivals at mbarriers.

    - No main loop spills registers.
    - The assembler serialises no matrix product.
    - One thread arrives for its warp group only after a barrier of the group.
    - Every mbarrier is used, and no other data begin at its address.
    """
    if heads <= 32 and cut in ONLY_MANY:
        pytest.skip("only for more than 32 heads")
    kernel = compiled(*recorded(monkeypatch, heads, cut))
    assert kernel.metadata.shared <= H200.shared
    check_assembly(kernel, tmp_path)
    disassembly = run("nvdisasm", "-c", tmp_path / "kernel.cubin")
    loops = product_loops(disassembly)
    assert loops
    consumers = 2 if heads > 32 and cut != "batch-invariant, two phases" else 1
    # with two consumers, leave out the loops that load the block table (LDG): these loops process only masked tiles
    main = [loop for loop in loops if not any("LDG" in text for text in loop)] if consumers == 2 else loops
    assert len(main) == consumers  # one main loop for each consumer
    if cut == "batch-invariant, two phases":  # the score products are in no loop, so check the whole kernel
        main = [disassembly.splitlines()]
    for loop in main:
        assert not [text for text in loop if re.search(r"\b(LDL|STL)\b", text)]
    writes = heads == 128 and cut not in ("split", *ONLY_MANY[1:])
    assert ("UTMASTG" in disassembly) == writes, "TMA stores of outputs"


def count_arrivals() -> None:
    """Print, for each of three kernels, its cache key and two counts of arrivals at mbarriers.

    The first count is the number of arrivals that one thread makes for its warp group. The second count is the
    number of these arrivals before which every thread arrived for itself (`cp.async.mbarrier.arrive`).
    """
    for heads, cut in ((3, "batch-invariant, planned"), (64, "scheduled, two"), (64, "batch-invariant, two phases")):
        with pytest.MonkeyPatch.context() as patch:
            kernel, *given = recorded(patch, heads, cut)
            found = arrivals_for_all(compiled(kernel, *given).asm["ptx"])
        every = sum(any(line.startswith("cp.async.mbarrier.arrive.shared") for line in before) for before in found)
        print("arrivals", kernel.cache_key, len(found), every)


def test_every_thread_arrives_for_racecheck(capsys, tmp_path):
    """After a call of `let_every_thread_arrive`, every thread arrives at each mbarrier.

    Racecheck (a tool of compute-sanitizer) needs these arrivals. Without the call, one thread arrives for its warp
    group. The two forms of a kernel have different cache keys.
    """
    count_arrivals()
    served = re.findall(r"^arrivals (\w+) (\d+) (\d+)$", capsys.readouterr().out, re.MULTILINE)
    program = f"""if True:
        from tests.hand_over import let_every_thread_arrive
        let_every_thread_arrive()
        from {__name__} import count_arrivals
        count_arrivals()"""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], cwd=memory_checks.ROOT, env=environment, capture_output=True,
                          text=True, check=True, timeout=600)  # fmt: skip
    checked = re.findall(r"^arrivals (\w+) (\d+) (\d+)$", done.stdout, re.MULTILINE)
    assert len(served) == len(checked) == 3
    for (key, count, few), (other_key, other_count, every) in zip(served, checked, strict=True):
        assert key != other_key and int(count) == int(other_count) == int(every) >= 3
        # `few` need not be 0: in two phases, every thread always arrives after the cp.async copies of `row_values`
        assert int(few) < int(count)


@pytest.mark.parametrize("block_size, widths, dtype", [
    (16, (512, 64), torch.bfloat16), (32, (256, 32), torch.float16), (128, (512, 0), torch.bfloat16),
    (64, (256, 64), torch.bfloat16),
])  # fmt: skip
@pytest.mark.parametrize("heads, cut", [
    (16, CUTS[0]), (32, CUTS[0]), (32, "batch-invariant"), (128, CUTS[0]), (128, CUTS[-1])
])  # fmt: skip
def test_every_shape_fits(heads, cut, block_size, widths, dtype, monkeypatch):
    """Compile kernels for several block sizes and widths -> they fit into an H200, and their barriers are used."""
    always = ((32, CUTS[0], 16), (16, CUTS[0], 32), (32, "batch-invariant", 32))
    if not DEEP and (heads, cut, block_size) not in always:
        pytest.skip("runs only with HYPOTHESIS_PROFILE=deep")
    kernel = compiled(*recorded(monkeypatch, heads, cut, block_size, widths, dtype))
    assert kernel.metadata.shared <= H200.shared
    assert unused(kernel.asm["ptx"]) == used_again(kernel.asm["ptx"]) == []


def test_choice_of_splits():
    """A single request gets many splits, but requests that fill the GPU get one split each.

    A request never has more splits than tiles.
    """
    for program_rows in (16, 64):
        choose = partial(select.best_num_splits, program_rows=program_rows, row_blocks=1, processors=132)
        assert choose(items=1, rows=program_rows, keys=131072) > 40
        assert choose(items=128, rows=128 * program_rows, keys=4096) == 1
        assert choose(items=1, rows=program_rows, keys=64) == choose(items=1, rows=1, keys=0) == 1


def test_choice_of_runs():
    """In a batch-invariant decode, several programs share the splits of a single request.

    If the requests fill the GPU, each request gets one program. A request never gets more programs than splits.
    """
    for heads, program_rows in ((16, 16), (32, 32), (128, 64)):
        split_rule = measured_schedule_costs(heads).split_rule
        choose = partial(
            select.best_num_programs, heads=heads, program_rows=program_rows, processors=132, split_rule=split_rule
        )
        assert choose(items=1, rows=heads, keys=131072) > 20
        assert choose(items=256, rows=256 * program_rows, keys=4096) == 1
        assert choose(items=1, rows=heads, keys=64) == choose(items=1, rows=heads, keys=0) == 1
        for keys in (64, 300, 4096, 70_000):
            tiles = triton.cdiv(keys, 64)
            assert choose(items=2, rows=heads, keys=keys) <= triton.cdiv(
                tiles, invariant_split_tiles(tiles, split_rule)
            )


def test_which_kernel_takes_how_many_rows(monkeypatch):
    """A request in one row block of 16 rows leaves registers for the combine kernel, except batch-invariant decodes."""
    few, many, room = "_row_blocks_16_32_kernel", "_row_blocks_64_kernel", 144
    unknown = "_row_blocks_16_or_64_kernel"  # the kernel chooses by the length of the request
    for heads, cut, name, registers in (
        (1, "whole", few, room), (16, "scheduled", few, room), (16, "split", few, room),
        (16, "batch-invariant", few, None), (17, "scheduled", few, None), (32, "whole", few, None),
        (33, "scheduled", unknown, None), (33, "scheduled, two", many, None), (33, "whole", many, None),
        (33, "batch-invariant, planned", many, None),
    ):  # fmt: skip
        kernel, _, constants = recorded(monkeypatch, heads, cut)
        assert kernel.fn.__name__ == name and heads == constants["c"].HEADS
        assert constants.get("maxnreg") == registers


@pytest.mark.parametrize("cut, registers", [("scheduled", 144), ("whole", None), ("batch-invariant, planned", None)])
def test_several_row_blocks_of_16_rows(cut, registers, monkeypatch, tmp_path):
    """With a schedule, four row blocks of 16 rows leave registers for the combine kernel too, and nothing spills."""
    monkeypatch.setattr(select, "rows_of_a_program", lambda *_: 16)
    kernel, kinds, constants = recorded(monkeypatch, 64, cut)
    assert (constants["c"].ROWS, constants.get("maxnreg")) == (16, registers)
    if registers:
        (tmp_path / "kernel.cubin").write_bytes(compiled(kernel, kinds, constants).asm["cubin"])
        assert not re.search(r"\b(LDL|STL)\b", run("nvdisasm", "-c", tmp_path / "kernel.cubin"))


@pytest.mark.parametrize("heads, cut, latent, out_dtype, box", [
    (64, "whole", 512, BF16, [64, 128]), (128, "scheduled", 256, BF16, [64, 64]), (128, "split", 512, BF16, None),
    (128, "batch-invariant, sliced", 512, BF16, None), (128, "whole", 512, torch.float32, None),
    (128, "batch-invariant", 512, torch.float16, None), (100, "whole", 512, BF16, None),
])  # fmt: skip
def test_whose_outputs_the_copy_engine_writes(heads, cut, latent, out_dtype, box, monkeypatch):
    """TMA (the GPU's bulk copy engine) writes outputs only if each row block is 64 heads of one token.

    TMA copies the outputs from the shared memory of the queries, so outputs and queries must also have the same dtype.
    Otherwise plain stores write the outputs.
    """
    launches = watched(monkeypatch)
    kernel = compiled(*recorded(monkeypatch, heads, cut, widths=(latent, 64), out_dtype=out_dtype))
    given = launches[-1][2]["out_rows"]
    assert (given and given.block_shape) == box
    assert ("cp.async.bulk.tensor.2d.global.shared" in kernel.asm["ptx"]) == (box is not None)
    if box:
        assert given.shape == (heads, latent) and given.base.data_ptr() == launches[-1][2]["written"].out.data_ptr()


@pytest.mark.parametrize("heads, cut, ahead", [
    (64, "whole", True), (33, "whole", True), (128, "whole", False), (64, "split", False), (64, "scheduled", False),
    (64, "batch-invariant", False),
])  # fmt: skip
def test_who_asks_ahead(heads, cut, ahead, monkeypatch):
    """A program prefetches its first queries and keys only if a row block has all heads and no request is split.

    Under these conditions, the program knows its first request before it reads any length or schedule.
    """
    ptx = compiled(*recorded(monkeypatch, heads, cut)).asm["ptx"]
    assert ("cp.async.bulk.prefetch.L2.global" in ptx) == ahead
    # The decode kernel waits until the previous kernel, which may write the schedule, has ended. Only then may it let
    # the combine kernel begin, because the combine kernel reads the schedule before its own wait.
    wanted = ("griddepcontrol.wait", "griddepcontrol.launch")
    order = [ptx.index(what) for what in (("cp.async.bulk.prefetch", *wanted) if ahead else wanted)]
    assert order == sorted(order)


def test_slices_where_processors_are_idle(monkeypatch):
    """Two programs share a work item, and each computes half of the output columns, if all of these conditions hold.

    - The decode is batch-invariant and has no schedule.
    - There are at least two multiprocessors for each work item.
    - The latent width is 512.
    - There are more than 32 heads, because only `row_blocks_64` can share work items.
    """
    launches = watched(monkeypatch)
    monkeypatch.setattr(select, "best_num_programs", lambda *_: 3)  # 128 heads have two row blocks: 6 programs
    for heads, processors, widths, cut, slices, programs in (
        (128, 132, (512, 64), "batch-invariant, sliced", 2, 12), (128, 12, (512, 0), "batch-invariant, sliced", 2, 12),
        (128, 11, (512, 64), "batch-invariant, sliced", 1, 6), (128, 5, (512, 64), "batch-invariant, sliced", 1, 5),
        (128, 132, (256, 64), "batch-invariant, sliced", 1, 6), (128, 132, (512, 64), "batch-invariant", 1, 6),
        (128, 132, (512, 64), "batch-invariant, planned", 1, 6), (128, 132, (512, 64), "whole", 1, 2),
        (16, 132, (512, 64), "batch-invariant, sliced", 1, 3),
        (32, 132, (512, 64), "batch-invariant, sliced", 1, 3),
    ):  # fmt: skip
        monkeypatch.setitem(globals(), "H200", H200._replace(processors=processors))
        _, _, constants = recorded(monkeypatch, heads, cut, widths=widths)
        assert slices == constants["c"].SLICES
        assert launches[-1][1] == programs


@pytest.mark.parametrize("heads, cut, runs, programs, slots, partial_rows, kept", [
    (128, "whole", 1, 2, 1, 0, 0), (128, "split", 1, 6, 3, 3, 0), (128, "scheduled", 1, 6, 4, 4, 0),
    (128, "batch-invariant, planned", 1, 6, 3, 3, 64 * 512), (128, "batch-invariant", 1, 2, 0, 0, 64 * 512),
    (128, "batch-invariant", 3, 6, 3, 3, 64 * 512), (32, "batch-invariant, planned", 1, 3, 3, 3, 16 * 512),
    (16, "batch-invariant, planned", 1, 3, 10, 10, 0),
])  # fmt: skip
def test_room_for_parts(heads, cut, runs, programs, slots, partial_rows, kept, monkeypatch):
    """The buffers have room for all partial outputs and for the weighted sums that programs keep between splits.

    The request has 40 tiles. A batch-invariant decode of 16 heads makes 10 splits of 4 tiles; with more heads, it makes
    3 splits of at most 16 tiles. A schedule of 3 programs that is not batch-invariant gets room for 1 + 3 splits.
    `partial_rows` is the number of partial outputs of each row, and `kept` the number of float32 values that each
    program keeps.
    """
    launches = watched(monkeypatch)
    monkeypatch.setattr(select, "best_num_programs", lambda *_: runs)
    recorded(monkeypatch, heads, cut)
    ((_, launched, given),) = launches
    assert (launched, given["num_partials"]) == (programs, slots)
    assert given["written"].partial_out.numel() == partial_rows * heads * 512 + programs * kept
    progress = 2 if cut.startswith("batch-invariant") else 0
    assert given["written"].partial_lse.numel() == 2 * partial_rows * heads + progress


def test_two_phases_where_processors_are_idle(monkeypatch):
    """The launcher chooses two phases if all of these conditions hold.

    - The decode is batch-invariant and has no schedule.
    - The latent width is 512, and there are more than 32 heads.
    - Every score block (a pair of tiles and a row block) gets its own program.

    A launch in two phases is cooperative, because programs wait for each other. The number of programs is the number of
    score blocks or of column blocks, whichever is larger, but at most the number of multiprocessors.

    In this test the block table has 40 columns. With blocks of 64 tokens, these are 20 pairs of tiles, which make 3
    splits. With blocks of 16 tokens, these are 5 pairs, which make 1 split.
    """
    launched = watched(monkeypatch)
    unplanned = "batch-invariant"
    for heads, processors, widths, block_size, cut, expected in (
        (128, 132, (512, 64), 64, unplanned, ("_two_phases_kernel", 48)),
        (128, 40, (512, 0), 64, unplanned, ("_two_phases_kernel", 40)),
        (40, 132, (512, 64), 64, unplanned, ("_two_phases_kernel", 24)),
        (40, 20, (512, 64), 64, unplanned, ("_two_phases_kernel", 20)),
        (40, 132, (512, 64), 16, unplanned, ("_two_phases_kernel", 8)),
        (40, 5, (512, 64), 16, unplanned, ("_two_phases_kernel", 5)),
        (40, 19, (512, 64), 64, unplanned, ("_row_blocks_64_kernel", 3)),
        (128, 132, (256, 64), 64, unplanned, ("_row_blocks_64_kernel", 6)),
        (40, 132, (512, 64), 64, "batch-invariant, planned", ("_row_blocks_64_kernel", 3)),
        (40, 132, (512, 64), 64, "whole", ("_row_blocks_64_kernel", 1)),
        (32, 132, (512, 64), 64, unplanned, ("_row_blocks_16_32_kernel", 3)),
    ):  # fmt: skip
        launched.clear()
        monkeypatch.setitem(globals(), "H200", H200._replace(processors=processors))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(select, "best_num_programs", lambda *_: 3)
            _, _, constants = recorded(patch, heads, cut, block_size, widths, as_chosen=True)
        assert launched[-1][:2] == expected
        together = expected[0] == "_two_phases_kernel"
        assert constants.get("launch_cooperative_grid", False) == together
        assert [name for name, *_ in launched] == ["_clear_kernel"] * together + [expected[0]]
        if together:
            units, splits = block_size * 20 // 64 * triton.cdiv(heads, 64), 3 if block_size == 64 else 1
            given = launched[-1][2]
            assert launched[0][1] == triton.cdiv(units * 129, 1024) and given["words"].numel() == units * 129
            assert given["row_values"].numel() == units * 256 and given["pairs"] == block_size * 20 // 64
            assert given["probabilities"].shape == given["probability_pairs"].shape == (units * 128, 64)
            slots = 3 if splits == 3 else 0  # a single split needs no partial output
            assert given["num_partials"] == slots and given["written"].partial_out.numel() == slots * heads * 512
            assert given["splits_bound"] == splits
    # a block table without columns
    assigned = select.assign_by_length(3, 64, 64, 0, 64, 512, 132, measured_schedule_costs(64).split_rule)
    assert assigned == select.Assignment(6, 1, 0, 0, most_splits=1, slices=2)


def test_memory_checkers_see_every_variant(monkeypatch):
    """The decodes and prefills of `tests.memory_checks` launch every Hopper kernel in every variant, on an H200."""
    launches = {}
    record(monkeypatch, launches)
    combining = Recorded(varlen_combine._combine_varlen_kernel, launches)
    monkeypatch.setattr(varlen_combine, "_combine_varlen_kernel", combining)
    monkeypatch.setattr(varlen, "device_facts", lambda _: H200)
    monkeypatch.setattr(decode, "combine_partial_outputs", lambda *_, **__: None)
    monkeypatch.setattr(decode, "device_facts", lambda _: H200)
    for given in memory_checks.decodes():
        *tensors, cut, stored, kv_scale, mode, q_scale = given[:-4]  # then: prepared, ranks, backend
        decode.mla_decode(*tensors, InvariantSplitRule(*cut), format_named(stored), kv_scale, None, mode, q_scale)
    for given in memory_checks.prefills():
        varlen.flash_attn_varlen(*given[:-1])
    lines = []
    for kernel, kinds, constants in launches.values():
        source = Source(kernel, kinds, constants)
        lines.append(describe(kernel.fn.__name__, source.signature, source.constants))
    assert {line.split()[0] for line in lines} == memory_checks.kernels_of(["hopper"])
    assert not [
        missing
        for missing in memory_checks.never_launched(lines, hopper=True)
        if " of " in missing and not missing.startswith(("gqa", "combine"))
    ]


@pytest.mark.parametrize("heads, query_len, rows", [
    (16, 1, 16), (16, 2, 32), (16, 5, 32), (4, 4, 16), (4, 5, 32), (20, 1, 32), (32, 8, 32), (33, 1, 64), (128, 4, 64),
])  # fmt: skip
def test_rows_by_own_length(heads, query_len, rows, monkeypatch):
    """In a batch-invariant decode, row blocks have 16 or 32 rows for up to 32 heads, and 64 rows for more heads.

    For up to 32 heads, a row block has 16 rows if a request has at most 16 rows, and 32 rows if a request has more.
    """
    asked = []
    monkeypatch.setattr(select, "best_num_programs", lambda *given: asked.append(given[4]) or 1)
    monkeypatch.setattr(decode, "rows_of_a_request", lambda *_: heads * query_len)
    recorded(monkeypatch, heads, "batch-invariant")
    assert asked == [rows]


def test_queries_in_words():
    """`_in_words` copies queries only if a row is not contiguous, or if the address or a stride is not aligned."""
    storage = torch.randn(4 * 3 * 512 + 16, dtype=torch.bfloat16)
    packed = storage[: 3 * 4 * 512].view(3, 4, 512)
    for there, strides in (
        (packed, [2048, 512]),
        (packed.transpose(0, 1), [512, 2048]),
        (packed[:1, :, :256], [0, 512]),  # with one token the stride of tokens does not matter
        (packed[:, :1].expand(3, 4, 512), [2048, 0]),
        (packed[:, :, :0], [2048, 512]),
    ):
        queries, found = decode._in_words(there)
        assert queries.data_ptr() == there.data_ptr() and found == strides
    for there in (
        storage[1 : 1 + packed.numel()].view_as(packed),
        packed[..., ::2],
        storage.as_strided((3, 4, 512), (2048, 8, 1)),
    ):
        queries, found = decode._in_words(there)
        assert torch.equal(queries, there) and queries.data_ptr() % 16 == 0 and queries.is_contiguous()
        assert found == list(queries.stride()[:2])


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("heads", [4, 20, 40, 64, 128])
def test_warmup_knows_a_request_alone(heads, query_len):
    """Warm-up launches every decode kernel and combine kernel that a single request of any length needs."""
    rows = heads * query_len

    def launched(length: int) -> set[tuple]:
        program_rows = select._rows_where_alone(select.rows_of_a_program(rows), 1, rows, length, 132)
        blocks = triton.cdiv(rows, program_rows)
        splits = select.best_num_splits(blocks, rows, length, program_rows, blocks, 132)
        return {(program_rows, blocks == 1, splits > 1)} | (
            {combine_launch._tile_for(splits, heads, 1)} if splits > 1 else set()
        )

    ahead = set().union(*map(launched, compilation.ALONE))
    assert set().union(*map(launched, range(64, 140_000, 960))) <= ahead


def record_all(monkeypatch) -> dict:
    """Replace all kernels, and let the backends serve CPU tensors; return the dict that collects launched variants."""
    found = {}
    for name in LAUNCHERS:
        module = importlib.import_module(f"fast.kernels.{name}")
        for kernel in [key for key in vars(module) if key.endswith("_kernel")]:
            monkeypatch.setattr(module, kernel, Recorded(getattr(module, kernel), found))
    record(monkeypatch, found)
    combine_varlen = Recorded(varlen_combine._combine_varlen_kernel, found)
    monkeypatch.setattr(varlen_combine, "_combine_varlen_kernel", combine_varlen)
    without_products(monkeypatch)
    with_backends(monkeypatch, cpu_backend(portable.KERNELS), hopper_on_cpu(hopper.KERNELS))
    return found


@pytest.mark.parametrize("heads, batch_invariant, latent", [
    (4, False, 256), (40, False, 256), (64, False, 256), (20, True, 256), (40, True, 256), (40, True, 512),
])  # fmt: skip
def test_warmup_specialises_for_every_step(heads, batch_invariant, latent, monkeypatch):
    """After warm-up, steps of every kind launch only kernel variants that warm-up has launched too."""
    found = record_all(monkeypatch)
    config = replace(LOW_RANK, num_heads=heads, kv_lora_rank=latent, qk_rope_head_dim=32)
    fast.warmup(
        config, device="cpu", dtype=torch.bfloat16, block_size=16, decode_threshold=3, batch_invariant=batch_invariant
    )
    ahead = set(found)
    assert {"_row_blocks_16_32_kernel", "_row_blocks_64_kernel"} & {key[0] for key in ahead}
    assert ("_two_phases_kernel" in {key[0] for key in ahead}) == (batch_invariant and (heads, latent) == (40, 512))
    serve(config, torch.bfloat16, 3, batch_invariant)
    serve_captured(config, torch.bfloat16, 3, batch_invariant)
    assert set(found) == ahead


@pytest.mark.parametrize("heads, batch_invariant", [(16, False), (128, False), (128, True)])
def test_warmup_knows_every_combine(heads, batch_invariant, monkeypatch):
    """Decodes of any number of requests and splits launch only combine kernels that warm-up has launched."""
    found = record_all(monkeypatch)
    for module in (decode, combine_launch, compilation):
        monkeypatch.setattr(module, "device_facts", lambda _: H200)
    config = replace(LOW_RANK, num_heads=heads, kv_lora_rank=256, qk_rope_head_dim=32)
    fast.warmup(config, device="cpu", dtype=BF16, block_size=64, decode_threshold=3, batch_invariant=batch_invariant)
    ahead = set(found)
    for query_len in (1, 2, 3):
        programs = decode.decode_programs(torch.device("cpu"), BF16, heads, 256, 32, 64, query_len)
        for requests in (1, 2, 3, 8, 9, 30, 200, 300):
            rows, tokens = query_len * heads, requests * query_len
            indices = 2 * requests if batch_invariant else requests + programs
            combine_launch.combine_partial_outputs(
                torch.empty(indices * rows * 256), torch.empty(2 * indices * rows + 2 * requests * batch_invariant),
                offsets([query_len] * requests), query_len, torch.zeros(programs, 5, dtype=torch.int32),
                offsets([1] * requests), batch_invariant, torch.empty(tokens, heads, 256, dtype=BF16),
                torch.empty(heads, tokens),
            )  # fmt: skip
            # without a schedule; more than two requests take the same variants as two
            counts = (2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 70)
            for splits in () if batch_invariant or requests > 2 else counts:
                combine_launch.combine_partial_outputs(
                    torch.empty(splits * tokens * heads * 256), torch.empty(2 * splits * tokens * heads),
                    offsets([query_len] * requests), query_len, None, None, False,
                    torch.empty(tokens, heads, 256, dtype=BF16), torch.empty(heads, tokens),
                )  # fmt: skip
    assert set(found) == ahead
