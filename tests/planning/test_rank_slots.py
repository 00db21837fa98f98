"""Tests of the lengths and slots of one rank, compared with a loop that assigns token after token to ranks.

D ranks share each sequence: each rank in turn holds `interleave` consecutive tokens. A token has a slot in the cache of
its rank, and slot -1 on the other ranks.
"""

from __future__ import annotations

import pytest
import torch

import fast
import reference
from reference.interfaces import CommonAttentionMetadata, TokenOwnership

from ..support.factories import integers, make_batch, offsets, table_without_blocks
from ..support.planning import batches
from ..support.properties import given, st
from ..support.ranks import owners

LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300, 1021)


@pytest.mark.parametrize("interleave", [1, 2, 16, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 64])
def test_local_lengths(ops, size, interleave):
    lens = integers(*LENGTHS)
    together = ops.get_dcp_local_seq_lens(lens, size, None, interleave)
    assert together.shape == (len(LENGTHS), size) and together.dtype == torch.int32
    for rank in range(size):
        dealt = [owners(length, size, interleave).count(rank) for length in LENGTHS]
        assert ops.get_dcp_local_seq_lens(lens, size, rank, interleave).tolist() == dealt
        assert together[:, rank].tolist() == dealt
        ownership = TokenOwnership(size, rank, interleave)
        assert [ownership.count(length) for length in LENGTHS] == dealt
        assert [ownership.most(length) for length in LENGTHS] == together.amax(1).tolist()
    assert together.sum(1).equal(lens)


def dealt_slots(batch, table, block_size, size, rank, interleave):
    """Return the slots of a rank: assign every token to a rank, and count the tokens of this rank."""
    slots = []
    for request, (query_len, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        held = 0
        for token, owner in enumerate(owners(length, size, interleave)):
            if token >= length - query_len:
                column, at = divmod(held, block_size)
                slots.append(int(table[request, column]) * block_size + at if owner == rank else -1)
            held += owner == rank
        slots += [-1] * (query_len if length == 0 else 0)
    return slots


@given(batch=batches(), size=st.sampled_from([1, 2, 3, 4, 8]), interleave=st.sampled_from([1, 2, 4, 8]),
       blocks=st.integers(1, 3), padding=st.integers(0, 2))  # fmt: skip
def test_slots(batch, size, interleave, blocks, padding):
    """Every query token outside padding rows has a slot on one rank; each rank fills its blocks in token order."""
    block_size = interleave * blocks
    batch = make_batch(*batch, block_size, padding)
    common, tokens = batch.common, batch.num_tokens + padding
    arguments = (common.query_start_loc, common.seq_lens, common.block_table, block_size, tokens, size)
    found = []
    for rank in range(size):
        wanted = dealt_slots(batch, common.block_table, block_size, size, rank, interleave) + [-1] * padding
        for ops in (reference, fast):
            slots = ops.dcp_slot_mapping(*arguments, rank, interleave)
            assert slots.dtype == torch.int64 and slots.tolist() == wanted
        found.append(wanted)
    real = [s > 0 for q, s in zip(batch.query_lens, batch.seq_lens, strict=True) for _ in range(q)]
    owned = [sum(rank[token] >= 0 for rank in found) for token in range(batch.num_tokens)]
    assert owned == [int(is_real) for is_real in real]


def test_one_rank_is_plain(ops):
    batch = make_batch([1, 3, 16, 0], [20, 3, 40, 0])
    arguments = (batch.common.query_start_loc, batch.common.seq_lens, batch.common.block_table, 16, batch.num_tokens)
    assert ops.dcp_slot_mapping(*arguments, 1, 0, 16).equal(ops.slot_mapping(*arguments))


@given(batch=batches(), size=st.sampled_from([1, 2, 3]), interleave=st.sampled_from([1, 4]),
       blocks=st.integers(1, 3))  # fmt: skip
def test_freed_blocks(batch, size, interleave, blocks):
    """Slots depend on the blocks of new tokens alone; the entries of earlier blocks may have any value."""
    block_size = interleave * blocks
    batch = make_batch(*batch, block_size)
    query_lens, seq_lens, common = batch.query_lens, batch.seq_lens, batch.common
    freed = table_without_blocks(*common.block_table.shape)
    for request, (query_len, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for token in range(length - query_len, length) if length else ():
            column = token // (block_size * size)
            freed[request, column] = common.block_table[request, column]
    lens = common.query_start_loc, common.seq_lens
    for rank in range(size):
        ownership = TokenOwnership(size, rank, interleave)
        made = [
            CommonAttentionMetadata.from_lens(query_lens, seq_lens, table, block_size, ownership).slot_mapping
            for table in (common.block_table, freed)
        ]
        assert made[0].equal(made[1])
        for ops in (reference, fast):
            found = ops.dcp_slot_mapping(*lens, freed, block_size, batch.num_tokens, size, rank, interleave)
            assert found.equal(made[0])
    if size == 1:
        for ops in (reference, fast):
            assert ops.slot_mapping(*lens, freed, block_size, batch.num_tokens).equal(made[0])


@pytest.mark.parametrize("block", [-1, -(2**31)])
def test_wrong_blocks_of_new_tokens(ops, block, plain_errors):
    """A negative block of a new token is refused, and a negative block of an earlier token is not."""
    with torch.device("cpu"):
        table = torch.tensor([[5, 6, 7, 8], [-7, block, 3, 4]], dtype=torch.int32)
        calls = (
            lambda *lens: ops.slot_mapping(offsets(lens[0]), integers(*lens[1]), table, 16, 40),
            lambda *lens: ops.dcp_slot_mapping(offsets(lens[0]), integers(*lens[1]), table, 16, 40, 1, 0),
            lambda *lens: ops.dcp_slot_mapping(offsets(lens[0]), integers(*lens[1]), table, 8, 40, 2, 1),
            lambda *lens: CommonAttentionMetadata.from_lens(*lens, table, 16),
        )
        for call in calls:
            call([1, 18], [50, 50])  # the new tokens of request 1 are in the blocks 3 and 4
            call([1, 0], [50, 30])  # request 1 has no new token
            for lens in (([1, 19], [50, 50]), ([1, 1], [50, 32]), ([0, 30], [0, 60])):
                message = rf"^block_table: expected blocks in \[0, 2147483648\) at request 1, got {block}$"
                with pytest.raises(ValueError, match=message):
                    call(*lens)
            with pytest.raises(ValueError, match="^block_table: expected at least 5 columns for request 1, got 4$"):
                call([1, 0], [50, 65])
