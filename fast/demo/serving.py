"""Loop that serves requests with a paged latent cache for each layer, in batches of decodes and prefills.

The main job and a long-running test use the loop.

The loop is not an inference server. It shows what a scheduler must pass to MLA attention:

- Requests start to run in the order of arrival.
- A step has a limited number of tokens, the token budget. Decodes come first; parts of prompts fill the rest.
- If no block is free, the loop preempts the youngest running request: the loop frees the blocks of this request, and
  computes the tokens of this request again later.
- A finished request frees its blocks.
- Sampling is greedy.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from reference.distributed.arguments import check_groups
from reference.distributed.groups import ContextParallel
from reference.interfaces import (
    COMPUTE_FORMAT,
    CONVERTED,
    ONE_RANK,
    CommonAttentionMetadata,
    GroupError,
    MLAConfig,
    MLAMetadata,
    PathCosts,
    check,
    check_config,
    check_costs,
    check_int,
    check_interleave,
    check_type,
    context_unit,
)

from .blocks import BlockAllocator, check_order
from .deadline import deadline
from .requests import Request, StepLost, StepReport

UNOWNED = torch.iinfo(torch.int32).max  # block-table entry behind the last block of a request; no block has this id


def _layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the `MLAAttention` layers that `use_mla` installed in a model; an empty list for any other model."""
    forwards = (module.__dict__.get("forward") for module in model.modules())
    layers = (getattr(forward, "attention", None) for forward in forwards)
    return [layer for layer in layers if hasattr(layer, "workspace_tokens")]


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


