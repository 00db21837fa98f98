"""Call every op with inputs that are made here with torch alone, in this tree or in an earlier one, and record digests.

    cp tests/recorded_calls.py ../earlier/tests/
    (cd ../earlier && python -m tests.recorded_calls earlier.json --device cuda)
    python -m tests.recorded_bits compare ../earlier/earlier.json --device cuda

The sample arguments in `tests/twins/test_ops.py` change with the ops, and so do the digests that
`tests.recorded_bits` computes from them. The arguments in this module stay the same. This module imports nothing but
torch and the module `tests.recorded_bits` of its tree, so a copy of this one file runs in an earlier tree. A record
that was made there also has the cases of `decodes`, `planners` and `layers` of the earlier `tests.recorded_bits`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Case = tuple[str, Callable[[], Any]]
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
EARLIER_NAMES = {"merge_packed_attn_states": "combine_attn_states", "weight_attn_out": "share_attn_out"}
# arguments that an earlier or a later tree does not have
OPTIONAL = {
    "batch_invariant", "cache_format", "fixed_overhead", "fp8_mode", "kv_scale", "num_heads", "out_dtype", "ownership",
    "prepared", "q_scale", "request_cost", "split_cost", "split_rule", "splits_per_tile", "total_seq_lens", "width",
}  # fmt: skip
WRITTEN = {  # op: arguments that the op writes
    "concat_and_cache_mla": ("kv_cache",), "copy_blocks": ("kv_caches",), "gather_cache_out": ("out",),
    "reorg_kvcache": ("out",), "rope_norm_and_cache": ("kv_cache",), "swap_blocks": ("target",),
}  # fmt: skip
STORED = {"cache_format": "compute_dtype", "kv_scale": None}
HEADS = (3, 16, 32, 64, 128)
TILE = 64  # keys of a tile in a decode schedule
LENGTHS = {  # batch: query lengths and sequence lengths
    "one": ([1], [2950]),
    "equal": ([1] * 8, [1024] * 8),
    "mixed": ([1, 2, 0, 3, 1], [700, 33, 0, 190, 5000]),
}


def call(name: str, arguments: dict[str, Any]) -> Any:
    """Call an op with the arguments that the op has in this tree; an op of an earlier tree may have its earlier name.

    Raises:
        TypeError: the op does not have one of the arguments, and the argument is not in `OPTIONAL`.
    """
    ops = torch.ops.mla_twins
    op = (getattr(ops, name, None) or getattr(ops, EARLIER_NAMES[name])).default
    names = [argument.name for argument in op._schema.arguments]
    if unknown := arguments.keys() - set(names) - OPTIONAL:
        raise TypeError(f"{name}: expected arguments out of {names}, got {sorted(unknown)}")
    return op(**{key: value for key, value in arguments.items() if key in names})


def offsets(lengths: Iterable[int]) -> Tensor:
    """Return the prefix sums of the lengths as int32; the first sum is 0."""
    return torch.nn.functional.pad(torch.tensor(list(lengths)).cumsum(0), (1, 0)).int()


def paged(seq_lens: list[int], block_size: int) -> tuple[Tensor, int]:
    """Return a block table with blocks in random order, [B, W], and the number of blocks."""
    counts = [-(-length // block_size) for length in seq_lens]
    free, table = torch.randperm(sum(counts) + 1).int(), torch.zeros(len(counts), max([1, *counts]), dtype=torch.int32)
    for request, count in enumerate(counts):
        table[request, :count], free = free[:count], free[count:]
    return table, sum(counts) + 1


def balanced_schedule(seq_lens: list[int], num_programs: int, request_cost: int) -> dict[str, Tensor]:
    """Return `tile_ranges` and `split_offsets` of a schedule with equal segments for the programs.

    All tiles of all requests are placed one after another on a line; each request begins with `request_cost` empty
    units. Each program gets the tiles of one segment. `fast.plan_decode` may choose another schedule.
    """
    line: list[tuple[int, int] | None] = []
    for request, length in enumerate(seq_lens):
        tiles = [(request, tile) for tile in range(-(-length // TILE))]
        line += [None] * (request_cost if tiles else 0) + tiles
    size = max(1, -(-len(line) // num_programs))
    ranges, splits = [], [0] * len(seq_lens)
    for program in range(num_programs):
        own = [unit for unit in line[program * size : (program + 1) * size] if unit]
        if not own:
            ranges.append([len(seq_lens), len(seq_lens) - 1, 0, 0, 0])
            continue
        ranges.append([own[0][0], own[-1][0], own[0][1], own[-1][1] + 1, splits[own[0][0]]])
        for request in {request for request, _ in own}:
            splits[request] += 1
    return {"tile_ranges": torch.tensor(ranges, dtype=torch.int32), "split_offsets": offsets(splits)}


def outcome(name: str, device: torch.device, make: Callable[[], dict[str, Any]]) -> Any:
    """Return the result of an op and the tensors that it wrote; `make` returns the arguments on the CPU."""
    arguments = {key: moved(value, device) for key, value in make().items()}
    result = call(name, arguments)
    return result, [arguments[key] for key in WRITTEN.get(name, ())]


def moved(value: Any, device: torch.device) -> Any:
    """Return a tensor, or a list of tensors, on the device; return any other value unchanged."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [moved(item, device) for item in value]
    return value


