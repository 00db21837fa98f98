"""Tests of the benchmarks `host` and `step`. Most tests run on a CPU with small dimensions.

`host` times the work of the CPU for each op. `step` times whole steps of all layers, and divides the time into parts
such as "attention".
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from ..benchmarks import host, kernel_times, layers, recorded_ops, step
from ..benchmarks.command_line import CannotRun
from ..benchmarks.kernel_times import LAYER_MARK, STEP_MARK, Kernel

ROOT = Path(__file__).resolve().parents[2]
HEAD = {"command", "hardware", "versions", "date", "fast_sha256"}


@pytest.mark.parametrize("module", [host, step])
def test_without_a_gpu(module, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert module.main([]) == 2
    assert capsys.readouterr().err == "error: needs a CUDA device, and torch sees none\n"


def test_batches():
    """Make a batch -> each request has its own blocks, and the slots are the slots of the new tokens."""
    torch.manual_seed(0)
    common = layers.make_batch([1, 70], [130, 200], "cpu")
    used = common.block_table[0, :3].tolist() + common.block_table[1, :4].tolist()
    assert sorted(used) == list(range(layers.num_blocks([130, 200])))
    assert common.slot_mapping[0] == common.block_table[0, 2] * 64 + 1
    assert common.slot_mapping[-1] == common.block_table[1, 3] * 64 + 7
    assert layers.positions_of([1, 3], [5, 4], "cpu").tolist() == [4, 1, 2, 3]


def test_config_of_a_device():
    assert layers.config_for("cuda").hidden_size == 7168 and layers.config_for("cuda", 16).num_heads == 16
    assert layers.config_for("cpu") == layers.SMALL


def test_host_on_a_cpu(tmp_path, capsys):
    """Run the benchmark `host` -> the results file has hardware, versions, dimensions, and the times of every op."""
    assert host.main(["--device", "cpu", "--calls", "2", "--json", str(tmp_path / "host.json")]) == 0
    report = json.loads((tmp_path / "host.json").read_text())
    assert report.keys() >= HEAD | {"dims", "calls", "rows"}
    times = {row["op"]: row["host_us"]["fast"] for row in report["rows"]}
    assert times.keys() >= host.TARGETS_US.keys()
    assert all(spread["runs"] == 2 and spread["median_us"] > 0 for spread in times.values())
    assert {row["target_us"] for row in report["rows"]} == {None}  # a run on a CPU has no targets
    assert "Host time of one eager call" in capsys.readouterr().out


def test_host_profile(capsys):
    """Run `host --profile` -> a profile with functions of the op, and no table of times."""
    assert host.main(["--device", "cpu", "--calls", "3", "--profile", "concat_and_cache_mla"]) == 0
    out = capsys.readouterr().out
    assert "one call under the profiler" in out and "concat_and_cache_mla" in out and "median us" not in out


def test_host_refusals(capsys, tmp_path):
    cpu = ["--device", "cpu"]
    for options, told in (
        ([*cpu, "--ops", "mla_encode"], "got mla_encode"),
        ([*cpu, "--profile", "mla_encode"], "got mla_encode"),
        ([*cpu, "--calls", "0"], "--calls: expected at least 1, got 0"),
        ([*cpu, "--peers", str(tmp_path)], "--peers: expected a folder with peers.py"),
    ):
        assert host.main(options) == 2
        assert told in capsys.readouterr().err


def test_peers_are_timed_beside(capsys):
    """Let some peers (kernels of other projects) fail -> the benchmark continues, and reports them with a reason.

    The libraries of two peers are missing, and a call of the third peer raises an error.
    """
    here = SimpleNamespace(
        available=lambda: {"flashmla": False, "fa3": True, "vllm_triton": False},
        fa3_mla_decode=lambda *arguments: None,
        fa3_prefill=lambda *arguments: 1 / 0,
    )
    ops = host.make_ops(layers.SMALL, layers.Batch(2, 20, 1, 3, 16), "cpu", None, here)
    rows = {row["op"]: row for row in host.measure(ops, "cpu", 2, with_targets=True)}
    assert set(rows["mla_decode"]["host_us"]) == {"fast", "FA3"}
    assert rows["mla_decode"]["absent"] == {"vLLM Triton": "its library could not be loaded"}
    assert rows["mla_decode, planned"]["absent"] == {"FlashMLA": "its library could not be loaded"}
    assert rows["run_prefill_new_tokens"]["absent"] == {"FA3": "ZeroDivisionError: division by zero"}
    assert rows["mla_decode"]["target_us"] == 80.0
    rows["mla_decode"]["host_us"]["fast"]["median_us"] = 81.0
    Console(width=120).print(host.draw([rows["mla_decode"]], "times"))
    assert "81.0 !" in capsys.readouterr().out


# The kernels of a traced step.


def test_every_kernel_belongs_to_a_part():
    """Look up the names of the kernels of `fast`, PyTorch and cuBLAS -> each kernel belongs to a part of a step."""
    names = set()
    for path in (ROOT / "fast" / "kernels").rglob("*.py"):
        names |= set(re.findall(r"^def (_\w+_kernel)\(", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert {"_decode_kernel", "_row_blocks_64_kernel", "_plan_decode_kernel", "_rope_norm_cache_kernel"} <= names
    assert {name for name in names if kernel_times.part_of(name) == kernel_times.OTHER} == set()
    known = {
        "_plan_decode_kernel": "plan", "_scheduled_decode_kernel": "attention", "_combine_splits_kernel": "attention",
        "_flash_attn_varlen_kernel": "attention", "_rope_norm_cache_kernel": "movement", "_merge_kernel": "movement",
        "_multiply_heads_kernel": "projections", "_gather_dequantized_kernel": "movement",
        "nvjet_tst_128x64_64x10_2x1_v_bz_TNT": "projections", "sm90_xmma_gemm_bf16bf16": "projections",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float>": "projections",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<>": "movement",
        "Memcpy HtoD (Pinned -> Device)": "movement", "mystery": "other",
    }  # fmt: skip
    assert {name: kernel_times.part_of(name) for name in known} == known


def test_time_of_parts():
    """Add up the times of kernels that overlap -> the time of an overlap counts once.

    So the times of the parts add up to the time in which at least one kernel runs.
    """
    kernels = [
        Kernel("gemm", 10, 20), Kernel("_decode_kernel", 20, 50), Kernel("_combine_splits_kernel", 45, 60),
        Kernel("_write_kernel", 30, 40), Kernel("_plan_decode_kernel", 0, 5),
    ]  # fmt: skip
    assert kernel_times.time_of_parts(kernels) == {"plan": 5, "projections": 10, "attention": 40, "movement": 0}
    assert kernel_times.busy_time(kernels) == 55
    assert kernel_times.time_of_parts([Kernel("mystery", 0, 1)])["other"] == 1
    assert kernel_times.busy_time([]) == 0


def traced_step(shift: float, attention: float = 3) -> list[Kernel]:
    """Return the kernels of a step of 3 layers, which starts at `shift` us.

    Each layer has 6 us of matrix products and `attention` us of attention. A layer starts 10 us after the layer before.
    """
    kernels = [Kernel("_plan_decode_kernel", shift, shift + 2)]
    for layer in range(3):
        start = shift + 2 + 10 * layer
        kernels += [Kernel("gemm", start, start + 6), Kernel("_decode_kernel", start + 6, start + 6 + attention)]
        if layer == 0:
            kernels.append(Kernel(f"void {LAYER_MARK}_cuda", start + 6 + attention, start + 6.5 + attention))
    return kernels


def test_marks():
    """Cut a trace of two steps at its marks -> the kernels of each step, without the kernels before the first mark."""
    trace = [Kernel("early", -5, -4)]
    for shift in (0, 100):
        trace += [Kernel(f"void {STEP_MARK}_cuda", shift - 1, shift - 0.5), *traced_step(shift)]
    steps = kernel_times.cut_at_marks(trace[::-1], STEP_MARK)
    assert steps == [traced_step(0), traced_step(100)]


def test_parts_and_busy_shares():
    """Divide traced steps into parts -> the times and shares computed by hand.

    "host_plan" is the time of the host's planning. "idle" is the wall time without the times of the other parts.

    "busy" and "busy_traced" are for the layers after the first layer. In the trace of the eager step, kernels of these
    layers run for 9 us, then no kernel runs for 1 us, then kernels run for 9 us: 18 us of 19 us ("busy_traced"). In the
    trace of the replays they run for 2 times 9.5 us. "busy" divides these 19 us by 24 us, the time without a trace.
    """
    steps = [traced_step(0), traced_step(100), traced_step(200)]
    parts = {"host_plan": 4, "idle": 7, "plan": 2, "projections": 18, "attention": 9, "movement": 0}
    assert step.parts_of(steps, 40.0, 4.0) == parts
    assert step.parts_of(steps, 20.0, 0.0)["idle"] == 0
    shares = step.busy_shares([traced_step(shift, 3.5) for shift in (0, 100)], steps, 24.0)
    assert shares == {"busy": pytest.approx(19 / 24), "busy_traced": pytest.approx(18 / 19)}


# The recorded ops.


def test_record():
    """Record the ops of a function -> the ops that launch a kernel on the device; a recorded op can run again.

    Views, allocations, ops with empty results and ops on another device are left out.
    """
    a, b = torch.randn(4, 3), torch.zeros(4, 4)

    def run() -> None:
        torch.empty(4, 4)
        a[:0] = 0
        torch.mm(a, a.t(), out=b)
        b.add_(1)

    ops = recorded_ops.record(run, "cpu")
    assert [op.name for op in ops] == ["aten::mm", "aten::add_"]
    expected = b + 1
    ops[1].call()
    assert torch.equal(b, expected)
    assert recorded_ops.record(run, "cuda") == []


def test_sum_over_ops(monkeypatch):
    """Sum the times of all ops of a step of 10 layers -> an op of a layer counts 10 times, an op of the plan once.

    It is an error if the recorded layers have no attention op, or if their ops differ.
    """
    seconds = iter([5.0, 1.0, 2.0])
    monkeypatch.setattr(recorded_ops, "_spread_of", lambda clock, calls: {"median_us": next(seconds)})
    plan = [recorded_ops.RecordedOp("mla_twins::plan_decode", lambda: None)]
    layer = [recorded_ops.RecordedOp(name, lambda: None) for name in ("aten::mm", "mla_twins::mla_decode")]
    total, ops = recorded_ops.time_ops(None, plan, [layer, layer], 10)
    assert total == 5 + 10 * (1 + 2) and [op["times"] for op in ops] == [1, 10, 10]
    with pytest.raises(AssertionError, match="expected mla_decode or flash_attn_varlen in a layer, got aten::mm"):
        recorded_ops.time_ops(None, [], [layer[:1]], 10)
    with pytest.raises(AssertionError, match="expected equal ops in all layers"):
        recorded_ops.time_ops(None, [], [layer, layer[:1]], 10)


# Whole steps.


def test_what_fits():
    """Divide the memory -> first a cache for each layer; the rest is for weights, at most one set for each layer."""
    assert step.fit(1000, 10, 3, 61) == (61, 61)
    assert step.fit(620, 10, 3, 61) == (61, 1 + 10 // 3)
    assert step.fit(100, 10, 3, 61) == (10, 1)
    with pytest.raises(CannotRun, match="free memory for one cache"):
        step.fit(9, 10, 3, 61)


def test_steps_on_a_cpu(tmp_path, capsys):
    """Run the benchmark `step` -> the time of every batch, eager and in a graph, and the ops of each step."""
    path = tmp_path / "step.json"
    assert step.main(["--device", "cpu", "--layers", "2", "--steps", "2", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report.keys() >= HEAD and report["layers"] == 2 and report["weight_sets"] == 2
    rows = {row["batch"]: row for row in report["rows"]}
    assert list(rows) == ["decodes", "mixed", "prompts", "prompts with context"]
    for row in rows.values():
        assert row["eager"]["wall_us"]["median_us"] > 0 and row["graph"]["wall_us"]["runs"] == 2
        assert 0 < row["eager"]["host_plan_us"]["median_us"] < row["eager"]["host_us"]["median_us"]
        assert ("host_plan_us" in row["graph"]) == (row["batch"] == "decodes")  # other graphs repeat one plan
        assert row["ops_us"] == pytest.approx(sum(op["times"] * op["median_us"] for op in row["ops"]))
    called = {name: [op["op"] for op in row["ops"] if op["op"].startswith("mla_twins")] for name, row in rows.items()}
    assert [name for name, ops in called.items() if "mla_twins::mla_decode" in ops] == ["decodes", "mixed"]
    gathered = [name for name, ops in called.items() if "mla_twins::gather_cache_out" in ops]
    assert gathered == ["prompts with context"]  # the op gathers into the workspace of the layer
    assert "Steps of 2 layers" in capsys.readouterr().out


def test_step_refusals(capsys):
    assert step.main(["--device", "cpu", "--layers", "0"]) == 2
    assert capsys.readouterr().err == "error: --layers: expected at least 1, got 0\n"


def test_step_table(capsys):
    """Draw the table of steps -> the parts of eager steps and of graphs. `verdicts` says which targets are met."""
    spread = {"median_us": 2000.0, "quartiles_us": [1900.0, 2100.0], "runs": 3}
    parts = {"host_plan": 110.0, "idle": 390.0, "plan": 5.0, "projections": 700.0, "attention": 700.0, "movement": 95.0}
    eager = {
        "wall_us": spread,
        "host_us": spread,
        "rest_us": spread,
        "parts_us": parts,
        "busy": 0.96,
        "busy_traced": 0.9,
    }
    row = {"batch": "mixed", "eager": eager, "graph": {"wall_us": spread, "parts_us": parts}, "ops_us": 1990.0,
           "ops": [], "graph_over_ops": 1.005}  # fmt: skip
    rows = [row, {**row, "batch": "decodes"}, {**row, "batch": "decodes", "graph_over_ops": 1.03}]
    Console(width=200).print(step.draw(rows, 61))
    shown = capsys.readouterr().out
    assert "Steps of 61 layers" in shown and "96.0%" in shown and "1.005" in shown and "0.70" in shown
    assert "host plan" in shown and "0.11" in shown and "0.39" in shown
    found = step.verdicts(rows)
    assert [verdict["met"] for verdict in found] == [True, True, False]
    assert (found[0]["busy"], found[0]["at_least"], found[2]["graph_over_ops"], found[2]["at_most"]) == (
        0.96, 0.95, 1.03, 1.02,
    )  # fmt: skip
    assert [verdict["text"] for verdict in found] == [
        "mixed: GPU busy 96.0% from the second layer on, at least 95%: met",
        "decodes: graph / ops 1.005, at most 1.02: met",
        "decodes: graph / ops 1.030, at most 1.02: missed",
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_traced_steps_on_a_gpu(monkeypatch, tmp_path):
    """Run the benchmark `step` on a GPU -> the sum of all parts is at least 99 % of the wall time.

    Every kernel belongs to a known part. "busy" and "busy_traced" are above 0, and "busy_traced" is at most 1.
    """
    small = {name: replace(batch, keys=min(batch.keys, 256), context=min(batch.context, 256), new_tokens=min(
        batch.new_tokens, 128)) for name, batch in step.BATCHES["cuda"].items()}  # fmt: skip
    monkeypatch.setitem(step.BATCHES, "cuda", small)
    path = tmp_path / "step.json"
    assert step.main(["--layers", "4", "--heads", "16", "--steps", "3", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [verdict["batch"] for verdict in report["targets"]] == ["decodes", "mixed"]
    for row in report["rows"]:
        assert row["eager"]["parts_us"]["host_plan"] > 0
        assert (row["graph"]["parts_us"]["host_plan"] > 0) == (row["batch"] == "decodes")
        for way in ("eager", "graph"):
            parts = row[way]["parts_us"]
            assert "other" not in parts and parts["attention"] > 0 and parts["projections"] > 0, row["batch"]
            assert sum(parts.values()) >= 0.99 * row[way]["wall_us"]["median_us"]
        assert 0 < row["eager"]["busy_traced"] <= 1 and row["eager"]["busy"] > 0
