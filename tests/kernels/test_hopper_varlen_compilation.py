"""Tests that compile the Hopper prefill kernel for sm_90 without a GPU, and tests of its launch choices.

If the compiler spills registers, waits for a product too early, or serialises products, the kernel is slow, but no test
of results fails. The tests of this file find these faults in the installed version of Triton.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from reference.interfaces import UnsupportedConfiguration

from .. import memory_checks
from ..support.compiled import RecordedGluon, Source, compiled
from ..support.factories import offsets

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from fast.kernels.compile_log import describe
from fast.kernels.hopper.varlen import kernel, launch, select

from .test_hopper_compilation import DEEP, H200, all_have_met, arrivals_for_all, product_loops, run

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
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


@pytest.fixture(autouse=True)
def on_an_h200(monkeypatch):
    monkeypatch.setattr(launch, "device_facts", lambda _: H200)


def recorded(monkeypatch, dims, dtype, out_dtype, stores_lse=True, views=False, heads=4):
    """Record a launch on one request; return kernel, argument kinds and constants."""
    nope, rope, value = dims
    launches: dict = {}
    monkeypatch.setattr(launch, "_varlen_kernel", RecordedGluon(kernel._varlen_kernel, launches))
    q = torch.zeros(200, heads, nope + (rope or 0), dtype=dtype)
    k, v = torch.zeros(300, heads, nope + value, dtype=dtype).split([nope, value], -1)
    if not views:
        k, v = k.contiguous(), v.contiguous()
    k_pe = torch.zeros(300, rope, dtype=dtype) if rope else None
    out = torch.zeros(200, heads, value, dtype=out_dtype)
    lse = torch.zeros(heads, 200) if stores_lse else None
    launch.flash_attn_varlen(q, k, k_pe, v, offsets([200]), offsets([300]), 200, 300, 0.1, True, out_dtype, out, lse)
    (only,) = launches.values()
    return only


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_spills(variant, monkeypatch, tmp_path):
    """Compile a variant and check the machine code.

    - No instruction reads or writes local memory (spilled registers).
    - The assembler serialises no matrix product (warnings C7510 to C7514).
    - Registers and shared memory are within the limits of Hopper.
    - One thread arrives at an mbarrier for its warp group only after a barrier of the group.
    """
    if variant not in ALWAYS and not DEEP:
        pytest.skip("runs only with HYPOTHESIS_PROFILE=deep")
    found = compiled(*recorded(monkeypatch, *VARIANTS[variant]))
    assert found.metadata.shared <= H200.shared
    (tmp_path / "kernel.cubin").write_bytes(found.asm["cubin"])
    (tmp_path / "kernel.ptx").write_text(found.asm["ptx"])
    disassembly = run("nvdisasm", "-c", tmp_path / "kernel.cubin")
    assert not re.findall(r"\b(?:LDL|STL)\b.*", disassembly)
    messages = run("ptxas", "-v", "-arch=sm_90a", "-o", tmp_path / "again.cubin", tmp_path / "kernel.ptx")
    assert "serialized" not in messages and not re.findall(r"C75\d\d", messages)
    assert int(re.search(r"Used (\d+) registers", messages)[1]) <= MOST_REGISTERS
    arrivals = arrivals_for_all(found.asm["ptx"])
    assert arrivals and all(map(all_have_met, arrivals))


def test_products_overlap_with_the_softmax(monkeypatch, tmp_path):
    """In each main loop, the wait for the product with the values comes after the exponentials of the next scores.

    Without the wait for a barrier between the two, the compiler moves the wait for the product before the softmax.
    """
    found = compiled(*recorded(monkeypatch, *VARIANTS["192/128"]))
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


def count_arrivals() -> None:
    """Print the number of arrivals, and the number of those before which every thread arrived for itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "device_facts", lambda _: H200)
        found = arrivals_for_all(compiled(*recorded(patch, MLA, BF16, BF16)).asm["ptx"])
    every = sum(any(line.startswith("cp.async.mbarrier.arrive.shared") for line in before) for before in found)
    print("arrivals", len(found), every)


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
    assert select.order_of(16384, 1, 128, 16384, 256, True, 132) == select.Order(129, 4, 132)
    assert select.order_of(16384, 1, 128, 16384, 256, False, 132) == select.Order(129, 1, 132)
    assert select.order_of(32768, 1, 16, 32768, 256, True, 132) == select.Order(257, 2, 132)
    assert select.order_of(200, 2, 3, 300, 256, True, 132) == select.Order(3, 3, 9)
    assert select.order_of(0, 0, 4, 0, 256, True, 132).programs == 1


