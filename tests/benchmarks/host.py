"""Time the work of the host (the CPU) in an eager call of each op, with dims of DeepSeek-V3: fast and its peers.

    python -m tests.benchmarks.host
    python -m tests.benchmarks.host --peers .peers --json host.json
    python -m tests.benchmarks.host --profile mla_decode

The peers are kernels of other projects. A time is the wall time of one Python call. The GPU is idle when the call
starts, and the call does not wait for the GPU. So a time contains only the CPU's work: check the arguments, allocate
the outputs, launch the kernels. The calls of one op follow each other directly, so that the CPU's caches are as warm
as in a step of many layers.

`--profile` prints in which functions the calls of one op spend their time. The profiler makes every call slower, so do
not compare times of a profile with times of the table.

With `--device cpu` the dimensions are small, and a time also contains the computation of the op on the CPU. Such times
only show that the benchmark runs.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.table import Table

import fast
from fast.mla.cache_write import rope_norm_and_cache
from reference.interfaces import AttentionState, DecodeSchedule, MLAConfig

from . import command_line
from .command_line import (
    CannotRun,
    check_at_least_one,
    check_device,
    check_peers,
    one_line,
    wide_console,
    write_report,
)
from .contest import OURS, load_peers
from .layers import (
    BLOCK_SIZE,
    Batch,
    config_for,
    dtype_for,
    host_threads,
    make_batch,
    make_layer,
    num_blocks,
    positions_of,
)
from .report import provenance
from .timing import Call, Spread, wall_times

CALLS, WARM_UP, WARM_UP_S = 200, 20, 1.0
TARGETS_US = {  # op: longest acceptable median in microseconds on the machine of docs/results
    "mla_decode": 80.0, "mla_decode, planned": 80.0, "mla_decode, invariant": 80.0, "plan_decode": 40.0,
    "concat_and_cache_mla": 40.0, "rope_norm_and_cache": 40.0, "forward_prefill": 150.0,
    "forward_prefill, one chunk": 350.0, "MLAAttention, decodes": 350.0,
}  # fmt: skip
DIMS = {"cuda": Batch(16, 4096, 2, 64, 512), "cpu": Batch(3, 40, 2, 8, 16)}  # some ops do not use the prompts' context
PROFILED_LINES = 40


@dataclass
class Op:
    """A call of a public function of `fast`, and calls of other projects.

    Attributes:
        call: one call of `fast`.
        peers: calls of other projects that do the same work.
        absent: peers that cannot be called here, with the reason.
    """

    call: Call
    peers: dict[str, Call] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


def time_calls(call: Call, device: str, runs: int = CALLS) -> Spread:
    """Return the spread of the wall time of `runs` calls; the device is idle at the start of each call."""
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for _ in range(min(WARM_UP, runs)):
        call()
    return wall_times(call, runs, synchronize)


def profile_calls(call: Call, device: str, runs: int = CALLS) -> str:
    """Return a table of the functions in which `runs` calls spend their time; a time is in microseconds per call."""
    time_calls(call, device, WARM_UP)
    profiler = cProfile.Profile()
    for _ in range(runs):
        if device == "cuda":
            torch.cuda.synchronize()
        profiler.enable()
        call()
        profiler.disable()
    stats = pstats.Stats(profiler, stream=io.StringIO())
    lines = [f"{'calls':>7} {'own us':>8} {'total us':>8}  function"]
    found = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:PROFILED_LINES]
    for (path, line, name), (_, count, own, total, _) in found:
        where = name if path == "~" else f"{Path(path).parent.name}/{Path(path).name}:{line} {name}"
        lines.append(f"{count / runs:>7.1f} {1e6 * own / runs:>8.2f} {1e6 * total / runs:>8.2f}  {where}")
    lines.append(f"one call under the profiler: {1e6 * stats.total_tt / runs:.1f} us")
    return "\n".join(lines)


def decode_ops(config: MLAConfig, dims: Batch, device: str, backend, peers: ModuleType | None) -> dict[str, Op]:
    """Return the ops of a decode: the attention, its schedule, and the plan that a builder makes for the step."""
    c, dtype = config, dtype_for(device)
    kind = {"dtype": dtype, "device": device}
    lens = [dims.keys] * dims.decodes
    common = make_batch([1] * dims.decodes, lens, device)
    cache = torch.randn(num_blocks(lens), BLOCK_SIZE, c.head_size, **kind)
    ql_nope = torch.randn(dims.decodes, c.num_heads, c.kv_lora_rank, **kind)
    q_pe = torch.randn(dims.decodes, c.num_heads, c.qk_rope_head_dim, **kind)
    served = {"device": device, "dtype": dtype, "block_size": BLOCK_SIZE, "backend": fast.backends.bind(backend)}
    programs, costs = fast.decode_programs(c, **served), fast.schedule_costs(c, **served)
    metadata = fast.build_mla_metadata(common, BLOCK_SIZE, BLOCK_SIZE, num_programs=0).decode
    schedules = {
        "mla_decode": None,
        "mla_decode, planned": fast.plan_decode(metadata.seq_lens, programs, costs),
        "mla_decode, invariant": DecodeSchedule(batch_invariant=True, split_rule=costs.split_rule),
    }
    bound = served["backend"]

    def decode(schedule):
        return fast.mla_decode(ql_nope, q_pe, cache, metadata, c.softmax_scale, schedule, backend=bound)

    ops = {name: Op(partial(decode, schedule)) for name, schedule in schedules.items()}
    ops["plan_decode"] = Op(lambda: fast.plan_decode(metadata.seq_lens, programs, costs, backend=bound))
    if peers is not None:
        q = torch.cat((ql_nope, q_pe), dim=-1)[:, None].contiguous()
        arguments = (q, cache, metadata.block_table, metadata.seq_lens, c.softmax_scale)
        add_decode_peers(ops, arguments, peers)
    builder = fast.MLAMetadataBuilder(c, BLOCK_SIZE, max(lens), len(lens), dtype=dtype, backend=backend)
    ops["MLAMetadataBuilder.build, decodes"] = Op(lambda: builder.build(0, common))
    return ops


def add_decode_peers(ops: dict[str, Op], arguments: tuple, peers: ModuleType) -> None:
    """Add the peers' decodes to the ops of `fast`.

    A peer that makes its schedule in the call is added to "mla_decode". A peer whose schedule was made before the call
    is added to "mla_decode, planned".
    """
    q, cache, table, lens, _ = arguments
    there = peers.available()
    plain, planned, plan = ops["mla_decode"], ops["mla_decode, planned"], ops["plan_decode"]
    if there["flashmla"]:
        ahead = peers.FlashMLADecode()
        planned.peers["FlashMLA"] = lambda: ahead(*arguments)
        plain.peers["FlashMLA, its schedule included"] = lambda: peers.FlashMLADecode()(*arguments)
    else:
        planned.absent["FlashMLA"] = "its library could not be loaded"
    if there["fa3"]:
        plain.peers["FA3"] = lambda: peers.fa3_mla_decode(*arguments)
        if hasattr(peers, "FA3MLADecodeAhead"):
            made = peers.FA3MLADecodeAhead()
            planned.peers["FA3, schedule ahead"] = lambda: made(*arguments)
        if hasattr(peers, "fa3_metadata"):
            batch, query_len, heads, width = q.shape
            cu = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * query_len
            longest, dim = table.shape[1] * cache.shape[1], width - 512
            plan.peers["FA3's scheduler metadata"] = lambda: peers.fa3_metadata(
                batch, query_len, longest, heads, 1, dim, lens, q.dtype, cu, cache.shape[1], True, 32
            )
    else:
        plain.absent["FA3"] = "its library could not be loaded"
    if there["vllm_triton"]:
        unit = torch.ones(1, device=q.device)
        plain.peers["vLLM Triton"] = lambda: peers.vllm_triton_decode(*arguments, kv_scale=unit)
    else:
        plain.absent["vLLM Triton"] = "its library could not be loaded"


def step_ops(config: MLAConfig, dims: Batch, device: str, backend) -> dict[str, Op]:
    """Return the ops on the new tokens of decodes: slots, rotation, norm, cache writes, W_UK and W_UV projections."""
    c, dtype, tokens = config, dtype_for(device), dims.decodes
    kind = {"dtype": dtype, "device": device}
    query_lens, lens = [1] * tokens, [dims.keys] * tokens
    common = make_batch(query_lens, lens, device)
    cache = torch.zeros(num_blocks(lens), BLOCK_SIZE, c.head_size, **kind)
    q_pe = torch.randn(tokens, c.num_heads, c.qk_rope_head_dim, **kind)
    kv_c, k_pe = torch.randn(tokens, c.kv_lora_rank, **kind), torch.randn(tokens, c.qk_rope_head_dim, **kind)
    weight, positions = torch.ones(c.kv_lora_rank, **kind), positions_of(query_lens, lens, device)
    frequencies = fast.rotary_frequencies(c.rope, c.qk_rope_head_dim).to(device)
    slots, bound = common.slot_mapping, fast.backends.bind(backend)
    w_uk, w_uv = (torch.randn(c.kv_lora_rank, c.num_heads, width, **kind) for width in
                  (c.qk_nope_head_dim, c.v_head_dim))  # fmt: skip
    w_uk_t, w_uv_absorbed = fast.absorb(w_uk, w_uv)
    q_nope = torch.randn(tokens, c.num_heads, c.qk_nope_head_dim, **kind)
    latent = torch.randn(tokens, c.num_heads, c.kv_lora_rank, **kind)
    return {
        "slot_mapping": Op(lambda: fast.slot_mapping(
            common.query_start_loc, common.seq_lens, common.block_table, BLOCK_SIZE, tokens
        )),
        "apply_rope": Op(lambda: fast.apply_rope(
            positions, q_pe, k_pe, c.rope, frequencies=frequencies, backend=bound
        )),
        "concat_and_cache_mla": Op(lambda: fast.concat_and_cache_mla(kv_c, k_pe, cache, slots, backend=bound)),
        "rope_norm_and_cache": Op(lambda: rope_norm_and_cache(
            positions, q_pe, kv_c, k_pe, cache, slots, weight, c.latent_norm_eps, c.rope, frequencies=frequencies,
            backend=bound,
        )),
        "query_to_latent": Op(lambda: fast.query_to_latent(q_nope, w_uk_t)),
        "latent_to_value": Op(lambda: fast.latent_to_value(latent, w_uv_absorbed)),
    }  # fmt: skip


def prefill_ops(config: MLAConfig, dims: Batch, device: str, backend, peers: ModuleType | None) -> dict[str, Op]:
    """Return the ops of a prefill, without context and with a context of one chunk."""
    c, dtype = config, dtype_for(device)
    kind, bound = {"dtype": dtype, "device": device}, fast.backends.bind(backend)
    query_lens = [dims.new_tokens] * dims.prompts
    tokens, workspace = sum(query_lens), max(1, num_blocks([dims.context] * dims.prompts)) * BLOCK_SIZE
    lens = {"": query_lens, ", one chunk": [dims.new_tokens + dims.context] * dims.prompts}
    batches = {name: make_batch(query_lens, seq_lens, device) for name, seq_lens in lens.items()}
    plans = {name: fast.build_mla_metadata(common, BLOCK_SIZE, workspace) for name, common in batches.items()}
    cache = torch.randn(num_blocks(lens[", one chunk"]), BLOCK_SIZE, c.head_size, **kind)
    q = torch.randn(tokens, c.num_heads, c.qk_head_dim, **kind)
    kv_c, k_pe = torch.randn(tokens, c.kv_lora_rank, **kind), torch.randn(tokens, c.qk_rope_head_dim, **kind)
    w_uk, w_uv = (torch.randn(c.kv_lora_rank, c.num_heads, width, **kind) for width in
                  (c.qk_nope_head_dim, c.v_head_dim))  # fmt: skip
    k_nope, v = fast.expand_kv(kv_c, w_uk, w_uv)
    whole = plans[", one chunk"].prefill
    (chunk,) = whole.context_chunks
    states = [
        AttentionState(torch.randn(tokens, c.num_heads, c.v_head_dim, device=device),
                       torch.randn(c.num_heads, tokens, device=device))
        for _ in range(2)
    ]  # fmt: skip

    def prefill(metadata):
        return fast.forward_prefill(q, kv_c, k_pe, cache, metadata, w_uk, w_uv, c.softmax_scale, backend=bound)

    final, memory = torch.empty(tokens, c.num_heads, c.v_head_dim, **kind), fast.ContextWorkspace()

    def prefill_of_a_layer(metadata):
        return fast.forward_prefill(
            q, kv_c, k_pe, cache, metadata, w_uk, w_uv, c.softmax_scale, return_lse=False, out=final, workspace=memory,
            backend=bound,
        )  # fmt: skip

    ops = {f"forward_prefill{name}": Op(partial(prefill, plan.prefill)) for name, plan in plans.items()}
    for name, plan in plans.items():
        ops[f"forward_prefill{name}, in a layer"] = Op(partial(prefill_of_a_layer, plan.prefill))
    ops["run_prefill_new_tokens"] = Op(lambda: fast.run_prefill_new_tokens(
        q, k_nope, k_pe, v, plans[""].prefill, c.softmax_scale, backend=bound
    ))  # fmt: skip
    if peers is not None and peers.available()["fa3"]:
        keys = torch.cat((k_nope, k_pe[:, None].expand(-1, c.num_heads, -1)), dim=-1).contiguous()
        values, starts, longest = v.contiguous(), plans[""].prefill.query_start_loc, dims.new_tokens
        ops["run_prefill_new_tokens"].peers["FA3"] = lambda: peers.fa3_prefill(
            q, keys, values, starts, starts, longest, longest, c.softmax_scale, True
        )
    ops["expand_kv"] = Op(lambda: fast.expand_kv(kv_c, w_uk, w_uv))
    ops["gather_context"] = Op(lambda: fast.gather_context(cache, whole, chunk, backend=bound))
    ops["merge_attn_states"] = Op(lambda: fast.merge_attn_states(*states, backend=bound))
    longest = max(lens[", one chunk"])
    builder = fast.MLAMetadataBuilder(c, BLOCK_SIZE, longest, dims.prompts, dtype=dtype, backend=backend)
    ops["MLAMetadataBuilder.build, prefills"] = Op(lambda: builder.build(0, batches[", one chunk"]))
    return ops


def layer_ops(config: MLAConfig, dims: Batch, device: str, backend) -> dict[str, Op]:
    """Return the calls of a whole layer on a step of decodes, and on a step of prompts without context."""
    c, dtype = config, dtype_for(device)
    layer = make_layer(c, dtype, device, backend=backend)
    batches = {
        "MLAAttention, decodes": ([1] * dims.decodes, [dims.keys] * dims.decodes),
        "MLAAttention, prefills": ([dims.new_tokens] * dims.prompts,) * 2,
    }
    ops = {}
    for name, (query_lens, lens) in batches.items():
        common = make_batch(query_lens, lens, device)
        builder = fast.MLAMetadataBuilder(c, BLOCK_SIZE, max(lens), len(lens), dtype=dtype, backend=backend)
        cache = torch.randn(num_blocks(lens), BLOCK_SIZE, c.head_size, dtype=dtype, device=device)
        hidden_states = torch.randn(sum(query_lens), c.hidden_size, dtype=dtype, device=device)
        positions = positions_of(query_lens, lens, device)
        ops[name] = Op(partial(layer, hidden_states, positions, cache, builder.build(0, common)))
    return ops


def make_ops(config: MLAConfig, dims: Batch, device: str, backend, peers: ModuleType | None) -> dict[str, Op]:
    """Return every op of the benchmark, in the order of a step."""
    with torch.no_grad():
        return {
            **decode_ops(config, dims, device, backend, peers),
            **step_ops(config, dims, device, backend),
            **prefill_ops(config, dims, device, backend, peers),
            **layer_ops(config, dims, device, backend),
        }


def measure(ops: dict[str, Op], device: str, runs: int, with_targets: bool) -> list[dict[str, Any]]:
    """Return one row for each op: the times of fast and of each peer, the target, and the absent peers."""
    rows = []
    for op in ops.values():  # warm-up, because the first calls of a process are slower
        time_calls(op.call, device, min(WARM_UP, runs))
    if runs == CALLS:  # and because an idle processor needs some time to reach its usual speed
        wall_times(next(iter(ops.values())).call, runs, seconds=WARM_UP_S)
    for name, op in ops.items():
        times = {OURS: asdict(time_calls(op.call, device, runs))}
        absent = dict(op.absent)
        for who, call in op.peers.items():
            try:
                times[who] = asdict(time_calls(call, device, runs))
            except Exception as error:  # one peer failed: continue with the other peers
                absent[who] = f"{type(error).__name__}: {one_line(error)}"
        target = TARGETS_US.get(name) if with_targets else None
        rows.append({"op": name, "target_us": target, "host_us": times, "absent": absent})
    return rows


def draw(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return the table of the rows; "!" marks a median above its target."""
    table = Table(title=title)
    table.add_column("op", no_wrap=True)
    table.add_column("", no_wrap=True)
    for column in ("median us", "quartiles", "at most"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        for place, (who, spread) in enumerate(row["host_us"].items()):
            low, high = spread["quartiles_us"]
            target = row["target_us"] if who == OURS else None
            missed = target is not None and spread["median_us"] > target
            table.add_row(
                row["op"] if place == 0 else "", who, f"{spread['median_us']:.1f}" + " !" * missed,
                f"{low:.1f} - {high:.1f}", "" if target is None else f"{target:.0f}",
                end_section=place == len(row["host_us"]) - 1,
            )  # fmt: skip
    return table


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = command_line.make_parser("host", __doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder with a module peers.py, whose calls are "
                        "timed as well")  # fmt: skip
    parser.add_argument("--ops", nargs="+", metavar="OP", help="ops to time; an op is named as in the table (default: "
                        "all)")  # fmt: skip
    parser.add_argument("--profile", metavar="OP", help="print where the calls of this op spend their time, and "
                        "nothing else")  # fmt: skip
    parser.add_argument("--calls", type=int, default=CALLS, metavar="N",
                        help="number of calls of each op (default: %(default)s)")  # fmt: skip
    parser.add_argument("--requests", type=int, metavar="B", help="number of requests of a decode")
    parser.add_argument("--keys", type=int, metavar="S", help="number of keys of each request of a decode")
    return parser


def _run(argv: Sequence[str], arguments: argparse.Namespace) -> int:
    check_device(arguments.device)
    check_peers(arguments.peers)
    check_at_least_one(arguments, "calls", "heads", "requests", "keys")
    with torch.no_grad(), host_threads(arguments.device):
        return _time_ops(argv, arguments)


def _time_ops(argv: Sequence[str], arguments: argparse.Namespace) -> int:
    device, given = arguments.device, {"decodes": arguments.requests, "keys": arguments.keys}
    dims = replace(DIMS[device], **{key: value for key, value in given.items() if value is not None})
    config = config_for(device, arguments.heads)
    torch.manual_seed(0)
    peers = None if arguments.peers is None else load_peers(arguments.peers)
    ops = make_ops(config, dims, device, arguments.backend, peers)
    for name in (arguments.ops or []) + [arguments.profile] * (arguments.profile is not None):
        if name not in ops:
            raise CannotRun(f"expected one of {'; '.join(ops)}; got {name}")
    console = wide_console(120)
    if arguments.profile is not None:
        console.print(profile_calls(ops[arguments.profile].call, device, arguments.calls), markup=False, soft_wrap=True)
        return 0
    if arguments.ops is not None:
        ops = {name: ops[name] for name in arguments.ops}
    rows = measure(ops, device, arguments.calls, with_targets=device == "cuda")
    head = provenance("host", argv, device=device)
    console.print(draw(rows, f"Host time of one eager call on {head.get('processor', head['hardware'])}"))
    for who, reason in sorted({pair for row in rows for pair in row["absent"].items()}):
        console.print(f"{who}: not timed: {reason}", markup=False, soft_wrap=True)
    if arguments.json is not None:
        report = {**head, "dims": {**asdict(dims), "heads": config.num_heads}, "calls": arguments.calls, "rows": rows}
        write_report(arguments.json, report, console)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Time the ops, print and write the times, and return the exit status."""
    return command_line.run(_run, argv, make_parser())


if __name__ == "__main__":
    sys.exit(main())
