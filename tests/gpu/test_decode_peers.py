"""Tests of the peers of the decode benchmark. The tests use stand-ins for the kernels of other projects, and no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from reference.interfaces import COMPUTE_FORMAT, FP8_E4M3

from ..benchmarks import contest, decode, layer_stages
from ..benchmarks.layers import Batch


def flashinfer_mla(plan, heads, page, scale, kv_dtype=torch.bfloat16, causal=False, space=None):
    """Plan a decode as peers.py does; the call computes it from the plan alone, in float64, and returns no LSE."""
    starts, page_starts, pages, lens = (tensor.tolist() for tensor in plan)
    assert page_starts == [0, *torch.tensor([-(-length // page) for length in lens]).cumsum(0).tolist()]

    def run(q_nope, q_pe, latent, rope):
        assert latent.dtype == rope.dtype == kv_dtype and q_nope.shape[1] == heads
        outs = []
        for request, length in enumerate(lens):
            blocks = pages[page_starts[request] : page_starts[request + 1]]
            keys, parts = (cache[blocks].flatten(0, 1)[:length].double() for cache in (latent, rope))
            rows = slice(starts[request], starts[request + 1])
            scores = q_nope[rows].double() @ keys.T + q_pe[rows].double() @ parts.T  # [Sq, N, length]
            count = starts[request + 1] - starts[request]
            last = torch.arange(length - count, length)[:, None, None]
            hidden = torch.arange(length) > last if causal else torch.zeros(1, 1, length, dtype=torch.bool)
            outs.append((scale * scores).masked_fill(hidden, -torch.inf).softmax(-1) @ keys)
        return torch.cat(outs).to(torch.bfloat16), None

    return run


def folder(**kernels) -> SimpleNamespace:
    """Return a folder of peers in which only FlashInfer can be loaded."""
    none = {"flashmla": False, "fa3": False, "vllm_triton": False}
    return SimpleNamespace(
        available=lambda: none, more_available=lambda: {"flashinfer": True}, FlashMLADecode=None, **kernels
    )


@pytest.mark.parametrize("cache_format", [COMPUTE_FORMAT, FP8_E4M3], ids=lambda each: each.name)
@pytest.mark.parametrize("row", [decode.Row(3, 150, 1, 4, "mixed"), decode.Row(2, 70, 2, 3)], ids=str)
def test_flashinfer_passes(row, cache_format):
    """Compute a row with FlashInfer's arguments -> within the budget, for every block table, with the cache's dtype."""
    inputs = decode.make_inputs(row, 2, "cpu", cache_format)
    contender = decode.peer_contenders(row, inputs, folder(flashinfer_mla=flashinfer_mla))[0][decode.FLASHINFER]
    found = decode.check(row, inputs, contender.view(contender.calls[0]()))
    assert len(found) == 2 and all(parity.passed for parity in found)  # all elements finite; `out`, without an LSE
    assert len(contender.calls) == 2 and not torch.equal(contender.calls[0]()[0], contender.calls[1]()[0])
    assert not all(parity.passed for parity in decode.check(row, inputs, contender.view(contender.calls[1]())))


def test_flashinfer_is_absent():
    """Let FlashInfer fail to plan, or leave it out -> it is absent with the reason, and the other peers are timed."""
    row = decode.Row(2, 70, 1, 3)
    inputs = decode.make_inputs(row, 1, "cpu")

    def cannot_plan(*arguments, **options):
        raise RuntimeError("Cannot find include path.\nof nvcc")

    here = folder(flashinfer_mla=cannot_plan, fa3_mla_decode=lambda *arguments: None)
    here.available = lambda: {"flashmla": False, "fa3": True, "vllm_triton": False}
    contenders, absent = decode.peer_contenders(row, inputs, here)
    assert (
        list(contenders) == ["FA3"] and absent[decode.FLASHINFER] == "RuntimeError: Cannot find include path. of nvcc"
    )
    here.more_available = dict
    assert decode.peer_contenders(row, inputs, here)[1][decode.FLASHINFER] == "its library could not be loaded"


def test_flashinfer_in_a_layer():
    """Time the attention of the peers in a layer of decodes -> FlashInfer is among them."""
    layers = SimpleNamespace(
        batch=Batch(2, 70, 0, 0), config=SimpleNamespace(num_heads=2), hidden_states=torch.zeros(1)
    )
    found = layer_stages.attention_of_peers(None, layers, folder(flashinfer_mla=flashinfer_mla))
    assert found.who == decode.FLASHINFER and found.us > 0 and set(found.absent) == {
        "FlashMLA", "FA3", decode.AHEAD, "vLLM Triton"
    }  # fmt: skip


def test_rows_have_the_decodes_of_a_layer():
    batch = layer_stages.BATCHES["cuda"]["decode"]
    assert contest.parse_rows(decode.ROWS, ["64,4096,1,128,equal"])[0] in decode.ROWS
    assert decode.Row(batch.decodes, batch.keys, 1, 128) in decode.ROWS
