"""Tests of ranks that run in processes (over gloo, or over NCCL on GPUs): results, ranks that disagree or die."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fast
import reference
from fast.parity import compare
from reference.interfaces import CACHE_FORMATS

from ..support.factories import assert_close64, assert_same_bits
from ..support.processes import Outcome, run_ranks, values_of
from ..support.ranks import (
    RANK_CONFIG,
    disagree,
    disagree_in_a_loop,
    everything,
    exchange_everything,
    generate_over_format,
    groups_of_a_mesh,
    make_loop,
    replay_decodes,
    serve_and_die,
    serve_for_ever,
)

ROOT = Path(__file__).parents[2]
GPUS = torch.cuda.device_count()
GROUP_TIMEOUT_S = 30.0
on_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


def simulated(size, total, interleave, dtype):
    """Return the results of every rank when one process simulates all ranks."""
    with torch.device("cpu"):
        packages = {"reference": reference, "fast": fast}
        return fast.simulate(size, interleave, lambda ranks: everything(ranks, packages, dtype, "cpu"), total)


@pytest.mark.parametrize(("size", "total", "interleave"), [(2, 2, 1), (4, 4, 16), (2, 4, 4)])
def test_processes_equal_the_simulator(size, total, interleave):
    """Over gloo, merges and layers give the float64 results of simulated ranks, and two runs give the same bits."""
    runs = [values_of(run_ranks(total, exchange_everything, size, interleave, torch.float64, "cpu")) for _ in range(2)]
    wanted = simulated(size, total, interleave, torch.float64)
    for rank in range(total):
        assert runs[0][rank].keys() == wanted[rank].keys() and len(wanted[rank]) == 24
        for name, value in runs[0][rank].items():
            assert_close64(value, wanted[rank][name])
            assert_same_bits(value, runs[1][rank][name])


def test_groups_of_a_device_mesh():
    assert values_of(run_ranks(4, groups_of_a_mesh)) == [(2, 1, (0, 1))] * 2 + [(2, 5, (2, 3))] * 2


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"dtype": [torch.float32] * 2 + [torch.bfloat16, torch.float32]},
         "dtype: expected torch.float32 on every rank, got torch.bfloat16 on rank 2"),
        ({"block_size": [16, 64, 64, 64]}, "block_size: expected 64 on every rank, got 16 on rank 0"),
        ({"seq_lens": [[5, 6], [5, 7], [5, 6], [5, 8]]},
         "seq_lens: expected [5, 6] on every rank, got [5, 7] on rank 1, [5, 8] on rank 3"),
        ({"interleave": [1, 1, 1, 16]}, "interleave: expected 1 on every rank, got 16 on rank 3"),
        ({"merge": ["a2a", "ag_rs", "a2a", "a2a"]}, "merge: expected a2a on every rank, got ag_rs on rank 1"),
        ({"size": [2, 2, 1, 1]}, "context_parallel_size: expected 2 on every rank, got 1 on rank 2, 1 on rank 3"),
    ],
    ids=["dtype", "block-size", "lengths", "interleave", "merge", "D"],
)  # fmt: skip
def test_ranks_that_disagree(facts, message):
    for outcome in run_ranks(4, disagree, facts):
        assert outcome.error == f"ValueError: {message}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": [16, 24]}, "block_size: expected 16 on every rank, got 24 on rank 1"),
        ({"eos": [None, 7]}, "eos: expected [] on every rank, got [7] on rank 1"),
        ({"shift": [0, 1]}, "requests: expected "),
        ({"token_budget": [40, 3]}, "token_budget: expected 40 on every rank, got 3 on rank 1"),
    ],
    ids=["block-size", "eos", "tokens", "refused-by-one"],
)
def test_loops_that_disagree(options, message):
    """If ranks start serving loops with different options, every rank raises an error that names the option.

    Some options are invalid on one rank only. All ranks first compare their options, and then each rank checks its own
    options. So no rank waits for a rank that raised an error.
    """
    for outcome in run_ranks(2, disagree_in_a_loop, 2, options):
        assert outcome.error.startswith(f"ValueError: {message}") and outcome.seconds < 10, outcome


@pytest.mark.parametrize("name", ["compute_dtype", "fp8_e4m3"])
@pytest.mark.parametrize("merge", ["a2a", "ag_rs"])
def test_decode_graphs(merge, name):
    """If each rank is a process, steps in a `DecodeGraph` give the same outputs as steps without a graph.

    On a CPU, a `DecodeGraph` captures nothing: it copies its inputs to its buffers and runs the steps eagerly.
    """
    for found, _ in values_of(
        run_ranks(2, replay_decodes, 2, merge, 2, "cpu", torch.float64, CACHE_FORMATS[name])
    ):  # fmt: skip
        for eager, captured in found:
            assert_close64(captured, eager)


def check_generation(outcomes: list[Outcome], name: str) -> None:
    """Assert that all ranks generated the tokens of one rank over caches in the same format, with the same scales.

    Args:
        outcomes: outcome of `generate_over_format` on every rank.
        name: name of the cache format.
    """
    values = values_of(outcomes)
    stored, layer_scale = CACHE_FORMATS[name].storage_dtype, CACHE_FORMATS[name].layer_scale
    for package in ("reference", "fast"):
        alone, ranks = values[0][f"{package}, one rank"], [found[f"{package}, all ranks"] for found in values]
        assert [len(tokens) for tokens in alone["tokens"]] == [12] * 4
        assert sum(len(set(tokens)) > 3 for tokens in alone["tokens"]) >= 3  # one request may repeat one token
        for found in ranks:
            assert found == ranks[0] and found["tokens"] == alone["tokens"], package
            assert found["dtypes"] == alone["dtypes"] == [str(stored)] * 2
            assert len(found["scales"]) == (2 if layer_scale else 0)
            for (scale, source), (wanted, _) in zip(found["scales"], alone["scales"], strict=True):
                assert scale == pytest.approx(wanted, rel=1e-5) and source == "first prefill"


@pytest.mark.parametrize(
    ("name", "mode", "dtype", "total", "size", "interleave", "merge"),
    [
        ("fp8_e4m3", "converted", torch.float64, 2, 2, 4, "a2a"),
        ("fp8_e4m3", "fp8_query", torch.float64, 4, 2, 1, "ag_rs"),
        ("fp8_e4m3", "converted", torch.float32, 2, 2, 4, "ag_rs"),
        ("fp8_ds_mla", "converted", torch.float64, 2, 2, 16, "ag_rs"),
        ("fp8_ds_mla", "converted", torch.float32, 2, 2, 4, "a2a"),
    ],
)
def test_fp8_generation(name, mode, dtype, total, size, interleave, merge):
    """Over gloo, ranks generate the tokens of one rank over the same fp8 format: prefills with context, and decodes.

    The first prefill chooses the scales, and every rank writes only some of its tokens. If each rank took the largest
    value of its own tokens, the scales would differ, and the test would fail.
    """
    task = size, interleave, merge, name, mode, "cpu", dtype
    check_generation(run_ranks(total, generate_over_format, *task), name)


# Tests of ranks that die. A run of the serving loop has about 100 exchanges between ranks: 15 steps of two layers, with
# two or three exchanges in each layer. A request in flight is a request that is not finished.


def check_survivor(outcome: Outcome, seconds: float) -> None:
    """Assert that a rank raised within `seconds`, and that its error names group, operation and requests in flight."""
    assert outcome.exit_status == 1, f"{outcome}"
    wanted = r"^StepLost: (cp|tp)_group: all_\w+ of rank \d among ranks \[[\d, ]+\] failed: .*"
    assert re.match(wanted + r"; requests in flight: \d(, \d)*$", outcome.error), outcome.error
    assert outcome.seconds < seconds


@pytest.mark.parametrize("kill", range(14))
def test_a_rank_that_dies_in_a_step(kill):
    """If one of two or four ranks dies at an exchange, every other rank raises within the timeout."""
    draw = random.Random(kill)
    total = (2, 4)[kill % 2]
    victim, exchange = draw.randrange(total), draw.randrange(1, 90) if kill else 1  # exchange 1 precedes the first step
    outcomes = run_ranks(total, serve_and_die, (2, 4, 2)[kill % 3] if total == 4 else 2, victim, exchange, "cpu",
                         torch.float32, timeout_s=GROUP_TIMEOUT_S)  # fmt: skip
    assert outcomes[victim].exit_status == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            check_survivor(outcome, GROUP_TIMEOUT_S)


@pytest.mark.parametrize("kill", range(6))
def test_a_rank_that_is_killed(kill):
    """If another process kills a rank at a random moment, all other ranks raise."""
    draw = random.Random(100 + kill)
    total = (2, 4)[kill % 2]
    victim = draw.randrange(total)

    def shoot(processes: list[int]) -> None:
        time.sleep(draw.random())
        os.kill(processes[victim], signal.SIGKILL)

    outcomes = run_ranks(total, serve_for_ever, 2, "cpu", torch.float32, timeout_s=GROUP_TIMEOUT_S, meanwhile=shoot)
    assert outcomes[victim].exit_status == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank != victim:  # if the victim died before this rank had made its loop, the error is GroupError
            assert outcome.exit_status == 1 and outcome.seconds < GROUP_TIMEOUT_S, f"{outcome}"
            wanted = r"^(StepLost|GroupError): (cp|tp)_group: all_\w+ of rank \d among ranks \[[\d, ]+\] failed: "
            assert re.match(wanted, outcome.error), outcome.error
            assert ("requests in flight" in outcome.error) == outcome.error.startswith("StepLost")


def test_a_rank_that_stands_still():
    """If SIGSTOP stops one of two ranks, the other rank raises after about 4 s, the timeout of the group."""
    stopped = []

    def stop(processes: list[int]) -> None:
        os.kill(processes[1], signal.SIGSTOP)
        stopped.append(time.monotonic())

    outcomes = run_ranks(2, serve_for_ever, 2, "cpu", torch.float32, timeout_s=4.0, limit_s=40.0, meanwhile=stop,
                         stands_still=1)  # fmt: skip
    assert outcomes[1].exit_status is None  # the stopped process did not end
    assert outcomes[0].exit_status == 1 and 3 < outcomes[0].ended - stopped[0] < 2 * 4.0
    assert re.match(r"^(StepLost|GroupError): (cp|tp)_group: all_\w+ of rank 0 among .* failed: ", outcomes[0].error)


# Tests of the main job: `python -m fast` serves prompts and compares `reference`, `fast` and transformers.


def torchrun(*options: str, processes: int = 4, folder: Path) -> tuple[int, str, str]:
    """Run `torchrun -m fast` on the CPU with one thread for each rank, and return exit status, stdout and stderr.

    If the command runs longer than 240 s, the function ends all processes of the command.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [*command, "-m", "fast", "--device", "cpu", *options], cwd=folder, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its workers
        output, errors = process.communicate(timeout=60)
        errors += "\nran longer than 240 s"
    return process.returncode, output, errors


