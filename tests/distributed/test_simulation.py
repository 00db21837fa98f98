"""Tests of `simulate`, which runs several ranks in one process: exchanges, torch modes, deadlocks and errors."""

from __future__ import annotations

import pytest
import torch


def test_ranks_keep_the_callers_mode(ops):
    with torch.inference_mode():
        assert ops.simulate(2, 1, lambda ranks: torch.is_inference_mode_enabled()) == [True, True]
    with torch.no_grad():
        assert ops.simulate(2, 1, lambda ranks: torch.is_grad_enabled()) == [False, False]
    with torch.device("meta"):
        assert ops.simulate(1, 1, lambda ranks: torch.empty(1).device.type) == ["meta"]


def test_exchanges(ops):
    def program(ranks):
        cp, tp, x = ranks.cp_group, ranks.tp_group, torch.arange(4.0).view(2, 2) + 10 * ranks.tp_group.rank
        return cp.all_gather(x), cp.reduce_scatter(x), cp.all_to_all(x), tp.all_reduce(x), tp.all_gather_object(tp.rank)

    found = ops.simulate(2, 1, program, 4)
    x = [torch.arange(4.0).view(2, 2) + 10 * rank for rank in range(4)]
    for rank, (gathered, scattered, exchanged, reduced, objects) in enumerate(found):
        first = rank // 2 * 2
        assert gathered.equal(torch.stack(x[first : first + 2]))
        assert scattered.equal(x[first][rank % 2] + x[first + 1][rank % 2])
        assert exchanged.equal(torch.stack([x[first][rank % 2], x[first + 1][rank % 2]]))
        assert reduced.equal(sum(x)) and objects == [0, 1, 2, 3]


def test_ranks_that_wait_for_each_other(ops):
    def different(ranks):
        x = torch.ones(2)
        return ranks.cp_group.all_gather(x) if ranks.rank else ranks.cp_group.all_reduce(x)

    with pytest.raises(ops.GroupError, match="^cp_group: all_reduce on rank 0, but all_gather on rank 1$"):
        ops.simulate(2, 1, different)

    def missing(ranks):
        return ranks.rank == 1 or ranks.cp_group.all_reduce(torch.ones(2))

    wanted = r"^simulation: every rank waits for another rank: rank 0 in all_reduce of cp_group, ranks \[0, 1\]$"
    with pytest.raises(ops.GroupError, match=wanted):
        ops.simulate(2, 1, missing)

    def shapes(ranks):
        return ranks.cp_group.all_gather(torch.ones(2 + ranks.rank))

    with pytest.raises(ops.GroupError, match=r"^cp_group: all_gather of \[2\] torch.float32 on rank 0, but \[3\]"):
        ops.simulate(2, 1, shapes)


def test_the_first_error_is_the_callers(ops):
    def program(ranks):
        if ranks.rank == 2:
            raise ArithmeticError("of rank 2")
        return ranks.cp_group.all_reduce(torch.ones(2))

    with pytest.raises(ArithmeticError, match="^of rank 2$"):
        ops.simulate(4, 1, program)
