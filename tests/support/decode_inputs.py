"""Helpers for the tests of decode kernels: inputs that reveal faults, the launch, and the check of the result."""

from __future__ import annotations

from dataclasses import replace

import torch

import reference
from fast.kernels.schedule_costs import measured_schedule_costs
from fast.parity import compare_states
from reference.interfaces import (
    COMPUTE_FORMAT,
    NEUTRAL_SPLIT_RULE,
    AttentionState,
    CacheFormat,
    DecodeMetadata,
    DecodeSchedule,
)

from .factories import Batch, make_batch, new_cache
from .triton_mode import DEVICE

SCALE = 0.13
FORMS = ["whole", "split", "scheduled", "batch-invariant", "batch-invariant, planned"]
LENS = {  # query lengths and sequence lengths; length 0 with a query token is a padding row
    "page edges": ([1] * 6, [0, 1, 63, 64, 65, 129]),
    "ragged": ([3, 0, 1, 5], [131, 20, 0, 70]),
    "no requests": ([], []),
}


def make_inputs(query_lens, seq_lens, heads=3, dtype=torch.float32, widths=(512, 64), block_size=64):
    """Return absorbed queries, rope parts of the queries, cache and plan on the CPU.

    Slots of the cache that belong to no token are NaN. Entries of the block table after a request's last block are
    out-of-range numbers.
    """
    latent, rope = widths
    batch = make_batch(query_lens, seq_lens, block_size)
    cache = new_cache(batch, latent + rope, dtype)
    plan = reference.build_mla_metadata(batch.common, block_size, 4096, max([1, *query_lens])).decode
    ql, q_pe = (torch.randn(batch.num_tokens, heads, width).to(dtype) for width in widths)
    return ql / latent**0.5, q_pe, cache, plan


def stored_cache(batch: Batch, entries: torch.Tensor, widths, cache_format: CacheFormat, kv_scale=None):
    """Return a cache that stores `entries` [tokens of all requests, Lkv + R]; other bytes are `cache_format.poison`."""
    latent, rope = widths
    columns = cache_format.columns(latent, rope)
    stored = reference.quantize_entries(entries[:, :latent], entries[:, latent:], cache_format, kv_scale)
    codes = torch.full((batch.num_blocks, batch.block_size, columns), cache_format.poison, dtype=torch.uint8)
    places = torch.tensor([place for own in batch.slots for place in own], dtype=torch.int64).view(-1, 2)
    codes[places[:, 0], places[:, 1]] = stored.view(torch.uint8)
    return codes.view(cache_format.storage_dtype)


