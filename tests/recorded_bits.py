"""Record digests of the results of every op, planner and layer, to show that a refactoring changes no bit.

    python -m tests.recorded_bits record before.json --device cuda
    python -m tests.recorded_bits compare before.json --device cuda

Record and compare on the same CPU or GPU model, because bits depend on the hardware. `compare` exits with 1 if a digest
differs or a case is missing.

A case is a named call with inputs from a fixed seed. `--jobs` sets the number of processes that run the cases. If two
cases have the same text before "|" in their names, the cases use the same compiled kernels, and one process runs them.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import itertools
import json
import subprocess
import sys
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


def digest_of(value: Any) -> str:
    """Return the first 16 hex digits of the sha256 of all tensors and numbers in a result, NaN payloads included.

    Four kinds of fields are left out, because the results of earlier commits do not have them: `InvariantSplitRule`,
    `GraphSupport`, `parts` and `workspace`. If such a field has a wrong value, the digests of the outputs differ.
    """
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            found.update(f"{list(value.shape)} {value.dtype}".encode())
            found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value) if field.name not in ("parts", "workspace")]
            held = [getattr(value, name) for name in names]
            add([x for x in held if not isinstance(x, InvariantSplitRule | GraphSupport)])
        elif isinstance(value, list | tuple):
            found.update(f"{len(value)} of".encode())
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    add(value)
    return found.hexdigest()[:16]


def cases(device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the name and the call of every case; the caller sets the same seed of torch before each call."""
    yield from ops(device)
    yield from decodes(device)
    yield from planners(device)
    yield from layers(device)


def ops(device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield cases of every registered op on the sample arguments of `tests/twins/test_ops.py`.

    A case returns the result and the arguments, because some ops write to their arguments. A case of
    `merge_packed_attn_states` returns only the result, because the padding bytes in its arguments are uninitialised.
    """
    from .twins import test_ops

    def outcome(op: Callable, arguments: tuple) -> Any:
        # lists of ints are left out
        kept = [x for x in arguments if not (isinstance(x, list) and isinstance(x[0], int))]
        return op(*arguments), [] if "merge_packed_attn_states" in str(op) else kept

    for dtype in (F32, BF16) if device.type == "cuda" else (F32, torch.float64):
        torch.manual_seed(1)
        with device:
            found = test_ops.samples(dtype)
        for name, many in found.items():
            many = copy.deepcopy(many)  # some samples share a cache tensor, and some ops write to the cache
            for index, arguments in enumerate(many):
                yield f"{name} {dtype} {index}", partial(outcome, test_ops.overload(name), arguments)


def decodes(device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
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


def planners(device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
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


def layers(device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
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


def digests(device: torch.device, shard: int, shards: int) -> dict[str, str]:
    """Divide the cases into `shards` shards, and return the digests of shard number `shard`, counted from 1."""
    torch.set_grad_enabled(False)
    found, groups = {}, {}
    for name, call in cases(device):
        group = groups.setdefault(name.split("|")[0], len(groups))
        if group % shards == shard - 1:
            torch.manual_seed(0)
            found[name] = digest_of(call())
    return found


def in_processes(device: str, jobs: int) -> dict[str, str]:
    """Compute the digests of all cases in `jobs` processes.

    Raises:
        RuntimeError: a process failed; the message is the end of its stderr.
    """
    command = [sys.executable, "-m", "tests.recorded_bits", "record", "-", "--device", device, "--shard"]
    started = [
        subprocess.Popen([*command, f"{shard}/{jobs}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for shard in range(1, jobs + 1)
    ]
    found: dict[str, str] = {}
    for process in started:
        output, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(errors[-2000:])
        found |= json.loads(output.splitlines()[-1])
    return found


def main(arguments: list[str] | None = None) -> int:
    """Record the digests, or compare them with a recorded file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("record", "compare"), help="write the file, or compare with it")
    parser.add_argument("file", type=Path, help="file of the digests")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="device (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="number of processes (default: %(default)s)")
    parser.add_argument("--shard", help=argparse.SUPPRESS)  # "1/4": print the first of four shards as JSON
    given = parser.parse_args(arguments)
    if given.shard:
        print(json.dumps(digests(torch.device(given.device), *map(int, given.shard.split("/")))))
        return 0
    found = in_processes(given.device, given.jobs)
    if given.verb == "record":
        given.file.write_text(
            json.dumps({**provenance("", (), given.device), "digests": found}, indent=1), encoding="utf-8"
        )
        print(f"{len(found)} digests recorded")
        return 0
    wanted = json.loads(given.file.read_text(encoding="utf-8"))["digests"]
    wrong = [name for name in wanted if found.get(name) != wanted[name]]
    print("\n".join(f"{'differs' if name in found else 'missing'}: {name}" for name in wrong))
    print(
        f"{len(wanted) - len(wrong)} of {len(wanted)} digests are the same; {len(found.keys() - wanted.keys())} are new"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