class ServingLoop:
    """Loop that serves requests together, in mixed batches of decodes and prefills.

    Args:
        model: causal language model under `fast.integrations.transformers.use_mla`. The caches have the device of the
            model, and the cache format that `use_mla` got. The plans have the fp8 mode that `use_mla` got.
        config: config of the model's attention layers.
        ops: module that plans and allocates: `reference`, `fast`, or another module with the same functions.
        num_blocks: blocks of the cache of each layer.
        block_size: tokens per block.
        max_num_seqs: largest number of requests that run at the same time.
        token_budget: largest number of tokens in one step; at least `max_num_seqs`, so that every running request can
            decode.
        workspace_tokens: largest number of context tokens that a prefill expands at once; at least `context_unit`,
            which is `block_size` without context parallelism.
        decode_threshold: a request with at most this number of query tokens takes the absorbed path, whatever
            `choose_path` returns for it.
        eos: token or tokens that end a request, or None.
        block_order: order in which blocks are first used; None means the ascending order.
        costs: costs from which `ops.choose_path` chooses the path of a request with more query tokens; None means the
            defaults of `PathCosts`.
        context_parallel: groups of the ranks that share heads and sequences, or None. `use_mla` must have got the same
            groups. Every rank creates the loop, adds the same requests and runs the same steps. The caches of D ranks
            that share sequences hold D times as many tokens as one cache.

    Raises:
        ValueError: a number is too small, or the ranks have different arguments (`verify_group`). Nothing has been
            allocated then.
    """

    def __init__(
        self,
        model: nn.Module,
        config: MLAConfig,
        ops: ModuleType,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        token_budget: int,
        workspace_tokens: int,
        decode_threshold: int = 1,
        eos: int | Collection[int] | None = None,
        block_order: Sequence[int] | None = None,
        costs: PathCosts | None = None,
        context_parallel: ContextParallel | None = None,
    ):
        check_type("model", model, nn.Module, "a model under use_mla")
        needed = ("allocate_kv_cache", "build_mla_metadata", "slot_mapping")
        missing = [name for name in needed if not hasattr(ops, name)]
        check(not missing, "ops", "a module that keeps the contract of reference and fast",
              f"{getattr(ops, '__name__', type(ops).__name__)} without {', '.join(missing)}")  # fmt: skip
        check_groups(context_parallel)
        known = eos is None or (isinstance(eos, int | Collection) and not isinstance(eos, Tensor))
        known = known and (eos is None or all(type(token) is int for token in ([eos] if isinstance(eos, int) else eos)))
        check(known, "eos", "a token, tokens or None", eos)
        self.context_parallel, self.eos = context_parallel, frozenset()
        if eos is not None:
            self.eos = frozenset((eos,) if isinstance(eos, int) else eos)
        layers = _layers_of(model)
        self.cache_format = getattr(layers[0], "cache_format", COMPUTE_FORMAT) if layers else COMPUTE_FORMAT
        fp8_mode = getattr(layers[0], "fp8_mode", CONVERTED) if layers else CONVERTED
        # The ranks compare their arguments first: if one rank raised alone, the other ranks would wait for it.
        if context_parallel is not None:
            with deadline(context_parallel, ()):
                ops.verify_group(
                    context_parallel, block_size=block_size, num_blocks=num_blocks, dtype=model.dtype, config=config,
                    max_num_seqs=max_num_seqs, token_budget=token_budget, workspace_tokens=workspace_tokens,
                    decode_threshold=decode_threshold, eos=sorted(self.eos), costs=costs, block_order=block_order,
                    num_layers=model.config.num_hidden_layers, ops=getattr(ops, "__name__", type(ops).__name__),
                    device=model.device.type, vocab_size=model.config.vocab_size, cache_format=self.cache_format.name,
                    fp8_mode=fp8_mode,
                )  # fmt: skip
        check_config(config)
        check_costs(costs)
        check_int("num_blocks", num_blocks, 1, "at least 1")
        check_order("block_order", block_order, num_blocks)
        check_int("block_size", block_size, 1, "at least 1")
        check_int("max_num_seqs", max_num_seqs, 1, "at least 1")
        check_int("token_budget", token_budget, max_num_seqs, f"at least max_num_seqs, {max_num_seqs}")
        check_int("decode_threshold", decode_threshold, 1, "at least 1")
        self.ownership = None if context_parallel is None else context_parallel.ownership
        owned = ONE_RANK if self.ownership is None else self.ownership
        check_interleave(owned.interleave, block_size)
        unit = context_unit(block_size, owned.size, owned.interleave)
        check_int("workspace_tokens", workspace_tokens, unit, f"at least one unit of {unit} tokens")
        takes_backend = "backend" in inspect.signature(ops.build_mla_metadata).parameters  # `reference` has no backends
        self._planning = {"dtype": model.dtype, "cache_format": self.cache_format}
        if fp8_mode != CONVERTED:
            self._planning["fp8_mode"] = fp8_mode
        for attention in layers:
            if takes_backend:
                self._planning["backend"] = getattr(attention, "backend", None)
            check(workspace_tokens <= attention.workspace_tokens, "workspace_tokens",
                  f"at most {attention.workspace_tokens}, the workspace_tokens of the model's layers (see use_mla)",
                  workspace_tokens)  # fmt: skip
        self.allocator = BlockAllocator(num_blocks, block_order)
        self.tokens_per_block = block_size * owned.size  # tokens of a sequence for which each rank needs one block
        self.model, self.config, self.ops = model, config, ops
        self.block_size, self.max_num_seqs, self.token_budget = block_size, max_num_seqs, token_budget
        self.workspace_tokens, self.decode_threshold, self.costs = workspace_tokens, decode_threshold, costs
        self.device = model.device
        dims = config.kv_lora_rank, config.qk_rope_head_dim
        columns, dtype = self.cache_format.columns(*dims), self.cache_format.dtype_for(model.dtype)
        self._entry_bytes = self.cache_format.entry_bytes(*dims, model.dtype)
        self.kv_caches = [
            ops.allocate_kv_cache(num_blocks, block_size, columns, dtype, self.device)
            for _ in range(model.config.num_hidden_layers)
        ]
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of arrival
        self.requests: list[Request] = []  # in the order of arrival; a finished request stays until it is dropped
        self._num_added = 0
        self._lost: str | None = None  # error of a failed step, after which ranks may be at different steps

    @property
    def cache_bytes_in_use(self) -> int:
        """Return the bytes of all cache blocks that requests own on this rank, over all layers."""
        owned = self.allocator.num_blocks - self.allocator.num_free
        return owned * self.block_size * self._entry_bytes * len(self.kv_caches)

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
        positions = self.model.config.max_position_embeddings
        check(total <= positions, "prompt_ids", f"prompt + max_new_tokens of at most the model's {positions} positions",
              got)  # fmt: skip
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
                metadata, next_ids = self._forward(plan)
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
            num_decodes=metadata.num_decodes,
            num_prefills=metadata.num_prefills,
            num_context_chunks=len(metadata.prefill.context_chunks),
            num_generated=len(next_ids),
            preempted=tuple(scheduled.preempted),
            finished=tuple(finished),
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            cache_bytes=cache_bytes,
        )

    def _refuse_where_lost(self) -> None:
        check(self._lost is None, "ServingLoop", "ranks at the same step", f"a step that failed ({self._lost})")

    def _schedule(self) -> _Schedule:
        """Choose the requests of a step and their numbers of tokens, and allocate blocks for them."""
        plan: dict[Request, int] = {}
        taken: dict[Request, int] = {}
        preempted: list[int] = []
        budget = self.token_budget
        # Older requests come first. The budget cuts at most one prompt in a step, so at most one running request, the
        # youngest, has pending prompt tokens. So the batch has the decodes first, as `MLAMetadata` requires.
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

    def _metadata(self, plan: dict[Request, int]) -> MLAMetadata:
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
        common = CommonAttentionMetadata.make(
            query_start_loc, seq_lens, table.to(self.device), slots.to(self.device), self.block_size
        )
        return self.ops.build_mla_metadata(
            common, self.block_size, self.workspace_tokens, self.decode_threshold, self.config, self.costs,
            ownership=self.ownership, **self._planning,
        )  # fmt: skip

    @torch.inference_mode()
    def _forward(self, plan: dict[Request, int]) -> tuple[MLAMetadata, dict[Request, int]]:
        """Run the model on the packed batch, and sample tokens.

        Returns:
            The `MLAMetadata` of the step, and a new token for each request whose last pending token is in the batch.
        """
        metadata = self._metadata(plan)
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
            mla_metadata=metadata,
            mla_kv_caches=self.kv_caches,
            logits_to_keep=on_device(last_rows),
        ).logits[0]
        tokens = logits.float().argmax(dim=-1)
        if self.context_parallel is not None:  # all ranks continue with rank 0's tokens, so that they never diverge
            tokens = self.context_parallel.tp_group.all_gather(tokens)[0]
        return metadata, dict(zip(sampled, tokens.tolist(), strict=True))

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
