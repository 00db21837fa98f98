"""Tests that compile the Hopper prefill kernel for sm_90 without a GPU, and tests of its launch choices.

If the compiler spills registers, waits for a product too early, or serialises products, the kernel is slow, but no test
of results fails. The tests of this file find these faults in the installed version of Triton.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from reference.interfaces import UnsupportedConfiguration

from .... import memory_checks
from ....support.compiled import Recorded, RecordedGluon, Source, compiled
from ....support.factories import offsets
from ....support.machine_code import arrivals_for_all, check_assembly, product_loops, run

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from fast.backends.own import HOPPER
from fast.kernels.compile_log import describe
from fast.kernels.hopper.varlen import combine, kernel, launch, select, work_items
from fast.kernels.prescribed_splits import prescribe_splits
from fast.mla.prefill_choice import check_invariant_prefills

from ..mla_decode.test_hopper_compilation import DEEP, H200

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
pytestmark = pytest.mark.usefixtures("without_shape_checks")
MOST_REGISTERS = 168  # of a thread: 65536 registers for 12 warps, in multiples of 8
MLA = (128, 64, 128)  # P, R and V of DeepSeek-V3
# P, R, V, and dtypes of queries and output; R of `None` means whole keys of P columns
VARIANTS = {
    "192/128": (MLA, BF16, BF16), "192/128, float32 out": (MLA, BF16, F32), "192/128, float16": (MLA, FP16, FP16),
    "192/128, whole keys": ((192, None, 128), BF16, BF16), "128/128": ((128, None, 128), BF16, BF16),
    "64/64": ((64, None, 64), BF16, BF16), "96/64": ((64, 32, 64), BF16, BF16),
    "96/64, whole keys": ((96, None, 64), BF16, BF16), "256/256": ((256, None, 256), BF16, BF16),
    "256/256, float32 out": ((256, None, 256), FP16, F32),
}  # fmt: skip
ALWAYS = ("192/128", "192/128, float32 out", "128/128", "64/64", "96/64", "256/256")
CASES = [(name, splits) for name in VARIANTS for splits in (1, 3)]


@pytest.fixture(autouse=True)
def on_an_h200(monkeypatch):
    monkeypatch.setattr(launch, "device_facts", lambda _: H200)


def recorded(monkeypatch, dims, dtype, out_dtype, stores_lse=True, views=False, heads=4, splits=1, combines=False):
    """Record a launch on one request with `splits` splits; return kernel, argument kinds and constants.

    With `combines`, return those of the combine kernel.
    """
    nope, rope, value = dims
    launches: dict = {}
    combine_launches: dict = {}
    monkeypatch.setattr(launch, "_varlen_kernel", RecordedGluon(kernel._varlen_kernel, launches))
    monkeypatch.setattr(combine, "_combine_varlen_kernel", Recorded(combine._combine_varlen_kernel, combine_launches))
    monkeypatch.setattr(launch, "order_of", lambda *given: select.order_of(*given)._replace(num_splits=splits))
    q = torch.zeros(200, heads, nope + (rope or 0), dtype=dtype)
    k, v = torch.zeros(300, heads, nope + value, dtype=dtype).split([nope, value], -1)
    if not views:
        k, v = k.contiguous(), v.contiguous()
    k_pe = torch.zeros(300, rope, dtype=dtype) if rope else None
    out = torch.zeros(200, heads, value, dtype=out_dtype)
    lse = torch.zeros(heads, 200) if stores_lse else None
    launch.flash_attn_varlen(q, k, k_pe, v, offsets([200]), offsets([300]), 200, 300, 0.1, True, out_dtype, out, lse)
    assert len(combine_launches) == (splits > 1)
    (only,) = (combine_launches if combines else launches).values()
    return only


def shared_of_the_readme(variant: str, splits: bool) -> int:
    """Return the bytes of shared memory of a variant in the README of the kernel; check its tiles and stages too."""
    (nope, rope, value), dtype, out_dtype = VARIANTS[variant]
    key = nope + (rope or 0)
    sized = f", output in {'16 bits' if out_dtype == dtype else 'float32'}" if key == 192 else ""
    text = (Path(kernel.__file__).parent / "README.md").read_text()
    row = re.search(rf"^\| {key} / {value}{sized} \| (\d+) \| (\d+) \| ([\d,]+) \| (.*) \|$", text, re.MULTILINE)
    constants = select.constants_of(select.parts_of(nope, rope or 0), value)
    assert (int(row[1]), int(row[2])) == (constants.KEYS, constants.STAGES)
    return int(row[4 if splits else 3].replace(",", ""))


@pytest.mark.parametrize("variant, splits", CASES)
def test_nothing_spills(variant, splits, monkeypatch, tmp_path):
    """Compile a variant, with and without splits, and check the machine code.

    - No instruction reads or writes local memory (spilled registers).
    - The assembler serialises no matrix product (warnings C7510 to C7514).
    - Registers and shared memory are within the limits of Hopper.
    - One thread arrives at an mbarrier for its warp group only after a barrier of the group.
    - Every mbarrier is used, and no other data begin at its address.
    """
    if not DEEP and (variant not in ALWAYS or (splits > 1 and "float32" in variant)):  # partial outputs are float32
        pytest.skip("runs only with HYPOTHESIS_PROFILE=deep")
    found = compiled(*recorded(monkeypatch, *VARIANTS[variant], splits=splits))
    assert found.metadata.shared <= H200.shared
    if variant in ALWAYS and (splits == 1 or "float32" not in variant):
        assert shared_of_the_readme(variant, splits > 1) == found.metadata.shared
    messages = check_assembly(found, tmp_path)
    disassembly = run("nvdisasm", "-c", tmp_path / "kernel.cubin")
    assert not re.findall(r"\b(?:LDL|STL)\b.*", disassembly)
    assert int(re.search(r"Used (\d+) registers", messages)[1]) <= MOST_REGISTERS


@pytest.mark.parametrize("aligned", [True, False])
def test_stores_of_16_bytes(aligned, monkeypatch):
    """Both consumers store 16 bytes of an output at once, if its address and strides are multiples of 16 bytes."""
    launches: dict = {}
    monkeypatch.setattr(launch, "_varlen_kernel", RecordedGluon(kernel._varlen_kernel, launches))
    q, k, v = torch.zeros(200, 4, 128, dtype=BF16), *torch.zeros(2, 300, 4, 128, dtype=BF16)
    out = (
        torch.zeros(200, 4, 136, dtype=BF16)[..., :128] if aligned else torch.zeros(200, 4, 132, dtype=BF16)[..., 2:130]
    )
    launch.flash_attn_varlen(q, k, None, v, offsets([200]), offsets([300]), 200, 300, 0.1, True, BF16, out)
    (only,) = launches.values()
    stores = Counter(re.findall(r"st\.global\.(v4\.b32|b16)", compiled(*only).asm["ptx"]))
    # 64 rows of 256 bytes for 128 threads of each consumer, in the branches with and without key tiles
    assert stores == ({"v4.b32": 2 * 2 * 8} if aligned else {"b16": 2 * 2 * 64})


@pytest.mark.parametrize("heads, counts", [(4, False), (200, True)])
def test_counter_of_work_items(heads, counts, monkeypatch):
    """A launch with more work items than programs gets a counter that is 0; another launch gets none."""
    given: list = []
    monkeypatch.setattr(launch, "launch", lambda _, grid, *arguments, **__: given.append((grid, arguments)))
    q, k, v = (torch.zeros(128, heads, 64, dtype=BF16) for _ in range(3))
    starts = offsets([128])
    launch.flash_attn_varlen(q, k, None, v, starts, starts.clone(), 128, 128, 0.1, True, BF16)
    ((grid, arguments),) = given
    taken = arguments[7]  # behind five descriptors and two vectors of offsets
    assert grid == (min(heads, H200.processors),) and (taken is starts) is not counts
    if counts:
        assert taken.tolist() == [0] and taken.dtype == torch.int32


@pytest.mark.parametrize("splits", [1, 3])
def test_products_overlap_with_the_softmax(splits, monkeypatch, tmp_path):
    """In each main loop, the wait for the product with the values comes after the exponentials of the next scores.

    Without the wait for a barrier between the two, the compiler moves the wait for the product before the softmax.
    """
    found = compiled(*recorded(monkeypatch, *VARIANTS["192/128"], splits=splits))
    (tmp_path / "kernel.cubin").write_bytes(found.asm["cubin"])
    loops = product_loops(run("nvdisasm", "-c", tmp_path / "kernel.cubin"))
    assert len(loops) == 4  # with and without a mask, for each consumer
    for loop in loops:
        waits = [place for place, text in enumerate(loop) if "WARPGROUP.DEPBAR.LE gsb0, 0x0" in text]
        exponentials = [place for place, text in enumerate(loop) if text.startswith("MUFU.EX2")]
        assert len(waits) == 1 and exponentials[-1] < waits[0]
        assert len(exponentials) == 66  # 64 probabilities and 2 factors of a thread
        assert sum("HGMMA" in text for text in loop) == 20
        assert sum(text.startswith("PRMT") for text in loop) < 8, "16-bit numbers are packed one by one"


def test_options_compile(monkeypatch):
    """The kernel compiles without an LSE, with views, and with one head."""
    for options in ({"stores_lse": False}, {"views": True, "heads": 1}):
        assert compiled(*recorded(monkeypatch, MLA, BF16, BF16, **options)).metadata.shared <= H200.shared


@pytest.mark.parametrize("variant, stores_lse", [("192/128", True), ("192/128", False), ("64/64", True),
                                                ("256/256, float32 out", True)])  # fmt: skip
def test_the_combine_kernel_compiles(variant, stores_lse, monkeypatch, tmp_path):
    """The combine kernel spills no register, with and without an LSE."""
    found = compiled(*recorded(monkeypatch, *VARIANTS[variant], stores_lse, splits=3, combines=True))
    (tmp_path / "kernel.cubin").write_bytes(found.asm["cubin"])
    assert not re.findall(r"\b(?:LDL|STL)\b.*", run("nvdisasm", "-c", tmp_path / "kernel.cubin"))


def count_arrivals() -> None:
    """Print the number of arrivals of one thread for its warp group, and of arrivals of each thread for itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "device_facts", lambda _: H200)
        ptx = compiled(*recorded(patch, MLA, BF16, BF16)).asm["ptx"]
    every = re.findall(r"^\s*cp\.async\.mbarrier\.arrive\.shared", ptx, re.MULTILINE)
    print("arrivals", len(arrivals_for_all(ptx)), len(every))


