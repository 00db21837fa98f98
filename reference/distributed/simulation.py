"""Simulate ranks in one process: each rank is a thread, one thread runs at a time, and exchanges happen in memory."""

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
    """Lock that lets one rank run until it waits, and then the next rank. The order is the same in every simulation.

    Attributes:
        turn: the rank that may run; -1 if no rank may run.
        ready: for each rank, a function that returns whether the rank can continue; None if the rank has ended.
        waits_for: for each rank, the exchange that the rank waits for, as text for error messages.
        error: the first exception of any rank, or None. After an exception, every rank raises when it waits.
    """

    def __init__(self, size: int):
        self.size, self.turn = size, 0
        self.changed = threading.Condition()
        self.ready: list[Callable[[], bool] | None] = [lambda: True] * size
        self.waits_for = [""] * size
        self.error: BaseException | None = None

    def start(self, rank: int) -> None:
        """Wait until a rank may run for the first time."""
        with self.changed:
            self._until_turn(rank)

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run, and return when `ready()` is True and it is this rank's turn.

        Args:
            rank: the rank that waits.
            ready: condition that the rank waits for.
            what: description of the condition for error messages.
        """
        with self.changed:
            self.ready[rank], self.waits_for[rank] = ready, what
            self._pass_on(rank)
            self._until_turn(rank)

    def end(self, rank: int, error: BaseException | None = None) -> None:
        """Record that a rank has ended. If it ended with an error, every other rank raises at its next wait."""
        with self.changed:
            self.ready[rank] = None
            self.error = self.error or error
            self._pass_on(rank)

    def stop(self, error: BaseException) -> None:
        """Make every rank raise the next time that it waits."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def _until_turn(self, rank: int) -> None:
        """Wait until it is this rank's turn; raise if another rank has failed."""
        self.changed.wait_for(lambda: self.turn == rank or self.error is not None)
        if self.error is not None:
            raise GroupError(f"simulation: rank {rank} stopped, because another rank failed")
        self.ready[rank] = lambda: True

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next rank that is ready; record a deadlock if no rank is ready."""
        order = [(rank + step) % self.size for step in range(1, self.size + 1)]
        turn = next((other for other in order if self.ready[other] is not None and self.ready[other]()), None)
        if turn is None and any(ready is not None for ready in self.ready) and self.error is None:
            waiting = [f"rank {other} in {self.waits_for[other]}" for other in sorted(order) if self.ready[other]]
            self.error = GroupError(f"simulation: every rank waits for another rank: {', '.join(waiting)}")
        self.turn = -1 if turn is None else turn
        self.changed.notify_all()


class _Contribution(NamedTuple):
    """The operation that one rank called in an exchange, and the value that the rank sent."""

    rank: int
    operation: str
    value: Any


class SimulatedRanks(Group):
    """One rank of a group whose members are threads of one process. `simulate` creates the objects of this class.

    Args:
        name: name of the group in error messages.
        rank: this rank in the group.
        members: global ranks of the members, in order.
        turns: object that lets one rank of the simulation run at a time.
        board: mapping from the number of an exchange to the contributions of the members. All members share this dict.
    """

    def __init__(
        self, name: str, rank: int, members: tuple[int, ...], turns: _Turns, board: dict[int, list[_Contribution]]
    ):
        super().__init__(name, len(members), rank, members)
        self._turns, self._board, self._exchanges = turns, board, 0

    def _exchange(self, operation: str, value: Any) -> list[Any]:
        """Send a value, wait for all members, and return the values of all members in the order of the ranks."""
        number, self._exchanges = self._exchanges, self._exchanges + 1
        contributions = self._board.setdefault(number, [])
        contributions.append(_Contribution(self.rank, operation, value))
        what = f"{operation} of {self.name}, ranks {list(self.members)}"
        self._turns.wait(self.members[self.rank], lambda: len(contributions) == self.size, what)
        by_rank = sorted(contributions, key=lambda contribution: contribution.rank)
        self._board.pop(number - 1, None)  # every member has read the previous exchange
        for other in by_rank:
            if other.operation != operation:
                raise GroupError(
                    f"{self.name}: {operation} on rank {self.rank}, but {other.operation} on rank {other.rank}"
                )
        return [contribution.value for contribution in by_rank]

    def _tensors(self, operation: str, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks; raise if their shapes or dtypes differ."""
        tensors = self._exchange(operation, x.clone())
        for rank, other in enumerate(tensors):
            if (other.shape, other.dtype) != (x.shape, x.dtype):
                raise GroupError(
                    f"{self.name}: {operation} of {list(x.shape)} {x.dtype} on rank {self.rank}, "
                    f"but {list(other.shape)} {other.dtype} on rank {rank}"
                )
        return tensors

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
    """Run a function on simulated ranks, which are threads of this process. No process group is needed.

    One rank runs until it waits for an exchange; then the next rank runs. The order is the same in every simulation. A
    debugger can stop in one rank while the other ranks wait. The time of a simulation is the sum of the ranks' times.

    Args:
        context_parallel_size: D, number of ranks that share each sequence; at most 64.
        interleave: I. Each rank in turn owns I consecutive tokens of a sequence.
        program: function that is called on every rank with the rank's `ContextParallel`. All ranks must call the same
            exchanges in the same order.
        tensor_parallel_size: TP, number of ranks that share the heads; a multiple of D, at most 64. None means D. The
            ranks that share a sequence are consecutive: the first D ranks, the next D ranks, and so on.
        merge: name of the merge, as in `ContextParallel`.

    Returns:
        The return values of `program`, in the order of the ranks.

    Raises:
        ValueError: a number is out of range.
        GroupError: ranks wait for different exchanges, or exchange tensors of different shapes or dtypes.
        Exception: the first exception that `program` raised on any rank.
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
    enter = thread_state()

    def run(rank: int) -> None:
        failure = None
        try:
            turns.start(rank)
            first = rank // size * size
            cp = SimulatedRanks("cp_group", rank - first, everyone[first : first + size], turns, boards[rank // size])
            tp = SimulatedRanks("tp_group", rank, everyone, turns, boards[-1])
            with enter():
                results[rank] = program(ContextParallel(cp, tp, interleave, merge))
        except BaseException as error:  # the caller's thread raises it again
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
    except BaseException as error:  # the caller was interrupted: stop all ranks
        turns.stop(error)
        raise
    if turns.error is not None:
        raise turns.error
    return results


def thread_state() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a function that makes a context manager, which gives another thread the PyTorch settings of this thread.

    PyTorch keeps the gradient mode, the inference mode, the default device and the CUDA stream for each thread.
    """
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    device = torch.get_default_device()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        on_stream = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
        # the context of a default device adds several us to every call of torch; the default of a new thread is the CPU
        on_device = contextlib.nullcontext() if device.type == "cpu" else torch.device(device)
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients), on_device, on_stream:
            yield

    return enter
