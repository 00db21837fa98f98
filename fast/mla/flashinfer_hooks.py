"""Hooks of the backends `flashinfer`, `flashinfer_mla`, `flashinfer_cudnn` and `trtllm_ragged`.

They plan the calls of a step once.

The adapters are in `fast.backends.adapters`. `flashinfer` and `trtllm_ragged` need the lengths of a call on the CPU.
The metadata of a step has the lengths only on the device, so the builder copies all lengths of a step to the CPU in one
copy. This copy waits for the GPU once in each step with prefills.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reference.interfaces import (
    AttentionState,
    CacheFormat,
    ContextChunk,
    MLAConfig,
    MLAMetadata,
    PrefillMetadata,
    wide_dtype,
)

from ..attention.varlen import AttentionInputs
from ..backends.adapters import flashinfer, flashinfer_cudnn, flashinfer_mla, trtllm_ragged
from ..backends.adapters.conversion import whole_keys
from ..backends.adapters.flashinfer_workspace import check_workspace, new_workspace
from ..backends.adapters.ragged_calls import RaggedCall
from .backend_hooks import BackendHooks
from .decode_hooks import DecodeHooks

OPTIONS = {"workspace": check_workspace}  # options of the backends with a workspace


class Offsets(NamedTuple):
    """The offsets of one call of the attention, on the device.

    Attributes:
        queries: [B + 1], first query token of each request.
        keys: [B + 1], first key of each request.
        max_queries: upper bound of the query lengths.
        max_keys: upper bound of the key lengths.
        causal: whether the call is over the new tokens, with a causal mask.
    """

    queries: Tensor
    keys: Tensor
    max_queries: int
    max_keys: int
    causal: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedPrefill(PrefillMetadata):
    """The prefill part of a plan, with what a backend has planned for each call of the attention.

    Attributes:
        new_tokens: the call over the new tokens.
        chunk_calls: the call over each chunk of `context_chunks`.
    """

    new_tokens: Any
    chunk_calls: tuple[Any, ...]


class PlanningHooks(BackendHooks):
    """Hooks of a backend that plans the calls of a step once.

    A subclass has the methods `plan_calls` and `attend`. A call that no builder planned, and a call under
    `torch.compile`, takes the launcher of the backend's op.
    """

    def plan_calls(self, calls: list[Offsets], state: Any) -> list[Any]:
        """Return what the backend plans for each call of a step, in the order of `calls`.

        Args:
            calls: the offsets of each call.
            state: result of `create_builder_state`.
        """
        raise NotImplementedError

    def attend(
        self, call: Any, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, out_dtype: torch.dtype,
        return_lse: bool, out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Run a planned call; `fast.backends.adapters.flashinfer.attend` explains the arguments and the result."""
        raise NotImplementedError

    def post_process_prefill_metadata(
        self, prefill: PrefillMetadata, state: Any, query_start_loc: Tensor
    ) -> PrefillMetadata:
        """Return the prefill part of a plan with a planned call for each call that `forward_prefill` makes.

        `forward_prefill` calls the attention for each of `prefill.parts`; without parts, for `prefill` itself.
        """
        plans = [part.plan for part in prefill.parts] or [prefill]
        calls = []
        for plan in plans:
            starts, longest = plan.query_start_loc, plan.max_query_len
            calls.append(Offsets(starts, starts, longest, longest, True))
            for chunk in plan.context_chunks:  # the query tokens of the run attend the chunk
                own = starts if chunk.run_query_start_loc is None else chunk.run_query_start_loc
                most = longest if chunk.run is None else chunk.run.max_query_len
                calls.append(Offsets(own, chunk.run_cu_seq_lens, most, chunk.max_seq_len, False))
        planned, made = iter(self.plan_calls(calls, state)), []
        for plan in plans:
            fields = {name: getattr(plan, name) for name in PrefillMetadata.__dataclass_fields__}
            new_tokens, *chunk_calls = itertools.islice(planned, 1 + len(plan.context_chunks))
            made.append(PlannedPrefill(**fields, new_tokens=new_tokens, chunk_calls=tuple(chunk_calls)))
        if not prefill.parts:
            return made[0]
        parts = zip(prefill.parts, made, strict=True)
        return dataclasses.replace(prefill, parts=tuple(dataclasses.replace(part, plan=plan) for part, plan in parts))

    def run_prefill_new_tokens(
        self, inputs: AttentionInputs, metadata: PrefillMetadata, softmax_scale: float, out_dtype: torch.dtype,
        return_lse: bool, out: Tensor | None, out_is_checked: bool,
    ) -> AttentionState | Tensor:  # fmt: skip
        """Compute causal attention over the new tokens, with the plan of the step if there is one."""
        if not isinstance(metadata, PlannedPrefill) or torch.compiler.is_compiling():
            return super().run_prefill_new_tokens(
                inputs, metadata, softmax_scale, out_dtype, return_lse, out, out_is_checked
            )
        keys = whole_keys(inputs.k, inputs.k_pe)
        made, lse = self.attend(
            metadata.new_tokens, inputs.q, keys, inputs.v, softmax_scale, out_dtype, return_lse, out
        )
        return made if lse is None else AttentionState(made, lse)

    def run_prefill_context_chunk(
        self, inputs: AttentionInputs, metadata: PrefillMetadata, chunk: ContextChunk, softmax_scale: float
    ) -> AttentionState:
        """Compute unmasked attention over one chunk, with the plan of the step if there is one."""
        planned = isinstance(metadata, PlannedPrefill) and not torch.compiler.is_compiling()
        chunks = metadata.context_chunks if planned else ()
        number = next((number for number, each in enumerate(chunks) if each is chunk), None)
        if number is None:
            return super().run_prefill_context_chunk(inputs, metadata, chunk, softmax_scale)
        return AttentionState(*self.attend(
            metadata.chunk_calls[number], inputs.q, whole_keys(inputs.k, inputs.k_pe), inputs.v, softmax_scale,
            wide_dtype(inputs.q.dtype), True,
        ))  # fmt: skip


