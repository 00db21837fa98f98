"""Tests of the decode benchmark over fp8 caches: its contenders, its checks, and the errors of kernels in e4m3.

The tests measure no times and need no GPU. `test_benchmarks` has the tests of what all benchmarks share.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fast
from fast.parity import Parity
from reference.interfaces import FP8_DS_MLA, FP8_E4M3, FP8_MODES, AttentionState

from ..benchmarks import contest, decode, decode_rows
from ..support.commands import ROOT
from .test_benchmarks import FakeClock

PRODUCT = f"{contest.OURS}, fp8_product"


@pytest.mark.parametrize("cache_format", [FP8_E4M3, FP8_DS_MLA], ids=lambda each: each.name)
def test_decode_over_a_cache_format(cache_format):
    """Decode over a cache format -> every contender is within its budget, and an output times 1.1 is not."""
    row = decode.Row(2, 70, 2, 5)
    case = decode.make_case(row, None, "cpu", device="cpu", cache_format=cache_format)
    assert case.bytes == row.bytes_over(cache_format)
    forms = "", ", planned", ", invariant"
    in_modes = [f"{contest.OURS}, {mode}{form}" for mode in FP8_MODES[1:] for form in forms]
    assert set(in_modes) < set(case.contenders)
    for who, contender in case.contenders.items():
        state = contender.view(contender.calls[0]())
        found = case.check(state)
        assert found and all(parity.passed for parity in found), who
        named, mode, plain = state if isinstance(state, decode.InMode) else (who, None, state)
        assert named == who and (mode is not None) == (who in in_modes)
        wrong = AttentionState(plain.out * 1.1, plain.lse)
        wrong = wrong if mode is None else decode.InMode(who, mode, wrong)
        assert not all(parity.passed for parity in case.check(wrong))


def test_peers_over_a_cache_format():
    """Make the contenders over fp8_e4m3 -> peers get e4m3 caches, and a peer that cannot plan is absent with a reason.

    No peer has a dense decode over fp8_ds_mla.
    """
    seen = []

    class Planned:
        def __call__(self, q, cache, block_table, seq_lens, scale):
            seen.append((q.dtype, cache.dtype, list(cache.shape[1:])))
            return (torch.zeros(2, 1, 3, 512),)

    def cannot_plan(*arguments, **options):
        raise RuntimeError("no kernel\nfor this row")

    here = SimpleNamespace(
        available=lambda: {"vllm_triton": False}, more_available=lambda: {"flashmla_fp8": True, "flashinfer": True},
        FlashMLADecodeFp8=Planned, flashinfer_mla=cannot_plan,
    )  # fmt: skip
    row = decode.Row(2, 70, 1, 3)
    inputs = decode.make_inputs(row, 2, "cpu", FP8_E4M3)
    contenders, absent = decode.peer_contenders(row, inputs, here)
    assert list(contenders) == [decode.FLASHMLA_E4M3]
    who, mode, out = contenders[decode.FLASHMLA_E4M3].view(contenders[decode.FLASHMLA_E4M3].calls[1]())
    assert (who, mode, out.shape) == (decode.FLASHMLA_E4M3, "fp8_product", (2, 3, 512))
    assert seen == [(torch.float8_e4m3fn, torch.float8_e4m3fn, [64, 576])]
    assert absent == {
        "vLLM Triton": "its library could not be loaded", "FlashInfer": "RuntimeError: no kernel for this row",
    }  # fmt: skip

    def plan(metadata, heads, page, scale, **options):
        _, pages, blocks, _ = metadata
        assert (heads, page, options["causal"]) == (3, 64, False) and pages.tolist() == [0, 2, 4] and len(blocks) == 4
        return lambda q_nope, q_pe, latent, rope: (torch.zeros(2, 3, latent.shape[2] + rope.shape[2] - 64), None)

    here.flashinfer_mla = plan
    contender = decode.peer_contenders(row, inputs, here)[0]["FlashInfer"]
    assert contender.view(contender.calls[0]()).shape == (2, 3, 512)
    assert decode.peer_contenders(row, decode.make_inputs(row, 1, "cpu", FP8_DS_MLA), here)[0] == {}


class FlashMLA:
    """Kernel with the signature of FlashMLA's fp8 kernel; it computes in the mode `fp8_product`, on the CPU.

    Attributes:
        inputs: the inputs of the benchmark; the kernel reads the lengths from their first plan.
        factor: number by which the kernel multiplies its output.
    """

    def __init__(self, inputs, factor=1.0):
        self.inputs, self.factor = inputs, factor

    def __call__(self, q, cache, block_table, seq_lens, scale):
        plan = replace(self.inputs.metadata[0], block_table=block_table, seq_lens=seq_lens)
        queries = q.flatten(0, 1).split([decode_rows.LATENT, decode_rows.ROPE], -1)
        state = fast.mla_decode(
            *queries, cache, plan, scale, None, torch.bfloat16, FP8_E4M3, self.inputs.storage["kv_scale"],
            fp8_mode="fp8_product", q_scale=torch.ones(()), backend="cpu",
        )  # fmt: skip
        return (state.out * self.factor).view(*q.shape[:3], decode.LATENT), state.lse


def case_beside(monkeypatch, factor):
    """Return a case over fp8_e4m3 whose only peer is the kernel above."""
    row, made = decode.Row(2, 70, 2, 5), []
    plain = decode.make_inputs
    monkeypatch.setattr(decode, "make_inputs", lambda *given: made.append(plain(*given)) or made[-1])
    here = SimpleNamespace(
        available=lambda: {"flashmla_fp8": True}, FlashMLADecodeFp8=lambda: FlashMLA(made[-1], factor)
    )
    return decode.make_case(row, here, "cpu", device="cpu", cache_format=FP8_E4M3)


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_the_peer_gets_the_same_queries(factor, monkeypatch):
    """Decode in e4m3 with a peer that computes as `fast` does -> about the same error; a worse peer has a larger error.

    The peer gets no scale of the queries, so its softmax scale must contain it. Its scores are then rounded in another
    place, so a few probabilities get another number in e4m3. The row stores the errors of both.
    """
    case = case_beside(monkeypatch, factor)
    kept = {who: case.contenders[who] for who in (contest.OURS, PRODUCT, decode.FLASHMLA_E4M3)}
    outs = {who: kept[who].view(kept[who].calls[0]()) for who in list(kept)[1:]}
    assert decode.relative_rms_error(outs[decode.FLASHMLA_E4M3].state / factor, outs[PRODUCT].state.out) < 5e-3
    for who, value in outs.items():
        assert value.who == who and case.check(value)
    errors = case.figures["e4m3_errors"]
    assert set(errors) == {PRODUCT, decode.FLASHMLA_E4M3} and 0 < errors[PRODUCT] < 0.05
    if factor == 1:
        assert errors[decode.FLASHMLA_E4M3] == pytest.approx(errors[PRODUCT], rel=0.2)
    else:
        assert errors[decode.FLASHMLA_E4M3] == pytest.approx(factor - 1, rel=0.2)
    ((who, (found,)),) = case.compare().items()
    assert who == PRODUCT and found.passed == (errors[PRODUCT] <= errors[decode.FLASHMLA_E4M3])


class AnyClock(FakeClock):
    """Clock with the same time for every contender."""

    def flushed(self, contenders):
        return {who: contest.Spread(100.0, (90.0, 110.0), 9) for who in contenders}


@pytest.mark.parametrize("ours, passed", [(1e-3, True), (2e-3, True), (2.1e-3, False), (float("nan"), False)])
def test_a_row_fails_if_the_error_of_fast_is_larger(ours, passed):
    """Give `fast` an error above the error of FlashMLA's fp8 kernel, or NaN -> the row fails and is not timed.

    The row has all errors, also those of a failed row, and can be written as JSON.
    """
    errors = {}

    def check(value):
        if value in (PRODUCT, decode.FLASHMLA_E4M3):
            errors[value] = ours if value == PRODUCT else 2e-3
        return [Parity("mla_decode: out", 0.1, 0.1, 1.0, 1.0)]

    whos = contest.OURS, PRODUCT, decode.FLASHMLA_E4M3
    case = contest.Case(
        1, 1, {who: contest.Contender([lambda who=who: who]) for who in whos}, check,
        figures={"e4m3_errors": errors}, compare=lambda: decode.compare_with_peer(errors),
    )  # fmt: skip
    row = {"dims": {"B": 1}, **contest.contest(case, AnyClock(), ("flushed",))}
    assert row["passed"] == passed == ("times" in row)
    assert row["e4m3_errors"] == errors and len(errors) == 2 and json.dumps(row)
    assert len(row["parity"][PRODUCT]) == 2 and len(row["parity"][decode.FLASHMLA_E4M3]) == 1
    lines = contest.failures([row])
    assert len(lines) == (not passed) and all("relative RMS error, budget: that of FlashMLA fp8" in x for x in lines)


def test_no_comparison_without_the_peer():
    """Compare without FlashMLA, or with FlashMLA alone -> no comparison."""
    assert decode.compare_with_peer({PRODUCT: 1.0}) == decode.compare_with_peer({decode.FLASHMLA_E4M3: 1.0}) == {}


def test_relative_rms_error():
    """Compute the error of outputs whose errors are known -> these errors; NaN and inf are not hidden."""
    exact = torch.tensor([3.0, -4.0], dtype=torch.float64)
    assert decode.relative_rms_error(exact.float(), exact) == 0
    assert decode.relative_rms_error(torch.tensor([3.0, -3.5]), exact) == pytest.approx(0.1)
    assert decode.relative_rms_error(torch.tensor([1.0, torch.nan]), exact) != 0
    assert decode.relative_rms_error(torch.tensor([1.0, torch.inf]), exact) == float("inf")


def test_recorded_rows_have_no_larger_error():
    """Read the recorded rows -> in each row with errors in e4m3, no error of `fast` is above the error of FlashMLA.

    Results files that were written before 2026-11-28 have no such errors.
    """
    for path in sorted((ROOT / "docs/results").glob("*decode-fp8.json")):
        for row in json.loads(path.read_text())["rows"]:
            compared = decode.compare_with_peer(row.get("e4m3_errors", {}))
            assert all(parity.passed for found in compared.values() for parity in found), (path.name, row["dims"])


def test_cost_of_batch_invariance():
    """Read the README's text -> the cost of batch invariance over fp8_e4m3 agrees with the results file."""

    def least(times, form):
        return min(times[f"{contest.OURS}{form}{planned}"]["median_us"] for planned in ("", ", planned"))

    rows = json.loads((ROOT / "docs/results/h200-decode-fp8.json").read_text())["rows"]
    costs = [least(times, ", invariant") / least(times, "") for row in rows for times in row["times"].values()]
    mean, low, high = (100 * (x - 1) for x in (statistics.geometric_mean(costs), min(costs), max(costs)))
    said = f"{mean:.0f} % ({low:.0f} to {high:.0f} %)"
    assert f"over `fp8_e4m3`, batch invariance costs {said}" in (ROOT / "README.md").read_text()
