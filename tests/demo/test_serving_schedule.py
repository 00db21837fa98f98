"""Tests of a serving loop: which requests it runs, preempts, ends and forgets, and how many blocks they hold.

To preempt a running request means to free its blocks and to compute it again later. To forget a finished request means
to remove it from the loop.

The model of these tests generates the successor of each token (token + 1). Every generated token is therefore known
beforehand, and thousands of steps take only seconds. tests/demo/test_serving.py tests the loop with real attention.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fast
from fast.demo.serving import ServingLoop

from ..support.factories import DIRECT

VOCABULARY = 101
# The fixture `plain_errors` switches off the run-time checks of annotations. They would make thousands of steps slow.
WITHOUT_SHAPE_CHECKS = pytest.mark.usefixtures("plain_errors")


class Successor(nn.Module):
    """Model that generates the successor of each token and counts the steps.

    Args:
        num_layers: number of layers; the loop makes one cache for each layer.
    """

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, num_layers: int = 1):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCABULARY, max_position_embeddings=4096, num_hidden_layers=num_layers)
        self.steps = 0

    def forward(self, ids, position_ids, use_cache, mla_metadata, mla_kv_caches, logits_to_keep):
        self.steps += 1
        following = (ids[0, logits_to_keep] + 1) % VOCABULARY
        return SimpleNamespace(logits=nn.functional.one_hot(following, VOCABULARY)[None])


def make_loop(ops=fast, **options) -> ServingLoop:
    sizes = dict(num_blocks=24, block_size=4, max_num_seqs=6, token_budget=16, workspace_tokens=64)
    return ServingLoop(Successor(), DIRECT, ops, **sizes | options)


def successors(token: int, count: int) -> list[int]:
    """Return the `count` tokens that the model generates after a token."""
    return [(token + 1 + i) % VOCABULARY for i in range(count)]


# The end of a request.


@pytest.mark.parametrize("eos", [[30, 60, 90], [90, 60, 30], (60, 90, 30), {30, 60, 90}], ids=str)
def test_each_of_several_eos_tokens_ends_a_request(ops, eos):
    """Give several eos tokens -> a request ends at each of these tokens."""
    loop = make_loop(ops, eos=eos)
    for last in (27, 55, 88, 0):
        loop.add([5, last], 9)
    generated = [request.generated_ids for request in loop.run()]
    assert generated == [[28, 29, 30], [56, 57, 58, 59, 60], [89, 90], successors(0, 9)]


# Preemption.


def random_load(seed: int, count: int) -> list[tuple[list[int], int]]:
    """Return random prompts of 1 to 40 tokens, each with 1 to 24 tokens to generate."""
    drawn, lengths = random.Random(seed), (1, 2, 3, 4, 5, 8, 9, 21, 40)
    return [
        ([drawn.randrange(VOCABULARY) for _ in range(drawn.choice(lengths))], drawn.randint(1, 24))
        for _ in range(count)
    ]


def steps_of(loop: ServingLoop, load):
    """Serve requests that arrive over time; for each step, yield the ids of running requests and the report.

    The ids are those of the requests that were running before the step.
    """
    drawn, left = random.Random(0), list(load)
    while left or loop.running or loop.waiting:
        for _ in range(min(len(left), drawn.randint(0, 3) if loop.running or loop.waiting else 1)):
            loop.add(*left.pop(0))
        before = [request.request_id for request in loop.running]
        yield before, loop.step()


@WITHOUT_SHAPE_CHECKS
@pytest.mark.parametrize("seed", [0, 2, 3, 7])
def test_the_youngest_requests_are_preempted_and_wait(seed):
    """Serve with too few blocks -> the youngest running requests are preempted, and do not run in the same step."""
    load, preemptions, most = random_load(seed, 40), 0, 0
    loop = make_loop(num_blocks=16, max_num_seqs=10, token_budget=24)
    for before, report in steps_of(loop, load):
        number = len(report.preempted)
        assert before == sorted(before)
        assert list(report.preempted) == before[::-1][:number]
        preempted = [loop.requests[request_id] for request_id in report.preempted]
        assert [request.num_computed for request in preempted] == [0] * number
        assert [request.blocks for request in preempted] == [[]] * number
        assert list(loop.waiting)[:number] == preempted[::-1]
        preemptions, most = preemptions + number, max(most, number)
    assert preemptions > 20 and most > 1
    assert [r.generated_ids for r in loop.requests] == [successors(ids[-1], new) for ids, new in load]


def test_a_preempted_request_that_would_fit_in_pieces_still_waits():
    """Preempt a request -> it waits, although the free blocks could hold the first tokens of its prompt.

    The preempted request gives up all its blocks. The older request takes one of these blocks, so 7 blocks stay free.
    """
    loop = make_loop(num_blocks=10, max_num_seqs=2, token_budget=8)
    loop.add([1, 2, 3], 12)
    loop.add(list(range(30)), 4)
    preempted = []
    while not preempted:
        preempted = loop.step().preempted
    victim = loop.requests[1]
    assert preempted == (1,) and loop.allocator.num_free == 7
    assert (victim.num_computed, victim.blocks, list(loop.waiting)) == (0, [], [victim])
    assert [request.generated_ids for request in loop.run()] == [successors(3, 12), successors(29, 4)]


# Blocks of ranks that share sequences.


@WITHOUT_SHAPE_CHECKS
@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (4, 4), (3, 2)])
def test_a_block_of_every_rank_holds_the_tokens_of_all(ops, size, interleave):
    """Serve on D ranks that share each sequence -> D x block_size tokens of a request take one block on each rank."""

    def program(ranks):
        loop = make_loop(ops, context_parallel=ranks, num_blocks=6, workspace_tokens=4 * size)
        for length, new in ((17, 9), (4, 6), (1, 24 * size - 1)):
            loop.add([7] * length, new)
        with pytest.raises(ValueError, match=f"^prompt_ids: expected .* the cache's {24 * size} tokens, got 2 "):
            loop.add([7, 7], 24 * size - 1)
        held = []
        while loop.running or loop.waiting:
            loop.step()
            held.append([len(request.blocks) for request in loop.running])
            assert held[-1] == [-(-request.num_computed // (4 * size)) for request in loop.running]
            assert loop.cache_bytes_in_use == 4 * DIRECT.head_size * 4 * sum(held[-1])
        return held

    found = ops.simulate(size, interleave, program)
    assert found == [found[0]] * size
    assert max(max(step, default=0) for step in found[0]) == 6


# Requests that finished and are forgotten.


def test_forgotten_requests_leave_the_loop(ops):
    """Call `forget_finished` -> the finished requests leave the loop and are returned in the order of their arrival.

    `run` returns the finished requests that are still in the loop. New requests get new ids.
    """
    loop = make_loop(ops, max_num_seqs=2)
    first, second, third = loop.add([1], 9), loop.add([2], 2), loop.add([3], 2)
    assert loop.forget_finished() == []
    while not third.finished:
        loop.step()
    assert not first.finished and loop.forget_finished() == [second, third]
    assert loop.requests == [first] and loop.forget_finished() == []
    fourth = loop.add([4], 1)
    assert fourth.request_id == 3
    done = loop.run()
    assert done == [first, fourth] and [r.generated_ids for r in done] == [successors(1, 9), successors(4, 1)]
    assert loop.forget_finished() == done == [first, fourth] and loop.requests == []
    assert loop.add([5], 1).request_id == 4
    assert done == [first, fourth], "the returned list has changed later"


@WITHOUT_SHAPE_CHECKS
def test_requests_may_be_forgotten_while_the_loop_runs():
    loop, forgotten = make_loop(), []
    load = random_load(1, 30)
    added = [loop.add(*each) for each in load]
    assert loop.run(lambda report: forgotten.extend(loop.forget_finished())) == []
    assert sorted(forgotten, key=lambda request: request.request_id) == added
    assert [r.generated_ids for r in added] == [successors(ids[-1], new) for ids, new in load]


@WITHOUT_SHAPE_CHECKS
def test_thousands_of_steps_hold_few_requests():
    """Run 2000 steps and forget the finished requests every 10 steps -> the loop never holds more than 70 requests."""
    drawn, loop, seen, most = random.Random(5), make_loop(num_blocks=16), [], 0
    for step in range(2000):
        if len(loop.waiting) < 4:
            loop.add([drawn.randrange(VOCABULARY)] * drawn.randint(1, 8), drawn.randint(1, 8))
        loop.step()
        if step % 10 == 9:
            seen += [request.request_id for request in loop.forget_finished()]
        most = max(most, len(loop.requests))
    assert loop.model.steps == 2000 and len(seen) > 1000
    assert most <= 6 + 4 + 10 * 6, "more than 6 running, 4 waiting and 10 x 6 finished requests"
    held = [request.request_id for request in loop.requests]
    assert sorted(seen + held) == list(range(len(seen) + len(held)))


@WITHOUT_SHAPE_CHECKS
def test_ranks_may_forget_at_different_steps(ops):
    """Let two ranks forget finished requests at different steps -> the same tokens and request ids on both ranks."""

    def program(ranks):
        loop, forgotten = make_loop(ops, context_parallel=ranks, num_blocks=8, workspace_tokens=8), []
        for number, (prompt, new) in enumerate(random_load(6, 24)):
            loop.add(prompt, new)
            if number % 3 == 2:
                loop.run()
            if number % (ranks.rank + 2) == 0:
                forgotten += loop.forget_finished()
        loop.run()
        forgotten += loop.forget_finished()
        return [(request.request_id, request.generated_ids) for request in forgotten]

    wanted = [(number, successors(ids[-1], new)) for number, (ids, new) in enumerate(random_load(6, 24))]
    assert ops.simulate(2, 1, program) == [wanted, wanted]