def make_stored_inputs(
    cache_format, query_lens, seq_lens, heads=3, dtype=torch.float32, widths=(512, 64), block_size=64
):
    """Return the inputs of `make_inputs` with a cache of another format, and the scale of the layer or None.

    The magnitudes of the tokens differ by factors up to about 1000. Some numbers of the latents are so small that they
    are stored as subnormal e4m3 numbers. Some numbers exceed the largest number of the format and saturate.
    """
    latent, rope = widths
    batch = make_batch(query_lens, seq_lens, block_size)
    plan = reference.build_mla_metadata(batch.common, block_size, 4096, max([1, *query_lens])).decode
    kv_scale = torch.tensor(0.0137) if cache_format.layer_scale else None
    entries = torch.randn(sum(seq_lens), latent + rope) * torch.exp(1.2 * torch.randn(sum(seq_lens), 1))
    entries[:, : latent // 4] /= 64
    cache = stored_cache(batch, entries, widths, cache_format, kv_scale)
    ql, q_pe = (torch.randn(batch.num_tokens, heads, width).to(dtype) for width in widths)
    return (ql / latent**0.5, q_pe, cache, plan), kv_scale


def rising_inputs(heads, dtype, widths=(512, 64), block_size=64):
    """Return inputs for which a kernel must rescale its sums: later tiles of keys have much larger scores.

    A tile is 64 keys. In even heads, the largest score so far (base 2) rises by more than 8 in some tiles. With random
    inputs, later scores are rarely larger than the scores of the first tile. A kernel that never rescales its sums
    would then pass the tests.
    """
    inputs = make_inputs([1, 2, 1], [700, 330, 190], heads, dtype, widths, block_size)
    ql, q_pe, cache, plan = inputs
    ql[:, 1::2] /= 4096
    q_pe[:, 1::2] /= 4096
    # One factor for each tile. The factors are powers of two, so that no key is rounded. The largest factors make
    # exp2(score - largest score of the first tile) overflow.
    factors = (1, 1, 4, 4, 2, 16, 16, 1, 128, 16, 4)
    for request, length in enumerate(plan.seq_lens.tolist()):
        for column in range(-(-length // block_size)):
            cache[plan.block_table[request, column]] *= factors[column * block_size // 64]
    queries = torch.cat((ql, q_pe), -1)[0].float()  # request 0, the longest
    keys = cache[plan.block_table[0, : -(-700 // block_size)].long()].flatten(0, 1)[:700].float()
    highest = torch.stack([tile.amax(-1) for tile in (queries @ keys.T * SCALE * 1.4427).split(64, -1)], -1)
    jumps = highest[:, 1:] - highest.cummax(-1).values[:, :-1] > 8  # [heads, tiles - 1]
    assert jumps[::2, ::2].any() and jumps[::2, 1::2].any() and not jumps[1::2].any()
    return inputs


def on_device(plan: DecodeMetadata) -> DecodeMetadata:
    """Return the plan with its tensors on DEVICE, where the kernels run."""
    tensors = {name: value.to(DEVICE) for name, value in vars(plan).items() if isinstance(value, torch.Tensor)}
    return replace(plan, **tensors)


def cut_of(schedule) -> tuple:
    """Return the contents of a schedule as arguments of a decode kernel, with tensors on DEVICE."""
    if schedule is None:
        return None, None, False, NEUTRAL_SPLIT_RULE
    tensors = (t if t is None else t.to(DEVICE) for t in (schedule.tile_ranges, schedule.split_offsets))
    return *tensors, schedule.batch_invariant, schedule.split_rule


def arguments(
    ql, q_pe, cache, plan, scale=SCALE, schedule=None, out_dtype=None, cache_format=COMPUTE_FORMAT, kv_scale=None
) -> tuple:
    """Return the arguments of a backend's decode, with tensors on DEVICE."""
    p = on_device(plan)
    return (
        ql.to(DEVICE), q_pe.to(DEVICE), cache.to(DEVICE), p.block_table, p.seq_lens, p.query_start_loc, p.visible_lens,
        p.max_query_len, p.max_seq_len, scale, out_dtype or ql.dtype, *cut_of(schedule),
        cache_format, None if kv_scale is None else kv_scale.to(DEVICE),
    )  # fmt: skip


def launch(kernels, *inputs, **options) -> AttentionState:
    """Launch the decode of a backend on DEVICE and return the attention state on the CPU."""
    out, lse = kernels.mla_decode(*arguments(*inputs, **options))
    assert out.is_contiguous() and lse.is_contiguous()
    return AttentionState(out.cpu(), lse.cpu())


def differences(decode, arguments, first, times) -> int:
    """Decode `times` times; return the number of elements whose bits differ from `first`, and describe these decodes.

    The description says which calls differ, and which rows of the first such call.
    """
    counts = torch.zeros(times, dtype=torch.int64, device=DEVICE)
    wrong = [each.clone() for each in first]  # results of the first call that differs
    seen = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for number in range(times):
        results = decode(*arguments)
        for mine, other in zip(results, first, strict=True):
            kind = torch.int16 if mine.dtype.itemsize == 2 else torch.int32
            counts[number] += (mine.view(kind) != other.view(kind)).sum()
        new = (counts[number] > 0) & ~seen
        for kept, mine in zip(wrong, results, strict=True):
            kept.copy_(torch.where(new, mine, kept))
        seen |= new
    if bool(seen):
        out, lse = (each.float() for each in wrong)
        apart = (out - first[0].float()).abs().amax(-1)  # [T, N]; NaN if an output is NaN
        rows = [(token, head, float(apart[token, head]), float(lse[head, token] - first[1][head, token]))
                for token, head in ((apart != 0) | (lse != first[1]).T).nonzero().tolist()]  # fmt: skip
        print(f"{int((counts > 0).sum())} of {times} calls differ: {counts.nonzero().flatten().tolist()[:20]}")
        print("token, head, largest difference of the output, difference of the LSE:", rows[:40])
    return int(counts.sum())


def captured(kernels, *inputs, schedule=None):
    """Capture a decode in a CUDA graph; return the graph, and the output and LSE that a replay writes.

    A replay reads the tensors in `inputs` if they are on DEVICE, and otherwise copies of them.
    """
    given = arguments(*inputs, schedule=schedule)
    kernels.mla_decode(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = kernels.mla_decode(*given)
    return graph, out, lse


def verdict(value, ql, q_pe, cache, plan, cache_format=COMPUTE_FORMAT, kv_scale=None):
    """Assert that the error of an attention state is within its budget; rows without keys must have output 0, LSE -inf.

    The error is measured against `reference` in float64 (gold). The budget is computed from the error of `reference` in
    the dtype of the inputs (low).
    """
    stored = {"cache_format": cache_format, "kv_scale": kv_scale}
    wide_cache = cache.double() if cache_format.storage_dtype is None else cache
    gold = reference.mla_decode(ql.double(), q_pe.double(), wide_cache, plan, SCALE, **stored)
    low = reference.mla_decode(ql, q_pe, cache, plan, SCALE, **stored)
    assert value.out.dtype == low.out.dtype and value.lse.dtype == low.lse.dtype
    for parity in compare_states("mla_decode", value, low, gold):
        assert parity.passed, parity
    unseen = plan.visible_lens == 0
    assert value.out[unseen].eq(0).all() and value.lse[:, unseen].eq(-torch.inf).all()


def schedule_of(plan, heads, programs, batch_invariant=False, request_cost=5):
    """Return the schedule of `reference.plan_decode` with the costs of the GPU kernels.

    With 0 programs, the schedule has no work items; only `batch_invariant` and the rule for splits are set.
    """
    costs = replace(measured_schedule_costs(heads), request_cost=request_cost)
    if programs == 0:
        return DecodeSchedule(batch_invariant=batch_invariant, split_rule=costs.split_rule)
    return reference.plan_decode(plan.seq_lens, programs, costs, batch_invariant)


def schedule_for(form, plan, heads):
    """Return the schedule for an entry of FORMS; None for a form without a schedule."""
    if form in ("whole", "split"):
        return None
    return schedule_of(plan, heads, 0 if form == "batch-invariant" else 3, form != "scheduled")
