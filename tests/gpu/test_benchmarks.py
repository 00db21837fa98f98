"""Tests of the benchmarks' arithmetic, checks, tables and errors. The tests measure no times and need no GPU.

A contender is one implementation that a benchmark times: `fast`, or a peer, which is a kernel of another project. A
ceiling is the highest rate of a simple operation on the GPU, such as the GB/s of a copy.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import fast
from fast.parity import Parity
from reference.interfaces import FP8_DS_MLA, FP8_E4M3, AttentionState

from ..benchmarks import bytes as moves
from ..benchmarks import contest, decode, prefill, report, table_width, timing, weights

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"decode": decode, "prefill": prefill, "bytes": moves, "weights": weights}
CEILINGS = timing.Ceilings(copy_gb_s=4000.0, read_gb_s=4000.0, matmul_tflops=800.0, sustained_matmul_tflops=700.0)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# The counts of operations and bytes must equal numbers that were computed by hand.


def test_decode_counts():
    """Count the work of a decode of 128 requests with 4096 keys and 128 heads -> the numbers computed by hand.

    The work is 2 * 128 * 128 * 4096 * 1088 operations, 604 MB of cache, 18.9 MB of queries and 16.8 MB of output.
    """
    row = decode.Row(128, 4096, 1, 128)
    assert row.flops == 146_028_888_064
    assert row.bytes == 603_979_776 + 18_874_368 + 16_777_216
    assert decode.Row(128, 4096, 2, 128).flops == 2 * row.flops
    assert decode.Row(128, 4096, 2, 128).bytes - row.bytes == 18_874_368 + 16_777_216
    # a cache in fp8_e4m3 has half of the bytes of a 16-bit cache; a cache in fp8_ds_mla has 656 / 1152 of the bytes of
    # a 16-bit cache
    for cache_format, cache in ((FP8_E4M3, 301_989_888), (FP8_DS_MLA, 343_932_928)):
        assert row.bytes_over(cache_format) == cache + 18_874_368 + 16_777_216


def test_prefill_counts():
    """Count the work of a prefill of 4096 queries, 4096 keys and 128 heads -> the numbers computed by hand.

    Without a mask the work is 2 * 128 * 4096^2 * 320 operations. A causal mask halves the work. A kernel that does half
    the work in 1059 us reaches 649 TFLOPS.
    """
    full = prefill.Row(1, 4096, 4096, 128, "full")
    assert full.flops == 1_374_389_534_720
    causal = replace(full, mask="causal")
    assert causal.flops == 687_194_767_360
    assert causal.flops / 1059e-6 == pytest.approx(649e12, rel=1e-3)
    # in MB: q 201, k_nope 134, k_pe 0.5, v 134, out 134
    assert causal.bytes == full.bytes == 201_326_592 + 134_217_728 + 524_288 + 134_217_728 + 134_217_728
    # a causal mask hides only new keys: it removes no pair of a query and a context key
    assert prefill.Row(1, 4, 10, 1, "causal").flops == 2 * (40 - 8) * 320


def test_bytes_counts():
    """Count the bytes of each operation on 65536 tokens -> the numbers computed by hand.

    A gather, a cache write and a block copy each read 75.5 MB of cache entries, write as many bytes, and read indices.
    A merge reads two states and writes one state; a float32 state has 4.29 GB of output and 33.6 MB of LSE.
    """
    entries = 2 * 75_497_472
    assert moves.Row("gather", 65536).bytes == entries + 4096
    assert moves.Row("cache_write", 65536).bytes == entries + 524_288
    assert moves.Row("copy_blocks", 65536).bytes == entries + 16_384
    assert moves.Row("swap_out", 65536).bytes == moves.Row("swap_in_run", 65536).bytes == 75_497_472
    for name, entry in (("fp8_e4m3", 576), ("fp8_ds_mla", 656)):
        assert moves.Row(f"gather_{name}", 65536).bytes == 65536 * (entry + 1152) + 4096
        assert moves.Row(f"cache_write_{name}", 65536).bytes == 65536 * (1152 + entry) + 524_288
        # for each token, a fused write also writes a normed and rotated entry (1152 bytes), reads a slot and a position
        # (16 bytes), and reads and writes the rope parts of the queries of 16 heads (2048 bytes)
        assert moves.Row(f"fused_write_{name}", 65536).bytes == 65536 * (1152 + entry + 1152 + 16 + 2 * 2048)
    assert moves.Row("merge", 65536).bytes == 3 * (4_294_967_296 + 33_554_432)
    assert moves.Row("merge_bfloat16", 65536).bytes == 3 * (2_147_483_648 + 33_554_432)


def test_bytes_of_a_contender():
    """Give a contender its own number of bytes -> its GB/s are computed from this number."""
    case = case_of()
    case.figures["contender_bytes"] = {"slow": 10**8}
    row = contest.contest(case, FakeClock(), ("flushed",))
    contest.add_shares(row, CEILINGS, "read_gb_s")
    assert row["times"]["flushed"]["fast"]["gb_s"] == pytest.approx(2000)
    assert row["times"]["flushed"]["slow"]["gb_s"] == pytest.approx(400)


def test_rows_are_the_published_ones():
    shapes = {(row.T, row.N) for row in weights.ROWS if row.op == "query_to_latent"}
    assert shapes == {(t, n) for t in (1, 4, 16, 64, 128, 256, 512) for n in (16, 128)}
    assert len(set(decode.ROWS)) == 24 and len(set(prefill.ROWS)) == 8 and len(set(moves.ROWS)) == 18
    assert {row.N for row in decode.ROWS} == {128, 64, 32, 16}
    assert decode.Row(1, 131072, 1, 16) in decode.ROWS and decode.Row(128, 4096, 2, 16) in decode.ROWS


def test_spread():
    assert timing.Spread.of([3.0]) == timing.Spread(3.0, (3.0, 3.0), 1)
    assert timing.Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == timing.Spread(3.0, (2.0, 4.0), 5)


def test_input_sets():
    """Compute how many sets of inputs a replay needs -> at least 1 and at most 32.

    If this range allows it, all sets together have at least 4 x the bytes of the L2 cache.
    """
    assert timing.input_sets(10, 100) == 40 - 8 and timing.input_sets(150, 100) == 3
    assert timing.input_sets(10**9, 100) == 1 and timing.input_sets(1, 10**9) == 32


def test_rounds():
    assert timing.rounds_for(200, 10) == 20
    assert timing.rounds_for(200, 0) == timing.MAX_ROUNDS and timing.rounds_for(0, 10) == timing.MIN_ROUNDS


def test_spread_out():
    assert decode.spread_out(1, 3) == [0] and decode.spread_out(2, 3) == [0, 1]
    assert decode.spread_out(128, 3) == [0, 64, 127]


# The checks of outputs must accept right outputs and refuse wrong outputs.

SMALL = {
    "decode": [decode.Row(3, 70, 2, 5), decode.Row(1, 40, 1, 1)],
    "prefill": [prefill.Row(3, 40, 60, 5, "causal"), prefill.Row(1, 200, 200, 2, "full")],
    "bytes": [moves.Row(op, 1024) for op in moves.MAKERS if not op.startswith(("merge", "reorg"))],
    "weights": [weights.Row(op, tokens, 3) for op in weights.OPS for tokens in (1, 37)],
}


@pytest.fixture
def small_merge(monkeypatch):
    monkeypatch.setattr(moves, "HEADS", 3)


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, rows in SMALL.items() for row in rows])
def test_check_passes(name, row):
    case = MODULES[name].make_case(row, None, "cpu", device="cpu")
    assert next(iter(case.contenders)) == contest.OURS
    for who, contender in case.contenders.items():
        found = case.check(contender.view(contender.calls[0]()))
        assert found and all(parity.passed for parity in found), who


@pytest.mark.parametrize("op", ["merge", "merge_bfloat16"])
def test_check_passes_merge(op, small_merge):
    case = moves.make_case(moves.Row(op, 1024), None, "cpu", device="cpu")
    state = case.contenders[contest.OURS].calls[0]()
    assert all(parity.passed for parity in case.check(state))
    wrong = AttentionState(state.out, state.lse * 1.01)
    assert not all(parity.passed for parity in case.check(wrong))


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_check_fails(name):
    """Change an output in one of three ways -> the check fails.

    The changes are a wrong value in a part of the output that is compared with `reference`, an LSE in base 2, and a NaN
    in a part of the output that is not compared.
    """
    row = {"decode": decode.Row(9, 70, 1, 5), "prefill": prefill.Row(3, 40, 60, 5, "causal")}[name]
    case = MODULES[name].make_case(row, None, "cpu", device="cpu")
    state = case.contenders[contest.OURS].calls[0]()
    compared = [parity.passed for parity in case.check(state)]
    assert all(compared)

    scaled = state.out.clone()
    scaled[-1, -1] *= 1.5
    stray = state.out.clone()
    stray[row.B * row.Sq // 2, 1, 0] = torch.nan  # head 1 is not compared with `reference`
    for wrong in (
        AttentionState(scaled, state.lse),
        AttentionState(state.out, state.lse * 1.4427),
        AttentionState(stray, state.lse),
        scaled,
    ):
        assert not all(parity.passed for parity in case.check(wrong))


def test_sets_are_disjoint():
    """No two sets of inputs have a block in common."""
    inputs = decode.make_inputs(decode.Row(2, 100, 1, 2), 3, "cpu")
    blocks = torch.cat([metadata.block_table.flatten() for metadata in inputs.metadata])
    assert len(inputs.metadata) == 3 and len(blocks.unique()) == len(blocks) == inputs.cache.shape[0]


# For a "stepped" time, a step makes its schedule once and then calls the decode of every layer.


def test_steps(monkeypatch):
    """Run a step of every contender -> LAYERS decodes; each decode uses the next set of inputs.

    A contender with a schedule ("planned") makes the schedule once, before the decodes.
    """
    row, calls, layers = decode.Row(3, 40, 1, 2), [], 7
    for module in (contest, decode):
        monkeypatch.setattr(module, "LAYERS", layers)
    inputs = decode.make_inputs(row, 3, "cpu")
    monkeypatch.setattr(decode, "make_inputs", lambda *arguments: inputs)
    first = [metadata.block_table.data_ptr() for metadata in inputs.metadata]
    case = decode.make_case(row, None, "cpu", device="cpu")
    decoded, planned = fast.mla_decode, fast.plan_decode
    monkeypatch.setattr(fast, "plan_decode", lambda *args, **options: calls.append("plan") or planned(*args, **options))

    def decode_once(*args, **options):
        calls.append(first.index(args[3].block_table.data_ptr()))
        return decoded(*args, **options)

    monkeypatch.setattr(fast, "mla_decode", decode_once)
    for who, contender in case.contenders.items():
        calls.clear()
        contender.whole_step()()
        plans = ["plan"] if "planned" in who else []
        assert calls == plans + [number % 3 for number in range(layers)], who


def test_steps_of_peers():
    """Run two steps of FlashMLA -> each step makes a new schedule, which FlashMLA uses for all calls of the step.

    A peer without a kernel in the folder of peers is reported as absent, with a reason.
    """
    made = []

    class Planned:
        def __init__(self):
            self.calls = 0
            made.append(self)

        def __call__(self, *arguments):
            self.calls += 1
            return (torch.zeros(3, 1, 2, 512),)

    here = SimpleNamespace(
        available=lambda: {"flashmla": True, "fa3": True, "vllm_triton": False},
        FlashMLADecode=Planned, fa3_mla_decode=lambda *arguments: None,
    )  # fmt: skip
    row = decode.Row(3, 40, 1, 2)
    contenders, absent = decode.peer_contenders(row, decode.make_inputs(row, 2, "cpu"), here)
    assert set(contenders) == {"FlashMLA", "FA3"}
    assert absent == {
        decode.AHEAD: "the folder of peers has no such kernel", "vLLM Triton": "its library could not be loaded",
        "FlashInfer": "its library could not be loaded",
    }  # fmt: skip
    for _ in range(2):
        contenders["FlashMLA"].whole_step()()
    assert [kernel.calls for kernel in made] == [0, timing.LAYERS, timing.LAYERS]
    here.FA3MLADecodeAhead = Planned
    assert decode.AHEAD in decode.peer_contenders(row, decode.make_inputs(row, 2, "cpu"), here)[0]


def test_table_width_passes(monkeypatch):
    for module in (contest, table_width):
        monkeypatch.setattr(module, "LAYERS", 3)
    case = table_width.make_case(table_width.Row(2, 70, 1, 3, 4), None, "cpu", device="cpu")
    for who, contender in case.contenders.items():
        found = case.check(contender.view(contender.calls[0]()))
        assert found and all(parity.passed for parity in found), who
        contender.whole_step()()


def test_table_width_sees_a_graph_for_longer_requests(monkeypatch):
    """For one request, the planned variants have the programs of a builder for S keys and for all keys of the table."""
    counts, plan_decode = [], fast.plan_decode

    def noted(seq_lens, num_programs, *arguments, **options):
        counts.append(num_programs)
        return plan_decode(seq_lens, num_programs, *arguments, **options)

    monkeypatch.setattr(table_width.fast, "plan_decode", noted)
    monkeypatch.setattr(table_width, "programs_of_one_request", lambda programs, keys, costs: programs + keys)
    for requests, wider in ((1, 4 * 64 - 70), (2, 0)):
        case = table_width.make_case(table_width.Row(requests, 70, 1, 3, 4), None, "cpu", device="cpu")
        counts.clear()
        for who in (decode.PLANNED, table_width.PLANNED_BY_TABLE):
            case.contenders[who].calls[0]()
        assert counts[1] - counts[0] == wider


def test_table_width_verdicts():
    row = {"dims": {"B": 1, "S": 1024, "Sq": 1, "N": 128, "W": 2560}}
    times = {decode.PLANNED: {"median_us": 10.0}, table_width.PLANNED_BY_TABLE: {"median_us": 10.6}}
    (found,) = table_width.verdicts([row | {"times": {"stepped": times}}])
    assert found["figure"] == pytest.approx(1.06) and not found["met"] and found["at_most"] == 1.05
    assert table_width.verdicts([row, row | {"times": {"flushed": times}}]) == []


# The table and the JSON file.


class FakeClock:
    """Clock with fixed times for the contenders `fast` and `slow`; a CUDA graph cannot capture `slow`."""

    def __init__(self):
        self.not_captured = {"slow": "it copies from the host"}

    def flushed(self, contenders):
        return {who: timing.Spread({"fast": 100.0, "slow": 250.0}[who], (90.0, 260.0), 9) for who in contenders}

    def host(self, contenders):
        return {who: timing.Spread(33.0, (30.0, 40.0), 9) for who in contenders}

    def replayed(self, contenders):
        return {"fast": timing.Spread(80.0, (79.0, 81.0), 9)}

    def stepped(self, steps):
        assert all(callable(step) for step in steps.values())
        return {"fast": timing.Spread(70.0, (69.0, 71.0), 9)}


def case_of(error: float = 0.5) -> contest.Case:
    def check(value):
        return [Parity("op: out", error if value == "fast" else 2.0, 0.1, 1.0, 1.0)]

    def broken():
        raise RuntimeError("head dim 192\nnot taken")

    contenders = {who: contest.Contender([lambda who=who: who]) for who in ("fast", "slow")}
    contenders["broken"] = contest.Contender([broken])
    return contest.Case(4 * 10**10, 2 * 10**8, contenders, check, {"gone": "no such library"})


def timed(error: float = 0.5) -> dict:
    row = {
        "dims": {"B": 1, "N": 128},
        **contest.contest(case_of(error), FakeClock(), ("flushed", "replayed", "stepped")),
    }
    contest.add_shares(row, CEILINGS, "read_gb_s")
    return row


def test_contest():
    """Time a row of 40 GFLOP and 200 MB that `fast` computes in 100 us -> 400 TFLOPS and 2000 GB/s.

    Each rate is half of its ceiling. `fast` has 2.5 x the speed of the contender `slow`, which takes 250 us.
    """
    row = timed()
    assert row["passed"] and row["absent"] == {
        "gone": "no such library",
        "broken": "RuntimeError: head dim 192 not taken",
    }
    found = row["times"]["flushed"]["fast"]
    assert found["tflops"] == pytest.approx(400) and found["share_of_matmul"] == pytest.approx(0.5)
    assert found["gb_s"] == pytest.approx(2000) and found["share_of_bandwidth"] == pytest.approx(0.5)
    assert row["fast_against"] == {"flushed": {"slow": 2.5}, "replayed": {}, "stepped": {}}
    assert row["times"]["stepped"]["fast"]["median_us"] == 70.0
    assert not row["parity"]["slow"][0]["passed"], "a peer outside the budget is timed and marked"
    json.dumps(row, allow_nan=False)


def test_failed_row_is_not_timed():
    row = timed(error=1.5)
    assert not row["passed"] and "times" not in row and "fast_against" not in row
    (line,) = contest.failures([row])
    assert line.startswith("B 1 N 128: op: out: error 1.50e+00") and line.endswith("not timed")


def test_own_breakdown_is_a_failed_row():
    """Let `fast` raise an exception -> the row fails and is not timed; the other contenders are still compared."""
    case = case_of()
    case.contenders[contest.OURS] = case.contenders["broken"]
    row = {"dims": {"B": 1, "N": 128}, **contest.contest(case, FakeClock(), ("flushed",))}
    assert not row["passed"] and "times" not in row and list(row["parity"]) == ["slow"]
    assert contest.failures([row]) == ["B 1 N 128: RuntimeError: head dim 192 not taken; not timed"]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(contest.draw_table("title", ["B", "N"], [row], ("flushed",), "read_gb_s"))
    assert "failed" in console.export_text()


def test_own_refusal_is_raised():
    def refuse():
        raise ValueError("no such backend")

    case = case_of()
    case.contenders[contest.OURS] = contest.Contender([refuse])
    with pytest.raises(ValueError, match="no such backend"):
        contest.contest(case, FakeClock(), ("flushed",))


def test_own_capture_must_succeed():
    clock = FakeClock()
    clock.replayed, clock.not_captured = (lambda contenders: {}), {"fast": "a host copy"}
    with pytest.raises(contest.CannotRun, match="fast could not be replayed: a host copy"):
        contest.contest(case_of(), clock, ("replayed",))


def test_table():
    rows = [timed(), timed(error=1.5)]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(contest.draw_table("title", ["B", "N"], rows, ("flushed", "replayed"), "read_gb_s"))
    text = console.export_text()
    for expected in ("host us", " 33 ",
                     "of read", "of matmul", "slow !", "250.0", "90.0 - 260.0", "400", "50%", "2.50 / nan",
                     "not timed", "not captured", "1.5e+00 / 1.0e+00"):  # fmt: skip
        assert expected in text, text
    no_flops = [{**row, "flops": 0} for row in rows]
    console.print(contest.draw_table("title", ["B", "N"], no_flops, ("flushed", "replayed"), "read_gb_s"))
    assert "TFLOPS" not in console.export_text().split("title")[-1]


@pytest.mark.parametrize("name", MODULES)
def test_whole_program(name, monkeypatch, tmp_path, capsys):
    """Run a whole benchmark on one small row -> exit status 0, and the expected table and results file.

    The clock and the ceilings are fake. If the error of the row exceeds its budget, the exit status is 1.
    """
    module, row = MODULES[name], SMALL[name][0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    stub = SimpleNamespace(not_captured={})
    stub.rested = stub.flushed = stub.replayed = stub.stepped = stub.host = lambda calls: {
        who: timing.Spread(50.0, (49.0, 51.0), 8) for who in calls
    }
    monkeypatch.setattr(contest, "Clock", lambda milliseconds: stub)
    monkeypatch.setattr(contest, "measure_ceilings", lambda clock: CEILINGS)
    monkeypatch.setattr(contest, "provenance", lambda name, argv, device: {"command": name})
    on_cpu = module.make_case
    monkeypatch.setattr(
        module, "make_case", lambda row, peers, backend, **options: on_cpu(row, peers, backend, "cpu", **options)
    )
    path = tmp_path / "report.json"
    argv = ["--rows", contest.row_name(row), "--backend", "cpu", "--json", str(path)]
    assert module.main(argv) == 0
    said = capsys.readouterr()
    assert said.err == "" and "ceilings in this run: copy 4000 GB/s" in said.out
    figures = json.loads(path.read_text())
    more = {"weights": {"scales"}}.get(name, set())
    assert set(figures) == {"command", "ceilings", "bandwidth", "targets", "rows"} | more
    assert figures["ceilings"]["matmul_size"] == timing.MATMUL_SIZE
    (found,) = figures["rows"]
    further = {"weights": {"contender_bytes", "held_bytes", "errors"}, "prefill": {"backend"}}.get(name, set())
    assert set(found) == {
        "dims", "flops", "bytes", "passed", "parity", "absent", "times", "host_us", "fast_against", *further
    }  # fmt: skip
    assert set(found["times"]["flushed"]["fast"]) == {
        "median_us", "quartiles_us", "runs", "tflops", "share_of_matmul", "gb_s", "share_of_bandwidth"
    }  # fmt: skip

    if name == "decode":
        assert module.main([*argv, "--cache-format", "fp8_ds_mla"]) == 0
        assert "Cache format: fp8_ds_mla" in " ".join(capsys.readouterr().out.split())
        figures = json.loads(path.read_text())
        assert figures["cache_format"] == "fp8_ds_mla" and figures["rows"][0]["bytes"] == row.bytes_over(FP8_DS_MLA)

    monkeypatch.setattr(contest, "finite", None)
    monkeypatch.setattr(module, "make_case", lambda row, peers, backend: case_of(1.5))
    assert module.main(argv) == 1
    assert "FAILED" in capsys.readouterr().out


# Options and errors.


@pytest.mark.parametrize("name", MODULES)
def test_help(name, capsys):
    with pytest.raises(SystemExit) as stop:
        MODULES[name].main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    for option in ("--peers", "--json", "--rows", "--backend", "--ways", "--time", "Exit status"):
        assert option in said


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "error: needs a CUDA device, and torch sees none\n"),
        (["--peers", "nowhere"], "error: --peers: expected a folder with peers.py, got nowhere\n"),
    ],
)
def test_errors(name, argv, message, no_gpu, capsys):
    assert MODULES[name].main(argv) == 2
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("decode", "1,2,3", "expected B,S,Sq,N,lens, such as 1,8192,1,128,equal, got 1,2,3"),
        ("decode", "1,2,3,4,equal", "Sq is at most S"),
        ("decode", "1,2,x,4,equal", "invalid literal"),
        ("decode", "1,8,1,4,sorted", "lens is equal, mixed, ragged"),
        ("prefill", "1,4,4,1,maybe,equal", "causal or full"),
        ("bytes", "gather,100", "a multiple of 1024 tokens"),
        ("bytes", "swap,1024", "one of gather, cache_write"),
        ("weights", "absorb,16,128", "one of query_to_latent, latent_to_value, expand_kv"),
        ("weights", "expand_kv,0,128", "sizes are at least 1"),
    ],
)
def test_bad_rows(name, text, reason, no_gpu, capsys):
    assert MODULES[name].main(["--rows", text]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --rows: expected ") and said.count("\n") == 1 and reason in said


def test_backend_that_cannot_serve(monkeypatch, capsys):
    """Name an unknown backend with `--backend` -> the benchmark ends with an error of one line."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(contest, "Clock", lambda milliseconds: FakeClock())
    monkeypatch.setattr(contest, "measure_ceilings", lambda clock: CEILINGS)
    on_cpu = moves.make_case
    monkeypatch.setattr(moves, "make_case", lambda row, peers, backend: on_cpu(row, peers, backend, device="cpu"))
    assert moves.main(["--rows", "gather,1024", "--backend", "nonesuch"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: backend: expected one of ") and said.count("\n") == 1


def test_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.bytes", "--peers", "nowhere"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --peers: expected a folder with peers.py, got nowhere\n"


def test_load_peers(tmp_path):
    (tmp_path / "peers.py").write_text("def available():\n    return {'fa3': False}\n")
    assert contest.load_peers(tmp_path).available() == {"fa3": False}


# The first fields of a results file: hardware, versions, command.


def test_provenance():
    head = report.provenance("decode", ["--rows", "1,2,1,1"])
    assert head["command"] == "python -m tests.benchmarks.decode --rows 1,2,1,1"
    assert len(head["fast_sha256"]) == 64 and "driver" not in head


def test_provenance_on_a_gpu(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(report.shutil, "which", lambda name: None)
    head = report.provenance("decode", [], device="cuda")
    assert head["hardware"] == head["gpu"] == "NVIDIA H200" and head["driver"] == "unknown"
    assert head["capability"] == [9, 0] and head["multiprocessors"] == 132
    assert {"python", "torch", "triton", "cuda"} <= set(head["versions"])


def test_missing_package():
    assert report.package_version("no-such-distribution") == "missing"
