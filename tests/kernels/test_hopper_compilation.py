"""The Hopper kernels compiled for sm_90 without a GPU: what the loops that multiply must not contain.

A register spilled within them, or products that the assembler runs one after another, cost a third of the speed and no
test of results would notice. Compilers change: this runs with the pinned Triton and with any other that is installed.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import fast
from fast import compilation
from fast.kernels.schedule_costs import measured_schedule_costs
from reference.interfaces import DecodeMetadata, InvariantCut, invariant_split_tiles

from .. import memory_checks
from ..support.backends import cpu_backend, with_backends
from ..support.decode_inputs import cut_of, schedule_of
from ..support.factories import LOW_RANK, integers, offsets
from ..test_compilation import LAUNCHERS, TYPES, Recorded, serve

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from fast.kernels import hopper  # noqa: E402
from fast.kernels import triton as portable  # noqa: E402
from fast.kernels.combine import launch as combine_launch  # noqa: E402
from fast.kernels.compile_log import describe  # noqa: E402
from fast.kernels.device import DeviceFacts  # noqa: E402
from fast.kernels.hopper.mla_decode import launch as decode  # noqa: E402
from fast.kernels.hopper.mla_decode import select  # noqa: E402
from fast.kernels.hopper.mla_decode.main_loops import row_blocks_16_32, row_blocks_64  # noqa: E402
from fast.kernels.hopper.mla_decode.two_phases import kernel as two_phases_kernels  # noqa: E402
from fast.kernels.hopper.mla_decode.two_phases import launch as two_phases_launch  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
BF16 = torch.bfloat16
DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
H200 = DeviceFacts(132, (9, 0), 232448)
CUTS = ("whole", "split", "scheduled", "batch-invariant", "batch-invariant, planned", "batch-invariant, sliced",
        "batch-invariant, two phases")  # fmt: skip
ONLY_MANY = CUTS[-2:]  # heads
LAUNCHED_BY = {row_blocks_16_32._row_blocks_16_32_kernel: decode, row_blocks_64._row_blocks_64_kernel: decode,
               two_phases_kernels._two_phases_kernel: two_phases_launch,
               two_phases_kernels._clear_kernel: two_phases_launch}  # fmt: skip


class RecordedGluon(Recorded):
    """As for portable kernels; descriptors carry the layout of their boxes."""

    @staticmethod
    def kind(parameter, value) -> tuple:
        if hasattr(value, "block_shape"):
            return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>", False
        return Recorded.kind(parameter, value)


def record(monkeypatch, launches: dict) -> None:
    """No kernel is launched from now on: what each launch would compile is noted."""
    for kernel, launcher in LAUNCHED_BY.items():
        monkeypatch.setattr(launcher, kernel.fn.__name__, RecordedGluon(kernel, launches))


def recorded(
    monkeypatch, heads, cut="whole", block_size=64, widths=(512, 64), dtype=torch.bfloat16, as_chosen=False,
    out_dtype=None,
):  # fmt: skip
    """What one launch of `mla_decode` would compile: the kernel, its arguments' kinds, its constants."""
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
    lens, keys = integers(600), 40 * block_size
    plan = DecodeMetadata(integers(*range(40))[None], lens, offsets([1]), 1, lens, keys, block_size)
    schedule = None
    if cut.startswith("batch-invariant"):
        schedule = schedule_of(plan, heads, 0, True)
    if cut in ("scheduled", "batch-invariant, planned"):
        schedule = schedule_of(plan, heads, 3, cut != "scheduled")
    decode.mla_decode(
        torch.zeros(1, heads, latent, dtype=dtype), torch.zeros(1, heads, rope, dtype=dtype),
        torch.zeros(40, block_size, latent + rope, dtype=dtype), plan.block_table, plan.seq_lens, plan.query_start_loc,
        plan.visible_lens, 1, plan.max_seq_len, 0.1, out_dtype or dtype, *cut_of(schedule),
    )  # fmt: skip
    *_, launch = launches.values()  # behind one that clears
    return launch


