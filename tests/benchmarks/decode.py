"""Time the absorbed decode over a paged latent cache: fast and its peers, bfloat16, dims of DeepSeek-V3.

    python -m tests.benchmarks.decode
    python -m tests.benchmarks.decode --peers .peers --rows 128,4096,1,128,equal 128,4096,1,16,mixed --json decode.json
    python -m tests.benchmarks.decode --peers .peers --cache-format fp8_e4m3

The peers are kernels of other projects: FlashMLA, FlashAttention-3 ("FA3"), FlashInfer's FA3 kernel for MLA
("FlashInfer") and vLLM's Triton kernel. FlashInfer returns no LSE, so only its outputs are compared.

Over the cache format fp8_e4m3, the peers are FlashMLA's fp8 kernel, vLLM's Triton kernel and FlashInfer's FA3 kernel.
FlashMLA's fp8 kernel has queries and probabilities in e4m3, as `fast` has in the mode fp8_product. Both get the same
queries in e4m3, and are compared with the same exact output. The row stores the relative RMS errors of both
("e4m3_errors"), and fails if the error of `fast` is the larger one.

A decode divides the keys of a request into splits, which different programs attend. A second kernel combines the
partial outputs of the splits. A time contains both kernels. For a request with S keys, Sq new tokens and N heads, the
FLOPs are 2 Sq N S (576 + 512). The bytes are the bytes of the cache entries, the queries and the output.

The variants of `fast` differ in how they split requests:

- "fast": every request has the same number of splits.
- "fast, planned": the splits follow a schedule of `plan_decode`.
- "fast, invariant": batch-invariant; the splits of a request depend on its own length alone.
- "fast, invariant, planned": batch-invariant, with a schedule of `plan_decode`.
- "fast, by default": "fast" or "fast, planned"; `build_mla_metadata` looks at the lengths and chooses. For a stepped
  time `build_for_cudagraph_capture` makes the plan, without knowledge of the lengths.

Over a cache in e4m3, two more variants decode with queries in e4m3: "fast, fp8_query" and "fast, fp8_product". Each of
them also has a variant with a schedule ("fast, fp8_query, planned") and a batch-invariant variant ("fast, fp8_query,
invariant"). The queries are quantised before the timed calls. The check compares these variants with `reference` in the
same mode and with the same queries.

A stepped time is the time of one layer in a CUDA graph that runs a step of 61 layers. The step makes a schedule once
for all layers, but "FA3" makes its schedule in every layer.

In a flushed or replayed time, a call of a planned variant of `fast` makes its schedule, and "FA3" too makes its
schedule in every call. FlashMLA and "FA3, schedule ahead" keep a schedule that was made before. FlashInfer's plan is
outside every time, also outside a stepped time, because the plan waits for the GPU.

The run compares its times over a cache in bfloat16 with the targets for an H200 (TARGET_ROWS), and prints a verdict on
each target: "met" or "missed". The results file has the verdicts too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import geometric_mean
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fast
import reference
from fast.mla.device_choices import programs_of_one_request
from fast.parity import Parity, compare, compare_states
from reference.interfaces import (
    COMPUTE_FORMAT,
    E4M3_MAX,
    FP8_E4M3,
    FP8_MODES,
    AttentionState,
    CacheFormat,
    DecodeMetadata,
    DecodeSchedule,
    MLAConfig,
    ScheduleCosts,
    to_e4m3,
)

from .command_line import one_line
from .contest import OURS, Case, Contender, finite, is_ours, run_benchmark
from .decode_rows import LATENT, ROWS, WIDTH, Inputs, Row, batch_of, blocks_of, make_inputs
from .layers import BLOCK_SIZE, DTYPE
from .targets import judged, median, named, peer_ratio, peers_of
from .timing import LAYERS, Call, in_turn, input_sets

SCALE = 192**-0.5
CHECKED_HEADS = CHECKED_REQUESTS = 3
PLANNED = f"{OURS}, planned"
INVARIANT = f"{OURS}, invariant"
INVARIANT_PLANNED = f"{INVARIANT}, planned"
BY_DEFAULT = f"{OURS}, by default"
PRODUCT = "fp8_product"  # the fp8 mode that computes as FlashMLA's fp8 kernel does
FLASHMLA_E4M3 = "FlashMLA fp8"
AHEAD = "FA3, schedule ahead"
FLASHINFER = "FlashInfer"


# The targets hold for these rows. "fast" and "fast, planned" count as one decode, and the faster of them is compared.
TARGET_ROWS = tuple(row for row in ROWS if row not in (
    Row(128, 4096, 1, 32), Row(64, 16384, 1, 64), Row(64, 4096, 1, 128), Row(128, 16384, 1, 128, "mixed"),
    Row(128, 16384, 1, 16, "mixed"),
))  # fmt: skip
LEAST_AGAINST_PEERS = 1.0  # target: least value of (time of the fastest peer) / (time of `fast`) in a row
LEAST_MEAN = {"flushed": 1.12, "replayed": 1.18}  # target: least geometric mean of these ratios, by way of timing
# target: most of (stepped time with a schedule) / (without); the former contains 1/61 of the time of one plan
MOST_OVER_UNPLANNED = 1.03


class InMode(NamedTuple):
    """The output of a decode with queries in e4m3.

    Attributes:
        who: name of the contender.
        mode: fp8 mode of the decode.
        state: the attention state, or only its `out` [B Sq, N, 512].
    """

    who: str
    mode: str
    state: AttentionState | Tensor


def queries_in_e4m3(inputs: Inputs) -> tuple[list[Tensor], Tensor]:
    """Return both parts of the queries in e4m3, and their scale; the largest element becomes 448."""
    parts = inputs.ql_nope, inputs.q_pe
    scale = (torch.stack([x.abs().max() for x in parts]).max() / E4M3_MAX).float()
    return [to_e4m3(x, scale) for x in parts], scale


def spread_out(count: int, at_most: int) -> list[int]:
    """Return at most `at_most` evenly spaced indices from 0 to `count` - 1, both included."""
    picked = min(count, at_most)
    return sorted({round(i * (count - 1) / max(picked - 1, 1)) for i in range(picked)})


def relative_rms_error(found: Tensor, exact: Tensor) -> float:
    """Return the root mean square of `found` - `exact`, divided by the root mean square of `exact`.

    The result is NaN if an element of `found` is NaN, and inf if an element is infinite.
    """
    exact = exact.double()
    return float((found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def compare_with_peer(errors: Mapping[str, float]) -> dict[str, list[Parity]]:
    """Return for each variant of `fast` in `errors` whether its error is at most the error of FlashMLA's fp8 kernel.

    Args:
        errors: relative RMS errors by contender. The result is empty without an entry `FLASHMLA_E4M3`.
    """
    limit = errors.get(FLASHMLA_E4M3)
    if limit is None:
        return {}
    op = f"mla_decode: relative RMS error, budget: that of {FLASHMLA_E4M3}"
    return {who: [Parity(op, error, error, limit, limit)] for who, error in errors.items() if is_ours(who)}


def check(
    row: Row, inputs: Inputs, value: AttentionState | Tensor | InMode, errors: dict[str, float] | None = None
) -> list[Parity]:
    """Check that the whole output is finite, and compare a few heads of a few requests with `reference`.

    Args:
        row: the shape.
        inputs: inputs of the call; the call used the first plan of `inputs.metadata`.
        value: output of the call: an attention state, only its `out` [B Sq, N, 512], or the output of an fp8 mode.
        errors: receives the relative RMS error of an output in the mode `fp8_product`, under the contender's name. The
            exact output has the dequantised queries and cache entries, and exact probabilities.
    """
    state = value.state if isinstance(value, InMode) else value
    out = state.out if isinstance(state, AttentionState) else state
    device, metadata = out.device, inputs.metadata[0]
    heads = torch.tensor(spread_out(row.N, CHECKED_HEADS), device=device)
    requests = torch.tensor(spread_out(row.B, CHECKED_REQUESTS), device=device)
    tokens = (requests[:, None] * row.Sq + torch.arange(row.Sq, device=device)).flatten()
    blocks = metadata.block_table[requests]
    index = dict(dtype=torch.int32, device=device)
    part = DecodeMetadata(
        torch.arange(blocks.numel(), **index).view(blocks.shape), metadata.seq_lens[requests],
        row.Sq * torch.arange(len(requests) + 1, **index), row.Sq, metadata.visible_lens[tokens],
        metadata.max_seq_len, BLOCK_SIZE,
    )  # fmt: skip
    cache, storage = blocks_of(inputs.cache, blocks.flatten().long()), inputs.storage
    if isinstance(value, InMode):
        from ..support.fp8_modes import rounded_decode

        whole, q_scale = queries_in_e4m3(inputs)
        queries = [blocks_of(x, tokens).view(torch.uint8)[:, heads].view(x.dtype) for x in whole]
        gold = reference.mla_decode(
            *queries, cache, part, SCALE, None, torch.float64, fp8_mode=value.mode, q_scale=q_scale, **storage
        )
        with device:
            given = queries, cache, part, *storage.values(), value.mode, q_scale
            low = rounded_decode(*given, DTYPE, device.type == "cuda", SCALE)
        out_of_some = out[tokens][:, heads].contiguous()
        if errors is not None and value.mode == PRODUCT:
            errors[value.who] = relative_rms_error(out_of_some, gold.out)
        found = [finite("mla_decode", out)]
        if not isinstance(state, AttentionState):
            return [*found, compare("mla_decode: out", out_of_some, low.out, gold.out)]
        mine = AttentionState(out_of_some, state.lse[heads][:, tokens].contiguous())
        low = AttentionState(low.out, low.lse.to(mine.lse.dtype))
        return found + compare_states("mla_decode", mine, low, gold)
    queries = [inputs.ql_nope[tokens][:, heads], inputs.q_pe[tokens][:, heads]]
    wide = cache.double() if storage["cache_format"] == COMPUTE_FORMAT else cache  # gold reads the same stored bytes
    gold = reference.mla_decode(*(q.double() for q in queries), wide, part, SCALE, **storage)
    low = reference.mla_decode(*queries, cache, part, SCALE, **storage)
    found = [finite("mla_decode", out)]
    if isinstance(value, AttentionState):
        mine = AttentionState(out[tokens][:, heads].contiguous(), value.lse[heads][:, tokens].contiguous())
        return found + compare_states("mla_decode", mine, low, gold)
    return [*found, compare("mla_decode: out", out[tokens][:, heads], low.out, gold.out)]


def vllm_with_scales(peers: ModuleType, device: torch.device) -> Callable:
    """Return a function that calls vLLM's Triton kernel with key and value scales in GPU memory, as vLLM does.

    The function of `peers` would copy the scales from the host in every call. Such a copy delays the timed stream, and
    a CUDA graph cannot capture the copy.
    """
    unit, plain = torch.ones((), device=device), peers._vllm_triton()

    def call(*arguments):
        peers._vllm_triton = lambda: partial(plain, k_scale=unit, v_scale=unit)
        try:
            return peers.vllm_triton_decode(*arguments)
        finally:
            peers._vllm_triton = lambda: plain

    return call


def flashinfer_calls(row: Row, inputs: Inputs, peers: ModuleType) -> list[Call]:
    """Return calls of FlashInfer's MLA decode, one for each block table; each call is already planned.

    The kernel gets the dtype of the cache: bfloat16 or e4m3. Its output has no LSE.
    """
    space, calls = torch.empty(128 << 20, dtype=torch.uint8, device=inputs.cache.device), []
    pages, index = [-(-length // BLOCK_SIZE) for length in row.seq_lens], dict(dtype=torch.int32)
    starts = torch.tensor([0, *pages], **index).cumsum(0, dtype=torch.int32).to(inputs.cache.device)
    for metadata in inputs.metadata:
        blocks = torch.cat([table[:count] for table, count in zip(metadata.block_table, pages, strict=True)])
        plan = (metadata.query_start_loc, starts, blocks, metadata.seq_lens)
        kernel = peers.flashinfer_mla(
            plan, row.N, BLOCK_SIZE, SCALE, kv_dtype=inputs.cache.dtype, causal=row.Sq > 1, space=space
        )
        latent, rope = inputs.cache[..., :LATENT], inputs.cache[..., LATENT:]
        calls.append(partial(kernel, inputs.ql_nope, inputs.q_pe, latent, rope))
    return calls


def fp8_contenders(row: Row, inputs: Inputs, peers: ModuleType) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the peers that decode over a cache in e4m3 as contenders, and the absent peers with the reasons.

    A contender is an implementation that is timed. The scale of the cache is 1. FlashMLA gets the queries that `fast`
    gets in its modes (`queries_in_e4m3`). Its kernel multiplies scores by the softmax scale and by the scale of the
    queries. The module of peers sets the scale of the queries to 1, so the softmax scale contains it.
    """
    q = torch.cat((inputs.ql_nope, inputs.q_pe), dim=-1).view(row.B, row.Sq, row.N, WIDTH)
    there = {**peers.available(), **getattr(peers, "more_available", dict)()}
    contenders, absent = {}, {}

    def add(
        who: str, library: str, calls: Callable[[], list[Call]], step: Callable[[], Call] | None = None,
        mode: str | None = None,
    ) -> None:  # fmt: skip
        if not there.get(library, False):
            absent[who] = "its library could not be loaded"
            return
        try:
            made = calls()
        except Exception as error:  # a peer that cannot plan this row is absent; the other peers are timed
            absent[who] = f"{type(error).__name__}: {one_line(error)}"
            return

        def view(output: Sequence[Tensor]) -> Tensor | InMode:
            out = output[0].reshape(row.B * row.Sq, row.N, LATENT)
            return out if mode is None else InMode(who, mode, out)

        contenders[who] = Contender(made, view, step)

    def calls_of(kernel: Callable, queries: Tensor, scale: float = SCALE) -> list[Call]:
        return [partial(kernel, queries, inputs.cache, m.block_table, m.seq_lens, scale) for m in inputs.metadata]

    parts, q_scale = queries_in_e4m3(inputs)
    joined = torch.cat([x.view(torch.uint8) for x in parts], dim=-1).view(parts[0].dtype).view(q.shape)
    scale_of_both = SCALE * float(q_scale)

    def flashmla() -> list[Call]:
        return calls_of(peers.FlashMLADecodeFp8(), joined, scale_of_both)

    add(FLASHMLA_E4M3, "flashmla_fp8", flashmla, lambda: in_turn(flashmla(), LAYERS)(), PRODUCT)
    add("vLLM Triton", "vllm_triton", lambda: calls_of(vllm_with_scales(peers, q.device), q))
    add("FlashInfer", "flashinfer", lambda: flashinfer_calls(row, inputs, peers))
    return contenders, absent


