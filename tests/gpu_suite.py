"""Run all checks and benchmarks of a CUDA machine, and write the results file of its GPU.

    python -m tests.gpu_suite
    python -m tests.gpu_suite --peers .peers --out docs/results
    python -m tests.gpu_suite --stages tests opcheck --out build

If the results file was written for the same sources, GPU and package versions, a run with `--stages` replaces only the
results of these stages. Otherwise the run replaces the whole file.

Stages:

- tests: the test suite with compiled kernels. Each file runs in one process; a slow file is divided among several
  processes. The files of `ANY_DEVICE` run twice: with tensors on the CPU and with tensors on the GPU. The option
  `--gpu-files-only` leaves out the files whose tests do the same on every machine. `--files TEXT ...` leaves out all
  files whose paths contain none of the texts; the results file names all files that were left out. With `--part K/N`,
  only the K-th of N parts runs; the results file adds up the parts of the same sources. With several GPUs, each
  process sees one of them, in turn; tests of several GPUs run in the stage between_gpus.
- opcheck: `torch.library.opcheck` of every registered op on the GPU.
- memcheck, racecheck: every registered op under the compute-sanitizer tool that has the name of the stage, with valid
  indices and with indices out of range. Without compute-sanitizer on PATH both stages are skipped.
- main_job: `python -m fast` in float32 for both attention families (MLA and grouped-query attention). It compares the
  tokens of three implementations.
- benchmarks: the benchmarks of the kernels on one GPU.
- steps: the benchmarks of whole steps on one GPU: host time of the ops, plans, steps of 61 layers, decodes in captured
  steps, wide block tables, and warm-up.
- between_gpus: with several GPUs, the tests and the benchmark of context parallelism over NCCL.

A test that needs a missing package is skipped. The results file counts the skipped tests by reason.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fast.mla.choose_path import short_name

from .benchmarks.report import digest, package_version, provenance
from .sanitizers import run_memcheck, run_racecheck
from .support.commands import ROOT, run, share_of

BENCHMARKS = {  # maps the name of a benchmark to its options, without --json
    "decode": (), "prefill": (), "bytes": (), "planning": ("--device", "cuda"),
    "crossover": ("--costs", "fast/assets/costs"),
}  # fmt: skip
ONCE_A_FILE = ("hardware", "gpu", "capability", "multiprocessors", "driver", "processor", "threads", "versions", "date",
             "fast_sha256", "command")  # fmt: skip
STEP_BENCHMARKS = {
    "host": (), "planning": ("--device", "cuda"), "step": (), "decode": ("--ways", "stepped"), "table_width": (),
    "warmup": ("--cache-formats", "compute_dtype"),
}  # fmt: skip
BESIDE_PEERS = ("decode", "prefill", "bytes", "host")
# Test files that make all tensors on the device of the option `--device`.
ANY_DEVICE = (
    "attention/test_rope.py", "cache/test_cache.py", "cache/test_fp8_formats.py", "gqa/test_fast_attention.py",
    "gqa/test_fast_cache.py", "gqa/test_fast_layer.py", "gqa/test_gqa_advance.py", "gqa/test_gqa_builder.py",
    "gqa/test_gqa_cascade_choice.py", "gqa/test_gqa_graphs.py", "gqa/test_gqa_local_attention.py",
    "identities/test_identities.py", "integrations/flash_mla/test_flash_mla.py",
    "integrations/transformers/gqa/test_gqa_generate.py", "integrations/transformers/gqa/test_gqa_models.py",
    "interfaces/test_from_lens.py", "mla/test_block_sizes.py", "mla/test_builder.py", "mla/test_cascade.py",
    "mla/test_fp8_decode_errors.py", "mla/test_fp8_layers.py", "mla/test_head_products.py", "mla/test_weights.py",
    "mla/test_workspaces.py", "mutations/test_mutations.py", "planning/test_advance.py", "planning/test_batch.py",
    "planning/test_schedule.py", "planning/test_schedule_choice.py", "planning/test_visible_lens.py",
    "twins/test_differential.py", "twins/test_ops.py",
)  # fmt: skip
# Maps a slow test file to the number of processes that run its tests.
SHARDS = {"test_hopper_decode.py": 16, "test_hopper_shapes.py": 8, "test_triton_scheduled_decode.py": 4,
          "test_hopper_e4m3_decode.py": 32, "test_hopper_e4m3_modes.py": 4, "test_triton_fp8_decode.py": 4,
          "test_triton_gqa.py": 4,
          "test_hopper_two_phases.py": 3, "test_triton_decode.py": 3, "test_triton_fp8_modes.py": 6,
          "test_triton_conversion.py": 4, "test_hopper_varlen.py": 4, "test_gqa_adapters.py": 4, "test_graphs.py": 2,
          "test_fast_attention.py": 4,
          "test_mixed_graphs.py": 2, "test_process_groups.py": 2, "test_gqa_context_parallel.py": 2,
          "test_compilation.py": 6, "test_hopper_compilation.py": 2, "test_torch_sdpa_gqa.py": 2}  # fmt: skip
# A test file with one of these texts runs compiled kernels, or asks whether there is a GPU.
GPU_TEXTS = ("triton_mode", '"cuda"', "cuda.is_available", "Gluon")


def file_name(gpu: str, count: int = 1) -> str:
    """Return the name of a machine's results file: "h200.json" for one "NVIDIA H200", "h200-x4.json" for four."""
    return f"{short_name(gpu)}.json" if count < 2 else f"{short_name(gpu)}-x{count}.json"