@pytest.mark.parametrize(
    ("size", "interleave", "merge", "ops", "cache_format", "mode"),
    [
        (4, 1, "a2a", "both", "compute_dtype", "converted"),
        (2, 16, "ag_rs", "fast", "compute_dtype", "converted"),
        (2, 1, "a2a", "both", "fp8_e4m3", "fp8_query"),
    ],
)
def test_main_job(tmp_path, size, interleave, merge, ops, cache_format, mode):
    """The main job on four ranks generates the same tokens as a single rank over the same format, in the same fp8 mode.

    `size` ranks share each sequence.
    """
    pytest.importorskip("transformers")
    status, output, errors = torchrun(
        "--context-parallel", str(size), "--interleave", str(interleave), "--merge", merge, "--max-new-tokens", "12",
        "--prompt", "def __init__(self, " * 12, "--prompt", "import os", "--json", "figures.json",
        "--token-budget", "64", "--workspace-tokens", "64", "--ops", ops, "--cache-format", cache_format,
        "--fp8-mode", mode, folder=tmp_path,
    )  # fmt: skip
    assert status == 0, output + errors
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["cache_format"], figures["fp8_mode"]) == (cache_format, mode)
    assert (figures["q_scales"] is None) == (mode == "converted")
    assert (figures["bits_per_byte"] is None) == (figures["kv_scales"] is None) == (cache_format == "compute_dtype")
    assert figures["ranks"] == 4 and figures["tokens_per_block"] == 16 * size and figures["merge"] == merge
    assert list(figures["backends"]) == (["reference", "fast"] if ops == "both" else ["fast"])
    for name in figures["backends"]:
        row = figures["backends"][name]
        assert row["identical"] and [len(ids) for ids in row["tokens"]] == [12, 12]
        assert row["schedule"]["context_chunks"] > 0 and row["received_bytes"]["cp_group"]["all_gather"] > 0
        assert re.search(rf"{name} .* identical", output)


