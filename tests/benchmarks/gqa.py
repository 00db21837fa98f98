"""Time grouped-query attention over a paged key/value cache: fast and its peers, bfloat16 queries.

    python -m tests.benchmarks.gqa
    python -m tests.benchmarks.gqa --peers .peers --backend triton --json gqa.json
    python -m tests.benchmarks.gqa --backend triton --rows 128,1,4096,64,8,128,0,0,plain

The peers are kernels of other projects: FlashAttention-3 ("FA3"), FlashAttention-4 ("FA4"), vLLM's unified Triton
kernel, and from FlashInfer the FA3 kernel for prefills and the XQA kernel of TensorRT-LLM for decodes. A block of the
cache has 64 tokens. FA4 needs blocks of 128 tokens, so two blocks that follow each other in a request also follow each
other in memory.

The variants of `fast` are:

- "fast": every request has the same number of splits; for a row with a shared prefix, a cascade.
- "fast, planned": a decode whose splits follow a schedule of `plan_decode`. A call makes its schedule.
- "fast, whole": a row with a shared prefix, without a cascade.

FLOPs and bytes are those of the visible keys alone: for N heads of D columns, a visible (query, key) pair needs 4 N D
FLOPs, and each key or value that some query attends is read once. The prefix that all requests share is read once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

import fast
import reference
from fast.gqa.schedule_programs import ScheduledLayer, schedule_programs
from fast.parity import Parity, compare, compare_states
from reference.interfaces import COMPUTE_FORMAT, FP8_E4M3, AttentionState
from reference.interfaces.gqa import GQAConfig, PagedAttentionMetadata

from .command_line import one_line
from .contest import OURS, Case, Contender, finite, run_benchmark
from .layers import BLOCK_SIZE, DTYPE
from .timing import input_sets

PLANNED = f"{OURS}, planned"
WHOLE = f"{OURS}, whole"
KINDS = ("plain", "sinks", "fp8")
MOST_DECODED = 16  # query tokens of a decode at most
CHECKED_QUERIES = 128
FA4_PROGRAMS = 128  # FA4 divides the keys of few requests into splits, so that it has this number of programs
SCALE_OF_CACHE = 4.0 / 448  # random numbers from a normal distribution are rarely above 4


@dataclass(frozen=True)
class Row:
    """One shape.

    Attributes:
        B: number of requests.
        Sq: new tokens of each request.
        S: keys of each request, new tokens and shared prefix included.
        N: query heads.
        Nkv: KV heads.
        D: head dim.
        window: keys of the sliding window; 0 means no window.
        shared: tokens of a prefix that all requests share; 0 means none.
        kind: "plain", "sinks" (with attention sinks) or "fp8" (over a cache in fp8_e4m3).
    """

    B: int
    Sq: int
    S: int
    N: int
    Nkv: int
    D: int
    window: int = 0
    shared: int = 0
    kind: str = "plain"

    @classmethod
    def parse(cls, *texts: str) -> Row:
        """Return the row of eight numbers and a kind, all given as text.

        Raises:
            ValueError: a text is not a number, or a value is out of range.
        """
        *numbers, kind = texts
        row = cls(*(int(text) for text in numbers), kind)
        sizes = row.B, row.Sq, row.S, row.N, row.Nkv, row.D
        if min(sizes) < 1 or min(row.window, row.shared) < 0 or kind not in KINDS:
            raise ValueError(f"sizes are at least 1, window and shared are at least 0, kind is {', '.join(KINDS)}")
        if row.Sq > row.S or row.shared + row.Sq > row.S or row.shared % BLOCK_SIZE or (row.shared and row.window):
            raise ValueError(f"shared is a multiple of {BLOCK_SIZE}, shared + Sq is at most S, and without a window")
        return row

    @property
    def config(self) -> GQAConfig:
        """Config of the layer."""
        return GQAConfig(
            self.N, self.Nkv, self.D, sliding_window=self.window or None, attention_sinks=self.kind == "sinks"
        )

    @property
    def decodes(self) -> bool:
        """True if the requests have few new tokens."""
        return self.Sq <= MOST_DECODED

    @property
    def read_keys(self) -> int:
        """Keys that are read for all requests; those of the shared prefix once."""
        own = self.S - self.shared
        return self.shared + self.B * (min(own, self.Sq + self.window - 1) if self.window else own)

    @property
    def flops(self) -> int:
        """Floating-point operations of both matrix products over the visible keys."""
        first, last = self.S - self.Sq + 1, self.S  # keys that the first and the last query see without a window
        pairs = (first + last) * self.Sq // 2
        if self.window:
            pairs = sum(min(seen, self.window) for seen in range(first, last + 1))
        return 4 * self.B * self.N * self.D * pairs

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values that are read, of the queries and of the output, each counted once."""
        element = FP8_E4M3.storage_dtype.itemsize if self.kind == "fp8" else DTYPE.itemsize
        entries = 2 * self.read_keys * self.Nkv * self.D * element
        return entries + 2 * self.B * self.Sq * self.N * self.D * DTYPE.itemsize