def read_junit(path: Path) -> dict[str, Any]:
    """Read pytest's XML report; return the number of passed tests, the names of failed tests, and skip reasons.

    "skipped" maps each reason to the number of tests that were skipped for this reason.
    """
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    failed, skipped = [], Counter()
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif (skip := case.find("skipped")) is not None:
            reason = skip.get("message", "")  # if a whole file is skipped, pytest gives only "collection skipped"
            skipped[f"{reason}: {case.get('name')}" if reason == "collection skipped" else reason] += 1
    passed = len(cases) - len(failed) - sum(skipped.values())
    return {"passed": passed, "failed": failed, "skipped": dict(skipped)}


def uses_gpu(file: Path) -> bool:
    """Return whether the tests of a file can do something else on a machine with a GPU."""
    text = file.read_text()
    return any(each in text for each in GPU_TEXTS)


def is_chosen(file: Path, texts: Sequence[str]) -> bool:
    """Return whether the path of a test file contains one of the texts of `--files`; without texts, every file does."""
    return not texts or any(text in file.relative_to(ROOT / "tests").as_posix() for text in texts)


def shards_of(file: Path, device: str) -> list[tuple[Path, str, str]]:
    """Return the runs of a test file on a device: the file, the device and "K/N" for each of its shards."""
    count = SHARDS.get(file.name, 1)
    return [(file, device, f"{number}/{count}") for number in range(1, count + 1)]