def test_main_job_refusals(tmp_path):
    """The main job refuses invalid options with one line before a model is loaded."""
    alone = subprocess.run([sys.executable, "-m", "fast", "--context-parallel", "2"], cwd=tmp_path, text=True,
                           env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False)  # fmt: skip
    assert alone.returncode == 2
    assert re.match(r"^error: --context-parallel: expected a start by torchrun .*, got no RANK", alone.stderr)
    status, _, errors = torchrun("--context-parallel", "3", processes=2, folder=tmp_path)
    assert status != 0
    assert "error: --context-parallel: expected a divisor of the 2 processes, got 3\n" in errors


# Tests on GPUs.


@on_gpus
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("total", [2, 4])
def test_nccl_within_budget(total, dtype):
    """Over NCCL, the errors of `fast` are within the budgets that docs/correctness.md defines.

    An error is measured against `reference` on simulated ranks in float64. The budget is computed from the error of
    `reference` over NCCL in the same dtype.
    """
    if total > GPUS:
        pytest.skip(f"needs {total} GPUs")
    outcomes = run_ranks(total, exchange_everything, total, 16, dtype, "cuda", backend="nccl", limit_s=180.0)
    gold = simulated(total, total, 16, torch.float64)
    for rank, found in enumerate(values_of(outcomes)):
        for name in (name for name in found if name.startswith("fast")):
            same = name.replace("fast", "reference")
            relative = 2.0**-13 if name.endswith("lse") else 0.0
            parity = compare(name, found[name], found[same], gold[rank][same], relative)
            assert parity.passed, parity