def test_every_thread_arrives_for_racecheck(tmp_path):
    """After a call of `let_every_thread_arrive`, every thread arrives at each mbarrier, as racecheck needs it."""
    program = f"""if True:
        from tests.hand_over import let_every_thread_arrive
        let_every_thread_arrive()
        from {__name__} import count_arrivals
        count_arrivals()"""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], cwd=memory_checks.ROOT, env=environment, capture_output=True,
                          text=True, check=True, timeout=600)  # fmt: skip
    count, every = re.search(r"^arrivals (\d+) (\d+)$", done.stdout, re.MULTILINE).groups()
    assert int(count) == int(every) > 10


def test_widths():
    """Two parts of a key become two products; other widths are joined to whole keys, or refused."""
    assert select.parts_of(128, 64) == select.Parts(128, 64, True, False)
    assert select.parts_of(64, 32) == select.Parts(64, 32, True, False)
    assert select.parts_of(192, 0) == select.Parts(128, 64, False, False)
    assert select.parts_of(192, 64) == select.Parts(256, 0, False, True)  # joined
    assert select.parts_of(48, 16) == select.Parts(64, 0, False, True)
    for nope, rope in ((80, 0), (512, 64)):
        with pytest.raises(UnsupportedConfiguration, match="serves keys of 64, 96, 128, 192, 256 columns"):
            select.parts_of(nope, rope)
    with pytest.raises(UnsupportedConfiguration, match="serves values of 64, 128, 256 columns, got 512"):
        select.constants_of(select.parts_of(128, 64), 512)


