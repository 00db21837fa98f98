"""Tests of the GPU suite (tests/gpu_suite.py and tests/sanitizers.py). The tests need no GPU.

The suite runs all tests on a GPU, and runs kernel launches under compute-sanitizer: memcheck finds accesses outside of
tensors, racecheck finds data races in shared memory. The tests of this file check which tests the suite runs, how it
reads the outputs of the tools, and what it reports.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from .. import conftest, gpu_suite, memory_checks, sanitizers
from ..support import commands


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "h200.json"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb.json"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090.json"),
    ],
)
def test_results_file(gpu, name):
    assert gpu_suite.file_name(gpu) == name


def test_junit(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="tests.test_a" name="right"/>'
        '<testcase classname="tests.test_a" name="wrong"><failure message="no"/></testcase>'
        '<testcase classname="tests.test_a" name="broken"><error message="no"/></testcase>'
        '<testcase classname="tests.test_a" name="left"><skipped message="no GPU"/></testcase>'
        '<testcase classname="" name="tests.test_b"><skipped message="collection skipped"/></testcase>'
        "</testsuite></testsuites>"
    )
    found = gpu_suite.read_junit(path)
    assert found == {
        "passed": 1, "failed": ["tests.test_a::wrong", "tests.test_a::broken"],
        "skipped": {"no GPU": 1, "collection skipped: tests.test_b": 1},
    }  # fmt: skip


@pytest.mark.parametrize("folder", ["triton", "hopper"])
def test_kernels_of_a_set(folder):
    """Collect the kernels of a backend from its modules -> `kernels_of` finds the same names in the source files."""
    pytest.importorskip("triton")
    package = importlib.import_module(f"fast.kernels.{folder}")
    found = set()
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if name.startswith("_") and name.endswith("_kernel") and value.fn.__module__ == module.name:
                found.add(value.fn.__name__.strip("_"))  # two variants of one function may have two names
    assert len(found) > 3 and memory_checks.kernels_of([folder]) == found


def test_what_a_memory_checker_must_have_seen():
    """Report on the shards of memcheck -> "ok" only if three conditions hold.

    - Every shard ran to its end; a shard is a part of the launches that has its own process.
    - No shard reported an error.
    - The launches of all shards together contain every kernel and every variant.
    """
    kernels = [f"{name} (fp32, ROWS 16)" for name in memory_checks.kernels_of(["combine", "triton"])]
    clean, unclean = "========= ERROR SUMMARY: 0 errors", "========= ERROR SUMMARY: 3 errors"
    ended = "shard {} of 2 has ended"

    def outcome(shard, names, said=clean, status=0, last=ended):
        return status, "\n".join([*(f"launched: {name}" for name in names), last.format(shard), said])

    both = [outcome(1, kernels[:5]), outcome(2, kernels[4:])]
    found = sanitizers.shards_report(both, hopper=False)
    assert found == {
        "ok": True, "launched": sorted(kernels),
        "summary": ["every op and every variant was launched", "2 x ERROR SUMMARY: 0 errors"],
    }  # fmt: skip
    for bad in (
        [both[0], outcome(2, kernels[6:])], [both[0], outcome(2, kernels[4:], unclean, 9)],
        [both[0], outcome(2, kernels[4:], last="killed")], [both[0], outcome(2, kernels[4:], said="")],
    ):  # fmt: skip
        assert not sanitizers.shards_report(bad, hopper=False)["ok"]
    missing = memory_checks.never_launched(kernels, hopper=True)
    assert "two_phases_kernel" in missing and "row_blocks_16_32_kernel of ROWS 32" in missing


KERNEL, TRITONS = (
    "_row_blocks_16_32_kernel",
    sorted(p for p in sanitizers.tritons_own() if p.kernel == "_row_blocks_16_32_kernel"),
)


def reported(*pairs) -> str:
    """Return the output of racecheck, with its summary, for one race at each pair of source lines."""
    lines = []
    for first, second in pairs:
        lines.append(f"========= Error: Race reported between Read access at {KERNEL}+0x140 in {first}")
        lines.append(f"=========     and Write access at {KERNEL}+0x9a0 in {second} [4 hazards]")
    return "\n".join([*lines, f"========= RACECHECK SUMMARY: {len(pairs)} hazards displayed ({len(pairs)} errors)"])


def places(*found) -> list[str]:
    return [f"{place.file}:{place.line}" for place in found]


def test_shards_run_again_where_a_race_has_no_place(monkeypatch):
    """Report a race without a source line -> the shard runs again, at most twice.

    A race that one run reports with source lines counts, even if a later run of the shard does not report it.
    """
    head, call = places(*TRITONS)
    nowhere = reported(("work_items.py:9", "work_items.py:7"), (head, call))
    nowhere = nowhere.replace(f"{KERNEL}+0x140 in {head}", "").replace(f"{KERNEL}+0x9a0 in {call}", " ")
    clean, ran = reported((head, call)), []

    def shards(tool, args, given, *options, shards=()):
        ran.append(list(shards))
        return [(0, clean), (0, clean if stops and shards else nowhere)][-len(shards) :]

    monkeypatch.setattr(sanitizers, "run_shards", shards)
    monkeypatch.setattr(sanitizers, "sanitizer", lambda tool: ["true"])
    monkeypatch.setattr(sanitizers, "run", lambda *_, **__: (0, "hand-over: every value came\n" + reported()))
    pytest.importorskip("triton")
    for stops, expected in ((True, [[], [2]]), (False, [[], [2], [2]])):
        ran.clear()
        found = sanitizers.run_racecheck(SimpleNamespace(jobs=2, limit=9.0))
        assert ran == expected and len(found["races"]) == 1 + (not stops)
        assert found["races"][-1].endswith(f" x work_items.py:9 ({KERNEL}), work_items.py:7 ({KERNEL})")
        assert any(line.startswith(f"{len(expected) - 1} shards again") for line in found["summary"])


def test_where_triton_specializes_warps():
    """Call `tritons_own` -> lines of each kernel with warp groups: its `def` and each `gl.warp_specialize(`.

    One kernel has two calls, which are in two `if` statements.
    """
    own = sanitizers.tritons_own()
    assert Counter(place.kernel for place in own) == {"_row_blocks_16_or_64_kernel": 5} | dict.fromkeys(
        ("_row_blocks_16_32_kernel", "_row_blocks_16_32_e4m3_kernel", "_row_blocks_64_kernel",
         "_row_blocks_64_e4m3_kernel", "_two_phases_kernel", "_varlen_kernel", "_hand_over_kernel"), 2
    )  # fmt: skip
    lines = (commands.ROOT / "fast/kernels/hopper/mla_decode/main_loops/row_blocks_16_32.py").read_text().splitlines()
    assert [lines[place.line - 1].strip() for place in TRITONS] == [f"def {KERNEL}(", "gl.warp_specialize("]


def test_where_writes_are_equal():
    """Report writes of the combine kernels -> a line that writes the output counts only against another line."""
    own = sanitizers.equal_writes()
    kernels = {"_combine_splits_kernel", "_combine_scheduled_kernel", "_combine_invariant_kernel"}
    assert Counter(place.kernel for place in own) == dict.fromkeys(kernels, 2)
    lines = (commands.ROOT / "fast/kernels/combine/kernels.py").read_text().splitlines()
    shown = {lines[place.line - 1].strip().split("(")[0] for place in own}
    assert shown == {"combined = ", "tl.store"}
    first, second = sorted(place for place in own if place.kernel == "_combine_splits_kernel")
    elsewhere = first._replace(line=first.line - 3)
    for pair, counted in (((first, first), 0), ((second, second), 0), ((first, second), 1), ((elsewhere, elsewhere), 1),
                          ((first._replace(kernel="_decode_kernel"),) * 2, 1)):  # fmt: skip
        assert sanitizers.of_ours(Counter({pair: 1})).total() == counted


def test_races():
    """Count the races in outputs of racecheck -> one race for each pair of source lines, also if a line is unknown."""
    head, call = places(*TRITONS)
    again = f"[4 hazards]\n=========     and Write access at {KERNEL}+0x10 in work_items.py:7 [1 hazards]"
    found = sanitizers.races(reported((head, call), ("work_items.py:9", call)).replace("[4 hazards]", again, 1))
    assert found.total() == 3 and sanitizers.of_ours(found).total() == 2
    assert str(next(iter(sanitizers.of_ours(found)))[1]) == f"work_items.py:7 ({KERNEL})"
    unknown = reported((head, call)).replace(f" in {call}", " in an unknown place")
    assert sanitizers.of_ours(sanitizers.races(unknown)).total() == 1
    unread = reported((head, call), ("work_items.py:9", call)).replace(
        f"Read access at {KERNEL}+0x140 in work_items.py:9", "it"
    )
    assert sanitizers.of_ours(sanitizers.races(unread)).total() == 1
    other = reported((head, call)).replace(f"{KERNEL}+0x9a0", "_other_kernel+0x9a0")
    assert sanitizers.of_ours(sanitizers.races(other)).total() == 1


def exchanged(output: str) -> str:
    """Return reports of racecheck with the path of the file and the kernel in each other's place."""
    return re.sub(rf"{KERNEL}(\+0x\w+) in ([\w.]+):", rf"/a/folder/\2\1 in {KERNEL}:", output)


