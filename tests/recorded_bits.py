"""Record digests of the results of every op, planner and layer, to show that a refactoring changes no bit.

    python -m tests.recorded_bits record before.json --device cuda
    python -m tests.recorded_bits compare before.json --device cuda

Record and compare on the same CPU or GPU model, because bits depend on the hardware. `compare` exits with 1 if a digest
differs or a case is missing, unless `tests/recorded_changes.py` says which commit changed the case on purpose. With
`--json FILE`, `compare` writes a results file with all digests. After a change of `tests/recorded_changes.py`,
`explain FILE` writes the reasons into this file again.

A case is a named call with inputs from a fixed seed. `--only` selects cases by name, and `--jobs` sets the number of
processes that run the cases. If two cases have the same text before "|" in their names, the cases use the same compiled
kernels, and one process runs them. To record in a tree of 2026-11-23 or later that lacks the cases of today, copy
`tests/recorded_calls.py` there and run it.

With `--outputs FOLDER`, `record` also stores the outputs of the cases in this folder, and `compare` computes the
largest relative difference between today's outputs and the stored outputs.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import itertools
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fast
import reference
from fast.kernels.schedule_costs import measured_schedule_costs
from reference.interfaces import DecodeSchedule, GraphSupport, InvariantSplitRule, MLAConfig

from .benchmarks.report import provenance
from .recorded_calls import Case, add_options, calls, digests, file_of, in_processes, options_of
from .recorded_changes import BEFORE, CHANGES
from .support.decode_inputs import make_inputs, on_device
from .support.factories import CONFIGS, make_batch, make_weights, moved
from .support.ranks import STEPS, Steps, everything, serve

BF16, FP16, F32 = torch.bfloat16, torch.float16, torch.float32
HEADS = (3, 16, 32, 64, 126, 128)
PROGRAMS = (0, 5, 132)  # numbers of programs in the schedule of a decode; 0: the decode has no schedule
LENGTHS = {  # batch: query lengths and sequence lengths
    "one": ([1], [2950]),
    "equal": ([1] * 8, [1024] * 8),
    "mixed": ([1, 2, 0, 3, 1], [700, 33, 0, 190, 5000]),
    "ragged": ([1] * 24, [17 * 2 ** (request % 9) for request in range(24)]),
}
LATER_FIELDS = {  # class: fields that the class did not have on 2026-11-23
    "CommonAttentionMetadata": {"seq_lens_cpu_upper_bound"},
    "ContextChunk": {"bounded", "run", "run_query_start_loc"},
    "DecodeMetadata": {"graph", "mask", "backend", "prepared", "total_seq_lens", "ownership"},
    "MLAMetadata": {"workspace", "cache_format", "fp8_mode", "captured"},
    "PrefillMetadata": {"parts", "backend", "batch_invariant"},
}


def digest_of(value: Any) -> str:
    """Return the first 16 hex digits of the sha256 of all tensors and numbers in a result, NaN payloads included.

    `LATER_FIELDS` and the fields that hold an `InvariantSplitRule` or a `GraphSupport` are left out, because the
    results of earlier commits do not have them. If such a field has a wrong value, the digests of the outputs differ.
    """
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            found.update(f"{list(value.shape)} {value.dtype}".encode())
            found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            later = set().union(*(LATER_FIELDS.get(parent.__name__, ()) for parent in type(value).__mro__))
            held = [getattr(value, field.name) for field in dataclasses.fields(value) if field.name not in later]
            add([x for x in held if not isinstance(x, InvariantSplitRule | GraphSupport)])
        elif isinstance(value, list | tuple):
            found.update(f"{len(value)} of".encode())
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    add(value)
    return found.hexdigest()[:16]


def cases(device: torch.device) -> Iterator[Case]:
    """Yield the name and the call of every case; the caller sets the same seed of torch before each call."""
    yield from ops(device)
    yield from calls(device)
    yield from decodes(device)
    yield from planners(device)
    yield from layers(device)


def ops(device: torch.device) -> Iterator[Case]:
    """Yield cases of every registered op on the sample arguments of `tests/twins/test_ops.py`.

    A case returns the result and the arguments, because some ops write to their arguments. A case of
    `merge_packed_attn_states` returns only the result, because the padding bytes in its arguments are uninitialised.
    """
    from .twins import test_ops

    def outcome(op: Callable, arguments: tuple) -> Any:
        # lists without tensors are left out
        kept = [x for x in arguments if not isinstance(x, list) or (x and isinstance(x[0], Tensor))]
        return op(*arguments), [] if "merge_packed_attn_states" in str(op) else kept

    for dtype in (F32, BF16) if device.type == "cuda" else (F32, torch.float64):
        torch.manual_seed(1)
        with device:
            found = test_ops.samples(dtype)
        for name, many in found.items():
            many = copy.deepcopy(many)  # some samples share a cache tensor, and some ops write to the cache
            for index, arguments in enumerate(many):
                yield f"{name} {dtype} {index}", partial(outcome, test_ops.overload(name), arguments)


def decodes(device: torch.device) -> Iterator[Case]:
    """Yield cases of `mla_decode` for every batch of `LENGTHS`, with and without a schedule and batch invariance."""
    dtypes, widths, backends = (F32,), ((24, 8),), (None,)
    if device.type == "cuda":
        dtypes, widths, backends = (BF16, FP16), ((512, 64), (256, 32), (512, 0)), (None, "triton")
    grid = itertools.product(HEADS, dtypes, widths, (False, True), backends, PROGRAMS, LENGTHS.items())
    for heads, dtype, width, batch_invariant, backend, programs, (label, lengths) in grid:
        is_usual = (width, dtype, backend) == (widths[0], dtypes[0], None)
        if not is_usual and (heads not in (16, 64) or (dtype == FP16) + (width != widths[0]) + bool(backend) > 1):
            continue

        def decode(lengths=lengths, heads=heads, dtype=dtype, width=width, programs=programs,
                   batch_invariant=batch_invariant, backend=backend) -> Any:  # fmt: skip
            ql, q_pe, cache, plan = make_inputs(*lengths, heads, dtype, width)
            if device.type == "cuda":
                plan = on_device(plan)
            schedule, costs = None, measured_schedule_costs(heads)
            if programs:
                schedule = fast.plan_decode(plan.seq_lens, programs, costs, batch_invariant)
            elif batch_invariant:
                schedule = DecodeSchedule(batch_invariant=True, split_rule=costs.split_rule)
            tensors = (x.to(device) for x in (ql, q_pe, cache))
            return fast.mla_decode(*tensors, plan, 0.13, schedule, backend=backend), schedule

        group = f"mla_decode {heads} {dtype} {width} {batch_invariant} {backend} {programs > 0}"
        yield f"{group} | {programs} {label}", decode


def planners(device: torch.device) -> Iterator[Case]:
    """Yield cases in which `fast` or `reference` plans a decode schedule (`plan_decode`) or a step."""
    drawn = torch.Generator().manual_seed(3)
    for package in (fast, reference):
        for heads, programs, requests in itertools.product(HEADS, (1, 7, 132), (1, 5, 64, 300)):
            lens = torch.randint(0, 9000, (requests,), generator=drawn, dtype=torch.int32)
            for invariant in (False, True):
                plan = partial(package.plan_decode, lens, programs, measured_schedule_costs(heads), invariant)
                yield f"{package.__name__}.plan_decode {heads} {programs} {requests} {invariant}", plan
        for label, (query_lens, seq_lens) in LENGTHS.items():
            for config in (None, CONFIGS["low-rank"], MLAConfig.from_preset("deepseek-v3")):

                def plan(package=package, query_lens=query_lens, seq_lens=seq_lens, config=config) -> Any:
                    common = make_batch(query_lens, seq_lens).common
                    costs = measured_schedule_costs(config.num_heads) if config else None
                    return package.build_mla_metadata(
                        common, 16, 512, config=config, num_programs=config and 7, schedule_costs=costs
                    )

                yield f"{package.__name__}.build_mla_metadata {label} {config and config.hidden_size}", plan


def layers(device: torch.device) -> Iterator[Case]:
    """Yield cases in which a layer runs steps with decodes and long prefills, on one rank and on several ranks."""
    large = dict(hidden_size=256, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                 v_head_dim=128)  # fmt: skip
    configs = CONFIGS | {f"{heads} heads": MLAConfig(num_heads=heads, **large) for heads in (16, 64)}
    packages = (fast, reference) if device.type == "cpu" else (fast,)
    for package, (name, config) in itertools.product(packages, configs.items()):
        dtype = BF16 if device.type == "cuda" and config.kv_lora_rank == 512 else F32
        yield (f"{package.__name__} layer {name}",
               partial(serve, package, config, Steps(STEPS, 16, 64, 2), dtype, device=device.type))  # fmt: skip
    for size in (1, 2, 3):

        def over_ranks(size=size) -> Any:
            both = {"fast": fast} | ({"reference": reference} if device.type == "cpu" else {})
            each = fast.simulate(size, 2, lambda ranks: everything(ranks, both, F32, device.type), 6)
            return [sorted(found.items()) for found in each]

        yield f"{size} ranks", over_ranks
    for programs, batch_invariant in itertools.product((0, 3), (False, True)):
        yield f"graph {programs} {batch_invariant}", partial(replayed, device, programs, batch_invariant)


def replayed(device: torch.device, programs: int, batch_invariant: bool) -> Any:
    """Replay a decode graph for requests with two query tokens; return the outputs and caches of all replays."""
    from .planning.test_graphs import make_graph, steps

    config, found = CONFIGS["low-rank"], []
    with torch.device("cpu"):
        weights = make_weights(config, F32)
    options = {"num_programs": programs, "batch_invariant": batch_invariant}
    _, held, graph = make_graph(fast, config, weights, F32, device, 2, **options)
    for batch, cache, hidden, positions in steps(config, F32, 2):
        held.copy_(cache)
        found += [graph.run(hidden.to(device), positions.to(device), moved(batch.common, device)).clone(), held.clone()]
    return found


def largest_relative_difference(earlier: list[Tensor], later: list[Tensor]) -> float | None:
    """Return the largest |difference| divided by the largest |earlier value|, over all outputs of a case.

    None means that the outputs cannot be compared: there is none, or their shapes or their NaN and infinities differ.
    """
    if not earlier or [x.shape for x in earlier] != [x.shape for x in later]:
        return None
    found = 0.0
    for x, y in zip(earlier, later, strict=True):
        finite = x.isfinite()
        if not torch.equal(finite, y.isfinite()):
            return None
        x, y = x[finite].double(), y[finite].double()
        if x.numel() and x.abs().max() > 0:
            found = max(found, float((x - y).abs().max() / x.abs().max()))
    return found


def report_of(
    recorded: dict[str, Any], found: dict[str, str], differences: dict[str, float | None], device: str, command: str
) -> dict[str, Any]:
    """Return the contents of a results file: the digests of both trees, and the reason for each change.

    Args:
        recorded: contents of the record of the earlier tree.
        found: today's digests.
        differences: largest relative differences of the outputs of the cases that differ, if known.
        device: device of the cases.
        command: command line of this comparison.
    """
    wanted = recorded["digests"]
    changed = {
        name: {"before": wanted[name], "after": found.get(name),
               "largest_relative_difference": differences.get(name)}
        for name in wanted if found.get(name) != wanted[name]
    }  # fmt: skip
    return with_reasons({
        **provenance("", (), device), "command": command,
        "before": {"commit": BEFORE} | {key: recorded[key] for key in ("hardware", "versions", "date", "fast_sha256")},
        "cases": len(wanted), "same": len(wanted) - len(changed),
        "digests": {name: wanted[name] for name in wanted if name not in changed}, "changed": changed,
    })  # fmt: skip


def with_reasons(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report with the reasons of `CHANGES`: fields "changes" and "unexplained", and a commit for each case."""
    device, names = "cuda" if "gpu" in report else "cpu", {}
    changed = {name: {**entry, "commit": None} for name, entry in report["changed"].items()}
    for name, entry in changed.items():
        if change := next((change for change in CHANGES if change.holds(name, device)), None):
            entry["commit"] = change.commit
            names.setdefault(change, []).append(name)
    changes = [
        {"commit": change.commit, "reason": change.reason, "cases": len(names[change]),
         "largest_relative_difference": max((value for name in names[change] if (
             value := changed[name]["largest_relative_difference"]) is not None), default=None)}
        for change in CHANGES if change in names
    ]  # fmt: skip
    unexplained = sorted(name for name, entry in changed.items() if entry["commit"] is None)
    rest = {key: report[key] for key in report if key not in ("changes", "unexplained", "digests", "changed")}
    return {**rest, "changes": changes, "unexplained": unexplained, "digests": report["digests"], "changed": changed}