def watched(monkeypatch) -> list[tuple]:
    """Of every launch that is recorded from now on: the kernel's name, its programs, and its arguments by name."""
    launches = []

    def noted(self, grid):
        def launch(*args, **constants):
            names = [parameter.name for parameter in self.kernel.params]
            launches.append((self.kernel.fn.__name__, *grid, dict(zip(names, args, strict=False))))
            Recorded.__getitem__(self, grid)(*args, **constants)

        return launch

    monkeypatch.setattr(RecordedGluon, "__getitem__", noted, raising=False)
    return launches


def compiled(kernel, kinds, constants):
    """Compiled for sm_90a, which need not be here."""
    settings = {"num_warps", "launch_pdl", "launch_cooperative_grid"}
    options = {key: value for key, value in constants.items() if key in settings}
    values = {key: value for key, value in constants.items() if key not in settings}
    values |= {name: what for name, (kind, what) in kinds.items() if kind == "constexpr"}
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in values else kinds[name][0] for name in names}
    divided = {(names.index(n),): [["tt.divisibility", 16]] for n, (kind, what) in kinds.items()
               if kind != "constexpr" and what}  # fmt: skip
    source = GluonASTSource(kernel, signature, values, divided)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def run(tool, *arguments) -> str:
    done = subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True, timeout=300)
    return done.stdout + done.stderr


def product_loops(disassembly: str) -> list[list[str]]:
    """The innermost loops that multiply, as instructions; not the one of the last tiles, which also reads the table."""
    instructions, labels = [], {}
    for line in disassembly.splitlines():
        if found := re.match(r"\s*(\.L\w+):", line):
            labels[found.group(1)] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]+\*/\s+(.*?);", line):
            instructions.append(found.group(1))
    loops = []
    for end, text in enumerate(instructions):
        found = re.search(r"\bBRA\b.*`\((\.L\w+)\)", text)
        if text.startswith("BRA `"):  # the way back from where a barrier is asked again, not the end of a loop
            continue
        if found and labels.get(found.group(1), end + 1) <= end:
            loops.append((labels[found.group(1)], end))
    multiply = [(a, b) for a, b in set(loops) if any("HGMMA" in text for text in instructions[a : b + 1])]
    innermost = [(a, b) for a, b in multiply
                 if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in multiply)]  # fmt: skip
    return [instructions[a : b + 1] for a, b in sorted(innermost)]


def arrivals_for_all(ptx: str) -> list[list[str]]:
    """Before each arrival of one thread for its group: the instructions since the one before it."""
    groups: list[list[str]] = [[]]
    for line in map(str.strip, ptx.splitlines()):
        if re.match(r"@%p\d+ mbarrier\.arrive\.shared", line):
            groups.append([])
        elif line and not re.match(r"\.(loc|file)|//|\$L__tmp", line):
            groups[-1].append(line)
    return groups[:-1]