def test_every_width_fits():
    for width in select.KEY_WIDTHS:
        for value in select.VALUE_WIDTHS:
            c = select.constants_of(select.parts_of(width, 0), value)
            elements = 128 * width + c.STAGES * c.KEYS * (width + value)
            assert 2 * elements + select.OTHER_MEMORY <= select.SHARED and c.STAGES in (2, 4)


def test_order():
    """Heads come one by one without a mask; with a mask, a group has as many heads as fit into the L2."""
    whole = select.BatchSizes(8192, 8192, 4, 128, 2048, 2048, True)
    long = select.BatchSizes(32768, 32768, 1, 16, 32768, 32768, True)
    short = select.BatchSizes(200, 500, 2, 3, 200, 300, True)
    for batch, wanted in (
        (whole, (67, 8, 1, 132, True)), (whole._replace(causal=False), (67, 1, 1, 132, True)),
        (long, (256, 1, 1, 132, True)), (short, (3, 3, 1, 9, False)),
        (select.BatchSizes(0, 0, 0, 4, 0, 0, True), (0, 4, 1, 1, False)),
    ):  # fmt: skip
        assert select.order_of(batch, 256, 128, 132) == select.Order(*wanted)


def sizes_of(query_lens, key_lens, heads, causal=False) -> select.BatchSizes:
    return select.BatchSizes(
        sum(query_lens), sum(key_lens), len(query_lens), heads, max(query_lens), max(key_lens), causal
    )