def explain(path: Path) -> int:
    """Write the reasons of `CHANGES` into a file of `compare --json`; return 1 if a reason is missing."""
    report = with_reasons(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n".join(f"no reason: {name}" for name in report["unexplained"]))
    return int(bool(report["unexplained"]))


def compare(given: argparse.Namespace) -> int:
    """Compare today's digests with a recorded file; return 1 if a case changed that was not meant to change."""
    recorded = json.loads(given.file.read_text(encoding="utf-8"))
    recorded["digests"] = {name: x for name, x in recorded["digests"].items() if re.search(given.only, name)}
    differences: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        here = argparse.Namespace(device=given.device, only=given.only, outputs=Path(folder) if given.outputs else None)
        found = in_processes("tests.recorded_bits", ["record", "-", *options_of(here)], given.jobs)
        for name, digest in recorded["digests"].items():
            if given.outputs and name in found and found[name] != digest:
                both = (torch.load(file_of(path, name)) for path in (given.outputs, here.outputs))
                differences[name] = largest_relative_difference(*both)
    command = shlex.join(["python", "-m", "tests.recorded_bits", *given.arguments])
    report = report_of(recorded, found, differences, given.device, command)
    for name, entry in report["changed"].items():
        kind = "missing" if name not in found else "differs"
        print(f"{kind}{' on purpose' * (entry['commit'] is not None)}: {name}, largest relative difference "
              f"{entry['largest_relative_difference']}, commit {entry['commit']}")  # fmt: skip
    print(f"{report['same']} of {report['cases']} digests are the same; {len(report['unexplained'])} changes have no "
          f"reason; {len(found.keys() - recorded['digests'].keys())} cases are new")  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(bool(report["unexplained"]))


def main(arguments: list[str] | None = None) -> int:
    """Record the digests, or compare them with a recorded file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("record", "compare", "explain"), help="write the file, compare with it, or "
                        "write the reasons of tests/recorded_changes.py into a file of `compare --json`")  # fmt: skip
    parser.add_argument("file", type=Path, help="file of the digests")
    add_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="results file that `compare` writes")
    given = parser.parse_args(arguments)
    given.arguments = sys.argv[1:] if arguments is None else arguments
    if given.verb == "compare":
        return compare(given)
    if given.verb == "explain":
        return explain(given.file)
    if given.outputs:
        given.outputs.mkdir(parents=True, exist_ok=True)
    if given.shard:
        found = digests(cases(torch.device(given.device)), digest_of, given.only, given.shard, given.outputs)
        print(json.dumps(found))
        return 0
    found = in_processes("tests.recorded_bits", ["record", "-", *options_of(given)], given.jobs)
    given.file.write_text(
        json.dumps({**provenance("", (), given.device), "digests": found}, indent=1), encoding="utf-8"
    )
    print(f"{len(found)} digests recorded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