def run_tests(args: argparse.Namespace) -> dict[str, Any]:
    """Run every test file in a process of its own, and divide each slow file among several processes.

    At most `--jobs` processes run at the same time, slow files first. The tests of the site are left out, because they
    compare the pages with a results file, which this run will replace.
    """
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if file.parent.name not in ("site", "data")]
    left_out_files = [
        file for file in files if (args.gpu_files_only and not uses_gpu(file)) or not is_chosen(file, args.files)
    ]
    files = sorted(
        set(files) - set(left_out_files),
        key=lambda file: ("triton" not in file.name and "hopper" not in file.name, file.name),
    )
    any_device = [ROOT / "tests" / name for name in ANY_DEVICE]
    runs = [run for file in files if file.name in SHARDS for run in shards_of(file, "cpu")]
    runs += [run for file in any_device if is_chosen(file, args.files) for run in shards_of(file, "cuda")]
    runs += [run for file in files if file.name not in SHARDS for run in shards_of(file, "cpu")]
    part, parts = args.part
    runs = runs[part - 1 :: parts]

    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))).split(",")

    def one(number: int, file: Path, device: str, shard: str) -> tuple[str, dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                str(file),
                f"--device={device}",
                f"--shard={shard}",
                f"--junitxml={report}",
            ]
            start = time.perf_counter()
            gpu = gpus[number % len(gpus)]
            status, output = run(command, args.limit, OMP_WAIT_POLICY="PASSIVE", CUDA_VISIBLE_DEVICES=gpu)
            seconds = time.perf_counter() - start
            found = read_junit(report) if report.exists() else {"passed": 0, "failed": [file.name], "skipped": {}}
        if status not in (0, 5) and not found["failed"]:  # 5: no test of the file was selected
            found["failed"] = [f"{file.name}: exit status {status}"]
        if device == "cuda" and not found["passed"] and not found["failed"]:
            found["failed"] = [f"{file.name} --device=cuda: nothing ran"]
        name = f"{file.name} --device={device} --shard={shard}"
        left_out = sum(found["skipped"].values())
        print(
            f"  {name}: {found['passed']} passed, {len(found['failed'])} failed, {left_out} skipped, {seconds:.0f} s",
            flush=True,
        )
        if found["failed"]:
            print(f"-- {name}\n{output}", flush=True)
        return name, found

    with ThreadPoolExecutor(args.jobs) as pool:
        results = dict(pool.map(one, range(len(runs)), *zip(*runs, strict=True)))
    skipped = sum((Counter(found["skipped"]) for found in results.values()), Counter())
    failed = [name for found in results.values() for name in found["failed"]]
    counts = {"passed": sum(found["passed"] for found in results.values()), "failed": failed, "skipped": dict(skipped)}
    print(f"tests: {counts['passed']} passed, {len(failed)} failed, {sum(skipped.values())} skipped")
    for reason, count in skipped.most_common():
        print(f"  skipped {count}: {reason}")
    if left_out_files:
        counts["files_left_out"] = sorted(file.name for file in left_out_files)
        print(f"  {len(left_out_files)} files left out")
    return {"ok": not failed, **counts, **({"parts": [f"{part}/{parts}"]} if parts > 1 else {})}


def sum_of_parts(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any] | None:
    """Add up the results of different parts of the tests; return None if they are not parts of the same division."""
    names = [*first.get("parts", ()), *second.get("parts", ())]
    if not first.get("parts") or not second.get("parts") or len(set(names)) < len(names):
        return None
    if len({name.partition("/")[2] for name in names}) > 1:
        return None
    skipped = Counter(first["skipped"]) + Counter(second["skipped"])
    return {**second, "ok": first["ok"] and second["ok"], "passed": first["passed"] + second["passed"],
            "failed": first["failed"] + second["failed"], "skipped": dict(skipped), "parts": sorted(names)}  # fmt: skip


def run_opcheck(args: argparse.Namespace) -> dict[str, Any]:
    """Check schema, fake implementation and ahead-of-time tracing of every op, on CUDA tensors.

    The ops of MLA are checked in two dtypes, and the ops of grouped-query attention, which have more samples, in one.
    """
    from .twins.test_gqa_ops import samples as gqa_samples
    from .twins.test_ops import check_op, samples

    failed = {}
    with torch.device("cuda"):
        full, half = (samples(dtype) for dtype in (torch.float32, torch.bfloat16))
        checked = {name: full[name] + half[name] for name in full} | gqa_samples(torch.bfloat16)
    for name, many in checked.items():
        try:
            for arguments in many:
                check_op(name, arguments)
        except Exception as error:  # a failed op must not prevent the checks of the other ops
            failed[name] = " ".join(str(error).split())
            print(f"opcheck {name}: {failed[name]}")
    print(f"opcheck: {len(checked) - len(failed)} of {len(checked)} ops")
    return {"ok": not failed, "ops": sorted(checked), "failed": failed}