def small_ops(device: torch.device) -> Iterator[Case]:
    """Yield cases of every op except decodes."""
    backend = "triton" if device.type == "cuda" else "cpu"
    for dtype in (F32, BF16) if device.type == "cuda" else (F32, F64):
        for name, label, make in arguments_of_ops(dtype, backend):
            yield f"call {name} {dtype} | {label}", partial(outcome, name, device, make)
        # a message has padding bytes that no kernel writes, so the case returns only the merged state
        yield f"call merge_packed_attn_states {dtype} |", partial(packed_and_merged, device, dtype, backend)
    for heads, programs, requests in ((3, 1, 5), (16, 7, 64), (128, 132, 300)):
        for invariant in (True, False):
            make = partial(planned, heads, programs, requests, invariant, backend)
            yield (
                f"call plan_decode | {heads} {programs} {requests} {invariant}",
                partial(outcome, "plan_decode", device, make),
            )


def arguments_of_ops(dtype: torch.dtype, backend: str) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """Yield (op, label, function that makes the arguments) for every op except decodes and plans."""
    lse = F64 if dtype == F64 else F32

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    def rope(interleaved: bool) -> dict[str, Any]:
        return {"positions": torch.randint(0, 4000, (37,)), "q_pe": rand(37, 3, 64), "k_pe": rand(37, 64),
                "frequencies": torch.rand(32, dtype=lse), "magnitude": 1.3, "interleaved": interleaved,
                "q_scale": None, "backend": backend}  # fmt: skip

    def written() -> dict[str, Any]:
        slots = torch.randperm(8 * 16)[:37]
        slots[5] = -1
        return {"kv_cache": rand(8, 16, 576), "slot_mapping": slots, "backend": backend, **STORED}

    def read() -> dict[str, Any]:
        table, blocks = paged([70, 33, 0], 16)
        return {"kv_cache": rand(blocks, 16, 576), "block_table": table, "cu_seq_lens": offsets([54, 17, 0]),
                "starts": torch.tensor([16, 16, 0]).int(), "backend": backend, **STORED}  # fmt: skip

    def attention(parts: bool, causal: bool) -> dict[str, Any]:
        keys = {"k": rand(203, 3, 128), "k_pe": rand(203, 64)} if parts else {"k": rand(203, 3, 192), "k_pe": None}
        return {"q": rand(103, 3, 192), **keys, "v": rand(203, 3, 128), "cu_seqlens_q": offsets([70, 0, 33]),
                "cu_seqlens_k": offsets([130, 3, 70]), "max_seqlen_q": 70, "max_seqlen_k": 130, "softmax_scale": 0.11,
                "causal": causal, "batch_invariant": False, "out_dtype": dtype, "backend": backend}  # fmt: skip

    def state(tokens: int, heads: int, value: int) -> list[Tensor]:
        return [rand(tokens, heads, value), torch.randn(heads, tokens, dtype=lse)]

    def merged() -> dict[str, Any]:
        names = ("prefix_out", "prefix_lse", "suffix_out", "suffix_lse")
        return dict(zip(names, state(67, 3, 128) + state(67, 3, 128), strict=True)) | {"backend": backend}

    for interleaved in (True, False):
        yield "apply_rope", f"{interleaved}", partial(rope, interleaved)
        yield (
            "rope_norm_and_cache",
            f"{interleaved}",
            lambda interleaved=interleaved: {**rope(interleaved), **written(), "kv_c": rand(37, 512),
                                             "norm_weight": rand(512), "eps": 1e-5},
        )  # fmt: skip
    yield "concat_and_cache_mla", "", lambda: {**written(), "kv_c_normed": rand(37, 512), "k_pe": rand(37, 64)}
    yield "gather_cache", "", lambda: {**read(), "num_tokens": 71, "width": 576, "out_dtype": dtype}
    yield "gather_cache_out", "", lambda: {**read(), "out": rand(71, 576)}
    pairs = torch.tensor([[0, 4], [2, 3]])
    yield "copy_blocks", "", lambda: {"kv_caches": [rand(5, 16, 40), rand(5, 16, 40)], "block_mapping": pairs,
                                      "backend": backend}  # fmt: skip
    yield "swap_blocks", "", lambda: {"source": rand(4, 16, 40), "target": rand(5, 16, 40), "block_mapping": pairs,
                                      "backend": backend}  # fmt: skip
    for parts in (True, False):
        for causal in (True, False):
            yield "flash_attn_varlen", f"{parts} {causal}", partial(attention, parts, causal)
    yield "merge_attn_states", "", merged
    yield "pack_attn_state", "", lambda: {**dict(zip(("out", "lse"), state(8, 4, 128), strict=True)), "size": 2,
                                          "backend": backend}  # fmt: skip
    yield "weight_attn_out", "", lambda: {"out": rand(9, 4, 128), "lses": torch.randn(2, 4, 9, dtype=lse), "rank": 1,
                                          "backend": backend}  # fmt: skip
    yield "reorg_kvcache", "", lambda: {"gathered": rand(2, 20, 576), "cu_seq_lens": offsets([20, 0, 17]),
                                        "local_cu_seq_lens": torch.tensor([[0, 10, 10, 19], [0, 10, 10, 18]]).int(),
                                        "interleave": 2, "out": rand(37, 576), "backend": backend}  # fmt: skip


