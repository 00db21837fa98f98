"""Merge of two attention states over disjoint keys, by log-sum-exp (FlashInfer, arXiv 2501.01005, section 2.2)."""

from __future__ import annotations

import torch

from reference.interfaces import AttentionState, GraphSupport, check_merge

from .. import backends
from ..backends import BackendChoice


def merge_attn_states(
    prefix: AttentionState,
    suffix: AttentionState,
    *,
    graph: GraphSupport = GraphSupport.NONE,
    backend: BackendChoice = None,
) -> AttentionState:
    """Return the attention state over the union of two disjoint sets of keys.

    See `reference.attention.merge.merge_attn_states` for the formula and for rows whose LSE is not finite.

    Args:
        prefix: state over the first set of keys, with out [T, N, Dv] and lse [N, T].
        suffix: state over the second set of keys, with the shapes and dtypes of `prefix`.
        graph: kind of the CUDA graph that contains the call; NONE if no graph contains the call.
        backend: name of a backend, mapping from op to backend name, or None to choose by capability (`fast.backends`).

    Returns:
        The merged state, with the shapes and dtypes of `prefix`.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    signature = _MERGES.signature(prefix, suffix, graph, backend)
    chosen = _MERGES.backend_of(signature)
    if chosen is None:
        check_merge(prefix, suffix)
        request = backends.state_request("merge_attn_states", prefix.out, graph)
        chosen = backends.select(request, backend).name
    out, lse = _MERGES.run(signature, chosen, prefix.out, prefix.lse, suffix.out, suffix.lse)
    return AttentionState(out, lse)


def _launch_merge(prefix_out, prefix_lse, suffix_out, suffix_lse, backend):
    return backends.kernel(backend, "merge_attn_states")(prefix_out, prefix_lse, suffix_out, suffix_lse)


_merge_attn_states = torch.library.custom_op(
    "mla_twins::merge_attn_states",
    _launch_merge,
    mutates_args=(),
    schema="(Tensor prefix_out, Tensor prefix_lse, Tensor suffix_out, Tensor suffix_lse, str backend)"
    " -> (Tensor, Tensor)",
)
_MERGES = backends.CheckedCalls(torch.ops.mla_twins.merge_attn_states, _launch_merge)


@_merge_attn_states.register_fake
def _(prefix_out, prefix_lse, suffix_out, suffix_lse, backend):
    return prefix_out.new_empty(prefix_out.shape), prefix_lse.new_empty(prefix_lse.shape)