def run_main_job(args: argparse.Namespace) -> dict[str, Any]:
    """Run `python -m fast` on the GPU for both attention families.

    The job compares ops with `reference`, and the tokens of three implementations.

    Returns:
        The result for MLA, with the result for grouped-query attention under the key "gqa". "ok" is True if both jobs
        passed.
    """
    mla, gqa = _run_family(args), _run_family(args, "--family", "gqa")
    return {**mla, "ok": mla["ok"] and gqa["ok"], "gqa": gqa}


def _run_family(args: argparse.Namespace, *family: str) -> dict[str, Any]:
    """Run `python -m fast` with the options `family`, and return its verdict, its parity table and its speeds."""
    options = [*family, "--device", "cuda", "--dtype", "float32"]
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "fast", *options, "--json", str(figures), "--no-picture"]
        status, output = run(command, args.limit, Path(folder))
        print(output)
        if not figures.exists():
            return {"ok": False, "status": status, "said": output[-2000:]}
        found = json.loads(figures.read_text())
    return {"ok": status == 0, "command": " ".join(["python -m fast", *options]), **{
        key: found[key] for key in ("verdict", "parity", "speed")}}  # fmt: skip


def run_benchmarks(args: argparse.Namespace, benchmarks: Mapping[str, Sequence[str]] = BENCHMARKS) -> dict[str, Any]:
    """Run the benchmarks one after another, so that nothing else runs on the GPU.

    Args:
        args: options of the GPU suite.
        benchmarks: maps the name of a benchmark to its options.
    """
    reports, ok = {}, True
    for name, options in benchmarks.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "report.json"
            command = [sys.executable, "-m", f"tests.benchmarks.{name}", "--json", str(path), *options]
            if args.peers is not None and name in BESIDE_PEERS:
                command += ["--peers", str(args.peers.resolve())]
            status, output = run(command, args.limit)
            print(output, flush=True)
            ok = ok and status == 0
            reports[name] = (
                json.loads(path.read_text()) if path.exists() else {"status": status, "said": output[-2000:]}
            )
        for shared in ONCE_A_FILE:
            reports[name].pop(shared, None)
    return {"ok": ok, **reports}


def run_between_gpus(args: argparse.Namespace) -> dict[str, Any]:
    """Run the tests of context parallelism over NCCL, then the benchmark `context_parallel` on 2, 4, 8, ... GPUs."""
    present = torch.cuda.device_count()
    if present < 2:
        print("between_gpus: skipped, needs two GPUs")
        return {"ok": True, "not_run": "needs two GPUs"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
                   "tests/distributed/test_process_groups.py", "tests/gqa/test_gqa_context_parallel.py", "-k", "nccl",
                   f"--junitxml={path}"]  # fmt: skip
        status, output = run(command, args.limit)
        tests = read_junit(path) if path.exists() else {"passed": 0, "failed": [output[-2000:]], "skipped": {}}
        print(output[-3000:] if status else f"between_gpus: {tests['passed']} passed", flush=True)
        reports, ok = {}, status == 0 and tests["passed"] > 0
        for ranks in (2**power for power in range(1, present.bit_length())):
            path = Path(folder) / f"{ranks}.json"
            benchmark = [sys.executable, "-m", "tests.benchmarks.context_parallel", "--ranks", str(ranks)]
            status, output = run([*benchmark, "--json", str(path)], args.limit)
            print(output, flush=True)
            ok = ok and status == 0
            found = json.loads(path.read_text()) if path.exists() else {"status": status, "said": output[-2000:]}
            reports[f"{ranks} GPUs"] = {key: value for key, value in found.items() if key not in ONCE_A_FILE}
    return {"ok": ok, "tests": tests, **reports}


STAGES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "tests": run_tests,
    "opcheck": run_opcheck,
    "memcheck": run_memcheck,
    "racecheck": run_racecheck,
    "main_job": run_main_job,
    "benchmarks": run_benchmarks,
    "steps": partial(run_benchmarks, benchmarks=STEP_BENCHMARKS),
    "between_gpus": run_between_gpus,
}


