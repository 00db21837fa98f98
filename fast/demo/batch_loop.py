"""Loop that serves requests in batches of decodes and prefills, for any attention family.

`ServingLoop` (fast.demo.serving) and `GQAServingLoop` (fast.demo.gqa.serving) add the plans and caches of a family. The
loop is not an inference server. It shows what a scheduler must pass to attention:

- Requests start to run in the order of arrival.
- A step has a limited number of tokens, the token budget. Decodes come first; parts of prompts fill the rest.
- If no block is free, the loop preempts the youngest running request: the loop frees the blocks of this request, and
  computes the tokens of this request again later.
- A finished request frees its blocks.
- Sampling is greedy.
"""

from __future__ import annotations

import abc
import hashlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from reference.distributed.groups import ContextParallel
from reference.interfaces import CommonAttentionMetadata, GroupError, check, check_int, check_type

from .blocks import BlockAllocator, check_order
from .deadline import deadline
from .requests import Request, StepLost, StepReport

UNOWNED = torch.iinfo(torch.int32).max  # block-table entry behind the last block of a request; no block has this id


def check_ops(ops: object, needed: Collection[str]) -> None:
    """Raise ValueError unless `ops` has all `needed` functions."""
    missing = [name for name in needed if not hasattr(ops, name)]
    check(not missing, "ops", "a module that keeps the contract of reference and fast",
          f"{getattr(ops, '__name__', type(ops).__name__)} without {', '.join(missing)}")  # fmt: skip


def read_eos(eos: int | Collection[int] | None) -> frozenset[int]:
    """Return the tokens that end a request.

    Raises:
        ValueError: `eos` is neither a token, nor several tokens, nor None.
    """
    known = eos is None or (isinstance(eos, int | Collection) and not isinstance(eos, Tensor))
    known = known and (eos is None or all(type(token) is int for token in ([eos] if isinstance(eos, int) else eos)))
    check(known, "eos", "a token, tokens or None", eos)
    if eos is None:
        return frozenset()
    return frozenset((eos,) if isinstance(eos, int) else eos)


class _Schedule(NamedTuple):
    """The requests and blocks of a step.

    Attributes:
        plan: number of tokens that each request computes in this step, in batch order.
        preempted: ids of the requests that are preempted in this step.
        taken: number of new blocks of each request for this step.
        admitted: requests that start to run in this step, for the first time or after a preemption.
    """

    plan: dict[Request, int]
    preempted: list[int]
    taken: dict[Request, int]
    admitted: list[Request]


class StepPlan(NamedTuple):
    """The plan of a step, as the model gets it.

    Attributes:
        arguments: keyword arguments of the model's forward: the plans and the caches of the layers.
        num_decodes: number of requests that decode.
        num_prefills: number of requests that prefill.
        num_context_chunks: number of chunks of cached context that the prefills expand.
    """

    arguments: dict[str, Any]
    num_decodes: int
    num_prefills: int
    num_context_chunks: int


