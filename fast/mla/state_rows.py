"""Rows of tensors and attention states, for prefills that attend and merge only some of their query tokens.

A chunk of context is attended by the query tokens of its run (`ChunkRun`). `forward_prefill` of `fast` uses this module
to merge the attention state over a chunk into the rows of these query tokens, and to write the output of each row once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reference.interfaces import AttentionState, ChunkRun, to_e4m3

from ..attention.merge import merge_states
from ..backends import BackendChoice


def rows_of(x: Tensor, first: int, end: int) -> Tensor:
    """Return x[first:end] of a tensor [rows, ...]; if this is the whole tensor, return `x` itself without a view."""
    return x if first == 0 and end == x.shape[0] else x[first:end]


def _state_rows(state: AttentionState, first: int, end: int) -> AttentionState:
    """Return the rows [first, end) of an attention state; if these are all rows, return the state itself."""
    if first == 0 and end == state.out.shape[0]:
        return state
    return AttentionState(state.out[first:end], state.lse[:, first:end])


def merge_run(
    state: AttentionState, chunk_state: AttentionState, run: ChunkRun, out: Tensor, backend: BackendChoice,
    output_scale: Tensor | None,
) -> None:  # fmt: skip
    """Merge the state over a chunk into the state over the keys before it.

    For query tokens that attend no later chunk, the merge writes the output into `out`. For the other query tokens of
    the run, it writes the output into `state.out`. In both cases, it writes the LSE into `state.lse`.

    Args:
        state: state of all query tokens of the plan with the chunk: out [T, N, V] and lse [N, T].
        chunk_state: state over the chunk of the query tokens of the run.
        run: run of the chunk.
        out: [T, N, V], the output of the prefill, with any strides.
        backend: backend of `merge_attn_states`.
        output_scale: scale of an output in e4m3; None for an output in the dtype of the queries.
    """
    start, finished, end = run.first_token, run.finished_token, run.end_token
    for first, stop, target, scale in ((start, finished, out, output_scale), (finished, end, state.out, None)):
        if first < stop:
            of_chunk, old = _state_rows(chunk_state, first - start, stop - start), _state_rows(state, first, stop)
            target = rows_of(target, first, stop)
            _merge_into(target, of_chunk, old, backend, scale)


def write_unmerged(state: AttentionState, runs: Sequence[ChunkRun], out: Tensor, output_scale: Tensor | None) -> None:
    """Write the rows of `state.out` into `out` whose output no merge has written.

    Plans that divide their prefills into parts leave no such row. A plan without parts may have requests that belong to
    no run, and a plan of the caller may have chunks in any order.

    Args:
        state: state after the last merge: out [T, N, V].
        runs: the run of each chunk of the plan.
        out: [T, N, V], the output of the prefill.
        output_scale: scale of an output in e4m3; None for an output in the dtype of the queries.
    """
    done, written = 0, sorted((run.first_token, run.finished_token) for run in runs)
    for first, end in [*written, (out.shape[0], out.shape[0])]:
        if done < first:
            rows = state.out[done:first]
            out[done:first].copy_(rows if output_scale is None else to_e4m3(rows, output_scale))
        done = max(done, end)


def _merge_into(
    target: Tensor, chunk_state: AttentionState, state: AttentionState, backend: BackendChoice,
    output_scale: Tensor | None,
) -> None:  # fmt: skip
    """Merge two states: write the output to `target`, which may have any strides, and the LSE to `state.lse`."""
    made = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
    merge_states(chunk_state, state, AttentionState(made, state.lse), backend=backend, output_scale=output_scale)
    if made is not target:
        target.copy_(made)