def calls_with_host_lens(calls: list[Offsets], states: Iterable[Any]) -> list[RaggedCall]:
    """Return the calls with their lengths on the CPU, after one copy that waits for the GPU.

    Args:
        calls: the offsets of each call.
        states: for each call, what runs the call.
    """
    given = [offsets for call in calls for offsets in (call.queries, call.keys)]
    on_cpu = torch.cat(given).cpu().split([offsets.shape[0] for offsets in given])
    return [
        RaggedCall(*lens, call.queries, call.keys, call.causal, state)
        for call, lens, state in zip(calls, zip(on_cpu[::2], on_cpu[1::2], strict=True), states, strict=False)
    ]


class FlashInferHooks(PlanningHooks):
    """Hooks of the backend `flashinfer`.

    A step uses one wrapper for each of its calls: for the new tokens of each part, and for each chunk. The wrapper
    plans its call in the first layer that runs the call, with the dtype, the number of heads and the softmax scale of
    this layer. Later layers with the same properties use this plan; other layers plan again.
    """

    options = OPTIONS

    def create_builder_state(
        self, config: MLAConfig, cache_format: CacheFormat, layer_names: tuple[str, ...], device: torch.device,
        workspace: int | Tensor | None = None,
    ) -> flashinfer.RaggedWrappers:  # fmt: skip
        """Return the workspace and the wrappers of one builder (`fast.backends.adapters.flashinfer_workspace`)."""
        return flashinfer.RaggedWrappers(device, workspace)

    def plan_calls(self, calls: list[Offsets], state: flashinfer.RaggedWrappers) -> list[RaggedCall]:
        """Return each call with its lengths on the CPU and with its wrapper."""
        return calls_with_host_lens(calls, map(state.wrapper, itertools.count()))

    def attend(
        self, call: RaggedCall, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, out_dtype: torch.dtype,
        return_lse: bool, out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Run a call by its wrapper."""
        return flashinfer.attend(call, q, k, v, softmax_scale, out_dtype, return_lse, out)


class TrtllmRaggedHooks(PlanningHooks):
    """Hooks of the backend `trtllm_ragged`, which has one workspace for all calls of a builder."""

    options = OPTIONS

    def create_builder_state(
        self, config: MLAConfig, cache_format: CacheFormat, layer_names: tuple[str, ...], device: torch.device,
        workspace: int | Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the workspace of one builder (`fast.backends.adapters.flashinfer_workspace`)."""
        return new_workspace(device, workspace)

    def plan_calls(self, calls: list[Offsets], state: Tensor) -> list[RaggedCall]:
        """Return each call with its lengths on the CPU and with the workspace."""
        return calls_with_host_lens(calls, itertools.repeat(state))

    def attend(
        self, call: RaggedCall, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, out_dtype: torch.dtype,
        return_lse: bool, out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Run a call with the workspace."""
        return trtllm_ragged.attend(call, q, k, v, softmax_scale, out_dtype, return_lse, out)


class FlashInferMLAHooks(DecodeHooks):
    """Hooks of the backend `flashinfer_mla`, which plans the decodes of a step once.

    The wrapper plans the decode in the first layer of a step. Later layers with the same properties use this plan;
    other layers plan again.
    """

    options = OPTIONS

    def create_builder_state(
        self, config: MLAConfig, cache_format: CacheFormat, layer_names: tuple[str, ...], device: torch.device,
        workspace: int | Tensor | None = None,
    ) -> flashinfer_mla.DecodeWrapper:  # fmt: skip
        """Return the wrapper of one builder, with its workspace (`fast.backends.adapters.flashinfer_workspace`)."""
        return flashinfer_mla.DecodeWrapper(new_workspace(device, workspace))

    def prepare(self, metadata: MLAMetadata, state: flashinfer_mla.DecodeWrapper) -> tuple[Tensor]:
        """Return a tensor that leads to the wrapper and to the lengths of the step, after a copy of the lengths."""
        return flashinfer_mla.prepare(metadata.decode, state)


class CudnnHooks(PlanningHooks):
    """Hooks of the backend `flashinfer_cudnn`, whose layers share the lengths of a call; a step never waits."""

    def plan_calls(self, calls: list[Offsets], state: None) -> list[flashinfer_cudnn.CudnnCall]:
        """Return each call; the first layer computes the lengths on the device."""
        return [flashinfer_cudnn.CudnnCall(*call) for call in calls]

    def attend(
        self, call: flashinfer_cudnn.CudnnCall, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float,
        out_dtype: torch.dtype, return_lse: bool, out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Run a call."""
        return flashinfer_cudnn.attend(call, q, k, v, softmax_scale, out_dtype, return_lse, out)
