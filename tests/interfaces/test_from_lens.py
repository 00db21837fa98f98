"""Tests of `CommonAttentionMetadata.from_lens`.

The function computes offsets, maxima and slots of a batch from its lengths and its block table. With context
parallelism it computes the slots of one rank.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fast
import reference
from reference.interfaces import CommonAttentionMetadata, TokenOwnership, slots_of_tokens

from ..support.factories import assert_same_bits, integers, offsets
from ..support.properties import given, st

LENS = ([3, 1, 0, 5], [20, 1, 9, 37])


def table_for(seq_lens, block_size, extra=1):
    width = max([0, *(-(-length // block_size) for length in seq_lens)]) + extra
    blocks = torch.randperm(len(seq_lens) * width)[: len(seq_lens) * width]
    return blocks.to(torch.int32).view(len(seq_lens), width)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 70), st.booleans()), max_size=5), st.sampled_from([1, 4, 16])
)
def test_from_lens_is_make_over_the_loops_slots(requests, block_size):
    query_lens = [query for query, _, _ in requests]
    seq_lens = [0 if padding else query + context for query, context, padding in requests]
    table = table_for(seq_lens, block_size)
    common = CommonAttentionMetadata.from_lens(query_lens, seq_lens, table, block_size)
    starts, lens = offsets(query_lens), integers(*seq_lens)
    slots = reference.slot_mapping(starts, lens, table, block_size, sum(query_lens))
    wanted = CommonAttentionMetadata.make(starts.cpu(), lens.cpu(), table, slots, block_size)
    for name, value in vars(wanted).items():
        found = getattr(common, name)
        if isinstance(value, torch.Tensor):
            assert_same_bits(found, value)
            assert found.device == value.device
        else:
            assert found == value, name


@pytest.mark.parametrize("size, interleave", [(1, 1), (2, 1), (3, 4), (2, 16)])
def test_rank_local_slots(size, interleave):
    """`from_lens` gives a rank the slots of `dcp_slot_mapping`, and every token has a slot on exactly one rank."""
    query_lens, seq_lens = LENS
    table = table_for(seq_lens, 16)
    found = []
    for rank in range(size):
        ownership = TokenOwnership(size, rank, interleave)
        common = CommonAttentionMetadata.from_lens(query_lens, seq_lens, table, 16, ownership)
        for ops in (reference, fast):
            wanted = ops.dcp_slot_mapping(
                offsets(query_lens), integers(*seq_lens), table, 16, sum(query_lens), size, rank, interleave
            )
            assert_same_bits(common.slot_mapping, wanted)
        found.append(common.slot_mapping >= 0)
        # the lengths count the tokens of all ranks, not only the rank-local tokens
        assert common.max_seq_len == 37 and common.seq_lens.tolist() == seq_lens
    assert torch.stack(found).sum(0).eq(1).all()


@pytest.mark.parametrize(
    "lens",
    [
        LENS,
        tuple(map(tuple, LENS)),
        tuple(torch.tensor(x, dtype=torch.int64, device="cpu") for x in LENS),
        tuple(torch.tensor(x, dtype=torch.int16, device="cpu") for x in LENS),
        (torch.tensor(LENS[0], device="cpu"), LENS[1]),
        ([np.int64(n) for n in LENS[0]], [np.int32(n) for n in LENS[1]]),
    ],
    ids=["lists", "tuples", "int64", "int16", "mixed", "numpy"],
)
def test_lengths_of_any_int_type(lens):
    table = table_for(LENS[1], 16)
    common = CommonAttentionMetadata.from_lens(*lens, table, 16)
    assert common.seq_lens_cpu.dtype == common.query_start_loc_cpu.dtype == torch.int32
    assert (common.query_start_loc.tolist(), common.seq_lens.tolist()) == ([0, 3, 4, 4, 9], LENS[1])
    assert (common.max_query_len, common.max_seq_len, common.block_size, common.num_actual_tokens) == (5, 37, 16, 9)
    assert common.block_table is table and common.slot_mapping.device == table.device


def test_a_batch_without_requests():
    common = CommonAttentionMetadata.from_lens([], [], torch.zeros(0, 3, dtype=torch.int32), 16)
    assert (common.num_reqs, common.num_actual_tokens, common.max_query_len, common.max_seq_len) == (0, 0, 0, 0)
    assert common.slot_mapping.shape == (0,)


TABLE = torch.arange(8, dtype=torch.int32).view(2, 4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([1], [20, 9]), "query_lens: expected 2 lengths, one for each row of block_table, got 1"),
        (([1, 1], torch.tensor([20, 9, 3], device="cpu")), "seq_lens: expected shape [2], got [3]"),
        (([1, 1], torch.tensor([20.0, 9.0], device="cpu")), "seq_lens: expected dtype torch.int32 or torch.int64 or "
                                              "torch.int16 or torch.int8 or torch.uint8, got torch.float32"),
        (([1, 1.0], [20, 9]), "query_lens: expected ints, got float at request 1"),
        (([1, True], [20, 9]), "query_lens: expected ints, got bool at request 1"),
        ((3, [20, 9]), "query_lens: expected a list of ints or a CPU tensor, got int"),
        (([1, -1], [20, 9]), "query_lens: expected lengths >= 0, got -1 at request 1"),
        (([1, 1], [20, 2**31]), "seq_lens: expected lengths below 2^31, got 2147483648"),
        (([1, 1], [20, 10**30]), f"seq_lens: expected lengths below 2^31, got {10**30}"),
        (([1, 4], [20, 3]), "seq_lens: expected at least the query length 4, got 3 at request 1"),
        (([1, 1], [20, 65]), "block_table: expected at least 5 columns for request 1, got 4"),
    ],
    ids=str,
)  # fmt: skip
def test_from_lens_refuses(arguments, message, plain_errors):
    with pytest.raises((TypeError, ValueError)) as error:
        CommonAttentionMetadata.from_lens(*arguments, TABLE, 16)
    assert str(error.value) == message


def test_from_lens_refuses_tables_and_sizes(plain_errors):
    for rest, message in (
        ((TABLE.long(), 16), "block_table: expected dtype torch.int32, got torch.int64"),
        (([[1]], 16), "block_table: expected a tensor, got list"),
        ((TABLE, 0), "block_size: expected a positive int, got 0"),
        ((TABLE, 16, 2), "ownership: expected a TokenOwnership or None, got int"),
        ((TABLE, 16, TokenOwnership(2, 0, 3)), "interleave: expected a divisor of the block size 16, got 3"),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            CommonAttentionMetadata.from_lens([1, 1], [20, 9], *rest)
        assert str(error.value) == message


def test_shares_reach_further(plain_errors):
    """If 2 ranks share each sequence, a column of the block table stands for 2 x 16 tokens: a block on each rank."""
    common = CommonAttentionMetadata.from_lens([1, 1], [20, 65], TABLE, 16, TokenOwnership(2, 0))
    assert common.slot_mapping.tolist() == [-1, 6 * 16 + 0]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_padding_rows_have_no_slot(size):
    """The query token of a padding row (a request of length 0) gets slot -1 from every function that computes slots."""
    for rank in range(size):
        common = CommonAttentionMetadata.from_lens([1, 1], [5, 0], TABLE, 16, TokenOwnership(size, rank))
        for ops in (reference, fast):
            starts, lens = offsets([1, 1]).to(TABLE.device), integers(5, 0).to(TABLE.device)
            found = ops.dcp_slot_mapping(starts, lens, TABLE, 16, 2, size, rank)
            assert_same_bits(found, common.slot_mapping)
        assert common.slot_mapping[1] == -1 and (common.slot_mapping[0] >= 0) == (rank == 4 % size)


def test_a_column_that_the_table_lacks_has_no_slot():
    """A token whose block would be after the last column of the block table gets slot -1 from `slots_of_tokens`."""
    table = TABLE.to(torch.get_default_device())
    found = slots_of_tokens(offsets([3, 1]), integers(66, 64), table, 16, 5)
    assert found.tolist() == [int(TABLE[0, 3]) * 16 + 15, -1, -1, int(TABLE[1, 3]) * 16 + 15, -1]
