"""Merge two attention states over disjoint keys (FlashInfer, arXiv 2501.01005, section 2.2).

`reference.attention.merge` explains attention states and the log-sum-exp (LSE).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from reference.interfaces import (
    E4M3,
    AttentionState,
    GraphSupport,
    check_dtype,
    check_merge,
    check_out,
    check_output_scale,
    check_scale_values,
    check_type,
)

from .. import backends
from ..backends import BackendChoice


def merge_attn_states(
    prefix: AttentionState,
    suffix: AttentionState,
    *,
    output_scale: Float[Tensor, ""] | None = None,
    output_block_scale: Tensor | None = None,
    out: AttentionState | None = None,
    graph: GraphSupport = GraphSupport.NONE,
    backend: BackendChoice = None,
) -> AttentionState:
    """Return the attention state over the union of two disjoint sets of keys.

    See `reference.attention.merge.merge_attn_states` for the formula and for rows whose LSE is not finite.

    Args:
        prefix: state over the first set of keys, with out [T, N, Dv] and lse [N, T].
        suffix: state over the second set of keys, with the shapes and dtypes of `prefix`.
        output_scale: float32 scale of an output in e4m3 (8 bits); None for an output in the dtype of `prefix`.
        output_block_scale: must be None: an output with one scale for each group of elements is not supported.
        out: state that receives the result; None allocates a state. Both tensors of `out` are contiguous and have the
            shapes of `prefix`. `out.lse` has the dtype of `prefix.lse`. If `out.out` has another dtype than
            `prefix.out`, the kernel rounds to the dtype of `out.out`. If `output_scale` is given, `out.out` is in e4m3.
            `out` may be `prefix` or `suffix` itself; any other `out` must share no memory with `prefix` and `suffix`.
        graph: kind of the CUDA graph that captures this call; NONE without a graph.
        backend: name of a backend, mapping from op to backend name, or None for an automatic choice (`fast.backends`).

    Returns:
        The state `out` if it is given; otherwise a new state with the shapes and dtypes of `prefix`. If `output_scale`
        is given, the output of the new state is in e4m3.

    Raises:
        ValueError: shapes, dtypes or devices do not match. For CPU tensors also: `output_scale` is not finite and
            positive.
        UnsupportedConfiguration: `output_block_scale` is given, or no backend that `backend` allows can serve the call.
    """
    if output_scale is not None or output_block_scale is not None:
        _check_merge(prefix, suffix)
        check_output_scale(output_scale, output_block_scale, prefix.out.device)
        check_scale_values("output_scale", output_scale)
    if out is not None:
        check_type("out", out, AttentionState)
        _check_merge(prefix, suffix)
        # Check `out` in every call: whether tensors overlap may differ between two calls with equal shapes.
        _check_target(out, prefix, suffix, output_scale is not None)
    return merge_states(prefix, suffix, out, graph, backend, output_scale)


def merge_states(
    prefix: AttentionState,
    suffix: AttentionState,
    out: AttentionState | None = None,
    graph: GraphSupport = GraphSupport.NONE,
    backend: BackendChoice = None,
    output_scale: Tensor | None = None,
) -> AttentionState:
    """Compute `merge_attn_states` without a check of `out` and `output_scale`.

    See `merge_attn_states` for the arguments, the result and the errors. The caller must have checked `out` and
    `output_scale`.
    """
    if output_scale is not None and out is None:
        out = AttentionState(*(
            torch.empty_like(each, dtype=dtype, memory_format=torch.contiguous_format)
            for each, dtype in ((prefix.out, E4M3), (prefix.lse, prefix.lse.dtype))
        ))  # fmt: skip
    calls = _MERGES if out is None else _MERGES_INTO
    signature = calls.signature(prefix, suffix, out, graph, backend, output_scale)
    chosen = calls.backend_of(signature)
    if chosen is None:
        check_merge(prefix, suffix)
        out_dtype = None if output_scale is None else E4M3
        request = backends.state_request("merge_attn_states", prefix.out, graph, out_dtype)
        chosen = backends.select(request, backend).name
    arguments = (prefix.out, prefix.lse, suffix.out, suffix.lse)
    if out is None:
        return AttentionState(*_MERGES.run(signature, chosen, *arguments))
    _MERGES_INTO.run(signature, chosen, *arguments, output_scale, out.out, out.lse)
    return out


_check_merge = backends.CheckedOnce(check_merge)


def _check_target(out: AttentionState, prefix: AttentionState, suffix: AttentionState, quantised: bool) -> None:
    """Check `out`: each of its tensors is the corresponding tensor of an input, or overlaps no input.

    If `quantised` is True, the output must be in e4m3.
    """
    check_type("out", out, AttentionState)
    for name, target, pair in (("out.out", out.out, (prefix.out, suffix.out)),
                               ("out.lse", out.lse, (prefix.lse, suffix.lse))):  # fmt: skip
        others = []  # stays empty under `torch.compile`, where tensors have no addresses to compare
        if not torch.compiler.is_compiling():
            kept = target if any(target is same for same in pair) else None
            others = [each for each in (*prefix, *suffix) if each is not kept]
        dtype = pair[0].dtype
        if name == "out.out" and quantised:
            dtype = E4M3
        elif name == "out.out" and isinstance(target, torch.Tensor):
            dtype = target.dtype
            check_dtype(f"{name}.dtype", dtype)
        check_out(name, target, tuple(pair[0].shape), dtype, pair[0].device, *others, contiguous=True)


def _launch_merge(prefix_out, prefix_lse, suffix_out, suffix_lse, backend):
    return backends.kernel(backend, "merge_attn_states")(prefix_out, prefix_lse, suffix_out, suffix_lse)


def _launch_merge_into(prefix_out, prefix_lse, suffix_out, suffix_lse, output_scale, out, lse, backend):
    scale = () if output_scale is None else (output_scale,)
    backends.kernel(backend, "merge_attn_states")(prefix_out, prefix_lse, suffix_out, suffix_lse, out, lse, *scale)


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
    schema="(Tensor prefix_out, Tensor prefix_lse, Tensor suffix_out, Tensor suffix_lse, Tensor? output_scale,"
    " Tensor(a!) out, Tensor(b!) lse, str backend) -> ()",
)
_MERGES_INTO = backends.CheckedCalls(torch.ops.mla_twins.merge_attn_states_out, _launch_merge_into, mutates=(5, 6))


@_merge_attn_states_out.register_fake
def _(prefix_out, prefix_lse, suffix_out, suffix_lse, output_scale, out, lse, backend):
    return None