SPLITS = [  # query lengths, key lengths, heads, causal, and the number of splits on 132 multiprocessors
    ([512], [65536], 16, False, 2),  # 64 work items become 128
    ([512], [65536], 16, True, 2),  # the mask changes the number of keys by less than 1 %
    ([512], [2000], 16, False, 2), ([512], [1900], 16, False, 1),  # a split has at least 8 key tiles
    ([1], [65536], 16, False, 8), ([1], [65536], 128, False, 1),
    ([1], [2**20], 1, False, 32),  # the greatest number of splits
    ([1] * 32, [65536] + [100] * 31, 16, False, 7),  # one long request among short ones
    ([4480], [65536], 4, False, 7),  # 140 work items: without splits, the second wave has 8 work items
    ([16384], [16384], 128, True, 1), ([2048] * 4, [2048] * 4, 128, True, 1), ([4096], [16384], 128, False, 1),
    ([32768], [32768], 16, True, 1), ([8192], [8192], 4, True, 1), ([8192], [8192], 1, True, 4),
    ([1024], [32768], 16, False, 1),  # 128 work items
    ([64] * 8, [8192] * 8, 16, False, 1),  # 128 work items, and 48 empty candidates, which take little time
    ([70000], [2**20], 1, False, 1),  # the partial outputs would be too large
    ([300, 0], [0, 9], 4, True, 1), ([3], [0], 1, False, 1),
]  # fmt: skip


@pytest.mark.parametrize("query_lens, key_lens, heads, causal, wanted", SPLITS)
def test_number_of_splits(query_lens, key_lens, heads, causal, wanted):
    """Keys are split if the work items do not fill the GPU; buffers of partial outputs stay within 64 MiB."""
    batch = sizes_of(query_lens, key_lens, heads, causal)
    assert select.best_num_splits(batch, 128, 132) == wanted
    loose = batch._replace(max_keys=2**30, max_queries=2**30) if len(query_lens) == 1 and not causal else batch
    assert select.best_num_splits(loose, 128, 132) == wanted  # bounds behind the end of the tensors change nothing


def test_only_chosen_splits_change_the_kernel():
    """The variant of a call depends on the number of splits alone: splits have their own variant."""
    for query_lens, key_lens, heads, causal, wanted in SPLITS:
        sizes = launch._launch_sizes(128, 64, 128, sizes_of(query_lens, key_lens, heads, causal), 132)
        assert (wanted > 1) == sizes.constants.SPLIT and sizes.order.num_splits == wanted
        assert sizes.constants._replace(SPLIT=False) == select.constants_of(select.parts_of(128, 64), 128)


def test_batch_invariant_calls_have_no_splits(monkeypatch):
    """The launcher gets the flag of a call, and then launches the variant without splits, also inside a warm-up."""
    assert HOPPER.ops["flash_attn_varlen"].batch_invariant and HOPPER.ops["flash_attn_varlen"].invariant_on_request
    check_invariant_prefills({"flash_attn_varlen": "hopper"}, True)
    found = []

    def sizes(nope, rope, value, batch, processors):
        found.append(select.order_of(batch, nope + value, 128, processors).num_splits)
        raise KeyError

    monkeypatch.setattr(launch, "_launch_sizes", sizes)
    monkeypatch.setattr(launch, "device_facts", lambda device: SimpleNamespace(processors=132))
    q, k, v = (torch.zeros(rows, 16, width).bfloat16() for rows, width in ((512, 128), (65536, 128), (65536, 128)))
    call = q, k, None, v, offsets([512]), offsets([65536]), 512, 65536, 0.1, False, torch.float32
    for prescribed in (None, 2):
        for batch_invariant in (False, True):
            splits = contextlib.nullcontext() if prescribed is None else prescribe_splits(prescribed)
            with splits, pytest.raises(KeyError):
                launch.flash_attn_varlen(*call, batch_invariant=batch_invariant)
    assert found[0] > 1 and found[1:] == [1, 2, 1]


