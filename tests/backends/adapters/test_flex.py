"""Tests of the adapter to `torch.nn.attention.flex_attention`.

Without a GPU, the layout in blocks and the block mask are tested as integers, and the attention runs with PyTorch's own
flex_attention without its kernel: not compiled, and traced by torch.compile with a backend that generates no code.
Calls of the compiled kernel: test_every_adapter.py on a GPU.
"""

from __future__ import annotations

import functools
import sys

import pytest
import torch

from fast import backends
from fast.backends.adapters import flex
from fast.backends.adapters.flex import BLOCK, FLEX

from ...support.adapters import check_state, make_call
from ...support.factories import offsets

pytestmark = pytest.mark.skipif(bool(flex.missing()), reason="; ".join(flex.missing()))
LENS = {
    "one": ([1], [1]),
    "mixed": ([1, 17, 0, 5], [1, 17, 4, 31]),
    "more queries": ([9, 4, 130], [4, 0, 129]),
    "block edges": ([127, 128, 129], [127, 128, 129]),
    "longer keys": ([130, 1], [257, 300]),
}


@pytest.fixture
def uncompiled(monkeypatch):
    """Run flex_attention operation by operation, by the switch that PyTorch has for debugging."""
    monkeypatch.setattr(sys.modules["torch.nn.attention.flex_attention"], "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def attend(call, needs_lse, out_dtype):
    """Attend without compilation."""
    prepared = flex.prepared(call.q, call.keys, call.v, call.cu_seqlens_q, call.cu_seqlens_k, call.causal)
    return flex.attend_aligned(*prepared, call.softmax_scale, needs_lse, out_dtype)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lens", LENS)
def test_within_the_budget(lens, causal, uncompiled):
    """Attend packed requests -> output and LSE within the budget; rows without keys are exactly 0 and -inf."""
    for dtype, out_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        call = make_call(*LENS[lens], (16, 8, 16, 2), dtype, causal)
        check_state(call, *attend(call, True, out_dtype), out_dtype)


def test_an_output_alone(uncompiled):
    call = make_call(*LENS["mixed"], (16, 8, 40, 3), torch.bfloat16, True)
    out, lse = attend(call, False, torch.bfloat16)
    assert lse is None and out.is_contiguous()
    check_state(call, out, None, torch.bfloat16)


@pytest.mark.parametrize("spare", [0, 37, 300], ids=str)
@pytest.mark.parametrize("lens", [[1], [127, 0, 128, 129], [0, 0], [5, 300, 1]], ids=str)
def test_blocks(lens, spare):
    """Lay out requests in blocks -> each request begins at a new block, and every other place has no token."""
    blocks = flex.blocks_of(offsets(lens), sum(lens) + spare)
    places = blocks.token.view(-1, BLOCK).tolist()
    expected, first = [], 0
    for length in lens:
        tokens = list(range(first, first + length))
        expected += [tokens[at : at + BLOCK] for at in range(0, length, BLOCK)]
        first += length
    assert len(places) == blocks.count >= len(expected)
    padded = [each + [-1] * (BLOCK - len(each)) for each in expected]
    assert places == padded + [[-1] * BLOCK] * (len(places) - len(padded))
    if sum(lens) + spare == 0:  # the launcher lays out no empty tensor
        return
    values = torch.full((sum(lens) + spare, 1, 2), torch.nan)
    values[: sum(lens)] = 1.0
    made = flex.aligned(values, blocks)
    assert torch.equal(made[0, 0, :, 0], (blocks.token >= 0).float()) and made.isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lens", LENS)
def test_the_blocks_of_the_mask(lens, causal):
    """List the blocks that each block of queries attends -> exactly the blocks with visible keys, of its own request.

    A full block has only visible keys. A NaN of another request can therefore not reach a query.
    """
    query_lens, key_lens = LENS[lens]
    queries = flex.blocks_of(offsets(query_lens), sum(query_lens))
    keys = flex.blocks_of(offsets(key_lens), sum(key_lens))
    mask = flex.mask_tensors(queries, keys, causal)
    row = 0
    for queries_of, keys_of, first in zip(query_lens, key_lens, keys.first.tolist(), strict=False):
        for begin in range(0, queries_of, BLOCK):
            visible = torch.ones(queries_of, keys_of, dtype=torch.bool)
            visible = (visible.tril(keys_of - queries_of) if causal else visible)[begin : begin + BLOCK]
            parts = visible.split(BLOCK, 1) if keys_of else ()
            full = {first + at for at, part in enumerate(parts) if part.shape[1] == BLOCK and part.all()}
            partial = {first + at for at, part in enumerate(parts) if part.any()} - full
            for count, listed, expected in (
                (mask.full, mask.full_blocks, full), (mask.partial, mask.partial_blocks, partial)
            ):  # fmt: skip
                assert set(listed[0, 0, row, : count[0, 0, row]].tolist()) == expected
                assert count[0, 0, row] == len(expected)
            row += 1
    assert mask.full[0, 0, row:].eq(0).all() and mask.partial[0, 0, row:].eq(0).all()
    for listed in (mask.full_blocks, mask.partial_blocks):
        assert listed.min() >= 0 and listed.max() < keys.count


def test_one_graph_for_all_lengths(monkeypatch):
    """Trace whole calls with torch.compile -> within the budget, and one graph of each kind for all batches."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    flex._compiled.cache_clear()
    graphs = []
    try:
        for lens in (([1, 17, 0, 5], [1, 17, 300, 31]), ([130, 3], [257, 300]), ([5, 9], [5, 9]), ([700, 1], [3, 900])):
            call = make_call(*lens, (16, 8, 16, 3), torch.bfloat16, True)
            given = call.q, call.keys, None, call.v, *call[4:], torch.float32
            check_state(call, *flex.flash_attn_varlen(*given), torch.float32)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    finally:
        flex._compiled.cache_clear()
    assert graphs[1] == graphs[3] <= graphs[0] + 1


def test_written_results_and_empty_calls():
    """Attend without keys or without queries -> zeros and -inf, in given tensors or in new tensors."""
    call = make_call([4], [0], (16, 8, 16, 3), torch.bfloat16, True)
    given = call.q, call.keys, None, call.v, *call[4:], torch.float32
    out, lse = torch.full((4, 3, 16), torch.nan), torch.full((3, 4), torch.nan)
    for found in (flex.flash_attn_varlen(*given, out, lse), flex.flash_attn_varlen(*given)):
        assert found[0].eq(0).all() and found[1].eq(-torch.inf).all() and found[0].dtype == torch.float32
    assert found[0].shape == out.shape and out.eq(0).all() and lse.eq(-torch.inf).all()
    assert flex.flash_attn_varlen(*given, out, None)[1] is None
    empty = make_call([0], [5], (16, 8, 16, 3), torch.bfloat16, True)
    assert flex.flash_attn_varlen(empty.q, empty.keys, None, empty.v, *empty[4:], torch.float32)[1].shape == (3, 0)


def test_the_declaration(monkeypatch):
    """Ask what the adapter serves -> every reason; it serves values that are wider than keys."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    gpu = torch.device("cuda")
    request = backends.KernelRequest(
        "flash_attn_varlen", gpu, torch.float32, (("qk_head_dim", 8), ("v_head_dim", 8)), mask="visible_lens"
    )
    text = "\n".join(FLEX.validate_configuration(request))
    for part in ("compute capability", "got torch.float32", "qk_head_dim", "v_head_dim", "visible_lens"):
        assert part in text, part
    assert FLEX.only_named and FLEX.ops["flash_attn_varlen"].lse


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_wait_free_call_on_a_gpu():
    """Attend on a GPU -> no wait for the GPU after the compilation, and one compilation for all lengths."""
    with torch.device("cuda"):
        warm = [([70, 3, 1], [70, 3, 1]), ([1, 130], [257, 300])]
        lens = [([40, 300], [400, 31]), ([5, 6, 7], [50, 6, 0]), ([9, 200, 1], [9, 200, 1])]
        calls = [make_call(*each, (128, 64, 128, 4), torch.bfloat16, True) for each in warm + lens]
        given = [(each.q, each.keys, None, each.v, *each[4:], torch.float32) for each in calls]
        for each in given[: len(warm)]:
            flex.flash_attn_varlen(*each)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = [flex.flash_attn_varlen(*each) for each in given]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
        for call, (out, lse) in zip(calls, found, strict=True):
            check_state(call, out, lse, torch.float32)