@on_gpus
@pytest.mark.parametrize("merge", ["a2a", "ag_rs"])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_ds_mla"])
def test_nccl_fp8_generation(name, merge):
    """Over NCCL, two ranks generate the tokens of one rank over the same fp8 format, with both packages in float32."""
    task = 2, 4, merge, name, "converted", "cuda", torch.float32
    outcomes = run_ranks(2, generate_over_format, *task, backend="nccl", timeout_s=150.0, limit_s=300.0)
    check_generation(outcomes, name)


@on_gpus
@pytest.mark.parametrize("name", ["compute_dtype", "fp8_e4m3"])
@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize("merge", ["a2a", "ag_rs"])
def test_nccl_graphs(merge, query_len, name):
    """Capture a step with exchanges, replay it with other lengths, blocks and slots -> errors within the budget.

    The reserved GPU memory does not grow during the replays.
    """
    task = 2, merge, query_len
    gold = values_of(run_ranks(2, replay_decodes, *task, "cpu", torch.float64, CACHE_FORMATS[name]))
    outcomes = run_ranks(2, replay_decodes, *task, "cuda", torch.float32, CACHE_FORMATS[name], backend="nccl",
                         limit_s=180.0)  # fmt: skip
    for (found, amounts), (wanted, _) in zip(values_of(outcomes), gold, strict=True):
        assert amounts == 1
        for (eager, captured), (whole, _) in zip(found, wanted, strict=True):
            parity = compare("graph", captured, eager, whole)
            assert parity.passed, parity


@pytest.fixture(scope="module")
def compiled():
    """Compile all kernels into Triton's disk cache, so that later no rank waits while another rank compiles."""
    for total in {2, min(GPUS, 4)}:
        served = run_ranks(total, serve_and_die, 2, None, 0, "cuda", torch.bfloat16, backend="nccl", timeout_s=120.0,
                           limit_s=180.0)  # fmt: skip
        values = values_of(served)
        assert all(value == values[0] for value in values)


@on_gpus
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kill", range(20))
def test_nccl_rank_that_dies(kill):
    """If a rank dies, every other rank ends with a non-zero exit status within 1 s after the timeout of the group.

    The error or the stderr of every other rank names the group, the operation and the requests in flight.
    """
    draw = random.Random(kill)
    total = 4 if GPUS >= 4 and kill % 2 else 2
    victim, exchange, timeout_s = draw.randrange(total), draw.randrange(1, 90), 6.0
    outcomes = run_ranks(total, serve_and_die, 2, victim, exchange, "cuda", torch.bfloat16, backend="nccl",
                         timeout_s=timeout_s, limit_s=60.0)  # fmt: skip
    assert outcomes[victim].exit_status == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.exit_status not in (0, None), f"{outcome}"
            assert outcome.ended - outcomes[victim].ended < timeout_s + 1, f"{outcome}"  # 1 s to observe the end
            text = (outcome.error or "") + outcome.stderr
            assert re.search(r"(cp|tp)_group: .*all_\w+.*requests in flight: \d", text, re.S), f"{outcome}"


def test_served_alone():
    """Every request of the serving loop generates more than three different tokens.

    With fewer different tokens, two results in the tests above could be equal by chance.
    """
    with torch.device("cpu"):
        requests = make_loop(fast, RANK_CONFIG, None, "cpu", torch.float64).run()
    assert all(len(set(request.generated_ids)) > 3 for request in requests)
