"""Merge two attention states over disjoint keys (FlashInfer, arXiv 2501.01005, section 2.2).

An attention state has two tensors: the output of attention over a set of keys, and the log-sum-exp (LSE) of the scores.
"""

from __future__ import annotations

import torch

from reference.interfaces import (
    AttentionState,
    GraphSupport,
    check_dtype,
    check_merge,
    check_out,
    check_type,
)

from .. import backends
from ..backends import BackendChoice


def merge_attn_states(
    prefix: AttentionState,
    suffix: AttentionState,
    *,
    out: AttentionState | None = None,
    graph: GraphSupport = GraphSupport.NONE,
    backend: BackendChoice = None,
) -> AttentionState:
    """Return the attention state over the union of two disjoint sets of keys.

    See `reference.attention.merge.merge_attn_states` for the formula and for rows whose LSE is not finite.

    Args:
        prefix: state over the first set of keys, with out [T, N, Dv] and lse [N, T].
        suffix: state over the second set of keys, with the shapes and dtypes of `prefix`.
        out: state that receives the result; None allocates a state. Both tensors of `out` are contiguous and have the
            shapes of `prefix`. The LSE of `out` has the dtype of the LSE of `prefix`. The output of `out` may have
            another dtype than the output of `prefix`. `out` may be `prefix` or `suffix` itself; otherwise `out` must
            share no memory with `prefix` and `suffix`.
        graph: kind of the CUDA graph that captures this call; NONE without a graph.
        backend: name of a backend, mapping from op to backend name, or None to choose by capability (`fast.backends`).

    Returns:
        The state `out` if it is given; otherwise a new state with the shapes and dtypes of `prefix`.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    if out is not None:
        check_type("out", out, AttentionState)
        _check_merge(prefix, suffix)
        _check_target(out, prefix, suffix)  # in every call: equal shapes do not show which tensors overlap
    return merge_states(prefix, suffix, out, graph, backend)


def merge_states(
    prefix: AttentionState,
    suffix: AttentionState,
    out: AttentionState | None = None,
    graph: GraphSupport = GraphSupport.NONE,
    backend: BackendChoice = None,
) -> AttentionState:
    """Compute `merge_attn_states` without a check of `out`.

    See `merge_attn_states` for the arguments, the result and the errors. The caller must know that `out` is valid.
    """
    calls = _MERGES if out is None else _MERGES_INTO
    signature = calls.signature(prefix, suffix, out, graph, backend)
    chosen = calls.backend_of(signature)
    if chosen is None:
        check_merge(prefix, suffix)
        request = backends.state_request("merge_attn_states", prefix.out, graph)
        chosen = backends.select(request, backend).name
    arguments = (prefix.out, prefix.lse, suffix.out, suffix.lse)
    if out is None:
        return AttentionState(*_MERGES.run(signature, chosen, *arguments))
    _MERGES_INTO.run(signature, chosen, *arguments, out.out, out.lse)
    return out


_check_merge = backends.CheckedOnce(check_merge)


def _check_target(out: AttentionState, prefix: AttentionState, suffix: AttentionState) -> None:
    """Check that each tensor of `out` is the corresponding tensor of `prefix` or `suffix`, or overlaps no input."""
    check_type("out", out, AttentionState)
    for name, target, pair in (("out.out", out.out, (prefix.out, suffix.out)),
                               ("out.lse", out.lse, (prefix.lse, suffix.lse))):  # fmt: skip
        others = []  # stays empty under `torch.compile`, where tensors have no addresses to compare
        if not torch.compiler.is_compiling():
            kept = target if any(target is same for same in pair) else None
            others = [each for each in (*prefix, *suffix) if each is not kept]
        dtype = target.dtype if name == "out.out" and isinstance(target, torch.Tensor) else pair[0].dtype
        check_dtype(f"{name}.dtype", dtype)
        check_out(name, target, tuple(pair[0].shape), dtype, pair[0].device, *others, contiguous=True)


def _launch_merge(prefix_out, prefix_lse, suffix_out, suffix_lse, backend):
    return backends.kernel(backend, "merge_attn_states")(prefix_out, prefix_lse, suffix_out, suffix_lse)


def _launch_merge_into(prefix_out, prefix_lse, suffix_out, suffix_lse, out, lse, backend):
    backends.kernel(backend, "merge_attn_states")(prefix_out, prefix_lse, suffix_out, suffix_lse, out, lse)


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


_merge_attn_states_out = torch.library.custom_op(
    "mla_twins::merge_attn_states_out",
    _launch_merge_into,
    mutates_args=("out", "lse"),
    schema="(Tensor prefix_out, Tensor prefix_lse, Tensor suffix_out, Tensor suffix_lse, Tensor(a!) out,"
    " Tensor(b!) lse, str backend) -> ()",
)
_MERGES_INTO = backends.CheckedCalls(torch.ops.mla_twins.merge_attn_states_out, _launch_merge_into, mutates=(4, 5))


@_merge_attn_states_out.register_fake
def _(prefix_out, prefix_lse, suffix_out, suffix_lse, out, lse, backend):
    return None
