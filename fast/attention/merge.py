"""Merge softmax attention over disjoint sets of keys by log-sum-exp (FlashInfer, arXiv 2501.01005, section 2.2)."""

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
    """Return the attention over the union of two disjoint sets of keys.

    See `reference.attention.merge.merge_attn_states` for the formula and for rows whose LSE is not finite.

    Args:
        prefix: out [T, N, Dv], lse [N, T].
        suffix: state with the same shapes and dtypes.
        graph: kind of CUDA graph in which the call is replayed.
        backend: name of a backend, mapping from op to backend name, or None to choose by capability (`fast.backends`).

    Returns:
        The merged state, in the dtypes of the arguments.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
        UnsupportedConfiguration: no backend can serve the call, or the named backend cannot.
    """
    check_merge(prefix, suffix)
    request = backends.state_request("merge_attn_states", prefix.out, graph)
    chosen = backends.select(request, backend)
    out, lse = torch.ops.mla_twins.merge_attn_states(prefix.out, prefix.lse, suffix.out, suffix.lse, chosen.name)
    return AttentionState(out, lse)


@torch.library.custom_op(
    "mla_twins::merge_attn_states",
    mutates_args=(),
    schema="(Tensor prefix_out, Tensor prefix_lse, Tensor suffix_out, Tensor suffix_lse, str backend)"
    " -> (Tensor, Tensor)",
)
def _merge_attn_states(prefix_out, prefix_lse, suffix_out, suffix_lse, backend):
    return backends.kernel(backend, "merge_attn_states")(prefix_out, prefix_lse, suffix_out, suffix_lse)


@_merge_attn_states.register_fake
def _(prefix_out, prefix_lse, suffix_out, suffix_lse, backend):
    return prefix_out.new_empty(prefix_out.shape), prefix_lse.new_empty(prefix_lse.shape)