def all_are_there(before: list[str]) -> bool:
    """Whether all threads of the group have met since one of them touched memory, or fenced what it had touched."""
    for line in reversed(before):
        if re.match(r"bar\.(sync|warp\.sync)\b", line):
            return True
        if re.search(r"^\$L|\bbra\b|\b(ld|st)\.(shared|global)|ldmatrix|stmatrix|wgmma|cp\.async|fence\.proxy", line):
            return False
    return False


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("heads", [16, 32, 128])
def test_nothing_spills_where_it_multiplies(heads, cut, monkeypatch, tmp_path):
    if heads <= 32 and cut in ONLY_MANY:
        pytest.skip("few heads have no such")
    kernel = compiled(*recorded(monkeypatch, heads, cut))
    assert kernel.metadata.shared <= H200.shared
    (tmp_path / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    (tmp_path / "kernel.ptx").write_text(kernel.asm["ptx"])
    disassembly = run("nvdisasm", "-c", tmp_path / "kernel.cubin")
    loops = product_loops(disassembly)
    assert loops
    groups = 2 if heads > 32 and cut != "batch-invariant, two phases" else 1
    main = [loop for loop in loops if not any("LDG" in text for text in loop)] if groups == 2 else loops
    assert len(main) == groups  # one each
    if cut == "batch-invariant, two phases":  # a program scores once, in no loop: nothing spills at all
        main = [disassembly.splitlines()]
    for loop in main:
        assert not [text for text in loop if re.search(r"\b(LDL|STL)\b", text)]
    writes = heads == 128 and cut not in ("split", *ONLY_MANY)
    assert ("UTMASTG" in disassembly) == writes, "the copy engine writes outputs"
    said = run("ptxas", "-v", "-arch=sm_90a", "-o", tmp_path / "again.cubin", tmp_path / "kernel.ptx")
    assert "serialized" not in said
    arrivals = arrivals_for_all(kernel.asm["ptx"])
    assert arrivals and all(map(all_are_there, arrivals))


def count_arrivals() -> None:
    """Print of three kernels their key, how many arrivals there are, and before how many every thread arrives."""
    for heads, cut in ((3, "batch-invariant, planned"), (64, "scheduled"), (64, "batch-invariant, two phases")):
        with pytest.MonkeyPatch.context() as patch:
            kernel, *given = recorded(patch, heads, cut)
            found = arrivals_for_all(compiled(kernel, *given).asm["ptx"])
        every = sum(any(line.startswith("cp.async.mbarrier.arrive.shared") for line in before) for before in found)
        print("arrivals", kernel.cache_key, len(found), every)


def test_every_thread_arrives_for_racecheck(capsys, tmp_path):
    """In the form that `tests.memory_checks` asks for, and in no other; neither is ever taken for the other."""
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
        assert int(few) < int(count)  # two phases copy row values without the engine


@pytest.mark.parametrize("block_size, widths, dtype", [
    (16, (512, 64), torch.bfloat16), (32, (256, 32), torch.float16), (128, (512, 0), torch.bfloat16),
    (64, (256, 64), torch.bfloat16),
])  # fmt: skip
@pytest.mark.parametrize("heads, cut", [(16, CUTS[0]), (32, CUTS[0]), (128, CUTS[0]), (128, CUTS[-1])])
def test_every_shape_fits(heads, cut, block_size, widths, dtype, monkeypatch):
    """Pages of every size, every preset's widths: compiled, and within the shared memory of the chip."""
    if not DEEP and (heads, block_size) not in ((32, 16), (16, 32)):
        pytest.skip("under HYPOTHESIS_PROFILE=deep")
    kernel = compiled(*recorded(monkeypatch, heads, cut, block_size, widths, dtype))
    assert kernel.metadata.shared <= H200.shared


def test_choice_of_splits():
    """One program a processor where there are few; no split where they fill the device; never more than the tiles."""
    for program_rows in (16, 64):
        choose = partial(select.best_num_splits, program_rows=program_rows, row_blocks=1, processors=132)
        assert choose(items=1, rows=program_rows, keys=131072) > 40
        assert choose(items=128, rows=128 * program_rows, keys=4096) == 1
        assert choose(items=1, rows=program_rows, keys=64) == choose(items=1, rows=1, keys=0) == 1


def test_choice_of_runs():
    """Splits by their own length are spread over programs where there are programs to spare, never more than splits."""
    for heads, program_rows in ((16, 16), (32, 32), (128, 64)):
        cut = measured_schedule_costs(heads).cut
        choose = partial(select.best_num_programs, heads=heads, program_rows=program_rows, processors=132, cut=cut)
        assert choose(items=1, rows=heads, keys=131072) > 20
        assert choose(items=256, rows=256 * program_rows, keys=4096) == 1
        assert choose(items=1, rows=heads, keys=64) == choose(items=1, rows=heads, keys=0) == 1
        for keys in (64, 300, 4096, 70_000):
            tiles = triton.cdiv(keys, 64)
            assert choose(items=2, rows=heads, keys=keys) <= triton.cdiv(tiles, invariant_split_tiles(tiles, cut))


def test_choice_of_rows():
    """Few rows where one request's programs of 4 tiles would leave processors idle, as few as still fit; else all."""
    for requests, rows, keys, chosen in (
        (1, 128, 8192, 32), (1, 64, 8192, 16), (1, 128, 1024, 16), (1, 128, 0, 16), (16, 128, 64, 64),
        (4, 128, 8192, 64), (1, 128, 131072, 64), (128, 128, 4096, 64), (128, 128, 64, 64), (1, 24, 131072, 32),
        (1, 24, 256, 16), (1, 3, 64, 16),
    ):  # fmt: skip
        program_rows = select.rows_of_a_program(rows)
        assert select._rows_where_alone(program_rows, requests, rows, keys, processors=132) == chosen
        blocks = triton.cdiv(rows, chosen)
        assert chosen == program_rows or requests * blocks * triton.cdiv(keys, 256) <= 132


def test_which_kernel_takes_how_many_rows(monkeypatch):
    for heads, name in (
        (1, "_row_blocks_16_32_kernel"),
        (32, "_row_blocks_16_32_kernel"),
        (33, "_row_blocks_64_kernel"),
    ):
        kernel, _, constants = recorded(monkeypatch, heads)
        assert kernel.fn.__name__ == name and constants["HEADS"] == heads


@pytest.mark.parametrize("heads, cut, latent, out_dtype, box", [
    (64, "whole", 512, BF16, [64, 128]), (128, "scheduled", 256, BF16, [64, 64]), (128, "split", 512, BF16, None),
    (128, "batch-invariant, sliced", 512, BF16, None), (128, "whole", 512, torch.float32, None),
    (128, "batch-invariant", 512, torch.float16, None), (100, "whole", 512, BF16, None),
])  # fmt: skip
def test_whose_outputs_the_copy_engine_writes(heads, cut, latent, out_dtype, box, monkeypatch):
    """Of 64 rows of one token, whole or none, as they lie in the queries' memory: no other dtype fits there."""
    launches = watched(monkeypatch)
    kernel = compiled(*recorded(monkeypatch, heads, cut, widths=(latent, 64), out_dtype=out_dtype))
    given = launches[-1][2]["out_rows"]
    assert (given and given.block_shape) == box
    assert ("cp.async.bulk.tensor.2d.global.shared" in kernel.asm["ptx"]) == (box is not None)
    if box:
        assert given.shape == (heads, latent) and given.base.data_ptr() == launches[-1][2]["out"].data_ptr()


@pytest.mark.parametrize("heads, cut, ahead", [
    (64, "whole", True), (33, "whole", True), (128, "whole", False), (64, "split", False), (64, "scheduled", False),
    (64, "batch-invariant", False),
])  # fmt: skip
def test_who_asks_ahead(heads, cut, ahead, monkeypatch):
    """One block of rows a token, and whole requests: a program's first request is known before any list is read."""
    ptx = compiled(*recorded(monkeypatch, heads, cut)).asm["ptx"]
    assert ("cp.async.bulk.prefetch.L2.global" in ptx) == ahead
    if ahead:  # while the kernel before may run, but after the next one may be launched
        order = [ptx.index(what) for what in ("griddepcontrol.launch", "cp.async.bulk.prefetch", "griddepcontrol.wait")]
        assert order == sorted(order)


def test_slices_where_processors_are_idle(monkeypatch):
    """Of requests that are cut by their own length, unplanned, if twice as many programs still fit; of 512 latents.

    Slices are programs of their own; `row_blocks_16_32` has none.
    """
    launches = watched(monkeypatch)
    monkeypatch.setattr(select, "best_num_programs", lambda *_: 3)  # 128 heads: by two blocks of rows
    for heads, processors, widths, cut, slices, programs in (
        (128, 132, (512, 64), "batch-invariant, sliced", 2, 12), (128, 12, (512, 0), "batch-invariant, sliced", 2, 12),
        (128, 11, (512, 64), "batch-invariant, sliced", 1, 6), (128, 5, (512, 64), "batch-invariant, sliced", 1, 5),
        (128, 132, (256, 64), "batch-invariant, sliced", 1, 6), (128, 132, (512, 64), "batch-invariant", 1, 6),
        (128, 132, (512, 64), "batch-invariant, planned", 1, 6), (128, 132, (512, 64), "whole", 1, 2),
        (16, 132, (512, 64), "batch-invariant, sliced", None, 3),
        (32, 132, (512, 64), "batch-invariant, sliced", None, 3),
    ):  # fmt: skip
        monkeypatch.setitem(globals(), "H200", H200._replace(processors=processors))
        _, _, constants = recorded(monkeypatch, heads, cut, widths=widths)
        assert constants.get("SLICES") == slices
        assert launches[-1][1] == programs


@pytest.mark.parametrize("heads, cut, runs, programs, slots, partial_rows, kept", [
    (128, "whole", 1, 2, 1, 0, 0), (128, "split", 1, 6, 3, 3, 0), (128, "scheduled", 1, 6, 4, 4, 0),
    (128, "batch-invariant, planned", 1, 6, 3, 3, 64 * 512), (128, "batch-invariant", 1, 2, 0, 0, 64 * 512),
    (128, "batch-invariant", 3, 6, 3, 3, 64 * 512), (32, "batch-invariant, planned", 1, 3, 3, 3, 16 * 512),
    (16, "batch-invariant, planned", 1, 3, 10, 10, 0),
])  # fmt: skip
def test_room_for_parts(heads, cut, runs, programs, slots, partial_rows, kept, monkeypatch):
    """40 tiles, 3 splits of 16 tiles or 10 of 4: parts for every slot, and behind what programs keep between splits.

    A schedule of 3 programs leaves at most one request unfinished each. Rows of parts are counted in requests.
    """
    launches = watched(monkeypatch)
    monkeypatch.setattr(select, "best_num_programs", lambda *_: runs)
    recorded(monkeypatch, heads, cut)
    ((_, launched, given),) = launches
    assert (launched, given["num_partials"]) == (programs, slots)
    assert given["partial_out"].numel() == partial_rows * heads * 512 + programs * kept
    progress = 2 if cut.startswith("batch-invariant") else 0
    assert given["partial_lse"].numel() == 2 * partial_rows * heads + progress


def test_two_phases_where_processors_are_idle(monkeypatch):
    """As many programs as score or as multiply, no more than processors, if every pair of tiles then has one.

    40 pages: of 64 keys 20 pairs of tiles and 3 splits, of 16 keys 5 and 1. Programs wait for each other, so they are
    launched together.
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
            assert given["probabilities"].shape == given["probability_pairs"].base.shape == (units * 128, 64)
            slots = 3 if splits == 3 else 0  # what is one split is no part
            assert given["num_partials"] == slots and given["partial_out"].numel() == slots * heads * 512
            assert given["splits_bound"] == splits
    # a table of no page
    assigned = select.assign_by_length(3, 64, 64, 0, 64, 512, 132, measured_schedule_costs(64).cut)
    assert assigned == select.Assignment(6, 1, 0, 0, most_splits=1, slices=2)


def test_memory_checkers_see_every_variant(monkeypatch):
    """What `tests.memory_checks` launches on an H200, as the launcher chooses there."""
    launches = {}
    record(monkeypatch, launches)
    monkeypatch.setattr(decode, "combine_partial_outputs", lambda *_, **__: None)
    monkeypatch.setattr(decode, "device_facts", lambda _: H200)
    for given in memory_checks.decodes():
        *tensors, cut, _ = given  # the last is the name of the backend
        decode.mla_decode(*tensors, InvariantCut(*cut))
    told = []
    for kernel, kinds, constants in launches.values():
        names = [parameter.name for parameter in kernel.params]
        signature = {name: kinds[name][0] if name in kinds else "constexpr" for name in names}
        constants = {(at,): constants[name] for at, name in enumerate(names) if name in constants}
        told.append(describe(kernel.fn.__name__, signature, constants))
    assert {line.split()[0] for line in told} == memory_checks.kernels_of(["hopper"])
    assert not [missing for missing in memory_checks.never_launched(told, hopper=True) if " of " in missing]


@pytest.mark.parametrize("heads, query_len, rows", [
    (16, 1, 16), (16, 2, 32), (16, 5, 32), (4, 4, 16), (4, 5, 32), (20, 1, 32), (32, 8, 32), (33, 1, 64), (128, 4, 64),
])  # fmt: skip
def test_rows_by_own_length(heads, query_len, rows, monkeypatch):
    """Up to 32 heads stay with blocks of 16 or 32 rows, however many query tokens a neighbour has; more with 64."""
    asked = []
    monkeypatch.setattr(select, "best_num_programs", lambda *given: asked.append(given[4]) or 1)
    monkeypatch.setattr(decode, "rows_of_a_request", lambda *_: heads * query_len)
    recorded(monkeypatch, heads, "batch-invariant")
    assert asked == [rows]


def test_queries_in_words():
    """Those that can be copied 16 bytes at a time stay where they are; others are copied first."""
    storage = torch.randn(4 * 3 * 512 + 16, dtype=torch.bfloat16)
    packed = storage[: 3 * 4 * 512].view(3, 4, 512)
    for there, strides in (
        (packed, [2048, 512]),
        (packed.transpose(0, 1), [512, 2048]),
        (packed[:1, :, :256], [0, 512]),  # of one token, whatever its stride
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
    """Of every length: with how many rows a program, split or whole, and how its parts are merged."""
    rows = heads * query_len

    def launched(length: int) -> set[tuple]:
        program_rows = select._rows_where_alone(select.rows_of_a_program(rows), 1, rows, length, 132)
        blocks = triton.cdiv(rows, program_rows)
        splits = select.best_num_splits(blocks, rows, length, program_rows, blocks, 132)
        return {(program_rows, splits > 1)} | (
            {combine_launch._tile_for(splits, rows, heads, 1)} if splits > 1 else set()
        )

    ahead = set().union(*map(launched, compilation.ALONE))
    assert set().union(*map(launched, range(64, 140_000, 960))) <= ahead


@pytest.mark.parametrize("heads, batch_invariant, latent", [
    (4, False, 256), (40, False, 256), (64, False, 256), (20, True, 256), (40, True, 256), (40, True, 512),
])  # fmt: skip
def test_warmup_specialises_for_every_step(heads, batch_invariant, latent, monkeypatch):
    """What steps of every kind launch was launched ahead; the launchers serve the CPU meanwhile."""
    found = {}
    for name in LAUNCHERS:
        module = importlib.import_module(f"fast.kernels.{name}")
        for kernel in [key for key in vars(module) if key.endswith("_kernel")]:
            monkeypatch.setattr(module, kernel, Recorded(getattr(module, kernel), found))
    record(monkeypatch, found)
    with_backends(monkeypatch, cpu_backend({**portable.KERNELS, **hopper.KERNELS}))
    config = replace(LOW_RANK, num_heads=heads, kv_lora_rank=latent, qk_rope_head_dim=32)
    fast.warmup(
        config, device="cpu", dtype=torch.bfloat16, block_size=16, decode_threshold=3, batch_invariant=batch_invariant
    )
    ahead = set(found)
    assert {"_row_blocks_16_32_kernel", "_row_blocks_64_kernel"} & {key[0] for key in ahead}
    assert ("_two_phases_kernel" in {key[0] for key in ahead}) == (batch_invariant and (heads, latent) == (40, 512))
    serve(config, torch.bfloat16, 3, batch_invariant)
    assert set(found) == ahead