def items_of(query_lens, key_lens, heads, group_heads, causal, keys_of_tile=128):
    """Compute in Python the order of work items that `work_items.item_of` describes; skip the empty slots."""
    starts_q, starts_k = offsets(query_lens).tolist(), offsets(key_lens).tolist()
    num_slots = starts_q[-1] // 128 + len(query_lens)
    for index in range(num_slots * heads):
        group, inside = divmod(index, group_heads * num_slots)
        first_head = group * group_heads
        width = min(group_heads, heads - first_head)
        slot, head = num_slots - 1 - inside // width, first_head + inside % width
        request = max(b for b in range(len(query_lens)) if starts_q[b] // 128 + b <= slot)
        tile = slot - (starts_q[request] // 128 + request)
        rows = min(query_lens[request] - 128 * tile, 128)
        if rows > 0:
            keys = key_lens[request]
            visible = keys - query_lens[request] + 128 * tile + 1 if causal else keys
            most = max(min(visible + rows - 1, keys), 0)
            yield head, starts_q[request] + 128 * tile, rows, starts_k[request], -(-most // keys_of_tile)


@pytest.mark.parametrize("heads, group_heads", [(1, 1), (3, 1), (5, 2), (4, 4)])
def test_every_row_has_one_item(heads, group_heads):
    """The slots of all requests and heads hold every (head, query token) pair exactly once, for ragged lengths."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        requests = int(torch.randint(1, 9, (), generator=generator))
        query_lens = (torch.randint(0, 300, (requests,), generator=generator) * torch.randint(
            0, 2, (requests,), generator=generator)).tolist()  # fmt: skip
        key_lens = torch.randint(0, 500, (requests,), generator=generator).tolist()
        seen = [(head, token + row) for head, token, rows, *_ in
                items_of(query_lens, key_lens, heads, group_heads, True) for row in range(rows)]  # fmt: skip
        assert len(seen) == len(set(seen)) == heads * sum(query_lens)


def test_memory_checkers_see_every_variant(monkeypatch):
    """The prefills of `tests.memory_checks` launch the kernel in every variant that `VARIANTS` lists there."""
    launches: dict = {}
    monkeypatch.setattr(launch, "_varlen_kernel", RecordedGluon(kernel._varlen_kernel, launches))
    for given in memory_checks.prefills():
        launch.flash_attn_varlen(*given[:-1])
    lines = []
    for found, kinds, constants in launches.values():
        source = Source(found, kinds, constants)
        lines.append(describe(found.fn.__name__, source.signature, source.constants))
    missing = memory_checks.never_launched(lines, hopper=True)
    assert lines and not [name for name in missing if name.startswith("varlen_kernel")]


def test_views_are_read_in_place():
    """Views with aligned rows are read in place; other tensors are copied."""
    both = torch.zeros(10, 3, 256, dtype=BF16)
    for view in (both[..., :128], both[..., 128:], both[:1], both.transpose(0, 1), both[3:, 1:]):
        assert launch.in_boxes(view) is view
    for view in (both[..., 1:129], both[..., ::2], both[:, :1].expand(-1, 3, -1), torch.zeros(10, 3, 65, dtype=BF16)):
        copy = launch.in_boxes(view) if view.shape[2] % 8 == 0 else view.contiguous()
        assert copy.is_contiguous() and copy.data_ptr() != both.data_ptr()
