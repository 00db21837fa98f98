"""Tests of `advance_step`, which turns the batch of a step into the batch of the next step.

The sampled token of each request becomes its one query token. `advance_step` writes ids, positions, slots, lengths and
offsets into the tensors of the batch. The tests compare these integers with a loop over all tokens.

A padding row is a request of length 0. In a batch "without lengths on the host", only the GPU has the lengths; the host
has upper bounds of the lengths, or nothing. `without_lens` makes such a batch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import fast
import reference
from fast import backends
from fast.backends import Backend, OpSupport
from reference.interfaces import CommonAttentionMetadata, GraphSupport, TokenOwnership

from ..support.backends import registered
from ..support.decode_loop import buffers, check_against_the_host, loop_cache, make_loop
from ..support.factories import (
    CONFIGS,
    DIRECT,
    assert_close64,
    integers,
    make_layer,
    make_weights,
    positions_of,
    table_without_blocks,
)
from ..support.planning import PACKAGES, batches, same, without_lens
from ..support.properties import given, st
from ..support.ranks import owners

BLOCK = 4


def copies(given):
    *tensors, common = given
    fields = {name: value.clone() for name, value in vars(common).items() if isinstance(value, torch.Tensor)}
    return *(x.clone() for x in tensors), replace(common, **fields)


def brute_force(sampled, common, tokens, block_size, ownership):
    """Return the expected ids, positions, slots, lengths and offsets, found by counting every token of a sequence."""
    query_lens, lens, table = common.query_start_loc.diff().tolist(), common.seq_lens.tolist(), common.block_table
    rows, after = [], []
    for request, (query_len, length) in enumerate(zip(query_lens, lens, strict=True)):
        grows = query_len > 0 and length > 0
        after.append(length + grows)
        if grows:
            *earlier, owner = owners(length + 1, ownership.size, ownership.interleave)
            column, at = divmod(earlier.count(ownership.rank), block_size)
            slot = int(table[request, column]) * block_size + at if owner == ownership.rank else -1
            rows.append((int(sampled[request]), length, slot))
        elif query_len > 0:
            rows.append((0, 0, -1))
    rows += [(0, 0, -1)] * (tokens - len(rows))
    starts = [0]
    for query_len in query_lens:
        starts.append(starts[-1] + min(query_len, 1))
    return *(list(column) for column in zip(*rows, strict=True)), after, starts


@given(batch=batches(), size=st.sampled_from([1, 2, 3, 8]), interleave=st.sampled_from([1, 2, 4]),
       blocks=st.integers(1, 3), padding=st.integers(0, 2), ops=PACKAGES,
       ids=st.sampled_from([torch.int32, torch.int64]), steps=st.integers(1, 3))  # fmt: skip
def test_integers(batch, size, interleave, blocks, padding, ops, ids, steps):
    """Every step gives the integers of `brute_force` on every rank, and exactly one rank owns each new token."""
    query_lens, seq_lens = batch
    block_size, tokens = interleave * blocks, sum(batch[0]) + padding
    width = -(-(max(seq_lens, default=0) + steps) // block_size)
    sampled, input_ids, positions, common = buffers(query_lens, seq_lens, width, padding, ids, block_size)
    on_rank = [copies((sampled, input_ids, positions, common)) for _ in range(size)]
    for _ in range(steps):
        found, after = [], []
        for rank, (_, input_ids, positions, common) in enumerate(on_rank):
            ownership = TokenOwnership(size, rank, interleave)
            wanted = brute_force(sampled, common, len(input_ids), block_size, ownership) if tokens else None
            given_ownership = None if size == 1 and interleave == 1 else ownership
            following = ops.advance_step(sampled, input_ids, positions, common, block_size, given_ownership)
            if wanted is not None:
                held = (input_ids, positions, common.slot_mapping, common.seq_lens, common.query_start_loc)
                assert [x.tolist() for x in held] == list(wanted)
            assert following.seq_lens is common.seq_lens and following.query_start_loc is common.query_start_loc
            host = CommonAttentionMetadata.from_lens(
                common.query_start_loc.diff().cpu(), common.seq_lens.cpu(), common.block_table, block_size, ownership
            )
            assert following.max_seq_len >= host.max_seq_len
            same(following, replace(host, max_seq_len=following.max_seq_len, max_query_len=following.max_query_len))
            assert following.max_query_len >= host.max_query_len
            count = following.num_actual_tokens
            found.append((following.slot_mapping >= 0).int())
            after.append((sampled, input_ids[:count], positions[:count], following))
        real = [s > 0 for q, s in zip(query_lens, seq_lens, strict=True) if q > 0]
        assert sum(found).tolist() == [int(is_real) for is_real in real]
        on_rank, tokens = after, count
        sampled = torch.randint(1, 1000, sampled.shape, dtype=ids)


@given(batch=batches(), size=st.sampled_from([1, 2, 3]), interleave=st.sampled_from([1, 4]), ops=PACKAGES)
def test_freed_blocks(batch, size, interleave, ops):
    """Every step reads the blocks of the new tokens alone; a window may have left all earlier blocks behind."""
    steps, block_size = 3, 4
    width = -(-(max(batch[1], default=0) + steps) // (block_size * size))
    whole = buffers(*batch, width, 0, torch.int64, block_size, size)
    freed, table = copies(whole), whole[-1].block_table
    *_, batch_of_freed = freed
    for rank in range(size):
        ownership, given = TokenOwnership(size, rank, interleave), (copies(whole), copies(freed))
        for _ in range(steps):
            lens = given[1][-1].seq_lens.tolist()
            entries = table_without_blocks(*batch_of_freed.block_table.shape)
            for request, tokens in enumerate(lens):
                column = tokens // (block_size * size)  # of the new token, at the position `tokens`
                entries[request, column] = table[request, column]
            given[1][-1].block_table.copy_(entries)
            following = []
            for sampled, input_ids, positions, common in given:
                after = ops.advance_step(sampled, input_ids, positions, common, block_size, ownership)
                count = after.num_actual_tokens
                following.append((sampled, input_ids[:count], positions[:count], after))
            given = following
            same(*(replace(each[-1], block_table=table) for each in given))
            assert given[0][2].equal(given[1][2])


def test_prefills_become_decodes(ops):
    """In the batch after a step with prefills, each request that had query tokens has one query token.

    Padding rows do not grow. The rest of the buffers gets the values of padding: id 0, position 0, slot -1.
    """
    table = integers(7, 3, 9, 1, 0, 5, 2, 8, 6, 4).view(5, 2)
    common = CommonAttentionMetadata.from_lens([1, 1, 3, 0, 2], [4, 0, 6, 5, 2], table, BLOCK)
    input_ids, positions = torch.arange(50, 57), torch.arange(7)
    following = ops.advance_step(torch.tensor([11, 12, 13, 14, 15]), input_ids, positions, common, BLOCK)
    assert input_ids.tolist() == [11, 0, 13, 15, 0, 0, 0]
    assert positions.tolist() == [4, 0, 6, 2, 0, 0, 0]
    assert common.slot_mapping.tolist() == [3 * 4, -1, 5 * 4 + 2, 6 * 4 + 2, -1, -1, -1]
    assert common.seq_lens.tolist() == [5, 0, 7, 5, 3]
    assert common.query_start_loc.tolist() == [0, 1, 2, 3, 3, 4]
    assert following.slot_mapping.tolist() == [12, -1, 22, 26] and following.num_actual_tokens == 4
    assert following.seq_lens_cpu.tolist() == [5, 0, 7, 5, 3] and following.max_query_len == 1
    assert following.query_start_loc_cpu.tolist() == [0, 1, 2, 3, 3, 4] and following.max_seq_len == 7


def test_nothing_to_advance(ops):
    """Without requests or without tokens, the buffers get the values of padding: id 0, position 0, slot -1."""
    for query_lens, seq_lens, tokens in (([], [], 0), ([], [], 3), ([0, 0], [3, 0], 2)):
        given = buffers(query_lens, seq_lens, 1, tokens)
        following = ops.advance_step(*given, BLOCK)
        assert given[1].eq(0).all() and given[2].eq(0).all() and given[3].slot_mapping.eq(-1).all()
        assert following.seq_lens.tolist() == seq_lens and following.num_actual_tokens == 0


def test_twins_agree_on_views():
    """Both packages write the same bits into strided views, and write nothing between the elements of a view."""
    wide = [torch.full((x.shape[0], 2), 99, dtype=x.dtype) for x in buffers([1, 2], [5, 2], 2)[:3]]
    given = buffers([1, 2], [5, 2], 2)
    results = []
    for ops in (reference, fast):
        sampled, input_ids, positions, common = copies(given)
        views = [x.clone() for x in wide]
        for view, values in zip(views, (sampled, input_ids, positions), strict=True):
            view[:, 0] = values
        following = ops.advance_step(*(view[:, 0] for view in views), common, BLOCK)
        assert all(view[:, 1].eq(99).all() for view in views)
        results.append((*views, following))
    same(*results)


def upper_bounds(common, longest):
    """Return the batch with upper bounds in place of the lengths on the CPU, like the batch of a captured graph."""
    return replace(common, seq_lens_cpu=torch.full_like(common.seq_lens_cpu, longest), max_seq_len=longest)


def test_upper_bounds_stay_in_bounds(ops):
    """Upper bounds of lengths on the CPU never exceed `max_seq_len` or the tokens that fit into a block table row."""
    for max_seq_len, bound in ((None, 8), (7, 7)):
        given = buffers([1, 1], [3, 4], 2)
        common = upper_bounds(given[3], bound)
        for _ in range(3):
            common = ops.advance_step(*given[:3], common, BLOCK, max_seq_len=max_seq_len)
            assert common.seq_lens_cpu.tolist() == [bound, bound] and common.max_seq_len == bound
        assert common.seq_lens.tolist() == [6, 7]


# Tests of batches without lengths on the host.


def knows_its_requests(query_lens):
    """Return whether the longest query length and the number of tokens determine the number of requests with tokens."""
    longest, tokens = max(query_lens, default=0), sum(query_lens)
    return longest <= 1 or -(-tokens // longest) == min(len(query_lens), tokens)


@given(batch=batches(), ops=PACKAGES, offsets_too=st.sampled_from([False, True]), slack=st.sampled_from([0, 3]),
       bounds=st.sampled_from([False, True]))  # fmt: skip
def test_without_lengths(batch, ops, offsets_too, slack, bounds):
    """Without lengths on the host, three steps give the same tensors as with lengths.

    The upper bounds of requests with tokens rise by 1 in each step. A batch that has no query offsets on the host is
    refused if the host does not know how many of its requests have tokens (`knows_its_requests`).
    """
    width = -(-(max(batch[1], default=0) + 3 + slack) // BLOCK)
    with torch.device("cpu"):
        start = buffers(*batch, width, 2)
    bare = (*start[:3], without_lens(start[3], slack, offsets_too, bounds))
    if offsets_too and not knows_its_requests(batch[0]):
        with pytest.raises(ValueError, match="^common.query_start_loc_cpu: expected offsets on the CPU, because "):
            ops.advance_step(*copies(bare), BLOCK)
        return
    (*held, common), (*other, found) = copies(start), copies(bare)
    for _ in range(3):
        bounds_before = found.seq_lens_cpu_upper_bound
        common, found = ops.advance_step(*held, common, BLOCK), ops.advance_step(*other, found, BLOCK)
        same(tuple(other), tuple(held))
        held[1:], other[1:] = ([x[: common.num_actual_tokens] for x in tensors[1:]] for tensors in (held, other))
        assert found.seq_lens_cpu is None and found.num_actual_tokens == common.num_actual_tokens
        for name in ("seq_lens", "query_start_loc", "slot_mapping", "block_table", "max_query_len"):
            same(getattr(found, name), getattr(common, name), name)
        if offsets_too:
            assert found.query_start_loc_cpu is None
        else:
            same(found.query_start_loc_cpu, common.query_start_loc_cpu)
        assert found.max_seq_len == common.max_seq_len + slack
        assert (found.seq_lens_cpu_upper_bound is None) is (offsets_too or not bounds)
        if found.seq_lens_cpu_upper_bound is not None:
            has_token = torch.tensor(batch[0], device="cpu") > 0
            same(found.seq_lens_cpu_upper_bound, bounds_before + ((bounds_before > 0) & has_token).int())


def test_bounds_over_steps(ops):
    """Over 5 steps, the upper bounds of growing requests rise by 1 up to a limit; the bounds of padding rows stay 0."""
    query_lens, seq_lens = [1, 1, 4, 0, 1], [4, 0, 6, 5, 20]
    for slack, max_seq_len in ((0, None), (2, None), (100, None), (100, 26)):
        *given, common = buffers(query_lens, seq_lens, 7, 2)
        bounds = integers(*(length + slack if length else 0 for length in seq_lens)).cpu()
        common = replace(without_lens(common, slack), seq_lens_cpu_upper_bound=bounds)
        for step in range(1, 6):
            common = ops.advance_step(*given, common, BLOCK, max_seq_len=max_seq_len)
            given[1:] = [x[: common.num_actual_tokens] for x in given[1:]]
            found, lens = common.seq_lens_cpu_upper_bound.tolist(), common.seq_lens.tolist()
            limit = max_seq_len or 7 * BLOCK  # 7 columns of the block table
            grown = [4 + step, 0, 6 + step, 5, 20 + step]
            wanted = [min(length + slack, limit) if length else 0 for length in grown]
            wanted[3] = 5 + slack  # a request without query tokens keeps its bound
            assert lens == grown and found == wanted
            assert max(lens) <= common.max_seq_len == max(20 + slack, min(20 + slack + step, limit))

    *given, common = buffers([1, 1, 1, 0], [4, 0, 6, 5], 4)
    bounds = integers(5, 0, 7, 8).cpu()
    common = replace(without_lens(common, 1, offsets_too=True), seq_lens_cpu_upper_bound=bounds)
    for step in range(1, 6):  # without offsets on the host, the bounds of requests without query tokens rise too
        common = ops.advance_step(*given, common, BLOCK)
        given[1:] = [x[:3] for x in given[1:]]
        assert common.seq_lens_cpu_upper_bound.tolist() == [5 + step, 0, 7 + step, 8 + step]
        assert common.seq_lens.tolist() == [4 + step, 0, 6 + step, 5] and common.num_actual_tokens == 3


def test_bounds_beside_lengths(ops):
    """If the host has both lengths and upper bounds, the bounds rise without a check, because no plan reads them."""
    given = buffers([1, 1, 0], [4, 0, 6], 3)
    common = replace(given[3], seq_lens_cpu_upper_bound=integers(9, 0, 3).cpu())
    following = ops.advance_step(*given[:3], common, BLOCK)
    assert following.seq_lens_cpu_upper_bound.tolist() == [10, 0, 3] and following.seq_lens_cpu.tolist() == [5, 0, 6]


def test_drafted_tokens(ops):
    """Without query offsets on the host, a batch can be advanced if all requests have equally many query tokens."""
    given = buffers([3, 3], [9, 5], 3)
    common = without_lens(given[3], offsets_too=True)
    following = ops.advance_step(*given[:3], common, BLOCK)
    assert following.num_actual_tokens == 2 and following.max_query_len == 1
    assert following.seq_lens.tolist() == [10, 6] and following.query_start_loc.tolist() == [0, 1, 2]
    assert following.slot_mapping.tolist() == given[3].slot_mapping[:2].tolist() and following.slot_mapping.min() >= 0


@pytest.mark.parametrize("offsets_too", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_plans_without_lengths(ops, config, offsets_too):
    """Several steps of a layer give the same outputs and the same cache with and without lengths on the host."""
    dtype, width, query_lens, seq_lens = torch.float64, 10, [1, 1, 5, 7, 0], [20, 0, 21, 7, 0]
    with torch.device("cpu"):
        if offsets_too:
            query_lens = [1, 1, 1, 1, 0]
        layer = make_layer(ops, config, make_weights(config, dtype), dtype)
        table = torch.randperm(5 * width).view(5, width).int()
        cache = torch.randn(5 * width, BLOCK, config.head_size, dtype=dtype)
        embedding = torch.randn(60, config.hidden_size, dtype=dtype)
        prompt, samples = torch.randint(0, 60, (sum(query_lens),)), torch.randint(0, 60, (4, 5))
        builder = ops.MLAMetadataBuilder(config, BLOCK, width * BLOCK, 5, num_programs=2)

        def outputs(change):
            held, ids, positions = cache.clone(), prompt.clone(), positions_of(query_lens, seq_lens)
            common = change(CommonAttentionMetadata.from_lens(query_lens, seq_lens, table, BLOCK))
            found = []
            for sampled in samples:
                plan = builder.build(0, common)
                tokens = common.num_actual_tokens
                found.append(layer(embedding[ids[:tokens]], positions[:tokens], held, plan))
                common = ops.advance_step(sampled, ids[:tokens], positions[:tokens], common, BLOCK)
            return found, held, common

        wanted, cache_wanted, common = outputs(lambda common: common)
        for slack in (0, 5):
            found, held, bare = outputs(partial(without_lens, slack=slack, offsets_too=offsets_too))
            assert bare.seq_lens_cpu is None and bare.seq_lens.equal(common.seq_lens)
            for step, output in enumerate(found):
                assert output.abs().max() > 0.01
                assert_close64(output, wanted[step])
            assert_close64(held, cache_wanted)


# Tests of several steps of a layer.


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_steps_of_a_layer(config):
    """5 steps with `advance_step` give the same bits as 5 steps whose batches the host makes; step 1 has prefills."""
    dtype, steps, width = torch.float32, 5, 10
    layer = make_layer(fast, config, make_weights(config, dtype), dtype)
    table = torch.randperm(5 * width).view(5, width).int()
    held = torch.randn(5 * width, BLOCK, config.head_size)
    embedding = torch.randn(60, config.hidden_size)
    query_lens, seq_lens = [1, 1, 5, 7, 0], [20, 0, 21, 7, 0]
    prompt = torch.randint(0, 60, (sum(query_lens),))

    def run(cache, ids, positions, common):
        plan = fast.build_mla_metadata(common, BLOCK, 64)
        hidden = layer(embedding[ids], positions, cache, plan)
        # a request without tokens also gets a sampled token; nothing reads this token
        last = (common.query_start_loc[1:] - 1).long()
        return hidden, (hidden[last] @ embedding.T).argmax(-1)

    def first_step():
        common = CommonAttentionMetadata.from_lens(query_lens, seq_lens, table, BLOCK)
        return held.clone(), prompt.clone(), positions_of(query_lens, seq_lens), common

    cache, ids, positions, common = first_step()
    lens, single = list(seq_lens), []
    for _ in range(steps):
        hidden, sampled = run(cache, ids, positions, common)
        single.append(hidden)
        lens = [length + (length > 0) for length in lens]
        ids = torch.tensor([token if length else 0 for token, length in zip(sampled.tolist(), lens, strict=True)][:4])
        positions = torch.tensor([max(length - 1, 0) for length in lens[:4]])
        common = CommonAttentionMetadata.from_lens([1, 1, 1, 1, 0], lens, table, BLOCK)
    wanted = cache

    cache, ids, positions, common = first_step()
    for step in range(steps):
        hidden, sampled = run(cache, ids, positions, common)
        assert hidden.equal(single[step]), step
        common = fast.advance_step(sampled, ids, positions, common, BLOCK)
        ids, positions = ids[: common.num_actual_tokens], positions[: common.num_actual_tokens]
    assert cache.equal(wanted) and common.seq_lens.tolist() == [25, 0, 26, 12, 0]
    assert single[0].isfinite().all() and single[0].abs().max() > 0.01


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("programs", [0, 3])
def test_steps_over_buffers(ops, programs, on_host):
    """Steps that advance a batch in its buffers on the device give the same bits as steps whose batches the host makes.

    With `on_host`, the batch has upper bounds of the lengths on the host. Otherwise the host has neither lengths nor
    query offsets.
    """
    dtype, steps, lens, ids = torch.float32, 4, [14, 0, 1, 33], [3, 0, 9, 41]
    loop = make_loop(ops, DIRECT, dtype, torch.device("cpu"), len(lens), steps, programs)
    held = loop_cache(DIRECT, dtype, len(lens))
    if not on_host:
        loop.batch = without_lens(loop.batch, offsets_too=True)
    with torch.device("cpu"), torch.no_grad():
        loop.load(lens, ids, held)
        loop.run(steps)
        found, outputs = loop.state(), loop.outputs.clone()
        loop.load(lens, ids, held)
        for _ in range(steps):
            loop.run(1)
        assert all(one.equal(other) for one, other in zip(loop.state(), found, strict=True))
        grown = [length + steps * (length > 0) for length in lens]
        assert found[0].tolist() == grown and found[2].tolist() == loop.host_batch(grown).slot_mapping.tolist()
        check_against_the_host(loop, lens, ids, held, outputs)


# Tests of refused arguments, and of backends.

REFUSED = {
    "ids of another dtype": (
        {"input_ids": torch.Tensor.int}, r"input_ids: expected dtype torch.int64, got torch.int32"),
    "sampled ids in float": (
        {"sampled_token_ids": torch.Tensor.float},
        r"sampled_token_ids: expected dtype torch.int32 or torch.int64, got torch.float32"),
    "one sampled id too few": ({"sampled_token_ids": lambda t: t[:-1]},
                               r"sampled_token_ids: expected shape \[3\], got \[2\]"),
    "positions in int32": ({"positions": torch.Tensor.int},
                           r"positions: expected dtype torch.int64, got torch.int32"),
    "too few positions": ({"positions": lambda t: t[:-1]}, r"positions: expected shape \[6\], got \[5\]"),
    "too few slots": ({"slot_mapping": lambda t: t[:-1]}, r"common.slot_mapping: expected shape \[6\], got \[5\]"),
    "a stride of 0": ({"positions": lambda t: t[:1].expand(6)},
                      r"positions: expected elements at different addresses, because they are written, got a stride"
                      r" of 0"),
    "positions elsewhere": ({"positions": lambda t: t.to("meta")}, r"positions: expected device cpu, got meta"),
    "a block size of 0": ({"block_size": lambda _: 0}, r"block_size: expected a positive int, got 0"),
    "slots of another block size": ({"block_size": lambda _: 8},
                                    r"common.block_size: expected 8, the block size of the plan, got 4"),
    "an interleave that does not divide": ({"ownership": lambda _: TokenOwnership(2, 0, 3)},
                                           r"interleave: expected a divisor of the block size 4, got 3"),
    "a max_seq_len of 0": ({"max_seq_len": lambda _: 0}, r"max_seq_len: expected a positive int or None, got 0"),
    "a request at max_seq_len": ({"max_seq_len": lambda _: 6},
                                 r"max_seq_len: expected at least 7, the next length of request 2, got 6"),
    "a full block table": ({"block_table": lambda t: t[:, :1]},
                           r"common.block_table: expected at least 2 columns for request 0, got 1"),
    "a negative block": ({"block_table": lambda t: -t - 1},
                         r"common.block_table: expected blocks in \[0, 2147483648\) at request 0, got -\d+"),
    "offsets that decrease": (
        {"query_start_loc": lambda t: integers(0, 2, 1, 6)},
        r"common.query_start_loc: expected values that never decrease, got 2 then 1 at request 1"),
    "more tokens than ids": ({"query_start_loc": lambda t: integers(0, 1, 2, 7), "seq_lens": lambda t: t + 1},
                             r"input_ids: expected at least 7 tokens, as common.query_start_loc has, got 6"),
    "a negative length": ({"seq_lens": lambda t: -t},
                          r"common.seq_lens: expected lengths >= 0, got -4 at request 0"),
}  # fmt: skip


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_refusals(ops, changes, message, plain_errors):
    """A refused call raises an error of one line and writes nothing."""
    with torch.device("cpu"):
        sampled, input_ids, positions, common = buffers([1, 1, 4], [4, 3, 6], 2)
        given = dict(sampled_token_ids=sampled, input_ids=input_ids, positions=positions, common=common,
                     block_size=BLOCK, ownership=None, max_seq_len=None)  # fmt: skip
        for name, change in changes.items():
            if name in given:
                given[name] = change(given[name])
            else:
                given["common"] = replace(given["common"], **{name: change(getattr(given["common"], name))})
        held = [given["input_ids"], given["positions"], *(getattr(given["common"], name) for name in (
            "seq_lens", "query_start_loc", "slot_mapping"))]  # fmt: skip
        before = [x.clone() for x in held]
        with pytest.raises(ValueError, match=f"^{message}$"):
            ops.advance_step(**given)
        assert all(one.is_meta or one.equal(other) for one, other in zip(held, before, strict=True))


REFUSED_WITHOUT_LENGTHS = {
    "no lengths on the device": (
        {"seq_lens": None}, TypeError, r"common.seq_lens: expected a tensor, got NoneType"),
    "no offsets on the device": (
        {"query_start_loc": None}, TypeError, r"common.query_start_loc: expected a tensor, got NoneType"),
    "no slots": ({"slot_mapping": None}, TypeError, r"common.slot_mapping: expected a tensor, got NoneType"),
    "a negative bound": (
        {"seq_lens_cpu_upper_bound": integers(4, 3, -6)}, ValueError,
        r"common.seq_lens_cpu_upper_bound: expected bounds >= 0, got -6 at request 2"),
    "a bound below the length": (
        {"seq_lens_cpu_upper_bound": integers(4, 2, 6)}, ValueError,
        r"common.seq_lens_cpu_upper_bound: expected at least the 3 keys of the request, got 2 at request 1"),
    "a bound below the query tokens": (
        {"seq_lens_cpu_upper_bound": integers(4, 3, 3)}, ValueError,
        r"common.seq_lens_cpu_upper_bound: expected at least the 4 query tokens of the request, got 3 at request 2"),
    "too few bounds": (
        {"seq_lens_cpu_upper_bound": integers(4, 3)}, ValueError,
        r"common.seq_lens_cpu_upper_bound: expected shape \[3\], got \[2\]"),
    "bounds in int64": (
        {"seq_lens_cpu_upper_bound": integers(4, 3, 6).long()}, ValueError,
        r"common.seq_lens_cpu_upper_bound: expected dtype torch.int32, got torch.int64"),
    "queries of several lengths without offsets": (
        {"query_start_loc_cpu": None}, ValueError,
        r"common.query_start_loc_cpu: expected offsets on the CPU, because 2 to 3 requests may have tokens, got None"),
    "more tokens than queries": (
        {"query_start_loc_cpu": None, "num_actual_tokens": 13}, ValueError,
        r"common.num_actual_tokens: expected at most 12 for 3 requests of at most 4 tokens, got 13"),
    "lengths without offsets": (
        {"seq_lens_cpu": integers(4, 3, 6), "query_start_loc_cpu": None}, ValueError,
        r"common.query_start_loc_cpu: expected offsets on the CPU beside seq_lens_cpu, got None"),
    "a request at max_seq_len": (
        {"max_seq_len": 6}, ValueError,
        r"max_seq_len: expected at least 7, the next length of request 2, got 6"),
}  # fmt: skip


@pytest.mark.parametrize("changes, error, message", REFUSED_WITHOUT_LENGTHS.values(), ids=REFUSED_WITHOUT_LENGTHS)
def test_refusals_without_lengths(ops, changes, error, message, plain_errors):
    """A refused call for a batch without lengths on the host raises an error of one line and writes nothing."""
    with torch.device("cpu"):
        *tensors, common = buffers([1, 1, 4], [4, 3, 6], 2)
        changes = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in changes.items()}
        limit = changes.pop("max_seq_len", None)
        common = replace(without_lens(common), **changes)
        held = [*tensors, *(x for x in (common.seq_lens, common.query_start_loc, common.slot_mapping) if x is not None)]
        before = [x.clone() for x in held]
        with pytest.raises(error, match=f"^{message}$"):
            ops.advance_step(*tensors, common, BLOCK, max_seq_len=limit)
        assert all(one.equal(other) for one, other in zip(held, before, strict=True))


def test_wrong_types(ops, plain_errors):
    given = buffers([1], [3], 1)
    for changed, message in (
        ((*given[:3], 5, BLOCK), "common: expected a CommonAttentionMetadata, got int"),
        ((*given[:3], given[3], BLOCK, 2), "ownership: expected a TokenOwnership or None, got int"),
        (([1], *given[1:], BLOCK), "sampled_token_ids: expected a tensor, got list"),
    ):
        with pytest.raises(TypeError, match=f"^{message}$"):
            ops.advance_step(*changed)


def test_backends(plain_errors):
    """A backend that cannot be captured serves an ordinary call, but no call with `graph=`.

    If `backend=` names a backend, this backend serves the call, or the call raises.
    """
    served = []

    def noted(*given):
        served.append(given)
        return backends.kernel("cpu", "advance_step")(*given)

    with (
        registered(Backend("eager", 50, "cpu", {"advance_step": OpSupport(noted, graph=GraphSupport.NONE)})),
        torch.device("cpu"),
    ):
        given = buffers([1], [1], 2)
        fast.advance_step(*given, BLOCK)
        assert len(served) == 1
        fast.advance_step(*given, BLOCK, backend="cpu")
        fast.advance_step(*given, BLOCK, graph=GraphSupport.ANY)
        assert len(served) == 1 and given[3].seq_lens.tolist() == [4]
        with pytest.raises(fast.UnsupportedConfiguration, match="eager: has graph support 'none'"):
            fast.advance_step(*given, BLOCK, graph=GraphSupport.ANY, backend="eager")
        with pytest.raises(ValueError, match="^backend: expected one of .*, got nosuch$"):
            fast.advance_step(*given, BLOCK, backend="nosuch")
        with pytest.raises(TypeError, match="^graph: expected a GraphSupport, got str$"):
            fast.advance_step(*given, BLOCK, graph="any")
        assert given[3].seq_lens.tolist() == [4]


def test_inside_a_compiled_function():
    """A function that calls `advance_step` writes the same integers with and without `torch.compile`."""
    with torch.device("cpu"):
        given = buffers([1, 1, 3], [4, 0, 6], 2)
    eager, compiled = copies(given), copies(given)

    def step(sampled, input_ids, positions, seq_lens, starts, slots, table):
        torch.ops.mla_twins.advance_step(
            sampled + 1, input_ids, positions, seq_lens, starts, slots, table, BLOCK, [1, 0, 1], 8, "cpu"
        )
        return input_ids * 2

    def arguments(of):
        *tensors, common = of
        return *tensors, common.seq_lens, common.query_start_loc, common.slot_mapping, common.block_table

    with torch.device("cpu"):
        wanted = step(*arguments(eager))
        found = torch.compile(step, fullgraph=True, backend="aot_eager")(*arguments(compiled))
    assert found.equal(wanted) and wanted[0] == 2 * (given[0][0] + 1)
    same(compiled, eager)