class BatchLoop(abc.ABC):
    """Loop that serves requests together, in mixed batches of decodes and prefills.

    A subclass allocates the caches of the model's layers, and implements `_plan`.

    Args:
        model: causal language model whose layers attend with this project.
        ops: module that plans and allocates: `reference`, `fast`, or another module with the same functions.
        num_blocks: blocks of the cache of each layer.
        block_size: tokens per block.
        max_num_seqs: largest number of requests that run at the same time.
        token_budget: largest number of tokens in one step; at least `max_num_seqs`, so that every running request can
            decode.
        eos: the tokens that end a request.
        block_order: order in which blocks are first used; None means the ascending order.
        context_parallel: groups of the ranks that share heads and sequences, or None.

    Raises:
        ValueError: a number is too small.
    """

    def __init__(
        self,
        model: nn.Module,
        ops: ModuleType,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        token_budget: int,
        eos: frozenset[int],
        block_order: Sequence[int] | None = None,
        context_parallel: ContextParallel | None = None,
    ):
        check_int("num_blocks", num_blocks, 1, "at least 1")
        check_order("block_order", block_order, num_blocks)
        check_int("block_size", block_size, 1, "at least 1")
        check_int("max_num_seqs", max_num_seqs, 1, "at least 1")
        check_int("token_budget", token_budget, max_num_seqs, f"at least max_num_seqs, {max_num_seqs}")
        self.model, self.ops, self.context_parallel, self.eos = model, ops, context_parallel, eos
        self.ownership = None if context_parallel is None else context_parallel.ownership
        self.block_size, self.max_num_seqs, self.token_budget = block_size, max_num_seqs, token_budget
        # tokens of a sequence for which each rank needs one block
        self.tokens_per_block = block_size * (1 if context_parallel is None else context_parallel.size)
        self.device = model.device
        self.allocator = BlockAllocator(num_blocks, block_order)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of arrival
        self.requests: list[Request] = []  # in the order of arrival; a finished request stays until it is dropped
        self._num_added = 0
        self._lost: str | None = None  # error of a failed step, after which ranks may be at different steps
        self._block_bytes = 0  # bytes of one block in the caches of all layers; the subclass sets the number

    @abc.abstractmethod
    def _plan(self, common: CommonAttentionMetadata) -> StepPlan:
        """Plan a step for the layers of the model."""

    @property
    def cache_bytes_in_use(self) -> int:
        """Return the bytes of all cache blocks that requests own on this rank, over all layers."""
        return (self.allocator.num_blocks - self.allocator.num_free) * self._block_bytes

    def add(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Request:
        """Put a request into the queue.

        The loop keeps a finished request until the caller calls `forget_finished`.

        Raises:
            ValueError: the prompt is empty or has a token outside the vocabulary; `max_new_tokens` is below 1; prompt
                and new tokens do not fit into the cache or exceed the model's positions. Nothing changes then.
        """
        check_type("prompt_ids", prompt_ids, Sequence, "a list of ints")
        prompt_ids = list(prompt_ids)
        check(len(prompt_ids) > 0, "prompt_ids", "at least one token", "an empty prompt")
        check(all(type(token) is int for token in prompt_ids), "prompt_ids", "a list of ints", prompt_ids[:4])
        vocabulary = self.model.config.vocab_size
        check(min(prompt_ids) >= 0 and max(prompt_ids) < vocabulary, "prompt_ids", f"tokens in [0, {vocabulary})",
              f"{min(prompt_ids)} to {max(prompt_ids)}")  # fmt: skip
        check_int("max_new_tokens", max_new_tokens, 1, "at least 1")
        total, got = len(prompt_ids) + max_new_tokens, f"{len(prompt_ids)} + {max_new_tokens}"
        capacity = self.allocator.num_blocks * self.tokens_per_block
        check(total <= capacity, "prompt_ids", f"prompt + max_new_tokens of at most the cache's {capacity} tokens", got)
        positions = getattr(self.model.config, "max_position_embeddings", None)  # None: the model has no limit
        fits = positions is None or total <= positions
        check(fits, "prompt_ids", f"prompt + max_new_tokens of at most the model's {positions} positions", got)
        request = Request(self._num_added, prompt_ids, max_new_tokens)
        self._num_added += 1
        self.requests.append(request)
        self.waiting.append(request)
        return request

    def run(self, on_step: Callable[[StepReport], None] | None = None) -> list[Request]:
        """Run steps until every request has finished.

        Args:
            on_step: function that gets the report of each step. It may call `forget_finished`.

        Returns:
            The requests in the order of arrival, without those that `forget_finished` dropped.

        Raises:
            ValueError: the ranks have different requests. No step has run then.
            StepLost: a rank did not answer.
        """
        check_type("on_step", on_step, (Callable, type(None)), "a function or None")
        if self.context_parallel is not None:
            self._refuse_where_lost()
            queued = (*self.running, *self.waiting)
            ids = tuple(request.request_id for request in queued)
            tokens = [[*request.tokens(0, request.num_tokens), -1, request.max_new_tokens] for request in queued]
            digest = hashlib.sha256(repr(tokens).encode()).hexdigest()
            try:
                with deadline(self.context_parallel, ids):
                    self.ops.verify_group(
                        self.context_parallel, seq_lens=[request.num_tokens for request in queued], requests=digest
                    )
            except GroupError as error:
                self._lost = str(error)
                raise StepLost(error, ids) from error
        while self.running or self.waiting:
            report = self.step()
            if on_step is not None:
                on_step(report)
        return list(self.requests)

    def forget_finished(self) -> list[Request]:
        """Drop the finished requests, so that a loop that serves for a long time does not accumulate requests.

        With several ranks, each rank may call this method at any time, because no step reads a finished request.

        Returns:
            The dropped requests, in the order of arrival.
        """
        finished = [request for request in self.requests if request.finished]
        self.requests = [request for request in self.requests if not request.finished]
        return finished

    def step(self) -> StepReport:
        """Run one mixed batch.

        If the model raises, the requests get no tokens, and the caller can repeat the step:

        - Blocks that were allocated for this step are free again.
        - Requests that started to run in this step wait again.
        - Requests that were preempted stay preempted, because their blocks may have been overwritten.

        With several ranks, every later step raises ValueError, because other ranks may still be in the failed step.

        Raises:
            StepLost: a rank did not answer; the error names the group, the operation and the requests of this step.
        """
        self._refuse_where_lost()
        scheduled = self._schedule()
        plan = scheduled.plan
        if not plan:  # no request runs or waits
            return StepReport(0, 0, 0, 0, 0, tuple(scheduled.preempted), (), 0, 0, self.cache_bytes_in_use)
        in_flight = tuple(request.request_id for request in plan)
        try:
            with deadline(self.context_parallel, in_flight):
                planned, next_ids = self._forward(plan)
        except BaseException as error:
            for request in scheduled.admitted[::-1]:
                self.running.remove(request)
                self.waiting.appendleft(request)
            for request, count in scheduled.taken.items():
                self.allocator.free(request.blocks[-count:])
                del request.blocks[-count:]
            if self.context_parallel is not None:
                self._lost = f"{type(error).__name__}: {error}"
            if isinstance(error, GroupError):
                raise StepLost(error, in_flight) from error
            raise
        cache_bytes = self.cache_bytes_in_use
        finished = self._advance(plan, next_ids)
        return StepReport(
            num_tokens=sum(plan.values()),
            num_decodes=planned.num_decodes,
            num_prefills=planned.num_prefills,
            num_context_chunks=planned.num_context_chunks,
            num_generated=len(next_ids),
            preempted=tuple(scheduled.preempted),
            finished=tuple(finished),
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            cache_bytes=cache_bytes,
        )

    def _refuse_where_lost(self) -> None:
        check(self._lost is None, type(self).__name__, "ranks at the same step", f"a step that failed ({self._lost})")

    def _schedule(self) -> _Schedule:
        """Choose the requests of a step and their numbers of tokens, and allocate blocks for them."""
        plan: dict[Request, int] = {}
        taken: dict[Request, int] = {}
        preempted: list[int] = []
        budget = self.token_budget
        # Older requests come first. The budget cuts at most one prompt in a step, so at most one running request, the
        # youngest, has pending prompt tokens. So the batch has the decodes first, as plans of `MLAMetadata` require.
        for request in list(self.running):
            count = min(request.num_pending, budget)
            needed = self._blocks_for(request, count)
            while needed > self.allocator.num_free and request in self.running:
                victim = self.running[-1]  # `request` or a younger request, not yet in `plan`
                preempted.append(victim.request_id)
                self._preempt(victim)
            if request not in self.running:
                break
            budget -= count
            self._take(request, needed, taken)
            plan[request] = count

        # After a preemption in this step, the loop below admits no request: the first waiting request is then the
        # request that was preempted last, and this request needs more blocks than are free.
        admitted: list[Request] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if self._blocks_for(request, request.num_pending) > self.allocator.num_free:
                break
            admitted.append(self.waiting.popleft())
            self.running.append(request)
            plan[request] = min(request.num_pending, budget)
            budget -= plan[request]
            self._take(request, self._blocks_for(request, plan[request]), taken)
        return _Schedule(plan, preempted, taken, admitted)

    def _blocks_for(self, request: Request, count: int) -> int:
        """Return how many more blocks `request` needs for its next `count` tokens."""
        return -(-(request.num_computed + count) // self.tokens_per_block) - len(request.blocks)

    def _take(self, request: Request, count: int, taken: dict[Request, int]) -> None:
        if count:
            request.blocks += self.allocator.allocate(count)
            taken[request] = count

    def _preempt(self, request: Request) -> None:
        """Stop a running request: free its blocks, drop its computed tokens, and put it first in the queue."""
        self.running.remove(request)
        self.allocator.free(request.blocks)
        request.blocks, request.num_computed = [], 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _batch(self, plan: dict[Request, int]) -> CommonAttentionMetadata:
        """Return the lengths, blocks and slots of a step."""
        starts, width = [0], max(len(request.blocks) for request in plan)
        for count in plan.values():
            starts.append(starts[-1] + count)
        query_start_loc = torch.tensor(starts, dtype=torch.int32)
        seq_lens = torch.tensor([r.num_computed + count for r, count in plan.items()], dtype=torch.int32)
        table = torch.tensor([r.blocks + [UNOWNED] * (width - len(r.blocks)) for r in plan], dtype=torch.int32)
        batch = (query_start_loc, seq_lens, table, self.block_size, starts[-1])
        if self.ownership is None:
            slots = self.ops.slot_mapping(*batch)
        else:
            ownership = self.ownership
            slots = self.ops.dcp_slot_mapping(*batch, ownership.size, ownership.rank, ownership.interleave)
        return CommonAttentionMetadata.make(
            query_start_loc, seq_lens, table.to(self.device), slots.to(self.device), self.block_size
        )

    @torch.inference_mode()
    def _forward(self, plan: dict[Request, int]) -> tuple[StepPlan, dict[Request, int]]:
        """Run the model on the packed batch, and sample tokens.

        Returns:
            The plan of the step, and a new token for each request whose last pending token is in the batch.
        """
        planned = self._plan(self._batch(plan))
        ids, positions, sampled, last_rows = [], [], [], []
        for request, count in plan.items():
            start = request.num_computed
            ids += request.tokens(start, start + count)
            positions += range(start, start + count)
            if count == request.num_pending:
                sampled.append(request)
                last_rows.append(len(ids) - 1)

        def on_device(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        logits = self.model(
            on_device(ids)[None],
            position_ids=on_device(positions)[None],
            use_cache=False,
            logits_to_keep=on_device(last_rows),
            **planned.arguments,
        ).logits[0]
        tokens = logits.float().argmax(dim=-1)
        if self.context_parallel is not None:  # all ranks continue with rank 0's tokens, so that they never diverge
            tokens = self.context_parallel.tp_group.all_gather(tokens)[0]
        return planned, dict(zip(sampled, tokens.tolist(), strict=True))

    def _advance(self, plan: dict[Request, int], next_ids: dict[Request, int]) -> list[int]:
        """Append the new tokens after a successful step, and return the ids of the requests that finished."""
        finished = []
        for request, count in plan.items():
            request.num_computed += count
        for request, token in next_ids.items():
            request.generated_ids.append(token)
            if token in self.eos or len(request.generated_ids) == request.max_new_tokens:
                request.finished = True
                self.running.remove(request)
                self.allocator.free(request.blocks)
                request.blocks = []
                finished.append(request.request_id)
        return finished
