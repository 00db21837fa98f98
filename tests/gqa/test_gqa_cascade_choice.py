"""Tests of the decision for a cascade of grouped-query attention, and of the cascade in a plan.

In a cascade, all decodes share a prefix. One call attends this prefix for all requests together, and another call
attends the rest of each request. The two attention states of each request are then merged.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import fast
import reference
from fast.kernels.device import device_facts
from fast.kernels.schedule_costs import GPU_CASCADE_COSTS
from reference.interfaces import FP8_E4M3, CascadeCosts, CommonAttentionMetadata
from reference.interfaces.gqa import GQAConfig, PagedAttentionMetadata

from ..support.factories import GARBAGE, integers, make_batch
from ..support.gqa_plans import CROSS, ENCODER, PLAIN, WINDOW, wanted_ranges
from ..support.planning import PACKAGES, same, without_lens
from ..support.properties import given, st

LLAMA = GQAConfig(32, 8, 128)
NEUTRAL = CascadeCosts(flops_per_byte=200, kernel_bytes=0)
WITHOUT = {  # configs that never have a cascade
    "ALiBi": replace(LLAMA, alibi_slopes=(0.5,) * 32),
    "window": replace(LLAMA, sliding_window=10**6),
    "chunks": replace(LLAMA, attention_chunk_size=2**20),
    "cross": replace(CROSS, num_heads=32),
    "encoder": ENCODER,
}


def on_host(value, requests):
    """Return the same length for each request, on the CPU, as `use_cascade_attention` wants the lengths."""
    return integers(*[value] * requests).cpu()


def seconds(requests, config, processors, stored, flops_per_byte=200):
    """Return the time of a call, found by counting every row, key and tile one after another.

    `requests` are (query tokens, keys) of each request, and `stored` is the number of bytes of a cache element.
    """
    flops = read = tiles = 0
    for queries, keys in requests:
        for _ in range(config.num_kv_heads):
            read += keys * 2 * config.head_dim * stored
            rows = queries * config.num_heads // config.num_kv_heads
            flops += rows * keys * 2 * 2 * config.head_dim
            tiles += math.ceil(rows / 64) * math.ceil(keys / 64)
    idle = math.ceil(tiles / processors) * processors / tiles
    return max(flops, flops_per_byte * read) * idle


def count_kernels(requests, config, processors):
    """Return the kernels of a call over requests of (query tokens, keys); a second kernel combines splits."""
    programs = 0
    for queries, _ in requests:
        programs += config.num_kv_heads * math.ceil(queries * config.num_heads // config.num_kv_heads / 64)
    several_tiles = any(keys > 64 for _, keys in requests)
    return 1 + (several_tiles and processors // programs >= 2)


def counted(prefix, query_lens, seq_lens, config, processors, costs=NEUTRAL, stored=2, state=4):
    """Return the times with and without a cascade."""
    requests = [(q, s) for q, s in zip(query_lens, seq_lens, strict=True) if q and s]
    tokens = sum(q for q, _ in requests)
    byte, kernel = costs.flops_per_byte, costs.flops_per_byte * costs.kernel_bytes
    merge = byte * 2 * 2 * tokens * config.num_heads * (config.head_dim + 1) * state
    suffixes = [(q, s - prefix) for q, s in requests]
    calls = ([(tokens, prefix)], suffixes, requests)
    times = [seconds(each, config, processors, stored, byte) for each in calls]
    more = [count_kernels(each, config, processors) for each in calls]
    apart = times[0] + times[1] + merge + kernel * (more[0] + more[1] + 1)
    return apart, times[2] + kernel * more[2]


@given(
    st.lists(st.tuples(st.sampled_from([1, 1, 4, 0]), st.sampled_from([0, 30, 500, 5000])), min_size=1, max_size=30),
    st.sampled_from([0, 16, 256, 4096]), st.sampled_from([LLAMA, PLAIN, GQAConfig(16, 16, 64), GQAConfig(64, 1, 128)]),
    st.sampled_from([(torch.bfloat16, 2, 4), (torch.float16, 2, 4), (torch.float32, 4, 4), (torch.float64, 8, 8)]),
    st.sampled_from([1, 2, 108, 132]),
    st.builds(CascadeCosts, st.sampled_from([200, 1, 40, 1000]), st.sampled_from([0, 5, 30_000_000])),
)  # fmt: skip
def test_decision(pairs, prefix, config, sizes, processors, costs):
    """The decision is that of counted bytes and FLOPs, and both packages decide alike."""
    query_lens, seq_lens = [q for q, _ in pairs], [s and s + prefix for _, s in pairs]
    dtype, stored, state = sizes
    given_lens = prefix, integers(*query_lens).cpu(), integers(*seq_lens).cpu()
    found = [
        ops.use_gqa_cascade_attention(*given_lens, config, dtype=dtype, num_processors=processors, costs=costs)
        for ops in (reference, fast)
    ]
    assert found[0] is found[1]
    if prefix == 0 or not any(q and s for q, s in zip(query_lens, seq_lens, strict=True)):
        assert not found[0]
        return
    apart, whole = counted(prefix, query_lens, seq_lens, config, processors, costs, stored, state)
    if abs(apart - whole) > 1e-9 * whole:
        assert found[0] is (apart < whole)


def test_what_decides(ops):
    """More query heads for each KV head, fp8, a short prefix or few requests speak against a cascade."""

    def decide(prefix=4096, requests=16, config=LLAMA, length=4200, query_len=1, **options):
        lens = on_host(query_len, requests), on_host(length, requests)
        return ops.use_gqa_cascade_attention(prefix, *lens, config, **options)

    assert decide() and not decide(requests=1) and not decide(prefix=0)
    # with one request the prefix is read once in any case; a prefix of one block saves less than the states cost
    assert not decide(prefix=16, length=4200) and decide(prefix=64, length=4200, requests=200)
    # 16 requests with 512 rows for the one KV head: FLOPs decide, and a cascade saves none
    assert not decide(config=GQAConfig(512, 1, 128))
    assert decide(cache_format=FP8_E4M3)
    # the prefix of 256 keys has 4 tiles of 8 KV heads, so most of 132 processors wait
    short = {"prefix": 256, "length": 257, "requests": 3}
    assert decide(**short) and not decide(**short, num_processors=132)
    assert decide(**short | {"requests": 8}, num_processors=132)
    # 15 requests of 4096 keys, two bytes for each of 2 * 8 * 128 columns: the cascade saves 252 MB for two more kernels
    assert decide(costs=CascadeCosts(kernel_bytes=100_000_000))
    assert not decide(costs=CascadeCosts(kernel_bytes=130_000_000))
    # with 132 processors, the cascade has three more kernels, because the call over the prefix is split
    assert decide(costs=CascadeCosts(kernel_bytes=70_000_000), num_processors=132)
    assert not decide(costs=CascadeCosts(kernel_bytes=100_000_000), num_processors=132)
    # FLOPs decide where a device moves many bytes in the time of a FLOP
    assert decide(costs=CascadeCosts(40)) and not decide(costs=CascadeCosts(1))


@pytest.mark.parametrize("processors", [1, 127, 128, 255, 256, 257, 1024])
@pytest.mark.parametrize("requests, length", [(8, 8192), (16, 4160), (16, 4161), (16, 4224)])
def test_kernels_are_counted(ops, requests, length, processors):
    """Raise the fixed time of a kernel to the time at which both ways are equal -> the decision changes there.

    The suffixes have one tile or two. With 16 requests of 8 KV heads, there is room for two splits from 256 processors
    on, and for the prefix alone with fewer processors.
    """
    prefix, config = 4096, LLAMA
    batch = prefix, [1] * requests, [length] * requests, config, processors
    (apart, whole), (apart_later, whole_later) = (counted(*batch, CascadeCosts(200, size)) for size in (0, 1))
    most = int((whole - apart) / ((apart_later - whole_later) - (apart - whole)))
    assert most > 10**6
    lens = on_host(1, requests), on_host(length, requests)
    for size, wanted in ((most - 1000, True), (most + 1000, False)):
        costs = CascadeCosts(kernel_bytes=size)
        assert ops.use_gqa_cascade_attention(prefix, *lens, config, num_processors=processors, costs=costs) is wanted


@pytest.mark.parametrize("config", WITHOUT.values(), ids=WITHOUT)
def test_configs_without_a_cascade(ops, config):
    lens = on_host(1, 64), on_host(5000, 64)
    assert ops.use_gqa_cascade_attention(4096, *lens, LLAMA) is True
    assert ops.use_gqa_cascade_attention(4096, *lens, config) is False
    builder = ops.GQAMetadataBuilder(config, 16, 8192, 64)
    assert builder.use_cascade_attention(4096, *lens) is False


def shared_batch(query_lens, seq_lens, shared, block_size=16):
    """Return a batch whose requests have the same first `shared` tokens in the same blocks; GARBAGE elsewhere."""
    batch = make_batch(query_lens, seq_lens, block_size)
    common, table = batch.common, batch.common.block_table.clone()
    real = [request for request, length in enumerate(seq_lens) if length]
    for request in real:
        table[request, : shared // block_size] = table[real[0], : shared // block_size]
    assert (table[seq_lens.index(0)] == GARBAGE).all() if 0 in seq_lens else True
    return CommonAttentionMetadata.make(
        common.query_start_loc_cpu, common.seq_lens_cpu, table, common.slot_mapping, block_size
    )


def test_plans(ops):
    """A plan has a cascade where it is faster: the prefix of the first real request, and the suffix of each one."""
    query_lens, seq_lens = [1, 1, 2, 1, 1, 1, 1, 1, 9], [0, 1000, 1001, 1017, 1030, 1100, 1000, 1001, 1200]
    common = shared_batch(query_lens, seq_lens, 992)
    options = dict(num_speculative_tokens=1, num_programs=4, cascade_costs=CascadeCosts())
    builder = ops.GQAMetadataBuilder(LLAMA, 16, 2048, 16, **options)
    plan = builder.build(992, common)
    assert plan.num_decodes == 8 and plan.schedule is None and plan.cascade is not None
    prefix, suffix = plan.cascade.prefix, plan.cascade.suffix
    assert type(prefix) is type(suffix) is PagedAttentionMetadata and prefix.first_visible is None
    assert prefix.block_table.tolist() == common.block_table[1:2, :62].tolist() and prefix.seq_lens.tolist() == [992]
    assert suffix.seq_lens.tolist() == [0, 8, 9, 25, 38, 108, 8, 9]
    visible = [end for _, end in wanted_ranges(LLAMA, query_lens[:8], seq_lens[:8])]
    assert prefix.visible_lens.tolist() == [min(end, 992) for end in visible]
    assert suffix.visible_lens.tolist() == [max(0, end - 992) for end in visible]
    same(plan.cascade, ops.split_shared_prefix(plan.decode, 992, 16, 1))
    assert builder.build(992, common, fast_build=True).cascade is None
    assert builder.build(0, common).cascade is None
    assert builder.build(992, without_lens(common)).cascade is None
    invariant = ops.GQAMetadataBuilder(LLAMA, 16, 2048, 16, num_speculative_tokens=1, batch_invariant=True)
    assert invariant.build(992, common).cascade is None
    assert invariant.use_cascade_attention(992, on_host(1, 2), on_host(1000, 2)) is False
    windowed = ops.GQAMetadataBuilder(replace(LLAMA, sliding_window=4096), 16, 2048, 16, num_speculative_tokens=1)
    assert windowed.build(992, common).cascade is None


def test_ranks_have_no_cascade(ops):
    def program(ranks):
        builder = ops.GQAMetadataBuilder(GQAConfig(4, 1, 64), 16, 8192, 64, context_parallel=ranks)
        return builder.use_cascade_attention(4096, on_host(1, 64), on_host(5000, 64))

    assert ops.simulate(2, 1, program) == [False, False]


def both_choices(**options):
    """Return the choice of `use_cascade_attention`, and of `build`, for 3 requests with a prefix of 256 keys.

    A cascade is faster on one processor, and slower on 132 processors.
    """
    builder = fast.GQAMetadataBuilder(LLAMA, 16, 8192, 64, **options)
    plan = builder.build(256, shared_batch([1] * 3, [257] * 3, 256))
    return builder.use_cascade_attention(256, on_host(1, 3), on_host(257, 3)), plan.cascade is not None


def test_processors_of_a_builder(monkeypatch):
    """Both methods of a builder of `fast` use the number of processors of one device, or a given number."""
    assert both_choices(num_processors=1, cascade_costs=CascadeCosts()) == (True, True)
    assert both_choices(num_processors=1, cascade_costs=CascadeCosts(kernel_bytes=10**9)) == (False, False)
    assert both_choices(num_processors=1, cascade_costs=CascadeCosts(flops_per_byte=1)) == (False, False)
    assert both_choices(num_processors=132) == (False, False)
    builders = [fast.GQAMetadataBuilder(LLAMA, 16, 8192, 64, device=device) for device in ("cpu", "cuda:3")]
    assert [builder.cascade_costs for builder in builders] == [NEUTRAL, GPU_CASCADE_COSTS]
    assert both_choices(device="cpu") == (True, True)  # also for a batch on a GPU
    asked = []

    def facts(device):
        asked.append(torch.device(device))
        return device_facts(torch.device("cpu"))._replace(processors=132)

    monkeypatch.setattr(fast.gqa.builder, "device_facts", facts)
    assert both_choices(device="cuda:3", backend="torch") == (False, False)  # also for a batch on a CPU
    assert asked == [torch.device("cuda:3")] * 2
    options = dict(num_processors=1, cascade_costs=CascadeCosts(), backend="torch")
    assert both_choices(device="cuda:3", **options) == (True, True) and len(asked) == 2


def test_default_device_of_a_builder():
    """Without a device, a builder takes the default device of PyTorch when it is made."""
    here = torch.get_default_device()
    processors = torch.cuda.get_device_properties(here).multi_processor_count if here.type == "cuda" else 1
    assert both_choices() == both_choices(num_processors=processors)
    with torch.device("meta"):
        builder = fast.GQAMetadataBuilder(LLAMA, 16, 8192, 64)
    assert builder.device == torch.device("meta")
    assert fast.GQAMetadataBuilder(LLAMA, 16, 8192, 64).device == here


@given(st.lists(st.tuples(st.sampled_from([1, 1, 2]), st.integers(0, 60)), min_size=1, max_size=6), PACKAGES,
       st.sampled_from([1, 7, 16, 40, 100]), st.sampled_from([16, 32]))  # fmt: skip
def test_windows_of_a_split(pairs, ops, window, prefix):
    """`split_shared_prefix` keeps a window: each key that a token attends is in exactly one part."""
    query_lens, seq_lens = [q for q, _ in pairs], [s and s + prefix + q for q, s in pairs]
    config = replace(WINDOW, sliding_window=window)
    plan = ops.build_gqa_metadata(make_batch(query_lens, seq_lens).common, 16, config, 2).decode
    if not any(seq_lens):
        return
    cascade = ops.split_shared_prefix(plan, prefix, 16, next(r for r, length in enumerate(seq_lens) if length))
    for token, (first, end) in enumerate(wanted_ranges(config, query_lens, seq_lens)):
        keys = []
        for part, begin in ((cascade.prefix, 0), (cascade.suffix, prefix)):
            low, high = int(part.first_visible[token]), int(part.visible_lens[token])
            assert 0 <= low <= high
            keys += range(begin + low, begin + high)
        assert keys == list(range(first, end))


def test_bad_input(ops, plain_errors):
    lens = integers(1, 1).cpu(), integers(40, 20).cpu()
    with pytest.raises(ValueError, match="^common_prefix_len: expected at most the 20 tokens of request 1, got 32$"):
        ops.use_gqa_cascade_attention(32, *lens, LLAMA)
    with pytest.raises(ValueError, match="^common_prefix_len: expected an int >= 0, got -16$"):
        ops.use_gqa_cascade_attention(-16, *lens, LLAMA)
    with pytest.raises(TypeError, match="^costs: expected a CascadeCosts or None, got int$"):
        ops.use_gqa_cascade_attention(16, *lens, LLAMA, costs=3)
    with pytest.raises(TypeError, match="^cascade_costs: expected a CascadeCosts or None, got int$"):
        ops.GQAMetadataBuilder(LLAMA, 16, 8192, 64, cascade_costs=3)
    with pytest.raises(ValueError, match="^kernel_bytes: expected an int >= 0, got -1$"):
        CascadeCosts(kernel_bytes=-1)
    with pytest.raises(ValueError, match="^flops_per_byte: expected a positive int, got 0$"):
        CascadeCosts(flops_per_byte=0)
    with pytest.raises(ValueError, match="^num_processors: expected a positive int, got 0$"):
        ops.use_gqa_cascade_attention(16, *lens, LLAMA, num_processors=0)
    with pytest.raises(TypeError, match="^config: expected a GQAConfig, got str$"):
        ops.use_gqa_cascade_attention(16, *lens, "llama")
    with pytest.raises(ValueError, match=r"^seq_lens: expected shape \[2\], got \[1\]$"):
        ops.use_gqa_cascade_attention(16, lens[0], integers(40).cpu(), LLAMA)
    builder = ops.GQAMetadataBuilder(LLAMA, 16, 8192, 64, cascade_costs=CascadeCosts())
    with pytest.raises(
        ValueError, match="^common_prefix_len: expected a positive multiple of the block size 16, got 1000"
    ):
        builder.build(1000, shared_batch([1] * 8, [1100] * 8, 992))