def with_earlier_stages(report: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """Return `report` with the stages that only `earlier` has, if both have the same sources, GPU and versions."""
    if any(earlier.get(key) != report.get(key) for key in ("fast_sha256", "tests_sha256", "hardware", "versions")):
        return report
    kept = {stage: earlier[stage] for stage in STAGES if stage in earlier and stage not in report}
    if "tests" in report and (whole := sum_of_parts(earlier.get("tests", {}), report["tests"])):
        kept["tests"] = whole
        report["seconds"]["tests"] = round(report["seconds"]["tests"] + earlier["seconds"]["tests"], 1)
    command = " && ".join(dict.fromkeys([earlier["command"], report["command"]] if kept else [report["command"]]))
    return {**report, **kept, "command": command, "seconds": {**earlier["seconds"], **report["seconds"]}}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu_suite",
        description=__doc__.splitlines()[0],
        epilog="Exit status: 0 if all stages passed, 1 if one failed, 2 without a CUDA device or with a wrong --peers.",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", metavar="DIR",
                        help="folder of the file <gpu>.json (default: docs/results)")  # fmt: skip
    usual = tuple(stage for stage in STAGES if stage != "steps")  # the stage steps repeats parts of benchmarks
    parser.add_argument("--stages", nargs="+", choices=tuple(STAGES), default=usual,
                        help="stages to run (default: all but steps)")  # fmt: skip
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder with peers.py, for the benchmarks")
    parser.add_argument("--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)), metavar="N",
                        help="number of test files that run at a time (default: %(default)s)")  # fmt: skip
    parser.add_argument("--part", type=share_of, default=(1, 1), metavar="K/N",
                        help="run only the K-th of N parts of the stage tests (default: 1/1)")  # fmt: skip
    parser.add_argument("--gpu-files-only", action="store_true",
                        help="leave out the test files whose tests do the same without a GPU")  # fmt: skip
    parser.add_argument("--files", nargs="+", default=(), metavar="TEXT",
                        help="run only the test files whose paths below tests/ contain one of the texts")  # fmt: skip
    parser.add_argument("--limit", type=float, default=1800.0, metavar="S",
                        help="time limit of one command in seconds (default: %(default)s)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages, write the results file and return the exit status."""
    args = make_parser().parse_args(argv)
    if args.peers is not None and not (args.peers / "peers.py").is_file():
        print(f"error: --peers: expected a folder with peers.py, got {args.peers}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("error: needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    given = sys.argv[1:] if argv is None else list(argv)
    head = provenance("", [], device="cuda", transformers=package_version("transformers"))
    report: dict[str, Any] = {
        **head,
        "tests_sha256": digest(ROOT / "reference", ROOT / "tests"),
        "command": " ".join(["python -m tests.gpu_suite", *given]),
        "seconds": {},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / file_name(torch.cuda.get_device_name(), torch.cuda.device_count())
    earlier = json.loads(path.read_text()) if path.exists() else {}
    for stage in args.stages:
        start = time.perf_counter()
        print(f"== {stage}", flush=True)
        report[stage] = STAGES[stage](args)
        report["seconds"][stage] = round(time.perf_counter() - start, 1)
        # write the file after every stage, so that a run that is stopped keeps the results of its finished stages
        path.write_text(json.dumps(with_earlier_stages(report, earlier) if earlier else report, indent=1) + "\n")
    report = with_earlier_stages(report, earlier) if earlier else report
    failed = [stage for stage in STAGES if not report.get(stage, {"ok": True})["ok"]]
    left_out = [stage for stage in STAGES if stage not in report or "not_run" in report[stage]]
    print(f"results: {path}\n" + (f"FAILED: {', '.join(failed)}" if failed else "all stages that ran passed"))
    if left_out:
        print(f"not run: {', '.join(left_out)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