def test_races_with_names_in_each_others_place():
    """Report races with file and kernel exchanged -> the same races. Leave out the kernel and the line -> run again."""
    usual = reported(places(*TRITONS), ("work_items.py:9", "work_items.py:7"))
    output = exchanged(usual)
    assert "access at /a/folder/work_items.py+0x140 in" in output
    assert sanitizers.races(output) == sanitizers.races(usual)
    assert all(map(sanitizers.named, sanitizers.races(output)))
    nameless = re.sub(rf" in {KERNEL}:\d+", "", output)
    assert not any(map(sanitizers.named, sanitizers.races(nameless)))
    assert sanitizers.of_ours(sanitizers.races(nameless)).total() == 2


def test_what_racecheck_must_say():
    """Report on the shards of racecheck -> "ok" only if two conditions hold.

    - No shard reports a race, except races of Triton's own code in `warp_specialize`.
    - The three controls, which are runs of tests/hand_over.py, have the expected results. Racecheck reports no race in
      "every thread arrives", and a race in "nobody waits". In "every thread arrives" and in "one arrives for all", all
      values arrive.
    """
    head, call = places(*TRITONS)
    kernels = [f"{name} (fp32)" for name in memory_checks.kernels_of(["combine", "triton"])]
    launched = "\n".join(f"launched: {name}" for name in kernels)

    def shard(number, said, status=0):
        return status, f"{launched}\nshard {number} of 2 has ended\n{said}"

    own, race = reported((head, call)), reported((head, call), ("work_items.py:9", "work_items.py:7"))
    came, lost = "hand-over: every value came\n", "hand-over: 3 of 64 rounds came\n"
    controls = {"every thread arrives": came + own, "one arrives for all": came + race, "nobody waits": lost + race}
    assert [*controls] == [*sanitizers.CONTROLS]
    outcomes = [shard(1, own), shard(2, own)]
    found = sanitizers.races_report(outcomes, controls, hopper=False)
    assert found["ok"] and found["races"] == [] and found["controls"] == dict(zip(controls, (0, 1, 1), strict=True))
    assert found["summary"][1:3] == ["0 races", "2 at Triton's warp_specialize"]
    nothing = (
        reported((head, call)).replace(f" {KERNEL}+0x140 in {head}", " ").replace(f" {KERNEL}+0x9a0 in {call}", " ")
    )
    assert sanitizers.races_report(outcomes, controls, False, [nothing])["ok"]
    assert not sanitizers.races_report(outcomes, controls, False, [nothing, race])["ok"]
    twice = own.replace(
        " [4 hazards]", f" [4 hazards]\n=========     and Write access at {KERNEL}+0x9a0 in {call} [1 hazards]"
    )
    for bad, heard in (
        ([shard(1, twice), shard(2, own.replace("Race reported", "A race"))], controls),
        ([outcomes[0], shard(2, race)], controls), ([outcomes[0], shard(2, own, 1)], controls),
        ([outcomes[0], (0, own)], controls), ([outcomes[0], shard(2, own.replace("1 hazards", "2 hazards"))], controls),
        (outcomes, controls | {"every thread arrives": came + race}),
        (outcomes, controls | {"every thread arrives": own}), (outcomes, controls | {"nobody waits": lost + own}),
        (outcomes, controls | {"one arrives for all": ""}), (outcomes, controls | {"every thread arrives": came}),
        (outcomes, controls | {"one arrives for all": lost + race}),
        ([outcomes[0], shard(2, f"========= Internal Sanitizer Error: out of memory\n{own}")], controls),
    ):  # fmt: skip
        assert not sanitizers.races_report(bad, heard, hopper=False)["ok"]
    assert sanitizers.races_report([outcomes[0], shard(2, race)], controls, hopper=False)["races"] == [
        f"1 x work_items.py:9 ({KERNEL}), work_items.py:7 ({KERNEL})"
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards(count):
    """Divide tests by `--shard` -> each test is in exactly one shard, even for fewer tests than shards."""
    for tests in (0, 2, 11):
        items = [SimpleNamespace(path=Path(f"test_{number}.py"), number=number) for number in range(tests)]
        ran = []
        for shard in range(1, count + 1):
            left, said = list(items), []
            hook = SimpleNamespace(pytest_deselected=lambda items, said=said: said.extend(items))
            conftest.pytest_collection_modifyitems(
                SimpleNamespace(getoption={"--shard": (shard, count)}.get, hook=hook), left
            )
            assert len(left) + len(said) == tests
            ran += [item.number for item in left]
        assert sorted(ran) == list(range(tests))


@pytest.mark.parametrize("said", ["", "3", "0/2", "3/2", "a/2", "1/2/3", "-1/2"])
def test_no_share(said):
    with pytest.raises(argparse.ArgumentTypeError, match=f"expected K/N with 1 <= K <= N, got {said}$"):
        commands.share_of(said)


@pytest.mark.parametrize("gpu_files_only", [False, True])
def test_suite_runs_every_file(gpu_files_only, monkeypatch):
    """Record the commands of the suite -> every test file runs with `--device=cpu`, slow files in several shards.

    The files of ANY_DEVICE also run with `--device=cuda`. With `gpu_files_only`, the other runs are those of the files
    that run kernels, or that ask for a GPU.
    """
    called = []
    monkeypatch.setattr(gpu_suite, "run", lambda command, *_, **__: (called.append(command), (0, ""))[1])
    counts = gpu_suite.run_tests(
        SimpleNamespace(jobs=1, limit=1.0, gpu_files_only=gpu_files_only, part=(1, 1), files=())
    )
    found = Counter(tuple(word for word in command if ".py" in word or word.startswith(("--device", "--shard")))
                    for command in called)  # fmt: skip
    folder = Path(__file__).parents[1]
    wanted = Counter()
    files = [file for file in folder.rglob("test_*.py") if file.parent.name != "site"]
    kernels = [file for file in files if "test_triton_decode" in file.name or file.name == "test_replays.py"]
    assert all(map(gpu_suite.uses_gpu, kernels)) and not gpu_suite.uses_gpu(folder / "interfaces" / "test_limits.py")
    left_out = [file for file in files if gpu_files_only and not gpu_suite.uses_gpu(file)]
    assert counts.get("files_left_out", []) == sorted(file.name for file in left_out)
    runs = [(file, "cpu") for file in set(files) - set(left_out)]
    for file, device in [*runs, *((folder / name, "cuda") for name in gpu_suite.ANY_DEVICE)]:
        count = gpu_suite.SHARDS.get(file.name, 1)
        wanted.update((str(file), f"--device={device}", f"--shard={number}/{count}") for number in range(1, count + 1))
    assert found == wanted and {*gpu_suite.SHARDS} <= {file.name for file in files}
    assert len({file.name for file in files}) == len(files), "two test files have the same name"


def test_suite_of_chosen_files(monkeypatch):
    """Choose files by parts of their paths -> only these files run, and the report names the others."""
    called = []
    monkeypatch.setattr(gpu_suite, "run", lambda command, *_, **__: (called.extend(command), (0, ""))[1])
    given = ("kernels/cpu/", "cache/test_cache.py")
    counts = gpu_suite.run_tests(SimpleNamespace(jobs=1, limit=1.0, gpu_files_only=False, part=(1, 1), files=given))
    ran = {Path(word).name for word in called if word.endswith(".py")}
    folder = Path(__file__).parents[1]
    assert ran == {"test_cache.py", *(file.name for file in (folder / "kernels" / "cpu").glob("test_*.py"))}
    assert called.count("--device=cuda") == 1 and "test_replays.py" in counts["files_left_out"]


def test_gpus_in_turn(monkeypatch):
    """Run the tests on a machine that shows the GPUs 2 and 5 -> half of the processes see GPU 2, and half GPU 5."""
    seen = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")

    def run(*_, CUDA_VISIBLE_DEVICES, **__):
        seen.append(CUDA_VISIBLE_DEVICES)
        return 5, ""

    monkeypatch.setattr(gpu_suite, "run", run)
    gpu_suite.run_tests(SimpleNamespace(jobs=1, limit=1.0, gpu_files_only=False, part=(1, 1), files=()))
    assert seen[:4] == ["2", "5", "2", "5"] and abs(seen.count("2") - seen.count("5")) <= 1


def test_parts_of_the_tests(monkeypatch):
    """Run the parts of a division -> together they run every file once, and the results file adds their results."""
    called = []
    monkeypatch.setattr(gpu_suite, "run", lambda command, *_, **__: (called.append(tuple(command[:-1])), (5, ""))[1])
    whole = SimpleNamespace(jobs=1, limit=1.0, gpu_files_only=False, part=(1, 1), files=())
    gpu_suite.run_tests(whole)
    wanted, stages = Counter(called), []
    called.clear()
    for part in (1, 2, 3):
        stages.append(gpu_suite.run_tests(SimpleNamespace(**{**vars(whole), "part": (part, 3)})))
        stages[-1] |= {"passed": part, "failed": ["x"] * (part == 2), "ok": part != 2, "skipped": {"why": part}}
    assert Counter(called) == wanted
    reports = [{"command": "c", "tests": stage, "seconds": {"tests": 1.5}} for stage in stages]
    found = reports[0]
    for report in reports[1:]:
        found = gpu_suite.with_earlier_stages(report, found)
    tests = found["tests"]
    assert (tests["passed"], tests["failed"], tests["ok"], tests["skipped"]) == (6, ["x"], False, {"why": 6})
    assert tests["parts"] == ["1/3", "2/3", "3/3"] and found["seconds"]["tests"] == 4.5
    again = gpu_suite.with_earlier_stages({"command": "c", "tests": stages[0], "seconds": {"tests": 1.5}}, found)
    assert again["tests"] == stages[0], "a part that runs again replaces the results"


def test_main_job_runs_both_families(monkeypatch):
    """Run the main job with planted results -> both families run in float32, and both must pass."""
    statuses, called = {"mla": 0, "gqa": 0}, []

    def planted(command, limit, cwd):
        family = "gqa" if "gqa" in command else "mla"
        called.append(command)
        if (status := statuses[family]) != 2:
            figures = {"verdict": family, "parity": [], "speed": {}, "cache": {}}
            Path(command[command.index("--json") + 1]).write_text(json.dumps(figures))
        return status, f"said by {family}"

    monkeypatch.setattr(gpu_suite, "run", planted)
    args = SimpleNamespace(limit=1.0)
    wanted = {"ok": True, "command": "python -m fast --device cuda --dtype float32", "verdict": "mla", "parity": [],
              "speed": {}}  # fmt: skip
    gqa = {**wanted, "command": "python -m fast --family gqa --device cuda --dtype float32", "verdict": "gqa"}
    assert gpu_suite.run_main_job(args) == {**wanted, "gqa": gqa}
    assert [[word for word in command if word in ("gqa", "cuda", "float32")] for command in called] == [
        ["cuda", "float32"], ["gqa", "cuda", "float32"]]  # fmt: skip
    for family, status in (("mla", 1), ("gqa", 1), ("mla", 2), ("gqa", 2)):
        statuses |= {"mla": 0, "gqa": 0, family: status}
        found = gpu_suite.run_main_job(args)
        assert not found["ok"] and found["gqa"]["ok"] == (family == "mla")
        failed = found if family == "mla" else found["gqa"]
        assert status != 2 or (failed["status"], failed["said"]) == (2, f"said by {family}")


def test_time_limit():
    status, said = commands.run([sys.executable, "-c", "import time; time.sleep(60)"], 0.5)
    assert status == 124 and "ran longer than" in said


def test_hostile_arguments():
    """Call `hostile` -> every second element of a block table is out of range; offsets and sizes are unchanged."""
    table = torch.zeros(2, 3, dtype=torch.int32)
    assert memory_checks.hostile("block_table", table, 99).tolist() == [[99, 0, 99], [0, 99, 0]]
    assert table.eq(0).all()
    assert memory_checks.hostile("query_start_loc", table, 99) is table
    assert memory_checks.hostile("max_query_len", 3, 99) == 3


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "error: needs a CUDA device, and torch sees none\n"),
        (["--peers", "nowhere"], "error: --peers: expected a folder with peers.py, got nowhere\n"),
    ],
)
def test_suite_errors(argv, message, no_gpu, capsys):
    assert gpu_suite.main(argv) == 2
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("stage", ["benchmarks", "steps"])
def test_benchmark_stages(stage, monkeypatch, tmp_path, capsys):
    """Run a stage of benchmarks -> each benchmark knows its options, and its report is in the results."""
    commands = []

    def recorded(command, limit):
        commands.append(command)
        Path(command[command.index("--json") + 1]).write_text('{"rows": [1], "date": "today"}')
        return len(commands) == 2, "said"  # the second benchmark fails

    monkeypatch.setattr(gpu_suite, "run", recorded)
    found = gpu_suite.STAGES[stage](SimpleNamespace(peers=tmp_path, limit=9.0))
    assert not found.pop("ok") and set(map(str, found.values())) == {"{'rows': [1]}"}
    for name, (_, _, module, *options) in zip(found, commands, strict=True):
        assert module == f"tests.benchmarks.{name}"
        capsys.readouterr()
        with pytest.raises(SystemExit):
            importlib.import_module(module).main(["--help"])
        known = capsys.readouterr().out
        assert all(option in known for option in options if option.startswith("--"))
        assert ("--peers" in options) == (name in gpu_suite.BESIDE_PEERS)


def test_suite_writes_what_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(gpu_suite, "provenance", lambda *_, **__: {"hardware": "NVIDIA H200"})
    stages = {"tests": lambda args: {"ok": True, "passed": 3}, "opcheck": lambda args: {"ok": False}}
    monkeypatch.setattr(gpu_suite, "STAGES", stages)
    assert gpu_suite.main(["--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "h200.json").read_text())
    assert found["tests"]["passed"] == 3 and set(found["seconds"]) == set(stages)
    assert "FAILED: opcheck" in capsys.readouterr().out