def items_of(query_lens, key_lens, heads, group_heads, causal, splits=1, keys_of_tile=128):
    """Compute in Python the order of work items that the module `work_items` describes.

    An item is head, first query token, number of rows, number of key tiles of the query tile, and the first and the
    last key tile (not included). Without splits, the candidates may be empty; an item of an empty candidate is None.
    """
    starts = offsets(query_lens).tolist()
    requests = range(len(query_lens))
    if splits > 1:
        candidates = [(b, tile) for b in requests for tile in range(-(-query_lens[b] // 128))]
    else:
        firsts = [starts[b] // 128 + b for b in requests]
        owners = [
            max(b for b in requests if firsts[b] <= candidate)
            for candidate in range(-(-starts[-1] // 128) + len(requests) - 1)
        ]
        candidates = [(b, candidate - firsts[b]) for candidate, b in enumerate(owners)]
    for index in range(len(candidates) * heads * splits):
        rest, split = divmod(index, splits)
        group, inside = divmod(rest, group_heads * len(candidates))
        first_head = group * group_heads
        width = min(group_heads, heads - first_head)
        request, tile = candidates[len(candidates) - 1 - inside // width]
        rows, keys = min(query_lens[request] - 128 * tile, 128), key_lens[request]
        visible = keys - query_lens[request] + 128 * tile + 1 if causal else keys
        steps = -(-max(min(visible + rows - 1, keys), 0) // keys_of_tile)
        item = (first_head + inside % width, starts[request] + 128 * tile, rows, steps, steps * split // splits,
                steps * (split + 1) // splits)  # fmt: skip
        yield item if rows > 0 else None


class Pointer(NamedTuple):
    """A pointer to an element of a list, for functions of a kernel that run as Python."""

    values: list[int]
    index: int = 0

    def __add__(self, step):
        return Pointer(self.values, self.index + step)


@functools.cache
def functions_as_python() -> dict[str, Callable]:
    """Return the functions of the kernel that find work items, to run as Python on ints and on `Pointer`."""
    stub = SimpleNamespace(
        minimum=min, maximum=max, where=lambda chosen, one, other: one if chosen else other,
        load=lambda pointer: pointer.values[pointer.index],
    )  # fmt: skip
    names = {**vars(work_items), "gl": stub, "QUERY_TILE": int(work_items.QUERY_TILE)}
    for name, function in vars(work_items).items():
        if isinstance(getattr(function, "fn", None), FunctionType):
            names[name] = FunctionType(function.fn.__code__, names, name)
    return names


def items_of_the_kernel(query_lens, key_lens, heads, group_heads, causal, splits=1, keys_of_tile=128):
    """Return the work items of `work_items.item_of` for all candidates of the launcher, in the form of `items_of`."""
    candidates = select.order_of(sizes_of(query_lens, key_lens, heads), 256, 128, 132).num_candidates
    sizes = SimpleNamespace(
        num_tokens=sum(query_lens), num_keys=sum(key_lens), num_requests=len(query_lens), num_heads=heads,
        num_candidates=candidates, group_heads=group_heads, num_splits=splits, causal=int(causal),
    )  # fmt: skip
    starts = (Pointer(offsets(lens).tolist()) for lens in (query_lens, key_lens))
    ctx = SimpleNamespace(sizes=sizes, cu_seqlens_q=next(starts), cu_seqlens_k=next(starts))
    constants = SimpleNamespace(SPLIT=splits > 1, KEYS=keys_of_tile)
    item_of, found = functions_as_python()["item_of"], []
    for index in range(candidates * heads * splits):
        item = item_of(index, ctx, constants)
        first = item.end - item.steps
        found.append((item.head, item.token, item.rows, first, item.end) if item.rows > 0 else None)
    return found


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("heads, group_heads", [(1, 1), (3, 1), (5, 2), (4, 4)])
def test_the_kernel_finds_the_items(heads, group_heads, splits):
    """The functions of the kernel, run as Python, give the items of `items_of`, and behind them only empty items."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(15):
        lens = ragged_lens(generator)
        for causal, keys_of_tile in ((True, 128), (False, 128), (True, 64)):
            wanted = [item and (*item[:3], *item[4:]) for item in
                      items_of(*lens, heads, group_heads, causal, splits, keys_of_tile)]  # fmt: skip
            found = items_of_the_kernel(*lens, heads, group_heads, causal, splits, keys_of_tile)
            assert found == wanted + [None] * (len(found) - len(wanted))


def ragged_lens(generator) -> tuple[list[int], list[int]]:
    """Return random query and key lengths of 1 to 8 requests; about half of the query lengths are 0."""
    requests = int(torch.randint(1, 9, (), generator=generator))
    present = torch.randint(0, 2, (requests,), generator=generator)
    query_lens = torch.randint(0, 300, (requests,), generator=generator) * present
    return query_lens.tolist(), torch.randint(0, 1500, (requests,), generator=generator).tolist()


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("heads, group_heads", [(1, 1), (3, 1), (5, 2), (4, 4)])
def test_every_row_has_one_item(heads, group_heads, splits):
    """The items hold every (head, query token, split) triple exactly once, and the splits every key tile exactly once.

    The launcher's bound of the number of candidates holds for all lengths. With splits, no candidate is empty.
    """
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        lens = ragged_lens(generator)
        found = list(items_of(*lens, heads, group_heads, True, splits))
        candidates = select.order_of(sizes_of(*lens, heads), 256, 128, 132).num_candidates
        assert (
            len(found) == candidates * heads
            if splits == 1
            else None not in found and len(found) <= candidates * heads * splits
        )
        seen, tiles = [], {}
        for head, token, rows, steps, first, end in filter(None, found):
            seen += [(head, token + row) for row in range(rows)]
            of_tile = tiles.setdefault((head, token), list(range(steps)))
            assert end - first in (steps // splits, steps // splits + 1)
            for tile in range(first, end):
                of_tile.remove(tile)
        assert len(seen) == splits * len(set(seen)) == splits * heads * sum(lens[0])
        assert not any(tiles.values())


def test_splits_fill_the_programs():
    """With splits, no program gets two work items while another program gets none (the items have equal lengths)."""
    for query_lens, key_lens, heads in (
        ([512], [65536], 16),
        ([256, 256], [32768, 32768], 16),
        ([100] * 4, [40000] * 4, 16),
    ):
        order = select.order_of(sizes_of(query_lens, key_lens, heads), 256, 128, 132)
        items = list(items_of(query_lens, key_lens, heads, order.group_heads, False, order.num_splits))
        assert order.num_splits == 2 and len(items) == 128 <= order.programs


def test_memory_checkers_see_every_variant(monkeypatch):
    """The prefills of `tests.memory_checks` launch the kernel in every variant that `VARIANTS` lists there."""
    launches: dict = {}
    monkeypatch.setattr(launch, "_varlen_kernel", RecordedGluon(kernel._varlen_kernel, launches))
    monkeypatch.setattr(combine, "_combine_varlen_kernel", Recorded(combine._combine_varlen_kernel, launches))
    for given in memory_checks.prefills():
        launch.flash_attn_varlen(*given[:-1])
    lines = []
    for found, kinds, constants in launches.values():
        source = Source(found, kinds, constants)
        lines.append(describe(found.fn.__name__, source.signature, source.constants))
    missing = memory_checks.never_launched(lines, hopper=True)
    assert lines and not [name for name in missing if name.startswith(("varlen_kernel", "combine_varlen_kernel"))]


def test_views_are_read_in_place():
    """Views with aligned rows are read in place; other tensors are copied."""
    both = torch.zeros(10, 3, 256, dtype=BF16)
    for view in (both[..., :128], both[..., 128:], both[:1], both.transpose(0, 1), both[3:, 1:]):
        assert launch.in_boxes(view) is view
    for view in (both[..., 1:129], both[..., ::2], both[:, :1].expand(-1, 3, -1)):
        copy = launch.in_boxes(view)
        assert copy.is_contiguous() and copy.data_ptr() != both.data_ptr()
    with pytest.raises(ValueError, match="^x: expected rows of a multiple of 16 bytes, got 65 columns$"):
        launch.in_boxes(torch.zeros(10, 3, 65, dtype=BF16))