LLAMA_70B, QWEN3, GPT_OSS = (64, 8, 128), (32, 4, 128), (64, 8, 64)
ROWS = (
    Row(128, 1, 4096, *LLAMA_70B),
    Row(1, 1, 8192, *LLAMA_70B),
    Row(1, 1, 131072, *LLAMA_70B),
    Row(128, 1, 4096, *QWEN3, kind="fp8"),
    Row(128, 1, 4096, *GPT_OSS, window=128, kind="sinks"),
    Row(1, 16384, 16384, *LLAMA_70B),
    Row(1, 512, 16896, *LLAMA_70B),
    Row(1, 16384, 16384, *LLAMA_70B, window=1024),
    Row(128, 1, 16896, *LLAMA_70B, shared=16384),
)


@dataclass(frozen=True)
class Inputs:
    """Random requests over one cache.

    Attributes:
        q: [B Sq, N, D].
        cache: [2, blocks, BLOCK_SIZE, Nkv, D].
        plans: one plan for each set of inputs; each set has other blocks of the cache.
        sinks: [N], or None.
        stored: keyword arguments that describe a cache in fp8_e4m3; empty for other caches.
    """

    q: Tensor
    cache: Tensor
    plans: tuple[PagedAttentionMetadata, ...]
    sinks: Tensor | None
    stored: dict


