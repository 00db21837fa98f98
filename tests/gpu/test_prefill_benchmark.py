"""Tests of the benchmark of prefills: lengths, counts, checks and peers. The tests measure no times and need no GPU.

A contender is one implementation that the benchmark times: a variant of `fast`, or a peer, which is a kernel of another
project.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import reference
from fast.backends import AttentionSizes

from ..benchmarks import contest, prefill
from ..benchmarks.command_line import CannotRun

RAGGED = prefill.Row(3, 130, 170, 5, "causal", "ragged")


def test_ragged_lengths():
    """A ragged row has the same random lengths in every process; other rows have equal lengths."""
    row = prefill.Row(32, 4096, 4096, 128, "causal", "ragged")
    lens = row.query_lens
    assert row in prefill.ROWS and lens == row.query_lens == row.key_lens and len(set(lens)) > 28
    assert 64 <= min(lens) < 400 and 3700 < max(lens) <= 4096
    assert [keys - queries for queries, keys in zip(RAGGED.query_lens, RAGGED.key_lens, strict=True)] == [40] * 3
    assert prefill.Row(2, 5, 9, 1, "full").key_lens == [9, 9]


def test_counts_of_ragged_rows():
    """Count the work of a ragged row -> the sum of the work of its requests."""
    lens = zip(RAGGED.query_lens, RAGGED.key_lens, strict=True)
    parts = [prefill.Row(1, queries, keys, 5, "causal") for queries, keys in lens]
    assert RAGGED.flops == sum(part.flops for part in parts)
    assert RAGGED.bytes == sum(part.bytes for part in parts)


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_check_of_ragged_rows(mask):
    """Compare a ragged row with `reference` -> it passes, and an output with a wrong last row fails."""
    case = prefill.make_case(prefill.Row(3, 130, 170, 5, mask, "ragged"), None, "cpu", device="cpu")
    assert list(case.contenders) == [contest.OURS] and case.figures == {"backend": "cpu"}
    state = case.contenders[contest.OURS].calls[0]()
    assert all(parity.passed for parity in case.check(state))
    state.out[-1] *= 1.5
    assert not all(parity.passed for parity in case.check(state))


def test_rows_of_the_command_line():
    assert contest.parse_rows(prefill.ROWS, ["32,4096,4096,128,causal,ragged"]) == [prefill.ROWS[-2]]
    for text in ("1,2,3,4,causal", "1,2,3,4,causal,mixed", "1,3,2,4,full,equal", "1,2,3,4,half,equal"):
        with pytest.raises(CannotRun, match="^--rows: expected B,Sq,Skv,N,mask,lens, such as "):
            contest.parse_rows(prefill.ROWS, [text])


@pytest.mark.parametrize("chosen, backend, wanted", [
    ("hopper", None, {"fast": None, prefill.PORTABLE: "triton"}), ("triton", None, {"fast": None}),
    ("hopper", "hopper", {"fast": "hopper", prefill.PORTABLE: "triton"}), ("triton", "triton", {"fast": "triton"}),
])  # fmt: skip
def test_variants_on_a_gpu(chosen, backend, wanted, monkeypatch):
    """Portable Triton is a variant of `fast`, unless it is the backend of `fast`."""
    inputs = prefill.make_inputs(RAGGED, "cpu")
    monkeypatch.setattr(prefill, "make_inputs", lambda *_: inputs)
    monkeypatch.setattr(prefill, "backend_of", lambda *_: chosen)
    attend = prefill.fast.attention.varlen
    monkeypatch.setattr(attend, "flash_attn_varlen_shared_rope", lambda *_, backend: backend)
    case = prefill.make_case(RAGGED, None, backend)
    assert {who: contender.calls[0]() for who, contender in case.contenders.items()} == wanted
    assert case.figures == {"backend": chosen} and all(map(contest.is_ours, case.contenders))


def test_request_of_a_row(monkeypatch):
    """The name of the backend in the results file is chosen for the same call that the benchmark makes."""
    asked = []
    monkeypatch.setattr(prefill, "select", lambda *given: asked.append(given) or SimpleNamespace(name="hopper"))
    assert prefill.backend_of(prefill.ROWS[-1], torch.device("cuda"), None) == "hopper"
    ((request, backend),) = asked
    assert (request.mask, request.lse, backend) == (None, True, None)
    assert request.sizes == AttentionSizes(1, 16, 512, 65536)


@pytest.mark.parametrize("row", [RAGGED, prefill.Row(2, 9, 9, 3, "causal")], ids=str)
def test_peers(row):
    """Every peer gets whole keys and passes the check; a peer that fails or is missing is absent with a reason."""
    seen, plans = [], []

    def attend(q, k, v, *rest):
        seen.append((k.is_contiguous(), v.is_contiguous()))
        return tuple(reference.flash_attn_varlen(q, k, v, *rest))

    def plan(cu_q, cu_k, heads, kv_heads, width, value, scale, causal):
        plans.append((heads, kv_heads, width, value))
        return lambda q, k, v: attend(q, k, v, cu_q, cu_k, row.Sq, row.Skv, scale, causal)

    def broken():
        raise RuntimeError("no kernel\nfor this row")

    here = SimpleNamespace(
        available=lambda: {"fa3": True}, more_available=lambda: {"fa4": True, "flashinfer": True},
        fa3_prefill=attend, flashinfer_ragged=plan, flashinfer=broken,
    )  # fmt: skip
    inputs = prefill.make_inputs(row, "cpu")
    contenders, absent = prefill.peer_contenders(row, inputs, here)
    assert plans == [(row.N, row.N, 192, 128)] and absent["FA4"] == "RuntimeError: no kernel for this row"
    assert ("cuDNN" in absent) == (row is RAGGED)
    for who in ("FA3", prefill.JOINED, "FlashInfer"):
        output = contenders[who].view(contenders[who].calls[0]())
        assert all(parity.passed for parity in prefill.check(row, inputs, output)), who
    assert seen == [(True, True), (True, False), (True, True)]

    here = SimpleNamespace(available=lambda: {"fa3": False})  # an older folder of peers
    contenders, absent = prefill.peer_contenders(row, inputs, here)
    missing = ("FA3", prefill.JOINED, "FA4", "FlashInfer")
    assert not {*missing} & set(contenders)
    assert [absent[who] for who in missing] == ["its library could not be loaded"] * 4
