"""Ranks in one process: each runs the same program in a thread of its own, one at a time, and exchanges in memory."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..interfaces import check, check_function, check_rank, is_positive_int
from .groups import ContextParallel, Group, GroupError, Pending

MOST_RANKS = 64


class _Turns:
    """Passes the turn from rank to rank: one runs until it waits for others, so every run is the same."""

    def __init__(self, size: int):
        self.size, self.turn = size, 0
        self.changed = threading.Condition()
        self.ready: list[Callable[[], bool] | None] = [lambda: True] * size  # None: the rank has ended
        self.waits_for = [""] * size
        self.error: BaseException | None = None

    def start(self, rank: int) -> None:
        """Wait for the first turn."""
        with self.changed:
            self._until_turn(rank)

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Give the turn away and come back once `ready` holds."""
        with self.changed:
            self.ready[rank], self.waits_for[rank] = ready, what
            self._pass_on(rank)
            self._until_turn(rank)

    def end(self, rank: int, error: BaseException | None = None) -> None:
        """The rank is done; where it failed, all others fail too."""
        with self.changed:
            self.ready[rank] = None
            self.error = self.error or error
            self._pass_on(rank)

    def stop(self, error: BaseException) -> None:
        """All ranks fail where they next wait."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def _until_turn(self, rank: int) -> None:
        self.changed.wait_for(lambda: self.turn == rank or self.error is not None)
        if self.error is not None:
            raise GroupError(f"simulation: rank {rank} stopped, for another rank failed")
        self.ready[rank] = lambda: True

    def _pass_on(self, rank: int) -> None:
        order = [(rank + step) % self.size for step in range(1, self.size + 1)]
        turn = next((other for other in order if self.ready[other] is not None and self.ready[other]()), None)
        if turn is None and any(ready is not None for ready in self.ready) and self.error is None:
            waiting = [f"rank {other} in {self.waits_for[other]}" for other in sorted(order) if self.ready[other]]
            self.error = GroupError(f"simulation: every rank waits for another: {', '.join(waiting)}")
        self.turn = -1 if turn is None else turn
        self.changed.notify_all()


class _Contribution(NamedTuple):
    """What one rank hands in to an exchange."""

    rank: int
    operation: str
    value: Any


class SimulatedRanks(Group):
    """A rank of a group whose members are threads of one process (`simulate` makes them).

    Args:
        name: what errors call it.
        rank: in the group.
        members: global ranks, in order.
        turns: of the whole simulation.
        board: what the members of this group handed in, shared by them.
    """

    def __init__(
        self, name: str, rank: int, members: tuple[int, ...], turns: _Turns, board: dict[int, list[_Contribution]]
    ):
        super().__init__(name, len(members), rank, members)
        self._turns, self._board, self._exchanges = turns, board, 0

    def _exchange(self, operation: str, value: Any) -> list[Any]:
        """Hand in a value, wait for those of all members."""
        number, self._exchanges = self._exchanges, self._exchanges + 1
        handed_in = self._board.setdefault(number, [])
        handed_in.append(_Contribution(self.rank, operation, value))
        what = f"{operation} of {self.name}, ranks {list(self.members)}"
        self._turns.wait(self.members[self.rank], lambda: len(handed_in) == self.size, what)
        by_rank = sorted(handed_in, key=lambda contribution: contribution.rank)
        self._board.pop(number - 1, None)  # all have read the one before
        for other in by_rank:
            if other.operation != operation:
                raise GroupError(
                    f"{self.name}: {operation} on rank {self.rank}, but {other.operation} on rank {other.rank}"
                )
        return [contribution.value for contribution in by_rank]

    def _tensors(self, operation: str, x: Tensor) -> list[Tensor]:
        found = self._exchange(operation, x.clone())
        for rank, other in enumerate(found):
            if (other.shape, other.dtype) != (x.shape, x.dtype):
                raise GroupError(
                    f"{self.name}: {operation} of {list(x.shape)} {x.dtype} on rank {self.rank}, "
                    f"but {list(other.shape)} {other.dtype} on rank {rank}"
                )
        return found

    def _all_gather(self, x: Tensor, out: Tensor) -> Pending:
        return Pending(torch.stack(self._tensors("all_gather", x), out=out))

    def _reduce_scatter(self, x: Tensor) -> Tensor:
        return torch.stack([other[self.rank] for other in self._tensors("reduce_scatter", x)]).sum(0)

    def _all_to_all(self, x: Tensor) -> Tensor:
        return torch.stack([other[self.rank] for other in self._tensors("all_to_all", x)])

    def _all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._tensors("all_reduce", x)).sum(0)

    def _all_gather_object(self, value: Any) -> list[Any]:
        return self._exchange("all_gather_object", value)


def simulate(
    context_parallel_size: int,
    interleave: int,
    program: Callable[[ContextParallel], Any],
    tensor_parallel_size: int | None = None,
    merge: str = "a2a",
) -> list[Any]:
    """Run a program on ranks that are threads of this process, without any process group.

    Ranks take turns: one runs until it waits for an exchange. So a run is the same each time, and what one rank does
    may be read, printed or stopped in a debugger while the others stand still. A simulation costs as much as its ranks
    one after another.

    Args:
        context_parallel_size: D, up to 64.
        interleave: I.
        program: called on every rank with its groups; every rank must exchange in the same order.
        tensor_parallel_size: TP, ranks that share the heads, a multiple of D; D where None. Every D consecutive ones
            share sequences.
        merge: of `ContextParallel`.

    Returns:
        What the program returned, by rank.

    Raises:
        ValueError: a number out of range.
        GroupError: ranks that wait for different exchanges, or exchange tensors that do not fit.
        Exception: what the program raised, on the first rank that did.
    """
    size = context_parallel_size
    total = size if tensor_parallel_size is None else tensor_parallel_size
    check_rank(size, None, interleave)
    check_function("program", program)
    check(is_positive_int(total) and total % size == 0, "tensor_parallel_size", f"a multiple of {size}", total)
    check(total <= MOST_RANKS, "tensor_parallel_size", f"at most {MOST_RANKS} ranks in one process", total)
    turns, everyone = _Turns(total), tuple(range(total))
    boards: list[dict[int, list[_Contribution]]] = [{} for _ in range(1 + total // size)]
    results: list[Any] = [None] * total
    enter = _surroundings()

    def run(rank: int) -> None:
        failure = None
        try:
            turns.start(rank)
            first = rank // size * size
            cp = SimulatedRanks("cp_group", rank - first, everyone[first : first + size], turns, boards[rank // size])
            tp = SimulatedRanks("tp_group", rank, everyone, turns, boards[-1])
            with enter():
                results[rank] = program(ContextParallel(cp, tp, interleave, merge))
        except BaseException as error:  # whatever it is, the caller gets it
            failure = error
        turns.end(rank, failure)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, rank), name=f"rank {rank}", daemon=True)
        for rank in everyone
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:  # interrupted: no rank goes on without its caller
        turns.stop(error)
        raise
    if turns.error is not None:
        raise turns.error
    return results


def _surroundings() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What of PyTorch's state belongs to a thread, taken from this one for others."""
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    device = torch.get_default_device()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        on_stream = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients), torch.device(device), on_stream:
            yield

    return enter