def make_inputs(row: Row, sets: int, device: torch.device | str) -> Inputs:
    """Return random inputs of a row, with `sets` sets of blocks."""
    shared, own = row.shared // BLOCK_SIZE, -(-(row.S - row.shared) // BLOCK_SIZE)
    blocks = sets * (shared + row.B * own)
    shape = 2, blocks, BLOCK_SIZE, row.Nkv, row.D
    stored = {}
    if row.kind == "fp8":
        scale = torch.tensor(SCALE_OF_CACHE, device=device)
        stored = dict(cache_format=FP8_E4M3, k_scale=scale, v_scale=scale)
        cache = torch.empty(shape, dtype=FP8_E4M3.storage_dtype, device=device)
        for half in cache.unbind(0):
            for block in half:  # one block at a time, to limit the memory of the random numbers
                block.copy_((torch.randn(block.shape, device=device) / SCALE_OF_CACHE).clamp(-448, 448))
    else:
        cache = torch.empty(shape, dtype=DTYPE, device=device).normal_()
    # two blocks that follow each other in memory do so in a request too, unless a request has an odd number of blocks
    together = 2 if shared % 2 == own % 2 == 0 else 1
    first = together * torch.randperm(blocks // together, device=device)
    order = (first[:, None] + torch.arange(together, device=device)).to(torch.int32).view(sets, -1)
    steps = torch.arange(row.B + 1, dtype=torch.int32, device=device)
    visible = torch.arange(row.S - row.Sq + 1, row.S + 1, dtype=torch.int32, device=device).repeat(row.B)
    plans = []
    for mine in order:
        table = torch.cat((mine[:shared].expand(row.B, -1), mine[shared:].view(row.B, own)), 1).contiguous()
        first = (visible - row.window).clamp(min=0) if row.window else None
        lens = torch.full((row.B,), row.S, dtype=torch.int32, device=device)
        plan = PagedAttentionMetadata(table, lens, row.Sq * steps, row.Sq, visible, row.S, BLOCK_SIZE)
        plans.append(replace(plan, first_visible=first))
    sinks = torch.randn(row.N, device=device).to(DTYPE) if row.kind == "sinks" else None
    q = torch.randn(row.B * row.Sq, row.N, row.D, device=device).to(DTYPE)
    return Inputs(q, cache, tuple(plans), sinks, stored)


def check(row: Row, inputs: Inputs, value: AttentionState | Tensor) -> list[Parity]:
    """Check that the whole output is finite, and compare queries of a few heads and requests with `reference`.

    Compared are the query heads of the first and of the last KV head, in the first and in the last request, with the
    first and the last queries of the request.
    """
    out = value.out if isinstance(value, AttentionState) else value
    found, plan, group = [finite("gqa_paged_attention", out)], inputs.plans[0], row.N // row.Nkv
    length = min(row.Sq, CHECKED_QUERIES)
    for request in sorted({0, row.B - 1}):
        for start in sorted({0, row.Sq - length}):
            rows = slice(request * row.Sq + start, request * row.Sq + start + length)
            part = replace(
                plan, block_table=plan.block_table[request : request + 1], seq_lens=plan.seq_lens[:1],
                query_start_loc=torch.tensor([0, length], dtype=torch.int32, device=out.device), max_query_len=length,
                visible_lens=plan.visible_lens[rows],
                first_visible=None if plan.first_visible is None else plan.first_visible[rows],
            )  # fmt: skip
            for kv_head in sorted({0, row.Nkv - 1}):
                heads = slice(kv_head * group, (kv_head + 1) * group)
                config = replace(row.config, num_heads=group, num_kv_heads=1)
                sinks = None if inputs.sinks is None else inputs.sinks[heads]
                cache = inputs.cache[:, :, :, kv_head : kv_head + 1]
                q = inputs.q[rows, heads]
                wide = cache if inputs.stored else cache.double()
                wide_sinks = None if sinks is None else sinks.double()
                gold = reference.gqa_paged_attention(q.double(), wide, part, config, wide_sinks, **inputs.stored)
                low = reference.gqa_paged_attention(q, cache, part, config, sinks, **inputs.stored)
                op, mine = f"gqa_paged_attention, request {request} from query {start}", out[rows, heads].contiguous()
                if isinstance(value, AttentionState):
                    mine = AttentionState(mine, value.lse[heads, rows].contiguous())
                    found += compare_states(op, mine, low, gold)
                else:
                    found.append(compare(f"{op}: out", mine, low.out, gold.out))
    return found


def peer_contenders(row: Row, inputs: Inputs, peers: ModuleType) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the peers that can compute a row as contenders, and the absent ones with the reasons."""
    contenders, absent = {}, {}
    k, v = inputs.cache.unbind(0)
    scale, window = row.D**-0.5, (row.window - 1, 0) if row.window else (-1, -1)
    have = {**peers.available(), **peers.more_available()}
    if have["flashinfer"] or have["fa4"]:
        peers.flashinfer()  # puts FlashInfer and the loader of FA4's kernels on the path of Python

    def add(who: str, key: str, calls, reason: str | None = None) -> None:
        if reason is None and not have[key]:
            reason = "its library could not be loaded"
        if reason is None:
            contenders[who] = Contender([partial(calls, plan) for plan in inputs.plans], lambda output: output[0])
        else:
            absent[who] = reason

    def fa3(plan, metadata=None):
        return peers.fa3_paged(
            inputs.q, k, v, plan.query_start_loc, row.Sq, plan.seq_lens, plan.block_table, scale, window=window,
            sinks=inputs.sinks, metadata=metadata,
        )  # fmt: skip

    not_bf16 = "its queries would have to be in e4m3 too" if row.kind == "fp8" else None
    add("FA3", "fa3", fa3, not_bf16)
    if have["fa3"] and not_bf16 is None and row.decodes:
        plan = inputs.plans[0]
        metadata = peers.fa3_metadata(
            row.B, row.Sq, plan.block_table.shape[1] * BLOCK_SIZE, row.N, row.Nkv, row.D, plan.seq_lens, DTYPE,
            plan.query_start_loc, BLOCK_SIZE, True, 0, window,
        )  # fmt: skip
        add("FA3, schedule ahead", "fa3", partial(fa3, metadata=metadata))
    # kernels without scales of a cache get the scale of the keys in the softmax scale, and an output without the scale
    factor = SCALE_OF_CACHE if row.kind == "fp8" else 1.0
    unified = peers.VllmUnified(row.B * row.Sq, row.N, row.Nkv, row.D) if have["vllm_unified"] else None
    add("vLLM unified Triton", "vllm_unified", lambda plan: unified(
        inputs.q, k, v, plan.query_start_loc, row.Sq, plan.seq_lens, plan.block_table, scale * factor, window=window,
        sinks=inputs.sinks))  # fmt: skip
    refusal = "no window and no sinks" if row.window or row.kind == "sinks" else None
    if row.decodes and row.Sq == 1:
        xqa = peers.FlashInferXQA() if have["flashinfer"] and refusal is None else None
        add("FlashInfer XQA", "flashinfer", lambda plan: xqa(
            inputs.q, k, v, plan.block_table, plan.seq_lens, scale * factor), refusal)  # fmt: skip
        add_fa4(row, inputs, peers, contenders, absent)
    elif not row.decodes:
        run = None
        if have["flashinfer"] and refusal is None and row.S % BLOCK_SIZE == 0:
            plan = inputs.plans[0]
            try:
                run = peers.flashinfer_paged(
                    plan.query_start_loc, plan.block_table, plan.seq_lens, row.N, row.Nkv, row.D, BLOCK_SIZE, scale
                )
            except Exception as error:  # the folder of peers lacks this kernel of FlashInfer
                refusal = f"{type(error).__name__}: {one_line(error)}"
        add("FlashInfer FA3", "flashinfer", lambda plan: run(inputs.q, k, v), refusal)
        if "FlashInfer FA3" in contenders:  # its plan holds the blocks of the first set
            contenders["FlashInfer FA3"].calls = contenders["FlashInfer FA3"].calls[:1]
    for who in ("vLLM unified Triton", "FlashInfer XQA"):
        if who in contenders:
            contenders[who].view = lambda output: output[0] * factor
    if row.shared and have["fa3"]:
        contenders["FA3 x 2 and merge"] = fa3_cascade(row, inputs, peers)
    return contenders, absent


def add_fa4(row: Row, inputs: Inputs, peers: ModuleType, contenders: dict, absent: dict) -> None:
    """Add FlashAttention-4 to the contenders, or to the absent ones with the reason."""
    reason = None
    if not peers.more_available()["fa4"]:
        reason = "its library could not be loaded"
    elif row.kind != "plain" or row.window or row.shared or (row.N // row.Nkv, row.D) != (8, 128):
        reason = "it is compiled for 8 query heads of 128 columns for each KV head, without window, sinks and e4m3"
    elif row.S % (2 * BLOCK_SIZE):
        reason = f"a request does not fill blocks of {2 * BLOCK_SIZE} tokens"
    if reason is not None:
        absent["FA4"] = reason
        return
    k, v = (half.view(-1, 2 * BLOCK_SIZE, row.Nkv, row.D) for half in inputs.cache.unbind(0))
    splits = 1 if row.B * row.Nkv >= FA4_PROGRAMS else FA4_PROGRAMS // (row.B * row.Nkv)
    name = "gqa8_dec" if splits == 1 else "gqa8_dec_split"

    def call(plan: PagedAttentionMetadata, table: Tensor):
        return peers.fa4(
            name, inputs.q, k, v, plan.query_start_loc, seq_lens=plan.seq_lens, block_table=table,
            scale=row.D**-0.5, splits=splits,
        )  # fmt: skip

    tables = [(plan.block_table[:, ::2] // 2).contiguous() for plan in inputs.plans]
    calls = [partial(call, plan, table) for plan, table in zip(inputs.plans, tables, strict=True)]
    contenders["FA4"] = Contender(calls, lambda output: output[0])


def fa3_cascade(row: Row, inputs: Inputs, peers: ModuleType) -> Contender:
    """Return the cascade of vLLM with FA3: attend the shared prefix with all queries, then the suffixes, and merge."""
    k, v = inputs.cache.unbind(0)
    device, scale, blocks = inputs.q.device, row.D**-0.5, row.shared // BLOCK_SIZE
    both = torch.tensor([0, row.B * row.Sq], dtype=torch.int32, device=device)
    prefix_lens = torch.tensor([row.shared], dtype=torch.int32, device=device)

    def call(plan: PagedAttentionMetadata, table: Tensor, prefix: Tensor, lens: Tensor):
        first = peers.fa3_paged(inputs.q, k, v, both, row.B * row.Sq, prefix_lens, prefix, scale, causal=False)
        second = peers.fa3_paged(inputs.q, k, v, plan.query_start_loc, row.Sq, lens, table, scale)
        return peers.vllm_merge(*first[:2], *second[:2])

    calls = []
    for plan in inputs.plans:
        tables = plan.block_table[:, blocks:].contiguous(), plan.block_table[:1, :blocks].contiguous()
        calls.append(partial(call, plan, *tables, plan.seq_lens - row.shared))
    return Contender(calls, lambda output: output[0])


def make_case(row: Row, peers: ModuleType | None, backend: str | None, device: str = "cuda") -> Case:
    """Return the inputs of one row and its contenders (the implementations to time)."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device == "cuda" else 1
    inputs = make_inputs(row, input_sets(row.bytes, l2_bytes), device)
    config, out = row.config, torch.empty_like(inputs.q)

    def attend(plan: PagedAttentionMetadata, planned: bool = False) -> AttentionState:
        schedule = fast.plan_decode(plan.seq_lens, programs, backend=named.get("plan_decode")) if planned else None
        return fast.gqa_paged_attention(
            inputs.q, inputs.cache, plan, config, inputs.sinks, schedule, **inputs.stored, out=out, backend=backend
        )

    def cascade(plan) -> AttentionState:
        return fast.gqa_cascade_attention(
            inputs.q, inputs.cache, plan, config, inputs.sinks, **inputs.stored, out=out, backend=backend
        )

    whole = Contender([partial(attend, plan) for plan in inputs.plans])
    named = {} if backend is None else fast.backends.bind(backend)
    ours = {OURS: whole}
    if row.shared:
        split = [fast.split_shared_prefix(plan, row.shared, BLOCK_SIZE, 0) for plan in inputs.plans]
        ours = {OURS: Contender([partial(cascade, plan) for plan in split]), WHOLE: whole}
    elif row.decodes and not row.window:  # the keys of a window are not counted from key 0
        stored = FP8_E4M3 if row.kind == "fp8" else COMPUTE_FORMAT
        layer = ScheduledLayer(config, torch.device(device), DTYPE, BLOCK_SIZE, stored)
        programs = schedule_programs(layer, row.Sq, backend)
        if programs > 1:  # a backend with one program ignores schedules
            ours[PLANNED] = Contender([partial(attend, plan, True) for plan in inputs.plans])
    others, absent = ({}, {}) if peers is None else peer_contenders(row, inputs, peers)
    return Case(row.flops, row.bytes, {**ours, **others}, lambda value: check(row, inputs, value), absent)


def main(argv: Sequence[str] | None = None) -> int:
    """Check and time the rows, and return the exit status."""
    return run_benchmark(
        "gqa", __doc__.splitlines()[0], ROWS, make_case, argv, ways=("flushed", "replayed"), bandwidth="read_gb_s",
        epilog="A row has B requests of Sq new tokens and S keys each, N query heads over Nkv KV heads of D columns, a "
        "window (0: none), a shared prefix (0: none) and a kind: plain, sinks or fp8.",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