def packed_and_merged(device: torch.device, dtype: torch.dtype, backend: str) -> Any:
    """Pack two attention states into a message, and return the merged state."""
    out, lse = torch.randn(3, 4, 128).to(dtype), torch.randn(4, 3, dtype=F64 if dtype == F64 else F32)
    message = call("pack_attn_state", {"out": out.to(device), "lse": lse.to(device), "size": 2, "backend": backend})
    return call("merge_packed_attn_states", {"message": message, "tokens": 3, "heads": 2, "value": 128,
                                             "dtype": dtype, "backend": backend})  # fmt: skip


def costs_of(heads: int) -> dict[str, Any]:
    """Return the costs of a schedule, as in all trees: the costs that were measured on an H200."""
    rule = [4, 32, 16, 128] if heads <= 16 else [16, 8, 32, 64]
    request_cost, split_cost = (5 if heads <= 32 else 8), (1 if heads <= 16 else 4)
    return {"request_cost": request_cost, "split_cost": split_cost, "splits_per_tile": 64 if heads <= 32 else 10,
            "split_rule": rule}  # fmt: skip


def planned(heads: int, programs: int, requests: int, batch_invariant: bool, backend: str) -> dict[str, Any]:
    """Return the arguments of a schedule; an earlier tree derives the costs from the number of heads."""
    costs = costs_of(heads)
    return {"seq_lens": torch.randint(0, 9000, (requests,), dtype=torch.int32), "num_programs": programs, **costs,
            "num_heads": heads, "fixed_overhead": costs["request_cost"], "batch_invariant": batch_invariant,
            "backend": backend}  # fmt: skip


def decodes(device: torch.device) -> Iterator[Case]:
    """Yield cases of decodes: without a schedule, over a fixed schedule, and batch-invariant without a schedule."""
    choices = [("cpu", F32, (24, 8))]
    if device.type == "cuda":
        wide, narrow = (512, 64), (256, 32)
        choices = [("hopper", BF16, wide), ("triton", BF16, wide), ("triton", F32, narrow)]
    for backend, dtype, widths in choices:
        for heads in HEADS:
            for way in ("plain", "batch-invariant", "scheduled"):
                for label, lengths in LENGTHS.items():
                    make = partial(decode_arguments, lengths, heads, dtype, widths, way, backend)
                    group = f"call mla_decode {backend} {dtype} {widths} {heads} {way}"
                    yield f"{group} | {label}", partial(outcome, "mla_decode", device, make)


