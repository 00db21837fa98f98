"""Merge of two attention states over disjoint keys, by log-sum-exp (FlashInfer, arXiv 2501.01005, section 2.2)."""

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
        out: state that receives the result; its LSE has the shape and dtype of the other LSEs, and both of its tensors
            are contiguous. Its output may have another dtype, to which the kernel rounds. `out` may be `prefix` or
            `suffix` itself, and must share no other memory with them. None allocates a state.
        graph: kind of the CUDA graph that contains the call; NONE if no graph contains the call.
        backend: name of a backend, mapping from op to backend name, or None to choose by capability (`fast.backends`).

    Returns:
        The merged state, with the shapes and dtypes of `prefix`; the state `out` if `out` is given.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
        UnsupportedConfiguration: no backend that `backend` allows can serve the call.
    """
    if out is not None:
        check_type("out", out, AttentionState)
        _check_merge(prefix, suffix)
        _check_target(out, prefix, suffix)  # at every call: whether two tensors overlap is not part of a signature
    return merge_states(prefix, suffix, out, graph, backend)


def merge_states(
    prefix: AttentionState,
    suffix: AttentionState,
    out: AttentionState | None = None,
    graph: GraphSupport = GraphSupport.NONE,
    backend: BackendChoice = None,
) -> AttentionState:
    """Compute `merge_attn_states`, with an `out` that the caller has checked.

    See `merge_attn_states` for the arguments, the result and the errors. `out` must have contiguous tensors of the
    right shapes, and each of its tensors must be a tensor of `prefix` or `suffix`, or overlap none of them.
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
    """Check the state that receives a merged state: each tensor is one of the inputs, or overlaps no input."""
    check_type("out", out, AttentionState)
    for name, target, pair in (("out.out", out.out, (prefix.out, suffix.out)),
                               ("out.lse", out.lse, (prefix.lse, suffix.lse))):  # fmt: skip
        others = []  # under `torch.compile` tensors have no addresses to compare
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
