"""Tests of the plan of a step of grouped-query attention: brute force, equality of both packages, refusals.

A plan has all integers that the attention of a step needs. The first requests of a batch are decodes, the others are
prefills. The expected visible keys are found token by token.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fast
import reference
from reference.interfaces import (
    FP8_DS_MLA,
    GraphSupport,
    QueryLenSupport,
    ScheduleCosts,
    TokenOwnership,
    UnsupportedConfiguration,
)
from reference.interfaces.gqa import EncoderMetadata, GQAMetadata

from ..mla.test_builder import to_cpu
from ..planning.test_batch import brute_split
from ..support.context_parallel import of_rank
from ..support.factories import assert_same_bits, integers, make_batch, moved, offsets
from ..support.gqa_plans import (
    CROSS,
    ENCODER,
    ENCODER_ONLY,
    LOCAL,
    PLAIN,
    WINDOW,
    cross_batch,
    held,
    wanted_ranges,
    wanted_scheduled,
)
from ..support.planning import PACKAGES, batches, same, without_lens
from ..support.properties import given, st
from ..support.synchronisation import no_synchronisation

SINGLE, UNIFORM, VARLEN = QueryLenSupport.SINGLE_ONLY, QueryLenSupport.UNIFORM, QueryLenSupport.VARLEN
CONFIGS = {
    "plain": PLAIN,
    "window 1": replace(PLAIN, sliding_window=1),
    "window 5": WINDOW,
    "window of a block": replace(PLAIN, sliding_window=16),
    "window of a block + 1": replace(PLAIN, sliding_window=17),
    "largest window": replace(PLAIN, sliding_window=2**31 - 1),
    "sinks": replace(PLAIN, attention_sinks=True),
}
RANKS = (None, TokenOwnership(1, 0), TokenOwnership(2, 1), TokenOwnership(3, 0, 4), TokenOwnership(3, 2, 16))


def check_plan(plan, batch, config, threshold, uniform=False, ownership=None):
    """Assert that a plan has the integers of a slow computation for each request and token."""
    query_lens, seq_lens, common = batch.query_lens, batch.seq_lens, batch.common
    decodes, prefills, decode_tokens, _ = brute_split(query_lens, threshold, uniform)
    assert (plan.num_decodes, plan.num_prefills, plan.num_decode_tokens) == (decodes, prefills, decode_tokens)
    assert plan.num_actual_tokens == batch.num_tokens and plan.config is config and plan.ownership == ownership
    ranges = wanted_ranges(config, query_lens, seq_lens, ownership)
    for part, rows, tokens in (
        (plan.decode, slice(0, decodes), slice(0, decode_tokens)),
        (plan.prefill, slice(decodes, None), slice(decode_tokens, None)),
    ):
        own, lens = query_lens[rows], [held(length, ownership) for length in seq_lens]
        assert part.visible_lens.tolist() == [end for _, end in ranges[tokens]]
        if config.sliding_window is None:
            assert part.first_visible is None
        else:
            assert part.first_visible.tolist() == [first for first, _ in ranges[tokens]]
        assert part.seq_lens.tolist() == lens[rows]
        assert part.query_start_loc.tolist() == offsets(own).tolist()
        assert part.max_query_len == max(own, default=0) and part.max_seq_len >= max(lens[rows], default=0)
        assert part.block_size == batch.block_size and part.graph is GraphSupport.NONE
        several = max(own, default=0) > 1 or config.sliding_window is not None
        shared = ownership is not None and ownership.size > 1 and several
        assert part.mask == ("visible_lens" if shared else "causal")
        assert_same_bits(part.block_table, common.block_table[rows])
    return plan


@given(batches(), st.sampled_from(sorted(CONFIGS)), st.sampled_from([1, 2, 3]), st.booleans())
def test_plan(lens, name, threshold, uniform):
    """The plans of both packages are right (`check_plan`) and equal, for any order and with padding rows."""
    plans, config = [], CONFIGS[name]
    for ops in (reference, fast):
        torch.manual_seed(0)
        batch = make_batch(*lens, padding=2)
        plan = ops.build_gqa_metadata(batch.common, 16, config, threshold, (VARLEN, UNIFORM)[uniform], num_programs=2)
        assert plan.slot_mapping is batch.common.slot_mapping
        plans.append(check_plan(plan, batch, config, threshold, uniform))
    same(*plans)


@given(batches(), st.sampled_from(sorted(CONFIGS)), st.sampled_from(RANKS), st.sampled_from([1, 3]))
def test_plans_of_ranks(lens, name, ownership, threshold):
    """On a rank, the plan counts the keys that this rank owns, in prefills as well as in decodes."""
    config = CONFIGS[name]
    batch = make_batch(*lens)
    if ownership is None:
        return
    common = of_rank(batch.common, 16, ownership)
    plans = [
        ops.build_gqa_metadata(common, 16, config, threshold, ownership=ownership, num_programs=3)
        for ops in (reference, fast)
    ]
    same(*plans)
    check_plan(plans[0], batch, config, threshold, False, ownership)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_prefills_before_decodes(ops, config):
    """The prefill-then-decode layout with padding rows at the end is legal; all requests are then prefills."""
    batch = make_batch([40, 3, 1, 1, 1, 2], [70, 3, 33, 16, 0, 0], padding=5)
    plan = check_plan(ops.build_gqa_metadata(batch.common, 16, config), batch, config, 1)
    assert plan.num_decodes == 0 and plan.num_prefills == 6 and plan.prefill.visible_lens.tolist()[-3:] == [0, 0, 0]
    builder = ops.GQAMetadataBuilder(config, 16, 100, 8)
    same(builder.build(0, batch.common), plan)
    decodes = make_batch([1, 1, 1, 0], [33, 16, 0, 0], padding=3)
    plan = check_plan(ops.build_gqa_metadata(decodes.common, 16, config), decodes, config, 1)
    assert plan.num_decodes == 4 and plan.num_actual_tokens == 3


def test_order_required(ops, plain_errors):
    common = make_batch([1, 30, 2, 1], [40, 90, 9, 8]).common
    wanted = "^common: expected every decode before the first prefill, number 1, got the decode"
    with pytest.raises(ValueError, match=f"{wanted} 3 behind it$"):
        ops.build_gqa_metadata(common, 16, PLAIN, require_order=True)
    with pytest.raises(ValueError, match=f"{wanted} 2 behind it$"):
        ops.build_gqa_metadata(common, 16, PLAIN, 2, require_order=True)
    with pytest.raises(ValueError, match=f"{wanted} 3 behind it$"):
        ops.build_gqa_metadata(common, 16, PLAIN, 2, UNIFORM, require_order=True)
    assert ops.build_gqa_metadata(common, 16, PLAIN, 40, require_order=True).num_decodes == 4


@given(batches(), st.booleans(), st.booleans(), st.sampled_from([1, 2, 17]))
def test_orders_agree(lens, uniform, local, threshold):
    """Both packages require the same order of requests, and give the same plan or the same error."""
    found, config, support = [], LOCAL if local else WINDOW, (VARLEN, UNIFORM)[uniform]
    for ops in (reference, fast):
        torch.manual_seed(0)
        common = make_batch(*lens).common
        try:
            found.append(ops.build_gqa_metadata(common, 16, config, threshold, support, True, num_programs=2))
        except ValueError as error:
            found.append(str(error))
    same(*found)


# Tests of plans without lengths on the CPU.


@given(batches(), st.sampled_from(["plain", "window 5", "window of a block"]), st.sampled_from([0, 7]),
       st.sampled_from([0, 3]), PACKAGES)  # fmt: skip
def test_plans_without_lengths(lens, name, slack, programs, ops):
    """Without lengths on the CPU, the tensors of a plan are the same, and a schedule is planned at least as often."""
    config, batch = CONFIGS[name], make_batch(*lens)
    options = dict(decode_threshold=3, num_programs=programs)
    whole = ops.build_gqa_metadata(batch.common, 16, config, **options)
    loose = ops.build_gqa_metadata(without_lens(batch.common, slack), 16, config, **options)
    for part in ("decode", "prefill"):
        wanted, got = getattr(whole, part), getattr(loose, part)
        assert got.max_seq_len >= wanted.max_seq_len
        same(replace(got, max_seq_len=wanted.max_seq_len), wanted)
    assert (loose.num_decodes, loose.num_decode_tokens) == (whole.num_decodes, whole.num_decode_tokens)
    if whole.schedule is not None:
        same(loose.schedule, whole.schedule)


@pytest.mark.parametrize("ownership", RANKS, ids=str)
def test_decodes_need_nothing_on_the_cpu(ops, ownership):
    """A step of decodes alone needs neither lengths nor offsets on the CPU."""
    batch = make_batch([2, 1, 1, 2], [90, 33, 1, 0])
    common = batch.common if ownership is None else of_rank(batch.common, 16, ownership)
    for config in (PLAIN, WINDOW):
        wanted = ops.build_gqa_metadata(common, 16, config, 2, ownership=ownership)
        got = ops.build_gqa_metadata(without_lens(common, 2, offsets_too=True), 16, config, 2, ownership=ownership)
        assert got.num_decodes == 4 and got.decode.max_query_len == 2
        same(replace(got.decode, max_seq_len=wanted.decode.max_seq_len), wanted.decode)


def test_prefills_need_bounds(ops, plain_errors):
    common = without_lens(make_batch([1, 30], [40, 90]).common, bounds=False)
    wanted = "^common.seq_lens_cpu_upper_bound: expected bounds on the CPU for queries of more than 1 tokens, got None$"
    with pytest.raises(ValueError, match=wanted):
        ops.build_gqa_metadata(common, 16, WINDOW)
    with pytest.raises(ValueError, match=r"^common.seq_lens_cpu: expected a tensor on the CPU, got None$"):
        ops.build_gqa_metadata(without_lens(make_batch([1, 1], [40, 90]).common), 16, LOCAL)


# Tests of schedules. A schedule assigns tiles of 64 keys to programs; only the tiles that a decode reads count.


@given(batches(), st.sampled_from([None, 1, 5, 63, 64, 65, 100, 2**31 - 1]), st.sampled_from([None, 16, 48, 64, 128]),
       st.sampled_from(RANKS), st.integers(0, 300))  # fmt: skip
def test_scheduled_lens(lens, window, chunk, ownership, extra):
    """The keys that count for a schedule are those from the first tile that a query token reads."""
    query_lens, seq_lens = lens[0], [length and length + extra for length in lens[1]]
    config = replace(PLAIN, sliding_window=window, attention_chunk_size=chunk)
    found = [
        ops.planning.visible_lens.scheduled_lens(offsets(query_lens), integers(*seq_lens), window, ownership, chunk)
        for ops in (reference, fast)
    ]
    same(*found)
    # a larger window than every length has no effect
    short = config if window is None or window < 2**20 else replace(config, sliding_window=None)
    assert found[0].tolist() == wanted_scheduled(short, query_lens, seq_lens, ownership)
    most = reference.interfaces.gqa.longest_scheduled_len
    bound = most(max(seq_lens, default=0), max(query_lens, default=0), window, ownership)
    assert all(counted <= bound for counted, query_len in zip(found[0].tolist(), query_lens, strict=True) if query_len)


def test_a_window_takes_the_schedule_away(ops):
    """Without a window, a schedule saves the idle time of short requests. A window makes all requests equally short."""
    batch = make_batch([1] * 6, [8000, 9, 100, 40, 1, 64])
    whole = ops.build_gqa_metadata(batch.common, 16, PLAIN, num_programs=4)
    assert whole.schedule_choice.planned and whole.schedule_choice.longest_tiles == 125
    same(whole.schedule, ops.plan_decode(whole.decode.seq_lens, 4))
    window = ops.build_gqa_metadata(batch.common, 16, replace(PLAIN, sliding_window=128), num_programs=4)
    assert window.schedule is None and window.schedule_choice.longest_tiles == 2
    sinks = ops.build_gqa_metadata(batch.common, 16, replace(PLAIN, attention_sinks=True), num_programs=4)
    same(sinks.schedule, whole.schedule)  # a sink is one score, and no tile
    wide = ops.build_gqa_metadata(batch.common, 16, replace(PLAIN, sliding_window=4000), num_programs=4)
    assert wide.schedule_choice.planned and wide.schedule_choice.longest_tiles == 63
    counted = integers(8000 - 62 * 64, 9, 100, 40, 1, 64)  # the window begins at key 4000, in tile 62
    same(wide.schedule, ops.plan_decode(counted, 4))


@given(batches(), st.sampled_from(sorted(CONFIGS)), st.sampled_from([0, 1, 5]), st.booleans(), st.booleans(),
       st.sampled_from([0, 3]), st.sampled_from([0, 4000]))  # fmt: skip
def test_builders_agree(lens, name, programs, invariant, fast_build, drafted, extra):
    """Both builders give the same plan; `fast_build` leaves out a schedule that batch invariance does not need."""
    seq_lens, plans = [length and length + extra * (length % 3) for length in lens[1]], []
    for ops in (reference, fast):
        torch.manual_seed(0)
        common = make_batch(lens[0], seq_lens).common
        builder = ops.GQAMetadataBuilder(
            CONFIGS[name], 16, 50_000, 8, num_speculative_tokens=drafted, num_programs=programs,
            batch_invariant=invariant,
        )  # fmt: skip
        plans.append(builder.build(0, common, fast_build))
    same(*plans)
    decodes = plans[0].num_decode_tokens > 0
    assert (decodes and invariant) or plans[0].schedule is None or not fast_build
    assert not (invariant and decodes) or plans[0].schedule.batch_invariant
    assert (plans[0].prefill_schedule is not None) == (invariant and plans[0].num_prefills > 0)
    if decodes and programs > 1 and not fast_build:
        lens = wanted_scheduled(CONFIGS[name], lens[0], seq_lens)[: plans[0].num_decodes]
        assert plans[0].schedule_choice.total_tiles == sum(-(-length // 64) for length in lens if length)


def test_reorder(ops, plain_errors):
    """The swaps bring the decodes to the front, whatever their contexts are."""

    def here(*values):
        return integers(*values).cpu()

    builder = ops.GQAMetadataBuilder(PLAIN, 16, 500, 8, num_speculative_tokens=2)
    assert builder.reorder_batch_threshold == 3
    order, query_lens = list(range(5)), [9, 1, 3, 4, 0]
    for one, other in builder.reorder_batch(here(*query_lens), here(0, 400, 5, 0, 3)):
        order[one], order[other] = order[other], order[one]
    assert sorted(order[:3]) == [1, 2, 4]
    uniform = ops.GQAMetadataBuilder(PLAIN, 16, 500, 8, UNIFORM, 2)
    assert uniform.reorder_batch(here(3, 9, 1, 2, 2), here(5, 5, 5, 5, 5)) == ((0, 3), (1, 4))
    assert uniform.reorder_batch(here(1, 9, 3, 0), here(5, 5, 5, 5)) == ((0, 2), (1, 3))  # the longest in a tie
    with pytest.raises(ValueError, match="^context_lens: expected"):
        builder.reorder_batch(here(1, 2), here(1))
    with pytest.raises(ValueError, match="^query_lens: expected"):
        builder.reorder_batch(here(1, -2), here(1, 3))


# Tests of attention types other than a decoder, and of batches without a cache.


def test_cross_attention(ops):
    """Every query token attends all keys of its request's encoder; lengths, blocks and slots are the encoder's."""
    batch = make_batch([1, 1, 3, 1, 20], [40, 9, 7, 0, 20], padding=2)
    encoder_lens = [30, 17, 64, 0, 5]
    common = cross_batch(batch, encoder_lens, ran=(2, 4))
    plan = ops.build_gqa_metadata(common, 16, CROSS, num_programs=2)
    assert (plan.num_decodes, plan.num_prefills, plan.num_decode_tokens, plan.num_actual_tokens) == (2, 3, 2, 26)
    assert plan.decode.seq_lens.tolist() == [30, 17] and plan.decode.visible_lens.tolist() == [30, 17]
    assert plan.prefill.visible_lens.tolist() == [64] * 3 + [0] + [5] * 20
    assert plan.prefill.query_start_loc.tolist() == [0, 3, 4, 24] and plan.prefill.seq_lens.tolist() == [64, 0, 5]
    assert plan.decode.first_visible is plan.prefill.first_visible is None and plan.prefill.mask == "visible_lens"
    assert plan.slot_mapping is common.encoder_slot_mapping and plan.slot_mapping.shape[0] == 69
    assert_same_bits(plan.prefill.block_table, common.encoder_block_table[2:])
    assert plan.decode.max_seq_len == 30 and plan.prefill.max_seq_len == 64
    later = ops.build_gqa_metadata(cross_batch(batch, encoder_lens), 16, CROSS)
    assert later.slot_mapping.shape[0] == 0
    # the layers of self attention take the same batch as an ordinary batch
    same(ops.build_gqa_metadata(common, 16, WINDOW), ops.build_gqa_metadata(batch.common, 16, WINDOW))
    builder = ops.GQAMetadataBuilder(CROSS, 16, 100, 8, num_programs=2)
    same(builder.build(0, common), plan)
    assert builder.use_cascade_attention(32, integers(1, 1).cpu(), integers(40, 50).cpu()) is False
    bare = replace(common, seq_lens_cpu=None, seq_lens_cpu_upper_bound=batch.common.seq_lens_cpu)
    same(ops.build_gqa_metadata(bare, 16, CROSS, num_programs=2), plan)


@pytest.mark.parametrize("ownership", [TokenOwnership(2, 1), TokenOwnership(3, 0, 4)], ids=str)
def test_cross_attention_of_ranks(ops, ownership):
    """A rank's query tokens attend the keys of the encoder that this rank owns."""
    common = cross_batch(make_batch([1, 2], [9, 5]), [30, 17])
    plan = ops.build_gqa_metadata(common, 16, CROSS, ownership=ownership)
    counts = [sum(token // ownership.interleave % ownership.size == ownership.rank for token in range(length))
              for length in (30, 17)]  # fmt: skip
    assert plan.decode.visible_lens.tolist() == plan.decode.seq_lens.tolist() == counts[:1]
    assert plan.prefill.visible_lens.tolist() == counts[1:] * 2 and plan.prefill.seq_lens.tolist() == counts[1:]


def test_decodes_of_cross_attention_need_no_lengths(ops):
    batch = make_batch([1, 1, 1], [40, 9, 7])
    common = cross_batch(batch, [30, 17, 3])
    bare = replace(common, seq_lens_cpu=None, query_start_loc_cpu=None)
    same(ops.build_gqa_metadata(bare, 16, CROSS), ops.build_gqa_metadata(common, 16, CROSS))


def test_encoders(ops):
    """An encoder's plan has the offsets of its requests and no cache; tokens behind the last request are padding."""
    for config in (ENCODER, ENCODER_ONLY, replace(ENCODER, sliding_window=4)):
        common = make_batch([7, 1, 0, 30], [7, 1, 0, 30], padding=4).common
        plan = ops.build_gqa_metadata(common, 16, config)
        assert type(plan) is EncoderMetadata and plan.config is config
        assert plan.query_start_loc.tolist() == [0, 7, 8, 8, 38]
        assert plan.max_query_len == 30 and plan.num_actual_tokens == 38
        builder = ops.GQAMetadataBuilder(config, 16, 100, 8)
        same(builder.build(0, common), plan)
        narrow = replace(common, block_table=common.block_table[:, :0])
        same(builder.build(0, narrow, True), plan)
        bare = replace(common, seq_lens_cpu=None, query_start_loc_cpu=None)
        assert ops.build_gqa_metadata(bare, 16, config).max_query_len == common.max_query_len


def test_encoders_have_no_context(ops, plain_errors):
    """A request of an encoder with context is refused if the host has its length, or an upper bound of its length."""
    common = make_batch([2, 3], [2, 9]).common
    builder = ops.GQAMetadataBuilder(ENCODER, 16, 100, 8)

    def refused(field, batch):
        wanted = (
            f"^common.{field}: expected the query length 3 in an encoder, which has no context, got 9 at request 1$"
        )
        for build in (lambda: builder.build(0, batch), lambda: ops.build_gqa_metadata(batch, 16, ENCODER_ONLY)):
            with pytest.raises(ValueError, match=wanted):
                build()

    refused("seq_lens", common)
    bare = without_lens(common, bounds=False)
    if torch.get_default_device().type == "cpu":
        refused("seq_lens", bare)
        refused("seq_lens", without_lens(common, offsets_too=True))
    else:  # nothing on the host shows the context
        assert builder.build(0, bare).max_query_len == 3
    without_context = make_batch([2, 3], [2, 3]).common
    refused(
        "seq_lens_cpu_upper_bound",
        replace(without_lens(without_context), seq_lens_cpu_upper_bound=integers(2, 9).cpu()),
    )
    assert builder.build(0, without_lens(without_context)).num_actual_tokens == 5


@pytest.mark.parametrize("config", [CROSS, ENCODER, ENCODER_ONLY], ids=lambda config: config.attention_type.value)
def test_decoders_only(ops, config, plain_errors):
    """Drafted tokens and a shared prefix are for decoders only; prefills of cross attention stay legal."""
    sizes, kind = dict(block_size=16, max_model_len=100, max_num_seqs=8), config.attention_type.value
    several = "decodes of several query tokens are for decoders only"
    batch = make_batch([1, 3], [1, 3])
    common = cross_batch(batch, [30, 17], ran=(0, 1)) if config is CROSS else batch.common
    with pytest.raises(
        ValueError,
        match=f"^num_speculative_tokens: expected 0 for attention type {kind}, because {several}, got 3$",
    ):
        ops.GQAMetadataBuilder(config, **sizes, num_speculative_tokens=3)
    with pytest.raises(
        ValueError, match=f"^decode_threshold: expected 1 for attention type {kind}, because {several}, got 4$"
    ):
        ops.build_gqa_metadata(common, 16, config, decode_threshold=4)
    builder = ops.GQAMetadataBuilder(config, **sizes, num_speculative_tokens=0)
    assert builder.reorder_batch_threshold == 1
    wanted = (
        f"^common_prefix_len: expected 0 for attention type {kind}, because a shared prefix is for decoders only, got"
    )
    for fast_build in (False, True):
        with pytest.raises(ValueError, match=f"{wanted} 16$"):
            builder.build(16, common, fast_build)
    plan = builder.build(0, common)
    assert config is not CROSS or (plan.num_decodes, plan.num_prefills, plan.prefill.max_query_len) == (1, 1, 3)
    decoders = ops.GQAMetadataBuilder(PLAIN, **sizes, num_speculative_tokens=3)
    assert decoders.reorder_batch_threshold == 4 and decoders.build(0, common).num_decodes == 2


def test_layers_refuse_decodes_of_cross_attention(ops, plain_errors):
    """A layer of cross attention attends a prefill of 3 tokens, and refuses the same plan as the plan of a decode."""
    common = cross_batch(make_batch([3], [3]), [30])
    plan = ops.build_gqa_metadata(common, 16, CROSS)
    decoding = replace(plan, decode=plan.prefill, prefill=plan.decode, num_decodes=1, num_decode_tokens=3)
    layer, cache = ops.GQAAttention(CROSS), torch.randn(2, 4, 16, 2, 32)
    output = torch.full((3, 4, 32), 7.0)
    wanted = "^metadata.decode.max_query_len: expected at most 1 for attention type cross, because decodes of several"
    with pytest.raises(ValueError, match=wanted):
        layer(torch.randn(3, 4, 32), None, None, cache, decoding, output)
    assert (output == 7).all()
    assert (layer(torch.randn(3, 4, 32), None, None, cache, plan, output) != 7).all()


@pytest.mark.parametrize("config", [PLAIN, WINDOW, LOCAL, CROSS, ENCODER], ids=["plain", "window", "local", "cross",
                                                                               "encoder"])  # fmt: skip
def test_numbers_of_tokens(ops, config, plain_errors):
    """A batch whose number of tokens is not the last of its offsets is refused: only captured plans have padding."""
    lens = [1, 0, 1] if config is ENCODER else [5, 6, 7]
    batch = make_batch([1, 0, 1], lens, padding=1)
    common = cross_batch(batch, [5, 0, 9]) if config is CROSS else batch.common
    ops.build_gqa_metadata(common, 16, config)
    builder = ops.GQAMetadataBuilder(config, 16, 100, 8)
    for tokens in (3, 1):
        wrong = replace(common, num_actual_tokens=tokens)
        for build in (lambda wrong=wrong: ops.build_gqa_metadata(wrong, 16, config),
                      lambda wrong=wrong: builder.build(0, wrong)):  # fmt: skip
            with pytest.raises(
                ValueError, match=f"^common.num_actual_tokens: expected 2, the last of the offsets, got {tokens}$"
            ):
                build()
        bare = replace(wrong, seq_lens_cpu=None, query_start_loc_cpu=None)
        if torch.get_default_device().type == "cpu" and config is not LOCAL:
            with pytest.raises(ValueError, match="^common.num_actual_tokens: expected 2, the last of the offsets"):
                builder.build(0, bare)
    if builder.can_run_in_cudagraph(common):
        padded = replace(common, num_actual_tokens=3)
        plan = ops.plan_captured_gqa_decodes(padded, 16, config, 0)
        assert plan.decode.visible_lens.tolist()[2:] == [0] and plan.decode.query_start_loc.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("config", [PLAIN, WINDOW, LOCAL], ids=["plain", "window", "local"])
def test_batches_without_a_cache(ops, config):
    """A block table without columns is legal if no request has context."""
    batch = make_batch([40, 1, 70], [40, 1, 70])
    common = replace(batch.common, block_table=batch.common.block_table[:, :0])
    plan = ops.build_gqa_metadata(common, 16, config)
    wanted = ops.build_gqa_metadata(batch.common, 16, config)
    for part in ("decode", "prefill"):
        found, cached = getattr(plan, part), getattr(wanted, part)
        assert found.block_table.shape == (cached.seq_lens.shape[0], 0)
        same(replace(found, block_table=cached.block_table), cached)
    profile = replace(common, block_table=common.block_table, seq_lens_cpu=None)
    with pytest.raises(ValueError, match="^common.seq_lens_cpu: expected a tensor on the CPU, got None$"):
        ops.build_gqa_metadata(profile, 16, config)


# Tests of refusals.


def test_bad_batches(ops, plain_errors):
    batch = make_batch([1, 3], [40, 20])
    common = batch.common
    with pytest.raises(ValueError, match="^block_table: expected at least 3 columns for request 0, got 2$"):
        ops.build_gqa_metadata(replace(common, block_table=common.block_table[:, :2]), 16, PLAIN)
    with pytest.raises(ValueError, match="^block_table: expected at least 3 columns for request 0, got 0$"):
        ops.build_gqa_metadata(replace(common, block_table=common.block_table[:, :0]), 16, PLAIN)
    with pytest.raises(ValueError, match="^common.block_size: expected 16, the block size of the plan, got 32$"):
        ops.build_gqa_metadata(replace(common, block_size=32), 16, PLAIN)
    with pytest.raises(TypeError, match="^common: expected a CommonAttentionMetadata, got list$"):
        ops.build_gqa_metadata([], 16, PLAIN)
    with pytest.raises(TypeError, match="^common: expected a CrossAttentionBatch with encoder_seq_lens, encoder_block"):
        ops.build_gqa_metadata(common, 16, CROSS)
    cross = cross_batch(batch, [30, 20])
    with pytest.raises(ValueError, match=r"^common.encoder_seq_lens: expected shape \[2\], got \[1\]$"):
        ops.build_gqa_metadata(replace(cross, encoder_seq_lens=integers(3)), 16, CROSS)
    with pytest.raises(ValueError, match="^common.encoder_block_table: expected at least 2 columns for 30 tokens"):
        ops.build_gqa_metadata(replace(cross, encoder_block_table=cross.encoder_block_table[:, :1]), 16, CROSS)
    with pytest.raises(ValueError, match="^common.encoder_seq_lens: expected 0 for a padding row, got 20 at re"):
        ops.build_gqa_metadata(cross_batch(make_batch([1, 3], [40, 0]), [30, 20]), 16, CROSS)
    with pytest.raises(ValueError, match="^common.seq_lens: expected the query length 1 in an encoder, which has"):
        ops.build_gqa_metadata(common, 16, ENCODER)
    if torch.get_default_device().type == "cpu":  # on a GPU the host does not know these values
        with pytest.raises(ValueError, match="^common.slot_mapping: expected slots for at most the 1 new tokens of"):
            ops.build_gqa_metadata(common, 16, PLAIN, ownership=TokenOwnership(2, 0))
        with pytest.raises(ValueError, match="^seq_lens: expected at least the query length 3, got 2 at request 1$"):
            ops.build_gqa_metadata(replace(common, seq_lens=integers(40, 2)), 16, PLAIN)


BAD = {  # arguments of `build_gqa_metadata`, and the error
    "config": ({"config": 3}, TypeError, "config: expected a GQAConfig, got int"),
    "block size": ({"block_size": 24}, ValueError, "block_size: expected a positive multiple of 16, got 24"),
    "block size 0": ({"block_size": 0}, ValueError, "block_size: expected a positive multiple of 16, got 0"),
    "threshold": ({"decode_threshold": 0}, ValueError, "decode_threshold: expected at least 1, got 0"),
    "single": ({"decode_threshold": 2, "query_len_support": SINGLE}, ValueError,
               "decode_threshold: expected 1 with SINGLE_ONLY, got 2"),
    "support": ({"query_len_support": "any"}, TypeError, "query_len_support: expected a QueryLenSupport, got str"),
    "order": ({"require_order": 1}, TypeError, "require_order: expected True or False, got int"),
    "ownership": ({"ownership": 2}, TypeError, "ownership: expected a TokenOwnership or None, got int"),
    "interleave": ({"ownership": TokenOwnership(2, 0, 3)}, ValueError,
                   "interleave: expected a divisor of the block size 16, got 3"),
    "programs": ({"num_programs": -1}, ValueError, "num_programs: expected an int >= 0 or None, got -1"),
    "costs": ({"schedule_costs": 3}, TypeError, "schedule_costs: expected a ScheduleCosts or None, got int"),
    "dtype": ({"dtype": torch.int32}, ValueError, "dtype: expected one of"),
    "chunk": ({"config": replace(PLAIN, attention_chunk_size=24)}, ValueError,
              "config.attention_chunk_size: expected a multiple of the block size 16, got 24"),
    "format": ({"cache_format": FP8_DS_MLA}, UnsupportedConfiguration,
               "cache_format: expected compute_dtype or fp8_e4m3 for a key/value cache, got fp8_ds_mla"),
    "ALiBi on ranks": ({"config": replace(PLAIN, alibi_slopes=(0.5,) * 4), "ownership": TokenOwnership(2, 0)},
                       UnsupportedConfiguration, "config.alibi_slopes: expected None if 2 ranks share sequences,"),
    "chunks on ranks": ({"config": LOCAL, "ownership": TokenOwnership(2, 0)}, UnsupportedConfiguration,
                        "config.attention_chunk_size: expected None if 2 ranks share sequences, got 32"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "kind", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(ops, options, kind, message, plain_errors):
    common = make_batch([1, 3], [40, 20]).common
    with pytest.raises(kind) as caught:
        ops.build_gqa_metadata(common, **{"block_size": 16, "config": PLAIN} | options)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


BAD_BUILDERS = {  # arguments of `GQAMetadataBuilder`, and the error
    "block size": ({"block_size": 8}, ValueError, "block_size: expected a positive multiple of 16, got 8"),
    "length": ({"max_model_len": 0}, ValueError, "max_model_len: expected a positive int, got 0"),
    "requests": ({"max_num_seqs": -2}, ValueError, "max_num_seqs: expected a positive int, got -2"),
    "drafted": ({"num_speculative_tokens": -1}, ValueError, "num_speculative_tokens: expected an int >= 0, got -1"),
    "programs": ({"num_programs": True}, ValueError, "num_programs: expected an int >= 0, a function or None, got"),
    "dtype": ({"dtype": torch.int32}, ValueError, "dtype: expected one of"),
    "graphs": ({"graph_support": GraphSupport.ANY, "query_len_support": UNIFORM}, ValueError,
               "graph_support: expected NONE or ONE_QUERY_LEN with a decode kernel for UNIFORM query lengths, got ANY"),
    "format": ({"cache_format": FP8_DS_MLA}, UnsupportedConfiguration, "cache_format: expected compute_dtype or"),
    "ranks": ({"context_parallel": 2}, TypeError, "context_parallel: expected a ContextParallel or None, got int"),
    "invariant": ({"batch_invariant": 1}, TypeError, "batch_invariant: expected True or False, got int"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "kind", "message"), BAD_BUILDERS.values(), ids=BAD_BUILDERS)
def test_bad_builders(ops, options, kind, message, plain_errors):
    with pytest.raises(kind) as caught:
        ops.GQAMetadataBuilder(**{"config": PLAIN, "block_size": 16, "max_model_len": 64, "max_num_seqs": 4} | options)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_bad_calls_of_a_builder(ops, plain_errors):
    common = make_batch([1, 1], [40, 33]).common
    builder = ops.GQAMetadataBuilder(PLAIN, 16, 64, 2, num_programs=lambda query_len: -1)
    with pytest.raises(ValueError, match="^num_programs: expected a function that gives at least 0, got -1$"):
        builder.build(0, common)
    builder = ops.GQAMetadataBuilder(PLAIN, 16, 64, 2)
    with pytest.raises(ValueError, match="^common_prefix_len: expected at most the context 39 of request 0, got 48$"):
        builder.build(48, common)
    with pytest.raises(ValueError, match="^common_prefix_len: expected an int >= 0, got -1$"):
        builder.build(-1, common)
    with pytest.raises(TypeError, match="^fast_build: expected True or False, got int$"):
        builder.build(0, common, 1)
    with pytest.raises(ValueError, match="^common: expected at most 2 requests, got 3$"):
        builder.build(0, make_batch([1] * 3, [5] * 3).common)
    with pytest.raises(ValueError, match="^num_processors: expected a positive int or None, got 0$"):
        fast.GQAMetadataBuilder(PLAIN, 16, 64, 2, num_processors=0)


def test_planning_writes_nothing(ops):
    """Planning does not write its input, also when the plan shares tensors with the batch."""
    common = make_batch([1, 4, 9], [17, 40, 9]).common
    before = [x.clone() for x in vars(common).values() if isinstance(x, torch.Tensor)]
    for config in (WINDOW, LOCAL):
        ops.build_gqa_metadata(common, 16, config, num_programs=3, schedule_costs=ScheduleCosts(request_cost=0))
    after = [x for x in vars(common).values() if isinstance(x, torch.Tensor)]
    assert all(one.equal(other) for one, other in zip(before, after, strict=True))


def test_empty_batch(ops):
    plan = ops.build_gqa_metadata(make_batch([], []).common, 16, WINDOW)
    assert isinstance(plan, GQAMetadata) and (plan.num_decodes, plan.num_prefills, plan.num_actual_tokens) == (0, 0, 0)
    assert plan.decode.first_visible.shape == plan.prefill.first_visible.shape == (0,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_does_not_wait_for_the_gpu():
    """Plans of batches on a GPU equal the plans on the CPU, and the host computes them without waiting for the GPU."""
    with torch.device("cpu"):
        batch = make_batch([1, 2, 1, 40], [900, 33, 16, 70])
        own, cross = make_batch([1, 1, 1], [8000, 33, 16]).common, cross_batch(batch, [30, 17, 64, 5])
    of_encoder = ("encoder_seq_lens", "encoder_block_table", "encoder_slot_mapping")
    there = replace(moved(cross, "cuda"), **{name: getattr(cross, name).cuda() for name in of_encoder})
    sizes = dict(num_programs=3, num_processors=1, cascade_costs=fast.CascadeCosts())
    builders = [
        fast.GQAMetadataBuilder(config, 16, 9000, 8, num_speculative_tokens=drafted, **sizes)
        for config, drafted in ((PLAIN, 1), (WINDOW, 1), (replace(PLAIN, sliding_window=4000), 1), (CROSS, 0))
    ]
    pairs = [(builder, common) for builder in builders[:3] for common in ((batch.common, moved(batch.common, "cuda")),
             (own, moved(own, "cuda")))] + [(builders[3], (cross, there))]  # fmt: skip
    wanted = [builder.build(0, common) for builder, (common, _) in pairs]
    for builder, (_, common) in pairs:
        builder.build(0, common)  # compiles kernels and allocates memory
    with no_synchronisation():
        plans = [builder.build(0, common) for builder, (_, common) in pairs]
    for plan, one in zip(plans, wanted, strict=True):
        assert plan.prefill.query_start_loc.is_cuda and plan.decode.visible_lens.is_cuda
        same(to_cpu(plan), one)