def decode_arguments(
    lengths: tuple[list[int], list[int]],
    heads: int,
    dtype: torch.dtype,
    widths: tuple[int, int],
    way: str,
    backend: str,
) -> dict[str, Any]:
    """Return the arguments of a decode over a cache without NaN."""
    (query_lens, seq_lens), (latent, rope) = lengths, widths
    table, blocks = paged(seq_lens, TILE)
    tokens, costs = sum(query_lens), costs_of(heads)
    visible = [s - q + i + 1 for q, s in zip(query_lens, seq_lens, strict=True) for i in range(q)]
    schedule = dict.fromkeys(("tile_ranges", "split_offsets"))
    if way == "scheduled":
        schedule = balanced_schedule(seq_lens, 132, costs["request_cost"])
    return {
        "ql_nope": (torch.randn(tokens, heads, latent) / latent**0.5).to(dtype),
        "q_pe": torch.randn(tokens, heads, rope).to(dtype),
        "kv_cache": torch.randn(blocks, TILE, latent + rope).to(dtype),
        "block_table": table, "seq_lens": torch.tensor(seq_lens).int(), "query_start_loc": offsets(query_lens),
        "visible_lens": torch.tensor(visible).int(), "max_query_len": max(query_lens), "max_seq_len": max(seq_lens),
        "softmax_scale": 0.13, "out_dtype": dtype, **schedule, "batch_invariant": way == "batch-invariant",
        "split_rule": costs["split_rule"], **STORED, "fp8_mode": "converted", "q_scale": None, "prepared": [],
        "total_seq_lens": None, "ownership": [], "backend": backend,
    }  # fmt: skip


def calls(device: torch.device) -> Iterator[Case]:
    """Yield the name and the call of every case of this module; the caller sets the seed of torch before each call."""
    yield from small_ops(device)
    yield from decodes(device)


def shared_cases(device: torch.device) -> Iterator[Case]:
    """Yield the cases whose inputs are the same in an earlier tree: all cases but those of `recorded_bits.ops`."""
    from . import recorded_bits

    yield from calls(device)
    yield from recorded_bits.decodes(device)
    yield from recorded_bits.planners(device)
    yield from recorded_bits.layers(device)


def floats(value: Any) -> list[Tensor]:
    """Return the floating-point tensors of a result on the CPU, in order."""
    if isinstance(value, Tensor):
        return [value.detach().cpu()] if value.is_floating_point() else []
    if hasattr(value, "out") and hasattr(value, "lse"):
        value = (value.out, value.lse)
    return [found for item in value for found in floats(item)] if isinstance(value, list | tuple) else []


def file_of(folder: Path, name: str) -> Path:
    """Return the file in which the outputs of a case are stored."""
    return folder / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.pt"


def digests(
    found: Iterable[Case], digest_of: Callable[[Any], str], only: str, shard: str, outputs: Path | None
) -> dict[str, str]:
    """Run one shard of the cases and return their digests.

    Args:
        found: all cases. If two cases have the same text before "|" in their names, both belong to the same shard.
        digest_of: function that computes the digest of a result.
        only: regular expression; the cases whose names contain no match are left out.
        shard: "1/4" for the first of four shards.
        outputs: folder in which the floating-point tensors of each result are stored; None stores none.
    """
    torch.set_grad_enabled(False)
    number, shards = map(int, shard.split("/"))
    results, groups = {}, {}
    for name, run in found:
        if not re.search(only, name):
            continue
        group = groups.setdefault(name.split("|")[0], len(groups))
        if group % shards == number - 1:
            torch.manual_seed(0)
            result = run()
            results[name] = digest_of(result)
            if outputs is not None:
                torch.save(floats(result), file_of(outputs, name))
    return results


def in_processes(module: str, arguments: list[str], jobs: int) -> dict[str, str]:
    """Compute the digests of all cases of a module in `jobs` processes.

    Raises:
        RuntimeError: a process failed; the message is the end of its stderr.
    """
    command = [sys.executable, "-m", module, *arguments, "--shard"]
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which cases run, and where and in how many processes."""
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="device (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="number of processes (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="REGEX", help="run only the cases whose names contain a match")
    parser.add_argument("--outputs", type=Path, metavar="FOLDER", help="folder for the outputs of the cases")
    parser.add_argument("--shard", help=argparse.SUPPRESS)  # "1/4": print the first of four shards as JSON


def options_of(given: argparse.Namespace) -> list[str]:
    """Return the options of `add_options` as a command line, without `--jobs` and `--shard`."""
    return [
        "--device",
        given.device,
        "--only",
        given.only,
        *(["--outputs", str(given.outputs)] if given.outputs else []),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Record the digests of the cases that this tree shares with other trees."""
    from . import recorded_bits
    from .benchmarks.report import provenance

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="file of the digests")
    add_options(parser)
    given = parser.parse_args(arguments)
    if given.outputs:
        given.outputs.mkdir(parents=True, exist_ok=True)
    if given.shard:
        found = shared_cases(torch.device(given.device))
        print(json.dumps(digests(found, recorded_bits.digest_of, given.only, given.shard, given.outputs)))
        return 0
    found = in_processes("tests.recorded_calls", ["-", *options_of(given)], given.jobs)
    given.file.write_text(
        json.dumps({**provenance("", (), given.device), "digests": found}, indent=1), encoding="utf-8"
    )
    print(f"{len(found)} digests recorded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
