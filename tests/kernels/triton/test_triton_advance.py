"""Tests that the Triton kernel of `advance_step` writes the integers of `reference`, and nothing out of range.

`advance_step` turns the batch of a step into the batch of the next step, in which each request has one query token.
Without a GPU, one test runs this file again in Triton's interpreter.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import reference
from reference.interfaces import ONE_RANK, TokenOwnership

from ...support.decode_loop import buffers
from ...support.factories import integers, offsets
from ...support.triton_mode import DEVICE, INTERPRETED, ON_GPU, run_in_interpreter, runs, starts_interpreter

if ON_GPU or INTERPRETED:
    from fast.kernels.triton import advance


@starts_interpreter
def test_in_the_interpreter():
    run_in_interpreter(__file__)


def strided(x):
    """Return a view on the device that has the values of `x` and a stride of 2."""
    wide = torch.full((x.shape[0], 2), -7, dtype=x.dtype)
    wide[:, 0] = x
    return wide.to(DEVICE)[:, 0]


def launch(sampled, input_ids, positions, common, block_size, ownership=ONE_RANK, limit=None, move=None):
    """Launch the kernel on copies of the tensors; return ids, positions, slots, lengths and offsets on the CPU.

    Args:
        sampled: sampled token of each request.
        input_ids: ids of the query tokens, written.
        positions: positions of the query tokens, written.
        common: the batch.
        block_size: tokens per block.
        ownership: tokens that this rank owns.
        limit: largest length of a request; None: as many tokens as fit into a row of the block table.
        move: function that copies a tensor to the device; None: make a contiguous copy.
    """
    move = move or (lambda x: x.clone().to(DEVICE))
    written = [move(x) for x in (input_ids, positions, common.seq_lens, common.query_start_loc, common.slot_mapping)]
    table = common.block_table.clone().to(DEVICE)
    limit = table.shape[1] * block_size * ownership.size if limit is None else limit
    advance.advance_step(move(sampled), *written, table, block_size, ownership, limit)
    ids, positions, lens, starts, slots = (x.cpu() for x in written)
    return ids, positions, slots, lens, starts


def check(query_lens, seq_lens, block_size, padding=0, ids=torch.int64, size=1, interleave=1, move=None):
    """Assert that the kernel gives the integers of `reference` on each of `size` ranks, over two steps."""
    width = -(-(max(seq_lens, default=0) + 2) // (block_size * size)) + 1
    with torch.device("cpu"):
        start = buffers(query_lens, seq_lens, width, padding, ids, block_size, size)
    for rank in range(size):
        ownership, (sampled, input_ids, positions, common) = TokenOwnership(size, rank, interleave), start
        for _ in range(2):
            found = launch(sampled, input_ids, positions, common, block_size, ownership, move=move)
            given = [x.clone() for x in (input_ids, positions, common.seq_lens, common.query_start_loc,
                                         common.slot_mapping)]  # fmt: skip
            input_ids, positions, lens, starts, slots = given
            common = replace(common, seq_lens=lens, query_start_loc=starts, slot_mapping=slots)
            reference.advance_step(sampled, input_ids, positions, common, block_size, ownership)
            for name, one, other in zip(
                ("ids", "positions", "slots", "lengths", "offsets"), found,
                (input_ids, positions, common.slot_mapping, common.seq_lens, common.query_start_loc), strict=True,
            ):  # fmt: skip
                assert one.dtype == other.dtype and one.equal(other), (name, rank)


CASES = {
    "one": ([1], [5]),
    "decodes": ([1, 1, 1], [5, 16, 31]),
    "mixed": ([1, 1, 7, 20], [9, 16, 7, 47]),
    "padding rows": ([1, 1, 1, 1], [9, 0, 16, 0]),
    "no tokens": ([0, 1, 0, 3, 0, 0], [4, 9, 0, 3, 8, 0]),
    "padding rows of two tokens": ([2, 2, 2], [9, 0, 16]),
    "no request": ([], []),
}


@runs
@pytest.mark.parametrize("lens", CASES.values(), ids=CASES)
def test_integers(lens):
    for padding in (0, 3):
        for ids in (torch.int32, torch.int64):
            check(*lens, 16, padding, ids)
    check(*lens, 6, 1, move=strided)


@runs
@pytest.mark.parametrize("size, interleave", [(2, 1), (3, 2), (2, 4), (1, 4)])
@pytest.mark.parametrize("lens", [CASES["mixed"], CASES["no tokens"]], ids=["mixed", "no tokens"])
def test_ranks(lens, size, interleave):
    check(*lens, 4, size=size, interleave=interleave)


@runs
@pytest.mark.parametrize("requests", [511, 512, 513, 1300])
def test_many_requests(requests):
    """The kernel is right if the requests exactly fill one iteration of its loop, or need several iterations."""
    draw = random.Random(requests)
    query_lens = [draw.choice([0, 1, 1, 1, 2]) for _ in range(requests)]
    seq_lens = [draw.choice([0, query_len, query_len + 15, 63]) for query_len in query_lens]
    check(query_lens, seq_lens, 16, 700)
    check([1] * requests, [9] * requests, 16)


@runs
@pytest.mark.parametrize("size", [1, 2])
def test_a_request_stops_at_its_limit(size):
    """A request that cannot grow ends at the last position within `limit`, with slot -1; other requests advance."""
    full = 2 * 4 * size  # tokens of two columns of the block table
    with torch.device("cpu"):
        sampled, input_ids, positions, common = buffers([1, 1, 1], [full - 1, full, 3], 2, size=size)
    for limit, lens, wanted in (
        (full, integers(full - 1, full, 3), [full, full, 4]),
        (full - 2, integers(full - 1, full, 3), [full - 2, full - 2, 4]),
        (1, integers(full, 1, 2), [1, 1, 1]),
        (0, integers(full, 1, 2), [0, 0, 0]),  # a block table without columns has no room for a token
        (full, integers(2**31 - 1, -(2**31), -5), [full, 0, 0]),
    ):
        common = replace(common, seq_lens=lens)
        found = [launch(sampled, input_ids, positions, common, 4, TokenOwnership(size, rank), limit)
                 for rank in range(size)]  # fmt: skip
        for ids, places, slots, after, starts in found:
            assert after.tolist() == wanted and places.tolist() == [max(length - 1, 0) for length in wanted]
            assert ids.tolist() == [int(token) if length else 0 for token, length in zip(sampled, wanted, strict=True)]
            grew = [0 < before < limit for before in lens.tolist()]
            assert all(slot == -1 for slot, grown in zip(slots.tolist(), grew, strict=True) if not grown)
            assert starts.tolist() == [0, 1, 2, 3]
        owned = [sum(int(slots[request]) >= 0 for _, _, slots, *_ in found) for request in range(3)]
        assert owned == [int(0 < before < limit) for before in lens.tolist()]


@runs
def test_out_of_range():
    """A negative block gives slot -1, and the largest int32 block gives a 64-bit slot.

    If `query_start_loc` has more tokens than `input_ids`, the kernel writes nothing behind `input_ids`.
    """
    with torch.device("cpu"):
        sampled, input_ids, positions, common = buffers([1, 1], [5, 6], 2)
    table = torch.tensor([[0, -3], [1, 2**31 - 1]], dtype=torch.int32, device="cpu")
    _, _, slots, lens, _ = launch(sampled, input_ids, positions, replace(common, block_table=table), 4)
    assert slots.tolist() == [-1, 4 * (2**31 - 1) + 2] and lens.tolist() == [6, 7]

    held = [torch.full((4,), 7, device="cpu") for _ in range(3)]  # two more elements than the kernel is given
    longer = [x.to(DEVICE) for x in held]
    input_ids, positions, slots = (x[:2] for x in longer)
    lens, starts = integers(5, 6, 7).cpu().to(DEVICE), offsets([1, 1, 1]).cpu().to(DEVICE)
    table = torch.zeros(3, 2, dtype=torch.int32, device=DEVICE)
    advance.advance_step(torch.tensor([1, 2, 3], device=DEVICE), input_ids, positions, lens, starts, slots, table, 4,
                         ONE_RANK, 8)  # fmt: skip
    assert [x[2:].tolist() for x in longer] == [[7, 7]] * 3
    assert [x.tolist() for x in (input_ids, positions, slots)] == [[1, 2], [5, 6], [1, 2]]
    assert lens.tolist() == [6, 7, 8] and starts.tolist() == [0, 1, 2, 3]