def peer_contenders(row: Row, inputs: Inputs, peers: ModuleType) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return FlashMLA, FlashAttention-3, FlashInfer and vLLM's Triton kernel as contenders, and the reasons of absence.

    FlashMLA and "FA3, schedule ahead" keep their schedule over several calls. For a stepped time they make a new
    schedule in each step. Over a cache in e4m3 the contenders are those of `fp8_contenders`; no peer has a dense decode
    over fp8_ds_mla.
    """
    if inputs.storage["cache_format"] == FP8_E4M3:
        return fp8_contenders(row, inputs, peers)
    if inputs.storage["cache_format"] != COMPUTE_FORMAT:
        return {}, {"peers": "no peer has a dense decode over this cache format"}
    q = torch.cat((inputs.ql_nope, inputs.q_pe), dim=-1).view(row.B, row.Sq, row.N, WIDTH)
    there = {**peers.available(), **getattr(peers, "more_available", dict)()}
    vllm_triton = vllm_with_scales(peers, q.device) if there["vllm_triton"] else None
    kernels = {  # peer: library, and a function that returns a kernel whose schedule is not made yet
        "FlashMLA": ("flashmla", peers.FlashMLADecode),
        "FA3": ("fa3", lambda: peers.fa3_mla_decode),
        AHEAD: ("fa3", getattr(peers, "FA3MLADecodeAhead", None)),
        "vLLM Triton": ("vllm_triton", lambda: vllm_triton),
    }

    def calls_of(kernel: Callable) -> list[Call]:
        return [partial(kernel, q, inputs.cache, m.block_table, m.seq_lens, SCALE) for m in inputs.metadata]

    def step_of(make: Callable[[], Callable]) -> Call:
        return lambda: in_turn(calls_of(make()), LAYERS)()

    contenders, absent = {}, {}
    for who, (name, make) in kernels.items():
        if make is None:
            absent[who] = "the folder of peers has no such kernel"
        elif not there[name]:
            absent[who] = "its library could not be loaded"
        else:
            contenders[who] = Contender(
                calls_of(make()), lambda output: output[0].reshape(row.B * row.Sq, row.N, LATENT), step_of(make)
            )
    if not there.get("flashinfer", False):
        return contenders, {**absent, FLASHINFER: "its library could not be loaded"}
    try:
        calls = flashinfer_calls(row, inputs, peers)
    except Exception as error:  # FlashInfer cannot plan this row; the other peers are timed
        return contenders, {**absent, FLASHINFER: f"{type(error).__name__}: {one_line(error)}"}
    planned = Contender(calls, lambda output: output[0].reshape(row.B * row.Sq, row.N, LATENT))
    return {**contenders, FLASHINFER: planned}, absent


def mode_contenders(
    row: Row, inputs: Inputs, config: MLAConfig, backend: dict[str, str] | None
) -> dict[str, Contender]:
    """Return the decodes with queries in e4m3 as contenders.

    Each of the two fp8 modes has a decode without a schedule, one with a schedule, and one that is batch-invariant and
    has no schedule.
    """
    queries, q_scale = queries_in_e4m3(inputs)
    device, cache_format = str(inputs.cache.device), inputs.storage["cache_format"]

    def attend(metadata: DecodeMetadata, mode: str, schedule: DecodeSchedule | None) -> AttentionState:
        return fast.mla_decode(
            *queries, inputs.cache, metadata, SCALE, schedule, DTYPE, fp8_mode=mode, q_scale=q_scale, backend=backend,
            **inputs.storage,
        )  # fmt: skip

    def served(mode: str) -> dict[str, Any]:
        return dict(
            device=device, block_size=BLOCK_SIZE, dtype=DTYPE, cache_format=cache_format, fp8_mode=mode, backend=backend
        )

    def planned(mode: str, costs: ScheduleCosts, who: str) -> Contender:
        programs = fast.decode_programs(config, query_len=row.Sq, **served(mode))
        count = programs_of_one_request(programs, row.S, costs) if row.B == 1 else programs

        def schedule_of(metadata: DecodeMetadata) -> DecodeSchedule:
            return fast.plan_decode(metadata.seq_lens, count, costs, False, backend=backend)

        def scheduled(metadata: DecodeMetadata) -> AttentionState:
            return attend(metadata, mode, schedule_of(metadata))

        def whole_step() -> None:
            schedule = schedule_of(inputs.metadata[0])
            in_turn([partial(attend, m, mode, schedule) for m in inputs.metadata], LAYERS)()

        return Contender([partial(scheduled, m) for m in inputs.metadata], partial(InMode, who, mode), whole_step)

    found = {}
    for mode in FP8_MODES[1:]:
        costs, who = fast.schedule_costs(config, **served(mode)), f"{OURS}, {mode}"
        found[f"{who}, planned"] = planned(mode, costs, f"{who}, planned")
        invariant = DecodeSchedule(batch_invariant=True, split_rule=costs.split_rule)
        for name, schedule in ((who, None), (f"{who}, invariant", invariant)):
            calls = [partial(attend, m, mode, schedule) for m in inputs.metadata]
            found[name] = Contender(calls, partial(InMode, name, mode))
    return found


def make_case(
    row: Row,
    peers: ModuleType | None,
    backend: str | None,
    device: str = "cuda",
    cache_format: CacheFormat = COMPUTE_FORMAT,
) -> Case:
    """Return the inputs and contenders of one row."""
    # the named backend computes the ops that it has; `fast` chooses a backend for the other ops, such as planning
    backend = fast.backends.bind(backend)
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device == "cuda" else 1
    num_bytes = row.bytes_over(cache_format)
    inputs = make_inputs(row, input_sets(num_bytes, l2_bytes), device, cache_format)
    storage = {} if cache_format == COMPUTE_FORMAT else inputs.storage
    ours = [
        lambda m=m: fast.mla_decode(inputs.ql_nope, inputs.q_pe, inputs.cache, m, SCALE, backend=backend, **storage)
        for m in inputs.metadata
    ]
    config = MLAConfig.from_preset("deepseek-v3", num_heads=row.N)
    planned_for = {"dtype": DTYPE, "cache_format": cache_format, "backend": backend}
    served = {"device": device, "block_size": BLOCK_SIZE, **planned_for}
    programs, costs = fast.decode_programs(config, query_len=row.Sq, **served), fast.schedule_costs(config, **served)

    def attend(metadata: DecodeMetadata, schedule: DecodeSchedule | None) -> AttentionState:
        queries = inputs.ql_nope, inputs.q_pe
        return fast.mla_decode(*queries, inputs.cache, metadata, SCALE, schedule, backend=backend, **storage)

    def schedule_of(metadata: DecodeMetadata, batch_invariant: bool, planned: bool) -> DecodeSchedule | None:
        if planned:
            count = programs
            if row.B == 1 and not batch_invariant:  # as a builder plans a graph for requests of at most S keys
                count = programs_of_one_request(programs, row.S, costs)
            return fast.plan_decode(metadata.seq_lens, count, costs, batch_invariant, backend=backend)
        return DecodeSchedule(batch_invariant=True, split_rule=costs.split_rule) if batch_invariant else None

    def contender(batch_invariant: bool, planned: bool, step: Call | None = None) -> Contender:
        def scheduled(metadata: DecodeMetadata) -> AttentionState:
            return attend(metadata, schedule_of(metadata, batch_invariant, planned))

        def whole_step() -> None:
            schedule = schedule_of(inputs.metadata[0], batch_invariant, planned)
            in_turn([partial(attend, m, schedule) for m in inputs.metadata], LAYERS)()

        return Contender([partial(scheduled, m) for m in inputs.metadata], step=step or whole_step)

    common = batch_of(row, inputs)
    default = fast.build_mla_metadata(common, BLOCK_SIZE, BLOCK_SIZE, row.Sq, config, **planned_for)
    builder = fast.MLAMetadataBuilder(
        config, BLOCK_SIZE, row.S, row.B, num_speculative_tokens=row.Sq - 1, **planned_for
    )

    def captured_step() -> None:
        plan = builder.build_for_cudagraph_capture(common)
        layers = [replace(plan.decode, block_table=m.block_table) for m in inputs.metadata]
        in_turn([partial(attend, m, plan.schedule) for m in layers], LAYERS)()

    cut_by = {
        PLANNED: contender(False, True),
        INVARIANT: contender(True, False),
        INVARIANT_PLANNED: contender(True, True),
        BY_DEFAULT: contender(False, default.schedule is not None, captured_step),
    }
    if cache_format.scaled:
        cut_by |= mode_contenders(row, inputs, config, backend)
    others, absent = ({}, {}) if peers is None else peer_contenders(row, inputs, peers)
    errors: dict[str, float] = {}
    return Case(
        row.flops,
        num_bytes,
        {OURS: Contender(ours), **cut_by, **others},
        lambda value: check(row, inputs, value, errors),
        absent,
        {"e4m3_errors": errors} if cache_format == FP8_E4M3 else {},
        lambda: compare_with_peer(errors),
    )


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the verdicts on all targets.

    LEAST_AGAINST_PEERS has a verdict for each target row, LEAST_MEAN if all target rows were timed, and
    MOST_OVER_UNPLANNED for each row of equal lengths with stepped times.
    """
    found = []
    for way, mean in LEAST_MEAN.items():
        ratios, peers = [], set()
        for row in (row for row in rows if Row(**row["dims"]) in TARGET_ROWS):
            best = peer_ratio(row, way, [OURS, PLANNED])
            if best is not None:
                what = f"{named(row)}: {best[0]}'s time / time of fast, {way}"
                found.append(judged(what, best[1], least=LEAST_AGAINST_PEERS, dims=row["dims"], way=way))
                ratios.append(best[1])
                peers |= peers_of(row, way).keys()
        if len(ratios) == len(TARGET_ROWS):
            names = sorted(peers)
            what = (
                f"geometric mean of {len(ratios)} rows, {way}: time of the fastest of {'; '.join(names)} / time of fast"
            )
            found.append(judged(what, geometric_mean(ratios), least=mean, way=way, peers=names))
    return found + _stepped_verdicts(rows)


def _stepped_verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the verdicts on MOST_OVER_UNPLANNED of each row of equal lengths with stepped times."""
    found = []
    for row in (row for row in rows if row["dims"]["lens"] == "equal"):
        unplanned = median(row, "stepped", [OURS])
        for who in (PLANNED, BY_DEFAULT):
            time = median(row, "stepped", [who])
            if time is not None and unplanned is not None:
                what = f"{named(row)}: time of {who} / time of fast, stepped"
                ratio = time / unplanned
                found.append(judged(what, ratio, most=MOST_OVER_UNPLANNED, dims=row["dims"], way="stepped", who=who))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Check and time the rows, and return the exit status."""
    return run_benchmark(
        "decode", __doc__.splitlines()[0], ROWS, make_case, argv,
        ways=("flushed", "replayed", "stepped"), bandwidth="read_gb_s",
        epilog="A row has B requests with Sq new tokens each, S keys in the longest request, and N heads.",
        cache_formats=True, verdicts=verdicts,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
